"""Additive scores of every broadcast pair, block by block on a CPU, and the gradients of their operands.

    score = sum_d weight_d tanh(q_d + k_d) = sum_d weight_d - 2 sum_d weight_d r_d,    r = 1 / (1 + e^(2q) e^(2k))

    dquery = sum_columns G weight S,    dkey = sum_rows G weight S,    S = 1 - tanh^2 = 4 r (1 - r)
    dweight = sum G - 2 sum G r

where G is the gradient of the scores. The exponentials of the rows and columns of a block are taken once. A pair then
costs a product, a sum and a quotient for each coordinate. Products may overflow or vanish, since r = 0 and r = 1 are
right then. The factors may not. A block with values that are not finite, or for which a factor would overflow or
vanish, takes r = sigmoid(-2 (q + k)). So does a block of a single row or column.

Gradients whose sums overflow are NaN where those of the plain form are infinite.

**Error.** With u the unit roundoff, r has an absolute error of about 3 u, and a tanh one of 6 u. So a small tanh loses
digits, and a score has an error of at least u sum |weight|.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from effops.blocks.operand import PairOperand
from effops.blocks.plan import Plan, Shape, Slices
from effops.blocks.tiling import Block, cut, depths, fit, part, pieces, sizes, tiles, whole
from effops.numerics.values import observed

PAIR_BYTES = 128 * 1024  # size of the scores of a block: 64 x 512 in float32, for callers that reduce them
PIECE_BYTES = 3 * 2**20  # size of a computation: more than an L2 cache, since a smaller one is not worth its calls


class _Weights(NamedTuple):
    """The weights of some pairs and coordinates, their sum, and whether no partial sum of them overflows.

    Weights that all pairs share have a single axis.
    """

    values: Tensor
    total: Tensor
    is_summable: bool


class AdditiveScores:
    """The scores of one call, as `Scores`: of query (rows), key (columns) and weight.

    The three have the same last dimension. `wanted` tells which of their gradients are wanted. `values_per_row` is how
    many values the caller keeps for each row of a block.
    """

    def __init__(
        self,
        plan: Plan,
        query: Tensor,
        key: Tensor,
        weight: Tensor,
        arithmetic: torch.dtype,
        *,
        wanted: Sequence[bool] = (False, False, False),
        values_per_row: int = 1,
    ) -> None:
        self.plan = plan
        self.arithmetic = arithmetic
        self.query, self.key, self.weight = (
            PairOperand(plan, tensor, arithmetic, is_wanted, any(wanted))
            for tensor, is_wanted in zip((query, key, weight), wanted)
        )
        self.dimension = query.shape[-1]
        dimension, itemsize = max(1, self.dimension), arithmetic.itemsize
        self.extents = cut(plan, dimension, itemsize, copies=1, values_per_row=values_per_row, pair_bytes=PAIR_BYTES)
        self.keeps_exponentials = min(math.prod(self.extents.rows), math.prod(self.extents.columns)) > 1
        self.limit = -math.log(torch.finfo(arithmetic).smallest_normal) / 2 - 0.1  # above, e^(2q) loses digits
        self.largest = torch.finfo(arithmetic).max / 8  # up to this sum |weight| no partial sum overflows
        all_axes = range(len(plan.order))
        self.weight_of_pairs = self.weight.varies(all_axes[len(plan.batch) :])
        self.weight_varies = self.weight.varies(all_axes)
        values = PIECE_BYTES // arithmetic.itemsize
        if any(wanted) or self.weight_varies:  # a second buffer is needed, for the terms or for converted weights
            values //= 2
        self.piece = fit(self.extents.pairs, values // self.extents.depth)
        pairs = math.prod(self.piece)

        def empty(numel: int) -> Tensor:
            return query.new_empty(numel, dtype=arithmetic)

        self.factors = [
            empty(self.extents.depth * math.prod(map(min, operand.view.shape, self.extents.pairs)))
            for operand in (self.query, self.key)
        ]
        self.ratios, self.sums = empty(pairs * self.extents.depth), empty(pairs)
        self.terms = torch.empty_like(self.ratios) if any(wanted) else None
        self.rooms: dict[tuple[int, Shape], Tensor] = {}
        self.expands = any(
            size != 1 and self.query.view.shape[axis] == self.key.view.shape[axis] == 1
            for axis, size in enumerate(self.extents.pairs)
        )
        self.one = query.new_ones((), dtype=arithmetic)

    def walk(self) -> Iterator[Block]:
        """Every block once."""
        plan, extents = self.plan, self.extents
        for batch in tiles(whole(plan.sizes(plan.batch)), extents.batch):
            for columns in tiles(whole(plan.sizes(plan.columns)), extents.columns):
                for rows in tiles(whole(plan.sizes(plan.rows)), extents.rows):
                    yield Block(batch, rows, columns)

    def evaluate(self, block: Block, out: Tensor | None) -> None:
        """Write the scores of a block to `out`, in its shape and the dtype of the arithmetic, unless `out` is None."""
        if out is None:
            return
        out.zero_()
        for depth in self._depths():
            factors = self._factors(block, depth)
            shared = None if self.weight_varies else self._weights(block.pairs, depth)
            for pairs, inside in pieces(block, self.piece):
                ratios = self._ratios(factors, inside, depth)
                out[inside].add_(self._weigh(ratios, shared or self._weights(pairs, depth)))

    def pull_back(self, block: Block, weight: Tensor, evaluated: None = None) -> None:
        """Add the contribution of a block to the gradients. `weight` is the gradient of its scores."""
        if self.terms is None:
            return
        for depth in self._depths():
            factors = self._factors(block, depth)
            for pairs, inside in pieces(block, self.piece):
                ratios = self._ratios(factors, inside, depth)
                g = weight[inside].unsqueeze(-1)
                terms = torch.mul(ratios, g, out=self._room(self.terms, ratios.shape))
                if self.weight.total is not None:
                    shape = part(self.weight.total, (*pairs, depth)).shape
                    total = g.to(self.arithmetic).sum_to_size(*shape[:-1], 1)
                    self.weight.add(pairs, depth, torch.sub(total, terms.sum_to_size(shape), alpha=2))
                if self.query.total is None and self.key.total is None:
                    continue
                terms.addcmul_(terms, ratios, value=-1)
                if self.weight_of_pairs:
                    terms.mul_(self.weight.part(pairs, depth))
                self.query.add(pairs, depth, terms)
                self.key.add(pairs, depth, terms)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of query, key and weight, in their shapes and dtypes, after `pull_back` of every block."""
        for operand in (self.query, self.key):
            if operand.total is not None:
                operand.total *= 4
                if not self.weight_of_pairs:
                    operand.total *= self.weight.view
        return self.query.gradient(), self.key.gradient(), self.weight.gradient()

    def _depths(self) -> Iterable[slice]:
        return depths(self.dimension, self.extents.depth) if self.dimension else ()

    def _factors(self, block: Block, depth: slice) -> tuple[bool, Tensor, Tensor]:
        """Whether r comes from products of exponentials; then e^(2q) and e^(2k) if so, else q and k."""
        parts = (operand.part(block.pairs, depth) for operand in (self.query, self.key))
        query, key = (
            buffer[: values.numel()].view(values.shape).copy_(values)
            if self.keeps_exponentials or values.dtype != self.arithmetic
            else values
            for buffer, values in zip(self.factors, parts)
        )
        if not self.keeps_exponentials:
            return False, query, key
        extremes = [extreme for operand in (query, key) for extreme in operand.aminmax()]
        as_product = all(abs(observed(extreme, ordinary=0.0)) <= self.limit for extreme in extremes)
        if as_product:
            query.mul_(2).exp_()
            key.mul_(2).exp_()
        return as_product, query, key

    def _ratios(self, factors: tuple[bool, Tensor, Tensor], inside: Slices, depth: slice) -> Tensor:
        """The r of every pair and coordinate of a piece."""
        as_product, query, key = factors
        out = self._room(self.ratios, (*sizes(inside), depth.stop - depth.start))
        query, key = part(query, inside), part(key, inside)
        if self.expands:
            query, key = query.expand(out.shape), key.expand(out.shape)
        if as_product:
            return torch.addcmul(self.one, query, key, out=out).reciprocal_()
        return torch.add(query, key, out=out).mul_(-2).sigmoid_()

    def _weights(self, pairs: Slices, depth: slice) -> _Weights:
        values = self.weight.part(pairs, depth).to(self.arithmetic)
        if values.numel() == values.shape[-1]:
            values = values.reshape(-1).contiguous()  # a product with strided weights sums its terms sequentially
        is_summable = observed(torch.linalg.vector_norm(values, 1), ordinary=0.0) <= self.largest
        return _Weights(values, values.sum(-1), is_summable)

    def _weigh(self, ratios: Tensor, weights: _Weights) -> Tensor:
        """The sums over d of weight (1 - 2 r), for the pairs of a piece. They may overwrite `ratios`."""
        values, total, is_summable = weights
        sums = self._room(self.sums, ratios.shape[:-1])
        if not is_summable:  # the sum of the weights may be infinite where that of the terms is not
            return torch.sum(ratios.mul_(-2).add_(1).mul_(values), -1, out=sums)
        if values.ndim > 1:
            return torch.sum(ratios.mul_(values), -1, out=sums).mul_(-2).add_(total)
        torch.addmv(total, ratios.view(-1, len(values)), values, alpha=-2, out=sums.view(-1))
        return sums

    def _room(self, buffer: Tensor, shape: Shape) -> Tensor:
        """A view of the start of a buffer, in the given shape."""
        at = id(buffer), shape
        if at not in self.rooms:
            self.rooms[at] = buffer[: math.prod(shape)].view(shape)
        return self.rooms[at]
