"""What the references of mixtures share. Each follows from the reference of the log densities of its components."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from effops.numerics.precision import unit_roundoff
from effops.ops.densities.density import DensityCall
from effops.ops.densities.mixture import MixtureCall
from effops.reference.reference import Bounds, Reference, Shape, summed_bounds


def mixture_reference(function: Callable[..., Tensor], log_prob: Reference) -> Reference:
    """The reference of the mixtures of a density. `log_prob` is the reference of its log densities."""
    return Reference(
        function,
        cases=_cases(_scale_dims(log_prob)),
        sample=functools.partial(_sample, log_prob),
        workload=functools.partial(_workload, log_prob),
        sizes=log_prob.sizes,
        bounds=functools.partial(_bounds, log_prob),
        gradient_bounds=functools.partial(_gradient_bounds, log_prob),
    )


def _scale_dims(log_prob: Reference) -> int:
    """How many of the last dimensions of scale are no batch axes."""
    _, scale_dims, _ = log_prob.op.core_dims.values()
    return scale_dims


def _cases(scale_dims: int) -> dict[str, tuple[Shape, ...]]:
    """Shapes of log_weights, loc, scale and x. The components lie along the last batch axis, in every possible role."""
    d = (5,) * scale_dims
    return {
        "founding": ((7,), (6, 7, 5), (6, 7, *d), (4, 6, 1, 5)),
        "one point": ((9,), (9, 5), (9, *d), (5,)),
        "one component": ((1,), (6, 1, 5), (1, *d), (4, 6, 1, 5)),
        "weights vary": ((6, 7), (7, 5), d, (6, 1, 5)),
        "weights by rows": ((4, 6, 1), (6, 7, 5), (7, *d), (4, 6, 1, 5)),
        "weights by pairs": ((4, 1, 7), (6, 7, 5), (6, 7, *d), (4, 6, 1, 5)),
        "weights alone vary": ((6, 9), (5,), d, (4, 1, 1, 5)),
        "scale alone varies": ((), (1, 5), (9, *d), (4, 1, 5)),
        "kept columns": ((7,), (3, 7, 5), (3, 7, *d), (4, 1, 1, 5)),
        "a point each": ((7,), (7, 5), (7, *d), (4, 7, 5)),
        "points are components": ((7,), (3, 1, 5), (3, 1, *d), (7, 5)),
        "several blocks": ((700,), (700, 5), (700, *d), (200, 1, 5)),
        "no component": ((0,), (0, 5), (0, *d), (4, 1, 5)),
        "no point": ((7,), (7, 5), (7, *d), (0, 1, 5)),
    }


def _sample(
    log_prob: Reference, log_weights: Shape, loc: Shape, scale: Shape, x: Shape, **options: Any
) -> tuple[Tensor, ...]:
    """Arguments of given shapes. The weights add up to 1 along the last axis, that of the components."""
    tensors = log_prob.sample(loc, scale, x, **options)
    weights = torch.randn(log_weights, dtype=torch.float64, generator=options.get("generator"))
    return weights.log_softmax(-1).to(tensors[0]), *tensors


def _workload(log_prob: Reference, **options: Any) -> tuple[Tensor, ...]:
    """The workload of the density, with the components moved to the last batch axis."""
    loc, scale, x = log_prob.workload(**options)
    components = len(loc)
    weights = torch.randn(components, dtype=torch.float64, generator=options.get("generator"))
    return (
        weights.log_softmax(-1).to(loc),
        loc.movedim(0, -2).contiguous(),
        scale.movedim(0, -1 - _scale_dims(log_prob)).contiguous(),
        x.squeeze(1).unsqueeze(-2),
    )


def _exact(log_prob: Reference, call: MixtureCall) -> tuple[DensityCall, Bounds, Bounds]:
    """The pairs as a call of the density, and the bounds of log_weights + log densities and of their logsumexp.

    A correct result lies between the results of the lowest and the highest log densities.
    """
    pairs = replace(log_prob.op.prepare(call.loc, call.scale, call.x), dtype=call.arithmetic, plan=call.plan)
    bounds, weights = log_prob.bounds(pairs), call.log_weights.double()
    values = bounds.value + weights
    eps = torch.finfo(call.arithmetic).eps
    rounding = (2 * eps * (values.abs() + weights.abs())).nan_to_num(posinf=0.0)
    below, above = bounds.below + rounding, bounds.above + rounding
    out, low, high = (torch.logsumexp(end, call.dim) for end in (values, values - below, values + above))
    rounding = eps * (8 + values.shape[call.dim] + out.abs())
    result_below, result_above = (torch.where(out.isfinite(), gap + rounding, 0.0) for gap in (out - low, high - out))
    return pairs, Bounds(values, below, above), Bounds(out, result_below, result_above, dtype=call.dtype)


def _bounds(log_prob: Reference, call: MixtureCall) -> Bounds:
    """The bounds of a correct result."""
    return _exact(log_prob, call)[-1]


def _gradient_bounds(log_prob: Reference, call: MixtureCall, dout: Tensor) -> tuple[Bounds, ...]:
    """The bounds of correct gradients.

    Those of loc, scale and x are the bounds of the density, for an upstream gradient with the error of the share.
    """
    pairs, terms, result = _exact(log_prob, call)
    out, u = result.value.unsqueeze(call.dim), unit_roundoff(call.arithmetic)
    error = torch.maximum(terms.below, terms.above) + torch.maximum(result.below, result.above).unsqueeze(call.dim)
    # Without a weight there is no share. If all scores are -inf in the arithmetic of the op, shares are unknown.
    lacks_weight = call.log_weights.expand(terms.value.shape).isneginf().all(call.dim, keepdim=True) & out.isneginf()
    is_unknown = (out + result.above.unsqueeze(call.dim) < -torch.finfo(call.arithmetic).max) & ~lacks_weight
    exponent = torch.where(lacks_weight, -torch.inf, terms.value - out).masked_fill(is_unknown, torch.nan)
    share, error = torch.exp(exponent), error + (8 + exponent.shape[call.dim]) * u
    # A share lies between 0 and 1, however far its exponent is off.
    at_most = torch.maximum(torch.exp(exponent + error).clamp(max=1) - share, share)
    share_error = torch.where(error < 1, share * torch.expm1(error), at_most).masked_fill(lacks_weight, 0.0)
    g = dout.double().unsqueeze(call.dim)
    upstream, upstream_error = g * share, g.abs() * share_error
    return (
        summed_bounds(upstream, upstream_error, upstream.abs(), 1, call.log_weights, u),
        *log_prob.gradient_bounds(pairs, upstream, upstream_error),
    )
