"""What probes find is what a step allocates, and they do nothing where they are not wanted."""

import threading

import pytest
import torch
from torch import nn

import effops
from effops.memory import Workload, anatomy
from effops.prediction import probes
from effops.prediction.outcomes import OperatorCall
from effops.pytorch.prediction import FakeTensorMode

functional = nn.functional


def training(model, *shape, dtype=torch.float32):
    return Workload(
        lambda: model().to(dtype),
        lambda size: torch.randn(size, *shape, dtype=dtype),
        lambda model, x: model(x).sum(),
        torch.optim.SGD,
    )


CONVOLUTIONS = {
    "3 x 3": (lambda: nn.Conv2d(20, 37, 3), 20, 31, 29),
    "strided": (lambda: nn.Conv2d(13, 27, 5, stride=2, padding=2, bias=False), 13, 31, 29),
    "1 x 1": (lambda: nn.Conv2d(24, 40, 1), 24, 17, 19),
    "depthwise": (lambda: nn.Conv2d(21, 21, 3, padding=1, groups=21), 21, 13, 11),
    "groups": (lambda: nn.Conv2d(24, 36, 3, groups=4), 24, 15, 17),
    "dilated": (lambda: nn.Conv2d(24, 20, 3, dilation=2), 24, 31, 29),
    "transposed": (lambda: nn.ConvTranspose2d(12, 20, 4, stride=2), 12, 15, 17),
    "1 axis": (lambda: nn.Conv1d(13, 27, 5), 13, 201),
    "3 axes": (lambda: nn.Conv3d(9, 5, 3), 9, 7, 11, 10),
}


@pytest.fixture
def unremembered(monkeypatch):
    """A process that has probed nothing."""
    monkeypatch.setattr(probes, "_found", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions(kind, dtype, unremembered):
    model, *shape = CONVOLUTIONS[kind]
    found = anatomy(training(lambda: nn.Sequential(model(), nn.ReLU()), *shape, dtype=dtype), 5, measure=True)
    assert found.unknown == ()
    assert abs(found.peak_bytes / found.measured.peak_bytes - 1) < 0.005, found


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_large_batch_follows_from_small_ones(kind, unremembered, monkeypatch):
    model, *shape = CONVOLUTIONS[kind]
    workload = training(model, *shape)
    whole = anatomy(workload, 24)
    monkeypatch.setattr(probes, "_found", {})
    images = torch.randn(10, *shape)
    monkeypatch.setattr(probes, "MOST_BYTES", images.nbytes + model()(images).nbytes)
    sizes = []
    run = probes._run

    def noted(func, args, *others, **options):
        sizes.append(args[0].shape[0])
        return run(func, args, *others, **options)

    monkeypatch.setattr(probes, "_run", noted)
    found = anatomy(workload, 24)
    assert min(sizes) < 24
    assert found.unknown == ()
    assert abs(found.peak_bytes / whole.peak_bytes - 1) < 0.001


def test_what_does_not_fit_is_named(unremembered, monkeypatch):
    monkeypatch.setattr(probes, "MOST_BYTES", 1000)
    model, *shape = CONVOLUTIONS["groups"]
    assert "aten::convolution" in anatomy(training(model, *shape), 5).unknown


def test_nothing_runs_unless_wanted(unremembered, monkeypatch):
    def fail(*args, **options):
        raise AssertionError("a probe ran")

    monkeypatch.setattr(probes, "_run", fail)
    model, *shape = CONVOLUTIONS["groups"]
    workload = training(model, *shape)
    with pytest.raises(AssertionError, match="a probe ran"):
        anatomy(workload, 5)
    unprobed = [
        anatomy(workload, 5, probe=False),
        effops.memory.max_batch_size(workload, "10 MB", probe=False),
        effops.memory.advise(workload, 5, probe=False),
        effops.memory.sweep(lambda width: workload, {"width": [1, 2]}, batch_size=5, probe=False),
    ]
    assert all("aten::convolution" in found.unknown for found in unprobed)
    assert "aten::convolution" in anatomy(workload, 5, device="cuda").unknown


def test_each_call_is_probed_once(unremembered, monkeypatch):
    ran = []
    run = probes._run

    def noted(func, *others, **options):
        ran.append(func)
        return run(func, *others, **options)

    monkeypatch.setattr(probes, "_run", noted)
    model, *shape = CONVOLUTIONS["groups"]
    for _ in range(3):
        anatomy(training(model, *shape), 5)
    assert sorted(map(str, ran)) == ["aten.convolution.default", "aten.convolution_backward.default"]


def test_probes_draw_no_numbers_and_leave_settings(unremembered):
    model, *shape = CONVOLUTIONS["3 x 3"]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        anatomy(training(model, *shape), 5)
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("of_another_thread", [False, True])
def test_a_profile_is_left_alone(of_another_thread, unremembered):
    """There is one profiler: a probe would end the profile."""
    model, *shape = CONVOLUTIONS["groups"]
    workload = training(model, *shape)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3)
        found = []
        if of_another_thread:
            thread = threading.Thread(target=lambda: found.append(anatomy(workload, 5)))
            thread.start()
            thread.join()
        else:
            found.append(anatomy(workload, 5))
        torch.linspace(0, 1, 3)
    assert "aten::convolution" in found[0].unknown
    assert {"aten::ones", "aten::linspace"} <= {event.name for event in profile.events()}
    assert anatomy(workload, 5).unknown == ()


def test_a_profile_that_warms_up_is_left_alone(unremembered):
    """The profiler has prepared then, and not begun."""
    model, *shape = CONVOLUTIONS["groups"]
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    seen = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=schedule,
        on_trace_ready=lambda ready: seen.extend(event.name for event in ready.events()),
    ) as profile:
        assert anatomy(training(model, *shape), 5).unknown == ()
        profile.step()
        torch.linspace(0, 1, 3)
        profile.step()
    assert "aten::linspace" in seen


@pytest.mark.parametrize(
    ("function", "shape", "name"),
    [
        (lambda x: functional.conv2d(x, x.new_ones(1, 1, 65, 65), padding=32), (1, 128, 128), "aten::convolution"),
        (lambda x: torch.cdist(x, x, p=3.0), (3000, 400), "aten::_cdist_forward"),
        (lambda x: functional.bilinear(x, x, x.new_ones(60, 900, 900)), (900,), "aten::_trilinear"),
    ],
)
def test_nothing_large_runs(function, shape, name, unremembered, monkeypatch):
    """Operands may be small where what is unfolded, or the time, is not."""
    ran = []
    monkeypatch.setattr(probes, "_run", lambda func, *others, **options: ran.append(func._schema.name))
    workload = Workload(
        nn.Identity,
        lambda size: torch.randn(size, *shape, dtype=torch.float64),
        generate=lambda model, x: function(x),
    )
    anatomy(workload, 100 if len(shape) == 1 else 16)
    assert name not in ran


def test_threads_probe_in_turn(unremembered):
    found = []
    model, *shape = CONVOLUTIONS["groups"]

    def predict():
        found.append(anatomy(training(model, *shape), 5))

    threads = [threading.Thread(target=predict) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.peak_bytes for one in found}) == 1
    assert {one.unknown for one in found} == {()}
    assert len(found) == 4


def test_small_batches_take_little_memory(unremembered, monkeypatch):
    """A list of tensors is not probed with all of them but one, where only that one has the batch."""
    ran = []
    run = probes._run

    def noted(func, args, kwargs):
        ran.append(sum(one.nbytes for one in args[0]))
        return run(func, args, kwargs)

    monkeypatch.setattr(probes, "_run", noted)
    with FakeTensorMode():
        given = [torch.empty(size, 8, 30, 30).to(memory_format=torch.channels_last) for size in (40, 39, 39, 39)]
        call = OperatorCall(torch.ops.aten._foreach_neg.default, (given,), {})
        result = call.func(given)
        monkeypatch.setattr(probes, "MOST_BYTES", 2 * given[0].nbytes)
        monkeypatch.setattr(probes, "QUICK_BYTES", given[0].nbytes)
        assert probes.probed(call, result) is None
        assert not ran
        found = probes.probed(OperatorCall(call.func, (given[:1],), {}), result[:1])
    assert found.result_strides == {0: given[0].stride()}
    assert found.temporary_bytes == 0
    assert ran


@pytest.mark.parametrize("function", [torch.sum, torch.nn.functional.mse_loss, torch.amax, torch.std_mean])
def test_results_of_large_images_without_a_batch(function, unremembered, monkeypatch):
    """They are numbers, some of them on a storage of all elements."""
    monkeypatch.setattr(probes, "QUICK_BYTES", 1000)

    def generate(model, x):
        images = x.to(memory_format=torch.channels_last)
        return function(images, images) if function is torch.nn.functional.mse_loss else function(images)

    found = anatomy(Workload(nn.Identity, lambda size: torch.randn(size, 8, 9, 11), generate=generate), 9, measure=True)
    assert found.unknown == ()
    assert abs(found.peak_bytes - found.measured.peak_bytes) <= 64
