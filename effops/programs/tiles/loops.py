"""A loop over the tiles of a stage, forward and backward. Backward computes again the tiles that are not kept."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from effops.dispatch.native import without_hooks
from effops.numerics.precision import CPU, without_autocast
from effops.numerics.values import observed
from effops.prediction.allocations import fake_mode
from effops.programs.rules.binding import argument, is_without_gradients, nbytes_of, operands_of
from effops.programs.rules.draws import new_seed, seed_of, seeded
from effops.programs.rules.product import contracted
from effops.programs.rules.reduction import LOG_SUMS, log_sum_exp
from effops.programs.rules.scan import first_carried, in_a_tile
from effops.programs.rules.view import SIZES
from effops.programs.tiles.combiners import COMBINERS, Combiner
from effops.programs.tiles.cuts import Along, Stage
from effops.programs.tiles.gradients import (
    PRODUCTS,
    UNREAD,
    GradientSum,
    factors_of,
    is_plain_product,
    known_log_sum,
    product,
    unread,
)
from effops.programs.tiles.results import Results, part, shape_for, stretch_of
from effops.pytorch.calls import FakeTensor, is_legacy_batchedtensor
from effops.pytorch.capture import is_functorch_wrapped_tensor
from effops.pytorch.operators import aten
from effops.pytorch.prediction import _disable_current_modes, map_arg, schema_of
from effops.pytorch.tiles import lookup_backend

Body = Callable[..., Sequence[Tensor]]
Wanted = Literal["results", "gradients", "both"]  # of a tile
RESULTS: Wanted = "results"
GRADIENTS: Wanted = "gradients"
BOTH: Wanted = "both"


class Loop:
    """A stage that runs in tiles.

    Attributes:
        whole: how many indices of the cut there are
        length: how many of them a tile has forward
        backward_length: the same in backward, which holds what autograd saves of a tile
        compiles: whether Inductor compiles a tile
        differentiates: whether forward computes the gradients too, which the one number that has them scales
        kept_tiles: of how many tiles, the last ones, forward keeps what their gradients read
    """

    def __init__(self, stage: Stage, *, compiles: bool = False, differentiates: bool = False) -> None:
        self.stage, self.compiles, self.differentiates = stage, compiles, differentiates
        self.whole = self.length = self.backward_length = stage.cut.length
        self.combiners: list[Combiner | None] = [
            COMBINERS[stage.cut.combined[node]](node) if node in stage.cut.combined else None for node in stage.outputs
        ]
        self.carrying = [node for node in stage.nodes if node in stage.cut.carried]
        self.drawing = [node for node in stage.nodes if seed_of(node) is not None]
        self.kept_tiles = 0
        self.nested: Callable[[GraphModule, Sequence[Tensor]], Body] | None = None
        self.body_of: Callable[[GraphModule], GraphModule] = lambda graph: graph
        self.bodies: dict[tuple[int, bool, bool, Wanted], Body] = {}
        self._differentiable: dict[tuple[bool, ...], tuple[bool, ...]] = {}

    def run_like(self, other: Loop) -> None:
        """Take the lengths of a loop of the same pattern, and share what it runs."""
        self.length, self.backward_length, self.nested = other.length, other.backward_length, other.nested
        self.bodies, self._differentiable = other.bodies, other._differentiable

    @property
    def keeps_lengths(self) -> bool:
        """Whether tiles must be the same forward and backward."""
        return bool(self.carrying or self.drawing or self.differentiates)

    def first_carried(self, device: Any) -> list[Tensor]:
        """What the first tile is given of one before it, for all nodes that go on from it."""
        return [one for node in self.carrying for one in first_carried(node, device)]

    @property
    def is_lean(self) -> bool:
        """Whether backward runs a graph of its own, without what gradients do not read."""
        return self.nested is None

    @property
    def summed(self) -> list[int]:
        """The inputs that all tiles read whole, to whose gradient products add theirs where it is summed up."""
        return self._whole_factors if self.is_lean and not self.compiles else []

    @property
    def known(self) -> dict[Node, int]:
        """The results that backward is given, and their places: the derivatives of their operators read them."""
        return self._log_sums if self.is_lean else {}

    @functools.cached_property
    def _log_sums(self) -> dict[Node, int]:
        dtypes = torch.float32, torch.float64
        found = {node: place for place, node in enumerate(self.stage.outputs) if node.target in LOG_SUMS}
        return {node: place for node, place in found.items() if node.meta["val"].dtype in dtypes}

    @functools.cached_property
    def _unread(self) -> dict[Wanted, set[Node]]:
        """The nodes whose values are not needed, for gradients alone and with all results."""
        outputs = zip(self.stage.outputs, self.combiners)
        read = {node for node, combiner in outputs if combiner is not None and type(combiner) is not Combiner}
        of_gradients = unread(self.stage.nodes, read - self._log_sums.keys())
        return {GRADIENTS: of_gradients, BOTH: unread(self.stage.nodes, self.stage.outputs)}

    @functools.cached_property
    def _whole_factors(self) -> list[int]:
        products = [node for node in self.stage.nodes if is_plain_product(node)]
        read = {(one, self.stage.along_of(node, number)) for node in products for number, one in factors_of(node)}
        return [
            place
            for place, (node, along) in enumerate(self.stage.inputs)
            if along is None and (node, None) in read and node.meta["val"].dtype in (torch.float32, torch.float64)
        ]

    @property
    def read_whole_bytes(self) -> int:
        """The bytes of the inputs that each tile reads whole."""
        return sum(nbytes_of(node) for node, along in self.stage.inputs if along is None)

    @property
    def product_bytes(self) -> int:
        """The bytes of products and of what they read, for all indices of the cut: Inductor fuses neither."""
        products = [node for node in self.stage.nodes if node.target in PRODUCTS or node.target is contracted]
        made = {one for node in products for one in (node, *operands_of(node)) if one in self.stage.cut.placed}
        return sum(map(nbytes_of, made))

    @functools.cached_property
    def pattern(self) -> str:
        """A text that loops share which compute the same of tensors that are laid out alike."""
        values = [(node.meta["val"], along) for node, along in self.stage.inputs]
        layouts = [(tuple(one.shape), one.stride(), one.dtype, along) for one, along in values]
        return f"{self.whole} {self.graph(1).code} {layouts}"

    def differentiable(self, wanted: Sequence[bool]) -> tuple[bool, ...]:
        """Which results require gradients, if these inputs do."""
        key = tuple(wanted)
        if key not in self._differentiable:
            with (
                _disable_current_modes(),
                torch.inference_mode(False),
                fake_mode(),
                torch.enable_grad(),
                without_hooks(),
            ):
                parts = []
                for (node, along), is_wanted in zip(self.stage.inputs, key):
                    shape = shape_for(node.meta["val"], along, 1)
                    parts.append(torch.empty(shape, dtype=node.meta["val"].dtype).requires_grad_(is_wanted))
                found = iter(self.graph(1).forward(*parts, *self.first_carried("cpu")))
                flags = []
                for combiner in self.combiners:
                    first, *_ = [next(found) for _ in range(1 if combiner is None else combiner.count)]
                    flags.append(first.requires_grad)
            self._differentiable[key] = tuple(flags)
        return self._differentiable[key]

    def tiles(self, length: int, end: int | None = None) -> Iterator[tuple[int, int]]:
        """The first index and the number of indices of each tile up to an end; all but the last have `length`."""
        end = self.whole if end is None else end
        for start in range(0, end, length):
            yield start, min(length, end - start)

    def forward(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Results, list[Tensor], Graphs | None]:
        """The results, what each tile leaves to the next one, and the graphs of the tiles that are kept, if any are."""
        results = Results(self.stage, self.combiners, self.whole)
        carried, left = self.first_carried(device_of(tensors)), list[Tensor]()
        last = [*self.tiles(self.backward_length)][-self.kept_tiles :] if self.kept_tiles and any(wanted) else []
        end = last[0][0] if last else self.whole
        for start, length in _seen(self.tiles(self.length, end), tensors):
            parts = [*self._parts(tensors, start, length), *carried]
            found = self.body(length, parts)(*parts)
            carried = self._leave(results.add(found, start, length), left, start // self.length)
            del found, parts
        graphs = Graphs([GradientSum(one) for one in tensors], {}) if last else None
        for start, length in last:
            assert graphs is not None
            parts = self._leaves(tensors, start, length, wanted)
            found = self._with_graph(BOTH, length, parts, graphs.sums)
            graphs.of_tiles[start] = parts, found
            results.add([own.detach() for own in found], start, length)
        return results, left, graphs

    def forward_with_gradients(
        self, tensors: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[Results, list[Tensor | None]]:
        """The results, and the gradients of the tensors that are wanted if that of the result is 1."""
        results, end = Results(self.stage, self.combiners, self.whole), self.differentiable(wanted).index(True)
        value = self.stage.outputs[end].meta["val"]
        one = torch.ones(value.shape, dtype=value.dtype, device=device_of(tensors))
        upstream = [one if place == end else None for place in range(len(self.combiners))]
        return results, self.backward(tensors, [() for _ in upstream], [], upstream, wanted, results)

    def _parts(self, tensors: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
        """What a tile reads: parts of tensors, and a seed of its own."""
        return [
            one + start if node.target is new_seed else part(one, along, start, length)
            for one, (node, along) in zip(tensors, self.stage.inputs)
        ]

    def _leaves(self, tensors: Sequence[Tensor], start: int, length: int, wanted: Sequence[bool]) -> list[Tensor]:
        """What a tile reads, as leaves of a graph of its own."""
        parts = zip(self._parts(tensors, start, length), wanted)
        return [one.detach().requires_grad_(is_wanted) for one, is_wanted in parts]

    def _with_graph(
        self,
        wanted: Wanted,
        length: int,
        parts: Sequence[Tensor],
        sums: Sequence[GradientSum],
        known: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """What a tile finds, with a graph of what gradients read."""
        given = [*parts, *[sums[place] for place in self.summed], *known]
        with torch.enable_grad():
            return list(self.body(length, given, wanted if self.is_lean else RESULTS)(*given))

    def _leave(self, carried: list[Tensor], left: list[Tensor], tile: int) -> list[Tensor]:
        """Put what a tile carries to the next one into the memory for that of all tiles."""
        if not left:
            count = -(-self.whole // self.length)
            left += [one.new_empty((count, *one.shape)) for one in carried]
        return [of_all[tile].copy_(one) for of_all, one in zip(left, carried)]

    def backward(
        self,
        tensors: Sequence[Tensor],
        kept: Sequence[Sequence[Tensor]],
        left: Sequence[Tensor],
        upstream: Sequence[Tensor | None],
        wanted: Sequence[bool],
        results: Results | None = None,
        graphs: Graphs | None = None,
    ) -> list[Tensor | None]:
        """The gradients of the tensors that are wanted.

        Results are put into `results` where they are not known. Each of `graphs` is taken out when it is used.
        """
        inputs = self.stage.inputs
        sums, of_tiles = graphs or Graphs([GradientSum(one) for one in tensors], {})
        first = self.first_carried(device_of(tensors))
        of_carried: list[Tensor | None] = [None for _ in first]  # gradients, from the tile behind
        tiles = [*self.tiles(self.backward_length)]
        split = len(tiles) - len(of_tiles)
        tiles = [*tiles[split:], *_seen(iter(tiles[:split]), tensors)]
        for start, length in reversed(tiles) if self.carrying else tiles:
            known: dict[Node, int] = {}
            if start in of_tiles:
                parts, found = of_tiles.pop(start)
            elif results is not None:
                parts = self._leaves(tensors, start, length, wanted)
                found = self._with_graph(BOTH, length, parts, sums)
                results.add([own.detach() for own in found], start, length)
            else:
                carried = [one[start // self.length - 1] for one in left] if start else first
                parts = self._leaves(tensors, start, length, wanted)
                parts += [one.detach().requires_grad_(one.is_floating_point()) for one in carried]
                known = self.known
                found = self._with_graph(GRADIENTS, length, parts, sums, self._known_parts(kept, start, length))
            outputs, gradients = self._upstream_of_tile(found, kept, upstream, start, length, known)
            for own, pulled_back in zip(found[len(found) - len(first) :], of_carried):
                if pulled_back is not None and own.requires_grad:
                    outputs.append(own)
                    gradients.append(pulled_back)
            of_carried = [None for _ in first]
            leaves = [place for place, one in enumerate(parts) if one.requires_grad]
            if outputs and leaves:
                pulled = torch.autograd.grad(outputs, [parts[place] for place in leaves], gradients, allow_unused=True)
                for place, gradient in zip(leaves, pulled):
                    if place >= len(tensors):
                        of_carried[place - len(tensors)] = gradient
                    elif gradient is not None:
                        part(sums[place].begun(), inputs[place][1], start, length).add_(gradient)
                del pulled, gradient
            del parts, found, outputs, gradients
        return [one.result() for one in sums]

    def _known_parts(self, kept: Sequence[Sequence[Tensor]], start: int, length: int) -> list[Tensor]:
        """The values of `known` for a tile, or those of all tiles where they are combined."""
        placed = self.stage.cut.placed
        return [part(kept[place][0], placed.get(node), start, length) for node, place in self.known.items()]

    def _upstream_of_tile(
        self,
        found: Sequence[Tensor],
        kept: Sequence[Sequence[Tensor]],
        upstream: Sequence[Tensor | None],
        start: int,
        length: int,
        known: Collection[Node],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The results of a tile through which gradients flow, and their gradients."""
        outputs, gradients, at = [], [], 0
        for place, (node, combiner) in enumerate(zip(self.stage.outputs, self.combiners)):
            count = 1 if combiner is None else combiner.count
            own, gradient = [*found[at : at + count]], upstream[place]
            at += count
            if gradient is None or not own[0].requires_grad:
                continue
            if combiner is None:
                gradient = part(gradient, self.stage.cut.placed[node], start, length)
            elif node not in known:
                own = combiner.numbered(own, start * stretch_of(self.stage, node))
                gradient = combiner.pulled_back(gradient, own, kept[place])
            outputs.append(own[0])
            gradients.append(gradient)
        return outputs, gradients

    def body(self, length: int, given: Sequence[Any], wanted: Wanted = RESULTS) -> Body:
        """What a tile of this length runs on what it is given."""
        parts = [one for one in given if isinstance(one, Tensor)]
        is_fake = any(isinstance(one, FakeTensor) for one in parts)
        compiles = self.compiles and self.nested is None and not self.drawing and not is_fake
        # What a tile reads whole may require gradients in the forward pass, too.
        requires_grad = torch.is_grad_enabled() and any(one.requires_grad for one in parts)
        key = length, requires_grad, compiles, wanted
        if key not in self.bodies:
            graph = self.body_of(self.graph(length, wanted))  # run without hooks that all modules have
            if self.nested is not None:
                self.bodies[key] = self.nested(graph, parts)
            else:
                self.bodies[key] = lookup_backend("inductor")(graph, list(parts)) if compiles else graph.forward
        return self.bodies[key]

    def graph(self, length: int, wanted: Wanted = RESULTS) -> GraphModule:
        """The nodes of the stage for a tile. Sizes among arguments become those of the tile.

        For gradients it takes the sums of `summed` too, and for gradients alone the values of `known`, and computes
        nothing else.
        """
        stage, graph = self.stage, Graph()
        slots = {one: graph.placeholder(f"input_{number}") for number, one in enumerate(stage.inputs)}
        given = {
            node: [
                graph.placeholder(f"carried_{number}_{place}") for place, _ in enumerate(first_carried(node, "meta"))
            ]
            for number, node in enumerate(self.carrying)
        }
        summed, known, ignored = dict[Node, Node](), dict[Node, Node](), set[Node]()
        if wanted != RESULTS:
            summed = {slots[stage.inputs[place]]: graph.placeholder(f"sum_{place}") for place in self.summed}
            ignored = self._unread[wanted]
        if wanted == GRADIENTS:
            known = {node: graph.placeholder(f"known_{place}") for node, place in self.known.items()}
        left: list[Node] = []  # to the next tile
        copied: dict[Node, Node] = {}
        for node in stage.nodes:
            numbers = iter(range(len(operands_of(node))))

            def taken(operand: Node, node: Node = node, numbers: Iterator[int] = numbers) -> Node:
                number = next(numbers)
                return copied[operand] if operand in copied else slots[operand, stage.along_of(node, number)]

            args, kwargs = map_arg((node.args, node.kwargs), taken)
            if node in given:
                operands: Any = args
                made, *more = in_a_tile(graph, node, operands[0], given[node])
                left += [_detached(graph, node, one) for one in more]
            elif node in known:
                is_part = node.target is log_sum_exp
                made = graph.call_function(known_log_sum, (args[0], known[node], *args[1:]), {"is_part": is_part})
            elif wanted != RESULTS and is_plain_product(node) and node.meta["val"].is_floating_point():
                made = product(graph, args, summed, is_read=node not in ignored)
            elif node in ignored and node.target in UNREAD:
                made = graph.call_function(UNREAD[node.target], args, kwargs)
            else:
                made = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            made.meta["custom"] = node.meta.get("custom", {})
            if node in stage.cut.placed and node.target in SIZES:
                set_size(made, node, stage.cut.placed[node], length)
            seed = seed_of(node)
            if seed is not None:
                seeded(node, made, slots[seed, None])
            copied[node] = made if node in stage.cut.combined else _detached(graph, node, made)
        outputs = []
        for node, combiner in zip(stage.outputs, self.combiners):
            if combiner is None or node in known:
                outputs.append(copied[node])
            else:
                first, *others = combiner.parts(graph, copied[node])
                outputs += [_detached(graph, node, first), *others]
        graph.output((*outputs, *left))
        return GraphModule({}, graph)


class Graphs(NamedTuple):
    """The graphs of some tiles, by their first index: what each reads and finds; and the sums of their gradients."""

    sums: list[GradientSum]
    of_tiles: dict[int, tuple[list[Tensor], list[Tensor]]]


class Tiles(torch.autograd.Function):
    """A loop, as autograd sees it: its inputs are saved, and totals of what is combined."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, *tensors: Tensor) -> tuple[Tensor, ...]:
        wanted, left = ctx.needs_input_grad[1:], list[Tensor]()
        differentiable = loop.differentiable(wanted)
        ctx.gradients, ctx.graphs = None, None
        with without_hooks():
            if loop.differentiates and any(differentiable):
                found, ctx.gradients = loop.forward_with_gradients(tensors, wanted)
            else:
                found, left, ctx.graphs = loop.forward(tensors, wanted)
        results = found.all()
        kept: list[Sequence[Tensor]] = [
            () if combiner is None else combiner.kept(own) for own, combiner in zip(found.totals, loop.combiners)
        ]
        for place in loop.known.values():
            if loop.combiners[place] is None:
                kept[place] = [results[place]]
        ctx.loop, ctx.counts = loop, [len(one) for one in kept]
        ctx.mark_non_differentiable(*(one for one, is_one in zip(results, differentiable) if not is_one))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *(one for own in kept for one in own), *left)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "tiled: gradients must not be differentiated again; got create_graph=True; call the function without "
                "tiled for that"
            )
        given = [one for one in upstream if one is not None]
        if any(is_legacy_batchedtensor(one) or is_functorch_wrapped_tensor(one) for one in given):
            raise NotImplementedError(
                "tiled: backward must get one gradient; got a batch, as of is_grads_batched=True; call it once for each"
            )
        loop, count = ctx.loop, len(ctx.loop.stage.inputs)
        gradients, ctx.gradients = ctx.gradients, None  # a second backward pass computes them again
        saved = ctx.saved_tensors  # raises if one was changed in place
        factor = next((one for one in upstream if one is not None), None)
        if factor is None:
            return (None,) * (1 + count)
        # An infinite factor, as of a mean of nothing, would make NaN of gradients of 0: they are computed with it.
        if gradients is not None and (factor.is_meta or observed(factor.abs().amax(), ordinary=1.0) < math.inf):
            return None, *(None if one is None else one.mul_(factor.reshape(())) for one in gradients)
        rest = iter(saved[count:])
        kept = [[next(rest) for _ in range(number)] for number in ctx.counts]
        with without_autocast(saved[0].device):
            wanted, (graphs, ctx.graphs) = ctx.needs_input_grad[1:], (ctx.graphs, None)
            return None, *loop.backward(saved[:count], kept, [*rest], upstream, wanted, graphs=graphs)


def _detached(graph: Graph, node: Node, made: Node) -> Node:
    """The copy of a node, without gradients if the function computes it so."""
    is_float = isinstance(node.meta["val"], Tensor) and node.meta["val"].is_floating_point()
    return graph.call_function(aten.detach.default, (made,)) if is_without_gradients(node) and is_float else made


def _seen(tiles: Iterator[tuple[int, int]], tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """All tiles, or of fake tensors three of them: the others take as many bytes."""
    if not any(isinstance(one, FakeTensor) for one in tensors):
        return tiles
    found = list(tiles)
    return iter(found if len(found) <= 3 else [*found[:2], found[-1]])


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else CPU


def set_size(made: Node, node: Node, along: Along, length: int) -> None:
    """Put the size of a tile among the sizes that an operator is given."""
    name = SIZES[node.target]
    sizes = list(argument(node, name))
    if sizes[along.axis] != -1:
        sizes[along.axis] = length * along.stretch
    names = [one.name for one in schema_of(node.target).arguments]
    made.update_arg(names.index(name), sizes)
