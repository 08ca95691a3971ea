"""Dtypes and rounding: result and arithmetic dtype of an op, unit roundoff, how exact a contraction is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.compiler import is_compiling

# What rounding the coordinates of a unit vector to this dtype does to the sum of their products.
INPUT_SLACK = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}

FLOATS = tuple(INPUT_SLACK)  # what operands may be
INTEGERS = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)  # that convert to them

CPU = torch.device("cpu")  # to compare with: the type of a device is a string made anew
_UNCHANGED = nullcontext()  # one for all calls


def wider(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The dtype to which two floating-point dtypes promote (`torch.promote_types`, but traceable)."""
    if first == second:
        return first
    if first.itemsize == second.itemsize:  # float16 and bfloat16
        return torch.float32
    return max(first, second, key=lambda dtype: dtype.itemsize)


def promote(first: torch.dtype, first_ndim: int, second: torch.dtype, second_ndim: int) -> torch.dtype:
    """Dtype of an elementwise operation on two floating-point tensors: a 0-d tensor does not widen an n-d one."""
    if (first_ndim == 0) == (second_ndim == 0):
        return wider(first, second)
    return second if first_ndim == 0 else first


def arithmetic_dtype(result: torch.dtype) -> torch.dtype:
    """float64 for a float64 result, else float32."""
    return torch.float64 if result == torch.float64 else torch.float32


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def autocast_enabled(device: torch.device) -> bool:
    if device == CPU:
        return torch.is_autocast_enabled("cpu")
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """In this context no operand is rounded by autocast."""
    return torch.autocast(device.type, enabled=False) if autocast_enabled(device) else _UNCHANGED


def contraction_error(dimension: int, arithmetic: torch.dtype, precision: str = "highest") -> float:
    """How many unit roundoffs of `arithmetic` a dot product of two unit vectors of `dimension` may be off.

    An allowance, not the worst case, which grows with the dimension: the rounding of a sequential sum in general
    position, which every variant keeps on the hard inputs of the tests up to D = 4096. `precision` is the value of
    `torch.get_float32_matmul_precision()`; below "highest", matrix products may round operands to TF32 or bfloat16.
    """
    exact_operands = 4 + math.sqrt(dimension)
    if arithmetic == torch.float64 or precision == "highest":
        return exact_operands
    if precision == "high":  # TF32, truncated
        return 2**14 * min(2.0, 1 + 6 / math.sqrt(dimension)) + exact_operands
    return 2**16 * min(2.0, 6 / math.sqrt(dimension)) + exact_operands


def matmul_precision() -> str:
    """`torch.get_float32_matmul_precision()`; in traced code, which can guard on no more, "medium" for "high" too."""
    if is_compiling():
        return "medium" if torch.backends.cuda.matmul.allow_tf32 else "highest"
    return torch.get_float32_matmul_precision()


def sphere_tolerance(dimension: int, arithmetic: torch.dtype, inputs: Sequence[torch.dtype]) -> float:
    """How far the dot product of two unit vectors, given in the dtypes `inputs`, may fall below -1."""
    rounding = contraction_error(dimension, arithmetic, matmul_precision())
    return rounding * unit_roundoff(arithmetic) + max(INPUT_SLACK[dtype] for dtype in inputs)
