"""Predictions in the modes that a caller may be in."""

import copy
import pickle

import pytest
import torch

import effops
from effops.reference import reference_of, tried_ops


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in tried_ops().values()])
def test_inference_mode_is_predicted_as_no_grad(op):
    args = reference_of(op).sample_case(next(iter(reference_of(op).cases)), dtype=torch.float32)
    with torch.no_grad():
        expected = effops.explain(op.function, *args)
    with torch.inference_mode():
        found = effops.explain(op.function, *args)
    assert found == expected


def test_an_explanation_can_be_copied():
    x = torch.randn(3, 4)
    found = effops.explain(effops.attention, x, x, x)
    assert copy.deepcopy(found) == found
    assert pickle.loads(pickle.dumps(found)) == found
