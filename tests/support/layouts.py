"""The same values in other layouts."""

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
