"""The objective of a PowerSpherical mixture, written plainly and by one op: the same loss and gradients in less memory.

The plain form broadcasts all pairs of points and components with their coordinates before it sums these up.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

import effops
from effops.measure import Pass, memory

POINTS, COMPONENTS, POSITIONS, DIMENSION = 64, 64, 32, 64


def plain(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """Mean negative log likelihood; (N, 1, T, D) points meet (K, T, D) directions."""
    b = (loc.shape[-1] - 1) / 2
    log_normaliser = torch.lgamma(scale + 2 * b) - torch.lgamma(scale + b) - b * math.log(4 * math.pi)
    cosine = (loc * x).sum(-1)  # (N, K, T), by way of (N, K, T, D)
    log_prob = log_normaliser + scale * torch.log((1 + cosine) / 2)
    return -torch.logsumexp(log_weights + log_prob, dim=1).mean()


def by_op(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    return -effops.power_spherical_mixture_log_prob(log_weights, loc, scale, x, dim=1).mean()


def with_gradients(objective: Callable[..., Tensor], *operands: Tensor) -> tuple[Tensor, ...]:
    """The loss, and the gradients of log weights, directions, concentrations and points."""
    loss = objective(*operands)
    return loss.detach(), *torch.autograd.grad(loss, operands)


def main() -> None:
    torch.manual_seed(0)
    operands = (
        torch.randn(COMPONENTS, POSITIONS).log_softmax(0),
        normalize(torch.randn(COMPONENTS, POSITIONS, DIMENSION), dim=-1),
        1 + 20 * torch.rand(COMPONENTS, POSITIONS),
        normalize(torch.randn(POINTS, 1, POSITIONS, DIMENSION), dim=-1),
    )
    operands = tuple(one.requires_grad_() for one in operands)
    before, after = (with_gradients(objective, *operands) for objective in (plain, by_op))
    print(f"loss: plain {before[0]:.5f}, by the op {after[0]:.5f}")
    for name, one, other in zip(("log weights", "directions", "concentrations", "points"), before[1:], after[1:]):
        print(f"gradients of {name}: largest {one.abs().max():.1e}, largest difference {(one - other).abs().max():.1e}")

    taken = {}
    for objective in (plain, by_op):
        work = Pass(lambda *given, objective=objective: with_gradients(objective, *given), operands)
        taken[objective.__name__] = memory(work).temporary_bytes
        print(f"{objective.__name__}: {taken[objective.__name__]:,} bytes beside operands and gradients, measured")
    print(f"saved: {taken['plain'] - taken['by_op']:,} bytes")
    print(effops.explain(effops.power_spherical_mixture_log_prob, *operands, dim=1))


if __name__ == "__main__":
    main()
