"""What cannot be cut, and why."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


class CannotTile(NotImplementedError):  # noqa: N818
    """A function cannot run in bounded memory.

    Attributes:
        reason: why
        operator: the operator that stops a cut; empty if none does
        shapes: of its result
        line: the user's line that called it, as "file:number"; empty if it is not known
        library_line: the line of a library that the user called, likewise
        remedy: what to do
    """

    def __init__(
        self,
        reason: str,
        *,
        operator: str = "",
        shapes: Sequence[tuple[int, ...]] = (),
        line: str = "",
        library_line: str = "",
        remedy: str = "",
    ) -> None:
        self.reason, self.operator, self.shapes = reason, operator, tuple(shapes)
        self.line, self.library_line, self.remedy = line, library_line, remedy
        parts = [f"tiled: {reason}", f"in {line}" if line else "", remedy]
        super().__init__("; ".join(part for part in parts if part))

    def __reduce__(self) -> Any:  # for pickle and copy, which would give the message as the reason
        names = "reason", "operator", "shapes", "line", "library_line", "remedy"
        return functools.partial(type(self), **{name: getattr(self, name) for name in names}), ()


class TilesDiffer(RuntimeError):  # noqa: N818
    """Tiles give another result than the whole, on a part of the arguments: a defect of effops."""
