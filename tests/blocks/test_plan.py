"""The plan: roles, views there and back, on random broadcast shapes."""

import pytest
import torch
from hypothesis import given, settings

from effops.blocks.plan import make_plan

from ..support.shapes import broadcastable


@settings(deadline=None, max_examples=200)
@given(broadcastable())
def test_matrix_product_over_the_plan_is_the_broadcast_expression(shapes):
    x_shape, loc_shape, scale_shape = shapes
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*x_shape, 3, generator=generator, dtype=torch.float64)
    loc = torch.randn(*loc_shape, 3, generator=generator, dtype=torch.float64)
    scale = torch.randn(scale_shape, generator=generator, dtype=torch.float64)
    plan = make_plan(x_shape, loc_shape, scale_shape)
    assert plan.shape == torch.broadcast_shapes(*shapes)
    assert sorted(plan.order) == list(range(len(plan.shape)))
    batch, rows, columns = (plan.numel(axes) for axes in (plan.batch, plan.rows, plan.columns))
    left = plan.view(x, plan.batch + plan.rows, trailing=1).reshape(batch, rows, 3)
    right = plan.view(loc, plan.batch + plan.columns, trailing=1).reshape(batch, columns, 3)
    pairs = (left @ right.mT).view(plan.sizes(plan.order)) * plan.view(scale, plan.order)
    out = plan.empty(x, x.dtype)
    ordered = plan.view(out, plan.order)
    assert ordered.is_contiguous()
    ordered.copy_(pairs)
    torch.testing.assert_close(out, (x * loc).sum(-1) * scale)


def test_roles_of_the_founding_shape():
    plan = make_plan((128, 1, 512), (128, 512), (128, 512))
    assert (plan.shape, plan.batch, plan.rows, plan.columns) == ((128, 128, 512), (2,), (0,), (1,))


def test_views_copy_nothing():
    x = torch.randn(5, 1, 7, 3)
    plan = make_plan((5, 1, 7), (5, 7))
    assert plan.view(x, plan.batch + plan.rows, trailing=1).data_ptr() == x.data_ptr()


def test_shapes_that_do_not_broadcast():
    with pytest.raises(RuntimeError):
        make_plan((3,), (2,))
