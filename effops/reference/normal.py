"""The references of `effops.ops.densities.normal`."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from effops.numerics.precision import contraction_error, unit_roundoff
from effops.ops.densities.density import DensityCall
from effops.ops.densities.normal import density, normal_log_prob, normal_mixture_log_prob
from effops.reference.mixture import mixture_reference
from effops.reference.reference import Bounds, Reference, Shape, summed_bounds


def _sample(
    loc: Shape,
    scale: Shape,
    x: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments loc, scale and x of given shapes: loc and x are normally distributed, scales lie between 1/2 and 2."""
    return (
        torch.randn(loc, dtype=torch.float64, generator=generator).to(device, dtype),
        (2 ** torch.empty(scale, dtype=torch.float64).uniform_(-1, 1, generator=generator)).to(device, dtype),
        torch.randn(x, dtype=torch.float64, generator=generator).to(device, dtype),
    )


def _workload(
    *,
    N: int,
    M: int,
    D: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of M components and N points that are drawn from them: loc (M, D), scale (M, 1), x (N, 1, D)."""
    loc, scale, noise = _sample((M, D), (M, 1), (N, D), dtype=torch.float64, generator=generator)
    component = torch.randint(M, (N,), generator=generator)
    x = (loc[component] + scale[component] * noise).unsqueeze(1)
    return loc.to(device, dtype), scale.to(device, dtype), x.to(device, dtype)


def _bounds(call: DensityCall) -> Bounds:
    """The bounds of a correct log density. A sum of squares has terms of one sign, so its error is relative to it."""
    u, scale = unit_roundoff(call.arithmetic), call.scale.double()
    normaliser = density.normaliser(scale, call.dimension)
    half = torch.zeros(call.shape, dtype=torch.float64, device=call.device)
    for loc, scale_of, x in _coordinates(call):
        half += 0.5 * ((x - loc) / scale_of) ** 2
    value = normaliser - half
    rounding = (8 + contraction_error(call.dimension, call.arithmetic)) * half + 2 * normaliser.abs() + 4 * value.abs()
    rounding = u * rounding + _normaliser_error(scale, call.dimension)
    return Bounds(value, rounding, rounding, dtype=call.dtype)


def _gradient_bounds(call: DensityCall, dout: Tensor, dout_error: Tensor | float = 0.0) -> tuple[Bounds, ...]:
    """The bounds of correct gradients of loc, scale and x: sums of terms, each of which is off by a few u."""
    g, u = dout.double(), unit_roundoff(call.arithmetic)
    error = g.abs() * (8 * u) + dout_error
    sums = [g.new_zeros(3, *operand.shape[:-1], call.dimension) for operand in call.tensors]
    for d, (loc, scale, x) in enumerate(_coordinates(call)):
        z = (x - loc) / scale
        slope, spread = z / scale, (z * z - 1) / scale
        sizes = slope.abs(), (z * z + 1) / scale.abs(), slope.abs()
        for of_operand, term, size in zip(sums, (slope, spread, -slope), sizes):
            for total, part in zip(of_operand, (g * term, error * size, g.abs() * size)):
                total[..., d] = part.sum_to_size(total.shape[:-1])
    terms = (g.numel() // max(1, math.prod(operand.shape[:-1])) for operand in call.tensors)
    return tuple(
        summed_bounds(value, error, size, count, operand, u)
        for (value, error, size), count, operand in zip(sums, terms, call.tensors)
    )


def _coordinates(call: DensityCall) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The values of loc, scale and x for one coordinate after the other, in float64."""
    loc, scale, x = (tensor.double() for tensor in call.tensors)
    for d in range(call.dimension):
        yield loc[..., d], scale[..., d if scale.shape[-1] > 1 else 0], x[..., d]


def _normaliser_error(scale: Tensor, dimension: int) -> Tensor:
    """By how much W may be off in float64. Its terms may have opposite signs, so their absolute values count."""
    repeats = dimension // max(1, scale.shape[-1])
    return 4 * unit_roundoff(torch.float64) * repeats * (scale.log().abs() + math.log(2 * math.pi)).sum(-1)


LOG_PROB = Reference(
    normal_log_prob,
    cases={
        # loc, scale, x
        "founding": ((5, 6, 7), (5, 6, 7), (5, 1, 6, 7)),
        "one against many": ((7,), (1,), (33, 7)),
        "row by row": ((29, 8), (29, 1), (29, 8)),
        "single": ((2,), (2,), (2,)),
        "one coordinate": ((17, 1), (17, 1), (19, 1, 1)),
        "columns only": ((17, 5), (17, 5), (5,)),
        "one scale": ((21, 5), (1,), (18, 1, 5)),
        "a scale for each coordinate": ((21, 5), (5,), (18, 1, 5)),
        "scale alone varies": ((6,), (9, 6), (13, 1, 6)),
        "scale by rows": ((11, 6), (13, 1, 6), (13, 1, 6)),
        "scale by pairs": ((4, 6), (13, 4, 1), (13, 1, 6)),
        "mixed roles": ((3, 1, 5, 1, 6), (5, 1, 6), (3, 4, 1, 2, 6)),
        "wide": ((3, 768), (3, 1), (2, 1, 768)),
        "several blocks": ((260, 9), (260, 9), (520, 1, 9)),
        "empty rows": ((4, 6), (4, 6), (0, 1, 6)),
        "empty columns": ((0, 6), (0, 1), (3, 1, 6)),
    },
    sample=_sample,
    workload=_workload,
    sizes={"N": 4096, "M": 4096, "D": 64},
    bounds=_bounds,
    gradient_bounds=_gradient_bounds,
)
mixture_reference(normal_mixture_log_prob, LOG_PROB)
