"""Score every pair of rows, map the score: in blocks that fit the cache, fused in place, for any op of that form.

    out = normaliser(scale) + scale * phi(<x, loc>)          over all broadcast pairs of x and loc

The result is computed block by block where it will stand: the dot products of a block are one batched matrix product,
and `phi` and the normaliser are applied while the block is in the cache. Backward computes each block again, so that
only the inputs are saved. Temporaries are a few buffers of `BLOCK_BYTES`, whatever the shapes and dtypes: operands
that need another dtype or layout for the matrix product are copied block by block too. A call whose products alone fit
one such buffer is computed at once, by a product and a sum: cutting it would cost more than computing it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from effops.broadcast import Plan, Shape
from effops.precision import arithmetic_dtype

BLOCK_BYTES = 512 * 1024  # half of the L2 cache that a core of common server CPUs has, or all of it
SLAB = 65536  # values of the scale whose normaliser is kept for the blocks that share it
DEPTH = 256  # terms of a dot product summed at once: a longer sum of like signs loses digits
PIECE = 3072  # values of the scale whose normaliser is computed at once, in float64

Slices = tuple[slice, ...]


class PairMap(Protocol):
    """The small functions that make an op of this form."""

    def value_(self, dot: Tensor) -> None:
        """Overwrite the dot products of a block with phi."""

    def derivative_(self, dot: Tensor, factor: Tensor, value: Tensor | None) -> None:
        """Overwrite `dot` with factor * phi'(dot); write phi(dot) to `value` if it is wanted."""

    def normaliser(self, scale: Tensor) -> Tensor:
        """The normaliser of a float64 scale."""

    def normaliser_derivative(self, scale: Tensor) -> Tensor:
        """Its derivative by the scale."""


@dataclass(frozen=True)
class Blocks:
    """Extents of a block along each axis of the plan, by role, and of a step through the contracted axis."""

    batch: Shape
    rows: Shape
    columns: Shape
    depth: int

    @property
    def pairs(self) -> Shape:
        return self.batch + self.rows + self.columns


def cut(plan: Plan, dimension: int, itemsize: int, *, copies: bool) -> Blocks:
    """Blocks of at most `BLOCK_BYTES` of pairs and, where operands are copied, of each operand."""
    limit = BLOCK_BYTES // itemsize
    longest = max(1, limit // min(dimension, 128)) if copies else limit
    all_rows, all_columns = plan.numel(plan.rows), plan.numel(plan.columns)
    columns = min(all_columns, longest, max(512, limit // max(1, all_rows)))
    rows = min(all_rows, longest, limit // max(1, columns))
    whole = rows == all_rows and columns == all_columns
    batch = max(1, min(limit // max(1, rows * columns), longest // max(1, rows, columns))) if whole else 1
    batch_extents = _fit(plan.sizes(plan.batch), batch)
    row_extents = _fit(plan.sizes(plan.rows), rows)
    column_extents = _fit(plan.sizes(plan.columns), columns)
    widest = math.prod(batch_extents) * max(math.prod(row_extents), math.prod(column_extents))
    depth = min(dimension, DEPTH, max(1, limit // widest) if copies else DEPTH)
    return Blocks(batch_extents, row_extents, column_extents, depth)


def _fit(sizes: Shape, target: int) -> Shape:
    """Extents with a product of at most `target`: inner axes whole, then part of one, outer axes one by one."""
    extents: list[int] = []
    for size in reversed(sizes):
        extents.append(max(1, min(size, target)))
        target = target // size if 0 < size <= target else 1
    return tuple(reversed(extents))


def _tiles(within: Slices, extents: Shape) -> Iterator[Slices]:
    return itertools.product(
        *(
            [slice(i, min(i + extent, axis.stop)) for i in range(axis.start, axis.stop, extent)]
            for axis, extent in zip(within, extents)
        )
    )


class _Operand:
    """x or loc, given block by block as the three-dimensional factor of a batched matrix product."""

    def __init__(self, view: Tensor, batch_axes: int, arithmetic: torch.dtype) -> None:
        self.view = view
        self.batch_axes = batch_axes
        self.arithmetic = arithmetic
        self.copied = view.dtype != arithmetic or not self._is_matrix_operand()
        self.buffer: Tensor | None = None

    def _is_matrix_operand(self) -> bool:
        """Whether blocks are views that BLAS takes: both roles collapse to one axis, and the matrices have one unit
        stride and do not overlap."""
        batch = _collapse(self.view, range(self.batch_axes))
        own = _collapse(self.view, range(self.batch_axes, self.view.ndim - 1))
        if batch is None or own is None:
            return False
        (rows, row_stride), depth, depth_stride = own, self.view.shape[-1], self.view.stride(-1)
        by_rows = depth_stride == 1 and (rows == 1 or row_stride >= depth)
        by_depth = row_stride == 1 and (depth == 1 or depth_stride >= rows)
        return by_rows or by_depth

    def make_buffer(self, extents: Shape) -> None:
        """For blocks of at most these extents; along an axis of size 1 there is one entry however long the block."""
        if self.copied:
            numel = math.prod(map(min, self.view.shape, extents))
            self.buffer = self.view.new_empty(numel, dtype=self.arithmetic)

    def block(self, axes: Slices) -> Tensor:
        block = part(self.view, axes)
        if self.buffer is not None:
            block = self.buffer[: block.numel()].view(block.shape).copy_(block)
        return self.merge(block)

    def merge(self, block: Tensor) -> Tensor:
        return _merge(block, self.batch_axes, block.ndim - 1 - self.batch_axes)


class _Pairs:
    """The blocks of one call: its operands, and the order of the loops over them."""

    def __init__(self, plan: Plan, loc: Tensor, scale: Tensor, x: Tensor, arithmetic: torch.dtype) -> None:
        self.plan = plan
        self.arithmetic = arithmetic
        self.dimension = x.shape[-1]
        batch_axes = len(plan.batch)
        self.left = _Operand(plan.view(x, plan.batch + plan.rows, trailing=1), batch_axes, arithmetic)
        # Along columns where only the scale varies loc keeps size 1: their dot products are computed once.
        right = plan.view(loc, plan.batch + plan.columns, trailing=1, expand=False)
        self.right = _Operand(right, batch_axes, arithmetic)
        self.scale = plan.view(scale, plan.order, expand=False)
        self.inner = batch_axes + len(plan.rows)
        self.scale_by_rows = any(size != 1 for size in self.scale.shape[batch_axes : self.inner])
        self.blocks = cut(plan, self.dimension, arithmetic.itemsize, copies=self.left.copied or self.right.copied)
        self.repeated = self.distinct(self.blocks.pairs) != self.blocks.pairs
        batch = math.prod(self.blocks.batch)
        self.left.make_buffer((*self.blocks.batch, *self.blocks.rows, self.blocks.depth))
        self.right.make_buffer((*self.blocks.batch, *self.blocks.columns, self.blocks.depth))
        # Many small blocks share one computation of their scales' constants.
        columns = math.prod(self.blocks.columns) if math.prod(self.scale.shape[self.inner :]) > 1 else 1
        shared = max(batch, SLAB // max(1, columns))
        self.slab = self.blocks.batch if batch == 1 or self.scale_by_rows else _fit(plan.sizes(plan.batch), shared)
        # The dot products of all parts of the depth but the first.
        self.partial = self.dot_buffer() if self.blocks.depth < self.dimension else None

    def walk(self, function: Callable[[Tensor], Tensor]) -> Iterator[tuple[Slices, Slices, Slices, Tensor, Tensor]]:
        """Batch, rows and columns of every block, `function` of its scale, and the scale."""
        all_batch, all_rows, all_columns = (
            tuple(slice(0, size) for size in self.plan.sizes(axes))
            for axes in (self.plan.batch, self.plan.rows, self.plan.columns)
        )
        shared: tuple[Tensor, Tensor] | None = None
        for slab in _tiles(all_batch, self.slab):
            for columns in _tiles(all_columns, self.blocks.columns):
                if not self.scale_by_rows:
                    shared = None  # freed before the next is computed
                    shared = self.constants(function, (*slab, *all_rows, *columns))
                for batch in _tiles(slab, self.blocks.batch):
                    inside = tuple(slice(i.start - j.start, i.stop - j.start) for i, j in zip(batch, slab))
                    for rows in _tiles(all_rows, self.blocks.rows):
                        if shared is None:
                            values, factor = self.constants(function, (*batch, *rows, *columns))
                            yield batch, rows, columns, values, factor
                            del values, factor
                        else:
                            yield batch, rows, columns, part(shared[0], inside), part(shared[1], inside)

    def depths(self) -> Iterator[slice]:
        return (slice(i, i + self.blocks.depth) for i in range(0, self.dimension, self.blocks.depth))

    def pair_buffer(self) -> Tensor:
        return self.scale.new_empty(math.prod(self.blocks.pairs), dtype=self.arithmetic)

    def dot_buffer(self) -> Tensor:
        return self.scale.new_empty(math.prod(self.distinct(self.blocks.pairs)), dtype=self.arithmetic)

    def merge(self, block: Tensor) -> Tensor:
        return _merge(block, len(self.plan.batch), len(self.plan.rows))

    def distinct(self, shape: Sequence[int]) -> Shape:
        """Shape of the distinct dot products of a block of that shape."""
        varying = self.right.view.shape[len(self.plan.batch) : -1]
        extents = (1 if size == 1 else extent for size, extent in zip(varying, shape[self.inner :]))
        return (*shape[: self.inner], *extents)

    def dot_(self, out: Tensor, batch: Slices, rows: Slices, columns: Slices) -> None:
        """Overwrite a block with <x, loc>."""
        matrices = self.merge(out)
        for depth in self.depths():
            left, right = self.left.block((*batch, *rows, depth)), self.right.block((*batch, *columns, depth))
            if self.partial is None or depth.start == 0:
                matrices.baddbmm_(left, right.mT, beta=0)
            else:
                matrices += torch.bmm(left, right.mT, out=self.partial[: out.numel()].view(matrices.shape))

    def constants(self, function: Callable[[Tensor], Tensor], block: Slices) -> tuple[Tensor, Tensor]:
        """`_constants` of a block's scale."""
        return _constants(function, part(self.scale, block), self.arithmetic)


def _constants(function: Callable[[Tensor], Tensor], scale: Tensor, arithmetic: torch.dtype) -> tuple[Tensor, Tensor]:
    """`function` of a scale, computed in float64 a piece at a time and rounded once; and the scale."""
    factor = scale.to(arithmetic, memory_format=torch.contiguous_format).contiguous()
    if scale.numel() <= PIECE:
        return function(scale.double()).to(arithmetic), factor
    flat = factor.view(-1)
    values = torch.empty_like(flat)
    for i in range(0, flat.numel(), PIECE):
        values[i : i + PIECE] = function(flat[i : i + PIECE].double())
    return values.view(scale.shape), factor


def part(operand: Tensor, block: Slices) -> Tensor:
    """operand[block], whole along the axes where `operand` has size 1."""
    return operand[tuple(slice(None) if size == 1 else piece for size, piece in zip(operand.shape, block))]


def _merge(block: Tensor, first: int, second: int) -> Tensor:
    """A view with the first axes of a block merged into one, the second ones likewise, and the rest."""
    shape = block.shape
    sizes = (shape[:first], shape[first : first + second], shape[first + second :])
    return block.view([math.prod(size) for size in sizes])


def _collapse(view: Tensor, axes: range) -> tuple[int, int] | None:
    """Size and stride of some axes of a view as one axis, if they are one."""
    size = stride = 1
    for axis in reversed(axes):
        if view.shape[axis] != 1:
            if size == 1:
                stride = view.stride(axis)
            elif view.stride(axis) != size * stride:
                return None
            size *= view.shape[axis]
    return size, stride


class _Workspace(NamedTuple):
    """What `forward` allocates besides constants: the result, and block buffers where it cannot be in place.

    `ordered` is a view of the result with the plan's order of axes.
    """

    out: Tensor
    ordered: Tensor
    pairs: _Pairs
    value: Tensor | None
    dot: Tensor | None


def _workspace(plan: Plan, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> _Workspace:
    out = plan.empty(x, dtype)
    pairs = _Pairs(plan, loc, scale, x, arithmetic_dtype(dtype))
    value = pairs.pair_buffer() if dtype != pairs.arithmetic else None
    return _Workspace(out, plan.view(out, plan.order), pairs, value, pairs.dot_buffer() if pairs.repeated else None)


def _fits_one_block(plan: Plan, x: Tensor, dtype: torch.dtype) -> bool:
    products = plan.numel(plan.order) * x.shape[-1]
    return 0 < products * arithmetic_dtype(dtype).itemsize <= BLOCK_BYTES


def _at_once(
    value_: Callable[[Tensor], None],
    normaliser: Callable[[Tensor], Tensor],
    plan: Plan,
    loc: Tensor,
    scale: Tensor,
    x: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    arithmetic = arithmetic_dtype(dtype)
    constants, factor = _constants(normaliser, scale, arithmetic)
    dot = (loc.to(arithmetic) * x.to(arithmetic)).sum(-1)
    value_(dot)
    out = plan.empty(x, dtype)
    if dtype == arithmetic:
        return torch.addcmul(constants, factor, dot, out=out)
    return out.copy_(torch.addcmul(constants, factor, dot))


def forward(pair_map: PairMap, plan: Plan, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The result in `dtype`, contiguous in the plan's order of axes."""
    if _fits_one_block(plan, x, dtype):
        return _at_once(pair_map.value_, pair_map.normaliser, plan, loc, scale, x, dtype)
    out, ordered, pairs, value_buffer, dot_buffer = _workspace(plan, loc, scale, x, dtype)
    for batch, rows, columns, normaliser, factor in pairs.walk(pair_map.normaliser):
        block = (*batch, *rows, *columns)
        target = ordered[block]
        value = target if value_buffer is None else value_buffer[: target.numel()].view(target.shape)
        dot = value
        if dot_buffer is not None:
            shape = pairs.distinct(target.shape)
            dot = dot_buffer[: math.prod(shape)].view(shape)
        pairs.dot_(dot, batch, rows, columns)
        pair_map.value_(dot)
        torch.addcmul(normaliser, factor, dot, out=value)
        if value is not target:
            target.copy_(value)
        del normaliser, factor  # freed before the next ones are computed
    return out


def rehearse(pair_map: PairMap, plan: Plan, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate what `forward` allocates at its largest, and compute no pairs: for predictions on fake tensors."""
    if _fits_one_block(plan, x, dtype):
        return _at_once(lambda dot: None, pair_map.normaliser, plan, loc, scale, x, dtype)
    out, _ordered, pairs, *_buffers = _workspace(plan, loc, scale, x, dtype)
    next(pairs.walk(pair_map.normaliser), None)
    return out


def backward(
    pair_map: PairMap,
    plan: Plan,
    loc: Tensor,
    scale: Tensor,
    x: Tensor,
    dout: Tensor,
    arithmetic: torch.dtype,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of loc, scale and x, in their shapes and dtypes, each where `needs` asks for it.

    With G = dout * scale * phi'(<x, loc>):    dx = sum_columns G loc,    dloc = sum_rows G x,
    dscale = sum dout * (normaliser'(scale) + phi).
    """
    pairs = _Pairs(plan, loc, scale, x, arithmetic)
    views = (pairs.right.view, pairs.scale, pairs.left.view)
    dloc, dscale, dx = (view.new_zeros(view.shape, dtype=arithmetic) if n else None for view, n in zip(views, needs))
    if dout.numel():
        upstream = plan.view(dout, plan.order)
        dot_buffer = pairs.dot_buffer()
        value_buffer = pairs.pair_buffer() if dscale is not None else None
        for batch, rows, columns, normaliser, factor in pairs.walk(pair_map.normaliser_derivative):
            block = (*batch, *rows, *columns)
            dout_block = upstream[block]
            shape = dout_block.shape
            distinct = pairs.distinct(shape)
            dot = dot_buffer[: math.prod(distinct)].view(distinct)
            pairs.dot_(dot, batch, rows, columns)
            if pairs.repeated:
                dot = dot.expand(shape).clone(memory_format=torch.contiguous_format)
            value = None if value_buffer is None else value_buffer[: dout_block.numel()].view(shape)
            pair_map.derivative_(dot, factor, value)
            if dscale is not None and value is not None:
                total = part(dscale, block)
                total += value.add_(normaliser).mul_(dout_block).sum_to_size(total.shape)
            if dx is None and dloc is None:
                continue
            weights = pairs.merge(dot.mul_(dout_block).sum_to_size(distinct))
            for depth in pairs.depths():
                if dx is not None:
                    target = pairs.left.merge(part(dx, (*batch, *rows, depth)))
                    target.baddbmm_(weights, pairs.right.block((*batch, *columns, depth)))
                if dloc is not None:
                    target = pairs.right.merge(part(dloc, (*batch, *columns, depth)))
                    target.baddbmm_(weights.mT, pairs.left.block((*batch, *rows, depth)))
    return (
        None if dloc is None else plan.gradient(dloc, loc, plan.batch + plan.columns),
        None if dscale is None else plan.gradient(dscale, scale, plan.order),
        None if dx is None else plan.gradient(dx, x, plan.batch + plan.rows),
    )
