"""A budget of memory in a test: the fixture `memory_budget` comes with effops. Nothing is computed, no GPU is needed.

Run it by `python -m pytest -s examples/budget_in_a_test.py`; -s shows what the tests print.
"""

import pytest
import torch
from torch import Tensor

import effops


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """The number of the nearest centre of each point, by the differences of all pairs."""
    return (points[:, None] - centres).square().sum(-1).argmin(dim=1)


def nearest_by_products(points: Tensor, centres: Tensor) -> Tensor:
    """The same: the square of the point is the same for all centres."""
    return (centres.square().sum(-1) - 2 * points @ centres.T).argmin(dim=1)


@pytest.fixture
def operands() -> tuple[Tensor, Tensor]:
    """Values are never read, so that these may be of any size."""
    return torch.empty(4096, 64), torch.empty(1024, 64)


def test_products_keep_the_budget(memory_budget, operands):
    report = memory_budget("64 MiB", nearest_by_products, *operands)
    print(f"\n{report}\nthat is {report.peak_bytes:,} bytes, predicted")
    assert report.peak_bytes < 2**26


def test_differences_exceed_the_budget(memory_budget, operands):
    """Without `pytest.raises` this test fails, and this is what it says."""
    with pytest.raises(effops.MemoryBudgetExceeded, match="square") as caught:
        memory_budget("64 MiB", nearest, *operands)
    print(f"\n{caught.value}\nthat is {caught.value.report.peak_bytes:,} bytes, predicted")


def test_both_find_the_same_centre():
    torch.manual_seed(0)
    points, centres = torch.randn(100, 64), torch.randn(30, 64)
    assert torch.equal(nearest(points, centres), nearest_by_products(points, centres))
