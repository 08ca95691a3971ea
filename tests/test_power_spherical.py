"""What is peculiar to the PowerSpherical log density: hard inputs, the antipode, the package that it replaces."""

import dataclasses
import math
from fractions import Fraction

import pytest
import torch

import effops
from effops.measure import Pass, memory
from effops.ops.power_spherical import op
from effops.precision import unit_roundoff
from effops.testing import error_ratio, gradient_error_ratio

SCALES = (1e-30, 1e-3, 1.0, 100.0, 1e4, 1e6, 1e7, 1e30, math.inf, math.nan, 0.0, -0.25, -1e3)
DIMENSIONS = (2, 3, 7, 8, 127, 128, 129, 768, 4096)
VARIANTS = [v for v in op.variants if v != "compile"]


def unit(*shape, generator):
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=torch.float64, generator=generator), dim=-1)


def hard_pairs(dimension, generator, *, identical):
    """Rows of loc and x, float64: every kind of pair that breaks a careless log density, one a row.

    With `identical`, one loc has identical coordinates: every term of its dot products rounds the same way.
    """
    e1 = torch.zeros(dimension, dtype=torch.float64)
    e1[0] = 1
    two_sparse = torch.zeros(dimension, dtype=torch.float64)
    two_sparse[0], two_sparse[-1] = 0.6, 0.8
    locs = [e1, two_sparse, *unit(4, dimension, generator=generator)]
    locs[2] = locs[2].abs()  # no cancellation in the sum
    if identical:
        locs[3] = torch.full_like(e1, dimension**-0.5)
    rows = []
    for loc in locs:
        tangent = unit(dimension, generator=generator)
        tangent = torch.nn.functional.normalize(tangent - (tangent @ loc) * loc, dim=-1)
        rows += [(loc, factor * loc) for factor in (1, 1 + 1e-7, 1 - 1e-7, -1, -1 - 1e-7, 0.5, 1.5, -1.5)]
        rows += [(loc, tangent), (loc, unit(dimension, generator=generator))]
        for angle in (1e-4, 1e-2, *(math.pi - d for d in (0.1, 1e-2, 1e-3, 3e-4, 1e-6))):
            rows.append((loc, math.cos(angle) * loc + math.sin(angle) * tangent))
    return torch.stack([loc for loc, _ in rows]), torch.stack([x for _, x in rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_hard_inputs(variant, dimension, dtype, device, generator):
    if variant == "triton" and device == "cpu" and dimension not in (2, 7, 129):
        pytest.skip("interpreted kernels take small shapes")
    check_hard_inputs(variant, dimension, dtype, device, generator)


@pytest.mark.parametrize(
    ("dimension", "dtype"),
    [*((dimension, torch.float32) for dimension in DIMENSIONS), (128, torch.bfloat16), (128, torch.float64)],
    ids=str,
)
def test_hard_inputs_compiled(dimension, dtype, device, generator):
    check_hard_inputs("compile", dimension, dtype, device, generator)


def check_hard_inputs(variant, dimension, dtype, device, generator):
    # In float64 a matrix product of two vectors of identical coordinates is itself off by up to three times the
    # allowance of `contraction_error`.
    pairs = hard_pairs(dimension, generator, identical=dtype != torch.float64)
    loc, x = (rows.to(device, dtype) for rows in pairs)
    scale = torch.tensor(SCALES, dtype=torch.float64).to(device, dtype)
    if variant == "triton" and device == "cpu":  # the interpreter is slow: every kind of pair, fewer of each
        loc, x = loc[::3], x[::3]
    row_by_row = (loc, scale.unsqueeze(-1), x)
    all_pairs = (loc[::5].unsqueeze(1), scale.unsqueeze(-1).unsqueeze(-1), x[::3])
    for args in (row_by_row, all_pairs):
        assert error_ratio(op, args, op(*args, variant=variant)) <= 1
        leaves = tuple(arg.clone().requires_grad_() for arg in args)
        out = op(*leaves, variant=variant)
        dout = torch.randn(out.shape, generator=generator).to(device, dtype)
        gradients = torch.autograd.grad(out, leaves, dout)
        # An infinite or NaN scale is in every sum over the scales: the gradients of loc and x say nothing there.
        assert gradient_error_ratio(op, args, dout, (None, gradients[1], None)) <= 1
        proper = scale.isfinite()
        leaves = tuple(arg.clone().requires_grad_() for arg in (args[0], args[1][proper], args[2]))
        gradients = torch.autograd.grad(op(*leaves, variant=variant), leaves, dout[proper])
        assert gradient_error_ratio(op, tuple(leaf.detach() for leaf in leaves), dout[proper], gradients) <= 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_stays_alone(variant, bad, device, generator):
    """NaN or infinity in one row of x, loc or scale must reach no other, tails of blocks included."""
    loc, scale, x = op.sample((67, 37), (67,), (70, 1, 37), device=device, generator=generator)
    clean = op(loc, scale, x, variant=variant)
    for spoiled, (row, column) in (("x", (69, slice(None))), ("loc", (slice(None), 66)), ("scale", (slice(None), 66))):
        args = {"loc": loc.clone(), "scale": scale.clone(), "x": x.clone()}
        args[spoiled][-1] = bad
        out = op(**args, variant=variant)
        assert not out[row, column].isfinite().any()
        out[row, column] = clean[row, column]
        assert error_ratio(op, (loc, scale, x), out) <= 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_antipode_is_finite_and_outside_is_nan(variant, dtype, device):
    loc = torch.eye(3, dtype=dtype, device=device)[:1].requires_grad_()
    scale = torch.tensor([2.0], dtype=dtype, device=device).requires_grad_()
    out = op(loc, scale, -loc.detach(), variant=variant)
    floor = unit_roundoff(dtype)
    rounding = 8 * floor  # relative: of the log, its product with the scale, the other term, and the sum
    expected = math.lgamma(4) - math.lgamma(3) - math.log(4 * math.pi) + 2 * math.log(floor / 2)
    assert out.item() == pytest.approx(expected, rel=rounding, abs=0)
    dloc, dscale = torch.autograd.grad(out, (loc, scale))
    assert torch.equal(dloc, torch.zeros_like(loc))
    assert dscale.item() == pytest.approx(1 / 3 + math.log(floor / 2), rel=rounding, abs=0)
    assert op(loc, scale, -1.01 * loc.detach(), variant=variant).isnan().all()


def package_error(loc, scale, x):
    """By how much the package is off in float64: each of its terms, and each sum of them, by some units."""
    b = 0.5 * (x.shape[-1] - 1)
    dot = (loc * x).sum(-1)
    terms = (
        (scale + 2 * b) * math.log(2),
        torch.lgamma(scale + b),
        torch.lgamma(scale + 2 * b),
        torch.full_like(scale, b * math.log(math.pi)),
        scale * torch.log1p(dot),
    )
    return 4 * unit_roundoff(torch.float64) * sum(term.abs() for term in terms)


@pytest.mark.parametrize("factor", [1, 1e5])
@pytest.mark.parametrize("variant", [v for v in op.variants if v != "triton"])
def test_equals_the_package_it_replaces(variant, factor, generator):
    """In float64, which the package needs: its terms of about s log 2 each are opposite."""
    package = pytest.importorskip("power_spherical")
    loc, scale, x = op.workload(M=6, T=5, D=16, generator=generator)
    args = (loc, factor * scale, x)
    wide = tuple(arg.double() for arg in args)
    expected = package.PowerSpherical(*wide[:2], validate_args=False).log_prob(wide[2])
    # The dot products of both may be off.
    of_package = op.bounds(op.prepare(*wide))
    error = torch.maximum(of_package.below, of_package.above) + package_error(*wide)
    for inputs in (args, wide):
        bounds = op.bounds(op.prepare(*inputs))
        bounds = dataclasses.replace(bounds, value=expected, below=bounds.below + error, above=bounds.above + error)
        assert bounds.error_ratio(op(*inputs, variant=variant)) <= 1


# Shapes of loc, scale and x at which blocks need the most: copies of both operands, a result in another dtype, a scale
# for each pair, and either partial sums or, in low dimensions, a normaliser of many terms.
LARGEST_TEMPORARIES = {
    "low dimension": ((2, 65536, 1, 2), (2, 65536, 2), (1, 65536, 2, 2)),
    "low dimension, scale alone varies": ((32767, 1, 2), (2, 32767, 2), (32767, 2, 2)),
    "in parts": ((512, 1, 513), (512, 512), (512, 513)),
    "in parts, scale alone varies": ((300,), (512, 512), (512, 1, 300)),
}


@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shapes", LARGEST_TEMPORARIES.values(), ids=LARGEST_TEMPORARIES)
def test_chunked_stays_within_its_memory_at_worst(shapes, dtype, permuted):
    """Antipodes, which need masks besides; with a scale for each of them it once took 4.6 MiB."""
    loc, scale, x = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    loc[..., 0], x[..., 0] = 1, -1
    args = (loc, scale + 3, x)
    if permuted:
        args = tuple(arg.mT.contiguous().mT if arg.ndim > 1 else arg for arg in args)
    measured = memory(Pass(lambda *args: op(*args, variant="chunked"), args))
    assert measured.temporary_bytes <= 4 * 2**20


def test_workload_is_a_draw_from_the_distribution(generator):
    """The cosine to loc is 2 z - 1 with z from beta(b + s, b), so its mean is s / (s + 2 b)."""
    loc, scale, x = op.workload(M=2000, T=1, D=5, dtype=torch.float64, generator=generator)
    cosine = (loc * x[:, 0]).sum(-1)
    expected = scale / (scale + 4)
    assert (x.norm(dim=-1) - 1).abs().max() < 1e-12
    assert (cosine - expected).mean().abs() < 4 * (cosine - expected).std() / 2000**0.5


def test_result_dtype_is_the_promotion_of_the_inputs(device, generator):
    for case in (((5, 4), (5,), (5, 4)), ((4,), (), (4,)), ((4,), (3,), (4,)), ((5, 4), (), (4,))):
        for dtypes in (
            (torch.bfloat16, torch.float32, torch.bfloat16),
            (torch.float32, torch.float64, torch.float32),
            (torch.float16, torch.float16, torch.float64),
            (torch.float32, torch.bfloat16, torch.bfloat16),
        ):
            sampled = op.sample(*case, dtype=torch.float64, device=device, generator=generator)
            loc, scale, x = (arg.to(dtype) for arg, dtype in zip(sampled, dtypes))
            out = effops.power_spherical_log_prob(loc, scale, x)
            assert out.dtype == (scale * (loc * x).sum(-1)).dtype
            assert error_ratio(op, (loc, scale, x), out) <= 1


@pytest.mark.parametrize("variant", [v for v in op.variants if v != "compile"])
def test_autocast_rounds_nothing(variant, device, generator):
    args = op.sample((40, 64), (40,), (30, 1, 64), device=device, generator=generator)
    expected = op(*args, variant=variant)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(op(*args, variant=variant), expected)
        half = op(*(arg.bfloat16() for arg in args), variant=variant)
    assert half.dtype == torch.float32
    assert error_ratio(op, tuple(arg.bfloat16().float() for arg in args), half) <= 1


def test_numbers_and_integers_as_scale(device, generator):
    loc, _, x = op.sample((5, 4), (5,), (5, 4), device=device, generator=generator)
    expected = op(loc, torch.tensor(3.0, device=device), x)
    for scale in (
        3.0,
        3,
        Fraction(3),
        torch.tensor(3, device=device),
        torch.tensor([3], device=device),
        torch.tensor(3.0),
    ):
        assert torch.equal(op(loc, scale, x), expected)
    # A number is as wide as the arithmetic: 1e5 is beyond float16, and W(1e5) is not.
    half = op(loc.half(), 1e5, loc.half())
    assert half.dtype == torch.float16
    assert half.isfinite().any()


BAD = {
    "last dimension": ((3, 4), (3,), (3, 5), ValueError, "last dimension of `x` must equal"),
    "last dimension 1": ((3, 4), (3,), (3, 1), ValueError, "last dimension of `x` must equal"),
    "not broadcastable": ((3, 4), (3,), (2, 4), ValueError, "must broadcast"),
    "scale not broadcastable": ((3, 4), (2,), (3, 4), ValueError, "must broadcast"),
    "D = 0": ((3, 0), (3,), (3, 0), ValueError, "at least 2"),
    "D = 1": ((3, 1), (3,), (3, 1), ValueError, "at least 2"),
    "0-d": ((), (), (), ValueError, "must have a last dimension"),
}


@pytest.mark.parametrize(("loc", "scale", "x", "error", "message"), BAD.values(), ids=BAD)
def test_bad_shapes(loc, scale, x, error, message):
    with pytest.raises(error, match=message) as caught:
        effops.power_spherical_log_prob(torch.zeros(loc), torch.ones(scale), torch.zeros(x))
    assert str(caught.value).startswith("power_spherical_log_prob: ")
    assert "got" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("argument", ["loc", "x"])
def test_bad_dtypes(argument, dtype):
    args = {"loc": torch.ones(3, 2), "scale": torch.ones(3), "x": torch.ones(3, 2)}
    args[argument] = args[argument].to(dtype)
    with pytest.raises(TypeError, match=f"`{argument}` must be real floating point; got {dtype}"):
        effops.power_spherical_log_prob(**args)


def test_bad_scale():
    loc = torch.ones(3, 2)
    with pytest.raises(TypeError, match="`scale` must be real; got torch"):
        effops.power_spherical_log_prob(loc, torch.ones(3, dtype=torch.complex64), loc)
    with pytest.raises(TypeError, match="`scale` must be a tensor or a number; got str"):
        effops.power_spherical_log_prob(loc, "large", loc)
    with pytest.raises(TypeError, match="`loc` must be a tensor; got list"):
        effops.power_spherical_log_prob([1.0, 0.0], 1.0, loc)


def test_sparse_tensors():
    loc = torch.ones(3, 2)
    with pytest.raises(TypeError, match="`x` must be dense; got torch"):
        effops.power_spherical_log_prob(loc, 1.0, loc.to_sparse())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meta_tensors(dtype):
    args = (torch.empty(400, 64), torch.empty(400), torch.empty(100, 1, 64))
    out = op(*(arg.to("meta", dtype) for arg in args))
    real = op(*(arg.to(dtype) for arg in op.sample(*(arg.shape for arg in args))))
    assert (out.shape, out.dtype, out.stride()) == (real.shape, real.dtype, real.stride())


def test_autocast_around_backward(device, generator):
    args = tuple(arg.requires_grad_() for arg in op.sample((300, 16), (300,), (90, 1, 16), generator=generator))
    expected = torch.autograd.grad(op(*args).sum(), args, create_graph=True)
    out = op(*args).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(out, args, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_mixed_devices():
    loc = torch.ones(3, 2)
    for args in ((loc.to("meta"), torch.ones(3), loc), (loc, torch.ones(3, device="meta"), loc)):
        with pytest.raises(ValueError, match="must be on one device; got"):
            effops.power_spherical_log_prob(*args)
