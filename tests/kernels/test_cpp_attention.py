"""Attention by the C++ library: blocks that are not whole, masks, shared keys, and threads."""

import itertools
import math

import pytest
import torch
from effops.kernels import library
from torch.nn.attention.bias import causal_lower_right

import effops
from effops.reference import error_ratio, gradient_error_ratio, tried_ops

pytestmark = pytest.mark.skipif(library.obstacle() != "", reason=library.obstacle())
NAMES = "attention_scores", "attention_weights", "attention"
# Batch axes of queries and of keys, and L, S, D, V: one owner of each entry of keys, or two sweeps; keys and values of
# several parts, blocks that are not whole, and fewer keys than queries. Where scores of a few queries fit a block, its
# owner computes gradients of whole rows.
SIZES = {
    "owners": ((3, 4), (3, 4), 40, 70, 5, 5),
    "shared keys": ((2, 2, 3), (2, 2, 1), 30, 140, 33, 8),
    "sweeps": ((2,), (2,), 300, 150, 16, 20),
    "wide": ((2,), (), 17, 140, 200, 150),
    "one axis more": ((2, 1, 1, 2, 1, 1), (1, 3, 1, 2, 1, 2), 9, 9, 4, 3),
    "no batch": ((), (), 5, 300, 64, 64),
    "whole rows, shared keys": ((4, 2, 2), (4, 2, 1), 45, 330, 32, 64),
    "whole rows, fewer keys": ((3, 3), (3, 3), 70, 17, 128, 12),
    "too many keys for whole rows": ((8,), (8,), 10, 1300, 8, 5),
}
MASKS = {
    "none": lambda L, S: {},
    "causal": lambda L, S: {"is_causal": True},
    "lower right": lambda L, S: {"attn_mask": causal_lower_right(L, S)} if L <= S else {"is_causal": True},
    "booleans": lambda L, S: {"attn_mask": torch.rand(L, S, generator=seeded(1)) > 0.4},
    "of keys": lambda L, S: {"attn_mask": torch.arange(S) < max(1, S - 3)},
    "of queries": lambda L, S: {"attn_mask": torch.arange(L).unsqueeze(-1) != 2},
    "numbers": lambda L, S: {"attn_mask": torch.randn(L, S, generator=seeded(2))},
    "strided numbers": lambda L, S: {"attn_mask": torch.randn(S, L, generator=seeded(2)).mT},
}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def operands(name, queried, keyed, L, S, D, V):
    generator = seeded(0)
    query, key, value = (
        torch.randn(*batch, rows, width, generator=generator)
        for batch, rows, width in ((queried, L, D), (keyed, S, D), (keyed, S, V))
    )
    return [query, key, value] if name == "attention" else [query, key]


def with_gradients(name, args, **options):
    leaves = [one.clone().requires_grad_() for one in args]
    out = getattr(effops, name)(*leaves, variant="cpp", **options)
    dout = torch.randn(out.shape, generator=seeded(3)).to(out.dtype)
    return out.detach(), dout, torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients(name, sizes, mask):
    args, options = operands(name, *SIZES[sizes]), MASKS[mask](*SIZES[sizes][2:4])
    out, dout, gradients = with_gradients(name, args, **options)
    op = tried_ops()[name]
    assert error_ratio(op, args, out, **options) <= 1
    if isinstance(options.get("attn_mask"), torch.Tensor) and mask != "lower right":
        gradients = (*gradients, None)
    assert gradient_error_ratio(op, args, dout, gradients, **options) <= 1


@pytest.mark.parametrize("pairs", ["queries and keys", "queries", "keys", "neither"])
@pytest.mark.parametrize("varies", ["everywhere", "along the first axis", "with pairs alone"])
@pytest.mark.parametrize("sizes", ["owners", "sweeps", "shared keys"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_masks(name, sizes, varies, pairs):
    args = operands(name, *SIZES[sizes])
    batch, (L, S) = SIZES[sizes][0], SIZES[sizes][2:4]
    first = (batch[0], *(1 for _ in batch[1:]))
    axes = {"everywhere": batch, "along the first axis": first, "with pairs alone": ()}[varies]
    rows, columns = {"queries and keys": (L, S), "queries": (L, 1), "keys": (1, S), "neither": (1, 1)}[pairs]
    mask = torch.randn(*axes, rows, columns, generator=seeded(4))
    out, dout, gradients = with_gradients(name, [*args, mask])
    op = tried_ops()[name]
    assert error_ratio(op, [*args, mask], out) <= 1
    assert gradient_error_ratio(op, [*args, mask], dout, gradients) <= 1


@pytest.mark.parametrize("spread", [1.0, 8.0, 60.0])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["additive_attention_scores", "additive_attention"])
def test_additive_results_and_gradients(name, sizes, spread):
    """By quotients of four, by factors, or by an exponential of each pair and coordinate."""
    query, key, *value = operands("attention", *SIZES[sizes])[: 3 if name == "additive_attention" else 2]
    batch = torch.broadcast_shapes(*SIZES[sizes][:2])
    query, key = spread * query, spread * key
    for shape in ((query.shape[-1],), (*batch, 1, 1, query.shape[-1])):
        weight = torch.randn(shape, generator=seeded(7))
        args = [query, key, *value, weight]
        out, dout, gradients = with_gradients(name, args)
        op = tried_ops()[name]
        assert error_ratio(op, args, out) <= 1
        assert gradient_error_ratio(op, args, dout, gradients) <= 1


@pytest.mark.parametrize(
    ("sizes", "mask"),
    [
        *itertools.product(("owners", "sweeps", "shared keys"), ("booleans", "of queries", "numbers")),
        *((sizes, "lower right") for sizes in ("owners", "shared keys")),  # which have no fewer keys than queries
    ],
)
def test_additive_attention_under_a_mask(sizes, mask):
    args, options = operands("attention", *SIZES[sizes]), MASKS[mask](*SIZES[sizes][2:4])
    args.append(torch.randn(SIZES[sizes][4], generator=seeded(7)))
    if mask == "numbers":
        args.append(options.pop("attn_mask"))
    out, dout, gradients = with_gradients("additive_attention", args, **options)
    op = tried_ops()["additive_attention"]
    if mask in ("booleans", "of queries"):
        gradients = (*gradients, None)
    assert error_ratio(op, args, out, **options) <= 1
    assert gradient_error_ratio(op, args, dout, gradients, **options) <= 1


def test_values_at_the_ends_of_additive_scores():
    """tanh is 1 or -1 near infinity, and NaN stays in its own pairs."""
    query = torch.tensor([[0.0, 0.5], [math.inf, 1.0], [-200.0, 90.0], [math.nan, 0.0]])
    key = torch.tensor([[0.1, 0.2], [300.0, -math.inf], [-1e-30, 44.0]])
    for weight in (torch.tensor([1.5, -2.0]), torch.tensor([2.5e38, -2.5e38])):
        found = effops.additive_attention_scores(query, key, weight, variant="cpp")
        expected = effops.additive_attention_scores(query.double(), key.double(), weight.double(), variant="naive")
        torch.testing.assert_close(found, expected.float(), equal_nan=True, rtol=1e-6, atol=1e-6 * weight[0].item())


@pytest.mark.parametrize("length", [40, 300])
@pytest.mark.parametrize("name", ["attention", "additive_attention", "log_sparse_attention"])
def test_one_tensor_in_every_place(name, length):
    """Queries, keys, values and the gradient from above: what is kept of one must not serve as another."""
    one = torch.randn(2, length, 16, generator=seeded(8))
    weight = [torch.randn(16, generator=seeded(7))] if name == "additive_attention" else []
    found = []
    for variant, dtype in (("cpp", torch.float32), ("naive", torch.float64)):
        leaf = one.to(dtype).requires_grad_()
        out = getattr(effops, name)(leaf, leaf, leaf, *(own.to(dtype) for own in weight), variant=variant)
        found.append([out, *torch.autograd.grad(out, leaf, leaf.detach())])
    for own, expected in zip(*found):
        torch.testing.assert_close(own, expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["attention", "additive_attention"])
def test_operands_that_begin_at_one_address(name):
    """Views of one tensor with other strides, and a gradient from above that is a view of the query."""
    square = torch.randn(16, 16, generator=seeded(9))
    weight = [torch.randn(16, generator=seeded(7))] if name == "additive_attention" else []
    found = []
    for variant, dtype in (("cpp", torch.float32), ("naive", torch.float64)):
        own = square.to(dtype)
        leaves = [one.requires_grad_() for one in (own.clone(), *(extra.to(dtype) for extra in weight))]
        query, dout = leaves[0], leaves[0].detach()[:, :1].expand(16, 16)
        for value in (query.mT, query):
            out = getattr(effops, name)(query, query, value, *leaves[1:], variant=variant)
            found.append([out, *torch.autograd.grad(out, leaves, dout)])
    for one, expected in zip(found[:2], found[2:]):
        for own, right in zip(one, expected):
            torch.testing.assert_close(own, right.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keys", [3, 40, 300])
def test_an_infinite_score_leaves_no_weight(keys):
    query, key, value = torch.ones(1, 1), torch.ones(keys, 1), torch.ones(keys, 2)
    key[1] = math.inf
    weights, _, _ = with_gradients("attention_weights", [query, key])
    out, _, (_, _, dvalue) = with_gradients("attention", [query, key, value])
    assert all(one.isnan().all() for one in (weights, out, dvalue))


def drawn(sizes, p, seed=0):
    """The factors of weights of 1/2, which the values, rows of the identity, leave where they are."""
    (_, keyed, L, S, *_), batch = sizes, sizes[0]
    torch.manual_seed(seed)
    query, key = torch.zeros(*batch, L, 4), torch.zeros(*keyed, S, 4)
    return S * effops.attention(query, key, torch.eye(S), dropout_p=p, variant="cpp")


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_dropped_weights(p):
    """Each with the probability, by its own place and by the seed, and the others are scaled."""
    found = drawn(((3, 2), (3, 1), 200, 300), p)
    kept = found != 0
    assert torch.equal(found, drawn(((3, 2), (3, 1), 200, 300), p))
    if p < 1:
        torch.testing.assert_close(found[kept], torch.full_like(found[kept], 1 / (1 - p)))
        assert not torch.equal(found, drawn(((3, 2), (3, 1), 200, 300), p, seed=1))
    for axes in ((-1,), (-2,), (0, 1), (0, 1, 2), (0, 1, 3)):
        count = math.prod(found.shape[axis] for axis in axes)
        deviations = (kept.double().mean(axes) - (1 - p)).abs() / max(math.sqrt(p * (1 - p) / count), 1e-9)
        assert deviations.max() < 6
    rows = (kept.double() - (1 - p)).flatten(0, -2)
    correlations = (rows[1:] * rows[:-1]).mean(-1) / max(p * (1 - p), 1e-9) * math.sqrt(rows.shape[-1])
    assert correlations.abs().max() < 6


@pytest.mark.parametrize("sizes", ["owners", "sweeps", "shared keys", "wide"])
def test_backward_drops_the_same(sizes):
    """Results and gradients are those of the weights times the factors that were drawn."""
    queried, keyed, L, S, D, _ = SIZES[sizes]
    batch = torch.broadcast_shapes(queried, keyed)
    leaves = [one.requires_grad_() for one in operands("attention", *SIZES[sizes])]
    torch.manual_seed(5)
    factors = S * effops.attention(
        torch.zeros(*queried, L, D), torch.zeros(*keyed, S, D), torch.eye(S), dropout_p=0.3, variant="cpp"
    )
    torch.manual_seed(5)
    out = effops.attention(*leaves, dropout_p=0.3, variant="cpp")
    wide = [one.detach().double().requires_grad_() for one in leaves]
    expected = (effops.attention_weights(*wide[:2]) * factors.expand(*batch, L, S).double()) @ wide[2]
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    dout = torch.randn(out.shape, generator=seeded(6))
    for found, right in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, wide, dout.double())):
        torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sizes", ["owners", "sweeps", "shared keys", "whole rows, shared keys"])
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_threads_gives_the_same_bits(name, sizes):
    args, count, found = operands(name, *SIZES[sizes]), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            out, _, gradients = with_gradients(name, args, is_causal=True)
            found.append([one.view(torch.int32) for one in (out, *gradients)])
    finally:
        torch.set_num_threads(count)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("sizes", ["owners", "sweeps", "wide", "whole rows, fewer keys"])
@pytest.mark.parametrize("mask", ["none", "lower right", "of keys"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_that_was_not_written(name, mask, sizes):
    args, options = operands(name, *SIZES[sizes]), MASKS[mask](*SIZES[sizes][2:4])
    expected, _, gradients = with_gradients(name, args, **options)
    torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN
    try:
        found, _, other_gradients = with_gradients(name, args, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip((expected, *gradients), (found, *other_gradients)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("keys", [3, 200])
def test_what_a_mask_excludes_leaves_no_trace(keys):
    """Neither does a query without keys, whose result and gradients are 0."""
    query, key, value = operands("attention", (2,), (2,), 5, keys, 8, 8)
    key[:, 1] = math.nan
    allowed = torch.ones(5, keys, dtype=torch.bool)
    allowed[:, 1] = False
    allowed[4] = False
    weights, _, _ = with_gradients("attention_weights", [query, key], attn_mask=allowed)
    out, _, (_, dkey, dvalue) = with_gradients("attention", [query, key, value], attn_mask=allowed)
    assert all(one.isfinite().all() for one in (weights, out, dvalue))
    assert (weights[:, :, 1] == 0).all()
    assert all((one[:, 4] == 0).all() for one in (weights, out))
    assert (dkey[:, 1] == 0).all()
    assert (dvalue[:, 1] == 0).all()


def test_scores_that_all_overflow():
    """They give NaN without a mask, and with one 0, as in other variants."""
    args = [torch.full((4, 2), 1e30), torch.full((3, 2), -1e30)]
    assert effops.attention_weights(*args, variant="cpp").isnan().all()
    allowed = torch.ones(4, 3, dtype=torch.bool)
    assert (effops.attention_weights(*args, attn_mask=allowed, variant="cpp") == 0).all()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda args: ([*args[:-1], args[-1].double()], {}), "needs float64 for all operands or for none"),
        (lambda args: (args, {"attn_mask": torch.zeros(5, 7).double()}), "needs float64 for all operands or for none"),
        (lambda args: ([one[(None,) * 8] for one in args], {}), "takes 8 batch axes at most, got 9"),
    ],
)
def test_what_it_does_not_take(change, expected):
    args, options = change(operands("attention", (2,), (2,), 5, 7, 4, 4))
    with pytest.raises(NotImplementedError, match=expected):
        effops.attention(*args, variant="cpp", **options)


def test_examples_of_a_batch():
    args = operands("attention", (6, 3), (6, 3), 9, 7, 4, 4)
    mapped = torch.func.vmap(lambda *one: effops.attention(*one, variant="cpp"))(*args)
    torch.testing.assert_close(mapped, effops.attention(*args, variant="cpp"))


@pytest.mark.parametrize("name", ["attention_weights", "attention", "additive_attention", "log_sparse_attention"])
def test_more_axes_than_the_kernels_take(name):
    """Under vmap a call may have one axis more than fits: then examples are computed one after another."""
    taken = operands("attention", (2, 1, 1, 2, 1, 1, 1, 1), (2, 1, 1, 1, 1, 1, 1, 2), 5, 5, 4, 4)
    args = {"additive_attention": [*taken, torch.ones(4)], "attention_weights": taken[:2]}.get(name, taken)

    def function(*one):
        return getattr(effops, name)(*one, variant="cpp")

    def gradients(*one):
        return torch.func.grad(lambda *one: function(*one).square().sum(), tuple(range(len(one))))(*one)

    for one_of in (function, gradients):
        batch = torch.stack([args[0], 2 * args[0]])
        found = torch.func.vmap(one_of, in_dims=(0, *(None for _ in args[1:])))(batch, *args[1:])
        for i, query in enumerate(batch):
            expected = one_of(query, *args[1:])
            own = found[i] if one_of is function else tuple(one[i] for one in found)
            torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits(dtype):
    """All of them are read, and products of two, which have twice as many digits, are rounded once."""
    query = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).unsqueeze(-1)
    key = torch.tensor([1, -3, 0.37, 1e-3, 300, 0.9999, 6e-8, -0.0]).to(dtype).unsqueeze(-1)
    expected = (query.float() * key.float().mT).to(dtype)
    for laid_out in (query, query.repeat(1, 2)[:, :1]):
        found = effops.attention_scores(laid_out, key, scale=1.0, variant="cpp")
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_float16_does_not_depend_on_how_subnormal_numbers_are_read():
    query, key = torch.arange(1.0, 1000)[:, None].mul(2.0**-24).half(), torch.tensor([[1024.0]]).half()
    expected = effops.attention_scores(query, key, scale=1.0, variant="cpp")
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(effops.attention_scores(query, key, scale=1.0, variant="cpp"), expected)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(expected.float().flatten(), torch.arange(1.0, 1000) * 2.0**-14)


def test_masks_of_16_bits_are_read_where_they_are():
    query, key, value = operands("attention", (2,), (2,), 70, 200, 8, 8)
    mask = torch.randn(200, generator=seeded(5)).bfloat16()
    for given in (mask, mask.expand(70, 200), mask.repeat(70, 1), mask.repeat(70, 2)[:, ::2]):
        found = effops.attention(query, key, value, attn_mask=given, variant="cpp")
        expected = effops.attention(query, key, value, attn_mask=given.float(), variant="cpp")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", [*NAMES, "additive_attention"])
@pytest.mark.parametrize("sizes", ["sweeps", "wide", "whole rows, shared keys"])
def test_operands_of_16_bits(name, sizes):
    """Results and gradients are those of the widened operands, rounded once; weights add up in another order."""
    args = [one.bfloat16() for one in operands("attention" if "additive" in name else name, *SIZES[sizes])]
    if "additive" in name:
        args.append(torch.linspace(-1, 1, args[0].shape[-1]).bfloat16())
    if "_" not in name or "additive" in name:
        args[2] = args[2][..., :128]
    out, dout, gradients = with_gradients(name, args)
    wide = [one.float().requires_grad_() for one in args]
    expected = getattr(effops, name)(*wide, variant="cpp")
    rtol = 2**-7 if name == "attention_weights" else 0
    torch.testing.assert_close(out, expected.detach().bfloat16(), rtol=rtol, atol=0)
    of_wide = torch.autograd.grad(expected, wide, dout.float())
    for gradient, one in zip(gradients, of_wide):
        assert gradient.dtype == torch.bfloat16
        assert torch.equal(gradient, one.bfloat16())
