"""`effops.tiled` on the programs of the corpus, and `compile=True` beside `torch.compile`, on a CPU.

python bench/studies/tiles.py --json FILE

A line is one program of the corpus at its small sizes, within a budget: what it takes as it is and in tiles, with
backward where the program is trained, the ratio of the times of tiles to those of the program as it is, forward and
both passes, and the seconds of the first call with its backward pass, from capture to check. `as it is` marks a
program that keeps the budget, and `products` one that products of matrices alone bring within it. Then come five
programs whose intermediate takes gigabytes: as it is, compiled, in tiles, and in compiled tiles. The last is the head
of a language model with its loss, 4096 x 1024 by 32000, beside what PyTorch has for it: `F.linear_cross_entropy` in
chunks, and Inductor's auto-chunker. All forms of a program take turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from corpus.budgets import leaves, measured_bytes, run
from corpus.program import Program
from corpus.programs import HALVES, programs
from corpus.ways import differences, outcome
from parts.arguments import file_to_write
from parts.report import header, heading, write_json
from torch import Tensor, nn
from torch._inductor import config
from torch.nn import functional

import effops
from effops import measure
from effops.commands.main import Parser
from effops.text import format_bytes, parse_bytes

CPU = torch.device("cpu")
BUDGETS = "16 MiB", "64 MiB"
ROWS, FEATURES, WORDS = 4096, 1024, 32000  # of a language model's head
LINE = "{:<24}{:>3}{:>8}  {:<9}{:>11}{:>11}{:>9}{:>7}{:>8}{:>8}"
TITLES = "program", "", "budget", "", "as it is", "tiles", "forward", "both", "first s", "check s"
HEAD = "language model's head"
LARGE_LINE = "{:<24}{:>3}  {:<9}{:<24}{:>9}{:>11}"
LARGE_TITLES = "program", "", "pass", "form", "s", "taken"


@dataclass(frozen=True)
class Row:
    """A program within a budget. What does not apply is None.

    Attributes:
        status: "tiles", "products" of matrices alone, "as it is", "refused", or what is wrong
        as_it_is_bytes, taken_bytes: what the program takes, and what it takes tiled
        forward, both: the time of tiles by that of the program as it is; `both` of what is trained
        first_s: seconds of the first call, with its backward pass where the program is trained
        call_s: seconds of a forward pass
        check_s: seconds of what the first call compares: it takes that much more, once it is planned
        note: why it was refused, or what is wrong
    """

    half: str
    program: str
    threads: int
    budget: str
    status: str
    as_it_is_bytes: int | None = None
    taken_bytes: int | None = None
    forward: float | None = None
    both: float | None = None
    first_s: float | None = None
    call_s: float | None = None
    check_s: float | None = None
    note: str = ""


@dataclass(frozen=True)
class LargeRow:
    """A form of a program whose intermediate takes gigabytes: the median time, and bytes besides results."""

    program: str
    threads: int
    pass_name: str
    form: str
    time_s: float
    taken_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="bench/studies/tiles.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--half", choices=HALVES, help="default: both")
    parser.add_argument("--program", action="append", metavar="NAME", help="one program, or several; default: all")
    parser.add_argument("--budget", action="append", metavar="SIZE", help="default: 16 MiB and 64 MiB")
    parser.add_argument("--threads", action="append", type=int, help="default: all cores, and one")
    parser.add_argument("--without-large", action="store_true", help="leave out the programs of gigabytes")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write header and rows there")
    options = parser.parse_args(arguments)
    head = header(CPU, measure.copy_bandwidth_gbps(CPU))
    print(heading(head, 100), flush=True)
    rows: list[Row | LargeRow] = []

    def save(found: Sequence[Row | LargeRow]) -> None:
        rows.extend(found)
        if options.json:
            write_json(options.json, head, rows)

    effops.tiled(lambda x: (x[:, None] - x).square().sum(), budget="1 MiB")(torch.randn(600, 1))  # loads what captures
    all_threads = options.threads or sorted({torch.get_num_threads(), 1}, reverse=True)
    print(LINE.format(*TITLES))
    for half, program in programs():
        if (
            program.expected
            and options.half in (None, half)
            and (not options.program or program.name in options.program)
        ):
            for threads in all_threads:
                torch.set_num_threads(threads)
                found = rows_of(half, program, threads, options.budget or BUDGETS)
                for row in found:
                    print_row(row)
                save(found)
    print_summary([row for row in rows if isinstance(row, Row)])
    if not options.without_large and not options.program:
        print("\n" + LARGE_LINE.format(*LARGE_TITLES))
        for name, (function, args) in large_programs().items():
            for threads in all_threads:
                for is_trained in (False, True):
                    save(large_rows(name, forms_of(function), args, threads, is_trained=is_trained))
    if not options.without_large and (not options.program or HEAD in options.program):
        forms, args = head_of_a_language_model()
        save(large_rows(HEAD, forms, args, all_threads[0], is_trained=True))


def rows_of(half: str, program: Program, threads: int, budgets: Sequence[str]) -> list[Row]:
    torch.compiler.reset()
    torch.manual_seed(0)
    arguments = program.arguments(**program.small)
    expected, as_it_is = outcome(program, arguments), measured_bytes(program, arguments)
    forms: dict[str, Program] = {"": program}
    rows: dict[str, Row] = {}
    for budget in budgets:
        base = Row(half, program.name, threads, budget, "tiles", as_it_is)
        form = replace(program, run=effops.tiled(program.run, budget=budget))
        try:
            start = time.perf_counter()
            found = outcome(form, arguments)
            first_s = time.perf_counter() - start
            wrong = differences(found, expected) and differences(outcome(program, arguments), expected) == ""
            if wrong:
                rows[budget] = replace(base, status="differs", note=differences(found, expected))
                continue
            taken = measured_bytes(form, arguments)
        except effops.CannotTile as refusal:
            rows[budget] = replace(base, status="refused", note=str(refusal))
            continue
        except Exception as error:  # what one program cannot run does not end the table
            rows[budget] = replace(base, status=type(error).__name__, note=" ".join(str(error).split())[:300])
            continue
        report: Any = effops.explain(form.run, *arguments)
        status = "tiles"
        if not isinstance(report, effops.CannotTile) and not report.loops:
            status = "as it is" if report.as_it_is_bytes <= report.budget_bytes else "products"
        call_s, check_s = seconds_of_check(program, arguments, budget) if status == "tiles" else (None, None)
        rows[budget] = replace(base, status=status, taken_bytes=taken, first_s=first_s, call_s=call_s, check_s=check_s)
        forms[budget] = form
    if len(forms) == 1:  # as it is alone, which may compute gradients that a forward pass has none of
        return list(rows.values())
    ratios = {"forward": timed(forms, partial(forward_once, arguments=arguments))}
    if program.backward:
        ratios["both"] = timed(forms, partial(run_once, arguments=arguments))
    for name, milliseconds in ratios.items():
        for budget in list(forms)[1:]:
            rows[budget] = replace(rows[budget], **{name: round(milliseconds[budget] / milliseconds[""], 3)})
    return list(rows.values())


def seconds_of_check(program: Program, arguments: tuple[Any, ...], budget: str) -> tuple[float, float]:
    """The seconds of a call, and of what the first one compares."""
    form = effops.tiled(program.run, budget=budget)
    effops.explain(form, *arguments)  # plans it
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        form(*arguments)
        seconds.append(time.perf_counter() - start)
    first_s, *others = seconds
    return min(others), max(0.0, first_s - min(others))


def timed(forms: dict[str, Program], once: Callable[[Program], Any]) -> dict[str, float]:
    passes = {name: measure.Pass(partial(once, form), ()) for name, form in forms.items()}
    timings = measure.times(passes, repeats=15, least_repeats=3, budget_s=0.7, warmup=1)
    return {name: timing.median_ms for name, timing in timings.items()}


def forward_once(program: Program, arguments: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        return program.run(*arguments)


def run_once(program: Program, arguments: tuple[Any, ...]) -> Any:
    """A run whose gradients are new, and not added to those of the run before."""
    for one in leaves(arguments):
        one.grad = None
    return run(program, arguments)


def print_row(row: Row) -> None:
    taken = "" if row.taken_bytes is None else format_bytes(row.taken_bytes)
    ratios = ("" if one is None else f"{one:.2f}" for one in (row.forward, row.both))
    seconds = ("" if one is None else f"{one:.2f}" for one in (row.first_s, row.check_s))
    as_it_is = "" if row.as_it_is_bytes is None else format_bytes(row.as_it_is_bytes)
    print(LINE.format(row.program, row.threads, row.budget, row.status, as_it_is, taken, *ratios, *seconds))
    if row.note:
        print(f"    {row.note[:200]}")
    sys.stdout.flush()


def print_summary(rows: Sequence[Row]) -> None:
    """The share that is accepted of each half within each budget, and the rows above a target."""
    for budget in dict.fromkeys(row.budget for row in rows):
        for half in HALVES:
            own = [row for row in rows if (row.budget, row.half) == (budget, half)]
            accepted = [row for row in own if row.taken_bytes is not None]
            if own:
                print(f"{budget}, {half}: {len(accepted)} of {len(own)} accepted ({len(accepted) / len(own):.0%})")
    cut = [row for row in rows if row.status in ("tiles", "products")]
    for name, is_above in (
        ("above the budget", lambda row: row.taken_bytes > parse_bytes(row.budget, "--budget")),
        ("forward above 1.2", lambda row: row.forward > 1.2),
        ("both above 1.5", lambda row: row.both is not None and row.both > 1.5),
        ("first call above 2.5 s", lambda row: row.first_s > 2.5),
        ("check above the call and 0.2 s", lambda row: row.check_s is not None and row.check_s > max(0.2, row.call_s)),
    ):
        print(f"{name}: {sum(map(is_above, cut))} of {len(cut)}")


def large_programs() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Functions with an intermediate of gigabytes, and arguments."""
    torch.manual_seed(0)

    def power_spherical(loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        return PowerSpherical(loc, scale).log_prob(value)  # type: ignore[no-any-return]

    def kernel_sum(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return torch.exp(-(x[:, None] - y).square().sum(-1)) @ weights

    def log_of_sum(x: Tensor, y: Tensor) -> Tensor:
        return torch.logsumexp(-(x[:, None] - y).square().sum(-1), 1)

    def contrastive(x: Tensor, y: Tensor) -> Tensor:
        scores = functional.cosine_similarity(x[:, None], y[None], dim=-1) / 0.1
        return functional.cross_entropy(scores, torch.arange(len(x)))

    def chamfer(x: Tensor, y: Tensor) -> Tensor:
        distances = (x[:, None] - y).square().sum(-1)
        return distances.amin(1).mean() + distances.amin(0).mean()

    from power_spherical import PowerSpherical

    unit = [functional.normalize(torch.randn(*shape), dim=-1) for shape in ((128, 128), (128, 512, 1, 128))]
    return {
        "PowerSpherical.log_prob": (power_spherical, (unit[0], torch.rand(128) + 1, unit[1])),
        "kernel sum": (kernel_sum, (torch.randn(4096, 16), torch.randn(8192, 16), torch.randn(8192, 4))),
        "logsumexp of pairs": (log_of_sum, (torch.randn(4096, 16), torch.randn(8192, 16))),
        "contrastive loss": (contrastive, (torch.randn(2048, 128), torch.randn(2048, 128))),
        "chamfer": (chamfer, (torch.randn(8192, 3), torch.randn(8192, 3))),
    }


def forms_of(function: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    return {
        "as it is": function,
        "torch.compile": torch.compile(function),
        "tiles": effops.tiled(function),
        "compiled tiles": effops.tiled(function, compile=True),
    }


def head_of_a_language_model() -> tuple[dict[str, Callable[..., Tensor]], tuple[Tensor, ...]]:
    """The forms of its loss, and hidden states, weight and targets."""

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(hidden @ weight.mT, target)

    compiled = torch.compile(lambda *args: loss(*args))  # of a code of its own, which nothing else has compiled

    def chunked(*args: Tensor) -> Tensor:
        with config.patch({"auto_chunker.enable": True, "fx_graph_cache": False}):
            return compiled(*args)

    in_chunks = partial(functional.linear_cross_entropy, options=nn.LinearCrossEntropyOptions())
    forms = {**forms_of(loss), "auto-chunker": chunked, "F.linear_cross_entropy": in_chunks}
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, FEATURES) / FEATURES**0.5, torch.randn(WORDS, FEATURES)
    return forms, (hidden, weight, torch.randint(WORDS, (ROWS,)))


def large_rows(
    name: str, forms: dict[str, Callable[..., Tensor]], args: tuple[Tensor, ...], threads: int, *, is_trained: bool
) -> list[LargeRow]:
    torch.compiler.reset()
    torch.set_num_threads(threads)
    args = tuple(one.detach().requires_grad_(is_trained and one.is_floating_point()) for one in args)
    trained = [place for place, one in enumerate(args) if one.requires_grad]

    def both(form: Callable[..., Tensor], *args: Tensor) -> Any:
        result = form(*args)
        return result, torch.autograd.grad(result.sum(), [args[place] for place in trained]) if trained else ()

    passes = {}
    for form, one in forms.items():
        try:
            both(one, *args)  # warms up
        except effops.CannotTile as refusal:  # what one form cannot run does not end the table
            print(f"{name}, {form}: {refusal}")
        else:
            passes[form] = measure.Pass(partial(both, one), args)
    timings = measure.times(passes, repeats=7, least_repeats=3, budget_s=4.0, warmup=0)
    rows = []
    for form, one in passes.items():
        taken = measure.memory(one).temporary_bytes
        pass_name = "both" if is_trained else "forward"
        rows.append(LargeRow(name, threads, pass_name, form, timings[form].median_ms / 1000, taken))
        row = rows[-1]
        print(LARGE_LINE.format(name, threads, pass_name, form, f"{row.time_s:.3f}", format_bytes(taken)), flush=True)
    return rows


if __name__ == "__main__":
    main()
