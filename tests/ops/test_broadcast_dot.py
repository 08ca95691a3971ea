"""What is peculiar to broadcast_dot: a single coordinate, whole products, huge pages."""

import mmap

import pytest
import torch

import effops
from effops.measure import Pass, memory
from effops.numerics import pages
from effops.ops.broadcast_dot import op
from effops.reference import gradient_error_ratio, reference_of

from ..support.calls import on_this_python, without_cpp


@pytest.mark.parametrize("variant", [v for v in without_cpp(on_this_python(op.variants)) if v != "compile"])
def test_a_sum_that_would_overflow_is_not_taken(variant, device):
    a, b = torch.full((1, 2), 3e38, device=device), torch.full((1, 1), 1e-10, device=device)
    torch.testing.assert_close(op(a, b, variant=variant), (a * b).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("a", "b"), [((1_000_000, 4), (1,)), ((4, 40_000), (3, 1, 1)), ((1_000_000, 1), (4,))], ids=str
)
def test_memory_of_a_single_coordinate(a, b, dtype, device, generator):
    args = reference_of(op).sample(a, b, dtype=dtype, device=device, generator=generator)
    measured = memory(Pass(lambda *args: op(*args, variant="chunked"), args))
    predicted = effops.explain(op.name, *args).variants["chunked"]
    assert measured.temporary_bytes <= 4 * 2**20
    assert abs(predicted.temporary_bytes - measured.temporary_bytes) <= max(2**16, 0.1 * measured.temporary_bytes)


LAYOUTS = {
    "positions as batch": lambda a, b: (a, b),
    "rows of longer ones": lambda a, b: (torch.cat((a, a), -1)[..., : a.shape[-1]], b),
    "the same rows everywhere": lambda a, b: (a[:, :, :1].expand(a.shape), b),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_product_where_no_operand_needs_a_copy(layout, generator):
    a, b = LAYOUTS[layout](
        torch.randn(64, 1, 40, 16, generator=generator), torch.randn(64, 40, 16, generator=generator)
    )
    leaves = [operand.detach().requires_grad_() for operand in (a, b)]
    assert memory(Pass(lambda *args: op(*args, variant="chunked"), (a, b))).temporary_bytes <= 4  # a scale of 1
    out = op(*leaves, variant="chunked")
    dout = torch.empty_like(out).copy_(torch.randn(out.shape, generator=generator))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        gradients = torch.autograd.grad(out, leaves, dout)
    products = [event for event in profiler.events() if event.name in ("aten::bmm", "aten::baddbmm_")]
    assert len(products) == 2
    assert gradient_error_ratio(op, (a, b), dout, gradients) <= 1


def test_an_empty_batch():
    a, b = torch.ones(0, 3, 1, 6, requires_grad=True), torch.ones(0, 1, 4, 6, requires_grad=True)
    out = op(a, b, variant="chunked")
    assert out.shape == (0, 3, 4)
    assert [one.shape for one in torch.autograd.grad(out.sum(), (a, b))] == [a.shape, b.shape]


@pytest.mark.skipif(pages._madvise is None, reason="the system has no such advice")
def test_large_results_get_huge_pages(monkeypatch, device):
    if device != "cpu":
        pytest.skip("of CPUs alone")
    asked = []
    monkeypatch.setattr(pages, "_madvise", lambda *arguments: asked.append(arguments))
    rows = torch.ones(2000, 4)
    small, large = op(rows[:200, None], rows[:200]), op(rows[:, None], rows)
    assert small.nbytes < pages.LEAST_BYTES < large.nbytes
    ((start, length, advice),) = asked
    assert large.data_ptr() <= start
    assert start + length == large.data_ptr() + large.nbytes
    assert (start % mmap.PAGESIZE, advice) == (0, mmap.MADV_HUGEPAGE)
