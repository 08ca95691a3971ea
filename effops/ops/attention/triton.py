"""Attention by Triton kernels: bring calls into the layout of the kernels, and gradients back from it.

The kernels of scaled dot products take four axes (batch, heads, rows, columns), with stride 0 where an operand
broadcasts. An operand whose batch axes do not collapse into batch and heads is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks.pairs import Scores
from effops.blocks.plan import Plan, Slices
from effops.blocks.tiling import Block, cut, part, sizes
from effops.dispatch.custom_op import Gradients, add_kernels
from effops.dispatch.op import Op
from effops.numerics.layout import as_gradient
from effops.ops.attention.call import AttentionCall, Kind, split_arguments
from effops.ops.attention.variants import custom_op
from effops.ops.densities.triton import stored_dtype

KERNEL_BYTES = 2**24  # size of the additive scores that kernels compute at once


def add(op: Op, kind: Kind, output: str) -> None:
    """Add the variant triton to the op of the scores, the weights or the sums of scaled dot products."""
    custom = custom_op(
        op,
        kind,
        output,
        "triton",
        _forward,
        _backward,
        empty=lambda call: call.mask.new_empty(call.shape, dtype=call.dtype),
    )
    add_kernels(op, custom)


def _forward(kind: Kind, call: AttentionCall) -> Tensor:
    from effops.kernels import attention as kernels

    query, key = (_four_axes(call, tensor) for tensor in call.scored)
    mask = _mask(call)
    value = None if call.value is None else _four_axes(call, call.value)
    out = call.mask.new_empty(call.shape, dtype=stored_dtype(call.dtype, call.device))
    target = out.view(*_outer(call), *call.shape[-2:])
    if value is None:
        run = kernels.scores if call.output == "scores" else kernels.weights
        run(query, key, mask, target, **_settings(kind, call))
    else:
        kernels.attention(query, key, value, mask, _seed(call), target, **_settings(kind, call))
    return out.to(call.dtype)


def _backward(kind: Kind, dout: Tensor, call: AttentionCall, wanted: Sequence[bool]) -> Gradients:
    from effops.kernels import attention as kernels

    wants_scored, wants_value, wants_mask, _ = split_arguments(call.output, wanted)
    upstream = dout.reshape(*_outer(call), *call.shape[-2:])

    def gradient(tensor: Tensor, is_wanted: bool) -> Tensor | None:
        """With four axes. Wide if a sum follows, else a view of a gradient that is laid out as the tensor."""
        shape = (*_outer(call), *tensor.shape[-2:])
        if not is_wanted:
            return None
        if math.prod(shape) != tensor.numel():
            return tensor.new_empty(shape, dtype=call.arithmetic)
        return torch.empty_like(tensor, dtype=stored_dtype(tensor.dtype, call.device)).reshape(shape)

    dquery, dkey = (gradient(tensor, is_wanted) for tensor, is_wanted in zip(call.scored, wants_scored))
    dvalue = None if call.value is None else gradient(call.value, bool(wants_value))
    dmask = _empty_dmask(call) if wants_mask else None
    query, key = (_four_axes(call, tensor) for tensor in call.scored)
    mask, settings = _mask(call), _settings(kind, call)
    if call.value is None:
        run = kernels.backward_scores if call.output == "scores" else kernels.backward_weights
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


def _restored(call: AttentionCall, gradient: Tensor, tensor: Tensor) -> Tensor:
    """A gradient with four axes, brought to the shape and dtype of its operand."""
    outer = list(call.shape[:-3])
    outer = outer if gradient.shape[0] == math.prod(outer) else [1] * len(outer)
    axes = (*outer, gradient.shape[1], *gradient.shape[2:])
    return as_gradient(gradient.view(axes[len(axes) - max(tensor.ndim, len(call.shape)) :]), tensor)


def _outer(call: AttentionCall) -> tuple[int, int]:
    """The sizes of the axes batch and heads."""
    batch = call.shape[:-2]
    return math.prod(batch[:-1]), math.prod(batch[-1:])


def _four_axes(call: AttentionCall, tensor: Tensor) -> Tensor:
    return tensor.expand(*call.shape[:-2], *tensor.shape[-2:]).reshape(*_outer(call), *tensor.shape[-2:])


def _mask(call: AttentionCall) -> Tensor | None:
    return call.mask.expand(call.plan.shape).reshape(*_outer(call), *call.plan.shape[-2:]) if call.masked else None


def _empty_dmask(call: AttentionCall) -> Tensor:
    """An uninitialised gradient of a mask. An axis over which the kernel sums has size 1."""
    outer = call.shape[:-3]
    sizes = (1,) * (len(outer) + 3 - call.mask.ndim) + tuple(call.mask.shape)
    varies = any(size != 1 for size in sizes[: len(outer)])
    shape = math.prod(outer) if varies else 1, *sizes[len(outer) :]
    if math.prod(shape) != call.mask.numel():
        return call.mask.new_empty(shape, dtype=call.arithmetic)
    return torch.empty_like(call.mask, dtype=call.arithmetic).reshape(shape)


def _seed(call: AttentionCall) -> Tensor | None:
    if not call.dropout_p or call.seed is None:
        return None
    return torch.full((1,), call.drawn_seed, dtype=torch.int64, device=call.device)


def _settings(kind: Kind, call: AttentionCall) -> dict[str, Any]:
    settings = {
        "scale": kind.scale(call),
        "causal": call.is_causal,
        "precision": torch.get_float32_matmul_precision(),
    }
    return settings if call.value is None else {**settings, "dropout_p": call.dropout_p}


class AdditiveScores(Scores):
    """Additive scores by kernels, as `Scores`. Blocks are larger than a cache."""

    def __init__(
        self, plan: Plan, query: Tensor, key: Tensor, weight: Tensor, arithmetic: torch.dtype, wanted: Sequence[bool]
    ) -> None:
        from effops.kernels import additive

        self.kernels = additive
        self.operands = (query, key, weight)
        extents = cut(plan, query.shape[-1], arithmetic.itemsize, pair_bytes=KERNEL_BYTES, width=4096)
        super().__init__(plan, arithmetic, extents)
        self.axes = (plan.batch + plan.rows, plan.batch + plan.columns, plan.batch)
        self.views = [
            plan.view(operand, axes, trailing=1, expand=False) for operand, axes in zip(self.operands, self.axes)
        ]
        self.sums = [
            torch.zeros_like(operand, dtype=arithmetic) if is_wanted else None
            for operand, is_wanted in zip(self.operands, wanted)
        ]
        self.totals = [
            None if sums is None else plan.view(sums, axes, trailing=1, expand=False)
            for sums, axes in zip(self.sums, self.axes)
        ]

    def evaluate(self, block: Block, out: Tensor | None) -> None:
        if out is None:
            return
        target = self._target(block, out)
        self.kernels.scores(*self._operands(block), target)
        if target.untyped_storage() is not out.untyped_storage():
            out.copy_(target.view(out.shape))

    def pull_back(self, block: Block, weight: Tensor, evaluated: None = None) -> None:
        operands = self._operands(block)
        found = [
            None
            if total is None
            else torch.empty_like(operand, dtype=self.arithmetic, memory_format=torch.contiguous_format)
            for total, operand in zip(self.totals, operands)
        ]
        self.kernels.backward(*operands, weight.reshape(self._sizes(block)), *found)
        for total, gradient, axes in zip(self.totals, found, self._slices(block)):
            if total is not None and gradient is not None:
                target = part(total, axes)
                target += gradient.view(*sizes(axes), gradient.shape[-1]).sum_to_size(target.shape)

    def gradients(self) -> tuple[Tensor | None, ...]:
        return tuple(
            None if sums is None else sums.to(operand.dtype) for sums, operand in zip(self.sums, self.operands)
        )

    def _slices(self, block: Block) -> tuple[Slices, Slices, Slices]:
        return block.batch + block.rows, block.batch + block.columns, block.batch

    def _sizes(self, block: Block) -> tuple[int, ...]:
        """The sizes of a block that has three axes: batch, rows and columns."""
        return tuple(math.prod(sizes(axes)) for axes in block)

    def _target(self, block: Block, out: Tensor) -> Tensor:
        """`out` viewed as batch, rows and columns, or memory of that shape if `out` is not contiguous."""
        shape = self._sizes(block)
        return out.view(shape) if out.is_contiguous() else out.new_empty(shape)

    def _operands(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """The operands query (batch, rows, D), key (batch, columns, D) and weight (batch, D) of a block."""
        batch, rows, columns = self._sizes(block)
        dimension = self.views[0].shape[-1]
        query, key, weight = (
            part(view, axes).expand(*sizes(axes), dimension) for view, axes in zip(self.views, self._slices(block))
        )
        return (
            query.reshape(batch, rows, dimension),
            key.reshape(batch, columns, dimension),
            weight.reshape(batch, dimension),
        )


def log_sparse(tensors: Sequence[Tensor], out: Tensor, scale: Tensor, local: int, restart: int | None) -> Tensor:
    """Log-sparse attention of query, key and value, in the layout and dtype of `out`."""
    from effops.kernels import log_sparse as kernels

    query, key, value = matrices(tensors)
    stored = out.to(stored_dtype(out.dtype, out.device))
    kernels.forward(query, key, value, _matrix(stored), scale, local=local, restart=restart)
    return stored.to(out.dtype)


def log_sparse_backward(
    dout: Tensor, tensors: Sequence[Tensor], scale: Tensor, local: int, restart: int | None, wanted: Sequence[bool]
) -> Gradients:
    """The gradients of query, key and value that `wanted` asks for."""
    from effops.kernels import log_sparse as kernels

    operands = matrices(tensors)

    def empty(tensor: Tensor, operand: Tensor) -> Tensor:
        if tensor.numel() != operand.numel():  # a sum over shared axes follows, before which it is not rounded
            return operand.new_empty(operand.shape, dtype=scale.dtype)
        return _matrix(torch.empty_like(tensor, dtype=stored_dtype(tensor.dtype, tensor.device)))

    found = [
        empty(tensor, operand) if is_wanted else None for tensor, operand, is_wanted in zip(tensors, operands, wanted)
    ]
    (query, key, value), (dquery, dkey, dvalue) = operands, found
    kernels.backward(query, key, value, _matrix(dout), dquery, dkey, dvalue, scale, local=local, restart=restart)
    batch = dout.shape[:-2]
    return [
        None if own is None else as_gradient(own.view(*batch, *tensor.shape[-2:]), tensor)
        for own, tensor in zip(found, tensors)
    ]


def matrices(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with one batch axis. It merges the axes of the shape to which their batch axes broadcast."""
    batch = torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors))
    return [_matrix(tensor.expand(*batch, *tensor.shape[-2:])) for tensor in tensors]


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-2]), *tensor.shape[-2:])
