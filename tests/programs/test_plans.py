"""How the tiles of a call are planned: steps that are not computed again, copies that are cut, and refusals."""

import copy
import pickle

import pytest
import torch

import effops
from effops.measure import Pass, memory
from effops.programs.tiles import function as planning


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
