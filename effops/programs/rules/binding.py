"""What a rule tells: which axes of an operator's operands and result go together."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from effops.pytorch.prediction import OpOverload, map_arg, schema_of

Shape = tuple[int, ...]
WITHOUT_GRADIENTS = "without_gradients"  # marks nodes that a function computes so


class Place(NamedTuple):
    """An axis of an operand. One index of the binding is `stretch` consecutive indices of it."""

    operand: int
    axis: int
    stretch: int = 1


class Binding(NamedTuple):
    """Axes that go together: those of operands, and that of the result, or how what is reduced is combined.

    An operator can be cut along them: each slice of the result depends on the same slice of the operands alone.
    """

    operands: tuple[Place, ...]
    axis: int | None
    stretch: int = 1
    combined: str = ""


Rule = Any  # Callable[[Node], Iterable[Binding]], each with its own options


def operands_of(node: Node) -> list[Node]:
    """The nodes among the arguments, in order; one that is there twice, twice."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), lambda one: found.append(one) or one)  # type: ignore[func-returns-value]
    return found


def value_of(node: Node) -> Any:
    return node.meta["val"]


def shape_of(node: Node) -> Shape:
    """The shape of the result, or of the first of several."""
    value = value_of(node)
    first = value[0] if isinstance(value, (tuple, list)) else value
    return tuple(first.shape) if isinstance(first, Tensor) else ()


def argument(node: Node, name: str) -> Any:
    """An argument by its name in the operator's schema, or its default."""
    for position, one in enumerate(schema_of(node.target).arguments):
        if one.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, one.default_value)
    raise KeyError(name)


def nbytes_of(node: Node) -> int:
    """The bytes of the results."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return sum(one.numel() * one.element_size() for one in values if isinstance(one, Tensor))


def aligned(node: Node, operands: Sequence[Node] | None = None) -> Iterator[Binding]:
    """The axes of operands that broadcast to the result."""
    operands = operands_of(node) if operands is None else operands
    shape = shape_of(node)
    for axis, size in enumerate(shape):
        if size != 1:
            places = []
            for number, operand in enumerate(operands):
                own = axis - len(shape) + len(shape_of(operand))
                if own >= 0 and shape_of(operand)[own] == size:
                    places.append(Place(number, own))
            yield Binding(tuple(places), axis)


def moved(node: Node, sources: Mapping[int, int]) -> Iterator[Binding]:
    """Axes of the result that are whole axes of the first operand."""
    shape = shape_of(operands_of(node)[0])
    for axis, source in sources.items():
        if shape[source] != 1:
            yield Binding((Place(0, source),), axis)


def all_but(node: Node, axes: Iterable[int]) -> Iterator[Binding]:
    """All axes of the first operand, which the result has likewise, but some."""
    rank = len(shape_of(operands_of(node)[0]))
    mixed = {axis % rank for axis in axes} if rank else set()
    return moved(node, {axis: axis for axis in range(rank) if axis not in mixed})


def is_operator(node: Node) -> bool:
    return isinstance(node.target, OpOverload)


def is_item(node: Node) -> bool:
    """Whether the node takes one of several results."""
    return node.target is operator.getitem


def is_without_gradients(node: Node) -> bool:
    return bool(node.meta.get("custom", {}).get(WITHOUT_GRADIENTS))
