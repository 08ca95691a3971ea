"""Attention by scaled dot products: scores, weights, and `F.scaled_dot_product_attention`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from effops import attend, chunked
from effops.attention import Call, Form, Kind, add_bound, attention_op, in_blocks_backward, summed_bounds, unpacked
from effops.binding import Gradients, is_plain, requires_grad
from effops.broadcast import Shape
from effops.density import predict
from effops.dots import Products, contract
from effops.op import Cost
from effops.operands import check_operand
from effops.precision import (
    autocast_enabled,
    contraction_error,
    matmul_precision,
    unit_roundoff,
    without_autocast,
)
from effops.testing import Bounds, exact_dot

Scored = tuple[Tensor, Tensor]


def naive(query: Tensor, key: Tensor, scale: float, arithmetic: torch.dtype) -> Tensor:
    return (query.to(arithmetic).unsqueeze(-2) * key.to(arithmetic).unsqueeze(-3)).sum(-1) * scale


def einsum(query: Tensor, key: Tensor, scale: float, arithmetic: torch.dtype) -> Tensor:
    return contract(key.unsqueeze(-3), query.unsqueeze(-2), arithmetic) * scale


WIDE_BYTES = 2 * 1024 * 1024


class ScaledDotProducts:
    """scale <query, key>, as an `effops.attention.Kind`."""

    operands: Mapping[str, int] = {"query": 2, "key": 2}
    forms: Mapping[str, Form] = {"naive": naive, "einsum": einsum}

    def scale(self, call: Call) -> float:
        dimension = call.scored[0].shape[-1]
        return 1 / math.sqrt(max(1, dimension)) if call.scale is None else call.scale

    def blocks(self, call: Call, needs: Sequence[bool]) -> chunked.Scores:
        query, key = call.pairs
        plan, arithmetic = call.plan, call.arithmetic
        summed = 0 if call.value is None else call.value.shape[-1]
        dimension = max(query.shape[-1], summed)
        # Where a block is the only buffer it may be larger than the cache: fewer, longer passes win.
        pair_bytes = chunked.BLOCK_BYTES if summed or any(needs) else WIDE_BYTES
        held = attend.HELD + summed
        extents = chunked.cut(plan, dimension, arithmetic.itemsize, copies=1.0, held=held, pair_bytes=pair_bytes)
        need_query, need_key = needs
        products = Products(plan, key, query, arithmetic, extents=extents, need_loc=need_key, need_x=need_query)
        return attend.ScaledDots(products, self.scale(call))

    def exact(self, call: Call) -> tuple[Tensor, Tensor]:
        query, key = call.scored
        scale, u = self.scale(call), unit_roundoff(call.arithmetic)
        rounding = contraction_error(query.shape[-1], call.arithmetic, matmul_precision())
        dot = exact_dot(key.unsqueeze(-3), query.unsqueeze(-2))
        sizes = query.double().norm(dim=-1).unsqueeze(-1) * key.double().norm(dim=-1).unsqueeze(-2)
        return scale * dot, abs(scale) * u * (rounding * sizes + 2 * dot.abs())

    def gradient_bounds(self, call: Call, dscores: Tensor, error: Tensor) -> tuple[Bounds, ...]:
        query, key = (tensor.double() for tensor in call.scored)
        scale, u = abs(self.scale(call)), unit_roundoff(call.arithmetic)
        of_query = (
            self.scale(call) * (dscores @ key),
            scale * (error @ key.abs()),
            scale * (dscores.abs() @ key.abs()),
        )
        of_key = (
            self.scale(call) * (dscores.mT @ query),
            scale * (error.mT @ query.abs()),
            scale * (dscores.mT.abs() @ query.abs()),
        )
        return (
            summed_bounds(*of_query, key.shape[-2], call.scored[0], u),
            summed_bounds(*of_key, query.shape[-2], call.scored[1], u),
        )


KIND = ScaledDotProducts()


def _sample(*shapes: Shape, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Tensor, ...]:
    """Normal tensors of given shapes: query, key, where there are, value and an additive mask."""
    generator, device = options.get("generator"), options.get("device", "cpu")
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype) for shape in shapes)


def _pairs_workload(*, B: int, H: int, L: int, D: int, **options: Any) -> tuple[Tensor, ...]:
    """Queries and keys of a batch of heads, as one layer of BERT-large has them by default."""
    return _sample((B, H, L, D), (B, H, L, D), **options)


def _workload(*, B: int, H: int, L: int, D: int, **options: Any) -> tuple[Tensor, ...]:
    """Queries, keys and values, likewise."""
    return _sample((B, H, L, D), (B, H, L, D), (B, H, L, D), **options)


PAIRS = {
    # query, key, additive mask
    "founding": ((2, 3, 5, 7), (2, 3, 6, 7), (5, 6)),
    "no mask": ((4, 5, 8), (4, 6, 8)),
    "single": ((1, 2), (1, 2)),
    "two axes": ((9, 4), (7, 4), (9, 1)),
    "shared keys": ((2, 3, 4, 5), (2, 1, 6, 5), (2, 1, 1, 6)),
    "shared queries": ((4, 5), (3, 6, 5), (3, 4, 6)),
    "mask varies alone": ((4, 5), (6, 5), (2, 3, 1, 6)),
    "wide": ((2, 3, 300), (2, 3, 300)),
    "several blocks": ((2, 270, 9), (2, 1030, 9)),
    "no query": ((3, 0, 5), (3, 4, 5), (0, 4)),
    "no key": ((3, 4, 5), (3, 0, 5), (3, 4, 1)),
    "no head": ((0, 4, 5), (0, 3, 5)),
    "no dimension": ((3, 4, 0), (3, 5, 0)),
}
SUMS = {name: (query, key, (*key[:-1], 6), *mask) for name, (query, key, *mask) in PAIRS.items()}
SUMS["values of more heads"] = ((3, 4, 5), (6, 5), (2, 3, 6, 5))
SIZES = {"B": 8, "H": 16, "L": 512, "D": 64}


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
) -> Any:
    return (query, key), value, attn_mask, is_causal, scale, dropout_p


class _FourAxes:
    """The operands of a call for `scaled_dot_product_attention`, which is fused for four axes alone.

    Where groups of heads share keys and values (*batch, heads, 1, keys, D), they become heads of their own.
    """

    def __init__(self, call: Call) -> None:
        assert call.value is not None
        self.call, self.batch = call, call.shape[:-2]
        (query, key), value = call.scored, call.value
        shared = all(_size(tensor, -3) == 1 for tensor in (key, value))
        self.grouped = len(self.batch) == 3 and self.batch[-1] > 1 and shared
        keyed = (*self.batch[:-1], 1) if self.grouped else self.batch
        self.query, self.key, self.value = (
            self._merge(query, self.batch),
            self._merge(key, keyed),
            self._merge(value, keyed),
        )
        self.mask = self._mask() if call.masked else None

    def _merge(self, tensor: Tensor, batch: Shape) -> Tensor:
        tensor = tensor.expand(*batch, *tensor.shape[-2:])
        if self.grouped:
            return tensor.flatten(-4, -3)
        return tensor.flatten(0, -4) if len(batch) > 2 else tensor[(None,) * (2 - len(batch))]

    def _mask(self) -> Tensor:
        mask = self.call.mask
        pairs = self.call.plan.shape[-2:]
        if all(size == 1 for size in mask.shape[:-2]):
            return mask.expand(*mask.shape[:-2], *pairs).view(pairs)
        if len(self.batch) <= 2:
            return mask[(None,) * (4 - mask.ndim)]
        mask = mask[(None,) * (len(self.batch) + 2 - mask.ndim)]
        if self.grouped and _size(mask, -3) == _size(mask, -4) == 1:
            return mask.squeeze(-3)
        outer = (mask.shape[0], *self.batch[1:]) if self.grouped else (*self.batch[:-1], mask.shape[-3])
        return self._merge(mask, outer)

    def restore(self, result: Tensor) -> Tensor:
        if len(self.batch) <= 2:
            return result.view(self.call.shape)
        axis, sizes = (1, self.batch[1:]) if self.grouped else (0, self.batch[:-1])
        return torch.unflatten(result, axis, sizes)


def _size(tensor: Tensor, axis: int) -> int:
    return tensor.shape[axis] if tensor.ndim >= -axis else 1


def _sdpa(kind: Kind, call: Call) -> Tensor:
    operands = _FourAxes(call)
    with _seeded(call):
        result = scaled_dot_product_attention(
            operands.query,
            operands.key,
            operands.value,
            operands.mask,
            call.dropout_p,
            call.is_causal,
            scale=kind.scale(call),
            enable_gqa=operands.grouped,
        )
    return operands.restore(result)


@contextmanager
def _seeded(call: Call) -> Iterator[None]:
    """In this context PyTorch drops as the call's seed says, so that backward can do so again."""
    if call.dropout_p and call.seed is not None and is_plain(call.tensors):
        with torch.random.fork_rng([call.device] if call.device.type == "cuda" else []):
            torch.manual_seed(int(call.seed))
            yield
    else:
        yield


def _sdpa_backward(kind: Kind, dout: Tensor, call: Call, needs: Sequence[bool]) -> Gradients:
    """Where PyTorch's own backward pass is not at hand: in blocks, or with dropout, which is PyTorch's, once more."""
    if not call.dropout_p:
        return in_blocks_backward(kind, dout, call, needs)
    if not is_plain(call.tensors):
        raise NotImplementedError(
            'attention(variant="sdpa"): with dropout gradients cannot be transformed; set dropout_p=0, or give '
            'variant="chunked"'
        )
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_(need) for tensor, need in zip(call.tensors, needs)]
        result = _sdpa(kind, unpacked(kind, call.reduced, (*leaves, *call.settings)))
    found = iter(torch.autograd.grad(result, [leaf for leaf in leaves if leaf.requires_grad], dout))
    return [next(found) if need else None for need in needs]


def _needs_one_dtype(call: Call) -> str:
    assert call.value is not None
    dtypes = {tensor.dtype for tensor in (*call.scored, call.value)}
    if dtypes == {call.dtype}:
        return ""
    return f"needs query, key and value in the dtype of the result, {call.dtype}; got {', '.join(map(str, dtypes))}"


def _needs_positive_scale(call: Call) -> str:
    if not call.is_causal or KIND.scale(call) > 0:
        return ""
    return f"needs a positive scale if is_causal, for PyTorch's kernels give NaN with {call.scale}"


def _is_fused(call: Call) -> bool:
    """Whether `F.scaled_dot_product_attention` holds nothing of the size of queries times keys for this call."""
    if call.device.type == "cuda" and is_plain(call.tensors):
        operands = _FourAxes(call)
        choice: int = torch._fused_sdp_choice(
            operands.query,
            operands.key,
            operands.value,
            operands.mask,
            call.dropout_p,
            call.is_causal,
            scale=KIND.scale(call),
            enable_gqa=operands.grouped,
        )
        return choice != SDPBackend.MATH.value
    query, key, value = *call.scored, call.value
    assert value is not None
    if call.device.type == "cuda":
        return call.dtype != torch.float64
    return (
        call.dropout_p == 0
        and not requires_grad((call.mask,))
        and query.shape[-1] == value.shape[-1] > 0
        and query.shape[-2] > 0
        and key.shape[-2] > 0
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    )


def _sdpa_cost(call: Call) -> Cost:
    return predict(call, lambda *tensors: _sdpa(KIND, unpacked(KIND, "sums", (*tensors, *call.settings))))


PREFERENCE = ("chunked", "compile", "einsum", "torchscript", "naive")
scores_op, weights_op = (
    attention_op(
        KIND,
        f"attention_{reduced}",
        reduced,
        cases=PAIRS,
        sample=_sample,
        workload=_pairs_workload,
        sizes=SIZES,
        arguments=_scored,
        preference=PREFERENCE,
    )
    for reduced in ("scores", "weights")
)
op = attention_op(
    KIND,
    "attention",
    "sums",
    cases=SUMS,
    sample=_sample,
    workload=_workload,
    sizes=SIZES,
    arguments=_summed,
    preference=("sdpa", *PREFERENCE),
)
add_bound(
    op,
    KIND,
    "sums",
    "sdpa",
    _sdpa,
    _sdpa_backward,
    empty=lambda call: _sdpa(KIND, call),
    native=True,
    cost=_sdpa_cost,
    needs=[_needs_one_dtype, _needs_positive_scale],
    automatic=_is_fused,
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
        attn_mask: broadcasts to the result `(*batch, L, S)`; booleans tell which pairs take part, the others score
            -inf; numbers are added
        is_causal: no query takes part with a later key: pair (i, j) needs j <= i, also for L != S
        scale: `1 / sqrt(D)` if None
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        The scores `(*batch, L, S)`, in the dtype to which the tensors promote (under autocast float32 or wider). The
        arithmetic is float32, or float64 for float64.

    Variant chunked saves its inputs for backward, no more.

    Raises:
        TypeError: an argument is no tensor, or not of a floating-point dtype
        ValueError: shapes do not fit, attn_mask and is_causal together, devices differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> query, key = torch.randn(2, 8, 100, 64), torch.randn(2, 8, 120, 64)
        >>> effops.attention_scores(query, key, is_causal=True).shape
        torch.Size([2, 8, 100, 120])
    """
    return scores_op(query, key, attn_mask, is_causal=is_causal, scale=scale, variant=variant)


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

    Arguments, errors and dtypes are those of `attention_scores`. The weights of a query that takes part with no key are
    0, as inside `F.scaled_dot_product_attention`, and so are their gradients.

    Variant chunked saves its inputs for backward, no more.

    Example:
        >>> query, key = torch.randn(2, 8, 100, 64), torch.randn(2, 8, 120, 64)
        >>> effops.attention_weights(query, key).sum(-1).allclose(torch.ones(2, 8, 100))
        True
    """
    return weights_op(query, key, attn_mask, is_causal=is_causal, scale=scale, variant=variant)


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

    `softmax(scale * query @ key.mT + attn_mask) @ value`. Where PyTorch fuses this, its kernels run (variant sdpa);
    where it would hold the weights of all pairs, as on a CPU for dropout, for a mask that requires gradients, and for
    values of another dimension than keys, variant chunked runs instead.

    Args:
        query: `(*batch, L, D)`
        key: `(*batch, S, D)`
        value: `(*batch, S, V)`; batch axes, heads among them, broadcast
        attn_mask: broadcasts to `(*batch, L, S)`; booleans tell which pairs take part; numbers are added to the scores
        dropout_p: the probability to drop a weight; the others are scaled by 1 / (1 - dropout_p). Which are dropped
            follows from PyTorch's seed and the variant
        is_causal: no query takes part with a later key: pair (i, j) needs j <= i, also for L != S
        scale: `1 / sqrt(D)` if None
        enable_gqa: several heads of queries, axis -3, share one of keys and values
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        `(*batch, L, V)`, in the dtype to which the tensors promote, 0 for a query that takes part with no key. Under
        autocast the operands are rounded as PyTorch's function does. Variant sdpa rounds weights to 16 bits where
        the operands have as many; the arithmetic of all others is float32, or float64 for float64.

    Variant chunked saves its inputs for backward, sdpa two more tensors: the result and a number for each query.

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
    check_operand("attention", "query", query, dims=2)
    if autocast_enabled(query.device):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value, attn_mask = (_rounded(tensor, dtype) for tensor in (query, key, value, attn_mask))
    with without_autocast(query.device):
        options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "variant": variant}
        if not enable_gqa:
            return op(query, key, value, attn_mask, **options)
        query, key, value, attn_mask = _grouped(query, key, value, attn_mask)
        return op(query, key, value, attn_mask, **options).flatten(-4, -3)


def _rounded(tensor: Any, dtype: torch.dtype) -> Any:
    """As autocast does: whatever is neither boolean nor float64."""
    takes_part = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if takes_part else tensor


def _grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
    """(*batch, heads, L, D) as (*batch, heads of keys, group, L, D), and the others so that they broadcast."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_operand("attention", name, tensor, dims=3)
    heads, shared = query.shape[-3], key.shape[-3]
    if shared == 0 or heads % shared or value.shape[-3] not in (1, shared):
        raise ValueError(
            "attention: with enable_gqa the heads of `query`, axis -3, must be a multiple of those of `key` and "
            f"`value`; got {heads}, {shared} and {value.shape[-3]}; repeat heads, or transpose"
        )
    group = heads // shared
    if mask is not None and mask.ndim >= 3:
        mask = mask.unflatten(-3, (shared, group)) if mask.shape[-3] == heads else mask.unsqueeze(-3)
    return query.unflatten(-3, (shared, group)), key.unsqueeze(-3), value.unsqueeze(-3), mask
