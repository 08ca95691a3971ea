"""Operands that a CPU copies in another dtype: none of these copies was once predicted."""

import pytest
import torch
from torch import nn

from effops.memory import Workload, anatomy

COUNT = 5003
ALLOWED_BYTES = 64  # numbers that operators wrap in tensors


class Operands:
    """Tensors of one size and several dtypes."""

    def __init__(self):
        self.f = torch.randn(COUNT)
        self.d, self.h = self.f.double(), self.f.bfloat16()
        self.b = self.f > 0
        self.i = torch.randint(1, 5, (COUNT,))
        self.i8 = self.i.to(torch.int8)


FUNCTIONS = {
    "product with a mask": lambda x: x.f * x.b,
    "product with wider floats": lambda x: x.f * x.d,
    "sum with narrower floats": lambda x: x.h + x.f,
    "difference of integers": lambda x: x.i - x.f,
    "comparison with narrower floats": lambda x: x.h > x.f,
    "comparison with integers": lambda x: x.i == x.f,
    "choice by a mask": lambda x: torch.where(x.b, x.h, x.f),
    "filled by a mask": lambda x: x.f.masked_fill(x.b, 0),
    "sine of integers": lambda x: x.i.sin(),
    "quotient of integers": lambda x: x.i / x.i,
    "quotient by a number": lambda x: x.i / 2,
    "product with a number": lambda x: x.i * 2.5,
    "narrow product with a number": lambda x: x.h * 2.0,
    "mask times a number": lambda x: x.b * 2,
    "quotient rounded down": lambda x: x.i // 2.5,
    "power of a number": lambda x: 2.0**x.i,
    "in place, of wider floats": lambda x: x.f.clone().mul_(x.d),
    "in place, of narrower floats": lambda x: x.d.clone().mul_(x.f),
    "comparison in place": lambda x: x.f.clone().eq_(x.d),
    "three dtypes": lambda x: torch.addcmul(x.f, x.h, x.d),
    "bounds of integers": lambda x: torch.clamp(x.f, x.i, x.i),
    "bits of a mask": lambda x: x.b & x.i,
    "logical and": lambda x: torch.logical_and(x.f, x.b),
    "narrow integers": lambda x: x.i8 + x.i,
    "a number in a tensor": lambda x: x.f + torch.tensor(2.0, dtype=torch.float64),
    "a broadcast mask": lambda x: x.f[:100] * x.b[:50, None],
    "infinite floats": lambda x: x.f.isinf(),
    "complex numbers": lambda x: torch.polar(x.f, x.f).abs(),
    "copy": lambda x: x.f.clone().copy_(x.d),
    "sum of a mask": lambda x: x.b.sum(),
    "sum of narrow integers": lambda x: x.i8.sum(),
    "sum in wider floats": lambda x: x.f.sum(dtype=torch.float64),
    "mean in wider floats": lambda x: x.h.mean(dtype=torch.float32),
    "product of integers": lambda x: x.i8.prod(),
    "cumulative sum of a mask": lambda x: x.b.cumsum(0),
    "any of floats": lambda x: x.f.any(),
    "norm in wider floats": lambda x: torch.linalg.vector_norm(x.h, dtype=torch.float32),
    "counted along an axis": lambda x: x.f.count_nonzero(0),
    "softmax in wider floats": lambda x: x.h.softmax(0, dtype=torch.float32),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operands_of_other_dtypes_are_copied(name):
    operands = Operands()
    workload = Workload(nn.Identity, torch.zeros, generate=lambda model, x: FUNCTIONS[name](operands))
    found = anatomy(workload, 1, measure=True)
    assert found.unknown == ()
    assert abs(found.peak_bytes - found.measured.peak_bytes) <= ALLOWED_BYTES, found


def test_cuda_converts_numbers_one_by_one():
    operands = Operands()
    workload = Workload(nn.Identity, torch.zeros, generate=lambda model, x: operands.f * operands.d)
    assert anatomy(workload, 1, device="cuda").peak_bytes == 4 + 8 * COUNT
