"""What else a machine does while something is measured: other processes, or another thread of the same Python."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

THREAD, PROCESSES, MOVING = "thread", "processes", "moving"
BUSY = """
import os, sys, torch
torch.set_num_threads(1)
os.sched_setaffinity(0, map(int, sys.argv[1:]))
matrix = torch.randn(600, 600)
print(flush=True)
while True:
    (matrix @ matrix).exp_()
"""


def load(text: str) -> str:
    """The value of an option: `processes:N`, `moving:N`, or `thread`."""
    kind, _, count = text.partition(":")
    if text == THREAD or (kind in (PROCESSES, MOVING) and count.isdecimal() and int(count) > 0):
        return text
    kinds = f"{THREAD}, or {PROCESSES}:N or {MOVING}:N with N of at least 1"
    raise argparse.ArgumentTypeError(f"expected {kinds}; got {text!r}")


@contextmanager
def beside(what: str | None) -> Iterator[None]:
    """Run a load while the block runs, and end it.

    Processes compute with PyTorch, each with one thread: on a core of its own as far as there are cores, or MOVING
    between all of them. The thread counts in Python, and gives its lock away only when it is asked for it.
    """
    with ExitStack() as stack:
        if what == THREAD:
            stack.enter_context(_counting())
        elif what is not None:
            kind, _, count = what.partition(":")
            cores = sorted(os.sched_getaffinity(0))
            for number in range(int(count)):
                stack.enter_context(_busy(cores if kind == MOVING else [cores[number % len(cores)]]))
        yield


@contextmanager
def _busy(cores: Sequence[int]) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY, *map(str, cores)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it computes
        yield
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _counting() -> Iterator[None]:
    is_over = threading.Event()

    def count() -> None:
        number = 0
        while not is_over.is_set():
            number += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        yield
    finally:
        is_over.set()
        counter.join()
