"""A forward/backward pair on plain tensors -> an operation that PyTorch's autograd understands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from effops.precision import without_autocast

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Binding:
    """How to compute an operation of some tensors, and its gradients.

    Attributes:
        forward: `forward(static, *tensors)` -> the result
        backward: `backward(static, *tensors, dout, needs)` -> a gradient a tensor, None where `needs` is False
        composite: the same function as `forward`, of differentiable PyTorch operations: for derivatives of `backward`,
            forward-mode differentiation and the transforms of `torch.func`

    `static` is whatever else the call needs; only the tensors are saved for backward.
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., Gradients]
    composite: Callable[..., Tensor]

    def __call__(self, static: Any, *tensors: Tensor) -> Tensor:
        if _transformed():
            return self.composite(static, *tensors)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            result: Tensor = _Differentiable.apply(self, static, *tensors)
            return result
        return self.forward(static, *tensors)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, binding: Binding, static: Any, *tensors: Tensor) -> Tensor:
        ctx.binding, ctx.static = binding, static
        ctx.save_for_backward(*tensors)
        return binding.forward(static, *tensors)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        binding, static, tensors, needs = ctx.binding, ctx.static, ctx.saved_tensors, ctx.needs_input_grad[2:]
        with without_autocast(dout.device):
            if torch.is_grad_enabled():  # the gradients are to be differentiated again
                gradients = _composite_gradients(binding, static, tensors, dout, needs)
            else:
                gradients = binding.backward(static, *tensors, dout, needs)
        return None, None, *gradients


def _transformed() -> bool:
    """Whether the call is under forward-mode differentiation or a transform of `torch.func`."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _composite_gradients(
    binding: Binding, static: Any, tensors: tuple[Tensor, ...], dout: Tensor, needs: tuple[bool, ...]
) -> Gradients:
    aliases = tuple(tensor.view_as(tensor) for tensor in tensors)  # the same tensor may be given twice
    wanted = [alias for alias, need in zip(aliases, needs) if need]
    found = iter(torch.autograd.grad(binding.composite(static, *aliases), wanted, dout, create_graph=True))
    return tuple(next(found) if need else None for need in needs)
