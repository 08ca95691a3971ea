"""von Mises-Fisher (Mardia & Jupp 2000, Directional Statistics, section 9.3.2) as a map of dot products, for `pairs`.

    log p(x | loc, k) = W(k) + k phi(<x, loc>),    phi(dot) = dot - 1
    W(k) = (D / 2 - 1) log k - D / 2 log(2 pi) - log I_{D/2-1}(k) + k
    phi'(dot) = 1,    W'(k) = 1 - I_{D/2}(k) / I_{D/2-1}(k)

Debye's uniform expansion gives W and W' in float64 at an order N = D / 2 - 1 + n of at least 63. The recurrence of the
Bessel functions leads from there to D / 2 - 1: with R = hypot(N, k), v = (N / R)^2,

    W = (D - 1) / 2 log(R / (2 pi)) + N log1p(N / R) - N^2 / (k + R) - sum_j P_j(v) / R^j - log p
    W' = g / p,    where p_N = 1, g_N = 1 - A_N, and downwards
    g_m = 2 (m + 1) p_{m+1} / R - c g_{m+1},    p_m = g_m + c p_{m+1},    c = k / R
"""

import triton
import triton.language as tl

from .tiles import Map


@triton.jit
def phi(dot, tolerance):
    return dot - 1, tl.zeros_like(dot) + 1


@triton.jit
def _order(D):
    n = tl.maximum((130 - D) // 3, 0)
    return n, 0.5 * tl.cast(D, tl.float64) - 1 + n


@triton.jit
def _hypot(k, N):
    """sqrt(k^2 + N^2), where the squares may overflow."""
    larger = tl.maximum(k, N)
    ratio = tl.minimum(k, N) / larger
    return larger * tl.sqrt(1 + ratio * ratio)


@triton.jit
def _debye(v, r):
    """sum_j P_j(v) r^j, the logarithm of Debye's sum of the U_j (DLMF 10.41.9)."""
    p1 = 1 / 8 + v * (-5 / 24)
    p2 = 1 / 16 + v * (-3 / 8 + v * (5 / 16))
    p3 = 25 / 384 + v * (-531 / 640 + v * (221 / 128 + v * (-1105 / 1152)))
    p4 = 13 / 128 + v * (-71 / 32 + v * (531 / 64 + v * (-339 / 32 + v * (565 / 128))))
    tail = 82825 / 1024 + v * (-82825 / 3072)
    p5 = 1073 / 5120 + v * (-50049 / 7168 + v * (186821 / 4608 + v * (-44899 / 512 + v * tail)))
    tail = 65385 / 64 + v * (-11805 / 16 + v * (19675 / 96))
    p6 = 103 / 192 + v * (-405 / 16 + v * (1677 / 8 + v * (-5389 / 8 + v * tail)))
    tail = 1852155413 / 163840 + v * (-432038457 / 32768 + v * (256406305 / 32768 + v * (-1282031525 / 688128)))
    p7 = 375733 / 229376 + v * (-3407083 / 32768 + v * (38038059 / 32768 + v * (-168434443 / 32768 + v * tail)))
    return r * (p1 + r * (p2 + r * (p3 + r * (p4 + r * (p5 + r * (p6 + r * p7))))))


@triton.jit
def _debye_slope(v, r):
    """sum_j Q_j(v) r^j, Q_j = j P_j + 2 v P_j', the derivative of `_debye` by log(N / R)."""
    p1 = 1 / 8 + v * (-5 / 8)
    p2 = 1 / 8 + v * (-3 / 2 + v * (15 / 8))
    p3 = 25 / 128 + v * (-531 / 128 + v * (1547 / 128 + v * (-1105 / 128)))
    p4 = 13 / 32 + v * (-213 / 16 + v * (531 / 8 + v * (-1695 / 16 + v * (1695 / 32))))
    tail = 1076725 / 1024 + v * (-414125 / 1024)
    p5 = 1073 / 1024 + v * (-50049 / 1024 + v * (186821 / 512 + v * (-493889 / 512 + v * tail)))
    tail = 457695 / 32 + v * (-11805.0 + v * (59025 / 16))
    p6 = 103 / 32 + v * (-405 / 2 + v * (8385 / 4 + v * (-16167 / 2 + v * tail)))
    tail = 5556466239 / 32768 + v * (-7344653769 / 32768 + v * (4871719795 / 32768 + v * (-1282031525 / 32768)))
    p7 = 375733 / 32768 + v * (-30663747 / 32768 + v * (418418649 / 32768 + v * (-2189647759 / 32768 + v * tail)))
    return r * (p1 + r * (p2 + r * (p3 + r * (p4 + r * (p5 + r * (p6 + r * p7))))))


@triton.jit
def _recurrence(k, n, N, R):
    """p and g at the order D / 2 - 1."""
    cosine, sine = k / R, N / R
    h = (0.5 + _debye_slope(sine * sine, 1 / R)) / R
    g = sine * (1 + cosine + sine) / ((1 + cosine) * (1 + sine)) + cosine * h
    p = tl.zeros_like(k) + 1
    for i in range(n):
        g = 2 * (N - i) / R * p - cosine * g
        p = g + cosine * p
    return p, g


@triton.jit
def normaliser(scale, D):
    n, N = _order(D)
    R = _hypot(scale, N)
    sine = N / R
    rounded = 1 + sine
    log1p = tl.where(rounded == 1, sine, tl.log(rounded) * (sine / (rounded - 1)))  # undoes the rounding (Kahan)
    p, _ = _recurrence(scale, n, N, R)
    LOG_2PI: tl.constexpr = 1.8378770664093453
    w = 0.5 * (tl.cast(D, tl.float64) - 1) * (tl.log(R) - LOG_2PI) + N * log1p - N * sine / (1 + scale / R)
    w = w - _debye(sine * sine, 1 / R) - tl.log(p)
    return tl.where((scale >= 0) & (scale < float("inf")), w, float("nan"))


@triton.jit
def normaliser_grad(scale, D):
    n, N = _order(D)
    p, g = _recurrence(scale, n, N, _hypot(scale, N))
    return tl.where((scale >= 0) & (scale < float("inf")), g / p, float("nan"))


MAP = Map(phi, normaliser, normaliser_grad)
