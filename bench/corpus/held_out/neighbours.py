"""Nearest points, boxes and kernels: values of all pairs, of which only a reduction is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..program import Expected, Program

ROWS = 32  # a chunk of the mended loops


def nearest_codes(latents: Tensor, codebook: Tensor) -> Tensor:
    distances = (latents[:, :, None] - codebook[:, None]).square().sum(-1)
    return distances.argmin(-1)


def nearest_codes_mended(latents: Tensor, codebook: Tensor) -> Tensor:
    products = latents @ codebook.mT
    return (codebook.square().sum(-1)[:, None] - 2 * products).argmin(-1)


def latents_and_codebook(heads: int, n: int, codes: int, d: int) -> tuple[Any, ...]:
    return torch.randn(heads, n, d), torch.randn(heads, codes, d)


def mean_of_nearest(queries: Tensor, points: Tensor, values: Tensor, neighbours: int) -> Tensor:
    distances = torch.linalg.vector_norm(queries[:, None] - points[None], dim=-1)
    return values[distances.topk(neighbours, largest=False).indices].mean(-1)


def mean_of_nearest_mended(queries: Tensor, points: Tensor, values: Tensor, neighbours: int) -> Tensor:
    nearest = [torch.cdist(chunk, points).topk(neighbours, largest=False).indices for chunk in queries.split(ROWS)]
    return values[torch.cat(nearest)].mean(-1)


def queries_and_points(n: int, m: int, d: int, neighbours: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.randn(m, d), torch.randn(m), neighbours


def chamfer_distance(predicted: Tensor, scanned: Tensor) -> Tensor:
    squared = (predicted[:, :, None] - scanned[:, None]).square().sum(-1)
    return squared.amin(2).mean(1) + squared.amin(1).mean(1)


def chamfer_distance_mended(predicted: Tensor, scanned: Tensor) -> Tensor:
    def squared_to_nearest(some: Tensor, others: Tensor) -> Tensor:
        return (some[:, :, None] - others[:, None]).square().sum(-1).amin(2)

    def direction(points: Tensor, others: Tensor) -> Tensor:
        chunks = points.split(ROWS, dim=1)
        return torch.cat([checkpoint(squared_to_nearest, c, others, use_reentrant=False) for c in chunks], 1).mean(1)

    return direction(predicted, scanned) + direction(scanned, predicted)


def point_clouds(batch: int, n: int, m: int) -> tuple[Any, ...]:
    return torch.rand(batch, n, 3, requires_grad=True), torch.rand(batch, m, 3)


def laplace_kernel_sum(points: Tensor, centres: Tensor, weights: Tensor) -> Tensor:
    kernel = torch.exp(-(points[:, None, :] - centres[None, :, :]).abs().sum(-1))
    return kernel @ weights


def laplace_kernel_sum_mended(points: Tensor, centres: Tensor, weights: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(points, centres, p=1)) @ weights


def points_centres_weights(n: int, m: int, d: int) -> tuple[Any, ...]:
    points = (torch.rand(n, d) / d).requires_grad_()
    return points, (torch.rand(m, d) / d).requires_grad_(), torch.randn(m, 1)


def gaussian_process_mean(queries: Tensor, observed: Tensor, weights: Tensor, lengthscale: Tensor) -> Tensor:
    kernel = torch.exp(-0.5 * torch.cdist(queries / lengthscale, observed / lengthscale).square())
    return kernel @ weights


def gaussian_process_mean_mended(queries: Tensor, observed: Tensor, weights: Tensor, lengthscale: Tensor) -> Tensor:
    scaled = observed / lengthscale
    chunks = (queries / lengthscale).split(ROWS)
    return torch.cat([torch.exp(-0.5 * torch.cdist(chunk, scaled).square()) @ weights for chunk in chunks])


def observations(n: int, m: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.randn(m, d), torch.randn(m, 1), torch.full((d,), 1.5)


def corners(n: int) -> Tensor:
    lower = torch.rand(n, 2) * 80
    return torch.cat([lower, lower + 1 + torch.rand(n, 2) * 40], dim=-1)


def area(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).prod(-1)


def best_overlap(anchors: Tensor, truth: Tensor) -> Tensor:
    a, b = anchors[:, None], truth
    overlap = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    return (overlap / (area(anchors)[:, None] + area(truth) - overlap)).amax(1)


def best_overlap_mended(anchors: Tensor, truth: Tensor) -> Tensor:
    return torch.cat([best_overlap(chunk, truth) for chunk in anchors.split(512)])


def anchors_and_truth(anchors: int, truth: int) -> tuple[Any, ...]:
    return corners(anchors), corners(truth)


def matched_overlap(boxes: Tensor, targets: Tensor) -> Tensor:
    """The loss of matched boxes needs the diagonal alone."""
    p, t = boxes[:, None], targets
    overlap = (torch.minimum(p[..., 2:], t[..., 2:]) - torch.maximum(p[..., :2], t[..., :2])).clamp(min=0).prod(-1)
    return 1 - torch.diagonal(overlap / (area(boxes)[:, None] + area(targets) - overlap))


def matched_overlap_mended(boxes: Tensor, targets: Tensor) -> Tensor:
    sides = torch.minimum(boxes[:, 2:], targets[:, 2:]) - torch.maximum(boxes[:, :2], targets[:, :2])
    overlap = sides.clamp(min=0).prod(-1)
    return 1 - overlap / (area(boxes) + area(targets) - overlap)


def matched_boxes(n: int) -> tuple[Any, ...]:
    targets = corners(n)
    return (targets + torch.rand(n, 4)).requires_grad_(), targets


PROGRAMS = (
    Program(
        "nearest_codes",
        "https://github.com/lucidrains/vector-quantize-pytorch/issues/66",
        nearest_codes,
        latents_and_codebook,
        sizes={"heads": 8, "n": 32_768, "codes": 8_192, "d": 64},
        small={"heads": 2, "n": 1_000, "codes": 256, "d": 32},
        expected=(
            Expected(
                "distances = (latents[:, :, None] - codebook[:, None]).square()",
                now=lambda s: 4 * s["heads"] * s["n"] * s["codes"] * s["d"],
                after=lambda s: 4 * s["heads"] * s["n"] * s["codes"],
            ),
        ),
        mended=nearest_codes_mended,
    ),
    Program(
        "mean_of_nearest",
        "https://github.com/pytorch/pytorch/issues/9406",
        mean_of_nearest,
        queries_and_points,
        sizes={"n": 10_000, "m": 100_000, "d": 32, "neighbours": 16},
        small={"n": 500, "m": 2_000, "d": 32, "neighbours": 5},
        expected=(
            Expected(
                "torch.linalg.vector_norm(queries[:, None] - points[None], dim=-1)",
                now=lambda s: 4 * s["n"] * s["m"] * s["d"],
                after=lambda s: 4 * ROWS * s["m"],
            ),
        ),
        mended=mean_of_nearest_mended,
    ),
    Program(
        "chamfer_distance",
        "https://github.com/Maghoumi/pytorch-softdtw-cuda/pull/23",
        chamfer_distance,
        point_clouds,
        sizes={"batch": 32, "n": 8_192, "m": 8_192},
        small={"batch": 3, "n": 1_000, "m": 900},
        expected=(
            Expected(
                "squared = (predicted[:, :, None] - scanned[:, None]).square()",
                now=lambda s: 12 * s["batch"] * s["n"] * s["m"],
                after=lambda s: 12 * s["batch"] * ROWS * max(s["n"], s["m"]),
            ),
        ),
        mended=chamfer_distance_mended,
        backward=True,
    ),
    Program(
        "laplace_kernel_sum",
        "https://github.com/cornellius-gp/gpytorch/issues/2260",
        laplace_kernel_sum,
        points_centres_weights,
        sizes={"n": 20_000, "m": 20_000, "d": 16},
        small={"n": 1_200, "m": 800, "d": 16},
        expected=(
            Expected(
                "kernel = torch.exp(-(points[:, None, :] - centres[None, :, :])",
                now=lambda s: 4 * s["n"] * s["m"] * s["d"],
                after=lambda s: 4 * s["n"] * s["m"],
            ),
        ),
        mended=laplace_kernel_sum_mended,
        backward=True,
    ),
    Program(
        "gaussian_process_mean",
        "https://github.com/cornellius-gp/gpytorch/issues/2352",
        gaussian_process_mean,
        observations,
        sizes={"n": 1_000_000, "m": 100_000, "d": 3},
        small={"n": 3_000, "m": 2_500, "d": 3},
        expected=(
            Expected(
                "kernel = torch.exp(-0.5 * torch.cdist(",
                now=lambda s: 4 * s["n"] * s["m"],
                after=lambda s: 4 * ROWS * s["m"],
            ),
        ),
        mended=gaussian_process_mean_mended,
    ),
    Program(
        "best_overlap",
        "https://github.com/pytorch/vision/issues/7959",
        best_overlap,
        anchors_and_truth,
        sizes={"anchors": 250_000, "truth": 600},
        small={"anchors": 20_000, "truth": 150},
        expected=(
            Expected(
                "overlap = (torch.minimum(a[..., 2:], b[..., 2:])",
                now=lambda s: 8 * s["anchors"] * s["truth"],
                after=lambda s: max(8 * 512 * s["truth"], 4 * s["anchors"]),
            ),
            Expected(
                "return (overlap / (area(anchors)",
                now=lambda s: 4 * s["anchors"] * s["truth"],
                after=lambda s: max(8 * 512 * s["truth"], 4 * s["anchors"]),
            ),
        ),
        mended=best_overlap_mended,
        note="one loop mends both lines: the sides of all pairs, and the ratio",
    ),
    Program(
        "matched_overlap",
        "https://github.com/roboflow/rf-detr/pull/1245",
        matched_overlap,
        matched_boxes,
        sizes={"n": 50_000},
        small={"n": 1_700},
        expected=(
            Expected(
                "overlap = (torch.minimum(p[..., 2:], t[..., 2:])",
                now=lambda s: 8 * s["n"] ** 2,
                after=lambda s: 16 * s["n"],
            ),
            Expected(
                "return 1 - torch.diagonal(overlap",
                now=lambda s: 4 * s["n"] ** 2,
                after=lambda s: 16 * s["n"],
            ),
        ),
        mended=matched_overlap_mended,
        backward=True,
        note="both lines make a square of which the diagonal is used",
    ),
)
