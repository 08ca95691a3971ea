"""Kernels and energies of all pairs, that a sum or a logsumexp reduces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..program import Expected, Program

ROWS = 64  # of a block of the mended programs


def in_blocks(function: Callable[..., Tensor], rows: Tensor, *others: Tensor) -> list[Tensor]:
    """What the function says of each block of rows. Backward computes a block again."""
    return [checkpoint(function, block, *others, use_reentrant=False) for block in rows.split(ROWS)]


def gaussian_sum(points: Tensor, sources: Tensor, weights: Tensor) -> Tensor:
    return torch.exp(-((points[:, None] - sources) ** 2).sum(-1) / 50) @ weights


def gaussian_sum_mended(points: Tensor, sources: Tensor, weights: Tensor) -> Tensor:
    return torch.exp(-squared_distances(points, sources) / 50) @ weights


def laplacian_sum(points: Tensor, sources: Tensor, weights: Tensor) -> Tensor:
    lengths = (points[:, None, :] - sources[None, :, :]).norm(dim=-1)
    return (-lengths).exp() @ weights


def laplacian_sum_mended(points: Tensor, sources: Tensor, weights: Tensor) -> Tensor:
    def block(rows: Tensor) -> Tensor:
        return (-torch.cdist(rows, sources, compute_mode="donot_use_mm_for_euclid_dist")).exp() @ weights

    return torch.cat([block(rows) for rows in points.split(ROWS)])


def density_of_rows(points: Tensor, samples: Tensor) -> Tensor:
    exponents = -0.5 * (points[:, None] - samples).square().sum(-1)
    return torch.logsumexp(exponents, 1) - math.log(len(samples))


def density_of_rows_mended(points: Tensor, samples: Tensor) -> Tensor:
    return torch.logsumexp(-0.5 * squared_distances(points, samples), 1) - math.log(len(samples))


def uniformity(features: Tensor, others: Tensor) -> Tensor:
    exponents = (features.unsqueeze(1) - others.unsqueeze(0)).pow(2).sum(-1).mul(-2)
    return exponents.flatten().logsumexp(0) - math.log(exponents.numel())


def uniformity_mended(features: Tensor, others: Tensor) -> Tensor:
    exponents = squared_distances(features, others).mul(-2)
    return exponents.flatten().logsumexp(0) - math.log(exponents.numel())


def squared_distances(points: Tensor, others: Tensor) -> Tensor:
    return points.pow(2).sum(-1)[:, None] + others.pow(2).sum(-1) - 2 * points @ others.mT


def mean_discrepancy(reference: Tensor, test: Tensor) -> Tensor:
    def mean(one: Tensor, other: Tensor) -> Tensor:
        return torch.exp(-(one[:, None] - other[None]).pow(2).sum(-1) / 50).mean()

    return mean(reference, reference) + mean(test, test) - 2 * mean(reference, test)


def mean_discrepancy_mended(reference: Tensor, test: Tensor) -> Tensor:
    def mean(one: Tensor, other: Tensor) -> Tensor:
        return torch.exp(-squared_distances(one, other) / 50).mean()

    return mean(reference, reference) + mean(test, test) - 2 * mean(reference, test)


def coulomb_energy(positions: Tensor, charges: Tensor) -> Tensor:
    squares = ((positions[:, None] - positions[None]) ** 2).sum(-1)
    squares = squares + torch.eye(len(charges))
    return torch.triu(charges[:, None] * charges * squares.rsqrt(), diagonal=1).sum()


def coulomb_energy_mended(positions: Tensor, charges: Tensor) -> Tensor:
    numbers = torch.arange(len(charges))

    def block(rows: Tensor, positions: Tensor, charges: Tensor) -> Tensor:
        is_later = numbers > rows[:, None]
        squares = (positions[rows, None] - positions).pow(2).sum(-1).masked_fill(~is_later, 1)
        return (charges[rows, None] * charges * squares.rsqrt() * is_later).sum()

    return torch.stack(in_blocks(block, numbers, positions, charges)).sum()


def two_sets(n: int, m: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d, requires_grad=True), torch.randn(m, d, requires_grad=True)


def two_sets_of_unit_length(n: int, m: int, d: int) -> tuple[Any, ...]:
    one, other = (torch.nn.functional.normalize(torch.randn(rows, d), dim=1) for rows in (n, m))
    return one.requires_grad_(), other.requires_grad_()


def sources_with_weights(n: int, m: int, d: int, e: int) -> tuple[Any, ...]:
    return *two_sets(n, m, d), torch.randn(m, e, requires_grad=True)


def points_with_weights(n: int, m: int, d: int, e: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.randn(m, d), torch.randn(m, e)


def charged_atoms(n: int) -> tuple[Any, ...]:
    return (10 * torch.randn(n, 3)).requires_grad_(), torch.randn(n)


PROGRAMS = (
    Program(
        "gaussian_sum",
        "https://github.com/cornellius-gp/gpytorch/pull/440",
        gaussian_sum,
        sources_with_weights,
        sizes={"n": 40_000, "m": 20_000, "d": 32, "e": 8},
        small={"n": 512, "m": 512, "d": 32, "e": 8},
        expected=(
            Expected(
                "((points[:, None] - sources) ** 2)",
                now=lambda s: 4 * s["n"] * s["m"] * s["d"],
                after=lambda s: 4 * s["n"] * s["m"],
            ),
        ),
        mended=gaussian_sum_mended,
        backward=True,
    ),
    Program(
        "laplacian_sum",
        "https://github.com/getkeops/keops/issues/429",
        laplacian_sum,
        points_with_weights,
        sizes={"n": 100_000, "m": 100_000, "d": 3, "e": 1},
        small={"n": 2_000, "m": 1_800, "d": 3, "e": 1},
        expected=(
            Expected(
                "(points[:, None, :] - sources[None, :, :])",
                now=lambda s: 4 * s["n"] * s["m"] * s["d"],
                after=lambda s: 4 * ROWS * s["m"],
            ),
        ),
        mended=laplacian_sum_mended,
        note="a kernel sum as KeOps' tutorials write it; the words of the issue were not at hand",
    ),
    Program(
        "density_of_rows",
        "https://github.com/pytorch/pytorch/issues/9406",
        density_of_rows,
        two_sets,
        sizes={"n": 50_000, "m": 10_000, "d": 64},
        small={"n": 700, "m": 400, "d": 32},
        expected=(
            Expected(
                "(points[:, None] - samples).square()",
                now=lambda s: 4 * s["n"] * s["m"] * s["d"],
                after=lambda s: 4 * s["n"] * s["m"],
            ),
        ),
        mended=density_of_rows_mended,
        backward=True,
    ),
    Program(
        "uniformity",
        "https://github.com/ssnl/align_uniform",
        uniformity,
        two_sets_of_unit_length,
        sizes={"n": 16_384, "m": 16_384, "d": 128},
        small={"n": 500, "m": 500, "d": 32},
        expected=(
            Expected(
                "(features.unsqueeze(1) - others.unsqueeze(0))",
                now=lambda s: 4 * s["n"] * s["m"] * s["d"],
                after=lambda s: 4 * s["n"] * s["m"],
            ),
        ),
        mended=uniformity_mended,
        backward=True,
        note="pairs of two sets, where the source takes pdist of one",
    ),
    Program(
        "mean_discrepancy",
        "https://github.com/SeldonIO/alibi-detect/issues/597",
        mean_discrepancy,
        two_sets,
        sizes={"n": 100_000, "m": 10_000, "d": 32},
        small={"n": 512, "m": 320, "d": 32},
        expected=(
            Expected(
                "(one[:, None] - other[None]).pow(2)",
                now=lambda s: 4 * max(s["n"], s["m"]) ** 2 * s["d"],
                after=lambda s: 4 * max(s["n"], s["m"]) ** 2,
            ),
        ),
        mended=mean_discrepancy_mended,
        backward=True,
    ),
    Program(
        "coulomb_energy",
        "https://github.com/torchmd/torchmd-net/pull/159",
        coulomb_energy,
        charged_atoms,
        sizes={"n": 30_000},
        small={"n": 1_700},
        expected=(
            Expected(
                "((positions[:, None] - positions[None]) ** 2)",
                now=lambda s: 4 * s["n"] * s["n"] * 3,
                after=lambda s: 4 * ROWS * s["n"] * 3,
            ),
        ),
        mended=coulomb_energy_mended,
        backward=True,
    ),
)
