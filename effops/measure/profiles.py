"""Rows of torch.profiler for passes, and for the operators inside."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import record_function

from effops.measure.passes import AS_A_PASS, Pass, check_integer, check_passes, warm_up
from effops.prediction.shared import profiled
from effops.pytorch.measure import DeviceType, FunctionEvent, FunctionEventAvg
from effops.pytorch.prediction import _ExperimentalConfig
from effops.text import aligned, format_bytes, format_us, tells_wrong_arguments

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


@partial(tells_wrong_arguments, remedy=f'; give one dict, as in profile({{"name": {AS_A_PASS}}})')
def profile(passes: Mapping[str, Pass], *, group_by_stack: int = 0, warmup: int = 1) -> Profile:
    """One row of torch.profiler for every pass, each run once in a `record_function` range of its name.

    With `group_by_stack` the operators inside each pass too, told apart by the innermost that many lines of their call
    stacks. Names must differ from names of PyTorch's operators.

    Raises:
        TypeError: `passes` are no passes by name, or another argument is no integer
        ValueError: a name is that of an operator, tensors have no memory, or a number is below 0
    """
    check_passes("profile", passes)
    check_integer("profile", "group_by_stack", group_by_stack, 0)
    check_integer("profile", "warmup", warmup, 0)
    if taken := [name for name in passes if "::" in name]:
        raise ValueError(
            f"profile: names of `passes` must differ from PyTorch's operators; got {taken[0]!r}; leave the colons out"
        )
    warm_up(passes.values(), warmup)
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


_OWN_FRAMES = "effops/measure/"
_PYTHON_FRAME = re.compile(r"\(\d+\): |^<built-in |^nn\.Module: ")


def _inside(events: Iterable[FunctionEvent]) -> Iterator[FunctionEvent]:
    for event in events:
        yield from event.cpu_children
        yield from _inside(event.cpu_children)


def _on_device(event: FunctionEvent) -> bool:
    return event.device_type != DeviceType.CPU


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
