"""The C++ kernels for log densities: operands in the layout of the kernels, and gradients back from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from effops.blocks.dots import DotMap, collapse
from effops.blocks.logsumexp import Reduction
from effops.dispatch.custom_op import Gradients
from effops.numerics.layout import without_negation
from effops.ops.densities.density import DensityCall
from effops.ops.densities.layout import Groups, LogsumexpGradients
from effops.pytorch import FakeTensor


class MixtureKernel:
    """The operands of a mixture as the kernel takes them."""

    def __init__(self, dot_map: DotMap, reduction: Reduction, log_weights: Tensor, call: DensityCall) -> None:
        self.log_weights, loc, self.scale, x = map(without_negation, (log_weights, call.loc, call.scale, call.x))
        self.map, self.arithmetic = dot_map, call.arithmetic
        self.groups = Groups(reduction, loc, x)
        self.left, self.right, self.scales, self.weights = self.groups.matrices(self.log_weights, self.scale, 0)
        self.dimension = call.dimension

    def normalisers(self, *, with_slopes: bool = False) -> tuple[Tensor, Tensor | None]:
        """The normalisers of the scales, and their derivatives, as operands."""
        from effops.kernels import library

        scale = self.scale.contiguous()
        values, slopes = torch.empty_like(scale), torch.empty_like(scale) if with_slopes else None
        if not isinstance(scale, FakeTensor):
            library.normalisers(self.map.native, scale, self.dimension, values, slopes)
        every = self.groups.EVERY
        return self.groups.matrix(values, every), None if slopes is None else self.groups.matrix(slopes, every)

    def forward(self, most: Tensor, rest: Tensor | None = None) -> None:
        """Write the statistics, or their sum to `most` if `rest` is None. Both have the shape of the result."""
        normaliser, _ = self.normalisers()
        self._run(False, normaliser=normaliser, most=most, rest=rest)

    def backward(self, statistics: Tensor, dout: Tensor, **gradients: Tensor | None) -> None:
        most, rest = statistics.unbind(-1)
        normaliser, slope = self.normalisers(with_slopes=gradients["dscale"] is not None)
        given = {"normaliser": normaliser, "slope": slope, "dout": without_negation(dout)}
        self._run(True, most=most, rest=rest, **given, **gradients)

    def _run(self, is_backward: bool, **operands: Tensor | None) -> None:
        """Run the kernel in one direction. On fake tensors the workspace is allocated, and nothing runs."""
        from effops.kernels import library

        call = library.MixtureCall(*self.scales.shape, self.left.shape[-1])
        call.weighs_points = self.groups.plan.varies(self.log_weights, self.groups.axes[2])
        call.threads = library.threads_for(library.mixture_items(call, is_backward))
        workspace = self.left.new_empty(call.threads * library.mixture_workspace())
        if isinstance(workspace, FakeTensor):
            return
        for name in ("most", "rest", "dout"):
            of_result = operands.get(name)
            operands[name] = None if of_result is None else self.groups.of_result(of_result).unsqueeze(-1)
        own = {"left": self.left, "right": self.right, "scale": self.scales, "weights": self.weights}
        for name, tensor in {**own, **operands}.items():
            setattr(call, name, library.Operand.of(tensor))
        call.workspace = workspace.data_ptr()
        library.run_mixture(call, self.map.native, self.map.settings, is_backward)


def obstacle(groups: Groups, log_weights: Tensor, scale: Tensor) -> str:
    """Why the kernel cannot take the operands of a mixture; empty if it can."""
    plan, (_, others, points, components) = groups.plan, groups.axes
    if plan.varies(scale, points):
        return "needs scales that are the same for all points"
    if plan.varies(log_weights, points) and log_weights.numel() < plan.numel(plan.order):
        return "needs weights that are the same for all points, or each pair's own"
    shared = [axis for axis in (*others, *components) if plan.shape[axis] > 1]
    if not all(plan.varies(groups.right, (axis,), trailing=1) for axis in shared):
        return "needs components that each have their own direction"
    if not all(_are_matrices(groups, *one) for one in ((groups.left, groups.LEFT), (groups.right, groups.RIGHT))):
        return "needs axes of one role to lie one after another in memory; here they would be copied"
    return ""


def _are_matrices(groups: Groups, operand: Tensor, roles: Sequence[int]) -> bool:
    """Whether the axes of each role collapse into one."""
    axes = [groups.axes[role] for role in roles]
    view = groups.plan.view(operand, sum(axes, ()), trailing=1, expand=False)
    ends = [*itertools.accumulate(map(len, axes), initial=0)]
    return all(collapse(view, range(*role)) is not None for role in itertools.pairwise(ends))


def forward_logsumexp(dot_map: DotMap, reduction: Reduction, log_weights: Tensor, call: DensityCall) -> Tensor:
    """The statistics of the reduction, as `effops.blocks.logsumexp.forward` computes them."""
    statistics = reduction.empty(call.x, call.arithmetic)
    MixtureKernel(dot_map, reduction, log_weights, call).forward(*statistics.unbind(-1))
    return statistics


def logsumexp(dot_map: DotMap, reduction: Reduction, log_weights: Tensor, call: DensityCall) -> Tensor:
    """The result, without statistics."""
    out = reduction.reduced.empty(call.x, call.dtype)
    MixtureKernel(dot_map, reduction, log_weights, call).forward(out)
    return out


def backward_logsumexp(
    dot_map: DotMap,
    reduction: Reduction,
    log_weights: Tensor,
    call: DensityCall,
    statistics: Tensor,
    dout: Tensor,
    wanted: Sequence[bool],
) -> Gradients:
    """Gradients of log_weights, loc, scale and x, in their shapes and dtypes, each where `wanted` asks for it."""
    kernel = MixtureKernel(dot_map, reduction, log_weights, call)
    gradients = LogsumexpGradients(kernel.groups, kernel.log_weights, kernel.scale, wanted, kernel.arithmetic)
    found = {
        "dleft": gradients.left,
        "dright": gradients.right,
        "dscale": gradients.factor,
        "dweights": gradients.weights,
    }
    if math.prod(kernel.scales.shape) == 0:
        for gradient in found.values():
            if gradient is not None:
                gradient.zero_()
    else:
        kernel.backward(statistics, dout, **found)
    return gradients.restored()
