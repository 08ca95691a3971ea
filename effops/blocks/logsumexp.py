"""The logsumexp of weighted scores along an axis, block by block, and its gradients.

Backward computes each block again, so that only the inputs and two statistics of each result are saved.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from effops.blocks.pairs import Scores, inside, pair_buffer
from effops.blocks.plan import Plan
from effops.blocks.tiling import Block, part, shortened_if_predicted


class Reduction:
    """The logsumexp of `log_weights + scores` along an axis of a plan.

    It is kept as two statistics: the maximum, and the logarithm of the sum of exp(value - maximum). They lie along the
    last axis of their tensor, which is outermost in memory. The result is their sum, in which the second is rounded.
    """

    def __init__(self, plan: Plan, axis: int) -> None:
        self.plan, self.axis = plan, axis
        self.position = plan.order.index(axis)
        self.reduced = plan.without(axis)

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Uninitialised statistics, whose memory has the plan's order of the remaining axes."""
        return self.reduced.empty_planes(2, like, dtype)

    def ordered(self, tensor: Tensor) -> Tensor:
        """A tensor with the shape of the result, viewed in the plan's order, with size 1 along the reduced axis."""
        return self.reduced.view(tensor, self.reduced.order).unsqueeze(self.position)


def forward(scores: Scores, log_weights: Tensor, reduction: Reduction, statistics: Tensor) -> Tensor:
    """Fill `statistics` with the statistics of all scores, a block at a time."""
    maximum, total = (reduction.ordered(statistics[..., i]) for i in range(2))
    maximum.fill_(-math.inf)
    total.zero_()
    weights = scores.plan.view(log_weights, scores.plan.order, expand=False)
    buffer = pair_buffer(scores, statistics)
    for block in shortened_if_predicted(scores.walk()):
        value = inside(buffer, block)
        _weigh(scores, block, weights, value)
        absorb(value, part(maximum, block.pairs), part(total, block.pairs), reduction.position)
    total.log_()
    return statistics


def backward(
    scores: Scores, log_weights: Tensor, reduction: Reduction, statistics: Tensor, dout: Tensor, wants_weights: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of log_weights and of the operands. The gradient of a score is its share of `dout`."""
    plan = scores.plan
    maximum, log_total, upstream = (reduction.ordered(tensor) for tensor in (*statistics.unbind(-1), dout))
    weights = plan.view(log_weights, plan.order, expand=False)
    dweights = torch.zeros_like(log_weights, dtype=scores.arithmetic) if wants_weights else None
    total = None if dweights is None else plan.view(dweights, plan.order, expand=False)
    buffer = pair_buffer(scores, statistics)
    for block in scores.walk():
        share = inside(buffer, block)
        evaluated = _weigh(scores, block, weights, share)
        share -= finite(part(maximum, block.pairs))
        remainder = part(log_total, block.pairs)
        share -= remainder.masked_fill(remainder == -math.inf, math.inf)  # if the sum is 0, so is every share
        share.exp_().mul_(part(upstream, block.pairs))
        if total is not None:
            sums = part(total, block.pairs)
            sums += share.sum_to_size(sums.shape)
        scores.pull_back(block, share, evaluated)
    return None if dweights is None else dweights.to(log_weights.dtype), *scores.gradients()


def absorb(value: Tensor, maximum: Tensor, total: Tensor, axis: int) -> Tensor:
    """Add the weighted scores of a block to the statistics, where `total` is the sum before its logarithm is taken.

    Overwrite the scores with exp(score - maximum). Return the factor that makes such values of earlier blocks relative
    to the new maximum.
    """
    highest = torch.maximum(maximum, value.amax(axis, keepdim=True))
    shift = finite(highest)
    factor = torch.exp(maximum - shift)
    total *= factor
    total += value.sub_(shift).exp_().sum(axis, keepdim=True)
    maximum.copy_(highest)
    return factor


def finite(maximum: Tensor) -> Tensor:
    """The number to subtract before an exponential: the maximum, or 0 where that is infinite or NaN."""
    return torch.where(maximum.isfinite(), maximum, 0)


def _weigh(scores: Scores, block: Block, weights: Tensor, out: Tensor) -> Any:
    """Write the scores of a block plus their log weights. Return what `Scores.pull_back` needs of the block."""
    evaluated = scores.evaluate(block, out)
    out += part(weights, block.pairs)
    return evaluated
