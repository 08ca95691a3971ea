"""Memory that NVIDIA's management library (NVML) says is occupied, on every device, and by what.

    print(device_usage())
    print(summarize(trainer.train()))

NVML sees what an allocator in the process does not: the CUDA context, and other processes.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from effops.text import aligned, format_bytes, how_to_install

REQUIRED_METRICS = "train_runtime", "train_samples_per_second"


class NVMLUnavailableError(RuntimeError):
    """NVML cannot be asked; the message says why, and what to do."""


@dataclass(frozen=True)
class DeviceUsage:
    """Memory of one device. Tensors, cache, context and others sum up to what is occupied.

    Attributes:
        index: NVML's, which counts every device of the machine, visible to CUDA or not
        name: the model
        total_bytes, occupied_bytes: as NVML says
        tensor_bytes: tensors of this process
        cache_bytes: what PyTorch's allocator in this process holds beyond them
        context_bytes: what else this process occupies, its CUDA context above all; None where NVML does not tell
            processes apart, as in containers
        other_bytes: everything else: other processes, and this one's context where that is not known
    """

    index: int
    name: str
    total_bytes: int
    occupied_bytes: int
    tensor_bytes: int
    cache_bytes: int
    context_bytes: int | None
    other_bytes: int


@dataclass(frozen=True)
class Usage:
    """Memory of all devices; `str()` is a table."""

    devices: tuple[DeviceUsage, ...]

    @property
    def occupied_bytes(self) -> int:
        """Of all devices together."""
        return sum(device.occupied_bytes for device in self.devices)

    def __str__(self) -> str:
        header = ("Device", "Total", "Occupied", "Tensors", "Cache", "Context", "Others")
        rows = [
            (
                f"{device.index}: {device.name}",
                format_bytes(device.total_bytes),
                format_bytes(device.occupied_bytes),
                format_bytes(device.tensor_bytes),
                format_bytes(device.cache_bytes),
                "in others" if device.context_bytes is None else format_bytes(device.context_bytes),
                format_bytes(device.other_bytes),
            )
            for device in self.devices
        ]
        return aligned([header, *rows])


@dataclass(frozen=True)
class Summary:
    """A finished run, and the memory occupied now; where NVML cannot be asked it is None, and `obstacle` tells why."""

    time_s: float
    samples_per_second: float
    usage: Usage | None
    obstacle: str = ""

    def __str__(self) -> str:
        occupied = f"unknown; {self.obstacle}"
        if self.usage is not None:
            occupied = f"{format_bytes(self.usage.occupied_bytes)}\n{self.usage}"
        time = f"Time: {self.time_s:.2f} s\nSamples a second: {self.samples_per_second:.2f}"
        return f"{time}\nMemory occupied: {occupied}"


def device_usage() -> Usage:
    """What NVML says that each device of this machine holds, split by what holds it; see `DeviceUsage`.

    No CUDA context is made by asking. MIG slices are not told apart from their device.

    Raises:
        NVMLUnavailableError: nvidia-ml-py is not installed, there is no NVIDIA driver, or NVML fails

    Example:
        >>> print(device_usage())                                                      # doctest: +SKIP
        Device                     Total   Occupied   Tensors      Cache    Context  Others
        0: NVIDIA H100 80GB HBM3  79.6 GiB  1.9 GiB   1.2 GiB  156.0 MiB  520.0 MiB   3.0 MiB
    """
    with _nvml() as nvml:
        allocators = _allocators()
        return Usage(tuple(_usage(nvml, index, allocators) for index in range(nvml.nvmlDeviceGetCount())))


@contextmanager
def _nvml() -> Iterator[Any]:
    """The initialised library; what NVML raises, now or inside of the context, becomes `NVMLUnavailableError`."""
    try:
        import pynvml
    except ImportError as error:
        raise NVMLUnavailableError(
            f"device_usage: needs the package nvidia-ml-py, which cannot be imported; {how_to_install('bench')}"
        ) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NVMLUnavailableError(
            f"device_usage: needs an NVIDIA driver, which NVML does not find ({error}); install one, or in a container "
            "pass the devices through; `effops.memory.anatomy` predicts memory without a device"
        ) from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise NVMLUnavailableError(
            f"device_usage: NVML failed ({error}); see whether `nvidia-smi` works, and restart the driver if not"
        ) from error
    finally:
        pynvml.nvmlShutdown()


def _allocators() -> dict[str, tuple[int, int]]:
    """Bytes of tensors and of cache in this process, by the UUID of the device."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return {
        str(torch.cuda.get_device_properties(index).uuid): (
            torch.cuda.memory_allocated(index),
            torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index),
        )
        for index in devices
    }


def _usage(nvml: Any, index: int, allocators: Mapping[str, tuple[int, int]]) -> DeviceUsage:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    uuid = nvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-")
    tensor_bytes, cache_bytes = allocators.get(uuid, (0, 0))
    process_bytes = _process_bytes(nvml, handle, present=uuid in allocators)
    context_bytes = None if process_bytes is None else process_bytes - tensor_bytes - cache_bytes
    return DeviceUsage(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        total_bytes=memory.total,
        occupied_bytes=memory.used,
        tensor_bytes=tensor_bytes,
        cache_bytes=cache_bytes,
        context_bytes=context_bytes,
        other_bytes=memory.used - tensor_bytes - cache_bytes - (context_bytes or 0),
    )


def _process_bytes(nvml: Any, handle: Any, present: bool) -> int | None:
    """What this process occupies; None where NVML does not tell, as it may number processes otherwise."""
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError_NotSupported:
        return None
    occupied: dict[int, int | None] = {process.pid: process.usedGpuMemory for process in processes}
    return occupied.get(os.getpid(), None if present else 0)


def summarize(result: Any) -> Summary:
    """Time, samples a second and occupied memory of a finished run, as the guide of transformers prints them.

    Args:
        result: what `transformers.Trainer.train()` returns, or any mapping, or any object with a mapping `metrics`,
            that has `train_runtime` in seconds and `train_samples_per_second`

    Returns:
        The summary; `str()` is its text. Without NVML it has time and samples a second, and says what is missing.

    Raises:
        TypeError: `result` neither is a mapping nor has `metrics`
        ValueError: a metric is missing

    Example:
        >>> print(summarize({"train_runtime": 40.96, "train_samples_per_second": 12.5}))    # doctest: +ELLIPSIS
        Time: 40.96 s
        Samples a second: 12.50
        Memory occupied: ...

    Source: Hugging Face transformers, "Efficient training on a single GPU".
    """
    metrics = result if isinstance(result, Mapping) else getattr(result, "metrics", None)
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "summarize: `result` must be a mapping of metrics, or have one as `metrics`; got "
            f"{type(result).__name__}; give what Trainer.train() returns"
        )
    missing = [name for name in REQUIRED_METRICS if name not in metrics]
    if missing:
        raise ValueError(
            f"summarize: `result` must have train_runtime and train_samples_per_second; got none of the name "
            f"{' and '.join(missing)}"
        )
    time_s, samples_per_second = map(_metric, REQUIRED_METRICS, (metrics[name] for name in REQUIRED_METRICS))
    try:
        return Summary(time_s, samples_per_second, device_usage())
    except NVMLUnavailableError as error:
        return Summary(time_s, samples_per_second, None, str(error))


def _metric(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"summarize: `{name}` must be a number; got {type(value).__name__} {value!r}; give what Trainer.train() "
            "returns"
        ) from None
