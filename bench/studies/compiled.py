"""Variant `compile` of every op against the best form that a user would compile, in fresh processes on a CPU.

python bench/studies/compiled.py --json FILE

A line is one pass of a call at the default size: the variant's time, the best other form, the ratio of the two, and the
error of both, forward, in the units of the op's bounds: above 1 a form is not right. Times are medians over processes,
in each of which all forms take turns; one that takes several times as long as the variant runs in one process, once. An
op and a number of threads that would begin after --minutes is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The profiler's library announces each start and stop on stderr below this level.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from parts.arguments import file_to_write
from parts.expected import Workload
from parts.peers import additive_scores, additive_sums, normal, plain_weights, power_spherical
from parts.report import header, write_json
from ratios import CPU, HOPELESS, Training, second_run_ms
from torch import Tensor
from torch._inductor import config as inductor

from effops import measure
from effops.commands.console import plain_or_rich_console
from effops.commands.main import Parser
from effops.dispatch.op import Op, ops
from effops.reference import reference_of, tried_ops
from effops.text import counted

OURS = "compile"
PASSES = "forward", "both"
SMALL = 64  # the most of a size at which errors are found
LINE = "{:<33}{:<8}{:>7}{:>9}  {:<20}{:>8}{:>6}{:>8}{:>8}"
TITLES = "op", "pass", "threads", "ms", "best other", "ms", "ratio", "error", "other's"


def normal_formula(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    z = (x - loc) / scale
    logs = scale.log().expand(*scale.shape[:-1], x.shape[-1]).sum(-1)
    return -0.5 * (z * z).sum(-1) - logs - 0.5 * x.shape[-1] * math.log(2 * math.pi)


def mixture(log_prob: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda log_weights, loc, scale, x: torch.logsumexp(log_weights + log_prob(loc, scale, x), -1)


def plain_scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT / math.sqrt(query.shape[-1])


# What a user would write, by op. Besides, each form of the op is compiled as it is called: naive, and einsum.
PLAIN: Mapping[str, Mapping[str, Callable[..., Tensor]]] = {
    "broadcast_dot": {
        "plain": lambda a, b: (a * b).sum(-1),
        "torch.einsum": lambda a, b: torch.einsum("...d,...d->...", a, b),
    },
    "normal_log_prob": {"plain": normal_formula, "distributions": normal},
    "normal_mixture_log_prob": {"plain": mixture(normal_formula), "distributions": mixture(normal)},
    "power_spherical_log_prob": {"package": power_spherical},
    "power_spherical_mixture_log_prob": {"package": mixture(power_spherical)},
    "attention_scores": {"plain": plain_scores},
    "attention_weights": {"plain": plain_weights, "softmax": lambda query, key: plain_scores(query, key).softmax(-1)},
    "attention": {"plain": lambda query, key, value: plain_scores(query, key).softmax(-1) @ value},
    "additive_attention_scores": {"plain": additive_scores},
    "additive_attention": {"plain": additive_sums},
}


@dataclass(frozen=True)
class Row:
    """A pass of a call: the variant, the best other form, and their errors in the units of the op's bounds."""

    op: str
    pass_name: str
    threads: int
    processes: int
    time_ms: float
    best_other: str
    other_ms: float
    ratio: float
    error: float
    other_error: float
    all_ms: Mapping[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="bench/studies/compiled.py", description=(__doc__ or "").splitlines()[0])
    compiled = [name for name, op in ops().items() if OURS in op.variants]
    parser.add_argument("--op", action="append", choices=compiled, metavar="OP", help="an op, or several; default: all")
    parser.add_argument("--threads", action="append", type=int, help="default: all cores, and one")
    parser.add_argument("--processes", type=int, default=5, help="fresh processes of each, 5")
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing after so many, 60")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write header and rows there")
    parser.add_argument("--child", choices=("errors", "times"), help=argparse.SUPPRESS)
    parser.add_argument("--without", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    threads = options.threads or sorted({torch.get_num_threads(), 1}, reverse=True)
    if options.child:
        torch.set_num_threads(threads[0])
        inductor.cpp.threads = threads[0]  # compiled code has the number in it, and is kept on disk
        measured = errors_of if options.child == "errors" else times_of
        op = tried_ops()[options.op[0]]
        forms = {form: function for form, function in forms_of(op).items() if form not in options.without}
        print(json.dumps(measured(op, forms)))
        return
    end = time.perf_counter() + 60 * options.minutes
    console = plain_or_rich_console(110)
    head = header(CPU, measure.copy_bandwidth_gbps(CPU))
    console.print(", ".join(f"{key}: {value}" for key, value in head.items()))
    console.print(LINE.format(*TITLES))
    rows: list[Row] = []
    for name in options.op or compiled:
        for count in threads:
            if time.perf_counter() > end:
                head.setdefault("left_out", []).append(f"{name}, {counted(count, 'threads')}")
                continue
            errors = child(name, count, "errors")
            found = [child(name, count, "times")]
            found += [child(name, count, "times", hopeless(found[0])) for _ in range(options.processes - 1)]
            for row in rows_of(name, count, found, errors):
                console.print(LINE.format(*cells(row)))
                rows.append(row)
            if options.json:
                write_json(options.json, head, rows)


def hopeless(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The forms that took several times as long as the variant in all passes of a process."""
    forms = next(iter(found.values()))
    return [form for form in forms if all(ms[form] > HOPELESS * ms[OURS] for ms in found.values())]


def child(name: str, threads: int, measured: str, without: Sequence[str] = ()) -> Mapping[str, Any]:
    """The errors or the times that one fresh process measures of all forms but those `without`."""
    command = [sys.executable, __file__, "--child", measured, "--op", name, "--threads", str(threads)]
    command += ["--without", *without]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: Mapping[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def rows_of(name: str, threads: int, found: Sequence[Mapping[str, Any]], errors: Mapping[str, float]) -> list[Row]:
    rows = []
    for pass_name in PASSES:
        times = defaultdict(list)
        for one in found:
            for form, ms in one[pass_name].items():
                times[form].append(ms)
        median = {form: statistics.median(all_ms) for form, all_ms in times.items()}
        best = min((form for form in median if form != OURS), key=median.__getitem__)
        ratio = median[OURS] / median[best]
        ours = pass_name, threads, len(found), median[OURS]
        rows.append(Row(name, *ours, best, median[best], ratio, errors[OURS], errors[best], median))
    return rows


def cells(row: Row) -> tuple[str, ...]:
    times = f"{row.time_ms:.1f}", row.best_other, f"{row.other_ms:.1f}", f"{row.ratio:.2f}"
    return row.op, row.pass_name, str(row.threads), *times, f"{row.error:.2g}", f"{row.other_error:.2g}"


def forms_of(op: Op) -> dict[str, Callable[..., Tensor]]:
    """Functions to compile, the variant itself among them, which compiles itself."""

    def called(variant: str) -> Callable[..., Tensor]:
        return lambda *args: op(*args, variant=variant)

    own = {name: torch.compile(called(name)) for name in ("naive", "einsum") if name in op.variants}
    plain = {name: torch.compile(function) for name, function in PLAIN.get(op.name, {}).items()}
    return {OURS: called(OURS), **own, **plain}


def errors_of(op: Op, forms: Mapping[str, Callable[..., Tensor]]) -> dict[str, float]:
    """The errors of the forms' results at small sizes."""
    sizes = {name: min(size, SMALL) for name, size in reference_of(op).sizes.items()}
    args = Workload(op, sizes, torch.float32, CPU, backward=False).args()
    bounds = reference_of(op).bounds(op.prepare(*args))
    return {name: bounds.error_ratio(form(*args)) for name, form in forms.items()}


def times_of(op: Op, forms: Mapping[str, Callable[..., Tensor]]) -> dict[str, dict[str, float]]:
    """Milliseconds of each form by pass, at the default size."""
    found = {}
    args = Workload(op, reference_of(op).sizes, torch.float32, CPU, backward=False).args()
    for pass_name in PASSES:
        if pass_name == "both":
            args = tuple(arg.detach().requires_grad_() for arg in args)
            forms = {name: Training(form) for name, form in forms.items()}
        passes = {name: measure.Pass(form, args) for name, form in forms.items()}
        once_ms = {name: second_run_ms(form, args) for name, form in forms.items()}
        passes = {name: one for name, one in passes.items() if once_ms[name] <= HOPELESS * once_ms[OURS]}
        timings = measure.times(passes, repeats=9, least_repeats=1, budget_s=0.5, warmup=0)  # each has run twice
        found[pass_name] = once_ms | {name: timing.median_ms for name, timing in timings.items()}
    return found


if __name__ == "__main__":
    main()
