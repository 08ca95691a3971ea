"""The gradient by the concentration of von Mises-Fisher draws: against quadrature, and against a million draws."""

import math

import pytest
import torch

from effops.distributions import PowerSpherical, VonMisesFisher
from effops.numerics.quantiles import angle_slope

DIMENSIONS = [2, 3, 4, 8, 32, 128, 512]
CONCENTRATIONS = [1e-3, 0.1, 1.0, 10.0, 100.0, 1e3, 1e5]
SMALL = {(2, 1e-3), (2, 10.0), (3, 1.0), (3, 1e5), (32, 100.0), (512, 1e3)}  # of which some draws are made by default
FEW, MANY = 20_000, 1_000_000


class Angles:
    """The probabilities of angles on a grid: tanh-sinh quadrature of sin(a)^(D-2) exp(k cos a), apart from effops."""

    def __init__(self, dimension, k):
        x = torch.linspace(-4.5, 4.5, 5001, dtype=torch.float64)
        angle, rest = (math.pi * torch.sigmoid(y) for y in (math.pi * x.sinh(), -math.pi * x.sinh()))
        self.sine = torch.minimum(angle, rest).sin()
        self.gap = 2 * (angle / 2).sin() ** 2  # 1 - cosine
        self.ratio = ((angle / 2).sin() / (rest / 2).sin()) ** 2
        self.probability = ((dimension - 2) * self.sine.log() - k * self.gap + (x.cosh() * angle * rest).log()).softmax(
            0
        )

    def mean(self, values):
        return (self.probability * values).sum()

    def slope(self, values):
        """The derivative of E values by k: a covariance with the cosine."""
        return -self.mean((values - self.mean(values)) * (self.gap - self.mean(self.gap)))


@pytest.mark.parametrize("k", [0.0, *CONCENTRATIONS])
@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_slopes_are_those_of_expectations(dimension, k):
    """d E h / dk = E h'(t) dt/dk, for h = gap, gap^2 and sin(angle)."""
    exact = Angles(dimension, k)
    counts = exact.probability > 1e-25
    slope = angle_slope(exact.ratio, torch.full_like(exact.ratio, k), dimension).where(counts, 0.0)
    assert slope.isfinite().all()
    for value, derivative in (
        (exact.gap, exact.sine),
        (exact.gap**2, 2 * exact.gap * exact.sine),
        (exact.sine, 1 - exact.gap),
    ):
        expected = exact.slope(value).item()
        error = 1e-12 * exact.mean((derivative * slope).abs()).item()
        assert exact.mean(derivative * slope).item() == pytest.approx(expected, rel=1e-10, abs=error)


@pytest.mark.parametrize("k", [0.5, 3.0, 30.0])
def test_slope_of_each_angle_in_three_dimensions(k):
    """There F = (exp(k (t - 1)) - exp(-2 k)) / (1 - exp(-2 k)), and dt/dk = -(dF/dk) / (dF/dt)."""
    t = torch.linspace(-0.99, 0.99, 45, dtype=torch.float64).requires_grad_()
    many = torch.full_like(t, k, requires_grad=True)
    below = ((many * (t - 1)).exp() - (-2 * many).exp()) / (1 - (-2 * many).exp())
    dt, dk = torch.autograd.grad(below.sum(), (t, many))
    found = angle_slope((1 - t.detach()) / (1 + t.detach()), many.detach(), 3)
    torch.testing.assert_close(-found * (1 - t.detach() ** 2).sqrt(), -dk / dt, rtol=1e-9, atol=1e-14)


def statistics(dimension, k, count):
    """Of each draw: its gap 1 - t, gap^2, their slopes by k through autograd, and one coordinate."""
    found, chunk = [], max(1000, min(count, 2_000_000 // dimension))
    loc = torch.nn.functional.normalize(torch.randn(dimension, dtype=torch.float64), dim=-1)
    for start in range(0, count, chunk):
        many = torch.full((min(chunk, count - start),), k, dtype=torch.float64, requires_grad=True)
        x = VonMisesFisher(loc, many, validate_args=False).rsample()
        gap = 0.5 * (x - loc).square().sum(-1)
        slopes = [torch.autograd.grad(value.sum(), many, retain_graph=True)[0] for value in (gap, gap**2)]
        found.append(torch.stack([gap, gap**2, *slopes, x[..., -1]]).detach())
    return torch.cat(found, dim=1), loc


@pytest.mark.parametrize(
    ("dimension", "k", "count"),
    [(dimension, k, FEW) for dimension, k in sorted(SMALL)]
    + [
        pytest.param(dimension, k, MANY, marks=pytest.mark.exhaustive)
        for dimension in (2, 3, 8, 64, 512)
        for k in (1e-3, 0.1, 1.0, 10.0, 1e3, 1e5)
    ],
)
def test_moments_and_gradients_of_draws(dimension, k, count):
    """Within 4 standard errors; the gradients too, which a rejection without its term of the score would miss."""
    torch.manual_seed(dimension)
    found, loc = statistics(dimension, k, count)
    exact = Angles(dimension, k)
    expected = [exact.mean(exact.gap), exact.mean(exact.gap**2), exact.slope(exact.gap), exact.slope(exact.gap**2)]
    expected = torch.stack([*expected, loc[-1] * (1 - expected[0])])
    standard_error = found.std(1) / math.sqrt(count)
    assert ((found.mean(1) - expected).abs() <= 4 * standard_error + 1e-12 * expected.abs()).all()


def test_draws_by_rejection_are_not_captured(monkeypatch):
    """In a CUDA graph, PyTorch raised an error of CUDA's instead, which named neither the function nor a remedy."""
    parameters = torch.nn.functional.normalize(torch.ones(4, 3), dim=-1), torch.full((4,), 2.0)
    distributions = VonMisesFisher(*parameters), PowerSpherical(*parameters)
    monkeypatch.setattr("effops.ops.densities.von_mises_fisher.is_captured", lambda device: True)
    for draw in (distributions[0].sample, distributions[0].rsample):
        with pytest.raises(NotImplementedError, match=r"VonMisesFisher\.rsample: .* CUDA graph, .*; draw before"):
            draw((2,))
    assert distributions[1].rsample((2,)).shape == (2, 4, 3)
