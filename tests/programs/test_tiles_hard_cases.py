"""Functions that somebody wrote to break `effops.tiled`: each is right, or refused by name."""

import contextlib
import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import effops

BUDGET = 2**18


def random(*shape):
    return torch.randn(*shape, requires_grad=True)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def in_checkpoint(a, b):
    with torch.no_grad():
        s = (a[:, None] - b).cos()
    return (s * (a[:, None] + b).sin()).sum(1)


def in_two_checkpoints(a, b):
    return checkpoint(in_checkpoint, a, b, use_reentrant=False) * a


def products_without_gradients(a, b, c):
    with torch.no_grad():
        p = a[:, None] * b
    return p.sum(-1) * c


def all_without_gradients(a, b):
    with torch.no_grad():
        p = (a[:, None] - b).exp()
    return p.sum(1)


def outside_of_autocast(a, b):
    with torch.autocast("cpu", enabled=False):
        return (a @ b).sin().sum(-1)


def overflowing(a, b):
    e = (100 * (a[:, None] * b)).exp()
    return (e / e.sum(1, keepdim=True)).amax(1)


def half(value):
    return torch.full((512,), value, dtype=torch.half)


NUMBERS = torch.arange(3000) * 7 % 50
REFUSED = {
    "a gradient of its own": (lambda x, y: StraightThrough.apply(x[:, None] * y).exp().sum(-1), (512,), (512,)),
    "frequencies of numbers": (
        lambda w: functional.embedding(NUMBERS, w, scale_grad_by_freq=True).sin().sum(-1),
        (50, 128),
    ),
    "a view of no elements": (
        lambda a, b: (a[:, None] * b).sin().sum(1) + (a[:, None] * b)[:, :0].flatten().reshape(0, 3).sum(),
        (640,),
        (512,),
    ),
    "a roll of all": (lambda a, b: (torch.roll(a[:, None] * b, 3) * (a[:, None] - b).cos()).sum(1), (640,), (640,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, *shapes = REFUSED[name]
    with pytest.raises(effops.CannotTile):
        effops.tiled(function, budget=BUDGET)(*(random(*shape) for shape in shapes))


RIGHT = {
    "products without gradients": (products_without_gradients, random(640, 64), random(640, 64), random(640, 640)),
    "all without gradients": (all_without_gradients, random(640), random(640)),
    "outside of autocast": (outside_of_autocast, random(640, 64), random(64, 640)),
    "products under autocast": (lambda a, b: (a[:, None] * b).sum(-1).sin().sum(-1), random(512, 64), random(512, 64)),
    "mean in float16": (lambda a, b: (a[:, None] + b).mean(), half(20.0), half(200.0)),
    "mean of products in float16": (lambda a, b: (a[:, None] * b).mean(1), half(20.0), half(200.0)),
    "variance in float16": (lambda a, b: (a[:, None] + b).var(1), torch.randn(512).half() * 30, half(0.0)),
    "variance of complex numbers": (
        lambda a, b: (a[:, None] + b).var(1),
        torch.randn(512, dtype=torch.complex64),
        torch.randn(512, dtype=torch.complex64),
    ),
    "softmax in bfloat16": (lambda a: torch.softmax(a * 20, 0) ** 0.5, torch.randn(300_000).bfloat16()),
    "a last tile of length 1": (
        lambda a, b: (a[:, None] - b).exp().squeeze(0).permute(1, 0, 2).sum(-1),
        random(65, 512),
        random(512, 512),
    ),
    "any of no axes": (lambda a, b: ((a[:, None] - b) > 1).any(()).sum(1), torch.randn(640), torch.randn(512)),
    "overflow": (overflowing, torch.ones(640), torch.ones(640)),
    "a checkpoint": (lambda a, b: checkpoint(in_checkpoint, a, b, use_reentrant=False), random(640), random(640)),
    "a checkpoint in a checkpoint": (
        lambda a, b: checkpoint(in_two_checkpoints, a, b, use_reentrant=False).sin(),
        random(640),
        random(640),
    ),
}
LARGER = "products without gradients", "a last tile of length 1", "outside of autocast"  # their tiles take more


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    function, *args = RIGHT[name]
    budget = 2**20 if name in LARGER else BUDGET
    context = torch.autocast("cpu", torch.bfloat16) if "autocast" in name else contextlib.nullcontext()
    with context:
        found, expected = effops.tiled(function, budget=budget)(*args), function(*args)
    assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)
    size = expected.abs().max().nan_to_num(1).item()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * size, equal_nan=True)
    if expected.requires_grad:
        leaves = [one for one in args if one.requires_grad]
        pairs = (torch.autograd.grad(one.sum(), leaves, allow_unused=True) for one in (found, expected))
        for own, other in zip(*pairs):
            assert (own is None) == (other is None)
            if other is not None:
                torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-5 * other.abs().max().item())


def test_numbers_that_roundings_change():
    """The signs of sums that cancel are those of their roundings, which differ between tiles and the whole."""
    a, b = torch.randn(640, 700), torch.randn(700, 512)
    a, b = torch.cat([a, -a], 1), torch.cat([b, b])
    found = effops.tiled(lambda a, b: ((a @ b)[:, None] > 0).sum((1, 2)), budget=BUDGET)(a, b)
    assert found.dtype == torch.int64


def test_gradients_that_are_switched_on_inside():
    """The result required no gradient, where PyTorch's does."""

    def function(a):
        with torch.enable_grad():
            return (a[:, None] * a).cos().sum(1)

    with torch.no_grad(), pytest.raises(effops.CannotTile, match="switch gradients on"):
        effops.tiled(function, budget=BUDGET)(random(640))


def test_results_that_are_changed_in_place():
    a, b = random(640), random(640)
    out = effops.tiled(lambda a, b: (a[:, None] - b).cos().sum(), budget=BUDGET)(a, b)
    out += 1
    out.backward()
    assert a.grad is not None


def test_methods_and_copies():
    class Kernel:
        @effops.tiled(budget=BUDGET)
        def of(self, x):
            return (x[:, None] * x).cos().sum(1)

    x = torch.randn(700)
    torch.testing.assert_close(Kernel().of(x), (x[:, None] * x).cos().sum(1))
    again = copy.deepcopy(effops.tiled(all_without_gradients, budget=BUDGET))
    assert again(x, x).shape == (700,)


def test_a_difference_is_told_again(monkeypatch):
    """The second call gave the wrong result without a word."""
    monkeypatch.setattr("effops.programs.tiles.checks.Check.__call__", raises)
    tiled = effops.tiled(all_without_gradients, budget=BUDGET)
    for _ in range(2):
        with pytest.raises(effops.TilesDiffer):
            tiled(torch.randn(640), torch.randn(640))


def raises(*_):
    raise effops.TilesDiffer("as if")
