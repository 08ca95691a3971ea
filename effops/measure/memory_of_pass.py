"""Bytes of a pass: the allocator's events on a CPU, and the caching allocator's statistics on CUDA."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from effops.measure.passes import AS_A_PASS, Pass, check_integer, check_pass, storage_bytes, warm_up
from effops.prediction.cuda_forms import CUDA_BLOCK_BYTES
from effops.prediction.shared import profiled
from effops.pytorch.measure import DeviceType
from effops.text import tells_wrong_arguments


@dataclass(frozen=True)
class Memory:
    """Bytes of one pass. Storages count whole, and once however many tensors view them.

    Attributes:
        input_bytes: the arguments; for a backward pass also the forward pass's result and the gradient from above
        output_bytes: the result, or the gradients, without what lies in storages of the inputs
        saved_bytes: what the forward pass leaves allocated for backward beyond inputs and output
        temporary_bytes: the most that was allocated at any instant of the pass beyond all of the above
        peak_bytes: the most that was allocated at any instant of the pass, inputs included. In a backward pass it may
            be less than the sum of the others, since what was saved is released on the way.
    """

    input_bytes: int
    output_bytes: int
    saved_bytes: int
    temporary_bytes: int
    peak_bytes: int


@partial(tells_wrong_arguments, remedy=f"; give one pass, as in memory({AS_A_PASS})")
def memory(work: Pass, *, warmup: int = 1) -> Memory:
    """Bytes of one pass, split; see `Memory`.

    `warmup` runs come first, so that what a first call compiles and caches is not counted.

    Raises:
        TypeError: `work` is no pass, or `warmup` no integer
        ValueError: tensors have no memory or are on another device than a CPU or CUDA, or `warmup` is below 0
    """
    check_pass("memory", "work", work)
    check_integer("memory", "warmup", warmup, 0)
    warm_up([work], warmup)
    block_bytes = CUDA_BLOCK_BYTES if work.device.type == "cuda" else 1
    with without_collector():
        with _running_bytes(work.device) as before:
            prepared = work.prepare()
        with _running_bytes(work.device) as during:
            results = prepared.run()
    new_bytes = storage_bytes(results, excluding=prepared.held, block_bytes=block_bytes)
    if work.backward:
        saved = before.retained_bytes - storage_bytes(prepared.held, excluding=work.args, block_bytes=block_bytes)
        temporary, peak = during.peak_bytes - new_bytes, saved + during.peak_bytes
    else:
        saved = during.retained_bytes - new_bytes
        temporary, peak = during.peak_bytes - during.retained_bytes, during.peak_bytes
    input_bytes = storage_bytes(prepared.held)
    return Memory(
        input_bytes=input_bytes,
        output_bytes=storage_bytes(results, excluding=prepared.held),
        saved_bytes=saved,
        temporary_bytes=max(0, temporary),
        peak_bytes=input_bytes + peak,
    )


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch the garbage collector off, so that it does not release earlier garbage meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class _RunningBytes:
    """Bytes allocated less bytes freed since the start: the most at any instant, and at the end."""

    peak_bytes: int = 0
    retained_bytes: int = 0


@contextmanager
def _running_bytes(device: torch.device) -> Iterator[_RunningBytes]:
    found = _RunningBytes()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        yield found
        torch.cuda.synchronize(device)
        found.peak_bytes = torch.cuda.max_memory_allocated(device) - start
        found.retained_bytes = torch.cuda.memory_allocated(device) - start
    else:
        with profiled() as profiler:
            yield found
        recorded: Any = profiler.profiler
        events = (event for event in recorded.kineto_results.events() if event.name() == "[memory]")
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.device_type() == DeviceType.CPU:
                found.retained_bytes += event.nbytes()  # negative for a release
                found.peak_bytes = max(found.peak_bytes, found.retained_bytes)
