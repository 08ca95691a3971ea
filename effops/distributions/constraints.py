"""What a direction must be."""

from torch import Tensor
from torch.distributions.constraints import Constraint

from effops.numerics.directions import lengths


class _UnitVector(Constraint):
    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        return lengths(value)[1]


unit_vector = _UnitVector()
"""The constraint of vectors of length 1, up to rounding to their dtype."""
