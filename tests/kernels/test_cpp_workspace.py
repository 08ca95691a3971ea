"""The workspace of the C++ library: what memory held before costs nothing."""

import ctypes

import pytest
import torch
from effops.kernels import library

import effops

pytestmark = pytest.mark.skipif(library.obstacle() != "", reason=library.obstacle())
ENVIRONMENT, MXCSR = 32, 28  # bytes of C's floating-point environment on x86, and where the flags of vectors are
FLAGS, SUBNORMAL = 0x3F, 0x02  # all flags, and the one that an operand raises

# Rows of the first operand and of the second, and coordinates: blocks, parts and vectors that are not whole.
SIZES = [(45, 70, 9), (150, 70, 40), (17, 141, 72), (20, 301, 21), (30, 801, 40)]


def normalised(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def directional(batch, M, N, D):
    return [normalised(batch, 1, N, D), torch.rand(batch, 1, N) + 1, normalised(batch, M, 1, D)]


def normal(batch, M, N, D, coordinates):
    return [torch.randn(batch, 1, N, D), torch.rand(batch, 1, N, coordinates) + 1, torch.randn(batch, M, 1, D)]


def attention(batch, M, N, D):
    return [torch.randn(batch, M, D), torch.randn(batch, N, D), torch.randn(batch, N, D)]


CALLS = {
    "power_spherical_log_prob": directional,
    "von_mises_fisher_log_prob": directional,
    "normal_log_prob": lambda batch, M, N, D: normal(batch, M, N, D, D),
    "normal_mixture_log_prob": lambda batch, M, N, D: [torch.randn(batch, 1, N), *normal(batch, M, N, D, 1)],
    "power_spherical_mixture_log_prob": lambda batch, M, N, D: [torch.randn(N), *directional(batch, M, N, D)],
    "broadcast_dot": lambda batch, M, N, D: [torch.randn(batch, M, 1, D), torch.randn(batch, 1, N, D)],
    "attention_scores": lambda *sizes: attention(*sizes)[:2],
    "attention_weights": lambda *sizes: attention(*sizes)[:2],
    "attention": attention,
    "attention under a mask": lambda batch, M, N, D: [*attention(batch, M, N, D), torch.randn(M, N)],
    "additive_attention": lambda batch, M, N, D: [*attention(batch, M, N, D), torch.randn(D)],
    "log_sparse_attention": lambda batch, M, N, D: attention(batch, N, N, D),
}


class Flags:
    """The floating-point flags of this thread."""

    def __init__(self):
        self.libc, self.environment = ctypes.CDLL(None), ctypes.create_string_buffer(ENVIRONMENT)

    def read(self):
        self.libc.fegetenv(self.environment)
        return ctypes.c_uint32.from_buffer(self.environment, MXCSR)

    def clear(self):
        self.read().value &= ~FLAGS
        self.libc.fesetenv(self.environment)


@pytest.fixture
def subnormal_operands(monkeypatch):
    """Fill each workspace with subnormal numbers, and collect whether a run of the kernels computed with any."""
    flags, run, found = Flags(), library.Library.run, []
    count = torch.get_num_threads()
    torch.set_num_threads(1)  # flags are those of a thread

    def watched(self, call, is_backward):
        if hasattr(call, "workspace"):
            real = next(real for real in library.REALS if library.library(real) is self)
            size = self.workspace(call) * call.threads * real.itemsize
            memory = (ctypes.c_char * size).from_address(call.workspace)
            words = torch.frombuffer(memory, dtype={4: torch.int32, 8: torch.int64}[real.itemsize])
            words.random_(1, 1 << 20)  # as the bits of small integers, which are those of subnormal numbers
        flags.clear()
        run(self, call, is_backward)
        found.append(flags.read().value & SUBNORMAL != 0)

    monkeypatch.setattr(library.Library, "run", watched)
    yield found
    torch.set_num_threads(count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_computed_with_what_memory_held(name, batch, sizes, dtype, subnormal_operands):
    """Memory may hold subnormal numbers, with which a product takes up to 70 times as long."""
    torch.manual_seed(0)
    args = [one.to(dtype).requires_grad_() for one in CALLS[name](batch, *sizes)]
    out = getattr(effops, name.split()[0])(*args, variant="cpp")
    torch.autograd.grad(out, args, torch.ones_like(out))
    assert subnormal_operands == [False, False]
