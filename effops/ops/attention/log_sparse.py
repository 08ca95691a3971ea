"""Causal attention over a log-sparse pattern: each position attends to O(log L) others, at offsets that double.

query l attends to key j <= l  iff  ((l - j) mod restart) is in {0..local-1} or {local-1 + 2^k, k >= 0}

S Li et al. 2019, arXiv:1907.00235.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks import log_sparse
from effops.blocks.log_sparse import allowed
from effops.dispatch.call import call
from effops.dispatch.custom_op import CustomOp, Gradients
from effops.dispatch.forms import add_forms
from effops.dispatch.op import Op, Variant
from effops.dispatch.registration import add_custom_op, add_kernels, add_native, predicted
from effops.dispatch.requirements import requires_inductor
from effops.dispatch.validation import finite
from effops.ops.attention import cpp, flex, triton
from effops.ops.attention.call import LOG_SPARSE, LogSparseCall, empty, factor, prepare_log_sparse
from effops.prediction import inductor

MAX_FEATURES = 2048  # the most features that the Triton kernels take


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dtype: torch.dtype,
    arithmetic: torch.dtype,
    local: int,
    restart: int | None,
    scale: float | None,
) -> Tensor:
    positions = torch.arange(query.shape[-2], device=query.device)
    pairs = allowed(positions.unsqueeze(-1) - positions, local, restart)
    # Not `torch.matmul`: it takes another way for fake tensors, whose bytes would be others.
    scores = torch.einsum("...id,...jd->...ij", [query.to(arithmetic), key.to(arithmetic)]) * factor(query, scale)
    weights = torch.softmax(scores.masked_fill(~pairs, -math.inf), -1)
    return torch.einsum("...ij,...jk->...ik", [weights, value.to(arithmetic)]).to(dtype)


def settings(call: LogSparseCall) -> tuple[Any, ...]:
    """The arguments of `naive` after the tensors."""
    return call.dtype, call.arithmetic, call.local, call.restart, call.scale


def split(arguments: Sequence[Any]) -> LogSparseCall:
    """The call with these arguments."""
    return LogSparseCall(*arguments)


def _blocks(call: LogSparseCall, *, keeps_scores: bool) -> log_sparse.Blocks:
    return log_sparse.Blocks(call.pattern, call.tensors, call.batch, call.arithmetic, keeps_scores=keeps_scores)


def _chunked(call: LogSparseCall) -> Tensor:
    return log_sparse.forward(_blocks(call, keeps_scores=False), *call.tensors, call.factor, empty(call))


def _chunked_backward(dout: Tensor, call: LogSparseCall, wanted: Sequence[bool]) -> Gradients:
    return log_sparse.backward(_blocks(call, keeps_scores=True), dout, *call.tensors, call.factor, wanted)


def _few_features(call: LogSparseCall) -> str:
    widest = max(call.query.shape[-1], call.value.shape[-1])
    reason = f"needs at most {MAX_FEATURES} features, which a row keeps in registers; got {widest}"
    return reason if widest > MAX_FEATURES else ""


op = Op(
    LOG_SPARSE,
    prepare=prepare_log_sparse,
    preference=("triton", "cpp", "chunked", "flex", "compile", "torchscript", "naive"),
    core_dims={"query": 2, "key": 2, "value": 2},
    conditions=lambda call: map(finite, ("query", "key", "value"), call.tensors),
)
add_forms(
    op,
    {"naive": naive},
    lambda form: form,
    settings,
    lambda program, call: inductor.attention_over_pattern(program, *call.tensors),
    operations=lambda call: call.operations_of(call.query.shape[-2] ** 2),
)
custom = functools.partial(
    CustomOp,
    parameters={
        **dict.fromkeys(op.core_dims, Tensor),
        "dtype": torch.dtype,
        "local": int,
        "restart": int | None,
        "scale": float | None,
    },
    split=split,
    composite=lambda call: naive(*call.tensors, *settings(call)),
    empty=empty,
    core_dims=tuple(op.core_dims.values()),
)
add_custom_op(op, custom(f"{LOG_SPARSE}_chunked", forward=_chunked, backward=_chunked_backward), "chunked")
op.add(
    Variant(
        "flex",
        flex.forward,
        lambda call: predicted(split, call, torch.no_grad()(flex.allocate)),
        [requires_inductor, flex.requires_flex],
        automatic=lambda call: False,
    )
)
add_kernels(
    op,
    custom(f"{LOG_SPARSE}_triton", forward=triton.log_sparse, backward=triton.log_sparse_backward),
    requires=[_few_features],
)
add_native(
    op,
    custom(
        f"{LOG_SPARSE}_cpp",
        forward=cpp.log_sparse,
        backward=cpp.log_sparse_backward,
        by_example=functools.partial(cpp.fills_axes, core_dims=tuple(op.core_dims.values())),
    ),
    requires=[cpp.log_sparse_obstacle],
)


@op.public
def log_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    local: int = 1,
    restart: int | None = None,
    scale: float | None = None,
    *,
    variant: str | None = None,
) -> Tensor:
    """Causal attention in which each position attends to O(log L) others.

    Query l attends to key j <= l iff `(l - j) mod restart` is in `{0..local-1}` or `{local-1 + 2^k, k >= 0}`. So a
    position attends to itself and the `local - 1` positions before it, and then at distances that double. The same
    pattern begins again after each `restart` positions.

    Args:
        query: `(*Q, L, E)`
        key: `(*K, L, E)`
        value: `(*V, L, F)`; the batch axes of the three broadcast
        local: how many of the nearest positions are all attended to, the position itself included
        restart: length after which the pattern begins again, at least `local`; None for never
        scale: the factor of the scores `query @ key.mT`; None for `1 / sqrt(E)`
        variant: the implementation to run; "auto" for the best that supports the call (see `effops.explain`), and None
            for that of `effops.use_variant`, or else the best

    Returns:
        The attention, `(*batch, L, F)`, contiguous. The dtype is the promotion of the inputs'; the arithmetic is
        float32, or float64 for float64. Under autocast the tensors are first cast to its dtype, except float64 tensors,
        as `torch.nn.functional.scaled_dot_product_attention` does.

    For backward, variants cpp, chunked and triton save the three tensors and no more. They take O(L log L) time.
    Variant flex is PyTorch's FlexAttention. It computes no gradients and takes float32 only. It compiles for seconds
    for each pattern, scale and number of features. It has not run on CUDA yet. It runs only if a call names it. On a
    CPU it may leave out keys whose scores are NaN, and give numbers where all other variants give NaN.

    Raises:
        TypeError: a tensor is none, or not of a floating-point dtype; `local` or `restart` is no integer
        ValueError: shapes do not fit, devices differ, `local` or `restart` is out of range, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> query, key, value = torch.randn(3, 8, 1000, 64).unbind()
        >>> effops.log_sparse_attention(query, key, value, local=4).shape
        torch.Size([8, 1000, 64])
    """
    return call(op, query, key, value, local, restart, scale, variant=variant)
