"""What kernels of a CPU allocate inside; none of this was once predicted."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from effops.memory import Workload, anatomy


def is_exact(found):
    assert found.unknown == ()
    assert abs(found.peak_bytes - found.measured.peak_bytes) <= 64, found
    return True


def passed(function, *shape):
    """A workload of a function and its backward pass."""

    def generate(model, x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            function(x).square().sum().backward()
        return x.grad

    return Workload(nn.Identity, lambda size: torch.randn(size, *shape), generate=generate)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("scale", [2, 0.5])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images_are_resized_with_channels_last(mode, channels, scale, layout):
    def generate(model, x):
        return functional.interpolate(x, scale_factor=scale, mode=mode)

    def batch(size):
        return torch.randn(size, channels, 9, 11).contiguous(memory_format=layout)

    assert is_exact(anatomy(Workload(nn.Identity, batch, generate=generate), 3, measure=True))


@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        ("nearest", (5, 300)),
        ("linear", (5, 300)),
        ("bicubic", (5, 20, 300)),
        ("nearest", (5, 20, 30, 3)),
        ("trilinear", (5, 20, 30, 3)),
    ],
)
def test_places_and_weights_of_positions(mode, shape):
    def generate(model, x):
        return functional.interpolate(x, scale_factor=2, mode=mode)

    assert is_exact(
        anatomy(Workload(nn.Identity, lambda size: torch.randn(size, *shape), generate=generate), 3, measure=True)
    )


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: functional.interpolate(x, scale_factor=2), (8, 9, 11)),
        (lambda x: functional.adaptive_max_pool2d(x, 3), (8, 9, 11)),
        (lambda x: functional.max_pool3d(x, 2), (4, 8, 9, 11)),
        (lambda x: functional.pixel_shuffle(x, 2), (8, 9, 11)),
        (lambda x: functional.pad(x, (1, 2, 1, 2), mode="replicate"), (8, 9, 11)),
        (lambda x: functional.group_norm(x, 2), (8, 9)),
        (lambda x: functional.layer_norm(x, (900,), torch.ones(900, requires_grad=True)), (900,)),
        (lambda x: functional.gelu(x).mT, (20, 30)),
        (lambda x: functional.gelu(x, approximate="tanh").mT, (20, 30)),
        (lambda x: functional.binary_cross_entropy(x.sigmoid(), torch.ones(3, 900)), (900,)),
        (lambda x: x.mT.tril(), (20, 30)),
        (lambda x: torch.dist(x, torch.zeros(900)), (900,)),
    ],
)
def test_functions_and_their_gradients(function, shape):
    assert is_exact(anatomy(passed(function, *shape), 3, measure=True))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sort(),
        lambda x: x.sort(0),
        lambda x: x.flatten().argsort(stable=True),
        lambda x: x.roll((1, 2), (0, 1)),
        lambda x: x.repeat(2, 1),
        lambda x: x.gather(0, torch.zeros(30, 40, dtype=torch.int32)),
        lambda x: torch.zeros(30, 40).scatter_reduce(0, torch.zeros(30, 40, dtype=torch.long), x, "mean"),
    ],
)
def test_places_and_copies(function):
    workload = Workload(nn.Identity, torch.zeros, generate=lambda model, x: function(torch.randn(30, 40)))
    assert is_exact(anatomy(workload, 1, measure=True))
