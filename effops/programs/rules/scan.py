"""Operators that mix the elements along an axis, and treat each index of the others alone.

A cumulative one can be cut along its axis too, where each tile goes on from the last results of the one before it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from effops.numerics.precision import arithmetic_dtype
from effops.programs.rules.binding import (
    Binding,
    Place,
    aligned,
    all_but,
    argument,
    operands_of,
    shape_of,
    value_of,
)
from effops.pytorch.operators import aten


def along(name: str) -> Callable[[Node], Iterator[Binding]]:
    """The rule of an operator that mixes the axis, or axes, of an argument."""

    def rule(node: Node) -> Iterator[Binding]:
        axes = argument(node, name)
        if axes == []:  # for some operators all elements in one row
            return iter(())
        return all_but(node, [axes] if isinstance(axes, int) else axes)

    return rule


def normalised(node: Node) -> Iterator[Binding]:
    rank, count = len(shape_of(operands_of(node)[0])), len(argument(node, "normalized_shape"))
    return all_but(node, range(rank - count, rank))


def crossed(node: Node) -> Iterator[Binding]:
    rank = len(shape_of(node))
    return (one for one in aligned(node) if one.axis != argument(node, "dim") % rank)


def of_one_axis(node: Node) -> Iterator[Binding]:
    """All axes but `dim` are mixed."""
    rank = len(shape_of(node))
    return all_but(node, (axis for axis in range(rank) if axis != argument(node, "dim") % rank))


def cumulative(node: Node) -> Iterator[Binding]:
    shape, dim = shape_of(node), argument(node, "dim")
    yield from along("dim")(node)
    if shape and shape[dim] != 1:
        yield Binding((Place(0, dim % len(shape)),), dim % len(shape), combined="carried")


def continued(scan: Any, x: Tensor, last: Tensor, *, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The results of a tile that goes on from the last one before it, and its own last one, which may be wider."""
    values = scan(torch.cat([last, x.to(torch.promote_types(x.dtype, last.dtype))], dim), dim)
    return values.narrow(dim, 1, x.shape[dim]).to(dtype), values.narrow(dim, x.shape[dim], 1)


def continued_extremum(
    scan: Any, x: Tensor, last: Tensor, number: Tensor, first: Tensor, *, dim: int
) -> tuple[Tensor, ...]:
    """The same for values and numbers. The tile begins at number `first`."""
    values, places = scan(torch.cat([last, x], dim), dim)
    both = values, torch.where(places == 0, number, places + (first - 1))
    length = x.shape[dim]
    results = (one.narrow(dim, 1, length) for one in both)
    return *results, *(one.narrow(dim, length, 1) for one in both), first + length


def of_continued(node: Node) -> Iterator[Binding]:
    for axis, size in enumerate(shape_of(node)):
        if axis != node.kwargs["dim"] and size != 1:
            yield Binding(tuple(Place(number, axis) for number in range(len(operands_of(node)[:3]))), axis)


def first_carried(node: Node, device: Any) -> list[Tensor]:
    """What the first tile of a cumulative operator goes on from."""
    value, shape = value_of(node), list(shape_of(node))
    shape[argument(node, "dim")] = 1
    if node.target in NEUTRAL:
        dtype = arithmetic_dtype(value.dtype) if value.is_floating_point() else value.dtype
        return [torch.full(shape, NEUTRAL[node.target], dtype=dtype, device=device)]
    dtype = value[0].dtype
    neutral = _range_of(dtype)[node.target is aten.cummin.default]
    number, first = (torch.zeros(one, dtype=torch.int64, device=device) for one in (shape, ()))
    return [torch.full(shape, neutral, dtype=dtype, device=device), number, first]


def _range_of(dtype: torch.dtype) -> tuple[float, float]:
    """The least and the largest value."""
    if dtype == torch.bool:
        return False, True
    return (-torch.inf, torch.inf) if dtype.is_floating_point else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def in_a_tile(graph: Graph, node: Node, x: Node, carried: list[Node]) -> list[Node]:
    """A cumulative operator of a tile, and what the next tile goes on from."""
    scan: Any = node.target
    value, options = value_of(node), {"dim": argument(node, "dim") % len(shape_of(node))}
    if isinstance(value, tuple):
        made = graph.call_function(continued_extremum, (scan, x, *carried), options)
        return [made, *(graph.call_function(operator.getitem, (made, place)) for place in (2, 3, 4))]
    made = graph.call_function(continued, (scan, x, *carried), {**options, "dtype": value.dtype})
    return [graph.call_function(operator.getitem, (made, place)) for place in (0, 1)]


NEUTRAL = {aten.cumsum.default: 0, aten.cumprod.default: 1, aten.logcumsumexp.default: -torch.inf}
RULES = {
    continued: of_continued,
    continued_extremum: of_continued,
    aten.linalg_cross.default: crossed,
    aten.renorm.default: of_one_axis,
    aten._fft_r2c.default: along("dim"),
    aten._fft_c2r.default: along("dim"),
    aten._fft_c2c.default: along("dim"),
    aten.roll.default: along("dims"),
    aten.cummax.default: cumulative,
    aten.cummin.default: cumulative,
    aten._softmax.default: along("dim"),
    aten._safe_softmax.default: along("dim"),
    aten._log_softmax.default: along("dim"),
    aten.cumsum.default: cumulative,
    aten.cumprod.default: cumulative,
    aten.logcumsumexp.default: cumulative,
    aten.flip.default: along("dims"),
    aten.topk.default: along("dim"),
    aten.sort.default: along("dim"),
    aten.sort.stable: along("dim"),
    aten.native_layer_norm.default: normalised,
}
