"""Calls of the Triton kernels, forward and backward, at the shapes that a stage of on_device.sh needs.

python bench/device/kernel_calls.py risky [--json FILE]        the load for compute-sanitizer
python bench/device/kernel_calls.py profiled [--json FILE]     the load for ncu: each kernel once
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from parts.arguments import file_to_write

import effops  # noqa: F401  (registers the ops)
from effops.commands.main import Parser
from effops.measure import upstream_gradient
from effops.reference import reference_of, tried_ops


@dataclass(frozen=True)
class KernelCall:
    """An op at sizes of its workload. The sizes that are not named are the benchmark's."""

    op: str
    dtype: torch.dtype
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{self.op}, {str(self.dtype).removeprefix('torch.')}, {sizes}"


FOUNDING, MIXTURE, ATTENTION = "power_spherical_log_prob", "power_spherical_mixture_log_prob", "attention"
SMALL = {"M": 37, "T": 3}
SETS: Mapping[str, Sequence[KernelCall]] = {
    # Rows that end within a vector of 16 bytes, in dtypes of 2 bytes: the last load or store may pass the end.
    "risky": [
        *(
            KernelCall(FOUNDING, dtype, {**SMALL, "D": D})
            for dtype in (torch.bfloat16, torch.float16)
            for D in (33, 129, 153)
        ),
        KernelCall(ATTENTION, torch.bfloat16, {"B": 1, "H": 2, "L": 65, "D": 33}),
    ],
    "founding": [KernelCall(FOUNDING, dtype, {}) for dtype in (torch.float32, torch.bfloat16)],
    "profiled": [KernelCall(op, torch.float32, {}) for op in (FOUNDING, MIXTURE)],
}


def run(calls: Sequence[KernelCall], device: torch.device) -> Iterator[KernelCall]:
    """Yield each call when its result and its gradients have been computed."""
    for call in calls:
        op = tried_ops()[call.op]
        reference = reference_of(op)
        generator = torch.Generator(device).manual_seed(0)
        args = reference.workload(
            **{**reference.sizes, **call.sizes}, dtype=call.dtype, device=device, generator=generator
        )
        leaves = [arg.detach().requires_grad_() for arg in args]
        out = op(*leaves, variant="triton")
        torch.autograd.grad(out, leaves, upstream_gradient(out))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield call


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write what has run there, after each call")
    options = parser.parse_args()
    done: list[str] = []
    for call in run(SETS[options.set], torch.device("cuda")):
        done.append(str(call))
        print(call, flush=True)
        if options.json:
            options.json.write_text(json.dumps({"calls": done}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
