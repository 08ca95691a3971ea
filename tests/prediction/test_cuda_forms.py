"""What autocast of CUDA computes in float32, predicted by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from effops.memory import Workload, anatomy

ROWS, WIDTH = 30, 64
COUNT = ROWS * WIDTH


def kept(function, dtype=torch.float16, device="cuda"):
    """The bytes that are kept for the backward pass of `function` of a layer's result, under autocast."""

    def loss(model, x):
        return function(model(x)).sum()

    workload = Workload(
        lambda: nn.Linear(WIDTH, WIDTH, bias=False),
        lambda size: torch.randn(size, WIDTH),
        loss,
        torch.optim.SGD,
        autocast=dtype,
    )
    found = anatomy(workload, ROWS, device=device)
    return found.instants["end of forward"]["saved activations"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "kept_bytes"),
    [
        (lambda y: y.softmax(-1), 4 * COUNT),  # its result
        (lambda y: functional.softmax(y, dim=-1), 4 * COUNT),
        (lambda y: torch.log_softmax(y, -1), 4 * COUNT),
        (lambda y: functional.layer_norm(y, (WIDTH,)), 4 * COUNT + 2 * 4 * ROWS),  # its operand, means and deviations
        (lambda y: y.exp(), 4 * COUNT),
        (lambda y: functional.relu(y), 2 * COUNT),
        (lambda y: functional.gelu(y), 2 * COUNT),
    ],
)
def test_float32_under_autocast(function, kept_bytes, dtype):
    others = kept(lambda y: y * 1.0, dtype)  # the operand and the weight in the narrow dtype
    assert kept(function, dtype) - others == pytest.approx(kept_bytes, abs=600)


def test_a_cpu_computes_them_in_the_dtype_that_they_get():
    assert kept(lambda y: y.softmax(-1), torch.bfloat16) - kept(lambda y: y.softmax(-1), torch.bfloat16, "cpu") == (
        pytest.approx(2 * COUNT, abs=600)
    )


def test_a_dtype_that_is_given_stays():
    wide, given = (
        kept(lambda y, dtype=dtype: y.softmax(-1, dtype=dtype), torch.float16) for dtype in (None, torch.float64)
    )
    assert given - wide == pytest.approx(4 * COUNT, abs=600)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.softmax(-1, torch.float32),
        lambda y: y.sum(-1, dtype=torch.float32),
        lambda y: functional.softmax(y, -1, 3, torch.float32),
    ],
)
def test_a_dtype_may_be_given_by_place(function):
    assert kept(function, torch.bfloat16) > 0


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.logsumexp(-1),
        lambda y: torch.linalg.vector_norm(y, dim=-1),
        lambda y: torch.linalg.matrix_norm(y),
        lambda y: functional.normalize(y),
        lambda y: 2**y,
        lambda y: y**2,
        lambda y: y.norm(),
    ],
)
def test_results_in_float32_under_autocast(function):
    seen = []

    def noted(y):
        found = function(y)
        seen.append(found.dtype)
        return found

    kept(noted, torch.bfloat16)
    assert set(seen) == {torch.float32}
