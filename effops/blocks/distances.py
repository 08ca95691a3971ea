"""Normal log densities of every broadcast pair, block by block on a CPU: values, and products with their derivatives.

    score = -1/2 sum_d ((x - loc) / s)^2 - sum_d log s - D/2 log 2 pi

**Direct form.** Differences, quotients and squares of a piece of a block at a time, in the dtype of the arithmetic.
Nothing cancels, whatever the values, but every pair costs D operations that stream through the cache.

**Product form.** Where the scale varies along rows or columns only, a block is one product of two factors

    x:           [x^2,       x,        1]               dx     = G @ [loc / s^2] - x (G @ [1 / s^2])
    loc, scale:  [-1/2 s^-2, s^-2 loc, constant]        dloc   = (G^T @ [x] - loc (G^T @ [1])) / s^2
                                                        dscale = G^T @ [(x - loc)^2] / s^3 - (G^T @ [1]) / s

with G the derivatives by the scores and (x - loc)^2 expanded likewise; x and loc change places where the scale varies
along rows, and sum_d x^2 stands for x^2 where the scale has one value for all coordinates. The factors are float64, for
results of float32, of values less a common centre: that of a few of the block's columns, by the median.

**Error.** With u = 2^-53 and c = `contraction_error`, a score of the product form is off by at most

    E = c u sum_d (x^2 + loc^2) / s^2

and the constant k = -sum_d log s - D/2 log 2 pi of its column shows where that matters: score = k - q/2 with q >= 0, so
that |k| >= 2 E / t means E <= t max(|score|, q/2), with t = `TOLERANCE`, without a look at the pairs. Where it does not
hold, pairs with q/2 < E / t are near-duplicates, and are computed directly: alone, or with their block if they are
many. A float32 result holds no more than 2^-24 of |score|, so that is as right as q itself where q can be seen.
Gradients of loc and x are off by c u sum |G x| / s^2, which is what moving x by 2^-29 c of itself does: float32 values
that differ do so by 2^-24 at least, so the sum of |G (x - loc)| / s^2 over pairs that differ outweighs it by 2^29 / c.
That holds of values less a centre where they are not larger for it: a coordinate of which columns are has none, nor has
one of which rows are where there are gradients.
The gradient of a scale can lose its (x - loc)^2, but has the terms |G| / s too, against which it is held to
`TOLERANCE`: else the block adds to the gradients by the direct form. Values that are not finite fail both tests, and
rows and columns of a product do not mix, so that no row spoils another.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks import limits
from effops.blocks.cutting import Block, Buffer, Extents, block_extents, depths, fit, merge, sizes, visited_in_block
from effops.blocks.operand import PairOperand, point_operand
from effops.blocks.pairs import Scores
from effops.blocks.plan import Plan, Shape, Slices
from effops.numerics.precision import contraction_error, unit_roundoff
from effops.numerics.values import observed

TOLERANCE = 2.0**-22  # relative error of a squared distance by the direct form in float32
SAMPLE = 8  # columns whose median is the centre of a block
HALF_LOG_2PI = math.log(2 * math.pi) / 2


class Distances(Scores):
    """The scores of normal densities, and the gradients of loc, scale and x, in that order, that are `wanted`."""

    def __init__(
        self,
        plan: Plan,
        loc: Tensor,
        scale: Tensor,
        x: Tensor,
        arithmetic: torch.dtype,
        wanted: Sequence[bool] = (False, False, False),
    ) -> None:
        self.loc, self.scale, self.x = (
            point_operand(plan, tensor, arithmetic, is_wanted) for tensor, is_wanted in zip((loc, scale, x), wanted)
        )
        self.differentiated = any(wanted)
        dimension = x.shape[-1]
        by_rows, by_columns = (plan.varies(scale, axes, trailing=1) for axes in (plan.rows, plan.columns))
        as_product = (
            arithmetic == torch.float32
            and min(plan.numel(plan.rows), plan.numel(plan.columns)) >= limits.LEAST_SIDE
            and plan.numel(plan.order) * dimension * arithmetic.itemsize > limits.BLOCK_BYTES
            and not (by_rows and by_columns)
        )
        if as_product:
            features = dimension + min(dimension, scale.shape[-1]) + 1
            extents = block_extents(
                plan,
                dimension,
                torch.float64.itemsize,
                values_per_coordinate=features / dimension,
                pair_bytes=limits.DISTANCE_BYTES,
                target_columns=limits.DISTANCE_WIDTH,
            )
        else:
            extents = block_extents(plan, max(1, dimension), arithmetic.itemsize, pair_bytes=limits.BLOCK_BYTES)
        super().__init__(plan, arithmetic, extents)
        self.direct = _Direct(extents, self.loc, self.scale, self.x, arithmetic, self.differentiated)
        self.product = _Product(plan, extents, self.direct, by_rows) if as_product else None

    def evaluate(self, block: Block, out: Tensor | None) -> None:
        if out is not None and (self.product is None or not self.product.evaluate(block, out)):
            self.direct.evaluate(block, out)

    def pull_back(self, block: Block, weight: Tensor, evaluated: Any = None) -> None:
        if not self.differentiated:
            return
        if self.product is not None:
            self.product.pull_back(block, weight)
        else:
            for depth in self.direct.depths:
                self.direct.pull_back(block, depth, weight)

    def gradients(self) -> tuple[Tensor | None, ...]:
        if self.product is not None:
            self.product.rows.finish()
            self.product.columns.finish()
        return self.loc.gradient(), self.scale.gradient(), self.x.gradient()


class _Direct:
    """The direct form, a piece of a block at a time."""

    def __init__(
        self,
        extents: Extents,
        loc: PairOperand,
        scale: PairOperand,
        x: PairOperand,
        arithmetic: torch.dtype,
        differentiated: bool,
    ) -> None:
        self.loc, self.scale, self.x = loc, scale, x
        self.arithmetic, self.differentiated = arithmetic, differentiated
        self.dimension = x.view.shape[-1]
        self.piece_values = limits.BLOCK_BYTES // arithmetic.itemsize
        self.depths = list(depths(self.dimension, self.piece_values))
        pairs = max(1, self.piece_values // max(1, self.dimension))
        rows = fit(extents.rows, math.isqrt(pairs))
        columns = fit(extents.columns, pairs // math.prod(rows))
        rows = fit(extents.rows, pairs // math.prod(columns))
        self.extents = fit(extents.batch, pairs // math.prod(rows + columns)) + rows + columns
        # The logarithm of a scale is taken once for all pairs of a block that share the scale.
        varying = [size != 1 for size in scale.view.shape[:-1]]
        scales = max(1, limits.BLOCK_BYTES // torch.float64.itemsize // max(1, scale.view.shape[-1]))
        limited = iter(fit(tuple(itertools.compress(extents.pairs, varying)), scales))
        self.constant_extents = tuple(
            next(limited) if varies else extent for varies, extent in zip(varying, extents.pairs)
        )
        self.quotients, self.pulls = Buffer(x.view, arithmetic), Buffer(x.view, arithmetic)

    def evaluate(self, block: Block, out: Tensor) -> None:
        out.zero_()
        for depth in self.depths:
            for pairs, inside in visited_in_block(block, self.constant_extents):
                out[inside] += _constant(self.scale.part((*pairs, depth)).double(), depth).to(out.dtype)
            for pairs, inside in visited_in_block(block, self.extents):
                out[inside].sub_(self.standardised(pairs, depth).square_().sum(-1), alpha=0.5)

    def evaluate_pairs(self, block: Block, which: tuple[Tensor, ...], out: Tensor) -> None:
        """Write the scores of single pairs of a block, given by their indices in it. Compute them in float64."""
        step = max(1, self.piece_values // 8 // self.dimension)
        for some in zip(*(index.split(step) for index in which)):
            loc, scale, x = (
                operand.part(block.pairs).expand(*out.shape, -1)[some].double()
                for operand in (self.loc, self.scale, self.x)
            )
            constant = _constant(scale, slice(0, self.dimension))
            out[some] = constant.sub_(x.sub_(loc).div_(scale).square_().sum(-1), alpha=0.5).to(out.dtype)

    def pull_back(self, block: Block, depth: slice, weight: Tensor) -> None:
        """Add the contribution of a block to the gradients, for the coordinates in `depth`."""
        for pairs, inside in visited_in_block(block, self.extents):
            z = self.standardised(pairs, depth)
            scale = self.scale.part((*pairs, depth)).to(self.arithmetic)
            g = weight[inside].unsqueeze(-1)
            no_pull = g == 0  # so that 0 * inf adds nothing
            if self.loc.wants_gradient or self.x.wants_gradient:
                pull = torch.div(z, scale, out=self.pulls.room(z.shape)).mul_(g)
                pull.masked_fill_(no_pull, 0)
                self.loc.add_gradient((*pairs, depth), pull)
                self.x.add_gradient((*pairs, depth), pull, sign=-1)
            if self.scale.wants_gradient:
                pull = z.square_().sub_(1).div_(scale).mul_(g).masked_fill_(no_pull, 0)
                self.scale.add_gradient((*pairs, depth), pull)

    def standardised(self, pairs: Slices, depth: slice) -> Tensor:
        """The quotient (x - loc) / s of every pair of a piece."""
        operands = self.loc, self.scale, self.x
        loc, scale, x = (operand.part((*pairs, depth)).to(self.arithmetic) for operand in operands)
        shape = (*sizes(pairs), x.shape[-1])
        return torch.sub(x.expand(shape), loc, out=self.quotients.room(shape)).div_(scale)


class _Product:
    """The product form: the product of a factor of a block's rows and one of its columns."""

    def __init__(self, plan: Plan, extents: Extents, direct: _Direct, by_rows: bool) -> None:
        self.direct, self.by_rows = direct, by_rows
        self.dimension, self.depth = direct.dimension, extents.depth
        self.rows: _Factor
        self.columns: _Factor
        if by_rows:
            self.rows = self.scaled = _Scaled(plan, plan.columns, direct.x, direct)
            self.columns = self.plain = _Plain(plan, plan.rows, direct.loc, direct)
        else:
            self.rows = self.plain = _Plain(plan, plan.columns, direct.x, direct)
            self.columns = self.scaled = _Scaled(plan, plan.rows, direct.loc, direct)
        self.pairs, self.doubtful = (Buffer(direct.x.view, dtype) for dtype in (torch.float64, torch.bool))
        self.at: tuple[Block, slice] | None = None

    def load(self, block: Block, depth: slice) -> None:
        """Make the factors for the coordinates in `depth`, unless they are the ones made last."""
        if self.at is None or (block.batch, block.columns, depth) != (self.at[0].batch, self.at[0].columns, self.at[1]):
            self.columns.load(block, depth, None)
            self.at = None
        if self.at is None or block.rows != self.at[0].rows:
            self.rows.load(block, depth, self.columns.centre)
            if self.direct.differentiated and observed(self.rows.loses_digits.any(), ordinary=False):
                centre = self.columns.centre.masked_fill(self.rows.loses_digits, 0)
                self.columns.load(block, depth, centre)
                self.rows.load(block, depth, centre)
        self.at = block, depth

    def evaluate(self, block: Block, out: Tensor) -> bool:
        """Write the scores of a block and return True, or return False if too many of them are not certain."""
        matrices, constant, squares = self.multiply(block)
        rate = _roundoff(self.dimension) / TOLERANCE
        certain = constant.abs() >= squares.mul_(2 * rate)
        near: tuple[Tensor, ...] = ()
        # In any case, so that bytes do not depend on values.
        least = torch.where(certain, math.inf, constant.sub(squares, alpha=0.5))
        doubtful = self.doubtful.room(matrices.shape)
        if not observed(certain.all(), ordinary=True):
            torch.le(matrices, least.unsqueeze(2 if self.by_rows else 1), out=doubtful).logical_not_()
            if observed(doubtful.count_nonzero(), ordinary=0) * limits.PAIRS_PER_DUPLICATE > doubtful.numel():
                del doubtful
                self.doubtful.release()  # before the direct form takes memory
                return False
            near = doubtful.view(out.shape).nonzero(as_tuple=True)
        out.copy_(matrices.view(out.shape))
        if near and near[0].numel():
            self.direct.evaluate_pairs(block, near, out)
        return True

    def multiply(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """The scores as matrices; for each column (or row) its constant, and the squares that bound the error."""
        matrices = merge(self.pairs.room(sizes(block.pairs)), len(block.batch), len(block.rows))
        for depth in depths(self.dimension, self.depth):
            self.load(block, depth)
            terms = torch.addcmul(self.scaled.distance, self.plain.most.sum(-1, keepdim=True), self.scaled.most_weight)
            multiply_by_rows(matrices, self.rows.features, self.columns.features.mT, beta=int(depth.start > 0))
            if depth.start == 0:
                constant, squares = self.scaled.constant, terms
            else:
                constant, squares = constant + self.scaled.constant, squares + terms
        return matrices, constant, squares

    def pull_back(self, block: Block, weight: Tensor) -> None:
        """Add the contribution of a block to the gradients."""
        matrices = merge(self.pairs.room(weight.shape).copy_(weight), len(block.batch), len(block.rows))
        for depth in depths(self.dimension, self.depth):
            self.load(block, depth)
            if self.direct.scale.wants_gradient and not self.squares_are_certain():
                self.direct.pull_back(block, depth, weight)
                continue
            self.rows.accumulate(matrices, self.columns.features)
            self.columns.accumulate(matrices.mT, self.rows.features)

    def squares_are_certain(self) -> bool:
        """Whether ((x - loc) / s)^2 + 1 is right to `TOLERANCE`, in the mean over coordinates that share a scale."""
        plain, scaled = self.plain, self.scaled
        squares = plain.most.amax(-1, keepdim=True) * scaled.most_weight + scaled.most_distance
        certain = _roundoff(plain.features.shape[1]) * squares <= TOLERANCE * scaled.repeats
        return bool(observed(certain.all(), ordinary=True))


class _Factor(ABC):
    """One of the two factors of blocks: features of x or loc, in float64, for every row or column.

    With merged axes its shape is (batch, rows or columns, features). The features are as many squares as the scale has
    values, then a value for each coordinate, then one last feature.
    """

    def __init__(self, plan: Plan, others: Shape, operand: PairOperand, direct: _Direct) -> None:
        self.operand, self.scale, self.differentiated = operand, direct.scale, direct.differentiated
        self.others = [plan.order.index(axis) for axis in others]
        self.batch_axes = len(plan.batch)
        self.buffer, self.sums_buffer = (Buffer(operand.view, torch.float64) for _ in range(2))
        self.is_pending = False
        self.loses_digits: Tensor  # for each coordinate, whether subtraction of the centre loses digits of gradients
        self.shape: Shape = ()

    def load(self, block: Block, depth: slice, centre: Tensor | None) -> None:
        """Make the features of the values of a block less `centre`. If that is None, find a centre of the values."""
        self.finish()
        self.block, self.depth = block, depth
        coordinates = depth.stop - depth.start
        own = (1 if axis in self.others else size for axis, size in enumerate(sizes(block.pairs)))
        shape = (*own, min(coordinates, self.scale.view.shape[-1]) + coordinates + 1)
        if shape != self.shape:  # else the views of the last block serve again
            self.shape = shape
            features = self.buffer.room(shape)
            self.parts, self.features = self.split(features), self.merge(features)
            self.squares, self.values, self.last = self.split(self.features)
            self.repeats = coordinates // self.squares.shape[-1]
            self.last.fill_(1)
        self.parts[1].copy_(self.operand.part((*block.pairs, depth)))
        if centre is None:
            sample = self.values[:, :: max(1, self.values.shape[1] // SAMPLE)]
            centre = sample.nanmedian(1, keepdim=True).values.nan_to_num_(0, 0, 0)
            centre.masked_fill_(_loses_digits(self.values, centre), 0)
        if self.differentiated:
            self.loses_digits = _loses_digits(self.values, centre)
        self.centre = centre
        self.values -= centre
        self.complete()

    @abstractmethod
    def complete(self) -> None:
        """Make all features of the values."""

    def accumulate(self, weights: Tensor, features: Tensor) -> None:
        """Add weights @ features to the sums of the loaded block, if a gradient depends on them."""
        if self.is_wanted():
            sums = self.merge(self.sums_buffer.room(self.shape))
            multiply_by_rows(sums, weights, features, beta=int(self.is_pending))
            self.is_pending = True

    def finish(self) -> None:
        """Add the gradients that follow from the sums, and start new sums."""
        if self.is_pending:
            self.pull_back(*self.split(self.sums_buffer.room(self.shape)))
        self.is_pending = False

    @abstractmethod
    def pull_back(self, squares: Tensor, values: Tensor, last: Tensor) -> None:
        """Add the gradients that follow from these sums, which may be overwritten."""

    def is_wanted(self) -> bool:
        """Whether a gradient that depends on the sums is wanted."""
        return self.operand.wants_gradient

    def merge(self, features: Tensor) -> Tensor:
        return merge(features, self.batch_axes, len(self.shape) - 1 - self.batch_axes)

    def split(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        squares = self.shape[-1] - 1 - (self.depth.stop - self.depth.start)
        return features[..., :squares], features[..., squares:-1], features[..., -1:]


class _Plain(_Factor):
    """The factor [x^2, x, 1]. Its operand varies along rows or columns where the scale does not."""

    def complete(self) -> None:
        if self.repeats == 1:
            torch.mul(self.values, self.values, out=self.squares)
        else:
            torch.sum(self.values.square(), -1, keepdim=True, out=self.squares)
        self.most = self.squares.amax(1)

    def pull_back(self, squares: Tensor, values: Tensor, last: Tensor) -> None:
        self.operand.add_gradient((*self.block.pairs, self.depth), values.addcmul_(self.parts[1], squares, value=2))


class _Scaled(_Factor):
    """The factor [-1/2 s^-2, s^-2 loc, constant] of the other operand and the scale."""

    def complete(self) -> None:
        self.parts[0].copy_(self.scale.part((*self.block.pairs, self.depth)))
        weights = self.squares
        self.constant = _constant(weights, self.depth)
        weights.square_().reciprocal_()
        self.most_weight = weights.amax(-1)
        weighted = self.values * weights
        distances = self.values.mul_(weighted)
        self.distance = distances.sum(-1)
        self.most_distance = distances.amax(-1) if self.repeats == 1 else self.distance
        torch.sub(self.constant, self.distance, alpha=0.5, out=self.last[..., 0])
        self.values.copy_(weighted)
        weights *= -0.5

    def pull_back(self, squares: Tensor, values: Tensor, last: Tensor) -> None:
        axes = *self.block.pairs, self.depth
        scale = self.scale.part(axes).double()
        centre = self.centre.view(*self.shape[: self.batch_axes], *[1] * (len(axes) - 1 - self.batch_axes), -1)
        own = self.operand.part(axes) - centre
        moment = torch.addcmul(values, own, last, value=-1)
        if self.scale.wants_gradient:
            expanded = values.add_(moment).mul_(own).sum_to_size(squares.shape)
            squares = squares.sub_(expanded).div_(scale.square()).sub_(last, alpha=self.repeats)
            self.scale.add_gradient(axes, squares.div_(scale))
        self.operand.add_gradient(axes, moment.div_(scale.square()))

    def is_wanted(self) -> bool:
        return super().is_wanted() or self.scale.wants_gradient


def multiply_by_rows(out: Tensor, left: Tensor, right: Tensor, beta: int) -> None:
    """out = beta out + left @ right, for matrices in float64.

    BLAS cuts a single matrix by columns, but elementwise operations give a thread some of its rows. So that a core
    finds what it has written itself, a single matrix becomes several of fewer rows: one for each thread, as long as
    these have `LEAST_ROWS` rows. What does not divide among them is a product of its own.
    """
    rows = left.shape[1]
    parts = min(torch.get_num_threads(), rows // limits.LEAST_ROWS) if out.shape[0] == 1 else 1
    if parts < 2:
        out.baddbmm_(left, right, beta=beta)
        return
    even = rows - rows % parts
    some_out, some_left = (tensor[0, :even].unflatten(0, (parts, -1)) for tensor in (out, left))
    some_out.baddbmm_(some_left, right.expand(parts, *right.shape[1:]), beta=beta)
    if even < rows:
        out[:, even:].baddbmm_(left[:, even:], right, beta=beta)


def _constant(scale: Tensor, depth: slice) -> Tensor:
    """-sum log s - D/2 log 2 pi over the coordinates in `depth`, of a scale for each or one scale for all of them."""
    repeats = (depth.stop - depth.start) // max(1, scale.shape[-1])
    return scale.log().add_(HALF_LOG_2PI).sum(-1).mul_(-repeats)


def _loses_digits(values: Tensor, centre: Tensor) -> Tensor:
    """For each coordinate, whether a value less the centre is larger than the value, so that digits are lost."""
    least, most = values.aminmax(dim=1, keepdim=True)
    return torch.where(centre > 0, 2 * least < centre, (2 * most > centre) & (centre < 0))


def _roundoff(terms: int) -> float:
    """The error of a sum of products in float64, relative to the sum of their absolute values."""
    return contraction_error(terms, torch.float64) * unit_roundoff(torch.float64)
