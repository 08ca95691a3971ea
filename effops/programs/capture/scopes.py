"""What the names of a user's functions stood for when an operator ran: shapes and numbers, and no tensor.

A fix is run with them, at the sizes of the program and at smaller ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from effops.programs.capture.places import ENGINE_CODE, Instruction, Place, kind_of, place_of
from effops.pytorch.capture import buffers_of, modules_of, parameters_of

DEPTH = 6  # frames, from the innermost outwards
FIELDS = 2  # of fields within fields
DISTRIBUTIONS = 4  # within each other, as the normals of a mixture are
BARE = vars(nn.Module()).keys() - {"training"}  # the tables that every module has
WIDTH = 64  # fields of an object, or elements of a sequence
PLAIN = int, float, complex, str, type(None), torch.dtype, torch.device, slice, type(Ellipsis), ModuleType, type
COMPREHENSIONS = {"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"}


class Described(NamedTuple):
    """A tensor without its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class Fields:
    """An object: what is known of its attributes."""

    kind: type
    values: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Scope:
    """A frame: where it stood, and what its names were. What cannot be described has no entry."""

    code: CodeType
    instruction: int
    names: Mapping[str, Any]
    surroundings: dict[str, Any]  # the globals of its module
    is_library: bool

    @property
    def place(self) -> Place:
        return place_of(Instruction(self.code, self.instruction))


def outermost(frame: FrameType | None) -> CodeType | None:
    """The innermost function of the user or of a library: the one that began to run on fake tensors."""
    while frame is not None and not kind_of(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def scopes(frame: FrameType | None, last: CodeType | None) -> tuple[Scope, ...]:
    """Those of the frames of the user and of libraries, from the innermost outwards, to the last function.

    Code from further outwards must not run in a trial: it would run the whole program again, with its lint.
    """
    found: list[Scope] = []
    for one in _scopes(frame):
        found.append(one)
        if one.code is last:
            break
    return tuple(found)


def _scopes(frame: FrameType | None) -> Iterator[Scope]:
    count = 0
    inner: dict[str, Any] = {}
    while frame is not None and count < DEPTH and frame.f_code is not ENGINE_CODE:
        kind = kind_of(frame.f_code.co_filename)
        if kind and frame.f_code.co_name in COMPREHENSIONS:
            inner = {**frame.f_locals, **inner}
        elif kind:
            names = {**frame.f_locals, **inner} if frame.f_locals is not frame.f_globals else inner
            values = {name: described(value) for name, value in names.items()}
            known = {name: value for name, value in values.items() if value is not NotImplemented}
            yield Scope(frame.f_code, frame.f_lasti, known, frame.f_globals, kind == "library")
            count, inner = count + 1, {}
        frame = frame.f_back


def described(value: Any) -> Any:
    """A value without the memory of its tensors; NotImplemented if it cannot be described."""
    return _described(value, FIELDS, DISTRIBUTIONS)


def _described(value: Any, depth: int, distributions: int) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return NotImplemented
        return Described(tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return weakref.ref(value)  # a function may hold tensors
    if isinstance(value, (list, tuple)) and depth and len(value) <= WIDTH:
        elements = [_described(one, depth - 1, distributions) for one in value]
        if any(one is NotImplemented for one in elements):
            return NotImplemented
        return type(value)(elements) if isinstance(value, (list, torch.Size)) else tuple(elements)
    if isinstance(value, Distribution) and distributions:  # all of it, so that it can be made again
        depth, distributions = max(depth, FIELDS), distributions - 1
    fields = getattr(value, "__dict__", None)
    if not isinstance(fields, dict) or not depth:
        return NotImplemented
    if isinstance(value, nn.Module):
        own = {name: one for name, one in fields.items() if name not in BARE}
        fields = {**own, **parameters_of(value), **buffers_of(value), **modules_of(value)}
    if len(fields) > WIDTH:
        return NotImplemented
    values = {name: _described(one, depth - 1, distributions) for name, one in fields.items()}
    return Fields(type(value), {name: one for name, one in values.items() if one is not NotImplemented})
