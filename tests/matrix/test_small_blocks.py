"""Chunked variants in blocks of 1 KiB, so that small operands have many, for operands that broadcast in many ways."""

import inspect
import random

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from effops.measure import Pass, memory
from effops.reference import error_ratio, gradient_error_ratio, reference_of, tried_ops

from ..support.blocks import small_blocks

CASES = [
    pytest.param(op, case, id=f"{op.name}-{case}") for op in tried_ops().values() for case in reference_of(op).cases
]
TRIALS = 6
MASKED = [op for op in tried_ops().values() if "attn_mask" in inspect.signature(op.function).parameters]


def shapes_of(op, case):
    """The shapes of a case. One that has several blocks of the usual size has several small ones at an eighth of it."""
    shapes = reference_of(op).cases[case]
    if case != "several blocks":
        return shapes
    return tuple(tuple(size if size < 64 else size // 8 + 1 for size in shape) for shape in shapes)


@pytest.mark.each_value(all=True)
@pytest.mark.slow
@pytest.mark.parametrize(("op", "case"), CASES)
@small_blocks()
def test_results_and_some_gradients(op, case, generator):
    choices = random.Random(case)
    for _ in range(TRIALS):
        sampled = reference_of(op).sample(*shapes_of(op, case), dtype=torch.float32, generator=generator)
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


@pytest.mark.parametrize("op", MASKED, ids=lambda op: op.name)
@pytest.mark.parametrize(("queries", "keys"), [(70, 150), (150, 70)])
@small_blocks()
def test_a_triangle_of_another_corner(op, queries, keys, generator):
    """Blocks beyond the diagonal are left out, those on it masked, and queries before the first key have none."""
    shapes = {"query": (queries, 4), "key": (keys, 4), "value": (keys, 3), "weight": (4,)}
    args = {
        name: torch.randn(shapes[name], generator=generator).requires_grad_() for name in op.core_dims if name in shapes
    }
    triangle = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    bias = causal_lower_right(queries, keys)
    cost = op.variants["chunked"].cost(op.prepare(**args, attn_mask=bias))
    used = memory(Pass(lambda *tensors: op.function(*tensors, attn_mask=bias, variant="chunked"), tuple(args.values())))
    assert 0 <= cost.temporary_bytes - used.temporary_bytes <= 64  # a prediction sees the masks of the first rows alone
    out, expected = (
        op.function(**args, attn_mask=mask, variant=variant)
        for mask, variant in ((bias, "chunked"), (triangle, "naive"))
    )
    torch.testing.assert_close(out, expected)
    dout = torch.where(expected.isfinite(), torch.randn(expected.shape, generator=generator), 0)
    for one, other in zip(*(torch.autograd.grad(result, args.values(), dout) for result in (out, expected))):
        torch.testing.assert_close(one, other)
