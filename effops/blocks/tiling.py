"""Blocks of pairs that fit the cache, and what is made of their scores: all of them, or their logsumexp along an axis.

`Scores` computes the scores of a block where they are wanted, and pulls a gradient of them back to the operands. Here
are the loops over the blocks, the same for all scores. Backward computes each block again, so that only the inputs, and
the statistics of a logsumexp, are saved. Temporaries are a few buffers of about `BLOCK_BYTES`, whatever the shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from effops.blocks.plan import Plan, Shape, Slices

BLOCK_BYTES = 512 * 1024  # half of the L2 cache that a core of common server CPUs has, or all of it
DEPTH = 256  # terms of a dot product summed at once: a longer sum of like signs loses digits


class Block(NamedTuple):
    """A block of pairs: its slices along the axes of each role."""

    batch: Slices
    rows: Slices
    columns: Slices

    @property
    def pairs(self) -> Slices:
        return self.batch + self.rows + self.columns


@dataclass(frozen=True)
class Extents:
    """The largest block along each axis of the plan, by role, and of a step through the contracted axis."""

    batch: Shape
    rows: Shape
    columns: Shape
    depth: int

    @property
    def pairs(self) -> Shape:
        return self.batch + self.rows + self.columns


class Scores(Protocol):
    """The scores of all pairs of a call, block by block."""

    plan: Plan
    arithmetic: torch.dtype
    extents: Extents

    def walk(self) -> Iterator[Block]:
        """Every block, in an order in which they share what is computed for several."""

    def evaluate(self, block: Block, out: Tensor | None) -> None:
        """Write the scores of the block that `walk` gave last to `out`; keep what `pull_back` needs of it."""

    def rehearse(self, block: Block, out: Tensor) -> None:
        """Allocate what `evaluate` does, on fake tensors, which have no values to look at."""

    def pull_back(self, block: Block, weight: Tensor) -> None:
        """Add what gradients `weight` of the scores of the block evaluated last contribute to those of the operands."""

    def gradients(self) -> tuple[Tensor | None, ...]:
        """The gradients of the operands, in their shapes and dtypes, None where they are not wanted."""


def cut(
    plan: Plan,
    dimension: int,
    itemsize: int,
    *,
    copies: float = 0,
    held: int = 1,
    pair_bytes: int = BLOCK_BYTES,
    width: int = 512,
) -> Extents:
    """Blocks of at most `pair_bytes` of pairs and, where operands are copied, `BLOCK_BYTES` of each operand.

    `copies` is how many values are kept for each coordinate of an operand, `held` how many for each row. Blocks have
    `width` columns where there are as many, and more where there are few rows.
    """
    limit = pair_bytes // itemsize
    copied = int(BLOCK_BYTES // itemsize / copies) if copies else 0  # coordinates of an operand
    longest = max(1, copied // min(dimension, 128)) if copies else limit
    all_rows, all_columns = plan.numel(plan.rows), plan.numel(plan.columns)
    columns = min(all_columns, longest, max(width, limit // max(1, all_rows)))
    most_rows = max(1, limit // max(1, held))
    rows = min(all_rows, longest, most_rows, limit // max(1, columns))
    whole = rows == all_rows and columns == all_columns
    entries = (limit // max(1, rows * columns), longest // max(1, rows, columns), most_rows // max(1, rows))
    batch = max(1, min(entries)) if whole else 1
    batch_extents = fit(plan.sizes(plan.batch), batch)
    row_extents = fit(plan.sizes(plan.rows), rows)
    column_extents = fit(plan.sizes(plan.columns), columns)
    widest = math.prod(batch_extents) * max(math.prod(row_extents), math.prod(column_extents))
    depth = min(dimension, DEPTH, max(1, copied // widest) if copies else DEPTH)
    return Extents(batch_extents, row_extents, column_extents, depth)


def fit(sizes: Shape, target: int) -> Shape:
    """Extents with a product of at most `target`: inner axes whole, then part of one, outer axes one by one."""
    extents: list[int] = []
    for size in reversed(sizes):
        extents.append(max(1, min(size, target)))
        target = target // size if 0 < size <= target else 1
    return tuple(reversed(extents))


def whole(sizes: Shape) -> Slices:
    return tuple(slice(0, size) for size in sizes)


_FEW_TILES = ContextVar("few_tiles", default=False)


@contextmanager
def few_tiles() -> Iterator[None]:
    """Let loops over tiles end with the second, which finds what the first leaves: to see what they allocate."""
    token = _FEW_TILES.set(True)
    try:
        yield
    finally:
        _FEW_TILES.reset(token)


def tiles(within: Slices, extents: Shape) -> Iterator[Slices]:
    all_tiles = itertools.product(
        *(
            [slice(i, min(i + extent, axis.stop)) for i in range(axis.start, axis.stop, extent)]
            for axis, extent in zip(within, extents)
        )
    )
    return itertools.islice(all_tiles, 2) if _FEW_TILES.get() else all_tiles


def part(operand: Tensor, block: Slices) -> Tensor:
    """operand[block], whole along the axes where `operand` has size 1, and along those after the block's."""
    return operand[tuple(slice(None) if size == 1 else piece for size, piece in zip(operand.shape, block))]


def merge(block: Tensor, first: int, second: int) -> Tensor:
    """A view with the first axes of a block merged into one, the second ones likewise, and the rest."""
    shape = block.shape
    sizes = (shape[:first], shape[first : first + second], shape[first + second :])
    return block.view([math.prod(size) for size in sizes])


def forward(scores: Scores, out: Tensor) -> Tensor:
    """Fill `out` with all scores; it is laid out in the plan's order of axes."""
    ordered = scores.plan.view(out, scores.plan.order)
    buffer = None if out.dtype == scores.arithmetic else pair_buffer(scores, out)
    for block in scores.walk():
        target = ordered[block.pairs]
        if buffer is None:
            scores.evaluate(block, target)
        else:
            value = inside(buffer, block)
            scores.evaluate(block, value)
            target.copy_(value)
    return out


def rehearse(scores: Scores, out: Tensor) -> Tensor:
    """Allocate what `forward` does, for two blocks: the second finds what the first leaves. For fake tensors."""
    ordered = scores.plan.view(out, scores.plan.order)
    buffer = None if out.dtype == scores.arithmetic else pair_buffer(scores, out)
    for block in itertools.islice(scores.walk(), 2):
        scores.rehearse(block, ordered[block.pairs] if buffer is None else inside(buffer, block))
    return out


def backward(scores: Scores, dout: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the operands, for a gradient of all scores."""
    upstream = scores.plan.view(dout, scores.plan.order)
    if dout.numel():
        for block in scores.walk():
            scores.evaluate(block, None)
            scores.pull_back(block, upstream[block.pairs])
    return scores.gradients()


def pair_buffer(scores: Scores, like: Tensor) -> Tensor:
    return like.new_empty(math.prod(scores.extents.pairs), dtype=scores.arithmetic)


class Reduction:
    """The logsumexp of `log_weights + scores` along an axis of a plan.

    It is kept as two statistics, along a last axis of their tensor that is outermost in memory: the maximum, and the
    logarithm of the sum of the exponentials without it. The result is the sum of both, and rounds the second.
    """

    def __init__(self, plan: Plan, axis: int) -> None:
        self.plan, self.axis = plan, axis
        self.position = plan.order.index(axis)
        self.reduced = plan.without(axis)

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Uninitialised statistics, laid out in the plan's order of the axes that are left."""
        return self.reduced.empty_planes(2, like, dtype)

    def ordered(self, tensor: Tensor) -> Tensor:
        """A tensor with the shape of the result, in the plan's order, with size 1 along the axis."""
        return self.reduced.view(tensor, self.reduced.order).unsqueeze(self.position)


def forward_logsumexp(scores: Scores, log_weights: Tensor, reduction: Reduction, statistics: Tensor) -> Tensor:
    """Fill `statistics` with those of all scores, a block at a time."""
    maximum, total = (reduction.ordered(statistics[..., i]) for i in range(2))
    maximum.fill_(-math.inf)
    total.zero_()
    weights = scores.plan.view(log_weights, scores.plan.order, expand=False)
    buffer = pair_buffer(scores, statistics)
    for block in scores.walk():
        value = inside(buffer, block)
        _weigh(scores, block, weights, value)
        absorb(value, part(maximum, block.pairs), part(total, block.pairs), reduction.position)
    total.log_()
    return statistics


def rehearse_logsumexp(scores: Scores, reduction: Reduction, statistics: Tensor) -> Tensor:
    """As `rehearse`, of `forward_logsumexp`."""
    maximum, total = (reduction.ordered(statistics[..., i]) for i in range(2))
    buffer = pair_buffer(scores, statistics)
    for block in itertools.islice(scores.walk(), 2):
        value = inside(buffer, block)
        scores.rehearse(block, value)
        absorb(value, part(maximum, block.pairs), part(total, block.pairs), reduction.position)
    return statistics


def absorb(value: Tensor, maximum: Tensor, total: Tensor, axis: int) -> Tensor:
    """Take the weighted scores of a block into the statistics: the logarithm of the sum is yet to come.

    Overwrites the scores with exp(score - maximum), and returns what makes such values of earlier blocks relative to
    the new maximum.
    """
    highest = torch.maximum(maximum, value.amax(axis, keepdim=True))
    shift = finite(highest)
    factor = torch.exp(maximum - shift)
    total *= factor
    total += value.sub_(shift).exp_().sum(axis, keepdim=True)
    maximum.copy_(highest)
    return factor


def backward_logsumexp(
    scores: Scores, log_weights: Tensor, reduction: Reduction, statistics: Tensor, dout: Tensor, need_weights: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of log_weights and of the operands, for a gradient of the result: each score gets its share of it."""
    plan = scores.plan
    maximum, log_total, upstream = (reduction.ordered(tensor) for tensor in (*statistics.unbind(-1), dout))
    weights = plan.view(log_weights, plan.order, expand=False)
    total = weights.new_zeros(weights.shape, dtype=scores.arithmetic) if need_weights else None
    buffer = pair_buffer(scores, statistics)
    for block in scores.walk():
        share = inside(buffer, block)
        _weigh(scores, block, weights, share)
        share -= finite(part(maximum, block.pairs))
        remainder = part(log_total, block.pairs)
        share -= remainder.masked_fill(remainder == -math.inf, math.inf)  # of nothing every share is 0
        share.exp_().mul_(part(upstream, block.pairs))
        if total is not None:
            sums = part(total, block.pairs)
            sums += share.sum_to_size(sums.shape)
        scores.pull_back(block, share)
    return None if total is None else plan.gradient(total, log_weights, plan.order), *scores.gradients()


def inside(buffer: Tensor, block: Block) -> Tensor:
    """Room for the scores of a block in a buffer."""
    shape = [piece.stop - piece.start for piece in block.pairs]
    return buffer[: math.prod(shape)].view(shape)


def _weigh(scores: Scores, block: Block, weights: Tensor, out: Tensor) -> None:
    """Write the scores of a block plus their log weights."""
    scores.evaluate(block, out)
    out += part(weights, block.pairs)


def finite(maximum: Tensor) -> Tensor:
    """What to subtract before an exponential: nothing where the maximum is infinite or NaN."""
    return torch.where(maximum.isfinite(), maximum, 0)
