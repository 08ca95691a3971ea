"""Scores plus the log weights of a mixture, block by block."""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from effops.blocks.cutting import Block
from effops.blocks.operand import PairOperand
from effops.blocks.pairs import Scores


class Weighted(Scores):
    """Scores plus log weights. `gradients` returns those of `scores`, then that of the weights."""

    def __init__(self, scores: Scores, log_weights: Tensor, *, is_wanted: bool = False) -> None:
        super().__init__(scores.plan, scores.arithmetic, scores.extents)
        self.scores = scores
        self.log_weights = PairOperand(self.plan, log_weights, self.arithmetic if is_wanted else None)
        self.is_folded = scores.fold(log_weights)

    def walk(self) -> Iterable[Block]:
        return self.scores.walk()

    def evaluate(self, block: Block, out: Tensor | None) -> Any:
        evaluated = self.scores.evaluate(block, out)
        if out is not None and not self.is_folded:
            self.log_weights.add_values_to(block, out)
        return evaluated

    def pull_back(self, block: Block, weight: Tensor, evaluated: Any = None) -> None:
        self.log_weights.add_gradient(block.pairs, weight)
        self.scores.pull_back(block, weight, evaluated)

    def lack_weight(self, position: int) -> Tensor:
        """Whether all weights along an axis are 0; `position` is its place in the plan's order.

        The result has size 1 along that axis, and along those where the weights do not vary.
        """
        return self.log_weights.view.amax(position, keepdim=True) == -math.inf

    def gradients(self) -> tuple[Tensor | None, ...]:
        return *self.scores.gradients(), self.log_weights.gradient()
