"""An axis through a part of a graph: which axis of each node it is, and where it is reduced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from effops.programs.rules.binding import Binding, is_item, is_without_gradients, operands_of, shape_of, value_of
from effops.programs.rules.draws import seed_of
from effops.programs.rules.table import bindings, why_none
from effops.programs.rules.view import RULES as VIEWS
from effops.pytorch.operators import aten

WIDE = {torch.float32, torch.float64, torch.bfloat16}  # their range leaves room for a factor


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
        combined: how tiles of a node that reduces the axis are put together; for one with several results, its items
        carried: the nodes of which each tile goes on from the one before it
        sliced: the axis of operands from outside of the region; the key is (reader, number of the operand)
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


def follow(region: Sequence[Node], start: Node, axis: int) -> Cut:
    """The cut along an axis of a node. It raises if a node needs the whole axis."""
    following = _Following(region, shape_of(start)[axis])
    following.place(start, Along(axis, 1))
    while following.todo:
        following.pass_on(following.todo.pop())
    return following.cut


def follow_binding(region: Sequence[Node], node: Node, binding: Binding) -> Cut:
    """The cut along a binding of a node, likewise: that may be an axis which it reduces."""
    following = _Following(region, length_of(node, binding))
    following.bind(node, binding, 1)
    while following.todo:
        following.pass_on(following.todo.pop())
    return following.cut


def length_of(node: Node, binding: Binding) -> int:
    """How many indices a binding of a node has."""
    if binding.axis is not None:
        return shape_of(node)[binding.axis] // binding.stretch
    place = binding.operands[0]
    return shape_of(operands_of(node)[place.operand])[place.axis] // place.stretch


class _Following:
    """A cut that grows from node to node.

    Attributes:
        bound: the binding of each node that has been told its axes; it can have one alone
        todo: the nodes whose axis is known, and from which it is to be passed on
    """

    def __init__(self, region: Sequence[Node], length: int) -> None:
        self.cut = Cut(region, length)
        self.inside, self.bound = set(region), dict[Node, Binding]()
        self.todo: list[Node] = []

    def pass_on(self, node: Node) -> None:
        """Tell the operands and the readers of a node which of their axes is that of the node."""
        along = self.cut.placed[node]
        own = next((one for one in bindings(node) if one.axis == along.axis), None)
        if own is None:
            raise Blocked(node, why_none(node) or "needs the whole axis")
        self.bind(node, own, _times(along, own.stretch, node))
        for user in node.users:
            if user not in self.inside:
                continue
            for number, operand in enumerate(operands_of(user)):
                if operand is node:
                    binding, stretch = _binding_that_reads(user, number, along.axis)
                    self.bind(user, binding, _times(along, stretch, user))

    def place(self, node: Node, along: Along) -> None:
        """Tell a node its axis."""
        if node in self.cut.combined or self.cut.placed.get(node, along) != along:
            raise Blocked(node, "would be cut along two axes at once")
        if node not in self.cut.placed:
            self.cut.placed[node] = along
            self.todo.append(node)

    def bind(self, node: Node, binding: Binding, times: int) -> None:
        """Cut a node along the axes of a binding. One index of the cut is `times` indices of the binding."""
        cut = self.cut
        if self.bound.setdefault(node, binding) != binding:
            raise Blocked(node, "would be cut along two axes at once")
        operands = operands_of(node)
        for number, source, stretch in binding.operands:
            along = Along(source, stretch * times)
            if operands[number] in self.inside:
                self.place(operands[number], along)
            else:
                cut.sliced[node, number] = along
        if binding.axis is not None:
            self.place(node, Along(binding.axis, binding.stretch * times))
            if binding.combined:  # a cumulative operator
                cut.carried.add(node)
        else:
            results = node.users if _has_several_results(node) else [node]
            for result in results:
                if cut.combined.setdefault(result, binding.combined) != binding.combined:
                    raise Blocked(node, "would be reduced in two ways")


def _times(along: Along, stretch: int, node: Node) -> int:
    """How many indices of a node's binding one of the cut takes, where the binding takes `stretch` of the axis."""
    if along.stretch % stretch:
        raise Blocked(node, "splits the axis")
    return along.stretch // stretch


def _binding_that_reads(node: Node, number: int, axis: int) -> tuple[Binding, int]:
    """The binding of a node that takes an axis of one of its operands, and the stretch of that axis."""
    for binding in bindings(node):
        for place in binding.operands:
            if (place.operand, place.axis) == (number, axis):
                return binding, place.stretch
    raise Blocked(node, why_none(node) or "needs the whole axis")


@dataclass
class Stage:
    """One loop over the tiles of a cut: the nodes that a tile computes, what they read, and the results.

    Reductions that read one another's results need a stage each.
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
        read = [
            (operand, self.along_of(node, number))
            for node in self.nodes
            for number, operand in enumerate(operands_of(node))
            if operand not in needed
        ]
        read += [(seed, None) for seed in map(seed_of, self.nodes) if seed is not None]
        self.inputs = list(dict.fromkeys(read))

    def along_of(self, node: Node, number: int) -> Along | None:
        """The axis of an operand from outside of the stage; None if each tile reads all of it."""
        operand = operands_of(node)[number]
        return self.cut.sliced.get((node, number)) or self.cut.placed.get(operand)


def _has_several_results(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))  # the output of a graph has no value


def _is_cut(cut: Cut, node: Node) -> bool:
    """Whether a tile computes its part of a node, or of a result of it that is combined."""
    has_combined_item = _has_several_results(node) and any(one in cut.combined for one in node.users)
    return node in cut.placed or node in cut.combined or has_combined_item


def stages_of(cut: Cut) -> list[Stage]:
    """The loops of a cut, in order."""
    inside, reductions_before = set(cut.region), dict[Node, int]()
    for node in cut.region:
        operands = [one for one in operands_of(node) if one in inside]
        counts = [reductions_before[one] + int(one in cut.combined) for one in operands]
        reductions_before[node] = max(counts, default=0)
    outputs: list[Node] = []
    for node in cut.nodes:
        if node not in cut.combined and all(_is_cut(cut, user) for user in node.users):
            continue  # tiles alone read it
        if _has_several_results(node):
            continue  # its items are the results
        source = node
        while source.target in VIEWS and operands_of(source)[0] in cut.placed:
            source = operands_of(source)[0]
        if source.target not in VIEWS:  # a view of what is whole takes no tiles
            outputs.append(source)
    outputs = list(dict.fromkeys(outputs))
    # A stage computes again what it needs of an earlier one. It reads only what that one has reduced.
    return [
        Stage(cut, [one for one in outputs if reductions_before[one] == count])
        for count in sorted({reductions_before[one] for one in outputs})
    ]


def down_to_a_number(graph: Graph, cut: Cut, taken: Collection[Node], leaves: Collection[Node]) -> Cut | None:
    """The same cut through all that comes after it, if that adds up to one number that has gradients.

    Args:
        taken: the nodes of all cuts, of which no other may come after it
        leaves: the inputs that require gradients
    """
    region = set(cut.region)
    after, differentiable = set(region), set(leaves)
    for node in graph.nodes:
        if node.op == "call_function" and any(one in after for one in node.all_input_nodes):
            after.add(node)
        if _has_gradients(node, differentiable):
            differentiable.add(node)
    seed = next((node for node, along in cut.placed.items() if along.stretch == 1), None)
    if seed is None or not (after - region).isdisjoint(taken):
        return None
    try:
        longer = follow([node for node in graph.nodes if node in after], seed, cut.placed[seed].axis)
    except Blocked:
        return None
    stages = stages_of(longer)
    return longer if len(stages) == 1 and _ends_in_a_number(stages[0], differentiable) else None


def _ends_in_a_number(stage: Stage, differentiable: Collection[Node]) -> bool:
    ends = [node for node in stage.outputs if node in differentiable]
    if len(ends) != 1 or stage.cut.combined.get(ends[0]) != "sum" or stage.cut.carried:
        return False
    (end,) = map(value_of, ends)
    values = [value_of(node) for node in (*stage.nodes, *(node for node, _ in stage.inputs))]
    floats = {one.dtype for one in values if isinstance(one, Tensor) and one.is_floating_point()}
    return bool(end.numel() == 1 and end.is_floating_point() and floats <= WIDE)


def _has_gradients(node: Node, differentiable: Collection[Node]) -> bool:
    has_any = any(one in differentiable for one in node.all_input_nodes)
    if not has_any or is_without_gradients(node) or node.target is aten.detach.default:
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex()) for one in values)
