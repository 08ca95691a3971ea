"""Scores of the form normaliser(scale) + scale * phi(<x, loc>), block by block, for `pairs` and `logsumexp`.

The dot products of a block are one batched matrix product, written to the place of the scores. `phi` and the normaliser
are applied while the block is in the cache. Operands that need another dtype or layout for the product are copied block
by block too. `effops.blocks.small` computes calls that are too small to be cut.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effops.blocks import limits
from effops.blocks.cutting import (
    Block,
    Buffer,
    Extents,
    block_extents,
    broadcast_slice,
    column_blocks,
    counted_from_start_of,
    depths,
    fit,
    merge,
    pair_bytes_beside,
    piece_around,
    sizes,
    visited_pieces,
    whole,
)
from effops.blocks.operand import PairOperand
from effops.blocks.pairs import Scores
from effops.blocks.plan import Axes, Plan, Shape, Slices
from effops.numerics.layout import zero_gradient
from effops.numerics.precision import converted

PIECE_VALUES = 14  # temporaries of a piece of a normaliser, in float64 for each of its values

Function = Callable[[Tensor], Tensor]


class DotMap:
    """The functions phi and normaliser of a score, and their derivatives: phi(t) = t, and no normaliser.

    Their argument is t = intercept + slope <x, loc>, which costs a matrix product nothing. Subclasses have others.

    Attributes:
        native: the name of phi among the maps in C++
        settings: as `MapSettings` there: the argument below which phi is constant, that below which it is NaN, and what
            is added to an argument
    """

    intercept, slope = 0.0, 1.0
    native, settings = "linear", (-math.inf, -math.inf, 0.0)

    def value_(self, t: Tensor) -> None:
        """Overwrite the arguments t of a block with phi."""

    def derivative_(self, t: Tensor, factor: Tensor, value: Tensor | None) -> None:
        """Overwrite `t` with factor * phi'(t); write phi(t) to `value` if it is wanted."""
        if value is not None:
            value.copy_(t)
        t.copy_(factor.expand(t.shape))

    def normaliser(self, scale: Tensor) -> Tensor:
        """The normaliser, in float64, of a scale of any dtype."""
        return torch.zeros_like(scale)

    def normaliser_derivative(self, scale: Tensor) -> Tensor:
        """The derivative of the normaliser by the scale."""
        return torch.zeros_like(scale)


class MatrixOperand:
    """One factor of the products. `block` gives a block of it as the three-dimensional factor of `torch.bmm`.

    `axes` are those of the plan along which it lies, besides the batch: rows or columns.
    """

    def __init__(self, plan: Plan, tensor: Tensor, axes: Axes, arithmetic: torch.dtype) -> None:
        self.view = plan.view(tensor, plan.batch + axes, trailing=1, expand=False)
        self.batch_axes = len(plan.batch)
        own_axes = self.view.ndim - 1 - self.batch_axes
        self.copied = tensor.dtype != arithmetic or not are_matrices(self.view, self.batch_axes, own_axes)
        self.buffer = Buffer(tensor, arithmetic)

    def block(self, axes: Slices) -> Tensor:
        block = broadcast_slice(self.view, axes)
        return self.merge(self.buffer.room(block.shape).copy_(block) if self.copied else block)

    def reserve(self, axes: Slices) -> None:
        """Take the memory that a block needs."""
        if self.copied:
            self.buffer.room(broadcast_slice(self.view, axes).shape)

    def merge(self, block: Tensor) -> Tensor:
        return merge(block, self.batch_axes, block.ndim - 1 - self.batch_axes)


class ProductSum(MatrixOperand):
    """The gradient of a factor: a sum of products, laid out as the factor, to which blocks add theirs.

    A product is written where it belongs if BLAS does so. Else, and where its matrices are many, small and apart, for
    which BLAS is called one by one, it goes through `buffer`.
    """

    def __init__(self, plan: Plan, factor: Tensor, axes: Axes, arithmetic: torch.dtype, buffer: Buffer) -> None:
        self.factor = factor
        self.gradient_sum = zero_gradient(factor, arithmetic)
        super().__init__(plan, self.gradient_sum, axes, arithmetic)
        self.buffer = buffer
        self.is_slow: bool | None = None  # whether BLAS is, as the first block tells

    def add_product(self, axes: Slices, left: Tensor, right: Tensor, alpha: float) -> None:
        """Add alpha left @ right to a block."""
        target = broadcast_slice(self.view, axes)
        if self.is_slow is None:
            matrix = math.prod(target.shape[self.batch_axes :])
            self.is_slow = matrix < min(target.numel(), limits.SLOW_MATRIX) and not self.view.is_contiguous()
        if self.copied:
            self._add_by_buffer(target, left, right, alpha)
        elif self.is_slow:
            step = max(1, limits.BLOCK_BYTES // self.gradient_sum.itemsize // max(1, left.shape[1] * right.shape[2]))
            for some in zip(self.merge(target).split(step), left.split(step), right.split(step)):
                self._add_by_buffer(*some, alpha)
        else:
            self.merge(target).baddbmm_(left, right, alpha=alpha)

    def _add_by_buffer(self, target: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
        product = self.buffer.room((left.shape[0], left.shape[1], right.shape[2]))
        target += product.baddbmm_(left, right, beta=0, alpha=alpha).view(target.shape)

    def gradient(self) -> Tensor:
        return self.gradient_sum.to(self.factor.dtype)


def are_matrices(view: Tensor, batch: int, rows: int) -> bool:
    """Whether a view is matrices that BLAS takes. Its first `batch` axes tell which matrix, the next `rows` which row.

    The axes of each role must collapse into one. The matrices must have a unit stride and must not overlap.
    """
    roles = (0, batch), (batch, batch + rows), (batch + rows, view.ndim)
    which, matrix_rows, matrix_columns = (collapse(view, range(*role)) for role in roles)
    if which is None or matrix_rows is None or matrix_columns is None:
        return False
    (height, row_stride), (width, column_stride) = matrix_rows, matrix_columns
    by_rows = column_stride == 1 and (height == 1 or row_stride >= width)
    by_columns = row_stride == 1 and (width == 1 or column_stride >= height)
    return by_rows or by_columns


def collapse(view: Tensor, axes: range) -> tuple[int, int] | None:
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


class Products(Scores):
    """The scores intercept + factor <x, loc> of one call, with gradients of x and loc.

    With gradients G of the scores:    dx = factor sum_columns G loc,    dloc = factor sum_rows G x.
    Along columns where only a further operand varies, and loc does not, the products are computed once: `evaluate` and
    `pull_back` take those that are `distinct`. `extents`, if given, are those of the blocks that the caller walks.
    Else blocks are as large as memory allows, where the caller has `held` bytes and some `buffers` of a block's size.
    """

    def __init__(
        self,
        plan: Plan,
        loc: Tensor,
        x: Tensor,
        arithmetic: torch.dtype,
        *,
        factor: float = 1.0,
        intercept: float = 0.0,
        extents: Extents | None = None,
        held: int = 0,
        buffers: float = 1.0,
        wants_loc: bool = False,
        wants_x: bool = False,
    ) -> None:
        self.dimension, self.factor, self.intercept = x.shape[-1], factor, intercept
        # BLAS is given no factor that its dtype rounds to 0: it would not see NaN, and oneDNN in bfloat16 would leave
        # the result as it was.
        self.is_tiny = abs(factor) < torch.finfo(arithmetic).smallest_normal
        self.alpha = 1.0 if self.is_tiny else factor
        self.left = MatrixOperand(plan, x, plan.rows, arithmetic)
        self.right = MatrixOperand(plan, loc, plan.columns, arithmetic)
        buffer = Buffer(x, arithmetic)  # one serves both sums, by turns
        self.dx = ProductSum(plan, x, plan.rows, arithmetic, buffer) if wants_x else None
        self.dloc = ProductSum(plan, loc, plan.columns, arithmetic, buffer) if wants_loc else None
        copies_any = any(one is not None and one.copied for one in (self.left, self.right, self.dx, self.dloc))
        if extents is None:
            held += 2 * limits.BLOCK_BYTES * copies_any
            buffers += self.dimension > (limits.DEPTH // 2 if copies_any else limits.DEPTH)  # `partial`
            limit = 2 * limits.TEMPORARY_BYTES if wants_loc or wants_x else limits.TEMPORARY_BYTES
            pair_bytes = pair_bytes_beside(held, buffers, limit)
            extents = block_extents(
                plan,
                self.dimension,
                arithmetic.itemsize,
                values_per_coordinate=float(copies_any),
                pair_bytes=pair_bytes,
                in_steps=True,
            )
        super().__init__(plan, arithmetic, extents)

    def distinct(self, shape: Sequence[int]) -> Shape:
        """The shape of the distinct products of a block that has the shape `shape`."""
        inner = len(self.plan.batch) + len(self.plan.rows)
        varying = self.right.view.shape[len(self.plan.batch) : -1]
        extents = (1 if size == 1 else extent for size, extent in zip(varying, shape[inner:]))
        return (*shape[:inner], *extents)

    def evaluate(self, block: Block, out: Tensor | None) -> None:
        if out is None:
            return
        # Several steps would add to the intercept one by one, and round each time.
        starts_with_intercept = self.intercept != 0 and self.dimension <= self.extents.depth
        for step, matrices in self._steps(block, out):
            if starts_with_intercept:
                matrices.fill_(self.intercept)
            for depth in depths(self.dimension, self.extents.depth):
                left = self.left.block((*step.batch, *step.rows, depth))
                right = self.right.block((*step.batch, *step.columns, depth))
                # BLAS sums the terms of a step by themselves, and then adds the sum to those before.
                beta = int(starts_with_intercept or depth.start > 0)
                matrices.baddbmm_(left, right.mT, beta=beta, alpha=self.alpha)
            if self.is_tiny:
                matrices.mul_(self.factor)
            if self.intercept and not starts_with_intercept:
                matrices.add_(self.intercept)

    def pull_back(self, block: Block, weight: Tensor, evaluated: None = None) -> None:
        weight = weight * self.factor if self.is_tiny else weight
        for step, matrices in self._steps(block, weight):
            for depth in depths(self.dimension, self.extents.depth):
                rows, columns = (*step.batch, *step.rows, depth), (*step.batch, *step.columns, depth)
                if self.dx is not None:
                    self.dx.add_product(rows, matrices, self.right.block(columns), self.alpha)
                if self.dloc is not None:
                    self.dloc.add_product(columns, matrices.mT, self.left.block(rows), self.alpha)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        dx, dloc = (None if products is None else products.gradient() for products in (self.dx, self.dloc))
        return dx, dloc

    def _steps(self, block: Block, values: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """What is multiplied at once of a block, and its values as matrices."""
        columns = (slice(None),) * len(block.columns)
        for batch in visited_pieces(block.batch, self.extents.copied_batch):
            for rows in visited_pieces(block.rows, self.extents.copied_rows):
                inside = *counted_from_start_of(block.batch, batch), *counted_from_start_of(block.rows, rows), *columns
                yield Block(batch, rows, block.columns), merge(values[inside], len(batch), len(rows))


class _Constants(NamedTuple):
    """What depends on the scale of one or several blocks alone: its functions, where they are wanted, and itself."""

    normaliser: Tensor | None
    normaliser_derivative: Tensor | None
    factor: Tensor

    def part(self, block: Slices) -> tuple[Tensor | None, Tensor | None, Tensor]:
        normaliser, derivative = (value if value is None else broadcast_slice(value, block) for value in self[:2])
        return normaliser, derivative, broadcast_slice(self.factor, block)


class DotScores(Scores):
    """The scores of one call, with gradients of loc, scale and x.

    Args:
        scored: whether the scores are wanted, besides gradients
        wanted: which gradients of loc, scale and x are wanted
        held, buffers: the bytes, and the number of buffers of the size of a block, that the caller has

    For a gradient `weight` of the scores, the arguments t have the gradient G = weight * scale * phi'(t), which gives
    those of loc and x.    dscale = sum weight * (normaliser'(scale) + phi)
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
        held: int = 0,
        buffers: int = 1,
    ) -> None:
        self.map, self.scored, self.differentiated = dot_map, scored, any(wanted)
        wants_loc, self.wants_scale, wants_x = wanted
        self.scale = PairOperand(plan, scale, arithmetic if self.wants_scale else None)
        self.bias: PairOperand | None = None
        self.scale_by_rows = plan.varies(scale, plan.rows)
        self.products = Products(
            plan,
            loc,
            x,
            arithmetic,
            factor=dot_map.slope,
            intercept=dot_map.intercept,
            held=held + 8 * PIECE_VALUES * limits.NORMALISER_PIECE + 2 * limits.NORMALISER_SLAB * arithmetic.itemsize,
            buffers=buffers + self._own_buffers(plan, loc, arithmetic),
            wants_loc=wants_loc,
            wants_x=wants_x,
        )
        super().__init__(plan, arithmetic, self.products.extents)
        self.repeated = self.products.distinct(self.extents.pairs) != self.extents.pairs
        self._share_constants(scale)
        self.dot, self.phi = Buffer(x, arithmetic), Buffer(x, arithmetic)
        self.region: Slices = ()  # where `constants` were computed last
        self.constants: _Constants | None = None

    def _own_buffers(self, plan: Plan, loc: Tensor, arithmetic: torch.dtype) -> float:
        """How many buffers of the size of a block there are: dot products, phi, masks of rare values, constants."""
        is_repeated = any(not plan.varies(loc, (axis,), trailing=1) for axis in plan.columns if plan.shape[axis] != 1)
        constants = 2 + self.wants_scale
        per_pair = constants if self.scale_by_rows else constants / max(1, plan.numel(plan.rows))
        return 2 * self.differentiated + is_repeated + 2 / arithmetic.itemsize + per_pair

    def _share_constants(self, *operands: Tensor) -> None:
        """Many small blocks share one computation of the constants of their scales."""
        batch = math.prod(self.extents.batch)
        by_columns = any(self.plan.varies(operand, self.plan.columns) for operand in operands)
        shared = max(batch, limits.NORMALISER_SLAB // max(1, math.prod(self.extents.columns) if by_columns else 1))
        is_own = batch == 1 or self.scale_by_rows
        self.slab = self.extents.batch if is_own else fit(self.plan.sizes(self.plan.batch), shared)

    def fold(self, bias: Tensor) -> bool:
        """Add `bias` to the normalisers, unless it varies along rows and they do not."""
        if self.plan.varies(bias, self.plan.rows) and not self.scale_by_rows:
            return False
        self.bias = PairOperand(self.plan, bias, None)
        self._share_constants(self.scale.tensor, bias)
        return True

    def walk(self) -> Iterable[Block]:
        """Every block once. Blocks that share constants follow one another."""
        return column_blocks(self.plan, self.extents, self.slab)

    def _constants_of(self, block: Block) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The constants of a block. Blocks that share constants share their computation too."""
        if self.scale_by_rows:
            slab, region = block.batch, block.pairs
        else:
            slab = piece_around(block.batch, self.slab, self.plan.sizes(self.plan.batch))
            region = (*slab, *whole(self.plan.sizes(self.plan.rows)), *block.columns)
        if self.constants is None or region != self.region:
            self.constants = None  # frees the former constants before others are made
            self.region, self.constants = region, self._computed_constants(region)
        return self.constants.part(counted_from_start_of(slab, block.batch))

    def _computed_constants(self, region: Slices) -> _Constants:
        """The constants of a region. Each is computed in float64, a piece at a time, and rounded once."""
        scale = self.scale.part(region)
        factor = scale.to(self.arithmetic, memory_format=torch.contiguous_format).contiguous()
        normaliser = _in_pieces(self.map.normaliser, scale, factor) if self.scored else None
        if normaliser is not None and self.bias is not None:
            normaliser = normaliser + self.bias.part(region).to(self.arithmetic)
        return _Constants(
            normaliser,
            _in_pieces(self.map.normaliser_derivative, scale, factor) if self.wants_scale else None,
            factor,
        )

    def evaluate(self, block: Block, out: Tensor | None) -> Any:
        """As for all scores. Gradients need scale * phi', phi, and the derivative of the normaliser."""
        normaliser, normaliser_derivative, factor = self._constants_of(block)
        shape = sizes(block.pairs)
        if out is None or self.differentiated or self.repeated:
            dot = self.dot.room(self.products.distinct(shape))
        else:
            dot = out
        self.products.evaluate(block, dot)
        phi: Tensor | None = dot
        evaluated = None
        if self.differentiated:
            if self.repeated:
                dot = dot.expand(shape).clone(memory_format=torch.contiguous_format)
            phi = self.phi.room(shape) if self.scored or self.wants_scale else None
            self.map.derivative_(dot, factor, phi)
            evaluated = dot, phi, normaliser_derivative
        else:
            self.map.value_(dot)
        if out is not None and phi is not None and normaliser is not None:
            torch.addcmul(normaliser, factor, phi.expand(shape), out=out)
        return evaluated

    def pull_back(self, block: Block, weight: Tensor, evaluated: Any = None) -> None:
        if evaluated is None:
            return
        slope, phi, normaliser_derivative = evaluated
        if self.wants_scale:
            self.scale.add_gradient(block.pairs, phi.add_(normaliser_derivative).mul_(weight))
        if self.products.dx is not None or self.products.dloc is not None:
            self.products.pull_back(block, slope.mul_(weight).sum_to_size(self.products.distinct(slope.shape)))

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dx, dloc = self.products.gradients()
        return dloc, self.scale.gradient(), dx


def _in_pieces(function: Function, scale: Tensor, factor: Tensor) -> Tensor:
    """`function` of the scale, a piece at a time, rounded from float64 to the dtype of `factor`.

    `factor` is the same scale, contiguous and in the dtype of the arithmetic.
    """
    if scale.numel() <= limits.NORMALISER_PIECE:
        return function(scale).to(factor.dtype)
    flat = factor.view(-1)
    values = torch.empty_like(flat)
    for i in range(0, flat.numel(), limits.NORMALISER_PIECE):
        values[i : i + limits.NORMALISER_PIECE] = function(flat[i : i + limits.NORMALISER_PIECE])
    return values.view(scale.shape)


def normalisers_of(dot_map: DotMap, scale: Tensor, arithmetic: torch.dtype) -> Tensor:
    """The normaliser of every scale, in the dtype of the arithmetic."""
    return _in_pieces(dot_map.normaliser, scale, converted(scale, arithmetic).contiguous())


def derivatives_of(dot_map: DotMap, scale: Tensor, arithmetic: torch.dtype) -> Tensor:
    """The derivative of the normaliser at every scale, in the dtype of the arithmetic."""
    return _in_pieces(dot_map.normaliser_derivative, scale, converted(scale, arithmetic).contiguous())


def contract(loc: Tensor, x: Tensor, arithmetic: torch.dtype) -> Tensor:
    """<x, loc> of every pair by `torch.einsum`; scriptable."""
    # 256 terms at a time, since a longer sequential sum of terms of one sign has an error above its budget.
    dot = torch.einsum("...d,...d->...", [loc[..., :256].to(arithmetic), x[..., :256].to(arithmetic)])
    for i in range(256, x.shape[-1], 256):
        part = [loc[..., i : i + 256].to(arithmetic), x[..., i : i + 256].to(arithmetic)]
        dot = dot + torch.einsum("...d,...d->...", part)
    return dot
