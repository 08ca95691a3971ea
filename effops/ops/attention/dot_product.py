"""Attention with scaled dot products: its scores, its weights, and `F.scaled_dot_product_attention`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks import softmax, tiling
from effops.blocks.dots import Products, contract
from effops.blocks.pairs import Scores
from effops.dispatch.arguments import check_operand
from effops.dispatch.call import call
from effops.dispatch.custom_op import add_custom_op
from effops.ops.attention import sdpa, triton
from effops.ops.attention.call import AttentionCall, Form, rounded_by_autocast
from effops.ops.attention.variants import attention_op, custom_op


def naive(query: Tensor, key: Tensor, scale: float, arithmetic: torch.dtype) -> Tensor:
    return (query.to(arithmetic).unsqueeze(-2) * key.to(arithmetic).unsqueeze(-3)).sum(-1) * scale


def einsum(query: Tensor, key: Tensor, scale: float, arithmetic: torch.dtype) -> Tensor:
    return contract(key.unsqueeze(-3), query.unsqueeze(-2), arithmetic) * scale


WIDE_BYTES = 2 * 1024 * 1024


class ScaledDotProducts:
    """The scores scale <query, key>, as an `effops.ops.attention.call.Kind`."""

    operands: Mapping[str, int] = {"query": 2, "key": 2}
    forms: Mapping[str, Form] = {"naive": naive, "einsum": einsum}

    def scale(self, call: AttentionCall) -> float:
        dimension = call.scored[0].shape[-1]
        return 1 / math.sqrt(max(1, dimension)) if call.scale is None else call.scale

    def blocks(self, call: AttentionCall, wanted: Sequence[bool]) -> Scores:
        query, key = call.pairs
        plan, arithmetic = call.plan, call.arithmetic
        summed = 0 if call.value is None else call.value.shape[-1]
        dimension = max(1, query.shape[-1], summed)
        # If a block is the only buffer, it may be larger than the cache: fewer, longer passes are faster.
        pair_bytes = tiling.BLOCK_BYTES if summed or any(wanted) else WIDE_BYTES
        values_per_row = softmax.VALUES_PER_ROW + summed
        extents = tiling.cut(
            plan, dimension, arithmetic.itemsize, copies=1.0, values_per_row=values_per_row, pair_bytes=pair_bytes
        )
        wants_query, wants_key = wanted
        factor = self.scale(call)
        return Products(
            plan, key, query, arithmetic, factor=factor, extents=extents, wants_loc=wants_key, wants_x=wants_query
        )


KIND = ScaledDotProducts()


def _scored(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Any:
    return (query, key), None, attn_mask, is_causal, scale, 0.0


def _summed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if enable_gqa:
        query, key, value, attn_mask = _grouped(query, key, value, attn_mask)
    return (query, key), value, attn_mask, is_causal, scale, dropout_p


PREFERENCE = ("triton", "chunked", "compile", "einsum", "torchscript", "naive")
scores_op, weights_op = (
    attention_op(
        KIND,
        f"attention_{output}",
        output,
        arguments=_scored,
        preference=PREFERENCE,
    )
    for output in ("scores", "weights")
)
op = attention_op(
    KIND,
    "attention",
    "sums",
    arguments=_summed,
    preference=("sdpa", *PREFERENCE),
)
for with_kernels, output in ((scores_op, "scores"), (weights_op, "weights"), (op, "sums")):
    triton.add(with_kernels, KIND, output)
add_custom_op(
    op,
    custom_op(
        op, KIND, "sums", "sdpa", sdpa.forward, sdpa.backward, empty=functools.partial(sdpa.forward, KIND), native=True
    ),
    "sdpa",
    cost=functools.partial(sdpa.cost, KIND),
    requires=[sdpa.requires_one_dtype, functools.partial(sdpa.requires_positive_scale, KIND)],
    automatic=functools.partial(sdpa.is_fused, KIND),
)


@scores_op.public
def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    variant: str | None = None,
) -> Tensor:
    """Masked, scaled dot products of all pairs of queries and keys: `scale * query @ key.mT + attn_mask`.

    Args:
        query: `(*batch, L, D)`
        key: `(*batch, S, D)`; batch axes, heads among them, broadcast
        attn_mask: broadcasts to the result `(*batch, L, S)`; booleans are True for pairs that take part, and other
            pairs score -inf; numbers are added
        is_causal: no query takes part with a later key: pair (i, j) needs j <= i, also for L != S
        scale: `1 / sqrt(D)` if None
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        The scores `(*batch, L, S)`, in the dtype to which the tensors promote (under autocast float32 or wider). The
        arithmetic is float32, or float64 for float64.

    For backward, variant chunked saves its inputs and no more.

    Raises:
        TypeError: an argument is no tensor, or not of a floating-point dtype
        ValueError: shapes do not fit, attn_mask and is_causal together, devices differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> query, key = torch.randn(2, 8, 100, 64), torch.randn(2, 8, 120, 64)
        >>> effops.attention_scores(query, key, is_causal=True).shape
        torch.Size([2, 8, 100, 120])
    """
    return call(scores_op, query, key, attn_mask, is_causal=is_causal, scale=scale, variant=variant)


@weights_op.public
def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    variant: str | None = None,
) -> Tensor:
    """The softmax of attention scores over the keys: `softmax(attention_scores(...), -1)`, written once.

    Arguments, errors and dtypes are those of `attention_scores`. A query that takes part with no key has weights of 0,
    as inside `F.scaled_dot_product_attention`, and gradients of 0.

    For backward, variant chunked saves its inputs and no more.

    Example:
        >>> query, key = torch.randn(2, 8, 100, 64), torch.randn(2, 8, 120, 64)
        >>> effops.attention_weights(query, key).sum(-1).allclose(torch.ones(2, 8, 100))
        True
    """
    return call(weights_op, query, key, attn_mask, is_causal=is_causal, scale=scale, variant=variant)


@op.public
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    variant: str | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, which never holds queries times keys by default.

    It computes `softmax(scale * query @ key.mT + attn_mask) @ value`. Where PyTorch fuses this, its kernels run
    (variant sdpa). Where PyTorch would hold the weights of all pairs, variant chunked runs instead. On a CPU that is so
    with dropout, for a mask that requires gradients, and for values of another dimension than keys. PyTorch converts a
    boolean mask to numbers, in a tensor of the mask's own size.

    Args:
        query: `(*batch, L, D)`
        key: `(*batch, S, D)`
        value: `(*batch, S, V)`; batch axes, heads among them, broadcast
        attn_mask: broadcasts to `(*batch, L, S)`; booleans are True for pairs that take part; numbers are added to the
            scores
        dropout_p: the probability to drop a weight; the others are scaled by 1 / (1 - dropout_p). PyTorch's seed and
            the variant determine which weights are dropped
        is_causal: no query takes part with a later key: pair (i, j) needs j <= i, also for L != S
        scale: `1 / sqrt(D)` if None
        enable_gqa: several heads of queries, axis -3, share one of keys and values
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        The attention `(*batch, L, V)`, in the dtype to which the tensors promote. It is 0 for a query that takes part
        with no key. Under autocast the operands are rounded as PyTorch's function rounds them. Variant sdpa rounds
        weights to 16 bits if the operands have 16 bits. The arithmetic of all other variants is float32, or float64 for
        float64.

    For backward, variant chunked saves its inputs. Variant sdpa saves two more tensors: the result, and a number for
    each query.

    Raises:
        TypeError: an argument is no tensor, or not of a floating-point dtype
        ValueError: shapes or numbers of heads do not fit, attn_mask and is_causal together, dropout_p is no
            probability, devices differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> query, key, value = (torch.randn(2, 8, 100, 64) for _ in range(3))
        >>> effops.attention(query, key, value, is_causal=True).shape
        torch.Size([2, 8, 100, 64])
    """
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "variant": variant}
    with rounded_by_autocast(op.name, query, key=key, value=value, attn_mask=attn_mask) as operands:
        if not enable_gqa:
            return call(op, *operands, **options)
        return call(op, *_grouped(*operands), **options).flatten(-4, -3)


def _grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
    """The query (*batch, heads, L, D) as (*batch, heads of keys, group, L, D), and the others to broadcast with it."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_operand("attention", name, tensor, dims=3)
    heads, shared = query.shape[-3], key.shape[-3]
    if shared == 0 or heads % shared or value.shape[-3] not in (1, shared):
        raise ValueError(
            "attention: with enable_gqa the heads of `query`, axis -3, must be a multiple of those of `key` and "
            f"`value`; got {heads}, {shared} and {value.shape[-3]}; repeat heads, or transpose"
        )
    group = heads // shared
    if isinstance(mask, Tensor) and mask.ndim >= 3:
        if mask.shape[-3] not in (1, heads):
            raise ValueError(
                f"attention: `attn_mask` must have 1 or {heads} heads, axis -3, as `query` has; got "
                f"{tuple(mask.shape)}; repeat those of a group, or unsqueeze"
            )
        mask = mask.unflatten(-3, (shared, group)) if mask.shape[-3] == heads else mask.unsqueeze(-3)
    return query.unflatten(-3, (shared, group)), key.unsqueeze(-3), value.unsqueeze(-3), mask
