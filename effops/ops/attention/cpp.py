"""Attention by C++ kernels: operands as addresses and strides, and gradients back from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks.plan import Shape
from effops.dispatch.custom_op import Gradients
from effops.numerics.layout import as_gradient, without_negation
from effops.numerics.pages import with_huge_pages
from effops.numerics.precision import arithmetic_dtype, converted, mixes_float64
from effops.numerics.shapes import broadcast_shapes, may_be_open
from effops.ops.attention.call import AttentionCall, LogSparseCall, empty, given, join_arguments, split_arguments
from effops.ops.attention.variants import ordered_empty
from effops.pytorch.calls import FakeTensor

AXES = 8  # of a batch, at most, as in C++
OUTPUTS = "scores", "weights", "sums"  # as `Output` in C++
NO_MASK, BOOLEANS, NUMBERS = range(3)  # as `Mask` in C++
DEPTH = 128  # features that are summed at a time, as in C++
OFFSETS = 128  # that are summed at a time, as in C++
STATISTICS = 3  # of a query, which backward finds first


def obstacle(call: AttentionCall) -> str:
    """Why the kernels cannot take a call; empty if they can."""
    if mixes_float64((*call.scored, *given(call.value), *([call.mask] if call.masked else []))):
        return "needs float64 for all operands or for none"
    if call.value is not None and call.value.shape[-1] > DEPTH and call.dtype.itemsize == 2:
        # Of more, sums are added up where the result is.
        return f"adds up at most {DEPTH} features of 16 bits, got {call.value.shape[-1]}"
    return _obstacle(len(call.shape) - 2)


def _obstacle(axes: int) -> str:
    """Why the kernels cannot take so many batch axes; empty if they can."""
    return f"takes {AXES} batch axes at most, got {axes}" if axes > AXES else ""


def is_faster(call: AttentionCall) -> bool:
    """Whether the kernels are faster than blocks. Of weights of 16 bits they compute all scores twice."""
    return call.output != "weights" or call.dtype.itemsize > 2


def fills_axes(arguments: Sequence[Any], core_dims: Sequence[int]) -> bool:
    """Whether an operand has as many batch axes as the kernels take, so that those of a batch may be too many."""
    return any(operand.ndim - dims >= AXES for operand, dims in zip(arguments, core_dims))


def forward(call: AttentionCall) -> Tensor:
    out = ordered_empty(call)
    if out.numel():
        _run(call, False, out=out)
    return out


def backward(dout: Tensor, call: AttentionCall, wanted: Sequence[bool]) -> Gradients:
    """The gradients of the tensors of a call that `wanted` asks for."""
    (query, key, *weight), batch = call.scored, tuple(call.plan.shape[:-2])
    (wants_query, wants_key, *wants_weight), wants_value, wants_mask, _ = split_arguments(call.output, wanted)
    keyed = tuple(1 if is_shared else size for is_shared, size in zip(_shared(call), batch))
    real = arithmetic_dtype(call.dtype)
    gradients = {
        "dquery": _empty(query, batch, real) if wants_query else None,
        "dkey": _empty(key, keyed, real) if wants_key else None,
        "dweight": _empty_parts(call) if any(wants_weight) else None,
        "dvalue": _empty(call.value, keyed, real) if call.value is not None and wants_value else None,
        "dmask": _empty(call.mask, call.mask.shape[:-2], real) if wants_mask else None,
    }
    if call.plan.numel(call.plan.order):
        statistics = dout.new_empty((*batch, query.shape[-2], STATISTICS), dtype=real)
        _run(call, True, dout=without_negation(dout), statistics=statistics, **gradients)
    else:
        _zero(gradients.values())
    dquery, dkey, dweight, dvalue, dmask = gradients.values()
    if dweight is not None:
        dweight = dweight.sum(-2)[..., None, None, :]
    found = join_arguments((dquery, dkey, *(dweight for _ in weight)), [dvalue for _ in given(call.value)], dmask)
    seeds = [None for _ in given(call.seed)]
    return [
        None if own is None else as_gradient(own, tensor)
        for own, tensor in zip((*found, *seeds), call.tensors, strict=True)
    ]


def _shared(call: AttentionCall) -> list[bool]:
    """For each batch axis, whether neither keys nor values vary along it."""
    return [axis not in call.plan.batch for axis in range(len(call.plan.shape) - 2)]


def _empty(tensor: Tensor, batch: Shape, real: torch.dtype) -> Tensor:
    """An uninitialised gradient with these batch axes, laid out as the tensor if that has the same."""
    shape = (*batch, *tensor.shape[-2:])
    if tuple(tensor.shape) == shape:
        return with_huge_pages(torch.empty_like(tensor, dtype=real))
    return with_huge_pages(tensor.new_empty(shape, dtype=real))


def _zero(gradients: Iterable[Tensor | None]) -> None:
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()


def _empty_parts(call: AttentionCall) -> Tensor:
    """For the gradient of the weight of additive scores, a part for each block of queries."""
    from effops.kernels import library

    query, _, weight = call.scored
    real = arithmetic_dtype(call.dtype)
    blocks = -(-query.shape[-2] // library.ROWS[real])
    return weight.new_empty((*call.plan.shape[:-2], blocks, weight.shape[-1]), dtype=real)


def _run(call: AttentionCall, is_backward: bool, **results: Tensor | None) -> None:
    """Run the kernel in one direction. On fake tensors the workspace is allocated, and nothing runs."""
    from effops.kernels import library

    real = arithmetic_dtype(call.dtype)
    kernels = library.library(real)
    query, key, *weight = map(without_negation, call.scored)
    weight = [converted(one, real) for one in weight]
    operands = {"query": query, "key": key, **results}
    operands["value"] = None if call.value is None else without_negation(call.value)
    operands["mask"] = without_negation(call.mask) if call.masked else None
    native = library.AttentionCall()
    batch = call.plan.shape[:-2]
    native.of_keys = library.Axes.of(batch, _shared(call))
    own = (1,) * (len(call.plan.shape) - call.mask.ndim) + tuple(call.mask.shape)
    native.of_mask = library.Axes.of(batch, [size == 1 for size in own[:-2]])
    native.queries, native.keys, native.depth = *call.plan.shape[-2:], query.shape[-1]
    native.features = 0 if call.value is None else call.value.shape[-1]
    native.output = OUTPUTS.index(call.output)
    native.mask_is = (BOOLEANS if call.mask.dtype == torch.bool else NUMBERS) if call.masked else NO_MASK
    native.may_exclude = call.masked or call.diagonal is not None
    native.diagonal = native.keys if call.diagonal is None else call.diagonal
    native.factor, native.dropped = 1 if weight else call.factor, call.dropout_p
    native.seed = call.drawn_seed if call.dropout_p else 0
    native.threads = library.threads_for(kernels.items(native, is_backward))
    workspace = query.new_empty(native.threads * kernels.workspace(native), dtype=real)
    if isinstance(workspace, FakeTensor):
        return
    for name, operand in operands.items():
        if operand is not None:
            setattr(native, name, library.Batched.of(operand, _strides(operand)))
    for one in weight:
        native.weight = library.Batched.of(one, _strides_of_weight(one))
    native.workspace = workspace.data_ptr()
    kernels.run(native, is_backward)


def _strides(operand: Tensor) -> list[int]:
    """The strides along all batch axes, rows and columns; 0 where the operand does not vary."""
    own = _own_strides(operand)
    return [0] * (AXES + 2 - len(own)) + own


def _strides_of_weight(weight: Tensor) -> list[int]:
    """Those of one row, which all pairs of a batch entry share."""
    *batch, coordinate = _own_strides(weight)
    return [0] * (AXES - len(batch[:-2])) + batch[:-2] + [0, coordinate]


def _own_strides(operand: Tensor) -> list[int]:
    return [0 if size == 1 else stride for size, stride in zip(operand.shape, operand.stride())]


def log_sparse_obstacle(call: LogSparseCall) -> str:
    """Why the kernels cannot take a call over the log-sparse pattern; empty if they can."""
    if len({tensor.dtype for tensor in call.tensors}) > 1:
        return "needs operands of one dtype"
    if call.dtype.itemsize == 2:
        length = call.query.shape[-2]
        if may_be_open(length):
            return "needs to know the length where dtypes have 16 bits, which a trace may leave open"
        offsets = len(call.pattern.offsets(length))
        if offsets > OFFSETS:  # of more, sums are added up where the result is
            return f"adds up at most {OFFSETS} offsets of 16 bits, got {offsets}"
    return _obstacle(len(call.batch))


def log_sparse(call: LogSparseCall) -> Tensor:
    out = empty(call)
    if out.numel():
        _run_log_sparse(call, False, out=out)
    return out


def log_sparse_backward(dout: Tensor, call: LogSparseCall, wanted: Sequence[bool]) -> Gradients:
    batch, keyed = call.batch, _keyed(call)
    gradients = [
        _empty_rows(tensor, axes) if is_wanted else None
        for tensor, axes, is_wanted in zip(call.tensors, (batch, keyed, keyed), wanted)
    ]
    if math.prod(batch) * call.query.shape[-2]:
        real = arithmetic_dtype(call.dtype)
        statistics = dout.new_empty((*batch, call.query.shape[-2], STATISTICS), dtype=real)
        dquery, dkey, dvalue = gradients
        _run_log_sparse(
            call, True, dout=_with_whole_rows(dout), statistics=statistics, dquery=dquery, dkey=dkey, dvalue=dvalue
        )
    else:
        _zero(gradients)
    return [None if own is None else as_gradient(own, tensor) for own, tensor in zip(gradients, call.tensors)]


def _keyed(call: LogSparseCall) -> Shape:
    """The sizes of the batch axes, 1 where neither keys nor values vary."""
    own = tuple(broadcast_shapes(*(tensor.shape[:-2] for tensor in call.tensors[1:])))
    return (1,) * (len(call.batch) - len(own)) + own


def _empty_rows(tensor: Tensor, batch: Shape) -> Tensor:
    """As `_empty`; the features of a position lie one after another, as the kernel writes them."""
    are_whole = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    real = arithmetic_dtype(tensor.dtype)
    return _empty(tensor, batch, real) if are_whole else tensor.new_empty((*batch, *tensor.shape[-2:]), dtype=real)


def _with_whole_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where the features of a position do not lie one after another, as the kernel reads them."""
    tensor = without_negation(tensor)
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _run_log_sparse(call: LogSparseCall, is_backward: bool, **results: Tensor | None) -> None:
    """Run the kernel in one direction; on fake tensors nothing."""
    from effops.kernels import library

    query, key, value = map(_with_whole_rows, call.tensors)
    if isinstance(query, FakeTensor):
        return
    native, kernels = library.LogSparseCall(), library.library(arithmetic_dtype(call.dtype))
    is_shared = [size == 1 for size in _keyed(call)]
    native.of_keys = library.Axes.of(call.batch, is_shared)
    (native.length, native.depth), native.features = query.shape[-2:], value.shape[-1]
    native.take(call.pattern.offsets(native.length))
    native.factor = call.factor
    native.threads = library.threads_for(kernels.items(native, is_backward))
    for name, operand in {"query": query, "key": key, "value": value, **results}.items():
        if operand is not None:
            setattr(native, name, library.Batched.of(operand, _strides(operand)))
    kernels.run(native, is_backward)
