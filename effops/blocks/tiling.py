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
from effops.pytorch import _get_dispatch_mode, _TorchDispatchModeKey


class Block(NamedTuple):
    """A block of pairs, given by its slices along the axes of each role."""

    batch: Slices
    rows: Slices
    columns: Slices

    @property
    def pairs(self) -> Slices:
        return self.batch + self.rows + self.columns


@dataclass(frozen=True)
class Extents:
    """The largest size of a block along the axes of each role, and of a step in it.

    A step has some of the batch and of the rows, all columns of the block, and `depth` of the contracted axis.
    """

    batch: Shape
    rows: Shape
    columns: Shape
    batch_step: Shape
    row_step: Shape
    depth: int

    @property
    def pairs(self) -> Shape:
        return self.batch + self.rows + self.columns


def cut(
    plan: Plan,
    dimension: int,
    itemsize: int,
    *,
    copies: float = 0,
    values_per_row: int = 1,
    pair_bytes: int,
    width: int | None = None,
    height: int | None = None,
    in_steps: bool = False,
) -> Extents:
    """Extents of blocks with at most `pair_bytes` of pairs and, if operands are copied, `BLOCK_BYTES` of each operand.

    `copies` is how many values are kept for each coordinate of an operand, and `values_per_row` how many for each row.
    Blocks have `width` columns (`WIDTH`) where there are as many, and more where there are few rows. They have parts of
    several entries of the batch if `height` says how many rows of each, else of one. A block of few columns has more
    entries and rows than are copied at once if those are copied `in_steps`.
    """
    limit = pair_bytes // itemsize
    copied = int(limits.BLOCK_BYTES // itemsize / copies) if copies else 0  # coordinates of an operand
    longest = max(1, copied // min(dimension, limits.COPIED_DEPTH)) if copies else limit
    width = limits.WIDTH if width is None else width
    all_rows, all_columns = plan.numel(plan.rows), plan.numel(plan.columns)
    columns = min(all_columns, longest, max(width, limit // max(1, all_rows)))
    most_rows = max(1, limit // max(1, values_per_row))
    rows = min(all_rows, most_rows, limit // max(1, columns), all_rows if height is None else height)
    rows = rows if in_steps else min(rows, longest)
    whole = height is not None or (rows == all_rows and columns == all_columns)
    copied_entries = max(1, longest // max(1, rows, columns))
    entries = min(limit // max(1, rows * columns), most_rows // max(1, rows))
    batch = max(1, entries if in_steps else min(entries, copied_entries)) if whole else 1
    batch_extents = fit(plan.sizes(plan.batch), batch)
    row_extents = fit(plan.sizes(plan.rows), rows)
    column_extents = fit(plan.sizes(plan.columns), columns)
    batch_step, row_step = fit(batch_extents, copied_entries), fit(row_extents, longest)
    widest = math.prod(batch_step) * max(math.prod(row_step), math.prod(column_extents))
    depth = min(dimension, limits.DEPTH, max(1, copied // widest) if copies else limits.DEPTH)
    return Extents(batch_extents, row_extents, column_extents, batch_step, row_step, depth)


def pair_bytes_beside(held: int, buffers: float, limit: int) -> int:
    """The size of the pairs of a block if a call allocates `held` of `limit` bytes, and buffers of that size."""
    return int(min(limits.PAIR_BYTES, (limit - held) / max(1.0, buffers)))


def fit(sizes: Shape, target: int) -> Shape:
    """Extents with a product of at most `target`: inner axes whole, then a part of one axis, then 1 for outer axes."""
    extents: list[int] = []
    for size in reversed(sizes):
        extents.append(max(1, min(size, target)))
        target = target // size if 0 < size <= target else 1
    return tuple(reversed(extents))


def whole(sizes: Shape) -> Slices:
    return tuple(slice(0, size) for size in sizes)


def is_prediction() -> bool:
    """Whether tensors are fake. A call then computes nothing and only shows what it allocates."""
    return _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None


def tiles(area: Slices, extents: Shape, *, backwards: bool = False) -> Iterable[Slices]:
    """The slices of all tiles. The last of an axis may be smaller.

    A prediction takes no neighbours of the same sizes twice: what a tile allocates depends on its size, and on what
    the one before it leaves allocated.
    """
    all_tiles = itertools.product(*(along(axis, extent, backwards) for axis, extent in zip(area, extents)))
    return _each_kind(all_tiles) if is_prediction() else all_tiles


def along(axis: slice, extent: int, backwards: bool = False) -> list[slice]:
    """The slices of the tiles along one axis: all, or the first two and the last two in a prediction."""
    starts = range(axis.stop, axis.start, -extent) if backwards else range(axis.start, axis.stop, extent)
    some = dict.fromkeys((*starts[:2], *starts[-2:])) if is_prediction() else starts
    if backwards:
        return [slice(max(i - extent, axis.start), i) for i in some]
    return [slice(i, min(i + extent, axis.stop)) for i in some]


def _each_kind(all_tiles: Iterable[Slices]) -> Iterator[Slices]:
    seen: set[tuple[Shape, Shape]] = set()
    before: Slices = ()
    is_taken = True
    for tile in all_tiles:
        kind = sizes(before), sizes(tile)
        is_new = kind not in seen
        if is_new:
            seen.add(kind)
            yield from (tile,) if is_taken else (before, tile)
        before, is_taken = tile, is_new


def all_pairs(plan: Plan) -> Block:
    """All pairs of a plan as one block."""
    return Block(*(whole(plan.sizes(axes)) for axes in (plan.batch, plan.rows, plan.columns)))


def column_blocks(plan: Plan, extents: Extents, slab: Shape) -> Iterator[Block]:
    """All blocks. Within a slab of the batch, blocks that share their columns follow one another."""
    everything = all_pairs(plan)
    for batches in tiles(everything.batch, slab):
        for columns in tiles(everything.columns, extents.columns):
            for batch in tiles(batches, extents.batch):
                for rows in tiles(everything.rows, extents.rows):
                    yield Block(batch, rows, columns)


def enclosing(tile: Slices, extents: Shape, sizes: Shape) -> Slices:
    """The tile of the larger `extents` that contains `tile`."""
    starts = (piece.start // extent * extent for piece, extent in zip(tile, extents))
    return tuple(slice(start, min(start + extent, size)) for start, extent, size in zip(starts, extents, sizes))


def part(operand: Tensor, block: Slices) -> Tensor:
    """operand[block]. Axes where `operand` has size 1 are taken whole, and so are axes after those of the block."""
    return operand[tuple(slice(None) if size == 1 else piece for size, piece in zip(operand.shape, block))]


def merge(block: Tensor, first: int, second: int) -> Tensor:
    """A view with three axes: the first `first` axes of a block merged, the next `second` merged, the rest merged."""
    shape = block.shape
    sizes = (shape[:first], shape[first : first + second], shape[first + second :])
    return block.view([math.prod(size) for size in sizes])


def within(outer: Slices, inner: Slices) -> Slices:
    """The slices `inner`, counted from the start of the slices `outer` that contain them."""
    return tuple(slice(i.start - j.start, i.stop - j.start) for i, j in zip(inner, outer))


def pieces(block: Block, extents: Shape) -> Iterator[tuple[Slices, Slices]]:
    """The slices of each piece of a block, along the axes of the plan and within the block."""
    for pairs in tiles(block.pairs, extents):
        yield pairs, within(block.pairs, pairs)


def depths(dimension: int, step: int) -> Iterator[slice]:
    """Slices of the coordinates, `step` at a time. Without coordinates there is one empty slice."""
    return (slice(i, min(i + step, dimension)) for i in range(0, max(1, dimension), step))


def sizes(pairs: Slices) -> Shape:
    return tuple(axis.stop - axis.start for axis in pairs)


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
