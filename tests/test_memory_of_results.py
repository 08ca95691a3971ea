"""Every result has memory of its own, in which no two elements share a place: a caller may change it in place.

PyTorch's own functions return such results. Only `mode`, and the attributes of a distribution that hold parameters,
are views of these, as in `torch.distributions`.
"""

import itertools

import pytest
import torch
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence

import effops
from effops.dispatch.op import find_op
from effops.distributions import HypersphericalUniform, Mixture, PowerSpherical, VonMisesFisher
from effops.ops.densities.density import KeptNormaliser
from effops.reference import reference_of, tried_ops

from .support.layouts import has_own_memory

VARIANTS = [
    pytest.param(op, variant, id=f"{op.name}-{variant}")
    for op in tried_ops().values()
    for variant in op.variants
    if variant not in ("compile", "flex")  # the former is in the matrix, and the latter has no broadcast axes
]
CASES = ("founding", "single", "one point", "one component", "columns only", "no component", "no key", "no dimension")


def all_expanded(tensor, core):
    """One value or row, expanded: stride 0 along every batch axis."""
    batch = (slice(0, 1),) * (tensor.ndim - core)
    return tensor[batch].expand(tensor.shape) if tensor.numel() else tensor


def subsets(args, variant):
    """Which arguments are expanded: each subset, or all where a call takes seconds."""
    return [(True,) * len(args)] if variant == "triton" else itertools.product((False, True), repeat=len(args))


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_ops(op, variant, device, generator):
    for case in [case for case in CASES if case in reference_of(op).cases]:
        sampled = reference_of(op).sample_case(case, device=device, generator=generator)
        for chosen in subsets(sampled, variant):
            expanded = (all_expanded(arg, core) for arg, core in zip(sampled, op.core_dims.values()))
            args = [wide if is_chosen else arg for wide, arg, is_chosen in zip(expanded, sampled, chosen)]
            if op.variants[variant].obstacle(op.prepare(*args)):
                continue
            for needs_grad in (False, True):
                given = [arg.detach().requires_grad_(needs_grad) for arg in args]
                out = op(*given, variant=variant)
                assert has_own_memory(out, given), (case, chosen, needs_grad, out.stride())


@pytest.mark.parametrize("variant", ["sdpa", "chunked", "einsum", "torchscript", "naive"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 0, 5), (0, 3, 5), (3, 4, 0), (1, 1, 1)], ids=str)
def test_attention(variant, shape, device, generator):
    """With masks, dropout of all weights, and heads that share keys, expanded or not."""
    op, (queries, keys, depth) = find_op(effops.attention), shape
    masks = None, torch.zeros(queries, keys, dtype=torch.bool), torch.tensor(True), torch.zeros(1, keys)
    options = [
        {"attn_mask": None if mask is None else mask.to(device), "dropout_p": p, "enable_gqa": gqa}
        for mask, p, gqa in itertools.product(masks, (0.0, 1.0), (False, True))
    ]
    for settings, is_expanded in itertools.product([*options, {"is_causal": True}], (False, True)):
        heads = 2 if settings.get("enable_gqa") else 4
        shapes = (2, 4, queries, depth), (2, heads, keys, depth), (2, heads, keys, depth)
        args = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        args = [all_expanded(arg, 1) for arg in args] if is_expanded else args
        if op.variants[variant].obstacle(op.prepare(*args, **settings)):
            continue
        out = effops.attention(*args, **settings, variant=variant)
        assert has_own_memory(out, [*args, *settings.values()]), (settings, is_expanded)


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(shape), dim=-1)


def distributions():
    """Of each family: parameters of every shape, expanded by the caller, by broadcasting, or by `expand`."""
    torch.manual_seed(0)
    for family in (PowerSpherical, VonMisesFisher):
        yield family(unit(4, 3), torch.rand(4) + 1)
        yield family(unit(4, 3), 2.0)
        yield family(unit(3), torch.rand(4) + 1)
        yield family(unit(3), 2.0).expand([4])
        yield family(unit(4, 3), torch.rand(4)).expand([5, 4])
        yield family(unit(3).expand(4, 3), torch.ones(()).expand(4))
        yield family(unit(1, 2), torch.ones(1)).expand([4])
        yield family(unit(2), torch.ones(1))
    yield PowerSpherical(unit(3), 2.0).expand([4]).marginal_t
    yield PowerSpherical(unit(3), 2.0).marginal_t.expand([4])
    yield HypersphericalUniform(3)
    yield HypersphericalUniform(3).expand([4])
    for components in (
        PowerSpherical(unit(5, 3), 2.0),
        VonMisesFisher(unit(5, 3), 2.0),
        Independent(Normal(torch.randn(5, 3), torch.ones(5, 3)), 1),
    ):
        for mixture in (Mixture(Categorical(torch.ones(batch)), components) for batch in ((5,), (4, 5))):
            yield mixture
            yield mixture.expand([4])
            yield mixture.expand([2, 4])


def tensors_of(value):
    """The tensors that a distribution holds, in whatever it is made of."""
    if isinstance(value, torch.Tensor):
        return [value]
    held = tuple(vars(value).values()) if isinstance(value, (Distribution, KeptNormaliser)) else value
    return [tensor for one in held for tensor in tensors_of(one)] if isinstance(held, tuple) else []


def results_of(p):
    """Functions that compute each result of a distribution."""
    draw = p.sample()
    alone = draw[(0,) * len(p.batch_shape)]
    for value in (draw, alone, draw.expand(6, *draw.shape), p.sample((6,))):
        yield lambda value=value: (p.log_prob(value), [value])
    others = [HypersphericalUniform(3), HypersphericalUniform(3).expand([4]), VonMisesFisher(unit(3), 2.0), p]
    for q in (*others, others[2].expand([4])) if p.event_shape == (3,) else ():
        yield lambda q=q: (kl_divergence(p, q), tensors_of(q))
        yield lambda q=q: (kl_divergence(q, p), tensors_of(q))
    for name in ("mean", "variance", "stddev", "covariance"):
        if hasattr(type(p), name):
            yield lambda name=name: (getattr(p, name), [])
    for shape in ((), (6,)):
        yield lambda shape=shape: (p.sample(shape), [])
        yield lambda shape=shape: (p.rsample(shape), [])
    yield lambda: (p.entropy(), [])


def test_distributions():
    """Log densities, entropies and divergences of an expanded distribution were views of stride 0."""
    count = 0
    for p in distributions():
        for compute in results_of(p):
            try:
                result, given = compute()
            except NotImplementedError:
                continue
            assert has_own_memory(result, [*given, *tensors_of(p)]), (p, result.shape, result.stride())
            count += 1
    assert count > 400


def test_a_changed_result_changes_no_other():
    """A small call keeps a normaliser for the next one, which must not see what a caller does to a result."""
    for p in (family(unit(3), 2.0).expand([4]) for family in (PowerSpherical, VonMisesFisher)):
        x = p.sample()[0]
        result = p.log_prob(x)
        before = result.clone()
        result[0] = 5
        assert torch.equal(result[1:], before[1:])
        result.add_(1)
        assert torch.equal(p.log_prob(x), before)


def test_mode_is_a_view_as_in_pytorch():
    torch.manual_seed(0)
    for p in (Normal(torch.zeros(3), 1.0).expand([4, 3]), PowerSpherical(unit(3), 2.0).expand([4])):
        assert not has_own_memory(p.mode, [p.loc])


@pytest.mark.parametrize("attention", ["fused", "naive", "log_sparse", "additive"])
@pytest.mark.parametrize("heads", [1, 2])
def test_layers(attention, heads, device):
    """The result, and the weights where the layer has them."""
    torch.manual_seed(0)
    for batch_first, shape in itertools.product((False, True), ((3, 6), (1, 6), (2, 3, 6), (1, 1, 6))):
        layer = effops.nn.MultiheadAttention(6, heads, attention=attention, batch_first=batch_first).to(device)
        x = torch.randn(shape, device=device)
        for query in (x, all_expanded(x, 1)):
            for average in (True, False):
                results = layer(query, query, query, average_attn_weights=average)
                for result in (one for one in results if one is not None):
                    assert has_own_memory(result, [query, *layer.parameters()]), (shape, batch_first)


def test_attention_of_transformers():
    pytest.importorskip("transformers")
    from effops.transformers import _attend

    module = torch.nn.Module().eval()
    for is_expanded, shape in itertools.product((False, True), ((2, 4, 3, 5), (1, 1, 1, 5))):
        query, key, value = (torch.randn(shape) for _ in range(3))
        args = [all_expanded(arg, 1) for arg in (query, key, value)] if is_expanded else [query, key, value]
        result, _ = _attend(module, *args, None)
        assert has_own_memory(result, args)


def test_patched_classes():
    """The op itself: the batch shape of the package's class broadcasts with the value's."""

    class Own:
        def __init__(self, loc, scale):
            self.loc, self.scale = loc, scale

        def log_prob(self, value):
            raise AssertionError

    torch.manual_seed(0)
    with effops.patch_power_spherical(Own):
        p = Own(unit(3).expand(4, 3), torch.ones(()).expand(4))
        x = unit(3)
        assert has_own_memory(p.log_prob(x), [p.loc, p.scale, x])
