"""All variants of one op, and its peers, on one workload: checked against float64, then measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from effops import measure
from effops.commands.console import Progress
from effops.dispatch.op import Cost
from effops.text import format_bytes

from .expected import Expected, Workload
from .floors import parts_of, total_ms
from .peers import PEERS


@dataclass(frozen=True)
class Row:
    """One implementation on one workload. What was not found out, or does not apply, is None.

    `status` is "ok", "failed" or "skipped", with the reason. Attributes are named as in the JSON file, except that
    `pass_name` is "pass" there. `time_ms` is the median, `host_ms` that of the time until
    the host has a run issued. A backward pass has no predicted temporaries.
    """

    op: str
    variant: str
    pass_name: str
    device: str
    dtype: str
    size: dict[str, int]
    is_peer: bool
    options: dict[str, Any] = field(default_factory=dict)
    status: str = "ok"
    reason: str = ""
    time_ms: float | None = None
    time_ms_min: float | None = None
    time_ms_iqr: float | None = None
    host_ms: float | None = None
    repeats: int | None = None
    speedup: float | None = None
    self_mem_bytes: int | None = None
    peak_bytes: int | None = None
    input_bytes: int | None = None
    output_bytes: int | None = None
    saved_bytes: int | None = None
    temporary_bytes: int | None = None
    predicted_temporary_bytes: int | None = None
    gbps: float | None = None
    copy_share: float | None = None
    floor_ratio: float | None = None
    error_ratio: float | None = None
    allclose: dict[str, bool | None] | None = None

    @property
    def fails(self) -> bool:
        """Whether an implementation of effops is wrong here; a peer's error is shown only."""
        return self.status == "failed" and not self.is_peer


@dataclass(frozen=True)
class Contender:
    """An implementation: a function of the op's arguments, why it cannot run (or ""), and its predicted cost.

    `is_ready` says that its first forward pass allocates what every later one does: nothing is compiled before.
    """

    name: str
    function: Callable[..., Tensor]
    obstacle: str
    cost: Cost | None
    is_peer: bool = False
    is_ready: bool = False


@dataclass(frozen=True)
class Effort:
    """How often a row runs for its time: `repeats` times, or fewer once it has used `budget_s` seconds.

    Even then it runs `least_repeats` times. A run that was observed anyway counts alone if it took `slow_s` seconds. So
    much of a result is checked as `most_flops` of the naive variant can tell.
    """

    repeats: int = 20
    least_repeats: int = 3
    budget_s: float = 10.0
    most_flops: float = math.inf
    slow_s: float = math.inf


@dataclass
class Observed:
    """A function whose last result is kept, and the seconds that the host spent on it."""

    function: Callable[..., Tensor]
    result: Tensor | None = None
    seconds: float = 0.0

    def __call__(self, *args: Tensor) -> Tensor:
        start = time.perf_counter()
        self.result = self.function(*args)
        self.seconds = time.perf_counter() - start
        return self.result


@dataclass(frozen=True)
class Known:
    """What results are compared with: those of the naive variant, and a peer's in float64."""

    naive: tuple[Tensor, ...] | None = None
    peer: str | None = None
    peer_float64: tuple[Tensor, ...] | None = None

    def allclose(self, expected: Expected, found: tuple[Tensor, ...], error: float) -> dict[str, bool | None]:
        """Whether a result is right and close to each; None where there is nothing to compare with."""
        others = {"naive": self.naive}
        if self.peer is not None:
            others[f"{self.peer}_float64"] = self.peer_float64
        return {
            name: None if other is None else error <= 1 and expected.close(found, other)
            for name, other in others.items()
        }


@dataclass(frozen=True)
class Found:
    """What was found out about a workload: a row for each implementation, and the profiler's table if it was asked for.

    `checked_share` and `tolerance` are those of `Expected`; None if nothing was checked.
    """

    rows: list[Row]
    profile: measure.Profile | None
    checked_share: float | None = None
    tolerance: float | None = None


def compare(
    workload: Workload,
    *,
    variants: Sequence[str],
    with_peers: bool,
    with_floor: bool,
    effort: Effort,
    profiled: bool,
    group_by_stack: int,
    copy_gbps: float,
    progress: Progress,
) -> Found:
    """Rows of every named variant and of the peers.

    With `profiled`, the profiler's table of those that are right; `with_floor`, multiples of the floor.
    """
    args = workload.args()
    contenders = list(contenders_of(workload, args, variants, with_peers))
    expected = Expected(workload, args, effort.most_flops)
    rows, seconds = _checked(workload, args, contenders, expected, progress)
    timings = {
        name: _once(once) for name, once in seconds.items() if rows[name].status == "ok" and once >= effort.slow_s
    }
    passes = {
        contender.name: measure.Pass(contender.function, args, workload.backward)
        for contender in contenders
        if rows[contender.name].status == "ok"
    }
    floor = parts_of(workload, args) if with_floor and passes else {}
    slow = list(timings)
    timings |= measure.times(
        {name: work for name, work in passes.items() if name not in timings}
        | {name: part.work for name, part in floor.items()},
        repeats=effort.repeats,
        least_repeats=effort.least_repeats,
        budget_s=effort.budget_s,
        warmup=0,
        progress=lambda name: progress(f"{workload.pass_name}: timing {name}"),
    )
    profile = None
    if profiled and passes:
        progress(f"{workload.pass_name}: profiling")
        profile = measure.profile(passes, group_by_stack=group_by_stack, warmup=0)
        for one in profile.rows:
            rows[one.name] = replace(rows[one.name], self_mem_bytes=one.self_mem_bytes)
            if one.name in slow:  # the first run of a process is slow, and this is a later one
                timings[one.name] = _once(one.cpu_total_us / 1e6)
    floor_ms = total_ms(floor, timings)
    for name in passes:
        rows[name] = _timed(rows[name], timings[name], timings.get("naive"), args, copy_gbps, floor_ms)
    if not passes:
        return Found(list(rows.values()), profile)
    return Found(list(rows.values()), profile, expected.checked_share, expected.tolerance)


def _once(seconds: float) -> measure.Timing:
    """What is known of a pass that ran once."""
    return measure.Timing(1000 * seconds, 1000 * seconds, 0.0, 1, 1000 * seconds)


def contenders_of(
    workload: Workload, args: tuple[Tensor, ...], variants: Sequence[str], with_peers: bool
) -> Iterator[Contender]:
    op, call = workload.op, workload.op.prepare(*args, **workload.options)
    for variant in op.variants.values():
        if variant.name in variants:
            function = partial(op, variant=variant.name, **workload.options)
            is_ready = variant.name in ("naive", "torchscript")
            yield Contender(variant.name, function, variant.obstacle(call), variant.cost(call), is_ready=is_ready)
    for name, peer in PEERS.get(op.name, {}).items():
        if peer.always or with_peers:
            cost = op.variants[peer.memory_like].cost(call)
            function = partial(peer.function, **workload.options)
            yield Contender(name, function, peer.obstacle, cost, is_peer=True, is_ready=peer.is_ready)


def _checked(
    workload: Workload,
    args: tuple[Tensor, ...],
    contenders: Sequence[Contender],
    expected: Expected,
    progress: Progress,
) -> tuple[dict[str, Row], dict[str, float]]:
    """A row for each contender, in their order, with its error and its memory, and the seconds of those seen to run."""
    rows: dict[str, Row] = {}
    seconds: dict[str, float] = {}
    known = _known_peer(workload, expected, progress)
    for contender in sorted(contenders, key=lambda contender: contender.name != "naive"):
        progress(f"{workload.pass_name}: checking {contender.name}")
        row = _blank(workload, contender)
        obstacle = contender.obstacle or shortage(workload, args, contender.cost)
        if obstacle:
            row = replace(row, status="skipped", reason=obstacle)
        else:
            try:
                row, found, once = _judged(row, workload, args, contender, expected, known)
                if contender.name == "naive":
                    known = replace(known, naive=found)
                if once is not None:
                    seconds[row.variant] = once
            except Exception as error:
                row = _in_trouble(row, error)
        rows[contender.name] = row
    return {contender.name: rows[contender.name] for contender in contenders}, seconds


def _blank(workload: Workload, contender: Contender) -> Row:
    cost = None if contender.is_peer else contender.cost
    return Row(
        op=workload.op.name,
        variant=contender.name,
        pass_name=workload.pass_name,
        device=workload.device.type,
        dtype=str(workload.dtype).removeprefix("torch."),
        size=dict(workload.sizes),
        options=dict(workload.options),
        is_peer=contender.is_peer,
        predicted_temporary_bytes=cost.temporary_bytes if cost and not workload.backward else None,
    )


def needed_bytes(workload: Workload, args: tuple[Tensor, ...], cost: Cost) -> int:
    """What the pass is predicted to allocate at once, beside its arguments."""
    needed = cost.output_bytes + cost.saved_bytes + cost.temporary_bytes
    if workload.backward:
        # The gradient from above, those of the arguments, and each temporary twice: once for either factor's gradient.
        needed += cost.output_bytes + sum(arg.nbytes for arg in args) + cost.temporary_bytes
    return needed


def shortage(workload: Workload, args: tuple[Tensor, ...], cost: Cost | None) -> str:
    """Why the pass does not fit in the memory that is free; empty if it does, as far as the prediction goes."""
    if cost is None:
        return ""
    needed = needed_bytes(workload, args, cost)
    available = measure.available_bytes(workload.device)
    if needed <= available:
        return ""
    return f"needs {needed / 2**30:.1f} GiB, {format_bytes(available)} are free"


def _known_peer(workload: Workload, expected: Expected, progress: Progress) -> Known:
    peers = PEERS.get(workload.op.name, {})
    name, peer, exact = next(((name, peer, peer.exact) for name, peer in peers.items() if peer.exact), (None,) * 3)
    if name is None or peer is None or exact is None:
        return Known()
    if workload.backward or peer.obstacle:
        return Known(peer=name)
    progress(f"{workload.pass_name}: computing {name} in float64")
    result = torch.empty(expected.shape, dtype=torch.float64, device=workload.device)
    with expected.threads():
        for piece in expected.pieces:
            result[piece.index] = exact(*piece.args)
    return Known(peer=name, peer_float64=(result,))


def _judged(
    row: Row,
    workload: Workload,
    args: tuple[Tensor, ...],
    contender: Contender,
    expected: Expected,
    known: Known,
) -> tuple[Row, tuple[Tensor, ...], float | None]:
    """The row with error and memory; the results, or the gradients; the seconds of the pass if they tell something.

    Where nothing is compiled before it runs, the first forward pass is the one whose memory is measured.
    """
    observed = Observed(contender.function)
    work = measure.Pass(observed, args, workload.backward)
    is_ready = contender.is_ready and not workload.backward
    memory = measure.memory(work, warmup=0) if is_ready else None
    out = observed(*args) if observed.result is None else observed.result
    found = torch.autograd.grad(out, args, measure.upstream_gradient(out)) if workload.backward else (out,)
    error = expected.error_ratio(out, found)
    row = replace(row, error_ratio=error, allclose=known.allclose(expected, found, error))
    if not error <= 1 and not contender.is_peer:
        return replace(row, status="failed", reason=f"the error is {error:.3g} times its budget"), found, None
    memory = memory or measure.memory(work, warmup=0)
    return replace(row, **vars(memory)), found, observed.seconds if is_ready else None


def _timed(
    row: Row,
    timing: measure.Timing,
    naive: measure.Timing | None,
    args: tuple[Any, ...],
    copy_gbps: float,
    floor_ms: float | None,
) -> Row:
    """The row with its times and its rate: inputs (in backward also the gradient from above) read, results written.

    A floor is no lower than the time of a copy of these bytes.
    """
    assert row.input_bytes is not None
    assert row.output_bytes is not None
    moved_bytes = row.input_bytes + row.output_bytes
    if row.pass_name == "backward":
        moved_bytes -= (row.input_bytes - measure.storage_bytes(args)) // 2
    gbps = moved_bytes / timing.median_ms / 1e6
    return replace(
        row,
        time_ms=timing.median_ms,
        time_ms_min=timing.min_ms,
        time_ms_iqr=timing.iqr_ms,
        host_ms=timing.host_ms,
        repeats=timing.repeats,
        speedup=naive.median_ms / timing.median_ms if naive else None,
        gbps=gbps,
        copy_share=gbps / copy_gbps,
        floor_ratio=None if floor_ms is None else timing.median_ms / max(floor_ms, moved_bytes / copy_gbps / 1e6),
    )


def _in_trouble(row: Row, error: Exception) -> Row:
    """The row of an implementation that raised: running out of memory is no fault of its own."""
    first_line = next(iter(str(error).splitlines()), "")
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in first_line:
        return replace(row, status="skipped", reason=f"ran out of memory: {first_line}")
    return replace(row, status="failed", reason=f"raised {type(error).__name__}: {first_line}")
