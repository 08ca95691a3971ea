"""Operators without a rule that PyTorch itself takes apart into others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx import Graph

from effops.programs.rules.table import RULES
from effops.programs.tiles.regions import SMALL

aten = torch.ops.aten
# Those of PyTorch's decompositions that are none of its core ones.
OTHERS = [
    aten.addmv.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten.diagonal_scatter.default,
    aten.dist.default,
    aten.narrow_copy.default,
    aten.native_batch_norm.default,
    aten.native_group_norm.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten.permute_copy.default,
    aten.slice_scatter.default,
    aten.unbind_copy.int,
    aten.view_copy.default,
]


def taken_apart(graph: Graph) -> dict[Any, Callable[..., Any]]:
    """The decompositions of PyTorch for a graph with an operator that they serve; else none."""
    found = _decompositions()
    is_served = any(node.op == "call_function" and node.target in found for node in graph.nodes)
    return found if is_served else {}


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    known = {**dict(core_aten_decompositions().items()), **get_decompositions(OTHERS)}
    return {operator: made_of for operator, made_of in known.items() if _is_served(operator)}


def _is_served(operator: Any) -> bool:
    if not isinstance(operator, torch._ops.OpOverload) or operator._schema.is_mutable or operator in {*RULES, *SMALL}:
        return False
    return torch.Tag.pointwise not in operator.tags and torch.Tag.nondeterministic_seeded not in operator.tags
