"""Exponentials of many values."""

import math

from torch import Tensor

LOG2_E = math.log2(math.e)


def exp_(values: Tensor) -> Tensor:
    """Overwrite values with their exponentials, computed as powers of two.

    PyTorch's `exp2` takes 0.35 of the time of its `exp`, and as long for every value. `exp` of -inf takes 5 times as
    long, and where the result is denormal 9 to 100 times (float32, AVX-512, 2 cores). The product rounds the exponent:
    the result is off by |value| roundoffs, so that of terms of a sum, relative to the largest, by less than one.
    """
    return values.mul_(LOG2_E).exp2_()
