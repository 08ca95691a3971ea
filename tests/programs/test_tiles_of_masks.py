"""What a mask selects: `x[mask] = ..` is an operator of elements, and `x[mask]` that is read has no shape."""

import pytest
import torch

import effops

BUDGET = 2**18


def pairs(a, b):
    return (a[:, None] - b).square().sum(-1)


def number(d, a, b):
    d[d > 3] = 0.0


def tensor(d, a, b):
    d[d > 3] = a.sum()


def one_element(d, a, b):
    d[d > 3] = a[:1, 0]


def infinite(d, a, b):
    d[torch.arange(len(a))[:, None] == torch.arange(len(b))] = float("inf")


def rows(d, a, b):
    d[a[:, 0] > 0] = 0.0


def rows_by_a_row(d, a, b):
    d[a[:, 0] > 0] = b[:, 0]


def columns(d, a, b):
    d[..., b[:, 0] > 0] = 0.0


def added(d, a, b):
    d[d > 3] += 2.0


def multiplied(d, a, b):
    d[d > 3] *= a.mean()


def without_infinite_gradients(d, a, b):
    """Elsewhere the root of 0 has an infinite gradient."""
    d -= 3
    d.clamp_(min=0)
    mask = d > 0
    d[mask] = d[mask].sqrt()


def of_another_tensor(d, a, b):
    root = (d + 1).sqrt()
    mask = d > 3
    d[mask] = root[mask] * 2


def twice_written(d, a, b):
    d[d > 3] = torch.log(d[d > 3])


def accumulated(d, a, b):
    d.index_put_((d > 3,), a.sum(), accumulate=True)


def filled(d, a, b):
    d[:, 3:9] = 5.0
    d.select(1, 1).zero_()


def root_of_a_threshold(d, a, b):
    """Elsewhere the gradient of the threshold is NaN."""
    threshold = a.mean() + 2
    mask = d < threshold
    d[mask] = torch.sqrt(threshold - d[mask])


def arc_of_a_scale(d, a, b):
    """At 1 the gradient of the scale is infinite."""
    scale = 1 + b.detach().mean() * 0 + a.sum() * 0
    mask = d > 1
    d[mask] = (d[mask] / scale).acosh()


CHANGES = [
    root_of_a_threshold,
    arc_of_a_scale,
    number,
    tensor,
    one_element,
    infinite,
    rows,
    rows_by_a_row,
    columns,
    added,
    multiplied,
    without_infinite_gradients,
    of_another_tensor,
    twice_written,
    accumulated,
    filled,
]


def operands(generator):
    return [torch.randn(size, 4, generator=generator).requires_grad_() for size in (400, 300)]


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_what_is_changed_where_a_mask_holds(change, generator):
    def function(a, b):
        d = pairs(a, b)
        change(d, a, b)
        return torch.exp(-d).sum(1)

    a, b = operands(generator)
    tiled = effops.tiled(function, budget=BUDGET)
    assert effops.explain(tiled, a, b).loops
    found, expected = tiled(a, b), function(a, b)
    torch.testing.assert_close(found, expected)
    leaves = [a, b]
    gradients = torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)
    for own, other in zip(*gradients):
        assert other.isfinite().all()
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize(
    "read",
    [
        lambda d: d[d > 3].sum(),
        lambda d: len(d[d > 3]) * d.sum(1),
        lambda d: d[d > 3].sqrt() - d[d > 3].mean(),
        lambda d: d[d > 3],
        lambda d: d.masked_fill(d > 3, 0).sum(1) + d[d > 3].sum(),
        lambda d: (d > 3).nonzero(),
        lambda d: torch.where(d > 3)[0],
    ],
)
def test_what_is_read_is_refused(read, generator):
    refusal = effops.explain(effops.tiled(lambda a, b: read(pairs(a, b)), budget=BUDGET), *operands(generator))
    assert isinstance(refusal, effops.CannotTile)
    assert "a shape must not depend on values" in str(refusal)
    assert "masked_fill" in refusal.remedy
    assert "torch.where" in refusal.remedy


def test_another_mask_is_refused(generator):
    """The numbers that two masks select do not lie at the same places."""

    def function(a, b):
        d = pairs(a, b)
        d[d > 3] = d[d.flip(1) > 3]
        return d.sum(1)

    assert isinstance(effops.explain(effops.tiled(function, budget=BUDGET), *operands(generator)), effops.CannotTile)


def test_a_mask_that_was_changed_is_another_one(generator):
    def function(a, b):
        d = pairs(a, b)
        selected = d[d > 3]
        d += 1
        d[d > 3] = selected
        return d.sum(1)

    assert isinstance(effops.explain(effops.tiled(function, budget=BUDGET), *operands(generator)), effops.CannotTile)


def test_a_function_that_keeps_the_budget(generator):
    """It runs as its trace, whose bytes are known."""

    def function(a, b):
        d = pairs(a, b)
        d[d > 3] += 1
        return d.sum(1)

    a, b = operands(generator)
    tiled = effops.tiled(function, budget="64 MiB")
    report = effops.explain(tiled, a, b)
    assert not report.loops
    assert report.first_call_bytes == report.taken_bytes == report.as_it_is_bytes > 4 * 400 * 300
    torch.testing.assert_close(tiled(a, b), function(a, b))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        return 2 * upstream


@pytest.mark.parametrize("budget", [BUDGET, "64 MiB"])
def test_a_gradient_of_its_own_is_not_lost(budget, generator):
    def function(a, b):
        d = Doubled.apply(pairs(a, b))
        d[d > 3] += 1
        return d.sum(1)

    with pytest.raises(effops.CannotTile, match="a part with a graph of its own"):
        effops.tiled(function, budget=budget)(*operands(generator))


@pytest.mark.parametrize("budget", [BUDGET, "64 MiB"])
@pytest.mark.parametrize("change", [None, added], ids=["plain", "masked"])
def test_inference_mode(change, budget, generator):
    """Its tensors count no writes."""

    def function(a, b):
        d = pairs(a, b)
        if change is not None:
            change(d, a, b)
        return torch.exp(-d).sum(1)

    with torch.inference_mode():
        a, b = (torch.randn(size, 4, generator=generator) for size in (400, 300))
        torch.testing.assert_close(effops.tiled(function, budget=budget)(a, b), function(a, b))


@pytest.mark.parametrize("name", ["fill", "add", "copy"])
def test_a_diagonal_that_is_written_to(name, generator):
    """It is a view, until nothing is written to it."""

    def function(a):
        d = pairs(a, a)
        diagonal = d.diagonal()
        if name == "fill":
            diagonal.fill_(5.0)
        elif name == "add":
            diagonal.add_(5.0)
        else:
            diagonal.copy_(a[:, 0])
        return torch.log_softmax(d, 0).exp().sum(1) + torch.log_softmax(d, 1).diagonal()

    a, _ = operands(generator)
    tiled = effops.tiled(function, budget=BUDGET)
    if not isinstance(effops.explain(tiled, a), effops.CannotTile):
        torch.testing.assert_close(tiled(a), function(a))


def inverted(d):
    near, mask = d > 3, d > 1
    near[mask] = ~near[mask]
    return near.sum(1)


def compared(d):
    near, mask = d > 3, d > 1
    near[mask] = d[mask] >= 2
    return near.sum(1)


def integers(d):
    counts = d.int()
    mask = counts > 1
    counts[mask] = counts[mask] * 3 - 1
    return counts.sum(1)


@pytest.mark.parametrize("function", [inverted, compared, integers], ids=lambda one: one.__name__)
@pytest.mark.parametrize("budget", [BUDGET, "64 MiB"])
def test_dtypes_without_gradients(function, budget, generator):
    a, b = (one.detach() for one in operands(generator))
    found = effops.tiled(lambda a, b: function(pairs(a, b)), budget=budget)(a, b)
    assert torch.equal(found, function(pairs(a, b)))


def mask_changed(d):
    mask = d > 3
    selected = d[mask]
    mask.copy_(d.flip(0) > 3)
    d[mask] = selected


def source_changed(d):
    selected = d[d > 3]
    torch.neg(d, out=d)
    d[d > 3] = selected


def of_fewer_axes(d):
    rows = d.sum(1)
    mask = rows == rows.max()
    d[mask] = rows[mask]


def divided(d):
    counts = d.int()
    mask = counts > 1
    counts[mask] = 100 // (counts[mask] - 1)


def of_another_dtype(d):
    counts = d.int()
    mask = counts > 1
    counts[mask] = counts[mask] / 2


def counted(d):
    selected = d[d > 3]
    if selected.shape[0] > 0:
        d[d > 3] = selected * 2


@pytest.mark.parametrize(
    "change",
    [mask_changed, source_changed, of_fewer_axes, divided, of_another_dtype, counted],
    ids=lambda one: one.__name__,
)
@pytest.mark.parametrize("budget", [BUDGET, "64 MiB"])
def test_what_is_not_put_back_where_it_was_is_refused(change, budget, generator):
    def function(a, b):
        d = pairs(a, b)
        change(d)
        return d.sum(1)

    with pytest.raises(effops.CannotTile, match=r"a shape must not depend|a branch must not depend"):
        effops.tiled(function, budget=budget)(*(one.detach() for one in operands(generator)))


def test_strides_are_those_of_what_is_changed(generator):
    def function(a, b, mask):
        d = torch.sin(a @ b.mT).mT
        d[mask] = d[mask] + 2
        d[mask] = 3.0
        return d

    a, b = (one.detach() for one in operands(generator))
    mask = torch.rand(300, 400, generator=generator) > 0.5
    for budget in ("600 KiB", "64 MiB"):
        found = effops.tiled(function, budget=budget)(a, b, mask)
        assert found.stride() == (1, 300)
        assert torch.equal(found, function(a, b, mask))
