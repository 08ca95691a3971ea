"""What `lint` says: findings, as text, as JSON, and as annotations of a pull request."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from effops.prediction.timeline import highest
from effops.programs.capture.observed import TURNS, Call, Observed
from effops.programs.capture.places import Place, place_of, source_line
from effops.programs.capture.unknown_numbers import UNSEEN
from effops.programs.capture.writes import watched
from effops.programs.large import humps
from effops.programs.large.proposals import Fix, fix_or_hint
from effops.programs.large.source.slices import statement_lines
from effops.programs.large.source.trials import seconds_of
from effops.text import counted, format_bytes

UNSEEN_BRANCH = "only one branch was followed: numbers that are read are NaN here, and comparisons with them are false"
FIELDS_OF_FIX = "how", "code", "imports", "lines", "after_bytes", "why"
ACCEPTED = re.compile(r"#\s*effops:\s*accept\b")
OTHERS, OTHERS_SHARE = 3, 0.1  # lines beside the findings that are told, and what each holds of the peak at least
SIGNS = {"mul": "*", "add": "+", "sub": "-", "div": "/"}


@dataclass(frozen=True)
class Finding:
    """A line whose intermediates are large, and what to write instead.

    Attributes:
        place: the user's line that makes the largest of them
        library: the line of a library that the user's line called, where it makes them; None if there is none
        lines: the bytes of the largest tensor that each line makes, on the way from what is small to what is small
        expression: the operation that makes the largest, in shapes
        reducer: the operation that reads it and makes something small
        now_bytes: the largest tensor; where at least four turns of a loop, or layers, each keep one, all of these
        after_bytes: the largest tensor that the fix makes, its result included; where a loop keeps some in each turn,
            all of these, the results that are held at once included; without a fix, the result that is left
        kept_bytes: what of it is kept for backward
        turns: how many are kept, one in each turn of a loop or in each layer
        peak_share: the part of the program's peak that is made here and alive then, from 0 to 1
        seconds: a rough time for what makes and reads the large tensors, by their bytes and operations
        fix: what to write instead, as code that was run; None if nothing was found that is equal and takes half
        hint: where fixes were looked for and there is none, why, and what takes less in this program
    """

    place: Place | None
    library: Place | None
    lines: Mapping[Place, int]
    expression: str
    reducer: str
    now_bytes: int
    after_bytes: int
    kept_bytes: int
    turns: int
    peak_share: float
    seconds: float
    fix: Fix | None
    hint: str = ""

    def __str__(self) -> str:
        place = self.place or self.library
        shares = [f"{self.peak_share:.0%} of the peak"] if self.peak_share >= 0.005 else []
        if self.kept_bytes:
            shares.append(f"these lines keep {format_bytes(self.kept_bytes)} for backward")
        turns = f" in {self.turns} turns" if self.turns >= TURNS else ""
        parts = [
            f"{place}: {format_bytes(self.now_bytes)} now{turns}, {format_bytes(self.after_bytes)} after"
            + (f" ({'; '.join(shares)})" if shares else ""),
            f"    {source_line(place) if place else ''}",
        ]
        if self.library is not None and self.place is not None:
            parts.append(f"  which calls {self.library}\n    {source_line(self.library)}")
        parts.append(f"  {self.expression}, which {self.reducer} reads")
        if self.fix is not None:
            parts.append(f"  {self.fix.how}{_in_place_of(self.fix.lines)}: {self.fix.why}")
            if self.fix.imports:
                parts.append(f"  at the top of the file: {'; '.join(self.fix.imports)}")
            parts += [f"    {line}" for line in self.fix.code.splitlines()]
        elif self.hint:
            parts.append(f"  {self.hint}")
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        fix = self.fix and {name: getattr(self.fix, name) for name in FIELDS_OF_FIX}
        lines = [{**_placed(place), "bytes": nbytes} for place, nbytes in self.lines.items()]
        names = ("expression", "reducer", "now_bytes", "after_bytes", "kept_bytes", "turns", "peak_share", "seconds")
        return {
            "place": _placed(self.place),
            "library": _placed(self.library),
            "lines": lines,
            **{name: getattr(self, name) for name in names},
            "fix": fix,
            "hint": self.hint,
        }


@dataclass
class LintReport:
    """What `lint` found. `str()` is for people.

    Attributes:
        findings: the largest first
        peak_bytes: the highest sum of live storages that the program allocated
        assumed: what was taken for granted without values, with the lines, and how often
        unknown: operators that may allocate more inside than is known
        with_fixes: whether fixes were looked for
        unseen: the places of comparisons with numbers that were read, as `loss.item() > 5`: one branch was followed,
            and what the other one takes is not known
        has_ended: whether the block of `with effops.lint() as report:` has, before which nothing is found
        accepted: what the comment `# effops: accept`, in its line, takes out of `findings`; no fix was looked for
        others: of the lines that no finding names, those that hold most at the peak, and their bytes
    """

    findings: Sequence[Finding] = ()
    peak_bytes: int = 0
    assumed: Mapping[str, int] = field(default_factory=dict)
    unknown: Sequence[str] = ()
    with_fixes: bool = False
    unseen: Sequence[Place] = ()
    has_ended: bool = True
    accepted: Sequence[Finding] = ()
    others: Mapping[Place, int] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.has_ended:
            return "nothing is found before the block ends: print the report behind it"
        parts = [str(one) for one in self.findings]
        parts.append(
            f"{counted(len(self.findings), 'findings')}; "
            f"the program's tensors take {format_bytes(self.peak_bytes)} at most"
        )
        without = sum(one.fix is None for one in self.findings)
        if without and self.with_fixes:
            parts.append(
                f"no fix was found for {without} of them: one must give the same results and gradients in half the "
                "bytes; it is looked for in the statement that makes the tensor and those up to the one that reduces it"
            )
        if self.others:
            shown = [f"  {format_bytes(held)}  {place}: {source_line(place)}" for place, held in self.others.items()]
            parts.append("\n".join(["other lines that hold much at the peak:", *shown]))
        if self.accepted:
            parts.append("\n".join(f"accepted: {one.place}: {format_bytes(one.now_bytes)}" for one in self.accepted))
        if self.unseen:
            shown = [f"  {place}: {source_line(place)}" for place in self.unseen]
            parts.append("\n".join([f"{UNSEEN_BRANCH}:", *shown]))
        parts.append("\n".join(f"assumed: {what} ({counted(count, 'times')})" for what, count in self.assumed.items()))
        return "\n\n".join(part for part in parts if part)

    def take_over(self, found: LintReport) -> None:
        """Tell from now on what another report tells: the user has this one since the block began."""
        for attribute in fields(found):
            setattr(self, attribute.name, getattr(found, attribute.name))

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        return {
            "findings": [one.to_json() for one in self.findings],
            "peak_bytes": self.peak_bytes,
            "assumed": dict(self.assumed),
            "unknown": list(self.unknown),
            "unseen": [_placed(place) for place in self.unseen],
            "accepted": [one.to_json() for one in self.accepted],
            "others": [{**_placed(place), "bytes": held} for place, held in self.others.items()],
        }

    def github(self) -> str:
        """Lines that GitHub shows beside the code of a pull request."""
        found = [(one.place or one.library, one) for one in self.findings]
        warnings = [
            f"::warning file={os.path.relpath(place.file)},line={place.line},endLine={place.last_line},"
            f"title={format_bytes(one.now_bytes)} now, {format_bytes(one.after_bytes)} after::{_escaped(str(one))}"
            for place, one in found
            if place is not None
        ]
        notices = [
            f"::notice file={os.path.relpath(place.file)},line={place.line},endLine={place.last_line},"
            f"title=only one branch was followed::{_escaped(UNSEEN_BRANCH)}"
            for place in self.unseen
        ]
        return "\n".join([*warnings, *notices])


def _in_place_of(lines: Sequence[int]) -> str:
    if not lines:
        return ""
    runs: list[list[int]] = []
    for line in lines:
        if runs and line == runs[-1][-1] + 1:
            runs[-1].append(line)
        else:
            runs.append([line])
    told = [f"{one[0]} to {one[-1]}" if len(one) > 1 else str(one[0]) for one in runs]
    return f", in place of {'line' if len(lines) == 1 else 'lines'} {' and '.join(told)}"


def _placed(place: Place | None) -> dict[str, Any]:
    return {} if place is None else {"file": place.file, "line": place.line, "source": place.source}


def _escaped(text: str) -> str:
    """A message of GitHub's workflow commands, which end with the line."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def report_of(
    observed: Observed,
    assumed: Mapping[tuple[str, Place | None], int],
    found: Sequence[humps.Found],
    *,
    with_fixes: bool = True,
) -> LintReport:
    """The report of what was found in a program."""
    assert observed.recorder is not None
    peak, tick = highest(observed.recorder.records)
    findings, accepted = [], []
    # Fixes are tried with the user's statements: one that writes to a file raises there, and is not tried.
    with watched("lint", allow=False, throw_away=False):
        for one in found:
            if _is_accepted(one):
                accepted.append(_finding(one, tick, peak, None, ""))
            else:
                findings.append(_finding(one, tick, peak, *(fix_or_hint(one) if with_fixes else (None, ""))))
    branches = [place for what, place in assumed if what in UNSEEN and place is not None]
    unseen = list({(one.file, one.line): one for one in branches}.values())
    rest = {key: count for key, count in assumed.items() if key[0] not in UNSEEN or key[1] is None}
    return LintReport(
        findings,
        peak,
        _by_lines(rest),
        tuple(sorted(observed.unknown)),
        with_fixes,
        unseen,
        accepted=accepted,
        others=_others(observed, [*findings, *accepted], tick, peak),
    )


def _others(observed: Observed, findings: Sequence[Finding], tick: int, peak: int) -> dict[Place, int]:
    """The lines that hold most at the peak, of those that are not named, and their bytes."""
    named = {(place.file, place.line) for one in findings for place in (one.place, one.library, *one.lines) if place}
    made = [one for one in observed.storages.values() if one.maker is not None and one.allocation.is_there(tick)]
    held = observed.bytes_by_line(one.allocation for one in made)
    least = max(humps.LEAST_BYTES, OTHERS_SHARE * peak)
    most = {
        place: nbytes
        for place, nbytes in held
        if place is not None and (place.file, place.line) not in named and nbytes >= least
    }
    return dict(itertools.islice(most.items(), OTHERS))


def _is_accepted(found: humps.Found) -> bool:
    """Whether a comment in the user's statement says that its large tensors stay."""
    user, _ = found.main.site
    if user is None:
        return False
    place = place_of(user)
    return any(ACCEPTED.search(line) for line in statement_lines(place.file, place.line))


def _by_lines(assumed: Mapping[tuple[str, Place | None], int]) -> dict[str, int]:
    """What was assumed, with all its lines, and how often."""
    places: dict[str, list[str]] = defaultdict(list)
    counts: Counter[str] = Counter()
    for (what, place), count in assumed.items():
        counts[what] += count
        if place is not None and str(place) not in places[what]:
            places[what].append(str(place))
    return {f"{what} at {', '.join(places[what])}" if places[what] else what: counts[what] for what in counts}


def _finding(found: humps.Found, tick: int, peak: int, fix: Fix | None, hint: str) -> Finding:
    top = found.top
    maker = found.main
    user, library = (one and place_of(one) for one in maker.site)
    members = found.members
    return Finding(
        place=user,
        library=library,
        lines=humps.lines(found),
        expression=_in_shapes(maker),
        reducer=f"{top.reducer.name} -> {_shapes(top.reducer)}",
        now_bytes=found.now_bytes,
        after_bytes=found.result_bytes if fix is None else fix.after_bytes,
        kept_bytes=found.kept_bytes,
        turns=len(found.turns),
        peak_share=sum(one.nbytes for one in members if one.allocation.is_there(tick)) / max(peak, 1),
        seconds=seconds_of({id(call): call for one in members for call in one.calls}.values()),
        fix=fix,
        hint=hint,
    )


def _in_shapes(call: Call) -> str:
    operands = [str(read.shape) for read in call.reads if math.prod(read.shape) > 1] or [""]
    sign = SIGNS.get(call.name)
    text = f" {sign} ".join(operands) if sign and len(operands) > 1 else f"{call.name}({', '.join(operands)})"
    return f"{text} -> {_shapes(call)}"


def _shapes(call: Call) -> str:
    return ", ".join(map(str, call.shapes[:1]))
