"""Exponentials of many values."""

import math

from torch import Tensor

LOG2_E = math.log2(math.e)


def exp_(values: Tensor) -> Tensor:
    """Overwrite values with their exponentials, computed as powers of two.

    PyTorch's `exp2` takes 0.35 of the time of its `exp`, whatever the value. `exp` takes 5 times as long for -inf, and
    9 to 100 times where the result is denormal (float32, AVX-512, 2 cores). The product with log2(e) is rounded. So a
    result is off by |value| roundoffs. In a sum of exponentials of which the largest is 1, a term is then off by less
    than one roundoff of the sum, since a large |value| makes a small term.
    """
    return values.mul_(LOG2_E).exp2_()
