"""Code in place of statements, with what else stands on their lines: the head of a function, or other statements."""

from __future__ import annotations

import ast
import itertools
import linecache
from collections.abc import Sequence
from types import CodeType

BRANCH = "if 1:\n    pass\n"  # heads such as `else:` stand behind one


def in_whole_lines(new: Sequence[str], gone: Sequence[ast.stmt], code: CodeType) -> str:
    """The sources of statements of a function, such that they can take the place of all lines on which others stand."""
    if not gone or not new:
        return "\n".join(new)
    first, last = gone[0], gone[-1]
    line = linecache.getline(code.co_filename, first.lineno).encode()  # columns count bytes
    last_line = linecache.getline(code.co_filename, last.end_lineno or last.lineno).encode()
    before, after = (one.decode().strip() for one in (line[: first.col_offset], last_line[last.end_col_offset :]))
    if code.co_name == "<lambda>":
        *others, body = new
        return "\n".join([*others, f"{before} {body.removeprefix('return ')}{after}".strip()])
    head, earlier = _head(before)
    rows = [*_rows(earlier), *itertools.chain.from_iterable(map(str.splitlines, new)), *_rows(after)]
    return "\n".join([head, *(f"    {row}" for row in rows)] if head else rows)


def _head(text: str) -> tuple[str, str]:
    """The head of a compound statement, as `if x:`, and what stands behind it."""
    for end in (place + 1 for place, one in enumerate(text) if one == ":"):
        for start in ("", BRANCH):
            try:
                ast.parse(f"{start}{text[:end]} pass")
            except SyntaxError:
                continue
            return text[:end], text[end:]
    return "", text


def _rows(text: str) -> list[str]:
    """A row of statements that stand side by side, if there are any."""
    row = text.strip().strip(";").strip()
    return [] if not row or row.startswith("#") else [row]
