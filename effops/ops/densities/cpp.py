"""The C++ kernels for log densities: operands in the layout of the kernels, and gradients back from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from effops.blocks.dots import DotMap, derivatives_of, normalisers_of
from effops.blocks.logsumexp import Reduction
from effops.blocks.plan import Shape
from effops.dispatch.custom_op import Gradients
from effops.numerics.layout import as_gradient, gradient_strides, without_negation
from effops.numerics.pages import with_huge_pages
from effops.numerics.precision import arithmetic_dtype, converted, mixes_float64
from effops.numerics.shapes import is_certain
from effops.ops.densities.density import DensityCall, Native, Wanted
from effops.ops.densities.layout import Groups, Layout
from effops.pytorch.calls import FakeTensor

COMPONENTS_ALONE, POINTS_ALONE, BOTH = range(3)  # as `Along` in C++


class Operand(NamedTuple):
    """A tensor, from which of its numbers on it is one, and the strides along the axes of the kernel."""

    tensor: Tensor
    strides: Sequence[int]
    first: int = 0


def of_map(dot_map: DotMap, dimension: int) -> Native:
    """The scores normaliser(scale) + scale phi(<x, loc>)."""

    def normalisers(scale: Tensor, with_slopes: bool) -> tuple[Tensor | None, Tensor | None]:
        from effops.kernels import library

        if dot_map.native == "linear":
            return None, None
        if scale.dtype == torch.float64:  # the library's have the digits of float32
            slopes = derivatives_of(dot_map, scale, scale.dtype) if with_slopes else None
            return normalisers_of(dot_map, scale, scale.dtype), slopes
        scale = scale.contiguous()
        values, slopes = scale.new_empty(scale.shape), scale.new_empty(scale.shape) if with_slopes else None
        if not isinstance(scale, FakeTensor):
            library.library(scale.dtype).normalisers(dot_map.native, scale, dimension, values, slopes)
        return values, slopes

    return Native(0, dot_map.native, dot_map.settings, normalisers)


def of_distances(dimension: int) -> Native:
    """The scores normaliser(deviations) - 1/2 of the squared distance."""

    def normalisers(deviations: Tensor, with_slopes: bool) -> tuple[Tensor | None, Tensor | None]:
        from effops.kernels import library

        deviations = deviations.contiguous()
        values = deviations.new_empty(deviations.shape[:-1])
        if not isinstance(values, FakeTensor):
            library.library(deviations.dtype).normalisers_of_deviations(deviations, dimension, values)
        return values, None

    return Native(1, "linear", DotMap.settings, normalisers)


class _Gradient:
    """The uninitialised gradient of an operand, and its strides along an axis for each group, of some sizes.

    It has the shape of the operand where that has such strides, else further axes over which it is summed later.
    """

    def __init__(
        self,
        layout: Layout,
        operand: Tensor,
        groups: tuple[int, ...],
        shape: Shape,
        dtype: torch.dtype,
        *,
        trailing: int = 0,
    ) -> None:
        self.operand = operand
        sizes, own, strides = tuple(operand.shape), gradient_strides(operand), None
        if operand.numel() == math.prod(shape):
            strides = layout.merged_strides(sizes, own, groups, trailing=trailing)
        if strides is None:
            strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            sizes, own = layout.summands(operand, groups, shape, strides, trailing=trailing)
        self.strides = strides
        self.tensor = with_huge_pages(operand.new_empty_strided(sizes, own, dtype=dtype))

    def restored(self) -> Tensor:
        return as_gradient(self.tensor, self.operand)


def _restored(gradient: _Gradient | None) -> Tensor | None:
    return None if gradient is None else gradient.restored()


class Kernel:
    """The operands of a call as the kernel takes them: with four axes, of which the second is 1 without a reduction.

    `left` has the points and `right` the components, along the last two groups of axes of the layout.
    """

    def __init__(
        self,
        native: Native,
        layout: Layout,
        left: Tensor,
        right: Tensor,
        scale: Tensor,
        log_weights: Tensor | None = None,
    ) -> None:
        self.native, self.layout, self.depth = native, layout, left.shape[-1]
        self.real = arithmetic_dtype(left.dtype)
        self.left, self.right, self.scale = map(without_negation, (left, right, scale))
        self.log_weights = None if log_weights is None else without_negation(log_weights)
        self.pairs = tuple(range(len(layout.axes)))
        self.points, self.components = self.pairs[:-1], (*self.pairs[:-2], self.pairs[-1])

    def operand(self, tensor: Tensor | None, groups: tuple[int, ...], *, trailing: int = 0) -> Operand | None:
        """A tensor as it lies, if its axes of each group collapse into one; else a copy."""
        if tensor is None:
            return None
        strides = self.layout.strides(tensor, groups, trailing=trailing)
        if strides is None:
            tensor = self.layout.matrix(tensor, groups, trailing=trailing)
            strides = tensor.stride()
        return Operand(tensor, strides)

    def of_pairs(self, tensor: Tensor | None) -> Operand | None:
        return self.operand(tensor, self.pairs)

    def run(self, is_backward: bool, *, with_slopes: bool = False, **operands: Operand | None) -> None:
        """Run the kernel in one direction. On fake tensors the workspace is allocated, and nothing runs."""
        from effops.kernels import library

        kernels = library.library(self.real)
        factors, dims = converted(self.scale, self.real), self.native.scale_dims
        normaliser, slope = self.native.normalisers(factors, with_slopes)
        scale = self.of_pairs(factors) if not dims else None
        if dims:
            deviations = self.operand(factors, self.components, trailing=1)
            assert deviations is not None
            operands["deviations"] = _of_coordinates(deviations, self.depth)
            scale = Operand(factors.new_full((), -0.5), (0, 0, 0, 0))
        given: dict[str, Operand | None] = {
            "left": self.operand(self.left, self.points, trailing=1),
            "right": self.operand(self.right, self.components, trailing=1),
            "scale": scale,
            "weights": None if self.log_weights is None else self.of_pairs(converted(self.log_weights, self.real)),
            "normaliser": self.of_pairs(normaliser),
            "slope": self.of_pairs(slope),
            **operands,
        }
        batch, *others, points, components = map(self.layout.plan.numel, self.layout.axes)
        call = library.PairsCall(batch, math.prod(others), points, components, self.depth)
        call.is_reduced = self.log_weights is not None
        call.scales_along = _along(self.layout, self.scale, dims)
        call.weights_along = COMPONENTS_ALONE if self.log_weights is None else _along(self.layout, self.log_weights)
        call.threads = library.threads_for(kernels.items(call, is_backward))
        workspace = factors.new_empty(call.threads * kernels.workspace(call))
        if isinstance(workspace, FakeTensor):
            return
        for name, operand in given.items():
            if operand is not None:
                setattr(call, name, library.Operand.of(operand.tensor, _four_axes(operand.strides), operand.first))
        call.workspace = workspace.data_ptr()
        call.map, (call.floor, call.least, call.offset) = kernels.map(self.native.map), self.native.settings
        kernels.run(call, is_backward)

    def run_backward(
        self, dscale: _Gradient | None, gradients: Mapping[str, _Gradient | None], **operands: Operand | None
    ) -> None:
        """Write gradients, or zeros if there are no pairs."""
        for name, gradient in gradients.items():
            operands[name] = None if gradient is None else Operand(gradient.tensor, gradient.strides)
        if not self.layout.plan.numel(self.layout.plan.order):
            for gradient in (dscale, *gradients.values()):
                if gradient is not None:
                    gradient.tensor.zero_()
            return
        if dscale is not None and self.native.scale_dims:
            *outer, _, components, coordinates = dscale.strides
            given = Operand(dscale.tensor, (*outer, components, coordinates))
            operands["ddeviations"] = _of_coordinates(given, self.depth)
        elif dscale is not None:
            operands["dscale"] = Operand(dscale.tensor, dscale.strides)
        self.run(True, with_slopes=dscale is not None, **operands)

    def gradient_of_rows(self, operand: Tensor, groups: tuple[int, ...]) -> _Gradient:
        """That of x or of loc. The points do not vary along the second of four groups."""
        sizes = [self.layout.plan.numel(self.layout.axes[group]) for group in groups]
        if groups == Groups.LEFT:
            sizes[1] = 1
        return _Gradient(self.layout, operand, groups, (*sizes, operand.shape[-1]), self.real, trailing=1)

    def gradient_of_sums(self, operand: Tensor) -> _Gradient:
        """That of weights or of a scale, without a last dimension."""
        return _Gradient(self.layout, operand, self.pairs, self.layout.shape_of_sums(operand), self.real)

    def gradient_of_scale(self) -> _Gradient:
        """That of deviations is summed over points alone."""
        if not self.native.scale_dims:
            return self.gradient_of_sums(self.scale)
        *outer, _, components = map(self.layout.plan.numel, self.layout.axes)
        shape = (*outer, 1, components, self.scale.shape[-1])
        return _Gradient(self.layout, self.scale, self.pairs, shape, self.real, trailing=1)


def _four_axes(strides: Sequence[int]) -> Sequence[int]:
    """With the second axis, which has size 1 without a reduction."""
    return strides if len(strides) == 4 else (strides[0], 0, *strides[1:])


def _of_coordinates(operand: Operand, depth: int) -> Operand:
    """Deviations with a stride of coordinates of 0, if there is one value for all of them."""
    is_one = operand.tensor.shape[-1] != depth
    return operand._replace(strides=(*operand.strides[:-1], 0)) if is_one else operand


def _along(layout: Layout, operand: Tensor, dims: int = 0) -> int:
    """Along what an operand varies, as `Along` in C++."""
    points, components = (layout.plan.varies(operand, group, trailing=dims) for group in layout.axes[-2:])
    if not points:
        return COMPONENTS_ALONE
    return BOTH if components else POINTS_ALONE


def obstacle(layout: Layout, left: Tensor, right: Tensor, **operands: tuple[Tensor, int]) -> str:
    """Why the kernel cannot take the operands of a call; empty if it can. Scales and weights have last dimensions."""
    plan, components = layout.plan, layout.axes[-1]
    if mixes_float64((left, right, *(operand for operand, _ in operands.values()))):
        return "needs float64 for all operands or for none"
    if not all(is_certain(size == 1) or is_certain(size != 1) for size in plan.shape):
        return "needs to know of all sizes whether they are 1, which this trace leaves open"
    for name, (operand, dims) in operands.items():
        along = _along(layout, operand, dims)
        if along != COMPONENTS_ALONE and dims:
            return f"needs a {name} that is the same for all points"
        if along == BOTH and operand.numel() < math.prod(plan.shape):
            return f"needs a {name} that varies along points or components alone, or that is each pair's own"
        real = arithmetic_dtype(left.dtype)
        if along == BOTH and operand.dtype != real:
            return f"needs a {name} of {real} where it is each pair's own"
    shared = [axis for group in (*layout.axes[1:-2], components) for axis in group if plan.shape[axis] > 1]
    if not all(plan.varies(right, (axis,), trailing=1) for axis in shared):
        return "needs components that each have their own direction"
    *batch, points, _ = pairs = range(len(layout.axes))
    if None in (layout.strides(left, (0, points), trailing=1), layout.strides(right, (*batch, pairs[-1]), trailing=1)):
        return "needs axes of one role to lie one after another in memory; here they would be copied"
    return ""


def forward(native: Native, call: DensityCall) -> Tensor:
    """The scores of all pairs, contiguous in the plan's order of axes."""
    out = call.plan.empty(call.x, call.dtype)
    if out.numel():
        kernel = Kernel(native, Layout.of_pairs(call.plan), call.x, call.loc, call.scale)
        kernel.run(False, most=kernel.of_pairs(out))
    return out


def backward(native: Native, call: DensityCall, dout: Tensor, wanted: Wanted) -> Gradients:
    """Gradients of loc, scale and x, in their shapes and dtypes, each where `wanted` asks for it."""
    wants_loc, wants_scale, wants_x = wanted
    kernel = Kernel(native, Layout.of_pairs(call.plan), call.x, call.loc, call.scale)
    dloc = kernel.gradient_of_rows(call.loc, (0, 2)) if wants_loc else None
    dx = kernel.gradient_of_rows(call.x, (0, 1)) if wants_x else None
    dscale = kernel.gradient_of_scale() if wants_scale else None
    kernel.run_backward(dscale, {"dleft": dx, "dright": dloc}, dout=kernel.of_pairs(without_negation(dout)))
    return _restored(dloc), _restored(dscale), _restored(dx)


def _mixture_kernel(native: Native, groups: Groups, log_weights: Tensor, call: DensityCall) -> Kernel:
    return Kernel(native, groups, groups.left, groups.right, call.scale, log_weights)


def _of_result(groups: Groups, tensor: Tensor) -> Operand:
    tensor, strides = groups.laid_out_as_result(tensor)
    return Operand(tensor, (*strides, 0))


def _of_statistics(groups: Groups, statistics: Tensor) -> tuple[Operand, Operand]:
    tensor, (*strides, plane) = groups.laid_out_as_result(statistics, trailing=1)
    return Operand(tensor, (*strides, 0)), Operand(tensor, (*strides, 0), plane)


def forward_logsumexp(native: Native, reduction: Reduction, log_weights: Tensor, call: DensityCall) -> Tensor:
    """The statistics of the reduction, as `effops.blocks.logsumexp.forward` computes them."""
    statistics = reduction.empty(call.x, call.arithmetic)
    groups = Groups(reduction, call.loc, call.x)
    most, rest = _of_statistics(groups, statistics)
    _mixture_kernel(native, groups, log_weights, call).run(False, most=most, rest=rest)
    return statistics


def logsumexp(native: Native, reduction: Reduction, log_weights: Tensor, call: DensityCall) -> Tensor:
    """The result, without statistics."""
    out = reduction.reduced.empty(call.x, call.dtype)
    groups = Groups(reduction, call.loc, call.x)
    _mixture_kernel(native, groups, log_weights, call).run(False, most=_of_result(groups, out))
    return out


def backward_logsumexp(
    native: Native,
    reduction: Reduction,
    log_weights: Tensor,
    call: DensityCall,
    statistics: Tensor,
    dout: Tensor,
    wanted: Sequence[bool],
) -> Gradients:
    """Gradients of log_weights, loc, scale and x, in their shapes and dtypes, each where `wanted` asks for it."""
    groups = Groups(reduction, call.loc, call.x)
    kernel = _mixture_kernel(native, groups, log_weights, call)
    wants_weights, wants_loc, wants_scale, wants_x = wanted
    wants_left, wants_right = (wants_loc, wants_x) if groups.is_swapped else (wants_x, wants_loc)
    left = kernel.gradient_of_rows(groups.left, groups.LEFT) if wants_left else None
    right = kernel.gradient_of_rows(groups.right, groups.RIGHT) if wants_right else None
    weights = kernel.gradient_of_sums(log_weights) if wants_weights else None
    dscale = kernel.gradient_of_scale() if wants_scale else None
    found = {"dleft": left, "dright": right, "dweights": weights}
    (most, rest), dresult = _of_statistics(groups, statistics), _of_result(groups, without_negation(dout))
    kernel.run_backward(dscale, found, most=most, rest=rest, dout=dresult)
    dloc, dx = (left, right) if groups.is_swapped else (right, left)
    return _restored(weights), _restored(dloc), _restored(dscale), _restored(dx)
