"""Densities of libraries, whose large line is the library's own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, distributions
from torch.nn import functional

from ..program import Expected, Program


def power_spherical(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    from power_spherical import PowerSpherical

    return PowerSpherical(loc, scale).log_prob(x)


def power_spherical_mended(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    from power_spherical import PowerSpherical

    products = torch.einsum("mtd,ntd->nmt", loc, x[:, 0])
    return PowerSpherical(loc, scale).log_normalizer() + scale * torch.log1p(products)


def components_and_points(n: int, m: int, t: int, d: int) -> tuple[Any, ...]:
    loc, x = functional.normalize(torch.randn(m, t, d), dim=-1), functional.normalize(torch.randn(n, 1, t, d), dim=-1)
    return loc.requires_grad_(), (5 + torch.rand(m, t)).requires_grad_(), x


def mixture(x: Tensor, logits: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    components = distributions.Independent(distributions.Normal(loc, scale), 1)
    return distributions.MixtureSameFamily(distributions.Categorical(logits=logits), components).log_prob(x)


def mixture_mended(x: Tensor, logits: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    precision = scale.pow(-2)
    squares = x.pow(2) @ precision.mT - 2 * x @ (loc * precision).mT + (loc.pow(2) * precision).sum(-1)
    constant = scale.log().sum(-1) + 0.5 * math.log(2 * math.pi) * x.shape[-1]
    return torch.logsumexp(logits.log_softmax(-1) - constant - 0.5 * squares, -1)


def points_and_components(n: int, k: int, d: int) -> tuple[Any, ...]:
    parameters = torch.randn(k), torch.randn(k, d), 0.5 + torch.rand(k, d)
    return torch.randn(n, d), *(one.requires_grad_() for one in parameters)


PROGRAMS = (
    Program(
        "power_spherical",
        "https://github.com/nicola-decao/power_spherical/blob/master/power_spherical/distributions.py",
        power_spherical,
        components_and_points,
        sizes={"n": 128, "m": 128, "t": 512, "d": 128},
        small={"n": 16, "m": 16, "t": 512, "d": 64},
        expected=(
            Expected(
                "(self.loc * value).sum(-1)",
                now=lambda s: 4 * s["n"] * s["m"] * s["t"] * s["d"],
                after=lambda s: 4 * s["t"] * max(s["n"] * s["m"], s["m"] * s["d"]),
                file="power_spherical/distributions.py",
            ),
        ),
        mended=power_spherical_mended,
        backward=True,
    ),
    Program(
        "mixture",
        "https://github.com/pytorch/pytorch/blob/main/torch/distributions/normal.py",
        mixture,
        points_and_components,
        sizes={"n": 32_768, "k": 256, "d": 32},
        small={"n": 2_048, "k": 128, "d": 32},
        expected=(
            Expected(
                "-((value - self.loc) ** 2) / (2 * var)",
                now=lambda s: 4 * s["n"] * s["k"] * s["d"],
                after=lambda s: 4 * s["n"] * s["k"],
                file="torch/distributions/normal.py",
            ),
        ),
        mended=mixture_mended,
        backward=True,
    ),
)
