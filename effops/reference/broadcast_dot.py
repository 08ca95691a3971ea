"""The reference of `effops.ops.broadcast_dot`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from effops.numerics.precision import arithmetic_dtype, contraction_error, unit_roundoff
from effops.ops.broadcast_dot import DotProductCall, broadcast_dot
from effops.reference.bounds import Bounds, exact_dot
from effops.reference.reference import Reference, normal_sample


def _workload(*, M: int, T: int, D: int, **options: Any) -> tuple[Tensor, ...]:
    """All pairs of M rows and M other rows, at T positions: a (M, 1, T, D), b (M, T, D)."""
    return normal_sample((M, 1, T, D), (M, T, D), **options)


def _bounds(call: DotProductCall) -> Bounds:
    """The bounds of a correct dot product. Its error is what `contraction_error` allows, times both lengths."""
    arithmetic = arithmetic_dtype(call.dtype)
    error = contraction_error(call.dimension, arithmetic, torch.get_float32_matmul_precision())
    a, b = (tensor.expand(*tensor.shape[:-1], call.dimension) for tensor in call.tensors)
    radius = a.double().norm(dim=-1) * b.double().norm(dim=-1) * (error * unit_roundoff(arithmetic))
    return Bounds(exact_dot(a, b), radius, radius, dtype=call.dtype)


def _gradient_bounds(call: DotProductCall, dout: Tensor) -> tuple[Bounds, Bounds]:
    """The bounds of correct gradients of a and b.

    A sum of n terms is off by (4 + n) u times the sum of their absolute values.
    """
    g, tensors = dout.double(), (call.a.double(), call.b.double())

    def pulled_back(weight: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        a, b = (tensor.clone().requires_grad_() for tensor in tensors)
        return torch.autograd.grad((a * b).sum(-1), (a, b), weight)

    values, sizes = pulled_back(g, *tensors), pulled_back(g.abs(), *(tensor.abs() for tensor in tensors))
    u = unit_roundoff(arithmetic_dtype(call.dtype))

    def bounds_of_sum(value: Tensor, size: Tensor, operand: Tensor) -> Bounds:
        terms = g.numel() * call.dimension // max(1, operand.numel())
        radius = (4 + terms) * u * size
        return Bounds(value, radius, radius)

    return bounds_of_sum(values[0], sizes[0], call.a), bounds_of_sum(values[1], sizes[1], call.b)


Reference(
    broadcast_dot,
    cases={
        # a, b
        "founding": ((5, 1, 6, 7), (5, 6, 7)),
        "one against many": ((33, 7), (7,)),
        "row by row": ((29, 8), (29, 8)),
        "single": ((2,), (2,)),
        "one coordinate": ((3, 1, 1), (4, 1)),
        "last dimension broadcasts": ((3, 1, 1), (4, 9)),
        "wide dimension broadcasts": ((5, 1, 300), (4, 1)),
        "mixed roles": ((3, 4, 1, 2, 6), (3, 1, 5, 1, 6)),
        "wide": ((2, 1, 768), (3, 768)),
        "empty rows": ((0, 1, 6), (4, 6)),
        "empty columns": ((3, 1, 6), (0, 6)),
        "empty dimension": ((3, 1, 0), (4, 0)),
        "several blocks": ((520, 1, 9), (260, 9)),
    },
    sample=normal_sample,
    workload=_workload,
    sizes={"M": 128, "T": 512, "D": 128},
    bounds=_bounds,
    gradient_bounds=_gradient_bounds,
)
