"""Every op inside torch.func's transforms and forward mode."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from effops.measure import Pass, memory
from effops.reference import gradient_error_ratio, reference_of, tried_ops

from ..support.calls import BOUND, NUMBERS, OPS, Operators, all_of, arguments, interpreted, leaves, same, smallest


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


SECOND_JACOBIANS = {"jacrev of jacrev", "hessian"}  # of axes of two, since they have a number for each three numbers
JACOBIANS = {"jacrev", "jacfwd"} | SECOND_JACOBIANS


@pytest.mark.slow
@pytest.mark.turns(1, interpreted=3)
@pytest.mark.each_value(all=True)
@pytest.mark.parametrize(("op", "variant"), BOUND)
def test_transforms(op, variant, device, generator):
    """Every transform of `torch.func` gives what it gives of the naive form, in every case at smaller sizes."""
    slow = interpreted(variant, device)
    cases = reference_of(op).cases
    for number, case in enumerate((next(iter(cases)), smallest(op)) if slow else cases):
        smaller, smallest_axes = (
            [tuple(size if size < 2 else size_of(size) for size in shape) for shape in cases[case]]
            for size_of in (lambda size: 2 + size % 2, lambda _: 2)
        )
        args, few = (
            reference_of(op).sample(*shapes, dtype=torch.float64, device=device, generator=generator)
            for shapes in (smaller, smallest_axes)
        )
        of_second = {name: one for name, one in transforms(op, few).items() if name in SECOND_JACOBIANS}
        for name, (transform, inputs) in (transforms(op, args) | of_second).items():
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
    counts = {  # operators, and examples of a batch
        "vmap": (1, 2),
        "vmap, nested": (1, 4),
        "grad": (2, 1),
        "vmap of grad": (2, 2),
        "grad of vmap": (2, 2),
    }
    for name, (calls, examples) in counts.items():
        transform, inputs = transforms(op, args)[name]
        with Operators() as operators:
            transform(lambda *args: op(*args))(*inputs)
        (first, *_), *_ = operators.calls
        one_by_one = "mixture_log_prob_cpp" in str(first)  # its examples, since together they may be refused
        assert len(operators.calls) == calls * (examples if one_by_one else 1), name


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


@pytest.mark.parametrize(("op", "variant"), BOUND)
def test_derivatives_of_derivatives_after_their_transforms(op, variant, device, generator):
    """What `vjp` gives is called when `vjp` is over: PyTorch failed in third derivatives, or in the second of some."""
    args = arguments(op, device, generator, smallest(op))

    def pulled_back(function):
        def gradients(*args):
            out, pull_back = torch.func.vjp(function, *args)
            return pull_back(tree_map(torch.ones_like, out))

        return gradients

    def third(variant):
        function = squares(lambda *args: op(*args, variant=variant))
        return pulled_back(pulled_back(pulled_back(function)))(*args)

    same(third(variant), third("naive"))


@pytest.mark.slow
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

    found, expected = (memory(Pass(one, args, backward=True)) for one in (by_vmap, broadcast))
    # An operator computes again what a call at once may have kept.
    assert found.temporary_bytes + found.saved_bytes <= expected.temporary_bytes + expected.saved_bytes
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


@pytest.mark.turns(2)
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(op, name, id=f"{op.name}-{name}")
        for op, (index, name) in itertools.product(tried_ops().values(), enumerate(COMPILED))
        if (NUMBERS[op.name] + index) % len(COMPILED) == 0
    ],
)
def test_compiled_transforms(op, name, device, generator):
    torch._dynamo.reset()
    transform, inputs = transforms(op, arguments(op, device, generator))[name]
    compiled = torch.compile(transform(lambda *args: op(*args)), backend="aot_eager", fullgraph=True)
    same(compiled(*inputs), transform(lambda *args: op(*args, variant="naive"))(*inputs))


@pytest.mark.parametrize("op", OPS)
def test_functionalize(op, device, generator):
    """Alone it changes nothing, with gradients too; with another transform it is refused."""
    args = arguments(op, device, generator, smallest(op))

    def with_gradients(function):
        own = leaves(args)
        out = function(*own)
        return out, *torch.autograd.grad(out, own, torch.ones_like(out))

    for found, expected in zip(with_gradients(torch.func.functionalize(op)), with_gradients(op), strict=True):
        assert torch.equal(found, expected)
    for transformed in (
        torch.func.functionalize(torch.func.grad(lambda *args: op(*args).sum())),
        torch.func.grad(lambda *args: torch.func.functionalize(op)(*args).sum()),
    ):
        with pytest.raises(NotImplementedError, match=r"functionalize must be the only transform.*leave it out"):
            transformed(*args)


@pytest.mark.parametrize("op", OPS)
def test_jvp_of_an_outside_vjp(op, device, generator):
    """A pull-back that was made outside is linear: its derivative along a gradient is what it gives for that one."""
    args = arguments(op, device, generator, smallest(op))
    out, pull_back = torch.func.vjp(op, *args)
    dout, along = (torch.randn(out.shape, dtype=out.dtype, generator=generator).to(device) for _ in range(2))
    found, tangent = jvp(pull_back, (dout,), (along,))
    same(found, pull_back(dout))
    same(tangent, pull_back(along))


@pytest.mark.parametrize("op", OPS)
def test_vjp_of_an_outside_vjp(op, device, generator):
    """Likewise its own pull-back is that of a linear function: <upstream, J along> = <J^T upstream, along>."""
    args = arguments(op, device, generator, smallest(op))
    out, pull_back = torch.func.vjp(op, *args)
    dout, along = (torch.randn(out.shape, dtype=out.dtype, generator=generator).to(device) for _ in range(2))
    gradients, pull_back_again = torch.func.vjp(pull_back, dout)
    upstream = tuple(torch.randn(one.shape, dtype=one.dtype, generator=generator).to(device) for one in gradients)
    (found,) = pull_back_again(upstream)
    expected = sum((one * other).sum() for one, other in zip(upstream, pull_back(along)))
    torch.testing.assert_close((found * along).sum(), expected)
