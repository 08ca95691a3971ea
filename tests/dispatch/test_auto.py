"""The name "auto" of the automatic choice, wherever a variant is named."""

import torch

import effops
from effops.dispatch.op import find_op


def test_auto_is_the_automatic_choice():
    args = torch.randn(5, 1, 4), torch.randn(3, 4)
    chosen = effops.explain(effops.broadcast_dot, *args).chosen
    with effops.use_variant("naive"):
        assert effops.explain(effops.broadcast_dot, *args).chosen == "naive"
        assert effops.explain(effops.broadcast_dot, *args, variant="auto").chosen == chosen
        with effops.use_variant("auto"):
            assert effops.explain(effops.broadcast_dot, *args).chosen == chosen
    assert torch.equal(effops.broadcast_dot(*args, variant="auto"), effops.broadcast_dot(*args, variant=chosen))
    assert "auto" not in find_op(effops.broadcast_dot).variants
