"""Every op, variant and case of the registry: results and gradients against float64, layouts, bytes, determinism."""

import itertools

import pytest
import torch

import effops
from effops.measure import Pass, memory
from effops.op import ops
from effops.precision import arithmetic_dtype
from effops.testing import error_ratio, gradient_error_ratio

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EVERYTHING = [
    pytest.param(op, variant, case, dtype, id=f"{op.name}-{variant}-{case}-{str(dtype)[6:]}")
    for op in ops().values()
    for variant, case, dtype in itertools.product(op.variants, op.cases, DTYPES)
    # Compilation takes seconds for each dtype: two dtypes for one case, one for the others.
    if variant != "compile" or dtype == torch.float32 or (dtype == torch.bfloat16 and case == next(iter(op.cases)))
]
VARIANTS = [pytest.param(op, v, id=f"{op.name}-{v}") for op in ops().values() for v in op.variants]


def supported(op, variant, args):
    """Skip where the variant cannot run at all on this machine."""
    obstacle = op.variants[variant].obstacle(op.prepare(*args))
    assert "cannot be imported" not in obstacle
    if obstacle:
        pytest.skip(f"{variant} {obstacle}")


def leaves(args):
    return tuple(arg.detach().clone().requires_grad_() for arg in args)


def run_with_gradients(op, variant, args, dout):
    args = leaves(args)
    out = op(*args, variant=variant)
    return out, torch.autograd.grad(out, args, dout)


@pytest.mark.parametrize(("op", "variant", "case", "dtype"), EVERYTHING)
def test_result_and_gradients(op, variant, case, dtype, device, generator):
    args = op.sample(*op.cases[case], dtype=dtype, device=device, generator=generator)
    supported(op, variant, args)
    shape = op.prepare(*args).static.plan.shape
    dout = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
    copies = leaves(args)
    before = [arg.clone() for arg in copies]
    out = op(*copies, variant=variant)
    gradients = torch.autograd.grad(out, copies, dout)
    assert out.shape == shape
    assert out.dtype == dtype
    assert error_ratio(op, args, out) <= 1
    assert gradient_error_ratio(op, args, dout, gradients) <= 1
    for arg, copy, gradient in zip(before, copies, gradients):
        assert torch.equal(arg, copy)
        assert gradient.shape == arg.shape
        assert gradient.dtype == arg.dtype


def strided(tensor, how):
    """The same values in another layout."""
    if how == "transposed":
        backwards = tuple(reversed(range(tensor.ndim)))
        return tensor.permute(backwards).contiguous().permute(backwards)
    if how == "sliced":
        if tensor.ndim == 0:
            return tensor
        wide = tensor.new_full([2 * size for size in tensor.shape], float("nan"))
        view = wide[tuple(slice(0, 2 * size, 2) for size in tensor.shape)]
        return view.copy_(tensor)
    assert how == "expanded"
    return tensor[:1].expand(tensor.shape) if tensor.ndim else tensor


@pytest.mark.parametrize("how", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_any_strides(op, variant, how, device, generator):
    for case in list(op.cases)[: 1 if variant == "compile" else None]:
        args = op.sample(*op.cases[case], dtype=torch.float32, device=device, generator=generator)
        supported(op, variant, args)
        args = tuple(strided(arg, how) for arg in args)
        plain = torch.randn(op.prepare(*args).static.plan.shape, generator=generator).to(device)
        dout = strided(plain, how)
        leaf_args = tuple(arg.detach().requires_grad_() for arg in args)
        out = op(*leaf_args, variant=variant)
        gradients = torch.autograd.grad(out, leaf_args, dout)
        assert error_ratio(op, args, out) <= 1, case
        assert gradient_error_ratio(op, args, dout, gradients) <= 1, case


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_every_element_is_written_and_runs_repeat(op, variant, device, generator):
    # Deterministic mode fills fresh memory with NaN.
    if variant == "compile":
        pytest.skip("Inductor allocates by itself")
    torch.use_deterministic_algorithms(True)
    try:
        for case, shapes in op.cases.items():
            args = op.sample(*shapes, dtype=torch.float32, device=device, generator=generator)
            supported(op, variant, args)
            dout = torch.randn(op.prepare(*args).static.plan.shape, generator=generator).to(device)
            out, gradients = run_with_gradients(op, variant, args, dout)
            assert error_ratio(op, args, out) <= 1, case
            assert gradient_error_ratio(op, args, dout, gradients) <= 1, case
            again, gradients_again = run_with_gradients(op, variant, args, dout)
            assert torch.equal(out, again), case
            assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again)), case
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_partial_gradients(op, variant, device, generator):
    """Each subset of the arguments may require gradients; the others get none, the result does not change."""
    args = op.sample(*next(iter(op.cases.values())), dtype=torch.float32, device=device, generator=generator)
    supported(op, variant, args)
    dout = torch.randn(op.prepare(*args).static.plan.shape, generator=generator).to(device)
    expected = run_with_gradients(op, "naive", args, dout)[1]
    subsets = itertools.product((False, True), repeat=len(args))
    for needs in [(True,) * len(args), (True, *(False,) * (len(args) - 1))] if variant == "compile" else subsets:
        copies = tuple(arg.clone().requires_grad_(need) for arg, need in zip(args, needs))
        out = op(*copies, variant=variant)
        assert out.requires_grad == any(needs)
        if any(needs):
            out.backward(dout)
        found = tuple(copy.grad for copy in copies)
        assert [gradient is not None for gradient in found] == list(needs)
        assert not any(needs) or gradient_error_ratio(op, args, dout, found) <= 1
        assert all(f is None or torch.allclose(f, e, rtol=1e-3) for f, e in zip(found, expected))


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_a_result_requires_gradients_only_if_an_input_does(op, variant, device, generator):
    """Whatever was called before: just-in-time compilers specialise on what they have seen."""
    if variant == "compile":
        pytest.skip("each need of gradients has a compiled object of its own; the test above calls several")
    for case in list(op.cases)[:4]:
        args = op.sample(*op.cases[case], dtype=torch.float32, device=device, generator=generator)
        supported(op, variant, args)
        for _ in range(3):
            for needs in itertools.product((True, False), repeat=len(args)):
                out = op(*(arg.clone().requires_grad_(need) for arg, need in zip(args, needs)), variant=variant)
                assert out.requires_grad == any(needs), case


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_derivatives_against_finite_differences(op, variant, device, generator):
    if variant == "compile":
        pytest.skip("compiled functions have no double backward")
    for case in list(op.cases)[:9]:
        args = op.sample(*op.cases[case], dtype=torch.float64, device=device, generator=generator)
        supported(op, variant, args)
        args = tuple(arg.requires_grad_() for arg in args)

        def function(*args):
            return op(*args, variant=variant)

        assert torch.autograd.gradcheck(function, args, fast_mode=True), case
        assert torch.autograd.gradgradcheck(function, args, fast_mode=True), case


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_forward_mode_and_transforms(op, variant, device, generator):
    """The tangent of forward mode, and `torch.func`'s gradient under vmap, are those of reverse mode."""
    if variant in ("compile", "torchscript"):
        pytest.skip("compiled functions have no forward mode")
    for case in ("founding", "several blocks"):
        args = op.sample(*op.cases[case], dtype=torch.float64, device=device, generator=generator)
        supported(op, variant, args)
        dout = torch.randn(op.prepare(*args).static.plan.shape, generator=generator, dtype=torch.float64).to(device)
        _, gradients = run_with_gradients(op, variant, args, dout)
        direction = tuple(torch.randn_like(arg) for arg in args)

        def function(*args):
            return op(*args, variant=variant)

        _, tangent = torch.func.jvp(function, args, direction)
        expected = sum((gradient * along).sum() for gradient, along in zip(gradients, direction))
        torch.testing.assert_close((tangent * dout).sum(), expected, rtol=1e-9, atol=1e-9)

        def weighted(*args, dout=dout):
            return (function(*args) * dout).sum()

        stacked = tuple(torch.stack([arg, arg]) for arg in args)
        batched = torch.func.vmap(torch.func.grad(weighted, argnums=tuple(range(len(args)))))(*stacked)
        for found, gradient in zip(batched, gradients):
            torch.testing.assert_close(found[1], gradient, rtol=1e-9, atol=1e-9)


def test_scripted_functions_refuse_forward_mode(generator):
    """They would return tangents of zero once they are specialised for reverse mode."""
    for op in ops().values():
        args = op.sample(*next(iter(op.cases.values())), dtype=torch.float64, generator=generator)
        with pytest.raises(NotImplementedError, match="cannot be differentiated in forward mode"):
            torch.func.jvp(lambda *args, op=op: op(*args, variant="torchscript"), args, args)


@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_predicted_bytes_are_the_measured_ones(op, variant, dtype, needs_grad, device, generator):
    if variant == "triton" and device == "cpu":
        pytest.skip("the interpreter copies tensors")
    sizes = {name: min(size, 96) for name, size in op.sizes.items()}
    args = op.workload(**sizes, dtype=dtype, device=device, generator=generator)
    supported(op, variant, args)
    args = tuple(arg.requires_grad_(needs_grad) for arg in args)
    report = effops.explain(op.name, *args).variants[variant]
    measured = memory(Pass(lambda *args: op(*args, variant=variant), args))
    assert report.output_bytes == measured.output_bytes
    assert abs(report.temporary_bytes - measured.temporary_bytes) <= max(2**16, 0.1 * measured.temporary_bytes)
    assert abs(report.saved_bytes - measured.saved_bytes) <= max(2**16, 0.1 * measured.saved_bytes)


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in ops().values()])
def test_chunked_stays_within_its_memory(op, device, generator):
    """At most 4 MiB of temporaries forward, nothing saved; backward at most 40 MiB beyond what it returns."""
    for case, dtype in itertools.product(op.cases, DTYPES):
        args = op.sample(*op.cases[case], dtype=dtype, device=device, generator=generator)
        args = tuple(arg.requires_grad_() for arg in args)
        measured = memory(Pass(lambda *args: op(*args, variant="chunked"), args))
        assert measured.temporary_bytes <= 4 * 2**20, (case, dtype)
        assert measured.saved_bytes == 0, (case, dtype)
        if arithmetic_dtype(dtype) == dtype:
            backward = memory(Pass(lambda *args: op(*args, variant="chunked"), args, backward=True))
            assert backward.temporary_bytes <= 40 * 2**20, (case, dtype)
