"""Triton kernels for log densities: operands in the layout of the kernels, and gradients back from it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks.logsumexp import Reduction
from effops.dispatch.custom_op import Gradients
from effops.dispatch.requirements import INTERPRETED
from effops.ops.densities.density import DensityCall, Kernels, Wanted
from effops.ops.densities.layout import Groups, Layout, LogsumexpGradients


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
    groups = Groups(reduction, call.loc, call.x)
    dims, arithmetic = kernels.scale_dims, call.arithmetic
    gradients = LogsumexpGradients(groups, log_weights, call.scale, wanted, arithmetic, scale_dims=dims)
    kernels.backward_logsumexp(
        *groups.matrices(log_weights, call.scale, dims),
        groups.of_result(statistics, trailing=1),
        groups.of_result(dout),
        gradients.weights,
        gradients.left,
        gradients.right,
        gradients.factor,
    )
    return gradients.restored()
