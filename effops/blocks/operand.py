"""An operand of all pairs: its parts for a block, and its gradient, to which the blocks add."""

from __future__ import annotations

import torch
from torch import Tensor

from effops.blocks.plan import Plan, Slices
from effops.blocks.tiling import BLOCK_BYTES, part


class PairOperand:
    """An operand as a view with all axes of the plan, in its order, and the operand's last axis.

    An axis along which the operand does not vary has size 1. `wanted` tells whether its gradient is wanted,
    `differentiated` whether that of any operand of the call is. The sum of the gradient is laid out as the operand;
    `total` views it as `view` does the operand.
    """

    def __init__(self, plan: Plan, tensor: Tensor, arithmetic: torch.dtype, wanted: bool, differentiated: bool) -> None:
        self.plan = plan
        self.tensor = tensor
        self.view = plan.view(tensor, plan.order, trailing=1, expand=False)
        self.differentiated = differentiated
        self.sums: Tensor | None = None
        self.total: Tensor | None = None
        if wanted:  # many blocks add to each value of a small gradient, and its sum in float64 costs little
            small = tensor.numel() * torch.float64.itemsize <= BLOCK_BYTES
            self.sums = torch.zeros_like(tensor, dtype=torch.float64 if small else arithmetic)
            self.total = plan.view(self.sums, plan.order, trailing=1, expand=False)

    def varies(self, axes: range) -> bool:
        return any(self.view.shape[axis] != 1 for axis in axes)

    def part(self, pairs: Slices, depth: slice) -> Tensor:
        return part(self.view, (*pairs, depth))

    def of_pairs(self, pairs: Slices, which: tuple[Tensor, ...]) -> Tensor:
        """A row for each of some pairs of a block, given by their indices in the block, in float64."""
        return self.plan.view(self.tensor, self.plan.order, trailing=1)[pairs][which].double()

    def add(self, pairs: Slices, depth: slice, gradient: Tensor, *, sign: int = 1) -> None:
        """Add the contribution of a block to the gradient, if that is wanted."""
        if self.total is not None:
            total = part(self.total, (*pairs, depth))
            total.add_(gradient.sum_to_size(total.shape), alpha=sign)

    def gradient(self) -> Tensor | None:
        return None if self.sums is None else self.sums.to(self.tensor.dtype)
