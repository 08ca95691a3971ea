"""How a function runs in tiles: the axes that are cut, what is combined, and the bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from effops.programs.rules.binding import shape_of
from effops.programs.tiles.loops import Loop
from effops.programs.tiles.program import Program
from effops.programs.tiles.traced import lines_of
from effops.text import aligned, counted, format_bytes


@dataclass(frozen=True)
class LoopReport:
    """A loop over tiles.

    Attributes:
        length: of the axis that is cut
        tile, backward_tile: how many of its indices a tile has
        largest: the shape of the largest intermediate that a tile has a part of
        line: where the user's program makes it, as "file:number"
        combined: how reductions of the axis are put together
    """

    length: int
    tile: int
    backward_tile: int
    largest: tuple[int, ...]
    line: str
    combined: tuple[str, ...]


@dataclass(frozen=True)
class TilesReport:
    """How a call runs: as it is, by products of matrices alone, or in tiles.

    Bytes are predicted, of a call with its backward pass.

    Attributes:
        budget_bytes: the most that it may take besides arguments, results and gradients
        as_it_is_bytes: what the function takes as it is
        taken_bytes: what the call takes
        first_call_bytes: what the first one takes at most, which checks parts of the loops
        unchecked: how many loops it has no room to check
    """

    budget_bytes: int
    as_it_is_bytes: int
    taken_bytes: int
    first_call_bytes: int
    unchecked: int
    loops: tuple[LoopReport, ...]

    def __str__(self) -> str:
        taken, budget = format_bytes(self.taken_bytes), format_bytes(self.budget_bytes)
        as_it_is = format_bytes(self.as_it_is_bytes)
        if self.as_it_is_bytes <= self.budget_bytes:
            return f"runs as it is: it takes {taken}, and the budget is {budget}"
        if not self.loops:
            return f"products of matrices, and no tiles: {taken} within {budget}; as it is {as_it_is}"
        header = "axis", "tile", "tile of backward", "largest intermediate", "combined", "times", "line"
        rows = [
            (
                f"{one.length:,}",
                f"{one.tile:,}",
                f"{one.backward_tile:,}",
                str(one.largest),
                "+".join(one.combined),
                f"{times:,}" if times > 1 else "",
                one.line,
            )
            for one, times in Counter(self.loops).items()
        ]
        count = counted(len(self.loops), "loops")
        title = f"{count} over tiles: {taken} within {budget}; as it is {as_it_is}"
        if self.first_call_bytes > self.taken_bytes:
            title += f"; the first call takes {format_bytes(self.first_call_bytes)}, with its check"
        if self.unchecked:
            title += f"; it has no room to check {counted(self.unchecked, 'loops')}"
        return f"{title}\n{aligned([header, *rows], left=len(header))}"


def report_of(program: Program | None, as_it_is_bytes: int, budget: int) -> TilesReport:
    if program is None:
        return TilesReport(budget, as_it_is_bytes, as_it_is_bytes, as_it_is_bytes, 0, ())
    taken = program.taken_bytes, program.first_call_bytes, program.unchecked
    return TilesReport(budget, as_it_is_bytes, *taken, tuple(map(_loop_report, program.loops)))


def _loop_report(loop: Loop) -> LoopReport:
    cut = loop.stage.cut
    largest = max(cut.placed, key=lambda node: node.meta["val"].numel() if hasattr(node.meta["val"], "numel") else 0)
    line, library = lines_of(largest)
    combined = tuple(dict.fromkeys([*cut.combined.values(), *(["carried"] if cut.carried else [])]))
    return LoopReport(loop.whole, loop.length, loop.backward_length, shape_of(largest), line or library, combined)
