"""The Triton kernels against float64 oracles, interpreted or on a device, and compiled ahead of time for others."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import mpmath
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from effops.kernels import distances, launch, mixture, pairs, power_spherical, von_mises_fisher  # noqa: E402

from effops.numerics.special import bessel_ratio, log_vmf_normaliser  # noqa: E402

f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, for the infinities and NaNs tested here
]

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


# --- oracle and budgets -----------------------------------------------------------------------------------------------


def log_gamma_ratio_and_derivatives(scale, D):
    """R, W, W' by mpmath, as float64."""
    mpmath.mp.dps = 80
    b = mpmath.mpf(D - 1) / 2
    a = b + mpmath.mpf(scale)
    if mpmath.isnan(a) or a <= 0:
        return math.nan, math.nan, math.nan
    if mpmath.isinf(a):
        return math.inf, math.nan, 0.0  # there is no density
    R = mpmath.loggamma(a + b) - mpmath.loggamma(a)
    return float(R), float(R - b * mpmath.log(4 * mpmath.pi)), float(mpmath.digamma(a + b) - mpmath.digamma(a))


def oracle_w(scale, D):
    """W and W' of a tensor, in float64."""
    values, inverse = scale.double().cpu().unique(return_inverse=True)
    table = torch.tensor([log_gamma_ratio_and_derivatives(v, D)[1:] for v in values.tolist()], dtype=f64)
    return table[inverse].to(scale.device).unbind(-1)


def arithmetic(*tensors):
    """Rounding unit and floor of t."""
    return 2.0**-53 if any(t.dtype == f64 for t in tensors) else 2.0**-24


def contraction_units(D, precision="highest"):
    """c_p of NUMERICS.md: the error of a dot product near 1 in rounding units, on the least exact hardware."""
    if precision == "medium" and DEVICE == "cuda" and not torch.version.hip:
        return 2**14 * min(2, 1 + 6 / math.sqrt(D))
    return 6 + D / 7 + math.sqrt(D)


def log_half(t, floor):
    """log(t / 2) with t below the floor taken as the floor."""
    t = torch.where(t < floor, floor, t)
    return torch.where(t > 1, torch.log1p((t - 2) / 2), torch.log(t / 2))


def half_ulp(value):
    """Rounding of the result; the interpreter truncates to bf16."""
    eps = torch.finfo(value.dtype).eps
    error = value.double().abs() * eps * (1 if value.dtype == bf16 and DEVICE == "cpu" else 0.5)
    return error + torch.finfo(value.dtype).smallest_normal * eps


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


def check_within(name, got, exact, error):
    error = error + half_ulp(got)
    ok = (got.double() - exact).abs() <= error
    ratio = ((got.double() - exact).abs() / error).nan_to_num(math.inf)
    worst = max(ratio.flatten().tolist(), default=0.0)
    assert ok.all(), f"{name}: {(~ok).sum()} of {ok.numel()} outside, the worst {worst:.3g} times the budget"


# --- inputs -----------------------------------------------------------------------------------------------------------


def padded(tensor, value=math.nan):
    """The same values as a view into a larger tensor filled with NaN: reading or writing past an edge shows."""
    base = torch.full([size + 4 for size in tensor.shape], value, dtype=tensor.dtype, device=tensor.device)
    view = base[tuple(slice(2, 2 + size) for size in tensor.shape)]
    view.copy_(tensor)
    return view


def assert_padding_untouched(view):
    base = view._base.clone()
    base.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(math.nan)
    assert base.isnan().all()


LAYOUTS = {
    "padded": padded,
    "transposed": lambda t: padded(t.mT).mT,
    "batch last": lambda t: padded(t.permute(1, 2, 0)).permute(2, 0, 1),
    "every other": lambda t: padded(t.repeat_interleave(2, -1))[..., ::2],
}


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


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_scales(shape, scale):
    x, loc, s, dout = make(shape, scale=scale)
    out = run_forward(x, loc, s)
    check_forward(out, x, loc, s.expand(out.shape), 1e-6)
    assert_padding_untouched(out)
    check_backward(x, loc, s, dout, run_backward(x, loc, s, dout))


DTYPES = [(f64, f64, f64), (bf16, bf16, bf16), (f16, f16, f16), (bf16, f32, f32), (f32, f16, bf16), (bf16, bf16, f32)]
DTYPES += [(f16, bf16, f16), (f32, f32, f64), (f64, f32, bf16)]


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


# --- squared distances ------------------------------------------------------------------------------------------------

# (B, M, N, D): several tiles and tails; row-wise in either role; both; more coordinates than a tile
DISTANCES = [(1, 33, 34, 17), (2, 1, 258, 3), (2, 66, 1, 7), (19, 1, 1, 130)]


@pytest.fixture
def whole_sums(monkeypatch):
    """Each sum in one program, which goes through all of its tiles: sums of tests are short and would be split."""
    monkeypatch.setattr(launch, "BUSY", 1)


class Distances:
    """Operands, the axes `scale` along which the scale varies, and exact results with what rounding may add to each."""

    def __init__(self, shape, dtypes=(f32, f32, f32), scale="nd", layout="padded"):
        self.shape, self.layout = shape, layout
        B, M, N, D = shape
        generator = torch.Generator().manual_seed(0)

        def random(*size):
            return torch.randn(size, generator=generator, dtype=f64)

        sizes = [n if axis in scale else 1 for axis, n in zip("bmnd", shape)]
        operands = random(B, M, D), random(B, N, D), random(*sizes).exp()
        place = LAYOUTS[layout]
        self.operands = [place(t.to(dtype).to(DEVICE)) for t, dtype in zip(operands, dtypes)]
        self.dtype = torch.promote_types(torch.promote_types(*dtypes[:2]), dtypes[2])
        self.dout = place(random(B, M, N).to(self.dtype).to(DEVICE))

    @property
    def expanded(self):
        x, loc, scale = self.operands
        return x, loc, scale.expand(*self.shape[:3], scale.shape[3])

    def forward(self):
        out = LAYOUTS[self.layout](torch.full(self.shape[:3], math.nan, dtype=self.dtype, device=DEVICE))
        distances.forward(*self.expanded, out)
        assert_padding_untouched(out)
        return out

    def backward(self, wanted=(True, True, True)):
        grads = [
            LAYOUTS[self.layout](torch.full(t.shape, math.nan, dtype=t.dtype, device=DEVICE)) if want else None
            for want, t in zip(wanted, self.operands)
        ]
        distances.backward(*self.expanded, self.dout, *grads)
        for grad in grads:
            if grad is not None:
                assert_padding_untouched(grad)
        return grads

    def check(self, wanted=(True, True, True)):
        B, M, N, D = self.shape
        u = arithmetic(*self.operands)
        x, loc, s = (t.double() for t in self.operands)
        s = s.expand(B, M, N, D)
        z = (x.unsqueeze(2) - loc.unsqueeze(1)) / s
        half = z.square().sum(-1) / 2
        W = -(s.log() + 0.5 * math.log(2 * math.pi)).sum(-1)
        out_error = u * ((12 + math.sqrt(D)) * half + 2 * W.abs() + 4 * (W - half).abs())
        check_within("out", self.forward(), W - half, out_error)
        G = self.dout.double().unsqueeze(-1)
        terms = (-G * z / s).unsqueeze(1), (G * z / s).unsqueeze(1), (G * (z * z - 1) / s).unsqueeze(1)
        sizes = terms[0].abs(), terms[1].abs(), (G.abs() * (z * z + 1) / s).unsqueeze(1)
        shapes = (B, 1, M, 1, D), (B, 1, 1, N, D), (self.operands[2].shape[0], 1, *self.operands[2].shape[1:])
        names = "dx", "dloc", "dscale"
        for name, got, term, size, shape in zip(names, self.backward(wanted), terms, sizes, shapes):
            if got is not None:
                exact, summed = term.sum_to_size(shape), size.sum_to_size(shape)
                error = u * (16 + math.sqrt(term.numel() / max(1, exact.numel()))) * summed
                check_within(name, got, exact.view(got.shape), error.view(got.shape))


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("scale", ["", "nd", "bmnd"])
@pytest.mark.parametrize("shape", DISTANCES, ids=str)
def test_distances(shape, scale):
    Distances(shape, scale=scale).check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("scale", ["b", "d", "m", "n", "md", "bd", "mn", "mnd", "bmn", "bm"])
def test_distances_sum_the_gradient_of_a_scale_along_any_axes(scale):
    Distances((3, 4, 5, 6), scale=scale).check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(str(dtype)[6:] for dtype in dtypes))
def test_distances_dtypes(dtypes):
    if DEVICE == "cpu" and f64 in dtypes and bf16 in dtypes:
        pytest.skip("the interpreter stores float64 as bf16 wrongly")
    Distances((1, 33, 17, 9), dtypes).check()
    Distances((1, 5, 1, 7), dtypes, scale="md").check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"batch last"}))
def test_distances_strides(layout):
    operands = Distances((2, 5, 9, 7), scale="bmnd", layout=layout)
    operands.check()
    operands.dout = operands.dout[:1, :, :1].expand_as(operands.dout)
    operands.check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("scale", ["d", "mnd"])
def test_distances_wanted_gradients(scale):
    operands = Distances((2, 3, 4, 5), scale=scale)
    for wanted in range(8):
        operands.check([bool(wanted >> bit & 1) for bit in range(3)])


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 0, 0, 5), (2, 3, 4, 0)], ids=str)
@pytest.mark.parametrize("scale", ["", "nd", "bmnd"])
def test_distances_size_0(shape, scale):
    operands = Distances(shape, scale=scale)
    assert (operands.forward() == 0).all()
    for grad in operands.backward():
        assert (grad == 0).all()


@pytest.mark.parametrize(("shape", "scale"), [((1, 33, 18, 5), "nd"), ((1, 1, 260, 3), "d"), ((65, 1, 1, 4), "d")])
def test_distances_grid_limit_and_parts_do_not_change_the_result(shape, scale, monkeypatch):
    operands = Distances(shape, scale=scale)
    out, grads = operands.forward(), operands.backward()
    monkeypatch.setattr(launch, "MAX_GRID", 2)
    assert torch.equal(operands.forward(), out)
    for got, expected in zip(operands.backward(), grads):
        assert torch.equal(got, expected)
    for busy in 1, 5:
        monkeypatch.setattr(launch, "BUSY", busy)
        operands.check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("shape", [(1, 33, 18, 9), (1, 33, 1, 9)], ids=str)
@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
def test_near_duplicates_far_from_0(shape, dtype):
    """Their distances and slopes have all digits: a product of matrices would leave none."""
    operands = Distances(shape, (dtype,) * 3, scale="n")
    x, loc, scale = operands.operands
    loc[:] = 1e4 + loc[:, :1]
    x[:] = loc[:, :1] + 1e-2 * x
    x[:, ::3] = loc[:, :1]
    scale *= 1e-2
    operands.check()
    assert (operands.backward()[0][:, ::3] == 0).all()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("shape", [(2, 33, 17, 5), (2, 9, 1, 5), (2, 1, 9, 5), (19, 1, 1, 5)], ids=str)
def test_distances_of_a_bad_row_stay_alone(shape, bad):
    operands = Distances(shape, scale="bmd")
    expected, (dx, dloc, dscale) = operands.forward(), operands.backward()
    operands.operands[0][0, -1, 4] = bad
    clean = torch.ones(shape[:2], dtype=torch.bool, device=DEVICE)
    clean[0, -1] = False
    out, grads = operands.forward(), operands.backward()
    assert torch.equal(out[clean], expected[clean])
    assert not out[~clean].isfinite().any()
    assert torch.equal(grads[0][clean], dx[clean])
    assert torch.equal(grads[1][1:], dloc[1:])
    assert torch.equal(grads[2][:, :, 0][clean], dscale[:, :, 0][clean])


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf])
def test_bad_scales_of_distances_stay_alone(value):
    operands = Distances((1, 3, 35, 5), scale="nd")
    expected, (_, dloc, dscale) = operands.forward(), operands.backward()
    operands.operands[2][0, 0, 33, 2] = value
    out, grads = operands.forward(), operands.backward()
    clean = torch.arange(35, device=DEVICE) != 33
    assert torch.equal(out[:, :, clean], expected[:, :, clean])
    assert not out[:, :, 33].isfinite().any()
    assert torch.equal(grads[1][:, clean], dloc[:, clean])
    assert torch.equal(grads[2][:, :, clean], dscale[:, :, clean])


# --- mixtures ---------------------------------------------------------------------------------------------------------

MAPS = {"power_spherical": power_spherical.MAP, "von_mises_fisher": von_mises_fisher.MAP}
# (B, C, M, N, D): tails, one component more than a block, sums that are split; single rows and components
MIXTURES = [(2, 1, 66, 33, 7), (1, 2, 5, 70, 18), (2, 1, 1, 33, 131), (1, 2, 70, 1, 5), (1, 1, 1, 1, 2)]


class Mixture:
    """Operands, which of their axes vary, and exact results with what rounding may add to each."""

    def __init__(self, name, shape, dtypes=(f32,) * 4, x="bm", scale="bcn", weights="bcn", layout="padded"):
        D = shape[-1]
        self.shape = shape
        self.name, self.layout = name, layout
        generator = torch.Generator().manual_seed(0)

        def random(axes, *trailing):
            sizes = [n if axis in axes else 1 for axis, n in zip("bcmn", shape)]
            return torch.randn(*sizes, *trailing, generator=generator, dtype=f64)

        x, loc = (torch.nn.functional.normalize(random(axes, D), dim=-1) for axes in (x, "bcn"))
        scale, weights = (0.5 * (4 * random(scale)).round()).exp(), random(weights)
        place = LAYOUTS[layout]
        operands = x.squeeze(3), loc.squeeze(2), scale, weights
        self.operands = [place(t.to(dtype).to(DEVICE)) for t, dtype in zip(operands, dtypes)]
        result = torch.promote_types(torch.promote_types(*dtypes[:2]), torch.promote_types(*dtypes[2:]))
        self.arithmetic = torch.promote_types(result, f32)
        self.dout = padded(random("bcm").squeeze(3).to(result).to(DEVICE))

    @property
    def expanded(self):
        B, C, M, N, D = self.shape
        x, loc, scale, weights = self.operands
        return x.expand(B, C, M, D), loc.expand(B, C, N, D), scale.expand(B, C, M, N), weights.expand(B, C, M, N)

    def forward(self):
        self.statistics = LAYOUTS[self.layout](
            torch.full((*self.shape[:3], 2), math.nan, dtype=self.arithmetic, device=DEVICE)
        )
        self.launch_forward()
        assert_padding_untouched(self.statistics)
        return self.statistics.sum(-1)

    def backward(self, wanted=(True,) * 4):
        """dx, dloc, dscale and dlog_weights. The last two are kept over n if they do not vary along m."""
        B, C, M, N, D = self.shape
        x, _, scale, weights = self.operands
        pairs = [[B, C, t.shape[2], N if t.shape[2] == 1 else t.shape[3]] for t in (scale, weights)]
        grads = [
            LAYOUTS[self.layout](torch.full(size, math.nan, dtype=t.dtype, device=DEVICE)) if want else None
            for want, size, t in zip(wanted, ([B, x.shape[1], M, D], [B, C, N, D], *pairs), self.operands)
        ]
        self.launch_backward(*grads)
        for grad in grads:
            if grad is not None:
                assert_padding_untouched(grad)
        return grads

    def launch_forward(self):
        mixture.forward(MAPS[self.name], *self.expanded, self.statistics, precision="highest", tolerance=2e-2)

    def launch_backward(self, dx, dloc, dscale, dweights):
        operands = *self.expanded, self.statistics, self.dout, dweights, dx, dloc, dscale
        mixture.backward(MAPS[self.name], *operands, precision="highest", tolerance=2e-2)

    def exact(self):
        """(value, error) of the result and of the gradients of every pair, which are still to be summed."""
        x, loc, s, weights = (t.double() for t in self.expanded)
        D = x.shape[-1]
        u = torch.finfo(self.arithmetic).eps / 2
        c = contraction_units(D) * u
        dot = x @ loc.mT
        if self.name == "power_spherical":
            W, W_grad = oracle_w(s, D)
            value, slope, slope_error = log_half(1 + dot, u), 1 / (1 + dot), c / (1 + dot).abs()
        else:
            W, W_grad = log_vmf_normaliser(s, D), bessel_ratio(s, D)[1]
            value, slope, slope_error = dot - 1, torch.ones_like(dot), torch.zeros_like(dot)
        score = weights + W + s * value
        score_error = (s * slope).abs() * c + 3 * u * (weights.abs() + W.abs() + (s * value).abs())
        score_error += 1e-11 * W.abs().clamp(min=1) if u < 1e-10 else 0
        score_error = torch.where(score == -math.inf, 0.0, score_error)
        out = score.logsumexp(-1)
        r = (score - out[..., None]).exp()
        mean_error = (r * score_error).sum(-1)
        terms = [math.sqrt(n) for n in self.shape[2:4]]
        r_error = score_error + mean_error[..., None] + (8 + terms[1]) * u
        G = self.dout.double()[..., None] * r
        G_error = G.abs() * r_error + self.dout.double().abs()[..., None] * torch.finfo(self.arithmetic).tiny
        G_dot, G_dot_error = G * s * slope, (G_error + G.abs() * (slope_error + 12 * u)) * (s * slope).abs()
        size = W_grad.abs() + value.abs()
        dscale_error = G_error * (W_grad + value).abs() + G.abs() * (slope * c + (8 + terms[0] + terms[1]) * u * size)
        dscale_error += G.abs() * 1e-11 if u < 1e-10 else 0
        dx_error = (G_dot_error + terms[1] * u * G_dot.abs()) @ loc.abs()
        dloc_error = (G_dot_error + terms[0] * u * G_dot.abs()).mT @ x.abs()
        G_error = G_error + (4 + terms[0] + terms[1]) * u * G.abs()
        result = out, mean_error + (8 + terms[1]) * u + 2 * u * out.abs()
        return result, [
            (G_dot @ loc, dx_error),
            (G_dot.mT @ x, dloc_error),
            (G * (W_grad + value), dscale_error),
            (G, G_error),
        ]

    def check(self, wanted=(True,) * 4):
        (out, out_error), gradients = self.exact()
        check_within("out", self.forward(), out, out_error)
        for name, got, (exact, error) in zip(("dx", "dloc", "dscale", "dweights"), self.backward(wanted), gradients):
            if got is not None:
                check_within(name, got, exact.sum_to_size(got.shape), error.sum_to_size(got.shape))


class NormalMixture(Mixture):
    """With one scale for all coordinates of a pair."""

    def launch_forward(self):
        x, loc, scale, weights = self.expanded
        distances.forward_logsumexp(x, loc, scale.unsqueeze(-1), weights, self.statistics)

    def launch_backward(self, dx, dloc, dscale, dweights):
        x, loc, scale, weights = self.expanded
        dscale = None if dscale is None else dscale.unsqueeze(-1)
        operands = x, loc, scale.unsqueeze(-1), weights, self.statistics, self.dout, dweights, dx, dloc, dscale
        distances.backward_logsumexp(*operands)

    def exact(self):
        x, loc, s, weights = (t.double() for t in self.expanded)
        D = x.shape[-1]
        u = torch.finfo(self.arithmetic).eps / 2
        z = (x.unsqueeze(3) - loc.unsqueeze(2)) / s.unsqueeze(-1)
        half = z.square().sum(-1) / 2
        W = -D * (s.log() + 0.5 * math.log(2 * math.pi))
        score = weights + W - half
        score_error = u * ((12 + math.sqrt(D)) * half + 3 * (weights.abs() + W.abs() + half))
        score_error = torch.where(score == -math.inf, 0.0, score_error)
        out = score.logsumexp(-1)
        r = (score - out[..., None]).exp()
        mean_error = (r * score_error).sum(-1)
        terms = [math.sqrt(n) for n in self.shape[1:4]]
        g = self.dout.double()[..., None]
        G = g * r
        G_error = G.abs() * (score_error + mean_error[..., None] + (8 + terms[2]) * u)
        G_error += g.abs() * torch.finfo(self.arithmetic).tiny
        slope = z / s.unsqueeze(-1)
        slope_error = (G_error + (16 + sum(terms)) * u * G.abs()).unsqueeze(-1) * slope.abs()
        dscale_error = (G_error + (16 + sum(terms)) * u * G.abs()) * (2 * half + D) / s
        result = out, mean_error + (8 + terms[2]) * u + 2 * u * out.abs()
        return result, [
            ((-G.unsqueeze(-1) * slope).sum(3), slope_error.sum(3)),
            ((G.unsqueeze(-1) * slope).sum(2), slope_error.sum(2)),
            (G * (2 * half - D) / s, dscale_error),
            (G, G_error + (4 + sum(terms)) * u * G.abs()),
        ]


def make_mixture(name, *args, **kwargs):
    return (NormalMixture if name == "normal" else Mixture)(name, *args, **kwargs)


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("shape", MIXTURES, ids=str)
@pytest.mark.parametrize("name", [*MAPS, "normal"])
def test_mixture(name, shape):
    make_mixture(name, shape).check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize(
    ("x", "scale", "weights"),
    [("bm", "bcmn", "bcmn"), ("bcm", "bcm", "m"), ("m", "cm", "bmn"), ("bcm", "bmn", "n"), ("bm", "", "c")],
)
@pytest.mark.parametrize("name", [*MAPS, "normal"])
def test_mixture_operands_vary_along_some_axes(name, x, scale, weights):
    make_mixture(name, (2, 2, 3, 5, 9), x=x, scale=scale, weights=weights).check()


@pytest.mark.parametrize(
    "dtypes",
    [(f64,) * 4, (bf16,) * 4, (f16,) * 4, (f32, f32, f32, f64), (bf16, bf16, f32, f32), (f16, f32, bf16, f32)],
    ids=lambda dtypes: "-".join(str(dtype)[6:] for dtype in dtypes),
)
@pytest.mark.parametrize("name", [*MAPS, "normal"])
def test_mixture_dtypes(name, dtypes):
    make_mixture(name, (1, 1, 5, 35, 40), dtypes).check()


@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"batch last"}))
def test_mixture_strides(layout):
    operands = Mixture("power_spherical", (2, 2, 5, 9, 7), x="bcm", scale="bcmn", weights="bcmn", layout=layout)
    operands.dout = operands.dout[:1, :, :1].expand_as(operands.dout)
    operands.check()


@pytest.mark.parametrize("along", ["bcn", "bcm", "bcmn"])
def test_mixture_wanted_gradients(along):
    operands = Mixture("power_spherical", (1, 1, 3, 4, 5), scale=along, weights=along)
    for wanted in 0, 1, 2, 4, 8, 6, 9:
        operands.check([bool(wanted >> bit & 1) for bit in range(4)])


@pytest.mark.parametrize("shape", [(0, 1, 3, 4, 5), (1, 0, 3, 4, 5), (1, 2, 0, 4, 5), (1, 2, 3, 0, 5)], ids=str)
@pytest.mark.parametrize("along", ["bcn", "bcm", "bcmn"])
def test_mixture_size_0(shape, along):
    operands = Mixture("power_spherical", shape, scale=along, weights=along)
    assert (operands.forward() == -math.inf).all()
    for grad in operands.backward():
        assert (grad == 0).all()


@pytest.mark.parametrize("name", [*MAPS, "normal"])
def test_mixture_grid_limit_and_parts(name, monkeypatch):
    """A repeated call has the same bits, however it is launched; parts without weight add nothing."""
    operands = make_mixture(name, (1, 1, 34, 67, 5) if name == "normal" else (1, 1, 66, 67, 18))
    operands.operands[3][..., :32] = -math.inf
    out, grads = operands.forward(), operands.backward()
    monkeypatch.setattr(launch, "MAX_GRID", 2)
    assert torch.equal(operands.forward(), out)
    for got, expected in zip(operands.backward(), grads):
        assert torch.equal(got, expected)
    monkeypatch.setattr(launch, "BUSY", 5)
    operands.check()


@pytest.mark.parametrize("name", ["power_spherical", "normal"])
@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("where", [[0], [34], list(range(34))], ids=["first", "last", "all but one"])
def test_mixture_components_of_weight_0(name, where):
    """They are left out, whatever they hold: as if they were not there."""
    operands = make_mixture(name, (1, 1, 3, 35, 9))
    _, loc, scale, weights = operands.operands
    rest = [n for n in range(35) if n not in where]
    weights[..., where] = -math.inf
    expected, expected_gradients = operands.forward(), operands.backward()
    dx, *others = expected_gradients
    (exact, error), _ = operands.exact()
    check_within("out", expected, exact, error)
    for bad in math.nan, math.inf:
        loc[:, :, where[0], 3] = bad
        scale[..., where[-1]] = bad
        assert torch.equal(operands.forward(), expected)
        got_dx, *got_others = operands.backward()
        assert torch.equal(got_dx, dx)
        for got, expected_grad, axis in zip(got_others, others, (2, 3, 3)):
            index = torch.tensor(where, device=DEVICE)
            assert (got.index_select(axis, index) == 0).all()
            index = torch.tensor(rest, device=DEVICE)
            assert torch.equal(got.index_select(axis, index), expected_grad.index_select(axis, index))


@pytest.mark.parametrize("name", [*MAPS, "normal"])
def test_mixture_without_weight(name):
    """A row whose weights are all 0 is -inf and passes no gradient, not even 0 times its infinity or into a tail."""
    operands = make_mixture(name, (1, 1, 3, 33, 9), weights="bcmn")
    x, _, _, weights = operands.operands
    weights[:, :, 1] = -math.inf
    out, grads = operands.forward(), operands.backward()
    assert (out[:, :, 1] == -math.inf).all()
    assert out[:, :, ::2].isfinite().all()
    assert (grads[0][:, :, 1] == 0).all()
    assert (grads[3][:, :, 1] == 0).all()
    x[:, :, 1, 5] = math.inf
    for got, expected in zip([operands.forward(), *operands.backward()], [out, *grads]):
        assert torch.equal(got, expected)
    weights.fill_(-math.inf)
    assert (operands.forward() == -math.inf).all()
    for grad in operands.backward():
        assert (grad == 0).all()


@pytest.mark.parametrize("name", ["power_spherical", "normal"])
@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("n", [0, 33])
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_mixture_bad_component_stays_in_its_row(name, bad, n):
    operands = make_mixture(name, (1, 2, 3, 34, 9), x="bcm", weights="bcmn")
    expected, (expected_dx, expected_dloc, *_) = operands.forward(), operands.backward()
    _, _, _, weights = operands.operands
    weights[0, 1, 2, n] = bad
    out, (dx, dloc, *_) = operands.forward(), operands.backward()
    clean = torch.ones_like(out, dtype=torch.bool)
    clean[0, 1, 2] = False
    assert torch.equal(out[clean], expected[clean])
    assert out[0, 1, 2] == bad or (math.isnan(bad) and out[0, 1, 2].isnan())
    assert torch.equal(dx[clean], expected_dx[clean])
    assert dx[0, 1, 2].isnan().all()
    assert torch.equal(dloc[:, 0], expected_dloc[:, 0])


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize(
    ("shape", "along", "chunk"),
    [
        ((1, 2, 3, 4, 2), "bcn", 1),
        ((3, 2, 2, 3, 4), "bcmn", 40),
        ((2, 3, 1, 6, 4), "m", 70),
        ((5, 1, 4, 3, 2), "n", 30),
    ],
)
def test_normal_mixture_in_chunks(shape, along, chunk, monkeypatch):
    """Of rows of pairs, of entries of b or of c."""
    monkeypatch.setattr(distances, "CHUNK", chunk)
    NormalMixture("normal", shape, scale=along, weights=along).check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("order", [1, -1])
def test_mixture_spread(order):
    """The running maximum moves by 300 from one end to the other."""
    operands = Mixture("power_spherical", (1, 1, 2, 70, 9))
    operands.operands[3][:] = order * torch.linspace(-300, 0, 70, device=DEVICE)
    operands.check()


@pytest.mark.parametrize("weight", [-7e4, 7e4])
@pytest.mark.parametrize(
    ("name", "scale"),
    [("power_spherical", 1.0), ("power_spherical", 1e5), ("von_mises_fisher", 1e5), ("normal", 1.0), ("normal", 1e-3)],
)
def test_mixture_responsibilities_sum_to_1(name, scale, weight):
    """In every sum over m and n, though the rounding of the result, or of a score, is a hundredth and more."""
    M = 3
    for along in "n", "mn":
        operands = make_mixture(name, (1, 1, M, 35, 40), scale="n", weights=along)
        x, loc, s, weights = operands.operands
        x += loc[:, :, :1]
        x /= x.norm(dim=-1, keepdim=True)
        loc[:] = loc[:, :, :1] + 1e-4 * loc
        s.fill_(scale)
        weights += weight
        operands.dout = torch.ones_like(operands.dout)
        operands.forward()
        _, _, _, dweights = operands.backward((False, False, False, True))
        assert dweights.isfinite().all()
        sums = dweights.sum(-1) if along == "mn" else dweights.sum(-1) / M
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=3e-6, atol=0)


SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


@pytest.mark.ahead_of_time
def test_shipped_kernels_compile_and_fit():
    """On every architecture: no spilled register, shared and tensor memory within the limits, something stored."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("kernels_aot.py"))
    workers = [
        subprocess.Popen([sys.executable, script, str(i), "2"], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    entries = [json.loads(line) for output in outputs for line in output.splitlines()]
    assert {entry["architecture"] for entry in entries} == set(launch.ARCHITECTURES)
    bad = [
        entry
        for entry in entries
        if entry["spill_bytes"] > 0
        or entry["shared_bytes"] > SHARED_BYTES[entry["architecture"]]
        or entry["tmem"] > 512
        or entry["stores"] == 0
    ]
    assert not bad, "\n".join(map(str, bad))
