"""Counts what operators compute, in the three classes of Ivanov et al. 2021 (arXiv:2007.00072).

A tensor contraction counts each multiplication and each addition. A reduction, as by a normalisation, counts
`PER_ELEMENT` operations for each element of its input. An element-wise operator counts one for each element of its
result.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from effops.pytorch.calls import tree_leaves
from effops.pytorch.operators import aten, is_elementwise
from effops.pytorch.prediction import flop_registry, schema_of, sdpa_backward_flop_count, sdpa_flop_count

CONTRACTION, REDUCTION, ELEMENTWISE, UNCOUNTED = CLASSES = (
    "contractions",
    "reductions",
    "element-wise",
    "uncounted",
)
PER_ELEMENT = 5
REDUCTIONS = ("softmax", "norm", "sum", "mean", "var", "amax", "aminmax", "logsumexp", "cumsum")


def operations(func: Any, args: Sequence[Any], options: Mapping[str, Any], result: Any) -> tuple[str, int]:
    """The class of a call of an operator, and how many operations it makes.

    In the class "uncounted" a call counts as one: only the author of such a kernel knows its operations.
    """
    if func in _FORMULAS:
        return CONTRACTION, _FORMULAS[func](args)
    if (formula := flop_registry.get(func.overloadpacket)) is not None:
        return CONTRACTION, int(formula(*args, **options, out_val=result))
    if func.namespace not in ("aten", "prim", "profiler"):
        return UNCOUNTED, 1
    if is_elementwise(func):
        return ELEMENTWISE, _elements(result)
    if func.namespace == "aten" and any(part in schema_of(func).name for part in REDUCTIONS):
        return REDUCTION, PER_ELEMENT * _elements(args)
    return ELEMENTWISE, 0


def _elements(value: Any) -> int:
    """The number of elements of the largest tensor."""
    return max((leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), default=0)


def _lstm(input: Tensor, hidden_size: int) -> int:
    return 2 * input.shape[0] * input.shape[1] * 4 * hidden_size * (input.shape[2] + hidden_size)


def _with_heads_of_first(*tensors: Tensor) -> list[tuple[int, ...]]:
    """Shapes with the heads of the first tensor: each is a product of its own, and torch 2.11 counts no shared ones."""
    heads = tensors[0].shape[1]
    return [(batch, heads, *rows) for batch, _, *rows in (tensor.shape for tensor in tensors)]


_FORMULAS: dict[Any, Callable[[Sequence[Any]], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda args: sdpa_flop_count(
        *_with_heads_of_first(*args[:3])
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: lambda args: sdpa_backward_flop_count(
        *_with_heads_of_first(*args[:4])
    ),
    aten.mkldnn_rnn_layer.default: lambda args: _lstm(args[0], args[10]),
    aten.mkldnn_rnn_layer_backward.default: lambda args: 2 * _lstm(args[0], args[15]),
}
