"""PowerSpherical (De Cao & Aziz 2020, arXiv:2006.04437) as a map of dot products, for `pairs`.

    log p(x | loc, s) = W(s) + s phi(<x, loc>),    phi(dot) = log(t / 2),    t = 1 + dot
    W(s) = lgamma(a + b) - lgamma(a) - b log(4 pi),    b = (D - 1) / 2,    a = b + s
    phi'(dot) = 1 / t,    W'(s) = psi(a + b) - psi(a)

Rounding can leave t below 0 at the antipode. If t < -tolerance, x is not on the sphere, and phi is NaN. Below the
floor, which is the rounding unit of the arithmetic, phi is that of the floor and phi' is 0.

Stirling's series gives the differences of lgamma and psi in float64, with the large terms cancelled by hand:

    n >= 0 with A = a + n >= 20,    B = A + b,    y = b / A,    q = log1p(y) / y - 1
    lgamma(a + b) - lgamma(a) = b (log B + q) - log1p(y) / 2 + delta(B) - delta(A) - sum_{k<n} log(1 + b / (a + k))
    psi(a + b) - psi(a) = log1p(y) + y / (2 B) + epsilon(B) - epsilon(A) + sum_{k<n} b / ((a + k) (a + b + k))
"""

import triton
import triton.language as tl

from .tiles import Map


@triton.jit
def phi(dot, tolerance):
    FLOOR: tl.constexpr = 2.0**-53 if dot.dtype == tl.float64 else 2.0**-24
    t = 1 + dot
    clamped = tl.where(t < FLOOR, FLOOR, t)  # this keeps NaN, which tl.maximum would drop
    u = 0.5 * clamped
    value = tl.log(u)
    if dot.dtype == tl.float64:
        y = 0.5 * (dot - 1)  # log u = log1p(y); y / (u - 1) undoes the rounding of u (Kahan)
        value = tl.where(u == 1, y, tl.where(tl.abs(y) < 0.5, value * (y / (u - 1)), value))
    value = tl.where(t < -tolerance, float("nan"), value)
    slope = tl.where(t < FLOOR, 0.0, 1 / clamped)
    return value, slope


@triton.jit
def _shift(scale, D):
    b = 0.5 * (tl.cast(D, tl.float64) - 1)
    # a >= b unless a scale is negative: then a may be any number above 0.
    negative = tl.max((scale < 0).to(tl.int32))
    n = tl.where(negative > 0, 20, tl.maximum(20 - (D - 1) // 2, 0))
    return b, b + scale, n


@triton.jit
def _log1p_excess(y):
    """log1p(y) / y - 1 for y >= 0."""
    tau = y / (2 + y)  # log1p(y) = 2 atanh(tau) = 2 (tau + tau^3 / 3 + tau^5 / 5 + ...)
    v = tau * tau
    series = 1 / 15 + v * (1 / 17 + v * (1 / 19))
    series = 1 / 9 + v * (1 / 11 + v * (1 / 13 + v * series))
    series = 1 / 3 + v * (1 / 5 + v * (1 / 7 + v * series))
    return tl.where(y < 0.5, tau * (2 * tau / (2 + y) * series - 1), tl.log(1 + y) / y - 1)


@triton.jit
def _delta(z):
    """lgamma(z) - (z - 1/2) log z + z - log(2 pi) / 2."""
    r = 1 / z
    v = r * r
    return r * (1 / 12 - v * (1 / 360 - v * (1 / 1260 - v * (1 / 1680))))


@triton.jit
def _epsilon(z):
    """psi(z) - log z + 1 / (2 z)."""
    r = 1 / z
    v = r * r
    return -v * (1 / 12 - v * (1 / 120 - v * (1 / 252 - v * (1 / 240))))


@triton.jit
def normaliser(scale, D):
    b, a, n = _shift(scale, D)
    A = a + n
    B = A + b
    y = b / A
    q = _log1p_excess(y)
    product = tl.zeros_like(a) + 1
    for k in range(n):
        product *= 1 + b / (a + k)
    LOG_4PI: tl.constexpr = 2.5310242469692907
    w = b * (tl.log(B) - LOG_4PI + q) - 0.5 * (y + y * q) + _delta(B) - _delta(A) - tl.log(product)
    return tl.where((a > 0) & (a < float("inf")), w, float("nan"))


@triton.jit
def normaliser_grad(scale, D):
    b, a, n = _shift(scale, D)
    A = a + n
    B = A + b
    y = b / A
    total = y + y * _log1p_excess(y) + 0.5 * y / B + _epsilon(B) - _epsilon(A)
    for k in range(n):
        total += b / (a + k) / (a + b + k)
    return tl.where(a > 0, total, float("nan"))


MAP = Map(phi, normaliser, normaliser_grad)
