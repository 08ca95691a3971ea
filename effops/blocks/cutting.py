"""Cut pairs into blocks that fit the cache, and find the parts of a tensor that belong to a block.

Temporaries of a call are a few buffers, whatever its shapes. `limits.py` says how large they are.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from effops.blocks import limits
from effops.blocks.plan import Plan, Shape, Slices
from effops.pytorch.calls import _get_dispatch_mode, _TorchDispatchModeKey


class Block(NamedTuple):
    """A block of pairs: its slices along the axes of each role."""

    batch: Slices
    rows: Slices
    columns: Slices

    @property
    def pairs(self) -> Slices:
        return self.batch + self.rows + self.columns


@dataclass(frozen=True)
class Extents:
    """The largest size of a block along the axes of each role, and of what is copied of its operands at once.

    Copied at once are `copied_batch` of its batch, `copied_rows` of its rows, all of its columns, and `depth` of the
    coordinates.
    """

    batch: Shape
    rows: Shape
    columns: Shape
    copied_batch: Shape
    copied_rows: Shape
    depth: int

    @property
    def pairs(self) -> Shape:
        return self.batch + self.rows + self.columns


def block_extents(
    plan: Plan,
    dimension: int,
    itemsize: int,
    *,
    pair_bytes: int,
    values_per_coordinate: float = 0,
    values_per_row: int = 1,
    target_columns: int | None = None,
    rows_per_entry: int | None = None,
    in_steps: bool = False,
) -> Extents:
    """The extents of blocks. The copies of an operand that are held at once have at most `BLOCK_BYTES`.

    Args:
        plan: the roles of the axes of all pairs
        dimension: how many coordinates an operand has
        itemsize: the bytes of a value in the dtype of the arithmetic
        pair_bytes: the most bytes that the pairs of a block may have
        values_per_coordinate: how many values copies hold for each coordinate of an operand; 0 if none is copied
        values_per_row: how many values are held for each row of a block, of which they may have `pair_bytes` too
        target_columns: the columns of a block, if there are as many; `WIDTH` if None. Blocks have more if rows are few
        rows_per_entry: the most rows of one entry of the batch in a block. If None, they are as many as fit, and a
            block has several entries only if it has all their rows and columns
        in_steps: whether operands are copied step by step, so that a block of few columns may have more entries and
            rows than are copied at once
    """
    most_pairs = pair_bytes // itemsize
    most_rows = max(1, most_pairs // max(1, values_per_row))
    copied_coordinates, copied_vectors = 0, most_pairs  # at once; what is not copied is bounded by the pairs alone
    if values_per_coordinate:
        copied_coordinates = int(limits.BLOCK_BYTES // itemsize / values_per_coordinate)
        copied_vectors = max(1, copied_coordinates // min(dimension, limits.COPIED_DEPTH))

    all_rows, all_columns = plan.numel(plan.rows), plan.numel(plan.columns)
    columns = max(limits.WIDTH if target_columns is None else target_columns, most_pairs // max(1, all_rows))
    columns = min(columns, all_columns, copied_vectors)
    rows = min(all_rows if rows_per_entry is None else rows_per_entry, all_rows, most_rows)
    rows = min(rows, most_pairs // max(1, columns))
    rows = rows if in_steps else min(rows, copied_vectors)

    copied_entries = max(1, copied_vectors // max(1, rows, columns))
    entries = 1
    if rows_per_entry is not None or (rows == all_rows and columns == all_columns):
        entries = min(most_pairs // max(1, rows * columns), most_rows // max(1, rows))
        entries = max(1, entries if in_steps else min(entries, copied_entries))

    batch_extents = fit(plan.sizes(plan.batch), entries)
    row_extents = fit(plan.sizes(plan.rows), rows)
    column_extents = fit(plan.sizes(plan.columns), columns)
    copied_batch, copied_rows = fit(batch_extents, copied_entries), fit(row_extents, copied_vectors)
    depth = min(dimension, limits.DEPTH)
    if values_per_coordinate:
        copied_at_once = math.prod(copied_batch) * max(math.prod(copied_rows), math.prod(column_extents))
        depth = min(depth, max(1, copied_coordinates // copied_at_once))
    return Extents(batch_extents, row_extents, column_extents, copied_batch, copied_rows, depth)


def pair_bytes_beside(held: int, buffers: float, limit: int) -> int:
    """The most bytes of the pairs of a block, of which there are so many `buffers` of its size.

    With `held` bytes of other things they take at most `limit` bytes.
    """
    return int(min(limits.PAIR_BYTES, (limit - held) / max(1.0, buffers)))


def fit(shape: Shape, target: int) -> Shape:
    """Extents with a product of at most `target`: inner axes whole, then a part of one axis, then 1 for outer axes."""
    extents: list[int] = []
    for size in reversed(shape):
        extents.append(max(1, min(size, target)))
        target = target // size if 0 < size <= target else 1
    return tuple(reversed(extents))


def whole(shape: Shape) -> Slices:
    """Slices that take all of a shape."""
    return tuple(slice(0, size) for size in shape)


def is_prediction() -> bool:
    """Whether tensors are fake. A call then computes nothing and only shows what it allocates."""
    return _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None


def visited_pieces(area: Slices, extents: Shape, *, backwards: bool = False) -> Iterable[Slices]:
    """The slices of the pieces of an area that a call computes one after another: all of them, if it is no prediction.

    The last piece along an axis may be smaller. A prediction visits only pieces that may allocate something new. What a
    piece allocates depends on its sizes, and on what the piece before it leaves allocated.
    """
    along_axes = [visited_along_axis(axis, extent, backwards) for axis, extent in zip(area, extents)]
    all_pieces = itertools.product(*along_axes)
    return _around_new_neighbours(all_pieces) if is_prediction() else all_pieces


def visited_along_axis(axis: slice, extent: int, backwards: bool = False) -> list[slice]:
    """The slices of the pieces along one axis: all, or in a prediction the first two and the last two."""
    starts = range(axis.stop, axis.start, -extent) if backwards else range(axis.start, axis.stop, extent)
    visited = dict.fromkeys((*starts[:2], *starts[-2:])) if is_prediction() else starts
    if backwards:
        return [slice(max(i - extent, axis.start), i) for i in visited]
    return [slice(i, min(i + extent, axis.stop)) for i in visited]


def _around_new_neighbours(all_pieces: Iterable[Slices]) -> list[Slices]:
    """The first piece, and two neighbours wherever no two before them have had their sizes."""
    pieces = list(all_pieces)
    seen: set[tuple[Shape, Shape]] = set()
    visited = {0}
    for i, neighbours in enumerate(itertools.pairwise(pieces)):
        first, second = map(sizes, neighbours)
        if (first, second) not in seen:
            seen.add((first, second))
            visited |= {i, i + 1}
    return [piece for i, piece in enumerate(pieces) if i in visited]


def all_pairs(plan: Plan) -> Block:
    """All pairs of a plan as one block."""
    return Block(*(whole(plan.sizes(axes)) for axes in (plan.batch, plan.rows, plan.columns)))


def column_blocks(plan: Plan, extents: Extents, slab: Shape) -> Iterator[Block]:
    """The visited blocks. In a slab, which is a piece of the batch, blocks that share their columns come one by one."""
    everything = all_pairs(plan)
    for slab_batch in visited_pieces(everything.batch, slab):
        for columns in visited_pieces(everything.columns, extents.columns):
            for batch in visited_pieces(slab_batch, extents.batch):
                for rows in visited_pieces(everything.rows, extents.rows):
                    yield Block(batch, rows, columns)


def piece_around(piece: Slices, extents: Shape, shape: Shape) -> Slices:
    """The larger piece that contains `piece`: one of those with these extents into which all of `shape` is cut."""
    starts = (axis.start // extent * extent for axis, extent in zip(piece, extents))
    return tuple(slice(start, min(start + extent, size)) for start, extent, size in zip(starts, extents, shape))


def broadcast_slice(operand: Tensor, block: Slices) -> Tensor:
    """`operand[block]`, but an axis of size 1 is taken whole. So are the axes after those of the block."""
    return operand[tuple(slice(None) if size == 1 else axis for size, axis in zip(operand.shape, block))]


def merge(block: Tensor, first: int, second: int) -> Tensor:
    """A view with three axes: the first `first` axes of a block merged, the next `second` merged, the rest merged."""
    shape = block.shape
    merged = (shape[:first], shape[first : first + second], shape[first + second :])
    return block.view([math.prod(axes) for axes in merged])


def counted_from_start_of(outer: Slices, inner: Slices) -> Slices:
    """The slices `inner`, which lie in the slices `outer`, counted from where these start."""
    return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in zip(inner, outer))


def visited_in_block(block: Block, extents: Shape) -> Iterator[tuple[Slices, Slices]]:
    """Each visited piece of a block twice: its slices of all pairs, and those of the block."""
    for piece in visited_pieces(block.pairs, extents):
        yield piece, counted_from_start_of(block.pairs, piece)


def depths(dimension: int, step: int) -> Iterator[slice]:
    """Slices of the coordinates, `step` at a time. Without coordinates there is one empty slice."""
    return (slice(i, min(i + step, dimension)) for i in range(0, max(1, dimension), step))


def sizes(slices: Slices) -> Shape:
    """The sizes of the axes that the slices take."""
    return tuple(axis.stop - axis.start for axis in slices)


class Buffer:
    """Memory for one block after another. It is as large as the largest of them, which is the first in most calls."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self.values: Tensor | None = None

    def room(self, shape: Sequence[int]) -> Tensor:
        """The memory, or the start of it, in a shape. It is uninitialised, or holds what the latest room holds."""
        numel = math.prod(shape)
        if self.values is None or numel > self.values.numel():
            self.values = None  # frees the former memory first
            self.values = self.like.new_empty(numel, dtype=self.dtype)
        memory = self.values if numel == self.values.numel() else self.values[:numel]
        return memory.view(shape)

    def release(self) -> None:
        """Give the memory back, until there is another block."""
        self.values = None
