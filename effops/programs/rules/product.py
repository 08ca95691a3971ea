"""Products of matrices, and distances of all pairs of rows."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.fx import Node

from effops.ops.einsum.program import product
from effops.programs.rules.binding import Binding, Place, argument, operands_of, shape_of
from effops.pytorch.operators import aten

Labels = tuple[int, ...]


def contracted(first: Tensor, second: Tensor, labels: tuple[Labels, Labels, Labels]) -> Tensor:
    """The product of two tensors, summed over the labels that the result lacks, which stands in graphs for both."""
    own, others, output = labels
    return product([(first, own), (second, others)], output)


def matrices(left: int, right: int, added: int | None = None) -> Callable[[Node], Iterator[Binding]]:
    """The rule of a product of two operands, given by their numbers, to which another one may be added."""

    def rule(node: Node) -> Iterator[Binding]:
        operands, shape = operands_of(node), shape_of(node)
        rank = len(shape)

        def with_added(axis: int, *places: Place) -> tuple[Place, ...]:
            if added is None:
                return places
            own = shape_of(operands[added])
            place = axis - rank + len(own)
            return (*places, Place(added, place)) if place >= 0 and own[place] != 1 else places

        rows, columns = rank - 2, rank - 1
        for axis in range(rank):
            if shape[axis] == 1:
                continue
            if axis < rows:
                places = [Place(left, axis), Place(right, axis)]
            else:
                places = [Place(left, rows)] if axis == rows else [Place(right, columns)]
            yield Binding(with_added(axis, *places), axis)
        if added is None and shape_of(operands[left])[-1] != 1:
            yield Binding((Place(left, columns), Place(right, rows)), None, combined="sum")

    return rule


def of_summed_batches(node: Node) -> Iterator[Binding]:
    """The sum of a batch of products, and another tensor that is added."""
    added, shape = shape_of(operands_of(node)[0]), shape_of(node)
    for axis, size in enumerate(shape):
        own = axis - 2 + len(added)
        places = (Place(0, own),) if own >= 0 and added[own] == size else ()
        if size != 1:
            yield Binding((*places, Place(1, 1) if axis == 0 else Place(2, 2)), axis)


def contraction(node: Node) -> Iterator[Binding]:
    labels: Any = node.args[2]
    *factors, output = labels
    for label in dict.fromkeys((*factors[0], *factors[1])):
        places = tuple(Place(number, own.index(label)) for number, own in enumerate(factors) if label in own)
        if label in output:
            yield Binding(places, output.index(label))
        else:
            yield Binding(places, None, combined="sum")


def of_vectors(node: Node) -> Iterator[Binding]:
    """Vectors: `mv` of a matrix and a vector, `dot` of two."""
    first, second = map(shape_of, operands_of(node))
    if len(first) == 2 and first[0] != 1:
        yield Binding((Place(0, 0),), 0)
    if second[0] != 1:
        yield Binding((Place(0, len(first) - 1), Place(1, 0)), None, combined="sum")


def distances(node: Node) -> Iterator[Binding]:
    """Each row of the first operand with each of the second; batch axes broadcast."""
    shapes, shape = [shape_of(one) for one in operands_of(node)[:2]], shape_of(node)
    rank = len(shape)
    for axis in range(rank - 2):
        if shape[axis] != 1:
            places = ((number, axis - rank + len(own)) for number, own in enumerate(shapes))
            fitting = (Place(*one) for one in places if one[1] >= 0 and shapes[one[0]][one[1]] == shape[axis])
            yield Binding(tuple(fitting), axis)
    for number, axis in enumerate((rank - 2, rank - 1)):
        if shape[axis] != 1:
            yield Binding((Place(number, len(shapes[number]) - 2),), axis)


def convolved(node: Node) -> Iterator[Binding]:
    """Each image, and each channel of the result where groups do not tie them to channels of the image."""
    shape, operands = shape_of(node), operands_of(node)
    if shape[0] != 1:
        yield Binding((Place(0, 0),), 0)
    if argument(node, "groups") == 1 and shape[1] != 1:
        bias = (Place(2, 0),) if len(operands) == 3 else ()
        yield Binding((Place(1, int(argument(node, "transposed"))), *bias), 1)


def sampled(node: Node) -> Iterator[Binding]:
    """Each image at the places of its grid: batch, channels of the image, rows, columns .. of the grid."""
    first = {0: (Place(0, 0), Place(1, 0)), 1: (Place(0, 1),)}
    for axis, size in enumerate(shape_of(node)):
        if size != 1:
            yield Binding(first.get(axis, (Place(1, axis - 1),)), axis)


RULES = {
    aten.convolution.default: convolved,
    aten.grid_sampler_2d.default: sampled,
    aten.grid_sampler_3d.default: sampled,
    contracted: contraction,
    aten.mm.default: matrices(0, 1),
    aten.bmm.default: matrices(0, 1),
    aten.addmm.default: matrices(1, 2, added=0),
    aten.baddbmm.default: matrices(1, 2, added=0),
    aten.addbmm.default: of_summed_batches,
    aten.mv.default: of_vectors,
    aten.dot.default: of_vectors,
    aten._cdist_forward.default: distances,
    aten._euclidean_dist.default: distances,
}
