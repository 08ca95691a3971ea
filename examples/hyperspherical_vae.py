"""A variational autoencoder of handwritten digits with a PowerSpherical latent, by the package power_spherical.

One line puts an op of effops under the package. The losses stay; the memory of all pairs of draws and posteriors goes.
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from power_spherical import HypersphericalUniform, PowerSpherical
from sklearn.datasets import load_digits
from torch import Tensor, nn

import effops
from effops.measure import Pass, memory

LATENT, HIDDEN, BATCH, STEPS = 16, 128, 512, 60


class Autoencoder(nn.Module):
    """`forward(pixels)` is the negative evidence lower bound; the divergence of the aggregate counts twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, LATENT + 1))
        self.decoder = nn.Sequential(nn.Linear(LATENT, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 64))

    def forward(self, pixels: Tensor) -> Tensor:
        direction, sharpness = self.encoder(pixels).split([LATENT, 1], -1)
        scale = 1 + nn.functional.softplus(sharpness.squeeze(-1))
        posterior = PowerSpherical(nn.functional.normalize(direction, dim=-1), scale)
        z = posterior.rsample()
        pairs = posterior.log_prob(z.unsqueeze(1))  # (B, B): each draw under each posterior, by way of (B, B, D)
        own, aggregate = pairs.diagonal(), pairs.logsumexp(1) - math.log(len(pixels))
        information = (own - aggregate).mean()
        divergence = (aggregate - HypersphericalUniform(LATENT).log_prob(z)).mean()
        errors = nn.functional.binary_cross_entropy_with_logits(self.decoder(z), pixels, reduction="none")
        return errors.sum(-1).mean() + information + 2 * divergence


def train(pixels: Tensor, op: AbstractContextManager) -> tuple[list[float], int]:
    """The losses of training, and the bytes that a step takes beside the gradients."""
    torch.manual_seed(0)
    model, losses = Autoencoder(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with op:
        for _ in range(STEPS):
            loss = model(pixels[torch.randint(len(pixels), (BATCH,))])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        step = Pass(lambda batch: torch.autograd.grad(model(batch), list(model.parameters())), (pixels[:BATCH],))
        return losses, memory(step).temporary_bytes


def main() -> None:
    pixels = torch.from_numpy(load_digits().data).float() / 16
    losses, taken = train(pixels, nullcontext())
    losses_patched, taken_patched = train(pixels, effops.patch_power_spherical())  # the line that changes
    print("step  package  patched")
    for step in (*range(0, STEPS, 10), STEPS - 1):
        print(f"{step:4} {losses[step]:8.3f} {losses_patched[step]:8.3f}")
    print(f"largest difference of a loss: {max(abs(a - b) for a, b in zip(losses, losses_patched)):.1e}")
    print(f"a step takes {taken:,} bytes by the package, {taken_patched:,} bytes patched, measured")


if __name__ == "__main__":
    main()
