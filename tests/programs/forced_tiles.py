"""Run a function of tensors in tiles of a forced length, along an axis of its largest tensor."""

import torch
from torch import fx

from effops.programs.rules.binding import nbytes_of, shape_of
from effops.programs.tiles.cuts import Blocked, follow, stages_of
from effops.programs.tiles.loops import Loop
from effops.programs.tiles.plans import refuse_randomness
from effops.programs.tiles.program import Program
from effops.programs.tiles.regions import regions
from effops.programs.tiles.traced import OF_SOFTMAX, traced


def graph_of(function, args):
    """A graph of one node, which calls the function."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x_{number}") for number in range(len(args))]
    made = graph.call_function(function, tuple(inputs))
    graph.output(made)
    return fx.GraphModule({}, graph)


def forced(function, args, length):
    """(axis, program) of each axis along which all that a function computes can be cut, and why others cannot."""
    found, blocked = _forced(traced(graph_of(function, args), args), length)
    if blocked and not found:  # as plans do
        found, _ = _forced(traced(graph_of(function, args), args, apart=OF_SOFTMAX), length)
    return found, blocked


def _forced(graph, length):
    refuse_randomness(graph)
    found, blocked = [], []
    areas = regions(graph.graph, 0, backward=True)
    if not areas:
        return found, blocked
    area = max(areas, key=lambda one: max(map(nbytes_of, one.large)))
    seed = max(area.large, key=lambda node: (not isinstance(node.meta["val"], tuple), nbytes_of(node)))
    for axis, size in enumerate(shape_of(seed)):
        if size > 1:
            try:
                loops = [Loop(stage) for stage in stages_of(follow(area.nodes, seed, axis))]
            except Blocked as error:
                blocked.append(str(error))
                continue
            for loop in loops:
                loop.length = loop.backward_length = min(length, loop.whole)
            found.append((axis, Program(graph, loops)))
    return found, blocked


def is_float(one):
    return isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex())
