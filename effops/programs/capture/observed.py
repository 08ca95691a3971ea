"""What a program did on fake tensors: its operators, the storages that they read and made, and where they were called.

`Observed.note` observes the recorder of `prediction`, which knows bytes and lifetimes.
"""

from __future__ import annotations

import math
import sys
import weakref
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from effops.prediction.allocations import Workspace
from effops.prediction.outcomes import OperatorCall
from effops.prediction.recorder import Recorder
from effops.prediction.timeline import Allocation
from effops.programs.capture.places import CallSite, CallSites, Place
from effops.programs.capture.scopes import Scope, outermost, scopes
from effops.pytorch.calls import FakeTensor, tree_leaves
from effops.pytorch.prediction import schema_of

TURNS = 4  # of a loop, at least, as tensors that one expression makes
# They take dtype and device from what they are given, and perhaps its shape. They read no element of it.
UNREAD = {"new_zeros", "new_ones", "new_empty", "new_empty_strided", "new_full"}
UNREAD |= {"zeros_like", "ones_like", "empty_like", "full_like"}


@dataclass(eq=False)
class Storage:
    """Memory that tensors share. `maker` is None for what was there before, whose bytes are not the program's.

    `writers` changed it in place, and `readers` are the operators that read it.
    """

    nbytes: int
    allocation: Allocation
    maker: Call | None
    is_parameter: bool = False
    writers: list[Call] = field(default_factory=list)
    readers: list[Call] = field(default_factory=list)
    read_bytes: int = 0  # by all of forward
    turns: Counter[tuple[CallSite, str]] = field(default_factory=Counter)  # how often forward reads it at one place

    @property
    def calls(self) -> list[Call]:
        """The operators that made it, changed it or read it."""
        return [call for call in (self.maker, *self.writers, *self.readers) if call is not None]


class Read(NamedTuple):
    """A tensor that an operator reads: its storage and how it lies there."""

    storage: Storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that are read, each once."""
        distinct = (size for size, stride in zip(self.shape, self.stride) if stride)
        return min(self.itemsize * math.prod(distinct), self.storage.nbytes)


@dataclass(eq=False)
class Call:
    """An operator that ran. A call that only made a view makes nothing."""

    operator: Any
    reads: Sequence[Read]
    makes: Sequence[Storage]
    writes: Sequence[Storage]
    shapes: Sequence[tuple[int, ...]]
    site: CallSite
    in_backward: bool
    tick: int
    temporary_bytes: int
    operations: int
    scopes: Sequence[Scope] = ()  # of a large call: what the names around it stood for

    @property
    def name(self) -> str:
        """The operator without its namespace and overload: 'mul'."""
        return str(schema_of(self.operator).name).partition("::")[2]

    @property
    def result_bytes(self) -> int:
        return sum(storage.nbytes for storage in (*self.makes, *self.writes))


class Observed:
    """The operators of a program in their order, and its storages.

    An operator of forward that makes or reads `scope_bytes` is noted with the names of the functions that called it.
    """

    def __init__(self, scope_bytes: float = 2**16) -> None:
        self.scope_bytes = scope_bytes
        self.outermost = outermost(sys._getframe(1))
        self.calls: list[Call] = []
        self.sites = CallSites()
        self.recorder: Recorder | None = None
        self.storages: dict[int, Storage] = {}  # by the id of the allocation, which each storage keeps
        self.backward_begins: int | None = None  # the tick at which autograd first ran an operator
        self.unknown: set[str] = set()

    def note(self, call: OperatorCall, result: Any, allocated: Workspace, counted: tuple[str, int]) -> None:
        """Called by the recorder after each operator."""
        assert self.recorder is not None
        site, in_backward = self.sites.current()
        tick = self.recorder.tick
        if in_backward and self.backward_begins is None:
            self.backward_begins = tick
        reads = [
            Read(self.storage_of(one), tuple(one.shape), one.stride(), one.itemsize)
            for one in _tensors((*call.args, *call.kwargs.values()))
            if schema_of(call.func).name.partition("::")[2] not in UNREAD
        ]
        read = {id(one.storage) for one in reads}
        results = _tensors((result,))
        owned = {id(storage): storage for storage in map(self.storage_of, results)}
        made = [storage for key, storage in owned.items() if key not in read and storage.maker is None]
        changed = _changed(call)
        written = [self.storage_of(one) for one in changed]
        noted = Call(
            call.func,
            reads,
            made,
            written,
            [tuple(leaf.shape) for leaf in results],
            site,
            in_backward,
            tick,
            allocated.temporary_bytes,
            counted[1],
        )
        if (
            not in_backward
            and max([0, *(one.nbytes for one in reads), *(one.nbytes for one in made)]) >= self.scope_bytes
        ):
            noted.scopes = scopes(sys._getframe(1), self.outermost)
        for storage in made:
            storage.maker = noted
        for storage in written:
            storage.writers.append(noted)
        if made or written:  # a view reads nothing
            for one in reads:
                one.storage.read_bytes += 0 if in_backward else one.nbytes
            for storage in {id(one.storage): one.storage for one in reads}.values():
                storage.readers.append(noted)
                storage.turns[site, noted.name] += not in_backward
        self.calls.append(noted)

    def bytes_by_line(self, allocations: Iterable[Allocation]) -> list[tuple[Place | None, int]]:
        """The bytes of what each line made, the most first; None for what no line is known of."""
        sums: defaultdict[tuple[str, int] | None, int] = defaultdict(int)
        # Of a line's expressions the longest, which has the others inside.
        places: dict[tuple[str, int] | None, Place | None] = {None: None}
        for one in allocations:
            call = self._call_of(one)
            place = None if call is None else call.site.place
            line = place and (place.file, place.line)
            sums[line] += one.nbytes
            if place is not None:
                places[line] = max(places.get(line) or place, place, key=lambda one: len(one.source))
        return sorted(((places[line], nbytes) for line, nbytes in sums.items()), key=lambda one: -one[1])

    def _call_of(self, allocation: Allocation) -> Call | None:
        """The operator that made a storage, or that allocated memory inside."""
        storage = self.storages.get(id(allocation))
        if storage is not None:
            return storage.maker
        # What an operator allocates inside is no storage. It is born before that operator is noted.
        index = bisect_left(self.calls, allocation.born, key=lambda call: call.tick)
        return self.calls[index] if index < len(self.calls) else None

    def storage_of(self, tensor: Tensor) -> Storage:
        assert self.recorder is not None
        memory = tensor.untyped_storage()
        reference = weakref.ref(memory)
        if reference not in self.recorder.living:  # it is older than the program
            self.recorder.count(tensor, nbytes=0)
        allocation = self.recorder.living[reference]
        found = self.storages.get(id(allocation))
        if found is None:
            found = self.storages[id(allocation)] = Storage(memory.nbytes(), allocation, None)
        if isinstance(tensor, nn.Parameter):
            found.is_parameter = True
        return found


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, FakeTensor)]


def _changed(call: OperatorCall) -> list[Tensor]:
    """The arguments that an operator changes in place."""
    if not schema_of(call.func).is_mutable:
        return []
    arguments = schema_of(call.func).arguments
    given = [
        call.kwargs.get(one.name) if one.kwarg_only or index >= len(call.args) else call.args[index]
        for index, one in enumerate(arguments)
    ]
    return _tensors(value for value, one in zip(given, arguments) if one.alias_info and one.alias_info.is_write)
