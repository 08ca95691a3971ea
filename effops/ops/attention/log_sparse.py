"""Causal attention over a log-sparse pattern: each position attends to O(log L) others, at offsets that double.

query l attends to key j <= l  iff  ((l - j) mod restart) is in {0..local-1} or {local-1 + 2^k, k >= 0}

S Li et al. 2019, arXiv:1907.00235.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effops.blocks import log_sparse
from effops.blocks.log_sparse import allowed
from effops.blocks.plan import Shape
from effops.dispatch.arguments import check_devices, check_operand
from effops.dispatch.call import call
from effops.dispatch.custom_op import CustomOp, Gradients, add_custom_op, add_kernels, predicted
from effops.dispatch.forms import add_forms
from effops.dispatch.op import Cost, Op, Variant
from effops.dispatch.requirements import requires_inductor
from effops.numerics.precision import arithmetic_dtype, wider
from effops.ops.attention import flex, triton
from effops.ops.attention.call import factor, rounded_by_autocast
from effops.prediction import inductor

NAME = "log_sparse_attention"
MAX_FEATURES = 2048  # the most features that the Triton kernels take
CORE_DIMS = {"query": 2, "key": 2, "value": 2}
PARAMETERS = {
    **dict.fromkeys(CORE_DIMS, Tensor),
    "dtype": torch.dtype,
    "local": int,
    "restart": int | None,
    "scale": float | None,
}


class LogSparseCall(NamedTuple):
    """A validated call: its tensors, the dtype of the result, and the settings."""

    query: Tensor
    key: Tensor
    value: Tensor
    dtype: torch.dtype
    local: int
    restart: int | None
    scale: float | None

    @classmethod
    def split(cls, arguments: Sequence[Any]) -> LogSparseCall:
        """The inverse of `arguments`."""
        return cls(*arguments)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(self)

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def batch(self) -> Shape:
        return _batch(*self.tensors)

    @property
    def factor(self) -> float:
        """The factor of the scores."""
        return factor(self.query, self.scale)

    @property
    def shape(self) -> Shape:
        return *self.batch, *self.value.shape[-2:]

    @property
    def arithmetic(self) -> torch.dtype:
        return arithmetic_dtype(self.dtype)

    @property
    def pattern(self) -> log_sparse.Pattern:
        return log_sparse.Pattern(self.local, self.restart)

    @property
    def operations(self) -> int:
        """About how many floating-point operations the pairs of the pattern take."""
        return _operations(self, self.pattern.pairs(self.query.shape[-2]))


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    local: int = 1,
    restart: int | None = None,
    scale: float | None = None,
) -> LogSparseCall:
    """Validate shapes, dtypes, devices and settings (never values of tensors), and round as autocast would."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        check_operand(NAME, name, tensor, dims=2)
    check_devices(NAME, **tensors)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{NAME}: last dimension of `key` must equal that of `query`; got query {tuple(query.shape)}, key "
            f"{tuple(key.shape)}; project one to the size of the other"
        )
    for name in ("key", "value"):
        if tensors[name].shape[-2] != query.shape[-2]:
            raise ValueError(
                f"{NAME}: `{name}` must have as many positions as `query`; got query {tuple(query.shape)}, {name} "
                f"{tuple(tensors[name].shape)}; the pattern is that of self-attention: pad or cut the shorter one"
            )
    try:
        _batch(*tensors.values())
    except RuntimeError as error:
        raise ValueError(
            f"{NAME}: batch shapes must broadcast; got query {tuple(query.shape)}, key {tuple(key.shape)}, value "
            f"{tuple(value.shape)}; unsqueeze the axes that should pair up, or repeat the heads that are shared"
        ) from error
    _check_pattern(local, restart)
    if scale is not None and not isinstance(scale, Real):
        raise TypeError(
            f"{NAME}: `scale` must be a number or None; got {type(scale).__name__}; multiply query by a tensor"
        )
    query, key, value = rounded_by_autocast(query, key, value)
    dtype = wider(wider(query.dtype, key.dtype), value.dtype)
    return LogSparseCall(query, key, value, dtype, local, restart, None if scale is None else float(scale))


def _check_pattern(local: int, restart: int | None) -> None:
    for name, number in (("local", local), ("restart", restart)):
        if number is None and name == "restart":
            continue
        if not isinstance(number, int) or isinstance(number, bool):
            got = type(number).__name__
            raise TypeError(f"{NAME}: `{name}` must be an integer; got {got}; convert it with int()")
        if number < 1:
            remedy = "1 is a position's attention to itself" if name == "local" else "None is no restart"
            raise ValueError(f"{NAME}: `{name}` must be at least 1; got {number}; {remedy}")
    if restart is not None and local > restart:
        raise ValueError(
            f"{NAME}: `local` must be at most `restart`, where every earlier position is attended to; got local="
            f"{local}, restart={restart}; lower `local` or raise `restart`"
        )


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
    scores = torch.matmul(query.to(arithmetic), key.to(arithmetic).transpose(-2, -1)) * factor(query, scale)
    weights = torch.softmax(scores.masked_fill(~pairs, -math.inf), -1)
    return torch.matmul(weights, value.to(arithmetic)).to(dtype)


def settings(call: LogSparseCall) -> tuple[Any, ...]:
    """The arguments of `naive` after the tensors."""
    return call.dtype, call.arithmetic, call.local, call.restart, call.scale


def _batch(*tensors: Tensor) -> Shape:
    return tuple(torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors)))


def empty(call: LogSparseCall) -> Tensor:
    return call.value.new_empty(call.shape, dtype=call.dtype)


def _blocks(call: LogSparseCall, *, keeps_scores: bool) -> log_sparse.Blocks:
    return log_sparse.Blocks(call.pattern, call.tensors, call.batch, call.arithmetic, keeps_scores=keeps_scores)


def _chunked(call: LogSparseCall) -> Tensor:
    return log_sparse.forward(_blocks(call, keeps_scores=False), *call.tensors, call.factor, empty(call))


def _chunked_backward(dout: Tensor, call: LogSparseCall, wanted: Sequence[bool]) -> Gradients:
    return log_sparse.backward(_blocks(call, keeps_scores=True), dout, *call.tensors, call.factor, wanted)


def _flex(call: LogSparseCall) -> Tensor:
    return flex.forward(triton.matrices(call.tensors), call.pattern, call.factor).view(call.shape)


def _triton(call: LogSparseCall) -> Tensor:
    return triton.log_sparse(call.tensors, empty(call), _scale(call), call.local, call.restart)


def _triton_backward(dout: Tensor, call: LogSparseCall, wanted: Sequence[bool]) -> Gradients:
    return triton.log_sparse_backward(dout, call.tensors, _scale(call), call.local, call.restart, wanted)


def _scale(call: LogSparseCall) -> Tensor:
    return torch.full((1,), call.factor, dtype=call.arithmetic, device=call.device)


def _operations(call: LogSparseCall, pairs: int) -> int:
    """A multiplication and an addition for each feature of keys and values, and the operations of the softmax."""
    return math.prod(call.batch) * pairs * 2 * (call.query.shape[-1] + call.value.shape[-1] + 4)


def _all_pairs(call: LogSparseCall) -> int:
    return call.query.shape[-2] ** 2


op = Op(
    NAME,
    prepare=prepare,
    preference=("triton", "chunked", "flex", "compile", "torchscript", "naive"),
    core_dims=CORE_DIMS,
)


add_forms(
    op,
    {"naive": naive},
    lambda form: form,
    settings,
    lambda program, call: inductor.attention_over_pattern(program, *call.tensors),
    operations=lambda call: _operations(call, _all_pairs(call)),
)


def _custom_op(variant: str, forward: Callable[..., Tensor], backward: Callable[..., Gradients]) -> CustomOp:
    return CustomOp(
        f"{NAME}_{variant}",
        parameters=PARAMETERS,
        split=LogSparseCall.split,
        forward=forward,
        backward=backward,
        composite=lambda call: naive(*call.tensors, *settings(call)),
        empty=empty,
        core_dims=tuple(CORE_DIMS.values()),
    )


def _few_features(call: LogSparseCall) -> str:
    widest = max(call.query.shape[-1], call.value.shape[-1])
    reason = f"needs at most {MAX_FEATURES} features, which a row keeps in registers; got {widest}"
    return reason if widest > MAX_FEATURES else ""


def _flex_cost(call: LogSparseCall) -> Cost:
    def allocated(fake_call: LogSparseCall) -> Tensor:
        return flex.allocate(triton.matrices(fake_call.tensors)).view(fake_call.shape)

    return predicted(LogSparseCall.split, call, torch.no_grad()(allocated))


add_custom_op(op, _custom_op("chunked", _chunked, _chunked_backward), "chunked")
op.add(Variant("flex", _flex, _flex_cost, [requires_inductor, flex.requires_flex], automatic=lambda call: False))
add_kernels(op, _custom_op("triton", _triton, _triton_backward), requires=[_few_features])


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
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        The attention, `(*batch, L, F)`, contiguous. The dtype is the promotion of the inputs'; the arithmetic is
        float32, or float64 for float64. Under autocast the tensors are first cast to its dtype, except float64 tensors,
        as `torch.nn.functional.scaled_dot_product_attention` does.

    For backward, variants chunked and triton save the three tensors and no more. They take O(L log L) time and memory.
    Variant flex is PyTorch's FlexAttention. It computes no gradients and takes float32 only. It compiles for seconds
    for each pattern, scale and number of features. It has not run on CUDA yet. It runs only if a call names it.

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
