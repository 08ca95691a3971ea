"""The Triton kernels of dot products against float64 oracles, interpreted or on a device."""

import math

import pytest
import torch

pytest.importorskip("triton")
from effops.kernels import launch, pairs, power_spherical, von_mises_fisher

from effops.numerics.special import bessel_ratio, log_vmf_normaliser

from .support import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    MARKS,
    arithmetic,
    assert_padding_untouched,
    bf16,
    check_within,
    contraction_units,
    f16,
    f32,
    f64,
    half_ulp,
    log_gamma_ratio_and_derivatives,
    log_half,
    oracle_w,
    padded,
    triton,
)

tl = triton.language

pytestmark = MARKS

# (B, M, N, D): several tiles and tails; row-wise in either role; both; long sums, which are split
SHAPES = [
    (2, 70, 67, 33),
    (1, 3, 130, 129),
    (3, 65, 2, 2),
    (2, 5, 1, 3),
    (3, 1, 9, 40),
    (19, 1, 1, 129),
    (1, 300, 1, 7),
]
SHAPES += [(2, 9, 1, 600), (1, 2, 400, 7)]
SCALES = {"scalar": "", "batch": "b", "rows": "bm", "columns": "bn", "columns of all": "n", "full": "bmn"}


def check_forward(out, x, loc, scale, tolerance, precision="highest"):
    u = arithmetic(x, loc, scale)
    c = contraction_units(x.shape[2], precision) * u
    s = scale.double()
    t = 1 + x.double() @ loc.double().mT
    W, _ = oracle_w(scale, x.shape[2])
    ends = torch.stack([W + s * log_half(t + sign * c, u) for sign in (-1, 1)])
    size = W.abs() + 2 * s.abs() * log_half(t, u).abs() + out.double().abs()
    pad = 2 * u * size + half_ulp(out) + (1e-11 * W.abs().clamp(min=1) if u < 1e-10 else 0)
    may_be_nan = (t - c < -tolerance) | W.isnan()
    must_be_nan = (t + c < -tolerance) | W.isnan()
    within = (ends.amin(0) - pad <= out) & (out <= ends.amax(0) + pad)
    ok = torch.where(out.isnan(), may_be_nan, within & ~must_be_nan)
    assert ok.all(), f"{(~ok).sum()} of {ok.numel()} outside: got {out[~ok][:4]}, expected {ends[:, ~ok][:, :4]}"


def gradients(x, loc, scale, dout):
    """Exact gradients of every pair and what rounding may add to each: dx, dloc, dscale (B, M, N)."""
    u = arithmetic(x, loc, scale)
    D = x.shape[2]
    x64, loc64, s, g = (a.double() for a in (x, loc, scale, dout))
    t = 1 + x64 @ loc64.mT
    G = g * s / t
    relative = contraction_units(D) * u / t.abs()
    _, W_grad = oracle_w(scale, D)
    exact = G @ loc64, G.mT @ x64, g * (W_grad + log_half(t, u))
    terms = [(G.abs() * (relative + (12 + math.sqrt(n)) * u)) for n in t.shape[1:]]
    dscale_error = g.abs() * (relative + 8 * u * (W_grad.abs() + log_half(t, u).abs()) + (1e-11 if u < 1e-10 else 0))
    return exact, (terms[1] @ loc64.abs(), terms[0].mT @ x64.abs(), dscale_error)


def make(shape, dtypes=(f32, f32, f32), scale="columns", layout="padded", seed=0):
    B, M, N, D = shape
    generator = torch.Generator().manual_seed(seed)

    def random(*size):
        return torch.randn(size, generator=generator, dtype=f64)

    x, loc = (torch.nn.functional.normalize(random(B, rows, D), dim=-1) for rows in (M, N))
    size = [n if axis in SCALES[scale] else 1 for axis, n in zip("bmn", (B, M, N), strict=True)]
    s = (0.5 * (4 * random(*size)).round()).exp()  # few distinct values: mpmath is slow
    place = LAYOUTS[layout]
    x, loc, s = (place(t.to(dtype).to(DEVICE)) for t, dtype in zip((x, loc, s), dtypes, strict=True))
    result = torch.promote_types(torch.promote_types(*dtypes[:2]), dtypes[2])
    return x, loc, s, place(random(B, M, N).to(result).to(DEVICE))


def run_forward(x, loc, scale, dtype=None, layout="padded", tolerance=1e-6, precision="highest"):
    shape = x.shape[0], x.shape[1], loc.shape[1]
    out = LAYOUTS[layout](torch.full(shape, math.nan, dtype=dtype or scale.dtype, device=DEVICE))
    scale = scale.expand(shape)
    pairs.forward(power_spherical.MAP, x, loc, scale, out, precision=precision, tolerance=tolerance)
    return out


def run_backward(x, loc, scale, dout, wanted=(True, True, True), layout="padded"):
    """Gradients of x, loc and scale; that of scale is summed over m or n, not both, where scale has size 1."""
    shape = dout.shape
    scale_shape = list(torch.broadcast_shapes(scale.shape, (shape[0], 1, 1)))
    if scale_shape[1:] == [1, 1]:
        scale_shape[2] = shape[2]
    shapes = x.shape, loc.shape, scale_shape
    grads = [
        LAYOUTS[layout](torch.full(tuple(size), math.nan, dtype=t.dtype, device=DEVICE)) if want else None
        for want, size, t in zip(wanted, shapes, (x, loc, scale), strict=True)
    ]
    scale = scale.expand(shape)
    pairs.backward(power_spherical.MAP, x, loc, scale, dout, *grads, precision="highest", tolerance=1e-6)
    return grads


def check_backward(x, loc, scale, dout, grads):
    exact, error = gradients(x, loc, scale.expand(dout.shape), dout)
    for name, got, e, d in zip(("dx", "dloc", "dscale"), grads, exact, error, strict=True):
        if got is None:
            continue
        if name == "dscale":
            u = arithmetic(x, loc, scale)
            for axis in (1, 2):
                if got.shape[axis] < e.shape[axis]:
                    d = d.sum(axis, keepdim=True) + math.sqrt(e.shape[axis]) * u * e.abs().sum(axis, keepdim=True)
                    e = e.sum(axis, keepdim=True)
        check_within(name, got, e, d)
        assert_padding_untouched(got)


@pytest.mark.each_value
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_scales(shape, scale):
    x, loc, s, dout = make(shape, scale=scale)
    out = run_forward(x, loc, s)
    check_forward(out, x, loc, s.expand(out.shape), 1e-6)
    assert_padding_untouched(out)
    check_backward(x, loc, s, dout, run_backward(x, loc, s, dout))


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(str(dtype)[6:] for dtype in dtypes))
@pytest.mark.parametrize("shape", [(2, 70, 34, 33), (2, 5, 1, 129), (1, 1, 130, 7)], ids=str)
def test_dtypes(shape, dtypes):
    if DEVICE == "cpu" and f64 in dtypes and bf16 in dtypes:
        pytest.skip("the interpreter stores float64 as bf16 wrongly")
    x, loc, s, dout = make(shape, dtypes)
    out = run_forward(x, loc, s, dtype=dout.dtype, tolerance=2e-2)
    check_forward(out, x, loc, s.expand(out.shape), 2e-2)
    check_backward(x, loc, s, dout, run_backward(x, loc, s, dout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 70, 67, 33), (2, 5, 1, 40), (3, 1, 9, 129), (19, 1, 1, 7)], ids=str)
def test_strides(shape, layout):
    x, loc, s, dout = make(shape, scale="full", layout=layout)
    out = run_forward(x, loc, s, layout="batch last")
    check_forward(out, x, loc, s, 1e-6)
    check_backward(x, loc, s, dout, run_backward(x, loc, s, dout, layout="transposed"))


@pytest.mark.parametrize("shape", [(2, 70, 67, 33), (3, 5, 1, 7), (19, 1, 1, 7)], ids=str)
def test_expanded_inputs(shape):
    x, loc, s, dout = make(shape, scale="scalar")
    x, loc = x[:1].expand_as(x), loc[:, :1].expand_as(loc)
    dout = dout[:1, :, :1].expand_as(dout)
    out = run_forward(x, loc, s)
    check_forward(out, x, loc, s.expand(out.shape), 1e-6)
    check_backward(x, loc, s, dout, run_backward(x, loc, s, dout))


@pytest.mark.each_value
@pytest.mark.parametrize("shape", [(2, 70, 34, 7), (2, 70, 1, 7), (3, 1, 9, 40), (19, 1, 1, 7)], ids=str)
@pytest.mark.parametrize("scale", ["rows", "columns", "full"])
def test_wanted_gradients(shape, scale):
    x, loc, s, dout = make(shape, scale=scale)
    for wanted in range(8):
        grads = run_backward(x, loc, s, dout, [bool(wanted >> bit & 1) for bit in range(3)])
        check_backward(x, loc, s, dout, grads)


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 0, 0, 5), (2, 0, 1, 5)], ids=str)
@pytest.mark.parametrize("scale", ["rows", "columns", "full"])
def test_size_0(shape, scale):
    x, loc, s, dout = make(shape, scale=scale)
    run_forward(x, loc, s)
    for grad in run_backward(x, loc, s, dout):
        assert (grad == 0).all()


@pytest.mark.parametrize("shape", [(3, 70, 34, 7), (1, 300, 1, 7), (40, 1, 1, 7)], ids=str)
def test_grid_limit_and_parts_do_not_change_the_result(shape, monkeypatch):
    x, loc, s, dout = make(shape)
    out, grads = run_forward(x, loc, s), run_backward(x, loc, s, dout)
    monkeypatch.setattr(launch, "MAX_GRID", 2)
    assert torch.equal(run_forward(x, loc, s), out)
    for got, expected in zip(run_backward(x, loc, s, dout), grads, strict=True):
        assert torch.equal(got, expected)
    for busy in 1, 5:
        monkeypatch.setattr(launch, "BUSY", busy)
        check_backward(x, loc, s, dout, run_backward(x, loc, s, dout))


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("shape", [(2, 70, 34, 33), (2, 70, 1, 7), (2, 1, 9, 40), (19, 1, 1, 7)], ids=str)
def test_a_bad_row_stays_alone(shape, bad):
    x, loc, s, dout = make(shape)
    B, M, _, D = shape
    for i, j in ((0, 0), (B - 1, M - 1)):
        x_bad = padded(x)
        x_bad[i, j, D - 1] = bad
        clean = torch.ones(B, M, dtype=torch.bool, device=DEVICE)
        clean[i, j] = False
        out, expected = run_forward(x_bad, loc, s), run_forward(x, loc, s)
        assert torch.equal(out[clean], expected[clean])
        assert not out[~clean].isfinite().any()
        (dx, dloc, _), (dx_expected, dloc_expected, _) = (run_backward(a, loc, s, dout) for a in (x_bad, x))
        assert torch.equal(dx[clean], dx_expected[clean])
        other = [b for b in range(B) if b != i]
        assert torch.equal(dloc[other], dloc_expected[other])


@pytest.mark.parametrize("N", [1, 33])
def test_an_infinite_row_adds_nothing_through_a_tail(N):
    """phi' is 0 at an infinite score, so its gradient is 0; 0 inf in the masked rows beside it once was NaN."""
    x, loc, s, dout = make((1, 3, N, 4))
    x.abs_()
    loc.abs_()
    loc[0, 0, 0] = math.inf
    _, dloc, _ = run_backward(x, loc, s, dout)
    assert (dloc[0, 0] == 0).all()


@pytest.mark.parametrize("dtype", [f64, f32, bf16, f16], ids=str)
@pytest.mark.parametrize("N", [1, 3])
def test_antipode(dtype, N):
    D, s = 9, 7.0
    loc = torch.zeros(1, N, D, dtype=dtype, device=DEVICE)
    loc[..., 4] = 1
    x = -loc[:, :1] * torch.tensor([1.0, 1.01, 1 - 2.0**-6], dtype=dtype, device=DEVICE)[None, :, None]
    scale = torch.full((1, 1, 1), s, dtype=dtype, device=DEVICE)
    out = run_forward(x, loc, scale, tolerance=1e-4)
    floor = 2.0**-53 if dtype == f64 else 2.0**-24
    _, W, _ = log_gamma_ratio_and_derivatives(s, D)
    expected = torch.full_like(out, W + s * math.log(floor / 2))
    torch.testing.assert_close(out[:, 0], expected[:, 0], rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert out[:, 1].isnan().all()
    assert (out[:, 2] > expected[:, 2]).all()

    dx, dloc, dscale = run_backward(x, loc, scale.expand(1, 3, 1), torch.ones_like(out))
    assert (dx[:, :2] == 0).all()
    assert dx[:, 2].abs().amax() > 0
    assert dloc.isfinite().all()
    assert dscale[:, 0].isfinite().all()
    assert dscale[:, 1].isnan().all()
    _, dloc, _ = run_backward(x[:, :2], loc, scale.expand(1, 2, 1), torch.ones_like(out[:, :2]))
    assert (dloc == 0).all()


@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
@pytest.mark.parametrize("shape", [(1, 40, 34, 129), (1, 40, 1, 129)], ids=str)
def test_near_the_mode_and_large_scales(shape, dtype):
    """x = loc (1 + 1e-7) is above 1: the value goes on, nothing is clamped."""
    x, loc, _, dout = make(shape, (dtype, dtype, dtype))
    N = shape[2]
    x[:, :N] = loc * (1 + 1e-7)
    for values in [1e-30, 1e-3, 1e4, 1e6], [1.0, 100.0, 1e7, 1e30]:
        scale = torch.tensor(values, dtype=dtype, device=DEVICE).repeat(10)[:40].reshape(1, 40, 1)
        out = run_forward(x, loc, scale)
        check_forward(out, x, loc, scale.expand(out.shape), 1e-6)
        check_backward(x, loc, scale, dout, run_backward(x, loc, scale, dout))


@pytest.mark.parametrize("shape", [(1, 35, 13, 9), (1, 35, 1, 9), (1, 1, 13, 9)], ids=str)
def test_bad_scales_stay_alone(shape):
    B, M, N, _ = shape
    x, loc, s, _ = make(shape, scale="rows" if N == 1 else "columns")
    values = [1.0, math.nan, 2.0, math.inf, 3.0, -1e3, 4.0, -0.25, 1e30, 0.0, 1e-30, -4.0, -3.9]
    s[:] = torch.tensor((values * 3)[: s.numel()], dtype=f32, device=DEVICE).reshape(s.shape)
    scale = s.expand(B, M, N)
    out = run_forward(x, loc, s)
    finite = scale.isfinite() & (scale > -4)
    assert not out[~finite].isfinite().any()
    usual = torch.where(finite, scale, 1.0)
    check_forward(torch.where(finite, out, run_forward(x, loc, usual)), x, loc, usual, 1e-6)


@triton.jit
def _normaliser_kernel(scale_ptr, w_ptr, w_grad_ptr, D, BLOCK: tl.constexpr, W: tl.constexpr, W_GRAD: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr + offs)
    tl.store(w_ptr + offs, W(scale, D))
    tl.store(w_grad_ptr + offs, W_GRAD(scale, D))


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("D", [2, 3, 7, 8, 127, 128, 129, 768, 4096])
def test_normaliser(D, negative):
    """Negative scales with a > 0 apart, because one of them changes how the whole block is computed."""
    values = [1e-30, 1e-3, 1.0, 7.3, 100.0, 1e4, 1e6, 1e7, 1e30, 0.0, math.inf, math.nan, 20.5, 3e5, 0.3, 44.0]
    if negative:
        values[3:9] = [-0.25, -1e3, -(D - 1) / 2, -(D - 1) / 2 + 0.01, -(D - 1) / 4, -1e-3]
    scale = torch.tensor(values, dtype=f64, device=DEVICE)
    w, w_grad = torch.empty_like(scale), torch.empty_like(scale)
    constants = {"BLOCK": len(values), "W": power_spherical.normaliser, "W_GRAD": power_spherical.normaliser_grad}
    _normaliser_kernel[(1,)](scale, w, w_grad, D, **constants)
    for s, got, got_grad in zip(values, w.tolist(), w_grad.tolist(), strict=True):
        R, W, W_grad = log_gamma_ratio_and_derivatives(s, D)
        if math.isfinite(W):
            assert abs(got - W) <= 1e-11 * max(1, abs(R)), f"W({s}) = {got}, not {W}"
            assert abs(got_grad - W_grad) <= 1e-11 * abs(W_grad), f"W'({s}) = {got_grad}, not {W_grad}"
        else:
            assert got == W or (math.isnan(got) and math.isnan(W)), f"W({s}) = {got}, not {W}"
            assert got_grad == W_grad or (math.isnan(got_grad) and math.isnan(W_grad)), f"W'({s}) = {got_grad}"


@pytest.mark.parametrize("D", [2, 3, 7, 64, 129, 130, 768, 4096])
def test_von_mises_fisher_normaliser(D):
    values = [1e-30, 1e-3, 1.0, 7.3, 100.0, 1e4, 1e6, 1e30, 0.0, 31.0, 0.3, 44.0, math.inf, math.nan, -1e-3, -1e4]
    scale = torch.tensor(values, dtype=f64, device=DEVICE)
    w, w_grad = torch.empty_like(scale), torch.empty_like(scale)
    constants = {"BLOCK": len(values), "W": von_mises_fisher.normaliser, "W_GRAD": von_mises_fisher.normaliser_grad}
    _normaliser_kernel[(1,)](scale, w, w_grad, D, **constants)
    W, W_grad = log_vmf_normaliser(scale, D), bessel_ratio(scale, D)[1]
    assert W[:-4].isfinite().all()
    assert W[-4:].isnan().all()
    torch.testing.assert_close(w, W, rtol=1e-13, atol=1e-13, equal_nan=True)
    torch.testing.assert_close(w_grad, W_grad, rtol=5e-13, atol=0, equal_nan=True)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("shape", [(1, 70, 67, 40), (1, 128, 128, 256)], ids=str)
def test_precisions(shape, precision):
    x, loc, s, _ = make(shape)
    out = run_forward(x, loc, s, precision=precision)
    check_forward(out, x, loc, s.expand(out.shape), 1e-6, precision)
