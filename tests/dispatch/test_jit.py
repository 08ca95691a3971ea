"""Compiled variants where the caller runs a backward pass more than once."""

import pytest
import torch
import torch._functorch.config as functorch_config

import effops


def density(normal):
    loc, x = (torch.nn.functional.normalize(normal(*shape), dim=-1) for shape in ((5, 3), (7, 1, 3)))
    return effops.power_spherical_log_prob, (loc, normal(5).exp(), x)


def scores(normal):
    return effops.attention_scores, (normal(2, 5, 3), normal(2, 7, 3))


@pytest.mark.compiled
@pytest.mark.parametrize("case", [density, scores])
@pytest.mark.parametrize("donated", [True, False])
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
