"""Just-in-time compilers (TorchScript, torch.compile, Triton): whether they can serve a call, and their products."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from effops.dispatch.op import Call

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, for tests


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


def needs_torchscript(call: Call) -> str:
    if sys.version_info >= (3, 14):
        return "needs torch.jit.script, which does not work on Python 3.14 and later"
    if is_compiling():
        return "cannot be traced by torch.compile: call it outside of the compiled function"
    return ""


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
            compiled = objects[signature] = torch.compile(own, dynamic=True, fullgraph=True)
        return compiled(*args)

    return call


@functools.cache
def _without_cpp_compiler() -> str:
    """Why TorchInductor cannot call its C++ compiler; empty if it can."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    found = shutil.which(compiler)
    return "" if found else f"needs a C++ compiler, and {compiler} was not found; install it or set CXX"


def needs_inductor(call: Call) -> str:
    if is_compiling():
        return ""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "needs torch.compile, which TORCH_COMPILE_DISABLE=1 turns off"
    if call.device.type == "cpu" and _without_cpp_compiler():
        return _without_cpp_compiler()
    if call.device.type == "cuda" and _import_error("triton"):
        return f"needs triton for TorchInductor, which cannot be imported: {_import_error('triton')}"
    if forward_ad._current_level >= 0:
        return "cannot be differentiated in forward mode, since TorchInductor cannot"
    if torch._C._are_functorch_transforms_active():
        return "cannot be transformed by torch.func from outside; compile the transformed function instead"
    return ""


@functools.cache
def _import_error(module: str) -> str:
    """Why a module cannot be imported; empty if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever an import raises is the answer
        return f"{type(error).__name__}: {error}"
    return ""


def needs_triton(call: Call) -> str:
    if call.device.type != "cuda" and not (call.device.type == "cpu" and INTERPRETED):
        return f"needs CUDA tensors, got {call.device.type}"
    if is_compiling():  # an import cannot be traced; the operator raises what it raises
        return ""
    error = _import_error("effops.kernels.pairs")
    return f"needs effops.kernels, which cannot be imported: {error}" if error else ""
