"""The PowerSpherical log density of every broadcast pair.   De Cao & Aziz 2020, arXiv:2006.04437.

    log p(x | loc, s) = W(s) + s log((1 + <loc, x>) / 2)
    W(s) = lgamma(s + 2 b) - lgamma(s + b) - b log(4 pi),    b = (D - 1) / 2

The published form, normaliser + s log1p(<loc, x>), cancels at large s: it has two opposite terms of about s log 2. Here
they are one term. Near the antipode, let t = 1 + <loc, x>, u the unit roundoff of the arithmetic, and tol the largest
error of t by rounding. t < -tol gives NaN, since x or loc is not on the sphere. -tol <= t < u is taken as t = u, with
no gradient through the dot product, so that the exact antipode is finite.
"""

import math

import torch
from torch import Tensor

from effops.blocks.dots import DotMap
from effops.dispatch.call import call
from effops.numerics.directions import directions_at_angle
from effops.numerics.special import (
    digamma_ratio,
    digamma_ratio_by_quadrature,
    digamma_ratio_of_number,
    log_gamma_ratio,
    log_gamma_ratio_by_quadrature,
    log_gamma_ratio_of_number,
)
from effops.numerics.values import observed
from effops.ops.densities.directional import Directional
from effops.ops.densities.log_prob import LogProb
from effops.ops.densities.mixture import Mixture
from effops.pytorch.calls import _standard_gamma


def _normaliser(scale: Tensor, dimension: int) -> Tensor:
    b = 0.5 * (dimension - 1)
    return log_gamma_ratio(scale, b) - b * math.log(4 * math.pi)


def _phi(dot: Tensor, tolerance: float) -> Tensor:
    half_floor = 2.0**-54 if dot.dtype == torch.float64 else 2.0**-25
    half = torch.rsub(dot, 0.5, alpha=-0.5)  # t / 2 = (1 + dot) / 2, in one pass
    half = torch.where(half < -0.5 * tolerance, float("nan"), half)
    return torch.log(torch.where(half < half_floor, half_floor, half))  # a NaN stays one


class HalfLog(DotMap):
    """phi(t) = log t, t = (1 + <loc, x>) / 2, and the PowerSpherical normaliser."""

    intercept = slope = 0.5
    native = "power_spherical"

    def __init__(self, dimension: int, floor: float, tolerance: float) -> None:
        self.dimension = dimension
        self.floor, self.least = 0.5 * floor, -0.5 * tolerance
        self.settings = self.floor, self.least, 0.0
        self.below_floor = self.floor * (1 - 2 * self.floor)  # the number before it, as it is half a unit roundoff

    def value_(self, t: Tensor) -> None:
        if self._has_low(t):
            self._raise_(t)
        t.log_()

    def derivative_(self, t: Tensor, factor: Tensor, value: Tensor | None) -> None:
        has_low = self._has_low(t)
        if value is not None:
            torch.log(self._raise_(value.copy_(t)) if has_low else t, out=value)
        if has_low:
            torch.threshold_(t, self.below_floor, math.inf)  # a value that is raised does not change with t
        torch.div(factor, t, out=t)

    def _raise_(self, t: Tensor) -> Tensor:
        """Raise t to the floor where it is below, or to NaN where rounding does not explain that it is."""
        return torch.threshold_(t, self.least, math.nan).clamp_min_(self.floor)

    def _has_low(self, t: Tensor) -> bool:
        """Whether a t is below the floor, or NaN. What is done about it takes no memory, so that bytes are known."""
        return not observed(t.amin(), ordinary=math.inf) >= self.floor  # amin(), as min() would copy a strided block

    def normaliser(self, scale: Tensor) -> Tensor:
        b, constant = 0.5 * (self.dimension - 1), -0.5 * (self.dimension - 1) * math.log(4 * math.pi)
        if scale.numel() == 1:
            return _filled(scale, log_gamma_ratio_of_number(observed(scale, ordinary=1), b) + constant)
        if _are_few(scale, 128):
            return log_gamma_ratio_by_quadrature(scale, b, constant)
        return _normaliser(scale.double(), self.dimension)

    def normaliser_derivative(self, scale: Tensor) -> Tensor:
        b = 0.5 * (self.dimension - 1)
        if scale.numel() == 1:
            return _filled(scale, digamma_ratio_of_number(observed(scale, ordinary=1), b))
        return digamma_ratio_by_quadrature(scale, b) if _are_few(scale, 16) else digamma_ratio(scale.double(), b)


def _filled(like: Tensor, value: float) -> Tensor:
    return like.new_full(like.shape, value, dtype=torch.float64)


def _are_few(scale: Tensor, count: int) -> bool:
    """Whether the scales are so few that a quadrature costs less than the recurrence, and are in its domain."""
    return 0 < scale.numel() <= count and observed(scale.amin(), ordinary=1) >= 0


def draw(loc: Tensor, scale: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A draw for each loc (..., D) and scale (...), differentiable in both.

    (1 + <loc, x>) / 2 is a beta variable: toward / (toward + away) of two gamma variables. Their ratio keeps the digits
    of a small angle. Its gradient keeps the digits at a large scale, where torch's Beta loses them in float32.
    """
    b = 0.5 * (loc.shape[-1] - 1)
    a = scale + b
    toward = _standard_gamma(a, generator=generator).where(a > 0, math.nan)  # for a <= 0 it returns some number
    away = _standard_gamma(torch.full_like(scale, b), generator=generator)
    return directions_at_angle(loc, away / toward, generator)


density = Directional(
    "power_spherical",
    scale_name="scale",
    phi=_phi,
    normaliser=_normaliser,
    map=HalfLog,
    kernel="power_spherical",
    singular=True,
    compiled_bytes_per_scale=40,
)
op = LogProb(density).op
mixture = Mixture(density).op


@op.public
def power_spherical_log_prob(loc: Tensor, scale: Tensor | float, x: Tensor, *, variant: str | None = None) -> Tensor:
    """Log density of PowerSpherical distributions: `PowerSpherical(loc, scale).log_prob(x)`, without its intermediate.

        log p(x | loc, s) = W(s) + s log((1 + <loc, x>) / 2)
        W(s) = lgamma(s + 2 b) - lgamma(s + b) - b log(4 pi),    b = (D - 1) / 2

    Args:
        loc: mean directions `(*L, D)`, unit vectors, D >= 2
        scale: concentrations `(*S)` or a number, positive
        x: points on the sphere `(*X, D)`, unit vectors
        variant: the implementation to run; "auto" for the best that supports the call (see `effops.explain`), and None
            for that of `effops.use_variant`, or else the best

    Returns:
        The log densities, of the shape to which `L`, `S` and `X` broadcast; it may be a permuted view. The dtype is the
        promotion of the inputs' (under autocast float32 or wider); the arithmetic is float32, or float64 for float64.

    The normaliser is computed in float64. For backward, variants cpp, chunked and triton save the three inputs and no
    more. Values are checked inside of `effops.validate()` only. Without it, vectors that are not of length 1 give
    finite numbers that are no log densities, and NaN where a dot product is further below -1 than rounding explains. A
    negative scale gives finite numbers, and NaN where the density cannot be normalised (s <= -b). A scale of NaN or
    infinity gives NaN. An exact antipode is finite.

    Raises:
        TypeError: an argument is no tensor, or not of a real (loc, x: floating-point) dtype
        ValueError: shapes do not broadcast, last dimensions differ or are below 2, devices differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> loc = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
        >>> x = torch.nn.functional.normalize(torch.randn(1000, 1, 3), dim=-1)
        >>> effops.power_spherical_log_prob(loc, torch.full((4,), 10.0), x).shape
        torch.Size([1000, 4])

    Source: De Cao & Aziz 2020, The Power Spherical distribution, arXiv:2006.04437.
    """
    return call(op, loc, scale, x, variant=variant)


@mixture.public
def power_spherical_mixture_log_prob(
    log_weights: Tensor,
    loc: Tensor,
    scale: Tensor | float,
    x: Tensor,
    dim: int = -1,
    *,
    variant: str | None = None,
) -> Tensor:
    """Log density of mixtures of PowerSpherical distributions, without the densities of all components at once.

        log p(x) = log sum_n exp(log_weights_n + log p(x | loc_n, s_n))

    It equals `torch.logsumexp(log_weights + power_spherical_log_prob(loc, scale, x), dim)`.

    Args:
        log_weights: logarithms of the weights of the components, of a batch shape `(*W)`; they need not add up to 1
        loc: mean directions `(*L, D)`, unit vectors, D >= 2
        scale: concentrations `(*S)` or a number
        x: points on the sphere `(*X, D)`, unit vectors
        dim: the axis of the components in the shape to which `W`, `L`, `S` and `X` broadcast
        variant: the implementation to run; "auto" for the best that supports the call (see `effops.explain`), and None
            for that of `effops.use_variant`, or else the best

    Returns:
        The log densities, of that shape without `dim`; it may be a permuted view. The dtype is the promotion of the
        inputs' (under autocast float32 or wider); the arithmetic is float32, or float64 for float64.

    For backward, variants cpp, chunked and triton save the four inputs, and two numbers for each result in the dtype of
    the arithmetic. Without a component, or if all weights are 0, the result is -inf and its gradients are 0. If it is
    -inf because the density of each component overflows, gradients are NaN, since shares are unknown. +inf and NaN are
    as in `torch.logsumexp`, with one exception: variant triton leaves out a component of weight 0 even where its
    density is NaN.

    Values are checked inside of `effops.validate()` only. Without it, weights in place of their logarithms give
    plausible numbers that are wrong. So do arguments in another order, where their shapes allow it. See also
    `power_spherical_log_prob`.

    Raises:
        TypeError: an argument is no tensor, or not of a real (all but scale: floating-point) dtype
        ValueError: shapes do not broadcast, `dim` is none of their axes, last dimensions differ or are below 2, devices
            differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> loc = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
        >>> x = torch.nn.functional.normalize(torch.randn(1000, 1, 3), dim=-1)
        >>> log_weights = torch.full((4,), 0.25).log()
        >>> effops.power_spherical_mixture_log_prob(log_weights, loc, torch.full((4,), 10.0), x).shape
        torch.Size([1000])

    Source: De Cao & Aziz 2020, The Power Spherical distribution, arXiv:2006.04437.
    """
    return call(mixture, log_weights, loc, scale, x, dim, variant=variant)
