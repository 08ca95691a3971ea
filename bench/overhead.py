"""Ratios within one run on a CPU that the tables of `run.py` do not show: the floor, training, and a call's overhead.

python bench/ratios.py
"""

from __future__ import annotations

import os
import statistics
import timeit
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch

from effops.dispatch.choice import choose
from effops.dispatch.custom_op import CUSTOM_OPS
from effops.measure import Pass, memory, times, without_collector
from effops.numerics.precision import without_autocast
from effops.ops.densities.power_spherical import op
from effops.reference import reference_of
from effops.text import format_bytes

COMPARED = ("chunked", "einsum", "compile", "torchscript")


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = reference_of(op)
    args = reference.workload(**reference.sizes, generator=generator)
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
    report_overhead(*reference.sample((3, 128), (3,), (3, 128), generator=generator))


def report(title: str, timings) -> None:
    print(f"\n{title}")
    for name, timing in timings.items():
        ratio = timing.median_ms / timings["chunked"].median_ms
        print(f"  {name:32} {timing.median_ms:8.1f} ms  {ratio:5.2f}")


def report_overhead(*args: torch.Tensor) -> None:
    """What Python adds to a call of three pairs, on one thread.

    A part costs more in a call than in a loop of its own, as what computes the call turns out of the caches what the
    part needs: here every part is followed by the body.
    """
    torch.set_num_threads(1)
    call, naive = op.prepare(*args), op.variants["naive"]
    chosen = choose(op, call, None)
    report_differences(
        "a call of 3 pairs, over the naive body",
        {
            "naive body": lambda: naive.run(call),
            f"variant={chosen.name!r}": lambda: op(*args, variant=chosen.name),
            "automatic": lambda: op(*args),
        },
    )
    custom = CUSTOM_OPS[f"{op.name}_{chosen.name}"]

    def body() -> torch.Tensor:
        return custom.forward(call)

    def without_autocast_body() -> torch.Tensor:
        with without_autocast(call.device):
            return body()

    report_differences(
        f"the same without gradients, over the body of {chosen.name}",
        {
            "body": body,
            "validation, then body": lambda: (op.prepare(*args), body()),
            "choice, then body": lambda: (choose(op, call, None), body()),
            "body without autocast": without_autocast_body,
            "with operator": lambda: custom(call),
            "with dispatch": lambda: op(*args),
        },
    )
    leaves = tuple(arg.clone().requires_grad_() for arg in args)
    differentiated, wanted = op.prepare(*leaves), (True,) * len(args)

    class Least(torch.autograd.Function):
        """The least that a function with a backward pass of its own can do in Python."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
            ctx.save_for_backward(*arguments[:-1])
            return custom.forward(custom.split(arguments))

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor) -> Any:
            return *custom.compute_gradients(dout, (*ctx.saved_tensors, call.dtype), wanted), None

    report_differences(
        "the same recorded for backward",
        {
            "body": body,
            "in a bare Function": lambda: Least.apply(*differentiated.arguments),
            "with operator": lambda: custom(differentiated),
            "with dispatch": lambda: op(*leaves),
        },
    )
    out, least = op(*leaves), Least.apply(*differentiated.arguments)
    dout = torch.ones_like(out)
    report_differences(
        "the backward pass alone",
        {
            "body": lambda: custom.backward(dout, call, wanted),
            "in a bare Function": lambda: torch.autograd.grad(least, leaves, dout, retain_graph=True),
            "with operator": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        },
    )


def report_differences(title: str, functions: Mapping[str, Callable[[], object]]) -> None:
    samples: dict[str, list[float]] = {name: [] for name in functions}
    with without_collector():
        for _ in range(101):
            for name, function in functions.items():
                samples[name].append(timeit.timeit(function, number=20) * 1e6 / 20)
    base = next(iter(samples.values()))
    print(f"\n{title}: the least of {len(base)} rounds, and the median difference within a round")
    for name, values in samples.items():
        over = statistics.median(value - first for value, first in zip(values, base))
        print(f"  {name:22} {min(values):8.1f} us  {over:+8.1f} us")


if __name__ == "__main__":
    main()
