"""The reference of `effops.einsum`, for a bilinear form: the equation that tests and the benchmark try it with."""

import math

import torch
from torch import Tensor

from effops.numerics.precision import arithmetic_dtype, contraction_error, unit_roundoff
from effops.ops.einsum.contraction import EinsumCall, einsum
from effops.reference.reference import Bounds, Reference, normal_sample, normal_workload

EQUATION = "...i,ijk,...j->...k"


def _radius(call: EinsumCall, sizes: Tensor, terms: int) -> Tensor:
    """How far a sum of `terms` products may be off, of which `sizes` is the sum of absolute values.

    Each intermediate is rounded to the dtype of the result. Twice, since float64 may be that of the reference too.
    """
    arithmetic = arithmetic_dtype(call.dtype)
    error = contraction_error(terms, arithmetic, torch.get_float32_matmul_precision()) * unit_roundoff(arithmetic)
    return 2 * len(call.operands) * (error + unit_roundoff(call.dtype)) * sizes


def bounds(call: EinsumCall) -> Bounds:
    """The bounds of a correct contraction."""
    operands = [operand.detach().double() for operand in call.operands]
    value = torch.einsum(call.equation, operands)
    sizes = torch.einsum(call.equation, [operand.abs() for operand in operands])
    radius = _radius(call, sizes, _terms(call, value.numel()))
    return Bounds(value, radius, radius, dtype=call.dtype)


def gradient_bounds(call: EinsumCall, dout: Tensor) -> tuple[Bounds, ...]:
    """The bounds of correct gradients."""

    def pulled_back(dout: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        leaves = [operand.clone().requires_grad_() for operand in operands]
        return torch.autograd.grad(torch.einsum(call.equation, leaves), leaves, dout)

    operands = [operand.detach().double() for operand in call.operands]
    values = pulled_back(dout.double(), *operands)
    sizes = pulled_back(dout.double().abs(), *(operand.abs() for operand in operands))
    radii = (_radius(call, size, _terms(call, size.numel())) for size in sizes)
    return tuple(Bounds(value, radius, radius) for value, radius in zip(values, radii))


def _terms(call: EinsumCall, numel: int) -> int:
    """How many products each of `numel` sums has."""
    return math.prod(call.contraction.sizes.values()) // max(1, numel)


Reference(
    einsum,
    given=(EQUATION,),
    core_dims={"operand 0": 1, "operand 1": 3, "operand 2": 1},
    cases={
        # vectors, the tensor of the form, other vectors
        "founding": ((5, 6), (6, 4, 3), (5, 4)),
        "all pairs": ((5, 1, 6), (6, 4, 3), (7, 4)),
        "one against many": ((33, 7), (7, 3, 2), (3,)),
        "single": ((2,), (2, 3, 4), (3,)),
        "axis of size 1 broadcasts": ((5, 1), (6, 4, 3), (5, 4)),
        "mixed roles": ((3, 4, 1, 2, 6), (6, 2, 5), (3, 1, 5, 1, 2)),
        "wide": ((2, 300), (300, 2, 3), (2, 2)),
        "empty rows": ((0, 6), (6, 4, 3), (0, 4)),
        "empty sum": ((5, 0), (0, 4, 3), (5, 4)),
        "several blocks": ((700, 9), (9, 30, 8), (700, 30)),
    },
    sample=normal_sample,
    workload=normal_workload("BD", "DDK", "BD"),  # B pairs of vectors with D coordinates, and K forms of them
    sizes={"B": 1024, "D": 64, "K": 64},
    bounds=bounds,
    gradient_bounds=gradient_bounds,
)
