"""All scores of a call, block by block, and the gradients of its operands. The loops serve every kind of score.

A `Scores` object computes the scores of a block in place, and pulls a gradient of them back to the operands. Backward
computes each block again, so that only the inputs are saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from effops.blocks.plan import Plan
from effops.blocks.tiling import Block, Extents, shortened_if_predicted


class Scores(Protocol):
    """The scores of all pairs of a call, block by block."""

    plan: Plan
    arithmetic: torch.dtype
    extents: Extents

    def walk(self) -> Iterator[Block]:
        """Every block once. Blocks that share an intermediate result follow one another."""

    def evaluate(self, block: Block, out: Tensor | None) -> Any:
        """Write the scores of a block to `out`, unless that is None. Return what `pull_back` needs of the block."""

    def pull_back(self, block: Block, weight: Tensor, evaluated: Any = None) -> None:
        """Add the contribution of a block to the gradients of the operands. `weight` is the gradient of its scores."""

    def gradients(self) -> tuple[Tensor | None, ...]:
        """The gradients of the operands, in their shapes and dtypes. Gradients that are not wanted are None."""


def forward(scores: Scores, out: Tensor) -> Tensor:
    """Fill `out` with all scores. Its memory has the plan's order of axes."""
    ordered = scores.plan.view(out, scores.plan.order)
    buffer = None if out.dtype == scores.arithmetic else pair_buffer(scores, out)
    for block in shortened_if_predicted(scores.walk()):
        target = ordered[block.pairs]
        if buffer is None:
            scores.evaluate(block, target)
        else:
            value = inside(buffer, block)
            scores.evaluate(block, value)
            target.copy_(value)
    return out


def backward(scores: Scores, dout: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the operands, for a gradient `dout` of all scores."""
    upstream = scores.plan.view(dout, scores.plan.order)
    if dout.numel():
        for block in scores.walk():
            scores.pull_back(block, upstream[block.pairs], scores.evaluate(block, None))
    return scores.gradients()


def pair_buffer(scores: Scores, like: Tensor) -> Tensor:
    """Uninitialised memory for the scores of the largest block."""
    return like.new_empty(math.prod(scores.extents.pairs), dtype=scores.arithmetic)


def inside(buffer: Tensor, block: Block) -> Tensor:
    """A view of the start of `buffer`, in the shape of the scores of a block."""
    shape = [piece.stop - piece.start for piece in block.pairs]
    return buffer[: math.prod(shape)].view(shape)
