"""Checks of the numbers, flags and functions that the functions of this folder take."""

from numbers import Integral, Real
from typing import Any

import torch

from effops.text import check_flags as check_flags
from effops.text import did_you_mean, integer_remedy

AUTOCAST_DTYPES = torch.bfloat16, torch.float16  # with another one PyTorch warns, and switches autocast off


def check_count(function: str, argument: str, count: Any, remedy: str = "give a larger one") -> None:
    """Raise unless this is an integer, at least 1; `remedy` is for what is smaller."""
    if not isinstance(count, Integral) or isinstance(count, bool):
        got = f"{type(count).__name__} {count!r}"
        raise TypeError(f"{function}: `{argument}` must be an integer; got {got}; {integer_remedy(count)}")
    if count < 1:
        raise ValueError(f"{function}: `{argument}` must be at least 1; got {count}; {remedy}")


def check_number(function: str, argument: str, number: Any) -> None:
    """Raise unless this is a real number."""
    if not isinstance(number, Real) or isinstance(number, bool):
        got = f"{type(number).__name__} {number!r}"
        raise TypeError(f"{function}: `{argument}` must be a number; got {got}; give one, as 0.1")


def check_device(function: str, device: Any) -> None:
    """Raise unless this is a device whose forms of operations are known."""
    known = "cpu", "cuda"
    if device not in known:
        remedy = did_you_mean(device, known) or "; give one of these, since what other devices allocate is not known"
        raise ValueError(f'{function}: `device` must be "cpu" or "cuda"; got {device!r}{remedy}')


def check_progress(function: str, progress: Any) -> None:
    """Raise unless this can be told of what comes next."""
    if not callable(progress):
        got = type(progress).__name__
        raise TypeError(f"{function}: `progress` must be a function of a text; got {got}; give one, as print")
