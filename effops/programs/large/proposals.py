"""The fix of a finding, as code that was run.

A named op comes first, then a contraction or a function of a library, then the function in tiles or a checkpointed
loop, whichever takes less time. Code is proposed only if it gave the results and gradients of the user's own on small
tensors, and makes at most half the bytes at full size.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from effops.programs.capture.observed import TURNS
from effops.programs.capture.scopes import Scope
from effops.programs.large.held import bytes_after, has_turns, results_held
from effops.programs.large.hints import hint
from effops.programs.large.humps import Found
from effops.programs.large.in_tiles import InTiles, in_tiles
from effops.programs.large.loops import checkpointed, loops
from effops.programs.large.rewrites import Rewrite, rewrites
from effops.programs.large.source.patterns import NAMED
from effops.programs.large.source.slices import Slice, slices, taken_apart, without_imports
from effops.programs.large.source.trials import Trial, at_full_size, attempt, compiled, operand_bytes
from effops.programs.large.source.whole_lines import in_whole_lines
from effops.text import format_bytes

MEASURED = 2  # loops at most, of which the best is taken
ENOUGH = 8  # times less than now: no other loop is measured then
LESS = 2  # times less than now
CLOSE = 0.05  # of the time of a function: no guess is finer


@dataclass(frozen=True)
class Fix:
    """What to write instead.

    Attributes:
        how: "named op", "contraction", "library function", "tiles" or "loop"
        code: the statements that change, as they can be pasted in place of the lines
        after_bytes: the largest tensor that the code makes, its result included, or what the turns of a loop leave
        why: why it takes less, and what it costs
        names: those that the code reads and the user's function has made
        lines: the numbers of the lines that the code replaces; none if it replaces no line
        more_seconds: of a loop or tiles, a rough time that they take beyond that of the code as it is
        imports: those that the code needs and the file lacks, for its top
    """

    how: str
    code: str
    after_bytes: int
    why: str
    names: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    more_seconds: float = 0.0
    imports: tuple[str, ...] = ()
    _sources: tuple[str, str] = field(default=("", ""), repr=False)
    _surroundings: dict[str, Any] = field(default_factory=dict, repr=False)

    def function(self) -> Callable[..., Any]:
        """The fixed statements, as a function of `names`."""
        return compiled(self._sources[0], self._surroundings)

    def original(self) -> Callable[..., Any]:
        """The statements as they are, as a function of `names`."""
        return compiled(self._sources[1], self._surroundings)


def propose(found: Found) -> Fix | None:
    """The fix of a finding; None if no code was found that is equal and takes half the bytes."""
    return fix_or_hint(found, hints=False)[0]


def fix_or_hint(found: Found, *, hints: bool = True) -> tuple[Fix | None, str]:
    """The fix of a finding, or why there is none and what takes less."""
    fix = _patch_of_package(found)
    if fix is not None:
        return fix, ""
    candidates = list(_candidates(found))
    tried: list[tuple[Slice, Trial]] = []
    for one in candidates:
        trial = Trial.of(one, operand_bytes(one) + found.largest_bytes)
        if trial is not None:
            tried.append((one, trial))
    fix = _best(found, tried)
    return fix, hint(found, len(candidates), len(tried)) if fix is None and hints else ""


def _best(found: Found, tried: Sequence[tuple[Slice, Trial]]) -> Fix | None:
    """The first rewrite that takes half the bytes; else a loop or tiles, whichever takes less time."""
    for how in (True, False):  # named ops of all slices first
        for one, trial in tried:
            for rewrite in rewrites(one, trial):
                if (rewrite.how == NAMED) is how and _agrees(one, trial, rewrite):
                    fix = _measured(found, one, rewrite)
                    if fix is not None:
                        return fix
    fixes = [fix for one, trial in tried for fix in _loop_fixes(found, one, trial)]
    loop = min(fixes, key=lambda one: (one.after_bytes, len(one.code)), default=None)
    if loop is not None and found.is_loop:  # the user has one already, whose turns run one by one
        return loop
    tiles = in_tiles(found)
    if tiles is not None and (loop is None or tiles.more_seconds <= loop.more_seconds + CLOSE * tiles.seconds):
        return _fix_in_tiles(tiles)
    return loop


def _fix_in_tiles(found: InTiles) -> Fix:
    body = found.whole.body
    code, lines, imports = found.whole.code(found.budget), found.whole.lines, found.whole.imports
    sources = found.whole.tiled_source(found.budget), found.whole.source
    why = "its operators run on parts of an axis, and are computed again in backward"
    surroundings = dict(body.scope.surroundings)
    more = found.more_seconds
    return Fix("tiles", code, found.bytes_after, why, body.free, lines, more, imports, sources, surroundings)


def _agrees(found: Slice, trial: Trial, rewrite: Rewrite) -> bool:
    statements = _with_imports(found, rewrite)
    return trial.agrees(statements) or (rewrite.drops and trial.agrees_without_dropout(statements))


def _candidates(found: Found) -> Iterator[Slice]:
    """Slices of the innermost function in which what is large is both made and reduced, the shortest first."""
    top = found.top
    members = sorted(top.members, key=lambda one: one.allocation.born)
    makers = [one.maker for one in members if one.maker is not None and one.maker.scopes]
    for last in top.reducer.scopes:
        if last.is_library:
            continue
        first = next((scope for call in makers for scope in call.scopes if scope.code is last.code), None)
        if first is None:
            continue
        yield from slices(first, last)
        return


def _loop_fixes(found: Found, one: Slice, trial: Trial) -> Iterator[Fix]:
    """Loops in place of a slice that were run: over its turns, if it stands in a loop; else over parts of an axis."""
    if len(found.turns) >= TURNS:
        again = checkpointed(one)
        fix = None if again is None or not trial.agrees(again.statements) else _measured(found, one, again)
        if fix is not None:
            yield fix
            return
    yield from _loops_over_parts(found, one, trial)


def _loops_over_parts(found: Found, one: Slice, trial: Trial) -> Iterator[Fix]:
    """Loops over parts of an axis: of the whole slice, then of what its reducing expression is made of.

    Few are measured, since each takes a run at full size on fake tensors. One that takes far less ends the search.
    """
    reducers = [hump.reducer for hump in found.humps]
    sources = [scope.place.source for call in reducers for scope in call.scopes if scope.code is one.scope.code]
    parts = [part for part in (one, taken_apart(one, sources)) if part is not None]
    tried = (rewrite for part in parts for rewrite in loops(part, trial, found.largest_bytes))
    equal = (
        rewrite
        for rewrite in tried
        if trial.agrees(rewrite.statements) and trial.agrees_in_other_draws(rewrite.statements)
    )
    for rewrite in itertools.islice(equal, MEASURED):
        fix = _measured(found, one, rewrite)
        if fix is not None:
            yield fix
            if ENOUGH * fix.after_bytes <= found.now_bytes:
                return


def _with_imports(found: Slice, rewrite: Rewrite) -> list[ast.stmt]:
    names = {node.id for one in rewrite.statements for node in ast.walk(one) if isinstance(node, ast.Name)}
    known = {*found.scope.surroundings, *found.scope.names}
    imports = [ast.parse(f"import {name}").body[0] for name in ("effops", "torch") if name in names - known]
    return [*imports, *rewrite.statements]


def _measured(found: Found, one: Slice, rewrite: Rewrite) -> Fix | None:
    statements = _with_imports(one, rewrite)
    sources = one.definition(statements, free=one.free), one.definition(one.statements)
    more = None
    with attempt():  # code that does not run on fake tensors is not proposed
        taken = at_full_size(compiled(sources[0], one.scope.surroundings), one)
        is_loop = rewrite.how == "loop"
        before = at_full_size(compiled(sources[1], one.scope.surroundings), one) if is_loop else taken
        more = taken.seconds - before.seconds
    if more is None:
        return None
    after = bytes_after(found, one, taken)
    if LESS * after > found.now_bytes:
        return None
    in_place, imports = without_imports(statements)
    code, lines = _changed(one.with_use(in_place), one.statements, one.scope.code)
    surroundings = dict(one.scope.surroundings)
    why = rewrite.why + _told_of_results(found, one, after)
    return Fix(rewrite.how, code, after, why, one.free, lines, more, imports, sources, surroundings)


def _told_of_results(found: Found, one: Slice, after: int) -> str:
    """That what turns of a loop give stays, where a finding counts one tensor alone."""
    held = results_held(found, one) if has_turns(found, one) and not found.is_loop else 0
    return f"; the results of all turns, {format_bytes(held)}, stay" if held > after else ""


def _changed(
    statements: Sequence[ast.stmt], before: Sequence[ast.stmt], function: CodeType
) -> tuple[str, tuple[int, ...]]:
    """The statements that are new, as code, and the numbers of the lines of those before that are gone."""
    new = [ast.unparse(ast.fix_missing_locations(one)) for one in statements]
    old = [ast.unparse(one) for one in before]
    gone = [one for one, source in zip(before, old) if source not in new and hasattr(one, "lineno")]
    if not gone:
        return "\n".join(source for source in new if source not in old), ()
    lines = {line for one in gone for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}
    between = before[before.index(gone[0]) : before.index(gone[-1])]
    kept = {ast.unparse(one) for one in between if getattr(one, "lineno", 0) in lines}  # on lines that are replaced
    changed = [source for source in new if source not in old or source in kept]
    code = in_whole_lines(changed, gone, function) if changed else ""
    return ("\n".join(changed), ()) if code is None else (code, tuple(sorted(lines)))


def _patch_of_package(found: Found) -> Fix | None:
    """The fix where the package power_spherical makes what is large: a patch of its `log_prob`."""
    calls = [one.maker for one in found.top.members if one.maker is not None]
    scope = next((scope for call in calls for scope in call.scopes if _is_power_spherical(scope)), None)
    if scope is None:
        return None
    op = ast.parse("return effops.power_spherical_log_prob(self.loc, self.scale, value)").body
    packages = ast.parse("return self.log_normalizer() + self.scale * torch.log1p((self.loc * value).sum(-1))").body
    first, *_, last = sorted(line for *_, line in scope.code.co_lines() if line)
    op[0].lineno, op[0].end_lineno = first, last
    rewrite = Rewrite(NAMED, op, "the op takes the place of the package's `log_prob`, with the same results")
    fix = _measured(found, Slice(op, scope, ()), rewrite)
    if fix is None:
        return None
    code = "effops.patch_power_spherical()  # once, before the first call"
    sources = fix._sources[0], Slice(packages, scope, ()).definition(packages)
    return Fix(
        NAMED,
        code,
        fix.after_bytes,
        rewrite.why,
        ("self", "value"),
        (),
        0.0,
        ("import effops",),
        sources,
        fix._surroundings,
    )


def _is_power_spherical(scope: Scope) -> bool:
    return scope.is_library and scope.place.file.endswith("power_spherical/distributions.py") and "value" in scope.names
