"""The references of `effops.ops.attention.additive`."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from effops.blocks.cutting import broadcast_slice, fit, visited_pieces, whole
from effops.numerics.precision import arithmetic_dtype, unit_roundoff, wider
from effops.numerics.shapes import broadcast_shapes
from effops.ops.attention.additive import additive_attention, additive_attention_scores
from effops.ops.attention.call import AttentionCall
from effops.reference.attention import ExactScores, attention_reference
from effops.reference.reference import Bounds, Shape, normal_workload

TERM_ERROR = 8  # the error that a term of a score may have, in roundoffs times |weight|
SLOPE_ERROR = 24  # the error that a term of a gradient may have, in roundoffs times |G weight|
EXACT_VALUES = 2**17  # how many terms are computed at once in float64


def exact_scores(query: Tensor, key: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of operands that broadcast, and the error that arithmetic in their dtype may have, both in float64.

    The error is (8 + sqrt(D)) u sum_d |weight_d|. Each term is off by 8 u |weight| at most, and the sum of many terms
    adds rounding of its own.
    """
    units = (TERM_ERROR + math.sqrt(query.shape[-1])) * _roundoff(query, key, weight)
    shape = broadcast_shapes(query.shape, key.shape, weight.shape)[:-1]
    value, error = (query.new_empty(shape, dtype=torch.float64) for _ in range(2))
    for pairs, (q, k, w) in _in_float64(shape, query, key, weight):
        value[pairs] = (w * torch.tanh(q + k)).sum(-1)
        error[pairs] = units * w.abs().sum(-1)
    return value, error


def exact_gradients(
    query: Tensor, key: Tensor, weight: Tensor, dout: Tensor, error: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """The gradients of query, key and weight for a gradient `dout` of the scores, and the errors that they may have.

    `dout` may have axes along which no score varies, since what the scores are used for does.
    A sum of n terms G weight S is off by (24 + sqrt(n)) u times the sum of |G weight|. A sum of n terms G tanh is off
    by as much of the sum of |G|. `error` is how far `dout` may be off, and adds to both.
    """
    tensors = query, key, weight
    u, values = _roundoff(*tensors), dout.numel() * query.shape[-1]
    units = [(SLOPE_ERROR + math.sqrt(values // max(1, tensor.numel()))) * u for tensor in tensors]
    totals = [[tensor.new_zeros(tensor.shape, dtype=torch.float64) for _ in range(2)] for tensor in tensors]
    views = [[_with_axes(total, dout.ndim + 1) for total in pair] for pair in totals]
    for pairs, (q, k, w) in _in_float64(dout.shape, *tensors):
        tanh = torch.tanh(q + k)
        slope = w * (1 - tanh * tanh)
        g = dout[pairs].double().unsqueeze(-1)
        of_sum, of_weight = (g * slope, (g * w).abs()), (g * tanh, g.abs())
        for (total, radius), unit, (terms, size) in zip(views, units, (of_sum, of_sum, of_weight)):
            _add(total, pairs, terms)
            _add(radius, pairs, size, unit)
        if error is not None:
            off = error[pairs].unsqueeze(-1)
            inherited = slope.abs() * off, tanh.abs() * off
            for (_, radius), terms in zip(views, (inherited[0], *inherited)):
                _add(radius, pairs, terms)
    return [(value, radius) for value, radius in totals]


def _add(total: Tensor, pairs: tuple[slice, ...], terms: Tensor, factor: float = 1.0) -> None:
    """Add `factor` times the terms to `total`, summed along the axes where `total` has size 1."""
    target = broadcast_slice(total, pairs)
    shape = tuple(1 if own == 1 else size for own, size in zip(target.shape, terms.shape))
    target.add_(terms.sum_to_size(shape), alpha=factor)


def _roundoff(query: Tensor, key: Tensor, weight: Tensor) -> float:
    """The unit roundoff of the arithmetic."""
    return unit_roundoff(arithmetic_dtype(wider(wider(query.dtype, key.dtype), weight.dtype)))


def _in_float64(pairs: Shape, *tensors: Tensor) -> Iterator[tuple[tuple[slice, ...], list[Tensor]]]:
    """The pairs in pieces, each with the parts of the operands that belong to it, in float64."""
    views = [_with_axes(tensor, len(pairs) + 1) for tensor in tensors]
    for piece in visited_pieces(whole(pairs), fit(pairs, EXACT_VALUES // max(1, tensors[0].shape[-1]))):
        yield piece, [broadcast_slice(view, piece).double() for view in views]


def _with_axes(tensor: Tensor, count: int) -> Tensor:
    return tensor[(None,) * (count - tensor.ndim)]


def _scores(call: AttentionCall) -> tuple[Tensor, Tensor]:
    return exact_scores(*_broadcast(call))


def _gradient_bounds(call: AttentionCall, dscores: Tensor, error: Tensor) -> tuple[Bounds, ...]:
    u = unit_roundoff(call.arithmetic)
    bounds = []
    for (value, radius), tensor in zip(exact_gradients(*_broadcast(call), dscores, error), call.scored):
        radius = (radius + 4 * u * value.abs()).view(tensor.shape)
        bounds.append(Bounds(value.view(tensor.shape), radius, radius))
    return tuple(bounds)


def _broadcast(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    query, key, weight = call.scored
    return query.unsqueeze(-2), key.unsqueeze(-3), weight


SCORES = ExactScores(_scores, _gradient_bounds)
PAIRS: dict[str, tuple[Shape, ...]] = {
    # query, key, weight
    "founding": ((2, 5, 7), (2, 6, 7), (7,)),
    "heads": ((2, 3, 5, 4), (2, 1, 6, 4), (3, 1, 1, 4)),
    "single": ((1, 2), (1, 2), (2,)),
    "shared queries": ((4, 5), (3, 6, 5), (5,)),
    "a weight for each query": ((4, 5), (6, 5), (4, 1, 5)),
    "a weight for each key": ((4, 5), (6, 5), (6, 5)),
    "wide": ((2, 3, 300), (2, 3, 300), (300,)),
    "several blocks": ((2, 70, 3), (2, 530, 3), (3,)),
    "no query": ((3, 0, 5), (3, 4, 5), (5,)),
    "no key": ((3, 4, 5), (3, 0, 5), (5,)),
    "no dimension": ((3, 4, 0), (3, 5, 0), (0,)),
}
SUMS: dict[str, tuple[Shape, ...]] = {
    name: (query, key, (*key[:-1], 6), weight) for name, (query, key, weight) in PAIRS.items()
}
SUMS["founding"] += ((5, 6),)  # an additive mask
SUMS["mask of keys"] = ((2, 3, 5, 4), (2, 1, 6, 4), (2, 1, 6, 3), (4,), (2, 1, 1, 6))
# Queries, keys, values of the same dimension and a weight, of the sizes of a decoder over a long input, such as speech.
SIZES = {"B": 1, "L": 256, "S": 2048, "D": 256}
attention_reference(
    additive_attention_scores, SCORES, cases=PAIRS, workload=normal_workload("BLD", "BSD", "D"), sizes=SIZES
)
attention_reference(
    additive_attention, SCORES, cases=SUMS, workload=normal_workload("BLD", "BSD", "BSD", "D"), sizes=SIZES
)
