"""What a benchmark will take, said before it starts: memory of the naive rows, what does not fit, and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from effops import measure
from effops.reference import reference_of
from effops.text import format_bytes

from .comparison import Contender, Effort, contenders_of, needed_bytes, shortage
from .expected import Piece, Workload, evenly_spread, one_thread, pieces
from .peers import PEERS
from .report import prose

# What a machine takes is in proportion to what it was seen to take before the benchmark.
LATER = 0.27  # of the first compilation, which starts TorchInductor and compiles the headers of all kernels
COMPARED = 0.1  # of what float64 takes, a comparison with it
COMPILERS = ("compile", "flex")


@dataclass(frozen=True)
class Speed:
    """Seconds that a machine takes for a piece of a workload: to find its bounds in float64, and in its plain form."""

    checked_s: float
    naive_s: float

    @classmethod
    def measured(cls, workload: Workload, piece: Piece) -> Speed:
        args = tuple(arg.detach() for arg in piece.args)
        call = workload.op.prepare(*args, **workload.options)
        with one_thread():
            checked_s = _seconds_of(lambda: reference_of(workload.op).bounds(call), workload.device)
        naive_s = _seconds_of(lambda: workload.op(*args, variant="naive", **workload.options), workload.device)
        return cls(checked_s, naive_s)


def _seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a second run: the first one also imports, and starts what later ones find."""
    for _ in range(2):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    return seconds


@dataclass(frozen=True)
class Outlook:
    """What is expected of a workload. `left_out` are rows that do not fit in the free memory, with the reason.

    The seconds are without those of compilations.
    """

    seconds: float
    naive_bytes: int
    left_out: tuple[str, ...]
    compilations: int


def outlook(
    workload: Workload,
    variants: Sequence[str],
    effort: Effort,
    *,
    with_peers: bool,
    profiled: bool,
) -> Outlook:
    args = workload.args()
    contenders = [one for one in contenders_of(workload, args, variants, with_peers) if not one.obstacle]
    short = {one.name: shortage(workload, args, one.cost) for one in contenders}
    fitting = [one for one in contenders if not short[one.name]]
    naive = [needed_bytes(workload, args, one.cost) for one in fitting if one.name == "naive" and one.cost]
    return Outlook(
        _seconds(workload, args, fitting, effort, profiled),
        max(naive, default=0),
        tuple(f"{workload.op.name} {name}, which {reason}" for name, reason in short.items() if reason),
        sum(one.name in COMPILERS for one in fitting),
    )


def compile_first(workload: Workload, variants: Sequence[str]) -> float:
    """Seconds of the first compilation of a workload, which its row need not repeat.

    Nothing else tells how long it takes: what is compiled depends on the op, and may lie on disk from another run.
    """
    args = workload.args()
    compiled = next(
        one
        for one in contenders_of(workload, args, variants, False)
        if one.name in COMPILERS and not one.obstacle and not shortage(workload, args, one.cost)
    )
    start = time.perf_counter()
    with suppress(Exception):  # its row tells what went wrong
        measure.Pass(compiled.function, args, workload.backward).prepare().run()
    return time.perf_counter() - start


def _seconds(
    workload: Workload, args: Sequence[Tensor], contenders: Sequence[Contender], effort: Effort, profiled: bool
) -> float:
    """Slow are float64, and what touches many pages. A piece of the workload tells how slow."""
    if not contenders:
        return 0.0
    op, call = workload.op, workload.op.prepare(*args, **workload.options)
    naive = op.variants["naive"].cost(call)
    flops = max(1, naive.flops)
    every = pieces(op, call, args, flops)
    speed = Speed.measured(workload, every[0])
    count = len(evenly_spread(every, effort.most_flops * len(every) / flops))
    exact = any(peer.exact for peer in PEERS.get(op.name, {}).values()) and not workload.backward
    checked = count * speed.checked_s * (1 + exact + COMPARED * len(contenders))
    temporary_bytes = sum(one.cost.temporary_bytes for one in contenders if one.cost)
    plain_forms = temporary_bytes / max(1, naive.temporary_bytes)
    runs = effort.least_repeats + profiled + (2 if workload.backward else 0)
    return checked + runs * plain_forms * len(every) * speed.naive_s + effort.budget_s * len(contenders)


def seconds_of_steps(steps: Sequence[Sequence[Outlook]], first_compiled_s: float = 0.0) -> list[float]:
    """What each step is expected to take, whose workloads run one after the other, after the first compilation."""
    compilations = [sum(one.compilations for one in step) for step in steps]
    first = next((number for number, count in enumerate(compilations) if count), None)
    return [
        sum(one.seconds for one in step) + LATER * first_compiled_s * (compilations[number] - (number == first))
        for number, step in enumerate(steps)
    ]


def needs(outlooks: Sequence[Outlook], device: torch.device, width: int) -> str:
    """How much memory the naive rows take, and what is left out because it does not fit, in lines of that width."""
    naive = max(one.naive_bytes for one in outlooks)
    free = measure.available_bytes(device)
    taken = f"Naive rows take up to {format_bytes(naive)} of memory; {format_bytes(free)} are free."
    left_out = [prose(f"Left out: {row}.", width) for one in outlooks for row in one.left_out]
    return "\n".join([prose(taken, width)] * bool(naive) + left_out)
