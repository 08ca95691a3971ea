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

from effops.pytorch.capture import buffers_of, modules_of, parameters_of

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
    key: list[Any] = [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        *((torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)) for device in DEVICES),
    ]
    if type(function) is not FunctionType:
        _add_value(function, key, set())
    open_containers: set[int] = set()
    for value in args:
        _add_value(value, key, open_containers)
    for name, value in kwargs.items():
        key.append(name)
        _add_value(value, key, open_containers)
    return tuple(key)


def _add_value(value: Any, key: list[Any], inside: set[int]) -> None:
    """Add to a key what matters of a value. `inside` are the containers that it lies in, so that circles end."""
    kind = type(value)
    if kind in PLAIN:
        key += (kind, value)
    elif isinstance(value, Tensor):
        _add_tensor(value, key)
    elif isinstance(value, nn.Module):
        _add_module(value, key)
    elif isinstance(value, numpy.ndarray):
        key += (kind, value.shape, value.strides, value.dtype)
    elif id(value) not in inside:
        inside.add(id(value))
        _add_object(value, key, inside)
        inside.discard(id(value))


def _add_object(value: Any, key: list[Any], inside: set[int]) -> None:
    kind = type(value)
    key.append(kind)
    if isinstance(value, Mapping):
        key.append(len(value))
        for name, held in value.items():
            _add_value(name, key, inside)
            _add_value(held, key, inside)
    elif isinstance(value, (list, tuple)):
        key.append(len(value))
        for held in value:
            _add_value(held, key, inside)
    elif isinstance(value, functools.partial):
        _add_object((value.func, value.args, value.keywords), key, inside)
    elif isinstance(value, MethodType):
        key.append(value.__func__)
        _add_value(value.__self__, key, inside)
    elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        key.append(value)
    elif hasattr(value, "__next__"):
        raise IteratorGivenError(kind.__name__)
    else:
        _add_identity(value, key)
        _add_attributes(vars(value) if hasattr(value, "__dict__") else {}, key, inside)


def _add_identity(value: Any, key: list[Any]) -> None:
    """Add the value if it can be hashed. Where that means identity, a weak reference does not keep it alive."""
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
    key.append(value)


def _add_attributes(attributes: Mapping[str, Any], key: list[Any], inside: set[int]) -> None:
    for name, value in attributes.items():
        if isinstance(value, (Tensor, nn.Module)) or (isinstance(value, (list, tuple, dict)) and len(value) < 64):
            key.append(name)
            _add_value(value, key, inside)


def _add_tensor(tensor: Tensor, key: list[Any]) -> None:
    wanted = tensor.requires_grad
    has_gradient = wanted and tensor.is_leaf and tensor.grad is not None
    stride = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    key += (type(tensor), tensor.shape, stride, tensor.dtype, tensor.device, wanted, has_gradient)


def _add_module(module: nn.Module, key: list[Any]) -> None:
    key.append(weakref.ref(module))
    waiting = [module]
    seen = {id(module)}
    while waiting:
        one = waiting.pop()
        key.append(one.training)
        _add_tensors(parameters_of(one).values(), key)
        _add_tensors(buffers_of(one).values(), key)
        for child in modules_of(one).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _add_tensors(tensors: Iterable[Tensor | None], key: list[Any]) -> None:
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        else:
            # Strides of parameters change with `.to(memory_format=)` alone, which channels-last models are about.
            _add_tensor(tensor, key)
