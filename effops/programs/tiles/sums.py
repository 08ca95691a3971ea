"""Gradients of what all tiles read, summed up over the tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from effops.numerics.layout import empty_gradient
from effops.numerics.precision import arithmetic_dtype
from effops.programs.rules.binding import operands_of

aten = torch.ops.aten
# Products, and the number of the operand that is the first factor.
PRODUCTS: dict[Any, int] = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}


class GradientSum:
    """The gradient of an operand, in float32 or wider. It takes no memory before a gradient reaches it."""

    def __init__(self, operand: Tensor) -> None:
        self.operand = operand
        self.total: Tensor | None = None

    def begun(self) -> Tensor:
        """The sum so far, which gradients are added to."""
        if self.total is None:
            is_complex = self.operand.is_complex()
            dtype = self.operand.dtype if is_complex else arithmetic_dtype(self.operand.dtype)
            self.total = torch.zeros_like(self.operand, dtype=dtype)
        return self.total

    def add_product(self, first: Tensor, second: Tensor) -> None:
        total = self.begun()
        (total.addmm_ if total.dim() == 2 else total.baddbmm_)(first, second)

    def result(self) -> Tensor | None:
        """The sum in the operand's dtype; None if no gradient reached it, as autograd has it."""
        total = self.total
        if total is None or total.dtype == self.operand.dtype:
            return total
        return empty_gradient(self.operand).copy_(total)


class SummedProduct(torch.autograd.Function):
    """A product of matrices, or of batches of them, which adds the gradients of some operands to their sums.

    Autograd would make the gradient of a whole operand for each tile.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, *sums: GradientSum | None) -> Tensor:
        ctx.save_for_backward(first, second)
        ctx.sums = sums
        return first @ second

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        first, second = ctx.saved_tensors
        (gradient,) = upstream
        found: list[Tensor | None] = [None, None]
        for place, (left, right) in enumerate(((gradient, second.mT), (first.mT, gradient))):
            if ctx.needs_input_grad[place]:
                if ctx.sums[place] is None:
                    found[place] = left @ right
                else:
                    ctx.sums[place].add_product(left, right)
        return *found, None, None


def summed_product(first: Tensor, second: Tensor, *sums: GradientSum | None) -> Tensor:
    """`SummedProduct`, as a function that stands in graphs."""
    found: Tensor = SummedProduct.apply(first, second, *sums)
    return found


def is_plain_product(node: Node) -> bool:
    """Whether a node is a product, without factors for it and for what is added."""
    return node.target in PRODUCTS and not node.kwargs


def factors_of(node: Node) -> list[tuple[int, Node]]:
    """The two operands of a product that are multiplied, with their numbers among its operands."""
    first = PRODUCTS[node.target]
    return list(enumerate(operands_of(node)))[first : first + 2]


def summing(graph: Graph, args: Sequence[Any], sums: Mapping[Node, Node]) -> Node:
    """A product in a tile's graph whose factors have sums for their gradients."""
    *added, first, second = args
    made = graph.call_function(summed_product, (first, second, sums.get(first), sums.get(second)))
    return graph.call_function(aten.add.Tensor, (made, *added)) if added else made
