"""Densities, kernels and transport: sums over all pairs of samples and components."""

from __future__ import annotations

import math
from typing import Any

import torch
from power_spherical import PowerSpherical
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal, kl_divergence
from torch.utils.checkpoint import checkpoint

from ..program import Expected, Program

ROWS = 64  # a chunk of the mended loops


def render_gaussians(pixels: Tensor, centres: Tensor, scales: Tensor, colours: Tensor) -> Tensor:
    weights = torch.exp(-0.5 * ((pixels[:, None] - centres) / scales).square().sum(-1))
    return weights @ colours


def render_gaussians_mended(pixels: Tensor, centres: Tensor, scales: Tensor, colours: Tensor) -> Tensor:
    chunks = pixels.split(ROWS)
    rendered = [checkpoint(render_gaussians, c, centres, scales, colours, use_reentrant=False) for c in chunks]
    return torch.cat(rendered)


def image_and_gaussians(side: int, gaussians: int) -> tuple[Any, ...]:
    axis = torch.linspace(0, 1, side)
    pixels = torch.cartesian_prod(axis, axis)
    centres, scales, colours = (torch.rand(gaussians, last) for last in (2, 2, 3))
    return pixels, centres.requires_grad_(), (scales / 10 + 0.02).requires_grad_(), colours.requires_grad_()


def soft_histogram(values: Tensor, bins: Tensor, width: float) -> Tensor:
    kernel = torch.exp(-0.5 * ((values[..., None] - bins) / width).square())
    return entropy(kernel.mean(1))


def soft_histogram_mended(values: Tensor, bins: Tensor, width: float) -> Tensor:
    def density_of(some: Tensor) -> Tensor:
        return torch.exp(-0.5 * ((values[:, None] - some[:, None]) / width).square()).mean(-1)

    densities = [checkpoint(density_of, some, use_reentrant=False) for some in bins.split(4)]
    return entropy(torch.cat(densities, dim=1))


def entropy(histogram: Tensor) -> Tensor:
    return torch.special.entr(histogram / histogram.sum(1, keepdim=True)).sum(1)


def images_and_bins(batch: int, pixels: int, bins: int) -> tuple[Any, ...]:
    return torch.rand(batch, pixels, requires_grad=True), torch.linspace(0, 1, bins), 1 / bins


def mixture_log_density(x: Tensor, logits: Tensor, means: Tensor, scales: Tensor) -> Tensor:
    mixture = MixtureSameFamily(Categorical(logits=logits), Independent(Normal(means, scales), 1))
    return mixture.log_prob(x)


def mixture_log_density_mended(x: Tensor, logits: Tensor, means: Tensor, scales: Tensor) -> Tensor:
    precision = scales**-2
    quadratic = x.square() @ precision.mT - 2 * x @ (means * precision).mT + (means.square() * precision).sum(-1)
    constant = scales.log().sum(-1) + 0.5 * math.log(2 * math.pi) * x.shape[-1]
    return torch.logsumexp(logits.log_softmax(-1) - 0.5 * quadratic - constant, dim=-1)


def samples_and_mixture(n: int, components: int, d: int) -> tuple[Any, ...]:
    logits, means, scales = torch.randn(components), torch.randn(components, d), 1 + torch.rand(components, d)
    return torch.randn(n, d), logits.requires_grad_(), means.requires_grad_(), scales.requires_grad_()


def directions_log_density(x: Tensor, logits: Tensor, directions: Tensor, concentrations: Tensor) -> Tensor:
    components = PowerSpherical(directions, concentrations)
    return torch.logsumexp(logits.log_softmax(-1) + components.log_prob(x[:, None]), dim=-1)


def directions_log_density_mended(x: Tensor, logits: Tensor, directions: Tensor, concentrations: Tensor) -> Tensor:
    normalizer = PowerSpherical(directions, concentrations).log_normalizer()
    components = normalizer + concentrations * torch.log1p(x @ directions.mT)
    return torch.logsumexp(logits.log_softmax(-1) + components, dim=-1)


def samples_and_directions(n: int, components: int, d: int) -> tuple[Any, ...]:
    x, directions = (torch.nn.functional.normalize(torch.randn(rows, d), dim=-1) for rows in (n, components))
    logits, concentrations = torch.randn(components), 1 + 10 * torch.rand(components)
    return x, logits.requires_grad_(), directions.requires_grad_(), concentrations.requires_grad_()


def divergence_to_prototypes(means: Tensor, scales: Tensor, centres: Tensor, widths: Tensor) -> Tensor:
    posterior, prototypes = Normal(means[:, None], scales[:, None]), Normal(centres, widths)
    return kl_divergence(posterior, prototypes).sum(-1)


def divergence_to_prototypes_mended(means: Tensor, scales: Tensor, centres: Tensor, widths: Tensor) -> Tensor:
    precision = widths**-2
    variances = (scales.square() + means.square()) @ precision.mT
    shifts = (centres.square() * precision).sum(-1) - 2 * means @ (centres * precision).mT
    logarithms = scales.log().sum(-1, keepdim=True) - widths.log().sum(-1)
    return 0.5 * (variances + shifts - means.shape[-1]) - logarithms


def posterior_and_prototypes(n: int, prototypes: int, d: int) -> tuple[Any, ...]:
    means, centres = (torch.randn(rows, d, requires_grad=True) for rows in (n, prototypes))
    scales, widths = ((0.5 + torch.rand(rows, d)).requires_grad_() for rows in (n, prototypes))
    return means, scales, centres, widths


def transport_cost(cost: Tensor, epsilon: float, iterations: int) -> Tensor:
    n, m = cost.shape
    rows, columns = torch.zeros_like(cost[:, 0]), torch.zeros_like(cost[0])
    for _ in range(iterations):
        rows = -epsilon * torch.logsumexp((columns - cost) / epsilon - math.log(m), dim=1)
        columns = -epsilon * torch.logsumexp((rows[:, None] - cost) / epsilon - math.log(n), dim=0)
    plan = torch.exp((rows[:, None] + columns - cost) / epsilon) / (n * m)
    return (plan * cost).sum()


def transport_cost_mended(cost: Tensor, epsilon: float, iterations: int) -> Tensor:
    def update(potential: Tensor, cost: Tensor) -> Tensor:
        return -epsilon * torch.logsumexp((potential - cost) / epsilon - math.log(len(potential)), dim=1)

    n, m = cost.shape
    columns = torch.zeros_like(cost[0])
    for _ in range(iterations):
        rows = checkpoint(update, columns, cost, use_reentrant=False)
        columns = checkpoint(update, rows, cost.mT, use_reentrant=False)
    plan = torch.exp((rows[:, None] + columns - cost) / epsilon) / (n * m)
    return (plan * cost).sum()


def cost_matrix(n: int, m: int, iterations: int) -> tuple[Any, ...]:
    return torch.rand(n, m, requires_grad=True), 0.1, iterations


def mean_discrepancy(source: Tensor, target: Tensor) -> Tensor:
    total = torch.cat([source, target])
    distances = (total.unsqueeze(0) - total.unsqueeze(1)).square().sum(2)
    return discrepancy(distances, len(source))


def mean_discrepancy_mended(source: Tensor, target: Tensor) -> Tensor:
    total = torch.cat([source, target])
    squares = total.square().sum(-1)
    return discrepancy(squares[:, None] + squares - 2 * total @ total.mT, len(source))


def discrepancy(distances: Tensor, n: int) -> Tensor:
    bandwidth = distances.detach().sum() / (len(distances) * (len(distances) - 1))
    kernels = torch.zeros_like(distances)
    for power in range(-2, 3):
        kernels = kernels + torch.exp(-distances / (bandwidth * 2.0**power))
    return kernels[:n, :n].mean() + kernels[n:, n:].mean() - 2 * kernels[:n, n:].mean()


def two_domains(n: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d, requires_grad=True), (torch.randn(n, d) + 0.5).requires_grad_()


PROGRAMS = (
    Program(
        "render_gaussians",
        "https://github.com/graphdeco-inria/gaussian-splatting/issues/500",
        render_gaussians,
        image_and_gaussians,
        sizes={"side": 256, "gaussians": 100_000},
        small={"side": 64, "gaussians": 800},
        expected=(
            Expected(
                "weights = torch.exp(-0.5 * ((pixels[:, None] - centres) / scales)",
                now=lambda s: 8 * s["side"] ** 2 * s["gaussians"],
                after=lambda s: 8 * ROWS * s["gaussians"],
            ),
        ),
        mended=render_gaussians_mended,
        backward=True,
    ),
    Program(
        "soft_histogram",
        "https://github.com/kornia/kornia/pull/1172",
        soft_histogram,
        images_and_bins,
        sizes={"batch": 16, "pixels": 65_536, "bins": 256},
        small={"batch": 4, "pixels": 10_000, "bins": 128},
        expected=(
            Expected(
                "kernel = torch.exp(-0.5 * ((values[..., None] - bins) / width)",
                now=lambda s: 4 * s["batch"] * s["pixels"] * s["bins"],
                after=lambda s: 16 * s["batch"] * s["pixels"],
            ),
        ),
        mended=soft_histogram_mended,
        backward=True,
    ),
    Program(
        "mixture_log_density",
        "https://github.com/pytorch/pytorch/issues/18125",
        mixture_log_density,
        samples_and_mixture,
        sizes={"n": 100_000, "components": 500, "d": 128},
        small={"n": 2_000, "components": 64, "d": 48},
        expected=(
            Expected(
                "-((value - self.loc) ** 2) / (2 * var)",
                now=lambda s: 4 * s["n"] * s["components"] * s["d"],
                after=lambda s: 4 * s["n"] * max(s["components"], s["d"]),
                file="torch/distributions/normal.py",
            ),
        ),
        mended=mixture_log_density_mended,
        backward=True,
    ),
    Program(
        "directions_log_density",
        "https://github.com/nicola-decao/power_spherical/blob/master/power_spherical/distributions.py",
        directions_log_density,
        samples_and_directions,
        sizes={"n": 100_000, "components": 512, "d": 128},
        small={"n": 2_000, "components": 64, "d": 64},
        expected=(
            Expected(
                "(self.loc * value).sum(-1)",
                now=lambda s: 4 * s["n"] * s["components"] * s["d"],
                after=lambda s: 4 * s["n"] * s["components"],
                file="power_spherical/distributions.py",
            ),
        ),
        mended=directions_log_density_mended,
        backward=True,
    ),
    Program(
        "divergence_to_prototypes",
        "https://github.com/pytorch/pytorch/blob/main/torch/distributions/kl.py",
        divergence_to_prototypes,
        posterior_and_prototypes,
        sizes={"n": 65_536, "prototypes": 512, "d": 256},
        small={"n": 1_500, "prototypes": 64, "d": 64},
        expected=tuple(
            Expected(
                line,
                now=lambda s: 4 * s["n"] * s["prototypes"] * s["d"],
                after=lambda s: 4 * s["n"] * max(s["prototypes"], s["d"]),
                file="torch/distributions/kl.py",
            )
            for line in (
                "var_ratio = (p.scale / q.scale).pow(2)",
                "t1 = ((p.loc - q.loc) / q.scale).pow(2)",
                "return 0.5 * (var_ratio + t1 - 1 - var_ratio.log())",
            )
        ),
        mended=divergence_to_prototypes_mended,
        backward=True,
        note="three lines of the library, and one contraction mends them all",
    ),
    Program(
        "transport_cost",
        "https://github.com/PythonOT/POT/pull/259",
        transport_cost,
        cost_matrix,
        sizes={"n": 5_000, "m": 5_000, "iterations": 100},
        small={"n": 500, "m": 500, "iterations": 20},
        expected=(
            Expected(
                "rows = -epsilon * torch.logsumexp((columns - cost) / epsilon",
                now=lambda s: 4 * (s["n"] * s["m"] + s["n"]) * s["iterations"],
                after=lambda s: 4 * s["n"] * s["m"],
            ),
            Expected(
                "columns = -epsilon * torch.logsumexp((rows[:, None] - cost) / epsilon",
                now=lambda s: 4 * (s["n"] * s["m"] + s["m"]) * s["iterations"],
                after=lambda s: 4 * s["n"] * s["m"],
            ),
        ),
        mended=transport_cost_mended,
        backward=True,
        note="no tensor is larger than the cost, but autograd keeps two of its size (and two rows) for each iteration",
    ),
    Program(
        "mean_discrepancy",
        "https://github.com/ZongxianLee/MMD_Loss.Pytorch/pull/5",
        mean_discrepancy,
        two_domains,
        sizes={"n": 1_024, "d": 2_048},
        small={"n": 100, "d": 256},
        expected=(
            Expected(
                "distances = (total.unsqueeze(0) - total.unsqueeze(1)).square()",
                now=lambda s: 4 * (2 * s["n"]) ** 2 * s["d"],
                after=lambda s: 8 * s["n"] * max(2 * s["n"], s["d"]),
            ),
        ),
        mended=mean_discrepancy_mended,
        backward=True,
    ),
)
