"""Products of matrices in place of a multiplication and a sum, which would make all the products first."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from effops.programs.rules.binding import argument, is_without_gradients, shape_of, value_of
from effops.programs.rules.product import contracted
from effops.pytorch.operators import aten


def with_products(module: GraphModule) -> None:
    """Replace sums of products of two tensors that broadcast, where nothing else reads the products."""
    for node in list(module.graph.nodes):
        if node.target is aten.sum.dim_IntList and node.args[0].target is aten.mul.Tensor and argument(node, "dim"):
            _replace(module.graph, node, node.args[0])
    module.graph.eliminate_dead_code()


def _replace(graph: Graph, total: Node, products: Node) -> None:
    factors = [one for one in products.args if isinstance(one, Node)]
    shape, rank = shape_of(products), len(shape_of(products))
    values: list[Tensor] = [value_of(one) for one in factors]
    is_alike = len({one.dtype for one in (*values, value_of(products), value_of(total))}) == 1
    if is_without_gradients(total) != is_without_gradients(products):
        return
    if len(factors) != 2 or len(products.users) > 1 or not is_alike or not values[0].is_floating_point():
        return
    if max(one.numel() for one in values) >= value_of(products).numel() or 0 in shape:
        return
    dims = {axis % rank for axis in argument(total, "dim")}
    labels = []
    with graph.inserting_before(total):
        squeezed = []
        for factor in factors:
            own = shape_of(factor)
            axes = range(rank - len(own), rank)  # of the products
            labels.append(tuple(axis for axis, size in zip(axes, own) if size != 1))
            gone = [place for place, size in enumerate(own) if size == 1]
            squeezed.append(_made(graph, factor, aten.squeeze.dims, factor, gone) if gone else factor)
        output = tuple(axis for axis in range(rank) if axis not in dims and shape[axis] != 1)
        found = _made(graph, total, contracted, *squeezed, (*labels, output))
        found.meta = {**total.meta, "val": value_of(total).reshape([shape[axis] for axis in output])}
        kept = [axis for axis in range(rank) if axis not in dims or argument(total, "keepdim")]
        for place, axis in enumerate(kept):
            if axis not in output:
                found = _made(graph, total, aten.unsqueeze.default, found, place)
    total.replace_all_uses_with(found)
    graph.erase_node(total)


def _made(graph: Graph, like: Node, target: object, *args: object) -> Node:
    """A node with the line of another one, and the value that it has for the values of its arguments."""
    made = graph.call_function(target, args)  # type: ignore[arg-type]
    values = [value_of(one) if isinstance(one, Node) else one for one in args]
    made.meta = dict(like.meta)
    if target is not contracted:
        made.meta["val"] = target(*values)  # type: ignore[operator]
    return made
