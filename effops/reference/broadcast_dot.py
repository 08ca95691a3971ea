"""The reference of `effops.ops.broadcast_dot`."""

import torch
from torch import Tensor

from effops.numerics.precision import arithmetic_dtype, contraction_error, unit_roundoff
from effops.ops.broadcast_dot import DotProductCall, broadcast_dot
from effops.reference.reference import Bounds, Reference, exact_dot, normal_sample, normal_workload, summed_bounds


def _bounds(call: DotProductCall) -> Bounds:
    """The bounds of a correct dot product. Its error is what `contraction_error` allows, times both lengths."""
    arithmetic = arithmetic_dtype(call.dtype)
    error = contraction_error(call.dimension, arithmetic, torch.get_float32_matmul_precision())
    a, b = (tensor.expand(*tensor.shape[:-1], call.dimension) for tensor in call.tensors)
    radius = a.double().norm(dim=-1) * b.double().norm(dim=-1) * (error * unit_roundoff(arithmetic))
    return Bounds(exact_dot(a, b), radius, radius, dtype=call.dtype)


def _gradient_bounds(call: DotProductCall, dout: Tensor) -> tuple[Bounds, ...]:
    """The bounds of correct gradients of a and b."""
    g, u = dout.double(), unit_roundoff(arithmetic_dtype(call.dtype))
    operands = call.a.double(), call.b.double()

    def pulled_back(weight: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        a, b = (tensor.clone().requires_grad_() for tensor in tensors)
        return torch.autograd.grad((a * b).sum(-1), (a, b), weight)

    values, sizes = pulled_back(g, *operands), pulled_back(g.abs(), *(tensor.abs() for tensor in operands))
    terms = (g.numel() * call.dimension // max(1, operand.numel()) for operand in operands)
    return tuple(
        summed_bounds(value, torch.zeros_like(value), size, count, operand, u)
        for value, size, count, operand in zip(values, sizes, terms, operands)
    )


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
    workload=normal_workload("M1TD", "MTD"),  # all pairs of M rows and M other rows, at T positions
    sizes={"M": 128, "T": 512, "D": 128},
    bounds=_bounds,
    gradient_bounds=_gradient_bounds,
)
