"""Compiled variants: backward passes that run more than once, and what is a constant of a compiled form."""

import pytest
import torch
import torch._functorch.config as functorch_config

import effops
from effops.dispatch import jit


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


def test_numbers_are_constants(monkeypatch):
    """They were inputs, so that masks that come of them were saved for backward: 1.2 times as long."""
    tensors = []

    def as_it_is(graph, inputs):
        tensors.extend(one for one in inputs if isinstance(one, torch.Tensor))
        return graph

    monkeypatch.setattr(jit, "_inductor", as_it_is)
    clamped = jit.compile_by_signature(lambda x, bound: x.clamp(max=bound))
    x = torch.arange(3.0)
    for bound in (0.5, 1.5):
        assert torch.equal(clamped(x, bound), x.clamp(max=bound))
    assert [one.shape for one in tensors] == [x.shape] * 2
