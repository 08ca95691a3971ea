"""Special functions of the normalisers, in float64, without the cancellation of the textbook forms.

Each is a composition of elementary operations: differentiable any number of times, scriptable, traceable, and without
a look at the values.
"""

import functools
import math
from typing import TypeVar

import torch
from torch import Tensor

Number = TypeVar("Number", Tensor, float)

# Stirling's series is used at arguments of at least 12, which the recurrence reaches where they are smaller: there the
# first omitted term of the slope is below 2e-14 (relative to the ratio, below 1e-15).


def log_gamma_ratio(s: Tensor, b: float) -> Tensor:
    """`lgamma(s + 2 b) - lgamma(s + b)` for a float64 tensor `s` and a number `b > 0`; NaN where `s + b <= 0`.

    The difference of two lgamma loses every digit at large s. Here each term is at most as large as the result: with
    n = max(0, ceil(12 - b)), a = s + b, A = a + n, B = A + b and Stirling's remainder delta,

        b log B + A log(B / A) - b - log(B / A) / 2 + delta(B) - delta(A) - log prod_{k < n} (1 + b / (a + k))

    Within 5e-15 of max(1, |ratio|) for b = 1/2 .. 2047.5 and s = 1e-30 .. 1e30.
    """
    n = max(0, math.ceil(12 - b))
    lower = s + (b + n)
    upper = lower + b
    log_ratio = torch.log1p(b / lower)
    total = torch.add((lower - 0.5) * log_ratio, torch.log(upper) - 1, alpha=b)
    remainder = _stirling_remainder(torch.stack((upper, lower)), b + n)
    total = total + (remainder[0] - remainder[1])
    if n > 0:
        product = torch.ones_like(s)
        for k in range(n):
            product = torch.addcdiv(product, product, s + (b + k), value=b)
        total = total - torch.log(product)
    return torch.where(s > -b, total, float("nan"))


def digamma_ratio(s: Tensor, b: float) -> Tensor:
    """`digamma(s + 2 b) - digamma(s + b)`, the derivative of `log_gamma_ratio` by s, to the same relative accuracy.

    log(B / A) + b / (2 A B) + delta'(B) - delta'(A) + sum_{k < n} b / ((a + k) (a + b + k))
    """
    n = max(0, math.ceil(12 - b))
    lower = s + (b + n)
    upper = lower + b
    total = torch.log1p(b / lower) + (0.5 * b) / lower / upper
    remainder = _stirling_remainder_slope(torch.stack((upper, lower)).reciprocal())
    total = total + (remainder[0] - remainder[1])
    for k in range(n):
        step = s + (b + k)
        total = total + b / step / (step + b)
    return torch.where(s > -b, total, float("nan"))


def log_gamma_ratio_of_number(s: float, b: float) -> float:
    """`log_gamma_ratio` of one number, as it computes it: PyTorch's operations take ten times as long for one."""
    if not s > -b:
        return math.nan
    n = max(0, math.ceil(12 - b))
    lower = s + (b + n)
    upper = lower + b
    total = (lower - 0.5) * math.log1p(b / lower) + b * (math.log(upper) - 1)
    total += _stirling_remainder(upper, b + n) - _stirling_remainder(lower, b + n)
    return total - sum([math.log1p(b / (s + (b + k))) for k in range(n)])


def digamma_ratio_of_number(s: float, b: float) -> float:
    """`digamma_ratio` of one number."""
    if not s > -b:
        return math.nan
    n = max(0, math.ceil(12 - b))
    lower = s + (b + n)
    upper = lower + b
    total = math.log1p(b / lower) + 0.5 * b / lower / upper
    total += _stirling_remainder_slope(1 / upper) - _stirling_remainder_slope(1 / lower)
    return total + sum([b / (s + (b + k)) / (s + (b + k) + b) for k in range(n)])


# Gauss-Legendre nodes and weights on (0, 1). They are on the CPU, and follow a tensor where it is.
_HALF_NODES = (
    0.010885670926971503598,
    0.056468700115952350462,
    0.13492399721297533795,
    0.24045193539659409204,
    0.36522842202382751383,
)
_HALF_WEIGHTS = (
    0.027834283558086833241,
    0.062790184732452312317,
    0.093145105463867125713,
    0.11659688229599523996,
    0.13140227225512333109,
)
_constants = functools.partial(torch.tensor, dtype=torch.float64, device="cpu")
# The interval (b, 2 b) in units of b.
NODES = _constants([*(1 + node for node in _HALF_NODES), 1.5, *(2 - node for node in reversed(_HALF_NODES))])
ONE = _constants([1.0])
WEIGHTS = _constants([*_HALF_WEIGHTS, 0.13646254338895031536, *reversed(_HALF_WEIGHTS)])


def log_gamma_ratio_by_quadrature(s: Tensor, b: float, plus: float = 0.0) -> Tensor:
    """`log_gamma_ratio` plus a number, in float64, for s >= 0 of any dtype, in few operations: fast for few values.

    The ratio is the integral of digamma from s + b to s + 2 b. Gauss and Legendre's 11 nodes give it within 5e-16 of
    max(1, |ratio|) for b = 1/2 .. 2047.5 and s = 0 .. 1e18, as the poles are as far away as the interval is long.
    """
    return _integral(torch.digamma(_points(s, b)), b, plus).view(s.shape)


def digamma_ratio_by_quadrature(s: Tensor, b: float) -> Tensor:
    """`digamma_ratio` for s >= 0 in few operations: the integral of trigamma, within 2e-15 of itself."""
    return _integral(torch.special.zeta(2.0, _points(s, b)), b, 0.0).view(s.shape)


def _points(s: Tensor, b: float) -> Tensor:
    """The points of the quadrature between s + b and s + 2 b: a row of them for each s."""
    return torch.add(s.reshape(-1, 1), _beside(NODES, s), alpha=b)


def _integral(values: Tensor, b: float, plus: float) -> Tensor:
    return torch.addmv(_beside(ONE, values), values, _beside(WEIGHTS, values), beta=plus, alpha=b)


def _beside(constant: Tensor, tensor: Tensor) -> Tensor:
    return constant if tensor.is_cpu else constant.to(tensor.device)


# Stieltjes' continued fraction of Stirling's remainder, 1/12 / (z + 1/30 / (z + ..)), from its last coefficient on.
# Each is one operation, while Stirling's series takes two for a term.
_STIELTJES = (22999 / 22737, 195 / 371, 53 / 210, 1 / 30)


def _stirling_remainder(z: Number, least: float) -> Number:
    """Stirling's remainder within 1e-15, for z of at least `least`, which is 12 or more."""
    one = z.new_ones(1) if isinstance(z, Tensor) else 1.0
    total = z
    for coefficient in _STIELTJES[0 if least < 60 else 2 :]:
        total = torch.addcdiv(z, one, total, value=coefficient) if isinstance(z, Tensor) else z + coefficient / total
    return 1 / (12 * total)


def _stirling_remainder_slope(y: Number) -> Number:
    # With y = 1 / z, -1/(12 z^2) + 1/(120 z^4) - 1/(252 z^6) + 1/(240 z^8) - 1/(132 z^10).
    v = y * y
    return -v * (1 / 12 - v * (1 / 120 - v * (1 / 252 - v * (1 / 240 - v / 132))))


# Debye's expansion is used at an order N of 42 or more, with its first omitted term below 2e-14 in log I_N, and at the
# order D / 2 - 1 itself from 63 on, where that is below 1e-15. In I_{N+1} / I_N it is below 4e-16 there; at a smaller N
# it is larger, but the recurrence down to D / 2 - 1 contracts it.


def log_vmf_normaliser(k: Tensor, dimension: int) -> Tensor:
    """W(k) of the von Mises-Fisher log density W(k) + k (<loc, x> - 1) on the unit sphere in D = `dimension` >= 2, for
    a float64 tensor `k`; NaN where k < 0, and at infinity.

    W = (D / 2 - 1) log k - D / 2 log(2 pi) - log I_{D/2-1}(k) + k, minus the log area of the sphere at k = 0. In that
    form it cancels, and I leaves the range of float64. Here, with an order N = D / 2 - 1 + n, R = hypot(N, k) and the
    polynomials P_j of Debye's expansion of I_N,

        (D - 1) / 2 log(R / (2 pi)) + N log1p(N / R) - N^2 / (k + R) - sum_j P_j(N^2 / R^2) / R^j - log p

    where p = (k / R)^n I_{N-n}(k) / I_N(k) comes from the recurrence of the I. For D = 2 .. 4096 and k = 0 .. 1e30:
    within 2e-14 of max(1, |W|), or 7e-16 from D = 64; through autograd, the first derivative is within 2e-13 of itself,
    or 2e-15 from D = 64, and the second within 2e-12, or 1e-14.
    """
    n, order = _debye_order(dimension)
    radius = torch.hypot(k, k.new_full((), order))
    cosine, sine = k / radius, order / radius
    total = 0.5 * (dimension - 1) * torch.log(radius / (2 * math.pi)) + order * torch.log1p(sine)
    total = total - order * sine / (1 + cosine) - _debye_sum(radius, sine, slope=False)
    if n > 0:
        inverse, square, p = 1 / radius, cosine * cosine, torch.ones_like(k)
        rest = cosine * _debye_ratio(radius, cosine, sine)[0]
        for i in range(n):  # factor = k I_{m-1} / (R I_m) and rest = k I_{m+1} / (R I_m) at m = N - i
            factor = torch.add(rest, inverse, alpha=2 * (order - i))
            p, rest = p * factor, square / factor
        total = total - torch.log(p)
    return torch.where(k >= 0, total, float("nan"))


def bessel_ratio(k: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """A = I_{D/2}(k) / I_{D/2-1}(k), the length of the von Mises-Fisher mean in D = `dimension` >= 2, and 1 - A, the
    derivative of `log_vmf_normaliser`, for a float64 tensor `k`; NaN where k < 0, and at infinity.

    A is about k / D at small k and 1 - A about (D - 1) / (2 k) at large k, so that neither follows from the other. From
    Debye's expansion at an order N, with R = hypot(N, k) and m = N, N - 1 .. D / 2,

        y = 2 m / R - (1 - A_m) k / R,    A_{m-1} = k / R / (y + k / R),    1 - A_{m-1} = y / (y + k / R)

    For D = 2 .. 4096 and k = 0 .. 1e30: A is within 5e-16 of itself, 1 - A and its derivative through autograd within
    1e-13, or 3e-15 from D = 64. The derivative of A through autograd cancels at large k: take that of 1 - A.
    """
    n, order = _debye_order(dimension)
    radius = torch.hypot(k, k.new_full((), order))
    cosine, sine = k / radius, order / radius
    ratio, difference = _debye_ratio(radius, cosine, sine)
    for i in range(n):
        y = 2 * (order - i) / radius - cosine * difference
        ratio, difference = cosine / (y + cosine), y / (y + cosine)
    return torch.where(k >= 0, ratio, float("nan")), torch.where(k >= 0, difference, float("nan"))


def _debye_order(dimension: int) -> tuple[int, float]:
    """n and N."""
    n = max(0, (130 - dimension) // 3)
    return n, 0.5 * dimension - 1 + n


def _debye_ratio(radius: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """A = I_{N+1}(k) / I_N(k) and 1 - A, with k = R cosine and N = R sine: A = cosine (1 / (1 + sine) - h)."""
    h = (0.5 + _debye_sum(radius, sine, slope=True)) / radius
    difference = sine * (1 + cosine + sine) / ((1 + cosine) * (1 + sine)) + cosine * h
    return cosine * (1 / (1 + sine) - h), difference


def _debye_sum(radius: Tensor, sine: Tensor, slope: bool) -> Tensor:
    """sum_j P_j(v) / R^j, the logarithm of Debye's sum of the U_j(N / R) / N^j, with v = (N / R)^2; or its slope by
    log(N / R) at a given N: sum_j Q_j(v) / R^j, Q_j = j P_j + 2 v P_j'."""
    v = sine * sine
    polynomials = _debye_polynomials()
    total = torch.zeros_like(v)
    for j in range(len(polynomials), 0, -1):
        polynomial = polynomials[j - 1]
        if slope:
            polynomial = [(j + 2 * i) * coefficient for i, coefficient in enumerate(polynomial)]
        value = polynomial[j] * v
        for i in range(j - 1, 0, -1):
            value = (value + polynomial[i]) * v
        total = (total + value + polynomial[0]) / radius
    return total


def _debye_polynomials() -> list[list[float]]:
    """P_1, P_2, .., each from its constant on; from Debye's recurrence of the U_j (DLMF 10.41.9)."""
    return [
        [1 / 8, -5 / 24],
        [1 / 16, -3 / 8, 5 / 16],
        [25 / 384, -531 / 640, 221 / 128, -1105 / 1152],
        [13 / 128, -71 / 32, 531 / 64, -339 / 32, 565 / 128],
        [1073 / 5120, -50049 / 7168, 186821 / 4608, -44899 / 512, 82825 / 1024, -82825 / 3072],
        [103 / 192, -405 / 16, 1677 / 8, -5389 / 8, 65385 / 64, -11805 / 16, 19675 / 96],
        [
            375733 / 229376,
            -3407083 / 32768,
            38038059 / 32768,
            -168434443 / 32768,
            1852155413 / 163840,
            -432038457 / 32768,
            256406305 / 32768,
            -1282031525 / 688128,
        ],
    ]
