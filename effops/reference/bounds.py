"""Judge a result: its error against float64, in units of a budget, which is the rounding error of a correct variant.

An error ratio of at most 1 passes. Budgets follow from the dtype of the arithmetic and from the error allowed to a
contraction. They do not follow from the error that some variant happens to have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bounds:
    """The float64 value of a result and how far below and above it a correct result may lie, elementwise.

    NaN is required where `value` is NaN, and accepted where `may_be_nan` holds. If `dtype` is given, the result must
    have it.
    """

    value: Tensor
    below: Tensor
    above: Tensor
    may_be_nan: Tensor | None = None
    dtype: torch.dtype | None = None

    def error_ratio(self, result: Tensor) -> float:
        """The largest error of `result` in units of its budget. It is infinite for a wrong shape, dtype or NaN."""
        if result.shape != self.value.shape or result.dtype != (self.dtype or result.dtype):
            return float("inf")
        if result.numel() == 0:
            return 0.0
        finite = torch.finfo(result.dtype)
        found, value = result.detach().to(self.value), self.value
        # The result is rounded once to its own dtype.
        rounding = value.abs() * (finite.eps / 2) + finite.smallest_normal
        error = found - value
        ratio = torch.where(error < 0, -error / (self.below + rounding), error / (self.above + rounding))
        overflow = (found.sign() == value.sign()) & found.isinf() & (value.abs() + self.above + rounding >= finite.max)
        ratio = torch.where(overflow | (found == value), 0.0, ratio)
        ratio = torch.where(value.isnan() & found.isnan(), 0.0, ratio)
        if self.may_be_nan is not None:
            ratio = torch.where(found.isnan() & self.may_be_nan, 0.0, ratio)
        return float(torch.nan_to_num(ratio, nan=float("inf")).max())


def worst_error_ratio(expected: Sequence[Bounds], results: Sequence[Tensor | None]) -> float:
    """The largest error of results in units of their budgets. It is infinite if all results are None."""
    found = [(bounds, result) for bounds, result in zip(expected, results, strict=True) if result is not None]
    return max((bounds.error_ratio(result) for bounds, result in found), default=float("inf"))


def exact_dot(loc: Tensor, x: Tensor) -> Tensor:
    """The dot product <loc, x> of every pair, in float64. For float64 inputs it is computed in extended precision."""
    if torch.float64 not in (loc.dtype, x.dtype):
        return torch.einsum("...d,...d->...", loc.double(), x.double())
    import numpy

    dot = numpy.einsum("...d,...d->...", *(t.detach().cpu().numpy().astype(numpy.longdouble) for t in (loc, x)))
    return torch.tensor(dot.astype(numpy.float64), device=loc.device)
