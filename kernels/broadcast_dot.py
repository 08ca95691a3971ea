"""The dot product itself, as a map of dot products for `pairs`: phi(dot) = dot, W(s) = 0."""

import triton
import triton.language as tl

from .tiles import Map


@triton.jit
def phi(dot, tolerance):
    return dot, tl.zeros_like(dot) + 1


@triton.jit
def zero(scale, D):
    return tl.zeros_like(scale)


MAP = Map(phi, zero, zero)
