"""Random equations of `effops.einsum`: right, in the bytes that are predicted, and never above the budget."""

import functools
import random
from dataclasses import replace

import pytest
import torch

import effops
from effops.dispatch.op import find_op
from effops.measure import Pass, memory
from effops.ops.einsum.paths import Operand, find
from effops.reference.einsum import bounds, gradient_bounds
from effops.reference.reference import worst_error_ratio

from .equations import laid_out, random_contraction

OP = find_op("einsum")
SLICES = 20
CALLS = 50  # of a slice; the default makes the first ones
NUMBERS_BYTES = 64  # of numbers that PyTorch wraps in tensors


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", range(SLICES if metafunc.config.option.exhaustive else 1))


def test_random_equations(part, request):
    option = request.config.option
    count = CALLS if option.ci or option.exhaustive else 10
    for number in range(part * CALLS, part * CALLS + count):
        hold(number)


def hold(number):
    drawn = random_contraction(number)
    name = f"{number}: {drawn.equation} of {[tuple(one.shape) for one in drawn.operands]}"
    leaves = [one.detach().requires_grad_() for one in drawn.operands]
    budget = 2**26
    call = OP.prepare(drawn.equation, *leaves, budget=budget)
    dout = laid_out(list(call.shape), call.dtype, random.Random(number))
    forward = call.described()
    backward, ordinary = (
        replace(forward, upstream=Operand.of(one), wanted=(True,) * len(leaves))
        for one in (dout, torch.empty(dout.shape, dtype=dout.dtype))
    )
    passes = forward, backward, ordinary
    uncut = [one.taken_bytes(find(one, budget)) for one in passes]
    if drawn.share is not None:
        budget = int(drawn.share * max(uncut))
        if find(forward, budget) is None or find(ordinary, budget) is None:
            with pytest.raises(ValueError, match=r"einsum: `budget` must let a \w+ pass run in at most 10,000 slices"):
                effops.einsum(drawn.equation, *leaves, budget=budget)
            return
        if find(backward, budget) is None:
            return
    run = functools.partial(effops.einsum, drawn.equation, budget=budget)
    before = [one.clone() for one in leaves]
    out = run(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    assert bounds(call).error_ratio(out) <= 1, name
    assert worst_error_ratio(gradient_bounds(call, dout), gradients) <= 1, name
    assert all(map(torch.equal, before, leaves)), name
    keeps_intermediates = OP.prepare(drawn.equation, *leaves, budget=budget).keeps_intermediates
    if not keeps_intermediates:  # else they are autograd's
        assert [one.stride() for one in gradients] == [torch.empty_like(one).stride() for one in leaves], name

    with torch.no_grad():
        found = memory(Pass(run, leaves))
        report = effops.explain("einsum", drawn.equation, *leaves, budget=budget).variants["chunked"]
    assert abs(found.temporary_bytes - report.temporary_bytes) <= NUMBERS_BYTES, (name, budget, found, report)
    assert found.temporary_bytes <= budget + NUMBERS_BYTES, (name, budget, found)
    if keeps_intermediates:
        found = memory(Pass(lambda *leaves: (out := run(*leaves), *torch.autograd.grad(out, leaves, dout)), leaves))
        assert found.temporary_bytes <= budget + NUMBERS_BYTES, (name, budget, found)
        return
    out = run(*leaves)

    def pulled_back(*leaves):
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    found = memory(Pass(pulled_back, leaves))
    predicted = backward.taken_bytes(find(backward, budget))
    # What is measured is the peak less the results, which may be there later than the most of all else.
    assert found.temporary_bytes <= predicted + NUMBERS_BYTES, (name, budget, found, predicted)
    assert found.temporary_bytes <= budget + NUMBERS_BYTES, (name, budget, found)
