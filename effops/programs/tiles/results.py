"""The results of a loop, which its tiles put together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from effops.numerics.precision import arithmetic_dtype
from effops.programs.rules.binding import is_item, operands_of
from effops.programs.tiles.combiners import Combiner
from effops.programs.tiles.cuts import Along, Stage


class Results:
    """The results of a loop, to which tiles add theirs.

    Attributes:
        whole: how many indices of the cut there are
        totals: of the results that are combined
    """

    def __init__(self, stage: Stage, combiners: Sequence[Combiner | None], whole: int) -> None:
        self.stage, self.combiners, self.whole = stage, combiners, whole
        self.stretches = [stretch_of(stage, node) for node in stage.outputs]
        self.totals = [list[Tensor]() for _ in combiners]
        self.found: list[Tensor | None] = [None for _ in combiners]
        self.dtypes: dict[int, torch.dtype] = {}

    def add(self, found: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
        """Add what a tile has found; returns what it leaves to the next one."""
        rest = iter(found)
        outputs = zip(self.stage.outputs, self.combiners, self.stretches)
        for place, (node, combiner, stretch) in enumerate(outputs):
            if combiner is None:
                along, computed, result = self.stage.cut.placed[node], next(rest), self.found[place]
                if result is None:
                    self.found[place] = result = self._empty(node, along, computed)
                part(result, along, start, length).copy_(computed)
            else:
                own = [next(rest) for _ in range(combiner.count)]
                own = combiner.numbered(own, start * stretch)
                self.dtypes[place] = _dtype_of(node, own[0])
                if self.totals[place]:
                    combiner.add(self.totals[place], own)
                else:
                    self.totals[place] = combiner.start(own)
        return list(rest)

    def all(self) -> list[Tensor]:
        for place, combiner in enumerate(self.combiners):
            if combiner is not None:
                self.found[place] = combiner.result(self.totals[place], self.dtypes[place])
        return [one for one in self.found if one is not None]

    def _empty(self, node: Node, along: Along, part: Tensor) -> Tensor:
        """Memory for a result, with the strides that the function gives it."""
        value = node.meta["val"]
        shape = shape_for(value, along, self.whole)
        return torch.empty_strided(shape, value.stride(), dtype=part.dtype, device=part.device)


def shape_for(value: Tensor, along: Along | None, length: int) -> list[int]:
    """The shape of the part of a tensor that has some indices of the cut."""
    shape = list(value.shape)
    if along is not None:
        shape[along.axis] = length * along.stretch
    return shape


def part(tensor: Tensor, along: Along | None, start: int, length: int) -> Tensor:
    if along is None:
        return tensor
    return tensor.narrow(along.axis, start * along.stretch, length * along.stretch)


def stretch_of(stage: Stage, node: Node) -> int:
    """How many indices of the axis that a node reduces are one of the cut; 1 if it reduces none."""
    along = stage.along_of(operands_of(node)[0] if is_item(node) else node, 0) if node in stage.cut.combined else None
    return 1 if along is None else along.stretch


def _dtype_of(node: Node, part: Tensor) -> torch.dtype:
    """The dtype of what is combined of parts, which may be wider than it, as all are in a check."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype if dtype.is_floating_point and part.dtype == arithmetic_dtype(dtype) else part.dtype
