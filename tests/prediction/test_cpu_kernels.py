"""What kernels of a CPU allocate inside; none of this was once predicted."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from effops.measure import Pass, memory
from effops.memory import Workload, anatomy
from effops.prediction import probes
from effops.prediction.inside import predict_bytes, workspace
from effops.pytorch.calls import tree_map_only
from effops.pytorch.prediction import FakeTensorMode

aten = torch.ops.aten


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


@pytest.mark.parametrize("channels", [2, 3, 4])
@pytest.mark.parametrize("threads", [1, 2])
def test_one_thread_resizes_large_images_of_three_channels_on_copies(channels, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        resize = passed(lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), channels, 40, 50)
        assert is_exact(anatomy(resize, 3, measure=True))
    finally:
        torch.set_num_threads(before)


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


IMAGES = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def calls():
    """Calls of operators with rules, whose workspace is seldom that of a step's largest point."""
    image = {name: torch.zeros(4, 8, 20, 24).to(memory_format=layout) for name, layout in IMAGES.items()}
    few = {name: torch.zeros(4, 3, 20, 24).to(memory_format=layout) for name, layout in IMAGES.items()}
    for name, size in itertools.product(IMAGES, ([40, 48], [64, 65])):
        for one in (image[name], few[name], image[name].bfloat16()):
            yield aten.upsample_nearest2d.default, one, size
            yield aten._upsample_nearest_exact2d.default, one, size
            yield aten.upsample_bilinear2d.default, one, size, False
    for dtype, reduction in itertools.product((torch.float32, torch.bfloat16), (0, 1, 2)):
        x = torch.zeros(70, 90, dtype=dtype)
        for loss in (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss):
            yield loss.default, x, x, reduction
        yield aten.binary_cross_entropy.default, x, x, None, reduction
        yield aten.binary_cross_entropy_with_logits.default, x, x, None, None, reduction
    for one in (image["contiguous"], image["channels last"].bfloat16()):
        yield aten.mean.dim, one, [2, 3]
        yield aten.mean.default, one
    for gradient, input, dtype in itertools.product(IMAGES, IMAGES, (torch.float32, torch.bfloat16)):
        if gradient == input or dtype == torch.float32:
            statistics = [torch.ones(8, dtype=dtype)] * 5
            images = image[gradient].to(dtype), image[input].to(dtype)
            yield aten.native_batch_norm_backward.default, *images, *statistics, True, 1e-5, [True] * 3


@pytest.mark.parametrize("call", list(calls()), ids=lambda call: str(call[0]))
def test_rules_tell_what_operators_allocate(call):
    function, *args = call
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
        told = workspace(function, fakes, {}, function(*fakes))
    ran = probes._run(function, tree_map_only(torch.Tensor, probes.Layout.of, args), {})
    assert told.known
    assert abs(told.temporary_bytes - ran.temporary_bytes) <= 128  # numbers that are wrapped, sums of channels
    results = {index: nbytes for index, (_, nbytes) in ran.results.items()}
    assert results == {**results, **told.result_bytes}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)], ids=str)
def test_sums_of_narrow_dtypes_along_axes_that_lie_apart(order, dtype):
    """They are taken of a copy in float32; those along one axis, or neighbours in memory, are not."""
    x = torch.randn([(3, 5, 7, 8)[axis] for axis in order]).to(dtype).permute([order.index(axis) for axis in range(4)])
    for count in range(1, 4):
        for dims in itertools.combinations(range(4), count):
            run = lambda x: x.sum(dims)  # noqa: B023, E731
            assert predict_bytes(run, x).temporary_bytes == memory(Pass(run, (x,))).temporary_bytes, dims
