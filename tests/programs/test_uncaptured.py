"""Why a function cannot be captured is told in words for those who wrote it."""

import logging
import warnings

import pytest
import torch

import effops

LOGGER = logging.getLogger("toy")


def pairs(a, b):
    return (a[:, None] - b).square().sum(-1)


def printing(a, b):
    print("hello")
    return pairs(a, b).sum(1)


def logging_it(a, b):
    LOGGER.warning("hello")
    return pairs(a, b).sum(1)


def warning(a, b):
    warnings.warn("careful", stacklevel=1)
    return pairs(a, b).sum(1)


def opening(a, b):
    open("no such file")  # noqa: SIM115
    return pairs(a, b).sum(1)


def branching(a, b):
    d = pairs(a, b)
    if d.max() > 3:
        return d.sum(1)
    return d.sum(1) * 2


def looping(a, b):
    d = pairs(a, b)
    while d.max() > 3:
        d = d / 2
    return d.sum(1)


def listing(a, b):
    return pairs(a, b).sum(1) * len(a.tolist())


def yielding(a, b):
    yield pairs(a, b)


def of_other_widths(a, b):
    return pairs(a, b[:, :3]).sum(1)


def of_other_matrices(a, b):
    return pairs(a, b) @ a[:5]


def without_name(a, b):
    return pairs(a, b).sum(1) + undefined_name  # noqa: F821


def without_method(a, b):
    return pairs(a, b).summ(1)


def refusing(a, b):
    if len(a) > 5:
        raise ValueError("too many rows")
    return pairs(a, b)


CASES = {
    printing: ("it calls `print`", "outside of the function"),
    logging_it: ("it calls `warning`", "outside of the function"),
    warning: ("it calls `warnings.warn`", "outside of the function"),
    opening: ("it calls `open`", "outside of the function"),
    branching: ("a branch must not depend on values of tensors", "torch.where"),
    looping: ("a branch must not depend on values of tensors", "torch.where"),
    listing: ("must not become a list", "outside of the function"),
    yielding: ("got a generator", "in a list"),
    of_other_widths: ("tiled: RuntimeError: ", "the function itself raises that"),
    of_other_matrices: ("tiled: RuntimeError: ", "the function itself raises that"),
    without_name: ("tiled: NameError: name 'undefined_name' is not defined", "the function itself raises that"),
    without_method: ("tiled: AttributeError: 'Tensor' object has no attribute 'summ'", "the function itself raises"),
    refusing: ("tiled: ValueError: too many rows", "the function itself raises that"),
}


@pytest.mark.parametrize("function", CASES, ids=lambda one: one.__name__)
def test_why_not(function):
    reason, remedy = CASES[function]
    a, b = torch.randn(70, 8), torch.randn(60, 8)
    with pytest.raises(effops.CannotTile) as raised:
        effops.tiled(function, budget="2 KiB")(a, b)
    message = str(raised.value)
    assert message.startswith("tiled: ")
    assert reason in message
    assert remedy in raised.value.remedy
    assert not any(word in message for word in ("Dynamo", "trace", "FakeTensor", "s77", "builtin"))
    if function is not yielding:
        assert __file__ in raised.value.line


@pytest.mark.parametrize("function", [of_other_widths, of_other_matrices])
def test_sizes_of_the_call_are_told(function):
    """PyTorch's front end names sizes that it does not know."""
    refusal = effops.explain(effops.tiled(function, budget="2 KiB"), torch.randn(70, 8), torch.randn(60, 8))
    numbers = ("70", "8") if function is of_other_widths else ("[70, 60]", "[5, 8]")
    assert all(one in refusal.reason for one in numbers)


@pytest.mark.parametrize("budget", [1, 16, 64.0, 512])
def test_a_small_budget_without_unit(budget):
    with pytest.raises(ValueError, match=rf'expected a unit .* got {budget}, .* write "{budget} MiB"'):
        effops.tiled(pairs, budget=budget)
    effops.tiled(pairs, budget=f"{budget} B")  # somebody who writes that means it


def test_calls_that_are_not_understood():
    with pytest.raises(TypeError, match=r"^compare: `fn`: it takes a, b; got no `a` and no `b`; .* behind them$"):
        effops.compare(pairs, effops.tiled(pairs))
    with pytest.raises(TypeError, match=r"^record: it takes no arguments; got 1 argument; write `with effops.record"):
        effops.record(pairs)
