"""The limits of `effops/blocks/limits.py` at half and at twice their values: time and temporary memory, on a CPU.

python bench/studies/limits.py --json FILE

Ratios are of the time with another limit to that with its own, of medians of interleaved runs. "own again" tells how
exact they are. A crossover has a call on either side of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

# The profiler's library announces each start and stop on stderr below this level.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from parts.arguments import file_to_write
from parts.expected import Workload
from parts.report import LEAST_WIDTH, header, heading, write_json
from torch import Tensor

import effops  # noqa: F401  (registers the ops)
from effops import measure
from effops.blocks import limits
from effops.commands.console import plain_or_rich_console
from effops.commands.main import Parser
from effops.reference import reference_of, tried_ops

CPU = torch.device("cpu")
OWN, AGAIN = "own", "own again"
FACTORS = {OWN: 1.0, AGAIN: 1.0, "half": 0.5, "twice": 2.0}
NOT_OF_SPEED = ("TEMPORARY_BYTES", "DEPTH")  # the contract of memory, and the digits of a sum
WITHOUT_A_CASE = ("PAIRS_PER_DUPLICATE", "SCORE_BLOCKS")  # none of the workloads here reaches them
LONG = {"B": 1, "H": 8, "L": 4096}


@dataclass(frozen=True)
class Case:
    """A call that a limit decides about. Its other sizes are the op's own."""

    limit: str
    op: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    backward: bool = False  # forward and backward

    def args(self) -> tuple[Tensor, ...]:
        op = tried_ops()[self.op]
        return Workload(op, {**reference_of(op).sizes, **self.sizes}, self.dtype, CPU, self.backward).args()


CASES = (
    Case("BLOCK_BYTES", "von_mises_fisher_log_prob", {"M": 1, "T": 1024}),
    Case("BLOCK_BYTES", "von_mises_fisher_log_prob", {"M": 1, "T": 2048}),
    Case("PAIR_BYTES", "power_spherical_log_prob"),
    Case("PAIR_BYTES", "power_spherical_mixture_log_prob", backward=True),
    Case("PAIR_BYTES", "attention"),
    Case("WIDTH", "power_spherical_log_prob"),
    Case("WIDTH", "von_mises_fisher_log_prob", backward=True),
    Case("COPIED_DEPTH", "power_spherical_log_prob", {"D": 256}, dtype=torch.bfloat16),
    Case("NORMALISER_SLAB", "power_spherical_mixture_log_prob"),
    Case("NORMALISER_PIECE", "power_spherical_log_prob"),
    Case("NORMALISER_PIECE", "von_mises_fisher_log_prob"),
    Case("SLOW_MATRIX", "power_spherical_log_prob", {"D": 32}, backward=True),
    Case("SLOW_MATRIX", "power_spherical_log_prob", {"D": 96}, backward=True),
    Case("DISTANCE_BYTES", "normal_log_prob"),
    Case("DISTANCE_BYTES", "normal_mixture_log_prob", backward=True),
    Case("DISTANCE_WIDTH", "normal_log_prob"),
    Case("DISTANCE_WIDTH", "normal_mixture_log_prob", backward=True),
    Case("LEAST_ROWS", "normal_log_prob"),
    Case("LEAST_ROWS", "normal_log_prob", backward=True),
    Case("LEAST_SIDE", "normal_log_prob", {"N": 65536, "M": 6}),
    Case("LEAST_SIDE", "normal_log_prob", {"N": 65536, "M": 12}),
    Case("STATISTICS_SLAB", "von_mises_fisher_mixture_log_prob", {"M": 16, "T": 4096}),
    Case("PRODUCT_BYTES", "broadcast_dot", dtype=torch.bfloat16),
    Case("WHOLE_KEYS", "attention", {"B": 2, "L": 1024}),
    Case("WHOLE_KEYS", "attention", {"B": 1, "L": 2048}),
    Case("LEAST_QUERIES", "attention", LONG, backward=True),
    Case("LEAST_QUERIES", "attention_weights", LONG, backward=True),
    Case("QUERIES", "attention", LONG),
    Case("KEYS", "attention", LONG),
    Case("ADDITIVE_PAIR_BYTES", "additive_attention"),
    Case("ADDITIVE_PIECE_BYTES", "additive_attention_scores"),
    Case("DIAGONAL_ROWS", "log_sparse_attention", backward=True),
    Case("DENSE_SHARE", "log_sparse_attention", backward=True),
    Case("SHIFTS_PER_GROUP", "log_sparse_attention", backward=True),
)


@dataclass(frozen=True)
class Row:
    """A case: what its time is with another limit, in units of that with its own, and the temporaries of forward."""

    limit: str
    value: float
    op: str
    size: dict[str, int]
    dtype: str
    pass_name: str
    threads: int
    time_ms: float
    ratios: dict[str, float]
    temporary_bytes: dict[str, int]


@contextmanager
def scaled(limit: str, factor: float) -> Iterator[None]:
    """A limit at a multiple of its value."""
    own = getattr(limits, limit)
    setattr(limits, limit, type(own)(own * factor))
    try:
        yield
    finally:
        setattr(limits, limit, own)


def run(case: Case, factor: float, *args: Tensor) -> Tensor:
    """The call, and its gradients if the case is one of both passes."""
    with scaled(case.limit, factor):
        out = tried_ops()[case.op](*args, variant="chunked")
        if case.backward:
            torch.autograd.grad(out, args, measure.upstream_gradient(out))
    return out


def measured(case: Case, repeats: int, budget_s: float) -> Row:
    args = case.args()
    passes = {name: measure.Pass(partial(run, case, factor), args) for name, factor in FACTORS.items()}
    timings = measure.times(passes, repeats=repeats, budget_s=budget_s)
    forward = replace(case, backward=False)
    detached = tuple(arg.detach() for arg in args)
    temporary_bytes = {
        name: measure.memory(measure.Pass(partial(run, forward, factor), detached)).temporary_bytes
        for name, factor in FACTORS.items()
        if name != AGAIN
    }
    own_ms = timings[OWN].median_ms
    return Row(
        case.limit,
        getattr(limits, case.limit),
        case.op,
        dict(case.sizes),
        str(case.dtype).removeprefix("torch."),
        "both" if case.backward else "forward",
        torch.get_num_threads(),
        own_ms,
        {name: timing.median_ms / own_ms for name, timing in timings.items() if name != OWN},
        temporary_bytes,
    )


LINE = "{:20} {:>9} {:32} {:18} {:4} {:>8} {:>5} {:>5} {:>5} {:>25}"
TITLES = ("Limit", "Value", "Op", "Sizes", "", "ms", "Again", "Half", "Twice", "Temporary, own/half/twice")


def cells(row: Row) -> tuple[str, ...]:
    sizes = ",".join(f"{name}={size}" for name, size in row.size.items())
    return (
        row.limit,
        f"{row.value:g}" if row.value < 1 else f"{row.value}",
        row.op,
        sizes if row.dtype == "float32" else "bf16",
        {"forward": "fwd", "both": "f+b"}[row.pass_name],
        f"{row.time_ms:.4g}",
        *(f"{row.ratios[name]:.2f}" for name in (AGAIN, "half", "twice")),
        "/".join(f"{row.temporary_bytes[name] / 2**20:.1f}" for name in (OWN, "half", "twice")) + " MiB",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case, and write the rows after each."""
    parser = Parser(prog="bench/studies/limits.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", choices=sorted({case.limit for case in CASES}), help="one of them; default: all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--repeats", type=int, default=21, metavar="N", help="timed runs of each, 21; fewer if slow")
    parser.add_argument("--budget", type=float, default=3.0, metavar="SECONDS", help="for each of the four, 3")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write header and rows there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    cases = [case for case in CASES if options.limit in (None, case.limit)]
    console, head = plain_or_rich_console(LEAST_WIDTH), header(CPU, measure.copy_bandwidth_gbps(CPU))
    console.print(heading(head, console.width))
    console.print(LINE.format(*TITLES), soft_wrap=True)
    rows = []
    for case in cases:
        rows.append(measured(case, options.repeats, options.budget))
        console.print(LINE.format(*cells(rows[-1])), soft_wrap=True)
        if options.json:
            write_json(options.json, head, rows)


if __name__ == "__main__":
    main()
