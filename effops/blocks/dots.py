"""Scores of the form normaliser(scale) + scale * phi(<x, loc>), block by block, for `pairs` and `logsumexp`.

The dot products of a block are one batched matrix product, written to the place of the scores. `phi` and the normaliser
are applied while the block is in the cache. Operands that need another dtype or layout for the product are copied block
by block too. If all elementwise products of a call fit one buffer, a product and a sum compute it at once: cutting it
would cost more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from effops.blocks.plan import Plan, Shape, Slices
from effops.blocks.tiling import BLOCK_BYTES, Block, Extents, cut, enclosing, fit, merge, part, row_blocks, tiles, whole
from effops.numerics.precision import arithmetic_dtype

SLAB = 65536  # how many values of a normaliser are kept for the blocks that share them
SMALL = 8192  # how many values a matrix has below which a BLAS call for it alone costs more than to add the matrix
PIECE = 3072  # how many values of a normaliser are computed at once, in float64

Function = Callable[[Tensor], Tensor]


class DotMap(Protocol):
    """The functions phi and normaliser of a score, and their derivatives."""

    def value_(self, dot: Tensor) -> None:
        """Overwrite the dot products of a block with phi."""

    def derivative_(self, dot: Tensor, factor: Tensor, value: Tensor | None) -> None:
        """Overwrite `dot` with factor * phi'(dot); write phi(dot) to `value` if it is wanted."""

    def normaliser(self, scale: Tensor) -> Tensor:
        """The normaliser of a float64 scale."""

    def normaliser_derivative(self, scale: Tensor) -> Tensor:
        """The derivative of the normaliser by the scale."""


class MatrixOperand:
    """One factor of the products. `block` gives a block of it as the three-dimensional factor of `torch.bmm`."""

    def __init__(self, view: Tensor, batch_axes: int, arithmetic: torch.dtype) -> None:
        self.view = view
        self.batch_axes = batch_axes
        self.arithmetic = arithmetic
        self.copied = view.dtype != arithmetic or not self._is_matrix_operand()
        self.buffer: Tensor | None = None

    def _is_matrix_operand(self) -> bool:
        """Whether blocks are views that BLAS takes.

        The axes of each role must collapse into one. The matrices must have a unit stride and must not overlap.
        """
        batch = _collapse(self.view, range(self.batch_axes))
        own = _collapse(self.view, range(self.batch_axes, self.view.ndim - 1))
        if batch is None or own is None:
            return False
        (rows, row_stride), depth, depth_stride = own, self.view.shape[-1], self.view.stride(-1)
        by_rows = depth_stride == 1 and (rows == 1 or row_stride >= depth)
        by_depth = row_stride == 1 and (depth == 1 or depth_stride >= rows)
        return by_rows or by_depth

    def make_buffer(self, extents: Shape) -> None:
        """Make the buffer for copies of blocks of at most these extents, if blocks are copied.

        An axis of size 1 takes one entry, whatever its extent.
        """
        if self.copied:
            numel = math.prod(map(min, self.view.shape, extents))
            self.buffer = self.view.new_empty(numel, dtype=self.arithmetic)

    def block(self, axes: Slices) -> Tensor:
        block = part(self.view, axes)
        if self.buffer is not None:
            block = self.buffer[: block.numel()].view(block.shape).copy_(block)
        return self.merge(block)

    def merge(self, block: Tensor) -> Tensor:
        return merge(block, self.batch_axes, block.ndim - 1 - self.batch_axes)


class ProductSum(MatrixOperand):
    """The gradient of a factor: a sum of products, laid out as the factor, to which blocks add theirs.

    A product is written where it belongs if BLAS does so. Else, and where its matrices are many, small and apart, for
    which BLAS is called one by one, it goes through a buffer.
    """

    def __init__(self, plan: Plan, factor: Tensor, axes: Shape, arithmetic: torch.dtype) -> None:
        self.total = torch.zeros_like(factor, dtype=arithmetic)
        view = plan.view(self.total, axes, trailing=1, expand=False)
        super().__init__(view, len(plan.batch), arithmetic)

    def buffer_numel(self, extents: Shape) -> int:
        """How many values of a buffer it needs, for blocks of at most these extents."""
        own = [min(size, extent) for size, extent in zip(self.view.shape, extents)]
        matrix, numel = math.prod(own[self.batch_axes :]), math.prod(own)
        if self.copied:
            return numel
        is_slow = matrix < min(numel, SMALL) and not self.view.is_contiguous()
        return min(numel, BLOCK_BYTES // self.arithmetic.itemsize) if is_slow else 0

    def add(self, axes: Slices, left: Tensor, right: Tensor, alpha: float) -> None:
        """Add alpha left @ right to a block."""
        target = part(self.view, axes)
        if self.buffer is None:
            self.merge(target).baddbmm_(left, right, alpha=alpha)
        elif self.copied:
            self._add_by_buffer(target, left, right, alpha)
        else:
            step = max(1, self.buffer.numel() // max(1, left.shape[1] * right.shape[2]))
            for some in zip(self.merge(target).split(step), left.split(step), right.split(step)):
                self._add_by_buffer(*some, alpha)

    def _add_by_buffer(self, target: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
        assert self.buffer is not None
        product = self.buffer[: target.numel()].view(left.shape[0], left.shape[1], right.shape[2])
        target += product.baddbmm_(left, right, beta=0, alpha=alpha).view(target.shape)

    def gradient(self, factor: Tensor) -> Tensor:
        return self.total.to(factor.dtype)


def _collapse(view: Tensor, axes: range) -> tuple[int, int] | None:
    """The size and stride of some axes of a view as one axis, or None if they do not collapse into one."""
    size = stride = 1
    for axis in reversed(axes):
        if view.shape[axis] != 1:
            if size == 1:
                stride = view.stride(axis)
            elif view.stride(axis) != size * stride:
                return None
            size *= view.shape[axis]
    return size, stride


class Products:
    """The dot products of one call, block by block, and the gradients of its operands.

    With gradients G of the products:    dx = sum_columns G loc,    dloc = sum_rows G x.
    Along columns where only a further operand varies, and loc does not, the products are computed once. `extents`, if
    given, are those of the blocks that the caller walks.
    """

    def __init__(
        self,
        plan: Plan,
        loc: Tensor,
        x: Tensor,
        arithmetic: torch.dtype,
        *,
        extents: Extents | None = None,
        wants_loc: bool = False,
        wants_x: bool = False,
    ) -> None:
        self.plan = plan
        self.arithmetic = arithmetic
        self.tensors = loc, x
        self.dimension = x.shape[-1]
        batch_axes = len(plan.batch)
        self.left = MatrixOperand(plan.view(x, plan.batch + plan.rows, trailing=1), batch_axes, arithmetic)
        right = plan.view(loc, plan.batch + plan.columns, trailing=1, expand=False)
        self.right = MatrixOperand(right, batch_axes, arithmetic)
        self.dloc, self.dx = (
            ProductSum(plan, tensor, plan.batch + axes, arithmetic) if is_wanted else None
            for tensor, axes, is_wanted in ((loc, plan.columns, wants_loc), (x, plan.rows, wants_x))
        )
        operands = [operand for operand in (self.left, self.right, self.dloc, self.dx) if operand is not None]
        copies = float(any(operand.copied for operand in operands))
        self.extents = extents or cut(plan, self.dimension, arithmetic.itemsize, copies=copies)
        of_rows, of_columns = (
            (*self.extents.batch, *axes, self.extents.depth) for axes in (self.extents.rows, self.extents.columns)
        )
        self.left.make_buffer(of_rows)
        self.right.make_buffer(of_columns)
        sums = [(one, axes) for one, axes in ((self.dx, of_rows), (self.dloc, of_columns)) if one is not None]
        numels = [one.buffer_numel(axes) for one, axes in sums]
        buffer = x.new_empty(max(numels), dtype=arithmetic) if any(numels) else None  # one serves both, by turns
        for (one, _), numel in zip(sums, numels):
            one.buffer = buffer if numel else None
        # Each part of the depth but the first has its dot products here, before they are added to those in `out`.
        self.partial = self.buffer() if self.extents.depth < self.dimension else None

    def buffer(self) -> Tensor:
        """Uninitialised memory for the distinct products of a block."""
        return self.left.view.new_empty(math.prod(self.distinct(self.extents.pairs)), dtype=self.arithmetic)

    def distinct(self, shape: Sequence[int]) -> Shape:
        """The shape of the distinct products of a block that has the shape `shape`."""
        inner = len(self.plan.batch) + len(self.plan.rows)
        varying = self.right.view.shape[len(self.plan.batch) : -1]
        extents = (1 if size == 1 else extent for size, extent in zip(varying, shape[inner:]))
        return (*shape[:inner], *extents)

    def evaluate(self, block: Block, out: Tensor, alpha: float = 1.0) -> Tensor:
        """Overwrite `out` with alpha <x, loc> for the pairs of a block."""
        if self.dimension == 0:
            return out.zero_()
        matrices = self._merge(out)
        for depth in self._depths():
            left = self.left.block((*block.batch, *block.rows, depth))
            right = self.right.block((*block.batch, *block.columns, depth))
            if self.partial is None or depth.start == 0:
                matrices.baddbmm_(left, right.mT, beta=0, alpha=alpha)
            else:
                products = torch.bmm(left, right.mT, out=self.partial[: out.numel()].view(matrices.shape))
                matrices.add_(products, alpha=alpha)
        return out

    def pull_back(self, block: Block, weights: Tensor, alpha: float = 1.0) -> None:
        """Add the contribution of a block to the gradients. alpha * `weights` is that of its distinct products."""
        matrices = self._merge(weights)
        for depth in self._depths():
            if self.dx is not None:
                right = self.right.block((*block.batch, *block.columns, depth))
                self.dx.add((*block.batch, *block.rows, depth), matrices, right, alpha)
            if self.dloc is not None:
                left = self.left.block((*block.batch, *block.rows, depth))
                self.dloc.add((*block.batch, *block.columns, depth), matrices.mT, left, alpha)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of loc and x."""
        loc, x = self.tensors
        return (
            None if self.dloc is None else self.dloc.gradient(loc),
            None if self.dx is None else self.dx.gradient(x),
        )

    def _depths(self) -> Iterator[slice]:
        return (slice(i, i + self.extents.depth) for i in range(0, self.dimension, self.extents.depth))

    def _merge(self, block: Tensor) -> Tensor:
        return merge(block, len(self.plan.batch), len(self.plan.rows))


class ScaledDots:
    """The scores scale <query, key>, as `Scores`, with gradients of query and key."""

    def __init__(self, products: Products, scale: float) -> None:
        self.products, self.scale = products, scale
        self.plan, self.arithmetic, self.extents = products.plan, products.arithmetic, products.extents

    def walk(self) -> Iterator[Block]:
        return itertools.chain.from_iterable(row_blocks(self.plan, self.extents))

    def evaluate(self, block: Block, out: Tensor | None) -> None:
        if out is not None:
            self.products.evaluate(block, out, self.scale)

    def pull_back(self, block: Block, weight: Tensor, evaluated: None = None) -> None:
        self.products.pull_back(block, weight, self.scale)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        dkey, dquery = self.products.gradients()
        return dquery, dkey


class DotScores:
    """The scores of one call, as `Scores`.

    Args:
        scored: whether the scores are wanted, besides gradients
        wanted: which gradients of loc, scale and x are wanted

    For a gradient `weight` of the scores, the products have the gradient G = weight * scale * phi'(<x, loc>), which
    gives those of loc and x.    dscale = sum weight * (normaliser'(scale) + phi)
    """

    def __init__(
        self,
        dot_map: DotMap,
        plan: Plan,
        loc: Tensor,
        scale: Tensor,
        x: Tensor,
        arithmetic: torch.dtype,
        *,
        scored: bool = True,
        wanted: Sequence[bool] = (False, False, False),
    ) -> None:
        self.map = dot_map
        self.plan = plan
        self.arithmetic = arithmetic
        wants_loc, self.wants_scale, wants_x = wanted
        self.products = Products(plan, loc, x, arithmetic, wants_loc=wants_loc, wants_x=wants_x)
        self.extents = self.products.extents
        self.scale_operand, self.scale = scale, plan.view(scale, plan.order, expand=False)
        batch_axes = len(plan.batch)
        inner = batch_axes + len(plan.rows)
        self.scale_by_rows = any(size != 1 for size in self.scale.shape[batch_axes:inner])
        self.repeated = self.products.distinct(self.extents.pairs) != self.extents.pairs
        # Many small blocks share one computation of the constants of their scales.
        batch = math.prod(self.extents.batch)
        columns = math.prod(self.extents.columns) if math.prod(self.scale.shape[inner:]) > 1 else 1
        shared = max(batch, SLAB // max(1, columns))
        self.slab = self.extents.batch if batch == 1 or self.scale_by_rows else fit(plan.sizes(plan.batch), shared)

        self.scored, self.differentiated = scored, any(wanted)
        if self.differentiated or self.repeated:  # else the products are computed in the place of the scores
            self.dot = self.products.buffer()
        wants_phi = self.differentiated and (scored or self.wants_scale)
        self.phi = scale.new_empty(math.prod(self.extents.pairs), dtype=arithmetic) if wants_phi else None
        self.region: Slices = ()  # where `constants` were computed last
        self.constants: _Constants | None = None
        self.dscale = torch.zeros_like(scale, dtype=arithmetic) if self.wants_scale else None
        self.scale_total = None if self.dscale is None else plan.view(self.dscale, plan.order, expand=False)

    def walk(self) -> Iterator[Block]:
        """Every block once. Blocks that share constants follow one another."""
        plan, extents = self.plan, self.extents
        all_batch, all_rows, all_columns = (whole(plan.sizes(axes)) for axes in (plan.batch, plan.rows, plan.columns))
        for slab in tiles(all_batch, self.slab):
            for columns in tiles(all_columns, extents.columns):
                for batch in tiles(slab, extents.batch):
                    for rows in tiles(all_rows, extents.rows):
                        yield Block(batch, rows, columns)

    def _constants_of(self, block: Block) -> _Constants:
        """The constants of a block. Blocks that share constants share their computation too."""
        if self.scale_by_rows:
            slab, region = block.batch, block.pairs
        else:
            slab = enclosing(block.batch, self.slab, self.plan.sizes(self.plan.batch))
            region = (*slab, *whole(self.plan.sizes(self.plan.rows)), *block.columns)
        if self.constants is None or region != self.region:
            self.constants = None  # frees the former constants before others are made
            self.region, self.constants = region, self._computed_constants(region)
        inside = tuple(slice(i.start - j.start, i.stop - j.start) for i, j in zip(block.batch, slab))
        return self.constants.part(inside)

    def _computed_constants(self, region: Slices) -> _Constants:
        """The constants of a region. Each is computed in float64, a piece at a time, and rounded once."""
        scale = part(self.scale, region)
        factor = scale.to(self.arithmetic, memory_format=torch.contiguous_format).contiguous()
        return _Constants(
            _in_pieces(self.map.normaliser, scale, factor) if self.scored else None,
            _in_pieces(self.map.normaliser_derivative, scale, factor) if self.wants_scale else None,
            factor,
        )

    def evaluate(self, block: Block, out: Tensor | None) -> _Evaluated | None:
        constants = self._constants_of(block)
        normaliser, _, factor = constants
        shape = tuple(piece.stop - piece.start for piece in block.pairs)
        evaluated = None
        if self.differentiated:
            dot = self._dots_apart(block, shape)
            if self.repeated:
                dot = dot.expand(shape).clone(memory_format=torch.contiguous_format)
            phi = None if self.phi is None else self.phi[: dot.numel()].view(shape)
            self.map.derivative_(dot, factor, phi)
            evaluated = _Evaluated(dot, phi, constants.normaliser_derivative)
        elif out is not None:
            phi = self._dots_apart(block, shape) if self.repeated else self.products.evaluate(block, out)
            self.map.value_(phi)
        if out is not None and phi is not None and normaliser is not None:
            torch.addcmul(normaliser, factor, phi.expand(shape), out=out)
        return evaluated

    def pull_back(self, block: Block, weight: Tensor, evaluated: _Evaluated | None = None) -> None:
        if evaluated is None:
            return
        slope, phi, normaliser_derivative = evaluated
        if self.scale_total is not None and phi is not None and normaliser_derivative is not None:
            total = part(self.scale_total, block.pairs)
            total += phi.add_(normaliser_derivative).mul_(weight).sum_to_size(total.shape)
        if self.products.dx is not None or self.products.dloc is not None:
            self.products.pull_back(block, slope.mul_(weight).sum_to_size(self.products.distinct(slope.shape)))

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dloc, dx = self.products.gradients()
        dscale = None if self.dscale is None else self.dscale.to(self.scale_operand.dtype)
        return dloc, dscale, dx

    def _dots_apart(self, block: Block, shape: Sequence[int]) -> Tensor:
        """The distinct dot products of a block, in a buffer of their own."""
        distinct = self.products.distinct(shape)
        return self.products.evaluate(block, self.dot[: math.prod(distinct)].view(distinct))


class _Evaluated(NamedTuple):
    """The factors of a block that its gradients need: scale * phi', phi, and the derivative of the normaliser."""

    slope: Tensor
    phi: Tensor | None
    normaliser_derivative: Tensor | None


class _Constants(NamedTuple):
    """What depends on the scale of one or several blocks alone: its functions, where they are wanted, and itself."""

    normaliser: Tensor | None
    normaliser_derivative: Tensor | None
    factor: Tensor

    def part(self, block: Slices) -> _Constants:
        normaliser, derivative, factor = self
        return _Constants(
            None if normaliser is None else part(normaliser, block),
            None if derivative is None else part(derivative, block),
            part(factor, block),
        )


def _in_pieces(function: Function, scale: Tensor, factor: Tensor) -> Tensor:
    """`function` of the float64 scale, a piece at a time, rounded to the dtype of `factor`.

    `factor` is the same scale, contiguous and in the dtype of the arithmetic.
    """
    if scale.numel() <= PIECE:
        return function(scale.double()).to(factor.dtype)
    flat = factor.view(-1)
    values = torch.empty_like(flat)
    for i in range(0, flat.numel(), PIECE):
        values[i : i + PIECE] = function(flat[i : i + PIECE].double())
    return values.view(scale.shape)


def fit_one_block(plan: Plan, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether all elementwise products of a call with a result in `dtype` fit one buffer."""
    products = plan.numel(plan.order) * x.shape[-1]
    return 0 < products * arithmetic_dtype(dtype).itemsize <= BLOCK_BYTES


def at_once(dot_map: DotMap, plan: Plan, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scores of a call that fits one block, by an elementwise product and a sum."""
    arithmetic = arithmetic_dtype(dtype)
    factor = scale.to(arithmetic, memory_format=torch.contiguous_format).contiguous()
    constants = _in_pieces(dot_map.normaliser, scale, factor)
    dot = (loc.to(arithmetic) * x.to(arithmetic)).sum(-1)
    dot_map.value_(dot)
    out = plan.empty(x, dtype)
    if dtype == arithmetic:
        return torch.addcmul(constants, factor, dot, out=out)
    return out.copy_(torch.addcmul(constants, factor, dot))


def contract(loc: Tensor, x: Tensor, arithmetic: torch.dtype) -> Tensor:
    """<x, loc> of every pair by `torch.einsum`; scriptable."""
    # 256 terms at a time, since a longer sequential sum of terms of one sign has an error above its budget.
    dot = torch.einsum("...d,...d->...", [loc[..., :256].to(arithmetic), x[..., :256].to(arithmetic)])
    for i in range(256, x.shape[-1], 256):
        part = [loc[..., i : i + 256].to(arithmetic), x[..., i : i + 256].to(arithmetic)]
        dot = dot + torch.einsum("...d,...d->...", part)
    return dot
