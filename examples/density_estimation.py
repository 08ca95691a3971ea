"""Density estimation on the sphere: 1,000 von Mises-Fisher components, fitted by expectation maximisation.

The sums that a step needs are gradients of the log likelihood, so that no responsibilities of all pairs are held.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

import effops

COMPONENTS, POINTS, HELD_OUT, STEPS = 1000, 20_000, 5_000, 20


def by_op(log_weights: Tensor, loc: Tensor, concentration: Tensor, x: Tensor) -> Tensor:
    """Log likelihood of each point."""
    return effops.von_mises_fisher_mixture_log_prob(log_weights, loc, concentration, x.unsqueeze(1))


def plain(log_weights: Tensor, loc: Tensor, concentration: Tensor, x: Tensor) -> Tensor:
    """The same, by the closed form in three dimensions."""
    k = concentration
    log_normaliser = k.log() - math.log(2 * math.pi) - k - torch.log1p(-torch.exp(-2 * k))
    log_prob = log_normaliser + k * (loc * x.unsqueeze(1)).sum(-1)
    return torch.logsumexp(log_weights + log_prob, dim=-1)


def sums(log_prob: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, Tensor]:
    """For each component the sum of its responsibilities (K,), and of the points times these (K, D)."""
    log_weights, loc, concentration, x = (one.detach() for one in given)
    log_weights, loc = log_weights.requires_grad_(), loc.requires_grad_()
    counts, pull = torch.autograd.grad(log_prob(log_weights, loc, concentration, x).sum(), (log_weights, loc))
    return counts, pull / concentration.unsqueeze(-1)


def draw(count: int) -> Tensor:
    """Points about a spiral from pole to pole."""
    height = 2 * torch.rand(count) - 1
    angle, radius = 20 * height, (1 - height.square()).sqrt()
    spiral = torch.stack((radius * angle.cos(), radius * angle.sin(), height), dim=-1)
    return normalize(spiral + 0.02 * torch.randn(count, 3), dim=-1)


def main() -> None:
    torch.manual_seed(0)
    x, held_out = draw(POINTS), draw(HELD_OUT)
    log_weights = torch.full((COMPONENTS,), -math.log(COMPONENTS))
    loc, concentration = x[:COMPONENTS], torch.full((COMPONENTS,), 200.0)
    print(f"held out, a uniform density: {-math.log(4 * math.pi):.3f}")
    for step in range(STEPS):
        counts, resultant = sums(by_op, log_weights, loc, concentration, x)
        length = resultant.norm(dim=-1) / (counts + 0.01)  # a bit of a point without direction: none becomes a spike
        loc = normalize(resultant, dim=-1)
        concentration = (length * (3 - length.square()) / (1 - length.square())).clamp(min=1)  # Banerjee et al. 2005
        log_weights = ((counts + 1) / (POINTS + COMPONENTS)).log()
        if step % 5 == 4:
            print(f"held out, step {step + 1}: {by_op(log_weights, loc, concentration, held_out).mean():.3f}")

    fitted = log_weights, loc, concentration, held_out
    exact = plain(*(one.double() for one in fitted))
    for log_prob in (plain, by_op):
        print(f"{log_prob.__name__}: largest error against float64 {(log_prob(*fitted) - exact).abs().max():.1e}")
        peak = effops.lint(sums, log_prob, log_weights, loc, concentration, x, fixes=False).peak_bytes
        print(f"{log_prob.__name__}: a step takes {peak:,} bytes, predicted")


if __name__ == "__main__":
    main()
