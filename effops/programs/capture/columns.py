"""The expression of an instruction on Python 3.10, whose code notes lines and no columns. Later Pythons note both.

The source is compiled once more, with lines of its own for each expression: the line of an instruction then tells its
expression. An instruction of the code that runs is found there by its line, and by what else that line does.
"""

from __future__ import annotations

import ast
import dis
import functools
import warnings
from collections import defaultdict
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

# Whether the compiler adds these, and which kind of jump it takes, depends on the lines of expressions too.
ADDED = {dis.opmap[name] for name in ("NOP", "EXTENDED_ARG", "JUMP_FORWARD", "JUMP_ABSOLUTE") if name in dis.opmap}
JUMPS = {*dis.hasjrel, *dis.hasjabs} - ADDED
JUMP = -1


class Span(NamedTuple):
    """Where an expression begins and ends. Columns count bytes of UTF-8, and the last is behind the expression."""

    first: int
    last: int
    begin_column: int
    end_column: int


def span_of(code: CodeType, offset: int, source: str) -> Span | None:
    """Find the expression of an instruction in the source of its file; None if the source does not tell it."""
    while code.co_code[offset] == dis.EXTENDED_ARG:  # a frame stands at this one where an argument is large
        offset += 2
    instructions = list(_instructions(code))
    line = next((number for at, _, number in instructions if at == offset), 0)
    own = [(at, operation) for at, operation, number in instructions if number == line]
    alike = [
        [span for _, span in one]
        for one in _lines(source).get((code.co_name, line), [])
        if [operation for operation, _ in one] == [operation for _, operation in own]
    ]
    # There is none if the code is not of this source, and there are several if functions of one line do the same.
    return next(span for (at, _), span in zip(own, alike[0]) if at == offset) if len(alike) == 1 else None


@functools.lru_cache(64)
def _lines(source: str) -> dict[tuple[str, int], list[list[tuple[int, Span]]]]:
    """The operations of each line of each function, with their expressions; by the function's name and the line."""
    found: dict[tuple[str, int], list[list[tuple[int, Span]]]] = {}
    try:
        tree = ast.parse(source)
        meant = _with_lines_of_their_own(tree)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler warned when the program was compiled, of its own lines
            codes = [compile(tree, "<source>", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError, RecursionError):
        return found
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
        lines = defaultdict(list)
        for _, operation, number in _instructions(code):
            if number in meant:  # an empty module has a line without an expression
                line, span = meant[number]
                lines[line].append((operation, span))
        for line, one in lines.items():
            found.setdefault((code.co_name, line), []).append(one)
    return found


def _with_lines_of_their_own(tree: ast.Module) -> dict[int, tuple[int, Span]]:
    """Move what a module consists of to other lines, and tell by these the lines before and the expressions."""
    nodes: list[Any] = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    calls = {node.func: node for node in nodes if isinstance(node, ast.Call)}
    meant = {}
    for number, node in enumerate(nodes):
        meant[2 * number + 1] = node.lineno, _span(node)
        # The call of a method is compiled with the last line of the method's name.
        meant[2 * number + 2] = node.end_lineno, _span(calls.get(node, node))
    for number, node in enumerate(nodes):
        node.lineno, node.end_lineno = 2 * number + 1, 2 * number + 2
    return meant


def _span(node: Any) -> Span:
    """Where later Pythons say that a node stands: on the line of its name, if it is an attribute of several lines."""
    named = node.func if isinstance(node, ast.Call) else node
    first, column = node.lineno, node.col_offset
    if isinstance(named, ast.Attribute) and named.lineno != named.end_lineno:
        first, column = named.end_lineno, (named.end_col_offset or 0) - len(named.attr.encode())
    return Span(first, node.end_lineno, column, node.end_col_offset)


def _instructions(code: CodeType) -> Iterator[tuple[int, int, int]]:
    """The offset, the operation and the line of each instruction that does not depend on lines."""
    for start, stop, line in code.co_lines():
        for offset in range(start, stop, 2) if line else ():
            operation = code.co_code[offset]
            if operation not in ADDED:
                yield offset, JUMP if operation in JUMPS else operation, line or 0
