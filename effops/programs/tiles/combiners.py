"""How the parts of a reduction that tiles compute are put together, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.fx import Graph, Node

from effops.numerics.precision import arithmetic_dtype
from effops.programs.rules.binding import argument

aten = torch.ops.aten


class Combiner(Protocol):
    """Puts the parts of one reduction together.

    A tile computes `parts`: the reduction of the tile, and what else is needed to combine it. The totals begin as
    copies of the first tile's parts.
    """

    count: int  # of the parts
    keeps_totals: bool  # for backward

    def parts(self, graph: Graph, node: Node, copied: Node) -> list[Node]:
        """Nodes of a tile's graph. `copied` is the reduction in it."""

    def start(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The totals after the first tile, in memory of their own."""

    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        """Change the totals by the parts of another tile."""

    def result(self, totals: Sequence[Tensor], dtype: torch.dtype) -> Tensor: ...

    def pulled_back(self, upstream: Tensor, parts: Sequence[Tensor], totals: Sequence[Tensor]) -> Tensor:
        """The gradient of a tile's reduction, from that of the result."""


class Sum:
    count, keeps_totals = 1, False

    def parts(self, graph: Graph, node: Node, copied: Node) -> list[Node]:
        return [copied]

    def start(self, parts: Sequence[Tensor]) -> list[Tensor]:
        (part,) = parts
        wide = arithmetic_dtype(part.dtype) if part.is_floating_point() else part.dtype
        return [part.to(wide, copy=True)]

    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        totals[0].add_(parts[0])

    def result(self, totals: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return totals[0].to(dtype)

    def pulled_back(self, upstream: Tensor, parts: Sequence[Tensor], totals: Sequence[Tensor]) -> Tensor:
        return upstream


class LogSumExp(Sum):
    keeps_totals = True

    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        torch.logaddexp(totals[0], parts[0].to(totals[0].dtype), out=totals[0])

    def pulled_back(self, upstream: Tensor, parts: Sequence[Tensor], totals: Sequence[Tensor]) -> Tensor:
        # The weight of a tile among all; a tile of -inf alone has none, and neither has one of many.
        weight = torch.exp(parts[0].detach().to(totals[0].dtype) - totals[0])
        return (upstream * weight.masked_fill_(parts[0] == -torch.inf, 0)).to(parts[0].dtype)


class Extremum:
    """The maximum or minimum, and how many elements are equal to it: they share its gradient."""

    count, keeps_totals = 2, True

    def __init__(self, *, largest: bool) -> None:
        self.largest = largest

    def parts(self, graph: Graph, node: Node, copied: Node) -> list[Node]:
        (operand, *_) = copied.args
        dim, keepdim = argument(node, "dim"), argument(node, "keepdim")
        whole = (
            copied
            if keepdim or not dim
            else graph.call_function(aten.amax.default if self.largest else aten.amin.default, (operand, dim, True))
        )
        equal = graph.call_function(aten.eq.Tensor, (operand, whole))
        return [copied, graph.call_function(aten.sum.dim_IntList, (equal, dim, keepdim))]

    def start(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.clone() for part in parts]

    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        (best, count), (part, equal) = totals, parts
        better = (part > best) if self.largest else (part < best)
        better |= part.isnan() & ~best.isnan()
        same = part == best
        count.add_(torch.where(same, equal, 0))
        torch.where(better, equal, count, out=count)
        torch.where(better, part, best, out=best)

    def result(self, totals: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return totals[0]

    def pulled_back(self, upstream: Tensor, parts: Sequence[Tensor], totals: Sequence[Tensor]) -> Tensor:
        (best, count), (part, equal) = totals, parts
        share = (equal / count).to(upstream.dtype)
        return torch.where((part == best) | best.isnan(), upstream * share, 0)


class Truth(Sum):
    """Whether any, or all, are true."""

    def __init__(self, *, all_of_them: bool) -> None:
        self.all_of_them = all_of_them

    def start(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0].clone()]

    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        if self.all_of_them:
            totals[0].logical_and_(parts[0])
        else:
            totals[0].logical_or_(parts[0])


COMBINERS: dict[str, Combiner] = {
    "sum": Sum(),
    "logsumexp": LogSumExp(),
    "max": Extremum(largest=True),
    "min": Extremum(largest=False),
    "any": Truth(all_of_them=False),
    "all": Truth(all_of_them=True),
}
