"""Scores under a mask, their softmax, and its weighted sums, a few rows of pairs at a time.

Rows are the queries and columns the keys: the last axis of the plan is that of the keys, along which only keys vary.

    P = softmax(scores + mask),    out = P value

Where a block holds whole rows, their softmax is one pass. Else, while the blocks of keys go by, each row keeps its
maximum, the sum of its exponentials, and the sums that they weigh. Backward computes these again, so that only the
inputs are saved:

    dP = dout value^T,    dscores = P (dP - sum_keys P dP),    dvalue = P^T dout

A row without any key to attend to has weights, result and gradients of 0. So has a row under a mask whose scores all
overflow to -inf, as in PyTorch. Without a mask such a row is NaN.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from effops.blocks import limits
from effops.blocks.cutting import Block, Buffer, depths, merge, sizes
from effops.blocks.dots import MatrixOperand, Products
from effops.blocks.logsumexp import absorb, finite
from effops.blocks.masked import Masked
from effops.blocks.plan import Plan
from effops.numerics.exponentials import exp_
from effops.numerics.values import observed
from effops.pytorch.operators import aten

Gradients = tuple[Tensor | None, ...]

VALUES_PER_ROW = 8  # numbers kept for a row while its blocks go by, temporaries included


class Dropout:
    """Zero weights with probability `p` and scale the others. The seed gives a block the same factors each time."""

    def __init__(self, plan: Plan, p: float, seed: int, device: torch.device) -> None:
        self.sizes, self.p, self.seed = plan.sizes(plan.order), p, seed
        self.generator = torch.Generator(device)

    def factor(self, block: Block, like: Tensor) -> Tensor:
        first = 0
        for piece, size in zip(block.pairs, self.sizes):
            first = first * size + piece.start
        self.generator.manual_seed((self.seed + first) % 2**63)
        kept = torch.empty_like(like).bernoulli_(1 - self.p, generator=self.generator)
        return kept.mul_(1 / (1 - self.p) if self.p < 1 else 0)


class Rows:
    """The softmax of some rows, whose scores come in blocks. `gather` goes through the blocks before `weights` can."""

    def __init__(self, scores: Masked, buffer: Buffer, blocks: list[Block]) -> None:
        self.scores, self.buffer, self.blocks = scores, buffer, blocks
        self.total = self.zeros()
        self.maximum = torch.full_like(self.total, -math.inf)

    def zeros(self) -> Tensor:
        """A zero for each row."""
        return self.buffer.like.new_zeros((*sizes(self.blocks[0].pairs[:-1]), 1), dtype=self.buffer.dtype)

    def gather(self) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Find the maximum and the sum of each row.

        Yield each block with its terms exp(score - maximum), and with the factor that makes sums of earlier terms
        relative to the same maximum.
        """
        for block in self.blocks:
            terms = self.buffer.room(sizes(block.pairs))
            highest = self.scores.maxima(block, terms)
            yield block, terms, absorb(terms, self.maximum, self.total, -1, highest)
        if self.scores.may_exclude:  # without a mask a sum is 0 where all scores overflow, and weights are to be NaN
            self.total.masked_fill_(self.total == 0, 1)
        self.maximum = finite(self.maximum)

    def weights(self, block: Block) -> Tensor:
        """The weights of a block, after `gather`."""
        scores = self.buffer.room(sizes(block.pairs))
        self.scores.evaluate(block, scores)
        return exp_(scores.sub_(self.maximum)).div_(self.total)


def _row_weights(scores: Masked, block: Block, scored: Tensor, out: Tensor | None = None) -> Tensor:
    """The weights of whole rows, written to `out`, or else to `scored`, the memory for their scores."""
    out = _ordinary_row_weights(scores, block, scored, out)
    return _any_row_weights(scores, block, scored, out) if _may_have_nan_of_mask(scores, out) else out


def _ordinary_row_weights(scores: Masked, block: Block, scored: Tensor, out: Tensor | None = None) -> Tensor:
    """The weights of whole rows. A row without keys, or with a score that is NaN or infinite, may be NaN throughout."""
    out = scored if out is None else out
    if scores.may_exclude:
        scores.reserve(block)
    scores.evaluate_unmended(block, scored)
    return torch.softmax(scored, -1, out=out)


def _may_have_nan_of_mask(scores: Masked, results: Tensor) -> bool:
    """Whether the ordinary weights, or sums that they weigh, have a NaN that may come of a mask."""
    if not scores.may_exclude:
        return False
    return results.device.type != "cpu" or bool(observed(results.sum().isnan(), ordinary=scores.first_query_lacks_keys))


def _any_row_weights(scores: Masked, block: Block, scored: Tensor, out: Tensor) -> Tensor:
    """The weights of whole rows, whatever their scores are."""
    no_key = scores.evaluate_and_find_empty_rows(block, scored)
    torch.softmax(scored, -1, out=out)
    return out.masked_fill_(no_key, 0)


def _write_weights(scores: Masked, buffer: Buffer, block: Block, out: Tensor) -> None:
    """Write the weights of whole rows, in one pass over their scores."""
    scored = buffer.room(sizes(block.pairs))
    if out.dtype == scored.dtype and out.is_contiguous():  # else PyTorch writes to a copy first
        _row_weights(scores, block, scored, out)
    else:
        out.copy_(_row_weights(scores, block, scored))


def _write_parts(scores: Masked, buffer: Buffer, blocks: list[Block], ordered: Tensor) -> None:
    """Write the weights of rows that several blocks share, in two passes over their scores."""
    rows = Rows(scores, buffer, blocks)
    deque(rows.gather(), maxlen=0)
    for block in blocks:
        ordered[block.pairs].copy_(rows.weights(block))


def forward_weights(scores: Masked, out: Tensor) -> Tensor:
    """Fill `out`, whose memory has the plan's order of axes, with the softmax."""
    buffer = Buffer(out, scores.arithmetic)
    ordered = scores.plan.view(out, scores.plan.order)
    for blocks in scores.rows() if out.numel() else ():
        if len(blocks) == 1:
            _write_weights(scores, buffer, blocks[0], ordered[blocks[0].pairs])
        else:
            _write_parts(scores, buffer, blocks, ordered)
        reached = blocks[-1].pairs[-1].stop
        ordered[blocks[-1].pairs[:-1]][..., reached:].zero_()
    return out


def backward_weights(scores: Masked, dout: Tensor) -> Gradients:
    """The gradients of the operands, for a gradient `dout` of the softmax."""
    upstream = scores.plan.view(dout, scores.plan.order)
    buffer = Buffer(dout, scores.arithmetic)

    def dweights(block: Block) -> Tensor:
        return buffer.room(sizes(block.pairs)).copy_(upstream[block.pairs])

    return _backward(scores, dout, dweights, lambda block, weights: None)


def forward_sums(scores: Masked, value: Tensor, dropout: Dropout | None, out: Tensor) -> Tensor:
    """Fill `out`, whose memory has the plan's order of axes, with the sums of `value (*batch, 1, keys, V)`."""
    plan = scores.plan
    values = MatrixOperand(plan, value, plan.columns, scores.arithmetic)
    depth = _depth(scores, value, values.copied)
    buffer, sums_buffer = Buffer(out, scores.arithmetic), Buffer(out, scores.arithmetic)
    ordered = plan.view(out.unsqueeze(-2), plan.order, trailing=1, expand=False)
    if plan.numel(plan.order) == 0:
        return out.zero_()

    def add(block: Block, weights: Tensor, sums: Tensor, beta: int) -> None:
        """Add what a block contributes to beta * sums."""
        if dropout is not None:
            weights *= dropout.factor(block, weights)
        matrices, factors = (merge(tensor, len(plan.batch), len(plan.rows)) for tensor in (sums, weights))
        for coordinates in depths(value.shape[-1], depth):
            part_of_value = values.block((*block.batch, *block.columns, coordinates))
            matrices[..., coordinates].baddbmm_(factors, part_of_value, beta=beta)

    for blocks in scores.rows():
        target = ordered[blocks[0].pairs[:-1]].squeeze(-2)
        sums = sums_buffer.room(target.shape)
        if len(blocks) == 1:
            scored = buffer.room(sizes(blocks[0].pairs))
            if scores.may_exclude:  # the scores may be computed twice
                values.reserve((*blocks[0].batch, *blocks[0].columns, slice(0, depth)))
            add(blocks[0], _ordinary_row_weights(scores, blocks[0], scored), sums, 0)
            if _may_have_nan_of_mask(scores, sums):
                add(blocks[0], _any_row_weights(scores, blocks[0], scored, scored), sums, 0)
        else:
            sums.zero_()
            rows = Rows(scores, buffer, blocks)
            for block, terms, factor in rows.gather():
                sums.mul_(factor)
                add(block, terms, sums, 1)
            sums.div_(rows.total)
        target.copy_(sums)
    return out


def backward_sums(
    scores: Masked, value: Tensor, dropout: Dropout | None, dout: Tensor, wants_value: bool
) -> tuple[Gradients, Tensor | None]:
    """The gradients of the operands of the scores, and the gradient of `value`."""
    extents = replace(scores.extents, depth=_depth(scores, value, is_copied=True))
    products = Products(
        scores.plan, value, dout.unsqueeze(-2), scores.arithmetic, extents=extents, wants_loc=wants_value
    )
    buffer = Buffer(dout, scores.arithmetic)

    def dweights(block: Block) -> Tensor:
        found = buffer.room(sizes(block.pairs))
        products.evaluate(block, found)
        return found if dropout is None else found.mul_(dropout.factor(block, found))

    def pull_back(block: Block, weights: Tensor) -> None:
        if wants_value:
            products.pull_back(block, weights if dropout is None else weights * dropout.factor(block, weights))

    return _backward(scores, dout, dweights, pull_back), products.gradients()[1]


def _depth(scores: Masked, value: Tensor, is_copied: bool) -> int:
    """How many coordinates of a block of values are taken at once: as many as a copy may have."""
    if not is_copied:
        return max(1, min(value.shape[-1], limits.DEPTH))
    extents = scores.extents
    longest = math.prod(extents.batch) * max(math.prod(extents.rows), math.prod(extents.columns))
    return max(1, min(value.shape[-1], limits.DEPTH, limits.BLOCK_BYTES // scores.arithmetic.itemsize // longest))


def _backward(
    scores: Masked, dout: Tensor, dweights: Callable[[Block], Tensor], pull_back: Callable[[Block, Tensor], None]
) -> Gradients:
    """The gradients of the operands of the scores.

    `dweights` computes the gradient of the weights of a block. `pull_back` takes the weights of a block and adds to the
    gradient of the value.
    """
    buffer = Buffer(dout, scores.arithmetic)
    for blocks in scores.rows() if scores.plan.numel(scores.plan.order) else ():
        if len(blocks) == 1:
            weights = _row_weights(scores, blocks[0], buffer.room(sizes(blocks[0].pairs)))
            pull_back(blocks[0], weights)
            found = dweights(blocks[0])
            aten._softmax_backward_data.out(found, weights, -1, found.dtype, grad_input=found)
            _pull_back_share(scores, blocks[0], found)
            continue
        rows = Rows(scores, buffer, blocks)
        weighted_sum = rows.zeros()
        for block, terms, factor in rows.gather():
            found = dweights(block)
            weighted_sum.mul_(factor).add_((found * terms).sum(-1, keepdim=True))
        weighted_sum /= rows.total
        for block in blocks:
            weights = rows.weights(block)
            pull_back(block, weights)
            _pull_back_share(scores, block, dweights(block).sub_(weighted_sum).mul_(weights))
    return scores.gradients()


def _pull_back_share(scores: Masked, block: Block, share: Tensor) -> None:
    """Add what the gradient of the scores of a block contributes, which is 0 where a weight is 0, unless it is NaN."""
    if share.device.type == "cpu" and not observed(share.sum().isnan(), ordinary=False):
        scores.pull_back_included(block, share)
    else:
        scores.pull_back(block, share)
