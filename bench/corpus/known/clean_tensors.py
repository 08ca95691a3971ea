"""Clean programs: tensors that look as if they were broadcast away, and are wanted or no larger than what is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..program import Program

DOCUMENTATION = "https://docs.pytorch.org/docs/stable/generated/"


def sums_of_pairs(a: Tensor, b: Tensor) -> Tensor:
    return a[:, None] + b


def two_vectors(n: int, m: int) -> tuple[Any, ...]:
    return torch.randn(n), torch.randn(m)


def gram(x: Tensor) -> Tensor:
    return x @ x.mT


def matrix(n: int, d: int) -> tuple[Any, ...]:
    return (torch.randn(n, d),)


def trained_matrix(n: int, d: int) -> tuple[Any, ...]:
    return (torch.randn(n, d, requires_grad=True),)


def distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y)


def two_matrices(n: int, m: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.randn(m, d)


def nearest_centre(x: Tensor, centres: Tensor) -> Tensor:
    return torch.cdist(x, centres).argmin(1)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()


def largest_values(x: Tensor) -> Tensor:
    return x.topk(50, -1).values


def chain(x: Tensor) -> Tensor:
    return (functional.gelu(x) * torch.sigmoid(x) + 1).tanh().mean()


def running_totals(x: Tensor) -> Tensor:
    return x.cumsum(0)


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


def conditioned(batch: int, length: int, d: int) -> tuple[Any, ...]:
    tensors = torch.randn(batch, length, d), torch.randn(batch, d), torch.randn(batch, d)
    return tuple(one.requires_grad_() for one in tensors)


def chosen(scores: Tensor, actions: Tensor) -> Tensor:
    return scores.gather(1, actions).mean()


def scores_and_actions(n: int, actions: int) -> tuple[Any, ...]:
    return torch.randn(n, actions, requires_grad=True), torch.randint(actions, (n, 1))


def sums_of_groups(x: Tensor, groups: Tensor, count: int) -> Tensor:
    return functional.one_hot(groups, count).to(x.dtype).mT @ x


def grouped(n: int, d: int, count: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.arange(n) % count, count


def contracted(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bij,bkj->bik", a, b).sum((1, 2))


def products(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b)


def two_batches(batch: int, n: int, m: int, d: int) -> tuple[Any, ...]:
    return torch.randn(batch, n, d, requires_grad=True), torch.randn(batch, m, d, requires_grad=True)


def two_factors(batch: int, n: int, d: int) -> tuple[Any, ...]:
    return torch.randn(batch, n, d, requires_grad=True), torch.randn(batch, d, n, requires_grad=True)


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).pow(2).mean()


def two_images(batch: int, side: int) -> tuple[Any, ...]:
    shape = batch, 3, side, side
    return torch.randn(shape, requires_grad=True), torch.randn(shape)


def enlarged(x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=4, mode="bilinear")


def small_images(batch: int, side: int) -> tuple[Any, ...]:
    return (torch.randn(batch, 3, side, side, requires_grad=True),)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


def heads_and_angles(batch: int, h: int, length: int, d: int) -> tuple[Any, ...]:
    angles = torch.arange(length)[:, None] * torch.rand(d // 2)
    return torch.randn(batch, h, length, d), angles.cos(), angles.sin()


PROGRAMS = (
    Program(
        "sums_of_pairs",
        "https://docs.pytorch.org/docs/stable/notes/broadcasting.html",
        sums_of_pairs,
        two_vectors,
        sizes={"n": 50_000, "m": 50_000},
        small={"n": 3_000, "m": 3_000},
        note="the pairs are the result",
    ),
    Program(
        "gram",
        "https://docs.pytorch.org/tutorials/advanced/neural_style_tutorial.html",
        gram,
        trained_matrix,
        sizes={"n": 32_768, "d": 128},
        small={"n": 2_500, "d": 32},
        backward=True,
        note="the matrix is the result",
    ),
    Program(
        "distances",
        DOCUMENTATION + "torch.cdist.html",
        distances,
        two_matrices,
        sizes={"n": 40_000, "m": 20_000, "d": 32},
        small={"n": 3_000, "m": 2_500, "d": 32},
        note="the distances are the result, and cdist makes nothing larger",
    ),
    Program(
        "nearest_centre",
        "https://github.com/subhadarship/kmeans_pytorch",
        nearest_centre,
        two_matrices,
        sizes={"n": 10_000_000, "m": 10, "d": 64},
        small={"n": 100_000, "m": 10, "d": 64},
        note="few centres: the distances are smaller than the points",
    ),
    Program(
        "centred",
        "https://github.com/facebookresearch/vicreg/blob/main/main_vicreg.py",
        centred,
        trained_matrix,
        sizes={"n": 100_000, "d": 8_192},
        small={"n": 4_000, "d": 1_024},
        backward=True,
        note="a reduction that is broadcast back, to the size of the input",
    ),
    Program(
        "standardised",
        DOCUMENTATION + "torch.nn.LayerNorm.html",
        standardised,
        trained_matrix,
        sizes={"n": 100_000, "d": 4_096},
        small={"n": 4_000, "d": 512},
        backward=True,
        note="layer normalisation by hand: nothing is larger than the input",
    ),
    Program(
        "largest_values",
        DOCUMENTATION + "torch.topk.html",
        largest_values,
        matrix,
        sizes={"n": 4_096, "d": 128_256},
        small={"n": 256, "d": 32_000},
        note="what is large is given",
    ),
    Program(
        "chain",
        "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        chain,
        matrix,
        sizes={"n": 65_536, "d": 8_192},
        small={"n": 2_048, "d": 2_048},
        note="elementwise on a large input: each tensor is as large as it, and a mean reduces the last",
    ),
    Program(
        "running_totals",
        DOCUMENTATION + "torch.cumsum.html",
        running_totals,
        matrix,
        sizes={"n": 1_000_000, "d": 256},
        small={"n": 20_000, "d": 256},
        note="the totals are the result",
    ),
    Program(
        "modulated",
        "https://github.com/facebookresearch/DiT/blob/main/models.py",
        modulated,
        conditioned,
        sizes={"batch": 256, "length": 256, "d": 1_152},
        small={"batch": 32, "length": 128, "d": 1_024},
        backward=True,
        note="small factors are broadcast to the size of the input; their gradients are sums of products of that size",
    ),
    Program(
        "chosen",
        "https://docs.pytorch.org/tutorials/intermediate/reinforcement_q_learning.html",
        chosen,
        scores_and_actions,
        sizes={"n": 1_000_000, "actions": 512},
        small={"n": 20_000, "actions": 256},
        backward=True,
        note="gather reads one of a row; its gradient is as large as the scores",
    ),
    Program(
        "sums_of_groups",
        DOCUMENTATION + "torch.nn.functional.one_hot.html",
        sums_of_groups,
        grouped,
        sizes={"n": 1_000_000, "d": 512, "count": 10},
        small={"n": 40_000, "d": 256, "count": 10},
        note="few classes: the ones are smaller than the rows that they sum",
    ),
    Program(
        "contracted",
        DOCUMENTATION + "torch.einsum.html",
        contracted,
        two_batches,
        sizes={"batch": 256, "n": 128, "m": 128, "d": 512},
        small={"batch": 128, "n": 64, "m": 64, "d": 256},
        backward=True,
        note="two operands: a matrix product of a quarter of an operand's size",
    ),
    Program(
        "products",
        DOCUMENTATION + "torch.bmm.html",
        products,
        two_factors,
        sizes={"batch": 512, "n": 512, "d": 64},
        small={"batch": 64, "n": 256, "d": 32},
        backward=True,
        note="matrix products, all of which are wanted",
    ),
    Program(
        "squared_error",
        DOCUMENTATION + "torch.nn.MSELoss.html",
        squared_error,
        two_images,
        sizes={"batch": 64, "side": 1_024},
        small={"batch": 8, "side": 256},
        backward=True,
        note="a mean of differences as large as the images",
    ),
    Program(
        "enlarged",
        DOCUMENTATION + "torch.nn.functional.interpolate.html",
        enlarged,
        small_images,
        sizes={"batch": 64, "side": 256},
        small={"batch": 8, "side": 128},
        backward=True,
        note="sixteen times the input, and the result",
    ),
    Program(
        "rotated",
        "https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py",
        rotated,
        heads_and_angles,
        sizes={"batch": 8, "h": 32, "length": 8_192, "d": 128},
        small={"batch": 4, "h": 8, "length": 1_024, "d": 128},
        note="angles are broadcast over heads, to the size of the result",
    ),
)
