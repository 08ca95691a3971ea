"""What the references of densities of directions share: cases, samples, and bounds of W(s) + s phi(<loc, x>)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from effops.numerics.directions import random_directions
from effops.numerics.precision import arithmetic_dtype, contraction_error, unit_roundoff
from effops.ops.densities.density import DensityCall
from effops.ops.densities.directional import Directional
from effops.reference.reference import Bounds, Reference, Shape, exact_dot, summed_bounds

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


@dataclass(frozen=True)
class DirectionalBounds:
    """The bounds of correct log densities of directions and of their gradients.

    Attributes:
        density: gives W and the domain
        phi: phi in float64, as a function of t = 1 + <loc, x> above the floor
        slope: phi' as such a function, which is positive and does not increase
        normaliser_errors: takes W, W' and the dimension, and returns by how much W and W' may be off in float64
    """

    density: Directional
    phi: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    normaliser_errors: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]

    def of_result(self, call: DensityCall) -> Bounds:
        """The bounds of a correct log density, whose dot product is off by what `contraction_error` allows.

        The rounding of the other steps, 2 u (|W| + 2 |s phi| + |out|), and the error of W widen them at either end.
        """
        u, tolerance = unit_roundoff(call.arithmetic), self.density.tolerance(call)
        floor = self.density.floor(call.arithmetic)
        scale, t, error = call.scale.double(), 1 + exact_dot(call.loc, call.x), _dot_error(call)
        normaliser, _, normaliser_error, _ = self._normaliser(call)

        def log_prob(t: Tensor) -> Tensor:
            return normaliser + scale * self.phi(t.clamp(min=floor))

        value, low, high = log_prob(t), log_prob(t - error), log_prob(t + error)
        low, high = torch.minimum(low, high), torch.maximum(low, high)
        rounding = 2 * u * (normaliser.abs() + 2 * (value - normaliser).abs() + value.abs())
        rounding += normaliser_error
        return Bounds(
            torch.where(t + error < -tolerance, math.nan, value),
            value - low + rounding,
            high - value + rounding,
            may_be_nan=t - error < -tolerance,
            dtype=call.dtype,
        )

    def of_gradients(self, call: DensityCall, dout: Tensor, dout_error: Tensor | float = 0.0) -> tuple[Bounds, ...]:
        """The bounds of correct gradients of loc, scale and x, if the upstream gradient may be off by `dout_error`.

        The error of t moves a weight G = dout s phi'. A sum of n terms is off by n u at most.
        """
        u, tolerance = unit_roundoff(call.arithmetic), self.density.tolerance(call)
        floor = self.density.floor(call.arithmetic)
        loc, scale, x = (tensor.double() for tensor in call.tensors)
        g, t, error = dout.double(), 1 + exact_dot(call.loc, call.x), _dot_error(call)

        # The slope phi', which is 0 below the floor, and the lowest and the highest value that it may have.
        slope = torch.where(t < floor, 0, self.slope(t.clamp(min=floor)))
        low = torch.where(t - error < floor, 0, self.slope(t + error))
        high = torch.where(t + error < floor, 0, self.slope((t - error).clamp(min=floor)))
        slope_error = torch.maximum(slope - low, high - slope) + 8 * u * torch.maximum(slope, high)
        phi, phi_low, phi_high = (self.phi(end.clamp(min=floor)) for end in (t, t - error, t + error))
        phi_error = torch.maximum(phi - phi_low, phi_high - phi)
        _, psi, _, psi_error = self._normaliser(call)
        terms = g * (psi + torch.where(t + error < -tolerance, math.nan, phi))
        term_error = phi_error + 8 * u * (psi.abs() + phi.abs()) + psi_error
        terms_error = g.abs() * term_error + dout_error * ((psi + phi).abs() + term_error)
        weight = g * scale * slope
        weight_error = (g * scale).abs() * slope_error + dout_error * scale.abs() * (slope + slope_error)

        def pulled_back(weight: Tensor, loc: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            """The gradients of loc and x, given the gradient of the dot product of each pair."""
            loc, x = loc.clone().requires_grad_(), x.clone().requires_grad_()
            dot = torch.einsum("...d,...d->...", loc, x).expand(weight.shape)
            return torch.autograd.grad(dot, (loc, x), weight)

        values = pulled_back(weight, loc, x)
        errors = pulled_back(weight_error, loc.abs(), x.abs())
        sizes = pulled_back(weight.abs(), loc.abs(), x.abs())
        of_loc, of_x = (
            summed_bounds(value, error, size, g.numel() // max(1, operand.numel() // call.dimension), operand, u)
            for value, error, size, operand in zip(values, errors, sizes, (loc, x))
        )
        return of_loc, summed_bounds(terms, terms_error, terms.abs(), 1, scale, u), of_x

    def _normaliser(self, call: DensityCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W and W' in float64, and by how much each may be off."""
        scale, own = call.scale.double(), self.density.map_of(call)
        normaliser, derivative = own.normaliser(scale), own.normaliser_derivative(scale)
        return normaliser, derivative, *self.normaliser_errors(normaliser, derivative, call.dimension)


def _dot_error(call: DensityCall) -> Tensor:
    """By how much a dot product of unit vectors may be off. For longer vectors it is in proportion to both lengths."""
    arithmetic = arithmetic_dtype(call.dtype)
    error = contraction_error(call.dimension, arithmetic, torch.get_float32_matmul_precision())
    length: Tensor = call.loc.double().norm(dim=-1) * call.x.double().norm(dim=-1)
    return length.clamp(min=1) * (error * unit_roundoff(arithmetic))


def _sample(
    loc: Shape,
    scale: Shape,
    x: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments loc, scale and x of given shapes: random directions, and scales of 1 to 100."""
    scales = 10 ** (2 * torch.rand(scale, dtype=torch.float64, generator=generator))
    return (
        random_directions(loc, generator).to(device, dtype),
        scales.to(device, dtype),
        random_directions(x, generator).to(device, dtype),
    )


def directional_reference(
    function: Callable[..., Tensor],
    bounds: DirectionalBounds,
    parameters: Callable[[int, int, int, torch.Generator | None], tuple[Tensor, Tensor]],
    draw: Callable[[Tensor, Tensor, torch.Generator | None], Tensor],
) -> Reference:
    """The reference of an op of the log densities of all pairs.

    `parameters` draws loc (M, T, D) and scale (M, T) of the workload from M, T, D and a generator. `draw` draws a
    direction from each of such densities.
    """

    def workload(
        *,
        M: int,
        T: int,
        D: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, ...]:
        """All pairs of M components and a draw from each, at T positions: loc, scale and x (M, 1, T, D)."""
        loc, scale = parameters(M, T, D, generator)
        x = draw(loc, scale, generator).unsqueeze(1)
        return loc.to(device, dtype), scale.to(device, dtype), x.to(device, dtype)

    return Reference(
        function,
        cases=CASES,
        sample=_sample,
        workload=workload,
        sizes={"M": 128, "T": 512, "D": 128},
        bounds=bounds.of_result,
        gradient_bounds=bounds.of_gradients,
    )
