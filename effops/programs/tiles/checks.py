"""Compare tiles with the whole, on a part of the tensors that a loop reads, forward and backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from effops.numerics.precision import in_float64
from effops.programs.rules.binding import Binding, nbytes_of, operands_of, value_of
from effops.programs.rules.draws import SEED, constant, drawn, seed_of
from effops.programs.rules.table import bindings
from effops.programs.rules.view import SIZES
from effops.programs.tiles.cuts import Along, Blocked, Cut, Stage, follow_binding, length_of
from effops.programs.tiles.loops import Loop, Tiles, device_of, set_size
from effops.programs.tiles.refusals import TilesDiffer
from effops.programs.tiles.results import part, shape_for
from effops.programs.tiles.traced import lines_of
from effops.pytorch.prediction import map_arg

LENGTHS = (7, 5, 3)  # of the part, cut into three tiles
LARGEST = 2**21  # bytes of the part's intermediates
LEAST = 4  # indices that are left of another axis
SEEDS = 4  # the largest nodes whose axes are tried
FINEST = 2.0**-36  # what is told apart of float64: its exact results have the roundings of the whole
WORSE = 4  # times the error of the whole that tiles may have


class Read(NamedTuple):
    """What a part reads: the number of an input of the loop, and its axis, first index and indices for each cut."""

    number: int
    along: tuple[tuple[Along, int, int], ...]

    def of(self, tensors: Sequence[Tensor], *own: Any) -> Tensor:
        """What is read of tensors, along the loop's own axis too."""
        found = tensors[self.number].detach()
        for one in (*self.along, own):
            found = part(found, *one)
        return found.requires_grad_(tensors[self.number].requires_grad)


class Part(NamedTuple):
    """A stage for a part of the indices of some axes, and what it reads."""

    stage: Stage
    reads: Sequence[Read]

    def sizes(self, length: int) -> list[tuple[Node, float]]:
        """The bytes of what is read and of what is computed for some indices of the cut."""
        share, placed = length / self.stage.cut.length, self.stage.cut.placed
        read = [(node, nbytes_of(node) * (1 if along is None else share)) for node, along in self.stage.inputs]
        return read + [(node, nbytes_of(node) * (share if node in placed else 1)) for node in self.stage.nodes]

    def bytes_of(self, length: int) -> float:
        """About what some indices of the cut take: the sum of all that is read and computed for them."""
        return sum(nbytes for _, nbytes in self.sizes(length))

    def shorter(self, most_bytes: float, length: int) -> Part | None:
        """A part with fewer indices of another axis, the longest of those that large nodes have; None if none can be.

        Args:
            most_bytes: what `length` indices of the cut should take
        """
        largest = [node for node, _ in sorted(self.sizes(length), key=lambda one: one[1])[-SEEDS:]]
        found = [
            (length_of(node, one), node, one)
            for node in self.stage.nodes
            if node in largest or any(operand in largest for operand in operands_of(node))
            for one in bindings(node)
            if not self._is_cut(node, one)
        ]
        for size, node, one in sorted(found, key=lambda each: -each[0]):
            try:
                other = follow_binding(self.stage.nodes, node, one) if size > LEAST else None
            except Blocked:
                continue
            if other is not None:
                return self._cut(other, max(LEAST, int(size * min(0.5, most_bytes / self.bytes_of(length)))))
        return None

    def _is_cut(self, node: Node, binding: Binding) -> bool:
        """Whether a binding is along the cut."""
        alongs = [(self.stage.along_of(node, place.operand), place.axis) for place in binding.operands]
        alongs += [(self.stage.cut.placed.get(node), binding.axis)] if binding.axis is not None else []
        return any(along is not None and along.axis == axis for along, axis in alongs)

    def _cut(self, other: Cut, length: int) -> Part:
        """The part with some indices from the middle of another cut."""
        cut, start = self.stage.cut, (other.length - length) // 2
        graph, copied = Graph(), dict[Node, Node]()
        slots, reads = dict[tuple[Node, Along | None, Along | None], Node](), dict[Node, Read]()
        numbers = {one: number for number, one in enumerate(self.stage.inputs)}

        def slot(operand: Node, along: Along | None, across: Along | None) -> Node:
            """The node that stands for what is read of an operand."""
            if (operand, along, across) not in slots:
                found = slots[operand, along, across] = graph.placeholder(f"input_{len(slots)}")
                found.meta["val"] = _shrunk(value_of(operand), across, length)
                read = self.reads[numbers[operand, along]]
                more = [] if across is None else [(across, start, length)]
                reads[found] = Read(read.number, (*read.along, *more))
            return slots[operand, along, across]

        own = Cut([], cut.length)
        for node in self.stage.nodes:
            alongs = list[Along | None]()

            def taken(operand: Node, node: Node = node, alongs: list[Along | None] = alongs) -> Node:
                number = len(alongs)
                alongs.append(None if operand in copied else self.stage.along_of(node, number))
                return copied.get(operand) or slot(operand, alongs[-1], other.sliced.get((node, number)))

            args, kwargs = map_arg((node.args, node.kwargs), taken)
            made = copied[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            made.meta = {**node.meta, "val": _shrunk(value_of(node), other.placed.get(node), length)}
            if node in other.placed and node.target in SIZES:
                set_size(made, node, other.placed[node], length)
            seed = seed_of(node)
            if seed is not None:
                made.meta[SEED] = slot(seed, None, None), node.meta[SEED][1]
            own.sliced.update({(made, number): along for number, along in enumerate(alongs) if along is not None})
            if node in cut.placed:
                own.placed[made] = cut.placed[node]
            if node in cut.combined:
                own.combined[made] = cut.combined[node]
            if node in cut.carried:
                own.carried.add(made)
        own.region = [*copied.values()]
        stage = Stage(own, [copied[node] for node in self.stage.outputs])
        return Part(stage, [reads[node] for node, _ in stage.inputs])


def _shrunk(value: Any, along: Along | None, length: int) -> Any:
    """A value, or several, like others, with fewer indices along an axis."""
    if along is None:
        return value
    if isinstance(value, (tuple, list)):  # those of another shape do not have the axis
        return [_shrunk(one, along, length) if one.shape == value[0].shape else one for one in value]
    return torch.empty(shape_for(value, along, length), dtype=value.dtype, device="meta")


class Check:
    """Compares a loop with the whole on a few indices from the middle of its cut, and of other axes if those are long.

    Attributes:
        loop: the loop
        most_bytes: about what the part should take at most
    """

    def __init__(self, loop: Loop, most_bytes: int = LARGEST) -> None:
        self.loop, self.most_bytes = loop, most_bytes

    @functools.cached_property
    def part(self) -> Part:
        """What is compared: the longest part of other axes that takes so little, or the shortest that can be cut."""
        stage, least = self.loop.stage, min(LENGTHS[-1], self.loop.whole)
        found = Part(stage, [Read(number, ()) for number in range(len(stage.inputs))])
        while found.bytes_of(least) > self.most_bytes:
            shorter = found.shorter(self.most_bytes, least)
            if shorter is None:
                break
            found = shorter
        return found

    @property
    def length(self) -> int:
        """How many indices of the loop's own cut are compared."""
        length = next((one for one in LENGTHS if self.part.bytes_of(one) <= self.most_bytes), LENGTHS[-1])
        return min(length, self.loop.whole)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Raise if tiles give another result or gradients than the whole.

        Errors are those against float64. What it cannot see: offsets that overflow, ties and -inf that the part does
        not hold, and sums in 16 bits over many tiles.
        """
        if self.length < 2:
            return
        found, *others, expected = self.runs(tensors)
        if len({len(found), len(expected), *map(len, others)}) > 1:
            _raise(self.loop, "this loop", f"{len(found)} results and gradients", f"{len(expected)}")
        for number, (own, right, *one_piece) in enumerate(zip(found, expected, *others)):
            _compare(self.loop, number, own, one_piece, right)

    def runs(self, tensors: Sequence[Tensor]) -> list[list[Tensor | None]]:
        """The results and gradients of the part: in tiles, as a whole, so of what roundings change, and in float64."""
        start = (self.loop.whole - self.length) // 2
        some = [
            read.of(tensors, along, start, self.length)
            for read, (_, along) in zip(self.part.reads, self.part.stage.inputs)
        ]
        tiles, rounded = self._in_tiles_of(-(-self.length // 3)), [_with_roundings(one) for one in some]
        whole, exact = self._whole(_without_chance), self._whole(_in_float64_without_chance)
        runs = (tiles, some), (whole, some), (whole, rounded), (exact, [in_float64(one) for one in some])
        return [_results(one, given, with_roundings=given is rounded) for one, given in runs]

    def exact_run(self, *, backward: bool) -> tuple[Callable[..., Any], list[Tensor]]:
        """The whole in float64, of which the check takes the most, and what it is given, without memory."""
        values = [
            torch.empty(shape_for(node.meta["val"], along, self.length), dtype=node.meta["val"].dtype, device="meta")
            for node, along in self.part.stage.inputs
        ]
        exact = self._whole(_in_float64_without_chance)
        given = [in_float64(one).requires_grad_(backward and one.is_floating_point()) for one in values]
        given += exact.first_carried("meta")
        return exact.body(self.length, given), given

    def taken_bytes(self, exact_bytes: int, *, backward: bool) -> int:
        """The bytes of a check whose run in float64 takes `exact_bytes`, with its results and gradients."""
        sizes, count = self.part.sizes(self.length), len(self.part.stage.inputs)
        given, computed = [nbytes for _, nbytes in sizes[:count]], dict(sizes[count:])
        found = [computed[node] for node in self.part.stage.outputs] + given * backward
        # Beside the run in float64 there are its arguments, those that are changed, and what the other runs found; and
        # later what all runs found, a difference in float64, and which elements are finite.
        beside, compared = 3 * sum(given) + 3 * sum(found), 5 * sum(found) + 4 * max(found, default=0)
        return int(max(exact_bytes + beside, compared))

    def _in_tiles_of(self, tile: int) -> Loop:
        """The loop over the part. Inductor compiles none: it knows no rule, and takes seconds."""
        loop = self.loop
        own = Loop(self.part.stage, differentiates=loop.differentiates)
        own.whole, own.length, own.backward_length = self.length, tile, tile
        own.body_of, own.kept_tiles = _without_chance, min(loop.kept_tiles, 1)  # of both kinds
        own.nested = None if loop.nested is None else lambda graph, parts: graph.forward
        return own

    def _whole(self, body_of: Callable[[GraphModule], GraphModule]) -> Loop:
        """The part in one piece: autograd runs it, and none of what runs tiles."""
        own = Loop(self.part.stage)
        own.whole = own.length = own.backward_length = self.length
        own.combiners, own.body_of = [None] * len(own.combiners), body_of
        return own


def _results(loop: Loop, tensors: Sequence[Tensor], *, with_roundings: bool) -> list[Tensor | None]:
    """The results, and the gradients for upstream gradients that are the same for all loops, but for roundings.

    Where the whole is a single tile, it runs without the loop.
    """
    is_whole = loop.length == loop.whole
    if is_whole:
        given = [*tensors, *loop.first_carried(device_of(tensors))]
        results = loop.body(loop.whole, given)(*given)[: len(loop.stage.outputs)]
    else:
        results = Tiles.apply(loop, *tensors)
    leaves = [one for one in tensors if one.requires_grad]
    outputs = [one for one in results if one.requires_grad]
    if not outputs or not leaves:
        return [*results]
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one) for one in outputs]
    if with_roundings:
        upstream = [_with_roundings(one) for one in upstream]
    with torch.no_grad():
        return [*results, *torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)]


def _compare(
    loop: Loop, number: int, own: Tensor | None, one_piece: Sequence[Tensor | None], right: Tensor | None
) -> None:
    """Compare a result of tiles with those of the whole: one, and one for arguments changed by roundings."""
    other, rounded = one_piece
    if own is None or other is None or rounded is None or right is None:
        if own is not other:
            _raise(loop, _name(loop, number), *("none" if one is None else "one" for one in (own, other)))
        return
    if own.is_complex():
        own, other, rounded, right = (torch.view_as_real(one) for one in (own, other, rounded, right))
    if not own.is_floating_point():
        known = (other == rounded) & (other == right)  # what roundings do not change, as they do a comparison
        if not torch.equal(own[known], other[known]):
            _raise(loop, _name(loop, number), "other values", "those of float64")
        return
    right = right.to(torch.float64)
    patterns = [one.isfinite() for one in (own, other, right)]
    same = torch.equal(patterns[0], patterns[1]) or torch.equal(patterns[0], patterns[2])
    unknown = ~(patterns[0] & patterns[1] & patterns[2] & rounded.isfinite())
    error, *of_whole = (_largest(torch.sub(one, right), unknown) for one in (own, other, rounded))
    rounding = max(FINEST, torch.finfo(own.dtype).eps) * math.sqrt(loop.whole) * _largest(right.clone(), unknown)
    if not same or not error <= WORSE * (max(of_whole) + rounding):
        _raise(loop, _name(loop, number), f"an error of {error:.3g}", f"one of {max(of_whole):.3g}")


def _largest(values: Tensor, unknown: Tensor) -> float:
    """The largest absolute value of those that are known. The values are overwritten."""
    return values.masked_fill_(unknown, 0).abs_().amax().item() if values.numel() else 0.0


def _name(loop: Loop, number: int) -> str:
    """What one of the results is, of which gradients are the last."""
    outputs = loop.stage.outputs
    return f"the result of {outputs[number].target}" if number < len(outputs) else "a gradient"


def _raise(loop: Loop, what: str, tiles: str, whole: str) -> None:
    line, _ = lines_of(loop.stage.outputs[0])
    raise TilesDiffer(
        f"tiled: on a part of the arguments, tiles give {tiles} for {what}, and the whole gives {whole}"
        + (f", in {line}" if line else "")
        + "; please report the function, and call it without tiled"
    )


def _with_roundings(tensor: Tensor) -> Tensor:
    """The tensor with each value changed by about a rounding, which shows how much roundings matter."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.linspace(-1, 1, max(1, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
    changed = tensor.detach() * (1 + torch.finfo(tensor.dtype).eps * noise[: tensor.numel()].reshape(tensor.shape))
    return changed.requires_grad_(tensor.requires_grad)


def _without_chance(graph: GraphModule) -> GraphModule:
    """The graph with a constant for all random numbers, which a tile draws otherwise than the whole."""
    draws = [node for node in graph.graph.nodes if node.target is drawn]
    for node in draws:
        node.target = constant
    if draws:  # writing its code takes a third of what a check does
        graph.recompile()
    return graph


def _in_float64_without_chance(graph: GraphModule) -> GraphModule:
    """The graph with float64 for all floating-point dtypes among its arguments, and a constant for what is drawn."""

    def widened(argument: object) -> object:
        if not isinstance(argument, torch.dtype):
            return argument
        return torch.float64 if argument.is_floating_point else torch.complex128 if argument.is_complex else argument

    graph = _without_chance(graph)
    with_dtypes = [node for node in graph.graph.nodes if any(map(_is_dtype, (*node.args, *node.kwargs.values())))]
    for node in with_dtypes:
        node.args = tuple(map(widened, node.args))
        node.kwargs = {name: widened(one) for name, one in node.kwargs.items()}
    if with_dtypes:
        graph.recompile()
    return graph


def _is_dtype(argument: object) -> bool:
    return isinstance(argument, torch.dtype)
