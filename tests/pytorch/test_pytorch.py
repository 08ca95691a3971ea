"""Every op inside what PyTorch offers: compilers, export, transforms, modes, checkpoints, threads."""

import itertools
import runpy
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import effops
from effops.dispatch.call import call
from effops.dispatch.custom_op import CustomOp
from effops.dispatch.op import ops
from effops.measure import Pass, memory
from effops.reference import error_ratio, gradient_error_ratio, reference_of

from ..support.tiers import turn

NUMBERS = {name: turn(name, 60) for name in ops()}
OPS = [pytest.param(op, id=op.name) for op in ops().values()]
BOUND = [
    pytest.param(op, variant, id=f"{op.name}-{variant}")
    for op, variant in itertools.product(ops().values(), ("chunked", "triton"))
    if variant in op.variants
]


def arguments(op, device, generator, case=None, dtype=torch.float64):
    reference = reference_of(op)
    return reference.sample_case(case or next(iter(reference.cases)), dtype=dtype, device=device, generator=generator)


def interpreted(variant, device):
    """Whether the variant is slow: kernels run by Triton's interpreter."""
    return variant == "triton" and device == "cpu"


def smallest(op):
    return next(case for case in ("single", "one point") if case in reference_of(op).cases)


def leaves(args):
    return tuple(arg.detach().clone().requires_grad_() for arg in args)


def all_of(args):
    return tuple(range(len(args)))


class Operators(TorchDispatchMode):
    """Records calls of effops' own operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "effops":
            detached = tree_map(lambda arg: arg.detach() if isinstance(arg, torch.Tensor) else arg, args)
            self.calls.append((func, detached))
        return func(*args, **(kwargs or {}))


def check_operators(function, args, checks):
    """opcheck of each operator in a forward and a backward pass."""
    args = leaves(args)
    with Operators() as operators:
        out = function(*args)
        torch.autograd.grad(out, args, torch.ones_like(out))
    assert len(operators.calls) == 2
    for operator, operands in operators.calls:
        torch.library.opcheck(operator, operands, test_utils=checks)


@pytest.mark.parametrize(("op", "variant"), BOUND)
def test_operators_are_what_they_say(op, variant, device, generator):
    """Schema, and shape, dtype and strides of the fake results, in every case; the rest of opcheck in the first."""
    cases = list(itertools.product(reference_of(op).cases, (torch.float32, torch.bfloat16)))
    if interpreted(variant, device):  # opcheck runs an operator many times
        cases = [(smallest(op), torch.float32), cases[1]]
    for number, (case, dtype) in enumerate(cases):
        args = arguments(op, device, generator, case, dtype)
        checks = ("test_schema", "test_faketensor")
        if number == 0:
            checks += ("test_autograd_registration", "test_aot_dispatch_dynamic")
        check_operators(lambda *args: op(*args, variant=variant), args, checks)


class Factors(NamedTuple):
    """The call of an operator that multiplies."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def tensors(self):
        return tuple(self)

    arguments = tensors


@pytest.mark.parametrize("wrong", ["shape", "dtype", "strides", "strides of a gradient", None])
def test_a_wrong_fake_is_noticed(wrong):
    def forward(call):
        return (call.a * call.b).mT.contiguous().mT

    def empty(call):
        a, b = call
        shape = torch.broadcast_shapes(a.shape, b.shape)
        if wrong == "shape":
            return a.new_empty(shape[1:])
        if wrong == "strides":
            return a.new_empty(shape)
        dtype = torch.float64 if wrong == "dtype" else a.dtype
        return a.new_empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT

    def gradient(dout, other):
        found = (dout * other).contiguous()
        return found.mT.contiguous().mT if wrong == "strides of a gradient" else found

    product = CustomOp(
        f"test_{(wrong or 'nothing').replace(' ', '_')}_is_wrong",
        parameters={"a": torch.Tensor, "b": torch.Tensor},
        split=lambda arguments: Factors(*arguments),
        forward=forward,
        backward=lambda dout, call, wanted: (gradient(dout, call.b), gradient(dout, call.a)),
        composite=forward,
        empty=empty,
        core_dims=(0, 0),
    )
    args = (torch.rand(4, 3), torch.rand(4, 3))
    if wrong is None:
        check_operators(lambda *args: product(Factors(*args)), args, ("test_schema", "test_faketensor"))
    else:
        with pytest.raises(Exception, match="opcheck"):
            check_operators(lambda *args: product(Factors(*args)), args, ("test_schema", "test_faketensor"))


def same(found, expected, **tolerances):
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other, **tolerances)


@pytest.mark.compiled
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


@pytest.mark.parametrize("variant", ["naive", "einsum", "compile"])
@pytest.mark.parametrize("op", OPS)
def test_named_variants_compile_too(op, variant, device, generator):
    if variant not in op.variants:
        pytest.skip(f"{op.name} has no variant {variant}")
    torch._dynamo.reset()
    args = arguments(op, device, generator, dtype=torch.float32)
    compiled = torch.compile(lambda *args: op(*args, variant=variant), backend="aot_eager", fullgraph=True)
    assert error_ratio(op, args, compiled(*args)) <= 1


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
            return op.finish(op.prepare(*args), operator(*tensors, *operands[len(tensors) :]))
    else:
        traced = torch.export.export(Module(op), args, strict=how == "strict export").module()
    copies = leaves(args)
    out = traced(*copies)
    dout = torch.randn(out.shape, generator=generator, dtype=out.dtype).to(device)
    assert gradient_error_ratio(op, args, dout, torch.autograd.grad(out, copies, dout)) <= 1


def test_ahead_of_time_compiled_package(capsys):
    """The example exports with sizes left open, packages, and compares the bits itself."""
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "export.py"), run_name="__main__")
    assert "the same bits" in capsys.readouterr().out


def squares(function):
    return lambda *args: (function(*args) ** 2).sum()


def transforms(op, args):
    """Functions of a function of the arguments, and their arguments, by name."""
    every = all_of(args)
    stacked = tuple(torch.stack([arg, arg.flip(0) if arg.ndim else arg]) for arg in args)
    at_the_end = tuple(arg.movedim(0, -1) for arg in stacked)
    shared = (*stacked[:-1], args[-1])
    only_last = (*(None,) * (len(args) - 1), 0)
    return {
        "grad": (lambda f: grad(squares(f), every), args),
        "grad of grad": (lambda f: grad(lambda *a: squares(grad(squares(f)))(*a), every), args),
        "vmap": (vmap, stacked),
        "vmap over the last axis": (lambda f: vmap(f, in_dims=-1, out_dims=-1), at_the_end),
        "vmap, one shared": (lambda f: vmap(f, in_dims=(*(0,) * (len(args) - 1), None)), shared),
        "vmap, nested": (
            lambda f: vmap(vmap(f, in_dims=(*(0,) * (len(args) - 1), None)), in_dims=only_last),
            stacked,
        ),
        "vmap of grad": (lambda f: vmap(grad(squares(f), every)), stacked),
        "vmap of grad, all but one shared": (
            lambda f: vmap(grad(squares(f), every), in_dims=only_last),
            (*args[:-1], stacked[-1]),
        ),
        "grad of vmap": (lambda f: grad(squares(vmap(f)), every), stacked),
        "jvp": (lambda f: lambda *a: jvp(f, a, tuple(arg.flip(0) if arg.ndim else arg for arg in a)), args),
        "jacrev": (lambda f: jacrev(f, every), args),
        "jacfwd": (lambda f: jacfwd(f, every), args),
        "jacrev of jacrev": (lambda f: jacrev(jacrev(f, every), every), args),
        "hessian": (lambda f: hessian(f, every), args),
    }


SECOND_JACOBIANS = {"jacrev of jacrev", "hessian"}
JACOBIANS = {"jacrev", "jacfwd"} | SECOND_JACOBIANS


@pytest.mark.slow
@pytest.mark.parametrize(("op", "variant"), BOUND)
def test_transforms(op, variant, device, generator):
    """Every transform of `torch.func` gives what it gives of the naive form, in every case at smaller sizes."""
    slow = interpreted(variant, device)
    cases = reference_of(op).cases
    for number, case in enumerate((next(iter(cases)), smallest(op)) if slow else cases):
        smaller = [tuple(size if size < 2 else 2 + size % 2 for size in shape) for shape in cases[case]]
        args = reference_of(op).sample(*smaller, dtype=torch.float64, device=device, generator=generator)
        for name, (transform, inputs) in transforms(op, args).items():
            if slow and name in JACOBIANS and case != smallest(op):
                continue  # kernels are launched for every element of a result
            if not slow and name in SECOND_JACOBIANS and (NUMBERS[op.name] + number) % 3:
                continue  # take a second and more: cases take turns
            found, expected = (transform(lambda *args, v=v: op(*args, variant=v))(*inputs) for v in (variant, "naive"))
            for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
                torch.testing.assert_close(one, other, msg=lambda text, at=(case, name): f"{at}: {text}")


@pytest.mark.parametrize("op", OPS)
def test_transforms_run_the_kernels(op, device, generator):
    """`grad` and `vmap` reach the operators of the default variant: not a composite of its mathematics."""
    args = arguments(op, device, generator)
    for name, calls in (("vmap", 1), ("vmap, nested", 1), ("grad", 2), ("vmap of grad", 2), ("grad of vmap", 2)):
        transform, inputs = transforms(op, args)[name]
        with Operators() as operators:
            transform(lambda *args: op(*args))(*inputs)
        assert len(operators.calls) == calls, name


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_what_outlived_its_transform(op, device, generator):
    """A transform leaves wrappers behind that look like any other tensor."""
    args = leaves(arguments(op, device, generator, smallest(op)))
    kept = []

    def keep(*args):
        kept[:] = args
        return args[0].sum()

    def gradients(*inputs):
        out = op(*inputs)
        return torch.autograd.grad(out, args, torch.ones_like(out))

    for transform in (grad(keep, all_of(args)), lambda *args: jvp(keep, args, args)):
        transform(*args)
        same(gradients(*kept), gradients(*args))


@pytest.mark.parametrize("op", OPS)
def test_transforms_keep_the_memory(op, device, generator):
    """What a batch shares is not copied for each example, nor are its gradients: vmap needs what broadcasting does."""
    reference = reference_of(op)
    sizes = dict.fromkeys(reference.sizes, 48 if len(reference.sizes) < 4 else 16)
    args = leaves(reference.workload(**sizes, device=device, generator=generator))
    batch_dims = [arg.ndim - dims for arg, dims in zip(args, op.core_dims.values())]
    mapped = max(i for i, dims in enumerate(batch_dims) if dims > 0)
    own_dims = batch_dims[mapped] - 1  # of an example
    ones = (1,) * (max(own_dims, *batch_dims[:mapped], *batch_dims[mapped + 1 :]) - own_dims)

    def total(*args):
        return op(*args, variant="chunked" if device == "cpu" else "triton").sum()

    def broadcast(*args):
        examples = args[mapped].unflatten(0, (-1, *ones))
        return total(*args[:mapped], examples, *args[mapped + 1 :])

    def by_vmap(*args):
        return vmap(lambda one: total(*args[:mapped], one, *args[mapped + 1 :]))(args[mapped]).sum()

    expected = memory(Pass(broadcast, args, backward=True))
    assert memory(Pass(by_vmap, args, backward=True)).temporary_bytes <= expected.temporary_bytes
    every = memory(Pass(lambda *args: torch.autograd.grad(broadcast(*args), args), args))
    transformed = memory(Pass(grad(by_vmap, all_of(args)), tuple(arg.detach() for arg in args)))
    assert transformed.temporary_bytes <= every.temporary_bytes


@pytest.mark.parametrize("op", OPS)
def test_forward_mode_through_a_backward_pass(op, device, generator):
    """The tangents of gradients of an earlier result, which were once dropped."""
    args = leaves(arguments(op, device, generator))
    shape = op.prepare(*args).shape
    dout, along = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for _ in range(2))

    def tangents(variant):
        out = op(*args, variant=variant)
        with forward_ad.dual_level():
            gradients = torch.autograd.grad(out, args, forward_ad.make_dual(dout, along))
            return [forward_ad.unpack_dual(gradient).tangent for gradient in gradients]

    same(tangents(None), tangents("naive"))


@pytest.mark.parametrize("op", OPS)
def test_batched_gradients(op, device, generator):
    args = leaves(arguments(op, device, generator))
    shape = op.prepare(*args).shape
    douts = torch.randn(3, *shape, generator=generator, dtype=torch.float64).to(device)
    found = torch.autograd.grad(op(*args), args, douts, is_grads_batched=True)
    plain = tuple(arg.detach() for arg in args)
    for i, dout in enumerate(douts):
        assert gradient_error_ratio(op, plain, dout, tuple(gradient[i] for gradient in found)) <= 1


COMPILED = ("grad", "vmap", "vmap of grad", "jvp", "jacrev")


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(op, name, id=f"{op.name}-{name}")
        for op, (index, name) in itertools.product(ops().values(), enumerate(COMPILED))
        if (NUMBERS[op.name] + index) % len(COMPILED) == 0
    ],
)
def test_compiled_transforms(op, name, device, generator):
    torch._dynamo.reset()
    transform, inputs = transforms(op, arguments(op, device, generator))[name]
    compiled = torch.compile(transform(lambda *args: op(*args)), backend="aot_eager", fullgraph=True)
    same(compiled(*inputs), transform(lambda *args: op(*args, variant="naive"))(*inputs))


@pytest.mark.parametrize("op", OPS)
def test_double_backward_of_a_compiled_function_is_an_error(op, device, generator):
    torch._dynamo.reset()
    args = leaves(arguments(op, device, generator))
    compiled = torch.compile(lambda *args: op(*args), backend="aot_eager", fullgraph=True)
    gradients = torch.autograd.grad(compiled(*args).sum(), args, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        sum(gradient.sum() for gradient in gradients).backward()


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "compiled"])
@pytest.mark.parametrize("op", OPS)
def test_checkpoint(op, how, device, generator):
    args = arguments(op, device, generator, dtype=torch.float32)
    copies = leaves(args)

    def function(*args):
        return checkpoint(lambda *args: op(*args), *args, use_reentrant=how == "reentrant")

    if how == "compiled":
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    out = function(*copies)
    dout = torch.randn(out.shape, generator=generator).to(device)
    out.backward(dout)
    assert gradient_error_ratio(op, args, dout, tuple(copy.grad for copy in copies)) <= 1


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("op", OPS)
def test_autocast_rounds_no_operand(op, compiled, device, generator):
    """In eager mode and compiled, entered outside and inside, forward and backward.

    Attention rounds its operands first, as PyTorch's does, and then nothing more.
    """
    torch._dynamo.reset()
    for dtype in (torch.float32, torch.bfloat16):
        args = arguments(op, device, generator, dtype=dtype)
        with torch.autocast(device, dtype=torch.bfloat16):
            prepared = op.prepare(*args)
        operands = prepared.tensors[: len(args)]
        expected = call(op, *(operand.float() for operand in operands)).to(prepared.dtype)

        def inside(*args):
            with torch.autocast(device, dtype=torch.bfloat16):
                return call(op, *args)

        function = torch.compile(inside, backend="inductor", fullgraph=True) if compiled else inside
        outer = torch.compile(lambda *args: call(op, *args), fullgraph=True) if compiled else inside
        with torch.autocast(device, dtype=torch.bfloat16):
            outside = outer(*args)
        copies = leaves(args)
        out = function(*copies)
        same((out, outside), (expected, expected), rtol=0, atol=0)
        out.sum().backward()
        ones = torch.ones_like(out)
        gradients = tuple(copy.grad.to(operand.dtype) for copy, operand in zip(copies, operands, strict=True))
        assert gradient_error_ratio(op, operands, ones, gradients) <= 1


@pytest.mark.parametrize("op", OPS)
def test_autocast_rounds_nothing_in_double_backward(op, device, generator):
    args = arguments(op, device, generator, dtype=torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        args = leaves(op.prepare(*args).tensors[: len(args)])  # as attention rounds them

    def second():
        gradients = torch.autograd.grad(call(op, *args).sum(), args, create_graph=True)
        return torch.autograd.grad(sum((gradient**2).sum() for gradient in gradients), args)

    expected = second()
    with torch.autocast(device, dtype=torch.bfloat16):
        found = second()
    same(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("op", OPS)
def test_fake_and_meta_tensors(op, device, generator):
    """Shapes, dtypes and strides are those of real tensors, forward and backward; nothing is computed."""
    for case, dtype in itertools.product(reference_of(op).cases, (torch.float32, torch.bfloat16)):
        args = leaves(arguments(op, device, generator, case, dtype))
        out = op(*args)
        expected = (out, *torch.autograd.grad(out, args, torch.ones_like(out)))
        with FakeTensorMode() as mode:
            fakes = leaves([mode.from_tensor(arg) for arg in args])
            found = op(*fakes)
            found = (found, *torch.autograd.grad(found, fakes, torch.ones_like(found)))
        metas = leaves([arg.to("meta") for arg in args])
        meta = op(*metas)
        meta = (meta, *torch.autograd.grad(meta, metas, torch.ones_like(meta)))
        outside_the_mode = op(*(fake.detach() for fake in fakes))
        for one, other, real in zip((*found, outside_the_mode), (*meta, meta[0]), (*expected, out), strict=True):
            assert one.device.type == device
            assert other.is_meta
            for tensor in (one, other):
                assert (tensor.shape, tensor.dtype, tensor.stride()) == (real.shape, real.dtype, real.stride()), case


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("op", OPS)
def test_make_fx_and_jit_trace(op, tracing_mode, device, generator):
    """A trace is of the operator: it does not hold what the traced values took for granted."""
    args = arguments(op, device, generator)
    other = arguments(op, device, generator)
    traced = make_fx(lambda *args: op(*args), tracing_mode=tracing_mode)(*args)
    assert error_ratio(op, other, traced(*other)) <= 1
    scripted = torch.jit.trace(lambda *args: op(*args), args, check_trace=False)
    assert error_ratio(op, other, scripted(*other)) <= 1


@pytest.mark.parametrize(("op", "variant"), BOUND)
def test_a_result_may_be_changed_in_place(op, variant, device, generator):
    for case in list(reference_of(op).cases)[:3]:
        args = leaves(arguments(op, device, generator, case))
        out = op(*args, variant=variant)
        out *= 2
        gradients = torch.autograd.grad(out, args, torch.ones_like(out))
        plain = tuple(arg.detach() for arg in args)
        assert gradient_error_ratio(op, plain, torch.full_like(out, 2), gradients) <= 1


@pytest.mark.parametrize("op", OPS)
def test_threads_with_variants_of_their_own(op, device, generator):
    """Each thread's results are the bits of the variant that it named, however the threads interleave."""
    names = [name for name in ("chunked", "einsum", "naive", "torchscript") if name in op.variants]
    args = arguments(op, device, generator, dtype=torch.float32)
    expected = {name: op(*args, variant=name) for name in names}
    found = {name: [] for name in names}
    barrier = threading.Barrier(len(names))

    def work(name):
        barrier.wait()
        with effops.use_variant(name):
            for _ in range(50):
                found[name].append(op(*args))

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        assert len(found[name]) == 50
        assert all(torch.equal(out, expected[name]) for out in found[name])


@pytest.mark.parametrize("op", OPS)
def test_distributed_data_parallel(op, device, generator, tmp_path):
    class Learned(torch.nn.Module):
        def __init__(self, args):
            super().__init__()
            self.learned = torch.nn.ParameterList(args[:-1])

        def forward(self, last):
            return op(*self.learned, last)

    args = arguments(op, device, generator, dtype=torch.float32)
    backend = "nccl" if device == "cuda" else "gloo"
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        module = torch.nn.parallel.DistributedDataParallel(Learned(args))
        out = module(args[-1])
        dout = torch.randn(out.shape, generator=generator).to(device)
        out.backward(dout)
    finally:
        torch.distributed.destroy_process_group()
    gradients = (*(parameter.grad for parameter in module.parameters()), None)
    assert gradient_error_ratio(op, args, dout, gradients) <= 1


@pytest.mark.parametrize("op", OPS)
def test_cuda_graph(op, device, generator):
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    args = leaves(arguments(op, device, generator, dtype=torch.float32))
    dout = torch.randn(op.prepare(*args).shape, generator=generator).to(device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.autograd.grad(op(*args), args, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*args)
        gradients = torch.autograd.grad(out, args, dout)
    fresh = arguments(op, device, generator, dtype=torch.float32)
    with torch.no_grad():
        for arg, value in zip(args, fresh):
            arg.copy_(value)
    graph.replay()
    assert error_ratio(op, fresh, out) <= 1
    assert gradient_error_ratio(op, fresh, dout, gradients) <= 1
