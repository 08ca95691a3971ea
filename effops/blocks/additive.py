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

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effops.blocks import limits
from effops.blocks.cutting import Block, Buffer, block_extents, broadcast_slice, depths, fit, sizes, visited_in_block
from effops.blocks.operand import point_operand
from effops.blocks.pairs import Scores
from effops.blocks.plan import Plan, Slices
from effops.numerics.values import observed


class _Weights(NamedTuple):
    """The weights of some pairs and coordinates, their sum, and whether no partial sum of them overflows."""

    values: Tensor
    total: Tensor
    is_summable: bool


class AdditiveScores(Scores):
    """The scores of one call, with gradients of query (rows), key (columns) and weight.

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
        self.query, self.key, self.weight = (
            point_operand(plan, tensor, arithmetic, is_wanted)
            for tensor, is_wanted in zip((query, key, weight), wanted)
        )
        self.differentiated = any(wanted)
        dimension, itemsize = max(1, query.shape[-1]), arithmetic.itemsize
        pair_bytes = limits.ADDITIVE_PAIR_BYTES
        extents = block_extents(
            plan, dimension, itemsize, values_per_coordinate=1, values_per_row=values_per_row, pair_bytes=pair_bytes
        )
        super().__init__(plan, arithmetic, extents)
        self.depths = list(depths(dimension, extents.depth)) if query.shape[-1] else []
        self.keeps_exponentials = min(math.prod(extents.rows), math.prod(extents.columns)) > 1
        self.limit = -math.log(torch.finfo(arithmetic).smallest_normal) / 2 - 0.1  # above, e^(2q) loses digits
        self.largest = torch.finfo(arithmetic).max / 8  # up to this sum |weight| no partial sum overflows
        self.weight_of_pairs = plan.varies(weight, plan.rows + plan.columns, trailing=1)
        self.weight_varies = plan.varies(weight, plan.order, trailing=1)
        values = limits.ADDITIVE_PIECE_BYTES // itemsize
        if self.differentiated or self.weight_varies:  # a second buffer is needed, for terms or converted weights
            values //= 2
        self.piece_extents = fit(extents.pairs, values // extents.depth)
        self.factors = Buffer(query, arithmetic), Buffer(query, arithmetic)
        self.ratios, self.sums, self.terms = (Buffer(query, arithmetic) for _ in range(3))
        self.one = query.new_ones((), dtype=arithmetic)

    def evaluate(self, block: Block, out: Tensor | None) -> None:
        if out is None:
            return
        out.zero_()
        for depth in self.depths:
            factors = self._factors(block, depth)
            shared = None if self.weight_varies else self._weights(block.pairs, depth)
            for pairs, inside in visited_in_block(block, self.piece_extents):
                ratios = self._ratios(factors, inside, depth)
                out[inside].add_(self._weigh(ratios, shared or self._weights(pairs, depth)))

    def pull_back(self, block: Block, weight: Tensor, evaluated: Any = None) -> None:
        if not self.differentiated:
            return
        for depth in self.depths:
            factors = self._factors(block, depth)
            for pairs, inside in visited_in_block(block, self.piece_extents):
                ratios = self._ratios(factors, inside, depth)
                g = weight[inside].unsqueeze(-1)
                terms = torch.mul(ratios, g, out=self.terms.room(ratios.shape))
                if self.weight.gradient_view is not None:
                    shape = broadcast_slice(self.weight.gradient_view, (*pairs, depth)).shape
                    total = g.to(self.arithmetic).sum_to_size(*shape[:-1], 1)
                    self.weight.add_gradient((*pairs, depth), torch.sub(total, terms.sum_to_size(shape), alpha=2))
                if not (self.query.wants_gradient or self.key.wants_gradient):
                    continue
                terms.addcmul_(terms, ratios, value=-1)
                if self.weight_of_pairs:
                    terms.mul_(self.weight.part((*pairs, depth)))
                self.query.add_gradient((*pairs, depth), terms)
                self.key.add_gradient((*pairs, depth), terms)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        for operand in (self.query, self.key):
            if operand.gradient_view is not None:
                operand.gradient_view *= 4
                if not self.weight_of_pairs:
                    operand.gradient_view *= self.weight.view
        return self.query.gradient(), self.key.gradient(), self.weight.gradient()

    def _factors(self, block: Block, depth: slice) -> tuple[bool, Tensor, Tensor]:
        """Whether r comes from products of exponentials; then e^(2q) and e^(2k) if so, else q and k."""
        parts = (operand.part((*block.pairs, depth)) for operand in (self.query, self.key))
        query, key = (
            buffer.room(values.shape).copy_(values)
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
        out = self.ratios.room((*sizes(inside), depth.stop - depth.start))
        query, key = broadcast_slice(query, inside).expand(out.shape), broadcast_slice(key, inside)
        if as_product:
            return torch.addcmul(self.one, query, key, out=out).reciprocal_()
        return torch.add(query, key, out=out).mul_(-2).sigmoid_()

    def _weights(self, pairs: Slices, depth: slice) -> _Weights:
        values = self.weight.part((*pairs, depth)).to(self.arithmetic)
        is_summable = observed(torch.linalg.vector_norm(values, 1), ordinary=0.0) <= self.largest
        return _Weights(values, values.sum(-1), is_summable)

    def _weigh(self, ratios: Tensor, weights: _Weights) -> Tensor:
        """The sums over d of weight (1 - 2 r), for the pairs of a piece. They may overwrite `ratios`."""
        values, total, is_summable = weights
        sums = self.sums.room(ratios.shape[:-1])
        if not is_summable:  # the sum of the weights may be infinite where that of the terms is not
            return torch.sum(ratios.mul_(-2).add_(1).mul_(values), -1, out=sums)
        # Not a product of a matrix and a vector: that runs on one thread, and the others wait for what it has read when
        # they overwrite `ratios`.
        torch.sum(ratios.mul_(values), -1, out=sums)
        return torch.add(total, sums, alpha=-2, out=sums)
