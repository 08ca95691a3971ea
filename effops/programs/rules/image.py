"""Operators that mix the last axes, as pooling, padding and resampling of images do: the axes before are cut."""

from collections.abc import Callable, Iterator

from torch.fx import Node

from effops.programs.rules.binding import Binding, Place, all_but, operands_of, shape_of
from effops.pytorch.operators import aten


def before(count: int) -> Callable[[Node], Iterator[Binding]]:
    """The rule of an operator that mixes the last axes, so many, of its only operand."""
    return lambda node: iter(()) if len(operands_of(node)) > 1 else all_but(node, range(-count, 0))


def before_of_all(count: int) -> Callable[[Node], Iterator[Binding]]:
    """The same of operands that have the axes before alike."""

    def rule(node: Node) -> Iterator[Binding]:
        shapes = [shape_of(one) for one in operands_of(node)]
        for axis, size in enumerate(shapes[0][:-count]):
            if size != 1 and all(len(own) == len(shapes[0]) and own[axis] == size for own in shapes):
                yield Binding(tuple(Place(number, axis) for number in range(len(shapes))), axis)

    return rule


def of_images(node: Node) -> Iterator[Binding]:
    """Images as rows of patches, and back: the first of three axes, or of four, is that of images."""
    rank = len(shape_of(operands_of(node)[0]))
    is_batch = rank == (4 if node.target is aten.im2col.default else 3)
    return all_but(node, range(1, rank)) if is_batch else iter(())


RULES = {
    aten.avg_pool2d.default: before(2),
    aten.avg_pool3d.default: before(3),
    aten.max_pool2d_with_indices.default: before(2),
    aten.max_pool3d_with_indices.default: before(3),
    aten.max_pool2d_with_indices_backward.default: before_of_all(2),
    aten.max_unpool2d.default: before_of_all(2),
    aten.max_unpool3d.default: before_of_all(3),
    aten._adaptive_avg_pool2d.default: before(2),
    aten._adaptive_avg_pool3d.default: before(3),
    aten.adaptive_max_pool2d.default: before(2),
    aten.adaptive_max_pool3d.default: before(3),
    aten.reflection_pad1d.default: before(1),
    aten.reflection_pad2d.default: before(2),
    aten.reflection_pad3d.default: before(3),
    aten.replication_pad1d.default: before(1),
    aten.replication_pad2d.default: before(2),
    aten.replication_pad3d.default: before(3),
    aten.upsample_linear1d.default: before(1),
    aten.upsample_bilinear2d.default: before(2),
    aten.upsample_bicubic2d.default: before(2),
    aten.upsample_trilinear3d.default: before(3),
    aten.upsample_nearest1d.default: before(1),
    aten.upsample_nearest2d.default: before(2),
    aten.upsample_nearest3d.default: before(3),
    aten._upsample_nearest_exact1d.default: before(1),
    aten._upsample_nearest_exact2d.default: before(2),
    aten._upsample_nearest_exact3d.default: before(3),
    aten._upsample_bilinear2d_aa.default: before(2),
    aten._upsample_bicubic2d_aa.default: before(2),
    aten.pixel_shuffle.default: before(3),
    aten.pixel_unshuffle.default: before(3),
    aten.im2col.default: of_images,
    aten.col2im.default: of_images,
}
