"""Layouts: a gradient has the strides of its operand, so that autograd takes it without a copy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effops.numerics.pages import with_huge_pages
from effops.pytorch.calls import compute_elementwise_output_strides
from effops.pytorch.operators import aten

_is_dense = aten.is_non_overlapping_and_dense.default


def gradient_strides(operand: Tensor) -> tuple[int, ...]:
    """The strides of `torch.empty_like(operand)`: the operand's own if it is dense.

    A fake tensor's `empty_like` differs from a real one's along axes of size 1.
    """
    if operand.is_contiguous() or _is_dense(operand):  # the former takes less time
        return operand.stride()
    return tuple(compute_elementwise_output_strides(operand))


def empty_gradient(operand: Tensor) -> Tensor:
    """An uninitialised gradient."""
    return with_huge_pages(operand.new_empty_strided(operand.shape, gradient_strides(operand)))


def zero_gradient(operand: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros that are laid out as an operand, to which the parts of its gradient are added in a dtype."""
    return with_huge_pages(torch.empty_like(operand, dtype=dtype)).zero_()


def as_gradient(found: Tensor, operand: Tensor) -> Tensor:
    """`found`, summed to the shape of its operand, in its dtype and with the strides of `gradient_strides`.

    It is copied only if its dtype is another one, or its stride along an axis of more than one element.
    """
    if found.numel() != operand.numel():
        ahead = found.ndim - operand.ndim
        summed = [axis for axis, size in enumerate(found.shape) if axis < ahead or size != operand.shape[axis - ahead]]
        found = torch.sum(found, summed)
    if found.shape != operand.shape:
        found = torch.reshape(found, operand.shape)
    strides = gradient_strides(operand)
    if found.dtype == operand.dtype and found.stride() == strides:
        return found
    is_laid_out = all(size == 1 or own == other for size, own, other in zip(found.shape, found.stride(), strides))
    if found.dtype == operand.dtype and is_laid_out:
        return torch.as_strided(found, operand.shape, strides)
    return empty_gradient(operand).copy_(found)


def without_overlap(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if elements share memory otherwise than along an axis that is expanded."""
    axes = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1 and stride > 0]
    for i, (stride, _) in enumerate(axes):
        inner = (other for j, other in enumerate(axes) if other[0] < stride or (other[0] == stride and j > i))
        if stride <= sum(other * (size - 1) for other, size in inner):
            return tensor.contiguous()
    return tensor


def repeated(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A result in a shape to which it broadcasts. If it has another one it is copied, so that callers may change it."""
    return tensor if tensor.shape == shape else tensor.expand(shape).clone(memory_format=torch.contiguous_format)


def is_negated(argument: Any) -> bool:
    """Whether the memory of a tensor holds the negatives of its values, as that of `z.conj().imag`.

    Kernels and compiled code read memory alone.
    """
    return isinstance(argument, Tensor) and argument.is_neg()


def without_negation(argument: Any) -> Any:
    """The argument, or a copy of a tensor whose memory holds the negatives of its values."""
    return argument.resolve_neg() if is_negated(argument) else argument
