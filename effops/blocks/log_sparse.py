"""Causal attention over a log-sparse pattern, in blocks that fit the cache: O(L log L) work, and no matrix of pairs.

Row l attends to row l - d for the same few offsets d, whatever l is. Offsets that lie close together, as small offsets
do, are computed as a diagonal of square blocks: matrix products under a mask. Most of these products is masked out, but
they are fast. Other offsets are computed one by one, as row-wise products of the queries and the keys d rows before.

Forward keeps a running maximum and sum of the softmax. Backward computes the probabilities of a block of rows again.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from effops.blocks import limits
from effops.blocks.cutting import broadcast_slice, fit, is_prediction, visited_pieces, whole
from effops.blocks.logsumexp import absorb
from effops.blocks.plan import Shape, Slices
from effops.numerics.exponentials import exp_
from effops.numerics.layout import zero_gradient
from effops.numerics.shapes import broadcast_shapes


class Pattern(NamedTuple):
    """The pattern of offsets d: those with (d mod restart) in {0..local-1} or {local-1+2^k}.

    Without `restart` no modulus is taken.
    """

    local: int
    restart: int | None

    def offsets(self, length: int) -> list[int]:
        """The offsets below `length`, ascending."""
        period = length if self.restart is None else min(self.restart, length)
        powers = (self.local - 1 + 2**k for k in range(period.bit_length()))
        base = [*range(min(self.local, period)), *(offset for offset in powers if offset < period)]
        starts = range(0, length, max(1, period))
        return [start + offset for start in starts for offset in base if start + offset < length]

    def pairs(self, length: int) -> int:
        return sum(length - offset for offset in self.offsets(length))


def allowed(distance: Tensor, local: int, restart: int | None) -> Tensor:
    """Whether a query attends to a key that is `distance` positions before it; scriptable."""
    offset = distance if restart is None else distance % restart
    beyond = offset - (local - 1)
    return (distance >= 0) & ((beyond <= 0) | ((beyond & (beyond - 1)) == 0))


@dataclass(frozen=True)
class Diagonal:
    """Square blocks of pairs, all at one distance from the main diagonal. The last block of a call may be smaller.

    They are an `OffsetGroup`: some offsets of a block of rows, as a matrix (rows, columns) for each entry of the batch.
    `rows` are the rows of the block that have a pair in the group. `left` and `total` of `gather` have the rows of the
    block, counted from its first row. `right`, and `total` of `scatter`, have all rows of the call.
    """

    rows: slice
    keys: slice
    count: int
    masked: Tensor

    def _split(self, tensor: Tensor) -> Tensor:
        blocks: Tensor = tensor.unflatten(-2, (self.count, tensor.shape[-2] // self.count))
        return blocks

    def _right(self, right: Tensor, dtype: torch.dtype) -> Tensor:
        return self._split(right[..., self.keys, :]).to(dtype)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Dot products of the block's rows `left` with those of `right` at the offsets."""
        product = self._split(left[..., self.rows, :]) @ self._right(right, left.dtype).mT
        return product.flatten(-3, -2)

    def mask_(self, scores: Tensor) -> Tensor:
        """Set entries that are no pair of the pattern to minus infinity."""
        blocks = self._split(scores)
        blocks.masked_fill_(self.masked[: blocks.shape[-2], : blocks.shape[-1]], -math.inf)
        return scores

    def gather(self, weights: Tensor, right: Tensor, total: Tensor) -> None:
        """Add to each row of the block in `total` the weighted sum of its rows of `right`, which the offsets choose."""
        product = self._split(weights) @ self._right(right, weights.dtype)
        total[..., self.rows, :].add_(product.flatten(-3, -2))

    def scatter(self, weights: Tensor, left: Tensor, total: Tensor) -> None:
        """Add each of the block's rows `left`, times its weights, to the rows of `total` at the offsets.

        Sum over the batch axes where `total` has size 1.
        """
        target = total[..., self.keys, :]
        product = self._split(weights).mT @ self._split(left[..., self.rows, :])
        target += product.flatten(-3, -2).sum_to_size(target.shape)


@dataclass(frozen=True)
class Shifts:
    """Offsets that are computed one by one, with the methods of `Diagonal`. `first` is the first row of the block."""

    first: int
    rows: slice
    offsets: Sequence[int]

    def _shifted(self) -> Iterator[tuple[int, slice, slice, slice]]:
        """For each offset: its column, the rows with a key at it (within the group, then the block), and their keys."""
        for column, offset in enumerate(self.offsets):
            rows = slice(max(self.rows.start, offset - self.first), self.rows.stop)
            inside = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
            shift = self.first - offset
            yield column, inside, rows, slice(rows.start + shift, rows.stop + shift)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        batch = broadcast_shapes(left.shape[:-2], right.shape[:-2])
        # The transposed view keeps the products of each offset contiguous.
        products = left.new_zeros((*batch, len(self.offsets), self.rows.stop - self.rows.start)).mT
        for column, inside, rows, keys in self._shifted():
            product = left[..., rows, :] * right[..., keys, :].to(left.dtype)
            torch.sum(product, -1, out=products[..., inside, column])
        return products

    def mask_(self, scores: Tensor) -> Tensor:
        for column, inside, _, _ in self._shifted():
            scores[..., : inside.start, column] = -math.inf
        return scores

    def gather(self, weights: Tensor, right: Tensor, total: Tensor) -> None:
        for column, inside, rows, keys in self._shifted():
            total[..., rows, :].addcmul_(weights[..., inside, column, None], right[..., keys, :].to(weights.dtype))

    def scatter(self, weights: Tensor, left: Tensor, total: Tensor) -> None:
        for column, inside, rows, keys in self._shifted():
            target = total[..., keys, :]
            target += (weights[..., inside, column, None] * left[..., rows, :]).sum_to_size(target.shape)


OffsetGroup = Diagonal | Shifts


class Blocks:
    """The rows of a call, a block at a time, and the groups of offsets of each.

    Args:
        tensors: query, key and value, of any strides
        batch: the shape to which their batch axes broadcast
        keeps_scores: whether the scores of all groups of a block are kept at once, or else those of one group
    """

    def __init__(
        self, pattern: Pattern, tensors: Sequence[Tensor], batch: Shape, arithmetic: torch.dtype, *, keeps_scores: bool
    ) -> None:
        self.batch, self.arithmetic = batch, arithmetic
        self.length = tensors[0].shape[-2]
        self.device = tensors[0].device
        limit = limits.BLOCK_BYTES // arithmetic.itemsize
        width = max(1, *(tensor.shape[-1] for tensor in tensors))
        self.edge = min(limits.DIAGONAL_ROWS, max(1, limit // width))
        offsets = pattern.offsets(self.length)
        spans = [list(span) for _, span in itertools.groupby(offsets, lambda offset: offset // self.edge)]
        dense = [span for span in spans if len(span) >= limits.DENSE_SHARE * self.edge]
        self.dense_offsets = set(itertools.chain(*dense))
        self.single_offsets = [offset for offset in offsets if offset not in self.dense_offsets]
        # A span of offsets covers the lower half of one diagonal of blocks and the upper half of the next diagonal.
        self.diagonals = sorted({span[0] // self.edge + half for span in dense for half in (0, 1)})
        columns = len(self.single_offsets) + self.edge * len(self.diagonals) if keeps_scores else 0
        self.rows = max(1, limit // max(width, self.edge, columns // limits.SCORE_BLOCKS) // self.edge) * self.edge
        self.extents = fit(batch, max(1, self.rows // max(1, self.length)))
        places = torch.arange(self.edge, device=self.device)
        self.distances = places.unsqueeze(-1) - places + self.edge - 1

    def batches(self) -> Iterable[Slices]:
        return visited_pieces(whole(self.batch), self.extents)

    def row_blocks(self) -> list[slice]:
        """Blocks of rows, each a multiple of the edge long, and a block of the rows that remain.

        A prediction takes the last three, among which is the whole block with the most offsets.
        """
        aligned = self.length // self.edge * self.edge
        blocks = [slice(start, min(start + self.rows, aligned)) for start in range(0, aligned, self.rows)]
        if aligned < self.length:
            blocks.append(slice(aligned, self.length))
        return blocks[-3:] if is_prediction() else blocks

    def take(self, tensor: Tensor, batch: Slices) -> Tensor:
        """A view of the part of a tensor that belongs to a block of the batch, with all batch axes."""
        missing = len(self.batch) + 2 - tensor.ndim
        return broadcast_slice(tensor[(None,) * missing], batch)

    def offset_groups(self, rows: slice) -> Iterator[OffsetGroup]:
        """The groups of offsets of a block of rows. In the first group every row has a pair: its pair with itself."""
        both = self._shifts(rows), self._diagonals(rows)
        return itertools.chain(*(both if 0 in self.single_offsets[:1] else reversed(both)))

    def _shifts(self, rows: slice) -> Iterator[OffsetGroup]:
        offsets = [offset for offset in self.single_offsets if offset < rows.stop]
        for i in range(0, len(offsets), limits.SHIFTS_PER_GROUP):
            inside = slice(max(0, offsets[i] - rows.start), rows.stop - rows.start)
            yield Shifts(rows.start, inside, offsets[i : i + limits.SHIFTS_PER_GROUP])

    def _diagonals(self, rows: slice) -> Iterator[OffsetGroup]:
        edge, last = self.edge, -(-rows.stop // self.edge)
        for shift in self.diagonals:
            if shift < last:
                first = max(rows.start // edge, shift)
                keys = slice((first - shift) * edge, min((last - shift) * edge, self.length))
                nearest = (shift - 1) * edge + 1
                missing = [nearest + i not in self.dense_offsets for i in range(2 * edge - 1)]
                masked = torch.tensor(missing, device=self.device)[self.distances]
                yield Diagonal(slice(first * edge - rows.start, rows.stop - rows.start), keys, last - first, masked)


def forward(blocks: Blocks, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> Tensor:
    """Fill `out` with the attention of every row."""
    for batch, rows in itertools.product(blocks.batches(), blocks.row_blocks()):
        _attend(blocks, batch, rows, query, key, value, scale, out)
    return out


def _attend(
    blocks: Blocks, batch: Slices, rows: slice, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor
) -> None:
    """Fill a block of `out`. The softmax takes one group after the other."""
    query, key, value = (blocks.take(tensor, batch) for tensor in (query, key, value))
    left, target = query[..., rows, :].to(blocks.arithmetic), out[batch][..., rows, :]
    total = left.new_zeros(target.shape)
    scored = broadcast_shapes(query.shape[:-2], key.shape[:-2])
    sums = left.new_zeros((*scored, target.shape[-2], 1))
    highest = torch.full_like(sums, -math.inf)
    for group in blocks.offset_groups(rows):
        weights = group.mask_(group.multiply(left, key).mul_(scale))
        shrink = absorb(weights, highest[..., group.rows, :], sums[..., group.rows, :], -1)
        total[..., group.rows, :].mul_(shrink)
        group.gather(weights, value, total)
    target.copy_(total.div_(sums))


def backward(
    blocks: Blocks, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients that `wanted` asks for, in the shapes and dtypes of the tensors.

    With the probabilities P and dP = dout value^T of the pairs in the pattern:
        dvalue = P^T dout,    dS = scale P (dP - sum_keys P dP),    dquery = dS key,    dkey = dS^T query
    """
    tensors = query, key, value
    totals = [
        zero_gradient(tensor, blocks.arithmetic) if is_wanted else None for tensor, is_wanted in zip(tensors, wanted)
    ]
    if dout.numel():
        for batch, rows in itertools.product(blocks.batches(), blocks.row_blocks()):
            views = [None if total is None else blocks.take(total, batch) for total in totals]
            operands = [blocks.take(tensor, batch) for tensor in tensors]
            upstream = dout[batch][..., rows, :].to(blocks.arithmetic)
            _pull_back(list(blocks.offset_groups(rows)), rows, upstream, operands, views, scale)
    return [None if total is None else total.to(tensor.dtype) for total, tensor in zip(totals, tensors)]


def _pull_back(
    groups: Sequence[OffsetGroup],
    rows: slice,
    upstream: Tensor,
    operands: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    scale: float,
) -> None:
    """Add the contribution of a block of rows to the gradients."""
    (query, key, value), (dquery, dkey, dvalue) = operands, gradients
    left = query[..., rows, :].to(upstream.dtype)
    shares = _probabilities(groups, left, key, scale)
    if dvalue is not None:
        for group, share in zip(groups, shares):
            group.scatter(share, upstream, dvalue)
    if dquery is None and dkey is None:
        return
    slopes = [group.multiply(upstream, value) for group in groups]
    mean = upstream.new_zeros((*upstream.shape[:-1], 1))
    for group, share, slope in zip(groups, shares, slopes):
        mean[..., group.rows, :].add_((share * slope).sum(-1, keepdim=True))
    dleft = left.new_zeros((*shares[0].shape[:-2], *left.shape[-2:]))
    for group, share, slope in zip(groups, shares, slopes):
        weights = slope.sub_(mean[..., group.rows, :]).mul_(share).mul_(scale).sum_to_size(share.shape)
        if dkey is not None:
            group.scatter(weights, left, dkey)
        if dquery is not None:
            group.gather(weights, key, dleft)
    if dquery is not None:
        target = dquery[..., rows, :]
        target += dleft.sum_to_size(target.shape)


def _probabilities(groups: Sequence[OffsetGroup], left: Tensor, key: Tensor, scale: float) -> list[Tensor]:
    """The softmax of a block of rows, one tensor for each group."""
    scores = [group.mask_(group.multiply(left, key).mul_(scale)) for group in groups]
    highest = scores[0].amax(-1, keepdim=True)
    for group, values in zip(groups[1:], scores[1:]):
        part_highest = highest[..., group.rows, :]
        torch.maximum(part_highest, values.amax(-1, keepdim=True), out=part_highest)
    sums = torch.zeros_like(highest)
    for group, values in zip(groups, scores):
        exp_(values.sub_(highest[..., group.rows, :]))
        sums[..., group.rows, :].add_(values.sum(-1, keepdim=True))
    for group, values in zip(groups, scores):
        values.div_(sums[..., group.rows, :])
    return scores
