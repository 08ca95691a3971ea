"""What shapes broadcast to: as PyTorch says, without what PyTorch imports for it."""

import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effops.numerics.shapes import broadcast_shapes

SHAPES = st.lists(st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=4).map(tuple), max_size=4)


@settings(deadline=None)
@given(SHAPES)
def test_broadcast_shapes_are_those_of_pytorch(shapes):
    try:
        expected = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="do not broadcast"):
            broadcast_shapes(*shapes)
    else:
        assert broadcast_shapes(*shapes) == expected
        assert isinstance(broadcast_shapes(*shapes), torch.Size)


def test_a_first_call_imports_no_symbolic_mathematics():
    code = """
        import sys, torch, effops
        x, ones = torch.randn(2, 3), torch.ones(2)
        effops.power_spherical_log_prob(x, ones, x)
        effops.normal_mixture_log_prob(ones, x, ones[:, None].expand(2, 3), x)
        effops.attention(x, x, x)
        assert "sympy" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
