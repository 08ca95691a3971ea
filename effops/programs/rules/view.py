"""Operators that show the same elements in another shape."""

from collections.abc import Iterator

from torch.fx import Node

from effops.programs.rules import draws
from effops.programs.rules.binding import Binding, Place, aligned, all_but, argument, moved, operands_of, shape_of
from effops.pytorch.operators import aten


def reshaped(node: Node) -> Iterator[Binding]:
    """Axes that are merged or split go by the outermost one, which keeps its neighbours together."""
    old, new = shape_of(operands_of(node)[0]), shape_of(node)
    if 0 in old:
        return
    i = j = 0
    while i < len(old) and j < len(new):
        before, after, sizes = [i], [j], [old[i], new[j]]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                i += 1
                before.append(i)
                sizes[0] *= old[i]
            else:
                j += 1
                after.append(j)
                sizes[1] *= new[j]
        first = next((axis for axis in before if old[axis] != 1), None)
        second = next((axis for axis in after if new[axis] != 1), None)
        if first is not None and second is not None:
            least = min(old[first], new[second])
            if least and old[first] % least == new[second] % least == 0:
                yield Binding((Place(0, first, old[first] // least),), second, new[second] // least)
        i, j = i + 1, j + 1


def unsqueezed(node: Node) -> Iterator[Binding]:
    rank = len(shape_of(node))
    new = argument(node, "dim") % rank
    return moved(node, {axis: axis - (axis > new) for axis in range(rank) if axis != new})


def squeezed(node: Node) -> Iterator[Binding]:
    shape, dim = shape_of(operands_of(node)[0]), argument(node, "dim")
    given = {axis % len(shape) for axis in ([dim] if isinstance(dim, int) else dim)} if shape else set()
    left = [axis for axis, size in enumerate(shape) if axis not in given or size != 1]
    return moved(node, dict(enumerate(left)))


def permuted(node: Node) -> Iterator[Binding]:
    rank = len(shape_of(node))
    return moved(node, {axis: source % rank for axis, source in enumerate(argument(node, "dims"))})


def transposed(node: Node) -> Iterator[Binding]:
    rank = len(shape_of(node))
    first, second = (
        (0, rank - 1) if node.target is aten.t.default else (argument(node, name) for name in ("dim0", "dim1"))
    )
    swapped = {first % rank: second % rank, second % rank: first % rank} if rank else {}
    return moved(node, {axis: swapped.get(axis, axis) for axis in range(rank)})


def selected(node: Node) -> Iterator[Binding]:
    rank = len(shape_of(operands_of(node)[0]))
    gone = argument(node, "dim") % rank
    return moved(node, {axis - (axis > gone): axis for axis in range(rank) if axis != gone})


def sliced(node: Node) -> Iterator[Binding]:
    is_whole = shape_of(node) == shape_of(operands_of(node)[0])
    return all_but(node, () if is_whole else (argument(node, "dim"),))


def diagonal(node: Node) -> Iterator[Binding]:
    rank = len(shape_of(operands_of(node)[0]))
    gone = {argument(node, name) % rank for name in ("dim1", "dim2")}
    return moved(node, dict(enumerate(axis for axis in range(rank) if axis not in gone)))


def divided(node: Node) -> Iterator[Binding]:
    """Several results, each a part of the axis `dim`."""
    return all_but(node, (argument(node, "dim"),))


def unbound(node: Node) -> Iterator[Binding]:
    rank = len(shape_of(operands_of(node)[0]))
    gone = argument(node, "dim") % rank
    return moved(node, {axis - (axis > gone): axis for axis in range(rank) if axis != gone})


def unfolded(node: Node) -> Iterator[Binding]:
    return all_but(node, (argument(node, "dimension"),))


def with_parts(node: Node) -> Iterator[Binding]:
    """Complex numbers as pairs along a last axis, and back."""
    pairs = operands_of(node)[0] if node.target is aten.view_as_complex.default else node
    return moved(node, {axis: axis for axis in range(len(shape_of(pairs)) - 1)})


RULES = {
    aten.view_as_real.default: with_parts,
    aten.view_as_complex.default: with_parts,
    aten.diagonal.default: diagonal,
    aten.split.Tensor: divided,
    aten.split_with_sizes.default: divided,
    aten.chunk.default: divided,
    aten.unbind.int: unbound,
    aten.conj.default: aligned,
    aten._conj.default: aligned,
    aten.unfold.default: unfolded,
    aten.view.default: reshaped,
    aten._unsafe_view.default: reshaped,
    aten.reshape.default: reshaped,
    aten.expand.default: aligned,
    aten.unsqueeze.default: unsqueezed,
    aten.squeeze.dim: squeezed,
    aten.squeeze.dims: squeezed,
    aten.permute.default: permuted,
    aten.transpose.int: transposed,
    aten.t.default: transposed,
    aten.select.int: selected,
    aten.slice.Tensor: sliced,
}
# The argument that has the sizes of the result. A tile has other ones.
SIZES = {
    aten.view.default: "size",
    aten._unsafe_view.default: "size",
    aten.reshape.default: "shape",
    aten.expand.default: "size",
    aten.full.default: "size",
    aten.ones.default: "size",
    aten.zeros.default: "size",
    aten.empty.memory_format: "size",
    **draws.SIZES,
}
