"""Operators that take elements by their numbers, or put tensors side by side."""

from collections.abc import Iterator

import torch
from torch.fx import Node

from effops.programs.rules.binding import Binding, Place, aligned, argument, operands_of, shape_of

aten = torch.ops.aten


def gathered(node: Node) -> Iterator[Binding]:
    source, shape = shape_of(operands_of(node)[0]), shape_of(node)
    along = argument(node, "dim") % len(shape) if shape else 0
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if axis == along:
            yield Binding((Place(1, axis),), axis)
        elif source[axis] == size:  # a shorter index reads the first ones
            yield Binding((Place(0, axis), Place(1, axis)), axis)


def selected(node: Node) -> Iterator[Binding]:
    shape = shape_of(node)
    along = argument(node, "dim") % len(shape) if shape else 0
    for axis, size in enumerate(shape):
        if size != 1:
            yield Binding((Place(1, 0) if axis == along else Place(0, axis),), axis)


def embedded(node: Node) -> Iterator[Binding]:
    if argument(node, "scale_grad_by_freq"):  # its gradient counts all numbers
        return
    shape = shape_of(node)
    for axis, size in enumerate(shape):
        if size != 1:
            yield Binding((Place(0, 1) if axis == len(shape) - 1 else Place(1, axis),), axis)


def indexed(node: Node) -> Iterator[Binding]:
    """Tensors of numbers broadcast. Their axes stand where the first of them stands, or in front if they are apart."""
    source, given = shape_of(operands_of(node)[0]), argument(node, "indices")
    numbers = [*given, *[None] * (len(source) - len(given))]
    if any(one is not None and one.meta["val"].dtype in (torch.bool, torch.uint8) for one in numbers):
        return
    axes = [axis for axis, one in enumerate(numbers) if one is not None]
    shapes = [shape_of(numbers[axis]) for axis in axes]
    rank = max(map(len, shapes))
    first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    others = [axis for axis, one in enumerate(numbers) if one is None]
    shape = shape_of(node)
    before = [axis for axis in others if axis < first]
    after = [axis for axis in others if axis not in before]
    for axis, own in enumerate(before):
        if shape[axis] != 1:
            yield Binding((Place(0, own),), axis)
    for place in range(rank):
        axis = len(before) + place
        if shape[axis] != 1:
            places = ((1 + number, place - rank + len(one), one) for number, one in enumerate(shapes))
            fitting = (Place(number, at) for number, at, one in places if at >= 0 and one[at] == shape[axis])
            yield Binding(tuple(fitting), axis)
    for axis, own in enumerate(after, len(before) + rank):
        if shape[axis] != 1:
            yield Binding((Place(0, own),), axis)


def joined(node: Node) -> Iterator[Binding]:
    shape, is_new = shape_of(node), node.target is aten.stack.default
    along = argument(node, "dim") % len(shape)
    count = len(operands_of(node))
    empty = {number for number, one in enumerate(operands_of(node)) if shape_of(one) == (0,)}  # of any rank
    for axis, size in enumerate(shape):
        if axis != along and size != 1:
            own = axis - (is_new and axis > along)
            yield Binding(tuple(Place(number, own) for number in range(count) if number not in empty), axis)


def scattered(node: Node) -> Iterator[Binding]:
    shapes, shape = [shape_of(one) for one in operands_of(node)], shape_of(node)
    along = argument(node, "dim") % len(shape) if shape else 0
    for axis, size in enumerate(shape):
        if axis != along and size != 1 and all(own[axis] == size for own in shapes):
            yield Binding(tuple(Place(number, axis) for number in range(len(shapes))), axis)


def beside(node: Node) -> Iterator[Binding]:
    """Axes but `dim` of all operands that have as many axes as the result; the others are numbers along `dim`."""
    shapes, shape = [shape_of(one) for one in operands_of(node)], shape_of(node)
    along = argument(node, "dim") % len(shape) if shape else 0
    for axis, size in enumerate(shape):
        places = [Place(number, axis) for number, own in enumerate(shapes) if len(own) == len(shape)]
        if axis != along and size != 1 and all(shapes[one.operand][axis] == size for one in places):
            yield Binding(tuple(places), axis)


def searched(node: Node) -> Iterator[Binding]:
    """Places of values in sorted rows, or in a single one."""
    rows, shape = shape_of(operands_of(node)[0]), shape_of(node)
    for axis, size in enumerate(shape):
        is_of_rows = len(rows) > 1 and axis < len(shape) - 1
        if size != 1 and len(operands_of(node)) == 2:
            yield Binding((Place(0, axis), Place(1, axis)) if is_of_rows else (Place(1, axis),), axis)


def in_buckets(node: Node) -> Iterator[Binding]:
    return aligned(node, operands_of(node)[:1])


def taken(node: Node) -> Iterator[Binding]:
    for axis, size in enumerate(shape_of(node)):
        if size != 1:
            yield Binding((Place(1, axis),), axis)


def padded(node: Node) -> Iterator[Binding]:
    """Axes without padding are cut."""
    shape, source = shape_of(node), shape_of(operands_of(node)[0])
    pad = argument(node, "pad")
    changed = {len(shape) - 1 - place // 2 for place, size in enumerate(pad) if size}
    for axis, size in enumerate(shape):
        if axis not in changed and size != 1 and source[axis] == size:
            yield Binding((Place(0, axis),), axis)


def repeated(node: Node) -> Iterator[Binding]:
    """Axes that are repeated once are those of the operand, and the first ones are new."""
    shape, source = shape_of(node), shape_of(operands_of(node)[0])
    missing = len(shape) - len(source)
    for axis, times in enumerate(argument(node, "repeats")):
        if times == 1 and axis >= missing and shape[axis] != 1:
            yield Binding((Place(0, axis - missing),), axis)


RULES = {
    aten.constant_pad_nd.default: padded,
    aten.repeat.default: repeated,
    aten.gather.default: gathered,
    aten.index_select.default: selected,
    aten.embedding.default: embedded,
    aten.index.Tensor: indexed,
    aten.cat.default: joined,
    aten.stack.default: joined,
    aten.scatter_add.default: scattered,
    aten.scatter.src: scattered,
    aten.scatter.value: scattered,
    aten.scatter_reduce.two: scattered,
    aten.index_add.default: beside,
    aten.index_copy.default: beside,
    aten.index_fill.int_Scalar: beside,
    aten.index_fill.int_Tensor: beside,
    aten.index_reduce.default: beside,
    aten.slice_scatter.default: beside,
    aten.searchsorted.Tensor: searched,
    aten.bucketize.Tensor: in_buckets,
    aten.take.default: taken,
}
