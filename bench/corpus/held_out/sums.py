"""Sums of many kernels, and of all paths through a lattice.

Written later than the modules of scores and losses, by somebody who had not seen a rule of the lint either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..program import Expected, Program


def additive_kernel(points: Tensor, others: Tensor, lengthscales: Tensor) -> Tensor:
    return torch.exp(-0.5 * ((points[:, None] - others) / lengthscales).square()).sum(-1)


def additive_kernel_mended(points: Tensor, others: Tensor, lengthscales: Tensor) -> Tensor:
    def of_dimension(points: Tensor, others: Tensor, lengthscale: Tensor) -> Tensor:
        return torch.exp(-0.5 * ((points[:, None] - others) / lengthscale).square())

    kernel = points.new_zeros(len(points), len(others))
    for dimension in zip(points.unbind(1), others.unbind(1), lengthscales):
        kernel = kernel + checkpoint(of_dimension, *dimension, use_reentrant=False)
    return kernel


def two_sets_of_points(n: int, m: int, d: int) -> tuple[Any, ...]:
    points, others = (torch.randn(rows, d, requires_grad=True) for rows in (n, m))
    return points, others, (0.5 + torch.rand(d)).requires_grad_()


def crf_normaliser(emissions: Tensor, transitions: Tensor) -> Tensor:
    scores = emissions[0]
    for emission in emissions[1:]:
        scores = torch.logsumexp(scores[:, :, None] + transitions + emission[:, None], dim=1)
    return scores.logsumexp(1)


def crf_normaliser_mended(emissions: Tensor, transitions: Tensor) -> Tensor:
    def step(scores: Tensor, emission: Tensor) -> Tensor:
        return torch.logsumexp(scores[:, :, None] + transitions, dim=1) + emission

    scores, *others = emissions.unbind()
    for emission in others:
        scores = checkpoint(step, scores, emission, use_reentrant=False)
    return scores.logsumexp(1)


def tagged_sentences(steps: int, batch: int, tags: int) -> tuple[Any, ...]:
    return torch.randn(steps, batch, tags, requires_grad=True), torch.randn(tags, tags, requires_grad=True)


PROGRAMS = (
    Program(
        "additive_kernel",
        "https://github.com/cornellius-gp/gpytorch/issues/748",
        additive_kernel,
        two_sets_of_points,
        sizes={"n": 13_500, "m": 13_500, "d": 26},
        small={"n": 500, "m": 450, "d": 26},
        expected=(
            Expected(
                "return torch.exp(-0.5 * ((points[:, None] - others) / lengthscales).square()).sum(-1)",
                now=lambda s: 4 * s["n"] * s["m"] * s["d"],
                after=lambda s: 4 * s["n"] * s["m"],
            ),
        ),
        mended=additive_kernel_mended,
        backward=True,
        note="a sum of exponentials, which no contraction gives; the sum itself is wanted",
    ),
    Program(
        "crf_normaliser",
        "https://github.com/kmkurn/pytorch-crf/issues/35",
        crf_normaliser,
        tagged_sentences,
        sizes={"steps": 512, "batch": 64, "tags": 200},
        small={"steps": 50, "batch": 32, "tags": 64},
        expected=(
            Expected(
                "scores = torch.logsumexp(scores[:, :, None] + transitions + emission[:, None], dim=1)",
                now=lambda s: 4 * (s["steps"] - 1) * s["batch"] * (s["tags"] ** 2 + s["tags"]),
                after=lambda s: 4 * s["batch"] * s["tags"] ** 2,
            ),
        ),
        mended=crf_normaliser_mended,
        backward=True,
        note="autograd keeps the scores of all pairs of tags, and the new scores, for each step",
    ),
)
