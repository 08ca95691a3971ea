"""Log density of independent normal coordinates, of every broadcast pair.

    log p(x | loc, s) = W(s) - 1/2 sum_d ((x_d - loc_d) / s_d)^2,    W(s) = - sum_d log s_d - D / 2 log(2 pi)

The matrix product that |x|^2 - 2 <x, loc> + |loc|^2 asks for cancels where x is close to loc, or both far from 0. So
no variant takes it as it stands; see `effops.blocks.distances` for when one may.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from effops.blocks.distances import Distances
from effops.blocks.plan import Plan, Shape
from effops.dispatch.call import call
from effops.numerics.precision import arithmetic_dtype, contraction_error, unit_roundoff
from effops.ops.densities.density import Call, Form, log_prob_op
from effops.ops.densities.mixture import mixture_op
from effops.reference.bounds import Bounds


def _naive(
    loc: Tensor, scale: Tensor, normaliser: Tensor, x: Tensor, arithmetic: torch.dtype, tolerance: float
) -> Tensor:
    z = (x.to(arithmetic) - loc.to(arithmetic)) / scale.to(arithmetic)
    return torch.add(normaliser.to(arithmetic), (z * z).sum(-1), alpha=-0.5)


class Normal:
    """Normal densities, as `effops.ops.densities.density.Density`."""

    name = "normal"
    scale_name = "scale"
    scale_dims = 1
    smallest = 0
    forms: Mapping[str, Form] = MappingProxyType({"naive": _naive})
    kernel = "distances"
    sizes: Mapping[str, int] = MappingProxyType({"N": 4096, "M": 4096, "D": 64})
    cases: Mapping[str, tuple[Shape, ...]] = MappingProxyType(
        {
            # loc, scale, x
            "founding": ((5, 6, 7), (5, 6, 7), (5, 1, 6, 7)),
            "one against many": ((7,), (1,), (33, 7)),
            "row by row": ((29, 8), (29, 1), (29, 8)),
            "single": ((2,), (2,), (2,)),
            "one coordinate": ((17, 1), (17, 1), (19, 1, 1)),
            "columns only": ((17, 5), (17, 5), (5,)),
            "one scale": ((21, 5), (1,), (18, 1, 5)),
            "a scale for each coordinate": ((21, 5), (5,), (18, 1, 5)),
            "scale alone varies": ((6,), (9, 6), (13, 1, 6)),
            "scale by rows": ((11, 6), (13, 1, 6), (13, 1, 6)),
            "scale by pairs": ((4, 6), (13, 4, 1), (13, 1, 6)),
            "mixed roles": ((3, 1, 5, 1, 6), (5, 1, 6), (3, 4, 1, 2, 6)),
            "wide": ((3, 768), (3, 1), (2, 1, 768)),
            "several blocks": ((260, 9), (260, 9), (520, 1, 9)),
            "empty rows": ((4, 6), (4, 6), (0, 1, 6)),
            "empty columns": ((0, 6), (0, 1), (3, 1, 6)),
        }
    )

    def normaliser(self, scale: Tensor, dimension: int) -> Tensor:
        repeats = dimension // max(1, scale.shape[-1])
        return -repeats * (scale.log() + 0.5 * math.log(2 * math.pi)).sum(-1)

    def tolerance(self, loc: Tensor, x: Tensor, dtype: torch.dtype) -> float:
        return 0.0

    def blocks(
        self,
        plan: Plan,
        loc: Tensor,
        scale: Tensor,
        x: Tensor,
        dtype: torch.dtype,
        *,
        scored: bool = True,
        wanted: Sequence[bool] = (False, False, False),
    ) -> Distances:
        return Distances(plan, loc, scale, x, arithmetic_dtype(dtype), wanted)

    def at_once(
        self, plan: Plan, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, *, rehearsed: bool = False
    ) -> None:
        return None

    def compiled_training(self, call: Any, pairs: int, is_product: bool, *, reduced: bool) -> tuple[int, int]:
        size = call.arithmetic.itemsize
        cast = size * pairs if not reduced and call.dtype != call.arithmetic else 0
        return size * pairs * reduced, cast + size * call.scale.numel() // max(1, call.scale.shape[-1])

    def sample(
        self,
        loc: Shape,
        scale: Shape,
        x: Shape,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """loc and x normal, scales of 1/2 to 2."""
        return (
            torch.randn(loc, dtype=torch.float64, generator=generator).to(device, dtype),
            (2 ** torch.empty(scale, dtype=torch.float64).uniform_(-1, 1, generator=generator)).to(device, dtype),
            torch.randn(x, dtype=torch.float64, generator=generator).to(device, dtype),
        )

    def workload(
        self,
        *,
        N: int,
        M: int,
        D: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All pairs of N points and M components, from which they are drawn: loc (M, D), scale (M, 1), x (N, 1, D)."""
        loc, scale, noise = self.sample((M, D), (M, 1), (N, D), dtype=torch.float64, generator=generator)
        of = torch.randint(M, (N,), generator=generator)
        x = (loc[of] + scale[of] * noise).unsqueeze(1)
        return loc.to(device, dtype), scale.to(device, dtype), x.to(device, dtype)

    def bounds(self, call: Call) -> Bounds:
        """Where a correct log density lies: a sum of squares, all of one sign, is off in proportion to itself."""
        u, scale = unit_roundoff(call.arithmetic), call.scale.double()
        normaliser = self.normaliser(scale, call.dimension)
        half = torch.zeros(call.shape, dtype=torch.float64, device=call.device)
        for loc, scale_of, x in _coordinates(call):
            half += 0.5 * ((x - loc) / scale_of) ** 2
        value = normaliser - half
        rounding = (
            (8 + contraction_error(call.dimension, call.arithmetic)) * half + 2 * normaliser.abs() + 4 * value.abs()
        )
        rounding = u * rounding + _normaliser_error(scale, call.dimension)
        return Bounds(value, rounding, rounding, dtype=call.dtype)

    def gradient_bounds(
        self, call: Call, dout: Tensor, dout_error: Tensor | float = 0.0
    ) -> tuple[Bounds, Bounds, Bounds]:
        """Where correct gradients of loc, scale and x lie: sums of terms that are off by some u each."""
        g, u = dout.double(), unit_roundoff(call.arithmetic)
        error = g.abs() * (8 * u) + dout_error
        values: list[list[Tensor]] = [[], [], []]
        sizes: list[list[Tensor]] = [[], [], []]
        errors: list[list[Tensor]] = [[], [], []]
        shapes = [tensor.shape[:-1] for tensor in call.tensors]
        for loc, scale, x in _coordinates(call):
            z = (x - loc) / scale
            slope, spread = z / scale, (z * z - 1) / scale
            for i, (term, size) in enumerate(
                ((slope, slope.abs()), (spread, (z * z + 1) / scale.abs()), (-slope, slope.abs()))
            ):
                values[i].append((g * term).sum_to_size(shapes[i]))
                sizes[i].append((g.abs() * size).sum_to_size(shapes[i]))
                errors[i].append((error * size).sum_to_size(shapes[i]))

        def of(i: int) -> Bounds:
            operand = call.tensors[i]
            value, size, error = (
                torch.stack(parts[i], -1).sum_to_size(operand.shape) if parts[i] else operand.double() * 0
                for parts in (values, sizes, errors)
            )
            terms = g.numel() * call.dimension // max(1, operand.numel())
            radius = error + (4 + terms) * u * size
            return Bounds(value, radius, radius)

        return of(0), of(1), of(2)


def _coordinates(call: Call) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """loc, scale and x of one coordinate after the other, in float64."""
    loc, scale, x = (tensor.double() for tensor in call.tensors)
    for d in range(call.dimension):
        yield loc[..., d], scale[..., d if scale.shape[-1] > 1 else 0], x[..., d]


def _normaliser_error(scale: Tensor, dimension: int) -> Tensor:
    """By how much W may be off in float64: its terms may be opposite."""
    repeats = dimension // max(1, scale.shape[-1])
    return 4 * unit_roundoff(torch.float64) * repeats * (scale.log().abs() + math.log(2 * math.pi)).sum(-1)


density = Normal()
op = log_prob_op(density)
mixture = mixture_op(density)


@op.public
def normal_log_prob(loc: Tensor, scale: Tensor | float, x: Tensor, *, variant: str | None = None) -> Tensor:
    """Log density of independent normal coordinates: `Independent(Normal(loc, scale), 1).log_prob(x)`, without its
    intermediate.

        log p(x | loc, s) = - 1/2 sum_d ((x_d - loc_d) / s_d)^2 - sum_d log s_d - D / 2 log(2 pi)

    Args:
        loc: means `(*L, D)`
        scale: standard deviations `(*S, D)`, or `(*S, 1)` or a number for all coordinates; positive
        x: points `(*X, D)`
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        The log densities, of the shape to which `L`, `S` and `X` broadcast; it may be a permuted view. The dtype is the
        promotion of the inputs' (under autocast float32 or wider); the arithmetic is float32, or float64 for float64.

    Squared distances keep their digits where x is close to loc, and where both are far from 0. Variant chunked saves
    the three inputs for backward, no more. Values are not validated: a negative or NaN scale gives NaN.

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
    """Log density of mixtures of normal distributions, without the densities of the components.

        log p(x) = log sum_n exp(log_weights_n + log p(x | loc_n, s_n))

    It equals `torch.logsumexp(log_weights + normal_log_prob(loc, scale, x), dim)`.

    Args:
        log_weights: logarithms of the weights of the components, of a batch shape `(*W)`; they need not add up to 1
        loc: means `(*L, D)`
        scale: standard deviations `(*S, D)`, or `(*S, 1)` or a number for all coordinates; positive
        x: points `(*X, D)`
        dim: the axis of the components in the shape to which `W`, `L`, `S` and `X` broadcast
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        The log densities, of that shape without `dim`; it may be a permuted view. The dtype is the promotion of the
        inputs' (under autocast float32 or wider); the arithmetic is float32, or float64 for float64.

    Variant chunked saves the four inputs for backward and two numbers for each result, in the dtype of the arithmetic.
    Without a component, or with weights of 0 alone, the result is -inf and its gradients are 0; +inf and NaN are as in
    `torch.logsumexp`, but variant triton leaves a component of weight 0 out even where its density is NaN. Values are
    not validated: see `normal_log_prob`.

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
