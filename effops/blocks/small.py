"""Scores normaliser(scale) + scale * phi(<x, loc>) of a call that is too small to be cut into blocks.

What follows from shapes and dtypes is found when a `SmallCall` is made, which callers may remember.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from effops.blocks import limits
from effops.blocks.dots import DotMap, derivatives_of, normalisers_of
from effops.blocks.plan import Plan, Shape
from effops.numerics.layout import as_gradient
from effops.numerics.precision import arithmetic_dtype, converted


class Normalisers(Protocol):
    """An object that may have the normaliser of a scale at hand, in the dtype of the arithmetic."""

    def of(self, dot_map: DotMap, scale: Tensor, arithmetic: torch.dtype) -> Tensor: ...


class SmallCall:
    """The scores of all pairs of a call at once, and their gradients.

    The dot products are one matrix product where x consists of rows and loc of columns. Else they are the sums of an
    elementwise product.

    Args:
        dot_map: phi and the normaliser
        plan: the roles of the axes of all pairs
        loc, scale, x: operands with the shapes and dtypes of the call; they are not kept
        dtype: the dtype of the result
    """

    def __init__(self, dot_map: DotMap, plan: Plan, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> None:
        self.map, self.plan, self.dtype = dot_map, plan, dtype
        self.arithmetic = arithmetic_dtype(dtype)
        self.converts = any(tensor.dtype != self.arithmetic for tensor in (loc, scale, x))
        pairs, dimension = plan.numel(plan.order), x.shape[-1]
        rows, columns = plan.numel(plan.rows), math.prod(loc.shape[:-1])
        self.row_shape: Shape = (rows, dimension)
        self.column_shape: Shape = (columns, dimension)
        self.pair_shape: Shape = (rows, columns)
        # A longer sum of terms of one sign loses digits. There are more pairs than rows times columns of loc where the
        # scale varies along columns and loc does not.
        self.is_product = not plan.batch and dimension <= limits.DEPTH and rows * columns == pairs
        if self.is_product and columns == 1:
            self.column_shape, self.pair_shape = (dimension,), (rows,)  # a vector costs less than a matrix
        # The largest temporary: all products of coordinates, unless copies of a product's operands are smaller.
        self.most_values = pairs * dimension
        if self.is_product:
            self.most_values = min(self.most_values, max(pairs, (rows + columns) * dimension))

    @property
    def is_small(self) -> bool:
        """Whether no temporary is larger than a block, so that blocks would cost more. An empty call is not small."""
        return 0 < self.most_values * self.arithmetic.itemsize <= limits.BLOCK_BYTES

    def forward(self, loc: Tensor, scale: Tensor, x: Tensor, known: Normalisers | None = None) -> Tensor:
        """The scores. The normalisers are asked of `known`, if it is given."""
        arithmetic = self.arithmetic
        if known is None:
            normalisers = normalisers_of(self.map, scale, arithmetic)
        else:
            normalisers = known.of(self.map, scale, arithmetic)
        if self.converts:
            loc, scale, x = converted(loc, arithmetic), converted(scale, arithmetic), converted(x, arithmetic)
        phi = self._arguments(loc, x)
        self.map.value_(phi)
        if self.dtype != arithmetic:
            return self.plan.empty(x, self.dtype).copy_(torch.addcmul(normalisers, scale, phi))
        out = phi if self.is_product else self.plan.empty(x, self.dtype)
        return torch.addcmul(normalisers, scale, phi, out=out)

    def gradients(
        self, operands: Sequence[Tensor], dout: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of loc, scale and x, where they are wanted."""
        loc, scale, x = operands
        arithmetic = self.arithmetic
        wide_loc, factor, wide_x, weight = loc, scale, x, converted(dout, arithmetic)
        if self.converts:
            wide_loc, factor, wide_x = (converted(operand, arithmetic) for operand in operands)
        slope = self._arguments(wide_loc, wide_x)
        if slope.shape != self.plan.shape:
            slope = slope.expand(self.plan.shape).clone(memory_format=torch.contiguous_format)
        phi = torch.empty_like(slope) if wanted[1] else None
        self.map.derivative_(slope, factor if self.map.slope == 1 else self.map.slope * factor, phi)
        dloc = dscale = dx = None
        if phi is not None:
            phi += derivatives_of(self.map, scale, arithmetic)
            dscale = as_gradient(phi.mul_(weight), scale)
        slope.mul_(weight)
        if wanted[0]:
            dloc = as_gradient(self._loc_gradient(slope, wide_x), loc)
        if wanted[2]:
            dx = as_gradient(self._x_gradient(slope, wide_loc), x)
        return dloc, dscale, dx

    def _arguments(self, loc: Tensor, x: Tensor) -> Tensor:
        """The argument of phi, of every pair."""
        dot = self._dots(loc, x)
        return torch.rsub(dot, self.map.intercept, alpha=-self.map.slope) if self.map.intercept else dot

    def _dots(self, loc: Tensor, x: Tensor) -> Tensor:
        """<x, loc>, of the shape of the result if it is a matrix product."""
        if not self.is_product:
            return (loc * x).sum(-1)
        rows, columns = _shaped(x, self.row_shape), _shaped(loc, self.column_shape)
        product = torch.mv(rows, columns) if columns.ndim == 1 else torch.mm(rows, columns.mT)
        return product if product.shape == self.plan.shape else self.plan.result(product)

    def _loc_gradient(self, slope: Tensor, x: Tensor) -> Tensor:
        if not self.is_product:
            return slope.unsqueeze(-1) * x
        pairs, rows = self._pairs(slope), _shaped(x, self.row_shape)
        return torch.mv(rows.mT, pairs) if pairs.ndim == 1 else torch.mm(pairs.mT, rows)

    def _x_gradient(self, slope: Tensor, loc: Tensor) -> Tensor:
        if not self.is_product:
            return slope.unsqueeze(-1) * loc
        pairs, columns = self._pairs(slope), _shaped(loc, self.column_shape)
        return torch.outer(pairs, columns) if pairs.ndim == 1 else torch.mm(pairs, columns)

    def _pairs(self, slope: Tensor) -> Tensor:
        """A tensor that is laid out as a result, viewed as the vector or the matrix of the product."""
        return slope if slope.shape == self.pair_shape else self.plan.view(slope, self.plan.order).view(self.pair_shape)


def _shaped(tensor: Tensor, shape: Shape) -> Tensor:
    """`tensor.reshape(shape)`. A small call gains a microsecond where nothing is to be done."""
    return tensor if tensor.shape == shape else tensor.reshape(shape)
