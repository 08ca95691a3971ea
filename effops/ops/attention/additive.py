"""Additive attention (Bahdanau): its scores, which no matrix product computes, and the weighted sums of values.

    score = sum_d weight_d tanh(query_d + key_d)

Source: Bahdanau, Cho, Bengio: Neural machine translation by jointly learning to align and translate, 2015.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks import softmax
from effops.blocks.additive import AdditiveScores
from effops.blocks.pairs import Scores
from effops.dispatch.call import call
from effops.dispatch.custom_op import add_kernels
from effops.ops.attention import triton
from effops.ops.attention.call import AttentionCall, Form, rounded_by_autocast
from effops.ops.attention.variants import attention_op, custom_op, in_blocks, in_blocks_backward


def naive(query: Tensor, key: Tensor, weight: Tensor, scale: float, arithmetic: torch.dtype) -> Tensor:
    pairs = torch.tanh(query.to(arithmetic).unsqueeze(-2) + key.to(arithmetic).unsqueeze(-3))
    return (weight.to(arithmetic) * pairs).sum(-1)


class Additive:
    """The scores sum_d weight_d tanh(query_d + key_d), as an `effops.ops.attention.call.Kind`."""

    operands: Mapping[str, int] = {"query": 2, "key": 2, "weight": 3}
    forms: Mapping[str, Form] = {"naive": naive}

    def scale(self, call: AttentionCall) -> float:
        return 1.0

    def blocks(self, call: AttentionCall, wanted: Sequence[bool]) -> Scores:
        values_per_row = softmax.VALUES_PER_ROW + (0 if call.value is None else call.value.shape[-1])
        weight = call.scored[2]
        return AdditiveScores(
            call.plan, *call.pairs, weight, call.arithmetic, wanted=wanted, values_per_row=values_per_row
        )


class _InKernels(Additive):
    """The same kind of scores, with Triton kernels for the scores of a block."""

    def blocks(self, call: AttentionCall, wanted: Sequence[bool]) -> Scores:
        return triton.AdditiveScores(call.plan, *call.pairs, call.scored[2], call.arithmetic, wanted)


def _requires_one_weight(call: AttentionCall) -> str:
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
for with_kernels, output in ((scores_op, "scores"), (op, "sums")):
    in_kernels = custom_op(with_kernels, _InKernels(), output, "triton", in_blocks, in_blocks_backward)
    add_kernels(with_kernels, in_kernels, requires=[_requires_one_weight])


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

    For backward, variants chunked and triton save the inputs and no more.

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
        attn_mask: broadcasts to `(*batch, L, S)`; booleans are True for pairs that take part; numbers are added to the
            scores
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        The attention `(*batch, L, V)`. It is 0 for a query that takes part with no key. Dtypes are those of
        `effops.attention`. Under autocast the operands are rounded. Otherwise the arithmetic is float32, or float64 for
        float64.

    For backward, variants chunked and triton save the inputs and no more. Errors are those of
    `additive_attention_scores`.

    Example:
        >>> query, key, value = torch.randn(2, 20, 64), torch.randn(2, 300, 64), torch.randn(2, 300, 80)
        >>> effops.additive_attention(query, key, value, torch.randn(64)).shape
        torch.Size([2, 20, 80])
    """
    with rounded_by_autocast(op.name, query, key=key, value=value, weight=weight, attn_mask=attn_mask) as operands:
        return call(op, *operands, variant=variant)
