"""Functions that look like those of the other modules, and whose large tensors are right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..program import Program


def distance_matrix(points: Tensor, others: Tensor) -> Tensor:
    return torch.cdist(points, others)


def two_sets(n: int, m: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.randn(m, d)


def outer_bias(left: Tensor, right: Tensor) -> Tensor:
    return torch.tanh(left[:, None] + right)


def two_vectors(n: int, m: int) -> tuple[Any, ...]:
    return torch.randn(n, requires_grad=True), torch.randn(m, requires_grad=True)


def best_passages(queries: Tensor, passages: Tensor) -> Tensor:
    return (queries @ passages.mT).topk(10).values


def queries_and_long_passages(n: int, m: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.randn(m, d)


def root_mean_square(signal: Tensor) -> Tensor:
    return signal.square().mean(-1).sqrt()


def long_signals(n: int, length: int) -> tuple[Any, ...]:
    return (torch.randn(n, length, requires_grad=True),)


def vocabulary_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels)


def given_logits(tokens: int, vocabulary: int) -> tuple[Any, ...]:
    return torch.randn(tokens, vocabulary, requires_grad=True), torch.randint(vocabulary, (tokens,))


def kernel_sums(points: Tensor, centres: Tensor, values: Tensor) -> Tensor:
    def rows(some: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(some, centres)) @ values

    return torch.cat([checkpoint(rows, some, use_reentrant=False) for some in points.split(64)])


def points_and_values(n: int, m: int, d: int, features: int) -> tuple[Any, ...]:
    return torch.rand(n, d, requires_grad=True), torch.rand(m, d), torch.randn(m, features, requires_grad=True)


def group_products(left: Tensor, right: Tensor) -> Tensor:
    return torch.einsum("gnk,gkm->gnm", left, right)


def batched_matrices(groups: int, n: int, d: int) -> tuple[Any, ...]:
    return tuple(torch.randn(*shape, requires_grad=True) for shape in ((groups, n, d), (groups, d, d)))


def tail_scores(heads: Tensor, relations: Tensor, entities: Tensor) -> Tensor:
    return torch.einsum("bd,bd,nd->bn", heads, relations, entities)


def known_triples(batch: int, entities: int, d: int) -> tuple[Any, ...]:
    return tuple(torch.randn(n, d, requires_grad=True) for n in (batch, batch, entities))


def mean_of_neighbours(nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    sums = torch.zeros_like(nodes).index_add(0, targets, nodes[sources])
    degrees = torch.bincount(targets, minlength=len(nodes)).clamp(min=1)
    return sums / degrees[:, None]


def nodes_and_edges(nodes: int, edges: int, d: int) -> tuple[Any, ...]:
    sources, targets = (torch.randint(nodes, (edges,)) for _ in range(2))
    return torch.randn(nodes, d, requires_grad=True), sources, targets


def long_convolution(signals: Tensor, filters: Tensor) -> Tensor:
    length = 2 * signals.shape[-1]
    spectrum = torch.fft.rfft(signals, length) * torch.fft.rfft(filters, length)
    return torch.fft.irfft(spectrum, length)[..., : signals.shape[-1]]


def signals_and_long_filters(batch: int, channels: int, length: int) -> tuple[Any, ...]:
    signals = torch.randn(batch, channels, length, requires_grad=True)
    return signals, (torch.randn(channels, length) / length).requires_grad_()


def given_triplets(anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    near, far = ((anchors - others).norm(dim=-1) for others in (positives, negatives))
    return functional.relu(near - far + 0.2)


def three_batches(n: int, d: int) -> tuple[Any, ...]:
    return tuple(torch.randn(n, d, requires_grad=True) for _ in range(3))


def attention_weights(queries: Tensor, keys: Tensor, slopes: Tensor) -> Tensor:
    positions = torch.arange(keys.shape[-2], dtype=queries.dtype, device=queries.device)
    bias = -slopes[:, None, None] * (positions[:, None] - positions).abs()
    return torch.softmax(queries @ keys.mT + bias, dim=-1)


def heads_of_queries(batch: int, heads: int, length: int, d: int) -> tuple[Any, ...]:
    queries, keys = ((torch.randn(batch, heads, length, d) / d**0.5).requires_grad_() for _ in range(2))
    return queries, keys, 2.0 ** -torch.arange(1, heads + 1)


def centred_covariance(features: Tensor, weights: Tensor) -> Tensor:
    centred = features - (weights[:, None] * features).sum(0)
    return (weights[:, None] * centred).mT @ centred


def weighted_features(n: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d, requires_grad=True), torch.rand(n).softmax(0)


def normalize_channels(images: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return ((images - mean[:, None, None]) / scale[:, None, None]).clamp(-3, 3)


def images_and_statistics(batch: int, side: int) -> tuple[Any, ...]:
    return torch.rand(batch, 3, side, side), torch.full((3,), 0.5), torch.full((3,), 0.25)


def decode_states(decay: Tensor, inputs: Tensor) -> Tensor:
    state, states = torch.zeros_like(inputs[:, 0]), []
    for step in range(inputs.shape[1]):
        state = decay * state + inputs[:, step]
        states.append(state)
    return torch.stack(states, dim=1)


def decay_and_inputs(batch: int, length: int, d: int) -> tuple[Any, ...]:
    return torch.rand(d, requires_grad=True), torch.randn(batch, length, d, requires_grad=True)


def clipped_ratio_loss(logits: Tensor, old: Tensor, advantages: Tensor, actions: Tensor) -> Tensor:
    chosen = logits.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)
    ratio = torch.exp(chosen - old)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def policy_batch(n: int, actions: int) -> tuple[Any, ...]:
    logits = torch.randn(n, actions, requires_grad=True)
    return logits, torch.randn(n) - 5, torch.randn(n), torch.randint(actions, (n,))


DISTANCES = "https://docs.pytorch.org/docs/stable/generated/torch.cdist.html"
PROGRAMS = (
    Program(
        "distance_matrix",
        DISTANCES,
        distance_matrix,
        two_sets,
        sizes={"n": 10_000, "m": 10_000, "d": 1_024},
        small={"n": 2_600, "m": 2_600, "d": 512},
        note="the matrix is the result, and not much larger than the points",
    ),
    Program(
        "outer_bias",
        "https://docs.pytorch.org/docs/stable/notes/broadcasting.html",
        outer_bias,
        two_vectors,
        sizes={"n": 20_000, "m": 20_000},
        small={"n": 2_000, "m": 2_000},
        backward=True,
        note="the result is a large matrix of two vectors",
    ),
    Program(
        "best_passages",
        "https://docs.pytorch.org/docs/stable/generated/torch.topk.html",
        best_passages,
        queries_and_long_passages,
        sizes={"n": 128, "m": 1_000_000, "d": 768},
        small={"n": 400, "m": 20_000, "d": 768},
        note="the scores are smaller than the passages, which were there before",
    ),
    Program(
        "root_mean_square",
        "https://docs.pytorch.org/docs/stable/generated/torch.mean.html",
        root_mean_square,
        long_signals,
        sizes={"n": 1_024, "length": 1_000_000},
        small={"n": 32, "length": 200_000},
        backward=True,
        note="a large reduction of an input that is as large",
    ),
    Program(
        "vocabulary_loss",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html",
        vocabulary_loss,
        given_logits,
        sizes={"tokens": 8_192, "vocabulary": 128_000},
        small={"tokens": 512, "vocabulary": 12_000},
        backward=True,
        note="the logits are the input",
    ),
    Program(
        "kernel_sums",
        "https://docs.pytorch.org/docs/stable/checkpoint.html",
        kernel_sums,
        points_and_values,
        sizes={"n": 500_000, "m": 100_000, "d": 3, "features": 256},
        small={"n": 1_000, "m": 16_000, "d": 3, "features": 64},
        backward=True,
        note="a loop over chunks of rows that keeps nothing of them",
    ),
    Program(
        "group_products",
        "https://docs.pytorch.org/docs/stable/generated/torch.einsum.html",
        group_products,
        batched_matrices,
        sizes={"groups": 512, "n": 4_096, "d": 128},
        small={"groups": 128, "n": 512, "d": 64},
        backward=True,
        note="one product for each of the groups of both operands",
    ),
    Program(
        "tail_scores",
        "https://github.com/pytorch/pytorch/issues/35299",
        tail_scores,
        known_triples,
        sizes={"batch": 1_024, "entities": 100_000, "d": 512},
        small={"batch": 256, "entities": 20_000, "d": 128},
        backward=True,
        note="three operands in an order whose first product is small",
    ),
    Program(
        "mean_of_neighbours",
        "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.index_add_.html",
        mean_of_neighbours,
        nodes_and_edges,
        sizes={"nodes": 1_000_000, "edges": 4_000_000, "d": 128},
        small={"nodes": 20_000, "edges": 60_000, "d": 64},
        backward=True,
        note="messages of the edges, three times the nodes",
    ),
    Program(
        "long_convolution",
        "https://docs.pytorch.org/docs/stable/generated/torch.fft.rfft.html",
        long_convolution,
        signals_and_long_filters,
        sizes={"batch": 16, "channels": 512, "length": 65_536},
        small={"batch": 4, "channels": 16, "length": 16_384},
        backward=True,
        note="the spectrum has twice the input's values, padded",
    ),
    Program(
        "given_triplets",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.TripletMarginLoss.html",
        given_triplets,
        three_batches,
        sizes={"n": 100_000, "d": 512},
        small={"n": 10_000, "d": 256},
        backward=True,
        note="triplets that are given, row by row",
    ),
    Program(
        "attention_weights",
        "https://github.com/ofirpress/attention_with_linear_biases",
        attention_weights,
        heads_of_queries,
        sizes={"batch": 1, "heads": 16, "length": 4_096, "d": 64},
        small={"batch": 4, "heads": 8, "length": 384, "d": 64},
        backward=True,
        note="the weights are asked for, so they are the result",
    ),
    Program(
        "centred_covariance",
        "https://docs.pytorch.org/docs/stable/generated/torch.cov.html",
        centred_covariance,
        weighted_features,
        sizes={"n": 1_000_000, "d": 512},
        small={"n": 40_000, "d": 64},
        backward=True,
        note="already a product of matrices",
    ),
    Program(
        "normalize_channels",
        "https://docs.pytorch.org/vision/stable/generated/torchvision.transforms.Normalize.html",
        normalize_channels,
        images_and_statistics,
        sizes={"batch": 1_024, "side": 512},
        small={"batch": 8, "side": 512},
        note="a few statistics, broadcast to the images",
    ),
    Program(
        "decode_states",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.RNN.html",
        decode_states,
        decay_and_inputs,
        sizes={"batch": 64, "length": 4_096, "d": 1_024},
        small={"batch": 16, "length": 256, "d": 512},
        backward=True,
        note="a loop whose steps depend on each other, and whose states are the result",
    ),
    Program(
        "clipped_ratio_loss",
        "https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo.py",
        clipped_ratio_loss,
        policy_batch,
        sizes={"n": 65_536, "actions": 4_096},
        small={"n": 4_096, "actions": 1_500},
        backward=True,
        note="log_softmax of given logits, of which one value a row is used",
    ),
)
