"""How the parts of a reduction that tiles compute are put together, forward and backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from effops.numerics.precision import arithmetic_dtype
from effops.programs.rules.binding import argument, is_operator, operands_of
from effops.programs.rules.reduction import log_sum_exp
from effops.pytorch.operators import aten
from effops.pytorch.prediction import schema_of


class Combiner:
    """Puts the parts of one reduction together, here by adding them up.

    A tile computes `parts`: the reduction of the tile, and what else is needed to combine it. The totals begin as
    copies of the first tile's parts.
    """

    count = 1  # of the parts

    def __init__(self, node: Node) -> None:
        """`node` is the reduction, or one of its several results."""
        self.node = node

    def parts(self, graph: Graph, made: Node) -> list[Node]:
        """Nodes of a tile's graph. `made` is the reduction in it, of which sums in 16 bits are kept in float32."""
        value, operand = self.node.meta["val"], operands_of(self.node)[0].meta["val"]
        names = {one.name for one in schema_of(made.target).arguments} if is_operator(made) else ()
        if (
            "dtype" in names
            and value.dtype == operand.dtype != arithmetic_dtype(value.dtype)
            and value.is_floating_point()
        ):
            made.update_kwarg("dtype", arithmetic_dtype(value.dtype))
        return [made]

    def numbered(self, parts: list[Tensor], first: int) -> list[Tensor]:
        """The parts with indices of the whole axis, for a tile that begins at index `first` of it."""
        return parts

    def start(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The totals after the first tile, in memory of their own."""
        (part,) = parts
        wide = arithmetic_dtype(part.dtype) if part.is_floating_point() else part.dtype
        return [part.to(wide, copy=True)]

    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        """Change the totals by the parts of another tile."""
        totals[0].add_(parts[0])

    def result(self, totals: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return totals[0].to(dtype)

    def kept(self, totals: Sequence[Tensor]) -> Sequence[Tensor]:
        """What backward needs of the totals."""
        return ()

    def pulled_back(self, upstream: Tensor, parts: Sequence[Tensor], kept: Sequence[Tensor]) -> Tensor:
        """The gradient of a tile's reduction, from that of the result."""
        return upstream.to(parts[0].dtype)


class LogSumExp(Combiner):
    """The logarithm of a sum of exponentials.

    Its totals are the largest part, and the sum of exponentials by that of the largest: a logarithm of many tiles would
    be rounded by each.
    """

    def parts(self, graph: Graph, made: Node) -> list[Node]:
        if self.node.meta["val"].dtype == operands_of(self.node)[0].meta["val"].dtype:
            made.target = log_sum_exp
        return [made]

    def start(self, parts: Sequence[Tensor]) -> list[Tensor]:
        (largest,) = super().start(parts)
        return [largest, torch.exp(largest - _finite(largest))]

    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        (largest, total), part = totals, parts[0].to(totals[0].dtype)
        new = torch.maximum(largest, part)
        unit = _finite(new)
        total.mul_(largest.sub_(unit).exp_()).add_(torch.exp(part - unit))
        largest.copy_(new)

    def result(self, totals: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return _log_of(totals).to(dtype)

    def kept(self, totals: Sequence[Tensor]) -> Sequence[Tensor]:
        return [_log_of(totals)]

    def pulled_back(self, upstream: Tensor, parts: Sequence[Tensor], kept: Sequence[Tensor]) -> Tensor:
        # The weight of a tile among all. In a row of -inf alone it is NaN, as PyTorch's gradient is.
        weight = torch.exp(parts[0].detach().to(kept[0].dtype) - kept[0])
        weight.masked_fill_((parts[0] == torch.inf) & (kept[0] == torch.inf), 1)
        return (upstream * weight).to(parts[0].dtype)


def _finite(tensor: Tensor) -> Tensor:
    """0 for what is infinite, by which nothing can be divided."""
    return tensor.masked_fill(tensor.isinf(), 0)


def _log_of(totals: Sequence[Tensor]) -> Tensor:
    largest, total = totals
    return total.log() + _finite(largest)


class Norm(Combiner):
    """The Euclidean norm."""

    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        (total,), part = totals, parts[0].to(totals[0].dtype)
        unknown = total.isnan() | part.isnan()  # beside inf, hypot forgets it
        total.hypot_(part).masked_fill_(unknown, torch.nan)

    def kept(self, totals: Sequence[Tensor]) -> Sequence[Tensor]:
        return totals

    def pulled_back(self, upstream: Tensor, parts: Sequence[Tensor], kept: Sequence[Tensor]) -> Tensor:
        (total,) = kept
        share = (parts[0].detach().to(total.dtype) / total).masked_fill_(total == 0, 0)
        share.masked_fill_((parts[0] == torch.inf) & (total == torch.inf), 1)
        return (upstream * share).to(parts[0].dtype)


class Product(Combiner):
    """The product.

    Its totals are three: the product of all tiles, that of the tiles whose product is not 0, and how many others there
    are. The last two tell the product of all tiles but one, which the gradient of that one needs.
    """

    def start(self, parts: Sequence[Tensor]) -> list[Tensor]:
        (total,) = super().start(parts)
        is_zero = total == 0
        return [total, total.masked_fill(is_zero, 1), is_zero.to(torch.int64)]

    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        product, without_zeros, zeros = self.start(parts)
        totals[0].mul_(product)
        totals[1].mul_(without_zeros)
        totals[2].add_(zeros)

    def kept(self, totals: Sequence[Tensor]) -> Sequence[Tensor]:
        return totals[1:]

    def pulled_back(self, upstream: Tensor, parts: Sequence[Tensor], kept: Sequence[Tensor]) -> Tensor:
        (product, zeros), part = kept, parts[0].detach()
        is_zero = part == 0
        others = torch.where(is_zero, product, product / part).masked_fill_(zeros > is_zero, 0)
        return (upstream * others.conj()).to(part.dtype)


class Extremum(Combiner):
    """The maximum or minimum, and how many elements are equal to it: they share its gradient."""

    count = 2

    def parts(self, graph: Graph, made: Node) -> list[Node]:
        (operand, *_) = made.args
        dim, keepdim = argument(self.node, "dim"), argument(self.node, "keepdim")
        rank, whole = operands_of(self.node)[0].meta["val"].dim(), made
        for axis in [] if keepdim else sorted(axis % rank for axis in dim):
            whole = graph.call_function(aten.unsqueeze.default, (whole, axis))
        equal = graph.call_function(aten.eq.Tensor, (operand, whole))
        # Sums of bools take half the time in int32.
        return [made, graph.call_function(aten.sum.dim_IntList, (equal, dim, keepdim), {"dtype": torch.int32})]

    def start(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.clone() for part in parts]

    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        (best, count), (part, equal) = totals, parts
        better = _is_better(part, best, is_largest=self.node.target is aten.amax.default)
        same = part == best
        count.add_(torch.where(same, equal, 0))
        torch.where(better, equal, count, out=count)
        torch.where(better, part, best, out=best)

    def result(self, totals: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return totals[0]

    def kept(self, totals: Sequence[Tensor]) -> Sequence[Tensor]:
        return totals

    def pulled_back(self, upstream: Tensor, parts: Sequence[Tensor], kept: Sequence[Tensor]) -> Tensor:
        (best, count), (part, equal) = kept, parts
        share = (equal / count).to(upstream.dtype)
        shared = torch.where(part == best, upstream * share, 0)
        return shared.masked_fill_(best.isnan(), torch.nan)


class FirstExtremum(Combiner):
    """The first element that is the maximum or minimum, or NaN: its value or its number, which takes the other too."""

    count = 2

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        of, item = node.args
        self.is_largest, self.item = of.target is aten.max.dim, int(item)  # type: ignore[union-attr, arg-type]

    def parts(self, graph: Graph, made: Node) -> list[Node]:
        return [made, graph.call_function(operator.getitem, (made.args[0], 1 - self.item))]

    def numbered(self, parts: list[Tensor], first: int) -> list[Tensor]:
        number = 1 - self.item
        parts[number] = parts[number] + first
        return parts

    def start(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.clone() for part in parts]

    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        better = _is_better(parts[self.item], totals[self.item], is_largest=self.is_largest)
        for total, part in zip(totals, parts):
            torch.where(better, part, total, out=total)

    def kept(self, totals: Sequence[Tensor]) -> Sequence[Tensor]:
        return totals[1:] if self.item == 0 else ()

    def pulled_back(self, upstream: Tensor, parts: Sequence[Tensor], kept: Sequence[Tensor]) -> Tensor:
        return torch.where(parts[1] == kept[0], upstream, 0)


def _is_better(part: Tensor, best: Tensor, *, is_largest: bool) -> Tensor:
    """Where the extremum of a tile takes the place of that of the tiles before; the first NaN does for good."""
    better = (part > best) if is_largest else (part < best)
    return better | (part.isnan() & ~best.isnan())


class AnyTrue(Combiner):
    def start(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0].clone()]

    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        totals[0].logical_or_(parts[0])


class AllTrue(AnyTrue):
    def add(self, totals: list[Tensor], parts: Sequence[Tensor]) -> None:
        totals[0].logical_and_(parts[0])


COMBINERS: dict[str, Callable[[Node], Combiner]] = {
    "sum": Combiner,
    "logsumexp": LogSumExp,
    "max": Extremum,
    "min": Extremum,
    "first max": FirstExtremum,
    "first min": FirstExtremum,
    "norm": Norm,
    "product": Product,
    "any": AnyTrue,
    "all": AllTrue,
}
