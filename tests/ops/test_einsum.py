"""What is peculiar to einsum: its equations, its budget, what it saves, and PyTorch's use of opt_einsum."""

import re
import warnings
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import effops
from effops.measure import Pass, memory
from effops.ops.einsum import contraction
from effops.ops.einsum.contraction import BUDGET, _known, op
from effops.ops.einsum.paths import Operand, find, keeps_intermediates
from effops.reference.einsum import bounds, gradient_bounds
from effops.reference.reference import worst_error_ratio
from effops.text import parse_bytes

from ..support.calls import on_this_python

# Each with the shapes of its operands.
EQUATIONS = {
    "chain": ("ij,jk,kl->il", (6, 7), (7, 5), (5, 4)),
    "chain of ten": ("ab,bc,cd,de,ef,fg,gh,hi,ij,jk->ak", *[(4, 4)] * 10),
    "bilinear": ("bi,ijk,bj->bk", (9, 4), (4, 5, 3), (9, 5)),
    "relative positions": ("bhid,bhjd,ijd->bhij", (2, 3, 5, 4), (2, 3, 6, 4), (5, 6, 4)),
    "factors of a tensor": ("ijk,jr,kr->ir", (5, 6, 7), (6, 3), (7, 3)),
    "diagonal": ("ii,ij->j", (5, 5), (5, 4)),
    "diagonals": ("iijj,jk->ik", (3, 3, 4, 4), (4, 2)),
    "trace": ("ii->", (6, 6)),
    "transposed": ("ij->ji", (5, 4)),
    "the operand itself": ("ij->ij", (5, 4)),
    "all summed": ("ij,jk->", (5, 4), (4, 3)),
    "summed alone": ("ij,k->i", (5, 4), (3,)),
    "outer": ("i,j,k->kij", (3,), (4,), (5,)),
    "scalars": (",->", (), ()),
    "ellipses": ("...ij,...jk->...ik", (4, 1, 2, 3), (5, 3, 4)),
    "ellipsis inside": ("i...j,j...->...i", (2, 6, 3), (3, 6)),
    "ellipsis summed": ("i...,i...->i", (3, 4, 5), (3, 4, 5)),
    "without arrow": ("ba,cb", (3, 4), (5, 3)),
    "ellipsis without arrow": ("b...,c", (3, 4), (5,)),
    "size 1 broadcasts": ("ij,jk->ik", (5, 1), (4, 3)),
    "size 1 everywhere": ("ij,jk->ik", (5, 1), (1, 3)),
    "empty sum": ("ij,jk->ik", (5, 0), (0, 3)),
    "empty result": ("ij,jk,k->ik", (0, 4), (4, 3), (3,)),
    "spaces": (" i j , j k -> i k ", (5, 4), (4, 3)),
}


def operands(shapes, generator, dtype=torch.float32):
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def passes_of(call):
    """The forward pass, and the backward pass to all operands from a contiguous gradient."""
    upstream = Operand.of(torch.empty(call.shape, dtype=call.dtype))
    return call.described(), replace(call.described(), upstream=upstream, wanted=(True,) * len(call.operands))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", on_this_python(["chunked", "einsum", "torchscript", "naive"]))
@pytest.mark.parametrize("name", EQUATIONS)
def test_equations(name, variant, dtype, generator):
    equation, *shapes = EQUATIONS[name]
    leaves = operands(shapes, generator, dtype)
    out = effops.einsum(equation, *leaves, variant=variant)
    expected = torch.einsum(equation, [leaf.double() for leaf in leaves])
    assert out.shape == expected.shape
    call = op.prepare(equation, *leaves)
    assert bounds(call).error_ratio(out) <= 1
    torch.testing.assert_close(bounds(call).value, expected)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
    gradients = torch.autograd.grad(out, leaves, dout)
    assert worst_error_ratio(gradient_bounds(call, dout), gradients) <= 1


@pytest.mark.parametrize(
    "name", ["chain", "bilinear", "relative positions", "factors of a tensor", "ellipses", "outer"]
)
def test_slices(name, generator):
    """Budgets of a half to a tenth of what the passes take, and the same results."""
    equation, *shapes = EQUATIONS[name]
    leaves = operands([tuple(3 * size if size > 1 else 1 for size in shape) for shape in shapes], generator)
    call = op.prepare(equation, *leaves)
    passes = passes_of(call)
    taken = max(one.taken_bytes(find(one, call.budget)) for one in passes)
    for budget in (taken // 2, taken // 10):
        out = effops.einsum(equation, *leaves, budget=budget)
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert bounds(call).error_ratio(out) <= 1
        assert worst_error_ratio(gradient_bounds(call, torch.ones_like(out)), gradients) <= 1
    assert taken == 0 or any(find(one, taken // 10).slices > 1 for one in passes)


def test_forms_of_call(generator):
    a, b, c = operands([(3, 4), (4, 5), (5, 2)], generator)
    expected = torch.einsum("ij,jk,kl->il", a, b, c)
    for call in (
        ("ij,jk,kl->il", [a, b, c]),
        (a, [0, 1], b, [1, 2], c, [2, 3], [0, 3]),
        (a, [0, 1], b, (1, 2), c, [2, 3]),
        (a, [..., 1], b, [1, 2], c, [2, 3], [..., 3]),
    ):
        torch.testing.assert_close(effops.einsum(*call), expected)
        assert effops.explain(effops.einsum, *call).variants["chunked"].output_bytes == expected.numel() * 4


X = torch.ones(2, 3)
MISTAKES = {
    "too few operands": (("ij,jk->ik", X), r"must have a term for each operand; got 'ij,jk->ik', with 2 terms, and 1"),
    "a budget by position": (
        ("ij,jk->ik", X, X, "1 MiB"),
        "must be tensors; got .1 MiB.; give `budget` by name",
    ),
    "a digit": (("i1->i", X), "must consist of letters, ellipses, commas and an arrow"),
    "half an arrow": (("ij,jk>ik", X, X), "write the arrow once, as ->, before the labels of the result"),
    "an arrow of another kind": (("ij,jk→ik", X, X), "write the arrow once, as ->, before the labels of the result"),
    "two arrows": (("ij,jk->ik->k", X, X), "write the arrow once, as ->, before the labels of the result"),
    "a dot": (("i.j->i", X), "write an ellipsis as three dots"),
    "too few labels": (("i->i", X), "operand 0 must have an axis for each of its labels; got 2 axes and 1 label"),
    "too many labels": (("ijk->i", X), "leave labels out; a label is one letter"),
    "words": (("batch dim, dim out -> batch out", X, X), "a label is one letter, as in .* and no word"),
    "a word behind the arrow": (("ij->sum", X), "behind the arrow; a label is one letter"),
    "an unknown label": (("ij->k", X), "labels of the result must be those of operands, each once; got 'k'"),
    "a label twice": (("ij->ii", X), "got 'i', twice"),
    "sizes that differ": (("ij,jk->ik", X, X), r"got 3 and 2 for 'j', the latter in operand 1 of 'ij,jk->ik'"),
    "sizes of an ellipsis that differ": (
        ("...j,...k->...", X, X[:1].mT),
        r"got 2 and 3 for an axis of an ellipsis, the latter in operand 1 of '\.\.\.j,\.\.\.k->\.\.\.'",
    ),
    "a diagonal of two sizes": (("ii->i", X), "axes of one label must have one size in an operand; got 2 and 3"),
    "labels out of range": ((X, [0, 60]), "labels must be a list of integers from 0 to 51"),
    "no labels": ((X, X), "labels must be a list of integers .* got Tensor"),
    "nothing": ((X,), "must be a text, or operands must come each with a list"),
    "complex": (("ij->i", X.to(torch.complex64)), "`operand 0` must be real floating point; got torch.complex64"),
    "integers": (("ij->i", X.long()), "`operand 0` must be real floating point; got torch.int64"),
    "a list": (("i->i", [1.0, 2.0]), "must have a term for each operand"),
    "devices": (("i,i->i", X[0], X[0].to("meta")), "tensors must be on one device"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    args, message = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=f"^einsum: .*{message}"):
        effops.einsum(*args)


@pytest.mark.slow
def test_budgets_that_do_not_suffice(generator):
    leaves = operands([(300, 300)] * 3, generator)
    with pytest.raises(
        ValueError, match=r"forward pass run in at most 10,000 slices; got 100 B; give at least '(.*)'$"
    ):
        effops.einsum("ab,bc,cd->ad", *(leaf.detach() for leaf in leaves), budget=100)
    with pytest.raises(ValueError, match=r"einsum: `budget` must .* at most 10,000 slices; got 100 B") as caught:
        effops.einsum("ab,bc,cd->ad", *leaves, budget=100)
    named = str(caught.value).split("'")[-2]
    effops.einsum("ab,bc,cd->ad", *leaves, budget=named).sum().backward()
    with pytest.raises(ValueError, match="einsum: `budget`: expected"):
        effops.einsum("ab->a", leaves[0], budget="much")


def test_a_budget_is_kept_where_torch_takes_16_times_as_much():
    """Bytes that are saved are the operands'."""
    a, b, c = (torch.randn(64, 256, requires_grad=True) for _ in range(3))
    equation, budget = "ia,ib,ic->abc", 2**22
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = effops.einsum(equation, a, b, c, budget=budget)
    assert {one.data_ptr() for one in kept} == {one.data_ptr() for one in (a, b, c)}
    run = lambda *leaves: effops.einsum(equation, *leaves, budget=budget)  # noqa: E731
    assert memory(Pass(run, (a, b, c))).temporary_bytes <= budget
    assert memory(Pass(run, (a, b, c), backward=True)).temporary_bytes <= budget
    plain = memory(Pass(lambda *leaves: torch.einsum(equation, *leaves), (a, b, c)))
    assert plain.temporary_bytes + plain.saved_bytes >= 4 * budget
    assert out.shape == (256, 256, 256)


def test_sums_of_slices_are_rounded_once():
    """Sixteen bits have eight digits of bfloat16: 1 added to 256 would be lost."""
    a, b = torch.ones(4096, 64, dtype=torch.bfloat16), torch.ones(4096, 1, dtype=torch.bfloat16)
    call = "ia,ib,ic->abc", a, a[:, :48], b
    program = find(op.prepare(*call, budget=2**14).described(), 2**14)
    (label,) = program.cut_from_sums
    assert 4096 // program.extents[label] >= 16
    assert (effops.einsum(*call, budget=2**14) == 4096).all()


@pytest.mark.parametrize("setting", ["with", "without", "disabled"])
def test_bytes_of_forms_with_and_without_opt_einsum(setting, monkeypatch, generator):
    """PyTorch's path is another one, and so are the bytes."""
    a, b, c = (one.detach() for one in operands([(64, 2), (2, 64), (64, 1)], generator))
    if setting == "without":
        monkeypatch.setattr(torch.backends.opt_einsum, "is_available", lambda: False)
    if setting == "disabled":
        monkeypatch.setattr(torch.backends.opt_einsum, "enabled", False)
    call = "ij,jk,kl->il", a, b, c
    for variant in on_this_python(("einsum", "torchscript", "naive", "chunked")):
        report = effops.explain("einsum", *call).variants[variant]
        found = memory(Pass(lambda *args, variant=variant: effops.einsum(call[0], *args, variant=variant), (a, b, c)))
        assert report.temporary_bytes == found.temporary_bytes, variant
    temporaries = effops.explain("einsum", *call).variants["einsum"].temporary_bytes
    assert temporaries == (2 * 1 * 4 if setting == "with" else 64 * 64 * 4)


def test_transforms(generator):
    x, y = (one.detach() for one in operands([(7, 3, 4), (4, 5)], generator))
    by_example = torch.vmap(lambda one, other: effops.einsum("ij,jk->ik", one, other), in_dims=(0, None))
    torch.testing.assert_close(by_example(x, y), x @ y)
    of_gradients = torch.func.vmap(
        torch.func.grad(lambda one, other: effops.einsum("ij,jk->", one, other)), in_dims=(0, None)
    )
    torch.testing.assert_close(of_gradients(x, y), y.sum(1).expand_as(x))
    second = torch.func.hessian(lambda one: effops.einsum("ij,jk,jk->", x[0], one, one))(y)
    torch.testing.assert_close(second.diagonal(0, 0, 2).diagonal(0, 0, 1), 2 * x[0].sum(0)[:, None].expand(4, 5))
    leaves = [one.double().requires_grad_() for one in (x[0], y)]
    assert torch.autograd.gradgradcheck(lambda *args: effops.einsum("ij,jk->ik", *args), leaves)


def test_autocast_and_two_dtypes(generator):
    a, b = (one.detach() for one in operands([(8, 8), (8, 8)], generator))
    with torch.autocast("cpu", torch.bfloat16):
        assert effops.einsum("ij,jk->ik", a, b).dtype == torch.einsum("ij,jk->ik", a, b).dtype == torch.bfloat16
    assert effops.einsum("ij,jk->ik", a, b.double()).dtype == torch.float64


def test_export(generator):
    class Form(torch.nn.Module):
        def forward(self, x, y):
            return effops.einsum("bi,bj->ij", x, y, budget="1 MiB")

    x, y = (one.detach() for one in operands([(8, 3), (8, 4)], generator))
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(Form(), (x, y), dynamic_shapes=({0: rows}, {0: rows})).module()
    for count in (8, 5):
        torch.testing.assert_close(exported(x[:count], y[:count]), x[:count].mT @ y[:count])


def test_calls_are_planned_once(monkeypatch, generator):
    a, b = (one.detach() for one in operands([(5, 6), (6, 7)], generator))
    expected = effops.einsum("xy,yz->xz", a, b, budget=BUDGET)
    monkeypatch.setattr("effops.ops.einsum.contraction.prepare", None)
    assert torch.equal(effops.einsum("xy,yz->xz", a, b), expected)


@pytest.mark.parametrize(
    "call",
    [("ij->ij", (3, 4)), ("ij->ji", (3, 4)), ("ij->i", (3, 1)), ("ij,j->ij", (3, 4), (1,)), ("...i->i...", (1, 4))],
    ids=lambda call: call[0],
)
def test_gradients_have_memory_of_their_own(call, generator):
    """As operators they raised, since the gradient from above came back."""
    equation, *shapes = call
    leaves = operands(shapes, generator)

    def total(*args):
        return effops.einsum(equation, *args).square().sum()

    expected = torch.autograd.grad(torch.einsum(equation, *leaves).square().sum(), leaves)
    plain = [leaf.detach() for leaf in leaves]
    for found in (
        torch.autograd.grad(total(*leaves), leaves),
        torch.func.grad(total, tuple(range(len(leaves))))(*plain),
    ):
        torch.testing.assert_close(found, expected)
    out = effops.einsum(equation, *leaves)
    for dout in (
        torch.ones(out.shape),
        torch.ones(out.shape).mT.contiguous().mT if out.ndim == 2 else torch.ones(out.shape),
    ):
        for gradient in torch.autograd.grad(out, leaves, dout, retain_graph=True):
            assert gradient.untyped_storage().data_ptr() != dout.untyped_storage().data_ptr()


@pytest.mark.parametrize("how", ["contiguous", "expanded", "permuted"])
def test_budgets_hold_for_any_gradient_from_above(how, generator):
    """Products copy an expanded one."""
    for equation, shapes, budget in (
        ("ia,ib->ab", [(64, 1024)] * 2, 2**19),
        ("ia,ib,ic->abc", [(16, 128)] * 3, 2**21),
    ):
        leaves = operands(shapes, generator)
        out = effops.einsum(equation, *leaves, budget=budget)
        dout = torch.randn(out.shape, generator=generator)
        if how == "expanded":
            dout = torch.ones(()).expand(out.shape)
        elif how == "permuted":
            dout = dout.permute(*reversed(range(out.ndim)))
        pulled_back = lambda *leaves: torch.autograd.grad(out, leaves, dout, retain_graph=True)  # noqa: B023, E731
        assert memory(Pass(pulled_back, tuple(leaves))).temporary_bytes <= budget
        assert worst_error_ratio(gradient_bounds(op.prepare(equation, *leaves), dout), pulled_back(*leaves)) <= 1


@pytest.mark.parametrize("sizes", [(5, 6, 4), (1, 6, 4), (5, 6, 1), (5, 1, 4)], ids=str)
@pytest.mark.parametrize("equation", ["bij,bjk->bik", "ij,jk->ki", "bij,jk->kbi", "bhij,ijk->bhik", "abij,bjk->kia"])
def test_a_product_lies_in_memory_as_that_of_torch(equation, sizes, generator):
    """So nothing copies it. On fake tensors, as an operator, it has the same strides."""
    known = dict(zip("ijk", sizes), a=3, b=2, h=3)
    a, b = ([known[letter] for letter in term] for term in equation.split("->")[0].split(","))
    args = [one.detach() for one in operands([a, b], generator)]
    expected = torch.einsum(equation, *args)
    with FakeTensorMode() as mode:
        fake = effops.einsum(equation, *map(mode.from_tensor, args))
    for budget in (BUDGET, 64):
        found = effops.einsum(equation, *args, budget=budget)
        assert all(
            one == other
            for one, other, size in zip(found.stride(), fake.stride(), found.shape, strict=True)
            if size > 1
        )
        assert 1 in sizes or found.stride() == expected.stride()  # PyTorch moves axes of size 1
        found.add_(1)  # it is nobody's view
    temporaries = [
        memory(Pass(lambda *args: form(equation, *args), args)).temporary_bytes  # noqa: B023
        for form in (effops.einsum, torch.einsum)
    ]
    assert temporaries[0] <= temporaries[1]


BILINEAR = "bi,ijk,bj->bk", (512, 32), (32, 32, 32), (512, 32)


def test_intermediates_are_kept_where_both_passes_keep_the_budget(generator):
    equation, *shapes = BILINEAR
    leaves = operands(shapes, generator)
    dout = torch.randn(512, 32, generator=generator)
    for budget, kept_bytes in (("64 MiB", 512 * 32 * 32 * 4), ("4 MiB", 0)):
        run = lambda *leaves: effops.einsum(equation, *leaves, budget=budget)  # noqa: B023, E731
        found = memory(Pass(run, leaves, backward=True))
        report = effops.explain("einsum", equation, *leaves, budget=budget).variants["chunked"]
        assert found.saved_bytes == report.saved_bytes == kept_bytes
        assert found.temporary_bytes + found.saved_bytes <= parse_bytes(budget)
        gradients = torch.autograd.grad(run(*leaves), leaves, dout)
        assert worst_error_ratio(gradient_bounds(op.prepare(equation, *leaves), dout), gradients) <= 1
    only = [leaves[0], *(leaf.detach() for leaf in leaves[1:])]
    all_of_them, alone = (
        torch.autograd.grad(effops.einsum(equation, *given), given[:1], dout) for given in (leaves, only)
    )
    assert torch.equal(*all_of_them, *alone)


def test_predictions_of_training_know_what_is_kept(generator):
    """A recorder sees what autograd does."""
    equation, *shapes = BILINEAR
    leaves = operands(shapes, generator)
    call = op.prepare(equation, *leaves)
    one = call.described().of_backward((True,) * 3)
    expected_bytes = replace(one, upstream=one.upstream.expanded).taken_bytes_of_graph(find(call.described(), 2**26))
    with effops.budget("64 MiB") as report:
        effops.einsum(equation, *leaves).sum().backward()
    assert report.peak_bytes == expected_bytes + 2 * 4  # and the sum, and its gradient


@pytest.fixture
def keeps_all(monkeypatch):
    monkeypatch.setattr("effops.ops.einsum.paths.WORTH_KEEPING_SECONDS", 0)
    keeps_intermediates.cache_clear()
    _known.cache_clear()
    yield
    keeps_intermediates.cache_clear()
    _known.cache_clear()


@pytest.mark.parametrize("how", ["contiguous", "expanded", "permuted", "moved"])
def test_what_is_kept_keeps_the_budget_for_any_gradient_from_above(how, generator, keeps_all):
    leaves = operands([(4, 4, 64, 16), (4, 4, 16, 16), (4, 4, 16, 64)], generator)
    equation = "bhqk,bhkc,bhcd->bhqd"
    for budget in (2**16, 2**18, 2**19, 2**20):
        out = effops.einsum(equation, *leaves, budget=budget)
        dout = torch.randn(out.shape, generator=generator)
        if how == "expanded":
            dout = torch.ones(()).expand(out.shape)
        elif how == "permuted":
            dout = dout.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        elif how == "moved":
            dout = dout.transpose(1, 2).contiguous().transpose(1, 2)

        def pulled_back(*leaves):
            out = effops.einsum(equation, *leaves, budget=budget)  # noqa: B023
            return out, torch.autograd.grad(out, leaves, dout)  # noqa: B023

        assert memory(Pass(pulled_back, tuple(leaves))).temporary_bytes <= budget


def test_kept_gradients_are_laid_out_like_operands(generator, keeps_all):
    """Autograd would copy others when it adds them up."""
    leaves = operands([(16, 24), (20, 24, 12), (16, 20)], generator)
    out = effops.einsum("bi,jik,bj->bk", *leaves)
    assert type(out.grad_fn).__name__ == "NativeBackward"
    gradients = torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=generator))
    assert [one.stride() for one in gradients] == [leaf.stride() for leaf in leaves]


@pytest.mark.parametrize("context", ["checkpoint", "hooks", "anomaly"])
def test_the_search_is_hidden_from_autograd_of_the_user(context, generator, keeps_all):
    leaves = operands([(32, 16), (16, 12, 8), (32, 12)], generator)
    run = lambda *leaves: effops.einsum("bi,ijk,bj->bk", *leaves)  # noqa: E731
    expected = torch.autograd.grad(torch.einsum("bi,ijk,bj->bk", *leaves).sum(), leaves)
    if context == "checkpoint":
        out = checkpoint(run, *leaves, use_reentrant=False)
    elif context == "hooks":
        packed = []
        with saved_tensors_hooks(lambda one: packed.append(type(one)) or one.numpy(), torch.from_numpy):
            out = run(*leaves)
        assert set(packed) <= {torch.Tensor, torch.nn.Parameter}
    else:
        with torch.autograd.set_detect_anomaly(True):
            out = run(*leaves)
    for one, other in zip(torch.autograd.grad(out.sum(), leaves), expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_explanations_where_some_operands_require_gradients(generator):
    equation, *shapes = BILINEAR
    x, bilinear, y = operands(shapes, generator)
    args = x.detach(), bilinear, y.detach()
    for budget in ("3 MiB", "5 MiB", "64 MiB"):
        run = lambda *args: effops.einsum(equation, *args, budget=budget)  # noqa: B023, E731
        report = effops.explain("einsum", equation, *args, budget=budget).variants["chunked"]
        assert memory(Pass(run, args, backward=True)).saved_bytes == report.saved_bytes


def test_compiled_whole_and_exported(generator):
    a, b = (one.detach() for one in operands([(4, 6), (6, 5)], generator))
    whole = torch.compile(lambda a, b: effops.einsum("ij,jk->ik", a, b).sin(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(a, b), (a @ b).sin())
    leaves = [one.requires_grad_() for one in (a, b)]
    torch.testing.assert_close(whole(*leaves), (a @ b).sin())

    class Form(torch.nn.Module):
        def forward(self, a, b):
            return effops.einsum("ij,jk->ik", a, b)

    exported = torch.export.export(Form(), (a.detach(), b.detach()), strict=True).module()
    torch.testing.assert_close(exported(a.detach(), b.detach()), a @ b)


def test_kept_intermediates_have_all_derivatives(generator, keeps_all):
    leaves = [leaf.detach().double().requires_grad_() for leaf in operands([(3, 4), (4, 5, 2), (3, 5)], generator)]
    run = lambda *leaves: effops.einsum("bi,ijk,bj->bk", *leaves)  # noqa: E731
    assert type(run(*leaves).grad_fn).__name__ == "NativeBackward"
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)
    out = run(*leaves)
    once, again = (torch.autograd.grad(out.sum(), leaves, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, again))
    with torch.autograd.graph.save_on_cpu():
        moved = run(*leaves)
    assert all(map(torch.equal, once, torch.autograd.grad(moved.sum(), leaves)))
    with torch.no_grad():
        leaves[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_budgets_count_what_a_later_result_hides():
    """The peak, less the result, was within the budget where an intermediate is gone before the result is there."""
    args = torch.randn(300, 2), torch.randn(2, 300), torch.randn(300, 300, 4), torch.randn(22_500)
    with effops.budget("64 KiB") as report:
        out = effops.einsum("ik,kj,ijm,r->mr", *args, budget="64 KiB")
    assert out.shape == (4, 22_500)
    assert report.peak_bytes <= 2**16


def test_operands_are_converted_slice_by_slice():
    a, b = torch.randn(64, 1024), torch.randn(64, 8192).bfloat16()
    run = lambda *args: effops.einsum("ia,ib->a", *args, budget=2**16)  # noqa: E731
    assert memory(Pass(run, (a, b))).temporary_bytes <= 2**16
    torch.testing.assert_close(run(a, b), torch.einsum("ia,ib->a", a, b.float()), rtol=1e-4, atol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert memory(Pass(run, (a, b.float()))).temporary_bytes <= 2**16


def test_explanations_of_what_cannot_run():
    huge = [torch.empty(1000, 1000, device="meta")] * 7
    equation = "ab,bc,cd,de,ef,fg,gh->ah"
    assert effops.explain("einsum", equation, *huge).variants["chunked"].temporary_bytes <= 2**26
    report = effops.explain("einsum", "ab,bc->ac", torch.ones(30, 30), torch.ones(30, 30), budget=0, variant="naive")
    assert report.chosen == "naive"


def test_what_is_recorded(generator):
    a, b = (one.detach() for one in operands([(3, 4), (4, 5)], generator))
    with effops.record() as calls:
        effops.einsum("ij,jk", [a, b])
    assert calls[0].shapes == {"operand 0": (3, 4), "operand 1": (4, 5)}
    assert "operand 1 (4, 5)" in str(calls)


def test_a_mode_of_the_user_does_not_see_the_search(generator):
    class Seen(TorchFunctionMode):
        def __init__(self):
            self.shapes = set()

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.shapes |= {tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)}
            return func(*args, **(kwargs or {}))

    leaves = operands([(61, 7), (7, 5), (5, 59)], generator)
    with Seen() as seen:
        effops.einsum("ij,jk,kl->il", *leaves, budget="1 KiB")
    assert (61, 7) in seen.shapes
    assert len(seen.shapes) < 30  # those of slices would be more


def test_operands_that_are_not_dense():
    with pytest.raises(TypeError, match=r"must be real floating point; got torch\.qint8"):
        effops.einsum("ij->i", torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8))
    with pytest.raises(TypeError, match="einsum: `operand 0` must be dense"):
        effops.einsum("ij->i", torch.ones(3, 4).to_sparse())
    with pytest.raises(NotImplementedError, match="at most 52 labels"):
        effops.einsum("...,...->...", torch.ones([1] * 60), torch.ones([1] * 60))
    with pytest.raises(ValueError, match=r"`budget`: .* got \[1\]"):
        effops.einsum("ij->i", torch.ones(3, 4), budget=[1])
    with pytest.raises(TypeError, match=r"^einsum: it takes .*got `operands`"):
        effops.einsum(equation="ij->i", operands=[torch.ones(3, 4)])


def test_explain_tells_what_is_cut() -> None:
    operands = torch.ones(500, 40), torch.ones(500, 30), torch.ones(40, 30, 20)
    assert effops.explain("einsum", "bi,bj,ijk->bk", *operands).plan == ""
    report = effops.explain("einsum", "bi,bj,ijk->bk", *operands, budget="100 KiB")
    cuts = dict(re.findall(r"\d+ of the (\d+) of ([a-z])", report.plan))
    assert cuts
    assert cuts.items() <= {"500": "b", "40": "i", "30": "j", "20": "k"}.items()
    assert report.plan in str(report)


def test_without_predictions_no_budget_is_kept(monkeypatch):
    """The call still runs, by the variant that neither predicts nor compiles, and says so."""
    monkeypatch.setattr(contraction, "UNPREDICTED", "predictions of memory need torch._absent, which torch 9.9 lacks")
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with effops.record() as record, pytest.warns(UserWarning, match="not kept: .* lacks; .*is taken now") as told:
        effops.einsum("ij,jk->ik", a, b)
    assert told[0].filename == __file__
    assert [one.variant for one in record] == ["einsum"]
    with warnings.catch_warnings(), effops.use_variant("naive"):
        warnings.simplefilter("error")
        effops.einsum("ij,jk->ik", a, b)
        effops.einsum("ij,jk->ik", a, b, variant="einsum")
    with pytest.raises(NotImplementedError, match="cannot keep a budget: predictions of memory need"):
        effops.einsum("ij,jk->ik", a, b, variant="chunked")
