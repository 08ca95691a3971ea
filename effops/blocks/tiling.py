"""How pairs are cut into blocks that fit the cache, and the parts of a tensor that belong to a block.

Temporaries of a call are a few buffers of about `BLOCK_BYTES`, whatever its shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from effops.blocks.plan import Plan, Shape, Slices
from effops.pytorch import _get_dispatch_mode, _TorchDispatchModeKey

BLOCK_BYTES = 512 * 1024  # half of the L2 cache that a core of common server CPUs has, or all of it
T = TypeVar("T")
DEPTH = 256  # terms of a dot product summed at once: a longer sum of like signs loses digits


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
    """The largest block along each axis of the plan, by role, and of a step through the contracted axis."""

    batch: Shape
    rows: Shape
    columns: Shape
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
    held: int = 1,
    pair_bytes: int = BLOCK_BYTES,
    width: int = 512,
) -> Extents:
    """Blocks of at most `pair_bytes` of pairs and, where operands are copied, `BLOCK_BYTES` of each operand.

    `copies` is how many values are kept for each coordinate of an operand, `held` how many for each row. Blocks have
    `width` columns where there are as many, and more where there are few rows.
    """
    limit = pair_bytes // itemsize
    copied = int(BLOCK_BYTES // itemsize / copies) if copies else 0  # coordinates of an operand
    longest = max(1, copied // min(dimension, 128)) if copies else limit
    all_rows, all_columns = plan.numel(plan.rows), plan.numel(plan.columns)
    columns = min(all_columns, longest, max(width, limit // max(1, all_rows)))
    most_rows = max(1, limit // max(1, held))
    rows = min(all_rows, longest, most_rows, limit // max(1, columns))
    whole = rows == all_rows and columns == all_columns
    entries = (limit // max(1, rows * columns), longest // max(1, rows, columns), most_rows // max(1, rows))
    batch = max(1, min(entries)) if whole else 1
    batch_extents = fit(plan.sizes(plan.batch), batch)
    row_extents = fit(plan.sizes(plan.rows), rows)
    column_extents = fit(plan.sizes(plan.columns), columns)
    widest = math.prod(batch_extents) * max(math.prod(row_extents), math.prod(column_extents))
    depth = min(dimension, DEPTH, max(1, copied // widest) if copies else DEPTH)
    return Extents(batch_extents, row_extents, column_extents, depth)


def fit(sizes: Shape, target: int) -> Shape:
    """Extents with a product of at most `target`: inner axes whole, then part of one, outer axes one by one."""
    extents: list[int] = []
    for size in reversed(sizes):
        extents.append(max(1, min(size, target)))
        target = target // size if 0 < size <= target else 1
    return tuple(reversed(extents))


def whole(sizes: Shape) -> Slices:
    return tuple(slice(0, size) for size in sizes)


def is_rehearsal() -> bool:
    """Whether tensors are fake, so that a call computes nothing and only shows what it allocates."""
    return _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None


def few(items: Iterable[T]) -> Iterable[T]:
    """All of them, but in a rehearsal the first two: the second finds what the first leaves."""
    return itertools.islice(items, 2) if is_rehearsal() else items


def tiles(within: Slices, extents: Shape) -> Iterable[Slices]:
    """Slices of all tiles, or of a few."""
    all_tiles = itertools.product(
        *(
            [slice(i, min(i + extent, axis.stop)) for i in range(axis.start, axis.stop, extent)]
            for axis, extent in zip(within, extents)
        )
    )
    return few(all_tiles)


def row_blocks(plan: Plan, extents: Extents) -> Iterator[list[Block]]:
    """All blocks, those of some rows at a time."""
    all_batch, all_rows, all_columns = (whole(plan.sizes(axes)) for axes in (plan.batch, plan.rows, plan.columns))
    for batch in tiles(all_batch, extents.batch):
        for rows in tiles(all_rows, extents.rows):
            yield [Block(batch, rows, columns) for columns in tiles(all_columns, extents.columns)]


def enclosing(tile: Slices, extents: Shape, sizes: Shape) -> Slices:
    """The tile of larger extents in which a tile lies."""
    starts = (piece.start // extent * extent for piece, extent in zip(tile, extents))
    return tuple(slice(start, min(start + extent, size)) for start, extent, size in zip(starts, extents, sizes))


def part(operand: Tensor, block: Slices) -> Tensor:
    """operand[block], whole along the axes where `operand` has size 1, and along those after the block's."""
    return operand[tuple(slice(None) if size == 1 else piece for size, piece in zip(operand.shape, block))]


def merge(block: Tensor, first: int, second: int) -> Tensor:
    """A view with the first axes of a block merged into one, the second ones likewise, and the rest."""
    shape = block.shape
    sizes = (shape[:first], shape[first : first + second], shape[first + second :])
    return block.view([math.prod(size) for size in sizes])


def pieces(block: Block, extents: Shape) -> Iterator[tuple[Slices, Slices]]:
    """Where the pieces of a block lie along the axes of the plan, and within the block."""
    for pairs in tiles(block.pairs, extents):
        yield pairs, tuple(slice(i.start - j.start, i.stop - j.start) for i, j in zip(pairs, block.pairs))


def depths(dimension: int, step: int) -> Iterator[slice]:
    """Coordinates by parts; one empty part if there are none."""
    return (slice(i, min(i + step, dimension)) for i in range(0, max(1, dimension), step))


def sizes(pairs: Slices) -> Shape:
    return tuple(axis.stop - axis.start for axis in pairs)
