"""Mixtures as ops: the logsumexp of the weighted log densities along an axis, without keeping the pairs.

    out = log sum_n exp(log_weights_n + log p(x | loc_n, scale_n))

Blocks and kernels compute two statistics of every row, the maximum and the logarithm of the sum of the exponentials
without it. Their sum is the result; both are saved for backward besides the inputs, for in float32 the result alone
would leave shares of the components that do not add up to 1.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effops.blocks import logsumexp as logsumexp_blocks
from effops.blocks import tiling
from effops.blocks.logsumexp import Reduction
from effops.blocks.plan import Plan, Shape, Slices
from effops.dispatch.arguments import check_devices, check_operand
from effops.dispatch.custom_op import Binding, Gradients, is_plain, requires_grad
from effops.dispatch.forms import add_forms, best_form, predict
from effops.dispatch.op import Cost, Op
from effops.dispatch.requirements import on_cuda, requires_triton
from effops.numerics.precision import arithmetic_dtype, autocast_enabled, promote
from effops.ops.densities import triton
from effops.ops.densities.density import (
    Density,
    Form,
    compiled_cost,
    empty_gradients,
    kernels_of,
    plan_of,
    preference,
    prepare,
    scores,
    tensor_dims,
)

SLAB = 65536  # results whose statistics are held at once, unless backward needs those of all
Statistics = Callable[..., Tensor]  # of log_weights, loc, scale, x, dim and dtype of the result


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
    check_operand(function, "log_weights", log_weights)
    inner = prepare(density, function, loc, scale, x)
    check_devices(function, log_weights=log_weights, x=x)
    try:
        plan = plan_of(density, *inner.tensors, log_weights)
    except RuntimeError as error:
        raise ValueError(
            f"{function}: `log_weights` must broadcast with the log densities; got log_weights "
            f"{tuple(log_weights.shape)}, log densities {inner.shape}; unsqueeze the axes that should pair up"
        ) from error
    rank = len(plan.shape)
    if not isinstance(dim, Integral) or isinstance(dim, bool):
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
        return statistics(weighted(best_form(density.forms), log_weights, loc, scale, x, dtype, tolerance), dim)

    def reduction_of(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int) -> Reduction:
        plan = plan_of(density, loc, scale, x, log_weights)
        return Reduction(plan, len(plan.shape) + dim)

    def empty(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return reduction_of(log_weights, loc, scale, x, dim).empty(x, arithmetic_dtype(dtype))

    def empty_gradients_of_call(
        log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        plan = plan_of(density, loc, scale, x, log_weights)
        return plan.empty_gradient(log_weights, plan.order), *empty_gradients(density, plan, loc, scale, x)

    def keeps_statistics(call: Call) -> bool:
        """Whether those of all results are held at once."""
        return requires_grad(call.tensors) or math.prod(call.shape) <= SLAB

    def slabs(call: Call, tensors: Sequence[Tensor]) -> Iterator[tuple[Slices, list[Tensor]]]:
        """Blocks of results, none larger than the first, and what each depends on."""
        axis = len(call.plan.shape) + call.dim
        for block in tiling.tiles(tiling.whole(call.shape), tiling.fit(call.shape, SLAB)):
            pairs = (*block[:axis], slice(None), *block[axis:])
            own_axes = (tensor.ndim - dims for tensor, dims in zip(tensors, op.core_dims.values()))
            yield block, [tiling.part(tensor, pairs[len(pairs) - own :]) for tensor, own in zip(tensors, own_axes)]

    def by_slabs(call: Call, tensors: Sequence[Tensor], statistics_of: Statistics, count: int | None = None) -> Tensor:
        """The result; only the statistics of a slab are held at a time. `count` slabs, or all."""
        out = tensors[-1].new_empty(call.shape, dtype=call.dtype)
        for block, parts in itertools.islice(slabs(call, tensors), count):
            out[block] = statistics_of(*parts, call.dim, call.dtype).sum(-1)
        return out

    def add(
        variant: str, forward: Statistics, backward: Callable[..., Gradients], rehearse: Statistics, **options: Any
    ) -> None:
        """The variant made of a pair of functions; `rehearse` allocates what `forward` does."""
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
            if keeps_statistics(call) or not is_plain(call.tensors):
                return op.finish(call, statistics_of_call(call))
            return by_slabs(call, call.tensors, forward)

        def statistics_of_call(call: Call) -> Tensor:
            return binding(*call.tensors, call.dim, call.dtype)

        def cost(call: Call) -> Cost:
            kept, saved = keeps_statistics(call), requires_grad(call.tensors)
            held: list[Tensor] = []

            def rehearsal(*tensors: Tensor) -> Tensor:
                if not kept:
                    return by_slabs(call, tensors, rehearse, 1)
                found = rehearse(*tensors, call.dim, call.dtype)
                held.extend([found] * saved)
                return op.finish(call, found)

            return predict(call, torch.no_grad()(rehearsal))

        op.variant(variant, cost=cost, statistics=statistics_of_call, **options)(run)

    def forward(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        reduction = reduction_of(log_weights, loc, scale, x, dim)
        blocks = density.blocks(reduction.plan, loc, scale, x, dtype)
        return logsumexp_blocks.forward(blocks, log_weights, reduction, reduction.empty(x, arithmetic_dtype(dtype)))

    def backward(
        dout: Tensor,
        log_weights: Tensor,
        loc: Tensor,
        scale: Tensor,
        x: Tensor,
        result: Tensor,
        dim: int,
        dtype: torch.dtype,
        wanted: Sequence[bool],
    ) -> Gradients:
        reduction = reduction_of(log_weights, loc, scale, x, dim)
        blocks = density.blocks(reduction.plan, loc, scale, x, dtype, wanted=wanted[1:])
        return logsumexp_blocks.backward(blocks, log_weights, reduction, result, dout[..., 1], wanted[0])

    def rehearse(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        reduction = reduction_of(log_weights, loc, scale, x, dim)
        blocks = density.blocks(reduction.plan, loc, scale, x, dtype)
        return logsumexp_blocks.rehearse(blocks, reduction, reduction.empty(x, arithmetic_dtype(dtype)))

    add("chunked", forward, backward, rehearse)

    def triton_forward(
        log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype
    ) -> Tensor:
        reduction, tolerance = reduction_of(log_weights, loc, scale, x, dim), density.tolerance(loc, x, dtype)
        kernels = kernels_of(density, tolerance)
        return triton.forward_logsumexp(
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
        wanted: Sequence[bool],
    ) -> Gradients:
        reduction, tolerance = reduction_of(log_weights, loc, scale, x, dim), density.tolerance(loc, x, dtype)
        return triton.backward_logsumexp(
            kernels_of(density, tolerance),
            reduction,
            log_weights,
            loc,
            scale,
            x,
            result,
            dout[..., 1],
            dtype,
            wanted,
            scale_dims=density.scale_dims,
        )

    def triton_rehearse(
        log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype
    ) -> Tensor:
        triton.rehearse_normaliser(scale, density.scale_dims)
        return empty(log_weights, loc, scale, x, dim, dtype)

    if density.kernel:
        requires = [requires_triton, functools.partial(_requires_layout, density)]
        add("triton", triton_forward, triton_backward, triton_rehearse, requires=requires, automatic=on_cuda)
    return op


def _requires_layout(density: Density, call: Call) -> str:
    axis = len(call.plan.shape) + call.dim
    if axis in call.plan.batch:
        return "needs components along an axis of x or of loc; here both vary along it"
    layout = triton.Layout(call.plan, triton.component_groups(call.plan, axis))
    return layout.obstacle(call.scale, density.scale_dims)
