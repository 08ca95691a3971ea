"""Operators that take elements by index, or put tensors side by side."""

from collections.abc import Iterator

import torch
from torch.fx import Node

from effops.programs.rules.binding import Binding, Place, aligned, argument, operands_of, shape_of, value_of
from effops.pytorch.operators import aten


def _dim_of(node: Node) -> int:
    """The axis `dim`, counted from the front."""
    rank = len(shape_of(node))
    return argument(node, "dim") % rank if rank else 0


def gathered(node: Node) -> Iterator[Binding]:
    """`dim` is an axis of the index. Other axes are cut in the source too."""
    source, shape, dim = shape_of(operands_of(node)[0]), shape_of(node), _dim_of(node)
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if axis == dim:
            yield Binding((Place(1, axis),), axis)
        elif source[axis] == size:  # a shorter index pairs with the beginning of the source alone
            yield Binding((Place(0, axis), Place(1, axis)), axis)


def selected(node: Node) -> Iterator[Binding]:
    """`dim` is the axis of the index. Other axes are those of the source."""
    dim = _dim_of(node)
    for axis, size in enumerate(shape_of(node)):
        if size != 1:
            place = Place(1, 0) if axis == dim else Place(0, axis)
            yield Binding((place,), axis)


def embedded(node: Node) -> Iterator[Binding]:
    """The last axis is that of the table. Other axes are those of the index."""
    if argument(node, "scale_grad_by_freq"):  # backward counts how often each index occurs in the whole input
        return
    shape = shape_of(node)
    for axis, size in enumerate(shape):
        if size != 1:
            place = Place(0, 1) if axis == len(shape) - 1 else Place(1, axis)
            yield Binding((place,), axis)


def indexed(node: Node) -> Iterator[Binding]:
    """Index tensors broadcast. Their axes replace the indexed ones in the result, or come first if those are apart."""
    source, given = shape_of(operands_of(node)[0]), argument(node, "indices")
    index_tensors = [*given, *[None] * (len(source) - len(given))]
    if any(one is not None and value_of(one).dtype in (torch.bool, torch.uint8) for one in index_tensors):
        return
    indexed_axes = [axis for axis, one in enumerate(index_tensors) if one is not None]
    other_axes = [axis for axis, one in enumerate(index_tensors) if one is None]
    are_adjacent = indexed_axes[-1] - indexed_axes[0] + 1 == len(indexed_axes)
    before = [axis for axis in other_axes if are_adjacent and axis < indexed_axes[0]]
    after = [axis for axis in other_axes if axis not in before]
    index_shapes = [shape_of(index_tensors[axis]) for axis in indexed_axes]
    rank = max(map(len, index_shapes))
    shape = shape_of(node)
    for axis, source_axis in enumerate([*before, *[None] * rank, *after]):
        if shape[axis] == 1:
            continue
        if source_axis is not None:
            places = [Place(0, source_axis)]
        else:
            places = []
            for number, index_shape in enumerate(index_shapes, 1):
                index_axis = axis - len(before) - rank + len(index_shape)  # the last axes are aligned
                if index_axis >= 0 and index_shape[index_axis] == shape[axis]:
                    places.append(Place(number, index_axis))
        yield Binding(tuple(places), axis)


def joined(node: Node) -> Iterator[Binding]:
    """All axes but `dim`, which is a new one in a stack."""
    is_stack, dim = node.target is aten.stack.default, _dim_of(node)
    # `cat` allows an operand of shape (0,) beside operands of any rank.
    numbers = [number for number, operand in enumerate(operands_of(node)) if shape_of(operand) != (0,)]
    for axis, size in enumerate(shape_of(node)):
        if axis != dim and size != 1:
            operand_axis = axis - 1 if is_stack and axis > dim else axis
            yield Binding(tuple(Place(number, operand_axis) for number in numbers), axis)


def scattered(node: Node) -> Iterator[Binding]:
    """All axes but `dim` that have one size in all operands."""
    shapes, dim = [shape_of(one) for one in operands_of(node)], _dim_of(node)
    for axis, size in enumerate(shape_of(node)):
        if axis != dim and size != 1 and all(one[axis] == size for one in shapes):
            yield Binding(tuple(Place(number, axis) for number in range(len(shapes))), axis)


def beside(node: Node) -> Iterator[Binding]:
    """All axes but `dim`. Operands of the result's rank are cut; the rest, such as the index, are read whole."""
    shapes, shape, dim = [shape_of(one) for one in operands_of(node)], shape_of(node), _dim_of(node)
    numbers = [number for number, one in enumerate(shapes) if len(one) == len(shape)]
    for axis, size in enumerate(shape):
        if axis != dim and size != 1 and all(shapes[number][axis] == size for number in numbers):
            yield Binding(tuple(Place(number, axis) for number in numbers), axis)


def searched(node: Node) -> Iterator[Binding]:
    """Sorted rows are cut together with rows of values. A single sorted row is read whole."""
    if len(operands_of(node)) != 2:  # the third is a sorter
        return
    rows, shape = shape_of(operands_of(node)[0]), shape_of(node)
    for axis, size in enumerate(shape):
        if size != 1:
            is_of_rows = len(rows) > 1 and axis < len(shape) - 1
            yield Binding((Place(0, axis), Place(1, axis)) if is_of_rows else (Place(1, axis),), axis)


def in_buckets(node: Node) -> Iterator[Binding]:
    """The values are cut. The boundaries are read whole."""
    return aligned(node, operands_of(node)[:1])


def taken(node: Node) -> Iterator[Binding]:
    """The index is cut. The source is read whole."""
    for axis, size in enumerate(shape_of(node)):
        if size != 1:
            yield Binding((Place(1, axis),), axis)


def padded(node: Node) -> Iterator[Binding]:
    """Axes without padding. `pad` has two numbers an axis, the last axis first."""
    shape, source = shape_of(node), shape_of(operands_of(node)[0])
    changed = {len(shape) - 1 - position // 2 for position, length in enumerate(argument(node, "pad")) if length}
    for axis, size in enumerate(shape):
        if axis not in changed and size != 1 and source[axis] == size:
            yield Binding((Place(0, axis),), axis)


RULES = {
    aten.constant_pad_nd.default: padded,
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
