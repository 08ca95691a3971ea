"""Dot products of all pairs, and their gradients: in one product where no operand needs a copy, else in blocks.

BLAS cuts whole matrices better than loops here do. It needs no memory for them where the operands are matrices as they
lie, in the dtype of the arithmetic, and so is the result.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from effops.blocks import pairs
from effops.blocks.dots import Products, are_matrices
from effops.blocks.plan import Plan, Shape
from effops.blocks.tiling import DEPTH, Block, cut, depths, merge
from effops.numerics.layout import empty_gradient
from effops.numerics.precision import arithmetic_dtype

# The bytes of a block of pairs where operands are copied, and of products that are written where rows lie apart.
PRODUCT_BYTES = 2 * 1024 * 1024


def forward(plan: Plan, loc: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Fill `out`, whose memory has the plan's order of axes, with all dot products."""
    arithmetic = arithmetic_dtype(out.dtype)
    left, right = _matrices(plan, plan.rows, x, arithmetic), _matrices(plan, plan.columns, loc, arithmetic)
    products = _weights(plan, out, arithmetic)
    if left is None or right is None or products is None:
        return pairs.forward(_Blocks(plan, loc, x, arithmetic), out)
    for depth in depths(x.shape[-1], DEPTH):
        products.baddbmm_(left[..., depth], right[..., depth].mT, beta=int(depth.start > 0))
    return out


def backward(
    plan: Plan, loc: Tensor, x: Tensor, dout: Tensor, wanted: Sequence[bool], arithmetic: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of loc and x that are wanted, for a gradient `dout` of all dot products."""
    gradients = [empty_gradient(operand) if is_wanted else None for operand, is_wanted in zip((loc, x), wanted)]
    left, right = _matrices(plan, plan.rows, x, arithmetic), _matrices(plan, plan.columns, loc, arithmetic)
    weight = _weights(plan, dout, arithmetic)
    into = [
        None if gradient is None else _matrices(plan, axes, gradient, arithmetic)
        for gradient, axes in zip(gradients, (plan.columns, plan.rows))
    ]
    is_whole = all((one is None) == (gradient is None) for one, gradient in zip(into, gradients))
    if left is None or right is None or weight is None or not is_whole:
        del gradients, into
        wants_loc, wants_x = wanted
        blocks = _Blocks(plan, loc, x, arithmetic, wants_loc=wants_loc, wants_x=wants_x)
        dx, dloc = pairs.backward(blocks, dout)
        return dloc, dx
    for target, weights, vectors in zip(into, (weight.mT, weight), (left, right)):
        if target is not None:
            _multiply(weights, vectors, target)
    dloc, dx = gradients
    return dloc, dx


class _Blocks(Products):
    """The dot products of one call in blocks, with gradients for one of any layout and dtype."""

    def __init__(self, plan: Plan, loc: Tensor, x: Tensor, arithmetic: torch.dtype, **wanted: bool) -> None:
        extents = cut(plan, x.shape[-1], arithmetic.itemsize, copies=1, pair_bytes=PRODUCT_BYTES)
        super().__init__(plan, loc, x, arithmetic, extents=extents, **wanted)

    def pull_back(self, block: Block, weight: Tensor, evaluated: None = None) -> None:
        super().pull_back(block, weight.to(self.arithmetic).contiguous())


def _matrices(plan: Plan, axes: Shape, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """An operand, or its gradient, as the three-dimensional factor of a product, or None if that takes a copy."""
    view = plan.view(tensor, plan.batch + axes, trailing=1, expand=False)
    if tensor.dtype == dtype and are_matrices(view, len(plan.batch), len(axes)):
        return merge(view, len(plan.batch), len(axes))
    return None


def _weights(plan: Plan, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The same of a tensor of all pairs."""
    view = plan.view(tensor, plan.order)
    if tensor.dtype == dtype and are_matrices(view, len(plan.batch), len(plan.rows)):
        return merge(view, len(plan.batch), len(plan.rows))
    return None


def _multiply(weights: Tensor, vectors: Tensor, out: Tensor) -> None:
    """Write weights @ vectors to `out`.

    BLAS takes a third longer to write matrices whose rows lie apart. A buffer has them first, some at a time.
    """
    if weights.shape[-1] == 1:
        torch.mul(weights, vectors, out=out)
    elif len(out) == 1 or out.is_contiguous():
        torch.bmm(weights, vectors, out=out)
    else:
        step = max(1, PRODUCT_BYTES // out.itemsize // max(1, out[0].numel()))
        buffer = out.new_empty((step, *out.shape[1:]))
        for some, *factors in zip(out.split(step), weights.split(step), vectors.split(step)):
            some.copy_(torch.bmm(*factors, out=buffer[: len(some)]))
