"""The same values in other layouts."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def strided(tensor: Tensor, how: str) -> Tensor:
    """The tensor in a layout. If "expanded", its first entry along the first axis takes the place of the others."""
    if how == "transposed":
        backwards = tuple(reversed(range(tensor.ndim)))
        return tensor.permute(backwards).contiguous().permute(backwards)
    if how == "sliced":
        if tensor.ndim == 0:
            return tensor
        wide = tensor.new_full([2 * size for size in tensor.shape], float("nan"))
        view = wide[tuple(slice(0, 2 * size, 2) for size in tensor.shape)]
        return view.copy_(tensor)
    assert how == "expanded"
    return tensor[:1].expand(tensor.shape) if tensor.ndim else tensor


def odd_where_single(tensor: Tensor) -> Tensor:
    """The same values, with strides along axes of size 1 that a contiguous tensor does not have."""
    return tensor.as_strided(tensor.shape, [7 if size == 1 else s for size, s in zip(tensor.shape, tensor.stride())])


def channels_last(tensor: Tensor) -> Tensor:
    """The first axis but one varies fastest, as that of channels does in PyTorch's layout for images."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if tensor.ndim > 1 else tensor


def offset(tensor: Tensor) -> Tensor:
    """The values begin inside of their storage."""
    storage = tensor.new_empty(tensor.numel() + 3)
    return storage[3:].view(tensor.shape).copy_(tensor)


def negated(tensor: Tensor) -> Tensor:
    """Memory holds the negative numbers, and a bit of the tensor says so."""
    return torch._neg_view(-tensor) if tensor.is_floating_point() else tensor


def has_own_memory(result: Tensor, given: Iterable[Any]) -> bool:
    """Whether no two elements of a result share a place in memory, and none shares its storage with a given tensor."""
    axes = sorted((stride, size) for stride, size in zip(result.stride(), result.shape) if size > 1)
    reached = 0  # by all smaller strides
    for stride, size in axes if result.numel() else ():
        if stride <= reached:
            return False
        reached += stride * (size - 1)
    storages = {one.untyped_storage().data_ptr() for one in given if isinstance(one, Tensor) and one.numel()}
    return result.numel() == 0 or result.untyped_storage().data_ptr() not in storages
