"""Special functions of the normalisers, in float64, without the cancellation of the textbook forms.

Each is a composition of elementary operations: differentiable any number of times, scriptable, traceable, and without
a look at the values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Stirling's series is used at arguments of at least 12, which the recurrence reaches where they are smaller: there its
# first omitted term is below 1e-14, and that of its derivative below 2e-14 (both relative to the ratio, below 1e-15).


def log_gamma_ratio(s: Tensor, b: float) -> Tensor:
    """`lgamma(s + 2 b) - lgamma(s + b)` for a float64 tensor `s` and a number `b > 0`; NaN where `s + b <= 0`.

    The difference of two lgamma loses every digit at large s. Here each term is at most as large as the result: with
    n = max(0, ceil(12 - b)), a = s + b, A = a + n, B = A + b and Stirling's remainder delta,

        b log B + A log(B / A) - b - log(B / A) / 2 + delta(B) - delta(A) - sum_{k < n} log(1 + b / (a + k))

    Within 5e-15 of max(1, |ratio|) for b = 1/2 .. 2047.5 and s = 1e-30 .. 1e30.
    """
    n = max(0, math.ceil(12 - b))
    lower = s + (b + n)
    upper = lower + b
    log_ratio = torch.log1p(b / lower)
    total = torch.add((lower - 0.5) * log_ratio, torch.log(upper) - 1, alpha=b)
    remainder = _stirling_remainder(torch.stack((upper, lower)))
    total = total + (remainder[0] - remainder[1])
    if n > 0:
        total = total - torch.log1p(b / _steps(s, b, n)).sum(-1)
    return torch.where(s > -b, total, float("nan"))


def digamma_ratio(s: Tensor, b: float) -> Tensor:
    """`digamma(s + 2 b) - digamma(s + b)`, the derivative of `log_gamma_ratio` by s, to the same relative accuracy.

    log(B / A) + b / (2 A B) + delta'(B) - delta'(A) + sum_{k < n} b / ((a + k) (a + b + k))
    """
    n = max(0, math.ceil(12 - b))
    lower = s + (b + n)
    upper = lower + b
    total = torch.log1p(b / lower) + (0.5 * b) / lower / upper
    remainder = _stirling_remainder_slope(torch.stack((upper, lower)))
    total = total + (remainder[0] - remainder[1])
    if n > 0:
        steps = _steps(s, b, n)
        total = total + (b / steps / (steps + b)).sum(-1)
    return torch.where(s > -b, total, float("nan"))


def _steps(s: Tensor, b: float, n: int) -> Tensor:
    """s + b + k for k = 0 .. n - 1, along a new last axis."""
    return s.unsqueeze(-1) + torch.arange(n, dtype=s.dtype, device=s.device).add(b)


def _stirling_remainder(z: Tensor) -> Tensor:
    # 1/(12 z) - 1/(360 z^3) + 1/(1260 z^5) - 1/(1680 z^7) + 1/(1188 z^9)
    y = 1 / z
    v = y * y
    return y * (1 / 12 - v * (1 / 360 - v * (1 / 1260 - v * (1 / 1680 - v / 1188))))


def _stirling_remainder_slope(z: Tensor) -> Tensor:
    # -1/(12 z^2) + 1/(120 z^4) - 1/(252 z^6) + 1/(240 z^8) - 1/(132 z^10)
    y = 1 / z
    v = y * y
    return -v * (1 / 12 - v * (1 / 120 - v * (1 / 252 - v * (1 / 240 - v / 132))))
