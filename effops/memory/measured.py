"""Follows a step that really runs on the CPU, by the profiler's record of every allocation."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from effops.memory.surroundings import isolated_from_caller
from effops.memory.workload import Step, Workload
from effops.prediction.shared import profiled
from effops.prediction.timeline import Allocation, Timeline

MARK = "effops.memory"


def measured_timeline(workload: Workload, batch_size: int) -> Timeline:
    """The timeline of the second of two steps, as it ran; the random number generator is left as it was."""
    notes = _Notes()
    with (
        isolated_from_caller(),
        torch.random.fork_rng(),
        profiled() as profiler,
    ):
        step = Step(workload, batch_size, notes.enter, notes.mark)
        step.run(batches=1)
        notes.note("begin")
        step.run()
        notes.note("end")
    recorded = profiler.profiler
    assert recorded is not None
    assert recorded.kineto_results is not None
    return notes.timeline(
        sorted(_events(recorded.kineto_results.experimental_event_tree(), ()), key=lambda one: one[0])
    )


class _Notes:
    """Leaves notes on a step among the profiler's events."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str, tuple[int, ...]]] = []

    def note(self, kind: str, what: str = "", addresses: tuple[int, ...] = ()) -> None:
        self.notes.append((kind, what, addresses))
        with record_function(MARK):
            pass

    def enter(self, phase: str) -> None:
        self.note("enter", phase)

    def mark(self, category: str, found: Iterable[Tensor]) -> None:
        self.note("mark", category, tuple(tensor.untyped_storage().data_ptr() for tensor in found))

    def timeline(self, events: Sequence[tuple[int, int, int, str]]) -> Timeline:
        """Put the allocator's events and the notes together; what was allocated before is not seen."""
        records: list[Allocation] = []
        living: dict[int, Allocation] = {}
        phases: list[tuple[str, int]] = []
        tick = start = 0
        notes = iter(self.notes)
        for _, address, nbytes, operator in events:
            if operator == MARK:
                kind, what, addresses = next(notes)
                if kind == "enter":
                    phases.append((what, tick + 1))
                elif kind == "begin":
                    start = tick
                elif kind == "end":
                    break
                for marked in addresses:
                    if marked in living:
                        living[marked].category = what
            elif nbytes > 0:
                tick += 1
                living[address] = Allocation(nbytes, tick, None, operator)
                records.append(living[address])
            elif address in living:
                tick += 1
                living.pop(address).died = tick
        return Timeline(records, tuple(phases), start, tick)


def _events(nodes: Sequence[Any], operators: tuple[str, ...]) -> Iterator[tuple[int, int, int, str]]:
    """The time, address, bytes and enclosing operator of each allocation, of each release and of each note."""
    for node in nodes:
        kind = node.tag.name
        if kind == "Allocation" and node.extra_fields.device == torch.device("cpu"):
            fields = node.extra_fields
            yield node.start_time_ns, fields.ptr, fields.alloc_size, _innermost_operator(operators)
        elif node.name == MARK:
            yield node.start_time_ns, 0, 0, MARK
        yield from _events(node.children, (*operators, node.name) if kind == "TorchOp" else operators)


def _innermost_operator(operators: Sequence[str]) -> str:
    """The innermost operator that does more than allocate."""
    named = (name for name in reversed(operators) if name.startswith(("aten::", "effops::")))
    return next((name for name in named if not name.startswith(("aten::empty", "aten::resize"))), "no operator")
