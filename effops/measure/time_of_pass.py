"""Time of passes, which take turns."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from effops.measure.passes import AS_A_PASS, Pass, check_integer, check_passes, check_seconds, warm_up
from effops.pytorch.measure import keep_busy
from effops.text import tells_wrong_arguments


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one pass: the median, the least and the interquartile range of `repeats` runs.

    `host_ms` is the median time until a call returns. On CUDA the device may run on after it.
    """

    median_ms: float
    min_ms: float
    iqr_ms: float
    repeats: int
    host_ms: float


@partial(tells_wrong_arguments, remedy=f'; give one dict, as in times({{"name": {AS_A_PASS}}})')
def times(
    passes: Mapping[str, Pass],
    *,
    repeats: int = 20,
    least_repeats: int = 3,
    budget_s: float = 10.0,
    warmup: int = 1,
    progress: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Time of every pass, by its name. They take turns in a random order, so that each sees the same disturbances.

    A pass runs `repeats` times, or fewer but at least `least_repeats` once it has used `budget_s` seconds, preparation
    included. Time on CUDA is the device's, with its cache flushed before each run, outside of the timed window. The
    device is kept busy until the host has issued the run, so that it waits for no launch. `progress` is called with the
    name after each run.

    Raises:
        TypeError: `passes` are no passes by name, or another argument is of another type
        ValueError: tensors have no memory or are on another device than a CPU or CUDA, or a number is too small
    """
    check_passes("times", passes)
    for argument, count, least in (("repeats", repeats, 1), ("least_repeats", least_repeats, 1), ("warmup", warmup, 0)):
        check_integer("times", argument, count, least)
    check_seconds("times", "budget_s", budget_s)
    if not callable(progress):
        raise TypeError(f"times: `progress` must be a function of a name; got {progress!r}; give one, as print")
    warm_up(passes.values(), warmup)
    gc.collect()
    shuffled = random.Random(0)
    watches = {device: _stopwatch(device) for device in {work.device for work in passes.values()}}
    samples_ms: dict[str, list[tuple[float, float]]] = {name: [] for name in passes}
    spent_s = dict.fromkeys(passes, 0.0)
    waiting = list(passes)
    while waiting:
        shuffled.shuffle(waiting)
        for name in waiting:
            start = time.perf_counter()
            prepared = passes[name].prepare()
            samples_ms[name].append(watches[passes[name].device](prepared.run))
            del prepared
            spent_s[name] += time.perf_counter() - start
            progress(name)
        waiting = [
            name
            for name in waiting
            if len(samples_ms[name]) < (repeats if spent_s[name] < budget_s else min(repeats, least_repeats))
        ]
    return {name: _summary(samples) for name, samples in samples_ms.items()}


def _summary(samples_ms: Sequence[tuple[float, float]]) -> Timing:
    """The summary of samples, each of which is the time of the pass and of the host."""
    own_ms, host_ms = zip(*samples_ms)
    low, median, high = statistics.quantiles(own_ms, n=4, method="inclusive") if len(own_ms) > 1 else own_ms * 3
    return Timing(median, min(own_ms), high - low, len(own_ms), statistics.median(host_ms))


LEAST_BUSY_MS, MOST_BUSY_MS = 1.0, 20.0


def _stopwatch(device: torch.device) -> Callable[[Callable[[], Any]], tuple[float, float]]:
    """A function that runs another and returns its milliseconds, and those until the host has them issued.

    Releasing the result is not timed. A run that waits for the device has the wait in both, and is timed all the same.
    """
    if device.type != "cuda":
        return lambda run: (_host_ms(run),) * 2
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(max(4 * cache_bytes, 2**26), dtype=torch.int8, device=device)
    cycles = 10**6
    with torch.cuda.device(device):
        cycles_per_ms = cycles / _device_ms(lambda: keep_busy(cycles))[0]
    busy_ms = LEAST_BUSY_MS

    def sample_ms(run: Callable[[], Any]) -> tuple[float, float]:
        nonlocal busy_ms
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            flush.zero_()
            keep_busy(int(busy_ms * cycles_per_ms))
            found = _device_ms(run)
        busy_ms = max(busy_ms, min(2 * found[1], MOST_BUSY_MS))
        return found

    return sample_ms


def _device_ms(run: Callable[[], Any]) -> tuple[float, float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    host_ms = _host_ms(run)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)), host_ms


def _host_ms(run: Callable[[], Any]) -> float:
    start = time.perf_counter_ns()
    result = run()
    end = time.perf_counter_ns()
    del result
    return (end - start) / 1e6


def copy_bandwidth_gbps(device: torch.device, *, size_bytes: int = 2**28) -> float:
    """Bytes read and written a second, in 1e9, by a copy of `size_bytes` on the device: the median of ten."""
    source = torch.ones(size_bytes, dtype=torch.int8, device=device)
    copied = times({"copy": Pass(torch.empty_like(source).copy_, (source,))}, repeats=10)["copy"]
    return 2 * size_bytes / copied.median_ms / 1e6
