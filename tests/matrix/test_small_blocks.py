"""Chunked variants in blocks of 1 KiB, so that small operands have many, for operands that broadcast in many ways."""

import random

import pytest
import torch

from effops.dispatch.op import ops
from effops.reference import error_ratio, gradient_error_ratio, reference_of

from ..support.blocks import small_blocks

CASES = [pytest.param(op, case, id=f"{op.name}-{case}") for op in ops().values() for case in reference_of(op).cases]
TRIALS = 6


@pytest.mark.slow
@pytest.mark.parametrize(("op", "case"), CASES)
@small_blocks()
def test_results_and_some_gradients(op, case, generator):
    choices = random.Random(case)
    for _ in range(TRIALS):
        sampled = reference_of(op).sample_case(case, dtype=torch.float32, generator=generator)
        args = []
        for arg, core in zip(sampled, op.core_dims.values()):
            batch = range(arg.ndim - core)
            kept = tuple(slice(0, 1) if choices.random() < 0.3 else slice(None) for _ in batch)
            args.append(arg[kept].clone())
        call = op.prepare(*args)
        wanted = [arg.is_floating_point() and choices.random() < 0.7 for arg in args]
        leaves = [arg.clone().requires_grad_(wants) for arg, wants in zip(args, wanted)]
        out = op(*leaves, variant="chunked")
        assert error_ratio(op, args, out) <= 1, [arg.shape for arg in args]
        if any(wanted):
            dout = torch.randn(call.shape, generator=generator)
            found = iter(torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], dout))
            gradients = [next(found) if wants else None for wants in wanted]
            assert gradient_error_ratio(op, args, dout, gradients) <= 1, ([arg.shape for arg in args], wanted)
