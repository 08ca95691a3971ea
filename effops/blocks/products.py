"""The dot products of all pairs of rows, and their gradients, as whole matrix products.

BLAS cuts matrices better than loops here do. Where they are matrices to BLAS as they lie, in the dtype of the
arithmetic, there is one product for all. Else what BLAS cannot take is copied, for some indices of the batch at a time.
Matrices too large for that are computed in the blocks of `Products`.
"""

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from effops.blocks import limits, pairs
from effops.blocks.cutting import Block, Buffer, block_extents, depths, fit, merge, visited_pieces, whole
from effops.blocks.dots import Products, are_matrices
from effops.blocks.plan import Axes, Plan, Shape, Slices
from effops.numerics.layout import empty_gradient
from effops.numerics.precision import arithmetic_dtype


class Matrices:
    """A tensor whose first axes tell which matrix, the next `rows` which row, and the others which column.

    Products are written where they belong, or to a buffer that is copied there: where BLAS cannot write, or takes a
    third longer, since the rows of several matrices lie apart. Of matrices that BLAS cannot read as they lie, a buffer
    has copies.
    """

    def __init__(self, view: Tensor, batch: int, rows: int, buffer: Buffer) -> None:
        arithmetic = buffer.dtype
        self.view, self.batch, self.rows = view, batch, rows
        self.bytes = math.prod(view.shape[batch:]) * arithmetic.itemsize  # of one matrix
        self.copied = view.dtype != arithmetic or not are_matrices(view, batch, rows)
        is_apart = not view.is_contiguous() and math.prod(view.shape[:batch]) > 1
        self.written_by_copy = self.copied or (is_apart and self.bytes <= limits.PRODUCT_BYTES)
        self.buffer = buffer

    def part(self, entries: Slices) -> Tensor:
        """The matrices of some entries of the batch, as the three-dimensional factor of a product."""
        some = self.view[entries]
        return self._merged(self.buffer.room(some.shape).copy_(some) if self.copied else some)

    def write(self, entries: Slices, left: Tensor, right: Tensor, *, terms: int = sys.maxsize) -> None:
        """Overwrite the matrices of some entries with products, of which BLAS sums so many terms at a time."""
        some = self.view[entries]
        out = self.buffer.room(some.shape) if self.written_by_copy else some
        matrices = self._merged(out)
        if left.shape[-1] == 1:
            torch.mul(left, right, out=matrices)
        else:
            for depth in depths(left.shape[-1], terms):
                matrices.baddbmm_(left[..., depth], right[:, depth], beta=int(depth.start > 0))
        if out is not some:
            some.copy_(out)

    def _merged(self, some: Tensor) -> Tensor:
        return merge(some, self.batch, self.rows)


def forward(plan: Plan, loc: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Fill `out`, whose memory has the plan's order of axes, with all dot products."""
    arithmetic = arithmetic_dtype(out.dtype)
    left, right = _operand(plan, plan.rows, x, arithmetic), _operand(plan, plan.columns, loc, arithmetic)
    products = _pairs(plan, out, arithmetic)
    batch = _batch_extents(plan, (left, right), (products,))
    if batch is None:
        return pairs.forward(_Blocks(plan, loc, x, arithmetic), out)
    for entries in visited_pieces(whole(plan.sizes(plan.batch)), batch):
        products.write(entries, left.part(entries), right.part(entries).mT, terms=limits.DEPTH)
    return out


def backward(
    plan: Plan, loc: Tensor, x: Tensor, dout: Tensor, wanted: Sequence[bool], arithmetic: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of loc and x that are wanted, for a gradient `dout` of all dot products."""
    wants_loc, wants_x = wanted
    dloc, dx = empty_gradient(loc) if wants_loc else None, empty_gradient(x) if wants_x else None
    buffer = Buffer(dout, arithmetic)  # it stays in the cache as both gradients take turns
    into_loc = None if dloc is None else _operand(plan, plan.columns, dloc, arithmetic, buffer)
    into_x = None if dx is None else _operand(plan, plan.rows, dx, arithmetic, buffer)
    left, right = _operand(plan, plan.rows, x, arithmetic), _operand(plan, plan.columns, loc, arithmetic)
    weights = _pairs(plan, dout, arithmetic)
    batch = _batch_extents(plan, (left, right, weights), (into_loc, into_x))
    if batch is None:
        del dloc, dx, into_loc, into_x  # before there are others
        dx, dloc = pairs.backward(_Blocks(plan, loc, x, arithmetic, wants_loc=wants_loc, wants_x=wants_x), dout)
        return dloc, dx
    for entries in visited_pieces(whole(plan.sizes(plan.batch)), batch):
        weight = weights.part(entries)
        if into_x is not None:
            into_x.write(entries, weight, right.part(entries))
        if into_loc is not None:
            into_loc.write(entries, weight.mT, left.part(entries))
    return dloc, dx


class _Blocks(Products):
    """The dot products of one call in blocks, with gradients for one of any layout and dtype."""

    def __init__(self, plan: Plan, loc: Tensor, x: Tensor, arithmetic: torch.dtype, **wanted: bool) -> None:
        extents = block_extents(
            plan, x.shape[-1], arithmetic.itemsize, values_per_coordinate=1, pair_bytes=limits.PAIR_BYTES
        )
        super().__init__(plan, loc, x, arithmetic, extents=extents, **wanted)

    def pull_back(self, block: Block, weight: Tensor, evaluated: None = None) -> None:
        super().pull_back(block, weight.to(self.arithmetic).contiguous())


def _operand(plan: Plan, axes: Axes, tensor: Tensor, arithmetic: torch.dtype, buffer: Buffer | None = None) -> Matrices:
    """An operand, or its gradient, whose rows lie along `axes`."""
    view = plan.view(tensor, plan.batch + axes, trailing=1, expand=False)
    return Matrices(view, len(plan.batch), len(axes), buffer or Buffer(tensor, arithmetic))


def _pairs(plan: Plan, tensor: Tensor, arithmetic: torch.dtype) -> Matrices:
    """A tensor of all pairs."""
    view = plan.view(tensor, plan.order)
    return Matrices(view, len(plan.batch), len(plan.rows), Buffer(tensor, arithmetic))


def _batch_extents(plan: Plan, read: Sequence[Matrices], written: Sequence[Matrices | None]) -> Shape | None:
    """For how many indices along each batch axis there are buffers, or None if one matrix is larger than a buffer."""
    buffered = [one.bytes for one in read if one.copied]
    buffered += [one.bytes for one in written if one is not None and one.written_by_copy]
    largest = max(buffered, default=0)
    if largest > limits.PRODUCT_BYTES:
        return None
    count = limits.PRODUCT_BYTES // max(1, largest) if buffered else plan.numel(plan.batch)
    return fit(plan.sizes(plan.batch), count)
