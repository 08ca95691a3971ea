"""Operators of PyTorch, each made of a forward and a backward function of a typed call.

They work with all of PyTorch: autograd, `torch.func`, tracing, fake tensors. A call on plain tensors runs the functions
at once. A call that is traced or transformed becomes two operators, one for each direction. For both, PyTorch knows the
layout of the results (fake tensors), how to batch them (vmap), and the derivatives.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from effops.dispatch.native import Native
from effops.numerics.layout import empty_gradient, without_negation
from effops.numerics.precision import without_autocast
from effops.prediction.inside import register_body
from effops.pytorch import (
    FakeTensor,
    TransformType,
    _are_functorch_transforms_active,
    _get_dispatch_mode,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
    forward_ad,
    get_interpreter_stack,
    is_gradtrackingtensor,
    is_legacy_batchedtensor,
    unwrap_if_dead,
)

Gradients = Sequence[Tensor | None]

_PLAIN_TYPES = frozenset((Tensor, Parameter))
_is_meta = attrgetter("is_meta")

CUSTOM_OPS: dict[str, CustomOp] = {}  # by name, since tracers can pass on a name but no object


def digest(folder: Path) -> str:
    """A number that changes with any module in a folder."""
    sources = sorted((str(path.relative_to(folder)), path.read_bytes()) for path in folder.rglob("*.py"))
    return hashlib.sha256(repr(sources).encode()).hexdigest()[:16]


# PyTorch keeps compiled graphs on disk, by the operators and numbers in them. Traced calls have this one among their
# arguments, so that a graph in which an older version's rules were traced is not that of this version.
CODE_VERSION = digest(Path(__file__).parents[1])


class CustomOp:
    """An operation on tensors, computed by a pair of functions of a call.

    The operator takes the tensors of a call and then its settings: numbers, dtypes, whatever a schema takes; last, it
    takes `CODE_VERSION`, which it ignores. Only the tensors are saved for backward, and the result if `saves_result`.

    Args:
        name: the operator is `torch.ops.effops.<name>`; the name of its backward ends in `_backward`
        parameters: names and types of the operator's arguments, the tensors first
        split: makes a call of these arguments, the inverse of `call.arguments`
        forward: `forward(call)` -> the result
        backward: `backward(dout, call, wanted)` -> a gradient for each tensor, None where `wanted` is False; if the
            result is saved, it is the last argument. A gradient has the strides that
            `effops.numerics.layout.gradient_strides` tells
        composite: the same function as `forward`, made of differentiable PyTorch operations; it serves derivatives of
            `backward` and forward-mode differentiation
        empty: an uninitialised result, with the layout that `forward` gives it
        core_dims: for each tensor, how many of its last dimensions are no batch axes; the axes before them broadcast
        saves_result: whether `backward` takes the result
        by_example: whether a call with these arguments is batched one example at a time, since it draws random numbers
            by the index of a value in the call
        native: whether `forward` consists of PyTorch operations that have their own backward; that backward runs where
            it can, on plain and on fake tensors, so that `backward` does not compute `forward` again
    """

    def __init__(
        self,
        name: str,
        *,
        parameters: Mapping[str, Any],
        split: Callable[[Sequence[Any]], Any],
        forward: Callable[[Any], Tensor],
        backward: Callable[..., Gradients],
        composite: Callable[[Any], Tensor],
        empty: Callable[[Any], Tensor],
        core_dims: Sequence[int],
        saves_result: bool = False,
        by_example: Callable[[Sequence[Any]], bool] = lambda arguments: False,
        native: bool = False,
    ) -> None:
        CUSTOM_OPS[name] = self
        self.name, self.native, self.saves_result = name, native, saves_result
        self.split, self.forward, self.backward, self.composite = split, forward, backward, composite
        self.core_dims, self.by_example = tuple(core_dims), by_example
        self.count, self.taken = len(self.core_dims), len(parameters)
        self.saved, self.kept = self.count + saves_result, self.taken + saves_result
        inputs = _inputs(parameters)
        kept = [*inputs[: self.count], *["Tensor result"] * saves_result, *inputs[self.count :]]

        def run(*arguments: Any) -> Tensor:
            with without_autocast(arguments[0].device):
                return forward(split(arguments[: self.taken]))

        def run_backward(dout: Tensor, *arguments: Any) -> list[Tensor]:
            saved, wanted = arguments[: self.kept], arguments[self.kept]
            with without_autocast(dout.device):
                return [one for one in self.compute_gradients(dout, saved, wanted) if one is not None]

        def fake_backward(dout: Tensor, *arguments: Any) -> list[Tensor]:
            wanted = arguments[self.kept]
            return [empty_gradient(tensor) for tensor, is_wanted in zip(arguments, wanted) if is_wanted]

        self.operator = torch.library.custom_op(
            f"effops::{name}", run, mutates_args=(), schema=f"({', '.join(inputs)}, str code='') -> Tensor"
        )
        self.operator.register_fake(lambda *arguments: empty(split(arguments[: self.taken])))
        self.operator.register_vmap(self._batched)
        self.operator.register_autograd(self.pull_back, setup_context=self.save)
        self.backward_operator = torch.library.custom_op(
            f"effops::{name}_backward",
            run_backward,
            mutates_args=(),
            schema=f"(Tensor dout, {', '.join(kept)}, bool[] needs, str code='') -> Tensor[]",
        )
        self.backward_operator.register_fake(fake_backward)
        self.backward_operator.register_vmap(self._batched_backward)
        self.backward_operator.register_autograd(self.pull_back_gradients, setup_context=self.save_for_gradients)
        register_body(name, run)
        register_body(f"{name}_backward", run_backward)

    def __call__(self, call: Any) -> Tensor:
        tensors = call.tensors
        result: Tensor
        if self.runs_at_once(tensors):
            if not requires_grad(tensors):
                return self.forward(call)
            # This skips `Function.apply`, a third of whose time goes into the search for transforms. `is_plain` found
            # none.
            if self.native:
                result = super(torch.autograd.Function, Native).apply(*call.arguments, self)
            else:
                result = super(torch.autograd.Function, _Differentiable).apply(*tensors, call, self)
        elif _needs_composite():
            result = self.composite(call)
        elif is_compiling() and self.native:
            result = self.forward(call)
        elif _are_functorch_transforms_active() and not self.is_functionalized():
            result = _Transformable.apply(*call.arguments, self.name)
        else:
            result = self.operator(*call.arguments, CODE_VERSION)
        return result

    def runs_at_once(self, tensors: Sequence[Tensor]) -> bool:
        return is_plain(tensors) or (self.native and _is_fake(tensors))

    def is_functionalized(self) -> bool:
        """Whether `functionalize` is the only active transform of `torch.func`; raises where it is one of several."""
        active = {interpreter.key() for interpreter in get_interpreter_stack() or ()}
        if len(active) > 1 and TransformType.Functionalize in active:
            raise NotImplementedError(
                f"{self.name}: torch.func.functionalize must be the only transform; got it with another; leave it out, "
                "since no operator of effops changes a tensor in place, or apply it to a graph that make_fx has made"
            )
        return TransformType.Functionalize in active

    def computes_again(self, dout: Tensor, saved: Sequence[Tensor]) -> bool:
        """Whether PyTorch's own backward cannot serve a pass that is differentiated or has many gradients."""
        return requires_grad((dout, *saved)) or not self.runs_at_once((dout,)) or is_legacy_batchedtensor(dout)

    def call_of(self, saved: Sequence[Any]) -> Any:
        """The call, from what is saved for backward: the tensors, the result if `saves_result`, and the settings."""
        return self.split((*saved[: self.count], *saved[self.saved :]))

    def compute_gradients(self, dout: Tensor, saved: Sequence[Any], wanted: Sequence[bool]) -> Gradients:
        """The gradients that `backward` computes from what is saved for it."""
        return self.backward(dout, self.call_of(saved), wanted, *saved[self.count : self.saved])

    def gradients(self, dout: Tensor, arguments: Sequence[Any], wanted: Sequence[bool]) -> Gradients:
        """The gradients of the tensors among `arguments`, which are what is saved. They can be differentiated again."""
        tensors = (dout, *arguments[: self.saved])
        # `torch.autograd.grad(is_grads_batched=True)` gives a kind of batched gradient that operators have no rule for.
        is_legacy = is_legacy_batchedtensor(dout)
        if not is_legacy and self.runs_at_once(tensors) and not requires_grad(tensors):
            with without_autocast(dout.device):
                return self.compute_gradients(dout, arguments, wanted)
        if is_legacy or _needs_composite():
            found = iter(self.composite_gradients(dout, arguments, wanted))
        elif _are_functorch_transforms_active() and not self.is_functionalized():
            found = iter(_TransformableGradients.apply(dout, *arguments, list(wanted), self.name))
        else:
            found = iter(self.backward_operator(dout, *arguments, list(wanted), CODE_VERSION))
        return tuple(next(found) if is_wanted else None for is_wanted in wanted)

    def composite_gradients(self, dout: Tensor, arguments: Sequence[Any], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
        """The gradients that `wanted` asks for, as `backward` computes them, by differentiable PyTorch operations."""
        tensors, settings = arguments[: self.count], arguments[self.saved :]
        with without_autocast(dout.device):
            _, pull_back = _vjp(lambda *tensors: self.composite(self.split((*tensors, *settings))), tensors)
            return tuple(gradient for gradient, is_wanted in zip(pull_back(dout), wanted) if is_wanted)

    def save(self, ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        ctx.settings, ctx.others = tuple(inputs[self.count : self.taken]), len(inputs) - self.count
        ctx.save_for_backward(*inputs[: self.count], *(output,) * self.saves_result)

    def pull_back(self, ctx: Any, dout: Tensor) -> Any:
        """The backward rule of the operation."""
        wanted = tuple(ctx.needs_input_grad[: self.count])
        gradients = self.gradients(without_negation(dout), (*ctx.saved_tensors, *ctx.settings), wanted)
        return *gradients, *(None,) * ctx.others

    def save_for_gradients(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        dout, *arguments = inputs
        ctx.settings, ctx.wanted = tuple(arguments[self.saved : self.kept]), arguments[self.kept]
        ctx.others = len(arguments) - self.count
        ctx.save_for_backward(dout, *arguments[: self.saved])

    def pull_back_gradients(self, ctx: Any, upstream: Sequence[Tensor | None]) -> Any:
        """The backward rule of the gradients, for second derivatives. The result is a function of the tensors here."""
        dout, *saved = ctx.saved_tensors
        result = saved[self.count :]

        def gradients(dout: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            return self.composite_gradients(dout, (*tensors, *result, *ctx.settings), ctx.wanted)

        with without_autocast(dout.device):
            found, pull_back = _vjp(gradients, (dout, *saved[: self.count]))
            given = tuple(torch.zeros_like(one) if other is None else other for one, other in zip(found, upstream))
            return *pull_back(given), *(None,) * ctx.others

    def _batched(self, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        if self.by_example(arguments[: self.taken]):
            return torch.stack([self.operator(*one) for one in _examples(info, in_dims, arguments)]), 0
        tensors = self.batch_axes_first(arguments[: self.count], in_dims)
        return self.operator(*tensors, *arguments[self.count :]), 0

    def _batched_backward(
        self, info: Any, in_dims: tuple[int | None, ...], dout: Tensor, *arguments: Any
    ) -> tuple[list[Tensor], list[int]]:
        # Each example of the batch has its own gradients, even of operands that all examples share.
        dims = in_dims[: 1 + self.saved]
        if self.by_example(arguments[: self.kept]):
            examples = _examples(info, dims, (dout, *arguments[: self.saved]))
            each = [self.backward_operator(*one, *arguments[self.saved :]) for one in examples]
            return [torch.stack(gradients) for gradients in zip(*each)], [0] * len(each[0])
        dout, *operands = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((dout, *arguments), dims)
        )
        operands, result = operands[: self.count], operands[self.count :]
        tensors = self.batch_axes_first(operands, (0,) * self.count)
        wanted = arguments[self.kept]
        found = self.backward_operator(dout, *tensors, *result, *arguments[self.saved :])
        wanted_operands = (operand for operand, is_wanted in zip(operands, wanted) if is_wanted)
        return [gradient.reshape(operand.shape) for gradient, operand in zip(found, wanted_operands)], [0] * len(found)

    def batch_axes_first(self, tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
        """Each tensor with its axis `dim` moved to the front of all batch axes, so that the tensors still broadcast."""
        ranks = [tensor.ndim - core - (dim is not None) for tensor, core, dim in zip(tensors, self.core_dims, dims)]
        moved = []
        for tensor, rank, dim in zip(tensors, ranks, dims):
            if dim is not None:
                missing = (None,) * (max(ranks) - rank)
                index = (slice(None), *missing)
                tensor = tensor.movedim(dim, 0)[index]
            moved.append(tensor)
        return moved


def _examples(info: Any, dims: Sequence[int | None], arguments: Sequence[Any]) -> Iterator[list[Any]]:
    """The arguments of each example of a batch; `dims` are the axes of the examples."""
    for i in range(info.batch_size):
        yield [one if dim is None else one.select(dim, i) for one, dim in zip(arguments, dims)]


def _vjp(function: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Any, Callable[..., list[Any]]]:
    """`torch.func.vjp` by the floating-point tensors. Other tensors, such as masks, have the gradient None.

    What a transform has saved for a backward pass after it is still wrapped, and PyTorch wraps nothing that is.
    """
    tensors = [unwrap_if_dead(tensor) for tensor in tensors]
    differentiable = [tensor.is_floating_point() for tensor in tensors]

    def of_differentiable(*some: Tensor) -> Any:
        given = iter(some)
        return function(*(next(given) if is_one else tensor for is_one, tensor in zip(differentiable, tensors)))

    inputs = (tensor for is_one, tensor in zip(differentiable, tensors) if is_one)
    result, pull_back = torch.func.vjp(of_differentiable, *inputs)[:2]

    def gradients(upstream: Any) -> list[Any]:
        found = iter(pull_back(upstream))
        return [next(found) if is_one else None for is_one in differentiable]

    return result, gradients


class _Differentiable(torch.autograd.Function):
    """The pair of functions on plain tensors. This classic kind of Function costs a third of the one for transforms."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        call, ctx.custom = arguments[-2:]
        result: Tensor = ctx.custom.forward(call)
        ctx.custom.save(ctx, call.arguments, result)
        ctx.others = 2
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return ctx.custom.pull_back(ctx, dout)


class _Transformable(torch.autograd.Function):
    """The operator in the form that `torch.func` needs, which does not see an operator's own autograd rule."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        *inputs, name = arguments
        result: Tensor = CUSTOM_OPS[name].operator(*inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        *arguments, ctx.name = inputs
        CUSTOM_OPS[ctx.name].save(ctx, arguments, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return *CUSTOM_OPS[ctx.name].pull_back(ctx, dout), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        # The whole batch is one call. The backward of this call sums the gradients of an operand that examples share.
        *inputs, name = arguments
        custom = CUSTOM_OPS[name]
        if custom.by_example(inputs):
            return torch.stack([_Transformable.apply(*one, name) for one in _examples(info, in_dims, inputs)]), 0
        tensors = custom.batch_axes_first(inputs[: custom.count], in_dims)
        return _Transformable.apply(*tensors, *inputs[custom.count :], name), 0


class _TransformableGradients(torch.autograd.Function):
    """The operator of the backward pass in the form that `torch.func` needs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        *inputs, name = arguments
        return tuple(CUSTOM_OPS[name].backward_operator(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        *arguments, ctx.name = inputs
        CUSTOM_OPS[ctx.name].save_for_gradients(ctx, arguments, output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return *CUSTOM_OPS[ctx.name].pull_back_gradients(ctx, upstream), None


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors are in memory, and the call is not traced, transformed or intercepted by a dispatch mode."""
    return (
        _is_eager()
        and _len_torch_dispatch_stack() == 0
        and _PLAIN_TYPES.issuperset(map(type, tensors))
        and not any(map(_is_meta, tensors))
        and not any(map(is_gradtrackingtensor, tensors))  # such a tensor outlived its transform
    )


def is_subclassed(tensor: Tensor) -> bool:
    """Whether PyTorch asks the class of the tensor what its functions do, and it is no fake tensor."""
    return type(tensor) not in _PLAIN_TYPES and not isinstance(tensor, FakeTensor)


def _is_fake(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor is fake, and the call is neither traced nor transformed."""
    return (
        _is_eager()
        and any(isinstance(tensor, FakeTensor) for tensor in tensors)
        and _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is None
    )


def _is_eager() -> bool:
    return (
        not is_compiling()
        and forward_ad._current_level < 0
        and not _are_functorch_transforms_active()
        and _get_tracing_state() is None
    )


def requires_grad(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _needs_composite() -> bool:
    """Whether a call is differentiated as no operator can be: in forward mode, or by a compiled transform."""
    if forward_ad._current_level >= 0:
        return True
    return is_compiling() and _are_functorch_transforms_active()


def _inputs(parameters: Mapping[str, Any]) -> list[str]:
    """How a schema writes arguments that are given by name and type."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def prototype(*arguments: Any) -> Any: ...

    listed = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters.items()]
    prototype.__signature__ = inspect.Signature(listed, return_annotation=Tensor)  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(prototype, mutates_args=())
    return schema[1 : schema.index(")")].split(", ")
