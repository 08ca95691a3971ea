"""von Mises-Fisher log density of every broadcast pair.   Mardia & Jupp 2000, Directional Statistics, section 9.3.2.

    log p(x | loc, k) = W(k) + k (<loc, x> - 1)
    W(k) = (D / 2 - 1) log k - D / 2 log(2 pi) - log I_{D/2-1}(k) + k

The maximum of the exponential is taken out, so neither term overflows. W is `log_vmf_normaliser`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from effops.blocks.dots import DotMap
from effops.dispatch.call import call
from effops.dispatch.custom_op import CustomOp
from effops.numerics.directions import directions_at_angle
from effops.numerics.quantiles import angle_slope
from effops.numerics.special import bessel_ratio, log_vmf_normaliser
from effops.numerics.values import is_captured
from effops.ops.densities.directional import Directional
from effops.ops.densities.log_prob import LogProb
from effops.ops.densities.mixture import Mixture
from effops.pytorch.calls import _standard_gamma


def _phi(dot: Tensor, tolerance: float) -> Tensor:
    return dot - 1  # it is finite everywhere, so that `tolerance`, which every phi is given, is not needed


class NormaliserCall(NamedTuple):
    """The normaliser of a float64 concentration, as an operator computes it."""

    concentration: Tensor
    dimension: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.concentration,)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(self)

    def empty(self) -> Tensor:
        return torch.empty_like(self.concentration)

    def value(self) -> Tensor:
        return log_vmf_normaliser(self.concentration, self.dimension)

    def forward(self) -> Tensor:
        return self.empty().copy_(self.value())

    def backward(self, dout: Tensor) -> Tensor:
        slope = bessel_ratio(self.concentration, self.dimension)[1]
        return torch.mul(dout, slope, out=self.empty())


# The normaliser is an operator, since its recurrence is long: a compiler would take a minute, and autograd would keep
# every step.
_operator = CustomOp(
    "von_mises_fisher_normaliser",
    parameters={"concentration": Tensor, "dimension": int},
    split=lambda arguments: NormaliserCall(*arguments),
    forward=NormaliserCall.forward,
    backward=lambda dout, call, wanted: (call.backward(dout) if wanted[0] else None,),
    composite=NormaliserCall.value,
    empty=NormaliserCall.empty,
    core_dims=(0,),
)


def _normaliser(concentration: Tensor, dimension: int) -> Tensor:
    return _operator(NormaliserCall(concentration, dimension))


class CosineMinusOne(DotMap):
    """phi(t) = t = <loc, x> - 1 and the von Mises-Fisher normaliser, for `effops.ops.densities.directional`.

    phi is finite everywhere. So `floor` and `tolerance`, which every map is given, are not needed.
    """

    intercept = -1.0
    native, settings = "von_mises_fisher", (-math.inf, -math.inf, intercept)

    def __init__(self, dimension: int, floor: float, tolerance: float) -> None:
        self.dimension = dimension

    def normaliser(self, scale: Tensor) -> Tensor:
        return log_vmf_normaliser(scale.double(), self.dimension)

    def normaliser_derivative(self, scale: Tensor) -> Tensor:
        return bessel_ratio(scale.double(), self.dimension)[1]


def draw(loc: Tensor, concentration: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A draw for each loc (..., D) and concentration (...), differentiable in both, once.

    The draws are by rejection, which has no gradient. The gradient by the concentration follows from the angle alone:
    it is how far the angle moves with the concentration, if the probability of a smaller angle stays the same.

    Sources: Wood 1994, Simulation of the von Mises Fisher distribution; Figurnov, Mohamed & Mnih 2018, Implicit
    Reparameterization Gradients, arXiv:1805.08498.
    """
    ratio = _draw_ratio(concentration.detach(), loc.shape[-1], generator)
    if concentration.requires_grad and torch.is_grad_enabled():
        ratio = _MovingRatio.apply(ratio, concentration, loc.shape[-1])
    return directions_at_angle(loc, ratio, generator)


def _draw_ratio(concentration: Tensor, dimension: int, generator: torch.Generator | None) -> Tensor:
    """tan(angle / 2)^2 of a draw for each concentration.

    The proposal is c up / down with two gamma variables. Wood's log acceptance ratio is
    k (w - w0) + d log((1 - w0 w) / (1 - w0^2)) with d = D - 1. It equals d (v + log(1 - v)), where nothing cancels at
    large k.
    """
    if is_captured(concentration.device):
        raise NotImplementedError(
            "VonMisesFisher.rsample: draws by rejection must not be captured in a CUDA graph, since the host asks "
            "whether any is missing; got a stream that is being captured; draw before, or use PowerSpherical"
        )
    d = dimension - 1
    c = d / (2 * concentration + torch.hypot(2 * concentration, concentration.new_full((), d)))
    ratio, missing = torch.empty_like(c), torch.ones_like(c, dtype=torch.bool)
    while missing.any():
        c_missing = c[missing]
        up, down = (_standard_gamma(torch.full_like(c_missing, 0.5 * d), generator=generator) for _ in range(2))
        v = (1 - c_missing) * (down - up) / (2 * (down + c_missing * up))
        rejected = d * (v + torch.log1p(-v)) < torch.empty_like(v).uniform_(generator=generator).log()
        ratio[missing] = c_missing * up / down
        missing = missing.masked_scatter(missing, rejected)
    return ratio


class _MovingRatio(torch.autograd.Function):
    """The ratios tan(angle / 2)^2 as they are, with the gradient by the concentrations that `angle_slope` tells."""

    @staticmethod
    def forward(ratio: Tensor, concentration: Tensor, dimension: int) -> Tensor:
        return ratio.clone()  # the other arguments are for backward

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        *tensors, ctx.dimension = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dratio: Tensor) -> tuple[None, Tensor, None]:
        ratio, concentration = (saved.double() for saved in ctx.saved_tensors)
        slope = angle_slope(ratio, concentration, ctx.dimension) * ratio.sqrt() * (1 + ratio)
        return None, dratio * slope.to(dratio.dtype), None


density = Directional(
    "von_mises_fisher",
    scale_name="concentration",
    phi=_phi,
    normaliser=_normaliser,
    map=CosineMinusOne,
    kernel="von_mises_fisher",
    singular=False,
    compiled_bytes_per_scale=112,
)
op = LogProb(density).op
mixture = Mixture(density).op


@op.public
def von_mises_fisher_log_prob(
    loc: Tensor, concentration: Tensor | float, x: Tensor, *, variant: str | None = None
) -> Tensor:
    """Log density of von Mises-Fisher distributions on the unit sphere.

        log p(x | loc, k) = W(k) + k (<loc, x> - 1)
        W(k) = (D / 2 - 1) log k - D / 2 log(2 pi) - log I_{D/2-1}(k) + k

    Args:
        loc: mean directions `(*L, D)`, unit vectors, D >= 2
        concentration: k, of shape `(*S)` or a number; at 0 the distribution is uniform
        x: points on the sphere `(*X, D)`, unit vectors
        variant: the implementation to run; "auto" for the best that supports the call (see `effops.explain`), and None
            for that of `effops.use_variant`, or else the best

    Returns:
        The log densities, of the shape to which `L`, `S` and `X` broadcast; it may be a permuted view. The dtype is the
        promotion of the inputs' (under autocast float32 or wider); the arithmetic is float32, or float64 for float64.

    The normaliser is computed in float64. For backward, variants cpp, chunked and triton save the three inputs and no
    more. Values are checked inside of `effops.validate()` only. Without it, vectors that are not of length 1 give
    finite numbers that are no log densities, and a negative, infinite or NaN concentration gives NaN.

    Raises:
        TypeError: an argument is no tensor, or not of a real (loc, x: floating-point) dtype
        ValueError: shapes do not broadcast, last dimensions differ or are below 2, devices differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> loc = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
        >>> x = torch.nn.functional.normalize(torch.randn(1000, 1, 3), dim=-1)
        >>> effops.von_mises_fisher_log_prob(loc, torch.full((4,), 10.0), x).shape
        torch.Size([1000, 4])

    Source: Mardia & Jupp 2000, Directional Statistics, section 9.3.2.
    """
    return call(op, loc, concentration, x, variant=variant)


@mixture.public
def von_mises_fisher_mixture_log_prob(
    log_weights: Tensor,
    loc: Tensor,
    concentration: Tensor | float,
    x: Tensor,
    dim: int = -1,
    *,
    variant: str | None = None,
) -> Tensor:
    """Log density of mixtures of von Mises-Fisher distributions, without the densities of all components at once.

        log p(x) = log sum_n exp(log_weights_n + log p(x | loc_n, k_n))

    It equals `torch.logsumexp(log_weights + von_mises_fisher_log_prob(loc, concentration, x), dim)`.

    Args:
        log_weights: logarithms of the weights of the components, of a batch shape `(*W)`; they need not add up to 1
        loc: mean directions `(*L, D)`, unit vectors, D >= 2
        concentration: concentrations `(*S)` or a number
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
    `von_mises_fisher_log_prob`.

    Raises:
        TypeError: an argument is no tensor, or not of a real (all but concentration: floating-point) dtype
        ValueError: shapes do not broadcast, `dim` is none of their axes, last dimensions differ or are below 2, devices
            differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> loc = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
        >>> x = torch.nn.functional.normalize(torch.randn(1000, 1, 3), dim=-1)
        >>> log_weights = torch.full((4,), 0.25).log()
        >>> effops.von_mises_fisher_mixture_log_prob(log_weights, loc, torch.full((4,), 10.0), x).shape
        torch.Size([1000])

    Source: Banerjee et al. 2005, Clustering on the Unit Hypersphere using von Mises-Fisher Distributions.
    """
    return call(mixture, log_weights, loc, concentration, x, dim, variant=variant)
