"""The benchmark's workload on DTensors in 1, 2 and 4 gloo processes: bytes sent, peak memory and time of each process,
beside a model of both that also predicts what more devices would need. See `--help`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.distributed as dist
from parts.arguments import file_to_write, positive, sizes
from parts.report import PROSE_WIDTH, header, heading
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from effops.dispatch.op import find_op
from effops.measure import Pass, memory
from effops.reference import reference_of
from effops.text import format_bytes

OP = "power_spherical_log_prob"
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Split:
    """Over how many devices each axis of the result is split: rows of x, components, positions."""

    rows: int = 1
    components: int = 1
    positions: int = 1

    @property
    def devices(self) -> int:
        return self.rows * self.components * self.positions

    def __str__(self) -> str:
        return " x ".join(f"{count} {axis}" for axis, count in asdict(self).items() if count > 1) or "none"


SPLITS = (
    Split(),
    *(Split(**{axis: count}) for count in (2, 4) for axis in ("positions", "components", "rows")),
    Split(components=2, positions=2),
)

# Along the axes of a mesh of shape (rows, components, positions): loc (M, T, D), scale (M, T), x (N, 1, T, D).
PLACEMENTS = (
    (Replicate(), Shard(0), Shard(1)),
    (Replicate(), Shard(0), Shard(1)),
    (Shard(0), Replicate(), Shard(2)),
)


@dataclass(frozen=True)
class Requirement:
    """Bytes of the device that has most: held at once in a forward and a backward pass, and sent in a backward pass.

    A forward pass sends nothing. The backward pass includes the reduction of pending gradients to full ones, by a ring:
    2 (p - 1) / p times their bytes over p devices.
    """

    forward_bytes: int
    backward_bytes: int
    sent_bytes: int


def need(split: Split, *, M: int, T: int, D: int, itemsize: int = 4) -> Requirement:
    """The model: M rows, M components, T positions, in closed form, without the temporaries of the op itself."""
    rows, components, positions = -(-M // split.rows), -(-M // split.components), -(-T // split.positions)
    loc = itemsize * components * positions * D
    scale = itemsize * components * positions
    x = itemsize * rows * positions * D
    result = itemsize * rows * components * positions
    sent = _ring(split.rows, loc + scale) + _ring(split.components, x)
    received = max(loc * (split.rows > 1), x * (split.components > 1))  # beside the pending gradient that it replaces
    return Requirement(loc + scale + x + result, 2 * (loc + scale + x + result) + received, sent)


def _ring(devices: int, nbytes: int) -> int:
    return 2 * (devices - 1) * nbytes // devices


@dataclass(frozen=True)
class Row:
    """One pass under one split: the most of any process, and what the model says."""

    split: Split
    pass_name: str
    peak_bytes: int
    predicted_peak_bytes: int
    sent_bytes: int
    predicted_sent_bytes: int
    time_ms: float


def run_processes(count: int, function: Callable[..., ResultT], *args: Any, timeout_s: float = 300) -> list[ResultT]:
    """`function(*args)` in each of `count` processes of a gloo group; the results by rank."""
    context = multiprocessing.get_context("forkserver")
    # Imported once for all processes.
    context.set_forkserver_preload(["effops.dispatch.sharding", "torch.distributed.tensor.debug"])
    with tempfile.TemporaryDirectory() as folder, context.Pool(count) as pool:
        calls = [(rank, count, f"{folder}/store", function, args, timeout_s) for rank in range(count)]
        return pool.starmap_async(_process, calls, chunksize=1).get(timeout_s)


def _process(
    rank: int, count: int, store: str, function: Callable[..., ResultT], args: tuple[Any, ...], timeout_s: float
) -> ResultT:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=timeout_s / 5), rank=rank, world_size=count)
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


def sent_bytes() -> int:
    """Bytes that this process has written so far, to sockets or elsewhere, as the system counts them (on Linux)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def measured(split: Split, repeats: int, sizes: Mapping[str, int]) -> list[Row]:
    """Both passes in this process of a group of `split.devices`."""
    mesh = init_device_mesh("cpu", (split.rows, split.components, split.positions))
    op = find_op(OP)
    whole = reference_of(op).workload(**sizes, generator=torch.Generator().manual_seed(0))
    shards = [
        distribute_tensor(tensor, mesh, placements, src_data_rank=None) for tensor, placements in zip(whole, PLACEMENTS)
    ]
    layouts = [(shard.placements, shard.shape, shard.stride()) for shard in shards]
    local = [shard.to_local().clone() for shard in shards]
    del whole, shards

    def call(*args: Tensor) -> Tensor:
        given = (
            DTensor.from_local(arg, mesh, placements, shape=shape, stride=stride)
            for arg, (placements, shape, stride) in zip(args, layouts)
        )
        return op(*given).to_local()

    predicted = need(split, **sizes)
    return [
        _row(split, Pass(call, tuple(local)), "forward", predicted.forward_bytes, 0, repeats),
        _row(
            split,
            Pass(call, tuple(arg.requires_grad_() for arg in local), backward=True),
            "backward",
            predicted.backward_bytes,
            predicted.sent_bytes,
            repeats,
        ),
    ]


def _row(split: Split, work: Pass, name: str, peak_bytes: int, sent: int, repeats: int) -> Row:
    peak = memory(work).peak_bytes
    times_ms = []
    for _ in range(repeats):
        prepared = work.prepare()
        dist.barrier()
        before, start = sent_bytes(), time.perf_counter_ns()
        result = prepared.run()
        times_ms.append((time.perf_counter_ns() - start) / 1e6)
        sent_in_run = sent_bytes() - before
        del result, prepared
    return Row(split, name, peak, peak_bytes, sent_in_run, sent, statistics.median(times_ms))


def most(rows: Sequence[Row]) -> Row:
    """Of one pass, the most that any process needed."""
    return replace(
        rows[0],
        peak_bytes=max(row.peak_bytes for row in rows),
        sent_bytes=max(row.sent_bytes for row in rows),
        time_ms=max(row.time_ms for row in rows),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/studies/sharded.py", description=__doc__)
    parser.add_argument("--size", type=sizes, default={}, metavar="M=..,T=..", help="instead of the op's default sizes")
    parser.add_argument("--repeats", type=positive, default=10, metavar="N", help="timed runs of a row, 10")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write header and rows there")
    parser.add_argument("--predict", action="store_true", help="print what the model says of more devices, and stop")
    options = parser.parse_args(arguments)
    size = {key: options.size.get(key, default) for key, default in reference_of(find_op(OP)).sizes.items()}
    if options.predict:
        print(prediction(**size))
        return 0
    rows = []
    for split in SPLITS:
        by_rank = run_processes(split.devices, measured, split, options.repeats, size)
        rows += [most(of_pass) for of_pass in zip(*by_rank)]
    head = header(torch.device("cpu"), None) | {"threads_per_process": 1}
    print(heading(head, PROSE_WIDTH))
    print(measurement(rows))
    if options.json:
        content = {"header": head, "size": size, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def measurement(rows: Iterable[Row]) -> str:
    """What was measured beside what the model says, as a table."""
    lines = []
    for row in rows:
        counts = (row.peak_bytes, row.predicted_peak_bytes, row.sent_bytes, row.predicted_sent_bytes)
        name = f"{row.split}, {row.pass_name}"
        lines.append((str(row.split.devices), name, *map(format_bytes, counts), f"{row.time_ms:.0f} ms"))
    return table(("processes", "split by", "peak memory", "predicted", "sent", "predicted", "time"), lines)


def prediction(*, M: int, T: int, D: int) -> str:
    """What the model says of a backward pass on up to 1024 devices: memory of one, and what it sends."""
    lines = []
    for devices in (1, 2, 4, 8, 64, 1024):
        one = 2 ** ((devices.bit_length() - 1) // 2)
        other = devices // one
        splits = (
            Split(positions=devices),
            Split(components=devices),
            Split(rows=devices),
            Split(components=one, positions=other),
            Split(components=one, rows=other),
        )
        fits = [max(split.rows, split.components) <= M and split.positions <= T for split in splits]
        needs = [need(split, M=M, T=T, D=D) for split in splits]
        cells = (f"{format_bytes(each.backward_bytes)}, {format_bytes(each.sent_bytes)}" for each in needs)
        lines.append([str(devices), *(cell if fit else "-" for cell, fit in zip(cells, fits))])
    return table(("devices", "positions", "components", "rows", "components x positions", "components x rows"), lines)


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    rule = ["---:"] * len(columns)
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, rule, *lines])


if __name__ == "__main__":
    sys.exit(main())
