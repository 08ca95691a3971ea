"""What `effops.tiled` computes backward, and which axes it cuts: gradients are right, and nothing is needless."""

from collections import Counter

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import effops
from effops.measure import Pass, memory
from effops.programs.tiles import plans

aten = torch.ops.aten
BUDGET = 2**18


@pytest.fixture(autouse=True)
def computes_all_tiles_again(monkeypatch):
    """Else backward would do so where the budget has no room for their graphs, and do what PyTorch does elsewhere."""
    monkeypatch.setattr(plans, "TRIES", 0)


class Counting(TorchDispatchMode):
    """Counts the operators that run, and keeps the strides of the operands of products of batches."""

    def __init__(self):
        super().__init__()
        self.counts, self.strides = Counter(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.counts[function] += 1
        if function in (aten.bmm.default, aten.baddbmm_.default):
            self.strides += [one.stride()[1:] for one in args[-2:]]
        return result


def check(function, leaves, budget=BUDGET):
    """Compare the results and gradients of tiles with those of the whole, and return what backward ran."""
    leaves = [one.requires_grad_() for one in leaves]
    tiled = effops.tiled(function, budget=budget)
    assert effops.explain(tiled, *leaves).loops
    tiled(*leaves).sum().backward()  # the first call compares tiles, too
    leaves = [one.detach().requires_grad_() for one in leaves]
    others = [one.detach().requires_grad_() for one in leaves]
    found, expected = tiled(*leaves), function(*others)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    upstream = torch.randn_like(expected)
    with Counting() as counting:
        found.backward(upstream)
    expected.backward(upstream)
    for one, other in zip(leaves, others):
        atol = 1e-5 * other.grad.nan_to_num(0, 0, 0).abs().max().item()
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=atol, equal_nan=True)
    assert memory(Pass(tiled, leaves, backward=True)).temporary_bytes <= budget
    return counting


def matrices(generator, *shapes):
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def two_sums(pairs):
    """Forward computes the gradients where there is one number alone."""
    return torch.stack([pairs.sum(), pairs.sum()])


@pytest.mark.parametrize(
    ("function", "operators"),
    [
        (lambda x, y: two_sums(functional.softplus(x @ y.mT)), (aten.softplus.default, aten.sum.default)),
        (lambda x, y: functional.softplus(3 * (x @ y.mT), 2.0, 5.0).sum(1), (aten.softplus.default,)),
        (lambda x, y: (x @ y.mT - 1).square().sum(0, keepdim=True), (aten.pow.Tensor_Scalar,)),
        (lambda x, y: (x @ y.mT).sin().unflatten(1, (4, -1)).sum((0, 2)), (aten.sum.dim_IntList,)),
        (lambda x, y: (x @ y.mT).sin().sum(1, dtype=torch.float64), (aten.sum.dim_IntList,)),
        (lambda x, y: torch.logsumexp(x @ y.mT, 1), (aten.logsumexp.default, aten.amax.default)),
        (lambda x, y: torch.logsumexp(x @ y.mT, (0, 1)), (aten.logsumexp.default, aten.amax.default)),
        (lambda x, y: torch.logsumexp(x @ y.mT, 0, keepdim=True).cos(), (aten.logsumexp.default, aten.amax.default)),
    ],
)
def test_what_no_gradient_reads_is_not_computed(function, operators, generator):
    counting = check(function, matrices(generator, (500, 8), (400, 8)))
    for operator in operators:
        assert not counting.counts[operator], operator


def test_the_last_product_is_not_computed_again(generator):
    def weighted(x, y):
        return torch.softmax(x @ y.mT, -1) @ y

    leaves = [one.requires_grad_() for one in matrices(generator, (500, 8), (400, 8))]
    tiled = effops.tiled(weighted, budget=BUDGET)
    (loop,) = tiled.planned(*leaves).program.loops
    counting = check(weighted, leaves)
    tiles = len([*loop.tiles(loop.backward_length)])
    # One of the first product, and four for the gradients of both.
    assert counting.counts[aten.mm.default] + counting.counts[aten.addmm_.default] == 5 * tiles


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_log_sums_of_16_bits_weigh_their_tiles(dtype, generator):
    """Totals are in float32, and the result is not: each tile weighs what it has of the total."""
    x, y = (one.to(dtype).requires_grad_() for one in matrices(generator, (500, 8), (400, 8)))
    tiled = effops.tiled(lambda x, y: torch.logsumexp(x @ y.mT, (0, 1)), budget=BUDGET)
    found = torch.autograd.grad(tiled(x, y), (x, y))
    others = [one.detach().double().requires_grad_() for one in (x, y)]
    expected = torch.autograd.grad(torch.logsumexp(others[0] @ others[1].mT, (0, 1)), others)
    for one, other in zip(found, expected):
        assert (one.double() - other).abs().max() <= 8 * torch.finfo(dtype).eps * other.abs().max()


def test_infinite_values_have_the_gradients_of_pytorch(generator):
    def rows(x, y):
        return torch.logsumexp(x[:, None] + y, 1)

    def all_of_them(x, y):
        return torch.logsumexp((x[:, None] + y).flatten(), 0)

    x, y = matrices(generator, (500,), (400,))
    x[3], x[7], y[5] = -torch.inf, torch.inf, -torch.inf
    for function in (rows, all_of_them):
        check(function, [x, y])


def test_values_that_are_read_are_computed(generator):
    """A sum that a result takes and another node reads, a product that is returned and read, a square that is read."""

    def read_twice(x, y):
        products = x @ y.mT
        squares = products.square()
        return squares.sum(1, keepdim=True) + (squares.exp().neg() * products).sum(1, keepdim=True)

    check(read_twice, [0.3 * one for one in matrices(generator, (500, 8), (400, 8))])


def test_products_alone_keep_the_budget(generator):
    """The result of a tile is memory too, until it is copied to where it belongs."""
    x, y = (one.requires_grad_() for one in matrices(generator, (600, 8), (500, 8)))
    check(lambda x, y: (x[:, None] * y).sum(-1), [x, y])


def test_gradients_of_batches_are_laid_out_for_products(generator):
    """The gradient of outer products comes in the strides of a permutation, which PyTorch multiplies one by one."""

    def bilinear(images, questions, glimpses):
        pairs = torch.matmul(images.mT[..., None], questions.mT[:, :, None])
        return (pairs.movedim(1, -1) @ glimpses.mT).movedim(-1, 1)

    counting = check(bilinear, matrices(generator, (6, 12, 64), (6, 10, 64), (4, 64)))
    assert counting.strides
    assert all(1 in strides for strides in counting.strides)


def casts_of(tiled, *args):
    """The nodes of the first loop that cast their operand."""
    return [node for node in tiled.planned(*args).program.loops[0].stage.nodes if node.target is aten._to_copy.default]


def test_zeros_and_ones_take_their_last_dtype_at_once(generator):
    codes = torch.randint(300, (400,), generator=generator)
    (codebook,) = matrices(generator, (300, 8))
    tiled = effops.tiled(lambda book: functional.one_hot(codes, 300).to(book.dtype) @ book, budget=BUDGET)
    torch.testing.assert_close(tiled(codebook), codebook[codes])
    assert [node.meta["val"].dtype for node in casts_of(tiled, codebook)] == [torch.float32]


def test_tiles_are_not_narrow_where_elements_lie_side_by_side(generator):
    """A few bins of each of many values would be slow: values are cut, though their mean is combined then."""
    values, bins = matrices(generator, (1, 20000), (64,))
    tiled = effops.tiled(lambda values, bins: (values[..., None] - bins).square().neg().exp().mean(1), budget=BUDGET)
    (loop,) = effops.explain(tiled, values, bins).loops
    assert loop.length == 20000


def test_the_axis_whose_tiles_read_the_least_whole_is_cut(generator):
    queries, keys, values = matrices(generator, *[(40, 64, 8)] * 3)
    tiled = effops.tiled(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, budget=BUDGET)
    (loop,) = effops.explain(tiled, queries, keys, values).loops
    assert loop.length == 40


def test_meta_tensors():
    """They have no values that the first call could compare."""
    x, y = (torch.empty(500, 8, device="meta", requires_grad=True) for _ in range(2))
    tiled = effops.tiled(lambda x, y: torch.logsumexp(x @ y.mT, 1), budget=BUDGET)
    result = tiled(x, y)
    result.sum().backward()
    assert (result.device.type, x.grad.shape) == ("meta", x.shape)
    effops.tiled(lambda x, y: torch.logsumexp(x @ y.mT, 1).mean(), budget=BUDGET)(x, y).backward()


def test_whole_factors_that_lie_otherwise(generator):
    """PyTorch adds products to such a sum one matrix after another, so they are made first where that takes little."""
    x, wide, low = matrices(generator, (8, 500, 6), (8, 64, 6), (8, 6, 64))
    counting = check(lambda x, y: (x @ y.mT).square().sum(-1), [x, wide])
    assert counting.counts[aten.baddbmm_.default] == 0
    counting = check(lambda x, y: (x @ y).square().sum(-1), [x, low])
    assert counting.counts[aten.baddbmm_.default] > 1


def test_a_large_whole_factor_that_lies_otherwise(generator):
    """The product for each tile would take as much as the factor itself."""
    x, y = matrices(generator, (2, 300, 64), (2, 1000, 64))
    counting = check(lambda x, y: (x @ y.mT).square().sum(-1), [x, y], budget=2**19)
    assert counting.counts[aten.baddbmm_.default] > 1


def test_an_axis_outside_of_others_is_cut(generator):
    """Of two axes that could be cut, tiles of the inner one would be laid out so that the sum is slow."""
    (left, right) = matrices(generator, (16, 20, 64), (16, 20, 95))

    def correlation(left, right):
        return (left[..., None] * right.unfold(-1, 32, 1)).square().mean(0)

    (loop,) = effops.explain(effops.tiled(correlation, budget=2**20), left, right).loops
    assert loop.length == 20
