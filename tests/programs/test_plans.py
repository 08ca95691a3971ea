"""How the tiles of a call are planned: steps that are not computed again, copies that are cut, and refusals."""

import copy
import pickle
import re

import pytest
import torch
from torch.nn import functional

import effops
from effops.measure import Pass, memory
from effops.programs.tiles import function as planning
from effops.text import parse_bytes


def chain(scores, transitions):
    found = scores[0]
    for own in scores[1:]:
        found = torch.logsumexp(found[:, :, None] + transitions + own[:, None], dim=1)
    return found.sum()


def scores_and_transitions(generator):
    scores = torch.randn(24, 8, 48, generator=generator).requires_grad_(True)
    return scores, torch.randn(48, 48, generator=generator).requires_grad_(True)


def test_steps_that_fit_are_not_computed_again(generator):
    """Each step is a cut of its own. Backward computes again only those that the budget leaves no room for."""
    args = scores_and_transitions(generator)

    def both(function):
        return lambda *args: torch.autograd.grad(function(*args), args)

    expected, loops = both(chain)(*args), []
    for budget in (2**19, 2**20, 2**20 * 3 // 2):
        tiled = effops.tiled(chain, budget=budget)
        for own, other in zip(both(tiled)(*args), expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
        report = effops.explain(tiled, *args)
        taken = memory(Pass(both(tiled), args), warmup=0).temporary_bytes
        assert taken <= budget
        assert taken > 0.8 * budget
        loops.append(len(report.loops))
    assert 0 < loops[2] < loops[1] < loops[0] < 23
    assert str(report).count(__file__) == 1  # loops that are alike take one line


def test_copies_are_cut_one_after_another(generator):
    x = torch.randn(100, 80, generator=generator).requires_grad_(True)

    def function(x):
        return (x.repeat(100, 1).view(100, 100, 80) - x[:, None]).square().mean((0, 2))

    tiled = effops.tiled(function, budget=2**19)
    (loop,) = effops.explain(tiled, x).loops
    assert (loop.length, loop.combined) == (100, ("sum",))  # copies: the axis behind has 80 elements
    torch.testing.assert_close(tiled(x), function(x))
    (own,), (other,) = (torch.autograd.grad((one(x) * x[:, 0].detach()).sum(), x) for one in (tiled, function))
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_a_refusal_is_planned_once(monkeypatch, generator):
    x = torch.randn(700, 700, generator=generator)
    planned = []
    program_of = planning.program_of
    monkeypatch.setattr(
        planning, "program_of", lambda *args, **kwargs: planned.append(0) or program_of(*args, **kwargs)
    )
    tiled = effops.tiled(lambda x: torch.linalg.inv(x).sin().sum(), budget="100 KiB")
    messages = set()
    for _ in range(3):
        with pytest.raises(effops.CannotTile, match="linalg_inv") as refusal:
            tiled(x)
        messages.add(str(refusal.value))
    assert (len(planned), len(messages)) == (1, 1)
    for other in (pickle.loads(pickle.dumps(refusal.value)), copy.copy(refusal.value)):
        assert str(other) == str(refusal.value)
        names = "reason", "operator", "shapes", "line", "library_line", "remedy"
        assert [getattr(other, name) for name in names] == [getattr(refusal.value, name) for name in names]


def bells(x, y):
    return (x[:, None] - y).square().sum(-1).neg().exp().sum(0)


def log_sums(x, y):
    pairs = (x[:, None] * y).sum(-1).tanh()
    return torch.cat([torch.logsumexp(pairs, 0), torch.logsumexp(pairs, 1), pairs.amax(1)])


def weighted(x, y):
    return torch.softmax(x @ y.mT, 0) @ y


@pytest.mark.parametrize("function", [bells, log_sums, weighted])
def test_tiles_whose_graphs_fit_are_kept(function, generator):
    """Backward computes again only those tiles for whose graphs the budget has no room."""
    x, y = (torch.randn(rows, 6, generator=generator).requires_grad_() for rows in (600, 500))
    upstream = torch.randn(function(x, y).shape, generator=generator)

    def both(one):
        return lambda x, y: torch.autograd.grad(one(x, y), (x, y), upstream)

    shares = []
    for budget in (2**18, 2**20, 2**21):
        tiled = effops.tiled(function, budget=budget)
        for _ in range(2):  # the first call compares tiles, too
            for own, other in zip(both(tiled)(x, y), both(function)(x, y), strict=True):
                torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
        assert memory(Pass(both(tiled), (x, y)), warmup=0).temporary_bytes <= budget
        loops = tiled.planned(x, y).program.loops
        shares.append(
            sum(loop.kept_tiles for loop in loops) / sum(len([*loop.tiles(loop.backward_length)]) for loop in loops)
        )
    assert 0 <= shares[0] < shares[1] < shares[2] <= 1


def test_kept_tiles_are_computed_again_for_a_second_backward_pass(generator):
    x, y = (torch.randn(rows, 6, generator=generator).requires_grad_() for rows in (600, 500))
    tiled = effops.tiled(bells, budget=2**20)
    assert any(loop.kept_tiles for loop in tiled.planned(x, y).program.loops)
    result = tiled(x, y).sum()
    first = torch.autograd.grad(result, (x, y), retain_graph=True)
    for own, other in zip(first, torch.autograd.grad(result, (x, y)), strict=True):
        torch.testing.assert_close(own, other)
    with torch.no_grad():
        torch.testing.assert_close(tiled(x, y), bells(x, y))


def squares_so_far(x):
    """Short tiles leave more to the tiles behind them than longer ones take."""
    return (x[:, :, None] * x[:, None]).cumsum(0).square().sum((1, 2))


def nearest_three(x):
    return torch.cdist(x, x[:500]).sort(dim=1)[0][:, :3]


@pytest.mark.parametrize("function", [squares_so_far, nearest_three])
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_budget_that_is_named_suffices(function, is_trained, generator):
    x = torch.randn(3000 if function is squares_so_far else 600, 40, generator=generator).requires_grad_(is_trained)

    def both(function):
        def run(x):
            out = function(x)
            return out, *(torch.autograd.grad(out.sum(), x) if is_trained else ())

        return run

    for budget in ("256 KiB", "512 KiB", "1 MiB"):
        refusal = effops.explain(effops.tiled(function, budget=budget), x)
        if isinstance(refusal, effops.CannotTile):
            (named,) = re.findall(r"give at least ([\d.]+ \w+)", str(refusal))
            tiled = effops.tiled(function, budget=named)
            for own, other in zip(both(tiled)(x), both(function)(x), strict=True):
                assert (own - other).abs().max() <= 1e-4 * other.abs().max()
            taken = memory(Pass(both(tiled), (x,)), warmup=0).temporary_bytes
            assert taken <= parse_bytes(named, "") + 4 * x.shape[0] * is_trained < 2**22  # and the sum's gradient


def binary_loss(a, b):
    scores = a @ b.T
    targets = (scores > 0).float()
    return functional.binary_cross_entropy_with_logits(scores, targets, pos_weight=torch.tensor(2.0))


def masked_attention(query, key):
    mask = torch.arange(400) % 3 != torch.arange(400).unsqueeze(1) % 2
    return functional.scaled_dot_product_attention(query, key, key, attn_mask=mask).square()


@pytest.mark.parametrize(
    ("function", "shapes", "budget"),
    [(binary_loss, [(700, 8), (600, 8)], "512 KiB"), (masked_attention, [(2, 4, 400, 16)] * 2, "1 MiB")],
)
def test_what_pytorch_takes_apart_is_cut(function, shapes, budget, generator):
    """PyTorch has each as one operator, which has no rule; that of attention has a tag of random operators too."""
    args = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    tiled = effops.tiled(function, budget=budget)
    found, expected = tiled(*args), function(*args)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(out.sum(), args) for out in (found, expected))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    assert effops.explain(tiled, *args).loops
