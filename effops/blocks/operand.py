"""An operand of all pairs: its parts for a block, and its gradient, to which the blocks add."""

import torch
from torch import Tensor

from effops.blocks import limits
from effops.blocks.cutting import Block, broadcast_slice, fit, sizes, visited_in_block
from effops.blocks.plan import Plan, Shape, Slices
from effops.numerics.layout import zero_gradient


class PairOperand:
    """An operand as a view with all axes of the plan, in its order, and then the operand's last `trailing` axes.

    An axis along which the operand does not vary has size 1. `sum_dtype` is the dtype in which its gradient is summed,
    or None if that is not wanted. `gradient_sum` is laid out as the operand. `gradient_view` is a view of it with the
    axes of `view`.
    """

    def __init__(self, plan: Plan, tensor: Tensor, sum_dtype: torch.dtype | None, *, trailing: int = 0) -> None:
        self.tensor = tensor
        self.view = plan.view(tensor, plan.order, trailing=trailing, expand=False)
        self.gradient_sum = self.gradient_view = None
        if sum_dtype is not None:
            self.gradient_sum = zero_gradient(tensor, sum_dtype)
            self.gradient_view = plan.view(self.gradient_sum, plan.order, trailing=trailing, expand=False)

    @property
    def wants_gradient(self) -> bool:
        return self.gradient_view is not None

    def part(self, axes: Slices) -> Tensor:
        return broadcast_slice(self.view, axes)

    def add_values_to(self, block: Block, out: Tensor) -> None:
        """Add the operand's values to those of a block. PyTorch would hold the whole block in another dtype."""
        if self.tensor.dtype == out.dtype:
            out += self.part(block.pairs)
            return
        for pairs, inside in visited_in_block(block, self.piece_extents(sizes(block.pairs), out.dtype)):
            out[inside] += self.part(pairs).to(out.dtype)

    def piece_extents(self, extents: Shape, dtype: torch.dtype) -> Shape:
        """The extents of what is converted at once: at most `BLOCK_BYTES`; whole axes where the operand broadcasts."""
        shape = self.view.shape[: len(extents)]
        varying = tuple(1 if size == 1 else extent for size, extent in zip(shape, extents))
        limited = fit(varying, limits.BLOCK_BYTES // dtype.itemsize)
        return tuple(extent if size == 1 else limit for size, extent, limit in zip(shape, extents, limited))

    def add_gradient(self, axes: Slices, gradient: Tensor, *, sign: int = 1) -> None:
        """Add the contribution of a block to the gradient, if that is wanted."""
        if self.gradient_view is not None:
            target = broadcast_slice(self.gradient_view, axes)
            target.add_(gradient.sum_to_size(target.shape), alpha=sign)

    def gradient(self) -> Tensor | None:
        return None if self.gradient_sum is None else self.gradient_sum.to(self.tensor.dtype)


def point_operand(plan: Plan, tensor: Tensor, arithmetic: torch.dtype, is_wanted: bool) -> PairOperand:
    """An operand whose last axis is that of the coordinates."""
    # Many blocks add to each value of a small gradient, and its sum in float64 costs little.
    is_small = tensor.numel() * torch.float64.itemsize <= limits.BLOCK_BYTES
    sum_dtype = torch.float64 if is_small else arithmetic
    return PairOperand(plan, tensor, sum_dtype if is_wanted else None, trailing=1)
