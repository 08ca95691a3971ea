"""Which batch axes of broadcast shapes are batch, rows and columns of a matrix product; views there and back.

An op scores every broadcast pair of `x (*X, D)` and `loc (*L, D)`; further operands (a scale) broadcast along. Every
axis of the result has one role:

    batch     x and loc both vary along it
    rows      only x varies
    columns   x does not vary (loc does, or only a further operand)

so that the result is `(batch, rows, D) x (batch, columns, D) -> (batch, rows, columns)`, by views.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from effops.numerics.pages import with_huge_pages
from effops.numerics.shapes import broadcast_shapes, is_known, remembered

Shape = tuple[int, ...]  # the size of each axis
Axes = tuple[int, ...]  # which axes, counted from 0
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Plan:
    """Roles of the axes of a broadcast result of shape `shape`; each role lists axes of the result, in its order."""

    shape: Shape
    batch: Axes
    rows: Axes
    columns: Axes

    @property
    def order(self) -> Axes:
        """Axes of the result in the order batch, rows, columns: the order that blocks and kernels see."""
        return self.batch + self.rows + self.columns

    def sizes(self, axes: Axes) -> Shape:
        return tuple(self.shape[axis] for axis in axes)

    def numel(self, axes: Axes) -> int:
        return math.prod(self.sizes(axes))

    def view(self, operand: Tensor, axes: Axes, *, trailing: int = 0, expand: bool = True) -> Tensor:
        """`operand`, broadcast to the result, as a view with just `axes` (then its last `trailing` axes).

        Where the operand does not vary along an axis, the view has stride 0 there; with `expand=False`, size 1.
        """
        sizes, strides = [], []
        first_trailing = operand.ndim - trailing
        missing = len(self.shape) - first_trailing
        for axis in axes:
            own = axis - missing
            varies = own >= 0 and operand.shape[own] == self.shape[axis]
            sizes.append(self.shape[axis] if varies or expand else 1)
            strides.append(operand.stride(own) if varies else 0)
        own_sizes, own_strides = operand.shape[first_trailing:], operand.stride()[first_trailing:]
        return operand.as_strided([*sizes, *own_sizes], [*strides, *own_strides])

    def varies(self, operand: Tensor, axes: Axes, *, trailing: int = 0) -> bool:
        """Whether `operand` is not constant along one of `axes`."""
        missing = len(self.shape) - (operand.ndim - trailing)
        return any(axis >= missing and operand.shape[axis - missing] != 1 for axis in axes)

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised result of shape `shape`, laid out contiguously in the order batch, rows, columns."""
        return with_huge_pages(like.new_empty_strided(self.shape, self._strides, dtype=dtype))

    def empty_planes(self, count: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """`count` such results in one tensor, each contiguous by itself, along a last axis."""
        strides = (*self._strides, self.numel(self.order))
        return like.new_empty_strided((*self.shape, count), strides, dtype=dtype)

    def without(self, axis: int) -> Plan:
        """The plan of a result that is reduced over an axis."""

        def remaining(axes: Axes) -> Axes:
            return tuple(other - (other > axis) for other in axes if other != axis)

        shape = self.shape[:axis] + self.shape[axis + 1 :]
        return Plan(shape, remaining(self.batch), remaining(self.rows), remaining(self.columns))

    @functools.cached_property
    def _strides(self) -> tuple[int, ...]:
        strides = [1] * len(self.shape)
        step = 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= torch.sym_max(1, self.shape[axis])  # as of contiguous tensors, where an axis of size 0 counts as 1
        return tuple(strides)

    def result(self, ordered: Tensor) -> Tensor:
        """What is contiguous in the order batch, rows, columns, viewed as a result."""
        return ordered.as_strided(self.shape, self._strides)


def make_plan(x: Shape, loc: Shape, *others: Shape) -> Plan:
    """The plan for batch shapes (without the contracted axis); raises RuntimeError if they do not broadcast."""
    shape = tuple(broadcast_shapes(x, loc, *others))

    def varying(operand: Shape) -> set[int]:
        """The axes along which an operand varies; one of an open size counts, as it may."""
        missing = len(shape) - len(operand)
        return {missing + axis for axis, size in enumerate(operand) if not is_known(size == 1)}

    in_x, in_loc = varying(x), varying(loc)
    axes = range(len(shape))
    return Plan(
        shape=shape,
        batch=tuple(axis for axis in axes if axis in in_x and axis in in_loc),
        rows=tuple(axis for axis in axes if axis in in_x and axis not in in_loc),
        columns=tuple(axis for axis in axes if axis not in in_x),
    )


broadcast_plan = remembered(make_plan)
