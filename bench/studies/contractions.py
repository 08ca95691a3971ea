"""`effops.einsum` beside `torch.einsum` along opt_einsum's paths, on contractions of real use, on a CPU.

python bench/studies/contractions.py --json FILE

A line is one pass of a contraction: the time within the default budget, that of `torch.einsum`, of the same compiled,
the ratio to the better of these two, and the temporaries of both, with what is kept for backward. All take turns in one
process for each number of threads. Then come calls of two small operands, in microseconds, and a contraction for which
`torch.einsum` takes more than 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from parts.arguments import file_to_write
from parts.report import header, write_json
from ratios import CPU, Training
from torch import Tensor
from torch._inductor import config as inductor

import effops
from effops import measure
from effops.commands.console import plain_or_rich_console
from effops.commands.main import Parser
from effops.text import format_bytes

# Each with the size of every letter.
CONTRACTIONS = {
    "scores of relative positions": ("bhid,ijd->bhij", {"b": 4, "h": 8, "i": 256, "j": 256, "d": 64}),
    "values of relative positions": ("bhij,ijd->bhid", {"b": 4, "h": 8, "i": 256, "j": 256, "d": 64}),
    "bilinear form": ("bi,ijk,bj->bk", {"b": 1024, "i": 64, "j": 64, "k": 64}),
    "trilinear form": ("bi,bj,bk,ijk->b", {"b": 1024, "i": 48, "j": 48, "k": 48}),
    "biaffine scores": ("bxi,oij,byj->boxy", {"b": 8, "x": 64, "y": 64, "i": 128, "j": 128, "o": 16}),
    "tensor train layer": ("nxyz,xar,rybs,szc->nabc", dict.fromkeys("xyzabc", 8) | {"n": 256, "r": 16, "s": 16}),
    "chain of matrices": ("nij,njk,nkl->nil", {"n": 64, "i": 128, "j": 64, "k": 256, "l": 64}),
    "equivariant product": ("wxik,ekc,bci,be->bcwx", {"w": 9, "x": 9, "i": 9, "k": 4, "e": 10, "c": 64, "b": 64}),
    "MTTKRP of CP decomposition": ("ijk,jr,kr->ir", {"i": 128, "j": 128, "k": 128, "r": 32}),
    "core of Tucker decomposition": ("ijk,ia,jb,kc->abc", dict.fromkeys("ijk", 128) | dict.fromkeys("abc", 16)),
    "third moments": ("ia,ib,ic->abc", {"i": 1024} | dict.fromkeys("abc", 256)),
}
BEYOND = "third moments", {"i": 5000}  # more than 1 GiB for torch.einsum
SMALL = "ij,jk->ik"
PASSES = "forward", "both"
LINE = "{:<30}{:<9}{:>7}{:>9}{:>14}{:>10}{:>7}{:>11}{:>11}"
TITLES = "contraction", "pass", "threads", "ms", "torch.einsum", "compiled", "ratio", "temporary", "torch's"


@dataclass(frozen=True)
class Row:
    """A pass: milliseconds, and the bytes of temporaries."""

    contraction: str
    equation: str
    pass_name: str
    threads: int
    time_ms: float
    torch_ms: float
    compiled_ms: float
    ratio: float
    temporary_bytes: int
    torch_temporary_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="bench/studies/contractions.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", action="append", type=int, help="default: all cores, and one")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write header and rows there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    threads = options.threads or sorted({torch.get_num_threads(), 1}, reverse=True)
    if options.child:
        torch.set_num_threads(threads[0])
        inductor.cpp.threads = threads[0]  # compiled code has the number in it, and is kept on disk
        for name in CONTRACTIONS:
            for row in rows_of(name, threads[0]):
                print(json.dumps(row), flush=True)
        print(json.dumps(small_calls()))
        print(json.dumps(beyond()))
        return
    console = plain_or_rich_console(110)
    head = header(CPU, measure.copy_bandwidth_gbps(CPU))
    console.print(", ".join(f"{key}: {value}" for key, value in head.items()))
    console.print(LINE.format(*TITLES))
    rows: list[Row] = []
    for count in threads:
        command = [sys.executable, __file__, "--child", "--threads", str(count)]
        *found, small, large = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        for line in found:
            rows.append(Row(**json.loads(line)))
            console.print(LINE.format(*cells(rows[-1])))
        head[f"small_calls_us_{count}_threads"] = json.loads(small)
        console.print(f"two operands of 8 x 8, in microseconds: {head[f'small_calls_us_{count}_threads']}")
        head[f"beyond_{count}_threads"] = json.loads(large)
        console.print(f"{BEYOND[0]} of {BEYOND[1]}: {head[f'beyond_{count}_threads']}")
        if options.json:
            write_json(options.json, head, rows)


def cells(row: Row) -> tuple[str, ...]:
    times = f"{row.time_ms:.2f}", f"{row.torch_ms:.2f}", f"{row.compiled_ms:.2f}", f"{row.ratio:.2f}"
    taken = format_bytes(row.temporary_bytes), format_bytes(row.torch_temporary_bytes)
    return row.contraction, row.pass_name, str(row.threads), *times, *taken


def operands_of(name: str, larger: Mapping[str, int] | None = None) -> tuple[str, list[Tensor]]:
    equation, sizes = CONTRACTIONS[name]
    sizes = {**sizes, **(larger or {})}
    generator = torch.Generator().manual_seed(0)
    terms = equation.split("->")[0].split(",")
    return equation, [torch.randn([sizes[letter] for letter in term], generator=generator) for term in terms]


def rows_of(name: str, threads: int) -> list[dict[str, Any]]:
    equation, operands = operands_of(name)
    forms: dict[str, Callable[..., Any]] = {
        "ours": lambda *operands: effops.einsum(equation, *operands),
        "torch": lambda *operands: torch.einsum(equation, *operands),
    }
    forms["compiled"] = torch.compile(forms["torch"])
    rows = []
    for pass_name in PASSES:
        bytes_of = {}
        if pass_name == "both":
            operands = [operand.requires_grad_() for operand in operands]
            for form in ("ours", "torch"):
                backward = measure.memory(measure.Pass(forms[form], tuple(operands), backward=True))
                bytes_of[form] = backward.temporary_bytes + backward.saved_bytes
            forms = {form: Training(function) for form, function in forms.items()}
        else:
            for form in ("ours", "torch"):
                bytes_of[form] = measure.memory(measure.Pass(forms[form], tuple(operands))).temporary_bytes
        passes = {form: measure.Pass(function, tuple(operands)) for form, function in forms.items()}
        timings = measure.times(passes, repeats=25, budget_s=1.5, warmup=2)
        found_ms = {form: timing.median_ms for form, timing in timings.items()}
        ratio = found_ms["ours"] / min(found_ms["torch"], found_ms["compiled"])
        times = found_ms["ours"], found_ms["torch"], found_ms["compiled"], ratio
        row = Row(name, equation, pass_name, threads, *times, bytes_of["ours"], bytes_of["torch"])
        rows.append(vars(row))
    return rows


def small_calls() -> dict[str, float]:
    """Microseconds of a call of two small operands."""
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    ours = measure.Pass(lambda *operands: [effops.einsum(SMALL, *operands) for _ in range(200)], (a, b))
    plain = measure.Pass(lambda *operands: [torch.einsum(SMALL, *operands) for _ in range(200)], (a, b))
    timings = measure.times({"effops": ours, "torch": plain}, repeats=50, budget_s=2, warmup=2)
    return {name: round(1000 * timing.median_ms / 200, 2) for name, timing in timings.items()}


def beyond() -> dict[str, float]:
    """Bytes and seconds of a contraction within the default budget, and the bytes that torch.einsum would take."""
    equation, operands = operands_of(*BEYOND)
    operands = [operand.requires_grad_() for operand in operands]
    found: dict[str, float] = {}
    for pass_name in ("forward", "backward"):
        is_backward = pass_name == "backward"
        one = measure.Pass(lambda *args: effops.einsum(equation, *args), tuple(operands), backward=is_backward)
        taken = measure.memory(one)
        run = one.prepare().run
        start = time.perf_counter()
        run()
        found[f"{pass_name}_s"] = round(time.perf_counter() - start, 2)
        found[f"{pass_name}_bytes"] = taken.temporary_bytes + taken.saved_bytes
    plain = effops.explain("einsum", equation, *operands).variants["einsum"]
    found["torch_forward_bytes_predicted"] = plain.temporary_bytes + plain.saved_bytes
    return found


if __name__ == "__main__":
    main()
