"""Every variant of every op on its workload: checked against float64, then memory and time. See `--help`."""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

# The profiler's library announces each start and stop on stderr below this level.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# Processes that compile would each import PyTorch first. One kernel is compiled at a time, so they save nothing.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from parts.arguments import comma_separated, file_to_write, keywords, positive, sizes, sweep
from parts.comparison import Effort, Row, compare
from parts.expected import Workload
from parts.outlook import compile_first, needs, outlook, seconds_of_steps
from parts.report import (
    LEAST_WIDTH,
    PROFILE_KEYS,
    SORT_KEYS,
    header,
    heading,
    plot_memory,
    print_tables,
    prose,
    title,
    write_html,
    write_json,
)
from parts.summary import print_summary
from parts.timeleft import TimeLeft, has_live_line, live_line, once_each

import effops  # noqa: F401  (registers the ops)
from effops.commands.console import plain_or_rich_console
from effops.commands.main import Parser
from effops.dispatch.op import Op, ops
from effops.measure import copy_bandwidth_gbps
from effops.memory.plot import check_picture
from effops.reference import reference_of, tried_ops
from effops.text import did_you_mean

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
PASSES = {"forward": (False,), "backward": (True,), "both": (False, True)}


MEANING = (
    "Temporary memory does not count inputs and output. Errors are in units of a budget: 1.0 is the largest that "
    "rounding can explain."
)
FOUNDING = "power_spherical_log_prob"
QUICK = Effort(least_repeats=1, budget_s=0.2, most_flops=2**27, slow_s=0.5)
QUICK_SHARE = 8  # the default divides the first size of each other op by it: what it takes falls as much


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 1 if a variant failed."""
    parser = argument_parser()
    options = parser.parse_args(arguments)
    selected = selected_ops(parser, options)
    device = torch.device(options.device)
    console = plain_or_rich_console(LEAST_WIDTH)
    effort = replace(Effort() if options.all else QUICK, repeats=options.repeats)
    steps = [
        (
            [Workload(op, sizes, DTYPES[options.dtype], device, one, keywords) for one in PASSES[options.passes]],
            variants,
        )
        for op, sizes, keywords, variants in selected
    ]
    groups: list[list[Row]] = []
    rows: list[Row] = []  # of all groups
    with live_line(console) as progress:
        progress("predicting memory and time")
        try:
            outlooks = [
                [
                    outlook(one, variants, effort, with_peers=options.peers, profiled=is_profiled(options, one))
                    for one in passes
                ]
                for passes, variants in steps
            ]
        except (TypeError, ValueError) as error:  # an op's own, of an option that it is given
            if not options.set:
                raise
            parser.error(f"argument --set: {error}")
        progress("measuring the bandwidth of a copy")
        head = header(device, copy_bandwidth_gbps(device))
        console.print(heading(head, console.width))
        console.print(prose(MEANING, console.width))
        console.print(needs([one for group in outlooks for one in group], device, console.width))
        compiling = (
            (one, variants)
            for (passes, variants), group in zip(steps, outlooks)
            for one, expected in zip(passes, group)
            if expected.compilations
        )
        first_compiled_s = 0.0
        for one, variants in itertools.islice(compiling, 1):
            progress("compiling once, which tells how long compilations take here")
            first_compiled_s = compile_first(one, variants)
        left = TimeLeft(seconds_of_steps(outlooks, first_compiled_s))
        for passes, variants in steps:
            step = left.next_step()
            console.print(f"\n{step}")
            if not console.is_terminal:
                progress(step)
            for workload in passes:
                console.print(title(workload), style="bold")
                found = compare(
                    workload,
                    variants=variants,
                    with_peers=options.peers,
                    with_floor=options.wide,
                    effort=effort,
                    profiled=is_profiled(options, workload),
                    group_by_stack=options.group_by_stack,
                    copy_gbps=head["copy_gbps"],
                    progress=progress if has_live_line(console) else once_each(progress),
                )
                print_tables(console, found, options.sort_by, wide=options.wide)
                groups.append(found.rows)
                rows += found.rows
                if options.json:
                    write_json(options.json, head, rows)
                if options.html:
                    write_html(options.html, head, rows)
    print_summary(console, groups)
    if options.plot:
        plot_memory(rows, options.sweep[0], options.plot)
    for row in rows:
        if row.fails:
            print(f"failed: {row.op} {row.variant}, {row.pass_name}: {row.reason}", file=sys.stderr)
    return int(any(row.fails for row in rows))


def is_profiled(options: argparse.Namespace, workload: Workload) -> bool:
    """Whether the profiler's table is asked for: under the founding op it always is."""
    by_option = options.all or options.profile or options.group_by_stack or options.sort_by in PROFILE_KEYS
    return bool(by_option) or workload.op.name == FOUNDING


def argument_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="bench/run.py", description=(__doc__ or "").replace(" See `--help`.", ""))
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--op", help=f"one op; default: all, which are {', '.join(ops())}")
    parser.add_argument("--variants", type=comma_separated, metavar="A,B", help="default: all")
    parser.add_argument("--size", type=sizes, default={}, metavar="M=..,T=..", help="instead of the op's default sizes")
    parser.add_argument(
        "--set", type=keywords, default={}, metavar="NAME=..", help="arguments of the op: is_causal=True"
    )
    parser.add_argument("--sweep", type=sweep, metavar="L=1024,2048", help="one size after the other")
    parser.add_argument(
        "--plot", type=file_to_write, metavar="FILE", help="draw memory against the size of --sweep there"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device, help="cuda if there is one")
    parser.add_argument("--pass", choices=PASSES, default="forward", dest="passes", help="default: forward")
    parser.add_argument("--peers", action="store_true", help="more rows: other implementations")
    parser.add_argument(
        "--repeats", type=positive, default=20, metavar="N", help="timed runs of a row, 20; fewer if slow"
    )
    parser.add_argument(
        "--sort-by", choices=SORT_KEYS, default="", metavar="KEY", help="smallest first: " + ", ".join(SORT_KEYS)
    )
    parser.add_argument("--group-by-stack", type=positive, default=0, metavar="N", help="operators by call stack")
    parser.add_argument(
        "--all",
        action="store_true",
        help="whole sizes; slow rows run thrice, every result is checked whole, every op profiled",
    )
    parser.add_argument("--profile", action="store_true", help="the profiler's table under every op")
    parser.add_argument("--wide", action="store_true", help="more columns, in tables of their own")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write header and rows there")
    parser.add_argument(
        "--html", type=file_to_write, metavar="FILE", help="write a page there: sortable rows, bars, curves of --sweep"
    )
    return parser


def accepted(op: Op) -> set[str]:
    """The arguments of an op that are no tensors."""
    assert op.function is not None
    return inspect.signature(op.function).parameters.keys() - op.core_dims.keys() - {"variant"}


def default_sizes(op: Op, *, whole: bool) -> dict[str, int]:
    """The sizes of an op's workload; in the default, but for the founding op, a part of the first of them."""
    own = dict(reference_of(op).sizes)
    if not whole and op.name != FOUNDING:
        first = next(iter(own))
        own[first] = max(1, own[first] // QUICK_SHARE)
    return own


def selected_ops(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> list[tuple[Op, Mapping[str, int], Mapping[str, Any], Sequence[str]]]:
    """Each op to run, sizes, options and the names of its variants. What suits none of the ops is an error."""
    if options.op is not None and options.op not in ops():
        nearest = did_you_mean(options.op, ops())
        parser.error(f"argument --op: expected one of {', '.join(ops())}; got {options.op!r}{nearest}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: cuda needs a CUDA device and torch built for it; got none; use --device cpu")
    chosen = [op for name, op in tried_ops().items() if options.op in (None, name)]
    chosen.sort(key=lambda op: op.name != FOUNDING)
    sizes_of_all = {key for op in chosen for key in reference_of(op).sizes}
    swept = {} if options.sweep is None else dict([options.sweep])
    expect_known(parser, "--size", options.size, sizes_of_all)
    expect_known(parser, "--sweep", list(swept), sizes_of_all)
    expect_known(parser, "--set", options.set, {key for op in chosen for key in accepted(op)} if options.set else set())
    if options.plot and (options.sweep is None or len(chosen) > 1 or options.passes == "both"):
        parser.error("argument --plot: expected one --op, one --pass and a --sweep; got none or several; name them")
    if options.plot:
        try:
            check_picture("argument --plot", options.plot)
        except (ImportError, ValueError) as error:
            parser.error(str(error))
    expect_known(parser, "--variants", options.variants or (), {name for op in chosen for name in op.variants})
    for key in {**options.size, **swept}:
        without = [op.name for op in chosen if key not in reference_of(op).sizes]
        if without:
            print(f"{key}: no size of {', '.join(without)}, which keep their own sizes", file=sys.stderr)
    return [
        (
            op,
            {
                **default_sizes(op, whole=options.all),
                **{key: size for key, size in given.items() if key in reference_of(op).sizes},
            },
            {key: value for key, value in options.set.items() if key in accepted(op)},
            [name for name in op.variants if options.variants is None or name in options.variants],
        )
        for op in chosen
        for given in ([{**options.size, key: size} for key, sizes in swept.items() for size in sizes] or [options.size])
        if options.variants is None or not op.variants.keys().isdisjoint(options.variants)
    ]


def expect_known(parser: argparse.ArgumentParser, option: str, given: Sequence[str], known: set[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        expected, got, nearest = ", ".join(sorted(known)), ", ".join(unknown), did_you_mean(unknown[0], known)
        parser.error(f"argument {option}: expected some of {expected}; got {got}{nearest}")


if __name__ == "__main__":
    sys.exit(main())
