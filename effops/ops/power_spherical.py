"""PowerSpherical log density of every broadcast pair.   De Cao & Aziz 2020, arXiv:2006.04437.

    log p(x | loc, s) = W(s) + s log((1 + <loc, x>) / 2)
    W(s) = lgamma(s + 2 b) - lgamma(s + b) - b log(4 pi),    b = (D - 1) / 2

The published form, normaliser + s log1p(<loc, x>), cancels at large s: two terms of about s log 2 each are opposite.
Here they are one. Near the antipode, with t = 1 + <loc, x>, u the unit roundoff of the arithmetic and tol what rounding
can do to t: t < -tol is NaN (x or loc is not on the sphere), and -tol <= t < u is taken as t = u with no gradient
through the dot product, so that the exact antipode is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from effops import chunked as blocks
from effops import fused
from effops.binding import Binding, Gradients
from effops.broadcast import Plan, Shape, broadcast_plan
from effops.jit import compile_by_signature, needs_inductor, needs_torchscript, needs_triton, script
from effops.op import Cost, Op
from effops.precision import (
    INPUT_SLACK,
    arithmetic_dtype,
    autocast_enabled,
    contraction_error,
    promote,
    sphere_tolerance,
    unit_roundoff,
    wider,
)
from effops.predict import predict_bytes
from effops.special import digamma_ratio, log_gamma_ratio
from effops.testing import Bounds

NAME = "power_spherical_log_prob"
CORE_DIMS = {"loc": 1, "scale": 0, "x": 1}  # how many of the last dimensions of each tensor are no batch axes
HALF = {dtype: torch.tensor(0.5, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)}


class Density(NamedTuple):
    """A validated call: its tensors, the plan of their pairs, and the dtype of the result."""

    loc: Tensor
    scale: Tensor
    x: Tensor
    plan: Plan
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.loc, self.scale, self.x

    @property
    def dimension(self) -> int:
        return self.x.shape[-1]

    @property
    def tolerance(self) -> float:
        return _tolerance(self.loc, self.x, self.dtype)


def prepare(loc: Tensor, scale: Tensor | float, x: Tensor) -> Density:
    """Validate shapes, dtypes and devices (never values)."""
    for argument, tensor in (("loc", loc), ("x", x)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{NAME}: `{argument}` must be a tensor; got {type(tensor).__name__}; use torch.as_tensor")
        if tensor.dtype not in INPUT_SLACK:
            names = ", ".join(str(dtype)[len("torch.") :] for dtype in INPUT_SLACK)
            raise TypeError(
                f"{NAME}: `{argument}` must be real floating point; got {tensor.dtype}; convert it to one of {names}"
            )
        if tensor.layout != torch.strided:
            raise TypeError(f"{NAME}: `{argument}` must be dense; got {tensor.layout}; use .to_dense()")
        if tensor.ndim == 0:
            raise ValueError(f"{NAME}: `{argument}` must have a last dimension; got a 0-d tensor; unsqueeze it")
    if loc.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"{NAME}: last dimension of `x` must equal that of `loc`; got x {tuple(x.shape)}, loc {tuple(loc.shape)}; "
            "expand the one of size 1, or transpose"
        )
    if x.shape[-1] < 2:
        raise ValueError(
            f"{NAME}: the last dimension must be at least 2, a circle; got x {tuple(x.shape)}; "
            "put the coordinates of a direction into the last dimension"
        )
    if loc.device != x.device:
        raise ValueError(f"{NAME}: tensors must be on one device; got loc on {loc.device}, x on {x.device}; move one")
    common = wider(loc.dtype, x.dtype)
    number = not isinstance(scale, Tensor)
    scale = _prepare_scale(scale, common, x.device)
    try:
        plan = broadcast_plan(x.shape[:-1], loc.shape[:-1], scale.shape)
    except RuntimeError as error:
        raise ValueError(
            f"{NAME}: batch shapes must broadcast; got loc {tuple(loc.shape[:-1])} + (D,), scale {tuple(scale.shape)}, "
            f"x {tuple(x.shape[:-1])} + (D,); unsqueeze the axes that should pair up"
        ) from error
    dtype = common if number else promote(common, max(loc.ndim, x.ndim) - 1, scale.dtype, scale.ndim)
    if dtype.itemsize < 4 and autocast_enabled(x.device):
        dtype = torch.float32
    return Density(loc, scale, x, plan, dtype)


def _prepare_scale(scale: Tensor | float, common: torch.dtype, device: torch.device) -> Tensor:
    if not isinstance(scale, Tensor):
        if not isinstance(scale, Real):
            raise TypeError(f"{NAME}: `scale` must be a tensor or a number; got {type(scale).__name__}")
        return torch.full((), float(scale), dtype=arithmetic_dtype(common), device=device)
    if scale.is_complex() or scale.dtype == torch.bool:
        raise TypeError(f"{NAME}: `scale` must be real; got {scale.dtype}; convert it first")
    if scale.device != device:
        if scale.ndim:
            raise ValueError(
                f"{NAME}: tensors must be on one device; got scale on {scale.device}, x on {device}; move one"
            )
        scale = scale.to(device)
    return scale if scale.is_floating_point() else scale.to(common)


def _normaliser(scale: Tensor, dimension: int) -> Tensor:
    b = 0.5 * (dimension - 1)
    return log_gamma_ratio(scale, b) - b * math.log(4 * math.pi)


def _log_prob_of_dot(dot: Tensor, scale: Tensor, dimension: int, floor: float, tolerance: float) -> Tensor:
    half = torch.rsub(dot, 0.5, alpha=-0.5)  # t / 2 = (1 + dot) / 2, in one pass
    half = torch.where(half < -0.5 * tolerance, float("nan"), half)
    log_half = torch.log(torch.where(half < 0.5 * floor, 0.5 * floor, half))  # a NaN stays one
    wide = scale.double()  # once, so that the two parts of the gradient of scale cancel before they are rounded
    return torch.addcmul(_normaliser(wide, dimension).to(dot.dtype), wide.to(dot.dtype), log_half)


def _naive(loc: Tensor, scale: Tensor, x: Tensor, arithmetic: torch.dtype, floor: float, tolerance: float) -> Tensor:
    dot = (loc.to(arithmetic) * x.to(arithmetic)).sum(-1)
    return _log_prob_of_dot(dot, scale, x.shape[-1], floor, tolerance)


def _einsum(loc: Tensor, scale: Tensor, x: Tensor, arithmetic: torch.dtype, floor: float, tolerance: float) -> Tensor:
    # In parts of 256: summed one after the other, many terms of one sign lose more digits than the budget allows.
    dot = torch.einsum("...d,...d->...", [loc[..., :256].to(arithmetic), x[..., :256].to(arithmetic)])
    for i in range(256, x.shape[-1], 256):
        part = [loc[..., i : i + 256].to(arithmetic), x[..., i : i + 256].to(arithmetic)]
        dot = dot + torch.einsum("...d,...d->...", part)
    return _log_prob_of_dot(dot, scale, x.shape[-1], floor, tolerance)


def _tolerance(loc: Tensor, x: Tensor, dtype: torch.dtype) -> float:
    """How far below 0 rounding may take t in a call with a result of `dtype`."""
    return sphere_tolerance(x.shape[-1], arithmetic_dtype(dtype), (loc.dtype, x.dtype))


def _rounding(call: Density) -> tuple[torch.dtype, float, float]:
    """Dtype of the arithmetic, the floor of t and the tolerance below 0."""
    arithmetic = arithmetic_dtype(call.dtype)
    return arithmetic, unit_roundoff(arithmetic), call.tolerance


def _predicted(call: Density, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Cost:
    operations = call.plan.numel(call.plan.order) * (2 * call.dimension + 4)
    return Cost(*predict_bytes(function, *call.tensors), operations)


def _cost_of(run: Callable[[Density], Tensor]) -> Callable[[Density], Cost]:
    """The cost of a variant made of PyTorch's operations: that of the run itself."""

    def cost(call: Density) -> Cost:
        return _predicted(call, lambda loc, scale, x: run(call._replace(loc=loc, scale=scale, x=x)))

    return cost


def naive(call: Density) -> Tensor:
    return _naive(*call.tensors, *_rounding(call)).to(call.dtype)


def einsum(call: Density) -> Tensor:
    return _einsum(*call.tensors, *_rounding(call)).to(call.dtype)


_scripted_einsum = script(_einsum)


def torchscript(call: Density) -> Tensor:
    return _scripted_einsum(*call.tensors, *_rounding(call)).to(call.dtype)


_compiled_einsum = compile_by_signature(_einsum)


def compiled(call: Density) -> Tensor:
    return _compiled_einsum(*call.tensors, *_rounding(call)).to(call.dtype)


def _compiled_cost(call: Density) -> Cost:
    """What TorchInductor allocates, as measured: it fuses all but matrix products and the normaliser's stack."""
    plan, arithmetic = call.plan, arithmetic_dtype(call.dtype)
    pairs, size, scales = plan.numel(plan.order), arithmetic.itemsize, call.scale.numel()
    output, result = call.dtype.itemsize * pairs, size * pairs
    cast = result if output != result else 0
    is_product = plan.numel(plan.rows) > 1 and plan.numel(plan.columns) > 1
    copies = size * sum(tensor.numel() for tensor in (call.loc, call.x) if tensor.dtype != arithmetic)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors):
        keeps_copies = is_product or call.loc.numel() != call.x.numel()
        saved = (size + 2) * pairs + copies * keeps_copies + scales * (17 + size % 8)
        temporary = cast or 8 * scales * is_product
    else:
        saved = 0
        if is_product:  # a matrix product in the order of the result is overwritten with it
            within = max(copies, result * plan.is_permuted) + 8 * scales
        else:
            within = 16 * scales + size // 8 * 8 * scales
        temporary = max(result + within - output, cast)
    return Cost(output, saved, temporary, pairs * (2 * call.dimension + 4))


class HalfLog:
    """phi(dot) = log((1 + dot) / 2) and the PowerSpherical normaliser, for `effops.chunked`."""

    def __init__(self, dimension: int, arithmetic: torch.dtype, tolerance: float) -> None:
        self.dimension = dimension
        self.half = HALF[arithmetic]
        self.floor = 0.5 * unit_roundoff(arithmetic)
        self.lowest = -0.5 * tolerance

    def _to_half_(self, dot: Tensor) -> tuple[Tensor, Tensor] | None:
        """Overwrite `dot` with (1 + dot) / 2, floored; return where it was below the floor, and the tolerance."""
        torch.add(self.half, dot, alpha=0.5, out=dot)
        if dot.amin().item() >= self.floor:  # min() would copy a strided block
            return None
        low, outside = dot < self.floor, dot < self.lowest
        dot.masked_fill_(low, self.floor)
        return low, outside

    def value_(self, dot: Tensor) -> None:
        floored = self._to_half_(dot)
        dot.log_()
        if floored:
            dot.masked_fill_(floored[1], math.nan)

    def derivative_(self, dot: Tensor, factor: Tensor, value: Tensor | None) -> None:
        floored = self._to_half_(dot)
        if value is not None:
            torch.log(dot, out=value)
        torch.div(0.5 * factor, dot, out=dot)
        if floored:
            low, outside = floored
            dot.masked_fill_(low, 0)
            if value is not None:
                value.masked_fill_(outside, math.nan)

    def normaliser(self, scale: Tensor) -> Tensor:
        return _normaliser(scale, self.dimension)

    def normaliser_derivative(self, scale: Tensor) -> Tensor:
        return digamma_ratio(scale, 0.5 * (self.dimension - 1))


def _half_log(loc: Tensor, x: Tensor, dtype: torch.dtype) -> HalfLog:
    return HalfLog(x.shape[-1], arithmetic_dtype(dtype), _tolerance(loc, x, dtype))


def _plan(loc: Tensor, scale: Tensor, x: Tensor) -> Plan:
    return broadcast_plan(x.shape[:-1], loc.shape[:-1], scale.shape)


def _chunked_forward(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return blocks.forward(_half_log(loc, x, dtype), _plan(loc, scale, x), loc, scale, x, dtype)


def _chunked_backward(
    dout: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, needs: tuple[bool, bool, bool]
) -> Gradients:
    arithmetic = arithmetic_dtype(dtype)
    return blocks.backward(_half_log(loc, x, dtype), _plan(loc, scale, x), loc, scale, x, dout, arithmetic, needs)


def _triton_forward(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    from effops.kernels.power_spherical import MAP

    return fused.forward(MAP, _plan(loc, scale, x), loc, scale, x, dtype, _tolerance(loc, x, dtype))


def _triton_backward(
    dout: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, needs: tuple[bool, bool, bool]
) -> Gradients:
    from effops.kernels.power_spherical import MAP

    return fused.backward(MAP, _plan(loc, scale, x), loc, scale, x, dout, dtype, _tolerance(loc, x, dtype), needs)


def _composite(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return einsum(Density(loc, scale, x, _plan(loc, scale, x), dtype))


def _empty(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return _plan(loc, scale, x).empty(x, dtype)


def _empty_gradients(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    plan = _plan(loc, scale, x)
    return (
        plan.empty_gradient(loc, plan.batch + plan.columns, trailing=1),
        plan.empty_gradient(scale, plan.order),
        plan.empty_gradient(x, plan.batch + plan.rows, trailing=1),
    )


def _bind(
    variant: str, forward: Callable[..., Tensor], backward: Callable[..., Gradients]
) -> Callable[[Density], Tensor]:
    """The variant made of a pair of functions of the tensors and the result's dtype."""
    binding = Binding(
        f"{NAME}_{variant}",
        forward=forward,
        backward=backward,
        composite=_composite,
        empty=_empty,
        empty_gradients=_empty_gradients,
        core_dims=tuple(CORE_DIMS.values()),
    )
    return lambda call: binding(*call.tensors, call.dtype)


chunked = _bind("chunked", _chunked_forward, _chunked_backward)
triton = _bind("triton", _triton_forward, _triton_backward)


def _chunked_cost(call: Density) -> Cost:
    pair_map = _half_log(call.loc, call.x, call.dtype)
    run = torch.no_grad()(lambda loc, scale, x: blocks.rehearse(pair_map, call.plan, loc, scale, x, call.dtype))
    return _predicted(call, run)


def _triton_cost(call: Density) -> Cost:
    run = torch.no_grad()(lambda loc, scale, x: fused.rehearse(call.plan, loc, scale, x, call.dtype))
    return _predicted(call, run)


def _unit(shape: Shape, generator: torch.Generator | None) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(shape, dtype=torch.float64, generator=generator), dim=-1)


def _draw(loc: Tensor, scale: Tensor, generator: torch.Generator | None) -> Tensor:
    """A draw from PowerSpherical(loc, scale), float64: the cosine to loc is affine in a beta variable."""
    b = 0.5 * (loc.shape[-1] - 1)
    scale = scale.expand(loc.shape[:-1])
    up, down = (torch._standard_gamma(alpha, generator=generator) for alpha in (b + scale, torch.full_like(scale, b)))
    cosine = ((up - down) / (up + down)).unsqueeze(-1)
    tangent = torch.randn(loc.shape, dtype=torch.float64, generator=generator)
    tangent -= (tangent * loc).sum(-1, keepdim=True) * loc
    return cosine * loc + (1 - cosine**2).clamp(min=0).sqrt() * torch.nn.functional.normalize(tangent, dim=-1)


def sample(
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
    return _unit(loc, generator).to(device, dtype), scales.to(device, dtype), _unit(x, generator).to(device, dtype)


def workload(
    *,
    M: int,
    T: int,
    D: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of M components and a draw from each, at T positions: loc (M, T, D), scale (M, T), x (M, 1, T, D)."""
    vectors = torch.randn(M, T, D, dtype=torch.float64, generator=generator)
    scale = vectors.norm(dim=-1)
    loc = vectors / scale.unsqueeze(-1)
    x = _draw(loc, scale, generator).unsqueeze(1)
    return loc.to(device, dtype), scale.to(device, dtype), x.to(device, dtype)


def _exact_t(call: Density) -> Tensor:
    """1 + <loc, x>: in float64, or for float64 inputs, which that would round, in extended precision."""
    loc, x = call.loc.double(), call.x.double()
    if torch.float64 not in (call.loc.dtype, call.x.dtype):
        return 1 + torch.einsum("...d,...d->...", loc, x)
    import numpy

    dot = numpy.einsum("...d,...d->...", *(t.detach().cpu().numpy().astype(numpy.longdouble) for t in (loc, x)))
    return torch.tensor((1 + dot).astype(numpy.float64), device=call.device)


def _dot_error(call: Density) -> Tensor:
    """By how much a dot product may be off: of unit vectors, or in proportion to longer ones."""
    arithmetic = arithmetic_dtype(call.dtype)
    error = contraction_error(call.dimension, arithmetic, torch.get_float32_matmul_precision())
    length: Tensor = call.loc.double().norm(dim=-1) * call.x.double().norm(dim=-1)
    return length.clamp(min=1) * (error * unit_roundoff(arithmetic))


def bounds(call: Density) -> Bounds:
    """Where a correct log density lies, if its dot product is off by what `contraction_error` allows.

    To either end the rounding of the other steps is added: 2 u (|W| + 2 |s l| + |out|), and that of the two float64
    parts of W, which are larger than W.
    """
    u = unit_roundoff(arithmetic_dtype(call.dtype))
    scale, t, error = call.scale.double(), _exact_t(call), _dot_error(call)
    normaliser = _normaliser(scale, call.dimension)

    def log_prob(t: Tensor) -> Tensor:
        return normaliser + scale * torch.log(t.clamp(min=u) / 2)

    value, low, high = log_prob(t), log_prob(t - error), log_prob(t + error)
    low, high = torch.minimum(low, high), torch.maximum(low, high)
    rounding = 2 * u * (normaliser.abs() + 2 * (value - normaliser).abs() + value.abs())
    rounding += 4 * unit_roundoff(torch.float64) * (normaliser.abs() + (call.dimension - 1) * math.log(4 * math.pi))
    outside = t + error < -call.tolerance
    return Bounds(
        torch.where(outside, math.nan, value),
        value - low + rounding,
        high - value + rounding,
        may_be_nan=t - error < -call.tolerance,
        dtype=call.dtype,
    )


def gradient_bounds(call: Density, dout: Tensor) -> tuple[Bounds, Bounds, Bounds]:
    """Where correct gradients of loc, scale and x lie.

    A weight G = dout s / t may move as far as t can; a sum of n terms is off by n u at most.
    """
    u = unit_roundoff(arithmetic_dtype(call.dtype))
    loc, scale, x = (tensor.double() for tensor in call.tensors)
    g, t, error = dout.double(), _exact_t(call), _dot_error(call)

    # 1 / t, and the ends of where it may lie: 0 below the floor, at most 1 / u above it
    slope = torch.where(t < u, 0, 1 / t.clamp(min=u))
    low = torch.where(t - error < u, 0, 1 / (t + error))
    high = torch.where(t + error < u, 0, 1 / (t - error).clamp(min=u))
    slope_error = torch.maximum(slope - low, high - slope) + 8 * u * torch.maximum(slope, high)
    log_half, log_low, log_high = (torch.log(end.clamp(min=u) / 2) for end in (t, t - error, t + error))
    log_error = torch.maximum(log_half - log_low, log_high - log_half)
    psi = digamma_ratio(scale, 0.5 * (call.dimension - 1))
    terms = g * (psi + torch.where(t + error < -call.tolerance, math.nan, log_half))
    terms_error = g.abs() * (log_error + 8 * u * (psi.abs() + log_half.abs()))
    weight, weight_error = g * scale * slope, (g * scale).abs() * slope_error

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


op = Op(
    NAME,
    prepare=prepare,
    preference=("triton", "chunked", "compile", "einsum", "torchscript", "naive"),
    cases={
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
    },
    sample=sample,
    workload=workload,
    sizes={"M": 128, "T": 512, "D": 128},
    bounds=bounds,
    gradient_bounds=gradient_bounds,
    core_dims=CORE_DIMS,
)


op.variant("naive", cost=_cost_of(naive))(naive)
op.variant("einsum", cost=_cost_of(einsum))(einsum)
op.variant("torchscript", cost=_cost_of(torchscript), needs=[needs_torchscript])(torchscript)
op.variant("compile", cost=_compiled_cost, needs=[needs_inductor])(compiled)
op.variant("chunked", cost=_chunked_cost)(chunked)
op.variant("triton", cost=_triton_cost, needs=[needs_triton], automatic_on=("cuda",))(triton)


@op.public
def power_spherical_log_prob(loc: Tensor, scale: Tensor | float, x: Tensor, *, variant: str | None = None) -> Tensor:
    """Log density of PowerSpherical distributions: `PowerSpherical(loc, scale).log_prob(x)`, without its intermediate.

        log p(x | loc, s) = W(s) + s log((1 + <loc, x>) / 2)
        W(s) = lgamma(s + 2 b) - lgamma(s + b) - b log(4 pi),    b = (D - 1) / 2

    Args:
        loc: mean directions `(*L, D)`, unit vectors, D >= 2
        scale: concentrations `(*S)` or a number, positive
        x: points on the sphere `(*X, D)`, unit vectors
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        The log densities, of the shape to which `L`, `S` and `X` broadcast; it may be a permuted view. The dtype is the
        promotion of the inputs' (under autocast float32 or wider); the arithmetic is float32, or float64 for float64.

    The normaliser is computed in float64. Variants chunked and triton save the three inputs for backward, no more.
    Values are not validated: a scale at which the density cannot be normalised (s <= -b) or NaN gives NaN, and so does
    a dot product further below -1 than rounding explains. An exact antipode is finite.

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
    return op(loc, scale, x, variant=variant)
