"""Bytes, time and profiler rows of a call, or of its backward pass, on a CPU or on a CUDA device.

    work = Pass(torch.cdist, (a, b))                    # the forward pass
    back = Pass(torch.cdist, (a, b), backward=True)     # the backward pass alone
    memory(work)                                        # bytes: inputs, output, saved, temporary, peak
    times({"forward": work, "backward": back})          # milliseconds: median, least, spread
    print(profile({"forward": work, "backward": back}))

On a CPU bytes are the running sum of the allocator's events, which the profiler records: exact and the same from run to
run. A release of what was allocated before the call does not count. On CUDA bytes are the caching allocator's
statistics, whose blocks are multiples of 512 bytes. Neither sees what a library takes from the system by itself
(scratch space inside a matrix product on a CPU, the CUDA context).
"""

import gc
import platform
import random
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg
from torch.profiler import record_function

from effops.prediction.cuda_forms import CUDA_BLOCK_BYTES
from effops.prediction.shared import profiled
from effops.pytorch import DeviceType, _ExperimentalConfig
from effops.text import aligned, format_bytes, format_us

__all__ = ["Memory", "Pass", "Profile", "ProfileRow", "Timing", "memory", "profile", "times"]


@dataclass(frozen=True)
class Prepared:
    """A pass ready to run: `run()` is what is measured, `held` are the tensors that it finds allocated."""

    run: Callable[[], Any]
    held: tuple[Any, ...]


@dataclass(frozen=True)
class Pass:
    """What is measured: `function(*args)`, or with `backward` the gradients of its result alone.

    A backward pass differentiates by the tensors among `args` that require gradients. Its forward pass runs anew before
    every measurement, and outside of it. The gradient that comes from above is normal noise of the result's shape and
    layout: no constant, which an implementation could profit from.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    backward: bool = False

    @property
    def device(self) -> torch.device:
        """Where the first tensor among the arguments is; the CPU if there is none."""
        return next((tensor.device for tensor in tensors(self.args)), torch.device("cpu"))

    def prepare(self) -> Prepared:
        """Do what comes before the measured part."""
        if not self.backward:
            return Prepared(lambda: self.function(*self.args), self.args)
        leaves = [tensor for tensor in tensors(self.args) if tensor.requires_grad]
        if not leaves:
            raise ValueError("Pass(backward=True): one of `args` must require gradients; got none that does")
        outputs = [output for output in tensors(self.function(*self.args)) if output.requires_grad]
        upstream = [upstream_gradient(output) for output in outputs]
        held = (*tensors(self.args), *outputs, *upstream)
        return Prepared(lambda: torch.autograd.grad(outputs, leaves, upstream), held)


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


def tensors(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, one.name) for one in fields(value))
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for part in value for tensor in tensors(part)]


def upstream_gradient(output: Tensor) -> Tensor:
    """Normal noise of the shape, layout, dtype and device of `output`; the same values at every call and layout."""
    generator = torch.Generator(output.device).manual_seed(0)
    values = torch.randn(output.shape, dtype=output.dtype, device=output.device, generator=generator)
    return torch.empty_like(output, requires_grad=False).copy_(values)


def storage_bytes(value: Any, *, beyond: Any = (), block_bytes: int = 1) -> int:
    """Bytes of the storages under the tensors in `value`, each once, without those under the tensors in `beyond`.

    Every storage is rounded up to a multiple of `block_bytes`.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors(beyond)}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors(value)}
    return sum(-(-nbytes // block_bytes) * block_bytes for start, nbytes in storages.items() if start not in known)


def memory(work: Pass, *, warmup: int = 1) -> Memory:
    """Bytes of one pass, split; see `Memory`.

    `warmup` runs come first, so that what a first call compiles and caches is not counted.
    """
    _warm_up([work], warmup)
    block_bytes = CUDA_BLOCK_BYTES if work.device.type == "cuda" else 1
    with without_collector():
        with _running_bytes(work.device) as before:
            prepared = work.prepare()
        with _running_bytes(work.device) as during:
            results = prepared.run()
    new_bytes = storage_bytes(results, beyond=prepared.held, block_bytes=block_bytes)
    if work.backward:
        saved = before.retained_bytes - storage_bytes(prepared.held, beyond=work.args, block_bytes=block_bytes)
        temporary, peak = during.peak_bytes - new_bytes, saved + during.peak_bytes
    else:
        saved = during.retained_bytes - new_bytes
        temporary, peak = during.peak_bytes - during.retained_bytes, during.peak_bytes
    input_bytes = storage_bytes(prepared.held)
    return Memory(
        input_bytes=input_bytes,
        output_bytes=storage_bytes(results, beyond=prepared.held),
        saved_bytes=saved,
        temporary_bytes=max(0, temporary),
        peak_bytes=input_bytes + peak,
    )


def _warm_up(passes: Iterable[Pass], runs: int) -> None:
    for work in passes:
        for _ in range(runs):
            work.prepare().run()


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


def device_model(device: torch.device) -> str:
    """The name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search(r"^model name\s*:\s*(.+)$", _file_text("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: the device's free memory, or of a CPU what system and container leave."""
    if device.type == "cuda":
        reserved_unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved_unused
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _file_text("/proc/meminfo"), re.MULTILINE))
    limit, used = _file_text("/sys/fs/cgroup/memory.max").strip(), _file_text("/sys/fs/cgroup/memory.current").strip()
    reclaimable = re.search(r"^inactive_file (\d+)$", _file_text("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
    bounds = [int(meminfo["MemAvailable"]) * 1024] if "MemAvailable" in meminfo else []
    if limit.isdigit() and used.isdigit():
        bounds.append(int(limit) - int(used) + (int(reclaimable[1]) if reclaimable else 0))
    return max(0, min(bounds)) if bounds else 2**63 - 1


def _file_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


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
    """
    _warm_up(passes.values(), warmup)
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
        cycles_per_ms = cycles / _device_ms(lambda: torch.cuda._sleep(cycles))[0]
    busy_ms = LEAST_BUSY_MS

    def sample_ms(run: Callable[[], Any]) -> tuple[float, float]:
        nonlocal busy_ms
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            flush.zero_()
            torch.cuda._sleep(int(busy_ms * cycles_per_ms))
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


NOTE_WIDTH = 100


@dataclass(frozen=True)
class ProfileRow:
    """What torch.profiler says of one pass, or of one operator within it at the call stack `stack`.

    `self_mem_bytes` is net: what the range itself allocated less what it freed, without the operators called inside. It
    is negative where a range frees what they allocated, and it is never a peak.
    """

    name: str
    self_mem_bytes: int
    device_time_avg_us: float
    cpu_total_percent: float
    cpu_total_us: float
    cpu_time_avg_us: float
    self_device_us: float
    self_device_percent: float
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """Profiler rows of several passes on one kind of device; `str()` is a table and what its bytes mean.

    `operators` holds, for every pass, its operators by call stack; it is empty unless stacks were asked for.
    """

    device_type: str
    rows: tuple[ProfileRow, ...]
    operators: Mapping[str, tuple[ProfileRow, ...]]

    @property
    def columns(self) -> tuple[str, ...]:
        host = "CPU total %", "CPU total", "CPU time avg"  # on a CPU there is nothing to say of CUDA
        if self.device_type == "cuda":
            return ("Name", "Self CUDA Mem", "CUDA time avg", *host, "Self CUDA", "Self CUDA %")
        return ("Name", "Self CPU Mem", *host)

    @property
    def note(self) -> str:
        """What the bytes of the table mean."""
        return (
            f"{self.columns[1]} is net: what a range itself allocated less what it freed, without the operators called "
            "inside. It is not peak memory, and is negative where a range frees what they allocated."
        )

    def cells(self, row: ProfileRow) -> tuple[str, ...]:
        """The texts of a row, in the order of `columns`."""
        host = f"{row.cpu_total_percent:.2f} %", format_us(row.cpu_total_us), format_us(row.cpu_time_avg_us)
        if self.device_type == "cuda":
            device = format_us(row.self_device_us), f"{row.self_device_percent:.2f} %"
            return (row.name, format_bytes(row.self_mem_bytes), format_us(row.device_time_avg_us), *host, *device)
        return (row.name, format_bytes(row.self_mem_bytes), *host)

    def __str__(self) -> str:
        table = aligned([self.columns, *(self.cells(row) for row in self.rows)], left=0)
        return f"{table}\n{textwrap.fill(self.note, NOTE_WIDTH)}"


def profile(passes: Mapping[str, Pass], *, group_by_stack: int = 0, warmup: int = 1) -> Profile:
    """One row of torch.profiler for every pass, each run once in a `record_function` range of its name.

    With `group_by_stack` the operators inside each pass too, told apart by the innermost that many lines of their call
    stacks. Names must differ from names of PyTorch's operators.
    """
    _warm_up(passes.values(), warmup)
    cuda = any(work.device.type == "cuda" for work in passes.values())
    totals = _Totals(_profiled(passes, cuda), cuda)
    operators = {}
    if group_by_stack:
        stacked = _Totals(_profiled(passes, cuda, with_stack=True), cuda)
        operators = {name: tuple(stacked.by_stack(name, group_by_stack)) for name in passes}
    rows = tuple(totals.row(name, totals.named(name)) for name in passes)
    return Profile("cuda" if cuda else "cpu", rows, operators)


def _profiled(passes: Mapping[str, Pass], cuda: bool, *, with_stack: bool = False) -> list[FunctionEvent]:
    settings = _ExperimentalConfig(verbose=with_stack)
    with profiled(cuda, with_stack=with_stack, experimental_config=settings) as profiler:
        for name, work in passes.items():
            prepared = work.prepare()
            with record_function(name):
                result = prepared.run()
                if cuda:
                    torch.cuda.synchronize(work.device)
            del prepared, result
    return list(profiler.events() or ())


class _Totals:
    """Sums over a whole profile, which its percentages refer to."""

    def __init__(self, events: list[FunctionEvent], cuda: bool) -> None:
        self.events, self.cuda = events, cuda
        self.self_cpu_us = sum(event.self_cpu_time_total for event in events)
        self.self_device_us = sum(
            event.self_device_time_total for event in events if _on_device(event) and not event.is_user_annotation
        )

    def named(self, name: str) -> list[FunctionEvent]:
        return [event for event in self.events if event.name == name]

    def row(self, name: str, events: Iterable[FunctionEvent], stack: tuple[str, ...] = ()) -> ProfileRow:
        """The sum of events of one name. On CUDA a range has a twin on the device, which tells its time there."""
        host, device = FunctionEventAvg(), FunctionEventAvg()
        for event in events:
            (device if _on_device(event) else host).add(event)
        timed = device if device.count else host
        return ProfileRow(
            name=name,
            self_mem_bytes=host.self_device_memory_usage if self.cuda else host.self_cpu_memory_usage,
            device_time_avg_us=timed.device_time_total / max(1, timed.count),
            cpu_total_percent=_percent(host.cpu_time_total, self.self_cpu_us),
            cpu_total_us=host.cpu_time_total,
            cpu_time_avg_us=host.cpu_time_total / max(1, host.count),
            self_device_us=timed.self_device_time_total,
            self_device_percent=_percent(timed.self_device_time_total, self.self_device_us),
            stack=stack,
        )

    def by_stack(self, range_name: str, depth: int) -> Iterator[ProfileRow]:
        """A row for each operator inside the range and each different end of its call stack."""
        groups: dict[tuple[str, tuple[str, ...]], list[FunctionEvent]] = {}
        for event in _inside(self.named(range_name)):
            if not _PYTHON_FRAME.search(event.name):
                stack = [line for line in event.stack if not line.startswith("<built-in ") and _OWN_FRAMES not in line]
                groups.setdefault((event.name, tuple(stack[:depth])), []).append(event)
        for (name, stack_end), events in groups.items():
            yield self.row(name, events, stack_end)


_OWN_FRAMES = "effops/measure.py("
_PYTHON_FRAME = re.compile(r"\(\d+\): |^<built-in |^nn\.Module: ")


def _inside(events: Iterable[FunctionEvent]) -> Iterator[FunctionEvent]:
    for event in events:
        yield from event.cpu_children
        yield from _inside(event.cpu_children)


def _on_device(event: FunctionEvent) -> bool:
    return event.device_type != DeviceType.CPU


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
