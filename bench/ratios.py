"""Ratios within one run on a CPU that the tables of `run.py` do not show: the floor, training, and a call's overhead.

python bench/ratios.py
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Mapping

import torch

import effops
from effops.binding import BINDINGS
from effops.measure import Pass, memory, times
from effops.op import format_bytes
from effops.ops.power_spherical import naive, op

COMPARED = ("chunked", "einsum", "compile", "torchscript")


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    args = op.workload(**op.sizes, generator=generator)
    loc, _, x = args
    rows, columns = x.squeeze(1).transpose(0, 1), loc.transpose(0, 1)
    products = torch.rand(columns.shape[0], rows.shape[1], columns.shape[1]) + 0.1

    def floor(rows: torch.Tensor, columns: torch.Tensor) -> None:
        torch.bmm(rows, columns.mT)
        torch.log(products)

    def variant(name: str):
        return lambda *args: op(*args, variant=name)

    passes = {"one bmm and one log": Pass(floor, (rows, columns))}
    passes |= {name: Pass(variant(name), args) for name in COMPARED}
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True)
    passes["chunked, in a compiled function"] = Pass(compiled, args)
    report("forward, over chunked", times(passes, repeats=25, budget_s=30))

    leaves = tuple(arg.clone().requires_grad_() for arg in args)
    dout = torch.randn_like(op(*args))

    def train(name: str):
        return lambda *leaves: torch.autograd.grad(op(*leaves, variant=name), leaves, dout)

    report("forward + backward, over chunked", times({n: Pass(train(n), leaves) for n in COMPARED}, budget_s=30))
    used = memory(Pass(train("chunked"), leaves))
    print(f"\nforward + backward of chunked: gradients {format_bytes(used.output_bytes)}, ", end="")
    print(f"output and temporaries {format_bytes(used.temporary_bytes)}")
    report_overhead(*op.sample((3, 128), (3,), (3, 128), generator=generator))


def report(title: str, timings) -> None:
    print(f"\n{title}")
    for name, timing in timings.items():
        ratio = timing.median_ms / timings["chunked"].median_ms
        print(f"  {name:32} {timing.median_ms:8.1f} ms  {ratio:5.2f}")


def report_overhead(*args: torch.Tensor) -> None:
    call = op.prepare(*args)
    chosen = effops.explain(op.name, *args).chosen
    report_differences(
        "a call of 3 pairs, over the naive body",
        {
            "naive body": lambda: naive(call),
            f"variant={chosen!r}": lambda: op(*args, variant=chosen),
            "automatic": lambda: op(*args),
        },
    )
    binding = BINDINGS[f"{op.name}_{chosen}"]
    leaves = tuple(arg.clone().requires_grad_() for arg in args)
    plain, differentiated = (*call.tensors, call.dtype), (*leaves, call.dtype)
    dout = torch.ones(call.plan.shape)
    report_differences(
        f"the same without gradients, over the body of {chosen}",
        {
            "body": lambda: binding.forward(*plain),
            "with binding": lambda: binding(*plain),
            "with dispatch": lambda: op(*args),
        },
    )
    report_differences(
        "the same recorded for backward",
        {
            "body": lambda: binding.forward(*plain),
            "with binding": lambda: binding(*differentiated),
            "with dispatch": lambda: op(*leaves),
        },
    )
    out = op(*leaves)
    needs = (True,) * len(args)
    report_differences(
        "the backward pass alone",
        {
            "body": lambda: binding.backward(dout, *plain, needs),
            "with binding": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        },
    )


def report_differences(title: str, functions: Mapping[str, Callable[[], object]]) -> None:
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(31):
        for name, function in functions.items():
            samples[name].append(timeit.timeit(function, number=100) * 1e4)
    base = next(iter(samples.values()))
    print(f"\n{title}: the least of 31 rounds, and the median difference within a round")
    for name, values in samples.items():
        over = statistics.median(value - first for value, first in zip(values, base))
        print(f"  {name:20} {min(values):8.1f} us  {over:+8.1f} us")


if __name__ == "__main__":
    main()
