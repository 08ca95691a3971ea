"""Losses over all pairs or triples of a batch, and over a large vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..program import Expected, Program

ROWS = 16  # a chunk of the mended loops


def nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    views = torch.cat([first, second])
    similarity = functional.cosine_similarity(views[:, None], views[None], dim=-1) / temperature
    similarity = similarity.masked_fill(torch.eye(len(views), dtype=torch.bool, device=views.device), -torch.inf)
    positives = torch.arange(len(views), device=views.device).roll(len(first))
    return functional.cross_entropy(similarity, positives)


def nt_xent_mended(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    views = functional.normalize(torch.cat([first, second]), dim=-1)
    similarity = views @ views.mT / temperature
    similarity = similarity.masked_fill(torch.eye(len(views), dtype=torch.bool, device=views.device), -torch.inf)
    positives = torch.arange(len(views), device=views.device).roll(len(first))
    return functional.cross_entropy(similarity, positives)


def two_views(n: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d, requires_grad=True), torch.randn(n, d, requires_grad=True), 0.5


def batch_all_triplets(embeddings: Tensor, labels: Tensor, margin: float) -> Tensor:
    distances = torch.cdist(embeddings, embeddings, p=1)
    same = labels[:, None] == labels
    excess = functional.relu(distances[:, :, None] - distances[:, None, :] + margin)
    excess = torch.where(same[:, :, None] & ~same[:, None, :], excess, 0)
    return excess.sum() / len(labels)


def batch_all_triplets_mended(embeddings: Tensor, labels: Tensor, margin: float) -> Tensor:
    def anchors_loss(distances: Tensor, same: Tensor) -> Tensor:
        gaps = distances[:, :, None] - distances[:, None] + margin
        return (functional.relu(gaps) * (same[:, :, None] & ~same[:, None])).sum()

    distances = torch.cdist(embeddings, embeddings, p=1)
    same = labels[:, None] == labels
    rows = zip(distances.split(ROWS), same.split(ROWS))
    losses = [checkpoint(anchors_loss, *row, use_reentrant=False) for row in rows]
    return torch.stack(losses).sum() / len(labels)


def labelled_embeddings(n: int, d: int, labels: int) -> tuple[Any, ...]:
    return torch.randn(n, d, requires_grad=True), torch.randint(labels, (n,)), 0.2


def language_model_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(hidden @ head.mT, labels)


def language_model_loss_mended(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    def tokens_loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(hidden @ head.mT, labels, reduction="sum")

    chunks = zip(hidden.split(ROWS), labels.split(ROWS))
    return torch.stack([checkpoint(tokens_loss, *chunk, use_reentrant=False) for chunk in chunks]).sum() / len(labels)


def tokens_and_head(tokens: int, vocabulary: int, d: int) -> tuple[Any, ...]:
    hidden, head = torch.randn(tokens, d, requires_grad=True), torch.randn(vocabulary, d) / d**0.5
    return hidden, head.requires_grad_(), torch.randint(vocabulary, (tokens,))


def transducer_joint(frames: Tensor, symbols: Tensor, head: Tensor) -> Tensor:
    joint = torch.tanh(frames[:, :, None] + symbols[:, None])
    return (joint @ head).log_softmax(-1)


def transducer_joint_mended(frames: Tensor, symbols: Tensor, head: Tensor) -> Tensor:
    def frames_logits(some: Tensor) -> Tensor:
        return (torch.tanh(some[:, :, None] + symbols[:, None]) @ head).log_softmax(-1)

    chunks = frames.split(4, dim=1)
    return torch.cat([checkpoint(frames_logits, chunk, use_reentrant=False) for chunk in chunks], dim=1)


def transducer_arguments(batch: int, frames: int, symbols: int, hidden: int, phones: int) -> tuple[Any, ...]:
    acoustic = torch.randn(batch, frames, hidden, requires_grad=True)
    linguistic = torch.randn(batch, symbols, hidden, requires_grad=True)
    return acoustic, linguistic, (torch.randn(hidden, phones) / hidden**0.5).requires_grad_()


def ranking_loss(scores: Tensor, relevance: Tensor) -> Tensor:
    better = relevance[:, None] > relevance
    return (functional.softplus(scores - scores[:, None]) * better).sum() / len(scores)


def ranking_loss_mended(scores: Tensor, relevance: Tensor) -> Tensor:
    def rows_loss(row_scores: Tensor, row_relevance: Tensor) -> Tensor:
        pairs = row_relevance[:, None] > relevance
        return (functional.softplus(scores - row_scores[:, None]) * pairs).sum()

    chunks = zip(scores.split(ROWS), relevance.split(ROWS))
    return torch.stack([checkpoint(rows_loss, *chunk, use_reentrant=False) for chunk in chunks]).sum() / len(scores)


def ranked_items(n: int) -> tuple[Any, ...]:
    return torch.randn(n, requires_grad=True), torch.randint(5, (n,))


def ensemble_crps(members: Tensor, truth: Tensor) -> Tensor:
    spread = (members[:, None] - members).abs().mean((0, 1))
    return (members - truth).abs().mean(0) - spread / 2


def ensemble_crps_mended(members: Tensor, truth: Tensor) -> Tensor:
    count = len(members)
    ranks = torch.arange(count, device=members.device)[:, None]
    weights = (2 * ranks - count + 1).to(members.dtype)
    spread = 2 * (weights * members.sort(0).values).sum(0) / count**2
    return (members - truth).abs().mean(0) - spread / 2


def forecast(members: int, places: int) -> tuple[Any, ...]:
    return torch.randn(members, places, requires_grad=True), torch.randn(places)


PROGRAMS = (
    Program(
        "nt_xent",
        "https://github.com/pytorch/pytorch/issues/104564",
        nt_xent,
        two_views,
        sizes={"n": 1_024, "d": 512},
        small={"n": 128, "d": 128},
        expected=(
            Expected(
                "functional.cosine_similarity(views[:, None], views[None]",
                now=lambda s: 4 * (2 * s["n"]) ** 2 * s["d"],
                after=lambda s: 4 * (2 * s["n"]) ** 2,
            ),
        ),
        mended=nt_xent_mended,
        backward=True,
    ),
    Program(
        "batch_all_triplets",
        "https://github.com/huggingface/sentence-transformers/pull/4029",
        batch_all_triplets,
        labelled_embeddings,
        sizes={"n": 1_024, "d": 768, "labels": 64},
        small={"n": 200, "d": 64, "labels": 16},
        expected=(
            Expected(
                "functional.relu(distances[:, :, None] - distances[:, None, :] + margin)",
                now=lambda s: 4 * s["n"] ** 3,
                after=lambda s: 4 * ROWS * s["n"] ** 2,
            ),
            Expected(
                "excess = torch.where(same[:, :, None]",
                now=lambda s: 4 * s["n"] ** 3,
                after=lambda s: 4 * ROWS * s["n"] ** 2,
            ),
        ),
        mended=batch_all_triplets_mended,
        backward=True,
    ),
    Program(
        "language_model_loss",
        "https://github.com/huggingface/trl/pull/5575",
        language_model_loss,
        tokens_and_head,
        sizes={"tokens": 131_072, "vocabulary": 151_936, "d": 4_096},
        small={"tokens": 1_024, "vocabulary": 16_000, "d": 16},
        expected=(
            Expected(
                "return functional.cross_entropy(hidden @ head.mT, labels)",
                now=lambda s: 4 * s["tokens"] * s["vocabulary"],
                after=lambda s: 4 * ROWS * s["vocabulary"],
            ),
        ),
        mended=language_model_loss_mended,
        backward=True,
    ),
    Program(
        "transducer_joint",
        "https://github.com/espnet/espnet/issues/2921",
        transducer_joint,
        transducer_arguments,
        sizes={"batch": 16, "frames": 471, "symbols": 120, "hidden": 640, "phones": 42},
        small={"batch": 4, "frames": 80, "symbols": 20, "hidden": 640, "phones": 42},
        expected=(
            Expected(
                "joint = torch.tanh(frames[:, :, None] + symbols[:, None])",
                now=lambda s: 4 * s["batch"] * s["frames"] * s["symbols"] * s["hidden"],
                after=lambda s: 4 * s["batch"] * s["symbols"] * max(s["frames"] * s["phones"], 4 * s["hidden"]),
            ),
        ),
        mended=transducer_joint_mended,
        backward=True,
    ),
    Program(
        "ranking_loss",
        "https://github.com/allegro/allRank/blob/master/allrank/models/losses/lambdaLoss.py",
        ranking_loss,
        ranked_items,
        sizes={"n": 50_000},
        small={"n": 2_400},
        expected=(
            Expected(
                "better = relevance[:, None] > relevance",
                now=lambda s: s["n"] ** 2,
                after=lambda s: 4 * ROWS * s["n"],
            ),
            Expected(
                "(functional.softplus(scores - scores[:, None]) * better)",
                now=lambda s: 4 * s["n"] ** 2,
                after=lambda s: 4 * ROWS * s["n"],
            ),
        ),
        mended=ranking_loss_mended,
        backward=True,
        note="the mask has a quarter of the bytes, and goes with the same fix",
    ),
    Program(
        "ensemble_crps",
        "https://github.com/alan-turing-institute/autocast/pull/333",
        ensemble_crps,
        forecast,
        sizes={"members": 50, "places": 1_000_000},
        small={"members": 40, "places": 10_000},
        expected=(
            Expected(
                "spread = (members[:, None] - members).abs()",
                now=lambda s: 4 * s["members"] ** 2 * s["places"],
                after=lambda s: 8 * s["members"] * s["places"],
            ),
        ),
        mended=ensemble_crps_mended,
        backward=True,
        note="the sorted values' indices are int64: 8 bytes for each value",
    ),
)
