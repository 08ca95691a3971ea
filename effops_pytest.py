"""A plugin of pytest, outside the package, which imports PyTorch: tests that ask for nothing here start as fast."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def memory_budget() -> Callable[..., Any]:
    """`memory_budget("64 MiB", fn, *args)` fails where `fn(*args)` would take more memory, as `effops.budget` says.

    Nothing is computed, and no GPU is needed. It returns the report, which has `peak_bytes` and `lines`.
    """
    return check


def check(limit: Any = None, fn: Any = None, /, *args: Any, **kwargs: Any) -> Any:
    """What the fixture gives."""
    __tracebackhide__ = True
    if callable(limit) or not callable(fn):
        raise TypeError(
            "memory_budget: arguments must be a limit, a function, and the arguments of the function; got "
            f'{type(limit).__name__}, {type(fn).__name__}; write memory_budget("64 MiB", fn, *args), without calling '
            'the function; for a block write `with effops.budget("64 MiB"):`'
        )
    from effops.programs.limits_of_memory import budget
    from effops.text import parse_bytes

    parse_bytes(limit, "memory_budget: `limit`")
    return budget(limit).check(fn, *args, **kwargs)
