"""Special functions against 50 digits."""

import mpmath
import pytest
import torch

from effops.special import digamma_ratio, log_gamma_ratio

S = [-0.4, 1e-30, 1e-3, 0.5, 1.0, 3.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e10, 1e30]


@pytest.mark.parametrize("dimension", [2, 3, 8, 24, 25, 26, 127, 128, 768, 4096])
def test_ratios_against_mpmath(dimension):
    b = (dimension - 1) / 2
    s = torch.tensor(S, dtype=torch.float64, requires_grad=True)
    value, slope = log_gamma_ratio(s, b), digamma_ratio(s, b)
    (through_autograd,) = torch.autograd.grad(value.sum(), s)
    with mpmath.workdps(80):
        for i, exact_s in enumerate(map(mpmath.mpf, S)):
            exact = mpmath.loggamma(exact_s + 2 * b) - mpmath.loggamma(exact_s + b)
            exact_slope = mpmath.digamma(exact_s + 2 * b) - mpmath.digamma(exact_s + b)
            assert abs(value[i].item() - exact) <= 5e-15 * max(1, abs(exact))
            assert abs(slope[i].item() - exact_slope) <= 1e-14 * abs(exact_slope)
            assert abs(through_autograd[i].item() - exact_slope) <= 1e-13 * abs(exact_slope)


def test_no_density_no_number():
    s = torch.tensor([-3.5, -3.6, -1e30, float("nan")], dtype=torch.float64)
    assert log_gamma_ratio(s, 3.5).isnan().all()
    assert digamma_ratio(s, 3.5).isnan().all()


def test_second_derivative():
    s = torch.tensor([0.01, 1.0, 50.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda s: log_gamma_ratio(s, 1.5), s)
    assert torch.autograd.gradcheck(lambda s: digamma_ratio(s, 1.5), s)
