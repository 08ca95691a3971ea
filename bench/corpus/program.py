"""What a program of the corpus states of itself: where it comes from, and what a correct finding says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Expected:
    """What a correct finding names.

    Attributes:
        line: a part of the source line that makes the large tensor. It stands in one line of the program's file, or of
            `file` if the line is a library's.
        now: bytes of the largest tensor that is made there; where a loop keeps one for each chunk, of all that it keeps
        after: bytes of the largest tensor that the mended program makes in its place, the result included
        file: the end of the path of a library's file, if the line is not the program's own
    """

    line: str
    now: Callable[[Sizes], int]
    after: Callable[[Sizes], int]
    file: str = ""


@dataclass(frozen=True)
class Program:
    """A function of tensors, and sizes for it.

    Attributes:
        name: unique in its half of the corpus
        source: the issue or the line of a library that it is taken from, as an address
        run: the function; it may take modules and numbers too
        arguments: makes the arguments from the sizes, by their names, on the default device. Tensors that are trained
            require gradients. It draws from the default generator.
        sizes: as in the source; they need not fit in any memory
        small: sizes at which the program as it is takes 20 MiB to 600 MiB
        expected: what a finding says, one for each line that a fix would change; none if the program is clean
        mended: the same function, as somebody who knows the fix would write it; None if the program is clean
        backward: whether the program is trained: the sum of its result is differentiated
        note: why a clean program is clean, or what is particular
    """

    name: str
    source: str
    run: Callable[..., Any]
    arguments: Callable[..., tuple[Any, ...]]
    sizes: Sizes
    small: Sizes
    expected: tuple[Expected, ...] = ()
    mended: Callable[..., Any] | None = None
    backward: bool = False
    note: str = ""
