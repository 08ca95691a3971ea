"""How far a benchmark is: a line for each op with an estimate of the time left, and what is being done meanwhile."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from effops.commands.console import Progress


class TimeLeft:
    """Counts steps, whose durations were guessed, and corrects the guesses by what the steps so far took.

    A minute in which the guesses were right is put before the steps, or half of all if that is less. The first step
    alone, which is unlike the others, would double or halve what is said of them.
    """

    def __init__(self, guesses_s: Sequence[float]) -> None:
        self.guesses_s, self.done, self.start = list(guesses_s), 0, time.perf_counter()

    def next_step(self, what: str = "op") -> str:
        """Begin a step: 'op 3 of 13, about 1:40 left'."""
        guessed, left = sum(self.guesses_s[: self.done]), sum(self.guesses_s[self.done :])
        trusted, taken = min(60.0, (guessed + left) / 2), time.perf_counter() - self.start if self.done else 0.0
        seconds = left * (trusted + taken) / (trusted + guessed) if left else 0.0
        self.done += 1
        unit = 5 if seconds > 20 else 1
        minutes, seconds = divmod(max(1, unit * round(seconds / unit)), 60)
        return f"{what} {self.done} of {len(self.guesses_s)}, about {minutes}:{seconds:02} left"


def has_live_line(console: Console) -> bool:
    """Whether a line can be erased there."""
    return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("NO_COLOR")


@contextmanager
def live_line(console: Console) -> Iterator[Progress]:
    """Say what is being done: in one line, on a terminal that can erase it; the line is gone at the end.

    Where the console is no such terminal, each text is a line on standard error, beside tables in a file.
    The line changes only when it is told to. Nothing runs beside what is measured.
    """
    if not has_live_line(console):
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield lambda text: live.update(Text(text, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)


def once_each(progress: Progress) -> Progress:
    """Tells each text once, for lines that stay: passes are timed by turns, and each turn is told."""
    told: set[str] = set()

    def tell(text: str) -> None:
        if text not in told:
            told.add(text)
            progress(text)

    return tell
