"""What `effops.lint` finds in the programs of the corpus, and what each program takes with several remedies, on a CPU.

python bench/corpus.py --half known
python bench/corpus.py --program squared_distances --json FILE
python bench/corpus.py --without compiled --without auto-chunker --without KeOps

The first table runs lint at each program's full sizes, on fake tensors. It counts the stated lines that lint finds, and
findings that are false. A finding is right if it names the line, and its bytes within 0.5 %.

The second table runs each program at its small sizes, with backward where the program is trained. It has the memory
budget and milliseconds of several ways to write it: as it is, mended by hand, compiled, compiled with Inductor's
auto-chunker, by `torch.func.vmap(chunk_size=)`, as a checkpointed loop, by KeOps, by a named op of effops, and by
`effops.tiled` within 64 MiB. The memory budget is the highest sum, at any moment, of what the run allocated and does
not return. * marks a predicted one, where a run would take more than half of the free memory. KeOps' own memory is not
PyTorch's, and is not counted.

Each way has to give the results and gradients of the program as it is; otherwise its cell says so. Times are without
compilation. The last column is lint's own fix, and the largest tensor that the fix makes. Each half of the corpus has
tables of its own: the author of lint's rules knew only the known half.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
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
from corpus.ways import Ways, differences, outcome, ways
from parts.arguments import file_to_write
from parts.report import format_ms, header, heading, write_json
from torch._inductor import metrics

import effops
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
VMAP, LOOP, KEOPS, OP, TILES = "vmap", "loop", "KeOps", "named op", "tiles"
FORMS = (AS_IS, MENDED, COMPILED, CHUNKED, VMAP, LOOP, KEOPS, OP, TILES)
FIX = "lint's fix: largest"
NONE = "-"
RECALL_LINE = "{:<26}{:>6}{:>7}{:>10}{:>7}{:>9}"
RECALL_TITLES = "program", "lines", "found", "findings", "false", "time"
COSTS_LINE = "{:<26}" + "{:>20}" * len(FORMS) + "  {:<13}{}"


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
        mended: what the mended program is: "loop", "contraction", "formula", "function" or "look-up"
        fix: how lint's fix does it, or why there is none; of several fixes, all
        fix_bytes: the largest tensor that the fix makes, its result included; of several fixes, the largest
    """

    half: str
    program: str
    forms: Mapping[str, Cost]
    mended: str
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
        print(f"\n{half}: memory budget and time at small sizes")
        print(COSTS_LINE.format("program", *FORMS, "mended by", FIX), flush=True)
        for program in chosen:
            costs.append(costs_of(half, program, quick=options.quick, without=options.without))
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
    parser.add_argument("--without", action="append", default=[], choices=FORMS[1:], help="a form to leave out")
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


def costs_of(half: str, program: Program, *, quick: bool = False, without: Sequence[str] = ()) -> Costs:
    """Bytes and times of each form that applies. Forms take turns when they are timed."""
    torch.compiler.reset()
    torch.manual_seed(0)
    arguments = program.arguments(**program.small)
    fix = fix_of(program, arguments)
    own_ways = ways(half).get(program.name, Ways(""))
    forms = forms_of(program, own_ways, quick=quick) | dict.fromkeys(without, "left out")
    costs = {
        name: Cost(reason=form) if isinstance(form, str) else cost_of(name, program, form, arguments)
        for name, form in forms.items()
    }
    costs = checked(costs, forms, arguments)
    repeats, budget_s = (1, 0.0) if quick else (9, 1.0)
    passes = {
        name: measure.Pass(partial(run_once, forms[name], arguments), ())
        for name, one in costs.items()
        if one.budget_bytes is not None and not one.predicted
    }
    timings = measure.times(passes, repeats=repeats, least_repeats=1, budget_s=budget_s, warmup=0)
    costs |= {name: replace(costs[name], time_ms=timing.median_ms) for name, timing in timings.items()}
    return Costs(half, program.name, costs, own_ways.mended, *fix)


def forms_of(program: Program, own_ways: Ways, *, quick: bool) -> dict[str, Program | str]:
    """Each form as a program, or in a word why there is none. What is compiled is so when it first runs."""
    functions = {
        MENDED: program.mended or "clean",
        COMPILED: "not with --quick" if quick else torch.compile(program.run),
        CHUNKED: "not with --quick" if quick else torch.compile(program.run, options=CHUNKER),
        VMAP: own_ways.vmap or NONE,
        LOOP: own_ways.loop or ("as mended" if own_ways.mended == "loop" else NONE),
        KEOPS: (own_ways.keops and (without_keops() or own_ways.keops)) or own_ways.no_keops or NONE,
        OP: own_ways.op or NONE,
        TILES: effops.tiled(program.run) if program.expected else NONE,
    }
    made = {name: one if isinstance(one, str) else replace(program, run=one) for name, one in functions.items()}
    return {AS_IS: program, **made}


def without_keops() -> str:
    """Why KeOps cannot run here; empty if it can. It compiles each formula when it is first called."""
    if importlib.util.find_spec("pykeops") is None:
        return "not installed"
    return "" if any(map(shutil.which, ("c++", "g++", "clang++"))) else "no compiler"


def checked(
    costs: Mapping[str, Cost], forms: Mapping[str, Program | str], arguments: tuple[Any, ...]
) -> dict[str, Cost]:
    """The same costs, but for forms whose results or gradients are not those of the program as it is."""
    ran = [name for name, one in costs.items() if one.budget_bytes is not None and not one.predicted]
    if AS_IS not in ran or len(ran) == 1:
        return dict(costs)
    outcomes = [outcome(forms[name], arguments) for name in (AS_IS, *ran)]
    if differences(outcomes[1], outcomes[0]):  # the program goes on from where it was, as a training step does
        return dict(costs)
    notes = {name: differences(found, outcomes[0])[:LONGEST_NOTE] for name, found in zip(ran, outcomes[1:])}
    return {**costs, **{name: Cost(reason="other results", note=note) for name, note in notes.items() if note}}


def cost_of(name: str, program: Program, form: Program, arguments: tuple[Any, ...]) -> Cost:
    """The memory budget of a form: measured, or predicted where it takes more than its share of the free memory."""
    is_predictable = name not in (COMPILED, CHUNKED, VMAP, KEOPS, TILES)
    needed = predicted_bytes(form if is_predictable else program, arguments)
    if needed is not None and needed > FREE_SHARE * measure.available_bytes(CPU):
        return Cost(needed, predicted=True) if is_predictable else Cost(reason="does not fit")
    before = metrics.num_auto_chunking
    try:
        nbytes = measured_bytes(form, arguments)
    except effops.CannotTile as refusal:
        return Cost(reason="refused", note=str(refusal)[:LONGEST_NOTE])
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
    print(COSTS_LINE.format(row.program, *(str(row.forms[name]) for name in FORMS), row.mended, fix))
    for name, one in row.forms.items():
        if one.note:
            print(f"    {name} {one.reason}: {one.note}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
