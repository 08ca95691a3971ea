"""The Triton kernels of mixtures against float64 oracles, interpreted or on a device."""

import math

import pytest
import torch

pytest.importorskip("triton")
from effops.kernels import distances, launch, mixture, power_spherical, von_mises_fisher

from effops.numerics.special import bessel_ratio, log_vmf_normaliser

from .support import (
    DEVICE,
    LAYOUTS,
    MARKS,
    assert_padding_untouched,
    bf16,
    check_within,
    contraction_units,
    f16,
    f32,
    f64,
    log_half,
    oracle_w,
    padded,
)

pytestmark = MARKS

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
@pytest.mark.each_value
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
    out = operands.forward()
    assert (out == -math.inf).all()
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
    out = operands.forward()
    assert (out == -math.inf).all()
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
