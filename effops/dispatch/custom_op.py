"""A forward/backward pair -> an operation that PyTorch understands: autograd, `torch.func`, tracing, fake tensors.

A call on plain tensors runs the pair at once. Where it is traced or transformed it becomes two operators, one for each
direction, of which PyTorch knows the results' layout (fake), how to batch them (vmap), and the derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from effops.numerics.precision import without_autocast

Gradients = Sequence[Tensor | None]

_PLAIN_TYPES = frozenset((Tensor, Parameter))
_is_meta = attrgetter("is_meta")

BINDINGS: dict[str, Binding] = {}  # tracers pass a name on where they could not pass an object


class Binding:
    """An operation on tensors, computed by a pair of functions.

    Arguments of the operation are the tensors and then its settings: numbers, dtypes, whatever an operator's schema
    takes, with annotations in `forward`. Only the tensors are saved for backward, and the result if it is wanted there.

    Args:
        name: of the operator, `torch.ops.effops.<name>`; that of its backward ends in `_backward`
        forward: `forward(*tensors, *settings)` -> the result
        backward: `backward(dout, *tensors, *settings, wanted)` -> a gradient a tensor, None where `wanted` is
            False; the result comes after the tensors if it is saved
        composite: the same function as `forward`, of differentiable PyTorch operations: for derivatives of `backward`
            and for forward-mode differentiation
        empty: an uninitialised result, laid out as `forward` does
        empty_gradients: uninitialised gradients of all tensors, laid out as `backward` does; takes what `forward` does
        core_dims: for each tensor, how many of its last dimensions are no batch axes: those before broadcast
        saves_result: whether `backward` takes the result
        native: whether `forward` is made of PyTorch operations that have a backward of their own: it is used where it
            saves what `backward` would compute again, on fake tensors as on those that they stand for
    """

    def __init__(
        self,
        name: str,
        *,
        forward: Callable[..., Tensor],
        backward: Callable[..., Gradients],
        composite: Callable[..., Tensor],
        empty: Callable[..., Tensor],
        empty_gradients: Callable[..., Sequence[Tensor]],
        core_dims: Sequence[int],
        saves_result: bool = False,
        native: bool = False,
    ) -> None:
        BINDINGS[name] = self
        self.native = native
        self.name = name
        self.forward, self.backward, self.composite = forward, backward, composite
        self.core_dims = tuple(core_dims)
        self.count = len(self.core_dims)
        self.saves_result = saves_result
        self.saved = self.count + saves_result
        schema = torch.library.infer_schema(forward, mutates_args=())
        inputs = schema[1 : schema.index(")")].split(", ")
        inputs[self.count : self.count] = ["Tensor result"] * saves_result

        def run(*arguments: Any) -> Tensor:
            with without_autocast(arguments[0].device):
                return forward(*arguments)

        def run_backward(dout: Tensor, *arguments: Any) -> list[Tensor]:
            with without_autocast(dout.device):
                return [gradient for gradient in backward(dout, *arguments) if gradient is not None]

        def fake_backward(dout: Tensor, *arguments: Any) -> list[Tensor]:
            *settings, wanted = arguments[self.saved :]
            return [
                gradient
                for gradient, is_wanted in zip(empty_gradients(*arguments[: self.count], *settings), wanted)
                if is_wanted
            ]

        self.operator = torch.library.custom_op(f"effops::{name}", run, mutates_args=(), schema=schema)
        self.operator.register_fake(empty)
        self.operator.register_vmap(self._batched)
        self.operator.register_autograd(self.pull_back, setup_context=self.save)
        self.backward_operator = torch.library.custom_op(
            f"effops::{name}_backward",
            run_backward,
            mutates_args=(),
            schema=f"(Tensor dout, {', '.join(inputs)}, bool[] needs) -> Tensor[]",
        )
        self.backward_operator.register_fake(fake_backward)
        self.backward_operator.register_vmap(self._batched_backward)
        self.backward_operator.register_autograd(self.pull_back_gradients, setup_context=self.save_for_gradients)

    def __call__(self, *arguments: Any) -> Tensor:
        tensors = arguments[: self.count]
        result: Tensor
        if self.runs_at_once(tensors):
            if not requires_grad(tensors):
                return self.forward(*arguments)
            function = _Native if self.native else _Differentiable
            # Past `Function.apply`: a third of what it does is to look for transforms, as `is_plain` did.
            result = super(torch.autograd.Function, function).apply(*arguments, self.name)  # type: ignore[misc]
        elif _needs_composite():
            result = self.composite(*arguments)
        elif is_compiling() and self.native:
            result = self.forward(*arguments)
        elif torch._C._are_functorch_transforms_active():
            result = _Transformable.apply(*arguments, self.name)
        else:
            result = self.operator(*arguments)
        return result

    def runs_at_once(self, tensors: Sequence[Tensor]) -> bool:
        return is_plain(tensors) or (self.native and _is_fake(tensors))

    def gradients(self, dout: Tensor, arguments: Sequence[Any], wanted: Sequence[bool]) -> Gradients:
        """Gradients of the tensors among `arguments`, which can be differentiated again: arguments of `backward`."""
        tensors = (dout, *arguments[: self.saved])
        # `is_grads_batched` gives a batched gradient of a kind for which operators have no rule.
        if _needs_composite() or torch._C._functorch.is_legacy_batchedtensor(dout):
            found = iter(self.composite_gradients(dout, arguments, wanted))
        elif self.runs_at_once(tensors) and not requires_grad(tensors):
            with without_autocast(dout.device):
                return self.backward(dout, *arguments, wanted)
        elif torch._C._are_functorch_transforms_active():
            found = iter(_TransformableGradients.apply(dout, *arguments, list(wanted), self.name))
        else:
            found = iter(self.backward_operator(dout, *arguments, list(wanted)))
        return tuple(next(found) if is_wanted else None for is_wanted in wanted)

    def composite_gradients(self, dout: Tensor, arguments: Sequence[Any], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
        """What `backward` computes, of differentiable PyTorch operations; only the gradients that `wanted` asks for."""
        tensors, settings = arguments[: self.count], arguments[self.saved :]
        with without_autocast(dout.device):
            _, pull_back = _vjp(lambda *tensors: self.composite(*tensors, *settings), tensors)
            return tuple(gradient for gradient, is_wanted in zip(pull_back(dout), wanted) if is_wanted)

    def save(self, ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        ctx.settings = tuple(inputs[self.count :])
        ctx.save_for_backward(*inputs[: self.count], *(output,) * self.saves_result)

    def pull_back(self, ctx: Any, dout: Tensor) -> Any:
        """The backward rule of the operation."""
        wanted = tuple(ctx.needs_input_grad[: self.count])
        gradients = self.gradients(dout, (*ctx.saved_tensors, *ctx.settings), wanted)
        return *gradients, *(None,) * len(ctx.settings)

    def save_for_gradients(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        dout, *arguments, ctx.wanted = inputs
        ctx.settings = tuple(arguments[self.saved :])
        ctx.save_for_backward(dout, *arguments[: self.saved])

    def pull_back_gradients(self, ctx: Any, upstream: Sequence[Tensor | None]) -> Any:
        """The backward rule of the gradients, for second derivatives: the result is a function of the tensors there."""
        dout, *saved = ctx.saved_tensors
        result = saved[self.count :]

        def gradients(dout: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            return self.composite_gradients(dout, (*tensors, *result, *ctx.settings), ctx.wanted)

        with without_autocast(dout.device):
            found, pull_back = _vjp(gradients, (dout, *saved[: self.count]))
            given = tuple(torch.zeros_like(one) if other is None else other for one, other in zip(found, upstream))
            return *pull_back(given), *(None,) * (len(result) + len(ctx.settings)), None

    def _batched(self, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        tensors = self.batch_axes_first(arguments[: self.count], in_dims)
        return self.operator(*tensors, *arguments[self.count :]), 0

    def _batched_backward(
        self, info: Any, in_dims: tuple[int | None, ...], dout: Tensor, *arguments: Any
    ) -> tuple[list[Tensor], list[int]]:
        # Each example has gradients of its own, of the operands that it shares with others too.
        dims = in_dims[: 1 + self.saved]
        dout, *operands = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((dout, *arguments), dims)
        )
        operands, result = operands[: self.count], operands[self.count :]
        tensors = self.batch_axes_first(operands, (0,) * self.count)
        wanted = arguments[-1]
        found = self.backward_operator(dout, *tensors, *result, *arguments[self.saved :])
        wanted_operands = (operand for operand, is_wanted in zip(operands, wanted) if is_wanted)
        return [gradient.reshape(operand.shape) for gradient, operand in zip(found, wanted_operands)], [0] * len(found)

    def batch_axes_first(self, tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
        """Each tensor with its axis `dim` at the front of all batch axes, as they broadcast."""
        ranks = [tensor.ndim - core - (dim is not None) for tensor, core, dim in zip(tensors, self.core_dims, dims)]
        moved = []
        for tensor, rank, dim in zip(tensors, ranks, dims):
            if dim is not None:
                missing = (None,) * (max(ranks) - rank)
                index = (slice(None), *missing)
                tensor = tensor.movedim(dim, 0)[index]
            moved.append(tensor)
        return moved


def _vjp(function: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Any, Callable[..., list[Any]]]:
    """`torch.func.vjp` by the tensors that have gradients; those of the others, such as masks, are None."""
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
    """The pair on plain tensors. This classic form of Function costs a third of the one that transforms need."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, ctx.name = arguments
        binding = BINDINGS[ctx.name]
        result = binding.forward(*inputs)
        binding.save(ctx, inputs, result)
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return *BINDINGS[ctx.name].pull_back(ctx, dout), None


class _Native(torch.autograd.Function):
    """A forward function on plain tensors with the backward that PyTorch has for it, and derivatives of that.

    The first backward pass frees what PyTorch saved. Another one, or one to be differentiated, computes it again.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, ctx.name = arguments
        binding = BINDINGS[ctx.name]
        tensors = inputs[: binding.count]
        with torch.enable_grad():
            leaves = [
                tensor.detach().requires_grad_(is_wanted) for tensor, is_wanted in zip(tensors, ctx.needs_input_grad)
            ]
            result = binding.forward(*leaves, *inputs[binding.count :])
        ctx.graph = result, [leaf for leaf in leaves if leaf.requires_grad]
        binding.save(ctx, inputs, result)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        binding = BINDINGS[ctx.name]
        graph, ctx.graph = ctx.graph, None
        again = graph is None or requires_grad((dout, *ctx.saved_tensors)) or not binding.runs_at_once((dout,))
        if again or torch._C._functorch.is_legacy_batchedtensor(dout):
            return *binding.pull_back(ctx, dout), None
        result, leaves = graph
        with without_autocast(dout.device):
            found = iter(torch.autograd.grad(result, leaves, dout, allow_unused=True, materialize_grads=True))
        return *(next(found) if is_wanted else None for is_wanted in ctx.needs_input_grad[:-1]), None


class _Transformable(torch.autograd.Function):
    """The operator as `torch.func` needs it: its own rule of autograd is not seen there."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        *inputs, name = arguments
        result: Tensor = BINDINGS[name].operator(*inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        *arguments, ctx.name = inputs
        BINDINGS[ctx.name].save(ctx, arguments, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return *BINDINGS[ctx.name].pull_back(ctx, dout), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        # One call for the batch, whose gradients of a shared operand are summed inside.
        *inputs, name = arguments
        binding = BINDINGS[name]
        tensors = binding.batch_axes_first(inputs[: binding.count], in_dims)
        return _Transformable.apply(*tensors, *inputs[binding.count :], name), 0


class _TransformableGradients(torch.autograd.Function):
    """The operator of the backward pass, likewise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        *inputs, name = arguments
        return tuple(BINDINGS[name].backward_operator(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        *arguments, ctx.name = inputs
        BINDINGS[ctx.name].save_for_gradients(ctx, arguments, output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return *BINDINGS[ctx.name].pull_back_gradients(ctx, upstream), None


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether a call is on tensors in memory, and neither traced nor transformed nor seen by a mode."""
    return (
        _is_eager()
        and torch._C._len_torch_dispatch_stack() == 0
        and _PLAIN_TYPES.issuperset(map(type, tensors))
        and not any(map(_is_meta, tensors))
        and not any(map(torch._C._functorch.is_gradtrackingtensor, tensors))  # they outlived their transform
    )


def _is_fake(tensors: Sequence[Tensor]) -> bool:
    """Whether a call is on fake tensors, and neither traced nor transformed."""
    return (
        _is_eager()
        and any(isinstance(tensor, FakeTensor) for tensor in tensors)
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None
    )


def _is_eager() -> bool:
    return (
        not is_compiling()
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
    )


def requires_grad(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _needs_composite() -> bool:
    """Whether the call is differentiated where an operator cannot be: in forward mode, or by a compiled transform."""
    if forward_ad._current_level >= 0:
        return True
    return is_compiling() and torch._C._are_functorch_transforms_active()
