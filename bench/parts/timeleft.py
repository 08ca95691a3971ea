"""How far a benchmark is: a line for each op with an estimate of the time left, and what is being done meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from effops.commands.console import Progress

from .comparison import Effort, contenders_of
from .expected import Workload

# What an op and a run that allocates a GiB take on two cores. Only their ratio matters once the first op is done.
SECONDS_OF_THE_FIRST = 15.0  # TorchInductor starts
SECONDS_PER_OP = 4.0
SECONDS_PER_GIB = 0.6


def expected_seconds(workload: Workload, variants: Sequence[str], effort: Effort) -> float:
    """A first guess, from the bytes that are predicted to be allocated: slow is what touches many pages."""
    args = workload.args()
    costs = [one.cost for one in contenders_of(workload, args, variants, with_peers=False) if not one.obstacle]
    runs = effort.least_repeats + (2 if workload.backward else 1)
    return SECONDS_PER_OP + SECONDS_PER_GIB * runs * sum(cost.temporary_bytes for cost in costs if cost) / 2**30


class TimeLeft:
    """Counts steps, whose durations were guessed, and corrects the guesses by what the steps so far took."""

    def __init__(self, guesses_s: Sequence[float]) -> None:
        self.guesses_s, self.done, self.start = list(guesses_s), 0, time.perf_counter()
        self.guesses_s[:1] = [SECONDS_OF_THE_FIRST + guess for guess in self.guesses_s[:1]]

    def next_step(self, what: str = "op") -> str:
        """Begin a step: 'op 3 of 13, about 1:40 left'."""
        guessed, left = sum(self.guesses_s[: self.done]), sum(self.guesses_s[self.done :])
        seconds = left * (time.perf_counter() - self.start) / guessed if guessed else left
        self.done += 1
        minutes, seconds = divmod(max(5, 5 * round(seconds / 5)), 60)
        return f"{what} {self.done} of {len(self.guesses_s)}, about {minutes}:{seconds:02} left"


@contextmanager
def live_line(console: Console) -> Iterator[Progress]:
    """Say in one line what is being done, on a terminal that can erase it; the line is gone at the end.

    The line changes only when it is told to. Nothing runs beside what is measured.
    """
    if not console.is_terminal or console.is_dumb_terminal or os.environ.get("NO_COLOR"):
        yield lambda text: None
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield lambda text: live.update(Text(text, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)
