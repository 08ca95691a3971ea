"""Score every pair of rows, map the score: as one Triton kernel, for any op of that form (see `effops.chunked`).

Lays broadcast operands out as the matrices that `effops.kernels.pairs` takes, and its gradients as those of the
operands. A view where strides allow; an operand whose axes of one role do not collapse into one is copied.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from effops.broadcast import Plan, Shape
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
    needs: tuple[bool, bool, bool],
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
