"""The parts of a graph that are large: nodes above a threshold, what reads them, and what lies between."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from torch.fx import Graph, Node

from effops.programs.rules.binding import is_item, nbytes_of, operands_of
from effops.programs.rules.view import RULES as VIEWS
from effops.pytorch.operators import aten

SMALL = {aten.arange.default, aten.arange.start, aten.arange.start_step}  # a tile takes its part of them


class Region(NamedTuple):
    """Nodes that are computed together, in order, and the large ones among them."""

    nodes: list[Node]
    large: list[Node]


def regions(graph: Graph, threshold: int, *, backward: bool) -> list[Region]:
    """The regions of the nodes that take more bytes than a threshold. They share no node.

    A view of a small tensor is not large, whatever its shape, but the gradient of what is expanded is. What lies
    between two nodes of a region belongs to it.
    """
    large: set[Node] = set()
    for node in graph.nodes:
        is_view = (node.target in VIEWS or is_item(node)) and operands_of(node)[0] not in large
        is_view = is_view and not (backward and node.target is aten.expand.default)
        if node.op == "call_function" and node.target not in SMALL and nbytes_of(node) > threshold and not is_view:
            large.add(node)
    groups = _Groups()
    inside = large | {operands_of(node)[0] for node in large if is_item(node)}
    for node in graph.nodes:
        reads = any(one in large for one in operands_of(node))
        if node.op == "call_function" and (reads or (is_item(node) and operands_of(node)[0] in inside)):
            inside.add(node)
    for node in inside:
        for one in operands_of(node):
            if one in inside and (one in large or is_item(node)):
                groups.join(one, node)
    while True:
        parts = groups.of(inside)
        changed = [_joined_between(graph, part, inside, groups) for part in parts]
        if not any(changed):
            order = {node: number for number, node in enumerate(graph.nodes)}
            ordered = (sorted(part, key=order.__getitem__) for part in parts)
            return [Region(nodes, [node for node in nodes if node in large]) for nodes in ordered]


class _Groups:
    """Nodes that belong together."""

    def __init__(self) -> None:
        self.root: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        """The node that stands for a group."""
        while self.root.setdefault(node, node) is not node:
            node = self.root[node]
        return node

    def join(self, first: Node, second: Node) -> None:
        self.root[self.find(first)] = self.find(second)

    def of(self, nodes: set[Node]) -> list[set[Node]]:
        found: dict[Node, set[Node]] = defaultdict(set)
        for node in nodes:
            found[self.find(node)].add(node)
        return list(found.values())


def _joined_between(graph: Graph, part: set[Node], inside: set[Node], groups: _Groups) -> bool:
    """Add what lies between two nodes of a part; whether there was any."""
    below: set[Node] = set()
    above: set[Node] = set()
    for node in graph.nodes:
        if any(one in part or one in below for one in operands_of(node)):
            below.add(node)
    for node in reversed(graph.nodes):
        if any(user in part or user in above for user in node.users):
            above.add(node)
    first, changed = next(iter(part)), False
    for node in below & above:
        if node.op == "call_function" and (node not in inside or groups.find(node) is not groups.find(first)):
            inside.add(node)
            groups.join(node, first)
            changed = True
    return changed
