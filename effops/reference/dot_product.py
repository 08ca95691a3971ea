"""The references of `effops.ops.attention.dot_product`."""

from torch import Tensor

from effops.numerics.precision import contraction_error, matmul_precision, unit_roundoff
from effops.ops.attention.call import AttentionCall
from effops.ops.attention.dot_product import attention, attention_scores, attention_weights
from effops.reference.attention import ExactScores, attention_reference
from effops.reference.reference import Bounds, exact_dot, normal_workload, summed_bounds


def _scores(call: AttentionCall) -> tuple[Tensor, Tensor]:
    query, key = call.scored
    scale, u = call.factor, unit_roundoff(call.arithmetic)
    rounding = contraction_error(query.shape[-1], call.arithmetic, matmul_precision())
    dot = exact_dot(key.unsqueeze(-3), query.unsqueeze(-2))
    sizes = query.double().norm(dim=-1).unsqueeze(-1) * key.double().norm(dim=-1).unsqueeze(-2)
    return scale * dot, abs(scale) * u * (rounding * sizes + 2 * dot.abs())


def _gradient_bounds(call: AttentionCall, dscores: Tensor, error: Tensor) -> tuple[Bounds, ...]:
    query, key = call.scored
    scale, u = call.factor, unit_roundoff(call.arithmetic)

    def bounds_of(operand: Tensor, dscores: Tensor, error: Tensor, other: Tensor) -> Bounds:
        other = other.double()
        error, size = (abs(scale) * (weights @ other.abs()) for weights in (error, dscores.abs()))
        return summed_bounds(scale * (dscores @ other), error, size, other.shape[-2], operand, u)

    return bounds_of(query, dscores, error, key), bounds_of(key, dscores.mT, error.mT, query)


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
SIZES = {"B": 8, "H": 16, "L": 512, "D": 64}  # a batch of heads, of the sizes of a layer of BERT-large
for function in (attention_scores, attention_weights):
    attention_reference(function, SCORES, cases=PAIRS, workload=normal_workload("BHLD", "BHLD"), sizes=SIZES)
attention_reference(attention, SCORES, cases=SUMS, workload=normal_workload("BHLD", "BHLD", "BHLD"), sizes=SIZES)
