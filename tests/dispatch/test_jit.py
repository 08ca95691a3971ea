"""Compiled variants: backward passes that run more than once, constants of compiled forms, and which forms are kept."""

import gc
import itertools
import math
import warnings
import weakref

import pytest
import torch
import torch._functorch.config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode

import effops
from effops.dispatch import jit
from effops.pytorch.calls import reset_code


def density(normal):
    loc, x = (torch.nn.functional.normalize(normal(*shape), dim=-1) for shape in ((5, 3), (7, 1, 3)))
    return effops.power_spherical_log_prob, (loc, normal(5).exp(), x)


def scores(normal):
    return effops.attention_scores, (normal(2, 5, 3), normal(2, 7, 3))


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("case", "donated"),
    [
        (density, True),
        (scores, False),
        pytest.param(density, False, marks=pytest.mark.exhaustive),
        pytest.param(scores, True, marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_backward_passes_run_again(case, donated, generator):
    """It raised "compiled with non-empty donated buffers": compiled backward passes wrote into what they had saved."""

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    op, args = case(normal)
    args = [arg.requires_grad_() for arg in args]
    with functorch_config.patch(donated_buffer=donated):  # the caller's setting
        result = op(*args, variant="compile")
        upstream = normal(*result.shape)
        first, again = (torch.autograd.grad(result, args, upstream, retain_graph=True) for _ in range(2))
        assert functorch_config.donated_buffer == donated
    expected = torch.autograd.grad(op(*args, variant="einsum"), args, upstream)
    for one, other, right in zip(first, again, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, right)


@pytest.mark.compiled
@pytest.mark.parametrize("case", [density, scores])
def test_compiled_backward_passes_take_gradients_with_other_strides(case, generator):
    """One that is differentiated raised "a leaf Variable that requires grad is being used in an in-place operation"."""

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    op, args = case(normal)
    args = [arg.requires_grad_() for arg in args]
    result = op(*args, variant="compile")
    upstream = normal(*reversed(result.shape)).mT if result.ndim == 2 else normal(7, 2, 5).permute(1, 2, 0)
    assert not upstream.is_contiguous()
    found = torch.autograd.grad(result, args, upstream.requires_grad_(), create_graph=True)
    expected = torch.autograd.grad(op(*args, variant="einsum"), args, upstream)
    torch.testing.assert_close(found, expected)


def test_numbers_are_constants(monkeypatch):
    """They were inputs, so that masks that come of them were saved for backward: 1.2 times as long."""
    tensors = []

    def as_it_is(graph, inputs):
        tensors.extend(one for one in inputs if isinstance(one, torch.Tensor))
        return graph

    monkeypatch.setattr(jit, "_inductor", as_it_is)
    clamped = jit.compile_by_signature(lambda x, bound: x.clamp(max=bound))
    x = torch.arange(3.0)
    for bound in (0.5, 1.5):
        assert torch.equal(clamped(x, bound), x.clamp(max=bound))
    assert [one.shape for one in tensors] == [x.shape] * 2


@pytest.fixture
def compilations(monkeypatch):
    """What is compiled meanwhile, a list of graphs. They run as they are: TorchInductor would take seconds."""
    graphs = []

    def as_it_is(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(jit, "_inductor", as_it_is)
    return graphs


def product(x, y, factor):
    return (x * y * factor).sum(-1)


def in_every_order(shape):
    """Tensors of a shape, one for each order of their strides."""
    for order in itertools.permutations(range(len(shape))):
        places = [order.index(axis) for axis in range(len(shape))]
        yield torch.randn([shape[axis] for axis in order]).permute(places)


def test_orders_of_strides_are_compiled_once_each(compilations):
    """The ninth raised FailOnRecompileLimitHit: PyTorch compiles one function for eight of them."""
    compiled = jit.compile_by_signature(product)
    shape = (2, 3, 4, 5)
    expanded = torch.randn(2, 3, 1, 5).expand(shape), torch.randn(5).expand(shape)
    tensors = [*itertools.islice(in_every_order(shape), 10), *expanded]
    y = torch.randn(shape)
    for _ in range(2):
        for x in tensors:
            assert torch.equal(compiled(x, y, 2.0), product(x, y, 2.0))
        assert len(compilations) == len(tensors) == 12


def test_the_first_sizes_have_a_form_of_their_own_and_all_others_share_one(compilations):
    """Code for given sizes takes less time. Sizes that change at each call are not compiled at each call."""
    compiled = jit.compile_by_signature(product)
    wide = torch.randn(40, 50)
    views = [wide[: 3 + count, : 5 + 2 * count] for count in range(8)]
    for _ in range(2):
        for x in views:
            assert torch.equal(compiled(x, x, 2.0), product(x, x, 2.0))
        assert len(compilations) == 2
    for x in views:
        own = x.clone().requires_grad_()
        assert torch.equal(compiled(own, own, 2.0), product(own, own, 2.0))
    assert len(compilations) == 4


def test_what_no_signature_has_is_compiled_without_limit(compilations):
    """PyTorch compiles anew for the number of threads, too. Its limit begins again with a new form."""
    compiled, before = jit.compile_by_signature(product), torch.get_num_threads()
    x = torch.randn(3, 5)
    try:
        for threads in range(1, 11):
            torch.set_num_threads(threads)
            assert torch.equal(compiled(x, x, 2.0), product(x, x, 2.0))
    finally:
        torch.set_num_threads(before)
    assert len(compilations) == 10


def test_nan_is_one_number_and_zeros_are_two(compilations):
    """Each call with NaN was compiled, since NaN equals no NaN. That with -0.0 computed with the 0.0 before it."""
    compiled = jit.compile_by_signature(lambda x, factor: x * factor)
    x = torch.rand(3, 5)
    for number in (math.nan, float("nan"), -math.nan):
        assert compiled(x, number).isnan().all()
    assert len(compilations) == 1
    for number in (0.0, -0.0, 0.0, -0.0):
        assert compiled(x, number).signbit().all() == (math.copysign(1, number) < 0)
    assert len(compilations) == 3


def test_the_forms_that_were_called_last_are_kept(compilations, monkeypatch):
    """Every number had a form that was kept for ever, by PyTorch too."""
    monkeypatch.setattr(jit, "FORMS", 3)
    compiled = jit.compile_by_signature(product)
    x = torch.randn(3, 5)
    forms = []
    for number in range(6):
        compiled(x, x, float(number))
        forms.append(weakref.ref(compilations.pop()))
        compiled(x, x, 0.0)  # stays among the last
    assert not compilations
    gc.collect()
    assert [number for number, form in enumerate(forms) if form() is None] == [1, 2, 3]
    compiled(x, x, 1.0)
    assert len(compilations) == 1


@pytest.mark.compiled
def test_a_form_that_is_dropped_has_its_backward_pass(monkeypatch, generator):
    """TorchInductor compiles a backward pass when it first runs, here after the form was dropped."""
    dropped = []
    monkeypatch.setattr(jit, "reset_code", lambda code: dropped.append(reset_code(code)))
    monkeypatch.setattr(jit, "FORMS", 1)
    compiled = jit.compile_by_signature(product)
    x = torch.randn(3, 5, generator=generator, requires_grad=True)
    result = compiled(x, x.detach(), 2.0)
    compiled(x.detach(), x.detach(), 2.0)
    gc.collect()
    assert dropped
    result.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


class Annotated(torch.Tensor):
    """A subclass that overrides nothing."""


class Unwrapped(torch.Tensor):
    """A subclass whose results are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize(("cls", "returned"), [(Annotated, Annotated), (Unwrapped, torch.Tensor)])
def test_a_subclass_is_compiled_as_a_plain_tensor(cls, returned, monkeypatch):
    """It raised "Multiple dispatch failed" where a tensor of a subclass required gradients."""
    monkeypatch.setattr(jit, "_inductor", "aot_eager")
    compiled = jit.compile_by_signature(product)
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    leaf = x.clone().as_subclass(cls).requires_grad_()
    result = compiled(leaf, y, 2.0)
    assert type(result) is returned
    result.as_subclass(torch.Tensor).sum().backward()
    assert torch.equal(leaf.grad.as_subclass(torch.Tensor), 2 * y)


def test_fake_tensors_are_refused(generator):
    """Compiled code read memory that fake tensors do not have: the process ended."""
    op, args = scores(lambda *shape: torch.randn(*shape, generator=generator))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(arg) for arg in args]
        with pytest.raises(NotImplementedError, match="needs tensors in memory, got fake ones; leave it to"):
            op(*fakes, variant="compile")


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
def test_that_torchscript_is_deprecated_is_not_told(monkeypatch, category):
    """Users of `effops.explain` did not ask for it. PyTorch shows them what is a FutureWarning since 2.15."""

    def script(function):
        warnings.warn("`torch.jit.script` is deprecated", category, stacklevel=2)
        return function

    monkeypatch.setattr(torch.jit, "script", script)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.script(torch.neg)(torch.ones(1)) == -1
