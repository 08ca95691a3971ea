"""Gradients back from the layout of kernels, on random broadcast shapes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effops.blocks.plan import make_plan
from effops.ops.densities.layout import Layout

from ..support.shapes import broadcastable


@settings(deadline=None, max_examples=200)
@given(broadcastable(), st.booleans())
def test_gradient_of_pairs_is_summed_to_its_operand(shapes, kernel_sums):
    x_shape, loc_shape, scale_shape = shapes
    plan = make_plan(x_shape, loc_shape, scale_shape)
    layout, scale = Layout.of_pairs(plan), torch.empty(scale_shape, dtype=torch.float64)
    of_pairs = torch.randn(plan.shape, dtype=torch.float64)
    expected = of_pairs.sum_to_size(scale_shape)
    gradient = layout.matrix(of_pairs, (0, 1, 2))
    if kernel_sums:
        gradient = gradient.sum_to_size(layout.shape_of_sums(scale))
    torch.testing.assert_close(layout.restore(gradient, scale, (0, 1, 2)), expected)


@settings(deadline=None, max_examples=100)
@given(broadcastable())
def test_gradient_of_rows_is_that_of_points(shapes):
    plan = make_plan(*shapes)
    layout, x = Layout.of_pairs(plan), torch.randn(*shapes[0], 3)
    assert torch.equal(layout.restore(layout.matrix(x, (0, 1), trailing=1), x, (0, 1), trailing=1), x)
