"""Additive attention (Bahdanau): its scores, which no matrix product computes, and the weighted sums of values.

    score = sum_d weight_d tanh(query_d + key_d)

Source: Bahdanau, Cho, Bengio: Neural machine translation by jointly learning to align and translate, 2015.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from effops.blocks import softmax
from effops.blocks.additive import AdditiveScores
from effops.dispatch.arguments import check_operand, raise_order
from effops.dispatch.call import call
from effops.dispatch.registration import add_kernels, add_native
from effops.ops.attention import cpp, triton
from effops.ops.attention.call import AttentionCall, prepare
from effops.ops.attention.variants import (
    Kind,
    attention_op,
    custom_op,
    in_blocks,
    in_blocks_backward,
    operands_of_pairs,
)


def naive(query: Tensor, key: Tensor, weight: Tensor, scale: float, arithmetic: torch.dtype) -> Tensor:
    pairs = torch.tanh(query.to(arithmetic).unsqueeze(-2) + key.to(arithmetic).unsqueeze(-3))
    return (weight.to(arithmetic) * pairs).sum(-1)


def blocks(call: AttentionCall, wanted: Sequence[bool]) -> AdditiveScores:
    """The scores block by block, and the gradients that `wanted` asks for."""
    values_per_row = softmax.VALUES_PER_ROW + (0 if call.value is None else call.value.shape[-1])
    query, key, weight = operands_of_pairs(call)
    return AdditiveScores(call.plan, query, key, weight, call.arithmetic, wanted=wanted, values_per_row=values_per_row)


def _requires_one_weight(call: AttentionCall) -> str:
    weight = call.scored[2]
    if all(size == 1 for size in weight.shape[-3:-1]):
        return ""
    return f"needs a weight for all pairs of a batch entry, (D,) or (*batch, 1, 1, D); got {tuple(weight.shape)}"


def _prepare_scores(function: str, output: str, query: Tensor, key: Tensor, weight: Tensor) -> AttentionCall:
    return prepare(function, output, {"query": query, "key": key, "weight": weight})


def _prepare_sums(
    function: str,
    output: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    attn_mask: Tensor | None = None,
) -> AttentionCall:
    if isinstance(value, Tensor) and isinstance(weight, Tensor):
        arguments = {"query": query, "key": key, "value": value, "weight": weight, "attn_mask": attn_mask}
        if value.ndim < 2 <= weight.ndim:
            raise_order(function, arguments, "`value` is a vector, and `weight` is none")
        if weight.dtype == torch.bool:
            raise_order(function, arguments, "`weight` is boolean, as a mask is")
    check_operand(function, "value", value, dims=2)
    return prepare(function, output, {"query": query, "key": key, "weight": weight}, value, attn_mask)


KIND = Kind({"query": 2, "key": 2, "weight": 3}, {"naive": naive}, blocks)
PREFERENCE = ("triton", "cpp", "chunked", "compile", "torchscript", "naive")
scores_op = attention_op(KIND, "additive_attention_scores", "scores", _prepare_scores, PREFERENCE)
op = attention_op(KIND, "additive_attention", "sums", _prepare_sums, PREFERENCE)
forward = functools.partial(in_blocks, triton.additive_scores)
backward = functools.partial(in_blocks_backward, triton.additive_scores)
for with_kernels, output in ((scores_op, "scores"), (op, "sums")):
    in_kernels = custom_op(with_kernels, KIND, output, "triton", forward, backward)
    add_kernels(with_kernels, in_kernels, requires=[_requires_one_weight])
    in_library = custom_op(with_kernels, KIND, output, "cpp", cpp.forward, cpp.backward, fills_axes=cpp.fills_axes)
    add_native(with_kernels, in_library, requires=[_requires_one_weight, cpp.obstacle])


@scores_op.public
def additive_attention_scores(query: Tensor, key: Tensor, weight: Tensor, *, variant: str | None = None) -> Tensor:
    """Additive attention scores of all pairs: `(weight * tanh(query.unsqueeze(-2) + key.unsqueeze(-3))).sum(-1)`.

    Args:
        query: `(*batch, L, D)`
        key: `(*batch, S, D)`; batch axes broadcast
        weight: `(D,)`, or whatever broadcasts with the pairs `(*batch, L, S, D)`
        variant: the implementation to run; "auto" for the best that supports the call (see `effops.explain`), and None
            for that of `effops.use_variant`, or else the best

    Returns:
        The scores `(*batch, L, S)`, in the dtype to which the tensors promote (under autocast float32 or wider). The
        arithmetic is float32, or float64 for float64; errors are absolute, in proportion to the sum of |weight|.

    For backward, variants cpp, chunked and triton save the inputs and no more.

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
            scores, so that zeros and ones exclude nothing (`effops.validate()` raises for them);
            a bias of `torch.nn.attention.bias`, of either corner, is honoured without a mask in memory
        variant: the implementation to run; "auto" for the best that supports the call (see `effops.explain`), and None
            for that of `effops.use_variant`, or else the best

    Returns:
        The attention `(*batch, L, V)`. It is 0 for a query that takes part with no key. Dtypes are those of
        `effops.attention`. Under autocast the operands are rounded. Otherwise the arithmetic is float32, or float64 for
        float64.

    A key that is NaN and that booleans exclude leaves no trace in the result, though the gradients of query and weight
    are NaN. A mask of numbers does not keep NaN out, and neither mask keeps out a value that is NaN or infinite.

    For backward, variants cpp, chunked and triton save the inputs and no more. Errors are those of
    `additive_attention_scores`.

    Example:
        >>> query, key, value = torch.randn(2, 20, 64), torch.randn(2, 300, 64), torch.randn(2, 300, 80)
        >>> effops.additive_attention(query, key, value, torch.randn(64)).shape
        torch.Size([2, 20, 80])
    """
    return call(op, query, key, value, weight, attn_mask, variant=variant)
