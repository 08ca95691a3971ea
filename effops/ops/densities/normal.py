"""The log density of independent normal coordinates, of every broadcast pair.

    log p(x | loc, s) = W(s) - 1/2 sum_d ((x_d - loc_d) / s_d)^2,    W(s) = - sum_d log s_d - D / 2 log(2 pi)

The squared distance |x|^2 - 2 <x, loc> + |loc|^2 would be a matrix product. But it cancels where x is close to loc, or
both are far from 0. So no variant uses it as it stands. `effops.blocks.distances` tells when a variant may use it.
"""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from effops.blocks.distances import Distances
from effops.dispatch.call import call
from effops.dispatch.validation import Condition, finite
from effops.ops.densities import cpp, triton
from effops.ops.densities.density import DensityCall, Form, Kernels, Native, Wanted
from effops.ops.densities.log_prob import LogProb
from effops.ops.densities.mixture import Mixture


def _naive(
    loc: Tensor, scale: Tensor, normaliser: Tensor, x: Tensor, arithmetic: torch.dtype, tolerance: float
) -> Tensor:
    # Expanded, the scale has its gradient summed over the pairs as that of loc is, by one loop of a compiled form.
    deviation = scale.to(arithmetic).expand(list(scale.shape[:-1]) + [x.shape[-1]])  # noqa: RUF005
    z = (x.to(arithmetic) - loc.to(arithmetic)) / deviation
    return torch.add(normaliser.to(arithmetic), (z * z).sum(-1), alpha=-0.5)


class Normal:
    """Normal densities, as `effops.ops.densities.density.Density`."""

    name = "normal"
    scale_name = "scale"
    scale_dims = 1
    smallest = 0
    compiled_bytes_per_scale = 8
    forms: Mapping[str, Form] = MappingProxyType({"naive": _naive})

    def normaliser(self, scale: Tensor, dimension: int) -> Tensor:
        repeats = dimension // max(1, scale.shape[-1])
        return -repeats * (scale.log() + 0.5 * math.log(2 * math.pi)).sum(-1)

    def tolerance(self, call: DensityCall) -> float:
        return 0.0

    def kernels(self, call: DensityCall) -> Kernels:
        return triton.distance_kernels()

    def native(self, call: DensityCall) -> Native:
        return cpp.of_distances(call.dimension)

    def blocks(self, call: DensityCall, *, scored: bool = True, wanted: Wanted = (False, False, False)) -> Distances:
        return Distances(call.plan, call.loc, call.scale, call.x, call.arithmetic, wanted)

    def conditions(self, call: DensityCall) -> Iterator[Condition]:
        yield finite("loc", call.loc)
        yield finite("x", call.x)
        is_deviation = (call.scale > 0) & call.scale.isfinite()
        remedy = "give a standard deviation, and variance.sqrt() or log_scale.exp() if you have these"
        yield Condition("scale", "be finite and above 0", call.scale, is_deviation, remedy)

    def small(self, call: DensityCall) -> None:
        return None


density = Normal()
op = LogProb(density).op
mixture = Mixture(density).op


@op.public
def normal_log_prob(loc: Tensor, scale: Tensor | float, x: Tensor, *, variant: str | None = None) -> Tensor:
    """Log density of independent normal coordinates: `Independent(Normal(loc, scale), 1).log_prob(x)`, without its
    intermediate.

        log p(x | loc, s) = - 1/2 sum_d ((x_d - loc_d) / s_d)^2 - sum_d log s_d - D / 2 log(2 pi)

    Args:
        loc: means `(*L, D)`
        scale: standard deviations `(*S, D)`, or `(*S, 1)` or a number for all coordinates; positive
        x: points `(*X, D)`
        variant: the implementation to run; "auto" for the best that supports the call (see `effops.explain`), and None
            for that of `effops.use_variant`, or else the best

    Returns:
        The log densities, of the shape to which `L`, `S` and `X` broadcast; it may be a permuted view. The dtype is the
        promotion of the inputs' (under autocast float32 or wider); the arithmetic is float32, or float64 for float64.

    Squared distances keep their digits where x is close to loc, and where both are far from 0. For backward, variant
    chunked saves the three inputs and no more. Values are checked inside of `effops.validate()` only. Without it, a
    negative or NaN scale gives NaN, and a variance in the place of a deviation plausible numbers.

    Raises:
        TypeError: an argument is no tensor, or not of a real (loc, x: floating-point) dtype
        ValueError: shapes do not broadcast, last dimensions differ, devices differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> effops.normal_log_prob(torch.zeros(4, 3), torch.ones(4, 1), torch.randn(1000, 1, 3)).shape
        torch.Size([1000, 4])
    """
    return call(op, loc, scale, x, variant=variant)


@mixture.public
def normal_mixture_log_prob(
    log_weights: Tensor,
    loc: Tensor,
    scale: Tensor | float,
    x: Tensor,
    dim: int = -1,
    *,
    variant: str | None = None,
) -> Tensor:
    """Log density of mixtures of normal distributions, without the densities of all components at once.

        log p(x) = log sum_n exp(log_weights_n + log p(x | loc_n, s_n))

    It equals `torch.logsumexp(log_weights + normal_log_prob(loc, scale, x), dim)`.

    Args:
        log_weights: logarithms of the weights of the components, of a batch shape `(*W)`; they need not add up to 1
        loc: means `(*L, D)`
        scale: standard deviations `(*S, D)`, or `(*S, 1)` or a number for all coordinates; positive
        x: points `(*X, D)`
        dim: the axis of the components in the shape to which `W`, `L`, `S` and `X` broadcast
        variant: the implementation to run; "auto" for the best that supports the call (see `effops.explain`), and None
            for that of `effops.use_variant`, or else the best

    Returns:
        The log densities, of that shape without `dim`; it may be a permuted view. The dtype is the promotion of the
        inputs' (under autocast float32 or wider); the arithmetic is float32, or float64 for float64.

    For backward, variant chunked saves the four inputs, and two numbers for each result in the dtype of the arithmetic.
    Without a component, or if all weights are 0, the result is -inf and its gradients are 0. If it is -inf because the
    density of each component overflows, gradients are NaN, since shares are unknown. +inf and NaN are as in
    `torch.logsumexp`, with one exception: variant triton leaves out a component of weight 0 even where its density is
    NaN.

    Values are checked inside of `effops.validate()` only. Without it, weights in place of their logarithms give
    plausible numbers that are wrong. So do arguments in another order, where their shapes allow it. See also
    `normal_log_prob`.

    Raises:
        TypeError: an argument is no tensor, or not of a real (all but scale: floating-point) dtype
        ValueError: shapes do not broadcast, `dim` is none of their axes, last dimensions differ, devices differ, no
            such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> log_weights, loc, scale = torch.full((4,), 0.25).log(), torch.zeros(4, 3), torch.ones(4, 1)
        >>> effops.normal_mixture_log_prob(log_weights, loc, scale, torch.randn(1000, 1, 3)).shape
        torch.Size([1000])
    """
    return call(mixture, log_weights, loc, scale, x, dim, variant=variant)
