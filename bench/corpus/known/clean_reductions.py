"""Clean programs: broadcasts that a reduction takes away at once, and that are hardly larger than what is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..program import Program


def masked_mean(embeddings: Tensor, mask: Tensor) -> Tensor:
    weights = mask.unsqueeze(-1).expand(embeddings.shape).to(embeddings.dtype)
    return (embeddings * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def words_and_mask(batch: int, length: int, d: int) -> tuple[Any, ...]:
    return torch.randn(batch, length, d, requires_grad=True), torch.rand(batch, length) > 0.2


def attention_pool(words: Tensor, query: Tensor) -> Tensor:
    weights = (words * query).sum(-1).softmax(-1)
    return (words * weights[..., None]).sum(1)


def words_and_query(batch: int, length: int, d: int) -> tuple[Any, ...]:
    return torch.randn(batch, length, d, requires_grad=True), torch.randn(d, requires_grad=True)


def nearer_of_two(points: Tensor, centres: Tensor) -> Tensor:
    return (points[:, None] - centres).pow(2).sum(-1).argmin(1)


def points_and_centres(n: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.randn(2, d)


def search_in_chunks(queries: Tensor, corpus: Tensor, chunk: int) -> Tensor:
    best = [(queries @ part.mT).amax(1) for part in corpus.split(chunk)]
    return torch.stack(best).amax(0)


def search(n: int, m: int, d: int, chunk: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.randn(m, d), chunk


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key = functional.elu(query) + 1, functional.elu(key) + 1
    weighted = torch.einsum("bhsd,bhse->bhde", key, value)
    total = torch.einsum("bhld,bhd->bhl", query, key.sum(2))
    return torch.einsum("bhld,bhde->bhle", query, weighted) / total[..., None]


def heads(batch: int, h: int, length: int, d: int) -> tuple[Any, ...]:
    return tuple(torch.randn(batch, h, length, d, requires_grad=True) for _ in range(3))


def normaliser(scores: Tensor) -> Tensor:
    return scores.logsumexp(-1).mean()


def given_scores(n: int, m: int) -> tuple[Any, ...]:
    return (torch.randn(n, m, requires_grad=True),)


def differences_in_time(x: Tensor) -> Tensor:
    return (x[:, 1:] - x[:, :-1]).abs().mean((0, 2))


def series(batch: int, times: int, d: int) -> tuple[Any, ...]:
    return (torch.randn(batch, times, d, requires_grad=True),)


def mixed_experts(x: Tensor, experts: Tensor, gate: Tensor) -> Tensor:
    outputs = torch.einsum("nd,kde->nke", x, experts)
    return (outputs * (x @ gate).softmax(-1)[..., None]).sum(1)


def few_experts(n: int, d: int, e: int) -> tuple[Any, ...]:
    parameters = torch.randn(2, d, e) / d**0.5, torch.randn(d, 2)
    return torch.randn(n, d), *(one.requires_grad_() for one in parameters)


PROGRAMS = (
    Program(
        "masked_mean",
        "https://www.sbert.net/examples/sentence_transformer/applications/computing-embeddings/README.html",
        masked_mean,
        words_and_mask,
        sizes={"batch": 256, "length": 512, "d": 768},
        small={"batch": 32, "length": 256, "d": 512},
        backward=True,
        note="the product is as large as the embeddings",
    ),
    Program(
        "attention_pool",
        "https://github.com/sgrvinod/a-PyTorch-Tutorial-to-Text-Classification",
        attention_pool,
        words_and_query,
        sizes={"batch": 256, "length": 512, "d": 768},
        small={"batch": 32, "length": 256, "d": 512},
        backward=True,
        note="both products are as large as the words",
    ),
    Program(
        "nearer_of_two",
        "https://github.com/subhadarship/kmeans_pytorch/blob/master/kmeans_pytorch/__init__.py",
        nearer_of_two,
        points_and_centres,
        sizes={"n": 1_000_000, "d": 128},
        small={"n": 32_000, "d": 64},
        note="k-means with two centres: the differences are twice the points",
    ),
    Program(
        "search_in_chunks",
        "https://github.com/huggingface/sentence-transformers/blob/master/sentence_transformers/util.py",
        search_in_chunks,
        search,
        sizes={"n": 1_000, "m": 10_000_000, "d": 384, "chunk": 50_000},
        small={"n": 256, "m": 80_000, "d": 64, "chunk": 8_000},
        note="no gradients: a chunk's scores are gone before those of the next",
    ),
    Program(
        "linear_attention",
        "https://github.com/idiap/fast-transformers/blob/master/fast_transformers/attention/linear_attention.py",
        linear_attention,
        heads,
        sizes={"batch": 8, "h": 16, "length": 16_384, "d": 64},
        small={"batch": 4, "h": 4, "length": 2_048, "d": 32},
        backward=True,
        note="keys and values are contracted first, so that no pair of positions exists",
    ),
    Program(
        "normaliser",
        "https://docs.pytorch.org/docs/stable/generated/torch.logsumexp.html",
        normaliser,
        given_scores,
        sizes={"n": 65_536, "m": 32_768},
        small={"n": 2_048, "m": 2_048},
        backward=True,
        note="what is reduced is given",
    ),
    Program(
        "differences_in_time",
        "https://docs.pytorch.org/docs/stable/generated/torch.diff.html",
        differences_in_time,
        series,
        sizes={"batch": 64, "times": 100_000, "d": 64},
        small={"batch": 8, "times": 8_192, "d": 64},
        backward=True,
        note="neighbours, not pairs",
    ),
    Program(
        "mixed_experts",
        "https://github.com/davidmrau/mixture-of-experts",
        mixed_experts,
        few_experts,
        sizes={"n": 65_536, "d": 1_024, "e": 1_024},
        small={"n": 8_192, "d": 256, "e": 256},
        backward=True,
        note="two experts: their outputs are twice the input",
    ),
)
