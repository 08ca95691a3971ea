"""Occupied memory as NVML tells it, with a library of our own in its place."""

import doctest
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from effops.memory import devices
from effops.memory.devices import NVMLUnavailableError, device_usage, summarize

MiB = 2**20


class Library(ModuleType):
    """A `pynvml` of two devices: this process is on the second, another one on both."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N818
        pass

    def __init__(self):
        super().__init__("pynvml")
        self.initialised = 0
        self.failing = ()
        self.used = [620 * MiB, 2564 * MiB]
        other = SimpleNamespace(pid=os.getpid() + 1, usedGpuMemory=100 * MiB)
        self.processes = [[other], [other, SimpleNamespace(pid=os.getpid(), usedGpuMemory=2000 * MiB)]]

    def check(self, name):
        if name in self.failing:
            raise self.NVMLError(f"{name} failed")

    def nvmlInit(self):  # noqa: N802
        self.check("nvmlInit")
        self.initialised += 1

    def nvmlShutdown(self):  # noqa: N802
        self.initialised -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return f"Accelerator {handle}"

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-uuid-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        self.check("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=16384 * MiB, used=self.used[handle])

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        if "processes" in self.failing:
            raise self.NVMLError_NotSupported
        return self.processes[handle]


@pytest.fixture
def library(monkeypatch):
    """Where CUDA sees the second device alone, as its first."""
    found = Library()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="uuid-1"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 1288 * MiB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 1400 * MiB)
    return found


def test_devices_are_matched_and_their_memory_split(library):
    usage = device_usage()
    first, second = usage.devices
    assert (first.tensor_bytes, first.cache_bytes, first.context_bytes, first.other_bytes) == (0, 0, 0, 620 * MiB)
    assert (second.name, second.total_bytes, second.occupied_bytes) == ("Accelerator 1", 16384 * MiB, 2564 * MiB)
    assert (second.tensor_bytes, second.cache_bytes) == (1288 * MiB, 112 * MiB)
    assert (second.context_bytes, second.other_bytes) == (600 * MiB, 564 * MiB)
    assert usage.occupied_bytes == 3184 * MiB
    assert library.initialised == 0
    header, *rows = str(usage).splitlines()
    assert header.split() == ["Device", "Total", "Occupied", "Tensors", "Cache", "Context", "Others"]
    assert "1: Accelerator 1" in rows[1]
    assert "600.0 MiB" in rows[1]


@pytest.mark.parametrize("why", ["not supported", "number withheld", "other number"])
def test_context_counts_as_others_where_processes_are_not_told_apart(library, why):
    if why == "not supported":
        library.failing = ("processes",)
    elif why == "number withheld":
        library.processes[1][1].usedGpuMemory = None
    else:
        library.processes[1][1].pid = 1
    second = device_usage().devices[1]
    assert second.context_bytes is None
    assert second.other_bytes == (2564 - 1400) * MiB
    assert "in others" in str(device_usage())


def test_without_cuda_nothing_is_asked_of_it(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: pytest.fail("makes a context"))
    assert all(device.tensor_bytes == 0 for device in device_usage().devices)


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("nvmlInit", "needs an NVIDIA driver"),
        ("nvmlDeviceGetMemoryInfo", "NVML failed .nvmlDeviceGetMemoryInfo failed"),
    ],
)
def test_failures_of_the_library_say_what_to_do(library, failing, message):
    library.failing = (failing,)
    with pytest.raises(NVMLUnavailableError, match=message):
        device_usage()
    assert library.initialised == 0


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NVMLUnavailableError, match=r'pip install .*-e "\.\[bench\]"'):
        device_usage()


def test_a_finished_run_is_summarised(library):
    metrics = {"train_runtime": 40.96, "train_samples_per_second": 12.5}
    for result in (metrics, SimpleNamespace(metrics=metrics)):
        summary = summarize(result)
        assert (summary.time_s, summary.samples_per_second) == (40.96, 12.5)
        assert summary.usage.occupied_bytes == 3184 * MiB
        assert str(summary).splitlines()[:3] == [
            "Time: 40.96 s",
            "Samples a second: 12.50",
            "Memory occupied: 3.1 GiB",
        ]


def test_a_run_without_a_driver_is_summarised_as_far_as_known(library):
    library.failing = ("nvmlInit",)
    summary = summarize({"train_runtime": 40.96, "train_samples_per_second": 12.5})
    assert summary.usage is None
    assert "Memory occupied: unknown; device_usage: needs an NVIDIA driver" in str(summary)


def test_a_result_without_metrics_is_refused():
    with pytest.raises(TypeError, match=r"`result` must be a mapping of metrics.*got int"):
        summarize(3)
    with pytest.raises(ValueError, match="got none of the name train_samples_per_second"):
        summarize({"train_runtime": 1.0})


def test_examples():
    found = doctest.testmod(devices)
    assert found.attempted
    assert not found.failed
