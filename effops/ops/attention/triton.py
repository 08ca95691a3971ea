"""Attention by Triton kernels: a call as the operands of `effops.kernels.attention`, with gradients of its own shapes.

The kernels take four axes (batch, heads, rows, columns), with stride 0 where an operand broadcasts. An operand whose
batch axes do not collapse into these is copied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks.plan import Shape
from effops.dispatch.custom_op import Gradients
from effops.dispatch.op import Op
from effops.dispatch.requirements import on_cuda, requires_triton
from effops.ops.attention.call import Call, Kind, taken_apart
from effops.ops.attention.variants import add_bound, predicted
from effops.ops.densities.triton import stored_dtype


def add(op: Op, kind: Kind, reduced: str) -> None:
    """Add the variant triton to the op of the scores, the weights or the sums of scaled dot products."""
    add_bound(
        op,
        kind,
        reduced,
        "triton",
        _forward,
        _backward,
        empty=lambda call: call.mask.new_empty(call.shape, dtype=call.dtype),
        empty_gradients=lambda call: [tensor.new_empty(tensor.shape) for tensor in call.tensors],
        cost=functools.partial(predicted, kind, function=torch.no_grad()(functools.partial(_forward, rehearsed=True))),
        requires=[requires_triton],
        automatic=on_cuda,
    )


def _forward(kind: Kind, call: Call, *, rehearsed: bool = False) -> Tensor:
    query, key = (_four_axes(call, tensor) for tensor in call.scored)
    mask = _mask(call)
    value = None if call.value is None else _four_axes(call, call.value)
    out = call.mask.new_empty(call.shape, dtype=stored_dtype(call.dtype, call.device))
    if not rehearsed:
        from effops.kernels import attention as kernels

        target = out.view(*_outer(call), *call.shape[-2:])
        if value is None:
            run = kernels.scores if call.reduced == "scores" else kernels.weights
            run(query, key, mask, target, **_settings(kind, call))
        else:
            kernels.attention(query, key, value, mask, _seed(call), target, **_settings(kind, call))
    return out.to(call.dtype)


def _backward(kind: Kind, dout: Tensor, call: Call, wanted: Sequence[bool]) -> Gradients:
    from effops.kernels import attention as kernels

    wants_scored, wants_value, wants_mask, _ = taken_apart(call.reduced, wanted)
    upstream = dout.reshape(*_outer(call), *call.shape[-2:])

    def gradient(tensor: Tensor, is_wanted: bool) -> Tensor | None:
        """In four axes; wide if it is yet to be summed."""
        shape = (*_outer(call), *tensor.shape[-2:])
        summed = math.prod(shape) != tensor.numel()
        dtype = call.arithmetic if summed else stored_dtype(tensor.dtype, call.device)
        return tensor.new_empty(shape, dtype=dtype) if is_wanted else None

    dquery, dkey = (gradient(tensor, is_wanted) for tensor, is_wanted in zip(call.scored, wants_scored))
    dvalue = None if call.value is None else gradient(call.value, bool(wants_value))
    dmask = call.mask.new_empty(_mask_sizes(call), dtype=call.arithmetic) if wants_mask else None
    query, key = (_four_axes(call, tensor) for tensor in call.scored)
    mask, settings = _mask(call), _settings(kind, call)
    if call.value is None:
        run = kernels.backward_scores if call.reduced == "scores" else kernels.backward_weights
        run(query, key, mask, upstream, dquery, dkey, dmask, **settings)
        gradients = [dquery, dkey, dmask]
    else:
        value, seed = _four_axes(call, call.value), _seed(call)
        kernels.backward_attention(query, key, value, mask, seed, upstream, dquery, dkey, dvalue, dmask, **settings)
        gradients = [dquery, dkey, dvalue, dmask, None]
    return [
        None if one is None else _restored(call, one, tensor)
        for one, tensor in zip(gradients, call.tensors, strict=True)
    ]


def _restored(call: Call, gradient: Tensor, tensor: Tensor) -> Tensor:
    """A gradient in four axes, in the shape and dtype of its operand."""
    outer = list(call.shape[:-3])
    outer = outer if gradient.shape[0] == math.prod(outer) else [1] * len(outer)
    axes = (*outer, gradient.shape[1], *gradient.shape[2:])
    return (
        gradient.view(axes[len(axes) - max(tensor.ndim, len(call.shape)) :]).sum_to_size(tensor.shape).to(tensor.dtype)
    )


def _outer(call: Call) -> tuple[int, int]:
    """Batch and heads."""
    batch = call.shape[:-2]
    return math.prod(batch[:-1]), math.prod(batch[-1:])


def _four_axes(call: Call, tensor: Tensor) -> Tensor:
    return tensor.expand(*call.shape[:-2], *tensor.shape[-2:]).reshape(*_outer(call), *tensor.shape[-2:])


def _mask(call: Call) -> Tensor | None:
    return call.mask.expand(call.plan.shape).reshape(*_outer(call), *call.plan.shape[-2:]) if call.masked else None


def _mask_sizes(call: Call) -> Shape:
    """The shape of the gradient of a mask: 1 along an axis over which it is summed."""
    outer = call.shape[:-3]
    sizes = (1,) * (len(outer) + 3 - call.mask.ndim) + tuple(call.mask.shape)
    varies = any(size != 1 for size in sizes[: len(outer)])
    return math.prod(outer) if varies else 1, *sizes[len(outer) :]


def _seed(call: Call) -> Tensor | None:
    if not call.dropout_p or call.seed is None:
        return None
    return torch.full((1,), call.drawn_seed, dtype=torch.int64, device=call.device)


def _settings(kind: Kind, call: Call) -> dict[str, Any]:
    settings = {
        "scale": kind.scale(call),
        "causal": call.is_causal,
        "precision": torch.get_float32_matmul_precision(),
    }
    return settings if call.value is None else {**settings, "dropout_p": call.dropout_p}
