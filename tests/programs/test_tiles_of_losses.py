"""Where a cut ends in a number, as a loss does, forward computes its gradients, and backward scales them."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import effops
from effops.measure import Pass, memory

from .test_tiles_backward import Counting

aten = torch.ops.aten
BUDGET = 2**20


def head(hidden, weight, target):
    return functional.cross_entropy(hidden @ weight.mT, target, ignore_index=3)


def operands(generator, dtype=torch.float32):
    hidden, weight = (torch.randn(rows, 32, generator=generator, dtype=dtype) / 4 for rows in (1200, 700))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(700, (1200,), generator=generator)


def losses(hidden, weight, target):
    """Losses of several kinds, of which each ends in one number that has gradients."""
    scores = hidden @ weight.mT
    yield functional.cross_entropy(scores, target, weight[:, 0].detach().abs(), reduction="sum")
    yield functional.cross_entropy(scores, target, weight[:, 0].detach().abs())
    yield (functional.softplus(scores).sum() / 7).tanh()
    yield functional.mse_loss(scores, torch.zeros_like(scores)) + hidden.square().mean()
    yield scores.amax(1).sub(scores[:, 0]).square().sum(0, keepdim=True)


def is_differentiated(tiled, *args):
    return any(loop.differentiates for loop in tiled.planned(*args).program.loops)


def gradients(function, args, factor=1.0):
    leaves = [one for one in args if one.requires_grad]
    return torch.autograd.grad(function(*args).sum() * factor, leaves)


def taken_bytes(function, args):
    return memory(Pass(lambda *args: gradients(function, args), args), warmup=0).temporary_bytes


def check(found, expected, rtol=1e-4):
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=rtol, atol=rtol * other.abs().max().item())


@pytest.mark.parametrize("number", range(5))
def test_losses(number, generator):
    args = operands(generator)

    def loss(*args):
        return list(losses(*args))[number]

    tiled = effops.tiled(loss, budget=BUDGET)
    assert is_differentiated(tiled, *args)
    torch.testing.assert_close(tiled(*args), loss(*args))
    check(gradients(tiled, args, 3.0), gradients(loss, args, 3.0))
    assert taken_bytes(tiled, args) <= BUDGET
    with torch.no_grad():
        torch.testing.assert_close(tiled(*args), loss(*args))


def test_each_product_is_computed_once(generator):
    args = operands(generator)
    tiled = effops.tiled(head, budget=BUDGET)
    tiled(*args)  # compares tiles, too
    (loop,) = tiled.planned(*args).program.loops
    with Counting() as counting:
        loss = tiled(*args)
    products = counting.counts[aten.mm.default] + counting.counts[aten.addmm_.default]
    assert products == 3 * len([*loop.tiles(loop.length)])
    with Counting() as counting:
        loss.backward()
    assert not counting.counts[aten.mm.default] + counting.counts[aten.addmm_.default]


def test_a_second_backward_pass(generator):
    args = operands(generator)
    hidden, weight, _ = args
    loss = effops.tiled(head, budget=BUDGET)(*args)
    first = torch.autograd.grad(loss * 2, (hidden, weight), retain_graph=True)
    kept = [one.clone() for one in first]
    second = torch.autograd.grad(loss, (hidden, weight))
    for own, before, other in zip(first, kept, second, strict=True):
        assert torch.equal(own, before)
        torch.testing.assert_close(own, 2 * other)


def test_what_is_frozen_has_no_gradient(generator):
    hidden, weight, target = operands(generator)
    args = hidden, weight.detach(), target
    check(gradients(effops.tiled(head, budget=BUDGET), args), gradients(head, args))


def test_other_results_are_those_of_the_whole(generator):
    """The number of the first largest score, which the order of tiles must not change, and how many are right."""
    hidden, weight, target = operands(generator)

    def loss_and_matches(hidden, weight, target):
        scores = (hidden @ weight.mT).round()
        return (scores.sin() * weight[:, 0]).sum(), scores.argmax(0), (scores > 1).sum()

    tiled = effops.tiled(loss_and_matches, budget=BUDGET)
    assert is_differentiated(tiled, hidden, weight, target)
    (_, *found), (_, *expected) = (one(hidden, weight, target) for one in (tiled, loss_and_matches))
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)


def test_what_float16_cannot_hold_waits_for_the_factor(generator):
    """Gradients that are scaled up, as they are for float16, would be 0 where the factor comes too late."""
    hidden, weight, target = operands(generator, torch.float16)
    tiled = effops.tiled(head, budget=BUDGET)
    assert not is_differentiated(tiled, hidden, weight, target)
    check(gradients(tiled, (hidden, weight, target), 128.0), gradients(head, (hidden, weight, target), 128.0), 0.02)


def test_gradients_that_would_break_the_budget_wait(generator):
    """Those of four scaled weights would be kept from forward to backward."""
    args = operands(generator)

    def heads(hidden, weight, target):
        return sum(head(hidden, weight * factor, target) for factor in (0.5, 1, 2, 4))

    for budget, differentiates in ((1_200_000, False), (2**21, True)):
        tiled = effops.tiled(heads, budget=budget)
        check(gradients(tiled, args), gradients(heads, args))
        assert taken_bytes(tiled, args) <= budget
        assert is_differentiated(tiled, *args) == differentiates


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_of_a_checkpoint(reentrant, generator):
    args = operands(generator)
    checkpoint(effops.tiled(head, budget=BUDGET), *args, use_reentrant=reentrant).backward()
    check([one.grad for one in args[:2]], gradients(head, args))


def test_hooks_see_what_backward_keeps(generator):
    """Arguments alone, as without gradients forward: not what tiles save for theirs."""
    args = operands(generator)
    tiled = effops.tiled(head, budget=BUDGET)
    tiled(*args)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: seen.append(one.shape) or one, lambda one: one):
        tiled(*args).backward()
    assert {*seen} == {(), (32, 700), (1200,), (1200, 1), (1200, 32)}
    check([one.grad for one in args[:2]], gradients(head, args))


@pytest.mark.parametrize("factor", [1.0, torch.inf, torch.nan])
def test_what_no_gradient_reaches_stays_zero(factor, generator):
    """A mean of no losses has an infinite factor, and gradients of 0 are not to become NaN."""
    hidden, weight, target = operands(generator)
    tiled = effops.tiled(head, budget=BUDGET)
    for own, other in zip(
        gradients(tiled, (hidden, weight, torch.full_like(target, 3)), factor),
        gradients(head, (hidden, weight, torch.full_like(target, 3)), factor),
        strict=True,
    ):
        torch.testing.assert_close(own, other, equal_nan=True)

    def gaps(hidden, weight):
        return functional.relu(hidden[:, :1] - weight[:, 0]).mean()

    args = hidden, weight
    tiled = effops.tiled(gaps, budget=BUDGET)
    for own, other in zip(gradients(tiled, args, factor), gradients(gaps, args, factor), strict=True):
        torch.testing.assert_close(own, other, equal_nan=True)


def test_changes_in_place_are_seen(generator):
    args = operands(generator)
    for changed in args[:2]:
        loss = effops.tiled(head, budget=BUDGET)(*args)
        with torch.no_grad():
            changed.mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Stop(torch.autograd.Function):
    """Passes no gradient on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        return None


def test_no_gradient_of_the_loss(generator):
    hidden, weight, target = operands(generator)
    (Stop.apply(effops.tiled(head, budget=BUDGET)(hidden, weight, target)) + hidden.sum()).backward()
    assert weight.grad is None
    assert torch.equal(hidden.grad, torch.ones_like(hidden))


def symmetric(scores, index, **options):
    return (
        functional.cross_entropy(scores, index, **options) + functional.cross_entropy(scores.mT, index, **options)
    ) / 2


def with_ignored(a, b, factor, index):
    scores = a @ b.mT * factor.exp()
    rows, columns = (torch.where(index % step == 0, -100, index) for step in (7, 5))
    return functional.cross_entropy(scores, rows) + functional.cross_entropy(scores.mT, columns)


def sigmoid_loss(a, b, factor, index):
    signs = 2 * torch.eye(len(a)) - 1
    return -functional.logsigmoid(signs * (a @ b.mT * factor.exp() - 10)).sum() / len(a)


def cosines(a, b):
    return functional.normalize(a, dim=-1) @ functional.normalize(b, dim=-1).mT


SYMMETRIC = {
    "plain": lambda a, b, factor, index: symmetric(a @ b.mT / 0.3, index),
    "temperature": lambda a, b, factor, index: symmetric(a @ b.mT * factor.exp(), index),
    "normalised": lambda a, b, factor, index: symmetric(cosines(a, b) / 0.1, index),
    "gathered": lambda a, b, factor, index: symmetric(a @ torch.cat([b[:200], b[200:]]).mT, index),
    "smoothed": lambda a, b, factor, index: symmetric(a @ b.mT, index, label_smoothing=0.1),
    "weighted": lambda a, b, factor, index: symmetric(a @ b.mT, index, weight=a[:, 0].detach().abs()),
    "of each": lambda a, b, factor, index: symmetric(a @ b.mT, index, reduction="none"),
    "ignored": with_ignored,
    "diagonals": lambda a, b, factor, index: (
        -(functional.log_softmax(a @ b.mT, 0).diag() + functional.log_softmax(a @ b.mT, 1).diag()).mean()
    ),
    "both weights": lambda a, b, factor, index: torch.softmax(a @ b.mT, 0) * torch.softmax(a @ b.mT, 1),
    "probabilities": lambda a, b, factor, index: sum(
        functional.cross_entropy(scores, torch.eye(len(a))) for scores in (a @ b.mT, b @ a.mT)
    ),
    "sigmoid": sigmoid_loss,
}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_both_softmaxes_of_a_matrix(name, generator):
    """Each axis of the scores is the one that a softmax needs: the other's is taken apart, with what it picks."""
    a, b = (torch.randn(500, 16, generator=generator).requires_grad_() for _ in range(2))
    factor, index = torch.tensor(0.5, requires_grad=True), torch.randperm(500, generator=generator)
    args = a, b, factor, index
    tiled = effops.tiled(SYMMETRIC[name], budget="512 KiB")
    assert effops.explain(tiled, *args).loops
    expected = SYMMETRIC[name](*args)
    torch.testing.assert_close(tiled(*args), expected)
    leaves = [a, b]
    check(torch.autograd.grad(tiled(*args).sum(), leaves), torch.autograd.grad(expected.sum(), leaves))


def test_a_label_out_of_range_raises(generator):
    """A sum by a mask finds no element there, and would give 0."""
    a, b = (torch.randn(500, 16, generator=generator) for _ in range(2))
    for label in (-1, 500):
        index = torch.arange(500)
        index[7] = label
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            effops.tiled(SYMMETRIC["plain"], budget="512 KiB")(a, b, torch.tensor(0.5), index)
