"""Shapes: what several of them broadcast to, and functions of them that are remembered."""

import functools
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def is_known(condition: bool) -> bool:
    """Whether a condition on sizes holds. One on a size of which no value is known does not."""
    if not isinstance(condition, torch.SymBool) and not is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports SymPy, as every symbolic size has

    return bool(guard_or_false(condition))


def is_certain(condition: bool) -> bool:
    """Whether a condition on sizes holds whatever sizes a trace leaves open. Nothing is guarded for it."""
    if not isinstance(condition, torch.SymBool) and not is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def may_be_open(*sizes: int) -> bool:
    """Whether a trace may leave one of the sizes open."""
    return is_compiling() or any(isinstance(size, torch.SymInt) for size in sizes)


def remembered(function: FunctionT) -> FunctionT:
    """A function of shapes with a cache of its latest results. Traced calls and symbolic sizes are not in it."""
    cached = functools.lru_cache(maxsize=4096)(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if is_compiling():
            return function(*args)
        try:
            return cached(*args)
        except TypeError:  # symbolic sizes cannot be hashed
            return function(*args)

    return call  # type: ignore[return-value]


def spreads(size: int, wanted: int) -> bool:
    """Whether an axis of some size broadcasts to a wanted one.

    It stands for `size in (1, wanted)`, which Dynamo takes for False where `size` is a constant and `wanted` a symbol.
    """
    return size == 1 or size == wanted


def do_broadcast(*shapes: Sequence[int]) -> bool:
    """Whether shapes broadcast."""
    try:
        broadcast_shapes(*shapes)
    except RuntimeError:
        return False
    return True


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """`torch.broadcast_shapes` of plain sizes, at a tenth of its time and without its imports (SymPy among them).

    It raises RuntimeError too if the shapes do not broadcast. Symbolic sizes go to PyTorch.
    """
    if is_compiling() or any(type(size) is not int for shape in shapes for size in shape):
        symbolic: torch.Size = torch.broadcast_shapes(*shapes)
        return symbolic
    if all(shape == shapes[0] for shape in shapes):
        return torch.Size(shapes[0] if shapes else ())
    result = []
    for sizes in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        size = next((size for size in sizes if size != 1), 1)
        if any(other not in (1, size) for other in sizes):
            raise RuntimeError(f"the shapes {', '.join(str(tuple(shape)) for shape in shapes)} do not broadcast")
        result.append(size)
    return torch.Size(reversed(result))
