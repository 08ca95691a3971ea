"""The references of `effops.ops.densities.von_mises_fisher`."""

import torch
from torch import Tensor

from effops.numerics.directions import random_directions
from effops.ops.densities.von_mises_fisher import (
    density,
    draw,
    von_mises_fisher_log_prob,
    von_mises_fisher_mixture_log_prob,
)
from effops.reference.directional import DirectionalBounds, directional_reference
from effops.reference.mixture import mixture_reference


def _phi(t: Tensor) -> Tensor:
    return t - 2


def _slope(t: Tensor) -> Tensor:
    return torch.ones_like(t)


def _normaliser_errors(normaliser: Tensor, derivative: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    accuracy = (2e-14, 1e-13) if dimension < 64 else (1e-15, 3e-15)  # as `effops.numerics.special` states
    return accuracy[0] * (normaliser.abs() + 1), accuracy[1] * derivative


def _parameters(M: int, T: int, D: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    loc = random_directions((M, T, D), generator)
    return loc, 10 ** (2 * torch.rand(M, T, dtype=torch.float64, generator=generator))


BOUNDS = DirectionalBounds(density, _phi, _slope, _normaliser_errors)
LOG_PROB = directional_reference(von_mises_fisher_log_prob, BOUNDS, _parameters, draw)
mixture_reference(von_mises_fisher_mixture_log_prob, LOG_PROB)
