"""Calls that may raise anything, as broken devices and compilers do."""

import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

REASON_LENGTH = 400
T = TypeVar("T")


def attempted(run: Callable[..., T], *args: Any) -> tuple[T | None, str]:
    """What a call returns, and empty; or None, and a line for what it raised."""
    try:
        return run(*args), ""
    except Exception as error:
        return None, textwrap.shorten(f"{type(error).__name__}: {error}", REASON_LENGTH)
