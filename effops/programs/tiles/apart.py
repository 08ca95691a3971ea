"""Operators without a rule that PyTorch itself takes apart into others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.fx import Graph

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
