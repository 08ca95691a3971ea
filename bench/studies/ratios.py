"""The automatic choice of every op against what else a user could take, in interleaved runs on a CPU.

python bench/studies/ratios.py --json FILE

A line is one call: the time of the automatic choice, its best peer, the ratio of the two, and the ratio of the
automatic choice to itself, which tells how exact the ratios of this run are. The default sizes come first, and then
each other case in one dtype and with one number of threads, by turns. What would begin after --minutes is left out, and
the file tells what. It is written after every call. `--beside` measures beside a load.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

# The profiler's library announces each start and stop on stderr below this level.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from parts.arguments import file_to_write
from parts.comparison import contenders_of, shortage
from parts.expected import Workload
from parts.load import beside, load
from parts.peers import PEERS
from parts.report import header, heading, write_json
from parts.timeleft import TimeLeft, live_line
from rich.console import Console
from torch import Tensor
from torch._inductor import config as inductor

import effops  # noqa: F401  (registers the ops)
from effops import measure
from effops.commands.console import plain_or_rich_console
from effops.commands.main import Parser
from effops.dispatch.choice import AUTO, choose
from effops.dispatch.op import Op, ops
from effops.reference import reference_of, tried_ops
from effops.text import counted

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PEER_VARIANTS = ("compile", "einsum")
AGAIN = "auto again"
OWN = ("cpp", "chunked")  # which have lines of their own where they are not the automatic choice
DEFAULT, FIRST_CALL = "default", "first call"
TARGET, TARGET_ELSEWHERE = 1.0, 1.1  # of the ratio, at the default size and elsewhere

# A peer that takes so many times as long as the automatic choice has its place after one run. In further cases of the
# same op and pass it is left out, which saves half of the time of a run: most of these are compiled for each case.
HOPELESS = 3.0
# A peer may hold more temporaries than the variant whose memory stands for its own: `torch.distributions.Normal` took
# more than 23 GiB for the default call and its gradients, so that the system ended the process.
PEER_FACTOR = 3
SECONDS_PER_STEP = 12.0  # a first guess, mostly what compilers take

Arguments = tuple[Tensor, ...]


def no_options(args: Arguments) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Case:
    """A call of an op: its sizes, what is done to its tensors, and its other arguments, which may depend on them."""

    op: Op
    name: str
    sizes: Mapping[str, int]
    change: Callable[[Op, Arguments], Arguments] = lambda op, args: args
    options: Callable[[Arguments], Mapping[str, Any]] = no_options

    def args(self, dtype: torch.dtype) -> Arguments:
        return self.change(self.op, Workload(self.op, self.sizes, dtype, CPU, backward=False).args())


@dataclass(frozen=True)
class Step:
    """What is measured in one go: both passes of a case."""

    case: Case
    dtype: str
    threads: int

    def __str__(self) -> str:
        return f"{self.case.op.name}, {self.case.name}, {self.dtype}, {counted(self.threads, 'threads')}"


@dataclass(frozen=True)
class Row:
    """A pass of a call: `subject`, which is the automatic choice or a named variant, and its peers, in milliseconds.

    `reasons` says why a peer has no time.
    """

    op: str
    case: str
    pass_name: str
    threads: int
    dtype: str
    size: dict[str, int]
    subject: str
    chosen: str
    time_ms: float
    control: float
    peers_ms: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    best_peer: str = field(init=False)
    ratio: float | None = field(init=False)

    def __post_init__(self) -> None:
        best = min(self.peers_ms, key=self.peers_ms.__getitem__, default="")
        object.__setattr__(self, "best_peer", best)
        object.__setattr__(self, "ratio", self.time_ms / self.peers_ms[best] if best else None)

    @property
    def is_late(self) -> bool:
        """Whether the ratio is above its target by more than the automatic choice differs from itself."""
        target = TARGET if self.case == DEFAULT else TARGET_ELSEWHERE
        return self.case != FIRST_CALL and (self.ratio or 0) > target * max(self.control, 1 / self.control)


def main(arguments: Sequence[str] | None = None) -> None:
    options = argument_parser().parse_args(arguments)
    end = time.perf_counter() + 60 * options.minutes
    console = plain_or_rich_console(100)
    steps = list(chosen_steps(options))
    rows: list[Row] = []
    head = header(CPU, measure.copy_bandwidth_gbps(CPU))
    if options.beside:
        head["beside"] = options.beside
    console.print(heading(head, console.width))
    console.print(LINE.format(*TITLES))
    bench = Bench(options.repeats, options.budget)
    left = TimeLeft([SECONDS_PER_STEP] * len(steps))
    with live_line(console) as progress, beside(options.beside):
        for number, step in enumerate(steps):
            if time.perf_counter() > end:
                head["left_out"] = [str(one) for one in steps[number:]]
                break
            progress(f"{left.next_step('call')}: {step}")
            for row in bench.rows(step):
                console.print(LINE.format(*cells(row)))
                rows.append(row)
            head["minutes"] = round((time.perf_counter() - end) / 60 + options.minutes, 1)
            if options.json:
                write_json(options.json, head, rows)
    if options.json:
        write_json(options.json, head, rows)
    print_summary(console, rows, len(head.get("left_out", ())))


def argument_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="bench/studies/ratios.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", action="append", choices=ops(), metavar="OP", help="an op, or several; default: all")
    parser.add_argument("--case", action="append", metavar="CASE", help="a case, or several, as in the table")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: both")
    parser.add_argument("--threads", action="append", type=int, help="default: all cores, and one")
    parser.add_argument("--beside", type=load, metavar="LOAD", help="processes:N that compute, or a thread that counts")
    parser.add_argument("--quick", action="store_true", help="default sizes in float32 on all cores")
    parser.add_argument("--minutes", type=float, default=28, help="begin nothing after so many, 28")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="timed runs, 15; fewer if slow")
    parser.add_argument("--budget", type=float, default=0.6, help="seconds for them, 0.6")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write header and rows there")
    return parser


def chosen_steps(options: argparse.Namespace) -> Iterator[Step]:
    """What the options ask for, the most valuable first."""
    chosen = [op for name, op in tried_ops().items() if options.op is None or name in options.op]
    threads = options.threads or sorted({torch.get_num_threads(), 1}, reverse=True)
    dtypes = options.dtype or list(DTYPES)
    if options.quick:
        threads, dtypes = threads[:1], dtypes[:1]
    cases = [case for op in chosen for case in cases_of(op) if options.case is None or case.name in options.case]
    defaults = [case for case in cases if case.name == DEFAULT]
    others = [] if options.quick else [case for case in cases if case.name != DEFAULT]
    ways = [(dtype, count) for count in threads for dtype in dtypes]
    yield from (Step(case, *way) for way in ways for case in defaults)
    first_calls = [case for case in others if case.name == FIRST_CALL]
    others = [case for case in others if case.name != FIRST_CALL]
    for turn in range(len(ways)):  # each case in one way, and then in another one
        yield from (Step(case, *ways[(number + turn) % len(ways)]) for number, case in enumerate(others))
        yield from (Step(case, *ways[0]) for case in first_calls if turn == 0)


def cases_of(op: Op) -> Iterator[Case]:
    """The calls of an op. What suits it follows from the names of its arguments."""
    sizes = reference_of(op).sizes
    assert op.function is not None
    names = inspect.signature(op.function).parameters
    yield Case(op, DEFAULT, sizes)
    yield Case(op, "a quarter", scaled(op, 0.25))
    yield Case(op, "four times", scaled(op, 4))
    yield Case(op, "strided", sizes, strided)
    yield Case(op, "expanded", sizes, expanded)
    if "loc" in names:
        yield Case(op, "1 component", sizes, partial(of_components, 1))
        yield Case(op, "100 components", sizes, partial(of_components, 100))
    if "is_causal" in names:
        yield Case(op, "causal", sizes, options=lambda args: {"is_causal": True})
        long = {**sizes, "B": 1, "H": 8, "L": 4096}
        yield Case(op, "4096 keys", long)
        yield Case(op, "4096 keys causal", long, options=lambda args: {"is_causal": True})
    if "attn_mask" in names:
        yield Case(op, "mask", sizes, options=some_pairs)
    yield Case(op, FIRST_CALL, sizes)


def scaled(op: Op, factor: float) -> dict[str, int]:
    """The default sizes with the largest of them changed, so that the call takes `factor` times the operations."""
    sizes = reference_of(op).sizes
    largest = max(sizes, key=sizes.__getitem__)

    def operations(length: int) -> int:
        small = {**dict.fromkeys(sizes, 8), largest: length}
        count: int = op.prepare(*Workload(op, small, torch.float32, CPU, backward=False).args()).operations
        return count

    power = round(math.log2(operations(16) / operations(8)))  # 2 where both axes of the pairs have this size
    return {**sizes, largest: round(sizes[largest] * factor ** (1 / power))}


def strided(op: Op, args: Arguments) -> Arguments:
    """The tensors with their batch axes in the reverse order in memory, and with rows that are half of longer ones."""

    def laid_out(tensor: Tensor, core: int) -> Tensor:
        batch = max(0, tensor.ndim - core)
        axes = (*reversed(range(batch)), *range(batch, tensor.ndim))
        shape = [tensor.shape[axis] for axis in axes]
        if core:
            shape[-1] *= 2
        memory = tensor.new_empty(shape)
        view = memory[..., : tensor.shape[-1]] if core else memory
        return view.permute(axes).copy_(tensor)

    return tuple(laid_out(arg, core) for arg, core in zip(args, op.core_dims.values()))


def expanded(op: Op, args: Arguments) -> Arguments:
    """The tensors but the last with the same values all along their first batch axis, with stride 0."""
    *others, last = args
    ranks = (arg.ndim - core for arg, core in zip(args, op.core_dims.values()))
    return (*(arg[:1].expand(arg.shape) if rank > 0 else arg for arg, rank in zip(others, ranks)), last)


def of_components(count: int, op: Op, args: Arguments) -> Arguments:
    """The tensors with the first components alone, which lie along the axis that is summed, or that x does not have."""
    call = op.prepare(*args)
    axis = call.plan.columns[0] if op.logsumexp is None else op.logsumexp(call)
    ranks = [arg.ndim - core for arg, core in zip(args, op.core_dims.values())]
    own_axes = [axis - max(ranks) + rank for rank in ranks]
    return tuple(
        arg.narrow(own, 0, count).contiguous() if own >= 0 and arg.shape[own] > count else arg
        for arg, own in zip(args, own_axes)
    )


def some_pairs(args: Arguments) -> Mapping[str, Any]:
    """A boolean mask that leaves out one pair in eight."""
    query, key = args[:2]
    generator = torch.Generator().manual_seed(0)
    return {"attn_mask": torch.rand(query.shape[-2], key.shape[-2], generator=generator) > 0.125}


class Training:
    """A function's result and gradients. The gradient from above is made in the first run."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.upstream: Tensor | None = None

    def __call__(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        out = self.function(*leaves)
        if self.upstream is None:
            self.upstream = measure.upstream_gradient(out)
        return torch.autograd.grad(out, leaves, self.upstream)


@dataclass
class Bench:
    """How often a call runs, and which peers were hopeless, by the op and the pass."""

    repeats: int
    budget_s: float
    hopeless: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def rows(self, step: Step) -> Iterator[Row]:
        torch.set_num_threads(step.threads)
        inductor.cpp.threads = step.threads  # compiled code has the number in it, and is kept on disk
        if step.case.name == FIRST_CALL:
            yield first_calls(step)
            return
        args = step.case.args(DTYPES[step.dtype])
        for pass_name in ("forward", "both"):
            yield from self.rows_of_pass(step, args, pass_name)

    def rows_of_pass(self, step: Step, args: Arguments, pass_name: str) -> Iterator[Row]:
        op, options = step.case.op, step.case.options(args)
        if pass_name == "both":
            args = tuple(arg.detach().requires_grad_() for arg in args)
        chosen = choose(op, op.prepare(*args, **options), None).name
        functions, reasons = self.functions_of(step, args, options, pass_name)
        if pass_name == "both":
            functions = {name: Training(function) for name, function in functions.items()}
        found_ms: dict[str, float] = {}
        passes: dict[str, measure.Pass] = {}
        for name, function in functions.items():
            try:
                once_ms = second_run_ms(function, args)
            except Exception as error:  # a peer's, which is told
                if name in (AUTO, AGAIN):
                    raise
                reasons[name] = next(iter(str(error).splitlines()), type(error).__name__)
                continue
            found_ms[name] = once_ms
            if once_ms <= HOPELESS * found_ms[AUTO]:
                passes[name] = measure.Pass(function, args)
            elif step.case.name == DEFAULT and name not in OWN:
                self.hopeless.setdefault((op.name, pass_name), set()).add(name)
        timings = measure.times(passes, repeats=self.repeats, budget_s=self.budget_s, warmup=0)
        found_ms |= {name: timing.median_ms for name, timing in timings.items()}
        peers_ms = {name: ms for name, ms in found_ms.items() if name not in (AUTO, AGAIN, *OWN)}
        control = found_ms[AGAIN] / found_ms[AUTO]
        for subject in (AUTO, *OWN):
            if subject in found_ms:
                yield Row(
                    op.name,
                    step.case.name,
                    pass_name,
                    step.threads,
                    step.dtype,
                    dict(step.case.sizes),
                    subject,
                    chosen if subject == AUTO else subject,
                    found_ms[subject],
                    control,
                    peers_ms,
                    reasons,
                )

    def functions_of(
        self, step: Step, args: Arguments, options: Mapping[str, Any], pass_name: str
    ) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
        """What runs, by name, and why others do not. Those of `OWN` are among them where they are not the choice."""
        op = step.case.op
        workload = Workload(op, step.case.sizes, DTYPES[step.dtype], CPU, pass_name == "both", options)
        chosen = choose(op, op.prepare(*args, **options), None).name
        names = [*PEER_VARIANTS, *(name for name in OWN if name in op.variants and name != chosen)]
        functions: dict[str, Callable[..., Any]] = dict.fromkeys((AUTO, AGAIN), partial(op, **options))
        reasons: dict[str, str] = {}
        hopeless = self.hopeless.get((op.name, pass_name), ()) if step.case.name != DEFAULT else ()
        shown_elsewhere = [name for name, peer in PEERS.get(op.name, {}).items() if peer.always]
        for one in contenders_of(workload, args, names, with_peers=True):
            cost = one.cost
            if cost is not None and one.is_peer:
                cost = cost._replace(temporary_bytes=PEER_FACTOR * cost.temporary_bytes)
            obstacle = one.obstacle or shortage(workload, args, cost)
            if one.name in hopeless:
                obstacle = f"took {HOPELESS:g} times as long at the default size"
            if one.name in shown_elsewhere:
                continue
            if obstacle:
                reasons[one.name] = obstacle
            else:
                functions[one.name] = one.function
        return functions, reasons


def second_run_ms(function: Callable[..., Any], args: Arguments) -> float:
    """The time of a second run: the first one compiles."""
    function(*args)
    start = time.perf_counter()
    function(*args)
    return 1000 * (time.perf_counter() - start)


def first_calls(step: Step) -> Row:
    """The first call in a new process, of the automatic choice and of each peer that is a variant."""
    op = step.case.op
    found_ms: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for name in (AUTO, AGAIN, *(name for name in PEER_VARIANTS if name in op.variants)):
        given = op.name, AUTO if name == AGAIN else name, step.dtype, step.threads
        with tempfile.TemporaryDirectory() as cache:  # so that nothing was compiled before
            done = subprocess.run(
                [sys.executable, "-c", f"import ratios; print(ratios.first_call_ms(*{given!r}))"],
                cwd=Path(__file__).parent,
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
                capture_output=True,
                text=True,
            )
        if done.returncode:
            reasons[name] = done.stderr.strip().splitlines()[-1]
        else:
            found_ms[name] = float(done.stdout.splitlines()[-1])
    chosen_ms, control = found_ms.pop(AUTO), found_ms.pop(AGAIN)
    size = dict(step.case.sizes)
    row = Row(op.name, FIRST_CALL, "forward", step.threads, step.dtype, size, AUTO, "", chosen_ms, control / chosen_ms)
    return replace(row, peers_ms=found_ms, reasons=reasons)


def first_call_ms(op_name: str, variant: str, dtype: str, threads: int) -> float:
    """The time of the first call of an op in this process, at its default size."""
    op = tried_ops()[op_name]
    torch.set_num_threads(threads)
    args = Case(op, FIRST_CALL, reference_of(op).sizes).args(DTYPES[dtype])
    start = time.perf_counter()
    op(*args, variant=variant)
    return 1000 * (time.perf_counter() - start)


LINE = "{:33} {:16} {:3} {:>2} {:4} {:>8} {:16} {:>5} {:>5}"  # 100 columns
TITLES = ("Op", "Case", "", "T", "", "ms", "Best peer", "Ratio", "Same")


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a line: a named variant stands behind its op, `f+b` is forward and backward."""
    name = row.op if row.subject == AUTO else f"{row.op} {row.subject}"
    return (
        name[:33],
        row.case[:16],
        {"forward": "fwd", "both": "f+b"}[row.pass_name],
        str(row.threads),
        {"float32": "f32", "bfloat16": "bf16"}[row.dtype],
        f"{row.time_ms:.4g}" if row.time_ms < 1e4 else f"{row.time_ms:.0f}",
        row.best_peer[:16],
        "-" if row.ratio is None else _factor(row.ratio),
        _factor(row.control),
    )


def _factor(value: float) -> str:
    """A factor in five columns, whose decimals are fewer where it is large, as on a machine that is busy."""
    return f"{value:.2f}" if value < 99.995 else f"{value:.0f}"


def print_summary(console: Console, rows: Sequence[Row], left_out: int) -> None:
    """How many lines are within their targets, the worst line of each op, and how exact ratios are."""
    judged = [row for row in rows if row.ratio is not None and row.case != FIRST_CALL and row.subject == AUTO]
    if not judged:
        return
    late = [row for row in judged if row.is_late]
    off = statistics.quantiles([max(row.control, 1 / row.control) for row in judged] * 2, n=20)
    console.print(
        f"\n{len(judged) - len(late)} of {len(judged)} lines are at most {TARGET} at the default size and "
        f"{TARGET_ELSEWHERE} elsewhere, give or take what the automatic choice differs from itself: by a factor of "
        f"{off[9]:.2f} in half of the lines, above {off[18]:.2f} in a twentieth. {left_out} calls were left out."
    )
    console.print("The largest ratio of each op, at its default size and elsewhere:")
    for name in dict.fromkeys(row.op for row in judged):
        for own in ([row for row in judged if (row.op, row.case == DEFAULT) == (name, at)] for at in (True, False)):
            if own:
                console.print(LINE.format(*cells(max(own, key=lambda row: row.ratio or 0))))


if __name__ == "__main__":
    main()
