"""What a benchmark will take, said before it starts: memory of the naive rows, what does not fit, and seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from effops import measure
from effops.text import format_bytes

from .comparison import Contender, Effort, contenders_of, needed_bytes, shortage
from .expected import Workload
from .peers import PEERS
from .report import prose

# Seconds on a machine whose speed is 1. What a machine takes is in proportion to these, and to what it fills.
FIRST_COMPILED = 12.0  # TorchInductor starts, and compiles the headers of all kernels
COMPILED = 4.5
CHECKED = 1.5  # float64 of 2^28 operations, on one thread
COMPARED = 0.3  # each result with it
PREDICTED = 1.0
FILLS = 2.0  # an expression takes so many times as long as it takes to fill what it allocates
TRACED = 100  # steps of a graph that is traced as a compiler traces, which tells the speed of Python here
TRACED_SECONDS = 0.18
COMPILERS = ("compile", "flex")


@dataclass(frozen=True)
class Speed:
    """What a machine takes: to trace, in units of `TRACED_SECONDS`, and to fill a GiB that was just allocated."""

    python: float
    fill_gib_s: float

    @classmethod
    def measured(cls, device: torch.device) -> Speed:
        _trace(1)  # what a first graph imports, any compilation needs
        start = time.perf_counter()
        _trace(TRACED)
        python = (time.perf_counter() - start) / TRACED_SECONDS
        start = time.perf_counter()
        filled = torch.ones(2**28, dtype=torch.int8, device=device)
        filled[-1].item()  # waits for the device
        return cls(python, 4 * (time.perf_counter() - start))


def _trace(steps: int) -> None:
    """A loop of a few instructions is in the cache of any processor; compilers' Python is not."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(steps):
            x = torch.tanh(x + 1)
        return x

    make_fx(chain, tracing_mode="fake")(torch.ones(2))


@dataclass(frozen=True)
class Outlook:
    """What is expected of a workload. `left_out` are rows that do not fit in the free memory, with the reason."""

    seconds: float
    naive_bytes: int
    left_out: tuple[str, ...]
    compiles: bool


def outlook(
    workload: Workload,
    variants: Sequence[str],
    effort: Effort,
    speed: Speed,
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
        _seconds(workload, fitting, effort, speed, profiled),
        max(naive, default=0),
        tuple(f"{workload.op.name} {name}, which {reason}" for name, reason in short.items() if reason),
        any(one.name in COMPILERS for one in fitting),
    )


def _seconds(
    workload: Workload, contenders: Sequence[Contender], effort: Effort, speed: Speed, profiled: bool
) -> float:
    """Slow is what compiles, float64, and what touches many pages."""
    costs = [one.cost for one in contenders if one.cost]
    compiled = COMPILED * sum(one.name in COMPILERS for one in contenders)
    share = min(effort.most_flops, max((cost.flops for cost in costs), default=0)) / 2**28
    exact = any(peer.exact for peer in PEERS.get(workload.op.name, {}).values()) and not workload.backward
    checked = share * (CHECKED * (1 + exact) + COMPARED * len(contenders))
    runs = effort.least_repeats + profiled + (2 if workload.backward else 0)
    filled = FILLS * runs * speed.fill_gib_s * sum(cost.temporary_bytes for cost in costs) / 2**30
    return speed.python * (PREDICTED + compiled + checked) + filled + effort.budget_s * len(contenders)


def seconds_of_steps(steps: Sequence[Sequence[Outlook]], speed: Speed) -> list[float]:
    """What each step is expected to take, whose workloads run one after the other. The first to compile takes more."""
    first = next((number for number, step in enumerate(steps) if any(one.compiles for one in step)), None)
    return [
        sum(one.seconds for one in step) + (FIRST_COMPILED * speed.python if number == first else 0.0)
        for number, step in enumerate(steps)
    ]


def needs(outlooks: Sequence[Outlook], device: torch.device, width: int) -> str:
    """How much memory the naive rows take, and what is left out because it does not fit, in lines of that width."""
    naive = max(one.naive_bytes for one in outlooks)
    free = measure.available_bytes(device)
    taken = f"Naive rows take up to {format_bytes(naive)} of memory; {format_bytes(free)} are free."
    left_out = [prose(f"Left out: {row}.", width) for one in outlooks for row in one.left_out]
    return "\n".join([prose(taken, width)] * bool(naive) + left_out)
