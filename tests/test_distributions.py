"""The distributions against quadrature, their own draws, and each other."""

import copy
import io
import math
import pickle
import re
import warnings

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal, kl_divergence

import effops
from effops import distributions
from effops.distributions import HypersphericalUniform, Mixture, PowerSpherical, VonMisesFisher, unit_vector
from effops.measure import Pass, memory
from effops.ops.densities import power_spherical, von_mises_fisher
from effops.reference import reference_of

OPS = {PowerSpherical: power_spherical.op, VonMisesFisher: von_mises_fisher.op}
DIRECTIONAL = pytest.mark.parametrize("family", [PowerSpherical, VonMisesFisher])
DIMENSIONS = [2, 3, 8, 128]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _validation(monkeypatch):
    """As torch has it at first: whoever has compiled a distribution has switched it off."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


def directions(*shape, dtype=torch.float64, device="cpu"):
    return torch.nn.functional.normalize(torch.randn(shape, dtype=torch.float64), dim=-1).to(device, dtype)


def assert_mean(draws, expected, rounding=0.0):
    """The mean of independent draws, along the first axis, is within 5 standard errors of `expected`."""
    standard_error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - expected).abs() <= 5 * standard_error + rounding).all()


class Exact:
    """The density of the angle to loc, sin(angle)^(D-2) f(angle), from f alone: by tanh-sinh quadrature."""

    def __init__(self, family, concentration, dimension):
        x = torch.linspace(-4.5, 4.5, 5001, dtype=torch.float64)
        angle, rest = (math.pi * torch.sigmoid(y) for y in (math.pi * x.sinh(), -math.pi * x.sinh()))
        sine = torch.minimum(angle, rest).sin()
        self.gap = 2 * (angle / 2).sin() ** 2  # 1 - cosine
        self.log_f = {
            PowerSpherical: 2 * concentration * (rest / 2).sin().log(),
            VonMisesFisher: -concentration * self.gap,
            HypersphericalUniform: torch.zeros_like(x),
        }[family]
        log_density = (dimension - 2) * sine.log() + self.log_f + (x.cosh() * angle * rest).log()
        self.probability = log_density.softmax(0)
        log_area = math.log(2) + (dimension - 1) / 2 * math.log(math.pi) - math.lgamma((dimension - 1) / 2)
        self.log_z = log_area + log_density.logsumexp(0) + math.log((x[1] - x[0]).item())
        self.across = self.mean(sine**2) / (dimension - 1)

    def mean(self, values):
        return (self.probability * values).sum()

    def entropy(self):
        return self.log_z - self.mean(self.log_f)


@DIRECTIONAL
@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_moments_and_entropy_against_quadrature(family, dimension, device):
    concentrations = [0.01, 0.7, 5.0, 100.0, 1e4]
    loc = directions(dimension, device=device)
    p = family(loc, torch.tensor(concentrations, dtype=torch.float64, device=device))
    assert torch.equal(p.stddev, p.variance.sqrt())
    for i, concentration in enumerate(concentrations):
        exact = Exact(family, concentration, dimension)
        gap = exact.mean(exact.gap)
        along, across = exact.mean((exact.gap - gap) ** 2).item(), exact.across.item()
        assert p.entropy()[i].item() == pytest.approx(exact.entropy().item(), rel=1e-11)
        torch.testing.assert_close(p.mean[i], (1 - gap.item()) * loc, rtol=1e-11, atol=0)
        torch.testing.assert_close(p.variance[i], along * loc**2 + across * (1 - loc**2), rtol=1e-9, atol=0)


@DIRECTIONAL
def test_variance_along_a_coordinate_keeps_its_digits(family, device):
    """At loc = e_1, var x_1 is about (D - 1) / (2 s^2), which 1 - E[t]^2 - ... loses in float32."""
    s = torch.tensor([1e4, 1e6], device=device)
    first = family(torch.eye(8, device=device)[0], s).variance[:, 0]
    expected = 7 / (2 * s**2) * {PowerSpherical: 4, VonMisesFisher: 1}[family]
    torch.testing.assert_close(first, expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dimension", [2, 3, 8])
def test_marginal_t_is_the_law_of_the_cosine(dimension, device):
    scale = torch.tensor([0.0, 0.7, 40.0], dtype=torch.float64, device=device, requires_grad=True)
    p = PowerSpherical(directions(dimension, device=device), scale)
    marginal = p.marginal_t
    assert (marginal.batch_shape, marginal.event_shape) == ((3,), ())
    assert marginal.expand([2, 3]).sample((5,)).shape == (5, 2, 3)
    t = marginal.rsample((20000,))
    assert t.requires_grad
    assert_mean(t.detach(), p._mean_cosine()[0].detach())
    assert_mean((p.sample((20000,)) * p.loc).sum(-1), marginal.mean.detach())
    torch.testing.assert_close(marginal.variance, p._variances()[0])
    assert torch.equal(marginal.stddev, marginal.variance.sqrt())
    assert_mean(-marginal.log_prob(t.detach()).detach(), marginal.entropy().detach())
    if dimension == 2:
        with pytest.raises(NotImplementedError, match="use marginal_t"):
            _ = p.base_dist
        return
    base = p.base_dist
    assert base.marginal_t.base_dist.concentration1.tolist() == (scale + (dimension - 1) / 2).tolist()
    assert (base.marginal_s.batch_shape, base.marginal_s.event_shape) == ((3,), (dimension - 1,))
    area_ratio = (dimension - 3) / 2 * torch.log1p(-(t.detach() ** 2))  # of a circle of latitude
    x = base.marginal_s.sample()
    polar = p.marginal_t.log_prob(t.detach()) + base.marginal_s.log_prob(x) - area_ratio
    x = directions(20000, 1, dimension, device=device)
    x = x - (x * p.loc).sum(-1, keepdim=True) * p.loc
    x = x / x.norm(dim=-1, keepdim=True) * (1 - t.detach() ** 2).sqrt().unsqueeze(-1) + t.detach().unsqueeze(-1) * p.loc
    x = torch.nn.functional.normalize(x, dim=-1)  # its rounding, which a small sine enlarged
    torch.testing.assert_close(polar, p.log_prob(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", [PowerSpherical, VonMisesFisher, HypersphericalUniform])
@pytest.mark.parametrize("dimension", [2, 3, 8])
def test_covariance(family, dimension, device):
    """Against draws; and its diagonal keeps the digits of the variance along loc."""
    loc = directions(2, dimension, device=device)
    p = make(family, loc, torch.tensor([[0.0], [0.7], [40.0]], dtype=torch.float64, device=device))
    x = p.sample((20000,))
    away = x - p.mean
    assert p.covariance.shape == (*p.batch_shape, dimension, dimension)
    assert_mean(away.unsqueeze(-1) * away.unsqueeze(-2), p.covariance)
    narrow = make(family, torch.eye(dimension, device=device)[0], 1e5)
    assert torch.equal(narrow.covariance.diagonal(dim1=-2, dim2=-1), narrow.variance)
    assert torch.equal(p.covariance, p.covariance.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@DIRECTIONAL
@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_moments_of_draws(family, dimension, dtype, device):
    eye = torch.eye(dimension, dtype=dtype, device=device)
    loc = torch.stack([eye[0], -eye[0], eye[1], directions(dimension, dtype=dtype, device=device)])
    p = family(loc, torch.tensor([0.5, 30.0, 1e6], dtype=dtype, device=device).unsqueeze(-1))
    draws = p.sample((2000,))
    assert draws.dtype == dtype
    assert draws.shape == (2000, 3, 4, dimension)
    assert not draws.requires_grad
    assert unit_vector.check(draws).all()
    x, loc = draws.double(), torch.nn.functional.normalize(loc.double(), dim=-1)
    exact = family(loc, p._parameters[1].double())
    roundoff = torch.finfo(dtype).eps
    assert_mean(x, exact.mean, roundoff)
    gap = 0.5 * (x - loc).square().sum(-1)  # 1 - <loc, x>, without cancellation
    expected_gap = exact._mean_cosine()[1].expand(3, 4)
    assert_mean(gap, expected_gap, 4 * roundoff * expected_gap.sqrt())
    deviation = (x - exact.mean).square()
    assert_mean(deviation, exact.variance, 4 * roundoff * exact.variance.sqrt() + roundoff**2)
    pairs = x[..., 0] * x[..., 1]  # directions about loc are uniform: the covariance that is left has no other term
    along, across = (variance.expand(3, 4) for variance in exact._variances())
    expected = (along - across + exact._mean_cosine()[0] ** 2) * loc[:, 0] * loc[:, 1]
    assert_mean(pairs, expected, roundoff)


@DIRECTIONAL
@pytest.mark.parametrize("concentration", [0.3, 20.0])
def test_law_of_the_angle(family, concentration, device):
    """Kolmogorov's distance of so many draws is above 2.5 / sqrt(count) once in 10^5 times."""
    count, loc = 200_000, directions(3, device=device)
    gap = 0.5 * (family(loc, concentration).sample((count,)) - loc).square().sum(-1).sort().values.cpu()
    exact = Exact(family, concentration, 3)
    below = torch.searchsorted(gap, exact.gap, side="right") / count
    assert (below - exact.probability.cumsum(0)).abs().max() <= 2.5 / math.sqrt(count)


@DIRECTIONAL
@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_entropy_is_that_of_draws(family, dimension, device):
    p = family(directions(3, dimension, device=device), torch.tensor([0.5, 20.0, 1e5], device=device).double())
    assert_mean(-p.log_prob(p.sample((4000,))), p.entropy())


def test_zero_noise_gives_a_direction(monkeypatch):
    """In float32 `torch.randn` returns 0 about once in 2^24 draws; on the circle that was a NaN."""
    monkeypatch.setattr(torch, "randn", lambda shape, **options: torch.zeros(shape, dtype=options["dtype"]))
    draws = PowerSpherical(torch.eye(2), 1.0).sample((5,))
    assert unit_vector.check(draws).all()


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float64, 0.3), (torch.float64, 40.0), (torch.float32, 1e6)], ids=str
)
@pytest.mark.parametrize("dimension", [2, 3, 8])
@DIRECTIONAL
def test_rsample_gradients_are_those_of_the_expectations(family, dimension, dtype, scale, device):
    """E x_i and E x_i^2, by scale and, within the tangent space, by loc: at e_1, -e_1, where loc_1 = 0, elsewhere."""
    eye, count = torch.eye(dimension, dtype=dtype, device=device), 8000
    loc = torch.stack([eye[0], -eye[0], eye[1], directions(dimension, dtype=dtype, device=device)])
    exact_loc = torch.nn.functional.normalize(loc.double(), dim=-1).requires_grad_()
    exact_scale = torch.full((4,), scale, dtype=torch.float64, device=device, requires_grad=True)
    exact = family(exact_loc, exact_scale)
    many_loc = loc.expand(count, -1, -1).clone().requires_grad_()
    many_scale = torch.full((count, 4), scale, dtype=dtype, device=device, requires_grad=True)
    x = family(many_loc, many_scale).rsample()
    assert x.requires_grad
    roundoff = torch.finfo(dtype).eps
    for value, expected in ((x, exact.mean), (x**2, exact.variance + exact.mean**2)):
        for i in (0, 1):
            dloc, dscale = torch.autograd.grad(value[..., i].sum(), (many_loc, many_scale), retain_graph=True)
            total = expected[:, i].sum()
            exact_dloc, exact_dscale = torch.autograd.grad(total, (exact_loc, exact_scale), retain_graph=True)
            exact_dloc -= (exact_dloc * exact_loc).sum(-1, keepdim=True) * exact_loc.detach()
            assert_mean(dloc.double(), exact_dloc, 8 * roundoff)
            assert_mean(dscale.double(), exact_dscale, 8 * roundoff * dscale.double().abs().mean(0))


@DIRECTIONAL
@pytest.mark.parametrize("first", [1.0, 1e-3, -1e-3, -1.0])
def test_rsample_has_the_gradient_of_its_path(family, first):
    """The same noise at a loc nearby, on one side of loc_1 = 0: beyond, the reflection is another."""
    raw = torch.tensor([first, 0, math.sqrt(1 - first**2)], dtype=torch.float64, requires_grad=True)

    def draw(raw):
        torch.manual_seed(1)
        return family(torch.nn.functional.normalize(raw, dim=-1), 3.0).rsample((4,))

    assert torch.autograd.gradcheck(draw, raw)


@DIRECTIONAL
def test_rsample_gradient_of_loc_is_finite_and_tangential(family, device):
    for dtype in (torch.bfloat16, torch.float32):
        loc = directions(64, 3, dtype=dtype, device=device).requires_grad_()
        scale = torch.logspace(-3, 4, 64, device=device).to(dtype).requires_grad_()
        x = family(loc, scale).rsample((100,))
        assert x.dtype == dtype
        x.square().mean(0)[..., 0].sum().backward()
        assert loc.grad.isfinite().all()
        assert scale.grad.isfinite().all()
        radial = (loc.grad * loc).sum(-1).abs()
        assert (radial <= 4 * torch.finfo(dtype).eps * loc.grad.norm(dim=-1) + torch.finfo(dtype).eps).all()


@DIRECTIONAL
def test_rsample_is_differentiable_once(family):
    """A second derivative is refused: it would lack what the draw itself contributes."""
    k = torch.tensor(2.0, requires_grad=True)
    p = family(directions(3, dtype=torch.float32), k)
    assert p.has_rsample
    assert not p.sample().requires_grad
    (slope,) = torch.autograd.grad(p.rsample()[0], k, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(slope, k)


PAIRS = [
    (PowerSpherical, HypersphericalUniform),
    (VonMisesFisher, HypersphericalUniform),
    (HypersphericalUniform, HypersphericalUniform),
    (PowerSpherical, VonMisesFisher),
    (VonMisesFisher, VonMisesFisher),
    (HypersphericalUniform, VonMisesFisher),
    (HypersphericalUniform, PowerSpherical),
]


def make(family, loc, concentration):
    if family is HypersphericalUniform:
        return HypersphericalUniform(loc.shape[-1], dtype=loc.dtype, device=loc.device)
    return family(loc, concentration)


@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda family: family.__name__)
def test_kl_divergence_against_quadrature_and_draws(first, second, dimension, device):
    """About one loc by quadrature. Of two locs by draws, and because E x is along the first."""
    loc, other = directions(2, dimension, device=device)
    for concentration, other_concentration in ((0.3, 4.0), (50.0, 7.0)):
        p, q = make(first, loc, concentration), make(second, loc, other_concentration)
        exact_p, exact_q = Exact(first, concentration, dimension), Exact(second, other_concentration, dimension)
        expected = (exact_q.log_z - exact_p.mean(exact_q.log_f) - exact_p.entropy()).item()
        assert kl_divergence(p, q).item() == pytest.approx(expected, rel=1e-9, abs=1e-11)
        away = make(second, other, other_concentration)
        x = p.sample((4000,))
        assert_mean(p.log_prob(x) - away.log_prob(x), kl_divergence(p, away), 1e-12)


@pytest.mark.parametrize("concentration", [0.0, 1.0, 1e6])
def test_kl_divergence_from_itself_is_zero(concentration, device):
    p = VonMisesFisher(directions(5, 17, dtype=torch.float32, device=device), concentration)
    assert kl_divergence(p, p).abs().max() <= 1e-8  # 1e6 * 2^-53, some times
    assert (kl_divergence(p, p.expand([3, 5])).shape) == (3, 5)


def test_kl_divergence_broadcasts_and_has_gradients(device):
    loc, other = directions(4, 1, 3, device=device).requires_grad_(), directions(5, 3, device=device)
    k = torch.tensor(2.0, dtype=torch.float64, device=device, requires_grad=True)
    assert kl_divergence(VonMisesFisher(loc, k), VonMisesFisher(other, k)).shape == (4, 5)

    def kl(loc, k):
        p = VonMisesFisher(torch.nn.functional.normalize(loc, dim=-1), k, validate_args=False)
        return kl_divergence(p, VonMisesFisher(other, 3 * k, validate_args=False))

    assert torch.autograd.gradcheck(kl, (loc, k))
    uniform = HypersphericalUniform(3, dtype=torch.float64, device=device)
    assert torch.autograd.gradcheck(lambda s: kl_divergence(uniform, PowerSpherical(other, s)), k)
    assert torch.autograd.gradcheck(lambda s: kl_divergence(PowerSpherical(other, s), uniform), k)


def test_kl_divergence_that_is_not_closed_or_makes_no_sense(device):
    p = PowerSpherical(directions(3, device=device), 2.0)
    for q in (p, PowerSpherical(directions(3, device=device), 2.0)):
        with pytest.raises(NotImplementedError):
            kl_divergence(p, q)
    with pytest.raises(NotImplementedError):
        kl_divergence(VonMisesFisher(p.loc, 1.0), p)
    with pytest.raises(ValueError, match="one event shape"):
        kl_divergence(p, HypersphericalUniform(4))


@DIRECTIONAL
def test_kl_divergence_to_power_spherical_says_what_to_do(family):
    """The estimate that the error names has the gradients of p's parameters."""
    k = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    p, q = family(directions(3), k), PowerSpherical(directions(3), 3.0)
    with pytest.raises(NotImplementedError, match=rf"kl_divergence\({family.__name__}, PowerSpherical\).*rsample"):
        kl_divergence(p, q)
    x = p.rsample((1000,))
    (p.log_prob(x) - q.log_prob(x)).mean(0).backward()
    assert k.grad.isfinite()


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda family: family.__name__)
def test_kl_divergence_checks_shapes_first(first, second):
    """The vectors of 3 and 4 coordinates once met in einsum, whose error came instead."""
    p = make(first, directions(2, 3), torch.ones(2).double())
    with pytest.raises(ValueError, match=r"kl_divergence: p and q must have one event shape; got \(3,\) and \(4,\)"):
        kl_divergence(p, make(second, directions(4), 2.0))
    with pytest.raises(ValueError, match=r"batch shapes of p and q must broadcast; got \(2,\) and \(5,\)"):
        kl_divergence(p.expand([2]), make(second, directions(3), 2.0).expand([5]))


@DIRECTIONAL
def test_moments_have_gradients(family):
    k = torch.tensor([0.2, 40.0], dtype=torch.float64, requires_grad=True)
    loc = directions(2, 3).requires_grad_()
    for statistic in ("mean", "variance", "covariance", "entropy"):

        def value(loc, k, statistic=statistic):
            result = getattr(family(loc, k, validate_args=False), statistic)
            return result() if callable(result) else result

        assert torch.autograd.gradcheck(value, (loc, k))


@DIRECTIONAL
def test_a_column_of_concentrations_warns_once(family):
    """A head that ends in one unit gives (B, 1). The batch was then (B, B), silently."""
    distributions.directional._warn_of_pairs.cache_clear()
    loc, name = directions(4, 3, dtype=torch.float32), family._concentration_name
    with pytest.warns(
        UserWarning, match=rf"{family.__name__}: `{name}` .*batch \(B, B\).*{name}\.squeeze\(-1\)"
    ) as caught:
        assert family(loc, torch.ones(4, 1)).batch_shape == (4, 4)
    assert [warning.filename for warning in caught] == [__file__]
    distributions.directional._warn_of_pairs.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (torch.ones(4), torch.ones(5, 1), torch.ones(()), torch.ones(1)):
            family(loc, scale)
        assert family(loc.unsqueeze(-3), torch.ones(4, 1)).batch_shape == (4, 4)
        family(loc[:1], torch.ones(1, 1))
        OPS[family](loc, torch.ones(4, 1), loc)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            family(loc, torch.ones(4, 1))
    assert len(caught) == 1


@DIRECTIONAL
@pytest.mark.parametrize("dimension", [2, 3, 128, 512])
def test_loc_that_float32_normalised_and_float64_checks(family, dimension, device):
    narrow = directions(50, dimension, dtype=torch.float32, device=device)
    loc = narrow.double().requires_grad_()
    p = family(loc, torch.full((50,), 1e5, dtype=torch.float64, device=device))
    assert unit_vector.check(p.loc).all()
    torch.testing.assert_close(p.loc, loc, rtol=0, atol=1e-6)
    x = p.sample()
    for value in (p.log_prob(x), p.log_prob(-p.loc.detach())):  # the antipode, beyond float64's rounding, was NaN
        assert value.isfinite().all()
    exact = torch.nn.functional.normalize(loc, dim=-1)
    assert torch.equal(p.log_prob(x), OPS[family](p.loc, p._parameters[1], x))
    torch.testing.assert_close(p.log_prob(x), OPS[family](exact, p._parameters[1], x), rtol=1e-10, atol=1e-10 * 1e5)
    (dloc,) = torch.autograd.grad(p.log_prob(x).sum(), loc)
    assert ((dloc * loc).sum(-1).abs() <= 1e-6 * dloc.norm(dim=-1)).all()
    with pytest.raises(ValueError, match="loc"):
        family(1.0001 * loc.detach(), 1.0)
    unit = directions(dimension, device=device)
    assert family(unit, 1.0).loc is unit
    assert torch.equal(family(loc, 1.0, validate_args=False).loc, loc)


@DIRECTIONAL
@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_at_zero_all_is_uniform(family, dimension, device):
    """The package's scale 0 was refused."""
    zero = torch.zeros(3, dtype=torch.float64, device=device, requires_grad=True)
    p, uniform = (
        family(directions(3, dimension, device=device), zero),
        make(HypersphericalUniform, directions(dimension), 0),
    )
    x = p.sample((4000,))
    torch.testing.assert_close(p.log_prob(x).cpu(), uniform.log_prob(x.cpu()))
    torch.testing.assert_close(p.entropy().cpu(), uniform.entropy().expand(3))
    torch.testing.assert_close(p.variance, torch.full_like(p.variance, 1 / dimension))
    assert torch.equal(p.mean, torch.zeros_like(p.mean))
    torch.testing.assert_close(kl_divergence(p, uniform).cpu(), torch.zeros(3).double())
    assert_mean(x, 0.0)
    assert_mean(x**2, 1 / dimension)
    for value in (p.log_prob(-p.loc), p.entropy(), p.mean, p.variance):  # at the antipode too
        (slope,) = torch.autograd.grad(value.sum(), zero)
        assert slope.isfinite().all()


def test_von_mises_fisher_at_zero_is_uniform(device):
    k = torch.tensor([0.0, 1e-30, 1e-12], dtype=torch.float64, device=device, requires_grad=True)
    p, uniform = VonMisesFisher(directions(5, device=device), k), HypersphericalUniform(5, dtype=torch.float64)
    x = directions(7, 1, 5, device=device)
    torch.testing.assert_close(p.log_prob(x), uniform.log_prob(x[:, 0].cpu()).to(device).unsqueeze(-1).expand(7, 3))
    torch.testing.assert_close(p.variance, torch.full_like(p.variance, 0.2))
    (slope,) = torch.autograd.grad(p.variance.sum(), k)
    assert slope.abs().max() < 1e-10  # its quotient A / k once had a slope of 1e14
    assert_mean(p.sample((4000,)), 0.0)


@DIRECTIONAL
def test_log_prob_is_the_op(family, device):
    loc, scale = directions(4, 3, dtype=torch.float32, device=device), torch.tensor(5.0, device=device)
    p, x = family(loc, scale), directions(9, 1, 3, dtype=torch.float32, device=device)
    assert torch.equal(p.log_prob(x), OPS[family](loc, scale, x))
    assert p.log_prob(x[0, 0]).shape == (4,)
    with effops.use_variant("einsum"):
        assert torch.equal(p.log_prob(x), OPS[family](loc, scale, x, variant="einsum"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@DIRECTIONAL
def test_log_prob_at_huge_concentration(family, dtype, device):
    """Judged in float64 from the same, rounded, parameters."""
    p = family(directions(6, 128, dtype=dtype, device=device), 1e6)
    x = p.sample((50,))
    assert p.log_prob(x).dtype == dtype
    op = OPS[family]
    assert reference_of(op).bounds(op.prepare(p.loc, p._parameters[1], x)).error_ratio(p.log_prob(x)) <= 1
    assert p.entropy().dtype == p.mean.dtype == p.variance.dtype == dtype
    wide = family(p.loc.double(), p._parameters[1].double(), validate_args=False)
    torch.testing.assert_close(p.entropy().double(), wide.entropy(), rtol=torch.finfo(dtype).eps, atol=0)


@DIRECTIONAL
def test_memory(family):
    """Pairs of draws and components; draws that are many or large; all without what broadcasting would take."""
    p = family(directions(100, 64, dtype=torch.float32), torch.rand(100) + 1)
    x = directions(1000, 1, 64, dtype=torch.float32)
    assert memory(Pass(p.log_prob, (x,))).temporary_bytes <= 4 * 2**20  # of pairs: 24 MiB
    for dimension, count in ((3, 20000), (128, 2000)):
        p = family(torch.eye(dimension)[0], 10.0)
        measured = memory(Pass(lambda p=p, count=count: p.sample((count,)), ()))
        assert measured.temporary_bytes <= 4.5 * measured.output_bytes


@DIRECTIONAL
def test_shapes_and_expand(family):
    p = family(directions(4, 1, 3, dtype=torch.float32), torch.rand(5) + 1)
    assert (p.batch_shape, p.event_shape, p.loc.shape) == ((4, 5), (3,), (4, 5, 3))
    assert p.sample((2,)).shape == (2, 4, 5, 3)
    assert p.sample().shape == p.mean.shape == p.variance.shape == p.mode.shape == p.stddev.shape == (4, 5, 3)
    assert p.entropy().shape == (4, 5)
    wide = p.expand([6, 4, 5])
    assert type(wide) is family
    assert wide.batch_shape == (6, 4, 5)
    assert wide.loc.shape == (6, 4, 5, 3)
    assert getattr(wide, family._concentration_name).shape == (6, 4, 5)
    x = wide.sample()
    assert x.shape == (6, 4, 5, 3)
    assert torch.equal(wide.log_prob(x), p.log_prob(x))
    assert wide.log_prob(x[0, 0, 0]).shape == wide.entropy().shape == (6, 4, 5)
    assert wide.mean.shape == (6, 4, 5, 3)
    with pytest.raises(ValueError, match="one to which"):
        p.expand([4, 6])
    with pytest.raises(ValueError, match="one to which"):
        family(p.loc[0, 0], 1.0).expand([4]).expand([5])
    assert Independent(p, 1).log_prob(p.sample()).shape == (4,)
    assert family(directions(0, 3), 1.0).sample((2,)).shape == (2, 0, 3)


@DIRECTIONAL
def test_arguments_are_validated(family):
    loc, name = directions(4, 3, dtype=torch.float32), family._concentration_name
    for bad in (-1.0, float("nan"), torch.tensor([1.0, 1.0, -1e-6, 1.0])):
        with pytest.raises(ValueError, match=name):
            family(loc, bad)
    for bad in (1.01 * loc, torch.full_like(loc, float("nan")), torch.zeros_like(loc)):
        with pytest.raises(ValueError, match="loc"):
            family(bad, 1.0)
    assert family(1.01 * loc, -1.0, validate_args=False).log_prob(loc).shape == (4,)
    p = family(loc, 1.0)
    for bad in (0.99 * loc, torch.zeros_like(loc)):
        with pytest.raises(ValueError, match="support"):
            p.log_prob(bad)
    with pytest.raises(ValueError, match="event_shape"):
        p.log_prob(loc[:, :2])
    assert p.expand([2, 4])._validate_args
    assert not family(loc, 1.0, validate_args=False).expand([4])._validate_args
    family(loc, 0.0)
    with pytest.raises(ValueError, match=f"{family.__name__}: batch shapes must broadcast; got loc .4,. .*{name} .3,."):
        family(loc, torch.ones(3))
    with pytest.raises(ValueError, match="at least 2"):
        family(loc[:, :1], 1.0)
    for bad in ([1.0, 0.0], torch.tensor([1, 0])):
        with pytest.raises(TypeError, match=f"{family.__name__}: `loc`"):
            family(bad, 1.0)
    assert getattr(family(loc, torch.tensor([2])), name).dtype == torch.float32


@pytest.mark.parametrize("family", [PowerSpherical, VonMisesFisher])
def test_draws_without_validation(family):
    p = family(directions(2, 3), torch.tensor([float("nan"), 1.0]).double(), validate_args=False)
    x = p.sample((10,))  # a rejection that ends
    assert x[:, 0].isnan().all()
    assert x[:, 1].isfinite().all()
    assert p.entropy().isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dimension", [2, 3, 128, 768])
def test_unit_vector_is_what_normalising_gives(dtype, dimension, device):
    v = torch.randn(10000, dimension, device=device).to(dtype)
    v = torch.nn.functional.normalize(v, dim=-1)
    assert unit_vector.check(v).all()
    assert unit_vector.event_dim == 1
    off = 1 + 8 * torch.finfo(dtype).eps * math.sqrt(1 + dimension / 8)
    assert not unit_vector.check((v.double() * off).to(torch.float64)).any()
    assert not unit_vector.check(torch.full((1, dimension), float("nan"), dtype=dtype)).any()


def test_hyperspherical_uniform(device):
    for dimension in (2, 3, 8):
        p = HypersphericalUniform(dimension, dtype=torch.float64, device=device)
        x = p.sample((4000,))
        assert x.dtype == torch.float64
        assert x.shape == (4000, dimension)
        assert unit_vector.check(x).all()
        assert p.entropy().item() == pytest.approx(Exact(HypersphericalUniform, 1, dimension).log_z.item(), rel=1e-13)
        assert torch.equal(p.log_prob(x), -p.entropy().expand(4000))
        assert_mean(x, p.mean)
        assert_mean(x**2, p.variance)
    named = HypersphericalUniform(dim=3, device=device, dtype=torch.float64, validate_args=False)
    in_order = HypersphericalUniform(3, device, torch.float64, False)  # of the package power_spherical
    assert repr(named) == repr(in_order) == "HypersphericalUniform(dim: 3, batch_shape: torch.Size([]))"
    assert named.dim == 3
    assert in_order.sample().dtype == torch.float64
    wide = HypersphericalUniform(3).expand([2, 1]).expand([2, 4])
    assert wide.batch_shape == (2, 4)
    assert wide.rsample((5,)).shape == (5, 2, 4, 3)
    assert wide.log_prob(directions(3)).shape == wide.entropy().shape == kl_divergence(wide, wide).shape == (2, 4)
    assert wide.mean.shape == wide.variance.shape == (2, 4, 3)
    assert HypersphericalUniform(3, dtype=torch.bfloat16).sample().dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"must be one to which \(2, 4\) expands; got \(3,\)"):
        wide.expand([3])
    with pytest.raises(ValueError, match="support"):
        wide.log_prob(torch.ones(3))
    with pytest.raises(ValueError, match="at least 2"):
        HypersphericalUniform(1)


@pytest.mark.parametrize("family", [PowerSpherical, VonMisesFisher, HypersphericalUniform])
def test_copies_are_equal(family):
    p = make(family, directions(4, 3, dtype=torch.float32), torch.rand(4) + 1).expand([2, 4])
    x = p.sample()
    for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert repr(other) == repr(p)
        assert torch.equal(other.log_prob(x), p.log_prob(x))
    saved = io.BytesIO()
    torch.save(p, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved, weights_only=False).log_prob(x), p.log_prob(x))


def components_of(kind, *batch, dimension=3):
    loc = directions(*batch, dimension, dtype=torch.float32)
    if kind == "normal":
        return Independent(Normal(loc, torch.rand(*batch, dimension) + 0.5), 1)
    return {"power_spherical": PowerSpherical, "von_mises_fisher": VonMisesFisher}[kind](loc, torch.rand(batch) + 1)


KINDS = pytest.mark.parametrize("kind", ["power_spherical", "von_mises_fisher", "normal"])


@KINDS
@pytest.mark.parametrize(("weights", "batch"), [((4,), (4,)), ((2, 4), (2, 4)), ((4,), (3, 2, 4)), ((2, 4), (3, 2, 4))])
def test_mixture_is_that_of_torch(kind, weights, batch):
    categorical, components = Categorical(logits=torch.randn(weights)), components_of(kind, *batch)
    mixture = Mixture(categorical, components)
    plain = MixtureSameFamily(categorical.expand(batch[:-1]), components)
    assert mixture.batch_shape == batch[:-1]
    assert mixture.event_shape == (3,)
    assert not mixture.has_rsample
    x = mixture.sample((7,))
    assert x.shape == plain.sample((7,)).shape
    torch.testing.assert_close(mixture.log_prob(x), plain.log_prob(x))
    torch.testing.assert_close(mixture.mean, plain.mean)
    torch.testing.assert_close(mixture.variance, plain.variance)
    wide = mixture.expand([5, *batch[:-1]])
    assert type(wide) is Mixture
    assert wide.sample().shape == (5, *batch[:-1], 3)
    assert wide.log_prob(x[0]).shape == wide.batch_shape == (5, *batch[:-1])
    torch.testing.assert_close(wide.log_prob(x[0]), plain.log_prob(x[0]).expand(wide.batch_shape))
    assert "Mixture(" in repr(mixture)
    assert "MixtureSameFamily" not in repr(mixture)
    copied = pickle.loads(pickle.dumps(mixture))
    assert torch.equal(copied.log_prob(x), mixture.log_prob(x))


@KINDS
def test_draws_of_a_mixture(kind):
    mixture = Mixture(Categorical(torch.tensor([0.1, 0.3, 0.6])), components_of(kind, 3))
    x = mixture.sample((10000,))
    assert_mean(x, mixture.mean)
    assert_mean((x - mixture.mean) ** 2, mixture.variance)
    entropy = -MixtureSameFamily.log_prob(mixture, x)
    assert_mean(-mixture.log_prob(x), entropy.mean(), 1e-5)


def test_mixture_draws_chosen_components_only():
    mixture = Mixture(Categorical(torch.ones(100)), components_of("power_spherical", 100, dimension=32))
    measured = memory(Pass(lambda: mixture.sample((3000,)), ()))
    assert measured.temporary_bytes <= 4 * measured.output_bytes  # of all components: 100


def test_a_mixture_takes_the_parameters_as_they_were_given(monkeypatch):
    """One loc of many scales reaches the op as one."""
    seen = {}

    def op(log_weights, loc, scale, x, dim):
        seen.update(weights=log_weights.shape, loc=loc.shape, scale=scale.shape, x=x.shape, dim=dim)
        return torch.zeros(x.shape[:-2])

    monkeypatch.setitem(distributions.mixture._MIXTURE_OPS, PowerSpherical, op)
    loc = directions(3, dtype=torch.float32)
    mixture = Mixture(Categorical(torch.ones(4)), PowerSpherical(loc, torch.ones(4)))
    mixture.log_prob(mixture.sample((7,)))
    assert seen == {"weights": (4,), "loc": (3,), "scale": (4,), "x": (7, 1, 3), "dim": -1}


def test_mixture_has_gradients():
    logits, loc = torch.randn(4, requires_grad=True), directions(4, 3, dtype=torch.float32).requires_grad_()
    mixture = Mixture(Categorical(logits=logits), PowerSpherical(loc, 5.0))
    mixture.log_prob(directions(6, 3, dtype=torch.float32)).sum().backward()
    assert logits.grad.abs().sum() > 0
    assert loc.grad.abs().sum() > 0


def test_mixture_says_what_it_takes():
    loc = directions(4, 3, dtype=torch.float32)
    for components in (
        Normal(loc, 1.0),
        Independent(Normal(loc, 1.0), 2),
        Independent(PowerSpherical(loc, 1.0), 1),
        HypersphericalUniform(3).expand([4]),
    ):
        with pytest.raises(TypeError, match=r"use torch\.distributions\.MixtureSameFamily"):
            Mixture(Categorical(torch.ones(4)), components)
    with pytest.raises(TypeError, match="Categorical"):
        Mixture(Normal(0.0, 1.0), PowerSpherical(loc, 1.0))
    with pytest.raises(ValueError, match=r"as many components as `mixture_distribution` has weights, 3; got 4"):
        Mixture(Categorical(torch.ones(3)), PowerSpherical(loc, 1.0))
    mixture = Mixture(Categorical(torch.ones(4)), PowerSpherical(loc, 1.0))
    with pytest.raises(ValueError, match="support"):
        mixture.log_prob(torch.ones(3))


def test_leaves_can_be_copied():
    """A distribution of parameters that require gradients, as torch's can."""
    loc = directions(4, 3, dtype=torch.float32).requires_grad_()
    component = PowerSpherical(loc, torch.ones(4, requires_grad=True))
    for distribution in (component, Mixture(Categorical(torch.ones(4)), component)):
        x = distribution.sample((2,))
        assert torch.equal(copy.deepcopy(distribution).log_prob(x), distribution.log_prob(x))


LOC = torch.eye(4, 3)
LOC[3, 0] = 1.0
SPHERICAL = PowerSpherical(LOC, 1.0)
UNIFORM = HypersphericalUniform(3)
MIXTURE = Mixture(Categorical(torch.ones(4)), SPHERICAL)
NORMALS = Mixture(Categorical(torch.ones(4)), Independent(Normal(LOC, 1.0), 1))
FAMILIES = {
    "PowerSpherical": SPHERICAL,
    "VonMisesFisher": VonMisesFisher(LOC, 1.0),
    "HypersphericalUniform": UNIFORM,
    "Mixture": MIXTURE,
}
# What was PyTorch's or Python's text, and named no remedy.
MISTAKES = {
    "a keyword of another family": (
        lambda: PowerSpherical(LOC, concentration=1.0),
        TypeError,
        'PowerSpherical: it takes loc, scale, validate_args; got `concentration`; did you mean "scale"?',
    ),
    "the letter of a book": (
        lambda: VonMisesFisher(LOC, kappa=1.0),
        TypeError,
        'VonMisesFisher: it takes loc, concentration, validate_args; got `kappa`; did you mean "concentration"?',
    ),
    "no scale": (lambda: PowerSpherical(LOC), TypeError, "PowerSpherical: it takes .*; got no `scale`; give each of"),
    "the former name of dim": (
        lambda: HypersphericalUniform(dimension=3),
        TypeError,
        'HypersphericalUniform: it takes dim, .*; got `dimension`; did you mean "dim"?',
    ),
    "a keyword of a mixture": (
        lambda: Mixture(Categorical(torch.ones(4)), components=SPHERICAL),
        TypeError,
        'Mixture: it takes .*; got `components`; did you mean "component_distribution"?',
    ),
    "no components": (
        lambda: Mixture(Categorical(torch.ones(4)), LOC),
        TypeError,
        "`component_distribution` must be .*; got Tensor; use torch.distributions.MixtureSameFamily",
    ),
    "a negative scale": (
        lambda: PowerSpherical(LOC, -1.0),
        ValueError,
        "PowerSpherical: `scale` must be at least 0; got -1; softplus, for one, gives only such numbers",
    ),
    "a scale that is nan": (
        lambda: VonMisesFisher(LOC, math.nan),
        ValueError,
        "VonMisesFisher: `concentration` must be at least 0; got nan; look where it comes from",
    ),
    "a scale that is a text": (
        lambda: PowerSpherical(LOC, "1"),
        TypeError,
        "PowerSpherical: `scale` must be a tensor or a number; got str; give a number",
    ),
    "a location that is not normalised": (
        lambda: PowerSpherical(2 * LOC[:3], 1.0),
        ValueError,
        "`loc` must hold unit vectors; got one of length 2; give torch.nn.functional.normalize(loc, dim=-1)",
    ),
    "a dimension that is no integer": (
        lambda: HypersphericalUniform(3.0),
        TypeError,
        "HypersphericalUniform: `dim` must be an integer; got float; convert it with int()",
    ),
    "a dtype in the place of the device": (
        lambda: HypersphericalUniform(3, torch.float64),
        TypeError,
        "HypersphericalUniform: `device` must be a device; got torch.float64; give dtype=torch.float64",
    ),
    "a dtype of integers": (
        lambda: HypersphericalUniform(3, dtype=torch.int64),
        TypeError,
        "HypersphericalUniform: `dtype` must be real floating point; got torch.int64",
    ),
    "values outside the support": (
        lambda: SPHERICAL.log_prob(torch.ones(4, 4, 3)),
        ValueError,
        "PowerSpherical.log_prob: `value` must hold unit vectors, the support; got one of length 1.732051; give "
        "torch.nn.functional.normalize(value, dim=-1)",
    ),
    "values that are nan": (
        lambda: NORMALS.log_prob(torch.tensor([1.0, math.nan, 1.0])),
        ValueError,
        "Mixture.log_prob: `x` must hold numbers, the support; got nan; look where it comes from",
    ),
    "values outside the support of a mixture": (
        lambda: MIXTURE.log_prob(torch.ones(3)),
        ValueError,
        "Mixture.log_prob: `x` must hold unit vectors, the support; got one of length 1.732051",
    ),
    "integers": (
        lambda: UNIFORM.log_prob(torch.tensor([1, 0, 0])),
        TypeError,
        "HypersphericalUniform.log_prob: `value` must be real floating point; got torch.int64; convert it to one of",
    ),
    "a list": (
        lambda: SPHERICAL.log_prob([1.0, 0.0, 0.0]),
        TypeError,
        "PowerSpherical.log_prob: `value` must be a tensor; got list; use torch.as_tensor",
    ),
    "values of another dimension": (
        lambda: SPHERICAL.log_prob(torch.ones(3, 4)),
        ValueError,
        "`value` must have a last dimension of 3, as event_shape says; got (3, 4); give value.mT",
    ),
    "values for every pair": (
        lambda: SPHERICAL.log_prob(LOC[:3]),
        ValueError,
        "must broadcast with batch_shape + event_shape = (4, 3); got (3, 3); for every pair give value.unsqueeze(-2)",
    ),
    "a batch shape that does not fit": (
        lambda: SPHERICAL.expand((7,)),
        ValueError,
        "PowerSpherical.expand: `batch_shape` must be one to which (4,) expands; got (7,); put new axes first",
    ),
    "a batch shape that does not fit a mixture": (
        lambda: MIXTURE.expand((7,)).expand((6,)),
        ValueError,
        "Mixture.expand: `batch_shape` must be one to which (7,) expands; got (6,); put new axes first",
    ),
    "a number for a batch shape": (
        lambda: MIXTURE.expand(7),
        TypeError,
        "Mixture.expand: `batch_shape` must be a tuple of integers; got 7; give (7,)",
    ),
    "the entropy of a mixture": (
        lambda: MIXTURE.entropy(),
        NotImplementedError,
        "Mixture.entropy has no closed form; estimate it: x = p.sample((1000,)); -p.log_prob(x).mean(0)",
    ),
    "gradients of draws of a mixture": (
        lambda: MIXTURE.rsample(),
        NotImplementedError,
        "Mixture.rsample: a draw must have a gradient; got the choice of a component, which has none; draw by sample",
    ),
    "the mode of a mixture": (lambda: MIXTURE.mode, NotImplementedError, "Mixture.mode has no closed form; seek the"),
    "the mode of the uniform distribution": (lambda: UNIFORM.mode, NotImplementedError, "got all alike; draw one by"),
    "the divergence of a mixture": (
        lambda: kl_divergence(SPHERICAL, MIXTURE),
        NotImplementedError,
        "kl_divergence(PowerSpherical, Mixture) has no closed form for a mixture; estimate it: x = p.sample((1000,))",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    call, kind, told = MISTAKES[mistake]
    pattern = re.escape(told).replace(re.escape(".*"), ".*")
    with pytest.raises(kind, match=pattern):
        call()


@pytest.mark.parametrize("name", FAMILIES)
def test_mistakes_in_what_all_families_have(name):
    p = FAMILIES[name]
    drawing = [method for method in (p.sample, p.rsample) if name != "Mixture" or method == p.sample]
    for draw in drawing:
        for given, remedy in ((5, r"give \(5,\)"), (5.0, "give "), ("a", "give "), ((1.5,), "give ")):
            with pytest.raises(
                TypeError, match=f"^{name}: `sample_shape` must be a tuple of integers; got .*; {remedy}"
            ):
                draw(given)
        with pytest.raises(ValueError, match=f"^{name}: `sample_shape` must hold sizes of at least 0; got .-1,.;"):
            draw((-1,))
        with pytest.raises(
            TypeError, match=rf'^{name}\.r?sample: it takes sample_shape; got `shape`; did you mean "sa'
        ):
            draw(shape=(5,))
        assert draw([2]).shape[0] == draw(torch.Size((2,))).shape[0] == 2
    with pytest.raises(TypeError, match=rf"^{name}\.log_prob: it takes (value|x); got `data`"):
        p.log_prob(data=LOC)
    for method in (p.cdf, p.icdf, lambda value: p.enumerate_support()):
        with pytest.raises(
            NotImplementedError, match=rf"^{name}\..*: only distributions of .* have one; got one of vectors of 3 coo"
        ):
            method(LOC)
