"""An axis through a part of a graph: which axis of each node it is, and where it is reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.fx import Node

from effops.programs.rules.binding import Binding, is_item, operands_of, shape_of, value_of
from effops.programs.rules.draws import seed_of
from effops.programs.rules.table import bindings, why_none
from effops.programs.rules.view import RULES as VIEWS


class Along(NamedTuple):
    """An axis of a node, of which each index of the cut takes `stretch` consecutive indices.

    `stretch` is above 1 where a view has joined the axis that is cut with axes behind it.
    """

    axis: int
    stretch: int


class Blocked(Exception):  # noqa: N818
    """A node stops a cut."""

    def __init__(self, node: Node, why: str) -> None:
        self.node, self.why = node, why
        super().__init__(f"{node.target} {why}")


@dataclass
class Cut:
    """An axis of the nodes of a region.

    Attributes:
        region: the nodes, in order
        length: of the axis
        placed: the axis of the nodes that have it
        combined: how the nodes that reduce it are combined, or the results of one that has several
        carried: the nodes of which each tile goes on from the one before it
        sliced: the axis of an operand from outside, by the node that takes it and the operand's number
    """

    region: Sequence[Node]
    length: int
    placed: dict[Node, Along] = field(default_factory=dict)
    combined: dict[Node, str] = field(default_factory=dict)
    carried: set[Node] = field(default_factory=set)
    sliced: dict[tuple[Node, int], Along] = field(default_factory=dict)

    @property
    def nodes(self) -> list[Node]:
        """Those that depend on the axis."""
        return [node for node in self.region if node in self.placed or node in self.combined]

    def length_of(self, node: Node) -> int:
        along = self.placed[node]
        return shape_of(node)[along.axis]


def follow(region: Sequence[Node], seed: Node, axis: int) -> Cut:
    """The cut along an axis of a node. It raises if a node needs the whole axis."""
    cut = Cut(region, shape_of(seed)[axis])
    inside, bound = set(region), dict[Node, Binding]()
    todo: list[Node] = []

    def put(node: Node, along: Along) -> None:
        if node in cut.combined or cut.placed.get(node, along) != along:
            raise Blocked(node, "would be cut along two axes at once")
        if node not in cut.placed:
            cut.placed[node] = along
            todo.append(node)

    def bind(node: Node, binding: Binding, times: int) -> None:
        if bound.setdefault(node, binding) != binding:
            raise Blocked(node, "would be cut along two axes at once")
        operands = operands_of(node)
        for number, source, stretch in binding.operands:
            along = Along(source, stretch * times)
            if operands[number] in inside:
                put(operands[number], along)
            else:
                cut.sliced[node, number] = along
        if binding.axis is not None:
            put(node, Along(binding.axis, binding.stretch * times))
            if binding.combined:
                cut.carried.add(node)
        else:
            for result in node.users if isinstance(value_of(node), (tuple, list)) else [node]:
                if cut.combined.setdefault(result, binding.combined) != binding.combined:
                    raise Blocked(node, "would be cut along two axes at once")

    def times_of(along: Along, stretch: int, node: Node) -> int:
        if along.stretch % stretch:
            raise Blocked(node, "splits the axis")
        return along.stretch // stretch

    put(seed, Along(axis, 1))
    while todo:
        node = todo.pop()
        along = cut.placed[node]
        own = next((one for one in bindings(node) if one.axis == along.axis), None)
        if own is None:
            raise Blocked(node, why_none(node) or "needs the whole axis")
        bind(node, own, times_of(along, own.stretch, node))
        for user in node.users:
            if user not in inside:
                continue
            for number, operand in enumerate(operands_of(user)):
                if operand is node:
                    found = (
                        (one, place.stretch)
                        for one in bindings(user)
                        for place in one.operands
                        if (place.operand, place.axis) == (number, along.axis)
                    )
                    taken, stretch = next(found, (None, 1))
                    if taken is None:
                        raise Blocked(user, why_none(user) or "needs the whole axis")
                    bind(user, taken, times_of(along, stretch, user))
    return cut


@dataclass
class Stage:
    """One loop over the tiles of a cut: the nodes that a tile computes, what they read, and the results.

    A cut has as many stages as reductions along it follow one another.
    """

    cut: Cut
    outputs: list[Node]
    nodes: list[Node] = field(init=False)
    inputs: list[tuple[Node, Along | None]] = field(init=False)

    def __post_init__(self) -> None:
        needed: set[Node] = set()
        todo = list(self.outputs)
        while todo:
            node = todo.pop()
            if node not in needed:
                needed.add(node)
                todo += [one for one in operands_of(node) if one in self.cut.placed or is_item(node)]
        self.nodes = [node for node in self.cut.region if node in needed]
        read = dict.fromkeys(
            (one, self.along_of(node, number))
            for node in self.nodes
            for number, one in enumerate(operands_of(node))
            if one not in needed
        )
        read.update(dict.fromkeys((seed, None) for seed in map(seed_of, self.nodes) if seed is not None))
        self.inputs = list(read)

    def along_of(self, node: Node, number: int) -> Along | None:
        """The axis of an operand from outside of the stage; None if each tile reads all of it."""
        operand = operands_of(node)[number]
        return self.cut.sliced.get((node, number)) or self.cut.placed.get(operand)


def _is_cut(cut: Cut, node: Node) -> bool:
    """Whether a tile computes its part of a node, or of a result of it that is combined."""
    is_several = isinstance(node.meta.get("val"), (tuple, list))
    return node in cut.placed or node in cut.combined or (is_several and any(one in cut.combined for one in node.users))


def stages_of(cut: Cut) -> list[Stage]:
    """The loops of a cut, in order."""
    inside, depth = set(cut.region), dict[Node, int]()
    for node in cut.region:
        depth[node] = max((depth[one] + (one in cut.combined) for one in operands_of(node) if one in inside), default=0)
    outputs: list[Node] = []
    for node in cut.nodes:
        if node in cut.combined or not all(_is_cut(cut, user) for user in node.users):
            if isinstance(node.meta["val"], (tuple, list)):
                continue  # its items are the results
            while node.target in VIEWS and operands_of(node)[0] in cut.placed:
                node = operands_of(node)[0]
            if node.target not in VIEWS:  # a view of what is whole takes no tiles
                outputs.append(node)
    # What a later stage reads of an earlier one without reducing it is computed again there.
    outputs = list(dict.fromkeys(outputs))
    levels = sorted({depth[one] for one in outputs})
    return [Stage(cut, [one for one in outputs if depth[one] == level]) for level in levels]
