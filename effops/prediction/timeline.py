"""What was allocated during steps, when and in which category: the same record of a predicted and of a measured run."""

import bisect
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

CATEGORIES = (
    "weights",
    "optimizer states",
    "gradients",
    "inputs",
    "saved activations",
    "forward temporaries",
    "backward temporaries",
    "optimizer temporaries",
    "generation state",
    "other",
)

# The phases of a step. Each lasts until the next one begins.
PHASES = (
    "setup",  # model and optimizer are made
    "inputs",  # a batch is made
    "forward",  # of training: the loss is computed; of inference: the model is called
    "backward",
    "optimizer",  # its step
    "between",  # of inference: what runs before, between and after calls of the model
    "release",  # gradients, or the results of inference, are released
)


@dataclass
class Allocation:
    """A storage, which is there from the tick `born` up to the tick `died`, or to the end if that is None.

    A tick is an allocation or a release. `category` is what the program that ran marked the storage as, such as
    weights. If it is None, the category follows from when the storage was there.
    """

    nbytes: int
    born: int
    died: int | None
    operator: str
    category: str | None = None

    def is_there(self, tick: int) -> bool:
        return self.born <= tick and (self.died is None or self.died > tick)


def highest(allocations: Iterable[Allocation]) -> tuple[int, int]:
    """The highest sum of bytes of some allocations, and the first tick at which it is there; (0, 0) without any."""
    changes: Counter[int] = Counter()
    for one in allocations:
        changes[one.born] += one.nbytes
        if one.died is not None:
            changes[one.died] -= one.nbytes
    total, found = 0, (0, 0)
    for tick in sorted(changes):
        total += changes[tick]
        if total > found[0]:
            found = total, tick
    return found


@dataclass(frozen=True)
class Timeline:
    """What was allocated during one step or several. Its sums are of the last step.

    Attributes:
        allocations: in the order of their births
        phases: in their order, each a name of `PHASES` with its first tick
        start: the last tick before the last step; what is there then was there before the step
        end: the last tick of the last step
    """

    allocations: Sequence[Allocation]
    phases: Sequence[tuple[str, int]]
    start: int
    end: int

    @functools.cached_property
    def totals(self) -> Sequence[int]:
        """Bytes at the tick `start`, and at each tick of the last step."""
        return [sum(column) for column in zip(*self.curves.values())]

    @functools.cached_property
    def curves(self) -> Mapping[str, Sequence[int]]:
        """Bytes of each category at the tick `start`, and at each tick of the last step."""
        ticks = self.end - self.start + 1
        changes = {category: [0] * (ticks + 1) for category in CATEGORIES}  # what is never released dies behind the end
        for allocation in self.allocations:
            for category, begin, end in self._categories(allocation):
                if end > self.start:
                    changes[category][max(0, begin - self.start)] += allocation.nbytes
                    changes[category][end - self.start] -= allocation.nbytes
        return {category: list(itertools.accumulate(change[:ticks])) for category, change in changes.items()}

    @property
    def peak_tick(self) -> int:
        """The first tick at which the most bytes are there."""
        return self.start + self.totals.index(self.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return max(self.totals)

    def alive(self, tick: int) -> Iterator[Allocation]:
        """What is there at a tick."""
        return (one for one in self.allocations if one.is_there(tick))

    def makers(self, category: str) -> Mapping[str, int]:
        """The operators that made what a category holds at its largest, by bytes; the largest operator comes first."""
        curve = self.curves[category]
        tick = self.start + curve.index(max(curve))
        found: Counter[str] = Counter()
        for one in self.alive(tick):
            if any(name == category and begin <= tick < end for name, begin, end in self._categories(one)):
                found[one.operator] += one.nbytes
        return dict(found.most_common())

    @property
    def ends(self) -> Mapping[str, int]:
        """The last tick of each phase of the last step. Of a phase that occurs several times, the last one counts."""
        phases = enumerate(self.phases)
        return {phase: self._first_tick(index + 1) - 1 for index, (phase, first) in phases if first > self.start}

    def _categories(self, allocation: Allocation) -> Iterator[tuple[str, int, int]]:
        """The categories that an allocation has in turn, each with its first tick and the tick after its last one.

        What a forward pass leaves behind is a saved activation until the end of the backward pass. What is there even
        then is kept by a module, and is of category other. In inference, what outlives a call of the model is
        generation state, such as a cache of keys and values.
        """
        born = allocation.born
        died = self.end + 1 if allocation.died is None else allocation.died
        index = bisect.bisect_right(self.phases, born, key=lambda phase: phase[1]) - 1
        phase, phase_end = self.phases[index][0], self._first_tick(index + 1)
        following = self.phases[index + 1][0] if index + 1 < len(self.phases) else ""
        category_end = died
        if allocation.category is not None:
            category = allocation.category
        elif born <= self.start or phase in ("setup", "inputs", "release"):
            category = "other"  # weights, states of the optimizer and inputs are marked
        elif phase == "forward" and died >= phase_end and following == "backward":
            category, category_end = "saved activations", min(died, self._first_tick(index + 2))
        elif phase == "between" or (phase == "forward" and died >= phase_end):
            category = "generation state"
        else:
            category, category_end = f"{phase} temporaries", min(died, phase_end)
        yield category, born, category_end
        if category_end < died:
            yield "other", category_end, died

    def _first_tick(self, index: int) -> int:
        """The first tick of a phase, or the one after the last step if there are no more phases."""
        return self.phases[index][1] if index < len(self.phases) else self.end + 1
