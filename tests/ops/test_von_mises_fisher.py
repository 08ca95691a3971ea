"""What is peculiar to the von Mises-Fisher log density: Bessel functions, at any dimension and concentration."""

import math

import mpmath
import pytest
import torch

from effops.ops.densities.von_mises_fisher import op
from effops.reference import reference_of

from ..support.calls import on_this_python, without_cpp

VARIANTS = [v for v in without_cpp(on_this_python(op.variants)) if v != "compile"]
E1, E3 = (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)

# Densities from the tests of SciPy (scipy/stats/tests/test_multivariate.py): x, mean direction, concentration, density.
PUBLISHED = [
    (E1, E1, 1e-4, 0.0795854295583605),
    (E1, E3, 1e-4, 0.07957747141331854),
    (E1, E1, 100, 15.915494309189533),
    (E1, E3, 100, 5.920684802611232e-43),
    (E1, (math.sqrt(0.98), math.sqrt(0.02), 0.0), 2000, 5.930499050746588e-07),
    (E1, E1, 2000, 318.3098861837907),
    ((1.0, 0, 0, 0, 0), (1.0, 0, 0, 0, 0), 2000, 101371.86957712633),
    ((1.0, 0, 0, 0, 0), (math.sqrt(0.98), math.sqrt(0.02), 0, 0, 0), 2000, 0.00018886808182653578),
    ((1.0, 0, 0, 0, 0), (math.sqrt(0.8), math.sqrt(0.2), 0, 0, 0), 2000, 2.0255393314603194e-87),
]


@pytest.mark.parametrize(("x", "loc", "concentration", "density"), PUBLISHED)
def test_published_values(x, loc, concentration, density, device):
    x, loc = (torch.tensor(vector, dtype=torch.float64, device=device) for vector in (x, loc))
    rounding = 2e-15 * max(1.0, concentration)  # of the dot product, and of the published concentration times it
    for variant in VARIANTS:
        out = op(loc, concentration, x, variant=variant)
        assert out.item() == pytest.approx(math.log(density), abs=rounding, rel=1e-14)


@pytest.mark.parametrize("dimension", [2, 3, 10, 64, 128, 4096])
def test_against_mpmath(dimension, device, generator):
    """Within 1e-12 up to 128 dimensions and 5e-12 at 4096, of concentrations at which their rounding allows it."""
    loc, _, x = reference_of(op).sample((1, dimension), (), (3, 1, dimension), dtype=torch.float64, generator=generator)
    concentrations = [0.0, 1e-6, 1e-3, 0.1, 1.0, 6.0, 50.0, 1e3]
    k = torch.tensor(concentrations, dtype=torch.float64)
    found = op(loc.to(device), k.to(device), x.to(device)).cpu()
    tolerance = 1e-12 if dimension <= 128 else 5e-12
    with mpmath.workdps(60):
        order = mpmath.mpf(dimension) / 2 - 1
        for i in range(3):
            dot = mpmath.fsum(mpmath.mpf(a) * mpmath.mpf(b) for a, b in zip(loc[0].tolist(), x[i, 0].tolist()))
            for j, kappa in enumerate(map(mpmath.mpf, concentrations)):
                if kappa == 0:
                    exact = mpmath.loggamma(order + 1) - mpmath.log(2) - (order + 1) * mpmath.log(mpmath.pi)
                else:
                    bessel = mpmath.log(mpmath.besseli(order, kappa, maxterms=10**6))
                    exact = order * mpmath.log(kappa) - (order + 1) * mpmath.log(2 * mpmath.pi) - bessel + kappa * dot
                assert abs(found[i, j].item() - exact) <= tolerance * max(1, abs(exact))


@pytest.mark.parametrize(("dimension", "below"), [(128, 6e-4), (512, 10.0), (768, 32.0), (4096, 1.8e3)])
def test_finite_where_the_bessel_function_underflows(dimension, below, device):
    """`scipy.special.ive`, and with it scipy's density, is 0 or infinite below these concentrations."""
    k = torch.tensor([0.0, 1e-300, 0.5 * below, below, 1e18], dtype=torch.float64, device=device)
    loc = torch.eye(dimension, dtype=torch.float64, device=device)[0]
    for variant in VARIANTS:
        out = op(loc, k, loc, variant=variant)
        assert out.isfinite().all()
        assert (out.diff() >= 0).all()  # the density at the mode grows with the concentration


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_density_no_number(variant, device):
    """A concentration below 0, infinite or NaN gives NaN, and NaN as its gradient."""
    loc = torch.eye(3, device=device)[0]
    k = torch.tensor([-1.0, -1e-30, math.inf, math.nan], device=device, requires_grad=True)
    out = op(loc, k, loc, variant=variant)
    (gradient,) = torch.autograd.grad(out.sum(), k)
    assert out.isnan().all()
    assert gradient.isnan().all()


def test_layout_of_the_normaliser(device):
    """Compiled code relies on it: of a gradient it was that of the gradient from above, once."""
    k = torch.ones(4, 3, dtype=torch.float64, device=device)
    dout = torch.ones(4, 3, dtype=torch.float64, device=device)
    for operand in (k, k.T.contiguous().T, k[:1].expand(4, 3), k[::2, ::2]):
        fake = torch.empty_like(operand)
        found = torch.ops.effops.von_mises_fisher_normaliser(operand, 5)
        (gradient,) = torch.ops.effops.von_mises_fisher_normaliser_backward(
            dout[: len(operand), : operand.shape[1]], operand, 5, [True]
        )
        assert found.stride() == gradient.stride() == fake.stride()
