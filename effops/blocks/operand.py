"""An operand of all pairs: its parts for a block, and the sum of what the blocks add to its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from effops.blocks.plan import Plan, Shape, Slices
from effops.blocks.tiling import BLOCK_BYTES, part


class PairOperand:
    """An operand with all axes of the plan in its order, of size 1 where it does not vary, and its last axis.

    It varies along `axes` at most. `wanted` is its gradient; `differentiated` is the call if that of any operand is.
    """

    def __init__(
        self, plan: Plan, tensor: Tensor, axes: Shape, arithmetic: torch.dtype, wanted: bool, differentiated: bool
    ) -> None:
        self.plan = plan
        self.tensor = tensor
        self.axes = axes
        self.view = plan.view(tensor, plan.order, trailing=1, expand=False)
        self.differentiated = differentiated
        self.total: Tensor | None = None
        if wanted:  # many blocks add to each value of a small gradient, whose sum costs little in float64
            small = self.view.numel() * torch.float64.itemsize <= BLOCK_BYTES
            self.total = self.view.new_zeros(self.view.shape, dtype=torch.float64 if small else arithmetic)

    def varies(self, axes: range) -> bool:
        return any(self.view.shape[axis] != 1 for axis in axes)

    def part(self, pairs: Slices, depth: slice) -> Tensor:
        return part(self.view, (*pairs, depth))

    def of_pairs(self, pairs: Slices, which: tuple[Tensor, ...]) -> Tensor:
        """For single pairs of a block, given by their indices in it: a row each, in float64."""
        return self.plan.view(self.tensor, self.plan.order, trailing=1)[pairs][which].double()

    def add(self, pairs: Slices, depth: slice, gradient: Tensor, *, sign: int = 1) -> None:
        """Add what a block contributes to the gradient, if that is wanted."""
        if self.total is not None:
            total = part(self.total, (*pairs, depth))
            total.add_(gradient.sum_to_size(total.shape), alpha=sign)

    def gradient(self) -> Tensor | None:
        if self.total is None:
            return None
        own = self.plan.view(self.tensor, self.axes, trailing=1, expand=False).shape
        return self.plan.gradient(self.total.view(own).to(self.tensor.dtype), self.tensor, self.axes)
