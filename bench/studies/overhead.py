"""What Python adds to a call of three pairs on a CPU, part by part.

python bench/studies/overhead.py
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Mapping
from typing import Any

import torch

from effops.dispatch.choice import choose
from effops.dispatch.custom_op import CUSTOM_OPS
from effops.measure import without_collector
from effops.numerics.precision import without_autocast
from effops.ops.densities.power_spherical import op
from effops.reference import reference_of


def main() -> None:
    """Time the parts of a call, on one thread.

    A part costs more in a call than in a loop of its own, as what computes the call turns out of the caches what the
    part needs: here every part is followed by the body.
    """
    torch.set_num_threads(1)
    args = reference_of(op).sample((3, 128), (3,), (3, 128), generator=torch.Generator().manual_seed(0))
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
