"""Additive attention (Bahdanau): scores that no product of matrices gives, and the sums of values they weigh.

    score = sum_d weight_d tanh(query_d + key_d)

Source: Bahdanau, Cho, Bengio: Neural machine translation by jointly learning to align and translate, 2015.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks import softmax
from effops.blocks.additive import AdditiveScores
from effops.blocks.pairs import Scores
from effops.blocks.plan import Plan, Slices
from effops.blocks.tiling import Block, cut, part, row_blocks, sizes
from effops.dispatch.call import call
from effops.dispatch.requirements import on_cuda, requires_triton
from effops.ops.attention.call import Call, Form, rounded_by_autocast
from effops.ops.attention.variants import add_blocks, attention_op

KERNEL_BYTES = 2**24  # of the scores that kernels compute at once for a reduction
DENSE = torch.contiguous_format


def naive(query: Tensor, key: Tensor, weight: Tensor, scale: float, arithmetic: torch.dtype) -> Tensor:
    pairs = torch.tanh(query.to(arithmetic).unsqueeze(-2) + key.to(arithmetic).unsqueeze(-3))
    return (weight.to(arithmetic) * pairs).sum(-1)


class Additive:
    """sum_d weight_d tanh(query_d + key_d), as an `effops.ops.attention.call.Kind`."""

    operands: Mapping[str, int] = {"query": 2, "key": 2, "weight": 3}
    forms: Mapping[str, Form] = {"naive": naive}

    def scale(self, call: Call) -> float:
        return 1.0

    def blocks(self, call: Call, wanted: Sequence[bool]) -> Scores:
        held = softmax.HELD + (0 if call.value is None else call.value.shape[-1])
        weight = call.scored[2]
        return AdditiveScores(call.plan, *call.pairs, weight, call.arithmetic, wanted=wanted, held=held)


class _KernelScores:
    """The scores of one call by kernels, as `Scores`: of larger blocks than a cache holds."""

    def __init__(
        self, plan: Plan, query: Tensor, key: Tensor, weight: Tensor, arithmetic: torch.dtype, wanted: Sequence[bool]
    ) -> None:
        from effops.kernels import additive

        self.kernels = additive
        self.plan, self.arithmetic = plan, arithmetic
        self.operands = (query, key, weight)
        self.extents = cut(plan, query.shape[-1], arithmetic.itemsize, pair_bytes=KERNEL_BYTES, width=4096)
        self.axes = (plan.batch + plan.rows, plan.batch + plan.columns, plan.batch)
        self.views = [
            plan.view(operand, axes, trailing=1, expand=False) for operand, axes in zip(self.operands, self.axes)
        ]
        self.totals = [
            view.new_zeros(view.shape, dtype=arithmetic) if is_wanted else None
            for view, is_wanted in zip(self.views, wanted)
        ]

    def walk(self) -> Iterator[Block]:
        return itertools.chain.from_iterable(row_blocks(self.plan, self.extents))

    def evaluate(self, block: Block, out: Tensor | None) -> None:
        if out is None:
            return
        target = self._target(block, out)
        self.kernels.scores(*self._operands(block), target)
        if target.untyped_storage() is not out.untyped_storage():
            out.copy_(target.view(out.shape))

    def rehearse(self, block: Block, out: Tensor) -> None:
        self._target(block, out)
        self._operands(block)

    def pull_back(self, block: Block, weight: Tensor) -> None:
        operands = self._operands(block)
        found = [
            None if total is None else torch.empty_like(operand, dtype=self.arithmetic, memory_format=DENSE)
            for total, operand in zip(self.totals, operands)
        ]
        self.kernels.backward(*operands, weight.reshape(self._sizes(block)), *found)
        for total, gradient, axes in zip(self.totals, found, self._slices(block)):
            if total is not None and gradient is not None:
                target = part(total, axes)
                target += gradient.view(*sizes(axes), gradient.shape[-1]).sum_to_size(target.shape)

    def gradients(self) -> tuple[Tensor | None, ...]:
        return tuple(
            None if total is None else self.plan.gradient(total, operand, axes)
            for total, operand, axes in zip(self.totals, self.operands, self.axes)
        )

    def _slices(self, block: Block) -> tuple[Slices, Slices, Slices]:
        return block.batch + block.rows, block.batch + block.columns, block.batch

    def _sizes(self, block: Block) -> tuple[int, ...]:
        """Of a block as batch, rows and columns."""
        return tuple(math.prod(sizes(axes)) for axes in block)

    def _target(self, block: Block, out: Tensor) -> Tensor:
        """`out` as batch, rows and columns, or room for it."""
        shape = self._sizes(block)
        return out.view(shape) if out.is_contiguous() else out.new_empty(shape)

    def _operands(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """query (batch, rows, D), key (batch, columns, D) and weight (batch, D) of a block."""
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


class _InKernels(Additive):
    """The same kind, with the scores of blocks by kernels."""

    def blocks(self, call: Call, wanted: Sequence[bool]) -> Scores:
        return _KernelScores(call.plan, *call.pairs, call.scored[2], call.arithmetic, wanted)


def _requires_one_weight(call: Call) -> str:
    weight = call.scored[2]
    if all(size == 1 for size in weight.shape[-3:-1]):
        return ""
    return f"needs a weight for all pairs of a batch entry, (D,) or (*batch, 1, 1, D); got {tuple(weight.shape)}"


PREFERENCE = ("triton", "chunked", "compile", "torchscript", "naive")


def _scored(query: Tensor, key: Tensor, weight: Tensor) -> Any:
    return (query, key, weight), None, None, False, None, 0.0


def _summed(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, attn_mask: Tensor | None = None) -> Any:
    return (query, key, weight), value, attn_mask, False, None, 0.0


scores_op = attention_op(
    Additive(),
    "additive_attention_scores",
    "scores",
    arguments=_scored,
    preference=PREFERENCE,
)
op = attention_op(
    Additive(),
    "additive_attention",
    "sums",
    arguments=_summed,
    preference=PREFERENCE,
)
for of_kernels, reduced in ((scores_op, "scores"), (op, "sums")):
    requires = [requires_triton, _requires_one_weight]
    add_blocks(of_kernels, _InKernels(), reduced, "triton", requires=requires, automatic=on_cuda)


@scores_op.public
def additive_attention_scores(query: Tensor, key: Tensor, weight: Tensor, *, variant: str | None = None) -> Tensor:
    """Additive attention scores of all pairs: `(weight * tanh(query.unsqueeze(-2) + key.unsqueeze(-3))).sum(-1)`.

    Args:
        query: `(*batch, L, D)`
        key: `(*batch, S, D)`; batch axes broadcast
        weight: `(D,)`, or whatever broadcasts with the pairs `(*batch, L, S, D)`
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        The scores `(*batch, L, S)`, in the dtype to which the tensors promote (under autocast float32 or wider). The
        arithmetic is float32, or float64 for float64; errors are absolute, in proportion to the sum of |weight|.

    Variants chunked and triton save the inputs for backward, no more.

    Raises:
        TypeError: an argument is no tensor, or not of a floating-point dtype
        ValueError: shapes do not fit, devices differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> query, key, weight = torch.randn(2, 20, 64), torch.randn(2, 300, 64), torch.randn(64)
        >>> effops.additive_attention_scores(query, key, weight).shape
        torch.Size([2, 20, 300])
    """
    return call(scores_op, query, key, weight, variant=variant)


@op.public
def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    attn_mask: Tensor | None = None,
    *,
    variant: str | None = None,
) -> Tensor:
    """Additive attention: `softmax(additive_attention_scores(query, key, weight) + attn_mask, -1) @ value`.

    Args:
        query: `(*batch, L, D)`
        key: `(*batch, S, D)`
        value: `(*batch, S, V)`; batch axes broadcast
        weight: `(D,)`, or whatever broadcasts with the pairs `(*batch, L, S, D)`
        attn_mask: broadcasts to `(*batch, L, S)`; booleans tell which pairs take part; numbers are added to the scores
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        `(*batch, L, V)`, 0 for a query that takes part with no key. Dtypes are as for `effops.attention`: under
        autocast the operands are rounded, otherwise the arithmetic is float32, or float64 for float64.

    Variants chunked and triton save the inputs for backward, no more. Raises what `additive_attention_scores` does.

    Example:
        >>> query, key, value = torch.randn(2, 20, 64), torch.randn(2, 300, 64), torch.randn(2, 300, 80)
        >>> effops.additive_attention(query, key, value, torch.randn(64)).shape
        torch.Size([2, 20, 80])
    """
    with rounded_by_autocast(op.name, query, key=key, value=value, weight=weight, attn_mask=attn_mask) as operands:
        return call(op, *operands, variant=variant)
