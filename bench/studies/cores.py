"""How long a value takes from one core to another, while every op runs: virtual cores may move from cache to cache.

python bench/studies/cores.py --json FILE

A hypervisor may put two virtual cores on cores that share an L3 cache, and later on cores that do not. A value then
takes five times as long between them, and so do operations that read what the other core has written. Times are
medians of those runs before and after which the cores were near, and of those around which they were far. It needs two
cores and a C compiler.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from parts.arguments import file_to_write
from parts.expected import Workload
from parts.report import header, write_json

import effops  # noqa: F401  (registers the ops)
from effops import measure
from effops.commands.main import Parser
from effops.dispatch.op import ops
from effops.reference import reference_of, tried_ops

CPU = torch.device("cpu")
SOURCE = r"""
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
static _Alignas(128) atomic_int value;
static int count;
static void run_on(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}
static void *answer(void *core) {
  run_on(*(int *)core);
  for (int i = 0; i < count; i++) {
    while (atomic_load(&value) != 2 * i + 1);
    atomic_store(&value, 2 * i + 2);
  }
  return 0;
}
double latency_ns(int one, int other, int times) {
  struct timespec start, end;
  pthread_t thread;
  cpu_set_t before;
  pthread_getaffinity_np(pthread_self(), sizeof before, &before);
  count = times + 1;
  atomic_store(&value, 0);
  run_on(one);
  pthread_create(&thread, 0, answer, &other);
  for (int i = 0; i < count; i++) {
    if (i == 1) clock_gettime(CLOCK_MONOTONIC, &start);
    atomic_store(&value, 2 * i + 1);
    while (atomic_load(&value) != 2 * i + 2);
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  pthread_join(thread, 0);
  pthread_setaffinity_np(pthread_self(), sizeof before, &before);
  return ((end.tv_sec - start.tv_sec) * 1e9 + end.tv_nsec - start.tv_nsec) / times / 2;
}
"""
FAR_NS = 90.0  # cores of one L3 cache take 25 to 60, others 110 to 300
TRIPS = 2000


@dataclass(frozen=True)
class Row:
    """An op: how often it ran with the cores near and far, and the medians of its times, if it did."""

    op: str
    pass_name: str
    near_runs: int
    near_ms: float | None
    far_runs: int
    far_ms: float | None


def stopwatch_of_cores(folder: Path) -> Callable[[], float]:
    """A function that returns the nanoseconds that a value takes between the first two cores of this process."""
    (folder / "cores.c").write_text(SOURCE)
    library = folder / "cores.so"
    subprocess.run(
        ["cc", "-O2", "-D_GNU_SOURCE", "-shared", "-fPIC", "-pthread", "-o", library, folder / "cores.c"], check=True
    )
    latency_ns = ctypes.CDLL(str(library)).latency_ns
    latency_ns.restype = ctypes.c_double
    one, other = sorted(os.sched_getaffinity(0))[:2]
    return lambda: float(latency_ns(one, other, TRIPS))


def passes_of(name: str) -> dict[str, Callable[[], object]]:
    """Forward, and forward and backward, of the automatic choice at the default sizes."""
    op = tried_ops()[name]
    args = Workload(op, reference_of(op).sizes, torch.float32, CPU, backward=True).args()

    def both() -> None:
        out = op(*args)
        torch.autograd.grad(out, args, measure.upstream_gradient(out))

    return {"forward": partial(op, *(arg.detach() for arg in args)), "both": both}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ops in turn, and print how they took with the cores near and far."""
    parser = Parser(prog="bench/studies/cores.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", choices=ops(), help="default: all")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="N", help="how long it runs, 120")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write header and rows there")
    options = parser.parse_args(arguments)
    runs = {
        (name, pass_name): run
        for name in ops()
        if options.op in (None, name)
        for pass_name, run in passes_of(name).items()
    }
    found: dict[tuple[str, str], dict[bool, list[float]]] = {key: {False: [], True: []} for key in runs}
    with tempfile.TemporaryDirectory() as folder:
        latency_ns = stopwatch_of_cores(Path(folder))
        for run in runs.values():
            run()
        head = header(CPU, measure.copy_bandwidth_gbps(CPU))
        end = time.perf_counter() + options.seconds
        while time.perf_counter() < end:
            for key, run in runs.items():
                before, start = latency_ns(), time.perf_counter()
                run()
                took_ms = 1000 * (time.perf_counter() - start)
                are_far = before > FAR_NS
                if are_far == (latency_ns() > FAR_NS):
                    found[key][are_far].append(took_ms)
    rows = [
        Row(
            *key,
            *(
                value
                for are_far in (False, True)
                for value in (len(times[are_far]), statistics.median(times[are_far]) if times[are_far] else None)
            ),
        )
        for key, times in found.items()
    ]
    for row in rows:
        near, far = (f"{ms:8.1f} ms" if ms else f"{'-':>11}" for ms in (row.near_ms, row.far_ms))
        times = f"{row.far_ms / row.near_ms:5.2f}" if row.near_ms and row.far_ms else ""
        print(f"{row.op:34} {row.pass_name:8} near {near} ({row.near_runs:3})  far {far} ({row.far_runs:3}) {times}")
    if options.json:
        write_json(options.json, head, rows)


if __name__ == "__main__":
    main()
