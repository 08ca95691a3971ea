"""The references of `effops.ops.densities.power_spherical`."""

import math

import torch
from torch import Tensor

from effops.numerics.precision import unit_roundoff
from effops.ops.densities.power_spherical import (
    density,
    draw,
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
)
from effops.reference.directional import DirectionalBounds, directional_reference
from effops.reference.mixture import mixture_reference


def _phi(t: Tensor) -> Tensor:
    return torch.log(t / 2)


def _slope(t: Tensor) -> Tensor:
    return 1 / t


def _normaliser_errors(normaliser: Tensor, derivative: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    # W is a sum of two parts, each of which may be larger than the sum.
    parts = normaliser.abs() + (dimension - 1) * math.log(4 * math.pi)
    u = unit_roundoff(torch.float64)
    return 4 * u * parts, 4 * u * derivative.abs()


def _parameters(M: int, T: int, D: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    vectors = torch.randn(M, T, D, dtype=torch.float64, generator=generator)
    scale = vectors.norm(dim=-1)
    return vectors / scale.unsqueeze(-1), scale


BOUNDS = DirectionalBounds(density, _phi, _slope, _normaliser_errors)
LOG_PROB = directional_reference(power_spherical_log_prob, BOUNDS, _parameters, draw)
mixture_reference(power_spherical_mixture_log_prob, LOG_PROB)
