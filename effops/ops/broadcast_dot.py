"""The dot product of every broadcast pair of rows: `(a * b).sum(-1)`, without the tensor of products.

It is a score of the form that `effops.blocks.dots` computes, with phi(dot) = dot, a scale of 1 and no normaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from effops.blocks import products
from effops.blocks.dots import DotMap, contract
from effops.blocks.plan import Plan, Shape, broadcast_plan
from effops.blocks.small import SmallCall
from effops.dispatch.arguments import check_devices, check_operand
from effops.dispatch.call import call
from effops.dispatch.custom_op import CustomOp, Gradients
from effops.dispatch.forms import add_forms
from effops.dispatch.op import Call, Op
from effops.dispatch.registration import add_custom_op, add_kernels, add_native
from effops.dispatch.validation import finite
from effops.numerics.layout import as_gradient, empty_gradient
from effops.numerics.precision import arithmetic_dtype, autocast_enabled, wider
from effops.numerics.shapes import broadcast_shapes, do_broadcast
from effops.ops.densities import cpp, triton
from effops.ops.densities.density import DensityCall
from effops.ops.densities.log_prob import prefers_native, requires_native
from effops.prediction import inductor
from effops.prediction.allocations import Bytes

NAME = "broadcast_dot"
CORE_DIMS = {"a": 1, "b": 1}


@dataclass
class DotProductCall(Call):
    """A validated call: its tensors, the plan of their pairs, and the dtype of the result."""

    a: Tensor
    b: Tensor
    plan: Plan
    dtype: torch.dtype

    @classmethod
    def split(cls, arguments: Sequence[Any]) -> DotProductCall:
        """The inverse of `arguments`."""
        a, b, dtype = arguments
        return cls(a, b, broadcast_plan(a.shape[:-1], b.shape[:-1]), dtype)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.a, self.b

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.a, self.b, self.dtype

    @property
    def shape(self) -> Shape:
        return self.plan.shape

    @property
    def dimension(self) -> int:
        return _dimension(self.a, self.b)

    @property
    def operations(self) -> int:
        return self.plan.numel(self.plan.order) * (2 * self.dimension + 4)

    @property
    def pairs(self) -> DensityCall:
        """The call of a score with a scale of 1."""
        return DensityCall(self.b, self.a.new_ones((), dtype=self.arithmetic), self.a, self.plan, self.dtype)


def prepare(a: Tensor, b: Tensor) -> DotProductCall:
    """Validate shapes, dtypes and devices (never values)."""
    check_operand(NAME, "a", a, dims=1)
    check_operand(NAME, "b", b, dims=1)
    check_devices(NAME, a=a, b=b)
    try:
        plan = broadcast_plan(a.shape[:-1], b.shape[:-1])
        broadcast_shapes(a.shape[-1:], b.shape[-1:])
    except RuntimeError:
        remedy = "unsqueeze the axes that should pair up"
        if not do_broadcast(a.shape[-1:], b.shape[-1:]):
            is_transposed = any(one.shape[-2:-1] == other.shape[-1:] for one, other in ((a, b), (b, a)))
            remedy = "transpose so that rows have one length" if is_transposed else "give rows of one length"
        if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[1]:
            remedy = f"for every pair of rows give a.unsqueeze(-2), and the result is {(len(a), len(b))}"
        raise ValueError(
            f"{NAME}: shapes must broadcast; got a {tuple(a.shape)}, b {tuple(b.shape)}; {remedy}"
        ) from None
    dtype = wider(a.dtype, b.dtype)
    if dtype.itemsize < 4 and autocast_enabled(a.device):
        dtype = torch.float32
    return DotProductCall(a, b, plan, dtype)


def _expanded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Views with the same last dimension; scriptable."""
    dimension = _dimension(a, b)
    return a.expand(list(a.shape[:-1]) + [dimension]), b.expand(list(b.shape[:-1]) + [dimension])  # noqa: RUF005


def _dimension(a: Tensor, b: Tensor) -> int:
    return max(a.shape[-1], b.shape[-1]) if min(a.shape[-1], b.shape[-1]) else 0


def naive(a: Tensor, b: Tensor, arithmetic: torch.dtype) -> Tensor:
    return (a.to(arithmetic) * b.to(arithmetic)).sum(-1)


def einsum(a: Tensor, b: Tensor, arithmetic: torch.dtype) -> Tensor:
    if a.shape[-1] != b.shape[-1]:  # cast first, so that the gradient of a single coordinate is summed, then rounded
        a, b = _expanded(a.to(arithmetic), b.to(arithmetic))
    return contract(b, a, arithmetic)


def _chunked(call: DensityCall) -> Tensor:
    small = SmallCall(DotMap(), call.plan, call.loc, call.scale, call.x, call.dtype)
    if small.is_small:
        return small.forward(call.loc, call.scale, call.x)
    return products.forward(call.plan, call.loc, call.x, call.plan.empty(call.x, call.dtype))


def _chunked_backward(call: DensityCall, dout: Tensor, wanted: Sequence[bool]) -> Gradients:
    wants_loc, _, wants_x = wanted
    dloc, dx = products.backward(call.plan, call.loc, call.x, dout, (wants_loc, wants_x), call.arithmetic)
    return dloc, None, dx


def _triton(call: DensityCall) -> Tensor:
    return triton.forward(triton.dot_kernels(NAME, 0.0), call)


def _triton_backward(call: DensityCall, dout: Tensor, wanted: Sequence[bool]) -> Gradients:
    return triton.backward(triton.dot_kernels(NAME, 0.0), call, dout, wanted)


def _native(call: DensityCall) -> Tensor:
    return cpp.forward(cpp.of_map(DotMap(), call.dimension), call)


def _native_backward(call: DensityCall, dout: Tensor, wanted: Sequence[bool]) -> Gradients:
    return cpp.backward(cpp.of_map(DotMap(), call.dimension), call, dout, wanted)


def _requires_native(call: DotProductCall) -> str:
    return requires_native(call.pairs)


def _composed(form: Any) -> Any:
    def dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        result: Tensor = form(a, b, arithmetic_dtype(dtype)).to(dtype)
        return result

    return dot


def _empty(call: DotProductCall) -> Tensor:
    return call.plan.empty(call.a, call.dtype)


def _compiled_bytes(program: inductor.Program, call: DotProductCall) -> Bytes:
    """What the compiled form allocates."""
    is_product = min(call.plan.numel(call.plan.rows), call.plan.numel(call.plan.columns)) > 1
    return inductor.dot_products(program, *call.tensors, is_product=is_product)


op = Op(
    NAME,
    prepare=prepare,
    # On an idle CPU `cpp` takes the time of BLAS, and for small calls longer.
    preference=("triton", "chunked", "cpp", "compile", "einsum", "torchscript", "naive"),
    core_dims=CORE_DIMS,
    conditions=lambda call: (finite("a", call.a), finite("b", call.b)),
)

add_forms(op, {"naive": naive, "einsum": einsum}, _composed, lambda call: (call.dtype,), _compiled_bytes)


def _add(add: Callable[..., None], variant: str, compute: Any, compute_backward: Any, **options: Any) -> None:
    """Add a variant from a forward and a backward function.

    Both get the call of a score, with operands whose last dimension is the same and not 0.
    """

    def forward(call: DotProductCall) -> Tensor:
        if not call.dimension:
            return _empty(call).zero_()
        a, b = _expanded(call.a, call.b)
        result: Tensor = compute(replace(call, a=a, b=b).pairs)
        return result

    def backward(dout: Tensor, call: DotProductCall, wanted: Sequence[bool]) -> Gradients:
        a, b = call.tensors
        if a.shape[-1] == b.shape[-1] == 0:
            return [empty_gradient(operand) if is_wanted else None for operand, is_wanted in zip((a, b), wanted)]
        wants_a, wants_b = wanted
        same = call if a.shape[-1] == b.shape[-1] else replace(call, a=summed(a, call.dtype), b=summed(b, call.dtype))
        db, _, da = compute_backward(same.pairs, dout, (wants_b, False, wants_a))
        return [
            None if gradient is None else as_gradient(gradient.expand(operand.shape), operand)
            for operand, gradient in ((a, da), (b, db))
        ]

    def summed(operand: Tensor, dtype: torch.dtype) -> Tensor:
        """An operand summed over its coordinates, each of which the other operand's one coordinate multiplies."""
        if operand.shape[-1] == 1:
            return operand
        return forward(DotProductCall.split((operand, operand.new_ones(1), arithmetic_dtype(dtype)))).unsqueeze(-1)

    custom = CustomOp(
        f"{NAME}_{variant}",
        parameters={"a": Tensor, "b": Tensor, "dtype": torch.dtype},
        split=DotProductCall.split,
        forward=forward,
        backward=backward,
        composite=lambda call: _composed(einsum)(*call.arguments),
        empty=_empty,
        core_dims=tuple(CORE_DIMS.values()),
    )
    add(op, custom, variant, **options)


_add(add_custom_op, "chunked", _chunked, _chunked_backward)
_add(add_kernels, "triton", _triton, _triton_backward)
_add(
    add_native,
    "cpp",
    _native,
    _native_backward,
    requires=[_requires_native],
    automatic=lambda call: prefers_native(call.pairs),
)


@op.public
def broadcast_dot(a: Tensor, b: Tensor, *, variant: str | None = None) -> Tensor:
    """Dot product of every broadcast pair of rows: `(a * b).sum(-1)`, without its intermediate.

    Args:
        a: `(*A, D)`
        b: `(*B, D)`; the last dimension of one of them may be 1
        variant: the implementation to run; "auto" for the best that supports the call (see `effops.explain`), and None
            for that of `effops.use_variant`, or else the best

    Returns:
        The dot products, of the shape to which `A` and `B` broadcast; it may be a permuted view. The dtype is the
        promotion of the inputs' (under autocast float32 or wider); the arithmetic is float32, or float64 for float64.

    For backward, variants cpp, chunked and triton save the two inputs and no more. NaN gives NaN in its rows, and so
    does infinity where a 0 meets it, unless `effops.validate()` is entered, which raises.

    Raises:
        TypeError: an argument is no tensor, or not of a floating-point dtype
        ValueError: shapes do not broadcast, devices differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> effops.broadcast_dot(torch.randn(1000, 1, 3), torch.randn(4, 3)).shape
        torch.Size([1000, 4])
    """
    return call(op, a, b, variant=variant)
