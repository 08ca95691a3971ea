"""Code in place of statements, with what else stands on their lines: the head of a function, or other statements."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence

BRANCH = "if 1:\n    pass\n"  # heads such as `else:` stand behind one


def in_whole_lines(new: Sequence[str], gone: Sequence[ast.stmt], file: str) -> str:
    """The sources of statements, such that they can take the place of all lines on which the others stand."""
    code = "\n".join(new)
    if not gone or not new:
        return code
    first, last = gone[0], gone[-1]
    line = linecache.getline(file, first.lineno).encode()  # columns count bytes
    before, own = line[: first.col_offset].decode(), line[first.col_offset :].decode()
    last_line = linecache.getline(file, last.end_lineno or last.lineno).encode()
    after = last_line[last.end_col_offset :].decode().strip()
    if isinstance(last, ast.Return) and not own.startswith("return"):  # the body of a lambda
        *others, body = new
        return "\n".join([*others, f"{before.strip()} {body.removeprefix('return ')}{after}"])
    head, earlier = _head(before.strip())
    rows = [*_rows(earlier), *code.splitlines(), *_rows(after)]
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
