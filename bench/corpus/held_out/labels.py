"""Comparisons with labels and thresholds, of everything with everything.

Written later than the modules of scores and losses, by somebody who had not seen a rule of the lint either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..program import Expected, Program


def precision_recall_counts(scores: Tensor, labels: Tensor, thresholds: Tensor) -> Tensor:
    """For each class and threshold: how many are false or true, and how many of these reach it."""
    classes, count = scores.shape[1], len(thresholds)
    truth = functional.one_hot(labels, classes)
    reached = (scores[..., None] >= thresholds).long()
    cells = reached + 2 * truth[..., None] + 4 * torch.arange(classes * count).view(classes, count)
    return torch.bincount(cells.flatten(), minlength=4 * classes * count).view(classes, count, 2, 2)


def precision_recall_counts_mended(scores: Tensor, labels: Tensor, thresholds: Tensor) -> Tensor:
    classes, count = scores.shape[1], len(thresholds)
    truth = functional.one_hot(labels, classes)
    places = torch.bucketize(scores, thresholds, right=True) + (count + 1) * torch.arange(classes)
    histogram = torch.bincount((2 * places + truth).flatten(), minlength=2 * classes * (count + 1))
    reached = histogram.view(classes, count + 1, 2).flip(1).cumsum(1).flip(1)
    return torch.stack([reached[:, :1] - reached[:, 1:], reached[:, 1:]], dim=-1)


def scored_samples(n: int, classes: int, thresholds: int) -> tuple[Any, ...]:
    return torch.randn(n, classes).softmax(-1), torch.randint(classes, (n,)), torch.linspace(0, 1, thresholds)


def instance_means(embeddings: Tensor, masks: Tensor) -> Tensor:
    masked = embeddings[:, :, None] * masks[..., None]
    return masked.sum(1) / masks.sum(1)[..., None]


def instance_means_mended(embeddings: Tensor, masks: Tensor) -> Tensor:
    return masks.mT @ embeddings / masks.sum(1)[..., None]


def pixels_and_masks(batch: int, pixels: int, instances: int, d: int) -> tuple[Any, ...]:
    masks = functional.one_hot(torch.randint(instances, (batch, pixels)), instances).to(torch.float32)
    return torch.randn(batch, pixels, d, requires_grad=True), masks


def semi_hard_triplets(embeddings: Tensor, labels: Tensor, margin: float) -> Tensor:
    """The negative of a pair is the nearest that is farther than the positive, or else the farthest."""
    distances, same, n = torch.cdist(embeddings, embeddings), labels[:, None] == labels, len(labels)
    tiled = distances.repeat(n, 1).unflatten(0, (n, n))
    farther = ~same & (tiled > distances.mT[..., None])
    nearest = torch.where(farther, tiled, torch.inf).amin(-1).mT
    return mean_of_pairs(distances, nearest, same, margin)


def semi_hard_triplets_mended(embeddings: Tensor, labels: Tensor, margin: float) -> Tensor:
    distances, same = torch.cdist(embeddings, embeddings), labels[:, None] == labels
    negatives = distances.masked_fill(same, torch.inf).sort(1).values
    places = torch.searchsorted(negatives.detach(), distances.detach(), right=True)
    nearest = negatives.gather(1, places.clamp(max=len(labels) - 1))
    return mean_of_pairs(distances, nearest, same, margin)


def mean_of_pairs(distances: Tensor, nearest: Tensor, same: Tensor, margin: float) -> Tensor:
    farthest = distances.masked_fill(same, -torch.inf).amax(1)
    negatives = torch.where(nearest.isinf(), farthest[:, None], nearest)
    positives = same & ~torch.eye(len(same), dtype=torch.bool, device=same.device)
    return (functional.relu(distances - negatives + margin) * positives).sum() / positives.sum()


def labelled_rows(n: int, d: int, labels: int) -> tuple[Any, ...]:
    return torch.randn(n, d, requires_grad=True), torch.arange(n) % labels, 5.0


PROGRAMS = (
    Program(
        "precision_recall_counts",
        "https://github.com/Lightning-AI/torchmetrics/issues/3299",
        precision_recall_counts,
        scored_samples,
        sizes={"n": 60_000, "classes": 3, "thresholds": 200},
        small={"n": 3_000, "classes": 3, "thresholds": 300},
        expected=tuple(
            Expected(
                line,
                now=lambda s: 8 * s["n"] * s["classes"] * s["thresholds"],
                after=lambda s: 8 * s["classes"] * max(s["n"], 4 * s["thresholds"]),
            )
            for line in (
                "reached = (scores[..., None] >= thresholds).long()",
                "cells = reached + 2 * truth[..., None]",
            )
        ),
        mended=precision_recall_counts_mended,
        note="288 MB of int64 in the source, twice",
    ),
    Program(
        "instance_means",
        "https://github.com/Wizaron/instance-segmentation-pytorch/blob/master/code/lib/losses/discriminative.py",
        instance_means,
        pixels_and_masks,
        sizes={"batch": 2, "pixels": 65_536, "instances": 20, "d": 32},
        small={"batch": 1, "pixels": 10_000, "instances": 20, "d": 32},
        expected=(
            Expected(
                "masked = embeddings[:, :, None] * masks[..., None]",
                now=lambda s: 4 * s["batch"] * s["pixels"] * s["instances"] * s["d"],
                after=lambda s: 4 * s["batch"] * s["instances"] * s["d"],
            ),
        ),
        mended=instance_means_mended,
        backward=True,
    ),
    Program(
        "semi_hard_triplets",
        "https://github.com/huggingface/sentence-transformers/pull/4026",
        semi_hard_triplets,
        labelled_rows,
        sizes={"n": 1_024, "d": 768, "labels": 64},
        small={"n": 264, "d": 32, "labels": 24},
        expected=(
            Expected(
                "tiled = distances.repeat(n, 1)",
                now=lambda s: 4 * s["n"] ** 3,
                after=lambda s: 8 * s["n"] ** 2,
            ),
            Expected(
                "farther = ~same & (tiled > distances.mT[..., None])",
                now=lambda s: s["n"] ** 3,
                after=lambda s: 8 * s["n"] ** 2,
            ),
            Expected(
                "nearest = torch.where(farther, tiled, torch.inf).amin(-1)",
                now=lambda s: 4 * s["n"] ** 3,
                after=lambda s: 8 * s["n"] ** 2,
            ),
        ),
        mended=semi_hard_triplets_mended,
        backward=True,
        note="the mended form sorts each row, and its indices are int64",
    ),
)
