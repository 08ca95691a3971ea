"""Attention by C++ kernels: operands as addresses and strides, and gradients back from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks.plan import Shape
from effops.dispatch.custom_op import Gradients
from effops.numerics.layout import as_gradient, without_negation
from effops.numerics.pages import with_huge_pages
from effops.ops.attention.call import AttentionCall, given, split_arguments
from effops.ops.attention.variants import ordered_empty
from effops.pytorch import FakeTensor

AXES = 8  # of a batch, at most, as in C++
OUTPUTS = "scores", "weights", "sums"  # as `Output` in C++
NO_MASK, BOOLEANS, NUMBERS = range(3)  # as `Mask` in C++
STATISTICS = 3  # of a query, which backward finds first


def obstacle(call: AttentionCall) -> str:
    """Why the kernels cannot take a call; empty if they can."""
    tensors = (*call.scored, *given(call.value))
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        return "needs float32"
    if call.masked and call.mask.dtype not in (torch.bool, torch.float32):
        return f"needs a mask of booleans or float32, got {call.mask.dtype}"
    if len(call.shape) - 2 > AXES:
        return f"takes {AXES} batch axes at most, got {len(call.shape) - 2}"
    return ""


def forward(call: AttentionCall) -> Tensor:
    out = ordered_empty(call)
    if out.numel():
        _run(call, False, out=out)
    return out


def backward(dout: Tensor, call: AttentionCall, wanted: Sequence[bool]) -> Gradients:
    """The gradients of the tensors of a call that `wanted` asks for."""
    wants_scored, wants_value, wants_mask, _ = split_arguments(call.output, wanted)
    batch = call.plan.shape[:-2]
    keyed = tuple(1 if is_shared else size for is_shared, size in zip(_shared(call), batch))
    tensors = (*call.scored, *given(call.value), call.mask)
    outer = (batch, keyed, *(keyed for _ in given(call.value)), call.mask.shape[:-2])
    wants = (*wants_scored, *(bool(wants_value) for _ in given(call.value)), bool(wants_mask))
    found = [
        _empty(tensor, (*axes, *tensor.shape[-2:])) if is_wanted else None
        for tensor, axes, is_wanted in zip(tensors, outer, wants)
    ]
    if call.plan.numel(call.plan.order):
        dquery, dkey, *dvalue, dmask = found
        statistics = dout.new_empty((*batch, call.scored[0].shape[-2], STATISTICS))
        gradients = {"dquery": dquery, "dkey": dkey, "dvalue": dvalue[0] if dvalue else None, "dmask": dmask}
        _run(call, True, dout=without_negation(dout), statistics=statistics, **gradients)
    else:
        for gradient in found:
            if gradient is not None:
                gradient.zero_()
    gradients_of_tensors = [None if own is None else as_gradient(own, tensor) for own, tensor in zip(found, tensors)]
    return [*gradients_of_tensors, *(None for _ in given(call.seed))]


def _shared(call: AttentionCall) -> list[bool]:
    """For each batch axis, whether neither keys nor values vary along it."""
    return [axis not in call.plan.batch for axis in range(len(call.plan.shape) - 2)]


def _empty(tensor: Tensor, shape: Shape) -> Tensor:
    """An uninitialised gradient of that shape, laid out as the tensor if that has the same shape."""
    return with_huge_pages(torch.empty_like(tensor) if tuple(tensor.shape) == shape else tensor.new_empty(shape))


def _run(call: AttentionCall, is_backward: bool, **results: Tensor | None) -> None:
    """Run the kernel in one direction. On fake tensors the workspace is allocated, and nothing runs."""
    from effops.kernels import library

    query, key = map(without_negation, call.scored)
    operands: dict[str, Any] = {"query": query, "key": key, **results}
    if call.value is not None:
        operands["value"] = without_negation(call.value)
    if call.masked:
        operands["mask"] = without_negation(call.mask)
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
    native.factor, native.dropped = call.factor, call.dropout_p
    native.seed = call.drawn_seed if call.dropout_p else 0
    native.threads = library.threads_for(library.attention_items(native, is_backward))
    workspace = query.new_empty(native.threads * library.attention_workspace())
    if isinstance(workspace, FakeTensor):
        return
    for name, operand in operands.items():
        if operand is not None:
            setattr(native, name, library.Batched.of(operand, _strides(operand)))
    native.workspace = workspace.data_ptr()
    library.run_attention(native, is_backward)


def _strides(operand: Tensor) -> list[int]:
    """The strides along all batch axes, rows and columns; 0 where the operand does not vary."""
    own = [0 if size == 1 else stride for size, stride in zip(operand.shape, operand.stride())]
    return [0] * (AXES + 2 - len(own)) + own
