"""The lines of a script that stand behind its last step, and that have not run when it is stopped there."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from effops.programs.capture.places import Place, place_of, user_instructions

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
DEFINITIONS = *FUNCTIONS, ast.ClassDef
LOOPS = ast.For, ast.AsyncFor, ast.While
FEW = 3  # runs of lines that are told


@dataclass(frozen=True)
class Stopped:
    """Where a script was stopped.

    Attributes:
        place: the line of the user that made the last step
        lines: those behind it that call something, as "12 to 14 of train.py"; the innermost function comes first
        in_loop: whether all stand in the innermost loop, so that one step more runs them
    """

    place: Place
    lines: Sequence[str]
    in_loop: bool

    def told(self, steps: int) -> str:
        """A line for people, of a script that was stopped after so many steps; empty if nothing stands behind it."""
        if not self.lines:
            return ""
        some = [*self.lines[:FEW], *(["more"] if len(self.lines) > FEW else [])]
        word = "line" if len(some) == 1 and " to " not in some[0] else "lines"
        remedy = f"`--steps {steps + 1}` follows it"
        if not self.in_loop:
            remedy = "to follow it, give `--steps` more steps than the script makes, or let the script make fewer"
        return (
            f"stopped after optimizer step {steps}, at {self.place}: what stands behind it did not run "
            f"({word} {', '.join(some)}); {remedy}"
        )


def stopped_at(error: BaseException, steps: int) -> Stopped | None:
    """Where an error has ended a script; None if no line of the user has led there."""
    places = [place_of(one) for one in user_instructions(error)]
    if not places:
        return None
    lines: list[str] = []
    in_loop = True
    for number, place in enumerate(reversed(places)):
        body = _body(place)
        found = list(_behind(body, place.line))
        deepest = _loops_around(body, place.line) if number == 0 else 0
        if deepest and steps > 1:  # in the turn before, what stands in the loop ran
            found = [one for one in found if one[1] < deepest]
        calling = [one for one in found if any(isinstance(node, ast.Call) for node in ast.walk(one[0]))]
        in_loop &= all(deepest and depth == deepest for _, depth in calling)
        lines += [f"{run} of {os.path.basename(place.file)}" for run in _runs([one for one, _ in calling])]
    return Stopped(places[-1], list(dict.fromkeys(lines)), in_loop)


def _body(place: Place) -> Sequence[ast.stmt]:
    """The statements of the innermost function that holds a place, or of its module."""
    try:
        tree = ast.parse("".join(linecache.getlines(place.file)))
    except SyntaxError:  # no file, as of code that the script has made itself
        return []
    bodies = [tree.body]  # `ast.walk` comes to the inner ones later
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and node.body[0].lineno <= place.line <= (node.end_lineno or node.lineno):
            bodies.append(node.body)
    return bodies[-1]


def _loops_around(body: Sequence[ast.stmt], line: int) -> int:
    loops = [node for one in body for node in ast.walk(one) if isinstance(node, LOOPS)]
    return sum(one.lineno <= line <= (one.end_lineno or one.lineno) for one in loops)


def _behind(block: Sequence[ast.stmt], line: int, depth: int = 0) -> Iterator[tuple[ast.stmt, int]]:
    """The statements behind a line in its function, and how many loops each stands in; without definitions."""
    for index, one in enumerate(block):
        if one.lineno <= line <= (one.end_lineno or one.lineno):
            blocks = [value for _, value in ast.iter_fields(one) if isinstance(value, list)]
            for inside in (*blocks, *(handler.body for handler in getattr(one, "handlers", ()))):
                if inside and isinstance(inside[0], ast.stmt):
                    yield from _behind(inside, line, depth + isinstance(one, LOOPS))
            yield from ((other, depth) for other in block[index + 1 :] if not isinstance(other, DEFINITIONS))


def _runs(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Lines of statements, those of neighbours as one."""
    ordered = sorted({(one.lineno, one.end_lineno or one.lineno) for one in statements})
    runs: list[tuple[int, int]] = []
    for first, last in ordered:
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = runs[-1][0], max(last, runs[-1][1])
        else:
            runs.append((first, last))
    return (f"{first} to {last}" if last > first else f"{first}" for first, last in runs)
