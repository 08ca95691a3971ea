"""Every op under torch.compile, torch.export and AOTInductor."""

import functools
import runpy
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx

import effops
from effops.dispatch.requirements import library_error
from effops.distributions import PowerSpherical, VonMisesFisher
from effops.numerics.directions import random_directions
from effops.reference import error_ratio, gradient_error_ratio, reference_of

from ..support.calls import BOUND, NUMBERS, OPS, Operators, arguments, interpreted, leaves, same


@pytest.mark.compiled
@pytest.mark.turns(4, interpreted=3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("op", "variant"), BOUND)
def test_compiled_as_one_graph(op, variant, backend, dynamic, device, generator):
    """The same bits and strides as in eager mode, with and without gradients."""
    slow, odd = interpreted(variant, device), NUMBERS[op.name] % 2 == 1
    if slow and (backend == "inductor", dynamic) != (odd, odd):
        pytest.skip("interpreted kernels: what surrounds them is that of the chunked variant")
    if not slow and (backend == "inductor") != (dynamic == odd):
        pytest.skip("compilation takes seconds: each op has each backend and static and dynamic sizes once")
    torch._dynamo.reset()

    def function(*args):
        return op(*args, variant=variant)

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    cases = list(reference_of(op).cases)
    for case in cases[int(dynamic) : 4 : 2] if backend == "aot_eager" and not slow else cases[:1]:
        args = leaves(arguments(op, device, generator, case, torch.float32))
        out, expected = compiled(*args), function(*args)
        assert out.stride() == expected.stride()
        dout = torch.randn(out.shape, generator=generator).to(device)
        gradients, expected_gradients = (torch.autograd.grad(o, args, dout) for o in (out, expected))
        assert [g.stride() for g in gradients] == [g.stride() for g in expected_gradients]
        same((out, gradients), (expected, expected_gradients), rtol=0, atol=0)
        with torch.no_grad():
            same(compiled(*args), expected, rtol=0, atol=0)


@pytest.mark.compiled
@pytest.mark.skipif(library_error() != "", reason=library_error())
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("op", OPS)
def test_the_library_in_traced_code(op, dynamic, generator):
    """Traced code calls the C++ kernels: the bits and strides of eager mode."""
    if "cpp" not in op.variants:
        pytest.skip(f"{op.name} has no variant cpp")
    torch._dynamo.reset()
    called = []

    def backend(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    sizes = {name: 11 + 6 * i for i, name in enumerate(reference_of(op).sizes)}
    args = leaves(reference_of(op).workload(**sizes, generator=generator))
    expected = op(*args, variant="cpp")
    aot = aot_autograd(fw_compiler=backend)
    out = torch.compile(lambda *args: op(*args, variant="cpp"), fullgraph=True, backend=aot, dynamic=dynamic)(*args)
    assert any(f"{op.name}_cpp" in name for name in called)
    assert out.stride() == expected.stride()
    dout = torch.randn(out.shape, generator=generator)
    gradients, expected_gradients = (torch.autograd.grad(one, args, dout) for one in (out, expected))
    assert [one.stride() for one in gradients] == [one.stride() for one in expected_gradients]
    same((out, gradients), (expected, expected_gradients), rtol=0, atol=0)


@pytest.mark.compiled
@pytest.mark.parametrize("dynamic", [0, 1, 2])
def test_one_size_is_dynamic_and_the_others_are_not(dynamic):
    """Dynamo takes a constant to be in no tuple with a symbol, be they equal."""
    loc, scale, x = (torch.rand(3, 16) + 1 for _ in range(3))
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    for function, args, axis in (
        (effops.normal_log_prob, (loc, scale, x), -1),
        (functools.partial(effops.attention, enable_gqa=True), (query, key, key.clone()), -3),
    ):
        torch._dynamo.reset()
        torch._dynamo.maybe_mark_dynamic(args[dynamic], axis)
        same(torch.compile(function, fullgraph=True, backend="eager")(*args), function(*args))


@pytest.mark.compiled
@pytest.mark.parametrize("op", OPS)
def test_other_sizes_compile_nothing_new(op, device, generator):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda *args: op(*args), backend=counter, fullgraph=True, dynamic=True)
    for factor in (1, 2, 3):
        sizes = {name: factor * (5 + 6 * i) for i, name in enumerate(reference_of(op).sizes)}
        args = reference_of(op).workload(**sizes, device=device, generator=generator)
        same(compiled(*args), op(*args))
    assert counter.frame_count == 1


@pytest.mark.turns(2)
@pytest.mark.each_value(all=True)
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["naive", "einsum", "compile"])
@pytest.mark.parametrize("op", OPS)
def test_named_variants_compile_too(op, variant, device, generator):
    if variant not in op.variants:
        pytest.skip(f"{op.name} has no variant {variant}")
    torch._dynamo.reset()
    args = arguments(op, device, generator, dtype=torch.float32)
    compiled = torch.compile(lambda *args: op(*args, variant=variant), backend="aot_eager", fullgraph=True)
    assert error_ratio(op, args, compiled(*args)) <= 1


@pytest.mark.compiled
@pytest.mark.parametrize("op", OPS)
def test_bad_arguments_fail_when_compiled(op, device, generator):
    torch._dynamo.reset()
    args = arguments(op, device, generator)
    cut = next(i for i, dims in enumerate(op.core_dims.values()) if dims)
    compiled = torch.compile(lambda *args: op(*args), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=op.name):
        compiled(*args[:cut], args[cut][..., :-1], *args[cut + 1 :])


class Module(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, *args):
        return self.op(*args)


@pytest.mark.parametrize("op", OPS)
def test_export(op, device, generator):
    """The exported program holds the operator, and serves other sizes."""
    args = arguments(op, device, generator)
    dynamic = tuple(dict.fromkeys(range(arg.ndim), torch.export.Dim.AUTO) for arg in args)
    program = torch.export.export(Module(op), args, dynamic_shapes={"args": dynamic})
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert any(getattr(call, "namespace", "") == "effops" for call in calls)
    for case in list(reference_of(op).cases)[:1]:
        longer = tuple(tuple(size + (size > 1) for size in shape) for shape in reference_of(op).cases[case])
        other = reference_of(op).sample(*longer, dtype=torch.float64, device=device, generator=generator)
        assert error_ratio(op, other, program.module()(*other)) <= 1


CUT = {"x", "a", "query"}


class Selected(torch.nn.Module):
    """An op of those points, or queries, that a mask keeps. No tracer knows how many they are."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, keep, *args):
        return self.op(*self.selected(keep, args))

    def selected(self, keep, args):
        cut = (*CUT, "key", "value") if self.op.name == "log_sparse_attention" else CUT
        named = dict(zip(self.op.core_dims, args))
        return [
            tensor if name not in cut else tensor[..., keep, :] if self.op.core_dims[name] == 2 else tensor[keep]
            for name, tensor in named.items()
        ]


@pytest.mark.parametrize("how", ["compile", "export"])
@pytest.mark.parametrize("op", [param for param in OPS if param.values[0].core_dims.keys() & CUT])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_values(op, how, device, generator):
    torch._dynamo.reset()
    module = Selected(op)
    args = leaves(arguments(op, device, generator, "several blocks", torch.float32))
    sizes = (arg.shape[0 if dims == 1 else -2] for arg, (name, dims) in zip(args, op.core_dims.items()) if name in CUT)
    size = next(sizes)
    keep = torch.rand(size, generator=generator) > 0.5
    if how == "compile":
        traced = torch.compile(module, backend="aot_eager", fullgraph=True)
    else:
        traced = torch.export.export(module, (keep.to(device), *args), strict=False).module()
    for mask in (keep, ~keep):
        selected = module.selected(mask.to(device), args)
        out = traced(mask.to(device), *args)
        assert error_ratio(op, selected, out) <= 1
        dout = torch.randn(out.shape, generator=generator).to(device)
        found = torch.autograd.grad(out, args, dout)
        chosen = effops.explain(op.name, *selected).chosen
        # Traced code runs `cpp` for attention alone.
        eager = op(*selected, variant="chunked" if chosen == "cpp" and "attention" not in op.name else None)
        expected = torch.autograd.grad(eager, args, dout)
        same(found, expected)


@pytest.mark.parametrize("scaled", [False, True], ids=["one scale", "a scale each"])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_as_many_components_as_a_mask_keeps(scaled, device, generator):
    torch._dynamo.reset()
    loc, x = (torch.randn(*batch, 3, generator=generator).to(device) for batch in ((20,), (30, 1)))
    scale, keep = torch.ones(20 if scaled else 1, 1, device=device), torch.arange(20, device=device) % 3 > 0

    def log_prob(keep):
        return effops.normal_mixture_log_prob(loc.new_zeros(()), loc[keep], scale[keep] if scaled else scale, x)

    same(torch.compile(log_prob, backend="aot_eager", fullgraph=True)(keep), log_prob(keep))


@pytest.mark.parametrize("family", [PowerSpherical, VonMisesFisher])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_as_many_distributions_as_a_mask_keeps(family, device, generator):
    torch._dynamo.reset()
    loc, x = (random_directions((*batch, 3), generator).to(device) for batch in ((8,), (4, 1)))
    concentration, keep = torch.arange(1.0, 9, device=device), torch.arange(8, device=device) % 3 > 0

    def log_prob(keep):
        return family(loc[keep], concentration[keep], validate_args=False).log_prob(x)

    for mask in (keep, ~keep):
        torch.testing.assert_close(torch.compile(log_prob, backend="aot_eager", fullgraph=True)(mask), log_prob(mask))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["strict export", "export", "make_fx", "jit.trace", "the operator itself"])
@pytest.mark.parametrize("op", OPS)
def test_what_was_traced_can_be_trained(op, how, device, generator):
    """A strictly exported program once lost the gradients without an error."""
    args = arguments(op, device, generator)
    if how == "make_fx":
        traced = make_fx(lambda *args: op(*args))(*args)
    elif how == "jit.trace":
        traced = torch.jit.trace(lambda *args: op(*args), args, check_trace=False)
    elif how == "the operator itself":
        with Operators() as operators:
            op(*args)
        operator, operands = operators.calls[0]

        def traced(*tensors):
            given = (
                (list(tensors), *operands[1:])
                if isinstance(operands[0], list)
                else (*tensors, *operands[len(tensors) :])
            )
            return op.finish(op.prepare(*args), operator(*given))
    else:
        traced = torch.export.export(Module(op), args, strict=how == "strict export").module()
    copies = leaves(args)
    out = traced(*copies)
    dout = torch.randn(out.shape, generator=generator, dtype=out.dtype).to(device)
    assert gradient_error_ratio(op, args, dout, torch.autograd.grad(out, copies, dout)) <= 1


@pytest.mark.slow
def test_ahead_of_time_compiled_package(capsys):
    """The example exports with sizes left open, packages, and compares the bits itself."""
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "export.py"), run_name="__main__")
    assert "the same bits" in capsys.readouterr().out


@pytest.mark.compiled
@pytest.mark.parametrize("op", OPS)
def test_double_backward_of_a_compiled_function_is_an_error(op, device, generator):
    torch._dynamo.reset()
    args = leaves(arguments(op, device, generator))
    compiled = torch.compile(lambda *args: op(*args), backend="aot_eager", fullgraph=True)
    gradients = torch.autograd.grad(compiled(*args).sum(), args, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        sum(gradient.sum() for gradient in gradients).backward()
