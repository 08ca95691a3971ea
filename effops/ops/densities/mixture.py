"""Make ops of mixtures: the logsumexp of the weighted log densities along an axis, without keeping the pairs.

    out = log sum_n exp(log_weights_n + log p(x | loc_n, scale_n))

Blocks and kernels compute two statistics of every result: the maximum, and the logarithm of the sum of
exp(value - maximum). Their sum is the result. Backward needs both, besides the inputs. From the result alone, in
float32, the shares of the components would not add up to 1.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from effops.blocks import limits
from effops.blocks import logsumexp as logsumexp_blocks
from effops.blocks.cutting import broadcast_slice, fit, visited_pieces, whole
from effops.blocks.logsumexp import Reduction
from effops.blocks.plan import Plan, Shape, Slices
from effops.blocks.weighted import Weighted
from effops.dispatch.arguments import check_devices, check_operand, check_order, reshaped
from effops.dispatch.custom_op import CustomOp, Gradients, is_plain, is_subclassed, requires_grad
from effops.dispatch.forms import add_forms, best_form
from effops.dispatch.op import Cost, Op
from effops.dispatch.registration import add_custom_op, add_kernels, add_native, allocated, predicted
from effops.dispatch.validation import Condition, below_infinity
from effops.numerics.precision import autocast_enabled, promote
from effops.numerics.shapes import do_broadcast
from effops.ops.densities import cpp, triton
from effops.ops.densities.density import Density, DensityCall, Form, plan_of, validated
from effops.ops.densities.layout import Groups, Layout, component_groups
from effops.ops.densities.log_prob import compiled_bytes, preference, scores, tensor_dims

SUM_TOLERANCE = 0.01  # of numbers that are taken for weights if their sum is 1


@dataclass
class MixtureCall(DensityCall):
    """A validated call: that of the log densities, the weights, and the axis of the components.

    `dim` counts axes from the last one: -1, -2, ..
    """

    log_weights: Tensor
    dim: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.log_weights, self.loc, self.scale, self.x

    @property
    def arguments(self) -> tuple[Any, ...]:
        return *self.tensors, self.dim, self.dtype

    @property
    def held_bytes(self) -> int:
        return 2 * self.arithmetic.itemsize * min(limits.STATISTICS_SLAB, math.prod(self.shape))  # statistics

    @property
    def pair_buffers(self) -> int:
        return 1

    @property
    def axis(self) -> int:
        """The axis of the components in the plan."""
        return len(self.plan.shape) + self.dim

    @property
    def reduction(self) -> Reduction:
        return Reduction(self.plan, self.axis)

    @property
    def shape(self) -> Shape:
        return self.plan.without(self.axis).shape


WithoutStatistics = Callable[
    [CustomOp, MixtureCall], Tensor
]  # the result by an operator that holds no, or few, of them


def statistics(values: Tensor, log_weights: Tensor, dim: int) -> Tensor:
    """The maximum, without a gradient, and the logarithm of the sum of exp(values - maximum), along a new last axis.

    `values` include the log weights. Where these are all -inf no gradient passes. Where values alone are, it is NaN.
    """
    if values.shape[dim] == 0:
        empty = values.sum(dim).unsqueeze(-1)
        return (empty - torch.inf).expand([*empty.shape[:-1], 2])
    maximum = values.amax(dim, keepdim=True).detach()
    shift = maximum.nan_to_num(neginf=0.0)  # +inf becomes the largest number, and other terms vanish
    total = torch.exp(values - shift).sum(dim)
    own_axes = [1] * (values.ndim - log_weights.ndim) + list(log_weights.shape)
    lacks_weight = log_weights.detach().reshape(own_axes).amax(dim) == -torch.inf
    no_share = (total == 0) & lacks_weight
    log_total = torch.where(no_share, -torch.inf, torch.log(torch.where(no_share, 1.0, total)))
    return torch.stack((maximum.squeeze(dim), log_total), -1)


def prepare_mixture(
    density: Density, function: str, log_weights: Tensor, loc: Tensor, scale: Tensor | float, x: Tensor, dim: int = -1
) -> MixtureCall:
    """Validate shapes, dtypes and devices (never values)."""
    try:
        inner, plan = _validated(density, function, log_weights, loc, scale, x)
    except (TypeError, ValueError) as error:
        arguments = {"log_weights": log_weights, "loc": loc, density.scale_name: scale, "x": x}
        check_order(function, arguments, ("loc", "x"), functools.partial(_validated, density, function), error)
        raise
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
    dim = int(dim) - rank if dim >= 0 else int(dim)
    return MixtureCall(*inner.tensors, plan, dtype, log_weights, dim)


def _validated(
    density: Density, function: str, log_weights: Tensor, loc: Tensor, scale: Tensor | float, x: Tensor
) -> tuple[DensityCall, Plan]:
    """The call of the log densities and the plan with the weights, if all fit in this order of the arguments."""
    check_operand(function, "log_weights", log_weights)
    inner = validated(density, function, loc, scale, x)
    check_devices(function, log_weights=log_weights, x=x)
    try:
        return inner, plan_of(density, *inner.tensors, log_weights)
    except RuntimeError:
        remedy = reshaped("log_weights", log_weights.shape, lambda shape: do_broadcast(shape, inner.shape))
        raise ValueError(
            f"{function}: `log_weights` must broadcast with the log densities; got log_weights "
            f"{tuple(log_weights.shape)}, log densities {inner.shape}; "
            + (remedy or "unsqueeze the axes that should pair up")
        ) from None


class Mixture:
    """The op of the mixtures of a family of densities."""

    def __init__(self, density: Density) -> None:
        self.density = density
        name = f"{density.name}_mixture_log_prob"
        self.op = Op(
            name,
            prepare=functools.partial(prepare_mixture, density, name),
            preference=preference(density),
            core_dims={"log_weights": 0, **tensor_dims(density)},
            logsumexp=lambda call: call.axis,
            conditions=self.conditions,
        )
        compiled = functools.partial(compiled_bytes, density, reduced=True)
        add_forms(self.op, density.forms, self.composed, self.settings, compiled)
        self._add(add_custom_op, "chunked", self.forward, self.backward, self._by_slabs)
        requires = [self.requires_layout]
        self._add(add_kernels, "triton", self.triton_forward, self.triton_backward, self._by_slabs, requires=requires)
        self._add(
            add_native,
            "cpp",
            self.native_forward,
            self.native_backward,
            self.native,
            few=0,  # it computes the result without them
            by_example=True,  # in a batch operands may vary along points, as `requires_native` rules out
            requires=[self.requires_native],
        )

    def _add(
        self,
        add: Callable[..., None],
        variant: str,
        forward: Callable[..., Tensor],
        backward: Callable[..., Gradients],
        without_statistics: WithoutStatistics,
        *,
        few: int = limits.STATISTICS_SLAB,
        by_example: bool = False,
        **options: Any,
    ) -> None:
        """Add a variant. Where backward needs no statistics, all are kept at once of up to `few` results."""
        best = self.composed(best_form(self.density.forms))
        custom = CustomOp(
            f"{self.op.name}_{variant}",
            parameters={
                **dict.fromkeys(("log_weights", "loc", "scale", "x"), Tensor),
                "dim": int,
                "dtype": torch.dtype,
            },
            split=self.split,
            forward=forward,
            backward=backward,
            composite=lambda call: best(*call.tensors, *self.settings(call)),
            empty=self.empty,
            core_dims=tuple(self.op.core_dims.values()),
            saves_result=True,
            by_example=lambda arguments: by_example,
        )
        run, cost = (functools.partial(one, custom, without_statistics, few) for one in (self.run, self.cost))
        add(self.op, custom, variant, run=run, cost=cost, **options)

    def split(self, arguments: Sequence[Any]) -> MixtureCall:
        """The call with these arguments."""
        log_weights, loc, scale, x, dim, dtype = arguments
        plan = plan_of(self.density, loc, scale, x, log_weights)
        return MixtureCall(loc, scale, x, plan, dtype, log_weights, dim)

    def conditions(self, call: MixtureCall) -> Iterator[Condition]:
        yield from self._of_the_densities(call)  # first, since arguments in another order are no weights either
        yield below_infinity("log_weights", call.log_weights)
        own = call.log_weights.ndim + call.dim
        if own >= 0 and call.log_weights.shape[own] == call.plan.shape[call.axis]:
            weights = call.log_weights.to(call.arithmetic)
            total = weights.sum(own)
            are_weights = (weights >= 0).all(own) & ((total - 1).abs() < SUM_TOLERANCE)
            expected = f"be logarithms, not weights that add up to 1 along dim={call.dim}"
            yield Condition("log_weights", expected, total, ~are_weights, "give weights.log()")

    def _of_the_densities(self, call: MixtureCall) -> Iterator[Condition]:
        """The conditions of loc, scale and x. Where the scale is wrong, it may stand in the place of the weights."""
        for condition in self.density.conditions(call):
            if condition.argument == self.density.scale_name:
                remedy = functools.partial(self._of_the_scale, call, condition.remedy)
                condition = condition._replace(remedy=remedy)
            yield condition

    def _of_the_scale(self, call: MixtureCall, remedy: Any) -> str:
        name = self.density.scale_name
        if bool((call.log_weights > 0).all()) and bool((call.scale <= 0).all()):
            return (
                f"the order is log_weights, loc, {name}, x; here `log_weights` is positive, as `{name}` should be: "
                "reorder the arguments, or give them by name"
            )
        return str(remedy)

    def requires_layout(self, call: MixtureCall) -> str:
        if call.axis in call.plan.batch:
            return "needs components along an axis of x or of loc; here both vary along it"
        layout = Layout(call.plan, component_groups(call.plan, call.axis))
        return layout.obstacle(call.scale, self.density.scale_dims)

    def requires_native(self, call: MixtureCall) -> str:
        if call.axis in call.plan.batch:
            return "needs components along an axis of x or of loc; here both vary along it"
        groups = Groups(call.reduction, call.loc, call.x)
        scale, log_weights = (call.scale, self.density.scale_dims), (call.log_weights, 0)
        return cpp.obstacle(groups, groups.left, groups.right, scale=scale, log_weights=log_weights)

    def composed(self, form: Form) -> Callable[..., Tensor]:
        """The statistics as a form computes them: a function of the tensors of a call and of its `settings`."""
        density = self.density

        def log_prob(
            log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dim: int, dtype: torch.dtype, tolerance: float
        ) -> Tensor:
            values = scores(density, form, loc, scale, x, dtype, tolerance)
            return statistics(_weighted(values, log_weights), log_weights, dim)

        return log_prob

    def settings(self, call: MixtureCall) -> tuple[Any, ...]:
        return call.dim, call.dtype, self.density.tolerance(call)

    def empty(self, call: MixtureCall) -> Tensor:
        """Uninitialised statistics."""
        return call.reduction.empty(call.x, call.arithmetic)

    def run(self, custom: CustomOp, without_statistics: WithoutStatistics, few: int, call: MixtureCall) -> Tensor:
        """The result. All statistics are kept at once where backward needs them, or where there are few."""
        if self._keeps_statistics(call, few) or not is_plain(call.tensors):
            return self.op.finish(call, custom(call))
        return without_statistics(custom, call)

    def cost(self, custom: CustomOp, without_statistics: WithoutStatistics, few: int, call: MixtureCall) -> Cost:
        if self._keeps_statistics(call, few):
            return allocated(self.op, custom, call)
        return predicted(self.split, call, torch.no_grad()(functools.partial(without_statistics, custom)))

    def _keeps_statistics(self, call: MixtureCall, few: int) -> bool:
        are_few = math.prod(call.shape) <= few
        return are_few or requires_grad(call.tensors) or any(map(is_subclassed, call.tensors))

    def _by_slabs(self, custom: CustomOp, call: MixtureCall) -> Tensor:
        """The result, computed with the statistics of one slab of results at a time."""
        out = call.x.new_empty(call.shape, dtype=call.dtype)
        for block, some in self._slabs(call):
            out[block] = custom.forward(some).sum(-1)
        return out

    def _slabs(self, call: MixtureCall) -> Iterator[tuple[Slices, MixtureCall]]:
        """Blocks of results with the call of each. No block is larger than the first."""
        core_dims = self.op.core_dims.values()
        for block in visited_pieces(whole(call.shape), fit(call.shape, limits.STATISTICS_SLAB)):
            pairs = (*block[: call.axis], slice(None), *block[call.axis :])
            own_axes = (tensor.ndim - dims for tensor, dims in zip(call.tensors, core_dims))
            parts = (broadcast_slice(tensor, pairs[len(pairs) - own :]) for tensor, own in zip(call.tensors, own_axes))
            yield block, self.split((*parts, call.dim, call.dtype))

    def forward(self, call: MixtureCall) -> Tensor:
        weighted = Weighted(self.density.blocks(call), call.log_weights)
        return logsumexp_blocks.forward(weighted, call.reduction, self.empty(call))

    def backward(self, dout: Tensor, call: MixtureCall, wanted: Sequence[bool], result: Tensor) -> Gradients:
        weighted = Weighted(self.density.blocks(call, wanted=wanted[1:]), call.log_weights, is_wanted=wanted[0])
        *found, dweights = logsumexp_blocks.backward(weighted, call.reduction, result, dout[..., 1])
        return dweights, *found

    def triton_forward(self, call: MixtureCall) -> Tensor:
        return triton.forward_logsumexp(self.density.kernels(call), call.reduction, call.log_weights, call)

    def triton_backward(self, dout: Tensor, call: MixtureCall, wanted: Sequence[bool], result: Tensor) -> Gradients:
        return triton.backward_logsumexp(
            self.density.kernels(call), call.reduction, call.log_weights, call, result, dout[..., 1], wanted
        )

    def native(self, custom: CustomOp, call: MixtureCall) -> Tensor:
        return cpp.logsumexp(self.density.native(call), call.reduction, call.log_weights, call)

    def native_forward(self, call: MixtureCall) -> Tensor:
        return cpp.forward_logsumexp(self.density.native(call), call.reduction, call.log_weights, call)

    def native_backward(self, dout: Tensor, call: MixtureCall, wanted: Sequence[bool], result: Tensor) -> Gradients:
        return cpp.backward_logsumexp(
            self.density.native(call), call.reduction, call.log_weights, call, result, dout[..., 1], wanted
        )


def _weighted(values: Tensor, log_weights: Tensor) -> Tensor:
    return values + log_weights.to(values.dtype)  # after that nobody holds `values`, which are as many as the pairs
