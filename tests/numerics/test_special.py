"""Special functions against 50 digits."""

import math
from fractions import Fraction

import mpmath
import pytest
import torch

from effops.numerics.special import (
    _debye_polynomials,
    bessel_ratio,
    digamma_ratio,
    digamma_ratio_by_quadrature,
    digamma_ratio_of_number,
    log_gamma_ratio,
    log_gamma_ratio_by_quadrature,
    log_gamma_ratio_of_number,
    log_vmf_normaliser,
)

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


@pytest.mark.parametrize("dimension", [2, 3, 8, 24, 25, 127, 768, 4096])
def test_ratios_by_quadrature_against_mpmath(dimension):
    b = (dimension - 1) / 2
    values = [0.0, *(s for s in S if 0 < s <= 1e10)]
    s = torch.tensor(values, dtype=torch.float64)
    value, slope = log_gamma_ratio_by_quadrature(s, b), digamma_ratio_by_quadrature(s, b)
    with mpmath.workdps(80):
        for i, exact_s in enumerate(map(mpmath.mpf, values)):
            exact = mpmath.loggamma(exact_s + 2 * b) - mpmath.loggamma(exact_s + b)
            exact_slope = mpmath.digamma(exact_s + 2 * b) - mpmath.digamma(exact_s + b)
            assert abs(value[i].item() - exact) <= 1e-15 * max(1, abs(exact))
            assert abs(slope[i].item() - exact_slope) <= 4e-15 * abs(exact_slope)


@pytest.mark.parametrize("dimension", [2, 3, 8, 24, 25, 127, 768, 4096])
def test_ratios_of_a_number_against_mpmath(dimension):
    b = (dimension - 1) / 2
    with mpmath.workdps(80):
        for s in (0.0, *S):
            exact = mpmath.loggamma(mpmath.mpf(s) + 2 * b) - mpmath.loggamma(mpmath.mpf(s) + b)
            exact_slope = mpmath.digamma(mpmath.mpf(s) + 2 * b) - mpmath.digamma(mpmath.mpf(s) + b)
            assert abs(log_gamma_ratio_of_number(s, b) - exact) <= 5e-15 * max(1, abs(exact))
            assert abs(digamma_ratio_of_number(s, b) - exact_slope) <= 1e-14 * abs(exact_slope)


def test_no_density_no_number():
    values = [-3.5, -3.6, -1e30, float("nan")]
    s = torch.tensor(values, dtype=torch.float64)
    for ratio, of_number in (
        (log_gamma_ratio, log_gamma_ratio_of_number),
        (digamma_ratio, digamma_ratio_of_number),
    ):
        assert ratio(s, 3.5).isnan().all()
        assert all(map(math.isnan, (of_number(value, 3.5) for value in values)))
        assert math.isnan(of_number(math.inf, 3.5)) == ratio(torch.tensor(math.inf).double(), 3.5).isnan().item()


def test_second_derivative():
    s = torch.tensor([0.01, 1.0, 50.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda s: log_gamma_ratio(s, 1.5), s)
    assert torch.autograd.gradcheck(lambda s: digamma_ratio(s, 1.5), s)


K = [0, 1e-30, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 2.0, 4.7, 10.0, 31.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e18, 1e30]


def log_bessel(order, k):
    """log(I_order(k) e^-k): mpmath's power series takes about k terms, and Hankel's takes its place at large k."""
    if k <= 1e4:
        return mpmath.log(mpmath.besseli(order, k, maxterms=10**6)) - k
    return mpmath.log(mpmath.hyp2f0(0.5 - order, 0.5 + order, 1 / (2 * k))) - mpmath.log(2 * mpmath.pi * k) / 2


def exact_vmf(k, dimension):
    """W, A and the derivative of A, by A' = 1 - A^2 - (D - 1) A / k."""
    order = mpmath.mpf(dimension) / 2 - 1
    if k == 0:
        return mpmath.loggamma(order + 1) - mpmath.log(2) - (order + 1) * mpmath.log(mpmath.pi), k, 1 / (2 * order + 2)
    log_i = log_bessel(order, k)
    ratio = mpmath.exp(log_bessel(order + 1, k) - log_i)
    normaliser = order * mpmath.log(k) - (order + 1) * mpmath.log(2 * mpmath.pi) - log_i
    return normaliser, ratio, 1 - ratio**2 - (dimension - 1) * ratio / k


@pytest.mark.parametrize("dimension", [2, 3, 4, 5, 7, 8, 64, 127, 128, 129, 130, 512, 768, 4096])
def test_von_mises_fisher_against_mpmath(dimension):
    k = torch.tensor(K, dtype=torch.float64, requires_grad=True)
    value, (ratio, slope) = log_vmf_normaliser(k, dimension), bessel_ratio(k, dimension)
    (slope_of_value,) = torch.autograd.grad(value.sum(), k, create_graph=True)
    (curvature,) = torch.autograd.grad(slope_of_value.sum(), k)
    (slope_of_slope,) = torch.autograd.grad(slope.sum(), k)
    few = dimension < 64  # the recurrence is long
    with mpmath.workdps(100):
        for i, exact_k in enumerate(map(mpmath.mpf, K)):
            exact, exact_ratio, exact_slope_of_ratio = exact_vmf(exact_k, dimension)
            assert abs(value[i].item() - exact) <= (2e-14 if few else 7e-16) * max(1, abs(exact))
            for computed, truth, tolerance in (
                (ratio, exact_ratio, 5e-16),
                (slope, 1 - exact_ratio, 1e-13 if few else 3e-15),
                (slope_of_slope, -exact_slope_of_ratio, 1e-13 if few else 3e-15),
                (slope_of_value, 1 - exact_ratio, 2e-13 if few else 2e-15),
                (curvature, -exact_slope_of_ratio, 2e-12 if few else 1e-14),
            ):
                assert abs(computed[i].item() - truth) <= tolerance * abs(truth)


def test_von_mises_fisher_in_three_dimensions():
    """k / (2 pi (1 - exp(-2 k))) and coth(k) - 1 / k."""
    k = torch.logspace(-6, 300, 5000, dtype=torch.float64)
    expected = torch.log(-k / (2 * math.pi * torch.expm1(-2 * k)))
    assert ((log_vmf_normaliser(k, 3) - expected).abs() <= 2e-14 * expected.abs().clamp(min=1)).all()
    k = k[k > 1]
    torch.testing.assert_close(bessel_ratio(k, 3)[0], 1 / torch.tanh(k) - 1 / k, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dimension", [2, 128])
def test_von_mises_fisher_outside_of_its_domain(dimension):
    k = torch.tensor([-1e-300, -1.0, -1e30, math.inf, math.nan], dtype=torch.float64)
    for values in (log_vmf_normaliser(k, dimension), *bessel_ratio(k, dimension)):
        assert values.isnan().all()


@pytest.mark.parametrize("dimension", [2, 7, 128])
def test_von_mises_fisher_second_derivative(dimension):
    k = torch.tensor([0.01, 1.0, 50.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda k: log_vmf_normaliser(k, dimension), k)
    assert torch.autograd.gradgradcheck(lambda k: bessel_ratio(k, dimension), k)


@pytest.mark.parametrize("dimension", [3, 128])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_von_mises_fisher_scripted(dimension):
    k = torch.tensor([0.0, 1e-3, 1.0, 1e5, -1.0], dtype=torch.float64)
    for function in (log_vmf_normaliser, bessel_ratio):
        torch.testing.assert_close(
            torch.jit.script(function)(k, dimension), function(k, dimension), rtol=1e-15, atol=0, equal_nan=True
        )


def test_debye_polynomials():
    """The U_j by their recurrence, and the logarithm of the series: j L_j = j U_j - sum_i i L_i U_{j-i} is t^j P_j."""

    def product(a, b):
        result = [Fraction(0)] * (len(a) + len(b) - 1)
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                result[i + j] += x * y
        return result

    def total(a, b):
        return [x + y for x, y in zip(a + [Fraction(0)] * (len(b) - len(a)), b + [Fraction(0)] * (len(a) - len(b)))]

    def integral(a):
        return [Fraction(0), *(x / i for i, x in enumerate(a, 1))]

    def derivative(a):
        return [i * x for i, x in enumerate(a)][1:]

    # U_{j+1}(t) = t^2 (1 - t^2) U_j'(t) / 2 + integral from 0 to t of (1 - 5 s^2) U_j(s) / 8
    u, logarithm = [[Fraction(1)]], [[Fraction(0)]]
    for j, polynomial in enumerate(_debye_polynomials(), 1):
        flow = product([Fraction(0), Fraction(0), Fraction(1, 2), Fraction(0), Fraction(-1, 2)], derivative(u[-1]))
        u.append(total(flow, integral(product([Fraction(1, 8), Fraction(0), Fraction(-5, 8)], u[-1]))))
        logarithm.append(u[j])
        for i in range(1, j):
            logarithm[j] = total(logarithm[j], product([Fraction(-i, j)], product(logarithm[i], u[j - i])))
        assert polynomial == [float(x) for x in logarithm[j][j::2]]
