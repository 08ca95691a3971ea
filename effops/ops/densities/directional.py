"""Log densities of directions about a mean direction: W(s) + s phi(<loc, x>) of every broadcast pair.

All that such densities share, as a `Density`. A density brings phi and W: as a `DirectionMap`, in place and in float64,
and phi as a scriptable function of PyTorch operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from effops.blocks import dots
from effops.blocks.dots import contract
from effops.blocks.plan import Plan, Shape
from effops.numerics.directions import random_directions
from effops.numerics.precision import arithmetic_dtype, contraction_error, sphere_tolerance, unit_roundoff
from effops.ops.densities.density import Call, Form, Wanted
from effops.reference.bounds import Bounds, exact_dot

CASES: Mapping[str, tuple[Shape, ...]] = {
    # loc, scale, x
    "founding": ((5, 6, 7), (5, 6), (5, 1, 6, 7)),
    "one against many": ((7,), (), (33, 7)),
    "samples of a batch": ((5, 3), (5,), (11, 5, 3)),
    "row by row": ((29, 8), (29,), (29, 8)),
    "single": ((2,), (), (2,)),
    "columns only": ((17, 5), (17,), (5,)),
    "scale alone varies": ((6,), (9,), (13, 1, 6)),
    "scale by rows": ((4, 6), (13, 1), (13, 1, 6)),
    "scale by pairs": ((4, 6), (13, 4), (13, 1, 6)),
    "mixed roles": ((3, 1, 5, 1, 6), (5, 1), (3, 4, 1, 2, 6)),
    "ones": ((1, 1, 129), (1,), (1, 3, 129)),
    "wide": ((3, 768), (3,), (2, 1, 768)),
    "several blocks": ((260, 9), (260,), (520, 1, 9)),
    "empty rows": ((4, 6), (4,), (0, 1, 6)),
    "empty columns": ((0, 6), (0,), (3, 1, 6)),
}


class DirectionMap(dots.DotMap, Protocol):
    """phi and W of a density: in place for blocks, and in float64 for bounds, as functions of t = 1 + dot."""

    def __init__(self, dimension: int, arithmetic: torch.dtype, floor: float, tolerance: float) -> None: ...

    def phi(self, t: Tensor) -> Tensor:
        """phi at t above the floor."""

    def slope(self, t: Tensor) -> Tensor:
        """phi' there: positive, and nowhere increasing."""

    def normaliser_errors(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """By how much W and W' may be off in float64."""


@dataclass(frozen=True)
class Directional:
    """A density W(s) + s phi(<loc, x>), as `effops.ops.densities.density.Density`.

    Attributes:
        name: of the family
        scale_name: name of the argument s
        phi: of the dot products, and the tolerance of `rounding`; scriptable
        normaliser: W of a float64 scale and the dimension
        map: phi and W
        kernel: the module of `effops.kernels` whose MAP has both as Triton functions
        singular: whether phi is singular at t = 0
        workload: the arguments of the benchmark
    """

    name: str
    scale_name: str
    phi: Callable[[Tensor, float], Tensor]
    normaliser: Callable[[Tensor, int], Tensor]
    map: Callable[[int, torch.dtype, float, float], DirectionMap]
    kernel: str
    singular: bool
    workload: Callable[..., tuple[Tensor, ...]]
    scale_dims = 0
    smallest = 2
    cases = CASES
    sizes = MappingProxyType({"M": 128, "T": 512, "D": 128})

    @functools.cached_property
    def forms(self) -> Mapping[str, Form]:
        phi = self.phi

        def naive(
            loc: Tensor, scale: Tensor, normaliser: Tensor, x: Tensor, arithmetic: torch.dtype, tolerance: float
        ) -> Tensor:
            dot = (loc.to(arithmetic) * x.to(arithmetic)).sum(-1)
            return torch.addcmul(normaliser.to(arithmetic), scale.to(arithmetic), phi(dot, tolerance))

        def einsum(
            loc: Tensor, scale: Tensor, normaliser: Tensor, x: Tensor, arithmetic: torch.dtype, tolerance: float
        ) -> Tensor:
            dot = contract(loc, x, arithmetic)
            return torch.addcmul(normaliser.to(arithmetic), scale.to(arithmetic), phi(dot, tolerance))

        return {"naive": naive, "einsum": einsum}

    def tolerance(self, loc: Tensor, x: Tensor, dtype: torch.dtype) -> float:
        """How far below 0 rounding may take t in a call with a result of `dtype`."""
        if not self.singular:
            return math.inf
        return sphere_tolerance(x.shape[-1], arithmetic_dtype(dtype), (loc.dtype, x.dtype))

    def map_of(self, loc: Tensor, x: Tensor, dtype: torch.dtype) -> DirectionMap:
        arithmetic = arithmetic_dtype(dtype)
        return self.map(x.shape[-1], arithmetic, self._floor(arithmetic), self.tolerance(loc, x, dtype))

    def _floor(self, arithmetic: torch.dtype) -> float:
        """The smallest t that rounding can tell from 0."""
        return unit_roundoff(arithmetic) if self.singular else -math.inf

    def blocks(
        self,
        plan: Plan,
        loc: Tensor,
        scale: Tensor,
        x: Tensor,
        dtype: torch.dtype,
        *,
        scored: bool = True,
        wanted: Wanted = (False, False, False),
    ) -> dots.DotScores:
        return dots.DotScores(
            self.map_of(loc, x, dtype), plan, loc, scale, x, arithmetic_dtype(dtype), scored=scored, wanted=wanted
        )

    def at_once(
        self, plan: Plan, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, *, rehearsed: bool = False
    ) -> Tensor | None:
        if not dots.fit_one_block(plan, x, dtype):
            return None
        return dots.at_once(self.map_of(loc, x, dtype), plan, loc, scale, x, dtype, rehearsed=rehearsed)

    def compiled_training(self, call: Any, pairs: int, is_product: bool, *, reduced: bool) -> tuple[int, int]:
        size, scales = call.arithmetic.itemsize, call.scale.numel()
        temporary = (16 if reduced else 8) * scales * is_product
        if not self.singular:
            return size * pairs + 12 * scales * (size == 4), temporary
        # With the masks of one `where` or of both.
        return (size + size // 4) * pairs + (17 + size % 8) * scales, temporary + size * pairs * reduced

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
        """loc, scale and x of given shapes: directions in general position, and scales of 1 to 100."""
        scales = 10 ** (2 * torch.rand(scale, dtype=torch.float64, generator=generator))
        return (
            random_directions(loc, generator).to(device, dtype),
            scales.to(device, dtype),
            random_directions(x, generator).to(device, dtype),
        )

    def bounds(self, call: Call) -> Bounds:
        """Where a correct log density lies, if its dot product is off by what `contraction_error` allows.

        To either end the rounding of the other steps is added: 2 u (|W| + 2 |s phi| + |out|), and that of W.
        """
        u, tolerance = unit_roundoff(call.arithmetic), self.tolerance(call.loc, call.x, call.dtype)
        floor, density = self._floor(call.arithmetic), self.map_of(call.loc, call.x, call.dtype)
        scale, t, error = call.scale.double(), 1 + exact_dot(call.loc, call.x), _dot_error(call)
        normaliser = density.normaliser(scale)

        def log_prob(t: Tensor) -> Tensor:
            return normaliser + scale * density.phi(t.clamp(min=floor))

        value, low, high = log_prob(t), log_prob(t - error), log_prob(t + error)
        low, high = torch.minimum(low, high), torch.maximum(low, high)
        rounding = 2 * u * (normaliser.abs() + 2 * (value - normaliser).abs() + value.abs())
        rounding += density.normaliser_errors(scale)[0]
        return Bounds(
            torch.where(t + error < -tolerance, math.nan, value),
            value - low + rounding,
            high - value + rounding,
            may_be_nan=t - error < -tolerance,
            dtype=call.dtype,
        )

    def gradient_bounds(
        self, call: Call, dout: Tensor, dout_error: Tensor | float = 0.0
    ) -> tuple[Bounds, Bounds, Bounds]:
        """Where correct gradients of loc, scale and x lie, if the upstream gradient may be off by `dout_error`.

        A weight G = dout s phi' may move as far as t can; a sum of n terms is off by n u at most.
        """
        u, tolerance = unit_roundoff(call.arithmetic), self.tolerance(call.loc, call.x, call.dtype)
        floor, density = self._floor(call.arithmetic), self.map_of(call.loc, call.x, call.dtype)
        loc, scale, x = (tensor.double() for tensor in call.tensors)
        g, t, error = dout.double(), 1 + exact_dot(call.loc, call.x), _dot_error(call)

        # phi', 0 below the floor, and the ends of where it may lie
        slope = torch.where(t < floor, 0, density.slope(t.clamp(min=floor)))
        low = torch.where(t - error < floor, 0, density.slope(t + error))
        high = torch.where(t + error < floor, 0, density.slope((t - error).clamp(min=floor)))
        slope_error = torch.maximum(slope - low, high - slope) + 8 * u * torch.maximum(slope, high)
        phi, phi_low, phi_high = (density.phi(end.clamp(min=floor)) for end in (t, t - error, t + error))
        phi_error = torch.maximum(phi - phi_low, phi_high - phi)
        psi = density.normaliser_derivative(scale)
        terms = g * (psi + torch.where(t + error < -tolerance, math.nan, phi))
        term_error = phi_error + 8 * u * (psi.abs() + phi.abs()) + density.normaliser_errors(scale)[1]
        terms_error = g.abs() * term_error + dout_error * (psi + phi).abs()
        weight, weight_error = g * scale * slope, (g * scale).abs() * slope_error + dout_error * (scale * slope).abs()

        def pulled_back(weight: Tensor, loc: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            """Gradients of loc and x for a weight of each pair."""
            loc, x = loc.clone().requires_grad_(), x.clone().requires_grad_()
            dot = torch.einsum("...d,...d->...", loc, x).expand(weight.shape)
            return torch.autograd.grad(dot, (loc, x), weight)

        def of(value: Tensor, size: Tensor, error: Tensor, results: int) -> Bounds:
            length = g.numel() // max(1, results)
            radius = error + (4 + length) * u * size  # terms that are all alike round the same way each time
            return Bounds(value, radius, radius)

        values = pulled_back(weight, loc, x)
        sizes = pulled_back(weight.abs(), loc.abs(), x.abs())
        errors = pulled_back(weight_error, loc.abs(), x.abs())
        shape = scale.shape
        return (
            of(values[0], sizes[0], errors[0], loc.numel() // call.dimension),
            of(terms.sum_to_size(shape), terms.abs().sum_to_size(shape), terms_error.sum_to_size(shape), scale.numel()),
            of(values[1], sizes[1], errors[1], x.numel() // call.dimension),
        )


def _dot_error(call: Call) -> Tensor:
    """By how much a dot product may be off: of unit vectors, or in proportion to longer ones."""
    arithmetic = arithmetic_dtype(call.dtype)
    error = contraction_error(call.dimension, arithmetic, torch.get_float32_matmul_precision())
    length: Tensor = call.loc.double().norm(dim=-1) * call.x.double().norm(dim=-1)
    return length.clamp(min=1) * (error * unit_roundoff(arithmetic))
