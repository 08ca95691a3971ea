"""Dtypes and rounding: the result and arithmetic dtype of an op, unit roundoff, the error of a contraction."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

# The error of the dot product of two unit vectors that comes from rounding their coordinates to this dtype.
INPUT_SLACK = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}

FLOATS = tuple(INPUT_SLACK)  # the dtypes that operands may have
# The dtypes of a scale that is converted to a floating-point dtype.
INTEGERS = frozenset(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))

CPU = torch.device("cpu")  # a comparison with it is fast: `device.type` makes a new string each time
_UNCHANGED = nullcontext()  # all calls share one


def wider(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The dtype to which two floating-point dtypes promote: `torch.promote_types`, in a form that can be traced."""
    if first == second:
        return first
    if first.itemsize == second.itemsize:  # float16 and bfloat16
        return torch.float32
    return max(first, second, key=lambda dtype: dtype.itemsize)


def promote(first: torch.dtype, first_ndim: int, second: torch.dtype, second_ndim: int) -> torch.dtype:
    """The dtype of an elementwise operation on two floating-point tensors. A 0-d tensor does not widen an n-d one."""
    if (first_ndim == 0) == (second_ndim == 0):
        return wider(first, second)
    return second if first_ndim == 0 else first


def arithmetic_dtype(result: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float64 for a float64 result, else float32."""
    return torch.float64 if result == torch.float64 else torch.float32


def mixes_float64(tensors: Iterable[Tensor]) -> bool:
    """Whether some of the tensors have float64, and others another floating dtype."""
    return len({tensor.dtype == torch.float64 for tensor in tensors if tensor.is_floating_point()}) > 1


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`. A small call gains a microsecond where nothing is to be done."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def autocast_enabled(device: torch.device) -> bool:
    if device == CPU:
        return torch.is_autocast_enabled("cpu")
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast rounds no operand."""
    return torch.autocast(device.type, enabled=False) if autocast_enabled(device) else _UNCHANGED


def contraction_error(dimension: int, arithmetic: torch.dtype, precision: str = "highest") -> float:
    """The error allowed to a dot product of two unit vectors of `dimension`, in unit roundoffs of `arithmetic`.

    It is an allowance, not the worst case, which grows in proportion to the dimension. It is the rounding of a
    sequential sum of terms in general position. Every variant stays within it on the hard inputs of the tests, up to
    D = 4096. `precision` is the value of `torch.get_float32_matmul_precision()`. Below "highest", matrix products may
    round operands to TF32 or bfloat16.
    """
    exact_operands = 4 + math.sqrt(dimension)
    if arithmetic == torch.float64 or precision == "highest":
        return exact_operands
    spread = 6 / math.sqrt(max(1, dimension))
    if precision == "high":  # TF32, truncated
        return 2**14 * min(2.0, 1 + spread) + exact_operands
    return 2**16 * min(2.0, spread) + exact_operands


def matmul_precision() -> str:
    """`torch.get_float32_matmul_precision()`. Traced code cannot tell "high" from "medium", and takes "medium"."""
    if is_compiling():
        return "medium" if torch.backends.cuda.matmul.allow_tf32 else "highest"
    return torch.get_float32_matmul_precision()


def sphere_tolerance(dimension: int, arithmetic: torch.dtype, inputs: Sequence[torch.dtype]) -> float:
    """How far rounding may take the dot product of two unit vectors below -1, if they are given in dtypes `inputs`."""
    rounding = contraction_error(dimension, arithmetic, matmul_precision())
    return rounding * unit_roundoff(arithmetic) + max(INPUT_SLACK[dtype] for dtype in inputs)


def in_float64(tensor: Tensor) -> Tensor:
    """A copy of a tensor in float64, or in complex128; one that is neither real nor complex stays as it is."""
    wide = tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex():
        wide = wide.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return wide.requires_grad_(tensor.requires_grad)
