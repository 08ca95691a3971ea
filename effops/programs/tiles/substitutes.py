"""Operators that take the place of others: those that PyTorch takes apart into, and products of matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from effops.programs.rules.binding import argument, is_without_gradients, shape_of, value_of
from effops.programs.rules.product import contracted
from effops.pytorch.operators import aten
from effops.pytorch.tiles import get_decompositions

# Those whose parts have the same gradient. Others do not: PyTorch's parts of `_safe_softmax` give NaN for rows of -inf
# alone, for which it gives 0.
OPERATORS = [
    aten._chunk_cat.default,
    aten._fused_rms_norm.default,
    aten._prelu_kernel.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._softmax_backward_data.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_masked_index.default,
    aten.addmv.default,
    aten.addr.default,
    aten.alias_copy.default,
    aten.as_strided_copy.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.block_diag.default,
    aten.channel_shuffle.default,
    aten.diag_embed.default,
    aten.diagonal_copy.default,
    aten.diagonal_scatter.default,
    aten.expand_copy.default,
    aten.floor_divide.default,
    aten.glu.default,
    aten.hardswish.default,
    aten.huber_loss.default,
    aten.isin.Tensor_Tensor,
    aten.linspace.default,
    aten.log_sigmoid_forward.default,
    aten.logspace.default,
    aten.mse_loss.default,
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
    aten.narrow_copy.default,
    aten.native_batch_norm.default,
    aten.native_group_norm.default,
    aten.nll_loss2d_forward.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.permute_copy.default,
    aten.rot90.default,
    aten.rsub.Tensor,
    aten.select_scatter.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.split_with_sizes_copy.default,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
    aten.t_copy.default,
    aten.trace.default,
    aten.transpose_copy.int,
    aten.unbind_copy.int,
    aten.unfold_copy.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsqueeze_copy.default,
    aten.view_copy.default,
]


def taken_apart(graph: Graph) -> dict[Any, Callable[..., Any]]:
    """The decompositions of PyTorch for a graph with an operator that they serve; else none."""
    served = {*OPERATORS}
    return _decompositions() if any(node.target in served for node in graph.nodes) else {}


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return get_decompositions(OPERATORS)


def with_products(module: GraphModule) -> None:
    """Replace sums of products of two tensors that broadcast, where nothing else reads the products.

    A product of matrices does not make all the products of numbers first.
    """
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
