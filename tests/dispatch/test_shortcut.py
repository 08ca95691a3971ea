"""The short way of small calls gives what the long way gives, and leaves to the long way what is none of its calls."""

import pytest
import torch
from torch.nn.functional import normalize

import effops
from effops.dispatch.call import Shortcut
from effops.dispatch.validation import validate
from effops.ops.densities import power_spherical, von_mises_fisher

OPS = {family.op.name: family.op for family in (power_spherical, von_mises_fisher)}
SHAPES = {  # of loc, scale and x
    "one loc": ((3,), (), (7, 3)),
    "a row for each": ((7, 3), (7,), (7, 3)),
    "every pair": ((5, 3), (5,), (7, 1, 3)),
    "every pair, loc first": ((5, 1, 3), (5, 1), (7, 3)),
    "scales alone vary": ((3,), (5, 1), (7, 3)),
    "one x": ((5, 3), (5,), (3,)),
    "one of each": ((3,), (), (3,)),
    "several axes": ((4, 1, 5, 3), (5,), (2, 1, 3)),
    "long vectors": ((5, 300), (5,), (7, 1, 300)),
}


@pytest.fixture
def taken(monkeypatch):
    """Whether each call took the short way."""
    found = []
    own = Shortcut.__call__

    def watched(self, *arguments, **options):
        result = own(self, *arguments, **options)
        found.append(result is not None)
        return result

    monkeypatch.setattr(Shortcut, "__call__", watched)
    return found


def operands(shapes, dtype=torch.float32, *, requires_grad=False):
    loc, scale, x = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    made = (normalize(loc, dim=-1), scale.abs() + 1, normalize(x, dim=-1))
    return tuple(one.to(dtype).requires_grad_(requires_grad) for one in made)


def gradients(op, leaves, **options):
    result = op(*leaves, **options)
    dout = torch.arange(1, 1 + result.numel(), dtype=result.dtype).view(result.shape)
    return result, *torch.autograd.grad(result, leaves, dout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_both_ways_agree(op, shapes, dtype, taken):
    """To the last bit, and in their layouts."""
    leaves = operands(shapes, dtype, requires_grad=True)
    long, short = gradients(op, leaves, variant="chunked"), gradients(op, leaves)
    assert taken == [True]
    for one, other in zip(short, long):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
    with torch.no_grad():
        assert torch.equal(op(*leaves), long[0])


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_subset_of_gradients(op):
    shapes = SHAPES["every pair"]
    for wanted in ((0,), (1,), (2,), (0, 2), (1, 2)):
        leaves = operands(shapes)
        for i in wanted:
            leaves[i].requires_grad_()
        some = [leaves[i] for i in wanted]
        short, long = (torch.autograd.grad(op(*leaves, variant=name).sum(), some) for name in (None, "chunked"))
        assert all(map(torch.equal, short, long))


def test_antipodes_and_points_off_the_sphere():
    loc, scale, x = operands(SHAPES["one loc"])
    x[0], x[1] = -loc, -2 * loc
    short, long = (power_spherical.op(loc, scale, x, variant=name) for name in (None, "chunked"))
    assert short[0].isfinite()
    assert short[1].isnan()
    torch.testing.assert_close(short, long, rtol=0, atol=0, equal_nan=True)


def test_no_call_with_a_context_around_it_goes_the_short_way(taken):
    op, args = power_spherical.op, operands(SHAPES["every pair"])
    with effops.record() as calls:
        op(*args)
    assert calls[0].variant == "chunked"
    with effops.use_variant("einsum"):
        op(*args)
    with validate(), pytest.raises(ValueError, match="must have length 1"):
        op(2 * args[0], *args[1:])
    assert taken == []
    with torch.autocast("cpu"):
        assert op(*operands(SHAPES["every pair"], torch.bfloat16)).dtype == torch.float32
    torch.func.vmap(op)(*(arg.expand(2, *arg.shape) for arg in args))
    torch.func.jvp(op, args, args)
    assert taken == [False] * 3
    op(*args)
    assert taken[3:] == [True]


def test_other_tensors_go_the_long_way(taken):
    op, (loc, scale, x) = power_spherical.op, operands(SHAPES["every pair"])
    expected = op(loc, scale, x)
    negative = torch.complex(x, -x).conj().imag
    assert negative.is_neg()
    torch.testing.assert_close(op(loc, scale, negative), expected)
    assert op(loc, scale.int(), x).shape == op(loc, 2, x).shape == expected.shape
    assert op(*(one.to("meta") for one in (loc, scale, x))).is_meta
    many = operands(((64, 3), (64,), (4096, 1, 3)))
    assert op(*many).shape == (4096, 64)
    empty = operands(((0, 3), (0,), (7, 1, 3)))
    assert op(*empty).shape == (7, 0)
    assert taken == [True, *[False] * 6]


def test_errors_are_those_of_the_long_way(taken):
    op, (loc, scale, x) = power_spherical.op, operands(SHAPES["every pair"])
    for wrong, error in (((loc[:, :2], scale, x), ValueError), ((loc, scale, x.int()), TypeError)):
        with pytest.raises(error) as short:
            op(*wrong)
        with pytest.raises(error) as long:
            op(*wrong, variant="chunked")
        assert str(short.value) == str(long.value)
    with pytest.raises(TypeError):
        op(loc, scale, torch.nested.nested_tensor([x[0], x[1]]))
    assert not any(taken)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_derivatives_of_derivatives(op):
    leaves = operands(SHAPES["every pair"], torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(op, leaves)


def test_many_gradients_at_once():
    leaves = operands(SHAPES["one loc"], requires_grad=True)
    result = power_spherical.op(*leaves)
    batched = torch.autograd.grad(result, leaves, torch.eye(7), is_grads_batched=True)
    for i in range(7):
        single = torch.autograd.grad(power_spherical.op(*leaves)[i], leaves)
        for one, other in zip(batched, single):
            torch.testing.assert_close(one[i], other)


def test_an_operand_that_has_changed_is_told():
    leaves = operands(SHAPES["one loc"], requires_grad=True)
    result = power_spherical.op(*leaves)
    with torch.no_grad():
        leaves[2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_only_the_operands_are_saved(taken):
    leaves, saved = operands(SHAPES["every pair"], requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        power_spherical.op(*leaves)
    assert taken == [True]
    assert {one.data_ptr() for one in saved} == {leaf.data_ptr() for leaf in leaves}
