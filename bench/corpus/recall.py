"""Which of the lines that a program states `effops.lint` finds, and which of its findings are right."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from effops import lint
from effops.programs.capture.places import Place
from effops.programs.large.findings import Finding
from effops.text import format_bytes, format_distinct_bytes

from .program import Expected, Program, Sizes

CLOSE = 0.005  # of the bytes that are expected


@dataclass(frozen=True)
class Recall:
    """What lint says of one program, which runs on fake tensors at its sizes.

    Attributes:
        sizes: "sizes" or "small"
        expected: how many lines the program states
        found: how many of these have a finding that names them and their bytes
        findings: how many findings there are
        false_findings: how many of them name no such line, or other bytes
        notes: what is missed or false, and why lint failed
    """

    half: str
    program: str
    sizes: str
    expected: int
    found: int = 0
    findings: int = 0
    false_findings: int = 0
    seconds: float = 0.0
    status: str = "ok"
    notes: Sequence[str] = ()


def recall(half: str, program: Program, sizes: str = "sizes") -> Recall:
    """Run lint on a program, and compare what it finds with what the program states."""
    size: Sizes = getattr(program, sizes)
    start = time.perf_counter()
    try:
        findings = lint(lambda: program.run(*program.arguments(**size)), fixes=False).findings
    except Exception as error:  # one program that lint cannot follow does not end the table
        note = f"lint raised {type(error).__name__}: {error}"
        return Recall(half, program.name, sizes, len(program.expected), status="failed", notes=(note,))
    seconds = time.perf_counter() - start
    lines = [(one, *line_of(program, one), one.now(size)) for one in program.expected]
    right: set[int] = set()
    missed = []
    for expected, file, line, nbytes in lines:
        named = [(index, count) for index, one in enumerate(findings) for count in bytes_of(one, file, line)]
        matching = {index for index, count in named if abs(count - nbytes) <= CLOSE * nbytes}
        right |= matching
        if not matching:
            missed.append(_miss(expected, nbytes, [count for _, count in named]))
    wrong = [_told(one) for index, one in enumerate(findings) if index not in right]
    found = len(lines) - len(missed)
    counts = len(lines), found, len(findings), len(wrong)
    return Recall(half, program.name, sizes, *counts, seconds, notes=(*missed, *wrong))


def bytes_of(finding: Finding, file: str, line: int) -> Iterator[int]:
    """The bytes that a finding states for a line, if it names the line: of the whole finding, and of the line alone.

    A loop that keeps a tensor in each turn has all of them in the former, one of them in the latter.
    """
    if covers(finding.place, file, line) or covers(finding.library, file, line):
        yield finding.now_bytes
    own = [nbytes for place, nbytes in finding.lines.items() if covers(place, file, line)]
    if own:
        yield max(own)


def covers(place: Place | None, file: str, line: int) -> bool:
    return place is not None and place.file == file and place.line <= line <= place.last_line


def line_of(program: Program, expected: Expected) -> tuple[str, int]:
    """Where the text of a finding stands. A string that only quotes it, such as the finding's own, does not count."""
    file = inspect.getsourcefile(program.run)
    if expected.file:
        parts = expected.file.removesuffix(".py").split("/")
        file = importlib.import_module(".".join(parts)).__file__
        assert file is not None
        assert file.endswith(expected.file)
    assert file is not None
    quoted = (repr(expected.line), f'"{expected.line}"')
    texts = enumerate(Path(file).read_text().splitlines(), 1)
    numbers = [i for i, text in texts if expected.line in text and not any(one in text for one in quoted)]
    assert len(numbers) == 1, f"{program.name}: {expected.line!r} stands in lines {numbers} of {file}"
    return file, numbers[0]


def summary(rows: Iterable[Recall]) -> str:
    """Recall and false findings of some programs, in a line."""
    rows = list(rows)
    expected, found = sum(one.expected for one in rows), sum(one.found for one in rows)
    findings, false = sum(one.findings for one in rows), sum(one.false_findings for one in rows)
    clean = [one for one in rows if not one.expected]
    share = f" ({found / expected:.1%})" if expected else ""
    failed = sum(one.status == "failed" for one in rows)
    return (
        f"recall: {found} of {expected} lines{share}; false: {false} of {findings} findings, "
        f"on {sum(one.findings > 0 for one in clean)} of {len(clean)} clean programs; lint failed on {failed}"
    )


def _miss(expected: Expected, nbytes: int, others: Sequence[int]) -> str:
    if others:
        nearest = min(others, key=lambda one: abs(one - nbytes))
        said, right = format_distinct_bytes(nearest, nbytes)
        return f"missed: {expected.line}: {said} instead of {right}"
    return f"missed: {expected.line}: {format_bytes(nbytes)}"


def _told(finding: Finding) -> str:
    place = finding.place or finding.library
    source = place.source if place else "a line that is not known"
    return f"false: {source}: {format_bytes(finding.now_bytes)}: {finding.expression}"
