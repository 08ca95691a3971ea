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
from effops.pytorch.calls import (
    FakeTensor,
    TransformType,
    _are_functorch_transforms_active,
    _get_dispatch_mode,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
    dual_level,
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
    An operator of any number of tensors takes them as one list. Everywhere else a call's arguments are flat.

    Args:
        name: the operator is `torch.ops.effops.<name>`; the name of its backward ends in `_backward`
        parameters: names and types of the operator's arguments, the tensors first, or one list of them
        split: makes a call of these arguments, the inverse of `call.arguments`
        forward: `forward(call)` -> the result
        backward: `backward(dout, call, wanted)` -> a gradient for each tensor, None where `wanted` is False; if the
            result is saved, it is the last argument. A gradient has the strides that
            `effops.numerics.layout.gradient_strides` tells
        composite: the same function as `forward`, made of differentiable PyTorch operations; it serves derivatives of
            `backward` and forward-mode differentiation
        empty: an uninitialised result, with the layout that `forward` gives it
        core_dims: for each tensor, how many of its last dimensions are no batch axes; the axes before them broadcast;
            for a list of tensors, a function that tells it from the settings
        saves_result: whether `backward` takes the result
        by_example: whether a call with these arguments is batched one example at a time, since it draws random numbers
            by the index of a value in the call
        native: whether `forward(call)` consists of PyTorch operations that have their own backward; that backward runs
            where it can, on plain and on fake tensors, so that `backward` does not compute `forward` again
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
        core_dims: Sequence[int] | Callable[[Any], Sequence[int]],
        saves_result: bool = False,
        by_example: Callable[[Sequence[Any]], bool] = lambda arguments: False,
        native: Callable[[Any], bool] = lambda call: False,
    ) -> None:
        CUSTOM_OPS[name] = self
        self.name, self.native, self.saves_result = name, native, saves_result
        self.split, self.forward, self.backward, self.composite = split, forward, backward, composite
        self.core_dims, self.by_example = core_dims, by_example
        self.takes_list = Tensor not in parameters.values()
        self.taken, self.kept = len(parameters), len(parameters) + saves_result
        first = 1 if self.takes_list else list(parameters.values()).count(Tensor)
        self.settings = self.taken - first
        inputs = _inputs(parameters)
        kept = [*inputs[:first], *["Tensor result"] * saves_result, *inputs[first:]]

        def run(*arguments: Any) -> Tensor:
            given = self.flat(arguments[: self.taken])
            with without_autocast(given[0].device):
                return forward(split(given))

        def run_backward(dout: Tensor, *arguments: Any) -> list[Tensor]:
            saved, wanted = self.flat(arguments[: self.kept]), arguments[self.kept]
            with without_autocast(dout.device):
                return [one for one in self.compute_gradients(dout, saved, wanted) if one is not None]

        def fake_backward(dout: Tensor, *arguments: Any) -> list[Tensor]:
            saved, wanted = self.flat(arguments[: self.kept]), arguments[self.kept]
            return [empty_gradient(tensor) for tensor, is_wanted in zip(saved, wanted) if is_wanted]

        self.operator = torch.library.custom_op(
            f"effops::{name}", run, mutates_args=(), schema=f"({', '.join(inputs)}, str code='') -> Tensor"
        )
        self.operator.register_fake(lambda *arguments: empty(split(self.flat(arguments[: self.taken]))))
        self.operator.register_vmap(self._batched)
        self.operator.register_autograd(self._pull_back_operator, setup_context=self._save_operator)
        self.backward_operator = torch.library.custom_op(
            f"effops::{name}_backward",
            run_backward,
            mutates_args=(),
            schema=f"(Tensor dout, {', '.join(kept)}, bool[] needs, str code='') -> Tensor[]",
        )
        self.backward_operator.register_fake(fake_backward)
        self.backward_operator.register_vmap(self._batched_backward)
        self.backward_operator.register_autograd(
            self._pull_back_backward_operator, setup_context=self._save_backward_operator
        )
        register_body(name, run)
        register_body(f"{name}_backward", run_backward)

    def __call__(self, call: Any) -> Tensor:
        tensors = call.tensors
        result: Tensor
        if is_plain(tensors) or (_is_fake(tensors) and self.native(call)):
            if not requires_grad(tensors):
                return self.forward(call)
            # This skips `Function.apply`, a third of whose time goes into the search for transforms. `is_plain` found
            # none.
            if self.native(call):
                result = super(torch.autograd.Function, Native).apply(*call.arguments, self)
            else:
                result = super(torch.autograd.Function, _Differentiable).apply(*tensors, call, self)
        elif _needs_composite():
            result = self.composite(call)
        elif is_compiling() and self.native(call):
            result = self.forward(call)
        elif _are_functorch_transforms_active() and not self.is_functionalized():
            result = _Transformable.apply(*call.arguments, self.name)
        else:
            result = self.operator(*self.listed(call.arguments, self.settings), CODE_VERSION)
        return result

    def flat(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """The arguments of an operator, with the tensors of a list one by one."""
        return (*arguments[0], *arguments[1:]) if self.takes_list else arguments

    def listed(self, arguments: Sequence[Any], others: int) -> Sequence[Any]:
        """The inverse of `flat`. Behind the tensors there are `others`."""
        if not self.takes_list:
            return arguments
        count = len(arguments) - others
        return list(arguments[:count]), *arguments[count:]

    def parts(self, saved: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Any]]:
        """What is saved for backward: the tensors, the result if `saves_result`, and the settings."""
        count = len(saved) - self.settings
        tensors = count - self.saves_result
        return saved[:tensors], saved[tensors:count], saved[count:]

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
        is_ordinary = is_plain((dout,)) or _is_fake((dout,))
        return requires_grad((dout, *saved)) or not is_ordinary or is_legacy_batchedtensor(dout)

    def compute_gradients(self, dout: Tensor, saved: Sequence[Any], wanted: Sequence[bool]) -> Gradients:
        """The gradients that `backward` computes from what is saved for it."""
        tensors, result, settings = self.parts(saved)
        return self.backward(dout, self.split((*tensors, *settings)), wanted, *result)

    def gradients(self, dout: Tensor, saved: Sequence[Any], wanted: Sequence[bool]) -> Gradients:
        """The gradients of the tensors among what is saved. They can be differentiated again."""
        tensors, result, settings = self.parts(saved)
        given = dout, *tensors, *result
        # `torch.autograd.grad(is_grads_batched=True)` gives a kind of batched gradient that operators have no rule for.
        is_legacy = is_legacy_batchedtensor(dout)
        at_once = is_plain(given) or (_is_fake(given) and self.native(self.split((*tensors, *settings))))
        if not is_legacy and at_once and not requires_grad(given):
            with without_autocast(dout.device):
                return self.compute_gradients(dout, saved, wanted)
        if is_legacy or _needs_composite():
            found = iter(self.composite_gradients(dout, saved, wanted))
        elif _are_functorch_transforms_active() and not self.is_functionalized():
            found = iter(_TransformableGradients.apply(dout, *saved, list(wanted), self.name))
        else:
            arguments = self.listed(saved, self.settings + self.saves_result)
            found = iter(self.backward_operator(dout, *arguments, list(wanted), CODE_VERSION))
        return tuple(next(found) if is_wanted else None for is_wanted in wanted)

    def composite_gradients(self, dout: Tensor, saved: Sequence[Any], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
        """The gradients that `wanted` asks for, as `backward` computes them, by differentiable PyTorch operations."""
        tensors, _, settings = self.parts(saved)
        with without_autocast(dout.device):
            _, pull_back = _vjp(lambda *tensors: self.composite(self.split((*tensors, *settings))), tensors)
            return tuple(gradient for gradient, is_wanted in zip(pull_back(dout), wanted) if is_wanted)

    def save(self, ctx: Any, arguments: Sequence[Any], result: Tensor) -> None:
        """Save the arguments of a call for its backward pass."""
        count = len(arguments) - self.settings
        ctx.settings = tuple(arguments[count:])
        ctx.save_for_backward(*arguments[:count], *(result,) * self.saves_result)

    def pull_back(self, ctx: Any, dout: Tensor, needs: Sequence[bool]) -> Gradients:
        """The gradients of the tensors of a call that was saved. `needs` tells of its arguments which are wanted."""
        saved = (*ctx.saved_tensors, *ctx.settings)
        tensors, _, _ = self.parts(saved)
        return self.gradients(without_negation(dout), saved, tuple(needs[: len(tensors)]))

    def save_for_gradients(self, ctx: Any, dout: Tensor, saved: Sequence[Any], wanted: Sequence[bool]) -> None:
        """Save the arguments of a backward pass, for second derivatives."""
        tensors, result, settings = self.parts(saved)
        ctx.settings, ctx.wanted = tuple(settings), wanted
        ctx.save_for_backward(dout, *tensors, *result)

    def pull_back_gradients(self, ctx: Any, upstream: Sequence[Tensor | None]) -> list[Any]:
        """The backward rule of the gradients, for `dout` and each tensor. The result is a function of the tensors."""
        dout, *saved = ctx.saved_tensors
        own, result, _ = self.parts((*saved, *ctx.settings))

        def gradients(dout: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            return self.composite_gradients(dout, (*tensors, *result, *ctx.settings), ctx.wanted)

        with without_autocast(dout.device):
            found, pull_back = _vjp(gradients, (dout, *own))
            given = tuple(torch.zeros_like(one) if other is None else other for one, other in zip(found, upstream))
            return pull_back(given)

    def _save_operator(self, ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        ctx.others = len(inputs) - self.taken
        self.save(ctx, self.flat(inputs[: self.taken]), output)

    def _pull_back_operator(self, ctx: Any, dout: Tensor) -> Any:
        gradients = self.pull_back(ctx, dout, self.flat(ctx.needs_input_grad))
        return *self.listed(gradients, 0), *(None,) * (self.settings + ctx.others)

    def _save_backward_operator(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        dout, *arguments = inputs
        ctx.others = len(arguments) - self.taken
        self.save_for_gradients(ctx, dout, self.flat(arguments[: self.kept]), arguments[self.kept])

    def _pull_back_backward_operator(self, ctx: Any, upstream: Sequence[Tensor | None]) -> Any:
        ddout, *gradients = self.pull_back_gradients(ctx, upstream)
        return ddout, *self.listed(gradients, 0), *(None,) * (self.settings + ctx.others)

    def _batched(self, info: Any, in_dims: Sequence[Any], *inputs: Any) -> tuple[Tensor, int]:
        arguments, dims = self.flat(inputs[: self.taken]), self.flat(in_dims[: self.taken])

        def result(arguments: Sequence[Any]) -> Tensor:
            found: Tensor = self.operator(*self.listed(arguments, self.settings), *inputs[self.taken :])
            return found

        if info.batch_size and self.by_example(arguments):
            return torch.stack([result(one) for one in _examples(info, dims, arguments)]), 0
        return result(self.batch_axes_first(arguments, dims)), 0

    def _batched_backward(
        self, info: Any, in_dims: Sequence[Any], dout: Tensor, *inputs: Any
    ) -> tuple[list[Tensor], list[int]]:
        # Each example of the batch has its own gradients, even of operands that all examples share.
        saved, wanted = self.flat(inputs[: self.kept]), inputs[self.kept]
        dims = in_dims[0], *self.flat(in_dims[1 : self.kept + 1])

        def gradients(dout: Tensor, *saved: Any) -> list[Tensor]:
            arguments = self.listed(saved, self.settings + self.saves_result)
            found: list[Tensor] = self.backward_operator(dout, *arguments, *inputs[self.kept :])
            return found

        if info.batch_size and self.by_example(saved):
            each = [gradients(*one) for one in _examples(info, dims, (dout, *saved))]
            return [torch.stack(found) for found in zip(*each)], [0] * len(each[0])
        dout, *batched = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((dout, *saved[: len(saved) - self.settings]), dims)
        )
        operands, result, settings = self.parts((*batched, *saved[len(batched) :]))
        tensors = self.batch_axes_first((*operands, *settings), (0,) * len(operands))[: len(operands)]
        found = gradients(dout, *tensors, *result, *settings)
        wanted_operands = (operand for operand, is_wanted in zip(operands, wanted) if is_wanted)
        return [gradient.reshape(operand.shape) for gradient, operand in zip(found, wanted_operands)], [0] * len(found)

    def batch_axes_first(self, arguments: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
        """The arguments, with the axis `dim` of each tensor before all its batch axes, so that they still broadcast."""
        count = len(arguments) - self.settings
        tensors, settings = arguments[:count], arguments[count:]
        cores = self.core_dims(settings) if callable(self.core_dims) else self.core_dims
        ranks = [tensor.ndim - core - (dim is not None) for tensor, core, dim in zip(tensors, cores, dims)]
        moved = []
        for tensor, rank, dim in zip(tensors, ranks, dims):
            if dim is not None:
                missing = (None,) * (max(ranks) - rank)
                index = (slice(None), *missing)
                tensor = tensor.movedim(dim, 0)[index]
            moved.append(tensor)
        return [*moved, *settings]


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
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return *ctx.custom.pull_back(ctx, dout, ctx.needs_input_grad), None, None


class _Transformable(torch.autograd.Function):
    """The operator in the form that `torch.func` needs, which does not see an operator's own autograd rule."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        *inputs, name = arguments
        custom = CUSTOM_OPS[name]
        result: Tensor = custom.operator(*custom.listed(inputs, custom.settings))
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        *arguments, ctx.name = inputs
        CUSTOM_OPS[ctx.name].save(ctx, arguments, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        gradients = CUSTOM_OPS[ctx.name].pull_back(ctx, dout, ctx.needs_input_grad)
        return *gradients, *(None,) * (len(ctx.settings) + 1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        # The whole batch is one call. The backward of this call sums the gradients of an operand that examples share.
        *inputs, name = arguments
        custom = CUSTOM_OPS[name]
        if info.batch_size and custom.by_example(inputs):
            return torch.stack([_Transformable.apply(*one, name) for one in _examples(info, in_dims, inputs)]), 0
        return _Transformable.apply(*custom.batch_axes_first(inputs, in_dims), name), 0


class _TransformableGradients(torch.autograd.Function):
    """The operator of the backward pass in the form that `torch.func` needs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        dout, *saved, wanted, name = arguments
        custom = CUSTOM_OPS[name]
        listed = custom.listed(saved, custom.settings + custom.saves_result)
        return tuple(custom.backward_operator(dout, *listed, wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        dout, *saved, wanted, ctx.name = inputs
        CUSTOM_OPS[ctx.name].save_for_gradients(ctx, dout, saved, wanted)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        custom = CUSTOM_OPS[ctx.name]
        gradients = custom.pull_back_gradients(ctx, upstream)
        return *gradients, *(None,) * (custom.saves_result + custom.settings + 2)


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
    """Whether a tensor is fake, or a mode makes it so, and the call is neither traced nor transformed."""
    return (
        _is_eager()
        and (
            _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None
            or any(isinstance(tensor, FakeTensor) for tensor in tensors)
        )
        and _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is None
    )


def _is_eager() -> bool:
    return (
        not is_compiling()
        and dual_level() < 0
        and not _are_functorch_transforms_active()
        and _get_tracing_state() is None
    )


def requires_grad(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _needs_composite() -> bool:
    """Whether a call is differentiated as no operator can be: in forward mode, or by a compiled transform."""
    if dual_level() >= 0:
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
