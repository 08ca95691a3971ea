"""Causal attention over a log-sparse pattern: each position attends to O(log L) others, at offsets that double.

query l attends to key j <= l  iff  ((l - j) mod restart) is in {0..local-1} or {local-1 + 2^k, k >= 0}

S Li et al. 2019, arXiv:1907.00235.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effops.blocks import log_sparse
from effops.blocks.log_sparse import allowed
from effops.blocks.plan import Shape
from effops.dispatch.arguments import check_devices, check_operand
from effops.dispatch.call import call
from effops.dispatch.custom_op import Binding, Gradients, requires_grad
from effops.dispatch.jit import compile_by_signature, script
from effops.dispatch.op import Cost, Op
from effops.dispatch.requirements import on_cuda, requires_inductor, requires_torchscript, requires_triton
from effops.numerics.precision import arithmetic_dtype, contraction_error, unit_roundoff, wider
from effops.ops.attention import flex
from effops.ops.attention.call import rounded_by_autocast
from effops.ops.densities.triton import stored_dtype
from effops.prediction.allocations import predict_bytes
from effops.reference.bounds import Bounds, normal_sample

NAME = "log_sparse_attention"
FEATURES = 2048  # as many as the kernels take
CORE_DIMS = {"query": 2, "key": 2, "value": 2}


class Call(NamedTuple):
    """A validated call: its tensors, the dtype of the result, and the settings. An operator takes these arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    dtype: torch.dtype
    local: int
    restart: int | None
    scale: float | None

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
        """What scores are multiplied with."""
        return factor(self.query, self.scale)

    @property
    def shape(self) -> Shape:
        return *self.batch, *self.value.shape[-2:]

    @property
    def arithmetic(self) -> torch.dtype:
        return arithmetic_dtype(self.dtype)


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    local: int = 1,
    restart: int | None = None,
    scale: float | None = None,
) -> Call:
    """Validate shapes, dtypes, devices and settings (never values of tensors)."""
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
    dtype = wider(wider(query.dtype, key.dtype), value.dtype)
    return Call(query, key, value, dtype, local, restart, None if scale is None else float(scale))


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


def factor(query: Tensor, scale: float | None) -> float:
    """What scores are multiplied with."""
    if scale is None:
        return 1.0 / math.sqrt(max(1, query.shape[-1]))
    return scale


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


def by_form(form: Callable[..., Tensor], call: Call) -> Tensor:
    return form(*call.tensors, call.dtype, call.arithmetic, call.local, call.restart, call.scale)


def _batch(*tensors: Tensor) -> Shape:
    return tuple(torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors)))


def empty(call: Call) -> Tensor:
    return call.value.new_empty(call.shape, dtype=call.dtype)


def _blocks(call: Call, *, kept: bool) -> log_sparse.Blocks:
    pattern = log_sparse.Pattern(call.local, call.restart)
    return log_sparse.Blocks(pattern, call.tensors, call.batch, call.arithmetic, kept=kept)


def _chunked(call: Call) -> Tensor:
    return log_sparse.forward(_blocks(call, kept=False), *call.tensors, call.factor, empty(call))


def _chunked_backward(dout: Tensor, call: Call, wanted: Sequence[bool]) -> Gradients:
    return log_sparse.backward(_blocks(call, kept=True), dout, *call.tensors, call.factor, wanted)


def _flex(call: Call) -> Tensor:
    pattern = log_sparse.Pattern(call.local, call.restart)
    return flex.forward(_matrices(call), pattern, call.factor).view(call.shape)


def _triton(call: Call) -> Tensor:
    from effops.kernels import log_sparse as kernels

    out = empty(call._replace(dtype=stored_dtype(call.dtype, call.device)))
    q, k, v = _matrices(call)
    kernels.forward(q, k, v, _flat(out), _scale(call), local=call.local, restart=call.restart)
    return out.to(call.dtype)


def _triton_backward(dout: Tensor, call: Call, wanted: Sequence[bool]) -> Gradients:
    from effops.kernels import log_sparse as kernels

    matrices, batch = _matrices(call), call.batch
    found = [
        matrix.new_empty(matrix.shape, dtype=_gradient_dtype(tensor, matrix, call.dtype)) if is_wanted else None
        for tensor, matrix, is_wanted in zip(call.tensors, matrices, wanted)
    ]
    (q, k, v), (dq, dk, dv) = matrices, found
    kernels.backward(q, k, v, _flat(dout), dq, dk, dv, _scale(call), local=call.local, restart=call.restart)
    return [
        None if own is None else own.view(*batch, *tensor.shape[-2:]).sum_to_size(tensor.shape).to(tensor.dtype)
        for own, tensor in zip(found, call.tensors)
    ]


def _matrices(call: Call) -> tuple[Tensor, ...]:
    """The tensors with one batch axis."""
    return tuple(_flat(tensor.expand(*call.batch, *tensor.shape[-2:])) for tensor in call.tensors)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-2]), *tensor.shape[-2:])


def _scale(call: Call) -> Tensor:
    return torch.full((1,), call.factor, dtype=call.arithmetic, device=call.device)


def _gradient_dtype(tensor: Tensor, matrix: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What is summed over a shared axis is not rounded before."""
    return stored_dtype(tensor.dtype, tensor.device) if tensor.numel() == matrix.numel() else arithmetic_dtype(dtype)


def workload(*, H: int, L: int, E: int, **options: Any) -> tuple[Tensor, ...]:
    """H heads of L positions and E features."""
    return normal_sample((H, L, E), (H, L, E), (H, L, E), **options)


class _Pairs:
    """The pairs of the pattern, in float64: of each row a column for every offset."""

    def __init__(self, call: Call) -> None:
        self.length = call.query.shape[-2]
        self.offsets = log_sparse.Pattern(call.local, call.restart).offsets(self.length)
        rows = torch.arange(self.length, device=call.device)
        self.missing = rows.unsqueeze(-1) < torch.tensor(self.offsets, device=call.device)

    def _shifted(self) -> Iterator[tuple[int, slice, slice]]:
        """Of each offset the column, the rows that have it, and their keys."""
        for column, offset in enumerate(self.offsets):
            yield column, slice(offset, self.length), slice(0, self.length - offset)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Dot products of all pairs of the rows of `left` and `right`; 0 where there is no pair."""
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        products = left.new_zeros((*batch, self.length, len(self.offsets)))
        for column, rows, keys in self._shifted():
            products[..., rows, column] = (left[..., rows, :] * right[..., keys, :]).sum(-1)
        return products

    def gather(self, weights: Tensor, right: Tensor) -> Tensor:
        """The weighted sum of the rows of `right` that each row is paired with."""
        batch = torch.broadcast_shapes(weights.shape[:-2], right.shape[:-2])
        total = right.new_zeros((*batch, *right.shape[-2:]))
        for column, rows, keys in self._shifted():
            total[..., rows, :] += weights[..., rows, column, None] * right[..., keys, :]
        return total

    def scatter(self, weights: Tensor, left: Tensor) -> Tensor:
        """Of each row, the weighted sum of the rows of `left` that are paired with it."""
        batch = torch.broadcast_shapes(weights.shape[:-2], left.shape[:-2])
        total = left.new_zeros((*batch, *left.shape[-2:]))
        for column, rows, keys in self._shifted():
            total[..., keys, :] += weights[..., rows, column, None] * left[..., rows, :]
        return total

    def lengths(self, left: Tensor, right: Tensor) -> Tensor:
        """Products of the lengths of the rows."""
        return self.multiply(left.norm(dim=-1, keepdim=True), right.norm(dim=-1, keepdim=True))


class _Exact(NamedTuple):
    """Attention in float64: the values, and how far a correct result's may be off."""

    pairs: _Pairs
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    shares: Tensor
    shares_error: Tensor
    terms: int
    unit: float


def _exact(call: Call) -> _Exact:
    """A score is off by its contraction's error, and its share by what that does in the exponent."""
    query, key, value = (tensor.double() for tensor in call.tensors)
    u, scale = unit_roundoff(call.arithmetic), call.factor
    pairs = _Pairs(call)
    scores = (pairs.multiply(query, key) * scale).masked_fill(pairs.missing, -math.inf)
    shares = torch.softmax(scores, -1)
    sizes = scores.abs().masked_fill(pairs.missing, 0)
    largest = sizes.amax(-1, keepdim=True) if sizes.numel() else sizes
    lengths = pairs.lengths(query, key)
    error = abs(scale) * _contraction_error(call, query) * u * lengths + 4 * u * (sizes + largest)
    terms = len(pairs.offsets)
    in_exponent = error + (shares * error).sum(-1, keepdim=True)
    shares_error = shares * (in_exponent.expm1() + (8 + terms) * u)
    return _Exact(pairs, query, key, value, scale, shares, shares_error, terms, u)


def _contraction_error(call: Call, operand: Tensor) -> float:
    return contraction_error(operand.shape[-1], call.arithmetic, torch.get_float32_matmul_precision())


def bounds(call: Call) -> Bounds:
    """Where a correct result lies."""
    exact = _exact(call)
    sizes = exact.shares_error + (4 + exact.terms) * exact.unit * exact.shares
    radius = exact.pairs.gather(sizes, exact.value.abs())
    return Bounds(exact.pairs.gather(exact.shares, exact.value), radius, radius, dtype=call.dtype)


def gradient_bounds(call: Call, dout: Tensor) -> tuple[Bounds, ...]:
    """Where correct gradients of query, key and value lie: a sum of n terms is off by (4 + n) u of their sizes."""
    pairs, query, key, value, scale, shares, shares_error, terms, u = _exact(call)
    dout = dout.double()
    slopes = pairs.multiply(dout, value)
    slopes_error = _contraction_error(call, value) * u * pairs.lengths(dout, value)
    mean = (shares * slopes).sum(-1, keepdim=True)
    mean_error = (shares_error * slopes.abs() + shares * (slopes_error + (4 + terms) * u * slopes.abs())).sum(
        -1, keepdim=True
    )
    weights = scale * shares * (slopes - mean)
    weights_error = abs(scale) * (
        shares_error * (slopes - mean).abs()
        + shares * (slopes_error + mean_error + 4 * u * (slopes.abs() + mean.abs()))
    )

    def of(operand: Tensor, reduce: Callable[..., Tensor], factors: Tensor, errors: Tensor, others: Tensor) -> Bounds:
        repeats = math.prod(call.batch) * operand.shape[-1] // max(1, operand.numel() // max(1, operand.shape[-2]))
        count = 4 + repeats * others.shape[-2]
        summed = reduce(factors, others).sum_to_size(operand.shape)
        radius = reduce(errors + count * u * factors.abs(), others.abs()).sum_to_size(operand.shape)
        return Bounds(summed, radius, radius, dtype=operand.dtype)

    return (
        of(call.query, pairs.gather, weights, weights_error, key),
        of(call.key, pairs.scatter, weights, weights_error, query),
        of(call.value, pairs.scatter, shares, shares_error, dout),
    )


def _operations(call: Call, pairs: int) -> int:
    """A multiplication and an addition a feature of keys and values, and the softmax."""
    return math.prod(call.batch) * pairs * 2 * (call.query.shape[-1] + call.value.shape[-1] + 4)


def _all_pairs(call: Call) -> int:
    return call.query.shape[-2] ** 2


def _own_pairs(call: Call) -> int:
    return log_sparse.Pattern(call.local, call.restart).pairs(call.query.shape[-2])


op = Op(
    NAME,
    prepare=prepare,
    preference=("triton", "chunked", "flex", "compile", "torchscript", "naive"),
    cases={
        # query, key, value
        "founding": ((2, 3, 13, 5), (2, 3, 13, 5), (2, 3, 13, 4)),
        "single": ((2, 3), (2, 3), (2, 2)),
        "one position": ((3, 1, 4), (3, 1, 4), (3, 1, 5)),
        "one head": ((7, 3), (7, 3), (7, 9)),
        "shared heads": ((4, 1, 33, 6), (3, 33, 6), (33, 8)),
        "values vary": ((33, 6), (33, 6), (2, 3, 33, 2)),
        "no positions": ((2, 0, 4), (2, 0, 4), (2, 0, 3)),
        "no heads": ((0, 5, 4), (5, 4), (1, 5, 4)),
        "several blocks": ((1100, 3), (1100, 3), (2, 1100, 2)),
    },
    sample=normal_sample,
    workload=workload,
    sizes={"H": 8, "L": 4096, "E": 64},
    bounds=bounds,
    gradient_bounds=gradient_bounds,
    core_dims=CORE_DIMS,
)


def _compiled_cost(call: Call) -> Cost:
    """What TorchInductor allocates, as measured: copies in the dtype of the arithmetic, scores, and mask."""
    size = call.arithmetic.itemsize
    results = math.prod(call.shape)
    output, operations = call.dtype.itemsize * results, _operations(call, _all_pairs(call))
    scores = size * math.prod(_batch(call.query, call.key)) * _all_pairs(call)
    copies = [size * tensor.numel() if tensor.dtype != call.arithmetic else 0 for tensor in call.tensors]
    rounded = size * results if call.dtype != call.arithmetic else 0
    if requires_grad(call.tensors):
        return Cost(output, scores + _all_pairs(call) + sum(copies), rounded, operations)
    temporary = scores + max(copies[0] + copies[1], copies[2] + rounded)
    return Cost(output, 0, temporary - output if rounded else temporary, operations)


def _cost(call: Call, function: Callable[[Call], Tensor], pairs: int) -> Cost:
    """As predicted for a function of a call."""
    bytes_needed = predict_bytes(lambda *tensors: function(Call(*tensors, *call[len(tensors) :])), *call.tensors)
    return Cost(*bytes_needed, _operations(call, pairs))


def _add_form(variant: str, form: Callable[..., Tensor], **options: Any) -> None:
    """A variant made of PyTorch operations."""
    run = functools.partial(by_form, form)
    op.variant(variant, **{"cost": lambda call: _cost(call, run, _all_pairs(call)), **options})(run)


_add_form("naive", naive)
_add_form("torchscript", script(naive), requires=[requires_torchscript])
_add_form("compile", compile_by_signature(naive), requires=[requires_inductor], cost=_compiled_cost)


def _add_bound(
    variant: str,
    compute: Callable[[Call], Tensor],
    compute_backward: Callable[[Tensor, Call, Sequence[bool]], Gradients],
    rehearse: Callable[[Call], Tensor],
    **options: Any,
) -> None:
    """A variant of a pair of functions; `rehearse` allocates what the forward one does."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dtype: torch.dtype,
        local: int,
        restart: int | None,
        scale: float | None,
    ) -> Tensor:
        return compute(Call(query, key, value, dtype, local, restart, scale))

    def backward(dout: Tensor, *arguments: Any) -> Gradients:
        return compute_backward(dout, Call(*arguments[:-1]), arguments[-1])

    binding = Binding(
        f"{NAME}_{variant}",
        forward=forward,
        backward=backward,
        composite=lambda *arguments: by_form(naive, Call(*arguments)),
        empty=lambda *arguments: empty(Call(*arguments)),
        empty_gradients=lambda *arguments: [tensor.new_empty(tensor.shape) for tensor in Call(*arguments).tensors],
        core_dims=tuple(CORE_DIMS.values()),
    )
    rehearsed = torch.no_grad()(rehearse)
    op.variant(variant, cost=lambda call: _cost(call, rehearsed, _own_pairs(call)), **options)(
        lambda call: binding(*call)
    )


def _rehearse_chunked(call: Call) -> Tensor:
    return log_sparse.rehearse(_blocks(call, kept=False), *call.tensors, call.factor, empty(call))


def _rehearse_triton(call: Call) -> Tensor:
    matrices = _matrices(call), _scale(call)
    out = empty(call)
    del matrices
    return out


def _few_features(call: Call) -> str:
    widest = max(call.query.shape[-1], call.value.shape[-1])
    reason = f"needs at most {FEATURES} features, which a row keeps in registers; got {widest}"
    return reason if widest > FEATURES else ""


_add_bound("chunked", _chunked, _chunked_backward, _rehearse_chunked)


def _rehearse_flex(call: Call) -> Tensor:
    return flex.rehearse(_matrices(call)).view(call.shape)


op.variant(
    "flex",
    cost=lambda call: _cost(call, torch.no_grad()(_rehearse_flex), _own_pairs(call)),
    requires=[requires_inductor, flex.requires_flex],
    automatic=lambda call: False,
)(_flex)
_add_bound(
    "triton", _triton, _triton_backward, _rehearse_triton, requires=[requires_triton, _few_features], automatic=on_cuda
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

    Query l attends to key j <= l iff `(l - j) mod restart` is in `{0..local-1}` or `{local-1 + 2^k, k >= 0}`: to itself
    and the `local - 1` before, then at distances that double, and so again after each `restart` positions.

    Args:
        query: `(*Q, L, E)`
        key: `(*K, L, E)`
        value: `(*V, L, F)`; the batch axes of the three broadcast
        local: number of nearest positions that are all attended to, oneself included
        restart: length after which the pattern begins anew, at least `local`; None for never
        scale: of the scores `query @ key.mT`; None for `1 / sqrt(E)`
        variant: the implementation to run; None for the best one that supports the call (see `effops.explain`)

    Returns:
        The attention, `(*batch, L, F)`, contiguous. The dtype is the promotion of the inputs'; the arithmetic is
        float32, or float64 for float64. Under autocast the tensors are cast to its dtype first, but for float64, as by
        `torch.nn.functional.scaled_dot_product_attention`.

    Variants chunked and triton save the three tensors for backward, no more, and take O(L log L) time and memory.
    Variant flex, PyTorch's FlexAttention, computes no gradients, takes float32 alone and compiles for seconds for each
    pattern, scale and number of features; it has not run on CUDA yet. It is never chosen unless it is named.

    Raises:
        TypeError: a tensor is none, or not of a floating-point dtype; `local` or `restart` is no integer
        ValueError: shapes do not fit, devices differ, `local` or `restart` is out of range, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> query, key, value = torch.randn(3, 8, 1000, 64).unbind()
        >>> effops.log_sparse_attention(query, key, value, local=4).shape
        torch.Size([8, 1000, 64])
    """
    with rounded_by_autocast(NAME, query, key=key, value=value) as operands:
        return call(op, *operands, local, restart, scale, variant=variant)
