"""What every op asks of its tensor arguments, with errors that name the function, the argument and the remedy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from effops.precision import FLOATS


def check_operand(function: str, argument: str, tensor: Any, *, dims: int = 0) -> None:
    """Raise unless it is a dense floating-point tensor with at least `dims` dimensions."""
    if not isinstance(tensor, Tensor):
        got = type(tensor).__name__
        raise TypeError(f"{function}: `{argument}` must be a tensor; got {got}; use torch.as_tensor")
    if tensor.dtype not in FLOATS:
        names = ", ".join(str(dtype)[len("torch.") :] for dtype in FLOATS)
        raise TypeError(
            f"{function}: `{argument}` must be real floating point; got {tensor.dtype}; convert it to one of {names}"
        )
    check_dense(function, argument, tensor)
    if tensor.ndim < dims:
        least = "a last dimension" if dims == 1 else f"at least {dims} dimensions"
        raise ValueError(f"{function}: `{argument}` must have {least}; got {tensor.ndim}; unsqueeze it")


def check_dense(function: str, argument: str, tensor: Tensor) -> None:
    """Raise if it is sparse or nested."""
    if tensor.layout != torch.strided:
        raise TypeError(f"{function}: `{argument}` must be dense; got {tensor.layout}; use .to_dense()")
    if tensor.is_nested:
        raise TypeError(f"{function}: `{argument}` must be dense; got a nested tensor; use .to_padded_tensor()")


def check_devices(function: str, **tensors: Tensor) -> None:
    """Raise unless they are on one device."""
    if len({tensor.device for tensor in tensors.values()}) > 1:
        got = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"{function}: tensors must be on one device; got {got}; move one")
