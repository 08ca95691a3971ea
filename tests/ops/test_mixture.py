"""What is peculiar to mixtures: the axis of the components, infinities, shares that add up, and memory."""

import contextlib
import math
from functools import partial

import pytest
import torch

import effops
from effops.dispatch.op import ops
from effops.measure import Pass, memory
from effops.reference import error_ratio, gradient_error_ratio, reference_of

from ..support.blocks import small_blocks

MIXTURES = [op for op in ops().values() if op.logsumexp is not None]
OPS = [pytest.param(op, id=op.name) for op in MIXTURES]
VARIANTS = [pytest.param(op, v, id=f"{op.name}-{v}") for op in MIXTURES for v in op.variants if v != "compile"]
DENSITIES = {op.name: ops()[op.name.replace("_mixture", "")] for op in MIXTURES}


def supported(op, variant, args, **kwargs):
    obstacle = op.variants[variant].obstacle(op.prepare(*args, **kwargs))
    if obstacle:
        pytest.skip(f"{variant} {obstacle}")


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_equals_the_plain_expression_along_every_axis(op, variant, device, generator):
    scale_dims = op.core_dims[list(op.core_dims)[2]]
    shapes = ((2, 1, 5), (3, 1, 4, 1, 6), (4, 5, *(6,) * scale_dims), (2, 1, 5, 6))  # -> (3, 2, 4, 5)
    tensors = reference_of(op).sample(*shapes, dtype=torch.float64, device=device, generator=generator)
    interpreted = variant == "triton" and device == "cpu"
    for dim in range(-4, 0 if interpreted else 4):
        supported(op, variant, tensors, dim=dim)
        found, plain = (tuple(tensor.clone().requires_grad_() for tensor in tensors) for _ in range(2))
        out = op(*found, dim, variant=variant)
        wide = DENSITIES[op.name](*plain[1:], variant="naive") + plain[0]
        dout = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(device)
        for result, leaves in ((out, found), (torch.logsumexp(wide, dim), plain)):
            assert error_ratio(op, tensors, result, dim=dim) <= 1
            gradients = torch.autograd.grad(result, leaves, dout)
            assert gradient_error_ratio(op, tensors, dout, gradients, dim=dim) <= 1


@pytest.mark.parametrize("op", OPS)
def test_gradient_of_log_weights_alone(op, device, generator):
    """As where only the weights are trained. Normal densities in large blocks looked for what other gradients need."""
    log_weights, *others = reference_of(op).sample_case("several blocks", device=device, generator=generator)
    every = tuple(arg.clone().requires_grad_() for arg in (log_weights, *others))
    expected = torch.autograd.grad(op(*every, variant="chunked").sum(), every)[0]
    log_weights.requires_grad_()
    (found,) = torch.autograd.grad(op(log_weights, *others, variant="chunked").sum(), log_weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["first", "last", "all", "a block"])
@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_components_without_weight(op, variant, where, device, generator):
    """They leave no trace; where there are no others, the result is -inf and gradients are 0."""
    count = 40 if variant == "triton" and device == "cpu" else 700
    shapes = {"first": slice(0, 1), "last": slice(-1, None), "all": slice(None), "a block": slice(0, count // 2)}
    case = reference_of(op).cases["several blocks"]
    shrunk = tuple(tuple(min(size, count if size == 700 else 20) for size in shape) for shape in case)
    args = reference_of(op).sample(*shrunk, device=device, generator=generator)
    args[0][shapes[where]] = -math.inf
    supported(op, variant, args)
    leaves = tuple(arg.clone().requires_grad_() for arg in args)
    out = op(*leaves, variant=variant)
    dout = torch.randn(out.shape, generator=generator).to(device)
    gradients = torch.autograd.grad(out, leaves, dout)
    if where == "all":
        assert (out == -math.inf).all()
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)
    else:
        assert error_ratio(op, args, out) <= 1
        assert gradient_error_ratio(op, args, dout, gradients) <= 1
        for gradient in gradients[:3]:
            assert not gradient[shapes[where]].any()


def far_away(op, shared, device, generator):
    """Points whose densities are ordinary, overflow, are ordinary, and overflow where no component has weight."""
    scale_dims = op.core_dims[list(op.core_dims)[2]]
    batch = (40,) if shared else (4, 40)
    shapes = (4, 40), (*batch, 5), (*batch, *(1,) * scale_dims), (4, 1, 5)
    log_weights, loc, scale, x = reference_of(op).sample(*shapes, device=device, generator=generator)
    if scale_dims:
        x[1::2] = 1e20
    else:
        mean, far = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0], [-0.8, 0.6, 0.0, 0.0, 0.0]], device=device)
        log_weights[:], loc[:], scale[:], x[::2], x[1::2] = -3e38, mean, 3e37, mean, far
    log_weights[3] = -math.inf
    return log_weights, loc, scale, x


@pytest.mark.each_value
@pytest.mark.parametrize("shared", [False, True], ids=["a batch", "rows"])
@pytest.mark.parametrize(
    ("op", "variant", "context"),
    [
        *(pytest.param(op, v, contextlib.nullcontext, id=f"{op.name}-{v}") for op in MIXTURES for v in op.variants),
        *(pytest.param(op, "chunked", small_blocks, id=f"{op.name}-small blocks") for op in MIXTURES),
    ],
)
def test_densities_that_all_overflow(op, variant, context, shared, device, generator):
    """Their shares are unknown, and gradients NaN. They were 0, as if no component had weight."""
    args = far_away(op, shared, device, generator)
    supported(op, variant, args)
    leaves = tuple(arg.clone().requires_grad_() for arg in args)
    with context():
        out = op(*leaves, variant=variant)
        dout = torch.randn(out.shape, generator=generator).to(device)
        gradients = torch.autograd.grad(out, leaves, dout, retain_graph=variant != "compile")
        assert out.isneginf().tolist() == [False, True, False, True]
        assert error_ratio(op, args, out) <= 1
        assert gradient_error_ratio(op, args, dout, gradients) <= 1
        of_weights, of_loc, _, of_x = gradients
        for gradient in (of_weights, of_x) if shared else (of_weights, of_loc, of_x):
            assert [bool(of_point.isnan().all()) for of_point in gradient] == [False, True, False, False]
            assert not gradient[3].any()
        if variant in ("chunked", "triton"):  # as where another process holds the components that are near
            dout[1] = 0
            assert not any(gradient.isnan().any() for gradient in torch.autograd.grad(out, leaves, dout))


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_infinite_weights_and_nan(op, variant, device, generator):
    args = reference_of(op).sample_case("founding", device=device, generator=generator)
    supported(op, variant, args)
    infinite, nan = args[0].clone(), args[0].clone()
    infinite[3], infinite[4], nan[-1] = math.inf, 200.0, math.nan
    infinite.requires_grad_()
    out = op(infinite, *args[1:], variant=variant)
    assert (out == math.inf).all()
    (shares,) = torch.autograd.grad(out.sum(), infinite)  # as torch.logsumexp
    assert shares.isnan().tolist() == [i == 3 for i in range(7)]
    assert not shares.nan_to_num(0.0).any()
    assert op(nan, *args[1:], variant=variant).isnan().all()
    x = args[3].clone()
    x[2] = math.nan  # of one point: the others do not see it
    out, clean = op(*args[:3], x, variant=variant), op(*args, variant=variant)
    assert out[2].isnan().all()
    out[2] = clean[2]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("offset", [0.0, 7e4, -7e4])
@pytest.mark.parametrize("spread", [0.0, 300.0])
@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_shares_of_the_components_add_up(op, variant, offset, spread, device, generator):
    """Also where the result is so large that its rounding alone would be 4e-3."""
    args = reference_of(op).sample_case("kept columns", device=device, generator=generator)
    supported(op, variant, args)
    weights = offset + spread * torch.rand(args[0].shape, generator=generator).to(device)
    leaf = weights.expand(4, 3, 7).clone().requires_grad_()
    out = op(leaf, *args[1:], variant=variant)
    (shares,) = torch.autograd.grad(out.sum(), leaf)
    assert (shares.sum(-1) - 1).abs().max() <= 2e-6
    assert error_ratio(op, (leaf.detach(), *args[1:]), out) <= 1


@pytest.mark.parametrize("op", OPS)
def test_memory_of_the_workload(op, device, generator):
    """Nothing of the size of components times points: at most 4 MiB forward, and 8 MiB backward beyond the results."""
    sizes = {name: min(size, 256) for name, size in reference_of(op).sizes.items()}
    args = reference_of(op).workload(**sizes, device=device, generator=generator)
    work = Pass(lambda *args: op(*args, variant="chunked"), args)
    assert memory(work).temporary_bytes <= 4 * 2**20
    leaves = tuple(arg.requires_grad_() for arg in args)
    backward = memory(Pass(lambda *args: op(*args, variant="chunked"), leaves, backward=True))
    assert backward.temporary_bytes <= 8 * 2**20


def test_memory_of_many_points(device, generator):
    """65,536 points in 128 dimensions and 128 components: the memory of inputs and output, and 4 MiB."""
    op = ops()["power_spherical_mixture_log_prob"]
    args = reference_of(op).sample((128,), (128, 128), (128,), (65536, 1, 128), device=device, generator=generator)
    measured = memory(Pass(op, args))
    assert measured.output_bytes == 65536 * 4
    assert measured.temporary_bytes <= 4 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_memory_of_many_results(op, dtype, device, generator):
    """Without gradients the statistics of a part of the results are held at a time, whatever varies along what axis."""
    d = (16,) * op.core_dims[list(op.core_dims)[2]]
    args = reference_of(op).sample(
        (5, 1), (434, 1, 5, 1, 16), (700, 5, 1, *d), (700, 1, 3, 16), dtype=dtype, device=device, generator=generator
    )
    work = Pass(lambda *args: op(*args, -2, variant="chunked"), args)
    measured, predicted = memory(work), effops.explain(op.name, *args, -2).variants["chunked"]
    assert measured.output_bytes == predicted.output_bytes == 434 * 700 * 3 * dtype.itemsize
    assert measured.saved_bytes == predicted.saved_bytes == 0
    assert measured.temporary_bytes <= 4 * 2**20
    assert abs(predicted.temporary_bytes - measured.temporary_bytes) <= 0.1 * measured.temporary_bytes
    leaves = tuple(arg.requires_grad_() for arg in args)
    trained, predicted = memory(Pass(work.function, leaves)), effops.explain(op.name, *leaves, -2).variants["chunked"]
    assert trained.saved_bytes == predicted.saved_bytes == 8 * 434 * 700 * 3
    out = op(*leaves, -2, variant="chunked")
    with torch.no_grad():
        parts = op(*leaves, -2, variant="chunked")
    assert parts.stride() == out.stride()
    torch.testing.assert_close(parts, out.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("components", [3, 600])
def test_memory_of_log_weights_of_each_point_in_another_dtype(components, device, generator):
    """They are converted a piece at a time, as predicted. PyTorch would convert them for a whole block."""
    op, points = ops()["power_spherical_mixture_log_prob"], 300_000 // components
    args = reference_of(op).sample(
        (points, components), (components, 4), (components,), (points, 1, 4), device=device, generator=generator
    )
    args = (args[0].bfloat16(), *args[1:])
    measured = memory(Pass(lambda *args: op(*args, variant="chunked"), args))
    predicted = effops.explain(op.name, *args).variants["chunked"]
    assert measured.temporary_bytes <= 4 * 2**20
    assert abs(predicted.temporary_bytes - measured.temporary_bytes) <= 64


def test_memory_of_few_coordinates_and_components(device, generator):
    """The features of a factor are more than the coordinates."""
    op = ops()["normal_mixture_log_prob"]
    for scale in (9, 3), (300_000, 1, 3), (9, 1):
        args = reference_of(op).sample((9,), (9, 3), scale, (300_000, 1, 3), device=device, generator=generator)
        assert memory(Pass(lambda *args: op(*args, variant="chunked"), args)).temporary_bytes <= 4 * 2**20, scale


@pytest.mark.parametrize("op", OPS)
def test_bad_arguments(op, device, generator):
    args = reference_of(op).sample_case("founding", device=device, generator=generator)
    for dim in (3, -4):
        with pytest.raises(ValueError, match=r"`dim` must be an axis of the broadcast batch shape \(4, 6, 7\); got"):
            op(*args, dim)
    for dim in (1.0, None):
        with pytest.raises(TypeError, match="`dim` must be an integer; got"):
            op(*args, dim)
    for weights, error, message in (
        (torch.zeros(3, device=device), ValueError, r"must broadcast with the log densities; got log_weights \(3,\)"),
        (torch.zeros(7, dtype=torch.int64, device=device), TypeError, r"must be real floating point; got torch.int64"),
        (0.0, TypeError, "`log_weights` must be a tensor; got float"),
        (torch.zeros(7).to_sparse(), TypeError, "`log_weights` must be dense"),
        (torch.zeros(7, device="meta"), ValueError, "must be on one device"),
    ):
        with pytest.raises(error, match=message) as caught:
            op(weights, *args[1:])
        assert str(caught.value).startswith(f"{op.name}: ")
    with pytest.raises(ValueError, match="give the components an axis"):
        op(torch.zeros((), device=device), args[1][0, 0], 1.0, args[3][0, 0, 0])


def test_bytes_of_operands_of_a_subclass_are_predicted():
    """They run as an operator, with all statistics, which the prediction of calls without gradients left out."""

    class Plain(torch.Tensor):
        pass

    function = effops.power_spherical_mixture_log_prob
    args = torch.zeros(3), torch.eye(3), torch.ones(3), torch.eye(3)[:, None].as_subclass(Plain)
    reports = effops.explain(function, *args).variants
    for name in ("cpp", "chunked"):
        if reports[name].supported:
            measured = memory(Pass(partial(function, variant=name), args))
            assert measured.temporary_bytes == reports[name].temporary_bytes, name
