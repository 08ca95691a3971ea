"""Code in place of statements, with what else stands on their lines: the head of a function, or other statements."""

from __future__ import annotations

import ast
import itertools
import linecache
from collections.abc import Sequence
from types import CodeType

# What must stand around heads such as `else:`, `finally:` and `try:`.
AROUND = ("", ""), ("if 1:\n    pass\n", ""), ("try:\n    pass\n", ""), ("", "\nfinally: pass")


def in_whole_lines(new: Sequence[str], gone: Sequence[ast.stmt], code: CodeType) -> str | None:
    """The sources of statements of a function, such that they can take the place of all lines on which others stand.

    None if they cannot, as in the middle of an expression.
    """
    first, last = gone[0], gone[-1]
    line = linecache.getline(code.co_filename, first.lineno).encode()  # columns count bytes
    last_line = linecache.getline(code.co_filename, last.end_lineno or last.lineno).encode()
    ends = line[: first.col_offset], last_line[last.end_col_offset :]
    before, after = (one.decode(errors="replace").strip() for one in ends)
    if code.co_name == "<lambda>":
        *others, body = new
        if others and not _parses(f"{before} 0 {after}"):  # as inside of brackets
            return None
        is_import = [isinstance(ast.parse(one).body[0], ast.Import) for one in others]
        whole = f"{before} {body.removeprefix('return ')}{after}".strip()
        return "\n".join([*others, whole]) if all(is_import) else None
    head, earlier = _head(before)
    around = [_row(earlier), _row(after)]
    if not all(map(_parses, around)):
        return None
    rows = [row for row in (around[0], *itertools.chain.from_iterable(map(str.splitlines, new)), around[1]) if row]
    return "\n".join([head, *(f"    {row}" for row in rows)] if head else rows)


def _head(text: str) -> tuple[str, str]:
    """The head of a compound statement, as `if x:`, and what stands behind it."""
    for end in (place + 1 for place, one in enumerate(text) if one == ":" and text[place + 1 : place + 2] != "="):
        if any(_parses(f"{start}{text[:end]} pass{rest}") for start, rest in AROUND):
            return text[:end], text[end:]
    return "", text


def _row(text: str) -> str:
    """Statements that stand side by side, without what separates them from others; empty for a comment."""
    row = text.strip().strip(";").strip()
    return "" if row.startswith("#") else row


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
