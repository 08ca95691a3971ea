"""Operators whose forward function consists of PyTorch operations that have their own backward."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from effops.numerics.precision import without_autocast
from effops.pytorch.calls import (
    _is_alias_of,
    _saved_tensors_hooks_disable,
    _saved_tensors_hooks_enable,
    _saved_tensors_hooks_get_disabled_error_message,
)


class Native(torch.autograd.Function):
    """A forward function on plain tensors, with the backward that PyTorch has for it.

    PyTorch's graph of the forward function is kept without a tensor. What it would save is saved here instead, so that
    checkpoints and hooks on saved tensors see all of it once. A backward pass that is to be differentiated does without
    this graph, and computes the gradients anew. So does one that gets a batch of gradients.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, custom = arguments
        ctx.custom = custom
        tensors, _, settings = custom.parts(inputs)
        kept = list(tensors)
        restored = _SavedTensors()  # hooks that held `ctx` instead would be a circle: `ctx` holds the graph with them
        ctx.restored = restored

        def index_of(saved: Tensor) -> int:
            index = next((i for i, tensor in enumerate(kept) if _is_alias(saved, tensor)), len(kept))
            if index == len(kept):
                kept.append(saved)
            return index

        with torch.enable_grad(), _hooks_enabled(), saved_tensors_hooks(index_of, restored.__getitem__):
            variables = _Variables.apply(
                torch.empty(0, device="cpu", dtype=torch.float32, requires_grad=True), ctx.needs_input_grad, *tensors
            )
            result: Tensor = custom.forward(custom.split((*variables, *settings)))
            sources = [variable for variable in variables if variable.requires_grad]
            ctx.edges = get_gradient_edge(result), [get_gradient_edge(source) for source in sources]
        ctx.settings, ctx.count = tuple(settings), len(tensors)
        ctx.save_for_backward(*kept)
        kept.clear()  # the graph holds the hooks, and a hook holds this list
        return result.detach()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        custom, saved = ctx.custom, ctx.saved_tensors
        tensors, wanted = saved[: ctx.count], ctx.needs_input_grad[: ctx.count]
        others = [None] * (len(ctx.settings) + 1)
        if custom.computes_again(dout, saved):
            return *custom.gradients(dout, (*tensors, *ctx.settings), wanted), *others
        result, sources = ctx.edges
        with ctx.restored.holding(saved), without_autocast(dout.device):
            found = iter(torch.autograd.grad(result, sources, dout, retain_graph=True, allow_unused=True))
        gradients: list[Tensor | None] = []
        for tensor, is_wanted in zip(tensors, wanted):
            gradient = next(found) if is_wanted else None
            gradients.append(torch.zeros_like(tensor) if is_wanted and gradient is None else gradient)
        return *gradients, *others


class _SavedTensors:
    """The saved tensors of a graph, while at least one backward pass through it needs them.

    Several threads may run backward through one graph. The tensors of each pass are equal.
    """

    def __init__(self) -> None:
        self.lock, self.passes = threading.Lock(), 0
        self.tensors: Sequence[Tensor] = ()

    def __getitem__(self, index: int) -> Tensor:
        return self.tensors[index]

    @contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        with self.lock:
            self.passes += 1
            self.tensors = tensors
        try:
            yield
        finally:
            with self.lock:
                self.passes -= 1
                if not self.passes:
                    self.tensors = ()


@contextmanager
def without_hooks() -> Iterator[None]:
    """Autograd without hooks of the caller on saved tensors, and without anomaly mode: on fake tensors both fail."""
    with (
        torch.autograd.set_detect_anomaly(False),
        _hooks_enabled(),
        saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
    ):
        yield


@contextmanager
def _hooks_enabled() -> Iterator[None]:
    """Hooks on saved tensors also where a caller has disabled its own."""
    message = _saved_tensors_hooks_get_disabled_error_message()
    if message is None:
        yield
        return
    _saved_tensors_hooks_enable()
    try:
        yield
    finally:
        _saved_tensors_hooks_disable(message)


class _Variables(torch.autograd.Function):
    """Views of tensors, from which a graph starts. The graph would hold leaves, and does not hold these views."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, wanted: Sequence[bool], *tensors: Tensor) -> tuple[Tensor, ...]:
        views = tuple(tensor.detach() for tensor in tensors)
        ctx.mark_non_differentiable(*(view for view, is_wanted in zip(views, wanted) if not is_wanted))
        return views


def _is_alias(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same values in the same memory."""
    return (
        _is_alias_of(tensor, other)
        and tensor.dtype == other.dtype
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.storage_offset() == other.storage_offset()
    )
