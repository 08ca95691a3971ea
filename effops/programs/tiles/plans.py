"""Choose the axes to cut and the lengths of tiles, so that a function keeps its memory budget."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from effops.prediction.allocations import fake_mode
from effops.programs.rules.binding import nbytes_of, operands_of, shape_of
from effops.programs.rules.draws import draws_of, seed_of
from effops.programs.rules.table import why_none
from effops.programs.tiles.checks import LARGEST, Check
from effops.programs.tiles.cuts import Blocked, Cut, down_to_a_number, follow, stages_of
from effops.programs.tiles.loops import BOTH, GRADIENTS, RESULTS, Body, Loop
from effops.programs.tiles.program import Program, faked, taken_bytes
from effops.programs.tiles.refusals import CannotTile
from effops.programs.tiles.regions import Region, regions
from effops.programs.tiles.results import shape_for
from effops.programs.tiles.traced import refused_at
from effops.pytorch.prediction import (
    _disable_current_modes,
)
from effops.text import format_bytes

TILE_BYTES = 2**22  # of a tile at most, since smaller ones stay in the cache
LEAST_TILE_BYTES = 2**14
DEEPEST = 3  # cuts within tiles
LEAST_RUN = 16  # elements of a tile that lie side by side, below which operators are slow
TRIES = 3  # to leave out cuts
NEARLY = 0.9  # of a budget that is used
MARGIN = 1.03  # for what does not grow in proportion
LEAST_SHARE = 0.03  # of the tiles that are worth another try
SEEDS = 4  # the largest nodes of a region whose axes are tried
SHARES = 8, 32, 128  # of the room for a check, which its part may take


def first_program(graphs: Iterable[GraphModule], plan: Callable[[GraphModule], Program]) -> Program:
    """The program of the first of the graphs of a call that can be cut; raises why the first graph cannot be."""
    refused: CannotTile | None = None
    for graph in graphs:
        try:
            return plan(graph)
        except CannotTile as error:
            if refused is None or not error.operator:  # one that needs a larger budget alone tells more
                refused = error
    assert refused is not None
    raise refused


def program_of(
    graph: GraphModule,
    args: Sequence[Any],
    budget: int,
    *,
    backward: bool,
    compiles: bool = False,
    verify: bool = True,
    depth: int = 0,
) -> Program:
    """A program of a graph that keeps the budget, for arguments like these. The graph's nodes have fake values.

    What draws random numbers has been given seeds, or the graph is refused. Where it is to `verify`, each loop is
    compared with the whole when it runs first.
    """
    refuse_randomness(graph)
    if depth:
        sizes = budget, budget, budget
        program = _program(graph, *sizes, backward=backward, compiles=compiles, verify=verify, depth=depth)
    else:
        program = _within(graph, args, budget, backward=backward, compiles=compiles, verify=verify)
    if verify:
        program.checks = {loop.pattern: Check(loop) for loop in reversed(program.loops)}
    return program


def _within(
    graph: GraphModule, args: Sequence[Any], budget: int, *, backward: bool, compiles: bool, verify: bool
) -> Program:
    """The program with the longest tiles that keeps the budget."""
    # Sizes are powers of two, so that a larger budget tries those of a smaller one again.
    least = 2 ** int(math.log2(max(LEAST_TILE_BYTES, min(TILE_BYTES, budget // 4))))  # of nodes that are cut
    # What is compiled makes few nodes beside products: the cache holds longer tiles, whose calls take less time.
    target = max(least, budget // 2) if compiles else least
    most = 3 * target if target < TILE_BYTES else max(target, budget * 3 // 4)

    inputs = (node for node in graph.graph.nodes if node.op == "placeholder")
    leaves = [node for node, one in zip(inputs, args) if backward and isinstance(one, Tensor) and one.requires_grad]

    def in_tiles_of(size: int) -> Program:
        """A program whose tiles take at most `size`: it keeps the budget, or takes little."""
        least_of_size, found = min(least, size) if compiles else size, list[Program]()
        # Gradients that forward computes may be too many to be kept. Many small nodes may be what takes the budget:
        # they are cut before tiles become smaller.
        for threshold, ends in ((least_of_size, True), (least_of_size, False), (least_of_size // 4, True)):
            if not ends and not any(loop.differentiates for loop in found[-1].loops):
                continue
            sizes = size, most * size // target, threshold
            given = leaves if ends else ()
            try:
                program = _program(graph, *sizes, backward=backward, compiles=compiles, verify=verify, leaves=given)
            except CannotTile:
                if not found:
                    raise
                break
            program.taken_bytes = taken_bytes(program, args, backward=backward)
            found.append(program)
            if program.taken_bytes <= budget:
                break
        return min(found, key=lambda one: one.taken_bytes)

    program = in_tiles_of(target)
    if program.taken_bytes <= budget:
        return program
    try:
        smallest: Program | CannotTile = in_tiles_of(LEAST_TILE_BYTES)
    except CannotTile as refusal:  # larger ones may do, for which nodes that cannot be cut are small
        smallest = refusal
    least_bytes = math.inf if isinstance(smallest, CannotTile) else smallest.taken_bytes
    least_bytes, suffices = min(least_bytes, program.taken_bytes), least_bytes <= budget
    # Smaller ones may do where the smallest are refused, and longer ones where each leaves something to the next one.
    leaves_rows = any(loop.carrying for loop in program.loops)
    factors = [0.5] * (suffices or leaves_rows or isinstance(smallest, CannotTile)) + [2.0] * leaves_rows
    for factor in factors:
        size, in_vain, before = target * factor, 0, program.taken_bytes
        while 2 * LEAST_TILE_BYTES <= size <= TILE_BYTES and (suffices or in_vain < 2):
            other = in_tiles_of(int(size))
            if other.taken_bytes <= budget:
                return other
            in_vain, before = in_vain + (other.taken_bytes >= before), other.taken_bytes
            least_bytes, size = min(least_bytes, other.taken_bytes), size * factor
    if isinstance(smallest, CannotTile):
        raise smallest
    if suffices:
        return smallest
    raise _too_little(budget, int(least_bytes))


def _too_little(budget: int, least_bytes: int) -> CannotTile:
    return CannotTile(
        f"the budget must suffice for the tiles; got {format_bytes(budget)}",
        remedy=f"give at least {format_bytes(least_bytes, rounds_up=True)}, which they take",
    )


def with_less_again(program: Program, args: Sequence[Any], budget: int, as_it_is_bytes: int) -> Program:
    """The program with as many of its last cuts left out as the budget allows: backward need not compute those again.

    Args:
        as_it_is_bytes: what a call and its backward pass take where all are left out, which is more than the budget
    """
    cuts = list(dict.fromkeys(id(step.stage.cut) for step in program.steps if isinstance(step, Loop)))
    few, few_bytes, many, many_bytes = 0, program.taken_bytes, len(cuts), as_it_is_bytes
    for _ in range(TRIES):
        count = few + (many - few) * (budget - few_bytes) // (many_bytes - few_bytes)
        if count == few or few_bytes > NEARLY * budget:
            break
        left_out = cuts[-count:]
        other = program.with_loops([one for one in program.loops if id(one.stage.cut) not in left_out])
        other.taken_bytes = taken_bytes(other, args, backward=True)
        if other.taken_bytes <= budget:
            program, few, few_bytes = other, count, other.taken_bytes
        else:
            many, many_bytes = count, other.taken_bytes
    return program if few else _with_kept_tiles(program, args, budget, as_it_is_bytes)


def fit_checks(program: Program, args: Sequence[Any], budget: int, *, backward: bool) -> None:
    """Choose parts that the first call has room to check, of loops and of those within their tiles."""
    program.first_call_bytes = program.taken_bytes
    with_nested = [*_with_nested(program)]
    if any(live > program.taken_bytes for one in with_nested for live in one.live_bytes.values()):
        taken_bytes(program, args, backward=backward)  # since the last run was one that kept more tiles
    for one in with_nested:
        for pattern, check in [*one.checks.items()]:
            live_bytes = one.live_bytes.get(pattern, 0)
            fitting = _fitting(check.loop, budget - live_bytes, backward=backward)
            if fitting is None:
                del one.checks[pattern]
                program.unchecked += 1
            else:
                one.checks[pattern], taken = fitting
                program.first_call_bytes = max(program.first_call_bytes, live_bytes + taken)


def _with_nested(program: Program) -> Iterator[Program]:
    yield program
    for body in {id(body): body for loop in program.loops for body in loop.bodies.values()}.values():
        if isinstance(body, Program):
            yield from _with_nested(body)


def _fitting(loop: Loop, room: int, *, backward: bool) -> tuple[Check, int] | None:
    """The check of the largest part that takes at most `room`, and what it takes; None if there is none."""
    for share in SHARES:
        check = Check(loop, min(LARGEST, room // share))
        graph, args = check.exact_run(backward=backward)
        exact_bytes = taken_bytes(graph, args, backward=backward, with_results=True)
        taken = check.taken_bytes(exact_bytes, backward=backward)
        if taken <= room:
            return check, taken
    return None


def _with_kept_tiles(program: Program, args: Sequence[Any], budget: int, as_it_is_bytes: int) -> Program:
    """The program with as many of the last tiles of each loop kept for backward as the budget allows."""
    counts = {loop: len([*loop.tiles(loop.backward_length)]) for loop in program.loops if not loop.keeps_lengths}
    own_bytes, kept = program.taken_bytes, 0.0
    share = max(LEAST_SHARE, (budget - own_bytes) / (as_it_is_bytes - own_bytes))
    for _ in range(TRIES if counts else 0):
        for loop, count in counts.items():
            loop.kept_tiles = int(share * count)
        taken = taken_bytes(program, args, backward=True)
        if taken <= budget:
            kept, program.taken_bytes = share, taken
        share = min(1.0, share * (budget - own_bytes) / max(1.0, (taken - own_bytes) * MARGIN))
        if share - kept < LEAST_SHARE or budget >= taken > NEARLY * budget:
            break
    for loop, count in counts.items():
        loop.kept_tiles = int(kept * count)
    return program


def _program(
    graph: GraphModule,
    target: int,
    most: int,
    threshold: int,
    *,
    backward: bool,
    compiles: bool,
    verify: bool,
    leaves: Collection[Node] = (),
    depth: int = 0,
) -> Program:
    """A program whose tiles take at most `target` bytes, and no node outside of a loop more than `threshold`.

    Where each tile reads more than that whole, as a large weight, tiles are as large as what is read, up to `most`.
    Where a cut can go on to a number, such as a loss, forward computes the gradients of `leaves` too.
    """
    cuts = [_best(region, target) for region in regions(graph.graph, threshold, backward=backward)]
    taken = {node for cut in cuts for node in cut.region}
    longer = [down_to_a_number(graph.graph, cut, taken, leaves) if leaves else None for cut in cuts]
    loops = [
        Loop(stage, compiles=compiles, differentiates=end is not None)
        for cut, end in zip(cuts, longer)
        for stage in stages_of(end or cut)
    ]
    alike: dict[str, Loop] = {}
    for loop in loops:
        first = alike.setdefault(loop.pattern, loop)
        if first is loop:
            own_target = max(target, min(most, loop.read_whole_bytes))
            _set_lengths(loop, own_target, backward)
            if depth < DEEPEST and _tile_bytes(loop, loop.length, False) > 2 * own_target:
                loop.nested = functools.partial(
                    _nested, target=own_target, compiles=compiles, verify=verify, depth=depth + 1
                )
        else:
            loop.run_like(first)
    _draw_alike(loops)
    return Program(graph, loops)


def refuse_randomness(graph: GraphModule) -> None:
    """Raise if a graph draws random numbers without seeds: in tiles others, and backward others again."""
    for node in draws_of(graph.graph):
        if seed_of(node) is None:
            raise refused_at(
                node,
                f"what is cut must not draw random numbers: {node.target} does",
                'draw them outside of the function, and give them as an argument; or give randomness="different"',
            )
        if node.kwargs.get("generator") is not None:
            raise refused_at(node, f"{node.target} must not have a generator", "leave it to PyTorch's own generator")


def _draw_alike(loops: Sequence[Loop]) -> None:
    """Give the loops of a cut that draw the same tiles, since they may draw the same numbers again."""
    for loop in loops:
        if loop.drawing:
            if loop.nested is not None:
                node = loop.drawing[0]
                raise refused_at(
                    node,
                    f"what draws random numbers must not be cut along two axes: {node.target} would be",
                    "give a larger budget, or draw outside of the function, and give the numbers as an argument",
                )
            same = [one for one in loops if one.drawing and one.stage.cut is loop.stage.cut]
            loop.length = loop.backward_length = min(one.length for one in same)


def _best(region: Region, target: int) -> Cut:
    """The cut that leaves the least whole, combines nothing if it can, and whose tiles read the least whole."""
    largest = sorted(region.large, key=nbytes_of, reverse=True)
    count = min(SEEDS, [*map(nbytes_of, largest)].count(nbytes_of(largest[0])))
    found: list[Cut] = []
    blocked: list[Blocked] = []

    def rank(cut: Cut) -> tuple[Any, ...]:
        smallest = max(nbytes_of(node) // cut.length for node in cut.placed)
        return (
            _whole_bytes(cut) > target,
            smallest > target,
            _run(cut, target) < LEAST_RUN,
            bool(cut.combined or cut.carried),
            _whole_bytes(cut),
            _read_whole_bytes(cut),
            -_run(cut, target),
            -cut.length,
        )

    for seeds in (largest[:count], largest[count : count + SEEDS]):  # others if the largest have no axis
        for seed in seeds:
            for axis, size in enumerate(shape_of(seed)):
                if size > 1:
                    try:
                        found.append(follow(region.nodes, seed, axis))
                    except Blocked as error:
                        blocked.append(error)
        best = min(found, key=rank, default=None)
        if best is not None and (_whole_bytes(best) <= target or not blocked):
            return best
    node, why = blocked[0].node, blocked[0].why
    raise refused_at(
        node,
        f"no axis of {shape_of(largest[0])} can be cut: {node.target} {why}",
        "compute it outside of the function, or add a rule (docs/tiles.md)"
        if why_none(node)
        else "reduce the tensor along a whole axis at a time, or give a larger budget",
        shapes=[shape_of(node)],
    )


def _whole_bytes(cut: Cut) -> int:
    """The bytes of the largest node that no tile takes a part of."""
    return max((nbytes_of(node) for node in cut.region if node not in cut.placed), default=0)


def _read_whole_bytes(cut: Cut) -> int:
    """The bytes from outside of the region that each tile reads all of."""
    inside = set(cut.region)
    read = {
        operand
        for node in cut.nodes
        for number, operand in enumerate(operands_of(node))
        if operand not in inside and (node, number) not in cut.sliced
    }
    return sum(map(nbytes_of, read))


def _run(cut: Cut, target: int) -> int:
    """About how many elements of a tile of the largest node lie side by side."""
    largest = max(cut.placed, key=nbytes_of)
    axis, stretch = cut.placed[largest]
    shape = shape_of(largest)
    length = max(1, cut.length * target // max(target, sum(map(nbytes_of, cut.placed))))
    return length * stretch * math.prod(shape[axis + 1 :])


def _set_lengths(loop: Loop, target: int, backward: bool) -> None:
    """The longest tiles, forward and backward, that take at most `target` bytes."""

    def length_within(is_backward: bool) -> int:
        length = loop.stage.cut.length
        if loop.compiles:
            length = max(1, min(length, length * TILE_BYTES // max(1, loop.product_bytes)))
        while length > 1:
            taken = _tile_bytes(loop, length, is_backward)
            if taken <= target:
                break
            # A little less than in proportion, since what a tile reads whole does not shrink; at most to a fiftieth,
            # since bytes of far longer tiles say little.
            length = max(1, min(length - 1, int(length * max(0.02, 0.95 * target / taken))))
        # Tiles of about one length.
        return -(-loop.stage.cut.length // -(-loop.stage.cut.length // length))

    loop.length = length_within(False)
    loop.backward_length = length_within(True) if backward else loop.length
    if loop.keeps_lengths:
        loop.length = loop.backward_length = min(loop.length, loop.backward_length)


def _tile_bytes(loop: Loop, length: int, backward: bool) -> int:
    """What a tile allocates at most."""
    is_lean = backward and loop.is_lean
    wanted = (BOTH if loop.differentiates else GRADIENTS) if is_lean else RESULTS
    graph = loop.graph(length, wanted)
    args: list[Any] = [
        _tile_of(node.meta["val"], along, length, backward and place not in loop.summed)
        for place, (node, along) in enumerate(loop.stage.inputs)
    ]
    args += [_tile_of(one, None, length, backward) for one in loop.first_carried("meta")]
    if is_lean:
        args += [None for _ in loop.summed]
    if wanted == GRADIENTS:
        args += [_tile_of(node.meta["val"], loop.stage.cut.placed.get(node), length, False) for node in loop.known]
    return taken_bytes(graph.forward, args, backward=backward, with_results=True)


def _tile_of(value: Tensor, along: Any, length: int, backward: bool) -> Tensor:
    """A tensor without memory that is like a tile's part of another one."""
    shape = shape_for(value, along, length)
    like = torch.empty_strided(shape, value.stride(), dtype=value.dtype, device="meta")
    return like.requires_grad_(backward and value.is_floating_point())


def _nested(
    graph: GraphModule, parts: Sequence[Tensor], *, target: int, compiles: bool, verify: bool, depth: int
) -> Body:
    """The program of a tile that is too large itself."""
    with _disable_current_modes(), torch.no_grad(), fake_mode(allow_non_fake_inputs=True):
        _Valued(graph).run(*(faked(one, False) for one in parts))
    backward = any(one.requires_grad for one in parts)
    return program_of(graph, parts, target, backward=backward, compiles=compiles, verify=verify, depth=depth)


class _Valued(Interpreter):
    """Runs a graph, and notes the value of each node."""

    def run_node(self, n: Node) -> Any:
        n.meta["val"] = value = super().run_node(n)
        return value
