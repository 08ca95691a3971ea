"""All scores of a call, block by block, and the gradients of its operands. The loops serve every kind of score.

A `Scores` object computes the scores of a block in place, and pulls a gradient of them back to the operands. Backward
computes each block again, so that only the inputs are saved.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from effops.blocks.cutting import Block, Buffer, Extents, column_blocks
from effops.blocks.plan import Plan


@dataclass
class Scores(ABC):
    """The scores of all pairs of a call, block by block, and the gradients of its operands."""

    plan: Plan
    arithmetic: torch.dtype
    extents: Extents

    def walk(self) -> Iterable[Block]:
        """Every block once. Blocks that share an intermediate result follow one another."""
        return column_blocks(self.plan, self.extents, self.extents.batch)

    def fold(self, bias: Tensor) -> bool:
        """Take a bias that broadcasts to the scores into all that are evaluated. Returns whether these scores did.

        They do where that costs less than to add it to every block, which is up to the caller otherwise.
        """
        return False

    @abstractmethod
    def evaluate(self, block: Block, out: Tensor | None) -> Any:
        """Write the scores of a block to `out`, in the dtype of the arithmetic, unless that is None.

        Return what `pull_back` needs of the block.
        """

    @abstractmethod
    def pull_back(self, block: Block, weight: Tensor, evaluated: Any = None) -> None:
        """Add the contribution of a block to the gradients of the operands. `weight` is the gradient of its scores."""

    @abstractmethod
    def gradients(self) -> tuple[Tensor | None, ...]:
        """The gradients of the operands, in their shapes and dtypes. Gradients that are not wanted are None."""


def forward(scores: Scores, out: Tensor) -> Tensor:
    """Fill `out` with all scores. Its memory has the plan's order of axes."""
    ordered = scores.plan.view(out, scores.plan.order)
    buffer = Buffer(out, scores.arithmetic)
    for block in scores.walk():
        target = ordered[block.pairs]
        value = target if out.dtype == scores.arithmetic else buffer.room(target.shape)
        scores.evaluate(block, value)
        if value is not target:
            target.copy_(value)
    return out


def backward(scores: Scores, dout: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the operands, for a gradient `dout` of all scores."""
    upstream = scores.plan.view(dout, scores.plan.order)
    if dout.numel():
        for block in scores.walk():
            scores.pull_back(block, upstream[block.pairs], scores.evaluate(block, None))
    return scores.gradients()
