"""Operators that reduce axes. Those that have a combiner can be cut along the reduced axis too."""

from collections.abc import Callable, Iterator

import torch
from torch.fx import Node

from effops.programs.rules.binding import Binding, Place, argument, operands_of, shape_of

aten = torch.ops.aten


def reducing(combined: str, *, keeps: bool | None = None) -> Callable[[Node], Iterator[Binding]]:
    """The rule of an operator with arguments `dim` and `keepdim`; without a combiner the reduced axis is mixed."""

    def rule(node: Node) -> Iterator[Binding]:
        shape = shape_of(operands_of(node)[0])
        names = {one.name for one in node.target._schema.arguments}  # type: ignore[union-attr]
        dims = argument(node, "dim") if "dim" in names else None
        keepdim = argument(node, "keepdim") if keeps is None and "keepdim" in names else bool(keeps)
        given = [dims] if isinstance(dims, int) else dims
        reduced = {axis % len(shape) for axis in given} if given else set(range(len(shape)))
        axis = 0
        for source, size in enumerate(shape):
            if source not in reduced:
                if size != 1:
                    yield Binding((Place(0, source),), axis)
            elif combined and size != 1:
                yield Binding((Place(0, source),), None, combined=combined)
            axis += keepdim or source not in reduced

    return rule


RULES = {
    aten.sum.default: reducing("sum"),
    aten.sum.dim_IntList: reducing("sum"),
    aten.amax.default: reducing("max"),
    aten.amin.default: reducing("min"),
    aten.any.dim: reducing("any"),
    aten.any.dims: reducing("any"),
    aten.any.default: reducing("any"),
    aten.all.dim: reducing("all"),
    aten.all.dims: reducing("all"),
    aten.all.default: reducing("all"),
    aten.logsumexp.default: reducing("logsumexp"),
    aten.linalg_vector_norm.default: reducing(""),
    aten.prod.dim_int: reducing(""),
    aten.argmin.default: reducing(""),
    aten.argmax.default: reducing(""),
    aten.max.dim: reducing(""),
    aten.min.dim: reducing(""),
    aten.median.dim: reducing(""),
    aten.nanmedian.dim: reducing(""),
    aten.mode.default: reducing(""),
    aten.kthvalue.default: reducing(""),
    aten.count_nonzero.dim_IntList: reducing(""),
    aten.std.correction: reducing(""),
    aten.var_mean.correction: reducing(""),
    aten.std_mean.correction: reducing(""),
    aten.var.correction: reducing(""),
    aten.mean.dim: reducing(""),
}
