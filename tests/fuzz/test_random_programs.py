"""Random functions in tiles: the results and gradients of the whole, within the budget, or refused by name."""

import warnings

import torch

import effops
from effops.measure import Pass, memory
from effops.programs.limits_of_memory import predict

from .random_programs import RandomProgram

PARTS, PROGRAMS = 20, 500  # of a part; the default and CI make the first ones
LEAST = 2**17  # bytes of a budget
SOME_BYTES = 1024  # numbers that PyTorch wraps in tensors


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", range(PARTS if metafunc.config.option.exhaustive else 1))


def test_random_programs(part, request):
    option = request.config.option
    count = PROGRAMS if option.exhaustive else 60 if option.ci else 8
    outcomes = [hold(number) for number in range(part * PROGRAMS, part * PROGRAMS + count)]
    large = [one for one in outcomes if one != "small"]
    print({one: outcomes.count(one) for one in set(outcomes)})
    assert large.count("cut") >= 0.6 * len(large), outcomes


def hold(number):
    """Whether a program was "small", "cut" or "refused"."""
    program = RandomProgram(number)
    args, leaves = program.args, [one for one in program.args if one.requires_grad]

    def with_backward(function):
        def both(*args):
            out = function(*args)
            return out, torch.autograd.grad(out.sum(), leaves, allow_unused=True) if out.requires_grad else ()

        return both

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken = predict(with_backward(program), *args).peak_bytes
        if taken < 4 * LEAST:
            return "small"
        budget = max(LEAST, taken // 4)
        tiled = effops.tiled(lambda *args: program(*args), budget=budget)
        try:
            found = with_backward(tiled)(*args)
        except effops.CannotTile:
            return "refused"
        expected = with_backward(program)(*args)
        assert found[0].stride() == expected[0].stride()
        about = f"{number}: {program.steps} of {[tuple(one.shape) for one in args]}, budget {budget}"
        close([found[0], *found[1]], [expected[0], *expected[1]], about)
        assert memory(Pass(with_backward(tiled), args)).temporary_bytes <= budget + SOME_BYTES, about
    return "cut"


def close(found, expected, about):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None), about
        if other is not None:
            assert (one.shape, one.dtype) == (other.shape, other.dtype), about
            size = other.abs().max().item() if other.numel() else 1.0
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5 * max(size, 1e-3), msg=about)
