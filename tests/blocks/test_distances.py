"""Scores of normal densities by blocks, and their gradients, against extended precision."""

import math

import numpy
import pytest
import torch

from effops import normal_log_prob, normal_mixture_log_prob
from effops.blocks import distances
from effops.blocks.distances import Distances
from effops.blocks.plan import broadcast_plan
from effops.measure import Pass, memory
from effops.numerics.precision import arithmetic_dtype

SCALE_OF_NO_CONSTANT = 1 / math.sqrt(2 * math.pi)  # log s + log(2 pi)/2 = 0: the squared distance alone is the score
SHAPES = {
    # loc, scale, x
    "columns": ((50, 1, 45), (50, 1, 45), (61, 45)),
    "columns, one scale": ((50, 1, 45), (50, 1, 1), (61, 45)),
    "rows": ((50, 1, 45), (61, 45), (61, 45)),
    "rows, one scale": ((50, 1, 45), (61, 1), (61, 45)),
    "rows and columns": ((50, 1, 45), (50, 61, 45), (61, 45)),
    "rows and columns, one scale": ((50, 1, 45), (50, 61, 1), (61, 45)),
    "neither": ((50, 1, 45), (45,), (61, 45)),
    "neither, one scale": ((50, 1, 45), (1,), (61, 45)),
    "several blocks": ((700, 3), (700, 3), (400, 1, 3)),
    "several depths": ((40, 1, 600), (40, 1, 600), (41, 600)),
    "several depths, one scale": ((40, 1, 600), (41, 1), (41, 600)),
    "many batches": ((190, 9, 1, 16), (190, 1, 1, 1), (190, 1, 12, 16)),
    "batch, scale by columns": ((3, 40, 1, 37), (40, 1, 37), (3, 1, 33, 37)),
    "mixed roles": ((3, 1, 20, 1, 36), (20, 1, 1), (3, 4, 1, 22, 36)),
    "mixed roles, scale by rows": ((3, 1, 20, 1, 36), (4, 1, 22, 36), (3, 4, 1, 22, 36)),
    "scale alone varies": ((60,), (90, 60), (33, 1, 60)),
    "scale and loc vary": ((10, 1, 60), (1, 9, 60), (53, 1, 1, 60)),
    "row by row": ((290, 300), (290, 1), (290, 300)),
    "one coordinate": ((400, 1, 1), (400, 1, 1), (510, 1)),
    "single": ((2,), (1,), (2,)),
    "one column": ((5,), (5,), (1000, 5)),
    "one row": ((1000, 5), (1000, 5), (5,)),
    "no rows": ((4, 6), (4, 6), (0, 1, 6)),
    "no columns": ((0, 6), (1,), (3, 1, 6)),
    "no coordinates": ((4, 0), (1,), (3, 1, 0)),
}
FORMS = ("columns", "columns, one scale", "rows", "rows, one scale", "rows and columns", "several depths")


def test_values_near_0_far_from_the_centre():
    """Less a centre of 1e4 they had lost what tells them apart, and the gradients of x and loc with it."""
    loc = torch.full((128, 16), 1e4)
    loc[0] = 1e-6
    scale = torch.full((1,), 1e-3)
    x = (torch.randn(128, 1, 16, generator=torch.Generator().manual_seed(0)) * 1e-9 + 1e-6).requires_grad_()
    loc.requires_grad_()
    weight = torch.zeros(128, 128)
    weight[:, 0] = 1
    found = torch.autograd.grad(normal_log_prob(loc, scale, x, variant="chunked"), (x, loc), weight)
    z = (x.double() - loc.double()[0]) / 1e-3**2
    torch.testing.assert_close(found[0], -z.detach().float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1][0], z.sum((0, 1)).detach().float(), rtol=1e-5, atol=0)


def result_dtype(*tensors):
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def plan_of(loc, scale, x):
    return broadcast_plan(x.shape[:-1], loc.shape[:-1], scale.shape[:-1])


def log_prob(loc, scale, x):
    plan, dtype = plan_of(loc, scale, x), result_dtype(loc, scale, x)
    out = plan.empty(x, dtype)
    ordered = plan.view(out, plan.order)
    scores = Distances(plan, loc, scale, x, arithmetic_dtype(dtype))
    buffer = x.new_empty(math.prod(scores.extents.pairs), dtype=scores.arithmetic)
    for block in scores.walk():
        target = ordered[block.pairs]
        if dtype == scores.arithmetic:
            scores.evaluate(block, target)
        else:
            value = buffer[: target.numel()].view(target.shape)
            scores.evaluate(block, value)
            target.copy_(value)
    return out


def gradients(loc, scale, x, dout, needs=(True, True, True)):
    plan = plan_of(loc, scale, x)
    scores = Distances(plan, loc, scale, x, arithmetic_dtype(result_dtype(loc, scale, x)), needs)
    upstream = plan.view(dout, plan.order)
    for block in scores.walk():
        scores.evaluate(block, None)
        scores.pull_back(block, upstream[block.pairs])
    return scores.gradients()


def exact(tensor):
    return tensor.detach().double().numpy().astype(numpy.longdouble)


def exact_scores(loc, scale, x):
    """Scores, and half the squared distances, in extended precision."""
    loc, scale, x = map(exact, (loc, scale, x))
    with numpy.errstate(all="ignore"):
        half = (((x - loc) / scale) ** 2).sum(-1) / 2
        repeats = loc.shape[-1] if scale.shape[-1] == 1 else 1
        log_scale = repeats * numpy.log(scale).sum(-1)
        log_2pi = numpy.log(8 * numpy.arctan(numpy.longdouble(1)))
        return -half - log_scale - loc.shape[-1] * log_2pi / 2, half


def assert_exact(out, loc, scale, x, relative=None):
    """Right to `relative` of score or distance, whichever is larger, and to half a unit in the last place."""
    expected, half = exact_scores(loc, scale, x)
    if relative is None:
        relative = 1e-14 if out.dtype == torch.float64 else 1e-6
    absolute = 1e-15 * loc.shape[-1] if out.dtype == torch.float64 else 0  # of logarithms about -log(2 pi)/2
    assert exceeded(out, expected, relative * numpy.maximum(abs(expected), half) + absolute) <= 1


def exceeded(actual, expected, allowed):
    """The largest error in units of what is allowed besides the rounding of the result."""
    assert actual.shape == expected.shape
    finfo = torch.finfo(actual.dtype)
    fits = abs(expected) < finfo.max
    error = abs(exact(actual) - expected)[fits]
    allowed = (allowed + finfo.eps / 2 * (abs(expected) + finfo.smallest_normal))[fits]
    too_large = numpy.where(numpy.isnan(expected), expected, numpy.copysign(math.inf, expected))[~fits]
    assert numpy.array_equal(exact(actual)[~fits], too_large, equal_nan=True)
    return float(numpy.nan_to_num(error / allowed, nan=math.inf).max(initial=0))


def sum_to(values, shape):
    values = values.sum(tuple(range(values.ndim - len(shape))))
    return values.sum(tuple(i for i, n in enumerate(shape) if n == 1 and values.shape[i] != 1), keepdims=True)


def gradient_ratios(actual, loc, scale, x, dout, relative=None):
    """Errors of the gradients in units of 1e-6 (float64: 1e-13) of the sum of sizes of the direct form's terms.

    To that is added what moving the values by 1e-12 of their spread does, about 2^-16 of a rounding in float32.
    """
    tensors = (loc, scale, x)
    loc, scale, x, g = *map(exact, tensors), exact(dout)[..., None]
    relative = relative or (1e-13 if result_dtype(*tensors) == torch.float64 else 1e-6)
    spread = max((abs(v - numpy.median(v)).max() for v in (x, loc) if v.size), default=0)
    difference = x - loc
    pull = g * difference / scale**2
    pull_size = abs(pull) + 1e-12 / relative * abs(g) * spread / scale**2
    square = (difference / scale) ** 2
    per_scale, per_scale_size = g * (square - 1) / scale, abs(g) * (square + 1) / scale
    terms = ((pull, pull_size), (per_scale, per_scale_size), (-pull, pull_size))
    for result, tensor, (value, size) in zip(actual, tensors, terms):
        assert result.dtype == tensor.dtype
        yield exceeded(result, sum_to(value, tensor.shape), relative * sum_to(size, tensor.shape))


def assert_exact_gradients(loc, scale, x, dout, relative=None):
    assert max(gradient_ratios(gradients(loc, scale, x, dout), loc, scale, x, dout, relative)) <= 1


def sample(shapes, generator, dtype=torch.float32):
    loc, scale, x = shapes
    return (
        torch.randn(loc, generator=generator).to(dtype),
        (2.0 * torch.rand(scale, generator=generator) + 0.1).to(dtype),
        torch.randn(x, generator=generator).to(dtype),
    )


def upstream(loc, scale, x, generator):
    return torch.randn(plan_of(loc, scale, x).shape, generator=generator).to(result_dtype(loc, scale, x))


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("batch", "rows"), [(1, 0), (1, 1), (1, 63), (1, 127), (1, 128), (1, 255), (1, 256), (3, 200)])
def test_products_by_rows(batch, rows, threads, beta, generator):
    def random(*shape):
        return torch.randn(batch, *shape, generator=generator, dtype=torch.float64)

    left, right, out = random(rows, 7), random(7, 5), random(rows, 5)
    if not beta:
        out.fill_(math.nan)
    expected = left @ right + (out if beta else 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        distances.multiply_by_rows(out, left, right, beta=beta)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out, expected, rtol=1e-14, atol=1e-14)


@pytest.fixture
def direct_calls(monkeypatch):
    """How often blocks and single pairs are computed directly."""
    counts = {"evaluate": 0, "evaluate_pairs": 0, "pull_back": 0}
    for name in counts:
        original = getattr(distances._Direct, name)

        def counting(self, *args, name=name, original=original):
            counts[name] += 1
            return original(self, *args)

        monkeypatch.setattr(distances._Direct, name, counting)
    return counts


@pytest.mark.parametrize("scale_shape", [(300, 24), (300, 1), (1,), (200, 1, 24)], ids=str)
@pytest.mark.parametrize("op", [normal_log_prob, normal_mixture_log_prob])
def test_ordinary_values_take_the_product_form(op, scale_shape, generator, direct_calls):
    """Forward and backward. Once every coordinate around 0 counted as far from the centre: backward took 19 times as
    long, by the direct form, and results were right."""
    loc, scale, x = (tensor.requires_grad_() for tensor in sample(((300, 24), scale_shape, (200, 1, 24)), generator))
    log_weights = [torch.randn(300, generator=generator)] if op is normal_mixture_log_prob else []
    op(*log_weights, loc, scale, x, variant="chunked").sum().backward()
    assert not any(direct_calls.values())
    with torch.no_grad():
        loc[0] = x[0] = 1e6
    op(*log_weights, loc, scale, x, variant="chunked").sum().backward()
    assert direct_calls["pull_back"]


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("op", [normal_log_prob, normal_mixture_log_prob])
def test_equal_components_take_the_product_form(op, by_rows, generator, direct_calls):
    """Less their common value the other operand lost digits, and backward took 5 times as long by the direct form."""
    (loc, scale, x) = sample(((1, 24), (1, 24), (200, 1, 24)), generator)
    tensors = [one.detach().requires_grad_() for one in (loc.expand(300, 24), scale.expand(300, 24), x)]
    if by_rows:
        tensors = [one.detach().requires_grad_() for one in (tensors[2], scale.expand(200, 1, 24), tensors[0])]
    log_weights = [torch.zeros(300 if not by_rows else (200, 1))] if op is normal_mixture_log_prob else []
    op(*log_weights, *tensors, variant="chunked").sum().backward()
    assert not any(direct_calls.values())
    dout = torch.randn(200, 300, generator=generator)
    assert_exact_gradients(*(one.detach() for one in tensors), dout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape(shapes, dtype, generator):
    tensors = sample(shapes, generator, dtype)
    assert_exact(log_prob(*tensors), *tensors)
    assert_exact_gradients(*tensors, upstream(*tensors, generator))


def test_random_roles(generator):
    def choose(options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    for _ in range(60):
        full = [choose((1, 2, 5, 13)) for _ in range(choose((1, 2, 3, 4)))]
        dimension = choose((1, 2, 9, 40))

        def batch(full=full):
            return tuple(choose((1, size)) for size in full)[choose((0, 0, 1)) :]

        shapes = ((*batch(), dimension), (*batch(), choose((1, dimension))), (*batch(), dimension))
        tensors = sample(shapes, generator)
        assert_exact(log_prob(*tensors), *tensors)
        assert_exact_gradients(*tensors, upstream(*tensors, generator))


@pytest.mark.parametrize("scale", [1e-3, SCALE_OF_NO_CONSTANT])
@pytest.mark.parametrize("offset", [1e3, 1e4])
@pytest.mark.parametrize("form", FORMS)
def test_offset_data(form, offset, scale, generator, direct_calls):
    loc, spread, x = sample(SHAPES[form], generator)
    scale = scale * (spread if scale != SCALE_OF_NO_CONSTANT else torch.ones_like(spread))
    tensors = loc + offset, scale, x + offset
    assert_exact(log_prob(*tensors), *tensors)
    assert_exact_gradients(*tensors, upstream(*tensors, generator))
    if form != "rows and columns" and scale.max() > 0.1:
        assert not any(direct_calls.values())  # there is a centre that serves


@pytest.mark.parametrize("form", [form for form in FORMS if form != "rows and columns"])
def test_values_on_both_sides_of_0(form, generator, direct_calls):
    """The centre is 0: its subtraction loses nothing, so that products serve forward and backward."""
    loc, scale, x = (torch.randn(shape, generator=generator) for shape in SHAPES[form])
    tensors = loc, 0.5 + scale.abs(), x
    assert_exact(log_prob(*tensors), *tensors)
    assert_exact_gradients(*tensors, upstream(*tensors, generator))
    assert not any(direct_calls.values())


@pytest.mark.parametrize("scale", [1e-3, SCALE_OF_NO_CONSTANT])
@pytest.mark.parametrize("relative_distance", [0.0, 1e-7, 1e-3])
@pytest.mark.parametrize("form", FORMS)
def test_near_duplicates(form, relative_distance, scale, generator):
    """Every row is about its own column: of an all-pairs call, the diagonal."""
    shape = SHAPES[form]
    loc = 30 * torch.randn(50, 1, shape[0][-1], generator=generator)
    loc = loc[: shape[0][0]]
    x = loc.squeeze(1)[torch.arange(shape[2][0]) % len(loc)]
    x = x * (1 + relative_distance * torch.randn(x.shape, generator=generator))
    tensors = loc, torch.full(shape[1], scale), x
    assert_exact(log_prob(*tensors), *tensors)
    assert_exact_gradients(*tensors, upstream(*tensors, generator))
    # as in a mixture, where the gradient comes through the nearest component
    nearest = torch.exp(-0.5 * torch.cdist(loc.squeeze(1).double(), x.double()) ** 2).float()
    assert_exact_gradients(*tensors, nearest * upstream(*tensors, generator))


@pytest.mark.parametrize("separation", [100.0, 1e5])
@pytest.mark.parametrize("form", ["columns", "columns, one scale", "rows", "rows, one scale"])
def test_clusters_that_no_centre_serves(form, separation, generator, direct_calls):
    """Near-duplicates far from the centre are computed directly: alone if they are few, else with their block."""
    loc, scale, x = sample(SHAPES[form], generator)
    loc[::2] += separation
    x[::2] += separation
    x[:50:5] = loc.squeeze(1)[::5] + 1e-3 * torch.randn(10, 45, generator=generator)
    tensors = loc, torch.full_like(scale, SCALE_OF_NO_CONSTANT), x
    assert_exact(log_prob(*tensors), *tensors)
    assert direct_calls["evaluate"] == (separation > 100)
    assert direct_calls["evaluate_pairs"] == (separation == 100)
    assert_exact_gradients(*tensors, upstream(*tensors, generator))


@pytest.mark.parametrize(
    ("bad", "rows"),
    [(math.nan, (0, 7)), (-math.inf, (0, 7)), (1e38, (0, 7)), (math.nan, (0, *range(4, 61)))],
    ids=["nan", "-inf", "1e38", "nearly all nan"],
)
@pytest.mark.parametrize("operand", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_bad_rows_spoil_no_others(form, operand, bad, rows, generator):
    tensors = sample(SHAPES[form], generator)
    dout = upstream(*tensors, generator)
    good = torch.ones(tensors[operand].shape[0], dtype=torch.bool)
    rows = [row for row in rows if row < len(good)]
    tensors[operand][rows, ..., 3] = bad
    good[rows] = False
    assert_exact(log_prob(*tensors), *tensors)
    # Gradients of the good rows are those of a call without the others
    needs = (True, False, True)  # that of the scale would have more computed directly
    mixed = gradients(*tensors, dout, needs)[operand][good]
    size = tensors[operand].shape[0]
    tensors = [tensor[good] if tensor.shape[0] == size else tensor for tensor in tensors]
    if len(tensors[1].shape) == 3 and tensors[1].shape[1] == size:
        tensors[1] = tensors[1][:, good]
    dout = dout[good] if operand == 0 else dout[:, good]
    alone = list(gradients(*tensors, dout))
    alone[operand] = mixed
    assert max(gradient_ratios(alone, *tensors, dout)) <= 1


@pytest.mark.parametrize("form", [*FORMS, "row by row", "one row"])
def test_improper_scales(form, generator):
    """They give what the plain expression gives: one in one place spoils no other."""
    loc, scale, x = sample(SHAPES[form], generator)
    flat = scale.flatten()
    for i, bad in enumerate((0.0, -1.0, math.inf, math.nan, 1e-30, 1e30)):
        flat[i * flat.numel() // 6] = bad
    scale = flat.view(scale.shape)
    assert_exact(log_prob(loc, scale, x), loc, scale, x)


@pytest.mark.parametrize("shapes", [SHAPES[form] for form in FORMS], ids=FORMS)
def test_strides(shapes, generator):
    """Operands that are transposed, reversed in part, or expanded, and an upstream gradient that is expanded."""
    tensors = sample(shapes, generator)
    dout = upstream(*tensors, generator)
    expected = log_prob(*tensors), *gradients(*tensors, dout)
    strided = [tensor.repeat_interleave(2, -1)[..., ::2] for tensor in tensors]
    strided[2] = tensors[2].T.contiguous().T
    copies = [tensor.clone() for tensor in strided]
    actual = log_prob(*strided), *gradients(*strided, dout.T.contiguous().T)
    for first, second in zip(expected, actual):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert all(map(torch.equal, strided, copies))
    assert_exact_gradients(*strided, dout[:1, :1].expand_as(dout))
    loc, scale, x = tensors
    wide = loc.expand(loc.shape[0], x.shape[0], -1), scale, x[:, :1].expand_as(x)
    assert_exact(log_prob(*wide), *wide)
    assert_exact_gradients(*wide, dout)


@pytest.mark.parametrize("form", [*FORMS, "row by row"])
def test_gradients_are_those_asked_for(form, generator):
    tensors = sample(SHAPES[form], generator)
    dout = upstream(*tensors, generator)
    every = gradients(*tensors, dout)
    for i in range(3):
        needs = tuple(i == j for j in range(3))
        for got, expected, wanted in zip(gradients(*tensors, dout, needs), every, needs):
            if wanted:
                torch.testing.assert_close(got, expected, rtol=0, atol=0)
            else:
                assert got is None


@pytest.mark.parametrize(
    ("dtypes"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float16, torch.bfloat16),
        (torch.float32, torch.float64, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["columns", "rows, one scale", "row by row"])
def test_mixed_dtypes(form, dtypes, generator):
    tensors = [tensor.to(dtype) for tensor, dtype in zip(sample(SHAPES[form], generator), dtypes)]
    assert_exact(log_prob(*tensors), *tensors)
    assert_exact_gradients(*tensors, upstream(*tensors, generator))


EXTREMES = {
    "headline": ((1000, 1, 64), (1000, 1, 64), (600, 64)),
    "wide": ((90, 1, 4096), (90, 1, 4096), (90, 4096)),
    "wide, scale by pairs": ((20, 1, 4096), (20, 30, 4096), (30, 4096)),
    "many rows": ((16, 64), (16, 64), (20000, 1, 64)),
    "many columns": ((20000, 64), (20000, 64), (16, 1, 64)),
    "many columns, scale by rows": ((20000, 64), (16, 1, 64), (16, 1, 64)),
    "one column": ((64,), (64,), (60000, 64)),
    "row by row": ((60000, 64), (60000, 64), (60000, 64)),
    "row by row, wide": ((300, 4096), (300, 4096), (300, 4096)),
    "many batches": ((1500, 12, 1, 64), (1500, 12, 1, 64), (1500, 1, 12, 64)),
    "widest": ((100000,), (100000,), (9, 1, 100000)),
    "one coordinate": ((2000, 1, 1), (2000, 1, 1), (2000, 1)),
}


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, torch.float32) for form in EXTREMES),
        *((form, torch.bfloat16) for form in ("headline", "many batches", "row by row", "widest")),
        *((form, torch.float64) for form in ("headline", "row by row", "one column", "widest")),
    ],
    ids=str,
)
def test_memory(form, dtype, generator):
    tensors = sample(EXTREMES[form], generator, dtype)
    if dtype != torch.float64:
        tensors[1].fill_(SCALE_OF_NO_CONSTANT)  # nothing is certain without a look at the pairs
    assert memory(Pass(log_prob, tensors), warmup=0).temporary_bytes <= 4 * 2**20
    sums = 4 * sum(tensor.numel() for tensor in tensors) if dtype == torch.bfloat16 else 0
    found = memory(Pass(gradients, (*tensors, upstream(*tensors, generator))), warmup=0)
    assert found.temporary_bytes <= 8 * 2**20 + sums
