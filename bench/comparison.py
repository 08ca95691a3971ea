"""All variants of one op, and its peers, on one workload: checked against float64, then measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from peers import PEERS
from torch import Tensor

from effops import measure
from effops.commands.console import Progress
from effops.dispatch.op import Cost, Op
from effops.reference import reference_of
from effops.reference.reference import Bounds, worst_error_ratio
from effops.text import format_bytes


@dataclass(frozen=True)
class Workload:
    """What is run: an op on arguments of given sizes, with options by keyword, and which pass of it."""

    op: Op
    sizes: Mapping[str, int]
    dtype: torch.dtype
    device: torch.device
    backward: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pass_name(self) -> str:
        return "backward" if self.backward else "forward"

    def args(self) -> tuple[Tensor, ...]:
        """The arguments of the op: the same values at every call."""
        generator = torch.Generator(self.device).manual_seed(0)
        args = reference_of(self.op).workload(**self.sizes, dtype=self.dtype, device=self.device, generator=generator)
        return tuple(arg.detach().requires_grad_(self.backward) for arg in args)


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
    error_ratio: float | None = None
    allclose: dict[str, bool | None] | None = None

    @property
    def fails(self) -> bool:
        """Whether an implementation of effops is wrong here; a peer's error is shown only."""
        return self.status == "failed" and not self.is_peer


@dataclass(frozen=True)
class Contender:
    """An implementation: a function of the op's arguments, why it cannot run (or ""), and its predicted cost."""

    name: str
    function: Callable[..., Tensor]
    obstacle: str
    cost: Cost
    is_peer: bool = False


class Expected:
    """What every result of a workload is judged by: bounds from float64, computed once, where they are first asked for.

    Those of gradients are for the gradient that `measure.upstream_gradient` makes for a result of any layout.
    """

    def __init__(self, workload: Workload, args: tuple[Tensor, ...]) -> None:
        self.reference = reference_of(workload.op)
        self.call = workload.op.prepare(*(arg.detach() for arg in args), **workload.options)
        self.like = args[0]

    @cached_property
    def bounds(self) -> Bounds:
        return self.reference.bounds(self.call)

    @cached_property
    def gradient_bounds(self) -> tuple[Bounds, ...]:
        result = self.like.new_empty(self.bounds.value.shape, dtype=self.call.dtype)
        return self.reference.gradient_bounds(self.call, measure.upstream_gradient(result))


@dataclass(frozen=True)
class Results:
    """What others are compared with by `torch.allclose`: the naive variant's results, and a peer's in float64."""

    naive: tuple[Tensor, ...] | None = None
    peer: str | None = None
    peer_float64: tuple[Tensor, ...] | None = None

    def allclose(self, found: tuple[Tensor, ...]) -> dict[str, bool | None]:
        """Whether default tolerances hold; None where there is nothing to compare with."""
        expected = {"naive": self.naive}
        if self.peer is not None:
            expected[f"{self.peer}_float64"] = self.peer_float64
        return {name: None if results is None else _close(found, results) for name, results in expected.items()}


def _close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(
        result.shape == other.shape and torch.allclose(result.to(other.dtype), other)
        for result, other in zip(found, expected, strict=True)
    )


def compare(
    workload: Workload,
    *,
    variants: Sequence[str],
    with_peers: bool,
    repeats: int,
    group_by_stack: int,
    copy_gbps: float,
    progress: Progress,
) -> tuple[list[Row], measure.Profile]:
    """Rows of every named variant and of the peers, and the profiler's table of those that are right."""
    args = workload.args()
    contenders = list(_contenders(workload, args, variants, with_peers))
    rows = _checked(workload, args, contenders, progress)
    passes = {
        contender.name: measure.Pass(contender.function, args, workload.backward)
        for contender in contenders
        if rows[contender.name].status == "ok"
    }
    timings = measure.times(
        passes, repeats=repeats, warmup=0, progress=lambda name: progress(f"{workload.pass_name}: timing {name}")
    )
    progress(f"{workload.pass_name}: profiling")
    profile = measure.profile(passes, group_by_stack=group_by_stack, warmup=0)
    for name, timing in timings.items():
        rows[name] = _timed(rows[name], timing, timings.get("naive"), args, copy_gbps)
    for profiled in profile.rows:
        rows[profiled.name] = replace(rows[profiled.name], self_mem_bytes=profiled.self_mem_bytes)
    return list(rows.values()), profile


def _contenders(
    workload: Workload, args: tuple[Tensor, ...], variants: Sequence[str], with_peers: bool
) -> Iterator[Contender]:
    op, call = workload.op, workload.op.prepare(*args, **workload.options)
    for variant in op.variants.values():
        if variant.name in variants:
            function = partial(op, variant=variant.name, **workload.options)
            yield Contender(variant.name, function, variant.obstacle(call), variant.cost(call))
    for name, peer in PEERS.get(op.name, {}).items():
        if peer.always or with_peers:
            cost = op.variants[peer.memory_like].cost(call)
            yield Contender(name, partial(peer.function, **workload.options), peer.obstacle, cost, is_peer=True)


def _checked(
    workload: Workload, args: tuple[Tensor, ...], contenders: Sequence[Contender], progress: Progress
) -> dict[str, Row]:
    """A row for each contender, in their order, with its error and its memory. The naive variant goes first."""
    rows: dict[str, Row] = {}
    expected, known = Expected(workload, args), _peer_results(workload, args, progress)
    for contender in sorted(contenders, key=lambda contender: contender.name != "naive"):
        progress(f"{workload.pass_name}: checking {contender.name}")
        row = _blank(workload, contender)
        obstacle = contender.obstacle or _shortage(workload, args, contender.cost)
        if obstacle:
            row = replace(row, status="skipped", reason=obstacle)
        else:
            try:
                row, found = _judged(row, workload, args, contender, expected, known)
                if contender.name == "naive":
                    known = replace(known, naive=found)
            except Exception as error:
                row = _in_trouble(row, error)
        rows[contender.name] = row
    return {contender.name: rows[contender.name] for contender in contenders}


def _blank(workload: Workload, contender: Contender) -> Row:
    return Row(
        op=workload.op.name,
        variant=contender.name,
        pass_name=workload.pass_name,
        device=workload.device.type,
        dtype=str(workload.dtype).removeprefix("torch."),
        size=dict(workload.sizes),
        options=dict(workload.options),
        is_peer=contender.is_peer,
        predicted_temporary_bytes=None if workload.backward or contender.is_peer else contender.cost.temporary_bytes,
    )


def _shortage(workload: Workload, args: tuple[Tensor, ...], cost: Cost) -> str:
    """Why the pass does not fit in the memory that is free; empty if it does, as far as the prediction goes."""
    needed = cost.output_bytes + cost.saved_bytes + cost.temporary_bytes
    if workload.backward:
        # The gradient from above, those of the arguments, and each temporary twice: once for either factor's gradient.
        needed += cost.output_bytes + sum(arg.nbytes for arg in args) + cost.temporary_bytes
    available = measure.available_bytes(workload.device)
    if needed <= available:
        return ""
    return f"needs {needed / 2**30:.1f} GiB, {format_bytes(available)} are free"


def _peer_results(workload: Workload, args: tuple[Tensor, ...], progress: Progress) -> Results:
    peers = PEERS.get(workload.op.name, {})
    name, peer, exact = next(((name, peer, peer.exact) for name, peer in peers.items() if peer.exact), (None,) * 3)
    if name is None or peer is None or exact is None:
        return Results()
    if workload.backward or peer.obstacle:
        return Results(peer=name)
    progress(f"{workload.pass_name}: computing {name} in float64")
    return Results(peer=name, peer_float64=(exact(*args),))


def _judged(
    row: Row,
    workload: Workload,
    args: tuple[Tensor, ...],
    contender: Contender,
    expected: Expected,
    known: Results,
) -> tuple[Row, tuple[Tensor, ...]]:
    """The row with error and memory, and the results: the forward pass's, or the gradients."""
    found, error = _results_and_error(workload, args, contender.function, expected)
    row = replace(row, error_ratio=error, allclose=known.allclose(found))
    if not error <= 1 and not contender.is_peer:
        return replace(row, status="failed", reason=f"the error is {error:.3g} times its budget"), found
    memory = measure.memory(measure.Pass(contender.function, args, workload.backward), warmup=0)
    return replace(row, **vars(memory)), found


def _results_and_error(
    workload: Workload, args: tuple[Tensor, ...], function: Callable[..., Tensor], expected: Expected
) -> tuple[tuple[Tensor, ...], float]:
    out = function(*args)
    error = expected.bounds.error_ratio(out)
    if not workload.backward:
        return (out,), error
    gradients = torch.autograd.grad(out, args, measure.upstream_gradient(out))
    return gradients, max(error, worst_error_ratio(expected.gradient_bounds, gradients))


def _timed(
    row: Row, timing: measure.Timing, naive: measure.Timing | None, args: tuple[Any, ...], copy_gbps: float
) -> Row:
    """The row with its times and its rate: inputs (in backward also the gradient from above) read, results written."""
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
    )


def _in_trouble(row: Row, error: Exception) -> Row:
    """The row of an implementation that raised: running out of memory is no fault of its own."""
    first_line = next(iter(str(error).splitlines()), "")
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in first_line:
        return replace(row, status="skipped", reason=f"ran out of memory: {first_line}")
    return replace(row, status="failed", reason=f"raised {type(error).__name__}: {first_line}")
