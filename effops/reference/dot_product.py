"""The references of `effops.ops.attention.dot_product`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from effops.numerics.precision import contraction_error, matmul_precision, unit_roundoff
from effops.ops.attention.call import AttentionCall
from effops.ops.attention.dot_product import KIND, attention, attention_scores, attention_weights
from effops.reference.attention import ExactScores, attention_reference, summed_bounds
from effops.reference.bounds import Bounds, exact_dot
from effops.reference.reference import normal_sample


def _scores(call: AttentionCall) -> tuple[Tensor, Tensor]:
    query, key = call.scored
    scale, u = KIND.scale(call), unit_roundoff(call.arithmetic)
    rounding = contraction_error(query.shape[-1], call.arithmetic, matmul_precision())
    dot = exact_dot(key.unsqueeze(-3), query.unsqueeze(-2))
    sizes = query.double().norm(dim=-1).unsqueeze(-1) * key.double().norm(dim=-1).unsqueeze(-2)
    return scale * dot, abs(scale) * u * (rounding * sizes + 2 * dot.abs())


def _gradient_bounds(call: AttentionCall, dscores: Tensor, error: Tensor) -> tuple[Bounds, ...]:
    query, key = (tensor.double() for tensor in call.scored)
    scale, u = abs(KIND.scale(call)), unit_roundoff(call.arithmetic)
    of_query = (
        KIND.scale(call) * (dscores @ key),
        scale * (error @ key.abs()),
        scale * (dscores.abs() @ key.abs()),
    )
    of_key = (
        KIND.scale(call) * (dscores.mT @ query),
        scale * (error.mT @ query.abs()),
        scale * (dscores.mT.abs() @ query.abs()),
    )
    return (
        summed_bounds(*of_query, key.shape[-2], call.scored[0], u),
        summed_bounds(*of_key, query.shape[-2], call.scored[1], u),
    )


def _pairs_workload(*, B: int, H: int, L: int, D: int, **options: Any) -> tuple[Tensor, ...]:
    """Queries and keys of a batch of heads. The default sizes are those of a layer of BERT-large."""
    return normal_sample((B, H, L, D), (B, H, L, D), **options)


def _workload(*, B: int, H: int, L: int, D: int, **options: Any) -> tuple[Tensor, ...]:
    """Queries, keys and values of a batch of heads. The default sizes are those of a layer of BERT-large."""
    return normal_sample((B, H, L, D), (B, H, L, D), (B, H, L, D), **options)


SCORES = ExactScores(_scores, _gradient_bounds)
PAIRS = {
    # query, key, additive mask
    "founding": ((2, 3, 5, 7), (2, 3, 6, 7), (5, 6)),
    "no mask": ((4, 5, 8), (4, 6, 8)),
    "single": ((1, 2), (1, 2)),
    "two axes": ((9, 4), (7, 4), (9, 1)),
    "shared keys": ((2, 3, 4, 5), (2, 1, 6, 5), (2, 1, 1, 6)),
    "shared queries": ((4, 5), (3, 6, 5), (3, 4, 6)),
    "mask varies alone": ((4, 5), (6, 5), (2, 3, 1, 6)),
    "wide": ((2, 3, 300), (2, 3, 300)),
    "several blocks": ((2, 270, 9), (2, 1030, 9)),
    "no query": ((3, 0, 5), (3, 4, 5), (0, 4)),
    "no key": ((3, 4, 5), (3, 0, 5), (3, 4, 1)),
    "no head": ((0, 4, 5), (0, 3, 5)),
    "no dimension": ((3, 4, 0), (3, 5, 0)),
}
SUMS = {name: (query, key, (*key[:-1], 6), *mask) for name, (query, key, *mask) in PAIRS.items()}
SUMS["values of more heads"] = ((3, 4, 5), (6, 5), (2, 3, 6, 7))
SIZES = {"B": 8, "H": 16, "L": 512, "D": 64}
for function in (attention_scores, attention_weights):
    attention_reference(function, SCORES, cases=PAIRS, workload=_pairs_workload, sizes=SIZES)
attention_reference(attention, SCORES, cases=SUMS, workload=_workload, sizes=SIZES)
