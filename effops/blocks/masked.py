"""Scores under a mask, block by block.

Rows are the queries, columns the keys: the last axis of the plan is that of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from effops.blocks.pairs import Scores
from effops.blocks.tiling import Block, part, row_blocks


class Masked:
    """Scores under a mask, as `Scores`. `gradients` returns those of `scores`, and then that of an additive mask.

    Pairs that a boolean mask excludes score -inf and pass no gradient. If `causal`, the same holds for pairs whose key
    comes after the query.
    """

    def __init__(self, scores: Scores, mask: Tensor | None, causal: bool, wants_mask: bool = False) -> None:
        self.scores, self.causal, self.operand = scores, causal, mask
        self.plan, self.arithmetic, self.extents = scores.plan, scores.arithmetic, scores.extents
        self.query_axis = self.plan.order.index(len(self.plan.shape) - 2)
        self.mask = None if mask is None else self.plan.view(mask, self.plan.order, expand=False)
        self.excludes = mask is not None and mask.dtype == torch.bool
        self.dmask = torch.zeros_like(mask, dtype=self.arithmetic) if wants_mask and mask is not None else None
        self.total = None if self.dmask is None else self.plan.view(self.dmask, self.plan.order, expand=False)

    def walk(self) -> Iterator[Block]:
        return self.scores.walk()

    def rows(self) -> Iterator[list[Block]]:
        """For some rows at a time, the blocks with keys that these rows may attend to."""
        for blocks in row_blocks(self.plan, self.extents):
            last = self._queries(blocks[0]).stop if self.causal and blocks else math.inf
            yield [block for block in blocks if block.pairs[-1].start < last]

    def evaluate(self, block: Block, out: Tensor | None) -> Any:
        evaluated = self.scores.evaluate(block, out)
        if out is not None:
            self._mask_(block, out)
        return evaluated

    def pull_back(self, block: Block, weight: Tensor, evaluated: Any = None) -> None:
        weight = weight.to(self.arithmetic).contiguous()
        for excluded in self._excluded(block, weight.device):
            weight = weight.masked_fill(excluded, 0)
        if self.total is not None:
            total = part(self.total, block.pairs)
            total += weight.sum_to_size(total.shape)
        self.scores.pull_back(block, weight, evaluated)

    def gradients(self) -> tuple[Tensor | None, ...]:
        dmask = None
        if self.dmask is not None and self.operand is not None:
            dmask = self.dmask.to(self.operand.dtype)
        return *self.scores.gradients(), dmask

    def _mask_(self, block: Block, out: Tensor) -> None:
        if self.mask is not None and not self.excludes:
            out += part(self.mask, block.pairs)
        for excluded in self._excluded(block, out.device):
            out.masked_fill_(excluded, -math.inf)

    def _excluded(self, block: Block, device: torch.device) -> Iterator[Tensor]:
        """Masks of the pairs of a block that do not take part, as tensors that broadcast with the block."""
        if self.mask is not None and self.excludes:
            yield part(self.mask, block.pairs).logical_not()
        queries, keys = self._queries(block), block.pairs[-1]
        if self.causal and keys.stop - 1 > queries.start:
            query = torch.arange(queries.start, queries.stop, device=device)
            key = torch.arange(keys.start, keys.stop, device=device)
            yield key > query.view(-1, *(1,) * (len(block.pairs) - 1 - self.query_axis))

    def _queries(self, block: Block) -> slice:
        return block.pairs[self.query_axis]
