"""What operators allocate inside, by rule and as measured, at sizes that are no powers of two."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import effops
from effops.memory import Workload, anatomy
from effops.prediction import inside, outcomes

functional = nn.functional
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
CAPABILITY = torch.backends.cpu.get_cpu_capability()
HAS_ONEDNN = torch.backends.mkldnn.is_available()
ONEDNN_COMPUTES = {  # products, with memory of PyTorch's allocator
    torch.float32: False,
    torch.bfloat16: HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
IS_AVX2 = CAPABILITY == "AVX2" and not any(ONEDNN_COMPUTES.values())
AS_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
OF_AVX2 = "oneDNN's blocks were measured on AVX2"
avx2 = pytest.mark.skipif(not IS_AVX2, reason=OF_AVX2)


def training(model, *shape):
    return Workload(model, lambda size: torch.randn(size, *shape), lambda model, x: model(x).sum(), torch.optim.SGD)


def inference(model, *shape):
    return Workload(model, lambda size: torch.randn(size, *shape))


def is_right(workload, batch_size, allowed_bytes=64):
    """The peak is right to the byte, but for the numbers that operators wrap in tensors."""
    found = anatomy(workload, batch_size, measure=True)
    assert found.unknown == ()
    assert abs(found.peak_bytes - found.measured.peak_bytes) <= allowed_bytes, found
    return True


def is_right_or_named(workload, batch_size, narrow):
    """The peak is right; without probes, `narrow` operators are named, which oneDNN computes."""
    found = anatomy(workload, batch_size, probe=False)
    assert found.unknown == narrow
    assert found.peak_bytes <= anatomy(workload, batch_size).peak_bytes
    return is_right(workload, batch_size)


@avx2
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv2d(3, 7, 3, padding=1), (3, 31, 29)),
        (lambda: nn.Conv2d(20, 37, 3), (20, 31, 29)),
        (lambda: nn.Conv2d(20, 37, 5, stride=2, bias=False), (20, 31, 29)),
        (lambda: nn.Conv2d(13, 27, 1), (13, 9, 11)),
        (lambda: nn.Conv2d(21, 21, 3, groups=21), (21, 31, 29)),
        (lambda: nn.Conv2d(24, 20, 3, dilation=2), (24, 31, 29)),
        (lambda: nn.Conv1d(13, 27, 5), (13, 201)),
        (lambda: nn.Conv3d(9, 5, 3), (9, 7, 11, 10)),
    ],
)
@pytest.mark.parametrize("batch_size", [3, 5])
def test_convolutions_on_blocks_of_channels(layer, shape, batch_size, one_thread):
    assert is_right(inference(layer, *shape), batch_size)


@pytest.mark.parametrize(("channels", "dilation"), [(3, 1), (13, 1), (20, 2)])
def test_convolutions_of_one_image_are_unfolded(channels, dilation, one_thread):
    assert is_right(inference(lambda: nn.Conv2d(channels, 5, 3, dilation=dilation), channels, 9, 11), 1)


@avx2
@pytest.mark.parametrize(("channels", "results"), [(16, 32), (20, 37), (9, 5)])
def test_convolutions_in_training(channels, results, one_thread):
    def model():
        return nn.Sequential(nn.Conv2d(channels, channels, 3), nn.Conv2d(channels, results, 3, padding=1))

    assert is_right(training(model, channels, 31, 29), 5)


def test_transposed_convolutions_have_no_rule():
    workload = inference(lambda: nn.ConvTranspose2d(3, 5, 3), 3, 9, 11)
    assert anatomy(workload, 3, probe=False).unknown == ("aten::convolution",)
    assert is_right(workload, 3)


@avx2
@pytest.mark.parametrize(("features", "hidden"), [(13, 37), (20, 20), (300, 20), (5, 70)])
@pytest.mark.parametrize("batch_size", [3, 70])
def test_lstm_without_gradients(features, hidden, batch_size, one_thread):
    workload = inference(lambda: nn.LSTM(features, hidden, batch_first=True), 11, features)
    assert is_right(workload, batch_size, allowed_bytes=100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "width"), [(12, 16), (33, 24), (130, 36), (600, 20), (801, 10)])
def test_attention(length, width, dtype):
    def loss(model, x):
        x = model(x)
        return functional.scaled_dot_product_attention(x, x, x).sum()

    def batch(size):
        return torch.randn(size, 3, length, width, dtype=dtype)

    def model():
        return nn.Linear(width, width, dtype=dtype)

    inference = training = ()
    if ONEDNN_COMPUTES[dtype]:
        packs = length >= (64 if dtype is torch.bfloat16 else 16)
        inference = (ATTENTION,) * packs + ("aten::addmm",)
        training = (ATTENTION,) * packs + (f"{ATTENTION}_backward",) * (length > 16) + ("aten::addmm", "aten::mm")
    assert is_right_or_named(Workload(model, batch, loss, torch.optim.SGD), 2, training)
    assert is_right_or_named(Workload(model, batch, generate=loss), 2, inference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(
    ("name", "length", "shapes"),
    [
        ("mm", 16, lambda k: [(16, k), (k, 16)]),
        ("addmm", 16, lambda k: [(16,), (16, k), (k, 16)]),
        ("bmm", 8, lambda k: [(4, 8, k), (4, k, 16)]),
        ("baddbmm", 8, lambda k: [(4, 8, 16), (4, 8, k), (4, k, 16)]),
        ("addbmm", 16, lambda k: [(16, 16), (4, 16, k), (4, k, 16)]),
        ("mv", 64, lambda k: [(64, k), (k,)]),
        ("addmv", 64, lambda k: [(64,), (64, k), (k,)]),
        ("dot", 4096, lambda k: [(k,), (k,)]),
        ("vdot", 4096, lambda k: [(k,), (k,)]),
    ],
)
def test_products_of_onednn_are_named(name, length, shapes, extra, dtype):
    """oneDNN takes a scratchpad for more than 4096 multiplications; the smaller product is exact."""

    def generate(model, x):
        return getattr(torch, name)(*(torch.ones(shape, dtype=dtype) for shape in shapes(length + extra)))

    workload = Workload(nn.Identity, torch.zeros, generate=generate)
    narrow = (f"aten::{name}",) if extra and ONEDNN_COMPUTES[dtype] else ()
    assert is_right_or_named(workload, 1, narrow)
    assert anatomy(workload, 1, device="cuda").unknown == ()


@pytest.mark.parametrize(
    "function",
    [
        functional.gelu,
        lambda x: functional.max_pool2d(x, 3, 2),
        lambda x: functional.avg_pool2d(x, 3, 2),
        lambda x: functional.adaptive_avg_pool2d(x, 5),
        lambda x: functional.pad(x, (3, 4, 1, 2), mode="reflect"),
        lambda x: functional.grid_sample(x, torch.zeros(len(x), 9, 7, 2), align_corners=False),
    ],
)
def test_gradients_of_a_sum_are_copied(function):
    def loss(model, x):
        return function(model(x)).sum()

    workload = Workload(lambda: nn.Linear(13, 13), lambda size: torch.randn(size, 5, 11, 13), loss, torch.optim.SGD)
    assert is_right(workload, 7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [30, 50, 77])
def test_binary_cross_entropy_of_logits(width, weighted, reduction):
    def loss(model, x):
        weight = torch.ones(width) if weighted else None
        return functional.binary_cross_entropy_with_logits(x, x, reduction=reduction, pos_weight=weight)

    assert is_right(Workload(nn.Identity, lambda size: torch.randn(size, width), generate=loss), 300)


class Used(nn.Module):
    """A tensor that several layers use, each one by itself or on the way of the others."""

    def __init__(self, times, results):
        super().__init__()
        self.first = nn.Linear(30, 300)
        self.others = nn.ModuleList(nn.Linear(300, results) for _ in range(times))

    def forward(self, x):
        x = self.first(x).relu()
        return sum(layer(x) for layer in self.others)


class Residual(Used):
    def __init__(self, times):
        super().__init__(times, 300)

    def forward(self, x):
        x = self.first(x).relu()
        for layer in self.others:
            x = x + layer(x).relu()
        return x + x


@pytest.mark.parametrize("times", [1, 2, 3, 5])
@pytest.mark.parametrize("model", [lambda times: Used(times, 3), Residual])
def test_gradients_are_added_in_place(model, times):
    """A tensor that is used several times has several gradients. Each of their sums was once a tensor of its own."""
    assert is_right(training(lambda: model(times), 30), 70)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mT.softmax(1),
        lambda x: x.mT.log_softmax(1),
        lambda x: functional.layer_norm(x.mT, x.shape[:1]),
        lambda x: x.logsumexp(0),
        lambda x: x @ x.new_ones(1, 1).expand(x.shape[1], 90),
    ],
)
@pytest.mark.parametrize("width", [30, 45, 50])
def test_copies_of_what_is_not_laid_out_in_order(function, width):
    def generate(model, x):
        return function(x)

    assert is_right(Workload(nn.Identity, lambda size: torch.randn(size, width), generate=generate), 70)


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_bias_is_added_in_place(batch_first):
    """Also where the input of a linear layer is not laid out in order, as that of a recurrent one is not."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.linear = nn.RNN(20, 33, batch_first=batch_first), nn.Linear(33, 70)

        def forward(self, x):
            return self.linear(self.recurrent(x)[0])

    assert is_right(training(Recurrent, 31, 20), 9)
    assert is_right(training(lambda: Recurrent().bfloat16().float(), 31, 20), 9)


def test_a_bias_is_added_in_place_under_autocast():
    class Columns(nn.Linear):
        def forward(self, x):
            return super().forward(x.mT)

    workload = Workload(
        lambda: Columns(64, 90),
        lambda size: torch.randn(size, 64, 70),
        lambda model, x: model(x).sum(),
        torch.optim.SGD,
        autocast=torch.bfloat16,
    )
    assert is_right(workload, 9, allowed_bytes=256)  # autocast keeps the bias in bfloat16


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_largest_point_of_a_normalised_batch(layout):
    """Its backward pass holds another tensor of the size of the input, which was left out."""

    def model():
        return nn.Sequential(nn.Conv2d(3, 128, 1), nn.BatchNorm2d(128)).to(memory_format=layout)

    def loss(model, x):
        return model(x).flatten(2).max(2).values.sum()

    workload = Workload(model, lambda size: torch.randn(size, 3, 14, 10), loss, torch.optim.SGD)
    assert is_right(workload, 9, allowed_bytes=1100)  # two sums of each of the 128 channels


@pytest.mark.parametrize("groups", [1, 12])
def test_gradients_of_images_with_channels_last(groups):
    """The gradient of a normalised batch has its layout, also where that from above has another one."""

    def model():
        layers = nn.Conv2d(12, 24, 1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 12, 3, groups=groups)
        return nn.Sequential(*layers, nn.BatchNorm2d(12), nn.Flatten(), nn.Linear(12 * 14 * 12, 3))

    def batch(size):
        return torch.randn(size, 12, 16, 14).to(memory_format=torch.channels_last)

    workload = Workload(
        lambda: model().to(memory_format=torch.channels_last), batch, lambda m, x: m(x).sum(), torch.optim.SGD
    )
    assert is_right(workload, 5, allowed_bytes=200)  # two sums of each of the 24 channels


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_groups_are_normalised_under_autocast(layout):
    """Gradients of an input in bfloat16 were predicted in the float32 of the weight."""

    def model():
        layers = nn.Conv2d(12, 24, 3), nn.GroupNorm(4, 24), nn.SiLU(), nn.Conv2d(24, 24, 3), nn.GroupNorm(4, 24)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 3)).to(memory_format=layout)

    workload = training(model, 12, 34, 30)
    found = anatomy(replace(workload, autocast=torch.bfloat16), 8, measure=True)
    assert found.unknown == ()
    assert abs(found.peak_bytes / found.measured.peak_bytes - 1) < 0.005, found.differences


LAYOUT_LAYERS = {
    "elu": nn.ELU(),
    "hardsigmoid": nn.Hardsigmoid(),
    "hardswish": nn.Hardswish(),
    "hardtanh": nn.Hardtanh(),
    "softplus": nn.Softplus(),
    "logsigmoid": nn.LogSigmoid(),
    "rrelu": nn.RReLU(),
    "glu": nn.GLU(1),
    "shuffle": nn.ChannelShuffle(2),
    "gelu": nn.GELU(),
    "fractional pooling": nn.FractionalMaxPool2d(2, output_ratio=0.7),
    "adaptive pooling": nn.AdaptiveMaxPool2d(20),
    "local response": nn.LocalResponseNorm(5),
    "reflection": nn.ReflectionPad2d(1),
    "unshuffle": nn.PixelUnshuffle(2),
}


@pytest.mark.each_value(all=True)
@pytest.mark.parametrize("kind", LAYOUT_LAYERS)
def test_results_and_gradients_of_channels_last(kind):
    """Layers whose fake results or gradients have another layout than real ones, where two memory formats meet."""
    layer, channels = LAYOUT_LAYERS[kind], {"glu": 12, "unshuffle": 96}.get(kind, 24)

    def model():
        layers = nn.Conv2d(12, 24, 1), layer, nn.Conv2d(channels, 24, 3), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(channels, 3)).to(memory_format=torch.channels_last)

    for batch in (5, 40):  # the second one is probed with smaller ones
        assert is_right(training(model, 12, 32, 36), batch, allowed_bytes=256)


@pytest.mark.skipif(IS_AVX2 or not CAPABILITY.startswith("AVX"), reason="this CPU is one with AVX2, or cannot be one")
@pytest.mark.slow
def test_all_is_exact_as_on_avx2():
    """A CPU with more than AVX2 runs these tests again as one with AVX2, since some are skipped or weaker on it."""
    files = ["tests/prediction/test_inside.py", "tests/commands/test_memory.py"]
    options = [
        "-q",
        "-rs",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "--deselect",
        f"{files[0]}::test_all_is_exact_as_on_avx2",
    ]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **AS_AVX2},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout
    assert OF_AVX2 not in process.stdout
    assert " passed" in process.stdout


def test_corrected_results_of_fake_tensors_are_those_of_explain_too(monkeypatch):
    """It took PyTorch's own, which torch 2.11 and 2.12 give sums of attention in float64 at half of their bytes."""
    args = [torch.randn(2, 3, 100, 16, requires_grad=True) for _ in range(3)]
    before = effops.explain("attention", *args).variants["sdpa"].saved_bytes
    corrected = outcomes.RESULTS[outcomes.FLASH_ATTENTION]

    def wider(*args, **kwargs):
        output, sums = corrected(*args, **kwargs)
        return output, sums.double()

    monkeypatch.setitem(outcomes.RESULTS, outcomes.FLASH_ATTENTION, wider)
    monkeypatch.setattr(inside, "_remembered", {})
    assert effops.explain("attention", *args).variants["sdpa"].saved_bytes == before + 4 * 2 * 3 * 100


def test_pinned_memory_has_the_strides_of_what_is_copied():
    with FakeTensorMode():
        given = torch.rand(10, 20)[:, ::2]
        found = outcomes.result_of(torch.ops.aten._pin_memory.default, (given,), {})
    assert (found.shape, found.stride()) == (given.shape, given.stride())
    assert found.untyped_storage().nbytes() == 4 * (20 * 9 + 2 * 9 + 1)
