"""The logsumexp of scores along an axis, block by block, and its gradients.

Backward computes each block again, so that only the inputs and two statistics of each result are saved.

A result of -inf has no gradient if all weights are 0. Else its scores have overflowed: the shares of the components are
unknown, and so is their gradient, NaN.
"""

import math

import torch
from torch import Tensor

from effops.blocks.cutting import Buffer, broadcast_slice, sizes
from effops.blocks.pairs import Scores
from effops.blocks.plan import Plan
from effops.blocks.weighted import Weighted
from effops.numerics.exponentials import exp_


class Reduction:
    """The logsumexp of scores along an axis of a plan.

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


def forward(scores: Scores, reduction: Reduction, statistics: Tensor) -> Tensor:
    """Fill `statistics` with the statistics of all scores, a block at a time."""
    maximum, total = (reduction.ordered(tensor) for tensor in statistics.unbind(-1))
    maximum.fill_(-math.inf)
    total.zero_()
    buffer = Buffer(statistics, scores.arithmetic)
    is_whole = scores.extents.pairs[reduction.position] == scores.plan.shape[reduction.axis]
    for block in scores.walk():
        value = buffer.room(sizes(block.pairs))
        scores.evaluate(block, value)
        highest, sums = broadcast_slice(maximum, block.pairs), broadcast_slice(total, block.pairs)
        if is_whole:
            torch.amax(value, reduction.position, keepdim=True, out=highest)
            exp_(value.sub_(finite(highest)))
            torch.sum(value, reduction.position, keepdim=True, out=sums)
        else:
            absorb(value, highest, sums, reduction.position)
    total.masked_fill_(maximum == -math.inf, 0).log_()
    return statistics


def backward(scores: Weighted, reduction: Reduction, statistics: Tensor, dout: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the operands. The gradient of a score is its share of `dout`."""
    if scores.plan.numel(scores.plan.order) == 0:
        return scores.gradients()
    maximum, log_total, upstream = (reduction.ordered(tensor) for tensor in (*statistics.unbind(-1), dout))
    lack_weight = scores.lack_weight(reduction.position)
    buffer = Buffer(statistics, scores.arithmetic)
    for block in scores.walk():
        share = buffer.room(sizes(block.pairs))
        evaluated = scores.evaluate(block, share)
        remainder, dresult = broadcast_slice(log_total, block.pairs), broadcast_slice(upstream, block.pairs)
        # Where the sum is 0, shares are 0 or unknown. An unknown share of an upstream gradient of 0 is 0.
        no_share = (remainder == -math.inf) & (broadcast_slice(lack_weight, block.pairs) | (dresult == 0))
        # Less a maximum of infinity, finite scores have no share. Less one of -inf, shares are NaN.
        share -= broadcast_slice(maximum, block.pairs).masked_fill(no_share, 0)
        scale = remainder.masked_fill(no_share, math.inf).neg_().exp_().mul_(dresult)
        scores.pull_back(block, exp_(share).mul_(scale), evaluated)
    return scores.gradients()


def absorb(value: Tensor, maximum: Tensor, total: Tensor, axis: int, own_maximum: Tensor | None = None) -> Tensor:
    """Add the scores of a block to the statistics, where `total` is the sum before its logarithm is taken.

    Overwrite the scores with exp(score - maximum). Return the factor that makes such values of earlier blocks relative
    to the new maximum. `own_maximum` is that of the block, where it is known.
    """
    highest = torch.maximum(maximum, value.amax(axis, keepdim=True) if own_maximum is None else own_maximum)
    shift = finite(highest)
    factor = torch.exp(maximum - shift)
    total *= factor
    total += exp_(value.sub_(shift)).sum(axis, keepdim=True)
    maximum.copy_(highest)
    return factor


def finite(maximum: Tensor) -> Tensor:
    """The number to subtract before an exponential: the maximum, or 0 where that is infinite or NaN."""
    return maximum.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
