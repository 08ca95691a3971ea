"""Operators that reduce axes. Those that have a combiner can be cut along the reduced axis too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from effops.programs.rules.binding import Binding, Place, argument, operands_of, shape_of
from effops.pytorch.operators import aten
from effops.pytorch.prediction import schema_of


def reducing(combined: str, *, of_no_axes: str = "all") -> Callable[[Node], Iterator[Binding]]:
    """The rule of an operator with arguments `dim` and `keepdim`; without a combiner the reduced axis is mixed.

    `of_no_axes` says whether "all" axes or "none" are reduced where `dim` is an empty list.
    """

    def rule(node: Node) -> Iterator[Binding]:
        shape = shape_of(operands_of(node)[0])
        names = {one.name for one in schema_of(node.target).arguments}
        dims = argument(node, "dim") if "dim" in names else None
        keepdim = "keepdim" in names and argument(node, "keepdim")
        given: Any = [dims] if isinstance(dims, int) else dims
        is_all = given is None or (len(given) == 0 and of_no_axes == "all")
        reduced = set(range(len(shape))) if is_all else {axis % len(shape) for axis in given if shape}
        axis = 0
        for source, size in enumerate(shape):
            if source not in reduced:
                if size != 1:
                    yield Binding((Place(0, source),), axis)
            elif combined and size != 1:
                yield Binding((Place(0, source),), None, combined=combined)
            axis += keepdim or source not in reduced

    return rule


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: Any, keepdim: bool) -> Tensor:
        result = torch.logsumexp(x, dim, keepdim=True)
        ctx.save_for_backward(x, result)
        ctx.keepdim = keepdim
        return result.clone() if keepdim else result.squeeze(dim)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, result = ctx.saved_tensors
        if not ctx.keepdim:
            upstream = upstream.reshape(result.shape)
        weights = x - torch.where(result == -torch.inf, 0, result)
        return weights.exp_().mul_(upstream), None, None


def log_sum_exp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """The same as PyTorch's, of which a row of -inf has no gradient, since others of other tiles may have some."""
    return _LogSumExp.apply(x, dim, keepdim)  # type: ignore[no-any-return]


log_sum_exp._schema = schema_of(aten.logsumexp.default)  # type: ignore[attr-defined]
LOG_SUMS = {aten.logsumexp.default, log_sum_exp}


def norm(node: Node) -> Iterator[Binding]:
    """The norms of order 1 and 2 are combined."""
    return reducing({1: "sum", 2: "norm"}.get(argument(node, "ord"), ""))(node)


RULES = {
    aten.sum.default: reducing("sum"),
    aten.sum.dim_IntList: reducing("sum"),
    aten.amax.default: reducing("max"),
    aten.amin.default: reducing("min"),
    aten.any.dim: reducing("any"),
    aten.any.dims: reducing("any", of_no_axes="none"),
    aten.any.default: reducing("any"),
    aten.all.dim: reducing("all"),
    aten.all.dims: reducing("all", of_no_axes="none"),
    aten.all.default: reducing("all"),
    aten.logsumexp.default: reducing("logsumexp"),
    log_sum_exp: reducing("logsumexp"),
    aten.linalg_vector_norm.default: norm,
    aten.prod.default: reducing("product"),
    aten.prod.dim_int: reducing("product"),
    aten.max.dim: reducing("first max"),
    aten.min.dim: reducing("first min"),
    aten.count_nonzero.default: reducing("sum"),
    aten.count_nonzero.dim_IntList: reducing("sum"),
    aten.median.dim: reducing(""),
    aten.nanmedian.dim: reducing(""),
    aten.mode.default: reducing(""),
    aten.kthvalue.default: reducing(""),
    aten.std.correction: reducing(""),
    aten.var_mean.correction: reducing(""),
    aten.std_mean.correction: reducing(""),
    aten.var.correction: reducing(""),
    aten.mean.dim: reducing(""),
}
