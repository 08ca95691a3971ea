"""Mixtures as ops: the logsumexp of the weighted log densities along an axis, without keeping the pairs.

    out = log sum_n exp(log_weights_n + log p(x | loc_n, scale_n))

Blocks and kernels compute two statistics of every row, the maximum and the logarithm of the sum of the exponentials
without it. Their sum is the result; both are saved for backward besides the inputs, for in float32 the result alone
would leave shares of the components that do not add up to 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effops import chunked, fused
from effops.binding import Binding, Gradients
from effops.broadcast import Plan, Shape
from effops.density import (
    Density,
    Form,
    add_forms,
    best_form,
    compiled_cost,
    empty_gradients,
    kernels_of,
    plan_of,
    predict,
    preference,
    prepare,
    scores,
    tensor_dims,
)
from effops.jit import needs_triton
from effops.op import Cost, Op
from effops.precision import arithmetic_dtype, autocast_enabled, promote
from effops.testing import Bounds


class Call(NamedTuple):
    """A validated call: its tensors, the plan of their pairs, the axis of the components, from the last: -1, -2, ..;
    and the dtype of the result."""

    log_weights: Tensor
    loc: Tensor
    scale: Tensor
    x: Tensor
    plan: Plan
    dim: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.log_weights, self.loc, self.scale, self.x

    @property
    def shape(self) -> Shape:
        return self.plan.without(len(self.plan.shape) + self.dim).shape

    @property
    def dimension(self) -> int:
        return self.x.shape[-1]

    @property
    def arithmetic(self) -> torch.dtype:
        return arithmetic_dtype(self.dtype)


def logsumexp(values: Tensor, dim: int) -> Tensor:
    """As `torch.logsumexp`, but where all values are -inf, or there are none, gradients are 0."""
    return statistics(values, dim).sum(-1)


def statistics(values: Tensor, dim: int) -> Tensor:
    """Along a new last axis the maximum, without a gradient, and the logarithm of the sum of exp(values - maximum)."""
    if values.shape[dim] == 0:
        empty = values.sum(dim).unsqueeze(-1)
        return (empty - torch.inf).expand([*empty.shape[:-1], 2])
    maximum = values.amax(dim, keepdim=True).detach()
    shift = maximum.nan_to_num(neginf=0.0)  # beside +inf all else vanishes
    total = torch.exp(values - shift).sum(dim)
    log_total = torch.where(total == 0, -torch.inf, torch.log(torch.where(total == 0, 1.0, total)))
    return torch.stack((maximum.squeeze(dim), log_total), -1)


def prepare_mixture(
    density: Density, function: str, log_weights: Tensor, loc: Tensor, scale: Tensor | float, x: Tensor, dim: int = -1
) -> Call:
    """Validate shapes, dtypes and devices (never values)."""
    if not isinstance(log_weights, Tensor):
        got = type(log_weights).__name__
        raise TypeError(f"{function}: `log_weights` must be a tensor; got {got}; use torch.as_tensor")
    if not log_weights.is_floating_point() or log_weights.dtype.itemsize < 2:
        raise TypeError(
            f"{function}: `log_weights` must be real floating point; got {log_weights.dtype}; they are logarithms: "
            "give weights.log()"
        )
    if log_weights.layout != torch.strided:
        raise TypeError(f"{function}: `log_weights` must be dense; got {log_weights.layout}; use .to_dense()")
    inner = prepare(density, function, loc, scale, x)
    if log_weights.device != inner.device:
        raise ValueError(
            f"{function}: tensors must be on one device; got log_weights on {log_weights.device}, x on {inner.device}; "
            "move one"
        )
    try:
        plan = plan_of(density, *inner.tensors, log_weights)
    except RuntimeError as error:
        raise ValueError(
            f"{function}: `log_weights` must broadcast with the log densities; got log_weights "
            f"{tuple(log_weights.shape)}, log densities {inner.shape}; unsqueeze the axes that should pair up"
        ) from error
    rank = len(plan.shape)
    if not isinstance(dim, Integral):
        raise TypeError(f"{function}: `dim` must be an integer; got {dim!r}; name one axis of the components")
    if not -rank <= dim < rank:
        raise ValueError(
            f"{function}: `dim` must be an axis of the broadcast batch shape {plan.shape}; got {dim!r}; "
            + (f"choose from {-rank} to {rank - 1}" if rank else "give the components an axis: loc.unsqueeze(-2)")
        )
    dtype = promote(inner.dtype, len(inner.shape), log_weights.dtype, log_weights.ndim)
    if dtype.itemsize < 4 and autocast_enabled(inner.device):
        dtype = torch.float32
    return Call(log_weights, *inner.tensors, plan, int(dim) - rank if dim >= 0 else int(dim), dtype)


def mixture_op(density: Density) -> Op:
    """The op of the mixtures of a density."""
    name = f"{density.name}_mixture_log_prob"
    op = Op(
        name,
        prepare=functools.partial(prepare_mixture, density, name),
        preference=preference(density),
        cases=_cases(density),
        sample=functools.partial(_sample, density),
        workload=functools.partial(_workload, density),
        sizes=density.sizes,
        bounds=functools.partial(_bounds, density),
        gradient_bounds=functools.partial(_gradient_bounds, density),
        core_dims={"log_weights": 0, **tensor_dims(density)},
        logsumexp=lambda call: len(call.plan.shape) + call.dim,
    )

    def weighted(
        form: Form, log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, tolerance: float
    ) -> Tensor:
        values = scores(density, form, loc, scale, x, dtype, tolerance)
        return values + log_weights.to(values.dtype)

    def composed(form: Form) -> Callable[..., Tensor]:
        def log_prob(
            log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype, tolerance: float
        ) -> Tensor:
            return statistics(weighted(form, log_weights, loc, scale, x, dtype, tolerance), dim)

        return log_prob

    def settings(call: Call) -> tuple[Any, ...]:
        return call.dim, call.dtype, density.tolerance(call.loc, call.x, call.dtype)

    def cost_of_compiled(call: Call) -> Cost:
        return compiled_cost(density, call, math.prod(call.shape))

    add_forms(op, density.forms, composed, settings, cost_of_compiled)

    def composite(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        tolerance = density.tolerance(loc, x, dtype)
        return statistics(weighted(best_form(density), log_weights, loc, scale, x, dtype, tolerance), dim)

    def reduction_of(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int) -> chunked.Reduction:
        plan = plan_of(density, loc, scale, x, log_weights)
        return chunked.Reduction(plan, len(plan.shape) + dim)

    def empty(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return reduction_of(log_weights, loc, scale, x, dim).empty(x, arithmetic_dtype(dtype))

    def empty_gradients_of_call(
        log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        plan = plan_of(density, loc, scale, x, log_weights)
        return plan.empty_gradient(log_weights, plan.order), *empty_gradients(density, plan, loc, scale, x)

    def bound(variant: str, forward: Callable[..., Tensor], backward: Callable[..., Gradients]) -> Any:
        binding = Binding(
            f"{name}_{variant}",
            forward=forward,
            backward=backward,
            composite=composite,
            empty=empty,
            empty_gradients=empty_gradients_of_call,
            core_dims=tuple(op.core_dims.values()),
            saves_result=True,
        )

        def run(call: Call) -> Tensor:
            return binding(*call.tensors, call.dim, call.dtype)

        return run

    def forward(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        reduction = reduction_of(log_weights, loc, scale, x, dim)
        blocks = density.blocks(reduction.plan, loc, scale, x, dtype)
        return chunked.forward_logsumexp(blocks, log_weights, reduction, reduction.empty(x, arithmetic_dtype(dtype)))

    def backward(
        dout: Tensor,
        log_weights: Tensor,
        loc: Tensor,
        scale: Tensor,
        x: Tensor,
        result: Tensor,
        dim: int,
        dtype: torch.dtype,
        needs: Sequence[bool],
    ) -> Gradients:
        reduction = reduction_of(log_weights, loc, scale, x, dim)
        blocks = density.blocks(reduction.plan, loc, scale, x, dtype, needs=needs[1:])
        return chunked.backward_logsumexp(blocks, log_weights, reduction, result, dout[..., 1], needs[0])

    def rehearsal(call: Call, work: Callable[[chunked.Reduction, Tensor, Tensor, Tensor, Tensor], None]) -> Cost:
        saved: list[Tensor] = []
        trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)

        def rehearse(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
            reduction = reduction_of(log_weights, loc, scale, x, call.dim)
            out = reduction.empty(x, call.arithmetic)
            saved.extend([out] * trained)
            work(reduction, loc, scale, x, out)
            return op.finish(call, out)

        return predict(call, torch.no_grad()(rehearse))

    def chunked_cost(call: Call) -> Cost:
        def work(reduction: chunked.Reduction, loc: Tensor, scale: Tensor, x: Tensor, out: Tensor) -> None:
            chunked.rehearse_logsumexp(density.blocks(reduction.plan, loc, scale, x, call.dtype), out)

        return rehearsal(call, work)

    op.variant("chunked", cost=chunked_cost)(bound("chunked", forward, backward))

    def triton_forward(
        log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype
    ) -> Tensor:
        reduction, tolerance = reduction_of(log_weights, loc, scale, x, dim), density.tolerance(loc, x, dtype)
        kernels = kernels_of(density, tolerance)
        return fused.forward_logsumexp(
            kernels, reduction, log_weights, loc, scale, x, dtype, scale_dims=density.scale_dims
        )

    def triton_backward(
        dout: Tensor,
        log_weights: Tensor,
        loc: Tensor,
        scale: Tensor,
        x: Tensor,
        result: Tensor,
        dim: int,
        dtype: torch.dtype,
        needs: Sequence[bool],
    ) -> Gradients:
        reduction, tolerance = reduction_of(log_weights, loc, scale, x, dim), density.tolerance(loc, x, dtype)
        return fused.backward_logsumexp(
            kernels_of(density, tolerance),
            reduction,
            log_weights,
            loc,
            scale,
            x,
            result,
            dout[..., 1],
            dtype,
            needs,
            scale_dims=density.scale_dims,
        )

    def triton_cost(call: Call) -> Cost:
        def work(reduction: chunked.Reduction, loc: Tensor, scale: Tensor, x: Tensor, out: Tensor) -> None:
            fused.rehearse_normaliser(scale, density.scale_dims)

        return rehearsal(call, work)

    if density.kernel:
        op.variant("triton", cost=triton_cost, needs=[needs_triton, _needs_one_side], automatic_on=("cuda",))(
            bound("triton", triton_forward, triton_backward)
        )
    return op


def _needs_one_side(call: Call) -> str:
    axis = len(call.plan.shape) + call.dim
    return "needs components along an axis of x or of loc; here both vary along it" if axis in call.plan.batch else ""


def _cases(density: Density) -> dict[str, tuple[Shape, ...]]:
    """Shapes of log_weights, loc, scale and x, the components along the last batch axis: every role of theirs."""
    d = (5,) * density.scale_dims
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
    density: Density, log_weights: Shape, loc: Shape, scale: Shape, x: Shape, **options: Any
) -> tuple[Tensor, ...]:
    """Arguments of given shapes; the weights of the components along the last axis add up to 1."""
    tensors = density.sample(loc, scale, x, **options)
    weights = torch.randn(log_weights, dtype=torch.float64, generator=options.get("generator"))
    return weights.log_softmax(-1).to(tensors[0]), *tensors


def _workload(density: Density, **options: Any) -> tuple[Tensor, ...]:
    """The density's own pairs of points and components, with the components along the last batch axis."""
    loc, scale, x = density.workload(**options)
    components = len(loc)
    weights = torch.randn(components, dtype=torch.float64, generator=options.get("generator"))
    return (
        weights.log_softmax(-1).to(loc),
        loc.movedim(0, -2).contiguous(),
        scale.movedim(0, -1 - density.scale_dims).contiguous(),
        x.squeeze(1).unsqueeze(-2),
    )


def _values(density: Density, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """log_weights + log densities in float64, and by how much they may be below and above."""
    inner = prepare(density, "", call.loc, call.scale, call.x)._replace(dtype=call.arithmetic, plan=call.plan)
    bounds = density.bounds(inner)
    values = bounds.value + call.log_weights.double()
    rounding = 2 * torch.finfo(call.arithmetic).eps * (values.abs() + call.log_weights.double().abs())
    rounding = rounding.nan_to_num(posinf=0.0)
    return values, bounds.below + rounding, bounds.above + rounding


def _bounds(density: Density, call: Call) -> Bounds:
    """Where a correct result lies: between those of the lowest and the highest log densities."""
    values, below, above = _values(density, call)
    out, low, high = (logsumexp(end, call.dim) for end in (values, values - below, values + above))
    rounding = torch.finfo(call.arithmetic).eps * (8 + values.shape[call.dim] + out.abs())
    finite = out.isfinite()
    return Bounds(
        out,
        torch.where(finite, out - low + rounding, 0.0),
        torch.where(finite, high - out + rounding, 0.0),
        dtype=call.dtype,
    )


def _gradient_bounds(density: Density, call: Call, dout: Tensor) -> tuple[Bounds, ...]:
    """Where correct gradients lie: those of the log densities, for an upstream gradient that is off as its share is."""
    values, below, above = _values(density, call)
    out = logsumexp(values, call.dim).unsqueeze(call.dim)
    of_result = _bounds(density, call)
    u = torch.finfo(call.arithmetic).eps / 2
    length = values.shape[call.dim]
    error = torch.maximum(below, above) + torch.maximum(of_result.below, of_result.above).unsqueeze(call.dim)
    share = torch.where(out == -torch.inf, 0.0, torch.exp(values - out))
    share_error = share * torch.expm1(error + (8 + length) * u)
    g = dout.double().unsqueeze(call.dim)
    upstream, upstream_error = g * share, g.abs() * share_error
    shape = call.log_weights.shape
    size = upstream.abs().sum_to_size(shape)
    terms = upstream.numel() // max(1, call.log_weights.numel())
    radius = upstream_error.sum_to_size(shape) + (4 + terms) * u * size
    inner = prepare(density, "", call.loc, call.scale, call.x)._replace(dtype=call.arithmetic, plan=call.plan)
    return (
        Bounds(upstream.sum_to_size(shape), radius, radius),
        *density.gradient_bounds(inner, upstream, upstream_error),
    )
