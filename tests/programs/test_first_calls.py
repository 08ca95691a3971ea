"""The first call of a function in tiles compares parts of its loops with the whole: within the budget, and little."""

import pytest
import torch
from torch.nn import functional

import effops
from effops.programs.rules import scan, table
from effops.programs.rules.binding import all_but
from effops.programs.tiles.checks import LARGEST, Check

from .test_tiles_backward import Counting
from .test_tiles_of_losses import taken_bytes

KIB, MIB = 2**10, 2**20


def along_flow(keys, queries, goal):
    """Each tile of one batch is cut along queries, since a softmax needs all keys."""
    return goal @ torch.softmax(keys.mT @ queries, 1)


def entropy(x, codes):
    weights = torch.softmax(200 * (x @ codes.mT), -1)
    mean = weights.flatten(0, -2).mean(0)
    own = -(weights * weights.clamp_min(1e-5).log()).sum(-1).mean()
    return own + (mean * mean.clamp_min(1e-5).log()).sum()


def nearest(x, y):
    return (x[:, None] - y).square().sum(-1).topk(3, 1, largest=False).values.mean()


def contrasted(x, y):
    scores = functional.cosine_similarity(x[:, None], y, dim=-1) * 10
    return functional.cross_entropy(scores, torch.arange(len(x)))


def running(x, y):
    return torch.cumsum(x[:, None] * y, 0).amax((1, 2))


def squares(x, weight):
    return functional.gelu(x @ weight).square().sum()


PROGRAMS = {
    "flow": (along_flow, ((2, 64, 384), (2, 64, 384), (2, 384)), 512 * KIB),
    "entropy": (entropy, ((600, 10), (1024, 10)), MIB),
    "entropy of groups": (entropy, ((4, 150, 10), (1024, 10)), 512 * KIB),
    "nearest": (nearest, ((500, 4), (2000, 4)), MIB),
    "contrasted": (contrasted, ((300, 32), (300, 32)), MIB),
    "running": (running, ((280, 6), (210, 6)), 512 * KIB),
    "squares": (squares, ((2000, 64), (64, 400)), MIB),
}


@pytest.fixture(params=PROGRAMS)
def program(request, generator):
    function, shapes, budget = PROGRAMS[request.param]
    return function, [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes], budget


def test_what_is_accepted_runs_within_the_budget(program, monkeypatch):
    """A single index of a loop may take more than a call should spend: less is compared."""
    function, args, budget = program
    parts, true = [], Check.__call__
    monkeypatch.setattr(Check, "__call__", lambda own, tensors: parts.append(own.part) or true(own, tensors))
    tiled = effops.tiled(function, budget=budget)
    report = effops.explain(tiled, *args)
    assert report.loops
    assert report.taken_bytes <= report.first_call_bytes <= budget
    assert taken_bytes(tiled, args) <= report.first_call_bytes + 16  # a sum of the results, by a factor
    assert parts
    assert all(part.bytes_of(3) <= min(LARGEST, budget / 2) for part in parts)
    found, expected = tiled(*args), function(*args)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["flow", "squares"])
def test_without_verify_nothing_is_compared(name, monkeypatch, generator):
    monkeypatch.setattr(Check, "__call__", lambda *_: pytest.fail("a loop was compared"))
    function, shapes, budget = PROGRAMS[name]
    args = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    tiled = effops.tiled(function, budget=budget, verify=False)
    report = effops.explain(tiled, *args)
    assert report.first_call_bytes == report.taken_bytes
    tiled(*args)


def test_a_loop_within_a_tile_is_compared(monkeypatch, generator):
    """A cumulative sum that claims to treat each index alone, in a tile of one batch."""
    monkeypatch.setitem(scan.RULES, torch.ops.aten.cumsum.default, None)
    monkeypatch.setitem(table.RULES, torch.ops.aten.cumsum.default, lambda node: all_but(node, ()))

    def of_batches(keys, queries, goal):
        return goal @ torch.softmax(keys.mT @ queries, 1).cumsum(2)

    shapes = (2, 64, 384), (2, 64, 384), (2, 384)
    args = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    tiled = effops.tiled(of_batches, budget="512 KiB")
    assert [loop.length for loop in effops.explain(tiled, *args).loops] == [2]
    with pytest.raises(effops.TilesDiffer, match="please report"):
        tiled(*args)


def test_what_has_no_room_is_told(generator):
    """Batches and rows are merged, so that a part of the batches has all rows."""
    keys, queries = (torch.randn(2, 64, 384, generator=generator, requires_grad=True) for _ in range(2))
    goal = torch.randn(2, 384, generator=generator, requires_grad=True)
    report = effops.explain(effops.tiled(along_flow, budget="512 KiB"), keys, queries, goal)
    assert report.unchecked == 1
    assert "; it has no room to check 1 loop" in str(report)
    x, weight = torch.randn(2000, 64, generator=generator), torch.randn(64, 400, generator=generator)
    report = effops.explain(effops.tiled(squares, budget="512 KiB"), x, weight)
    assert report.unchecked == 0
    assert f"; the first call takes {report.first_call_bytes / KIB:.1f} KiB, with its check" in str(report)


def test_the_second_call_compares_nothing(generator):
    x, weight = torch.randn(2000, 64, generator=generator), torch.randn(64, 400, generator=generator)
    tiled = effops.tiled(squares, budget=MIB)
    counts = []
    for _ in range(3):
        with Counting() as counting:
            tiled(x, weight)
        counts.append(sum(counting.counts.values()))
    assert counts[0] > counts[1] == counts[2]
