"""What densities of directions share: hard inputs, dtypes, autocast, bad arguments."""

import math
from fractions import Fraction

import pytest
import torch

from effops.dispatch.requirements import library_error
from effops.ops.densities import power_spherical, von_mises_fisher
from effops.reference import error_ratio, gradient_error_ratio, reference_of

from ..support.calls import on_this_python

SCALES = (1e-30, 1e-3, 1.0, 100.0, 1e4, 1e6, 1e7, 1e30, math.inf, math.nan, 0.0, -0.25, -1e3)
DIMENSIONS = (2, 3, 7, 8, 127, 128, 129, 768, 4096)
VARIANTS = [v for v in on_this_python(power_spherical.op.variants) if v != "compile"]


@pytest.fixture(params=[power_spherical.op, von_mises_fisher.op], ids=lambda op: op.name)
def op(request):
    return request.param


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


@pytest.mark.each_value(all=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_hard_inputs(op, variant, dimension, dtype, device, generator):
    if variant == "triton" and device == "cpu" and dimension not in ((2, 7, 129) if dtype == torch.float32 else (7,)):
        pytest.skip("interpreted kernels take small shapes")
    if variant == "cpp":
        if device != "cpu" or library_error():
            pytest.skip("cpp needs a CPU and its library")
        check_hard_inputs(op, variant, dimension, dtype, device, generator, forms=("each scale its directions",))
    else:
        check_hard_inputs(op, variant, dimension, dtype, device, generator)


@pytest.mark.turns(4)
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("dimension", "dtype", "form"),
    [
        (2, torch.float32, "rows"),
        (129, torch.float32, "all pairs"),
        (7, torch.bfloat16, "all pairs"),
        (128, torch.float64, "rows"),
    ],
    ids=str,
)
def test_hard_inputs_compiled(op, dimension, dtype, form, device, generator):
    if op is not power_spherical.op and (dimension, dtype) != (129, torch.float32):
        pytest.skip("each dimension is compiled anew; the antipode, the hard part, is the PowerSpherical's")
    check_hard_inputs(op, "compile", dimension, dtype, device, generator, forms=(form,))


def check_hard_inputs(op, variant, dimension, dtype, device, generator, forms=("rows", "all pairs")):
    # In float64 a matrix product of two vectors of identical coordinates is itself off by up to three times the
    # allowance of `contraction_error`.
    pairs = hard_pairs(dimension, generator, identical=dtype != torch.float64)
    loc, x = (rows.to(device, dtype) for rows in pairs)
    scale = torch.tensor(SCALES, dtype=torch.float64).to(device, dtype)
    if variant == "triton" and device == "cpu":  # the interpreter is slow: every kind of pair, fewer of each
        loc, x = loc[::5], x[::5]
    calls = {
        "rows": (loc, scale.unsqueeze(-1), x),
        "all pairs": (loc[::5].unsqueeze(1), scale.unsqueeze(-1).unsqueeze(-1), x[::3]),
        "each scale its directions": (
            loc[::5].unsqueeze(1).repeat(len(scale), 1, 1, 1),
            scale.unsqueeze(-1).unsqueeze(-1),
            x[::3],
        ),
    }
    for args in (calls[form] for form in forms):
        if variant != "compile":  # without gradients it is compiled apart
            assert error_ratio(op, args, op(*args, variant=variant)) <= 1
        leaves = tuple(arg.clone().requires_grad_() for arg in args)
        out = op(*leaves, variant=variant)
        assert error_ratio(op, args, out) <= 1
        dout = torch.randn(out.shape, generator=generator).to(device, dtype)
        gradients = torch.autograd.grad(out, leaves, dout)
        # An infinite or NaN scale is in every sum over the scales: the gradients of loc and x say nothing there.
        assert gradient_error_ratio(op, args, dout, (None, gradients[1], None)) <= 1
        proper = scale.isfinite()
        own = args[0][proper] if args[0].ndim == 4 else args[0]
        leaves = tuple(arg.clone().requires_grad_() for arg in (own, args[1][proper], args[2]))
        gradients = torch.autograd.grad(op(*leaves, variant=variant), leaves, dout[proper])
        assert gradient_error_ratio(op, tuple(leaf.detach() for leaf in leaves), dout[proper], gradients) <= 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_stays_alone(op, variant, bad, device, generator):
    """NaN or infinity in one row of x, loc or scale must reach no other, tails of blocks included."""
    loc, scale, x = reference_of(op).sample((67, 37), (67,), (70, 1, 37), device=device, generator=generator)
    clean = op(loc, scale, x, variant=variant)
    for spoiled, (row, column) in (("x", (69, slice(None))), ("loc", (slice(None), 66)), ("scale", (slice(None), 66))):
        args = {"loc": loc.clone(), "scale": scale.clone(), "x": x.clone()}
        args[spoiled][-1] = bad
        out = op(*args.values(), variant=variant)
        assert not out[row, column].isfinite().any()
        out[row, column] = clean[row, column]
        assert error_ratio(op, (loc, scale, x), out) <= 1


def test_result_dtype_is_the_promotion_of_the_inputs(op, device, generator):
    for case in (((5, 4), (5,), (5, 4)), ((4,), (), (4,)), ((4,), (3,), (4,)), ((5, 4), (), (4,))):
        for dtypes in (
            (torch.bfloat16, torch.float32, torch.bfloat16),
            (torch.float32, torch.float64, torch.float32),
            (torch.float16, torch.float16, torch.float64),
            (torch.float32, torch.bfloat16, torch.bfloat16),
        ):
            sampled = reference_of(op).sample(*case, dtype=torch.float64, device=device, generator=generator)
            loc, scale, x = (arg.to(dtype) for arg, dtype in zip(sampled, dtypes))
            out = op(loc, scale, x)
            assert out.dtype == (scale * (loc * x).sum(-1)).dtype
            assert error_ratio(op, (loc, scale, x), out) <= 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_rounds_nothing(op, variant, device, generator):
    args = reference_of(op).sample((40, 64), (40,), (30, 1, 64), device=device, generator=generator)
    expected = op(*args, variant=variant)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(op(*args, variant=variant), expected)
        half = op(*(arg.bfloat16() for arg in args), variant=variant)
    assert half.dtype == torch.float32
    assert error_ratio(op, tuple(arg.bfloat16().float() for arg in args), half) <= 1


def test_numbers_and_integers_as_scale(op, device, generator):
    loc, _, x = reference_of(op).sample((5, 4), (5,), (5, 4), device=device, generator=generator)
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
def test_bad_shapes(op, loc, scale, x, error, message):
    with pytest.raises(error, match=message) as caught:
        op(torch.zeros(loc), torch.ones(scale), torch.zeros(x))
    assert str(caught.value).startswith(f"{op.name}: ")
    assert "got" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("argument", ["loc", "x"])
def test_bad_dtypes(op, argument, dtype):
    args = {"loc": torch.ones(3, 2), "scale": torch.ones(3), "x": torch.ones(3, 2)}
    args[argument] = args[argument].to(dtype)
    with pytest.raises(TypeError, match=f"`{argument}` must be real floating point; got {dtype}"):
        op(*args.values())


def test_bad_scale(op):
    name, loc = list(op.core_dims)[1], torch.ones(3, 2)
    with pytest.raises(TypeError, match=f"`{name}` must be real; got torch"):
        op(loc, torch.ones(3, dtype=torch.complex64), loc)
    with pytest.raises(TypeError, match=f"`{name}` must be a tensor or a number; got str"):
        op(loc, "large", loc)
    with pytest.raises(TypeError, match="`loc` must be a tensor; got list"):
        op([1.0, 0.0], 1.0, loc)


def test_sparse_tensors(op):
    loc = torch.ones(3, 2)
    with pytest.raises(TypeError, match="`x` must be dense; got torch"):
        op(loc, 1.0, loc.to_sparse())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meta_tensors(op, dtype):
    args = (torch.empty(400, 64), torch.empty(400), torch.empty(100, 1, 64))
    out = op(*(arg.to("meta", dtype) for arg in args))
    real = op(*(arg.to(dtype) for arg in reference_of(op).sample(*(arg.shape for arg in args))))
    assert (out.shape, out.dtype, out.stride()) == (real.shape, real.dtype, real.stride())


def test_autocast_around_backward(op, device, generator):
    args = tuple(
        arg.requires_grad_() for arg in reference_of(op).sample((300, 16), (300,), (90, 1, 16), generator=generator)
    )
    expected = torch.autograd.grad(op(*args).sum(), args, create_graph=True)
    out = op(*args).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(out, args, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_mixed_devices(op):
    loc = torch.ones(3, 2)
    for args in ((loc.to("meta"), torch.ones(3), loc), (loc, torch.ones(3, device="meta"), loc)):
        with pytest.raises(ValueError, match="must be on one device; got"):
            op(*args)
