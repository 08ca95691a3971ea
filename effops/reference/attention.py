"""What the references of attention share: the bounds of correct results and gradients, for any kind of scores."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from effops.numerics.precision import contraction_error, matmul_precision, unit_roundoff
from effops.ops.attention.call import AttentionCall, join_arguments
from effops.reference.reference import Bounds, Reference, Shape, normal_sample, summed_bounds


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


def _exact(exact_scores: ExactScores, call: AttentionCall) -> tuple[Bounds, Tensor, Tensor, Tensor]:
    """A call in float64: the scores under the mask, their softmax, and two more.

    These are the relative error that correct weights may have, and a mask, True for pairs that take no part.
    """
    scores, error = exact_scores.compute(call)
    u = unit_roundoff(call.arithmetic)
    excluded = torch.zeros(call.plan.shape, dtype=torch.bool, device=call.device)
    if call.masked and call.mask.dtype == torch.bool:
        excluded = excluded | ~call.mask
    elif call.masked:
        scores = scores + call.mask.double()
        error = error + 2 * u * (scores.abs() + call.mask.double().abs()).nan_to_num(posinf=0.0)
    if call.diagonal is not None:
        excluded = excluded | torch.ones_like(excluded).triu(call.diagonal + 1)
    scores = scores.masked_fill(excluded, -math.inf)
    error = torch.where(scores == -math.inf, 0.0, error.expand(scores.shape))
    no_key = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(no_key, 0).softmax(-1).masked_fill(no_key, 0)
    relative = torch.expm1(error + (weights * error).sum(-1, keepdim=True)) + (8 + scores.shape[-1]) * u
    return Bounds(scores, error, error, dtype=call.dtype), weights, relative, excluded


def bounds(scores: ExactScores, call: AttentionCall, *, rounded: bool) -> Bounds:
    """The bounds of a correct result. If `rounded`, weights may be rounded to the dtype of the sums, as in PyTorch."""
    of_scores, weights, relative, _ = _exact(scores, call)
    if call.output == "scores":
        return of_scores
    result, radius = weights, weights * relative
    if call.value is not None:
        value = call.value.double()
        rounding = (4 + value.shape[-2]) * unit_roundoff(call.arithmetic) + _rounding(call, rounded)
        result, radius = weights @ value, (weights * (relative + rounding)) @ value.abs()
    return Bounds(result, radius, radius, dtype=call.dtype)


def _rounding(call: AttentionCall, rounded: bool) -> float:
    """The roundoff of weights that are stored for every pair, beyond that of the arithmetic."""
    return unit_roundoff(call.dtype) if rounded and call.dtype != call.arithmetic else 0.0


def gradient_bounds(scores: ExactScores, call: AttentionCall, dout: Tensor, *, rounded: bool) -> tuple[Bounds, ...]:
    """The bounds of correct gradients of the tensors that a caller gives. `rounded` is that of `bounds`."""
    _, weights, relative, excluded = _exact(scores, call)
    u, g, coarse = unit_roundoff(call.arithmetic), dout.double(), _rounding(call, rounded)
    of_value: tuple[Bounds, ...] = ()
    if call.output == "scores":
        dscores, error = g.masked_fill(excluded, 0), torch.zeros_like(g)
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
        summing = (4 + weights.shape[-1]) * u
        mean_error = mean_error + (weights * ((relative + summing) * dweights.abs() + off)).sum(-1, keepdim=True)
        dscores = weights * (dweights - mean)
        error = weights * (
            (relative + 2 * coarse) * (dweights - mean).abs() + off + mean_error + 2 * u * (dweights.abs() + mean.abs())
        )
    query, key, *others = scores.gradient_bounds(call, dscores, error)
    of_mask = (summed_bounds(dscores, error, dscores.abs(), 1, call.mask, u),) if call.masked else ()
    return join_arguments((query, key, *others), of_value, *of_mask)
