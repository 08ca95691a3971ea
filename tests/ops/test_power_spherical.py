"""What is peculiar to the PowerSpherical log density: the antipode, the package that it replaces, low dimensions."""

import dataclasses
import math

import pytest
import torch

from effops.measure import Pass, memory
from effops.numerics.precision import unit_roundoff
from effops.ops.densities.power_spherical import op
from effops.reference import reference_of

from ..support.calls import on_this_python, without_cpp

REFERENCE = reference_of(op)

VARIANTS = [v for v in on_this_python(op.variants) if v != "compile"]


@pytest.mark.parametrize("variant", without_cpp(VARIANTS))
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
@pytest.mark.parametrize("variant", [v for v in without_cpp(on_this_python(op.variants)) if v != "triton"])
def test_equals_the_package_it_replaces(variant, factor, generator):
    """In float64, which the package needs: its terms of about s log 2 each are opposite."""
    package = pytest.importorskip("power_spherical")
    loc, scale, x = REFERENCE.workload(M=6, T=5, D=16, generator=generator)
    args = (loc, factor * scale, x)
    wide = tuple(arg.double() for arg in args)
    expected = package.PowerSpherical(*wide[:2], validate_args=False).log_prob(wide[2])
    # The dot products of both may be off.
    of_package = REFERENCE.bounds(op.prepare(*wide))
    error = torch.maximum(of_package.below, of_package.above) + package_error(*wide)
    for inputs in (args, wide):
        bounds = REFERENCE.bounds(op.prepare(*inputs))
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
    loc, scale, x = REFERENCE.workload(M=2000, T=1, D=5, dtype=torch.float64, generator=generator)
    cosine = (loc * x[:, 0]).sum(-1)
    expected = scale / (scale + 4)
    assert (x.norm(dim=-1) - 1).abs().max() < 1e-12
    assert (cosine - expected).mean().abs() < 4 * (cosine - expected).std() / 2000**0.5
