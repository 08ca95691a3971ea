"""The references of `effops.ops.densities.power_spherical`."""

from __future__ import annotations

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


def _workload(
    *,
    M: int,
    T: int,
    D: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of M components and a draw from each, at T positions.

    The arguments are loc (M, T, D), scale (M, T), x (M, 1, T, D).
    """
    vectors = torch.randn(M, T, D, dtype=torch.float64, generator=generator)
    scale = vectors.norm(dim=-1)
    loc = vectors / scale.unsqueeze(-1)
    x = draw(loc, scale, generator).unsqueeze(1)
    return loc.to(device, dtype), scale.to(device, dtype), x.to(device, dtype)


BOUNDS = DirectionalBounds(density, _phi, _slope, _normaliser_errors)
LOG_PROB = directional_reference(power_spherical_log_prob, BOUNDS, _workload)
mixture_reference(power_spherical_mixture_log_prob, LOG_PROB)
