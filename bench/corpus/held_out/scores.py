"""Scores of all pairs of positions: attention, matching and state spaces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..program import Expected, Program

ROWS = 32  # a chunk of the mended loops


def graph_attention(nodes: Tensor, source: Tensor, target: Tensor, direction: Tensor) -> Tensor:
    left, right = nodes @ source, nodes @ target
    return torch.softmax(functional.leaky_relu(left[:, None] + right[None], 0.2) @ direction, dim=1) @ right


def graph_attention_mended(nodes: Tensor, source: Tensor, target: Tensor, direction: Tensor) -> Tensor:
    def attend(left: Tensor, right: Tensor) -> Tensor:
        return torch.softmax(functional.leaky_relu(left[:, None] + right, 0.2) @ direction, dim=1) @ right

    left, right = nodes @ source, nodes @ target
    return torch.cat([checkpoint(attend, chunk, right, use_reentrant=False) for chunk in left.split(ROWS)])


def graph(n: int, d: int) -> tuple[Any, ...]:
    nodes = torch.randn(n, d, requires_grad=True)
    return nodes, *((torch.randn(*shape) / d**0.5).requires_grad_() for shape in ((d, d), (d, d), (d,)))


def relative_keys(queries: Tensor, keys: Tensor, table: Tensor, distances: Tensor) -> Tensor:
    relative = torch.einsum("bhid,ijd->bhij", queries, table[distances])
    return queries @ keys.mT + relative


def relative_keys_mended(queries: Tensor, keys: Tensor, table: Tensor, distances: Tensor) -> Tensor:
    products = queries @ table.mT
    relative = products.gather(-1, distances.expand(*queries.shape[:-1], len(distances)))
    return queries @ keys.mT + relative


def relative_positions(batch: int, heads: int, length: int, d: int) -> tuple[Any, ...]:
    queries, keys = ((torch.randn(batch, heads, length, d) / d**0.5).requires_grad_() for _ in range(2))
    positions = torch.arange(length)
    distances = positions[:, None] - positions + length - 1
    return queries, keys, torch.randn(2 * length - 1, d, requires_grad=True), distances


def late_interaction(queries: Tensor, passages: Tensor) -> Tensor:
    similarity = torch.einsum("qnd,pmd->qpnm", queries, passages)
    return similarity.amax(-1).sum(-1)


def late_interaction_mended(queries: Tensor, passages: Tensor) -> Tensor:
    def one_query(query: Tensor) -> Tensor:
        return (query @ passages.mT).amax(-1).sum(-1)

    return torch.stack([checkpoint(one_query, query, use_reentrant=False) for query in queries])


def queries_and_passages(queries: int, passages: int, short: int, long: int, d: int) -> tuple[Any, ...]:
    return torch.randn(queries, short, d, requires_grad=True), torch.randn(passages, long, d, requires_grad=True)


def correlation_volume(left: Tensor, right: Tensor, disparities: int) -> Tensor:
    shifted = functional.pad(right, (disparities - 1, 0)).unfold(-1, disparities, 1)
    return (left[..., None] * shifted).mean(0)


def correlation_volume_mended(left: Tensor, right: Tensor, disparities: int) -> Tensor:
    padded, width = functional.pad(right, (disparities - 1, 0)), left.shape[-1]
    return torch.stack([(left * padded[..., s : s + width]).mean(0) for s in range(disparities)], dim=-1)


def stereo_features(channels: int, height: int, width: int, disparities: int) -> tuple[Any, ...]:
    left, right = (torch.randn(channels, height, width, requires_grad=True) for _ in range(2))
    return left, right, disparities


def span_maxima(hidden: Tensor, spans: Tensor) -> Tensor:
    return (hidden[:, None] + torch.where(spans, 0.0, -torch.inf)[..., None]).amax(2)


def span_maxima_mended(hidden: Tensor, spans: Tensor) -> Tensor:
    def maxima(some: Tensor) -> Tensor:
        return hidden[:, None].masked_fill(~some[..., None], -torch.inf).amax(2)

    return torch.cat([checkpoint(maxima, some, use_reentrant=False) for some in spans.split(4, dim=1)], dim=1)


def sentences_and_spans(batch: int, spans: int, length: int, d: int) -> tuple[Any, ...]:
    first = torch.randint(length - 10, (batch, spans, 1))
    positions = torch.arange(length)
    inside = (positions >= first) & (positions < first + torch.randint(1, 10, (batch, spans, 1)))
    return torch.randn(batch, length, d, requires_grad=True), inside


def attention_of_chunks(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    outputs = []
    for chunk in queries.split(ROWS, dim=1):
        outputs.append(torch.softmax(chunk @ keys.mT, dim=-1) @ values)
    return torch.cat(outputs, dim=1)


def attention_of_chunks_mended(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    def attend(some: Tensor) -> Tensor:
        return torch.softmax(some @ keys.mT, dim=-1).matmul(values)

    return torch.cat([checkpoint(attend, some, use_reentrant=False) for some in queries.split(ROWS, dim=1)], dim=1)


def queries_keys_values(heads: int, length: int, d: int) -> tuple[Any, ...]:
    queries = (torch.randn(heads, length, d) / d**0.5).requires_grad_()
    return queries, *(torch.randn(heads, length, d, requires_grad=True) for _ in range(2))


def chunk_scan(readouts: Tensor, states: Tensor, values: Tensor, decay: Tensor) -> Tensor:
    """Within each chunk of a state space layer; b c l s h stand for batch, chunk, to, from and head."""
    scores = (readouts[:, :, :, None] * states[:, :, None]).sum(-1) * decay
    return (scores[..., None] * values[:, :, None]).sum(3)


def chunk_scan_mended(readouts: Tensor, states: Tensor, values: Tensor, decay: Tensor) -> Tensor:
    scores = torch.einsum("bclhn,bcshn->bclsh", readouts, states) * decay
    return torch.einsum("bclsh,bcshp->bclhp", scores, values)


def state_space(batch: int, chunks: int, length: int, heads: int, state: int, d: int) -> tuple[Any, ...]:
    sizes = (batch, chunks, length, heads)
    decay = torch.rand(batch, chunks, length, length, heads).requires_grad_()
    return *(torch.randn(*sizes, last, requires_grad=True) for last in (state, state, d)), decay


PROGRAMS = (
    Program(
        "graph_attention",
        "https://github.com/diegoantognini/pyGAT/pull/63",
        graph_attention,
        graph,
        sizes={"n": 20_000, "d": 64},
        small={"n": 400, "d": 64},
        expected=(
            Expected(
                "functional.leaky_relu(left[:, None] + right[None], 0.2)",
                now=lambda s: 4 * s["n"] ** 2 * s["d"],
                after=lambda s: 4 * ROWS * s["n"] * s["d"],
            ),
        ),
        mended=graph_attention_mended,
        backward=True,
    ),
    Program(
        "relative_keys",
        "https://github.com/entity-neural-network/incubator/issues/143",
        relative_keys,
        relative_positions,
        sizes={"batch": 1, "heads": 8, "length": 4_096, "d": 128},
        small={"batch": 1, "heads": 2, "length": 256, "d": 128},
        expected=(
            Expected(
                'relative = torch.einsum("bhid,ijd->bhij", queries, table[distances])',
                now=lambda s: 4 * s["length"] ** 2 * s["d"],
                after=lambda s: 4 * s["batch"] * s["heads"] * s["length"] * (2 * s["length"] - 1),
            ),
        ),
        mended=relative_keys_mended,
        backward=True,
    ),
    Program(
        "late_interaction",
        "https://github.com/NVIDIA-NeMo/Automodel/pull/2283",
        late_interaction,
        queries_and_passages,
        sizes={"queries": 512, "passages": 512, "short": 32, "long": 300, "d": 128},
        small={"queries": 40, "passages": 40, "short": 24, "long": 150, "d": 32},
        expected=(
            Expected(
                'similarity = torch.einsum("qnd,pmd->qpnm", queries, passages)',
                now=lambda s: 4 * s["queries"] * s["passages"] * s["short"] * s["long"],
                after=lambda s: 4 * s["passages"] * s["long"] * max(s["short"], s["d"]),
            ),
        ),
        mended=late_interaction_mended,
        backward=True,
    ),
    Program(
        "correlation_volume",
        "https://github.com/xy-guo/Learning-Monocular-Depth-by-Stereo/issues/12",
        correlation_volume,
        stereo_features,
        sizes={"channels": 64, "height": 256, "width": 512, "disparities": 192},
        small={"channels": 32, "height": 48, "width": 96, "disparities": 48},
        expected=(
            Expected(
                "return (left[..., None] * shifted).mean(0)",
                now=lambda s: 4 * s["channels"] * s["height"] * s["width"] * s["disparities"],
                after=lambda s: (
                    4
                    * s["height"]
                    * max(s["width"] * s["disparities"], s["channels"] * (s["width"] + s["disparities"]))
                ),
            ),
        ),
        mended=correlation_volume_mended,
        backward=True,
    ),
    Program(
        "span_maxima",
        "https://github.com/lavis-nlp/spert/blob/master/spert/models.py",
        span_maxima,
        sentences_and_spans,
        sizes={"batch": 16, "spans": 2_000, "length": 200, "d": 768},
        small={"batch": 2, "spans": 128, "length": 120, "d": 256},
        expected=(
            Expected(
                "return (hidden[:, None] + torch.where(spans, 0.0, -torch.inf)",
                now=lambda s: 4 * s["batch"] * s["spans"] * s["length"] * s["d"],
                after=lambda s: 16 * s["batch"] * s["length"] * s["d"],
            ),
        ),
        mended=span_maxima_mended,
        backward=True,
    ),
    Program(
        "attention_of_chunks",
        "https://github.com/SeanNaren/min-LLM/issues/5",
        attention_of_chunks,
        queries_keys_values,
        sizes={"heads": 16, "length": 16_384, "d": 64},
        small={"heads": 4, "length": 1_280, "d": 32},
        expected=(
            Expected(
                "outputs.append(torch.softmax(chunk @ keys.mT, dim=-1) @ values)",
                now=lambda s: 4 * s["heads"] * s["length"] ** 2,
                after=lambda s: 4 * s["heads"] * s["length"] * max(ROWS, s["d"]),
            ),
        ),
        mended=attention_of_chunks_mended,
        backward=True,
        note="each chunk is small, but autograd keeps the softmax of every chunk",
    ),
    Program(
        "chunk_scan",
        "https://github.com/huggingface/transformers/pull/48978",
        chunk_scan,
        state_space,
        sizes={"batch": 1, "chunks": 16, "length": 256, "heads": 128, "state": 128, "d": 64},
        small={"batch": 2, "chunks": 6, "length": 64, "heads": 2, "state": 64, "d": 64},
        expected=(
            Expected(
                "scores = (readouts[:, :, :, None] * states[:, :, None]).sum(-1)",
                now=lambda s: 4 * s["batch"] * s["chunks"] * s["length"] ** 2 * s["heads"] * s["state"],
                after=lambda s: 4 * s["batch"] * s["chunks"] * s["length"] ** 2 * s["heads"],
            ),
            Expected(
                "return (scores[..., None] * values[:, :, None])",
                now=lambda s: 4 * s["batch"] * s["chunks"] * s["length"] ** 2 * s["heads"] * s["d"],
                after=lambda s: 4 * s["batch"] * s["chunks"] * s["length"] ** 2 * s["heads"],
            ),
        ),
        mended=chunk_scan_mended,
        backward=True,
    ),
)
