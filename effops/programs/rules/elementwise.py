"""Operators of which each element of the result depends on the elements at its place, and values that are the same."""

from torch.fx import Node

from effops.programs.rules.binding import Binding, aligned, shape_of
from effops.pytorch.operators import aten


def filled(node: Node) -> list[Binding]:
    return [Binding((), axis) for axis, size in enumerate(shape_of(node)) if size != 1]


RULES = {
    aten.clone.default: aligned,
    aten._to_copy.default: aligned,
    aten.detach.default: aligned,
    aten.alias.default: aligned,
    aten.lift_fresh_copy.default: aligned,
    aten.zeros_like.default: aligned,
    aten.ones_like.default: aligned,
    aten.full_like.default: aligned,
    aten.empty_like.default: aligned,
    aten.fill.Scalar: aligned,
    aten.fill.Tensor: aligned,
    aten.zero.default: aligned,
    aten.masked_fill.Scalar: aligned,
    aten.masked_fill.Tensor: aligned,
    aten.where.self: aligned,
    aten.copy.default: aligned,
    aten.polar.default: aligned,
    aten.complex.default: aligned,
    aten.full.default: filled,
    aten.ones.default: filled,
    aten.zeros.default: filled,
    aten.empty.memory_format: filled,
}
