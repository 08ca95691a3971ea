"""The floor of an op on this machine: what its formula costs in PyTorch's operations, if nothing else cost anything.

It is the sum of parts that are timed beside the variants: a matrix product for the pairs, written to a result that is
new (so that page faults count) or to one that is there; a special function of every pair, whose values stay in the
cache; and a second product for the sums that weights weigh. It is no less than the time in which a copy moves the
inputs and the result. Backward passes have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from effops import measure
from effops.numerics.precision import arithmetic_dtype

from .expected import Workload

CACHED_NUMEL = 2**18  # values of a special function that is timed: they stay in the L2 cache of each core


@dataclass(frozen=True)
class Formula:
    """What an op computes for each pair of rows.

    Attributes:
        is_product: whether a dot product makes pairs of all their coordinates
        functions: special functions of a pair; without a product, of each coordinate of a pair
        later: special functions of a pair besides
        is_reduced: whether pairs are not the result
        is_weighing: whether a second product reduces them
    """

    is_product: bool = True
    functions: tuple[Callable[..., Tensor], ...] = ()
    later: tuple[Callable[..., Tensor], ...] = ()
    is_reduced: bool = False
    is_weighing: bool = False


FORMULAS: Mapping[str, Formula] = {
    "broadcast_dot": Formula(),
    "normal_log_prob": Formula(),
    "normal_mixture_log_prob": Formula(later=(torch.exp,), is_reduced=True),
    "power_spherical_log_prob": Formula(functions=(torch.log,)),
    "power_spherical_mixture_log_prob": Formula(functions=(torch.log,), later=(torch.exp,), is_reduced=True),
    "von_mises_fisher_log_prob": Formula(),
    "von_mises_fisher_mixture_log_prob": Formula(later=(torch.exp,), is_reduced=True),
    "attention_scores": Formula(),
    "attention_weights": Formula(later=(torch.exp,)),
    "attention": Formula(later=(torch.exp,), is_reduced=True, is_weighing=True),
    "additive_attention_scores": Formula(is_product=False, functions=(torch.tanh,)),
    "additive_attention": Formula(
        is_product=False, functions=(torch.tanh,), later=(torch.exp,), is_reduced=True, is_weighing=True
    ),
}


@dataclass(frozen=True)
class Part:
    """A part of a floor: what is timed, and how often its time counts."""

    work: measure.Pass
    count: float


def parts_of(workload: Workload, args: Sequence[Tensor]) -> dict[str, Part]:
    """The parts of the floor of a pass, by name; none if it has no floor."""
    formula = FORMULAS.get(workload.op.name)
    if workload.backward or formula is None:
        return {}
    plan = workload.op.prepare(*args, **workload.options).plan
    batch, rows, columns = plan.numel(plan.batch), plan.numel(plan.rows), plan.numel(plan.columns)
    last = args[1] if formula.is_weighing else args[-1]
    dimension, like = last.shape[-1], last.detach().to(arithmetic_dtype(workload.dtype))
    parts = {}
    if formula.is_product:
        left, right = like.new_ones(batch, rows, dimension), like.new_ones(batch, columns, dimension)
        parts["product of the floor"] = _product(left, right.mT, is_new=not formula.is_reduced)
    if formula.is_weighing:
        width = args[2].shape[-1]
        parts["sums of the floor"] = _product(
            like.new_ones(batch, rows, columns), like.new_ones(batch, columns, width), is_new=True
        )
    values, out = like.new_full((CACHED_NUMEL,), 0.5), like.new_empty(CACHED_NUMEL)
    pairs = batch * rows * columns
    counts = dict.fromkeys(formula.functions, pairs * (1 if formula.is_product else dimension))
    for function, count in {**counts, **dict.fromkeys(formula.later, pairs)}.items():
        work = measure.Pass(partial(function, out=out), (values,))
        parts[f"{function.__name__} of the floor"] = Part(work, count / CACHED_NUMEL)
    return parts


def _product(left: Tensor, right: Tensor, *, is_new: bool) -> Part:
    out = None if is_new else left.new_empty(*left.shape[:-1], right.shape[-1])
    return Part(measure.Pass(partial(torch.bmm, out=out), (left, right)), 1)


def total_ms(parts: Mapping[str, Part], timings: Mapping[str, measure.Timing]) -> float | None:
    """The sum of the parts, from the time of each; None if there are none."""
    if not parts:
        return None
    return math.fsum(part.count * timings[name].median_ms for name, part in parts.items())
