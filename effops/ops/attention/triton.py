"""Attention by Triton kernels: bring calls into the layout of the kernels, and gradients back from it.

The kernels of scaled dot products take four axes (batch, heads, rows, columns), with stride 0 where an operand
broadcasts. An operand whose batch axes do not collapse into batch and heads is copied.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks.cutting import Block, block_extents, broadcast_slice, sizes
from effops.blocks.pairs import Scores
from effops.blocks.plan import Plan, Slices
from effops.dispatch.custom_op import Gradients
from effops.numerics.layout import as_gradient
from effops.ops.attention.call import AttentionCall, LogSparseCall, empty, given, matrix
from effops.ops.attention.variants import operands_of_pairs
from effops.ops.densities.triton import stored_dtype

KERNEL_BYTES = 2**24  # size of the additive scores that kernels compute at once


def forward(call: AttentionCall) -> Tensor:
    from effops.kernels import attention as kernels

    out = empty(call, stored_dtype(call.dtype, call.device))
    kernels.forward(_inputs(call), out.view(*_outer(call), *call.shape[-2:]))
    return out.to(call.dtype)


def backward(dout: Tensor, call: AttentionCall, wanted: Sequence[bool]) -> Gradients:
    from effops.kernels import attention as kernels

    dquery, dkey, *dvalue = (
        _empty(tensor, (*_outer(call), *tensor.shape[-2:]), call.arithmetic) if is_wanted else None
        for tensor, is_wanted in zip((*call.scored, *given(call.value)), wanted)
    )
    dmask = _empty_dmask(call) if wanted[2 + len(dvalue)] else None
    upstream = dout.reshape(*_outer(call), *call.shape[-2:])
    gradients = dquery, dkey, dvalue[0] if dvalue else None, dmask
    kernels.backward(_inputs(call), upstream, *gradients)
    found = dquery, dkey, *dvalue, dmask, *(None for _ in given(call.seed))
    return [
        None if gradient is None else _restored(call, gradient, tensor)
        for gradient, tensor in zip(found, call.tensors, strict=True)
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


def _inputs(call: AttentionCall) -> Any:
    """The operands and settings of the call, as the kernels take them."""
    from effops.kernels.attention_tiles import AttentionInputs

    query, key = (_four_axes(call, tensor) for tensor in call.scored)
    value = None if call.value is None else _four_axes(call, call.value)
    mask = call.mask.expand(call.plan.shape).reshape(*_outer(call), *call.plan.shape[-2:]) if call.masked else None
    seed = torch.full((1,), call.drawn_seed, dtype=torch.int64, device=call.device) if call.dropout_p else None
    settings = call.factor, call.diagonal, call.dropout_p, torch.get_float32_matmul_precision()
    return AttentionInputs(call.output, query, key, value, mask, seed, *settings)


def _empty_dmask(call: AttentionCall) -> Tensor:
    """An uninitialised gradient of a mask. An axis over which the kernel sums has size 1."""
    outer = call.shape[:-3]
    sizes = (1,) * (len(outer) + 3 - call.mask.ndim) + tuple(call.mask.shape)
    varies = any(size != 1 for size in sizes[: len(outer)])
    shape = (math.prod(outer) if varies else 1, *sizes[len(outer) :])
    return _empty(call.mask, shape, call.arithmetic, call.arithmetic)


def _empty(tensor: Tensor, shape: Sequence[int], wide: torch.dtype, stored: torch.dtype | None = None) -> Tensor:
    """An uninitialised gradient of that shape. Wide if a sum follows, else a view of one laid out as the tensor."""
    if math.prod(shape) != tensor.numel():
        return tensor.new_empty(shape, dtype=wide)
    return torch.empty_like(tensor, dtype=stored or stored_dtype(tensor.dtype, tensor.device)).reshape(shape)


class AdditiveScores(Scores):
    """Additive scores by kernels, as `Scores`. Blocks are larger than a cache."""

    def __init__(
        self, plan: Plan, query: Tensor, key: Tensor, weight: Tensor, arithmetic: torch.dtype, wanted: Sequence[bool]
    ) -> None:
        from effops.kernels import additive

        self.kernels = additive
        self.operands = (query, key, weight)
        extents = block_extents(
            plan, query.shape[-1], arithmetic.itemsize, pair_bytes=KERNEL_BYTES, target_columns=4096
        )
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
        shape = self._sizes(block)
        target = out.view(shape) if out.is_contiguous() else out.new_empty(shape)
        query, key, weight = self._operands(block)
        self.kernels.scores(query, key, weight, target)
        if not out.is_contiguous():
            out.copy_(target.view(out.shape))

    def pull_back(self, block: Block, weight: Tensor, evaluated: None = None) -> None:
        query, key, factor = self._operands(block)
        dquery, dkey, dfactor = (
            None
            if total is None
            else torch.empty_like(operand, dtype=self.arithmetic, memory_format=torch.contiguous_format)
            for total, operand in zip(self.totals, (query, key, factor))
        )
        upstream = weight.reshape(self._sizes(block))
        self.kernels.backward(query, key, factor, upstream, dquery, dkey, dfactor)
        for total, gradient, axes in zip(self.totals, (dquery, dkey, dfactor), self._slices(block)):
            if total is not None and gradient is not None:
                target = broadcast_slice(total, axes)
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

    def _operands(self, block: Block) -> list[Tensor]:
        """The operands query (batch, rows, D), key (batch, columns, D) and weight (batch, D) of a block."""
        batch, rows, columns = self._sizes(block)
        return [
            broadcast_slice(view, axes).expand(*sizes(axes), view.shape[-1]).reshape(*shape, view.shape[-1])
            for view, axes, shape in zip(self.views, self._slices(block), ((batch, rows), (batch, columns), (batch,)))
        ]


def additive_scores(call: AttentionCall, wanted: Sequence[bool]) -> AdditiveScores:
    """The additive scores of a call by kernels, and the gradients that `wanted` asks for."""
    query, key, weight = operands_of_pairs(call)
    return AdditiveScores(call.plan, query, key, weight, call.arithmetic, wanted)


def log_sparse(call: LogSparseCall) -> Tensor:
    from effops.kernels import log_sparse as kernels

    out = empty(call, stored_dtype(call.dtype, call.device))
    query, key, value = call.matrices
    kernels.forward(query, key, value, matrix(out), _scale(call), local=call.local, restart=call.restart)
    return out.to(call.dtype)


def log_sparse_backward(dout: Tensor, call: LogSparseCall, wanted: Sequence[bool]) -> Gradients:
    from effops.kernels import log_sparse as kernels

    query, key, value = call.matrices
    dquery, dkey, dvalue = (
        _empty(tensor, operand.shape, call.arithmetic) if is_wanted else None
        for tensor, operand, is_wanted in zip(call.tensors, (query, key, value), wanted)
    )
    settings: dict[str, Any] = {"local": call.local, "restart": call.restart}
    kernels.backward(query, key, value, matrix(dout), dquery, dkey, dvalue, _scale(call), **settings)
    return [
        None if own is None else as_gradient(own.view(*call.batch, *tensor.shape[-2:]), tensor)
        for own, tensor in zip((dquery, dkey, dvalue), call.tensors)
    ]


def _scale(call: LogSparseCall) -> Tensor:
    return torch.full((1,), call.factor, dtype=call.arithmetic, device=call.device)
