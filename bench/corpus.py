"""What `effops.lint` finds in the programs of the corpus, and what each program takes with several remedies, on a CPU.

python bench/corpus.py --half known
python bench/corpus.py --program squared_distances --json FILE

The first table runs lint at each program's full sizes, on fake tensors. It counts the stated lines that lint finds, and
findings that are false. A finding is right if it names the line, and its bytes within 0.5 %.

The second table runs each program at its small sizes. It has the memory budget and milliseconds of a run, with backward
where the program is trained: as it is, mended by hand, compiled, and compiled with Inductor's auto-chunker. The memory
budget is the highest sum, at any moment, of what the run allocated and does not return. * marks a predicted one, where
a run would take more than half of the free memory. The last column is lint's own fix, and the largest tensor that the
fix makes. Each half of the corpus has tables of its own: the author of lint's rules knew only the known half.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

# The profiler's library announces each start and stop on stderr below this level.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# Processes that compile would each import PyTorch first. One program is compiled at a time, so they save nothing.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from corpus.budgets import leaves, measured_bytes, run
from corpus.program import Program
from corpus.programs import HALVES, programs
from corpus.recall import Recall, recall, summary
from parts.arguments import file_to_write
from parts.report import format_ms, header, heading, write_json
from torch._inductor import metrics

from effops import lint, measure
from effops.commands.main import Parser
from effops.programs.capture.faked import CannotFollow
from effops.programs.limits_of_memory import predict
from effops.text import did_you_mean, format_bytes

CPU = torch.device("cpu")
AT_SMALL = {"kernel_sums": "at its small sizes: its 7,800 checkpointed chunks would take minutes"}
FREE_SHARE = 0.5  # of the free memory, that a run may take
LONGEST_NOTE = 200
CHUNKER = {"auto_chunker.enable": True, "fx_graph_cache": False}  # what is read from disk does not count as chunked

AS_IS, MENDED, COMPILED, CHUNKED = "as it is", "mended", "compiled", "auto-chunker"
FORMS = (AS_IS, MENDED, COMPILED, CHUNKED)
FIX = "lint's fix: largest"
RECALL_LINE = "{:<26}{:>6}{:>7}{:>10}{:>7}{:>9}"
RECALL_TITLES = "program", "lines", "found", "findings", "false", "time"
COSTS_LINE = "{:<26}" + "{:>22}" * len(FORMS) + "  {}"


@dataclass(frozen=True)
class Cost:
    """What one form of a program takes. What does not apply is None, and `reason` says why, in a word or two.

    Attributes:
        budget_bytes: the memory budget of a run
        predicted: whether the bytes are predicted, since they do not fit
        note: more of the reason
    """

    budget_bytes: int | None = None
    time_ms: float | None = None
    predicted: bool = False
    reason: str = ""
    note: str = ""

    def __str__(self) -> str:
        if self.budget_bytes is None:
            return self.reason
        return f"{format_bytes(self.budget_bytes)}{'*' * self.predicted}  {format_ms(self.time_ms):>7}"


@dataclass(frozen=True)
class Costs:
    """What a program takes at its small sizes, by the form.

    Attributes:
        fix: how lint's fix does it, or why there is none; of several fixes, all
        fix_bytes: the largest tensor that the fix makes, its result included; of several fixes, the largest
    """

    half: str
    program: str
    forms: Mapping[str, Cost]
    fix: str
    fix_bytes: int | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables; returns the exit code: 1 if lint failed on a program, or one does not run as it is."""
    parser = argument_parser()
    options = parser.parse_args(arguments)
    selected = selected_programs(parser, options)
    head = header(CPU, measure.copy_bandwidth_gbps(CPU))
    print(heading(head, 120), flush=True)
    found: list[Recall] = []
    costs: list[Costs] = []

    def save() -> None:
        if options.json:
            write_json(options.json, head, [*found, *costs])

    for half, chosen in selected.items():
        print(f"\n{half}: lint at full sizes\n{RECALL_LINE.format(*RECALL_TITLES)}", flush=True)
        for program in chosen:
            found.append(recall(half, program, "small" if program.name in AT_SMALL else "sizes"))
            print_recall(found[-1])
            save()
        print(summary(one for one in found if one.half == half), flush=True)
    for half, chosen in selected.items():
        print(f"\n{half}: memory budget and time at small sizes\n{COSTS_LINE.format('program', *FORMS, FIX)}")
        for program in chosen:
            costs.append(costs_of(half, program, quick=options.quick))
            print_costs(costs[-1])
            save()
    failed = [one.program for one in found if one.status == "failed"]
    failed += [one.program for one in costs if one.forms[AS_IS].reason == "failed"]
    for name in dict.fromkeys(failed):
        print(f"failed: {name}", file=sys.stderr)
    return int(bool(failed))


def argument_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="bench/corpus.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--half", choices=HALVES, help="default: both, one after the other")
    parser.add_argument("--program", action="append", metavar="NAME", help="one program, or several; default: all")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write header and rows there")
    parser.add_argument("--quick", action="store_true", help="time one run of each form, and compile nothing")
    return parser


def selected_programs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, list[Program]]:
    """The programs to look at, by the half. A name may be one of both halves."""
    chosen = {half: [one for own, one in programs() if own == half] for half in HALVES if options.half in (None, half)}
    names = {one.name for one in chain(*chosen.values())}
    for name in options.program or ():
        if name not in names:
            where = f" of the half {options.half}" if options.half else ""
            nearest = did_you_mean(name, names) or "; `bench/corpus/` has them"
            parser.error(f"argument --program: expected a program{where}; got {name!r}{nearest}")
    if options.program:
        chosen = {half: [one for one in own if one.name in options.program] for half, own in chosen.items()}
    return {half: own for half, own in chosen.items() if own}


def costs_of(half: str, program: Program, *, quick: bool = False) -> Costs:
    """Bytes and times of each form that applies. Forms take turns when they are timed."""
    torch.compiler.reset()
    torch.manual_seed(0)
    arguments = program.arguments(**program.small)
    fix = fix_of(program, arguments)
    forms = forms_of(program, quick=quick)
    costs = {
        name: Cost(reason=form) if isinstance(form, str) else cost_of(name, program, form, arguments)
        for name, form in forms.items()
    }
    repeats, budget_s = (1, 0.0) if quick else (9, 1.0)
    passes = {
        name: measure.Pass(partial(run_once, forms[name], arguments), ())
        for name, one in costs.items()
        if one.budget_bytes is not None and not one.predicted
    }
    timings = measure.times(passes, repeats=repeats, least_repeats=1, budget_s=budget_s, warmup=0)
    costs |= {name: replace(costs[name], time_ms=timing.median_ms) for name, timing in timings.items()}
    return Costs(half, program.name, costs, *fix)


def forms_of(program: Program, *, quick: bool) -> dict[str, Program | str]:
    """Each form as a program, or in a word why there is none. What is compiled is so when it first runs."""
    forms: dict[str, Program | str] = {AS_IS: program, MENDED: "clean"}
    if program.mended is not None:
        forms[MENDED] = replace(program, run=program.mended)
    if quick:
        return {**forms, COMPILED: "not with --quick", CHUNKED: "not with --quick"}
    return {
        **forms,
        COMPILED: replace(program, run=torch.compile(program.run)),
        CHUNKED: replace(program, run=torch.compile(program.run, options=CHUNKER)),
    }


def cost_of(name: str, program: Program, form: Program, arguments: tuple[Any, ...]) -> Cost:
    """The memory budget of a form: measured, or predicted where it takes more than its share of the free memory."""
    is_compiled = name in (COMPILED, CHUNKED)
    needed = predicted_bytes(program if is_compiled else form, arguments)
    if needed is not None and needed > FREE_SHARE * measure.available_bytes(CPU):
        return Cost(reason="does not fit") if is_compiled else Cost(needed, predicted=True)
    before = metrics.num_auto_chunking
    try:
        nbytes = measured_bytes(form, arguments)
    except Exception as error:  # what one form cannot run does not end the table
        return Cost(reason="failed", note=f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST_NOTE])
    if name == CHUNKED and metrics.num_auto_chunking == before:
        return Cost(reason="nothing chunked")
    return Cost(nbytes)


def predicted_bytes(form: Program, arguments: tuple[Any, ...]) -> int | None:
    """None where a line depends on values: small sizes are then taken to fit."""
    try:
        return predict(run, form, arguments).peak_bytes
    except CannotFollow:
        return None


def run_once(form: Program, arguments: tuple[Any, ...]) -> Any:
    """A run whose gradients are new, and not added to those of the run before."""
    for one in leaves(arguments):
        one.grad = None
    return run(form, arguments)


def fix_of(program: Program, arguments: tuple[Any, ...]) -> tuple[str, int | None]:
    """How lint would mend it at small sizes, and the largest tensor that is then made."""
    try:
        findings = lint(program.run, *arguments).findings
    except Exception as error:  # one program that lint cannot follow does not end the table
        return f"lint raised {type(error).__name__}", None
    fixes = [one.fix for one in findings if one.fix is not None]
    if not fixes:
        return "no fix" if findings else "no finding" if program.expected else "clean", None
    how = ", ".join(dict.fromkeys(one.how for one in fixes))
    without = len(findings) - len(fixes)
    if without:
        how += f"; no fix for {without} of {len(findings)}"
    return how, max(one.after_bytes for one in fixes)


def print_recall(row: Recall) -> None:
    counts = row.expected, row.found, row.findings, row.false_findings
    note = f"  {AT_SMALL[row.program]}" if row.sizes == "small" else ""
    print(RECALL_LINE.format(row.program, *counts, format_ms(1000 * row.seconds)) + note)
    for one in row.notes:
        print(f"    {' '.join(one.split())[:LONGEST_NOTE]}")
    sys.stdout.flush()


def print_costs(row: Costs) -> None:
    fix = row.fix if row.fix_bytes is None else f"{format_bytes(row.fix_bytes)}, {row.fix}"
    print(COSTS_LINE.format(row.program, *(str(row.forms[name]) for name in FORMS), fix))
    for name, one in row.forms.items():
        if one.note:
            print(f"    {name} {one.reason}: {one.note}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
