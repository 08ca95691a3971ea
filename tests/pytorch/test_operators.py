"""The operators that effops registers: what they say of themselves, alone, in traces and as fake tensors."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from effops.dispatch.custom_op import CustomOp
from effops.reference import error_ratio, gradient_error_ratio, reference_of

from ..support.calls import BOUND, OPS, Operators, arguments, interpreted, leaves, smallest


def check_operators(function, args, checks):
    """opcheck of each operator in a forward and a backward pass."""
    args = leaves(args)
    with Operators() as operators:
        out = function(*args)
        torch.autograd.grad(out, args, torch.ones_like(out))
    assert len(operators.calls) == 2
    for operator, operands in operators.calls:
        torch.library.opcheck(operator, operands, test_utils=checks)


@pytest.mark.turns(1, interpreted=3)
@pytest.mark.each_value(all=True)
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
    if "strides" in (wrong or "") and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 opcheck compares no strides")

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


@pytest.mark.turns(1, interpreted=3)
@pytest.mark.parametrize(("op", "variant"), BOUND)
def test_a_result_may_be_changed_in_place(op, variant, device, generator):
    for case in list(reference_of(op).cases)[:3]:
        args = leaves(arguments(op, device, generator, case))
        out = op(*args, variant=variant)
        out *= 2
        gradients = torch.autograd.grad(out, args, torch.ones_like(out))
        plain = tuple(arg.detach() for arg in args)
        assert gradient_error_ratio(op, plain, torch.full_like(out, 2), gradients) <= 1
