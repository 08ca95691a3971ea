"""Functions that draw random numbers, in tiles: `randomness="different"`."""

import pytest
import torch
from torch.nn import functional

import effops
from effops.measure import Pass, memory

BUDGET = 2**18


def noisy(x, y):
    return functional.dropout(x[:, None] * y, 0.5).cos().sum(1)


def with_noise(x, y):
    z = x[:, None] - y
    return (z * (z + torch.randn_like(z)).detach().sign()).sum(1)


def in_two_loops(x, y):
    """The mask is drawn in both loops: for the sum along the axis that is cut, and for what is divided by it."""
    z = functional.dropout((x[:, None] * y).exp(), 0.3)
    return ((z / z.sum(0)) ** 2).sum(0)


DRAWS = {
    "rand": lambda z: torch.rand(z.shape) * z,
    "randn": lambda z: torch.randn(z.shape) * z,
    "randint": lambda z: torch.randint(1, 5, z.shape) * z,
    "rand_like": lambda z: torch.rand_like(z) * z,
    "randn_like": lambda z: torch.randn_like(z) * z,
    "randint_like": lambda z: torch.randint_like(z.detach(), 1, 5) * z,
    "bernoulli": lambda z: torch.bernoulli(torch.sigmoid(z)) * z,
    "normal": lambda z: torch.normal(z.detach(), 1.0) * z,
    "normal of two": lambda z: torch.normal(z.detach(), z.detach().exp()) * z,
    "normal of numbers": lambda z: torch.normal(0.0, 1.0, z.shape) * z,
    "exponential_": lambda z: torch.empty_like(z).exponential_() * z,
    "uniform_": lambda z: torch.empty_like(z).uniform_(1, 2) * z,
    "poisson": lambda z: torch.poisson(z.detach().exp()) * z,
    "alpha_dropout": lambda z: functional.alpha_dropout(z, 0.5, True),
    "dropout1d": lambda z: functional.dropout1d(z[None], 0.5, True)[0],
    "gumbel_softmax": lambda z: functional.gumbel_softmax(z, dim=-1),
    "native_dropout": lambda z: torch.native_dropout(z, 0.5, True)[0],
    "a distribution": lambda z: torch.distributions.Normal(z, 1.0).rsample(),
}


def pairs():
    return [torch.randn(640, requires_grad=True), torch.randn(520, requires_grad=True)]


def tiled(function, budget=BUDGET):
    return effops.tiled(function, budget=budget, randomness="different")


def gradients(out, leaves):
    return torch.autograd.grad(out.sum(), leaves)


def test_statistics_and_the_mask_of_backward():
    """The gradient of the sum of x * mask by x is the sum of the mask: forward and backward have the same."""
    x, y = pairs()
    function = tiled(lambda x, y: functional.dropout(x[:, None] * y, 0.25).sum(1))
    out = function(x, y)
    of_x, of_y = gradients(out, (x, y))
    torch.testing.assert_close(of_x * x, out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((of_y * y).sum(), out.sum(), rtol=1e-4, atol=1e-4)
    kept = torch.ones(640, requires_grad=True), torch.ones(520)
    share = function(*kept).mean() / 520
    assert abs(share - 1) < 0.02
    assert memory(Pass(lambda x, y: gradients(function(x, y), (x, y)), (x, y))).temporary_bytes <= BUDGET
    rows = function(*kept)
    assert rows.unique().numel() > 40  # rows have masks of their own


@pytest.mark.parametrize("function", [noisy, with_noise, in_two_loops], ids=lambda one: one.__name__)
def test_seeds(function):
    """A seed repeats a call; two calls differ; the generator goes on by the same number of draws at each call."""
    x, y = pairs()
    program = tiled(function)
    assert effops.explain(program, x, y).loops
    torch.manual_seed(3)
    first, second = program(x, y), program(x, y)
    state = torch.get_rng_state()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    again = [program(x, y), program(x, y)]
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert torch.equal(torch.get_rng_state(), state)
    one, other = gradients(first, (x, y)), gradients(again[0], (x, y))
    assert all(map(torch.equal, one, other))
    assert torch.equal(torch.get_rng_state(), state)  # backward draws nothing of it


@pytest.mark.slow
def test_both_loops_draw_the_same():
    """Where z / z.sum(0) has another mask in the quotient than in the sum, the columns do not sum to 1."""
    x, y = pairs()

    def shares(x, y):
        z = functional.dropout((x[:, None] * y).exp(), 0.3)
        down, right = z / z.sum(0), z / z.sum(1, keepdim=True)
        more = [(factor * down).sin().exp().cos() * (factor * right).tanh() for factor in (1, 2, 3)]
        return down.sum(0), right.sum(1), sum(more).sum()

    for found in tiled(shares, 2**20)(x, y)[:2]:
        torch.testing.assert_close(found, torch.ones_like(found))


@pytest.mark.slow
def test_gradients_are_those_of_the_draws():
    """Twice the same draws at points that differ by little: differences are those that the gradient tells."""
    x, y = (one.double().detach().requires_grad_() for one in pairs())
    program = tiled(in_two_loops)
    torch.manual_seed(1)
    (gradient,) = torch.autograd.grad(program(x, y).sum(), x)
    step = torch.randn_like(x) * 1e-6
    totals = []
    for sign in (1, -1):
        torch.manual_seed(1)
        totals.append(program((x + sign * step).detach().requires_grad_(), y).sum().detach())
    assert abs((totals[0] - totals[1]) / 2 - (gradient * step).sum()) <= 1e-4 * (gradient * step).abs().sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_operators(name):
    x, y = pairs()
    program = tiled(lambda x, y: DRAWS[name]((x[:, None] - y) / 4).mean((0, 1)), 2**20 if "gumbel" in name else BUDGET)
    report = effops.explain(program, x, y)
    assert not isinstance(report, effops.CannotTile), report
    assert report.loops
    torch.manual_seed(0)
    before = torch.get_rng_state()
    out = program(x, y)
    assert not torch.equal(torch.get_rng_state(), before)
    gradients(out, (x, y))
    expected = torch.stack([DRAWS[name]((x[:, None] - y) / 4).mean() for _ in range(4)])
    many = torch.stack([program(x, y) for _ in range(4)])
    assert (many.mean() - expected.mean()).abs() <= 6 * (expected.std() + many.std()) + 1e-6


def test_what_is_unused_or_not_drawn():
    x, y = pairs()
    before = torch.get_rng_state()
    tiled(lambda x, y: (x[:, None] * y).cos().sum(1))(x, y)
    assert torch.equal(torch.get_rng_state(), before)
    small = tiled(noisy)
    torch.manual_seed(0)
    found = small(x[:5], y[:5])
    torch.manual_seed(0)
    assert torch.equal(found, noisy(x[:5], y[:5]))  # as it is


def test_refusals():
    x, y = pairs()
    with pytest.raises(ValueError, match=r"^tiled: `randomness`: expected one of error, different"):
        effops.tiled(noisy, randomness="same")
    with pytest.raises(effops.CannotTile, match=r'randomness="different"'):
        effops.tiled(noisy, budget=BUDGET)(x, y)
    with pytest.raises(effops.CannotTile, match=r"multinomial\.default has no rule"):
        tiled(lambda x, y: torch.multinomial((x[:, None] * y).exp(), 520).cos().sum(1))(x, y)
    with pytest.raises(effops.CannotTile, match="along two axes"):
        tiled(lambda x, y: functional.dropout(x[:, None, None] * y[:, None] * y).cos().sum(1))(x[:300], y[:300])
