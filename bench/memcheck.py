"""Runs the Triton kernels of every op on the op's small cases, forward and backward: the load for compute-sanitizer."""

from __future__ import annotations

import argparse
import sys

import torch

import effops  # noqa: F401  (registers the ops)
from effops.dispatch.op import ops
from effops.measure import tensors, upstream_gradient
from effops.reference import reference_of


def main() -> int:
    """Returns the exit code: 1 if there was nothing to run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", default="triton")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    calls = 0
    for op in ops().values():
        reference = reference_of(op)
        for name in reference.cases:
            generator = torch.Generator(options.device).manual_seed(0)
            args = reference.sample_case(name, device=torch.device(options.device), generator=generator)
            leaves = [tensor.requires_grad_() for tensor in tensors(args)]
            if op.variants[options.variant].obstacle(op.prepare(*args)):
                continue
            out = op(*args, variant=options.variant)
            torch.autograd.grad(out, leaves, upstream_gradient(out))
            calls += 1
            print(f"{op.name}: {name}")
    return int(calls == 0)


if __name__ == "__main__":
    sys.exit(main())
