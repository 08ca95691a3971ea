"""Log densities of every broadcast pair as ops: validated calls, the variants of a density, and the cost of each.

A density is `normaliser(scale) + scores`, with scores of its own of every pair of loc and x. What it brings is a
`Density`; `log_prob_op` makes the op of its pairs, and `effops.ops.densities.mixture` that of their logsumexp.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from effops.blocks import pairs
from effops.blocks.pairs import Scores
from effops.blocks.plan import Plan, Shape, broadcast_plan
from effops.dispatch.arguments import check_dense, check_devices, check_operand
from effops.dispatch.custom_op import Binding, Gradients, requires_grad
from effops.dispatch.forms import add_forms, best_form, predict
from effops.dispatch.op import Cost, Op
from effops.dispatch.requirements import on_cuda, requires_triton
from effops.numerics.precision import FLOATS, INTEGERS, arithmetic_dtype, autocast_enabled, promote, wider
from effops.ops.densities import triton

Wanted = Sequence[bool]


class Call(NamedTuple):
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
    def shape(self) -> Shape:
        return self.plan.shape

    @property
    def dimension(self) -> int:
        return self.x.shape[-1]

    @property
    def arithmetic(self) -> torch.dtype:
        return arithmetic_dtype(self.dtype)


# loc, scale in float64, its normaliser, x, dtype of the arithmetic, tolerance -> scores in that dtype; scriptable
Form = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype, float], Tensor]


class Density(Protocol):
    """A family of densities.

    Attributes:
        name: of the family
        scale_name: name of the argument `scale`
        scale_dims: how many of the last dimensions of `scale` are no batch axes: 0 or 1
        smallest: dimension of x
        forms: the scores by PyTorch operations, naive and, where it differs, einsum
        kernel: the module of `effops.kernels` with phi and the normaliser, or if `scale_dims` is 1 with the kernels
        normaliser: what depends on a float64 scale alone, and the dimension, in float64, differentiable
    """

    @property
    def name(self) -> str: ...

    @property
    def scale_name(self) -> str: ...

    @property
    def scale_dims(self) -> int: ...

    @property
    def smallest(self) -> int: ...

    @property
    def forms(self) -> Mapping[str, Form]: ...

    @property
    def kernel(self) -> str: ...

    @property
    def normaliser(self) -> Callable[[Tensor, int], Tensor]: ...

    def tolerance(self, loc: Tensor, x: Tensor, dtype: torch.dtype) -> float:
        """What rounding may do to a score of inputs on the boundary of their domain."""

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
    ) -> Scores:
        """The scores for a result in `dtype`, block by block, and the gradients that `wanted` asks for."""

    def at_once(
        self, plan: Plan, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, *, rehearsed: bool
    ) -> Tensor | None:
        """The result of a call that is too small to be cut into blocks, else None; only allocated if `rehearsed`."""

    def compiled_training(self, call: Any, pairs: int, is_product: bool, *, reduced: bool) -> tuple[int, int]:
        """Bytes that TorchInductor saves for backward, and needs besides, as measured; without copies of operands."""


def prepare(density: Density, function: str, loc: Tensor, scale: Tensor | float, x: Tensor) -> Call:
    """Validate shapes, dtypes and devices (never values)."""
    check_operand(function, "loc", loc, dims=1)
    check_operand(function, "x", x, dims=1)
    dimension = x.shape[-1]
    if loc.shape[-1] != dimension:
        raise ValueError(
            f"{function}: last dimension of `x` must equal that of `loc`; got x {tuple(x.shape)}, loc "
            f"{tuple(loc.shape)}; expand the one of size 1, or transpose"
        )
    if dimension < density.smallest:
        raise ValueError(
            f"{function}: the last dimension must be at least {density.smallest}; got x {tuple(x.shape)}; "
            "put the coordinates of a point into the last dimension"
        )
    if loc.device != x.device:  # costs less than the call
        check_devices(function, loc=loc, x=x)
    common = wider(loc.dtype, x.dtype)
    given, scale = scale, _prepare_scale(density, function, scale, common, x)
    dims = density.scale_dims
    batch_shape = scale.shape[: scale.ndim - dims]
    try:
        plan = broadcast_plan(x.shape[:-1], loc.shape[:-1], batch_shape)
    except RuntimeError as error:
        raise ValueError(
            f"{function}: batch shapes must broadcast; got loc {tuple(loc.shape[:-1])} + (D,), {density.scale_name} "
            f"{tuple(batch_shape)}{' + (D or 1,)' * dims}, x {tuple(x.shape[:-1])} + (D,); unsqueeze the axes that "
            "should pair up"
        ) from error
    dtype = common
    if isinstance(given, Tensor) and scale.dtype != common:
        ndim = max(loc.ndim, x.ndim) + dims - 1  # 0-d tensors do not widen others
        dtype = promote(common, ndim, scale.dtype, given.ndim)
    if dtype.itemsize < 4 and autocast_enabled(x.device):
        dtype = torch.float32
    return Call(loc, scale, x, plan, dtype)


def _prepare_scale(density: Density, function: str, scale: Tensor | float, common: torch.dtype, x: Tensor) -> Tensor:
    name, dims = density.scale_name, density.scale_dims
    if not isinstance(scale, Tensor):
        if not isinstance(scale, Real):
            got = type(scale).__name__
            raise TypeError(f"{function}: `{name}` must be a tensor or a number; got {got}; use torch.as_tensor")
        return torch.full((1,) * dims, float(scale), dtype=arithmetic_dtype(common), device=x.device)
    check_dense(function, name, scale)
    if scale.dtype not in FLOATS:
        if scale.dtype not in INTEGERS:
            raise TypeError(f"{function}: `{name}` must be real; got {scale.dtype}; convert it first")
        scale = scale.to(common)
    if scale.device != x.device:
        if scale.ndim or scale.is_meta:
            check_devices(function, **{name: scale, "x": x})
        scale = scale.to(x.device)
    if scale.ndim < dims:
        scale = scale.unsqueeze(-1)
    if dims and scale.shape[-1] not in (1, x.shape[-1]):
        raise ValueError(
            f"{function}: last dimension of `{name}` must be that of `x`, or 1; got {name} {tuple(scale.shape)}, x "
            f"{tuple(x.shape)}; unsqueeze it if it has one value for all coordinates"
        )
    return scale


def tensor_dims(density: Density) -> dict[str, int]:
    """The tensor arguments, and how many of the last dimensions of each are no batch axes."""
    return {"loc": 1, density.scale_name: density.scale_dims, "x": 1}


def plan_of(density: Density, loc: Tensor, scale: Tensor, x: Tensor, *others: Tensor) -> Plan:
    """The plan of a call; operands `others` have batch axes alone."""
    scale_shape = scale.shape[: scale.ndim - density.scale_dims]
    return broadcast_plan(x.shape[:-1], loc.shape[:-1], scale_shape, *(other.shape for other in others))


def empty_gradients(density: Density, plan: Plan, loc: Tensor, scale: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised gradients, laid out as the chunked variant's and the kernels'."""
    return (
        plan.empty_gradient(loc, plan.batch + plan.columns, trailing=1),
        plan.empty_gradient(scale, plan.order, trailing=density.scale_dims),
        plan.empty_gradient(x, plan.batch + plan.rows, trailing=1),
    )


def scores(
    density: Density, form: Form, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, tolerance: float
) -> Tensor:
    """All scores by a form, in the dtype of the arithmetic for a result in `dtype`."""
    wide = scale.double()  # once, so that the two parts of its gradient cancel before they are rounded
    return form(loc, wide, density.normaliser(wide, x.shape[-1]), x, arithmetic_dtype(dtype), tolerance)


def preference(density: Density) -> tuple[str, ...]:
    """The names of the variants, the best first."""
    everywhere = ("triton", "chunked", "compile", "einsum", "torchscript", "naive")
    missing = {"einsum", "triton"} - density.forms.keys() - ({"triton"} if density.kernel else set())
    return tuple(name for name in everywhere if name not in missing)


def log_prob_op(density: Density) -> Op:
    """The op of the log densities of all pairs."""
    name = f"{density.name}_log_prob"
    op = Op(
        name,
        prepare=functools.partial(prepare, density, name),
        preference=preference(density),
        core_dims=tensor_dims(density),
    )

    def composed(form: Form) -> Callable[..., Tensor]:
        def log_prob(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, tolerance: float) -> Tensor:
            return scores(density, form, loc, scale, x, dtype, tolerance).to(dtype)

        return log_prob

    def settings(call: Call) -> tuple[Any, ...]:
        return call.dtype, density.tolerance(call.loc, call.x, call.dtype)

    add_forms(op, density.forms, composed, settings, functools.partial(compiled_cost, density))
    plan_of_call = functools.partial(plan_of, density)
    by_best_form = composed(best_form(density.forms))

    def composite(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        return by_best_form(loc, scale, x, dtype, density.tolerance(loc, x, dtype))

    def empty(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        return plan_of_call(loc, scale, x).empty(x, dtype)

    def empty_gradients_of_call(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return empty_gradients(density, plan_of_call(loc, scale, x), loc, scale, x)

    def bound(variant: str, forward: Callable[..., Tensor], backward: Callable[..., Gradients]) -> Binding:
        return Binding(
            f"{name}_{variant}",
            forward=forward,
            backward=backward,
            composite=composite,
            empty=empty,
            empty_gradients=empty_gradients_of_call,
            core_dims=tuple(op.core_dims.values()),
        )

    def forward(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        plan = plan_of_call(loc, scale, x)
        at_once = density.at_once(plan, loc, scale, x, dtype, rehearsed=False)
        if at_once is not None:
            return at_once
        return pairs.forward(density.blocks(plan, loc, scale, x, dtype), plan.empty(x, dtype))

    def backward(dout: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, wanted: Wanted) -> Gradients:
        plan = plan_of_call(loc, scale, x)
        return pairs.backward(density.blocks(plan, loc, scale, x, dtype, scored=False, wanted=wanted), dout)

    def triton_forward(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        plan, tolerance = plan_of_call(loc, scale, x), density.tolerance(loc, x, dtype)
        kernels = kernels_of(density, tolerance)
        return triton.forward(kernels, plan, loc, scale, x, dtype, scale_dims=density.scale_dims)

    def triton_backward(
        dout: Tensor, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, wanted: Wanted
    ) -> Gradients:
        plan, tolerance = plan_of_call(loc, scale, x), density.tolerance(loc, x, dtype)
        kernels = kernels_of(density, tolerance)
        return triton.backward(kernels, plan, loc, scale, x, dout, dtype, wanted, scale_dims=density.scale_dims)

    def triton_cost(call: Call) -> Cost:
        def rehearse(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
            return triton.rehearse(call.plan, loc, scale, x, call.dtype, scale_dims=density.scale_dims)

        return predict(call, torch.no_grad()(rehearse))

    def rehearsal(call: Call) -> Cost:
        def rehearse(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
            at_once = density.at_once(call.plan, loc, scale, x, call.dtype, rehearsed=True)
            if at_once is not None:
                return at_once
            blocks = density.blocks(call.plan, loc, scale, x, call.dtype)
            return pairs.rehearse(blocks, call.plan.empty(x, call.dtype))

        return predict(call, torch.no_grad()(rehearse))

    in_blocks = bound("chunked", forward, backward)
    op.variant("chunked", cost=rehearsal)(lambda call: in_blocks(*call.tensors, call.dtype))
    if density.kernel:
        in_kernel = bound("triton", triton_forward, triton_backward)
        requires = [
            requires_triton,
            lambda call: triton.Layout.of_pairs(call.plan).obstacle(call.scale, density.scale_dims),
        ]
        register = op.variant("triton", cost=triton_cost, requires=requires, automatic=on_cuda)
        register(lambda call: in_kernel(*call.tensors, call.dtype))
    return op


def kernels_of(density: Density, tolerance: float) -> Any:
    """The Triton kernels of a density, as `effops.ops.densities.triton` takes them."""
    module = importlib.import_module(f"effops.kernels.{density.kernel}")
    return module if density.scale_dims else triton.Dots(module.MAP, tolerance)


def compiled_cost(density: Density, call: Any, results: int | None = None) -> Cost:
    """What TorchInductor allocates, as measured: it fuses all but matrix products and the normaliser.

    `results` is their number in a logsumexp; None where every pair is one.
    """
    plan, size, scales = call.plan, call.arithmetic.itemsize, call.scale.numel()
    pairs, operations = plan.numel(plan.order), plan.numel(plan.order) * (2 * call.dimension + 4)
    output = call.dtype.itemsize * (pairs if results is None else results)
    by_product = "einsum" in density.forms
    is_product = by_product and plan.numel(plan.rows) > 1 and plan.numel(plan.columns) > 1
    copied = [tensor for tensor in (call.loc, call.x) if by_product and tensor.dtype != call.arithmetic]
    copies = size * sum(tensor.numel() for tensor in copied)
    statistics = 3 * size * (results or 0)
    if requires_grad(call.tensors):
        saved, temporary = density.compiled_training(call, pairs, is_product, reduced=results is not None)
        keeps_copies = is_product or call.loc.numel() != call.x.numel()
        return Cost(output, saved + copies * keeps_copies + statistics, temporary, operations)
    cast = size * pairs if output != size * pairs else 0
    if results is not None:
        values = size * pairs + 8 * scales
        temporary = values + max(copies - output, statistics)
    elif is_product:  # a matrix product in the order of the result is overwritten with it
        temporary = max(size * pairs + max(copies, size * pairs * plan.is_permuted) + 8 * scales - output, cast)
    elif by_product:
        temporary = max(size * pairs + (16 + size // 8 * 8) * scales - output, cast)
    else:
        temporary = cast + size * scales // max(1, call.scale.shape[-1])
    return Cost(output, 0, temporary, operations)
