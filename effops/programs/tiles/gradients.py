"""The operators of a tile as backward runs them: they compute nothing that no gradient reads.

Gradients of what all tiles read are summed up over the tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from effops.numerics.layout import empty_gradient
from effops.numerics.precision import arithmetic_dtype
from effops.programs.rules.binding import is_without_gradients, operands_of, value_of
from effops.programs.rules.view import RULES as VIEWS
from effops.pytorch.operators import aten

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
        if total.dim() == 2:
            total.addmm_(first, second)
        elif total.is_contiguous() or total.nbytes > first.nbytes + second.nbytes:
            total.baddbmm_(first, second)
        else:  # PyTorch adds one matrix after another to a total that is laid out otherwise
            total.add_(first @ second)

    def result(self) -> Tensor | None:
        """The sum in the operand's dtype; None if no gradient reached it, as autograd has it."""
        total = self.total
        if total is None or total.dtype == self.operand.dtype:
            return total
        return empty_gradient(self.operand).copy_(total)


class _Product(torch.autograd.Function):
    """A product of matrices, or of batches of them, which adds the gradients of some operands to their sums.

    Autograd would make the gradient of a whole operand for each tile.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, is_read: bool, *sums: GradientSum | None) -> Tensor:
        ctx.save_for_backward(first, second)
        ctx.sums = sums
        return first @ second if is_read else _zeros(first, [*first.shape[:-1], second.shape[-1]])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        first, second = ctx.saved_tensors
        (gradient,) = upstream
        if gradient.dim() == 3 and 1 not in gradient.stride()[1:]:
            gradient = gradient.contiguous()  # else PyTorch copies and multiplies one matrix after another
        found: list[Tensor | None] = [None, None]
        for place, (left, right) in enumerate(((gradient, second.mT), (first.mT, gradient))):
            if ctx.needs_input_grad[place]:
                if ctx.sums[place] is None:
                    found[place] = left @ right
                else:
                    ctx.sums[place].add_product(left, right)
        return *found, None, None, None


def _product(first: Tensor, second: Tensor, is_read: bool, *sums: GradientSum | None) -> Tensor:
    return _Product.apply(first, second, is_read, *sums)  # type: ignore[no-any-return]


class _LogSum(torch.autograd.Function):
    """The logarithm of a sum of exponentials, whose result is known: that of all tiles, where they are combined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, known: Tensor, dim: Any, is_part: bool) -> Tensor:
        ctx.save_for_backward(x, known)
        ctx.kept, ctx.is_part = _kept(x.shape, dim), is_part
        return known.view_as(known)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        x, known = ctx.saved_tensors
        known, gradient = (one.reshape(ctx.kept) for one in (known, *upstream))
        if ctx.is_part:  # a row of -inf has no gradient, since other parts may have one
            known = torch.where(known == -torch.inf, 0, known)
        return (x - known).exp_().mul_(gradient), None, None, None


def known_log_sum(x: Tensor, known: Tensor, dim: Any, keepdim: bool = False, *, is_part: bool) -> Tensor:
    """The logarithm of a sum of exponentials that is `known`, with the gradient of `x`."""
    return _LogSum.apply(x, known, dim, is_part)  # type: ignore[no-any-return]


class _Unread(torch.autograd.Function):
    """An operator whose result nobody reads. Its derivative is given the operand if it reads that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], derivative: Callable[..., Tensor], reads: bool) -> Tensor:
        ctx.save_for_backward(*([x] if reads else []))
        ctx.derivative = derivative
        return _zeros(x, shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return ctx.derivative(*upstream, *ctx.saved_tensors), None, None, None


def _unread_sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    shape, own, kept = x.shape, x.dtype, _kept(x.shape, dim)

    def derivative(upstream: Tensor) -> Tensor:
        return upstream.reshape(kept).to(own).expand(shape)

    left = kept if keepdim else [size for axis, size in enumerate(shape) if axis not in _axes(len(shape), dim)]
    found: Tensor = _Unread.apply(x, left, derivative, False)
    return found if dtype is None else found.to(dtype)


def _unread_square(x: Tensor, exponent: float) -> Tensor:
    def derivative(upstream: Tensor, x: Tensor) -> Tensor:
        return upstream * (exponent * x)

    return _Unread.apply(x, x.shape, derivative, True)  # type: ignore[no-any-return]


def _unread_softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    def derivative(upstream: Tensor, x: Tensor) -> Tensor:
        return aten.softplus_backward.default(upstream, x, beta, threshold)  # type: ignore[no-any-return]

    return _Unread.apply(x, x.shape, derivative, True)  # type: ignore[no-any-return]


UNREAD: dict[Any, Callable[..., Tensor]] = {
    aten.sum.default: _unread_sum,
    aten.sum.dim_IntList: _unread_sum,
    aten.pow.Tensor_Scalar: _unread_square,
    aten.softplus.default: _unread_softplus,
}
READ_NO_VALUES = {aten.sum.default, aten.sum.dim_IntList, *VIEWS}  # their derivatives


def _axes(rank: int, dim: Any) -> set[int]:
    """The axes that are reduced: all if none is given."""
    dims = [dim] if isinstance(dim, int) else dim or range(rank)
    return {axis % rank for axis in dims} if rank else set()


def _kept(shape: Sequence[int], dim: Any) -> list[int]:
    """The shape of a reduction that keeps the axes it reduces."""
    reduced = _axes(len(shape), dim)
    return [1 if axis in reduced else size for axis, size in enumerate(shape)]


def _zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    """What stands for values that nobody reads: a single number."""
    return like.new_zeros(()).expand(shape)


def unread(nodes: Sequence[Node], read: Iterable[Node]) -> set[Node]:
    """The nodes, of those in order, whose values are not needed for the gradients, nor to compute what is.

    `read` are those whose values are needed for something else.
    """
    needed, found = set(read), set()
    for node in reversed(nodes):
        is_unread = node not in needed and _has_derivative_alone(node)
        if is_unread:
            found.add(node)
        if not is_unread or node.target not in READ_NO_VALUES:
            needed.update(operands_of(node))
    return found


def _has_derivative_alone(node: Node) -> bool:
    """Whether backward can do without the value of a node: it is a view, or has a form in this file."""
    value = value_of(node)
    if not isinstance(value, Tensor) or not value.is_floating_point() or is_without_gradients(node):
        return False
    if node.target is aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 2)
    return is_plain_product(node) or node.target in UNREAD or node.target in VIEWS


def is_plain_product(node: Node) -> bool:
    """Whether a node is a product, without factors for it and for what is added."""
    return node.target in PRODUCTS and not node.kwargs


def factors_of(node: Node) -> list[tuple[int, Node]]:
    """The two operands of a product that are multiplied, with their numbers among its operands."""
    first = PRODUCTS[node.target]
    return list(enumerate(operands_of(node)))[first : first + 2]


def product(graph: Graph, args: Sequence[Any], sums: Mapping[Node, Node], *, is_read: bool) -> Node:
    """A product in a tile's graph for backward. Some factors have sums for their gradients."""
    *added, first, second = args
    made = graph.call_function(_product, (first, second, is_read, sums.get(first), sums.get(second)))
    return graph.call_function(aten.add.Tensor, (made, *added)) if added else made
