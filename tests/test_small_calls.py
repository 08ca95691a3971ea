"""What makes small calls of distributions fast: a normaliser that is kept, and a quick look before validation."""

import warnings

import pytest
import torch
from torch.func import grad, vmap
from torch.nn.functional import normalize

from effops.distributions import PowerSpherical, VonMisesFisher
from effops.numerics.directions import have_length_one, lengths
from effops.ops.densities import power_spherical, von_mises_fisher

FAMILIES = {PowerSpherical: power_spherical, VonMisesFisher: von_mises_fisher}
MAPS = {PowerSpherical: power_spherical.HalfLog, VonMisesFisher: von_mises_fisher.CosineMinusOne}


def directions(*shape, dtype=torch.float32):
    return normalize(torch.randn(*shape, dtype=dtype), dim=-1)


@pytest.fixture
def computed(monkeypatch):
    """How many normalisers were computed."""
    counts = []
    for dot_map in MAPS.values():
        own = dot_map.normaliser
        monkeypatch.setattr(dot_map, "normaliser", lambda self, scale, own=own: counts.append(1) or own(self, scale))
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_normaliser_is_computed_once(family, computed):
    p, x = family(directions(4, 3), torch.rand(4) + 1), directions(7, 1, 3)
    first, second = p.log_prob(x), p.log_prob(x)
    assert torch.equal(first, second)
    assert len(computed) == 1
    assert torch.equal(p.expand([2, 4]).log_prob(x.unsqueeze(1)), first.unsqueeze(1).expand(7, 2, 4))
    assert len(computed) == 1
    assert p.log_prob(normalize(x.double(), dim=-1)).dtype == torch.float64
    assert len(computed) == 2


@pytest.mark.parametrize("change", ["in place", "through .data", "another tensor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_normaliser_is_that_of_the_concentration(family, change):
    loc, concentration, x = directions(4, 3), torch.rand(4) + 1, directions(7, 1, 3)
    p = family(loc, concentration)
    p.log_prob(x)
    if change == "in place":
        concentration.mul_(2)
    elif change == "through .data":
        concentration.data.mul_(2)
    else:
        p._parameters = loc, concentration * 2
    assert torch.equal(p.log_prob(x), FAMILIES[family].op(loc, p._parameters[1], x))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_with_a_kept_normaliser(family, computed):
    """The kept one is no part of a graph: each call has gradients by all parameters, as a first call has."""
    parameters = directions(4, 3).requires_grad_(), (torch.rand(4) + 1).requires_grad_()
    x, p = directions(7, 1, 3).requires_grad_(), family(*parameters)
    expected = torch.autograd.grad(FAMILIES[family].op(*parameters, x).sum(), (*parameters, x))
    computed.clear()
    for _ in range(3):
        found = torch.autograd.grad(p.log_prob(x).sum(), (*parameters, x))
        assert all(map(torch.equal, found, expected))
    assert len(computed) == 1
    twice = torch.autograd.grad(p.log_prob(x).sum(), parameters, create_graph=True)
    assert all(one.requires_grad for one in twice)


@pytest.mark.parametrize("family", FAMILIES)
def test_transforms_of_a_distribution_that_was_called(family):
    loc, concentration, x = directions(4, 3), torch.rand(4) + 1, directions(7, 3)
    p = family(loc, concentration, validate_args=False)
    p.log_prob(x.unsqueeze(1))
    expected = FAMILIES[family].op(loc, concentration, x.unsqueeze(1))
    torch.testing.assert_close(vmap(p.log_prob)(x), expected)

    def of_concentration(k):
        return family(loc, k, validate_args=False).log_prob(x.unsqueeze(1)).sum()

    leaf = concentration.clone().requires_grad_()
    (right,) = torch.autograd.grad(FAMILIES[family].op(loc, leaf, x.unsqueeze(1)).sum(), leaf)
    torch.testing.assert_close(grad(of_concentration)(concentration), right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dimension", [2, 3, 128, 768])
def test_the_quick_look_accepts_what_validation_accepts(dimension, dtype):
    """It takes normalised vectors, and none whose length is off by more than the tolerance of validation."""
    vectors = directions(1000, dimension, dtype=dtype)
    assert have_length_one(vectors)
    for factor in torch.linspace(1 - 1e-5, 1 + 1e-5, 101, dtype=torch.float64).tolist():
        changed = vectors.clone()
        changed[17] *= factor
        assert lengths(changed)[1].all() or not have_length_one(changed)
    vectors[3, 0] = float("nan")
    assert not have_length_one(vectors)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_values_are_told(family):
    loc = directions(4, 3)
    p = family(loc, torch.ones(4), validate_args=True)  # Dynamo switches the default off
    for value, message in (
        (2 * loc, "`value` must hold unit vectors, the support; got one of length 2"),
        (loc[:, :2], r"`value` must have a last dimension of 3, as event_shape says; got \(4, 2\)"),
        (directions(5, 3), r"`value` must .*\(5, 3\)"),
        (1.0, "`value` must be a tensor; got float"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            p.log_prob(value)
    for parameters in ((2 * loc, torch.ones(4)), (loc, -torch.ones(4)), (loc, torch.full((4,), float("nan")))):
        with pytest.raises(ValueError, match=r"`(loc|scale|concentration)` .*; got "):
            family(*parameters, validate_args=True)
        assert family(*parameters, validate_args=False)._validate_args is False


@pytest.mark.parametrize("family", FAMILIES)
def test_the_quick_look_leaves_no_trace(family):
    """It takes numbers of parameters that learn: without PyTorch's warning of that, and without a graph."""
    loc, x = (directions(4, 3).requires_grad_() for _ in range(2))
    concentration = (torch.rand(4) + 1).requires_grad_()
    saved = []
    torch.set_warn_always(True)  # PyTorch gives this warning once in a process
    try:
        with (
            warnings.catch_warnings(),
            torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one),
        ):
            warnings.simplefilter("error")
            p = family(loc, concentration, validate_args=True)
            assert not saved
            p.log_prob(x)
    finally:
        torch.set_warn_always(False)
    assert len(saved) == 3  # loc, concentration and x, for backward
