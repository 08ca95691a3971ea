"""Distances of all pairs, of which each row needs its nearest few."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..program import Expected, Program

ROWS = 64  # of a block of the mended programs


def frame_atoms(atoms: Tensor) -> Tensor:
    distances = ((atoms[:, None] - atoms) ** 2).sum(-1).sqrt()
    return distances.topk(3, largest=False).values[:, 1:]


def frame_atoms_mended(atoms: Tensor) -> Tensor:
    return torch.cdist(atoms, atoms, compute_mode="donot_use_mm_for_euclid_dist").topk(3, largest=False).values[:, 1:]


def nearest_points(queries: Tensor, points: Tensor) -> Tensor:
    return torch.cdist(queries, points).topk(3, largest=False).values


def nearest_points_mended(queries: Tensor, points: Tensor) -> Tensor:
    blocks = [torch.cdist(rows, points).topk(3, largest=False).values for rows in queries.split(ROWS)]
    return torch.cat(blocks)


def assign_clusters(points: Tensor, centres: Tensor) -> Tensor:
    differences = points.unsqueeze(1) - centres.unsqueeze(0)
    return (differences**2).sum(-1).argmin(1)


def assign_clusters_mended(points: Tensor, centres: Tensor) -> Tensor:
    return (centres.pow(2).sum(-1) - 2 * points @ centres.mT).argmin(1)


def anomaly(patches: Tensor, memory_bank: Tensor) -> Tensor:
    nearest = torch.pow(patches[:, None] - memory_bank, 2).sum(2).argmin(1)
    return (patches - memory_bank[nearest]).norm(dim=1).amax()


def anomaly_mended(patches: Tensor, memory_bank: Tensor) -> Tensor:
    nearest = (memory_bank.pow(2).sum(1) - 2 * patches @ memory_bank.mT).argmin(1)
    return (patches - memory_bank[nearest]).norm(dim=1).amax()


def chamfer(cloud: Tensor, other: Tensor) -> Tensor:
    distances = (cloud[:, None] - other).square().sum(-1)
    return distances.amin(1).mean() + distances.amin(0).mean()


def nearest(cloud: Tensor, other: Tensor) -> Tensor:
    """The nearest of the other points, for each point."""
    return torch.cat([torch.cdist(rows, other).argmin(1) for rows in cloud.split(ROWS)])


def chamfer_mended(cloud: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        forth, back = nearest(cloud, other), nearest(other, cloud)
    there = (cloud - other[forth]).square().sum(-1).mean()
    return there + (other - cloud[back]).square().sum(-1).mean()


def three_coordinates(n: int) -> tuple[Any, ...]:
    return (torch.randn(n, 3),)


def two_clouds(n: int, m: int) -> tuple[Any, ...]:
    return torch.randn(n, 3), torch.randn(m, 3)


def two_trained_clouds(n: int, m: int) -> tuple[Any, ...]:
    return torch.randn(n, 3, requires_grad=True), torch.randn(m, 3, requires_grad=True)


def points_and_centres(n: int, k: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.randn(k, d)


PROGRAMS = (
    Program(
        "frame_atoms",
        "https://github.com/aqlaboratory/openfold-3/issues/225",
        frame_atoms,
        three_coordinates,
        sizes={"n": 41_842},
        small={"n": 1_800},
        expected=(
            Expected(
                "((atoms[:, None] - atoms) ** 2)",
                now=lambda s: 4 * s["n"] * s["n"] * 3,
                after=lambda s: 4 * s["n"] * s["n"],
            ),
        ),
        mended=frame_atoms_mended,
        note="the mended form is the issue's own: blocks of rows would take less",
    ),
    Program(
        "nearest_points",
        "https://github.com/getkeops/keops/issues/73",
        nearest_points,
        two_clouds,
        sizes={"n": 20_000, "m": 10_000},
        small={"n": 4_000, "m": 2_500},
        expected=(
            Expected(
                "torch.cdist(queries, points)",
                now=lambda s: 4 * s["n"] * s["m"],
                after=lambda s: 4 * ROWS * s["m"],
            ),
        ),
        mended=nearest_points_mended,
    ),
    Program(
        "assign_clusters",
        "https://github.com/subhadarship/kmeans_pytorch/issues/13",
        assign_clusters,
        points_and_centres,
        sizes={"n": 1_000_000, "k": 1_000, "d": 128},
        small={"n": 4_096, "k": 64, "d": 32},
        expected=(
            Expected(
                "points.unsqueeze(1) - centres.unsqueeze(0)",
                now=lambda s: 4 * s["n"] * s["k"] * s["d"],
                after=lambda s: 4 * s["n"] * max(s["k"], s["d"]),
            ),
            Expected(
                "(differences**2)",
                now=lambda s: 4 * s["n"] * s["k"] * s["d"],
                after=lambda s: 4 * s["n"] * max(s["k"], s["d"]),
            ),
        ),
        mended=assign_clusters_mended,
    ),
    Program(
        "anomaly",
        "https://github.com/hcw-00/PatchCore_anomaly_detection/issues/19",
        anomaly,
        points_and_centres,
        sizes={"n": 784, "k": 16_384, "d": 1_536},
        small={"n": 16, "k": 8_192, "d": 64},
        expected=(
            Expected(
                "torch.pow(patches[:, None] - memory_bank, 2)",
                now=lambda s: 4 * s["n"] * s["k"] * s["d"],
                after=lambda s: 4 * s["k"] * max(s["n"], s["d"]),
            ),
        ),
        mended=anomaly_mended,
        note="few rows and a long reduced axis; squares of the memory bank are as large as itself",
    ),
    Program(
        "chamfer",
        "https://github.com/kornia/kornia/issues/257",
        chamfer,
        two_trained_clouds,
        sizes={"n": 16_384, "m": 16_384},
        small={"n": 2_000, "m": 1_600},
        expected=(
            Expected(
                "(cloud[:, None] - other).square()",
                now=lambda s: 4 * s["n"] * s["m"] * 3,
                after=lambda s: 4 * ROWS * max(s["n"], s["m"]),
            ),
        ),
        mended=chamfer_mended,
        backward=True,
    ),
)
