"""Values of all pairs of two sets, that a sum or an extremum reduces at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..program import Expected, Program


def squared_distances(points: Tensor, centres: Tensor) -> Tensor:
    return (points[:, None] - centres).pow(2).sum(-1)


def squared_distances_mended(points: Tensor, centres: Tensor) -> Tensor:
    products = points @ centres.mT
    return (points.pow(2).sum(-1)[:, None] + centres.pow(2).sum(-1) - 2 * products).clamp(min=0)


def points_and_centres(n: int, k: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.randn(k, d)


PROGRAMS = (
    Program(
        "squared_distances",
        "https://github.com/pytorch/pytorch/issues/25799",
        squared_distances,
        points_and_centres,
        sizes={"n": 100_000, "k": 1_000, "d": 64},
        small={"n": 2_000, "k": 100, "d": 64},
        expected=(
            Expected(
                "(points[:, None] - centres).pow(2)",
                now=lambda s: 4 * s["n"] * s["k"] * s["d"],
                after=lambda s: 4 * s["n"] * s["k"],
            ),
        ),
        mended=squared_distances_mended,
    ),
)
