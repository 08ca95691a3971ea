"""Operators that mix the elements along an axis, and treat each index of the others alone."""

from collections.abc import Callable, Iterator

import torch
from torch.fx import Node

from effops.programs.rules.binding import Binding, aligned, all_but, argument, operands_of, shape_of

aten = torch.ops.aten


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


RULES = {
    aten.linalg_cross.default: crossed,
    aten.renorm.default: of_one_axis,
    aten._fft_r2c.default: along("dim"),
    aten._fft_c2r.default: along("dim"),
    aten._fft_c2c.default: along("dim"),
    aten.roll.default: along("dims"),
    aten.cummax.default: along("dim"),
    aten.cummin.default: along("dim"),
    aten._softmax.default: along("dim"),
    aten._safe_softmax.default: along("dim"),
    aten._log_softmax.default: along("dim"),
    aten.cumsum.default: along("dim"),
    aten.cumprod.default: along("dim"),
    aten.logcumsumexp.default: along("dim"),
    aten.flip.default: along("dims"),
    aten.topk.default: along("dim"),
    aten.sort.default: along("dim"),
    aten.sort.stable: along("dim"),
    aten.native_layer_norm.default: normalised,
}
