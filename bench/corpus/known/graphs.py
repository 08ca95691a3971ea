"""Layers that join every pair of two sequences or of a graph's nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..program import Expected, Program

ROWS = 16  # of a block of the mended programs


def graph_attention(left: Tensor, right: Tensor, attention: Tensor, edges: Tensor) -> Tensor:
    scores = (functional.leaky_relu(left[:, None] + right, 0.2) * attention).sum(-1)
    weights = scores.masked_fill(~edges[..., None], -1e9).softmax(1)
    return torch.einsum("ijh,jhd->ihd", weights, right)


def graph_attention_mended(left: Tensor, right: Tensor, attention: Tensor, edges: Tensor) -> Tensor:
    def of_rows(rows: Tensor, right: Tensor, attention: Tensor) -> Tensor:
        sums = rows.unsqueeze(1) + right
        return (functional.leaky_relu(sums, 0.2) * attention).sum(-1)

    blocks = [checkpoint(of_rows, rows, right, attention, use_reentrant=False) for rows in left.split(ROWS)]
    weights = torch.cat(blocks).masked_fill(~edges[..., None], -1e9).softmax(1)
    return torch.einsum("ijh,jhd->ihd", weights, right)


def graph(n: int, h: int, d: int) -> tuple[Any, ...]:
    nodes = [torch.randn(n, h, d, requires_grad=True) for _ in range(2)]
    return *nodes, torch.randn(h, d, requires_grad=True), torch.rand(n, n) > 0.5


def relations(objects: Tensor, first: Tensor, second: Tensor) -> Tensor:
    n = len(objects)
    pairs = torch.cat([objects[:, None].expand(-1, n, -1), objects.expand(n, -1, -1)], -1)
    hidden = functional.relu(pairs @ first)
    return (hidden @ second).sum((0, 1))


def relations_mended(objects: Tensor, first: Tensor, second: Tensor) -> Tensor:
    def of_rows(rows: Tensor, others: Tensor) -> Tensor:
        return functional.relu(rows[:, None] + others).sum((0, 1))

    one, other = (objects @ half for half in first.chunk(2))
    sums = [checkpoint(of_rows, rows, other, use_reentrant=False) for rows in one.split(ROWS)]
    return torch.stack(sums).sum(0) @ second


def scene(n: int, d: int, h: int) -> tuple[Any, ...]:
    first, second = torch.randn(2 * d, h) / d, torch.randn(h, 8) / h
    return tuple(one.requires_grad_() for one in (torch.randn(n, d), first, second))


def transducer(sounds: Tensor, words: Tensor, vocabulary: Tensor) -> Tensor:
    joint = torch.tanh(sounds[:, :, None] + words[:, None])
    return (joint @ vocabulary.mT).logsumexp(-1)


def transducer_mended(sounds: Tensor, words: Tensor, vocabulary: Tensor) -> Tensor:
    def of_times(part: Tensor, words: Tensor, vocabulary: Tensor) -> Tensor:
        joint = torch.tanh(part.unsqueeze(2) + words.unsqueeze(1))
        return functional.linear(joint, vocabulary).logsumexp(-1)

    parts = [checkpoint(of_times, part, words, vocabulary, use_reentrant=False) for part in sounds.split(ROWS, 1)]
    return torch.cat(parts, 1)


def speech(n: int, times: int, words: int, d: int, vocabulary: int) -> tuple[Any, ...]:
    shapes = (n, times, d), (n, words, d), (vocabulary, d)
    return tuple(torch.randn(shape).requires_grad_() for shape in shapes)


PROGRAMS = (
    Program(
        "graph_attention",
        "https://github.com/pyg-team/pytorch_geometric/pull/10755",
        graph_attention,
        graph,
        sizes={"n": 4_096, "h": 8, "d": 64},
        small={"n": 256, "h": 4, "d": 32},
        expected=(
            Expected(
                "functional.leaky_relu(left[:, None] + right, 0.2)",
                now=lambda s: 4 * s["n"] ** 2 * s["h"] * s["d"],
                after=lambda s: 4 * max(ROWS * s["d"], s["n"]) * s["n"] * s["h"],
            ),
        ),
        mended=graph_attention_mended,
        backward=True,
    ),
    Program(
        "relations",
        "https://github.com/pytorch/pytorch/pull/2105",
        relations,
        scene,
        sizes={"n": 1_024, "d": 256, "h": 256},
        small={"n": 256, "d": 64, "h": 96},
        expected=(
            Expected(
                "torch.cat([objects[:, None].expand(-1, n, -1), objects.expand(n, -1, -1)], -1)",
                now=lambda s: 4 * s["n"] ** 2 * 2 * s["d"],
                after=lambda s: 4 * s["n"] * s["h"],
            ),
            Expected(
                "functional.relu(pairs @ first)",
                now=lambda s: 4 * s["n"] ** 2 * s["h"],
                after=lambda s: 4 * ROWS * s["n"] * s["h"],
            ),
        ),
        mended=relations_mended,
        backward=True,
    ),
    Program(
        "transducer",
        "https://github.com/espnet/espnet/pull/3081",
        transducer,
        speech,
        sizes={"n": 16, "times": 471, "words": 20, "d": 512, "vocabulary": 4_233},
        small={"n": 2, "times": 128, "words": 16, "d": 64, "vocabulary": 2_000},
        expected=(
            Expected(
                "(joint @ vocabulary.mT)",
                now=lambda s: 4 * s["n"] * s["times"] * s["words"] * s["vocabulary"],
                after=lambda s: 4 * s["n"] * ROWS * s["words"] * s["vocabulary"],
            ),
        ),
        mended=transducer_mended,
        backward=True,
        note="the tensor of 2.5 GB that espnet's issue 2921 lists; normalisers of the joint network alone",
    ),
)
