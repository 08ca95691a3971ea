"""Score every pair of rows, map the score: as one Triton kernel, for any op of the form that `effops.dots` has.

Lays broadcast operands out as the matrices that `effops.kernels` takes, and its gradients as those of the operands. A
view where strides allow; an operand whose axes of one role do not collapse into one is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effops.broadcast import Plan, Shape
from effops.chunked import Reduction
from effops.precision import arithmetic_dtype


def forward(
    pair_map: Any, plan: Plan, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, tolerance: float
) -> Tensor:
    """The result in `dtype`, contiguous in the plan's order of axes."""
    from effops.kernels import pairs

    matrices, out = _workspace(plan, loc, scale, x, dtype)
    ordered = plan.view(out, plan.order).view(matrices[2].shape)
    precision = torch.get_float32_matmul_precision()
    pairs.forward(pair_map, *matrices, ordered, precision=precision, tolerance=tolerance)
    return out.to(dtype)


def rehearse(plan: Plan, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate what `forward` allocates, and compute nothing: for predictions on fake tensors."""
    _matrices, out = _workspace(plan, loc, scale, x, dtype)
    return out


def _workspace(
    plan: Plan, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    return _matrices(plan, loc, scale, x), plan.empty(x, _stored_dtype(dtype, x.device))


def _stored_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that a kernel stores: Triton's interpreter, on the CPU, truncates to bfloat16 where it should round."""
    return torch.float32 if dtype == torch.bfloat16 and device.type == "cpu" else dtype


def backward(
    pair_map: Any,
    plan: Plan,
    loc: Tensor,
    scale: Tensor,
    x: Tensor,
    dout: Tensor,
    dtype: torch.dtype,
    tolerance: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of loc, scale and x, in their shapes and dtypes, each where `needs` asks for it."""
    from effops.kernels import pairs

    need_loc, need_scale, need_x = needs
    arithmetic = arithmetic_dtype(dtype)
    left, right, factor = _matrices(plan, loc, scale, x)
    batch, rows, columns = plan.sizes(plan.batch), plan.sizes(plan.rows), plan.sizes(plan.columns)
    own_loc = plan.view(loc, plan.batch + plan.columns, trailing=1, expand=False).shape
    own_scale = plan.view(scale, plan.order, expand=False).shape
    # The kernel sums dscale over the rows or the columns, if scale does not vary along them.
    by_rows = math.prod(own_scale[len(batch) : len(batch) + len(rows)]) != 1
    by_columns = math.prod(own_scale[len(batch) + len(rows) :]) != 1 or not by_rows
    scale_sizes = (*batch, *(rows if by_rows else (1,) * len(rows)), *(columns if by_columns else (1,) * len(columns)))
    scale_shape = (math.prod(batch), math.prod(rows) if by_rows else 1, math.prod(columns) if by_columns else 1)
    # What is summed further down here is not rounded before.
    loc_dtype = _stored_dtype(loc.dtype, x.device) if math.prod(own_loc) == right.numel() else arithmetic
    dloc = right.new_empty(right.shape, dtype=loc_dtype) if need_loc else None
    dscale = factor.new_empty(scale_shape, dtype=arithmetic) if need_scale else None
    dx = left.new_empty(left.shape, dtype=_stored_dtype(x.dtype, x.device)) if need_x else None
    pairs.backward(
        pair_map,
        left,
        right,
        factor,
        plan.view(dout, plan.order).reshape(factor.shape),
        dx,
        dloc,
        dscale,
        precision=torch.get_float32_matmul_precision(),
        tolerance=tolerance,
    )

    def restore(gradient: Tensor | None, sizes: Shape, own: Shape, operand: Tensor, axes: Shape) -> Tensor | None:
        return None if gradient is None else plan.gradient(gradient.view(sizes).sum_to_size(own), operand, axes)

    depth = x.shape[-1]
    return (
        restore(dloc, (*batch, *columns, depth), own_loc, loc, plan.batch + plan.columns),
        restore(dscale, scale_sizes, own_scale, scale, plan.order),
        restore(dx, (*batch, *rows, depth), (*batch, *rows, depth), x, plan.batch + plan.rows),
    )


def _matrices(plan: Plan, loc: Tensor, scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x as (batch, rows, D), loc as (batch, columns, D) and scale as (batch, rows, columns)."""
    batch, rows, columns = plan.numel(plan.batch), plan.numel(plan.rows), plan.numel(plan.columns)
    left = plan.view(x, plan.batch + plan.rows, trailing=1).reshape(batch, rows, x.shape[-1])
    right = plan.view(loc, plan.batch + plan.columns, trailing=1).reshape(batch, columns, loc.shape[-1])
    return left, right, plan.view(scale, plan.order).reshape(batch, rows, columns)


class _Groups:
    """A logsumexp as `effops.kernels.mixture` takes it: axes of the plan in four groups, each of which becomes one.

    The components are the last group. One of x and loc varies along it, the other does not: which is which tells
    `left`, the points, from `right`; along the second group only `right` and further operands vary.
    """

    def __init__(self, reduction: Reduction, loc: Tensor, x: Tensor) -> None:
        plan, axis = reduction.plan, reduction.axis
        rows, columns, self.left, self.right = plan.rows, plan.columns, x, loc
        if axis in rows:
            rows, columns, self.left, self.right = columns, rows, loc, x
        self.reduction, self.plan = reduction, plan
        self.axes = (plan.batch, tuple(other for other in columns if other != axis), rows, (axis,))

    def matrix(self, operand: Tensor, groups: tuple[int, ...], *, trailing: int = 0) -> Tensor:
        """The operand with one axis for each of the groups, of stride 0 where it does not vary."""
        axes: list[int] = []
        sizes: list[int] = []
        merged: list[int] = []
        for group in (self.axes[i] for i in groups):
            varies = self.plan.varies(operand, group, trailing=trailing)
            axes += group
            sizes += self.plan.sizes(group) if varies else (1,) * len(group)
            merged.append(math.prod(self.plan.sizes(group)) if varies else 1)
        view = self.plan.view(operand, tuple(axes), trailing=trailing, expand=False)
        last = view.shape[view.ndim - trailing :]
        matrix = view.expand(*sizes, *last).reshape(*merged, *last)
        return matrix.expand(*(math.prod(self.plan.sizes(self.axes[i])) for i in groups), *last)

    def of_result(self, tensor: Tensor, *, trailing: int = 0) -> Tensor:
        """A tensor of the shape of the result, with an axis for each of the first three groups."""
        reduced, axis = self.reduction.reduced, self.reduction.axis
        groups = [tuple(other - (other > axis) for other in group) for group in self.axes[:3]]
        view = reduced.view(tensor, sum(groups, ()), trailing=trailing)
        sizes = [math.prod(reduced.sizes(group)) for group in groups]
        return view.reshape(*sizes, *tensor.shape[tensor.ndim - trailing :])

    def restore(self, gradient: Tensor, operand: Tensor, groups: tuple[int, ...], *, trailing: int = 0) -> Tensor:
        """A gradient with an axis for each of the groups, of size 1 where it was summed: that of the operand."""
        axes = sum((self.axes[i] for i in groups), ())
        sizes: list[int] = []
        for i, size in zip(groups, gradient.shape):
            group = self.plan.sizes(self.axes[i])
            sizes += group if size == math.prod(group) else (1,) * len(group)
        own = self.plan.view(operand, axes, trailing=trailing, expand=False).shape
        ordered = gradient.view(*sizes, *gradient.shape[len(groups) :]).sum_to_size(own)
        return self.plan.gradient(ordered, operand, axes)


def forward_logsumexp(
    pair_map: Any,
    reduction: Reduction,
    log_weights: Tensor,
    loc: Tensor,
    scale: Tensor,
    x: Tensor,
    dtype: torch.dtype,
    tolerance: float,
) -> Tensor:
    """The statistics of the reduction, as `effops.chunked.forward_logsumexp` gives them."""
    from effops.kernels import mixture

    groups = _Groups(reduction, loc, x)
    statistics = reduction.empty(x, arithmetic_dtype(dtype))
    mixture.forward(
        pair_map,
        groups.matrix(groups.left, (0, 1, 2), trailing=1),
        groups.matrix(groups.right, (0, 1, 3), trailing=1),
        groups.matrix(scale, (0, 1, 2, 3)),
        groups.matrix(log_weights, (0, 1, 2, 3)),
        groups.of_result(statistics, trailing=1),
        precision=torch.get_float32_matmul_precision(),
        tolerance=tolerance,
    )
    return statistics


def backward_logsumexp(
    pair_map: Any,
    reduction: Reduction,
    log_weights: Tensor,
    loc: Tensor,
    scale: Tensor,
    x: Tensor,
    statistics: Tensor,
    dout: Tensor,
    dtype: torch.dtype,
    tolerance: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of log_weights, loc, scale and x, in their shapes and dtypes, each where `needs` asks for it."""
    from effops.kernels import mixture

    need_weights, need_loc, need_scale, need_x = needs
    groups = _Groups(reduction, loc, x)
    need_left, need_right = (need_x, need_loc) if groups.left is x else (need_loc, need_x)
    left = groups.matrix(groups.left, (0, 1, 2), trailing=1)
    right = groups.matrix(groups.right, (0, 1, 3), trailing=1)
    factor, weights = (groups.matrix(operand, (0, 1, 2, 3)) for operand in (scale, log_weights))
    arithmetic = arithmetic_dtype(dtype)
    dleft = left.new_empty((left.shape[0], 1, *left.shape[2:]), dtype=arithmetic) if need_left else None
    dright = right.new_empty(right.shape, dtype=arithmetic) if need_right else None

    def summed(operand: Tensor, need: bool) -> Tensor | None:
        """For the gradient of scale or log_weights, summed by the kernel over a group along which it does not vary."""
        if not need:
            return None
        by_rows, by_columns = (groups.plan.varies(operand, groups.axes[i]) for i in (2, 3))
        first, second, rows, columns = factor.shape
        shape = (first, second, rows if by_rows else 1, columns if by_columns or not by_rows else 1)
        return operand.new_empty(shape, dtype=arithmetic)

    dfactor, dweights = summed(scale, need_scale), summed(log_weights, need_weights)
    mixture.backward(
        pair_map,
        left,
        right,
        factor,
        weights,
        groups.of_result(statistics, trailing=1),
        groups.of_result(dout),
        dweights,
        dleft,
        dright,
        dfactor,
        precision=torch.get_float32_matmul_precision(),
        tolerance=tolerance,
    )

    def restore(gradient: Tensor | None, operand: Tensor, axes: tuple[int, ...], trailing: int = 0) -> Tensor | None:
        return None if gradient is None else groups.restore(gradient, operand, axes, trailing=trailing)

    of_left, of_right = restore(dleft, groups.left, (0, 1, 2), 1), restore(dright, groups.right, (0, 1, 3), 1)
    dloc, dx = (of_right, of_left) if groups.left is x else (of_left, of_right)
    every = (0, 1, 2, 3)
    return restore(dweights, log_weights, every), dloc, restore(dfactor, scale, every), dx
