"""What the references of attention share: the bounds of correct results and gradients, for any kind of scores."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from effops.numerics.precision import contraction_error, matmul_precision, unit_roundoff
from effops.ops.attention.call import AttentionCall, join_arguments
from effops.reference.bounds import Bounds
from effops.reference.reference import Reference, Shape, normal_sample


@dataclass(frozen=True)
class ExactScores:
    """A kind of scores, computed in float64.

    Attributes:
        compute: takes a call, and returns its scores without a mask, and by how much correct scores may be off
        gradient_bounds: takes a call, the gradients of the scores, and their errors; returns the bounds of correct
            gradients of the operands
    """

    compute: Callable[[AttentionCall], tuple[Tensor, Tensor]]
    gradient_bounds: Callable[[AttentionCall, Tensor, Tensor], tuple[Bounds, ...]]


def attention_reference(
    function: Callable[..., Tensor],
    scores: ExactScores,
    *,
    cases: Mapping[str, tuple[Shape, ...]],
    workload: Callable[..., tuple[Tensor, ...]],
    sizes: Mapping[str, int],
) -> Reference:
    """The reference of an op of attention. Variants of the op may round weights as PyTorch does."""
    return Reference(
        function,
        cases=cases,
        sample=normal_sample,
        workload=workload,
        sizes=sizes,
        bounds=functools.partial(bounds, scores, rounded=True),
        gradient_bounds=functools.partial(gradient_bounds, scores, rounded=True),
    )


class _Exact(NamedTuple):
    """A call in float64.

    Attributes:
        scores: the scores under the mask
        error: by how much correct scores may be off
        excluded: True for pairs that take no part
        weights: the softmax of the scores
        relative: the relative error that correct weights may have
    """

    scores: Tensor
    error: Tensor
    excluded: Tensor
    weights: Tensor
    relative: Tensor


def _exact(exact_scores: ExactScores, call: AttentionCall) -> _Exact:
    scores, error = exact_scores.compute(call)
    u = unit_roundoff(call.arithmetic)
    excluded = torch.zeros(call.plan.shape, dtype=torch.bool, device=call.device)
    if call.masked and call.mask.dtype == torch.bool:
        excluded = excluded | ~call.mask
    elif call.masked:
        scores = scores + call.mask.double()
        error = error + 2 * u * (scores.abs() + call.mask.double().abs()).nan_to_num(posinf=0.0)
    if call.is_causal:
        excluded = (
            excluded | torch.ones(call.plan.shape[-2:], dtype=torch.bool, device=call.device).tril().logical_not()
        )
    scores = scores.masked_fill(excluded, -math.inf)
    error = torch.where(scores == -math.inf, 0.0, error.expand(scores.shape))
    no_key = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(no_key, 0).softmax(-1).masked_fill(no_key, 0)
    relative = torch.expm1(error + (weights * error).sum(-1, keepdim=True)) + (8 + scores.shape[-1]) * u
    return _Exact(scores, error, excluded, weights, relative)


def bounds(scores: ExactScores, call: AttentionCall, *, rounded: bool) -> Bounds:
    """The bounds of a correct result. If `rounded`, weights may be rounded to the dtype of the sums, as in PyTorch."""
    exact, u = _exact(scores, call), unit_roundoff(call.arithmetic)
    if call.output == "scores":
        return Bounds(exact.scores, exact.error, exact.error, dtype=call.dtype)
    if call.value is None:
        radius = exact.weights * exact.relative
        return Bounds(exact.weights, radius, radius, dtype=call.dtype)
    value = call.value.double()
    rounding = (4 + value.shape[-2]) * u + _rounding(call, rounded)
    radius = (exact.weights * (exact.relative + rounding)) @ value.abs()
    return Bounds(exact.weights @ value, radius, radius, dtype=call.dtype)


def _rounding(call: AttentionCall, rounded: bool) -> float:
    """The roundoff of weights that are stored for every pair, beyond that of the arithmetic."""
    return unit_roundoff(call.dtype) if rounded and call.dtype != call.arithmetic else 0.0


def gradient_bounds(scores: ExactScores, call: AttentionCall, dout: Tensor, *, rounded: bool) -> tuple[Bounds, ...]:
    """The bounds of correct gradients of the tensors that a caller gives. `rounded` is that of `bounds`."""
    exact, u, g = _exact(scores, call), unit_roundoff(call.arithmetic), dout.double()
    weights, relative, keys = exact.weights, exact.relative, exact.weights.shape[-1]
    coarse = _rounding(call, rounded)
    of_value: tuple[Bounds, ...] = ()
    if call.output == "scores":
        dscores, error = g.masked_fill(exact.excluded, 0), torch.zeros_like(g)
    else:
        dweights, off, mean_error = g, torch.zeros_like(g), torch.zeros(())
        if call.value is not None:
            value = call.value.double()
            dweights = g @ value.mT
            products = contraction_error(value.shape[-1], call.arithmetic, matmul_precision())
            off = products * u * (g.norm(dim=-1).unsqueeze(-1) * value.norm(dim=-1).unsqueeze(-2))
            mean_error = coarse * (g.abs() * (weights @ value).abs()).sum(-1, keepdim=True)
            size = weights.mT @ g.abs()
            error = (weights * (relative + 2 * coarse)).mT @ g.abs()
            of_value = (summed_bounds(weights.mT @ g, error, size, weights.shape[-2], call.value, u),)
        mean = (weights * dweights).sum(-1, keepdim=True)
        mean_error = mean_error + (weights * ((relative + (4 + keys) * u) * dweights.abs() + off)).sum(-1, keepdim=True)
        dscores = weights * (dweights - mean)
        error = weights * (
            (relative + 2 * coarse) * (dweights - mean).abs() + off + mean_error + 2 * u * (dweights.abs() + mean.abs())
        )
    query, key, *others = scores.gradient_bounds(call, dscores, error)
    of_mask = (summed_bounds(dscores, error, dscores.abs(), 1, call.mask, u),) if call.masked else ()
    return join_arguments((query, key, *others), of_value, *of_mask)


def summed_bounds(value: Tensor, error: Tensor, size: Tensor, terms: int, operand: Tensor, u: float) -> Bounds:
    """The bounds of a gradient that is summed to the shape of its operand.

    Each entry of `value` is already a sum of `terms` terms. `size` is the sum of their absolute values.
    """
    value, error, size = (
        tensor.expand(torch.broadcast_shapes(tensor.shape, operand.shape)) for tensor in (value, error, size)
    )
    terms *= value.numel() // max(1, operand.numel())
    shape = operand.shape
    radius = error.sum_to_size(shape) + (4 + terms) * u * size.sum_to_size(shape)
    return Bounds(value.sum_to_size(shape), radius, radius)
