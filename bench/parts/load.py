"""What else a machine does while something is measured: other processes, or another thread of the same Python."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

THREAD, PROCESSES = "thread", "processes"
BUSY = """
import os, sys, torch
torch.set_num_threads(1)
os.sched_setaffinity(0, {int(sys.argv[1])})
matrix = torch.randn(600, 600)
print(flush=True)
while True:
    (matrix @ matrix).exp_()
"""


def load(text: str) -> str:
    """The value of an option: `processes:N`, or `thread`."""
    kind, _, count = text.partition(":")
    if text == THREAD or (kind == PROCESSES and count.isdecimal() and int(count) > 0):
        return text
    raise argparse.ArgumentTypeError(f"expected {THREAD}, or {PROCESSES}:N with N of at least 1; got {text!r}")


@contextmanager
def beside(what: str | None) -> Iterator[None]:
    """Run a load while the block runs, and end it.

    Processes compute with PyTorch, each with one thread on a core of its own as far as there are cores. The thread
    counts in Python, and gives its lock away only when it is asked for it.
    """
    with ExitStack() as stack:
        if what == THREAD:
            stack.enter_context(_counting())
        elif what is not None:
            cores = sorted(os.sched_getaffinity(0))
            for number in range(int(what.partition(":")[2])):
                stack.enter_context(_busy(cores[number % len(cores)]))
        yield


@contextmanager
def _busy(core: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(core)], stdout=subprocess.PIPE)
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
