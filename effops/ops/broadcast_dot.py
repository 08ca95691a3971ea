"""Dot product of every broadcast pair of rows: `(a * b).sum(-1)`, without the products.

It is a score of the form that `effops.blocks.dots` computes, with phi(dot) = dot, a scale of 1 and no normaliser.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effops.blocks import dots, pairs
from effops.blocks.dots import contract
from effops.blocks.plan import Plan, Shape, broadcast_plan
from effops.dispatch.arguments import check_devices, check_operand
from effops.dispatch.call import call
from effops.dispatch.custom_op import Binding, Gradients
from effops.dispatch.forms import add_forms, predict
from effops.dispatch.op import Cost, Op
from effops.dispatch.requirements import on_cuda, requires_triton
from effops.numerics.precision import arithmetic_dtype, autocast_enabled, wider
from effops.ops.densities import triton

NAME = "broadcast_dot"
CORE_DIMS = {"a": 1, "b": 1}


class Call(NamedTuple):
    """A validated call: its tensors, the plan of their pairs, and the dtype of the result."""

    a: Tensor
    b: Tensor
    plan: Plan
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.a.device

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.a, self.b

    @property
    def shape(self) -> Shape:
        return self.plan.shape

    @property
    def arithmetic(self) -> torch.dtype:
        return arithmetic_dtype(self.dtype)

    @property
    def dimension(self) -> int:
        return _dimension(self.a, self.b)


def prepare(a: Tensor, b: Tensor) -> Call:
    """Validate shapes, dtypes and devices (never values)."""
    check_operand(NAME, "a", a, dims=1)
    check_operand(NAME, "b", b, dims=1)
    check_devices(NAME, a=a, b=b)
    try:
        plan = broadcast_plan(a.shape[:-1], b.shape[:-1])
        torch.broadcast_shapes(a.shape[-1:], b.shape[-1:])
    except RuntimeError as error:
        raise ValueError(
            f"{NAME}: shapes must broadcast; got a {tuple(a.shape)}, b {tuple(b.shape)}; "
            "unsqueeze the axes that should pair up"
        ) from error
    dtype = wider(a.dtype, b.dtype)
    if dtype.itemsize < 4 and autocast_enabled(a.device):
        dtype = torch.float32
    return Call(a, b, plan, dtype)


def _expanded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Views with the same last dimension; scriptable."""
    dimension = _dimension(a, b)
    return a.expand(list(a.shape[:-1]) + [dimension]), b.expand(list(b.shape[:-1]) + [dimension])  # noqa: RUF005


def _dimension(a: Tensor, b: Tensor) -> int:
    return max(a.shape[-1], b.shape[-1]) if min(a.shape[-1], b.shape[-1]) else 0


def naive(a: Tensor, b: Tensor, arithmetic: torch.dtype) -> Tensor:
    return (a.to(arithmetic) * b.to(arithmetic)).sum(-1)


def einsum(a: Tensor, b: Tensor, arithmetic: torch.dtype) -> Tensor:
    if a.shape[-1] != b.shape[-1]:  # cast before: the gradient of a single coordinate is summed before it is rounded
        a, b = _expanded(a.to(arithmetic), b.to(arithmetic))
    return contract(b, a, arithmetic)


class Identity:
    """phi(dot) = dot, for `effops.blocks.dots`."""

    def value_(self, dot: Tensor) -> None:
        pass

    def derivative_(self, dot: Tensor, factor: Tensor, value: Tensor | None) -> None:
        if value is not None:
            value.copy_(dot)
        dot.copy_(factor.expand(dot.shape))

    def normaliser(self, scale: Tensor) -> Tensor:
        return torch.zeros_like(scale)

    def normaliser_derivative(self, scale: Tensor) -> Tensor:
        return torch.zeros_like(scale)


def _plan(a: Tensor, b: Tensor) -> Plan:
    return broadcast_plan(a.shape[:-1], b.shape[:-1])


def _scores(a: Tensor, b: Tensor, dtype: torch.dtype, **options: Any) -> dots.DotScores:
    return dots.DotScores(Identity(), _plan(a, b), b, _one(a, dtype), a, arithmetic_dtype(dtype), **options)


def _one(a: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_ones((), dtype=arithmetic_dtype(dtype))


def _chunked(a: Tensor, b: Tensor, dtype: torch.dtype, *, rehearsed: bool = False) -> Tensor:
    plan = _plan(a, b)
    if dots.fit_one_block(plan, a, dtype):
        return dots.at_once(Identity(), plan, b, _one(a, dtype), a, dtype, rehearsed=rehearsed)
    return (pairs.rehearse if rehearsed else pairs.forward)(_scores(a, b, dtype), plan.empty(a, dtype))


def _chunked_backward(dout: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, wanted: Sequence[bool]) -> Gradients:
    return pairs.backward(_scores(a, b, dtype, scored=False, wanted=wanted), dout)


def _triton(a: Tensor, b: Tensor, dtype: torch.dtype, *, rehearsed: bool = False) -> Tensor:
    if rehearsed:
        return triton.rehearse(_plan(a, b), b, _one(a, dtype), a, dtype)
    from effops.kernels.broadcast_dot import MAP

    return triton.forward(triton.Dots(MAP, 0.0), _plan(a, b), b, _one(a, dtype), a, dtype)


def _triton_backward(dout: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, wanted: Sequence[bool]) -> Gradients:
    from effops.kernels.broadcast_dot import MAP

    return triton.backward(triton.Dots(MAP, 0.0), _plan(a, b), b, _one(a, dtype), a, dout, dtype, wanted)


def _composed(form: Any) -> Any:
    def dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        result: Tensor = form(a, b, arithmetic_dtype(dtype)).to(dtype)
        return result

    return dot


def _empty(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return _plan(a, b).empty(a, dtype)


def _empty_gradients(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    plan = _plan(a, b)

    def empty(operand: Tensor, axes: Shape) -> Tensor:
        own = operand[..., :1] if a.shape[-1] != b.shape[-1] else operand
        return plan.empty_gradient(own, axes, trailing=1).expand(operand.shape)

    return empty(a, plan.batch + plan.rows), empty(b, plan.batch + plan.columns)


def _compiled_cost(call: Call) -> Cost:
    """What TorchInductor allocates, as measured: copies in the dtype of the arithmetic, and the product in it."""
    plan, size = call.plan, arithmetic_dtype(call.dtype).itemsize
    pairs = plan.numel(plan.order)
    output, operations = call.dtype.itemsize * pairs, 2 * pairs * call.dimension
    is_product = plan.numel(plan.rows) > 1 and plan.numel(plan.columns) > 1
    cast = size * pairs if call.dtype.itemsize != size else 0
    copies = is_product * size * sum(tensor.numel() for tensor in call.tensors if tensor.dtype.itemsize != size)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors):
        return Cost(output, copies, cast, operations)
    return Cost(output, 0, size * pairs + copies - output, operations)


op = Op(
    NAME,
    prepare=prepare,
    preference=("triton", "chunked", "compile", "einsum", "torchscript", "naive"),
    core_dims=CORE_DIMS,
)

add_forms(op, {"naive": naive, "einsum": einsum}, _composed, lambda call: (call.dtype,), _compiled_cost)


def _add(variant: str, compute: Any, compute_backward: Any, **options: Any) -> None:
    """The variant made of a pair of functions of operands with the same last dimension, which is not 0."""

    def forward(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        result: Tensor = compute(*_expanded(a, b), dtype) if _dimension(a, b) else _empty(a, b, dtype).zero_()
        return result

    def backward(dout: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, wanted: Sequence[bool]) -> Gradients:
        if a.shape[-1] == b.shape[-1] == 0:
            return [
                gradient if is_wanted else None for gradient, is_wanted in zip(_empty_gradients(a, b, dtype), wanted)
            ]
        wants_a, wants_b = wanted
        operands = (a, b) if a.shape[-1] == b.shape[-1] else (summed(a, dtype), summed(b, dtype))
        db, _, da = compute_backward(dout, *operands, dtype, (wants_b, False, wants_a))
        return [
            None if gradient is None else gradient.to(operand.dtype).expand(operand.shape)
            for operand, gradient in ((a, da), (b, db))
        ]

    def summed(operand: Tensor, dtype: torch.dtype) -> Tensor:
        """What a single coordinate is multiplied with: the sum of all, which have the same gradient."""
        if operand.shape[-1] == 1:
            return operand
        return forward(operand, operand.new_ones(1), arithmetic_dtype(dtype)).unsqueeze(-1)

    binding = Binding(
        f"{NAME}_{variant}",
        forward=forward,
        backward=backward,
        composite=_composed(einsum),
        empty=_empty,
        empty_gradients=_empty_gradients,
        core_dims=tuple(CORE_DIMS.values()),
    )

    def cost(call: Call) -> Cost:
        def rehearse(a: Tensor, b: Tensor) -> Tensor:
            if call.dimension == 0:
                return _empty(a, b, call.dtype)
            result: Tensor = compute(*_expanded(a, b), call.dtype, rehearsed=True)
            return result

        return predict(call, torch.no_grad()(rehearse))

    op.variant(variant, cost=cost, **options)(lambda call: binding(call.a, call.b, call.dtype))


_add("chunked", _chunked, _chunked_backward)
_add("triton", _triton, _triton_backward, requires=[requires_triton], automatic=on_cuda)


@op.public
def broadcast_dot(a: Tensor, b: Tensor, *, variant: str | None = None) -> Tensor:
    """Dot product of every broadcast pair of rows: `(a * b).sum(-1)`, without its intermediate.

    Args:
        a: `(*A, D)`
        b: `(*B, D)`; the last dimension of one of them may be 1
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        The dot products, of the shape to which `A` and `B` broadcast; it may be a permuted view. The dtype is the
        promotion of the inputs' (under autocast float32 or wider); the arithmetic is float32, or float64 for float64.

    Variants chunked and triton save the two inputs for backward, no more.

    Raises:
        TypeError: an argument is no tensor, or not of a floating-point dtype
        ValueError: shapes do not broadcast, devices differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> effops.broadcast_dot(torch.randn(1000, 1, 3), torch.randn(4, 3)).shape
        torch.Size([1000, 4])
    """
    return call(op, a, b, variant=variant)
