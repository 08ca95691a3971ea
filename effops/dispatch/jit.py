"""Just-in-time compilers (TorchScript, torch.compile, Triton): whether they can serve a call, and their products."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from effops.pytorch import TracingContext


def script(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function scripted by TorchScript, on its first call."""

    @functools.cache
    def scripted() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.script(function)

    def call(*args: Any) -> Tensor:
        # Optimised, it specialises on training: then it loses tangents, claims gradients of inputs that require none,
        # and raises in inference mode.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            result: Tensor = scripted()(*args)
        return result

    return call


def compile_by_signature(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function compiled by torch.compile with dynamic sizes: one compiled object for each rank, broadcast pattern,
    dtype, device and need of gradients of its tensors, and each value of its other arguments."""
    objects: dict[Any, Callable[..., Tensor]] = {}

    def call(*args: Any) -> Tensor:
        if is_compiling():  # by the caller, with what surrounds it
            return function(*args)
        grad = torch.is_grad_enabled()
        signature = tuple(
            (tuple(min(size, 2) for size in arg.shape), arg.dtype, arg.device, grad and arg.requires_grad)
            if isinstance(arg, Tensor)
            else arg
            for arg in args
        )
        compiled = objects.get(signature)
        if compiled is None:
            # A code object of its own: the limit of recompilations is counted per code object.
            own = types.FunctionType(
                function.__code__.replace(),
                function.__globals__,
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            compiled = objects[signature] = torch.compile(own, backend=_inductor, dynamic=True, fullgraph=True)
        return compiled(*args)

    return call


def _inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """TorchInductor, whose backward pass leaves the saved tensors as they are, so that it can run again.

    As a rule, Inductor lets a backward pass write into the saved tensors ("donated buffers"), and PyTorch then refuses
    `retain_graph=True`. The switch `torch._functorch.config.donated_buffer` is read again when a backward pass runs,
    and is the user's. So the list of donated buffers is emptied instead, whenever a pass is compiled.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # takes seconds to import

    # Inductor's cache does not see that: without a tag of its own, it would answer with passes that write.
    tag = f"{torch.compiler.config.cache_key_tag} saved tensors are kept"
    tagged = functools.partial(torch.compiler.config.patch, cache_key_tag=tag)  # type: ignore[attr-defined]

    def compile_pass(*args: Any, **settings: Any) -> Any:
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []
        with tagged():  # a backward pass may be compiled later, when it first runs
            return compile_fx_inner(*args, **settings)

    with tagged():
        return compile_fx(graph, inputs, inner_compile=compile_pass)
