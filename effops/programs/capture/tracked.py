"""The objects that Python's collector tracks, listed without harm to other threads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import chain, groupby, starmap
from typing import Any


def tracked() -> list[Any]:
    """The tracked objects that are no tuples.

    Among the tuples are those that another thread is building, `tuple(... for ...)`. CPython can give such a tuple its
    final length only while nothing else refers to it, and raises SystemError in that thread otherwise. So the list of
    all is made and sifted inside a single call of a built-in, during which no other thread runs, as it may between any
    two steps of a loop in Python.
    """
    nothing: dict[type, Any] = {tuple: (), int: ()}
    return list(chain.from_iterable(starmap(nothing.get, groupby(_all(), type))))


def _all() -> Iterator[Any]:
    """All tracked objects, listed when the first is asked for, and a number, which is what `groupby` keeps last."""
    return chain(chain.from_iterable(map(gc.get_objects, (None,))), (0,))
