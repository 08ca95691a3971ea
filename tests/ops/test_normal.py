"""What is peculiar to the normal log density: digits of small distances, memory, and scales of all shapes."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal
from torch.utils._python_dispatch import TorchDispatchMode

from effops.measure import Pass, memory
from effops.ops.densities.normal import mixture, op
from effops.reference import reference_of

from ..support.calls import on_this_python, without_cpp

REFERENCE = reference_of(op)

VARIANTS = [v for v in on_this_python(op.variants) if v != "compile"]


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-3])
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_near_duplicates_far_from_the_origin(variant, offset, scale, device, generator):
    """The squared distance, which the result holds, is right to 1e-6 where it is large enough to be seen there."""
    loc = (offset + torch.randn(200, 24, generator=generator)).to(device)
    x = (loc + scale * torch.randn(200, 24, generator=generator).to(device)).unsqueeze(1)
    out = op(loc, scale, x, variant=variant).double()
    squares = ((x.double() - loc.double()) / scale).square().sum(-1)
    constant = -24 * (math.log(scale) + 0.5 * math.log(2 * math.pi))
    error = (out - (constant - 0.5 * squares)).abs()
    assert (error <= 1e-6 * (0.5 * squares + abs(constant))).all()


@pytest.mark.parametrize("variant", without_cpp(VARIANTS))
def test_equals_torch_distributions(variant, device, generator):
    for scale in ((4, 5), (4, 1), (5,), (1,), (3, 1, 5)):
        loc, scales, x = REFERENCE.sample(
            (4, 5), scale, (3, 1, 5), dtype=torch.float64, device=device, generator=generator
        )
        expected = Independent(Normal(loc, scales.expand(torch.broadcast_shapes(scale, (4, 5)))), 1).log_prob(x)
        torch.testing.assert_close(op(loc, scales, x, variant=variant), expected, rtol=1e-13, atol=1e-13)


def test_a_scale_without_axes_widens_nothing(device):
    loc = torch.zeros(4, 3, device=device)
    wide = torch.tensor(2.0, dtype=torch.float64, device=device)
    assert op(loc, wide, loc).dtype == torch.float32
    assert op(loc.bfloat16(), wide.float(), loc.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(op(loc, wide, loc), op(loc, 2.0, loc))


def test_memory_of_all_pairs(device, generator):
    """4 GiB in the plain form."""
    args = REFERENCE.workload(N=4096, M=4096, D=64, device=device, generator=generator)
    assert memory(Pass(lambda *args: op(*args, variant="chunked"), args)).temporary_bytes <= 4 * 2**20


@pytest.mark.parametrize("variant", ["chunked", "triton"])
def test_nothing_comes_of_a_component_without_a_share(variant, device):
    """Not even where its distance overflows, where the plain form's gradient of the scale is NaN."""
    loc, x = torch.zeros(2, 1, device=device, requires_grad=True), torch.tensor([[1.0], [2.0]], device=device)
    weights, scale = torch.zeros(2, device=device), torch.tensor([[1.0], [1e-20]], device=device, requires_grad=True)
    x = x.unsqueeze(1).requires_grad_()
    out = mixture(weights, loc, scale, x, variant=variant)
    dloc, dscale, dx = torch.autograd.grad(out.sum(), (loc, scale, x))
    assert dloc.flatten().tolist() == [3, 0]
    assert dscale.flatten().tolist() == [3, 0]
    assert dx.flatten().tolist() == [-1, -2]
    (dx,) = torch.autograd.grad(op(loc, scale, x, variant=variant)[:, 0].sum(), x)
    assert dx.flatten().tolist() == [-1, -2]


@pytest.mark.parametrize(
    ("scale", "is_copied"),
    [((13, 1, 4, 6), True), ((13, 1, 4, 1), True), ((13, 1, 1, 6), False), ((3, 4, 6), True), ((13, 3, 4, 6), False)],
    ids=str,
)
def test_kernels_refuse_scales_that_they_would_copy_for_every_pair(scale, is_copied, device, generator):
    args = REFERENCE.sample((4, 6), scale, (13, 3, 1, 6), device=device, generator=generator)
    obstacles = [need(op.prepare(*args)) for need in op.variants["triton"].requires]
    assert any("here it would be copied" in obstacle for obstacle in obstacles) == is_copied
    weights = torch.zeros(4, device=device)
    obstacles = [need(mixture.prepare(weights, *args)) for need in mixture.variants["triton"].requires]
    assert any("here it would be copied" in obstacle for obstacle in obstacles) == is_copied


@pytest.mark.parametrize("density", [op, mixture], ids=lambda density: density.name)
def test_a_scale_of_the_arithmetic_is_not_converted_back(density, generator):
    """Compiled, it went through float64 and back for every pair and coordinate, which took three times as long."""

    class Narrowed(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.count += func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64 != out.dtype
            return out

    narrowed, reference = Narrowed(), reference_of(density)
    args = reference.sample_case(next(iter(reference.cases)), dtype=torch.float32, generator=generator)
    with narrowed:
        density(*args, variant="naive")
    assert narrowed.count == 1  # the normaliser


def test_bad_scales(device):
    x = torch.zeros(4, 3, device=device)
    with pytest.raises(ValueError, match="last dimension of `scale` must be that of `x`, or 1; got"):
        op(x, torch.ones(4, 2, device=device), x)
    with pytest.raises(TypeError, match="`scale` must be dense; got"):
        op(x, torch.ones(4, 1, device=device).to_sparse(), x)
    assert op(x, -1.0, x).isnan().all()
