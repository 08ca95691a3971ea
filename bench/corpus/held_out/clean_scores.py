"""Scores, kernels and products that look like those of the other modules, and whose large tensors are right.

Written later than the modules of scores and losses, by somebody who had not seen a rule of the lint either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..program import Program


def matrix_suppression(masks: Tensor, scores: Tensor) -> Tensor:
    """Scores of sorted masks, less what the better ones cover."""
    shared, areas = masks @ masks.mT, masks.sum(1)
    overlaps = (shared / (areas[:, None] + areas - shared)).triu(1)
    covered = overlaps.amax(0)
    decay = torch.exp(-2 * (overlaps.square() - covered[:, None].square()))
    return scores * decay.amin(0)


def sorted_masks(masks: int, pixels: int) -> tuple[Any, ...]:
    return (torch.rand(masks, pixels) > 0.7).to(torch.float32), torch.rand(masks).sort(descending=True).values


def kernel_factor(points: Tensor, lengthscales: Tensor, jitter: float) -> Tensor:
    scaled = points / lengthscales
    covariance = torch.exp(-0.5 * torch.cdist(scaled, scaled).square())
    covariance.diagonal().add_(jitter)
    return torch.linalg.cholesky(covariance)


def points_and_lengthscales(n: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d), 0.5 + torch.rand(d), 1e-2


def biaffine_scores(heads: Tensor, dependents: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("bxi,oij,byj->boxy", dependents, weight, heads)


def words_and_labels(batch: int, words: int, d: int, labels: int) -> tuple[Any, ...]:
    heads, dependents = torch.randn(2, batch, words, d)
    return heads, dependents, torch.randn(labels, d, d) / d


def latent_attention(latents: Tensor, inputs: Tensor, to_keys: Tensor, to_values: Tensor) -> Tensor:
    keys, values = inputs @ to_keys, inputs @ to_values
    weights = torch.softmax(latents @ keys.mT, dim=-1)
    return weights @ values


def latents_and_inputs(batch: int, latents: int, length: int, channels: int, d: int) -> tuple[Any, ...]:
    queries = (torch.randn(latents, d) / d**0.5).requires_grad_()
    projections = ((torch.randn(channels, d) / channels**0.5).requires_grad_() for _ in range(2))
    return queries, torch.randn(batch, length, channels), *projections


def gauss_newton(jacobians: Tensor, curvatures: Tensor) -> Tensor:
    return torch.einsum("ncp,nck,nkq->pq", jacobians, curvatures, jacobians)


def jacobians_of_samples(n: int, classes: int, parameters: int) -> tuple[Any, ...]:
    shares = torch.randn(n, classes).softmax(-1)
    curvatures = torch.diag_embed(shares) - shares[:, :, None] * shares[:, None]
    return torch.randn(n, classes, parameters), curvatures


def distances_of_means(embeddings: Tensor, labels: Tensor, instances: int, margin: float) -> Tensor:
    sums = embeddings.new_zeros(instances, embeddings.shape[1]).index_add(0, labels, embeddings)
    counts = embeddings.new_zeros(instances).index_add(0, labels, embeddings.new_ones(len(labels)))
    means = sums / counts.clamp(min=1)[:, None]
    distances = (means[:, None] - means).square().sum(-1)
    return functional.relu(margin - distances).triu(1).sum() / (instances * (instances - 1))


def pixels_and_instances(pixels: int, instances: int, d: int) -> tuple[Any, ...]:
    labels = torch.randint(instances, (pixels,))
    return torch.randn(pixels, d, requires_grad=True), labels, instances, 3.0


def low_rank_adapter(inputs: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return inputs @ weight.mT + (inputs @ down.mT * 2) @ up.mT


def frozen_and_trained(n: int, d: int, rank: int) -> tuple[Any, ...]:
    down, up = torch.randn(rank, d, requires_grad=True), torch.zeros(d, rank, requires_grad=True)
    return torch.randn(n, d), torch.randn(d, d) / d**0.5, down, up


PROGRAMS = (
    Program(
        "matrix_suppression",
        "https://github.com/WXinlong/SOLO/blob/master/mmdet/core/post_processing/matrix_nms.py",
        matrix_suppression,
        sorted_masks,
        sizes={"masks": 500, "pixels": 60_800},
        small={"masks": 256, "pixels": 24_000},
        note="all pairs of masks, which are far smaller than the masks",
    ),
    Program(
        "kernel_factor",
        "https://github.com/cornellius-gp/linear_operator/blob/main/linear_operator/utils/cholesky.py",
        kernel_factor,
        points_and_lengthscales,
        sizes={"n": 13_500, "d": 26},
        small={"n": 2_100, "d": 26},
        note="the factor is the result, and as large as the covariance",
    ),
    Program(
        "biaffine_scores",
        "https://github.com/yzhangcs/parser/blob/main/supar/modules/affine.py",
        biaffine_scores,
        words_and_labels,
        sizes={"batch": 64, "words": 100, "d": 100, "labels": 45},
        small={"batch": 16, "words": 64, "d": 100, "labels": 40},
        note="the scores of all pairs and labels are the result; the first product is twice as large at most",
    ),
    Program(
        "latent_attention",
        "https://github.com/lucidrains/perceiver-pytorch/blob/main/perceiver_pytorch/perceiver_pytorch.py",
        latent_attention,
        latents_and_inputs,
        sizes={"batch": 8, "latents": 128, "length": 50_176, "channels": 261, "d": 64},
        small={"batch": 2, "latents": 48, "length": 12_000, "channels": 128, "d": 64},
        backward=True,
        note="few queries: the scores are smaller than the inputs",
    ),
    Program(
        "gauss_newton",
        "https://github.com/aleximmer/Laplace/blob/main/laplace/curvature/curvature.py",
        gauss_newton,
        jacobians_of_samples,
        sizes={"n": 1_000, "classes": 10, "parameters": 20_000},
        small={"n": 250, "classes": 10, "parameters": 1_000},
        note="three operands, from left to right: the first product is as large as the Jacobians",
    ),
    Program(
        "distances_of_means",
        "https://github.com/nyoki-mtl/pytorch-discriminative-loss/blob/master/src/loss.py",
        distances_of_means,
        pixels_and_instances,
        sizes={"pixels": 1_048_576, "instances": 60, "d": 32},
        small={"pixels": 80_000, "instances": 60, "d": 64},
        backward=True,
        note="the differences of all pairs, of sixty means",
    ),
    Program(
        "low_rank_adapter",
        "https://github.com/microsoft/LoRA/blob/main/loralib/layers.py",
        low_rank_adapter,
        frozen_and_trained,
        sizes={"n": 8_192, "d": 4_096, "rank": 8},
        small={"n": 2_048, "d": 1_024, "rank": 8},
        backward=True,
        note="the product of the factors is as large as the result that it is added to",
    ),
)
