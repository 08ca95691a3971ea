"""What autograd does in place, or by values, while nobody observes its operators."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from effops.memory import Workload, anatomy

PLACES = torch.arange(4)
EXACT = {
    "maximum along an axis": lambda x: x.max(1)[0],
    "largest": lambda x: x.topk(3, 1)[0],
    "median along an axis": lambda x: x.median(1)[0],
    "maxout": lambda x: x.unflatten(1, (5, 10)).max(1)[0],
    "cumulative maximum": lambda x: x.cummax(1)[0],
    "gathered": lambda x: x.gather(1, torch.zeros(70, 3, dtype=torch.long)),
    "selected": lambda x: x.index_select(0, PLACES),
    "indexed": lambda x: x[PLACES],
    "trace": lambda x: x.trace(),
    "logits": lambda x: -functional.binary_cross_entropy_with_logits(x, torch.ones(70, 50), reduction="none"),
    "angles": lambda x: torch.atan2(x, torch.ones(70, 50)),
    "taken": lambda x: x.take(PLACES),
    "logits and targets": lambda x: functional.binary_cross_entropy_with_logits(x, x.sigmoid(), reduction="none"),
    "weighted logits and targets": lambda x: functional.binary_cross_entropy_with_logits(
        x, x.sigmoid(), torch.ones(70, 50), reduction="sum"
    ),
    "maxima": lambda x: x.amax(1),
    "scattered maxima": lambda x: torch.zeros(70, 50).scatter_reduce(
        0, torch.zeros(70, 50, dtype=torch.long), x, "amax"
    ),
}
MARKED = {
    "maximum": (lambda x: x.max(), "MaxBackward1"),
    "median": (lambda x: x.median(), "MedianBackward0"),
    "product": (lambda x: x.prod(), "ProdBackward0"),
    "products along an axis": (lambda x: x.prod(1), "ProdBackward1"),
    "cumulative product": (lambda x: x.cumprod(1), "CumprodBackward0"),
    "weighted logits": (
        lambda x: functional.binary_cross_entropy_with_logits(x, torch.ones(70, 50), pos_weight=torch.ones(50)),
        "BinaryCrossEntropyWithLogitsBackward0",
    ),
    "deviation and mean": (lambda x: sum(torch.std_mean(x, 1)), "StdMeanBackward0"),
    "filled": (lambda x: torch.ones(70, 50).masked_fill(torch.ones(70, 50) > 0, x.sum()), "MaskedFillBackward1"),
}


def training(function):
    return Workload(
        lambda: nn.Linear(50, 50),
        lambda size: torch.randn(size, 50),
        lambda model, x: function(model(x)).sum(),
        torch.optim.SGD,
    )


@pytest.mark.parametrize("name", EXACT)
def test_what_autograd_fills_in_place_is_held_once(name):
    found = anatomy(training(EXACT[name]), 70, measure=True)
    assert found.unknown == ()
    assert abs(found.peak_bytes - found.measured.peak_bytes) <= 64, found


def test_powers_have_gradients_of_another_shape():
    found = anatomy(training(lambda x: x[:, :1] ** x.abs()), 70, measure=True)
    assert abs(found.peak_bytes - found.measured.peak_bytes) <= 64, found


@pytest.mark.parametrize("name", MARKED)
def test_formulas_that_look_at_values_are_named(name):
    function, formula = MARKED[name]
    assert anatomy(training(function), 70).unknown == (formula,)


def test_bounds_in_tensors():
    """Observed, the formula of torch 2.13 calls other operators; that of torch 2.15 calls the same, not in place."""
    found = anatomy(training(lambda x: x.clamp(torch.zeros(50), torch.ones(50))), 70, measure=True)
    assert found.unknown in ((), ("ClampBackward0",))
    assert found.unknown or abs(found.peak_bytes - found.measured.peak_bytes) <= 64, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "axis"), [((35, 50, 2), -1), ((35, 50), 0), ((35, 50), 1)])
def test_products_with_zeros(shape, axis, dtype):
    """Which elements are zero, and how many of each product, was not counted. Without zeros less is taken."""

    def products(x):
        return x.relu().to(dtype).unflatten(0, shape).prod(axis).float()

    found = anatomy(training(lambda x: products(x.flatten()[: torch.Size(shape).numel()])), 70, measure=True)
    assert found.unknown == ("ProdBackward1",)
    assert abs(found.peak_bytes - found.measured.peak_bytes) <= 64, found
