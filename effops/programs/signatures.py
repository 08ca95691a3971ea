"""What a prediction of a call depends on, as a key: two calls of one key take the same memory, but for globals."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
DEVICES = "cpu", "cuda"  # whose autocast is told apart


class IteratorGivenError(TypeError):
    """An argument is an iterator, which a prediction would advance."""


def signature(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """The key of a call: its arguments, what `function` carries along, and the state of PyTorch.

    Tensors count by layout, dtype, device and what asks for gradients. Modules count by identity, by the mode of each
    module inside, and by their parameters and buffers. Containers count by what they hold. Other objects count by
    value or identity, and by the tensors and modules that are their attributes.
    """
    parts: list[Any] = [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        *((torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)) for device in DEVICES),
    ]
    if type(function) is not FunctionType:
        _describe(function, parts, set())
    open_containers: set[int] = set()
    for value in args:
        _describe(value, parts, open_containers)
    for name, value in kwargs.items():
        parts.append(name)
        _describe(value, parts, open_containers)
    return tuple(parts)


def _describe(value: Any, parts: list[Any], inside: set[int]) -> None:
    """Add what matters of a value. `inside` are the containers that it lies in, so that circles end."""
    kind = type(value)
    if kind in PLAIN:
        parts += (kind, value)
    elif isinstance(value, Tensor):
        _describe_tensor(value, parts)
    elif isinstance(value, nn.Module):
        _describe_module(value, parts)
    elif isinstance(value, numpy.ndarray):
        parts += (kind, value.shape, value.strides, value.dtype)
    elif id(value) not in inside:
        inside.add(id(value))
        _describe_object(value, parts, inside)
        inside.discard(id(value))


def _describe_object(value: Any, parts: list[Any], inside: set[int]) -> None:
    kind = type(value)
    parts.append(kind)
    if isinstance(value, Mapping):
        parts.append(len(value))
        for key, held in value.items():
            _describe(key, parts, inside)
            _describe(held, parts, inside)
    elif isinstance(value, (list, tuple)):
        parts.append(len(value))
        for held in value:
            _describe(held, parts, inside)
    elif isinstance(value, functools.partial):
        _describe_object((value.func, value.args, value.keywords), parts, inside)
    elif isinstance(value, MethodType):
        parts.append(value.__func__)
        _describe(value.__self__, parts, inside)
    elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        parts.append(value)
    elif hasattr(value, "__next__"):
        raise IteratorGivenError(kind.__name__)
    else:
        _add_identity(value, parts)
        _describe_attributes(vars(value) if hasattr(value, "__dict__") else {}, parts, inside)


def _add_identity(value: Any, parts: list[Any]) -> None:
    """The value if it can be hashed. Where that means identity, a weak reference does not keep it alive."""
    try:
        hash(value)
    except TypeError:
        return
    if type(value).__eq__ is object.__eq__:  # type: ignore[comparison-overlap]
        try:
            value = weakref.ref(value)
            hash(value)
        except TypeError:
            pass
    parts.append(value)


def _describe_attributes(attributes: Mapping[str, Any], parts: list[Any], inside: set[int]) -> None:
    for name, value in attributes.items():
        if isinstance(value, (Tensor, nn.Module)) or (isinstance(value, (list, tuple, dict)) and len(value) < 64):
            parts.append(name)
            _describe(value, parts, inside)


def _describe_tensor(tensor: Tensor, parts: list[Any]) -> None:
    wanted = tensor.requires_grad
    has_gradient = wanted and tensor.is_leaf and tensor.grad is not None
    stride = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    parts += (type(tensor), tensor.shape, stride, tensor.dtype, tensor.device, wanted, has_gradient)


def _describe_module(module: nn.Module, parts: list[Any]) -> None:
    parts.append(weakref.ref(module))
    waiting = [module]
    seen = {id(module)}
    while waiting:
        one = waiting.pop()
        parts.append(one.training)
        _describe_held(one._parameters.values(), parts)
        _describe_held(one._buffers.values(), parts)
        for child in one._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _describe_held(tensors: Iterable[Tensor | None], parts: list[Any]) -> None:
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
        else:
            # Strides of parameters change with `.to(memory_format=)` alone, which channels-last models are about.
            _describe_tensor(tensor, parts)
