"""Losses and similarities of all pairs of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..program import Expected, Program

ANCHORS = 8  # of a block of the mended triplets
TOKENS = 64  # of a block of the mended head


def similarities(one: Tensor, other: Tensor) -> Tensor:
    return functional.cosine_similarity(one[:, :, None], other.mT[None], dim=1)


def similarities_mended(one: Tensor, other: Tensor) -> Tensor:
    return functional.normalize(one, dim=1) @ functional.normalize(other, dim=1).mT


def contrastive(queries: Tensor, keys: Tensor) -> Tensor:
    logits = functional.cosine_similarity(queries.unsqueeze(1), keys.unsqueeze(0), dim=-1) / 0.07
    return functional.cross_entropy(logits, torch.arange(len(queries)))


def contrastive_mended(queries: Tensor, keys: Tensor) -> Tensor:
    logits = functional.normalize(queries, dim=-1) @ functional.normalize(keys, dim=-1).mT / 0.07
    return functional.cross_entropy(logits, torch.arange(len(queries)))


def sigmoid_loss(images: Tensor, texts: Tensor, chunk: int) -> Tensor:
    loss = -(images * texts).sum()
    for part in images.split(chunk):
        loss = loss + functional.softplus(part @ texts.mT).sum()
    return loss / len(images)


def sigmoid_loss_mended(images: Tensor, texts: Tensor, chunk: int) -> Tensor:
    def of_chunk(part: Tensor, texts: Tensor) -> Tensor:
        logits = part @ texts.mT
        return functional.softplus(logits).sum()

    loss = -(images * texts).sum()
    for part in images.split(chunk):
        loss = loss + checkpoint(of_chunk, part, texts, use_reentrant=False)
    return loss / len(images)


def triplets(embeddings: Tensor, same: Tensor) -> Tensor:
    d = 2 - 2 * embeddings @ embeddings.mT
    losses = functional.relu(d[:, :, None] - d[:, None] + 0.5) * (same[:, :, None] & ~same[:, None])
    return losses.sum() / (losses > 0).sum().clamp(min=1)


def triplets_mended(embeddings: Tensor, same: Tensor) -> Tensor:
    def of_anchors(d: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
        losses = functional.relu(d.unsqueeze(2) - d.unsqueeze(1) + 0.5) * (same.unsqueeze(2) & ~same.unsqueeze(1))
        return losses.sum(), (losses > 0).sum()

    d = 2 - 2 * embeddings @ embeddings.mT
    blocks = zip(d.split(ANCHORS), same.split(ANCHORS), strict=True)
    sums = [checkpoint(of_anchors, *block, use_reentrant=False) for block in blocks]
    return sum(loss for loss, _ in sums) / sum(count for _, count in sums).clamp(min=1)


def late_interaction(queries: Tensor, documents: Tensor) -> Tensor:
    scores = torch.einsum("qid,cjd->qcij", queries, documents)
    return scores.amax(3).sum(2)


def late_interaction_mended(queries: Tensor, documents: Tensor) -> Tensor:
    one_by_one = [(query @ documents.mT).amax(2).sum(1) for query in queries]
    return torch.stack(one_by_one)


def language_model_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = hidden @ weight.mT
    return functional.cross_entropy(logits, targets)


def language_model_loss_mended(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    def of_tokens(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(hidden, weight), targets, reduction="sum")

    blocks = zip(hidden.split(TOKENS), targets.split(TOKENS), strict=True)
    losses = [checkpoint(of_tokens, part, weight, target, use_reentrant=False) for part, target in blocks]
    return torch.stack(losses).sum() / len(targets)


def two_sets(n: int, m: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.randn(m, d)


def trained_pairs(n: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d, requires_grad=True), torch.randn(n, d, requires_grad=True)


def pairs_and_chunk(n: int, d: int, chunk: int) -> tuple[Any, ...]:
    images, texts = (functional.normalize(torch.randn(n, d), dim=1).requires_grad_() for _ in range(2))
    return images, texts, chunk


def labelled(n: int, d: int, classes: int) -> tuple[Any, ...]:
    labels = torch.arange(n) % classes
    same = (labels[:, None] == labels) & ~torch.eye(n, dtype=torch.bool)
    return functional.normalize(torch.randn(n, d), dim=1).requires_grad_(), same


def questions_and_pages(n: int, m: int, words: int, patches: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, words, d), torch.randn(m, patches, d)


def head_arguments(tokens: int, d: int, vocabulary: int) -> tuple[Any, ...]:
    weight = torch.randn(vocabulary, d) / d**0.5
    return torch.randn(tokens, d, requires_grad=True), weight.requires_grad_(), torch.arange(tokens) * 7 % vocabulary


PROGRAMS = (
    Program(
        "similarities",
        "https://github.com/pytorch/pytorch/pull/50196",
        similarities,
        two_sets,
        sizes={"n": 20_000, "m": 20_000, "d": 128},
        small={"n": 400, "m": 400, "d": 64},
        expected=(
            Expected(
                "functional.cosine_similarity(one[:, :, None], other.mT[None], dim=1)",
                now=lambda s: 4 * s["n"] * s["m"] * s["d"],
                after=lambda s: 4 * s["n"] * s["m"],
            ),
        ),
        mended=similarities_mended,
        note="the example that the documentation of CosineSimilarity gives for a matrix",
    ),
    Program(
        "contrastive",
        "https://github.com/pytorch/pytorch/issues/104564",
        contrastive,
        trained_pairs,
        sizes={"n": 8_192, "d": 512},
        small={"n": 320, "d": 64},
        expected=(
            Expected(
                "functional.cosine_similarity(queries.unsqueeze(1), keys.unsqueeze(0), dim=-1)",
                now=lambda s: 4 * s["n"] ** 2 * s["d"],
                after=lambda s: 4 * s["n"] ** 2,
            ),
        ),
        mended=contrastive_mended,
        backward=True,
    ),
    Program(
        "sigmoid_loss",
        "https://github.com/mlfoundations/open_clip/pull/1145",
        sigmoid_loss,
        pairs_and_chunk,
        sizes={"n": 32_768, "d": 768, "chunk": 512},
        small={"n": 2_560, "d": 16, "chunk": 128},
        expected=(
            Expected(
                "functional.softplus(part @ texts.mT)",
                now=lambda s: 4 * s["n"] ** 2,
                after=lambda s: 4 * s["n"] * s["chunk"],
            ),
        ),
        mended=sigmoid_loss_mended,
        backward=True,
        note="autograd keeps the logits of every chunk; mended in open_clip's pull request 1214",
    ),
    Program(
        "triplets",
        "https://github.com/huggingface/sentence-transformers/pull/4029",
        triplets,
        labelled,
        sizes={"n": 2_048, "d": 768, "classes": 64},
        small={"n": 208, "d": 16, "classes": 8},
        expected=(
            Expected(
                "functional.relu(d[:, :, None] - d[:, None] + 0.5)",
                now=lambda s: 4 * s["n"] ** 3,
                after=lambda s: 4 * ANCHORS * s["n"] ** 2,
            ),
        ),
        mended=triplets_mended,
        backward=True,
    ),
    Program(
        "late_interaction",
        "https://github.com/illuin-tech/colpali/pull/412",
        late_interaction,
        questions_and_pages,
        sizes={"n": 128, "m": 128, "words": 128, "patches": 1_024, "d": 128},
        small={"n": 24, "m": 24, "words": 64, "patches": 256, "d": 16},
        expected=(
            Expected(
                '"qid,cjd->qcij"',
                now=lambda s: 4 * s["n"] * s["m"] * s["words"] * s["patches"],
                after=lambda s: 4 * s["m"] * s["words"] * s["patches"],
            ),
        ),
        mended=late_interaction_mended,
    ),
    Program(
        "language_model_loss",
        "https://github.com/huggingface/transformers/issues/30860",
        language_model_loss,
        head_arguments,
        sizes={"tokens": 8_192, "d": 4_096, "vocabulary": 128_256},
        small={"tokens": 1_024, "d": 32, "vocabulary": 8_000},
        expected=(
            Expected(
                "hidden @ weight.mT",
                now=lambda s: 4 * s["tokens"] * s["vocabulary"],
                after=lambda s: 4 * TOKENS * s["vocabulary"],
            ),
            Expected(
                "functional.cross_entropy(logits, targets)",
                now=lambda s: 4 * s["tokens"] * s["vocabulary"],
                after=lambda s: 4 * TOKENS * s["vocabulary"],
            ),
        ),
        mended=language_model_loss_mended,
        backward=True,
    ),
)
