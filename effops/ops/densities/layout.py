"""Operands of a plan as the matrices that kernels take, and gradients back from them.

An operand is viewed as a matrix where its strides allow that. It is copied where its axes of one role do not collapse
into one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from effops.blocks.logsumexp import Reduction
from effops.blocks.plan import Plan, Shape
from effops.numerics.layout import as_gradient
from effops.numerics.pages import with_huge_pages
from effops.numerics.shapes import remembered


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

    def strides(self, operand: Tensor, groups: tuple[int, ...], *, trailing: int = 0) -> Shape | None:
        """The strides of `matrix`, found without an operation of PyTorch; None where that is a copy."""
        return self.merged_strides(operand.shape, operand.stride(), groups, trailing=trailing)

    def merged_strides(
        self, shape: Shape, strides: Shape, groups: tuple[int, ...], *, trailing: int = 0
    ) -> Shape | None:
        """Those of an operand with this shape and these strides."""
        axes = tuple(self.axes[i] for i in groups)
        return _merged_strides(self.plan.shape, axes, tuple(shape), strides, trailing)

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
        gradient = with_huge_pages(torch.empty_like(operand, dtype=dtype))
        return self._merged(gradient, groups, trailing).expand(shape)

    def empty_sums(self, operand: Tensor, dtype: torch.dtype, *, trailing: int = 0) -> Tensor:
        """An uninitialised gradient of an operand, with an axis for each group."""
        shape = self.shape_of_sums(operand, trailing=trailing)
        return self.empty(operand, tuple(range(len(self.axes))), shape, dtype, trailing=trailing)

    def shape_of_sums(self, operand: Tensor, *, trailing: int = 0) -> Shape:
        """The shape of a gradient, with an axis for each group. One over which the kernel sums has size 1."""
        *outer, by_rows, by_columns = (self.plan.varies(operand, group, trailing=trailing) for group in self.axes)
        if not trailing:  # a kernel of dot products sums over the rows or over the columns, not over both
            outer, by_columns = [True] * len(outer), by_columns or not by_rows
        sizes = (
            math.prod(self.plan.sizes(group)) if varies else 1
            for group, varies in zip(self.axes, (*outer, by_rows, by_columns))
        )
        return (*sizes, *operand.shape[operand.ndim - trailing :])

    def restore(
        self, gradient: Tensor | None, operand: Tensor, groups: tuple[int, ...], *, trailing: int = 0
    ) -> Tensor | None:
        """The gradient of the operand, from one with an axis for each group, of size 1 where the kernel summed."""
        if gradient is None:
            return None
        sizes, strides = self.summands(operand, groups, gradient.shape, gradient.stride(), trailing=trailing)
        return as_gradient(torch.as_strided(gradient, sizes, strides), operand)

    def summands(
        self, operand: Tensor, groups: tuple[int, ...], shape: Shape, strides: Shape, *, trailing: int = 0
    ) -> tuple[Shape, Shape]:
        """The shape and strides of such a gradient, with the axes of its operand.

        Before them are the axes over which it is yet to be summed.
        """
        plan, steps = self.plan, dict[int, int]()  # of each axis of the plan over which the kernel did not sum
        for i, size, step in zip(groups, shape, strides):
            if size == plan.numel(self.axes[i]):
                for axis in reversed(self.axes[i]):
                    steps[axis] = step
                    step *= plan.shape[axis]
        missing = len(plan.shape) - (operand.ndim - trailing)
        own = [steps.get(axis, 0) for axis in range(missing, len(plan.shape))]  # any one serves where the size is 1
        summed = tuple(axis for axis in steps if not plan.varies(operand, (axis,), trailing=trailing))
        return (
            (*plan.sizes(summed), *operand.shape),
            (*(steps[axis] for axis in summed), *own, *strides[len(groups) :]),
        )


@remembered
def _merged_strides(
    whole: Shape, groups: tuple[Shape, ...], own: Shape, own_strides: Shape, trailing: int
) -> Shape | None:
    """The strides of an operand whose axes of each group become one; 0 where it does not vary. None if they cannot."""
    missing = len(whole) - (len(own) - trailing)
    merged = []
    for group in groups:
        size, stride = 1, 0
        for axis in reversed([axis for axis in group if whole[axis] > 1]):
            varies = axis >= missing and own[axis - missing] != 1
            step = own_strides[axis - missing] if varies else 0
            if size == 1:
                stride = step
            elif step != size * stride:
                return None
            size *= whole[axis]
        merged.append(stride)
    return (*merged, *own_strides[len(own) - trailing :])


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
        self.is_swapped = axis in plan.rows  # x has the components
        self.left, self.right = (loc, x) if self.is_swapped else (x, loc)
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

    def laid_out_as_result(self, tensor: Tensor, *, trailing: int = 0) -> tuple[Tensor, Shape]:
        """A tensor with the shape of the result, and its strides in `of_result`. It is a copy if these need one."""
        whole, own = self.reduction.reduced.shape, tuple(tensor.shape)
        strides = _merged_strides(whole, self._of_result, own, tensor.stride(), trailing)
        if strides is None:
            tensor = self.of_result(tensor, trailing=trailing)
            strides = tensor.stride()
        return tensor, strides

    @property
    def _of_result(self) -> tuple[Shape, ...]:
        """The first three groups of axes, as the result counts them."""
        axis = self.reduction.axis
        return tuple(tuple(other - (other > axis) for other in group) for group in self.axes[:3])

    def of_result(self, tensor: Tensor, *, trailing: int = 0) -> Tensor:
        """A tensor with the shape of the result, viewed with an axis for each of the first three groups."""
        reduced, groups = self.reduction.reduced, self._of_result
        view = reduced.view(tensor, sum(groups, ()), trailing=trailing)
        sizes = [math.prod(reduced.sizes(group)) for group in groups]
        return view.reshape(*sizes, *tensor.shape[tensor.ndim - trailing :])


class LogsumexpGradients:
    """The gradients of a logsumexp's operands as kernels write them: None where one is not wanted.

    `wanted` tells of log_weights, loc, scale and x.
    """

    def __init__(
        self,
        groups: Groups,
        log_weights: Tensor,
        scale: Tensor,
        wanted: Sequence[bool],
        arithmetic: torch.dtype,
        *,
        scale_dims: int = 0,
    ) -> None:
        self.groups, self.log_weights, self.scale, self.scale_dims = groups, log_weights, scale, scale_dims
        wants_weights, wants_loc, wants_scale, wants_x = wanted
        wants_left, wants_right = (wants_loc, wants_x) if groups.is_swapped else (wants_x, wants_loc)

        def of_vectors(operand: Tensor, roles: tuple[int, ...], is_wanted: bool) -> Tensor | None:
            shape = [math.prod(groups.plan.sizes(groups.axes[role])) for role in roles]
            if roles == groups.LEFT:  # which does not vary along the second group
                shape[1] = 1
            own = (*shape, operand.shape[-1])
            return groups.empty(operand, roles, own, arithmetic, trailing=1) if is_wanted else None

        self.left = of_vectors(groups.left, groups.LEFT, wants_left)
        self.right = of_vectors(groups.right, groups.RIGHT, wants_right)
        self.factor = groups.empty_sums(scale, arithmetic, trailing=scale_dims) if wants_scale else None
        self.weights = groups.empty_sums(log_weights, arithmetic) if wants_weights else None

    def restored(self) -> tuple[Tensor | None, ...]:
        """Those of log_weights, loc, scale and x, in the shapes and dtypes of these."""
        groups = self.groups
        left = groups.restore(self.left, groups.left, groups.LEFT, trailing=1)
        right = groups.restore(self.right, groups.right, groups.RIGHT, trailing=1)
        return (
            groups.restore(self.weights, self.log_weights, groups.EVERY),
            left if groups.is_swapped else right,
            groups.restore(self.factor, self.scale, groups.EVERY, trailing=self.scale_dims),
            right if groups.is_swapped else left,
        )
