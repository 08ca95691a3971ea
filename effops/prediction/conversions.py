"""The operands that a CPU copies in another dtype, as measured with torch 2.13.

Element-wise operators compute in one dtype, and reductions in the dtype of their result. On a CPU they take copies of
operands that are not in it. A CUDA device converts numbers one by one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effops.pytorch import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

aten = torch.ops.aten
MASKED = {aten.where, aten.masked_fill, aten.masked_fill_}  # whose masks are not converted
UNTAGGED = {  # element-wise too, though PyTorch does not say so
    aten.eq_,
    aten.floor_divide,
    aten.floor_divide_,
    aten.ge_,
    aten.gt_,
    aten.le_,
    aten.lt_,
    aten.ne_,
}
REDUCTIONS = {
    aten.all,
    aten.any,
    aten.cumprod,
    aten.cumsum,
    aten.linalg_vector_norm,
    aten.mean,
    aten.nansum,
    aten.prod,
    aten.sum,
}


def converted_bytes(func: Any, args: Sequence[Any], result: Any) -> int:
    """The bytes of operands of a call that are copied in another dtype."""
    if not isinstance(result, Tensor):
        return 0
    if func.overloadpacket in REDUCTIONS:
        is_norm = args[0].is_complex() and not result.is_complex()  # its magnitudes are taken while it is read
        return 0 if is_norm else _copied_bytes(args[:1], result.dtype)
    if torch.Tag.pointwise not in func.tags and func.overloadpacket not in UNTAGGED:
        return 0
    operands: Sequence[Any] = [one for one in args if isinstance(one, (Tensor, float, int))]
    tensors = [one for one in operands if isinstance(one, Tensor)]
    if func.overloadpacket in MASKED:
        operands = tensors = [one for one in tensors if one.dtype is not torch.bool]
    if not tensors:
        return 0
    dtype = _dtype(operands, result)
    written = tensors[:1] if func._schema.is_mutable else []
    return _copied_bytes((*tensors, *written), dtype)


def _dtype(operands: Sequence[Any], result: Tensor) -> torch.dtype:
    """The dtype in which an element-wise operator computes: floats for a result in floats, whatever its operands."""
    _, dtype = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    return result.dtype if result.is_floating_point() and not (dtype.is_floating_point or dtype.is_complex) else dtype


def _copied_bytes(tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
    return sum(dtype.itemsize * one.numel() for one in tensors if one.dtype != dtype)
