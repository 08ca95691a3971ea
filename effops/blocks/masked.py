"""Scores of attention under a mask, block by block.

Rows are the queries, columns the keys: the last axis of the plan is that of the keys.

Pairs are excluded by adding -inf to their scores. To write -inf where a boolean mask says so would take 15 to 30 times
as long on a CPU. But the sum is NaN where the score is NaN or +inf. So -inf is written after all in a block whose
scores have a NaN or +inf.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from effops.blocks.cutting import Block, Buffer, all_pairs, sizes, visited_along_axis, visited_in_block, visited_pieces
from effops.blocks.operand import PairOperand
from effops.blocks.pairs import Scores
from effops.blocks.plan import Shape, Slices
from effops.numerics.values import observed


class Masked(Scores):
    """Scores under a mask. `gradients` returns those of `scores`, and then that of an additive mask.

    Pairs that a boolean mask excludes score -inf and pass no gradient. The same holds for pairs whose key comes more
    than `diagonal` places after the query; if that is None, for none. Buffers are made on the device of `like`. With
    `wants_mask` the gradient of the mask is summed up too.
    """

    def __init__(
        self,
        scores: Scores,
        mask: Tensor | None,
        like: Tensor,
        *,
        diagonal: int | None = None,
        wants_mask: bool = False,
    ) -> None:
        super().__init__(scores.plan, scores.arithmetic, scores.extents)
        self.scores, self.diagonal = scores, diagonal
        self.first_query_lacks_keys = diagonal is not None and diagonal < 0  # whatever the mask is
        self.may_exclude = diagonal is not None or mask is not None
        self.mask = None if mask is None else PairOperand(self.plan, mask, self.arithmetic if wants_mask else None)
        self.mask_is_boolean = mask is not None and mask.dtype == torch.bool
        self.terms: Tensor | None = None  # 0 or -inf, for the latest part of a boolean mask
        self.terms_place: tuple[int, Shape] | None = None  # where that part lies in the mask
        self.highest_buffer, self.flags_buffer = (Buffer(like, dtype) for dtype in (self.arithmetic, torch.bool))

    def walk(self) -> Iterable[Block]:
        return self.scores.walk()

    def rows(self) -> Iterator[list[Block]]:
        """For some rows at a time, the blocks with keys that these rows may attend to.

        With a diagonal the last queries come first, which attend to the most keys: no later block is larger. Entries
        of the batch, which may share a mask, follow one another.
        """
        everything = all_pairs(self.plan)
        for rows in visited_pieces(everything.rows, self.extents.rows, backwards=self.diagonal is not None):
            for batch in visited_pieces(everything.batch, self.extents.batch):
                reached = self._reached(everything._replace(batch=batch, rows=rows))
                columns = itertools.product(*map(visited_along_axis, reached, self.extents.columns))
                yield [Block(batch, rows, keys) for keys in columns]

    def evaluate(self, block: Block, out: Tensor | None) -> Any:
        evaluated = self.scores.evaluate(block, out)
        if out is not None and self._add(block, out):
            self._mend(block, out)
        return evaluated

    def evaluate_unmended(self, block: Block, out: Tensor) -> None:
        """As `evaluate`, but an excluded pair may score NaN, if it scores NaN or +inf without the mask."""
        self.scores.evaluate(block, out)
        self._add(block, out)

    def maxima(self, block: Block, out: Tensor) -> Tensor:
        """Write the scores of a block to `out`, and return the largest of each row, which the next call overwrites."""
        self.scores.evaluate(block, out)
        return self._mend(block, out) if self._add(block, out) else self._amax(out)

    def evaluate_and_find_empty_rows(self, block: Block, out: Tensor) -> Tensor:
        """Write the scores of a block to `out`, and return whether all of a row are minus infinity."""
        highest = self.maxima(block, out)
        return torch.eq(highest, -math.inf, out=self.flags_buffer.room(highest.shape))

    def reserve(self, block: Block) -> None:
        """Take the memory of `evaluate_and_find_empty_rows`.

        Rows take it in any case, so that predicted bytes hold whether or not their values make that run.
        """
        shape = (*sizes(block.pairs[:-1]), 1)
        self.highest_buffer.room(shape)
        self.flags_buffer.room(shape)

    def pull_back(self, block: Block, weight: Tensor, evaluated: Any = None) -> None:
        if self.mask_is_boolean or self.diagonal is not None:
            weight = weight.to(self.arithmetic, copy=True, memory_format=torch.contiguous_format)
            self._clear(block, weight)
        self.pull_back_included(block, weight, evaluated)

    def pull_back_included(self, block: Block, weight: Tensor, evaluated: Any = None) -> None:
        """As `pull_back`, for a gradient that is 0 already where pairs are excluded."""
        weight = weight.to(self.arithmetic).contiguous()
        if self.mask is not None:
            self.mask.add_gradient(block.pairs, weight)
        self.scores.pull_back(block, weight, evaluated)

    def gradients(self) -> tuple[Tensor | None, ...]:
        return *self.scores.gradients(), None if self.mask is None else self.mask.gradient()

    def _add(self, block: Block, out: Tensor) -> bool:
        """Add the mask to the scores of a block. Return whether there may be pairs that are excluded."""
        if self.mask is not None and not self.mask_is_boolean:
            self.mask.add_values_to(block, out)
        has_excluded = False
        for inside, terms in self._exclusions(block, out.device):
            out[inside] += terms
            has_excluded = True
        return has_excluded

    def _mend(self, block: Block, out: Tensor) -> Tensor:
        """Write -inf to excluded pairs if their sums may be NaN. Return the largest score of each row."""
        highest = self._amax(out)
        all_below_infinity = torch.lt(highest, math.inf, out=self.flags_buffer.room(highest.shape)).all()
        # On another device a look would wait for it, so blocks are always mended there.
        if out.device.type == "cpu" and observed(all_below_infinity, ordinary=True):
            return highest
        for inside, terms in self._exclusions(block, out.device):
            # `_terms_of` may keep the terms, and a copy would take memory: so they are changed, and then restored.
            terms.mul_(math.inf)  # 0 -> NaN, -inf -> -inf
            torch.fmin(out[inside], terms, out=out[inside])  # of a score and NaN, the score
            terms.nan_to_num_(nan=0.0, neginf=-math.inf)
        return self._amax(out)

    def _amax(self, out: Tensor) -> Tensor:
        return torch.amax(out, -1, keepdim=True, out=self.highest_buffer.room((*out.shape[:-1], 1)))

    def _clear(self, block: Block, values: Tensor) -> None:
        """Set the values of excluded pairs to 0."""
        for inside, terms in self._exclusions(block, values.device):
            values[inside].masked_fill_(terms != 0, 0.0)

    def _exclusions(self, block: Block, device: torch.device) -> Iterator[tuple[Slices, Tensor]]:
        """Where pairs of a block may be excluded: their slices, and terms that broadcast with them, 0 or -inf."""
        if self.mask is not None and self.mask_is_boolean:
            for pairs, inside in visited_in_block(block, self.mask.piece_extents(self.extents.pairs, self.arithmetic)):
                yield inside, self._terms_of(self.mask.part(pairs))
        if self.diagonal is not None:
            yield from self._beyond_diagonal(block, self.diagonal, device)

    def _beyond_diagonal(self, block: Block, diagonal: int, device: torch.device) -> Iterator[tuple[Slices, Tensor]]:
        """The same for keys that come too late: a triangle of those that some queries reach, then those that none does.

        The triangle takes the same number of keys in every block where it can. Keys that all queries reach get 0.
        """
        axis = self._query_axis()
        queries, keys = block.pairs[axis], block.pairs[-1]
        count = queries.stop - queries.start
        first_stop, last_stop = queries.start + diagonal + 1, queries.stop + diagonal  # of what the queries reach
        others = (slice(None),) * (len(block.pairs) - 1)
        stop = min(keys.stop, last_stop)
        start = max(keys.start, stop - count + 1)
        if max(start, first_stop) < stop:
            terms = torch.full((count, stop - start), -math.inf, dtype=self.arithmetic, device=device)
            terms.triu_(first_stop - start)
            axes_between = len(others) - 1 - axis
            yield (*others, slice(start - keys.start, stop - keys.start)), terms.view(count, *[1] * axes_between, -1)
        if last_stop < keys.stop:
            unreached = max(keys.start, last_stop)
            terms = torch.full((), -math.inf, dtype=self.arithmetic, device=device)
            yield (*others, slice(unreached - keys.start, None)), terms

    def _terms_of(self, included: Tensor) -> Tensor:
        """What to add for a part of a boolean mask: 0 or -inf. It is kept for blocks that share this part."""
        place = int(included.storage_offset()), tuple(included.shape)
        if place != self.terms_place:
            self.terms = None  # frees the former terms before others are made
            # 1 -> 1 -> -1 -> 0, and 0 -> inf -> -inf -> -inf
            self.terms_place, self.terms = place, included.to(self.arithmetic).reciprocal_().neg_().add_(1)
        assert self.terms is not None
        return self.terms

    def _reached(self, block: Block) -> Slices:
        """The columns of a block without the keys that come after those of the last query; at least one key."""
        *others, keys = block.columns
        if self.diagonal is None or keys.start == keys.stop:
            return block.columns
        last_stop = block.pairs[self._query_axis()].stop + self.diagonal
        return *others, slice(keys.start, min(keys.stop, max(1, last_stop)))

    def _query_axis(self) -> int:
        """The position of the axis of the queries, the last but one of the result, in the order of the plan."""
        return self.plan.order.index(len(self.plan.shape) - 2)
