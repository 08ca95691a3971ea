"""Scores under a mask, block by block: that of attention, or the log weights of a mixture, which are added alike.

In attention rows are the queries, columns the keys: the last axis of the plan is that of the keys.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from effops.blocks.operand import PairOperand
from effops.blocks.pairs import Scores
from effops.blocks.tiling import Block, is_prediction, row_blocks


class Masked(Scores):
    """Scores under a mask. `gradients` returns those of `scores`, and then that of an additive mask.

    Pairs that a boolean mask excludes score -inf and pass no gradient. The same holds for pairs whose key comes more
    than `diagonal` places after the query; None is as far as can be.
    """

    def __init__(
        self, scores: Scores, mask: Tensor | None, *, diagonal: int | None = None, wants_mask: bool = False
    ) -> None:
        super().__init__(scores.plan, scores.arithmetic, scores.extents)
        self.scores, self.diagonal = scores, diagonal
        self.lacks_keys = diagonal is not None and diagonal < 0  # the first query does, whatever the mask is
        self.mask = None if mask is None else PairOperand(self.plan, mask, self.arithmetic if wants_mask else None)
        self.excludes = mask is not None and mask.dtype == torch.bool

    def walk(self) -> Iterable[Block]:
        return self.scores.walk()

    def rows(self) -> Iterator[list[Block]]:
        """For some rows at a time, the blocks with keys that these rows may attend to."""
        for i, blocks in enumerate(row_blocks(self.plan, self.extents)):
            if self.diagonal is None or not blocks:
                yield blocks
            else:
                reached = blocks[0].pairs[self._query_axis()].stop
                if is_prediction() and i > 0:  # it sees no further rows, of which the last attend to the most keys
                    reached = self.plan.shape[-2]
                last = reached + self.diagonal
                yield [block for block in blocks if block.pairs[-1].start < last] or blocks[:1]

    def evaluate(self, block: Block, out: Tensor | None) -> Any:
        evaluated = self.scores.evaluate(block, out)
        if out is not None:
            if self.mask is not None and not self.excludes:
                out += self.mask.part(block.pairs)
            for excluded in self._excluded(block, out.device):
                out.masked_fill_(excluded, -math.inf)
        return evaluated

    def pull_back(self, block: Block, weight: Tensor, evaluated: Any = None) -> None:
        weight = weight.to(self.arithmetic).contiguous()
        for excluded in self._excluded(block, weight.device):
            weight = weight.masked_fill(excluded, 0)
        if self.mask is not None:
            self.mask.add(block.pairs, weight)
        self.scores.pull_back(block, weight, evaluated)

    def gradients(self) -> tuple[Tensor | None, ...]:
        return *self.scores.gradients(), None if self.mask is None else self.mask.gradient()

    def _excluded(self, block: Block, device: torch.device) -> Iterator[Tensor]:
        """Masks of the pairs of a block that do not take part, as tensors that broadcast with the block."""
        if self.mask is not None and self.excludes:
            yield self.mask.part(block.pairs).logical_not()
        if self.diagonal is not None:
            queries, keys = block.pairs[self._query_axis()], block.pairs[-1]
            # A prediction sees the first blocks of a row alone, of which a later one may hold a mask.
            last = self.plan.shape[-1] if is_prediction() else keys.stop
            if last - 1 > queries.start + self.diagonal:
                query = torch.arange(queries.start + self.diagonal, queries.stop + self.diagonal, device=device)
                key = torch.arange(keys.start, keys.stop, device=device)
                yield key > query.view(-1, *(1,) * (len(block.pairs) - 1 - self._query_axis()))

    def _query_axis(self) -> int:
        """The position of the axis of the queries in the order of the plan."""
        return self.plan.order.index(len(self.plan.shape) - 2)
