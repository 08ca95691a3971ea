"""Which storages are large between small ones: the rules of `lint`.

A hump goes from roots, which are small, over members, which are large, to the results of an operator that reduces them.
Its members need not have been made: another expression has the same results without them. What a program returns can be
of all pairs itself, as a matrix of costs. Then no member is much larger, and many that are held at once are a hump.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from effops.prediction.timeline import highest
from effops.programs.capture.observed import TURNS, UNREAD, Call, Observed, Read, Storage
from effops.programs.capture.places import CallSite, Place, place_of

LEAST_BYTES = 2**24
LEAST_TIMES = 8.0
HEAD_TIMES = 4.0  # the weight of a language model's head is large itself
SEED_SHARE = 256  # what is kept of a loop over chunks is large in sum alone
REDUCED_TIMES = 4  # a reducer's results are so many times smaller than what it reads, at least
NEAR_TIMES = 4  # members lie within so many times of each other
STEPS_BEHIND = 4  # a turn of a loop reduces the part that it reads in so many operators, at most
READ_SHARE = 4  # a reducer reads at least one in so many bytes of a tensor, or few of it are ever read
# Whose results are what a program wants of its operands, not a step on the way.
TRANSFORMS = {
    "convolution",
    "_convolution",
    "convolution_overrideable",
    "mkldnn_convolution",
    "cudnn_convolution",
    "embedding",
    "_embedding_bag",
    "mkldnn_rnn_layer",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "_fft_c2c",
    "_fft_r2c",
    "_fft_c2r",
}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_grouped_mm", "linear"}
CONSTANTS = {
    "ones",
    "zeros",
    "full",
    "arange",
    "eye",
    "linspace",
    "tril_indices",
    "triu_indices",
    "scalar_tensor",
    *UNREAD,
}
CHECKS = {"all", "any", "_is_all_true", "_is_any_true"}  # of values, which can be switched off
COPIES = {"clone", "_to_copy"}
LOSSES = {"_log_softmax", "nll_loss_forward", "logsumexp"}


@dataclass(eq=False)
class Hump:
    """Storages that are large between small ones, for one reducing call.

    If the hump `is_of_result`, this call makes what the program returns, and need not reduce anything. If it is
    `in_parts`, a loop reads it part by part, and this call reduces the first one.
    """

    members: list[Storage]
    roots: list[Storage]
    reducer: Call
    is_of_result: bool = False
    in_parts: bool = False

    @property
    def is_head(self) -> bool:
        return _is_head(self.members)

    @property
    def largest(self) -> Storage:
        """The first of the largest members."""
        return max(self.members, key=lambda one: (one.nbytes, -one.allocation.born))

    @property
    def result_bytes(self) -> int:
        return self.reducer.result_bytes

    @property
    def held_bytes(self) -> int:
        """The most bytes of members at once while they are made and read."""
        ticks = [member.allocation.born for member in self.members]
        return max(sum(one.nbytes for one in self.members if one.allocation.is_there(tick)) for tick in ticks)

    @property
    def times(self) -> float:
        """How many times as much is held as the largest of what goes in and comes out."""
        outside = max([1, self.result_bytes, *(root.nbytes for root in self.roots)])
        times = self.largest.nbytes / outside
        counts_all = times >= REDUCED_TIMES or self.is_head or self.is_of_result
        return self.held_bytes / outside if counts_all else times


@dataclass(eq=False)
class Found:
    """Humps whose largest members are made at one site: those of each turn of a loop, or of each layer."""

    humps: list[Hump] = field(default_factory=list)
    kept: list[Storage] = field(default_factory=list)  # members that are kept for backward
    outlives: Callable[[Storage], bool] = bool  # whether a storage is there when the program has ended

    @property
    def top(self) -> Hump:
        return max(self.humps, key=lambda hump: hump.largest.nbytes)

    @property
    def largest_bytes(self) -> int:
        return self.top.largest.nbytes

    @property
    def kept_bytes(self) -> int:
        return sum(one.nbytes for one in self.kept)

    @property
    def turns(self) -> list[Storage]:
        """What is kept that one expression makes, where it makes most: in the turns of a loop, or in layers."""
        made: dict[tuple[CallSite, str], list[Storage]] = defaultdict(list)
        for one in self.kept:
            if one.maker is not None:
                made[one.maker.site, one.maker.name].append(one)
        return max(made.values(), key=lambda turns: sum(one.nbytes for one in turns), default=[])

    @property
    def is_loop(self) -> bool:
        """Whether what all turns keep is told, and not one tensor."""
        return len(self.turns) >= TURNS

    @property
    def main(self) -> Call:
        """The call that makes what is told."""
        maker = (self.turns[0] if self.is_loop else self.top.largest).maker
        assert maker is not None
        return maker

    @property
    def now_bytes(self) -> int:
        """Those of the largest member, or of all turns of a loop that are kept."""
        return sum(one.nbytes for one in self.turns) if self.is_loop else self.largest_bytes

    @property
    def result_bytes(self) -> int:
        """Those of the results that are left: of the largest hump, or of all turns of a loop that are there at once."""
        if not self.is_loop:
            return self.top.result_bytes
        made = [storage for hump in self.humps for storage in (*hump.reducer.makes, *hump.reducer.writes)]
        at_once, _ = highest({id(one): one.allocation for one in made}.values())
        return max(self.top.result_bytes, at_once)

    @property
    def members(self) -> list[Storage]:
        return list({id(one): one for hump in self.humps for one in hump.members}.values())


def find(
    program: Observed,
    returned: Iterable[Storage],
    end: int,
    least_bytes: float = LEAST_BYTES,
    times: float = LEAST_TIMES,
) -> list[Found]:
    """The humps of a program that matter, the largest first. `end` is the tick at which its forward pass ended."""
    results = {id(storage): storage for storage in returned}
    groups: dict[tuple[CallSite, str], Found] = defaultdict(Found)
    for hump in (*_humps(program, least_bytes / SEED_SHARE), *_humps_of_parts(program, least_bytes)):
        maker = hump.largest.maker
        assert maker is not None
        if not _is_wanted(hump, results.keys()):
            groups[maker.site, maker.name].humps.append(hump)
    found = _those_that_matter(program, groups.values(), end, least_bytes, times)
    named = {id(member) for group in found for member in group.members}
    of_results = [Found([hump]) for hump in _humps_of_results(results, times)]
    others = [group for group in of_results if named.isdisjoint(map(id, group.members))]
    found += _those_that_matter(program, others, end, least_bytes, times)
    merged = _merged(found)
    for group in merged:
        group.outlives = lambda storage: _outlives(storage, program, results.keys())
    return sorted(merged, key=lambda one: -max(one.largest_bytes, one.kept_bytes))


def _outlives(storage: Storage, program: Observed, returned: Container[int]) -> bool:
    """Whether a program returns a storage, or holds it when it has ended.

    What the last operator has read, or what backward has where it comes last, may be released just after it.
    """
    last, died = program.calls[-1], storage.allocation.died
    is_read_last = last.in_backward or last in storage.readers
    return id(storage) in returned or died is None or (not is_read_last and died > last.tick)


def _those_that_matter(
    program: Observed, groups: Iterable[Found], end: int, least_bytes: float, times: float
) -> list[Found]:
    found = []
    for group in groups:
        group.kept = [one for one in group.members if _is_kept(one, end, program.backward_begins is not None)]
        if _matters(group, least_bytes, times):
            found.append(group)
    return found


def _humps(program: Observed, least: float) -> Iterator[Hump]:
    """The hump before each operator of forward whose results are much smaller than what it reads."""
    for call in program.calls:
        if call.in_backward or call.name in CHECKS:
            continue
        large = _reduced(call, least)
        if not large:
            continue
        hump = _walk(large, call, through_products=False)
        if not hump.members or hump.times < REDUCED_TIMES:
            through = _walk(large, call, through_products=True)
            if _has_rows_of_pairs(through):
                hump = through
        if hump.members:
            yield hump


def _humps_of_parts(program: Observed, least: float) -> Iterator[Hump]:
    """What a loop reads part by part, and reduces in each turn: the turn could make its part."""
    for storage in program.storages.values():
        if storage.nbytes < least or not _is_made(storage):
            continue
        for call in (one for one in storage.readers if not one.in_backward and _is_read_in_turns(storage, one)):
            part = max(read.nbytes for read in call.reads if read.storage is storage)
            reducer = _reducer_behind(call, part) if READ_SHARE * part <= storage.nbytes else None
            hump = None if reducer is None else _walk([storage], reducer, through_products=False)
            if hump is not None and hump.members:
                hump.in_parts = True
                yield hump
            break  # the other turns are like the first one


def _reducer_behind(call: Call, nbytes: int) -> Call | None:
    """The operator, here or behind, whose results are much smaller than a part that is read; None if it stays large."""
    for _ in range(STEPS_BEHIND):
        if call.result_bytes * REDUCED_TIMES <= nbytes:
            return call
        readers = [one for made in (*call.makes, *call.writes) for one in made.readers if one.tick > call.tick]
        if not readers or readers[0].in_backward:
            return None
        call = readers[0]
    return None


def _humps_of_results(results: Mapping[int, Storage], times: float) -> Iterator[Hump]:
    """What is held on the way to each result that is made of small tensors alone: of all pairs, as they are too."""
    for result in results.values():
        if not _is_made(result):
            continue
        makers = [call for call in (result.maker, *result.writers) if call is not None]
        reads = [read for call in makers for read in call.reads if NEAR_TIMES * read.nbytes >= result.nbytes]
        large = {id(read.storage): read.storage for read in reads if _is_made(read.storage)} | {id(result): result}
        hump = _walk(list(large.values()), makers[-1], through_products=False)
        hump.members = [one for one in hump.members if id(one) not in results]
        hump.is_of_result = True
        if hump.members and hump.result_bytes >= times * max((root.nbytes for root in hump.roots), default=1):
            yield hump


def _reduced(call: Call, least: float) -> list[Storage]:
    """What a call reads that is much larger than its results, or of which few elements are ever read."""
    if not (call.makes or call.writes):
        return []
    large = {
        id(read.storage): read.storage
        for read in call.reads
        if read.storage.nbytes >= max(least, REDUCED_TIMES * call.result_bytes)
        and _is_made(read.storage)
        and (
            READ_SHARE * read.nbytes > read.storage.nbytes
            or LEAST_TIMES * read.storage.read_bytes <= read.storage.nbytes
        )
    }
    most = max((one.nbytes for one in large.values()), default=0)
    return [one for one in large.values() if NEAR_TIMES * one.nbytes >= most]


def _is_made(storage: Storage) -> bool:
    return not storage.is_parameter and storage.maker is not None and not storage.maker.in_backward


def _walk(large: Sequence[Storage], reducer: Call, *, through_products: bool) -> Hump:
    """Walk back from what a call reads to what is small."""
    members: dict[int, Storage] = {id(one): one for one in large}
    roots = {id(read.storage): read.storage for read in reducer.reads if id(read.storage) not in members}
    waiting = list(large)
    while waiting:
        storage = waiting.pop()
        for call in (storage.maker, *storage.writers):
            if call is None:
                continue
            if not call.reads and not storage.writers and call.name not in CONSTANTS:  # random numbers are given
                roots[id(storage)] = storage
                continue
            is_product = call.name in PRODUCTS and _has_parameter(call)
            is_logits = call.name in PRODUCTS and _is_head([storage])
            if not is_logits and (call.name in TRANSFORMS or (is_product and not through_products)):
                roots[id(storage)] = storage
                continue
            for read in call.reads:
                other = read.storage
                if id(other) in members or other is storage:
                    continue
                is_large = NEAR_TIMES * read.nbytes >= storage.nbytes and _is_made(other)
                if is_large and not is_logits and not _is_read_in_turns(other, call):
                    members[id(other)] = other
                    waiting.append(other)
                else:
                    roots[id(other)] = other
    held = [one for key, one in members.items() if key not in roots]
    # What members are combined with goes in too, as the values that a mask of their size hides.
    for storage in held:
        for call in storage.readers:
            if call is not reducer and not call.in_backward:
                roots.update({id(read.storage): read.storage for read in call.reads if id(read.storage) not in members})
    return Hump(held, list(roots.values()), reducer)


def _is_read_in_turns(storage: Storage, call: Call) -> bool:
    """Whether a loop reads a storage in turns: then it is what the loop is given."""
    return storage.turns[call.site, call.name] >= TURNS


def _is_head(members: Iterable[Storage]) -> bool:
    """Whether members are a product that a loss reads, or a copy of it: the logits of a language model."""
    made = [one for one in members if one.maker is not None and one.maker.name in PRODUCTS]
    readers = [reader for one in made for reader in one.readers if not reader.in_backward]
    copies = [one for reader in readers if reader.name in COPIES for one in reader.makes]
    readers += [reader for one in copies for reader in one.readers if not reader.in_backward]
    return any(reader.name in LOSSES for reader in readers)


def _has_rows_of_pairs(hump: Hump) -> bool:
    """Whether a product with a parameter runs on the rows of all pairs: many times those of each root."""
    rows = [
        _rows(read)
        for member in hump.members
        if member.maker is not None and member.maker.name in PRODUCTS and _has_parameter(member.maker)
        for read in member.maker.reads
        if not read.storage.is_parameter
    ]
    roots = {id(one) for one in hump.roots}
    outside = [
        _distinct_rows(read)
        for member in hump.members
        if member.maker is not None
        for read in member.maker.reads
        if id(read.storage) in roots and not read.storage.is_parameter
    ]
    return bool(rows) and max(rows) >= LEAST_TIMES * max(outside, default=1)


def _has_parameter(call: Call) -> bool:
    return any(read.storage.is_parameter for read in call.reads)


def _rows(read: Read) -> int:
    count = 1
    for size in read.shape[:-1]:
        count *= size
    return count


def _distinct_rows(read: Read) -> int:
    """The rows of a tensor that are not one row repeated."""
    count = 1
    for size, stride in zip(read.shape[:-1], read.stride[:-1]):
        count *= size if stride else 1
    return count


def _is_kept(storage: Storage, end: int, has_backward: bool) -> bool:
    """Whether a storage outlives forward, and backward reads it."""
    return has_backward and storage.allocation.is_there(end) and any(one.in_backward for one in storage.readers)


def _is_wanted(hump: Hump, wanted: Container[int]) -> bool:
    """Whether the program returns a member, or something as large that is made of members."""
    least = hump.held_bytes / LEAST_TIMES
    seen, waiting = {id(one) for one in hump.members}, list(hump.members)
    while waiting:
        storage = waiting.pop()
        if id(storage) in wanted:
            return True
        for call in storage.readers:
            if call.in_backward:
                continue
            for other in (*call.makes, *call.writes):
                if id(other) not in seen and other.nbytes > least:
                    seen.add(id(other))
                    waiting.append(other)
    return False


def _matters(group: Found, least_bytes: float, times: float) -> bool:
    if any(
        hump.largest.nbytes >= least_bytes and hump.times >= (min(HEAD_TIMES, times) if hump.is_head else times)
        for hump in group.humps
    ):
        return True
    roots = {id(root): root.nbytes for hump in group.humps for root in hump.roots}
    results = {id(one): one.nbytes for hump in group.humps for one in (*hump.reducer.makes, *hump.reducer.writes)}
    outside = max(sum(roots.values()), sum(results.values()), 1)
    return group.kept_bytes >= max(least_bytes, times * outside)


def _merged(groups: Sequence[Found]) -> list[Found]:
    """One finding for humps that share members: the one that has the largest of them."""
    merged: list[Found] = []
    for group in sorted(groups, key=lambda one: -max(one.largest_bytes, one.kept_bytes)):
        members = {id(one) for one in group.members}
        into = next((one for one in merged if members & {id(other) for other in one.members}), None)
        if into is None:
            merged.append(group)
        else:
            into.humps += group.humps
            into.kept = list({id(one): one for one in (*into.kept, *group.kept)}.values())
    return merged


def lines(group: Found) -> dict[Place, int]:
    """The places at which the members are made, in their order, and the bytes of each, as those of a finding."""
    made: dict[Place, list[Storage]] = defaultdict(list)
    for one in sorted(group.members, key=lambda one: one.allocation.born):
        instruction = None if one.maker is None else one.maker.site.library or one.maker.site.user
        if instruction is not None:
            made[place_of(instruction)].append(one)
    kept = {id(one) for one in group.kept}
    turns = {place: [one for one in all_of if id(one) in kept] for place, all_of in made.items()}
    return {
        place: sum(one.nbytes for one in turns[place])
        if len(turns[place]) >= TURNS
        else max(one.nbytes for one in all_of)
        for place, all_of in made.items()
    }
