"""What `effops.budget` predicts for a program, and what the allocator of the CPU says of the same run."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from effops.measure import tensors_of, without_collector
from effops.prediction.shared import profiled
from effops.programs.limits_of_memory import MemoryReport, predict

from .program import Program, Sizes


class Compared(NamedTuple):
    report: MemoryReport
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Of the prediction, as a part of what was measured."""
        return abs(self.predicted_bytes - self.measured_bytes) / max(1, self.measured_bytes)


def compared(program: Program, sizes: Sizes) -> Compared:
    """Both numbers of bytes, for a run that differentiates if the program is trained. The run must fit in memory."""
    torch.manual_seed(0)
    arguments = program.arguments(**sizes)
    report = predict(run, program, arguments)
    return Compared(report, report.peak_bytes, measured_bytes(program, arguments))


def run(program: Program, arguments: tuple[Any, ...]) -> Any:
    """The results. Where the program is trained, the arguments have gradients afterwards."""
    results = program.run(*arguments)
    if program.backward:
        torch.stack([one.sum() for one in tensors_of(results) if one.requires_grad]).sum().backward()
    return results


def measured_bytes(program: Program, arguments: tuple[Any, ...]) -> int:
    """The most bytes, at any moment, of what was allocated in a run and is neither returned nor a gradient."""
    run(program, arguments)  # warms up
    for one in leaves(arguments):
        one.grad = None
    gc.collect()
    with without_collector():
        with profiled() as profiler:
            results = run(program, arguments)
        returned = [*tensors_of(results), *(one.grad for one in leaves(arguments) if one.grad is not None)]
        addresses = {one.untyped_storage().data_ptr() for one in returned}
        recorded: Any = profiler.profiler
        events = sorted(allocations(recorded.kineto_results.experimental_event_tree()))
    last = {address: index for index, (_, address, nbytes) in enumerate(events) if nbytes > 0 and address in addresses}
    living: dict[int, int] = {}
    total = most = 0
    for index, (_, address, nbytes) in enumerate(events):
        if nbytes > 0 and last.get(address) != index:
            living[address] = nbytes
            total += nbytes
            most = max(most, total)
        elif nbytes < 0:
            total -= living.pop(address, 0)  # what is older than the run is not counted
    return most


def leaves(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for one in arguments:
        yield from one.parameters() if isinstance(one, torch.nn.Module) else tensors_of(one)


def allocations(nodes: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """The time, the address and the bytes of each allocation, and of each release, whose bytes are negative."""
    for node in nodes:
        if node.tag.name == "Allocation" and node.extra_fields.device == torch.device("cpu"):
            yield node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size
        yield from allocations(node.children)
