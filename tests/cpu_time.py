"""Tell how much CPU time the default tests, benchmark or site take, and whether their budget allows it.

    python tests/cpu_time.py tests
    python tests/cpu_time.py benchmark
    python tests/cpu_time.py site         # its build, all examples, and the docstrings' examples

It exits with 1 above the budget in `cpu_budget.ini`. Seconds differ between machines, so they are counted in units: a
fixed piece of work that is timed over and over while the command runs. The command runs as on a machine with two cores,
and finds nothing compiled.
"""

import argparse
import configparser
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
BUDGETS = Path(__file__).with_name("cpu_budget.ini")
TESTS = "-m", "pytest", "-q", "-n", "2"
OF_SITE = (f"tests/test_{name}.py" for name in ("site", "examples", "doctests"))
COMMANDS = {"tests": TESTS, "benchmark": ("bench/run.py",), "site": (*TESTS, "--ci", *OF_SITE)}
SECONDS_BETWEEN = 20.0  # from one timing of the unit to the next
PRODUCTS, SIZE, STEPS = 20, 1024, 10_000_000  # of a unit


class Used(NamedTuple):
    """CPU seconds of a command and its children, those of a unit meanwhile, and the command's exit code."""

    seconds: float
    unit_seconds: float
    code: int

    @property
    def units(self) -> float:
        return self.seconds / self.unit_seconds


def unit_seconds() -> float:
    """CPU seconds of 20 products of 1024 x 1024 on one thread and a loop of Python."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix, total = torch.ones(SIZE, SIZE), 0
        start = time.thread_time()
        for _ in range(PRODUCTS):
            matrix @ matrix
        for step in range(STEPS):
            total += step
        return time.thread_time() - start
    finally:
        torch.set_num_threads(threads)


def seconds_of_children() -> float:
    """CPU seconds of the processes that this one waited for, and of those that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(command: Sequence[str]) -> Used:
    """Run Python with these arguments in the checkout, to its end."""
    unit_seconds()  # the first product of a process prepares the others
    before, units = seconds_of_children(), [unit_seconds()]
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name)) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        environment = os.environ | caches | {"OMP_NUM_THREADS": "2"}
        with subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment) as process:
            while process.poll() is None:
                units.append(unit_seconds())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SECONDS_BETWEEN)
    return Used(seconds_of_children() - before, statistics.median(units), process.returncode)


def budgets() -> dict[str, list[float]]:
    """The units that each command was allowed, one number after the other; the last one holds."""
    file = configparser.ConfigParser()
    file.read_string(BUDGETS.read_text())
    return {what: [float(units) for units in file[what].values()] for what in file.sections()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    what = parser.parse_args(arguments).what
    used, allowed = measure(COMMANDS[what]), budgets()[what][-1]
    print(
        f"{what}: {used.units:.0f} units of CPU time, {allowed:.0f} allowed "
        f"({used.seconds:.0f} s, {used.unit_seconds:.2f} s a unit)"
    )
    return used.code or int(used.units > allowed)


if __name__ == "__main__":
    sys.exit(main())
