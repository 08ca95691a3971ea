"""The reference of `effops.ops.attention.log_sparse`."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from effops.numerics.precision import contraction_error, unit_roundoff
from effops.numerics.shapes import broadcast_shapes
from effops.ops.attention.call import LogSparseCall
from effops.ops.attention.log_sparse import log_sparse_attention
from effops.reference.reference import Bounds, Reference, normal_sample, normal_workload


def _offsets(length: int, local: int, restart: int | None) -> list[int]:
    """The offsets of the pattern below `length`."""
    period = restart or max(1, length)
    near = {*range(local), *(local - 1 + 2**k for k in range(length.bit_length()))}
    return [offset for offset in range(length) if offset % period in near]


class _Exact:
    """A call in float64. The pairs of the pattern are a matrix with a column for each offset.

    Attributes:
        query, key, value: the operands
        shares, shares_error: the softmax of the scores, and by how much correct shares may be off
        unit: the unit roundoff of the arithmetic
    """

    def __init__(self, call: LogSparseCall) -> None:
        self.call, self.unit = call, unit_roundoff(call.arithmetic)
        self.query, self.key, self.value = (tensor.double() for tensor in call.tensors)
        self.length = self.key.shape[-2]
        self.offsets = _offsets(self.length, call.local, call.restart)
        rows = torch.arange(self.length, device=call.device)
        missing = rows.unsqueeze(-1) < torch.tensor(self.offsets, device=call.device)
        scores = (self.multiply(self.query, self.key) * call.factor).masked_fill(missing, -math.inf)
        self.shares = torch.softmax(scores, -1)
        sizes = scores.abs().masked_fill(missing, 0)
        largest = sizes.amax(-1, keepdim=True) if sizes.numel() else sizes
        # A score has the error of its contraction, which is in the exponent of its share.
        error = self.multiply_error(self.query, self.key, abs(call.factor)) + 4 * self.unit * (sizes + largest)
        in_exponent = error + (self.shares * error).sum(-1, keepdim=True)
        self.shares_error = self.shares * (in_exponent.expm1() + (8 + len(self.offsets)) * self.unit)

    def _shifted(self) -> Iterator[tuple[int, slice, slice]]:
        """For each offset: its column, the rows with a key at it, and these keys."""
        for column, offset in enumerate(self.offsets):
            yield column, slice(offset, self.length), slice(0, self.length - offset)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Dot products of all pairs of the rows of `left` and `right`; 0 where there is no pair."""
        batch = broadcast_shapes(left.shape[:-2], right.shape[:-2])
        products = left.new_zeros((*batch, self.length, len(self.offsets)))
        for column, rows, keys in self._shifted():
            products[..., rows, column] = (left[..., rows, :] * right[..., keys, :]).sum(-1)
        return products

    def multiply_error(self, left: Tensor, right: Tensor, factor: float = 1) -> Tensor:
        """By how much such dot products may be off, times `factor`: in proportion to the lengths of both rows."""
        rounding = contraction_error(left.shape[-1], self.call.arithmetic, torch.get_float32_matmul_precision())
        lengths = self.multiply(left.norm(dim=-1, keepdim=True), right.norm(dim=-1, keepdim=True))
        return factor * rounding * self.unit * lengths

    def weigh(self, weights: Tensor, vectors: Tensor, *, mirrored: bool = False) -> Tensor:
        """For each row, the weighted sum of the vectors at its keys; if `mirrored`, at the rows that it is a key of."""
        batch = broadcast_shapes(weights.shape[:-2], vectors.shape[:-2])
        total = vectors.new_zeros((*batch, *vectors.shape[-2:]))
        for column, rows, keys in self._shifted():
            summed, given = (keys, rows) if mirrored else (rows, keys)
            total[..., summed, :] += weights[..., rows, column, None] * vectors[..., given, :]
        return total


def _bounds(call: LogSparseCall) -> Bounds:
    """The bounds of a correct result."""
    exact = _Exact(call)
    sizes = exact.shares_error + (4 + len(exact.offsets)) * exact.unit * exact.shares
    radius = exact.weigh(sizes, exact.value.abs())
    return Bounds(exact.weigh(exact.shares, exact.value), radius, radius, dtype=call.dtype)


def _gradient_bounds(call: LogSparseCall, dout: Tensor) -> tuple[Bounds, ...]:
    """The bounds of correct gradients of query, key and value.

    A sum of n terms is off by (4 + n) u times the sum of their absolute values.
    """
    exact, dout = _Exact(call), dout.double()
    shares, shares_error, u = exact.shares, exact.shares_error, exact.unit
    slopes, slopes_error = exact.multiply(dout, exact.value), exact.multiply_error(dout, exact.value)
    mean = (shares * slopes).sum(-1, keepdim=True)
    mean_terms = shares_error * slopes.abs() + shares * (slopes_error + (4 + len(exact.offsets)) * u * slopes.abs())
    mean_error = mean_terms.sum(-1, keepdim=True)
    weights = call.factor * shares * (slopes - mean)
    weights_error = abs(call.factor) * (
        shares_error * (slopes - mean).abs()
        + shares * (slopes_error + mean_error + 4 * u * (slopes.abs() + mean.abs()))
    )

    def bounds_of(operand: Tensor, factors: Tensor, errors: Tensor, others: Tensor, *, mirrored: bool) -> Bounds:
        repeats = math.prod(call.batch) * operand.shape[-1] // max(1, operand.numel() // max(1, operand.shape[-2]))
        rounding = (4 + repeats * others.shape[-2]) * u * factors.abs()
        value, radius = (
            exact.weigh(*pair, mirrored=mirrored).sum_to_size(operand.shape)
            for pair in ((factors, others), (errors + rounding, others.abs()))
        )
        return Bounds(value, radius, radius, dtype=operand.dtype)

    return (
        bounds_of(call.query, weights, weights_error, exact.key, mirrored=False),
        bounds_of(call.key, weights, weights_error, exact.query, mirrored=True),
        bounds_of(call.value, shares, shares_error, dout, mirrored=True),
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
    workload=normal_workload("HLE", "HLE", "HLE"),  # H heads of L positions and E features
    sizes={"H": 8, "L": 4096, "E": 64},
    bounds=_bounds,
    gradient_bounds=_gradient_bounds,
)
