"""The reference of `effops.ops.attention.log_sparse`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effops.numerics.precision import contraction_error, unit_roundoff
from effops.ops.attention.log_sparse import LogSparseCall, log_sparse_attention
from effops.reference.bounds import Bounds
from effops.reference.reference import Reference, normal_sample


def _workload(*, H: int, L: int, E: int, **options: Any) -> tuple[Tensor, ...]:
    """H heads of L positions and E features."""
    return normal_sample((H, L, E), (H, L, E), (H, L, E), **options)


def _offsets(length: int, local: int, restart: int | None) -> list[int]:
    """The offsets of the pattern below `length`."""
    period = restart or max(1, length)
    near = {*range(local), *(local - 1 + 2**k for k in range(length.bit_length()))}
    return [offset for offset in range(length) if offset % period in near]


class _Pairs:
    """The pairs of the pattern, in float64: a matrix with a column for each offset."""

    def __init__(self, call: LogSparseCall) -> None:
        self.length = call.query.shape[-2]
        self.offsets = _offsets(self.length, call.local, call.restart)
        rows = torch.arange(self.length, device=call.device)
        self.missing = rows.unsqueeze(-1) < torch.tensor(self.offsets, device=call.device)

    def _shifted(self) -> Iterator[tuple[int, slice, slice]]:
        """For each offset: its column, the rows with a key at it, and these keys."""
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
        """For each row, the weighted sum of the rows of `right` that it is paired with."""
        batch = torch.broadcast_shapes(weights.shape[:-2], right.shape[:-2])
        total = right.new_zeros((*batch, *right.shape[-2:]))
        for column, rows, keys in self._shifted():
            total[..., rows, :] += weights[..., rows, column, None] * right[..., keys, :]
        return total

    def scatter(self, weights: Tensor, left: Tensor) -> Tensor:
        """For each row, the weighted sum of the rows of `left` that are paired with it."""
        batch = torch.broadcast_shapes(weights.shape[:-2], left.shape[:-2])
        total = left.new_zeros((*batch, *left.shape[-2:]))
        for column, rows, keys in self._shifted():
            total[..., keys, :] += weights[..., rows, column, None] * left[..., rows, :]
        return total

    def lengths(self, left: Tensor, right: Tensor) -> Tensor:
        """For each pair, the product of the lengths of its two rows."""
        return self.multiply(left.norm(dim=-1, keepdim=True), right.norm(dim=-1, keepdim=True))


class _Exact(NamedTuple):
    """Attention in float64: its operands, the shares (softmax), and by how much correct shares may be off.

    `terms` is the number of offsets, and `unit` the unit roundoff of the arithmetic.
    """

    pairs: _Pairs
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    shares: Tensor
    shares_error: Tensor
    terms: int
    unit: float


def _exact(call: LogSparseCall) -> _Exact:
    """The call in float64. A score has the error of its contraction, which is in the exponent of its share."""
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


def _contraction_error(call: LogSparseCall, operand: Tensor) -> float:
    return contraction_error(operand.shape[-1], call.arithmetic, torch.get_float32_matmul_precision())


def _bounds(call: LogSparseCall) -> Bounds:
    """The bounds of a correct result."""
    exact = _exact(call)
    sizes = exact.shares_error + (4 + exact.terms) * exact.unit * exact.shares
    radius = exact.pairs.gather(sizes, exact.value.abs())
    return Bounds(exact.pairs.gather(exact.shares, exact.value), radius, radius, dtype=call.dtype)


def _gradient_bounds(call: LogSparseCall, dout: Tensor) -> tuple[Bounds, ...]:
    """The bounds of correct gradients of query, key and value.

    A sum of n terms is off by (4 + n) u times the sum of their absolute values.
    """
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

    def bounds_of(
        operand: Tensor, reduce: Callable[..., Tensor], factors: Tensor, errors: Tensor, others: Tensor
    ) -> Bounds:
        repeats = math.prod(call.batch) * operand.shape[-1] // max(1, operand.numel() // max(1, operand.shape[-2]))
        count = 4 + repeats * others.shape[-2]
        summed = reduce(factors, others).sum_to_size(operand.shape)
        radius = reduce(errors + count * u * factors.abs(), others.abs()).sum_to_size(operand.shape)
        return Bounds(summed, radius, radius, dtype=operand.dtype)

    return (
        bounds_of(call.query, pairs.gather, weights, weights_error, key),
        bounds_of(call.key, pairs.scatter, weights, weights_error, query),
        bounds_of(call.value, pairs.scatter, shares, shares_error, dout),
    )


Reference(
    log_sparse_attention,
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
    workload=_workload,
    sizes={"H": 8, "L": 4096, "E": 64},
    bounds=_bounds,
    gradient_bounds=_gradient_bounds,
)
