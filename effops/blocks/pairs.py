"""All scores of a call, block by block, and the gradients of its operands: the same loops for every kind of score.

`Scores` computes the scores of a block where they are wanted, and pulls a gradient of them back to the operands.
Backward computes each block again, so that only the inputs are saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from effops.blocks.plan import Plan
from effops.blocks.tiling import Block, Extents, few


class Scores(Protocol):
    """The scores of all pairs of a call, block by block."""

    plan: Plan
    arithmetic: torch.dtype
    extents: Extents

    def walk(self) -> Iterator[Block]:
        """Every block, in an order in which they share what is computed for several."""

    def evaluate(self, block: Block, out: Tensor | None) -> Any:
        """Write the scores of a block to `out`, unless that is None. Returns what `pull_back` takes of the block."""

    def pull_back(self, block: Block, weight: Tensor, evaluated: Any = None) -> None:
        """Add what gradients `weight` of the scores of a block contribute to those of the operands."""

    def gradients(self) -> tuple[Tensor | None, ...]:
        """The gradients of the operands, in their shapes and dtypes, None where they are not wanted."""


def forward(scores: Scores, out: Tensor) -> Tensor:
    """Fill `out` with all scores; it is laid out in the plan's order of axes."""
    ordered = scores.plan.view(out, scores.plan.order)
    buffer = None if out.dtype == scores.arithmetic else pair_buffer(scores, out)
    for block in few(scores.walk()):
        target = ordered[block.pairs]
        if buffer is None:
            scores.evaluate(block, target)
        else:
            value = inside(buffer, block)
            scores.evaluate(block, value)
            target.copy_(value)
    return out


def backward(scores: Scores, dout: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the operands, for a gradient of all scores."""
    upstream = scores.plan.view(dout, scores.plan.order)
    if dout.numel():
        for block in scores.walk():
            scores.pull_back(block, upstream[block.pairs], scores.evaluate(block, None))
    return scores.gradients()


def pair_buffer(scores: Scores, like: Tensor) -> Tensor:
    return like.new_empty(math.prod(scores.extents.pairs), dtype=scores.arithmetic)


def inside(buffer: Tensor, block: Block) -> Tensor:
    """Room for the scores of a block in a buffer."""
    shape = [piece.stop - piece.start for piece in block.pairs]
    return buffer[: math.prod(shape)].view(shape)
