"""Random functions in tiles: the results and gradients of the whole, within the budget, or refused by name.

    python -m tests.fuzz.programs_in_tiles 0 500    # programs 0 to 499; each tenth is captured too, as users' are

A program whose own results change as much if its arguments, or the sums and products in it, are moved by roundings, as
where two largest are almost equal, or are as far from those in float64, as where a sum cancels, or which overflow, is
"unstable": it is run, and not compared.
"""

import collections
import logging
import sys
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import effops
from effops.measure import Pass, memory
from effops.numerics.precision import in_float64
from effops.programs.limits_of_memory import predict
from effops.programs.rules.product import contracted

from ..programs.forced_tiles import graph_of
from .random_programs import RandomProgram

aten = torch.ops.aten
LEAST = 2**17  # bytes of a budget
SOME_BYTES = 1024  # numbers that PyTorch wraps in tensors
SMALL, CUT, REFUSED, UNSTABLE = "small", "cut", "refused", "unstable"
ROUNDINGS = 4  # ways to move arguments and sums by some
SUMS = {
    *(aten.sum, aten.mean, aten.var, aten.linalg_vector_norm, aten.logsumexp, aten._softmax, aten._log_softmax),
    *(aten.prod, aten.cumsum, aten.cumprod, aten.mm, aten.bmm),
}
CAPTURED = 10  # of so many programs one


def hold(number):
    """Whether a program is small, cut, refused or unstable, and why it is refused."""
    program = RandomProgram(number)
    args, leaves = program.args, [one for one in program.args if one.requires_grad]

    def with_backward(function, leaves=leaves):
        def both(*args):
            out = function(*args)
            return out, torch.autograd.grad(out.sum(), leaves, allow_unused=True) if out.requires_grad else ()

        return both

    taken = predict(with_backward(program), *args).peak_bytes
    if taken < 4 * LEAST:
        return SMALL, ""
    budget = max(LEAST, taken // 4)
    about = f"{number}: {program.steps} of {[tuple(one.shape) for one in args]}, budget {budget}"
    try:
        tiled = in_tiles(program, args, budget, is_captured=number % CAPTURED == 0)
        found = with_backward(tiled)(*args)
    except effops.CannotTile as error:
        return REFUSED, f"{error.operator or error.reason}"
    assert memory(Pass(with_backward(tiled), args), warmup=0).temporary_bytes <= budget + SOME_BYTES, about
    expected = with_backward(program)(*args)
    assert strides(found[0]) == strides(expected[0]), about
    try:
        close([found[0], *found[1]], [expected[0], *expected[1]], about)
    except AssertionError:
        wide = [in_float64(one) for one in args]
        exact = with_backward(program, [one for one in wide if one.requires_grad])(*wide)
        in_order = [found[0], *found[1]], [expected[0], *expected[1]], [exact[0], *exact[1]]
        if all(map(is_as_exact, *in_order)) or any(map(overflows, in_order[2])):
            return UNSTABLE, about
        for seed in range(ROUNDINGS):
            near = [moved_by_roundings(one, seed) for one in args]
            with SumsMoved(seed):
                others = with_backward(program, [one for one in near if one.requires_grad])(*near)
            try:
                close([others[0], *others[1]], in_order[1], about)
            except AssertionError:
                return UNSTABLE, about
        raise
    return CUT, ""


def is_as_exact(found, expected, exact):
    """Whether an error is one of roundings: at most four times that of the program as it is."""
    if exact is None:
        return True
    of_tiles, of_whole = ((one.detach().double() - exact.detach()).abs().max() for one in (found, expected))
    return bool(of_tiles <= 4 * of_whole)


def in_tiles(program, args, budget, *, is_captured):
    """The program in tiles, which is not captured by Dynamo unless it is asked for, since that takes a second."""

    def function(*args):
        return program(*args)

    tiled = effops.tiled(function, budget=budget)
    if is_captured:
        torch._dynamo.reset()
        return tiled
    planned, _ = tiled._planned(graph_of(function, args), args)
    assert planned is not None
    assert planned.loops or any(one.target is contracted for one in planned.steps if isinstance(one, torch.fx.Node))
    return planned


def overflows(tensor):
    return tensor is not None and bool((tensor.abs() > torch.finfo(torch.float32).max).any())


def strides(tensor):
    """Those of axes that have more than one index: others may have any."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]


def moved_by_roundings(tensor, seed):
    generator = torch.Generator().manual_seed(seed)
    return moved(tensor.detach(), generator).requires_grad_(tensor.requires_grad)


def moved(tensor, generator):
    noise = torch.rand(tensor.shape, generator=generator) * 2 - 1
    return tensor * (1 + 4 * torch.finfo(tensor.dtype).eps * noise)


class SumsMoved(TorchDispatchMode):
    """Sums and products of matrices are moved by roundings, as another order of their terms moves them."""

    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket not in SUMS or not isinstance(found, torch.Tensor) or not found.is_floating_point():
            return found
        # Terms cancel: a sum, or a variance, that should be 0 is as far from it as its terms have roundings.
        terms = args[0].detach().abs().amax() ** (2 if func.overloadpacket is aten.var else 1)
        return found + terms * (moved(torch.ones_like(found), self.generator) - 1)


def close(found, expected, about):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None), about
        if other is not None:
            assert (one.shape, one.dtype) == (other.shape, other.dtype), about
            size = other.nan_to_num(0, 0, 0).abs().max().item() if other.numel() else 1.0
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5 * max(size, 1e-3), equal_nan=True, msg=about)


def main():
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    first, count = map(int, sys.argv[1:])
    outcomes, reasons, wrong = collections.Counter(), collections.Counter(), 0
    for number in range(first, first + count):
        try:
            outcome, why = hold(number)
        except Exception as error:
            outcome, why = "WRONG", f"{type(error).__name__} {error}"
            wrong += 1
        outcomes[outcome] += 1
        if outcome == REFUSED:
            reasons[why] += 1
        elif why:
            print(f"{number} {outcome}: {why}", flush=True)
        if (number + 1 - first) % 50 == 0:
            print(f"{number + 1 - first}/{count}: {dict(outcomes)}", flush=True)
    for why, times in reasons.most_common():
        print(f"{times:5} refused: {why}")
    large = sum(outcomes.values()) - outcomes[SMALL]
    print(f"{dict(outcomes)}; {outcomes[CUT] / max(1, large):.1%} of the large ones cut, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
