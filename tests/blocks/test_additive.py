"""Additive scores by blocks, and their gradients, against float64."""

import itertools
import math

import pytest
import torch

from effops.blocks import limits, pairs
from effops.blocks.additive import AdditiveScores
from effops.blocks.cutting import Block, visited_pieces, whole
from effops.blocks.plan import broadcast_plan
from effops.measure import Pass, memory
from effops.numerics.precision import arithmetic_dtype, wider
from effops.prediction.inside import predict_bytes
from effops.reference import additive
from effops.reference.additive import exact_gradients, exact_scores
from effops.reference.reference import Bounds

MIB = 2**20
SHAPES = {
    # query, key, weight
    "attention": ((2, 37, 1, 33), (2, 1, 41, 33), (33,)),
    "heads": ((2, 3, 17, 1, 16), (2, 3, 1, 19, 16), (3, 1, 1, 16)),
    "shared keys": ((3, 17, 1, 16), (19, 16), (16,)),
    "weight by row": ((2, 17, 1, 16), (2, 1, 19, 16), (17, 1, 16)),
    "weight by column": ((2, 17, 1, 16), (2, 1, 19, 16), (19, 16)),
    "weight by pair": ((2, 17, 1, 16), (2, 1, 19, 16), (2, 17, 19, 16)),
    "weight alone varies": ((7, 1, 9), (9,), (5, 1, 6, 9)),
    "many batches": ((300, 2, 1, 9), (300, 1, 3, 9), (300, 1, 1, 9)),
    "several blocks": ((1, 150, 1, 9), (1, 1, 700, 9), (9,)),
    "several depths": ((20, 1, 600), (70, 600), (600,)),
    "row by row": ((290, 70), (290, 70), (70,)),
    "one query": ((1, 5), (1500, 5), (5,)),
    "one key": ((1500, 1, 5), (1, 5), (5,)),
    "one coordinate": ((40, 1, 1), (50, 1), (1,)),
    "mixed roles": ((3, 1, 5, 1, 6), (3, 4, 1, 7, 6), (4, 1, 1, 6)),
    "single": ((2,), (2,), (2,)),
    "no rows": ((0, 1, 6), (4, 6), (6,)),
    "no columns": ((3, 1, 6), (0, 6), (6,)),
    "no coordinates": ((3, 1, 0), (4, 0), (0,)),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def plan_of(*tensors):
    return broadcast_plan(*(tensor.shape[:-1] for tensor in tensors))


def result_dtype(query, key, weight):
    return wider(wider(query.dtype, key.dtype), weight.dtype)


def make(tensors, wanted=(False, False, False)):
    return AdditiveScores(plan_of(*tensors), *tensors, arithmetic_dtype(result_dtype(*tensors)), wanted=wanted)


def scores(*tensors):
    out = plan_of(*tensors).empty(tensors[0], result_dtype(*tensors))
    return pairs.forward(make(tensors), out)


def gradients(*tensors, dout, wanted=(True, True, True)):
    return pairs.backward(make(tensors, wanted), dout)


def sample(shapes, generator, dtype=torch.float32, scale=1.0):
    return [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


def upstream(tensors, generator):
    return torch.randn(plan_of(*tensors).shape, generator=generator).to(result_dtype(*tensors))


def assert_right(tensors, dout=None):
    value, error = exact_scores(*tensors)
    assert Bounds(value, error, error, dtype=result_dtype(*tensors)).error_ratio(scores(*tensors)) <= 1
    if dout is not None:
        for tensor, found, (value, error) in zip(
            tensors, gradients(*tensors, dout=dout), exact_gradients(*tensors, dout), strict=True
        ):
            assert Bounds(value, error, error, dtype=tensor.dtype).error_ratio(found) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape(shapes, dtype, generator):
    tensors = sample(shapes, generator, dtype)
    assert_right(tensors, upstream(tensors, generator))


@pytest.mark.each_value(all=True)
@pytest.mark.parametrize("values", [1, 40, additive.EXACT_VALUES], ids=["single pairs", "pieces", "at once"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_oracle_is_the_plain_expression(dtype, values, generator, monkeypatch):
    monkeypatch.setattr(additive, "EXACT_VALUES", values)
    tensors = [tensor.double().requires_grad_() for tensor in sample(SHAPES["heads"], generator, dtype)]
    query, key, weight = tensors
    out = (weight * torch.tanh(query + key)).sum(-1)
    dout = upstream(tensors, generator)
    torch.testing.assert_close(exact_scores(*tensors)[0], out)
    expected = torch.autograd.grad(out, tensors, dout, retain_graph=True)
    for found, gradient in zip(exact_gradients(*tensors, dout), expected, strict=True):
        torch.testing.assert_close(found[0], gradient)
    # an error of the gradient from above does what it would do if all terms had one sign
    error = torch.rand(dout.shape, generator=generator, dtype=torch.float64)
    slope = 1 - torch.tanh(query + key).square()
    terms = (weight.abs() * slope, weight.abs() * slope, torch.tanh(query + key).abs())
    pairs = zip(exact_gradients(*tensors, dout), exact_gradients(*tensors, dout, error))
    for tensor, term, (without, given) in zip(tensors, terms, pairs, strict=True):
        own = (error.unsqueeze(-1) * term).sum_to_size(tensor.shape)
        torch.testing.assert_close(given[1] - without[1], own)


def test_random_roles(generator):
    def choose(options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    for _ in range(60):
        full = [choose((1, 2, 5, 13)) for _ in range(choose((1, 2, 3, 4)))]
        dimension = choose((1, 2, 9, 40))
        shapes = [(*tuple(choose((1, size)) for size in full)[choose((0, 0, 1)) :], dimension) for _ in range(3)]
        tensors = sample(shapes, generator)
        assert_right(tensors, upstream(tensors, generator))


def test_mixed_dtypes(generator):
    for dtypes in itertools.permutations((torch.bfloat16, torch.float32, torch.float64)):
        tensors = [t.to(dtype) for t, dtype in zip(sample(SHAPES["attention"], generator), dtypes, strict=True)]
        assert_right(tensors, upstream(tensors, generator))


@pytest.mark.parametrize(
    "place",
    [
        lambda t: t.mT.contiguous().mT if t.ndim > 1 else t.repeat_interleave(3)[::3],
        lambda t: t.repeat_interleave(2, -1)[..., ::2],
        lambda t: t[..., :1].expand(t.shape),
        lambda t: t.transpose(0, -2).contiguous().transpose(0, -2) if t.ndim > 2 else t,
    ],
    ids=["transposed", "every other", "expanded", "batch inside"],
)
@pytest.mark.parametrize("form", ["heads", "weight by pair", "several depths"])
def test_any_strides(form, place, generator):
    tensors = [place(tensor) for tensor in sample(SHAPES[form], generator)]
    copies = [tensor.clone() for tensor in tensors]
    assert_right(tensors, place(upstream(tensors, generator)))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


@pytest.fixture
def routes(monkeypatch):
    """Of every block, whether it was computed from products."""
    found = []
    original = AdditiveScores._factors

    def recording(self, block, depth):
        factors = original(self, block, depth)
        found.append(factors[0])
        return factors

    monkeypatch.setattr(AdditiveScores, "_factors", recording)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 10.0, 43.0, 44.0, 60.0, 353.0, 356.0, 1e4, 1e30, 3.3e38])
def test_values_that_cancel(size, dtype, generator, routes):
    """e^(2q) e^(2k) of q = 45, k = -43.9 was inf times a number that has lost its digits, and tanh 1 for 0.80."""
    query, key, weight = sample(SHAPES["attention"], generator, torch.float64)
    query = query.sign() * size
    key = -query[:, :1] + key
    tensors = query.to(dtype), key.to(dtype), weight.to(dtype)
    assert_right(tensors, upstream(tensors, generator))
    largest = max(float(tensor.abs().max()) for tensor in tensors[:2])
    limit = 354 if dtype == torch.float64 else 43.5
    assert set(routes) == {largest < limit}


@pytest.mark.parametrize("offset", [0.0, 1e-6, 0.5, 5.0, 9.5, 20.0, 40.0])
def test_saturated(offset, generator):
    query, key, weight = sample(SHAPES["attention"], generator, scale=1e-2)
    for sign in (-1, 1):
        tensors = query + sign * offset / 2, key + sign * offset / 2, weight
        assert_right(tensors, upstream(tensors, generator))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("operand", [0, 1, 2])
@pytest.mark.parametrize("form", ["attention", "heads", "several blocks", "many batches", "row by row"])
def test_bad_values_spoil_no_others(form, operand, bad, generator):
    """Every result is that of the plain expression: NaN, infinite, or as right as without the bad value."""
    tensors = sample(SHAPES[form], generator)
    flat = tensors[operand].view(-1)
    flat[3] = flat[-2] = bad
    value, error = exact_scores(*tensors)
    found = scores(*tensors)
    assert torch.equal(found.isnan(), value.isnan())
    assert torch.equal(found[value.isinf()].double(), value[value.isinf()])
    finite = value.isfinite()
    assert ((found - value).abs() <= error + 1e-6)[finite].all()
    if operand < 2:
        dout = upstream(tensors, generator)
        for found, (value, error) in zip(gradients(*tensors, dout=dout), exact_gradients(*tensors, dout), strict=True):
            assert torch.equal(found.isnan(), value.isnan())
            assert ((found - value).abs() <= error + 1e-5)[~value.isnan()].all()


def test_opposite_infinities(generator):
    query, key, weight = sample(SHAPES["attention"], generator)
    query[0, 3, 0, 5], key[0, 0, 7, 5], key[0, 0, 8, 5] = math.inf, -math.inf, math.inf
    found = scores(query, key, weight)
    assert found[0, 3, 7].isnan()
    assert int(found.isnan().sum()) == 1


def test_huge_weights(generator):
    """Their sum overflows where that of the terms does not."""
    query, key, _ = sample(SHAPES["attention"], generator, scale=0.01)
    weight = torch.full((33,), 3e38)
    weight[::2] *= -1
    assert_right((query, key, weight))


@pytest.mark.parametrize("form", ["heads", "weight by row", "weight by pair", "several blocks", "several depths"])
def test_any_block_by_itself(form, generator):
    """In any order, of any size up to the extents; gradients without scores before."""
    tensors = sample(SHAPES[form], generator)
    plan, dout = plan_of(*tensors), upstream(tensors, generator)
    out = plan.empty(tensors[0], torch.float32)
    calculated, differentiated = make(tensors), make(tensors, (True, True, True))
    extents = [
        tuple(max(1, n - n // 3) for n in part)
        for part in (calculated.extents.batch, calculated.extents.rows, calculated.extents.columns)
    ]
    parts = [
        list(visited_pieces(whole(plan.sizes(axes)), part))
        for axes, part in zip((plan.batch, plan.rows, plan.columns), extents, strict=True)
    ]
    blocks = [Block(*block) for block in itertools.product(*parts)]
    for i in torch.randperm(len(blocks), generator=generator).tolist():
        target = plan.view(out, plan.order)[blocks[i].pairs]
        value = torch.full(target.shape, math.nan)
        calculated.evaluate(blocks[i], value)
        target.copy_(value)
        differentiated.pull_back(blocks[i], plan.view(dout, plan.order)[blocks[i].pairs])
    value, error = exact_scores(*tensors)
    assert Bounds(value, error, error).error_ratio(out) <= 1
    for found, (value, error) in zip(differentiated.gradients(), exact_gradients(*tensors, dout), strict=True):
        assert Bounds(value, error, error).error_ratio(found) <= 1


@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=3)))
@pytest.mark.parametrize("form", ["attention", "weight by pair"])
def test_only_the_gradients_asked_for(form, wanted, generator):
    tensors = sample(SHAPES[form], generator)
    dout = upstream(tensors, generator)
    everything = gradients(*tensors, dout=dout)
    for is_wanted, found, expected in zip(
        wanted, gradients(*tensors, dout=dout, wanted=wanted), everything, strict=True
    ):
        assert torch.equal(found, expected) if is_wanted else found is None


def test_deterministic(generator):
    tensors = sample(SHAPES["several blocks"], generator)
    dout = upstream(tensors, generator)
    assert torch.equal(scores(*tensors), scores(*tensors))
    first, second = (gradients(*tensors, dout=dout) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


LARGE = {
    "speech": ((1, 64, 1, 256), (1, 1, 1024, 256), (256,)),
    "one coordinate": ((700, 1, 1), (900, 1), (1,)),
    "wide": ((20, 1, 4096), (30, 4096), (4096,)),
    "very wide": ((3, 1, 100_000), (4, 100_000), (100_000,)),
    "many rows": ((50_000, 1, 16), (1, 16), (16,)),
    "many columns": ((1, 16), (50_000, 16), (16,)),
    "many batches": ((4000, 2, 1, 16), (4000, 1, 3, 16), (16,)),
    "row by row": ((50_000, 16), (50_000, 16), (16,)),
    "weight by pair": ((1, 40, 1, 128), (1, 1, 90, 128), (40, 90, 128)),
    "weight by row": ((1, 40, 1, 128), (1, 1, 900, 128), (40, 1, 128)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", LARGE.values(), ids=LARGE.keys())
def test_memory(shapes, dtype, generator):
    tensors = sample(shapes, generator, dtype)
    dout = upstream(tensors, generator)
    assert memory(Pass(scores, tuple(tensors)), warmup=0).temporary_bytes <= 4 * MIB
    # Gradients are summed in the dtype of the arithmetic, or float64 if they are small.
    itemsize = arithmetic_dtype(dtype).itemsize
    totals = sum(
        tensor.numel() * (8 if tensor.numel() * 8 <= limits.BLOCK_BYTES else itemsize)
        for tensor in tensors
        if dtype != torch.float64
    )
    found = memory(Pass(lambda *args: gradients(*args[:3], dout=args[3]), (*tensors, dout)), warmup=0)
    assert found.temporary_bytes <= 8 * MIB + totals


@pytest.mark.parametrize("shapes", [SHAPES["several blocks"], SHAPES["weight by pair"], LARGE["very wide"]])
def test_predicted_bytes_are_the_measured_ones(shapes, generator):
    tensors = sample(shapes, generator)
    predicted = predict_bytes(scores, *tensors).temporary_bytes
    assert predicted == pytest.approx(memory(Pass(scores, tuple(tensors)), warmup=0).temporary_bytes, rel=0.02)


def test_wide_sums_of_one_sign():
    """Added one after the other, 100,000 terms of one sign lose more digits than the budget allows."""
    tensors = torch.rand(3, 1, 100_000), torch.rand(4, 100_000), torch.rand(100_000)
    assert_right(tensors, torch.ones(3, 4))


def test_many_rows_add_to_one_gradient(generator):
    tensors = torch.rand(20_000, 1, 4), torch.rand(3, 4), torch.rand(4)
    assert_right(tensors, torch.ones(20_000, 3))


def test_extents_suit_a_reduction():
    extents = make((torch.empty(1, 256, 1, 256), torch.empty(1, 1, 2048, 256), torch.empty(256))).extents
    assert [math.prod(part) for part in (extents.batch, extents.rows, extents.columns)] == [1, 64, 512]
