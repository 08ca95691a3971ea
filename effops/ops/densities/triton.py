"""Triton kernels for log densities: bring operands into the layout of the kernels, and gradients back from it.

Kernels take matrices. An operand is viewed as a matrix where its strides allow that. It is copied where its axes of one
role do not collapse into one.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks.logsumexp import Reduction
from effops.blocks.plan import Plan, Shape
from effops.dispatch.custom_op import Gradients
from effops.dispatch.requirements import INTERPRETED
from effops.ops.densities.density import DensityCall, Kernels, Wanted


def dot_kernels(module: str, tolerance: float) -> Kernels:
    """The kernels of scores W(s) + s phi(<x, loc>), where a module of `effops.kernels` has phi and W as its MAP."""
    from effops.kernels import mixture, pairs

    map = importlib.import_module(f"effops.kernels.{module}").MAP
    settings: dict[str, Any] = {"precision": torch.get_float32_matmul_precision(), "tolerance": tolerance}
    functions: tuple[Callable[..., None], ...] = pairs.forward, pairs.backward, mixture.forward, mixture.backward
    return Kernels(0, *(functools.partial(function, map, **settings) for function in functions))


def distance_kernels() -> Kernels:
    """The kernels of scaled squared distances."""
    from effops.kernels import distances

    return Kernels(1, distances.forward, distances.backward, distances.forward_logsumexp, distances.backward_logsumexp)


def forward(kernels: Kernels, call: DensityCall) -> Tensor:
    """The result, contiguous in the plan's order of axes."""
    plan, x = call.plan, call.x
    matrices = _matrices(Layout.of_pairs(plan), call, kernels.scale_dims)
    out = plan.empty(x, stored_dtype(call.dtype, x.device))
    kernels.forward(*matrices, plan.view(out, plan.order).view(matrices[2].shape[:3]))
    return out.to(call.dtype)


def stored_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that a kernel stores.

    It is float32 for bfloat16 in Triton's interpreter on the CPU, which truncates to bfloat16 where it should round.
    """
    return torch.float32 if dtype == torch.bfloat16 and device.type == "cpu" and INTERPRETED else dtype


def backward(kernels: Kernels, call: DensityCall, dout: Tensor, wanted: Wanted) -> Gradients:
    """Gradients of loc, scale and x, in their shapes and dtypes, each where `wanted` asks for it."""
    wants_loc, wants_scale, wants_x = wanted
    plan, loc, scale, x = call.plan, call.loc, call.scale, call.x
    layout = Layout.of_pairs(plan)
    left, right, factor = _matrices(layout, call, kernels.scale_dims)
    # A gradient that `restore` will sum is not rounded before.
    loc_dtype = stored_dtype(loc.dtype, x.device) if loc.numel() == right.numel() else call.arithmetic
    dloc = layout.empty(loc, (0, 2), right.shape, loc_dtype, trailing=1) if wants_loc else None
    dscale = layout.empty_sums(scale, call.arithmetic, trailing=kernels.scale_dims) if wants_scale else None
    dx = layout.empty(x, (0, 1), left.shape, stored_dtype(x.dtype, x.device), trailing=1) if wants_x else None
    kernels.backward(left, right, factor, plan.view(dout, plan.order).reshape(factor.shape[:3]), dx, dloc, dscale)
    return (
        layout.restore(dloc, loc, (0, 2), trailing=1),
        layout.restore(dscale, scale, (0, 1, 2), trailing=kernels.scale_dims),
        layout.restore(dx, x, (0, 1), trailing=1),
    )


def _matrices(layout: Layout, call: DensityCall, scale_dims: int) -> tuple[Tensor, Tensor, Tensor]:
    """x as (batch, rows, D), loc as (batch, columns, D), scale as (batch, rows, columns), and its last dimension."""
    return (
        layout.matrix(call.x, (0, 1), trailing=1),
        layout.matrix(call.loc, (0, 2), trailing=1),
        layout.matrix(call.scale, (0, 1, 2), trailing=scale_dims),
    )


class Layout:
    """Axes of a plan in groups, each of which becomes one axis. The last two groups are rows and columns."""

    def __init__(self, plan: Plan, axes: tuple[Shape, ...]) -> None:
        self.plan, self.axes = plan, axes

    @classmethod
    def of_pairs(cls, plan: Plan) -> Layout:
        return cls(plan, (plan.batch, plan.rows, plan.columns))

    def matrix(self, operand: Tensor, groups: tuple[int, ...], *, trailing: int = 0) -> Tensor:
        """The operand with one axis for each of the groups. An axis along which it does not vary has stride 0."""
        matrix = self._merged(operand, groups, trailing)
        sizes = (math.prod(self.plan.sizes(self.axes[i])) for i in groups)
        return matrix.expand(*sizes, *matrix.shape[len(groups) :])

    def _merged(self, operand: Tensor, groups: tuple[int, ...], trailing: int) -> Tensor:
        """The operand with one axis for each of the groups, of size 1 where it does not vary."""
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
        return view.expand((*sizes, *last)).reshape((*merged, *last))

    def obstacle(self, scale: Tensor, scale_dims: int) -> str:
        """Why kernels cannot take a scale with a last dimension: `matrix` would copy it for every pair. Else empty."""
        varying = [
            {self.plan.varies(scale, (axis,), trailing=scale_dims) for axis in group if self.plan.shape[axis] > 1}
            for group in self.axes
        ]
        if scale_dims == 0 or {True, False} not in varying or sum(True in group for group in varying[1:]) < 2:
            return ""
        return (
            "needs a scale of each pair to vary along all axes of x, or of loc, if along one; here it would be copied"
        )

    def empty(
        self, operand: Tensor, groups: tuple[int, ...], shape: Shape, dtype: torch.dtype, *, trailing: int = 0
    ) -> Tensor:
        """For the gradient of an operand, with an axis for each of the groups, as a kernel writes it.

        It is a view of one laid out as the operand, unless it is yet to be summed or the operand has no such view.
        """
        if operand.numel() != math.prod(shape):
            return operand.new_empty(shape, dtype=dtype)
        return self._merged(torch.empty_like(operand, dtype=dtype), groups, trailing).expand(shape)

    def empty_sums(self, operand: Tensor, dtype: torch.dtype, *, trailing: int = 0) -> Tensor:
        """An uninitialised gradient of an operand, with an axis for each group.

        An axis over which the kernel sums has size 1.
        """
        *outer, by_rows, by_columns = (self.plan.varies(operand, group, trailing=trailing) for group in self.axes)
        if not trailing:  # a kernel of dot products sums over the rows or over the columns, not over both
            outer, by_columns = [True] * len(outer), by_columns or not by_rows
        sizes = (
            math.prod(self.plan.sizes(group)) if varies else 1
            for group, varies in zip(self.axes, (*outer, by_rows, by_columns))
        )
        shape = (*sizes, *operand.shape[operand.ndim - trailing :])
        return self.empty(operand, tuple(range(len(self.axes))), shape, dtype, trailing=trailing)

    def restore(
        self, gradient: Tensor | None, operand: Tensor, groups: tuple[int, ...], *, trailing: int = 0
    ) -> Tensor | None:
        """The gradient of the operand, from one with an axis for each group, of size 1 where the kernel summed."""
        if gradient is None:
            return None
        axes = sum((self.axes[i] for i in groups), ())
        sizes: list[int] = []
        for i, size in zip(groups, gradient.shape):
            group = self.plan.sizes(self.axes[i])
            sizes += group if size == math.prod(group) else (1,) * len(group)
        own = self.plan.view(operand, axes, trailing=trailing, expand=False).shape
        ordered = gradient.view((*sizes, *gradient.shape[len(groups) :])).sum_to_size(own)
        return self.plan.gradient(ordered, operand, axes)


def component_groups(plan: Plan, axis: int) -> tuple[Shape, ...]:
    """The groups of axes of a logsumexp along `axis`: batch, other axes of the components' role, points, components."""
    rows, columns = (plan.columns, plan.rows) if axis in plan.rows else (plan.rows, plan.columns)
    return plan.batch, tuple(other for other in columns if other != axis), rows, (axis,)


class Groups(Layout):
    """A logsumexp as `effops.kernels` take it: the axes of the plan in four groups.

    The components are the last group. One of x and loc varies along it and is `right`. The other does not and is
    `left`, the points. Along the second group only `right` and further operands vary.
    """

    LEFT, RIGHT, EVERY = (0, 1, 2), (0, 1, 3), (0, 1, 2, 3)  # the groups along which operands have axes

    def __init__(self, reduction: Reduction, loc: Tensor, x: Tensor) -> None:
        plan, axis = reduction.plan, reduction.axis
        self.left, self.right = (loc, x) if axis in plan.rows else (x, loc)
        self.reduction = reduction
        super().__init__(plan, component_groups(plan, axis))

    def matrices(self, log_weights: Tensor, scale: Tensor, scale_dims: int) -> tuple[Tensor, ...]:
        """The operands as kernels take them: left, right, scale and log_weights."""
        return (
            self.matrix(self.left, self.LEFT, trailing=1),
            self.matrix(self.right, self.RIGHT, trailing=1),
            self.matrix(scale, self.EVERY, trailing=scale_dims),
            self.matrix(log_weights, self.EVERY),
        )

    def of_result(self, tensor: Tensor, *, trailing: int = 0) -> Tensor:
        """A tensor with the shape of the result, viewed with an axis for each of the first three groups."""
        reduced, axis = self.reduction.reduced, self.reduction.axis
        groups = [tuple(other - (other > axis) for other in group) for group in self.axes[:3]]
        view = reduced.view(tensor, sum(groups, ()), trailing=trailing)
        sizes = [math.prod(reduced.sizes(group)) for group in groups]
        return view.reshape(*sizes, *tensor.shape[tensor.ndim - trailing :])


def forward_logsumexp(kernels: Kernels, reduction: Reduction, log_weights: Tensor, call: DensityCall) -> Tensor:
    """The statistics of the reduction, as `effops.blocks.logsumexp.forward` computes them."""
    groups = Groups(reduction, call.loc, call.x)
    statistics = reduction.empty(call.x, call.arithmetic)
    kernels.forward_logsumexp(
        *groups.matrices(log_weights, call.scale, kernels.scale_dims), groups.of_result(statistics, trailing=1)
    )
    return statistics


def backward_logsumexp(
    kernels: Kernels,
    reduction: Reduction,
    log_weights: Tensor,
    call: DensityCall,
    statistics: Tensor,
    dout: Tensor,
    wanted: Sequence[bool],
) -> Gradients:
    """Gradients of log_weights, loc, scale and x, in their shapes and dtypes, each where `wanted` asks for it."""
    wants_weights, wants_loc, wants_scale, wants_x = wanted
    scale, scale_dims, arithmetic = call.scale, kernels.scale_dims, call.arithmetic
    groups = Groups(reduction, call.loc, call.x)
    is_swapped = groups.left is not call.x
    wants_left, wants_right = (wants_loc, wants_x) if is_swapped else (wants_x, wants_loc)
    left, right, *others = groups.matrices(log_weights, scale, scale_dims)
    left_shape = (left.shape[0], 1, *left.shape[2:])
    dleft = groups.empty(groups.left, groups.LEFT, left_shape, arithmetic, trailing=1) if wants_left else None
    dright = groups.empty(groups.right, groups.RIGHT, right.shape, arithmetic, trailing=1) if wants_right else None
    dfactor = groups.empty_sums(scale, arithmetic, trailing=scale_dims) if wants_scale else None
    dweights = groups.empty_sums(log_weights, arithmetic) if wants_weights else None
    kernels.backward_logsumexp(
        left,
        right,
        *others,
        groups.of_result(statistics, trailing=1),
        groups.of_result(dout),
        dweights,
        dleft,
        dright,
        dfactor,
    )
    of_left = groups.restore(dleft, groups.left, groups.LEFT, trailing=1)
    of_right = groups.restore(dright, groups.right, groups.RIGHT, trailing=1)
    return (
        groups.restore(dweights, log_weights, groups.EVERY),
        of_left if is_swapped else of_right,
        groups.restore(dfactor, scale, groups.EVERY, trailing=scale_dims),
        of_right if is_swapped else of_left,
    )
