"""Attention that writes its scores down: windows of an image, rows of an alignment, pairs of two modalities.

Written later than the modules of scores and losses, by somebody who had not seen a rule of the lint either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..program import Expected, Program

CHANNELS = 2  # a chunk of the mended windows
SEQUENCES = 2  # a chunk of the mended rows


def windows_of(features: Tensor, window: int) -> Tensor:
    """A view of the padded features: each pixel with the pixels around it."""
    return functional.pad(features, [window // 2] * 4).unfold(2, window, 1).unfold(3, window, 1)


def local_self_attention(queries: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    weights = (queries[..., None, None] * windows_of(keys, window)).flatten(-2).softmax(-1)
    return (weights * windows_of(values, window).flatten(-2)).sum(-1)


def local_self_attention_mended(queries: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        products = queries[..., None, None] * windows_of(keys, window)
        return (products.flatten(-2).softmax(-1) * windows_of(values, window).flatten(-2)).sum(-1)

    chunks = zip(*(one.split(CHANNELS, dim=1) for one in (queries, keys, values)))
    return torch.cat([checkpoint(attend, *chunk, use_reentrant=False) for chunk in chunks], dim=1)


def feature_maps(batch: int, channels: int, side: int, window: int) -> tuple[Any, ...]:
    return *(torch.randn(batch, channels, side, side, requires_grad=True) for _ in range(3)), window


def row_attention(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    logits = queries @ keys.mT + bias
    return torch.softmax(logits, dim=-1) @ values


def row_attention_mended(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return (queries @ keys.mT + bias).softmax(-1) @ values

    chunks = zip(*(one.split(SEQUENCES) for one in (queries, keys, values)))
    return torch.cat([checkpoint(attend, *chunk, use_reentrant=False) for chunk in chunks])


def aligned_sequences(sequences: int, heads: int, length: int, d: int) -> tuple[Any, ...]:
    queries, keys = ((torch.randn(sequences, heads, length, d) / d**0.25).requires_grad_() for _ in range(2))
    values = torch.randn(sequences, heads, length, d, requires_grad=True)
    return queries, keys, values, torch.randn(heads, length, length, requires_grad=True)


def bilinear_attention(images: Tensor, questions: Tensor, glimpses: Tensor) -> Tensor:
    pairs = torch.matmul(images.mT[..., None], questions.mT[:, :, None])
    return (pairs.movedim(1, -1) @ glimpses.mT).movedim(-1, 1)


def bilinear_attention_mended(images: Tensor, questions: Tensor, glimpses: Tensor) -> Tensor:
    def logits(glimpse: Tensor) -> Tensor:
        return (images * glimpse) @ questions.mT

    return torch.stack([checkpoint(logits, glimpse, use_reentrant=False) for glimpse in glimpses], dim=1)


def regions_and_words(batch: int, regions: int, words: int, d: int, glimpses: int) -> tuple[Any, ...]:
    images = torch.randn(batch, regions, d, requires_grad=True)
    return images, torch.randn(batch, words, d, requires_grad=True), torch.randn(glimpses, d, requires_grad=True)


PROGRAMS = (
    Program(
        "local_self_attention",
        "https://github.com/leaderj1001/Stand-Alone-Self-Attention/issues/6",
        local_self_attention,
        feature_maps,
        sizes={"batch": 32, "channels": 64, "side": 56, "window": 7},
        small={"batch": 2, "channels": 32, "side": 48, "window": 7},
        expected=tuple(
            Expected(
                line,
                now=lambda s: 4 * s["batch"] * s["channels"] * s["side"] ** 2 * s["window"] ** 2,
                after=lambda s: 4 * s["batch"] * s["side"] ** 2 * max(CHANNELS * s["window"] ** 2, s["channels"]),
            )
            for line in (
                "weights = (queries[..., None, None] * windows_of(keys, window))",
                "return (weights * windows_of(values, window).flatten(-2)).sum(-1)",
            )
        ),
        mended=local_self_attention_mended,
        backward=True,
        note="a score for each channel of each pixel of a window, and a copy of the windows of the values",
    ),
    Program(
        "row_attention",
        "https://github.com/aqlaboratory/openfold/issues/64",
        row_attention,
        aligned_sequences,
        sizes={"sequences": 5_120, "heads": 8, "length": 384, "d": 8},
        small={"sequences": 20, "heads": 4, "length": 256, "d": 8},
        expected=tuple(
            Expected(
                line,
                now=lambda s: 4 * s["sequences"] * s["heads"] * s["length"] ** 2,
                after=lambda s: 4 * s["heads"] * s["length"] * max(SEQUENCES * s["length"], s["sequences"] * s["d"]),
            )
            for line in ("logits = queries @ keys.mT + bias", "return torch.softmax(logits, dim=-1) @ values")
        ),
        mended=row_attention_mended,
        backward=True,
        note="24 GB for one tensor in the source; the bias of pairs is shared by all sequences",
    ),
    Program(
        "bilinear_attention",
        "https://github.com/jnhwkim/ban-vqa/pull/23",
        bilinear_attention,
        regions_and_words,
        sizes={"batch": 256, "regions": 36, "words": 14, "d": 3_840, "glimpses": 8},
        small={"batch": 16, "regions": 36, "words": 14, "d": 1_024, "glimpses": 4},
        expected=tuple(
            Expected(
                line,
                now=lambda s: 4 * s["batch"] * s["d"] * s["regions"] * s["words"],
                after=lambda s: 4 * s["batch"] * s["regions"] * max(s["d"], s["glimpses"] * s["words"]),
            )
            for line in (
                "pairs = torch.matmul(images.mT[..., None], questions.mT[:, :, None])",
                "return (pairs.movedim(1, -1) @ glimpses.mT)",
            )
        ),
        mended=bilinear_attention_mended,
        backward=True,
        note="the second product copies the pairs, to have the channels last",
    ),
)
