"""Loops, look-ups and metrics that look like those of the other modules, and whose large tensors are right.

Written later than the modules of scores and losses, by somebody who had not seen a rule of the lint either.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..program import Program


def messages_in_chunks(nodes: Tensor, sources: Tensor, targets: Tensor, weights: Tensor, chunk: int) -> Tensor:
    sums = torch.zeros_like(nodes)
    for some, others, factors in zip(*(one.split(chunk) for one in (sources, targets, weights))):
        sums.index_add_(0, others, nodes[some] * factors[:, None])
    return sums


def weighted_edges(nodes: int, edges: int, d: int, chunk: int) -> tuple[Any, ...]:
    sources, targets = (torch.randint(nodes, (edges,)) for _ in range(2))
    return torch.randn(nodes, d), sources, targets, torch.rand(edges), chunk


def moving_averages(average: nn.Module, model: nn.Module, decay: float) -> tuple[Tensor, ...]:
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters()):
            old.lerp_(new, 1 - decay)
    return tuple(average.parameters())


def model_and_average(layers: int, d: int) -> tuple[Any, ...]:
    average, model = (nn.Sequential(*(nn.Linear(d, d) for _ in range(layers))) for _ in range(2))
    return average, model, 0.999


def denoising_loop(model: nn.Module, latents: Tensor, alphas: Tensor) -> Tensor:
    with torch.no_grad():
        for now, earlier in pairwise(alphas):
            noise = model(latents)
            images = (latents - (1 - now).sqrt() * noise) / now.sqrt()
            latents = earlier.sqrt() * images + (1 - earlier).sqrt() * noise
    return latents


def model_and_latents(batch: int, channels: int, side: int, steps: int) -> tuple[Any, ...]:
    first, second = (
        nn.Conv2d(narrow, wide, 3, padding=1) for narrow, wide in ((channels, 4 * channels), (4 * channels, channels))
    )
    model = nn.Sequential(first, nn.SiLU(), second)
    return model, torch.randn(batch, channels, side, side), torch.linspace(0.01, 0.999, steps + 1)


def mel_spectrogram(signals: Tensor, window: Tensor, filters: Tensor) -> Tensor:
    n = len(window)
    spectra = torch.stft(signals, n, n // 4, window=window, return_complex=True)
    return (filters @ spectra.abs().square()).clamp(min=1e-5).log()


def signals_and_filters(batch: int, length: int, n: int, mels: int) -> tuple[Any, ...]:
    return torch.randn(batch, length), torch.hann_window(n), torch.rand(mels, n // 2 + 1)


def negative_sampling(inner: Tensor, outer: Tensor, centres: Tensor, contexts: Tensor, negatives: Tensor) -> Tensor:
    words = functional.embedding(centres, inner)
    positive = (words * functional.embedding(contexts, outer)).sum(-1)
    negative = torch.bmm(functional.embedding(negatives, outer), words[:, :, None]).squeeze(2)
    return functional.softplus(-positive) + functional.softplus(negative).sum(1)


def tables_and_words(vocabulary: int, d: int, batch: int, negatives: int) -> tuple[Any, ...]:
    inner, outer = ((torch.randn(vocabulary, d) / d).requires_grad_() for _ in range(2))
    centres, contexts = (torch.randint(vocabulary, (batch,)) for _ in range(2))
    return inner, outer, centres, contexts, torch.randint(vocabulary, (batch, negatives))


def calibration_error(confidences: Tensor, correct: Tensor, bins: int) -> Tensor:
    edges = torch.linspace(0, 1, bins + 1, device=confidences.device)
    places = torch.bucketize(confidences, edges[1:-1])
    sums = confidences.new_zeros(2, bins)
    sums[0].index_add_(0, places, confidences)
    sums[1].index_add_(0, places, correct)
    return (sums[0] - sums[1]).abs().sum() / len(confidences)


def predictions(n: int, bins: int) -> tuple[Any, ...]:
    confidences = torch.rand(n)
    return confidences, (torch.rand(n) < confidences).to(torch.float32), bins


def ray_samples(bins: Tensor, weights: Tensor, uniform: Tensor) -> Tensor:
    """Samples along each ray by the inverse of its distribution function, which is linear between the bins."""
    shares = (weights + 1e-5) / (weights + 1e-5).sum(-1, keepdim=True)
    distribution = functional.pad(shares.cumsum(-1), (1, 0))
    above = torch.searchsorted(distribution, uniform, right=True).clamp(max=bins.shape[1] - 1)
    places = torch.stack([(above - 1).clamp(min=0), above], dim=-1)
    shape = (*places.shape[:2], bins.shape[1])
    low, high = distribution[:, None].expand(shape).gather(2, places).unbind(-1)
    left, right = bins[:, None].expand(shape).gather(2, places).unbind(-1)
    return left + (uniform - low) / (high - low).clamp(min=1e-5) * (right - left)


def rays_and_bins(rays: int, bins: int, samples: int) -> tuple[Any, ...]:
    edges = torch.rand(rays, bins).sort(-1).values
    return edges, torch.rand(rays, bins - 1), torch.rand(rays, samples)


PROGRAMS = (
    Program(
        "messages_in_chunks",
        "https://pytorch-geometric.readthedocs.io/en/latest/advanced/sparse_tensor.html",
        messages_in_chunks,
        weighted_edges,
        sizes={"nodes": 2_449_029, "edges": 61_859_140, "d": 100, "chunk": 16_384},
        small={"nodes": 50_000, "edges": 400_000, "d": 64, "chunk": 4_096},
        note="the messages of a chunk are added in place, and nothing is kept of them",
    ),
    Program(
        "moving_averages",
        "https://github.com/huggingface/pytorch-image-models/blob/main/timm/utils/model_ema.py",
        moving_averages,
        model_and_average,
        sizes={"layers": 48, "d": 4_096},
        small={"layers": 8, "d": 700},
        note="two sets of large weights, and one of them changes in place",
    ),
    Program(
        "denoising_loop",
        "https://github.com/huggingface/diffusers/blob/main/src/diffusers/schedulers/scheduling_ddim.py",
        denoising_loop,
        model_and_latents,
        sizes={"batch": 16, "channels": 16, "side": 128, "steps": 50},
        small={"batch": 4, "channels": 16, "side": 96, "steps": 6},
        note="a loop over steps that keeps the last latents alone",
    ),
    Program(
        "mel_spectrogram",
        "https://docs.pytorch.org/audio/stable/generated/torchaudio.transforms.MelSpectrogram.html",
        mel_spectrogram,
        signals_and_filters,
        sizes={"batch": 32, "length": 480_000, "n": 1_024, "mels": 128},
        small={"batch": 4, "length": 300_000, "n": 1_024, "mels": 128},
        note="frames that overlap by three quarters: four times the signal",
    ),
    Program(
        "negative_sampling",
        "https://github.com/theeluwin/pytorch-sgns/blob/master/model.py",
        negative_sampling,
        tables_and_words,
        sizes={"vocabulary": 1_000_000, "d": 300, "batch": 65_536, "negatives": 5},
        small={"vocabulary": 20_000, "d": 128, "batch": 8_192, "negatives": 5},
        backward=True,
        note="five words for each word; both tables have dense gradients",
    ),
    Program(
        "calibration_error",
        "https://github.com/Lightning-AI/torchmetrics/blob/master/src/torchmetrics/functional/classification/calibration_error.py",
        calibration_error,
        predictions,
        sizes={"n": 100_000_000, "bins": 15},
        small={"n": 1_500_000, "bins": 15},
        note="each prediction finds its bin, and no mask of all bins is made",
    ),
    Program(
        "ray_samples",
        "https://github.com/yenchenlin/nerf-pytorch/blob/master/run_nerf_helpers.py",
        ray_samples,
        rays_and_bins,
        sizes={"rays": 65_536, "bins": 64, "samples": 128},
        small={"rays": 8_192, "bins": 64, "samples": 128},
        note="gather reads from a view that is expanded to all samples, and is never written down",
    ),
)
