"""What people get wrong in a call, and the answer that they get: which argument, what was expected, what to do."""

import functools
import re
import traceback

import pytest
import torch
from torch._subclasses import FakeTensorMode

import effops
from effops.reference import tried_ops

LOC, X, SCALE = torch.eye(4, 3).add(1e-3), torch.ones(10, 3), torch.ones(4)
WEIGHTS = torch.zeros(4)
QUERY = torch.ones(2, 8, 10, 16)
VECTOR = torch.ones(16)
PAIRS = torch.ones(10, 10, dtype=torch.bool)
SEQUENCE = torch.ones(2, 10, 16)


def spherical(*args, **options):
    return effops.power_spherical_log_prob(*args, **options)


def mixture(*args):
    return effops.power_spherical_mixture_log_prob(*args)


def normal(*args):
    return effops.normal_log_prob(*args)


def attention(*args, **options):
    return effops.attention(QUERY, QUERY, QUERY, *args, **options)


def layer(*args, **options):
    return effops.nn.MultiheadAttention(16, 4, batch_first=True)(*args, **options)


def entered(context):
    with context:
        pass


MISTAKES = {
    "all pairs without an axis for them": (
        lambda: spherical(LOC, SCALE, X),
        ValueError,
        "batch shapes must broadcast; got loc (4,) + (D,), scale (4,), x (10,) + (D,); "
        "for every pair of x and loc give x.unsqueeze(-2), and the result is (10, 4)",
    ),
    "all pairs, and a scale of each point": (
        lambda: spherical(LOC, torch.ones(10), X),
        ValueError,
        "give x.unsqueeze(-2), scale.unsqueeze(-1), and the result is (10, 4)",
    ),
    "all pairs in a batch": (
        lambda: spherical(torch.ones(2, 4, 3), torch.ones(2, 4), torch.ones(2, 10, 3)),
        ValueError,
        "give x.unsqueeze(-2), loc.unsqueeze(-3), scale.unsqueeze(-2), and the result is (2, 10, 4)",
    ),
    "all pairs in a batch, where x has an axis for them": (  # every point met the components of all batches
        lambda: spherical(torch.ones(2, 4, 3), torch.ones(2, 4), torch.ones(2, 10, 1, 3)),
        ValueError,
        "give loc.unsqueeze(-3), scale.unsqueeze(-2), and the result is (2, 10, 4)",
    ),
    "all pairs of a mixture": (
        lambda: mixture(WEIGHTS, LOC, SCALE, X),
        ValueError,
        "give x.unsqueeze(-2), and the result is (10, 4)",
    ),
    "all pairs of normal densities": (
        lambda: normal(LOC, torch.ones(4, 3), X),
        ValueError,
        "got loc (4,) + (D,), scale (4,) + (D or 1,), x (10,) + (D,); .*give x.unsqueeze(-2)",
    ),
    "all dot products": (
        lambda: effops.broadcast_dot(X, LOC),
        ValueError,
        "for every pair of rows give a.unsqueeze(-2), and the result is (10, 4)",
    ),
    "a matrix product": (lambda: effops.broadcast_dot(X, LOC.T), ValueError, "transpose so that rows have one length"),
    "x first": (
        lambda: spherical(X, LOC, SCALE),
        ValueError,
        "arguments must have the order loc, scale, x; got loc (10, 3), scale (4, 3), x (4,): "
        "`scale` has the last dimension of `loc`, and `x` has not; reorder them, or give them by name",
    ),
    "x first, a number last": (
        lambda: spherical(X, LOC, 2.0),
        ValueError,
        "must have the order loc, scale, x; .* x 2.0",
    ),
    "scale first": (lambda: spherical(SCALE, LOC, X), ValueError, "must have the order loc, scale, x"),
    "x first, with a column last": (
        lambda: normal(X, LOC, torch.ones(4, 1)),
        ValueError,
        "`scale` has the last dimension of `loc`, and `x` has not",
    ),
    "weights after the scale": (
        lambda: mixture(LOC, SCALE, WEIGHTS, X.unsqueeze(1)),
        ValueError,
        "must have the order log_weights, loc, scale, x; .*: `log_weights` has the last dimension of `x`, and `loc`",
    ),
    "x before loc": (
        lambda: mixture(WEIGHTS, X, LOC, SCALE),
        ValueError,
        "must have the order log_weights, loc, scale",
    ),
    "weights of each point after loc": (  # the advice was to give points and parameters of one dimension
        lambda: mixture(LOC, torch.zeros(10, 4), SCALE, X.unsqueeze(1)),
        ValueError,
        "must have the order log_weights, loc, scale, x; .*: "
        "they fit as log_weights (10, 4), loc (4, 3), scale (4,), x (10, 1, 3); reorder them, or give them by name",
    ),
    "weights in the place of normal scales": (  # the advice was to unsqueeze them
        lambda: effops.normal_mixture_log_prob(LOC, torch.ones(4, 3), WEIGHTS, X.unsqueeze(1)),
        ValueError,
        "must have the order log_weights, loc, scale, x; .*: they fit as log_weights (4,), loc (4, 3), scale (4, 3), x",
    ),
    "points in the place of scales": (
        lambda: mixture(LOC, torch.zeros(10, 4), X.unsqueeze(1), SCALE),
        ValueError,
        "must have the order log_weights, loc, scale, x; .*: they fit as log_weights (10, 4), loc (",
    ),
    "components before their weights": (
        lambda: effops.distributions.Mixture(
            effops.distributions.PowerSpherical(torch.eye(3), 1.0), torch.distributions.Categorical(SCALE)
        ),
        TypeError,
        "must be a torch.distributions.Categorical; got PowerSpherical; swap it with `component_distribution`",
    ),
    "a scale for each density": (
        lambda: normal(LOC, SCALE, X.unsqueeze(1)),
        ValueError,
        "last dimension of `scale` must be that of `x`, or 1; .*give scale.unsqueeze(-1)",
    ),
    "a scale in a list": (
        lambda: spherical(LOC, [1.0], X),
        TypeError,
        "`scale` must be a tensor or a number; got list",
    ),
    "a scale that is none": (
        lambda: spherical(LOC, None, X),
        TypeError,
        "`scale` must be a tensor or a number; got NoneType; give a number",
    ),
    "a scale in a text": (lambda: spherical(LOC, "5", X), TypeError, "got str; give a number"),
    "scales in a list of tensors": (lambda: spherical(LOC, [SCALE], X), TypeError, "got list; use torch.stack"),
    "tensors of different shapes in a list": (  # torch.stack was advised
        lambda: spherical([LOC, LOC[1:]], 1.0, X),
        TypeError,
        "got list; call the function for each of these tensors, whose shapes differ; or pad them to one",
    ),
    "integers in a list": (  # what torch.as_tensor makes of them was refused next
        lambda: spherical(LOC, 1.0, [1, 0, 0]),
        TypeError,
        "got list; use torch.as_tensor(..., dtype=torch.float32)",
    ),
    "a mask in a list": (
        lambda: attention([[1] * 10] * 10),
        TypeError,
        "`attn_mask` must be a tensor, boolean or .*; got list; give torch.as_tensor(mask, dtype=torch.bool), True for",
    ),
    "a bias in a list": (lambda: attention([[0.5] * 10]), TypeError, "got list; use torch.as_tensor"),
    "no whole number": (  # int() was advised, which gives 2
        lambda: effops.log_sparse_attention(QUERY, QUERY, QUERY, 2.5),
        TypeError,
        "`local` must be an integer; got float; give a whole number, as 2",
    ),
    "a direction in a column": (  # to expand it was advised
        lambda: spherical(LOC, 1.0, torch.ones(3, 1)),
        ValueError,
        "got x (3, 1), loc (4, 3); give x.squeeze(-1), if its coordinates are along the dimension before the last",
    ),
    "directions of no dimension": (
        lambda: spherical(LOC, 1.0, torch.ones(7, 1)),
        ValueError,
        "got x (7, 1), loc (4, 3); give points and parameters of one dimension",
    ),
    "no points": (lambda: spherical(LOC, 1.0, None), TypeError, "`x` must be a tensor; got NoneType; give a tensor"),
    "a factor in a text": (lambda: attention(scale="5"), TypeError, "a number or None; got str; give a float"),
    "a factor in a tensor": (lambda: attention(scale=SCALE), TypeError, "got Tensor; multiply query by it"),
    "no positions": (
        lambda: effops.log_sparse_attention(QUERY, QUERY, QUERY, None),
        TypeError,
        "`local` must be an integer; got NoneType; give one",
    ),
    "a column of scales": (
        lambda: spherical(LOC, torch.ones(4, 1), X.unsqueeze(1)),
        ValueError,
        "scale (4, 1), x (10, 1) + (D,); for every pair of x and loc give scale.squeeze(-1), and the result is (10, 4)",
    ),
    "a column of scales, and points without an axis for pairs": (
        lambda: effops.von_mises_fisher_log_prob(LOC, torch.ones(4, 1), X),
        ValueError,
        "give concentration.squeeze(-1), x.unsqueeze(-2), and the result is (10, 4)",
    ),
    "scales of nothing": (  # the advice was to pair them with the points, and gave a result that nobody meant
        lambda: spherical(LOC, torch.ones(2), X.unsqueeze(1)),
        ValueError,
        "; give `scale` the batch shape (4,), one for each loc, or (), one for all",
    ),
    "a scale of each point in a column, which is right": (
        lambda: spherical(LOC, torch.ones(10, 1), X),
        ValueError,
        "give x.unsqueeze(-2), and the result is (10, 4)",
    ),
    "scales of coordinates in columns": (
        lambda: normal(LOC, torch.ones(4, 3, 1), X.unsqueeze(1)),
        ValueError,
        "give scale.squeeze(-1), and the result is (10, 4)",
    ),
    "a column of log weights": (
        lambda: mixture(WEIGHTS.unsqueeze(-1), LOC, SCALE, X.unsqueeze(1)),
        ValueError,
        "`log_weights` must broadcast with the log densities; .*; give log_weights.squeeze(-1)",
    ),
    "a mask with an axis too many": (
        lambda: effops.attention(QUERY[..., :9, :], QUERY, QUERY, PAIRS[:9, :, None]),
        ValueError,
        "got (9, 10, 1); give attn_mask.squeeze(-1)",
    ),
    "a column as weight": (
        lambda: effops.additive_attention_scores(QUERY, QUERY, VECTOR.unsqueeze(-1)),
        ValueError,
        "weight (16, 1); give weight.squeeze(-1)",
    ),
    "a padding mask with an axis too many": (
        lambda: layer(SEQUENCE, SEQUENCE, SEQUENCE, torch.zeros(2, 10, 1, dtype=torch.bool)),
        ValueError,
        "got (2, 10, 1); give key_padding_mask.squeeze(-1)",
    ),
    "a column of scales of a distribution": (
        lambda: effops.distributions.PowerSpherical(torch.ones(2, 4, 3), torch.ones(4, 1)),
        ValueError,
        "got loc (2, 4) + (D,), scale (4, 1); give scale.squeeze(-1)",
    ),
    "points of another dimension": (
        lambda: spherical(torch.ones(4, 9), 1.0, torch.ones(4, 8)),
        ValueError,
        "got x (4, 8), loc (4, 9); give points and parameters of one dimension",
    ),
    "a location for all coordinates": (
        lambda: normal(torch.ones(4, 1), 1.0, torch.ones(4, 8)),
        ValueError,
        "expand `loc`, whose last dimension is 1",
    ),
    "locations in columns": (
        lambda: spherical(LOC.T.contiguous(), 1.0, X),
        ValueError,
        "got x (10, 3), loc (3, 4); give loc.mT",
    ),
    "rows of different lengths": (
        lambda: effops.broadcast_dot(torch.ones(4, 9), torch.ones(4, 8)),
        ValueError,
        "got a (4, 9), b (4, 8); give rows of one length",
    ),
    "a mistyped op": (lambda: effops.variants("attn"), ValueError, ', einsum; did you mean "attention"?'),
    "a mistyped variant": (
        lambda: spherical(LOC, 1.0, LOC, variant="chunkd"),
        ValueError,
        'choose from triton, .*, auto; did you mean "chunked"?',
    ),
    "a mistyped variant of a context": (
        lambda: effops.use_variant("einsm"),
        ValueError,
        'choose from .*; did you mean "einsum"?',
    ),
    "a mistyped attention of the layer": (
        lambda: effops.nn.MultiheadAttention(16, 4, attention="fusd"),
        ValueError,
        "got 'fusd'; did you mean \"fused\"?",
    ),
    "an array": (
        lambda: spherical(LOC.numpy(), 1.0, X),
        TypeError,
        "`loc` must be a tensor; got ndarray; use torch.as_",
    ),
    "an unknown variant": (
        lambda: spherical(LOC, 1.0, LOC, variant="cuda"),
        ValueError,
        "choose from triton, .*, auto",
    ),
    "a mask of integers": (
        lambda: attention(PAIRS.long()),
        TypeError,
        "`attn_mask` must be boolean, .*; got torch.int64; give mask.bool() if it is 1, or ~mask.bool() if it is 0, "
        "for pairs that take part",
    ),
    "a mask of integers for groups": (lambda: attention(PAIRS.int(), enable_gqa=True), TypeError, "give mask.bool()"),
    "dropout without its name": (lambda: attention(0.1), TypeError, "by name, as dropout_p=0.1"),
    "causal without its name": (lambda: attention(True), TypeError, "by name, as is_causal=True"),
    "a mask of keys": (
        lambda: attention(torch.ones(2, 10, dtype=torch.bool)),
        ValueError,
        "got (2, 10); to mask keys for all queries give attn_mask[:, None, None, :]",
    ),
    "heads after positions": (
        lambda: effops.attention(QUERY.transpose(1, 2), QUERY, QUERY),
        ValueError,
        "give tensor.transpose(-3, -2) if its heads follow its positions",
    ),
    "the weight before the value": (
        lambda: effops.additive_attention(QUERY, QUERY, VECTOR, QUERY),
        ValueError,
        "must have the order query, key, value, weight, .*: `value` is a vector, and `weight` is none",
    ),
    "the mask before the weight": (
        lambda: effops.additive_attention(QUERY, QUERY, QUERY, PAIRS, VECTOR),
        ValueError,
        "must have the order query, key, value, weight, attn_mask; .*: `weight` is boolean, as a mask is",
    ),
    "a mask for the log-sparse pattern": (
        lambda: effops.log_sparse_attention(QUERY, QUERY, QUERY, PAIRS),
        TypeError,
        "`local` must be an integer; got Tensor; it takes no mask, since the pattern says which pairs take part",
    ),
    "an integer padding mask": (
        lambda: layer(SEQUENCE, SEQUENCE, SEQUENCE, torch.ones(2, 10, dtype=torch.int64)),
        TypeError,
        "MultiheadAttention: `key_padding_mask` must be boolean.* give mask.bool() if it is 1, .* for what is left out",
    ),
    "a mask of pairs as the padding mask": (
        lambda: layer(SEQUENCE, SEQUENCE, SEQUENCE, PAIRS),
        ValueError,
        "`key_padding_mask` must have the shape (batch, keys) = (2, 10); got (10, 10); give a mask of pairs by name",
    ),
    "a transposed padding mask": (  # it was said to be a mask of pairs
        lambda: layer(SEQUENCE, SEQUENCE, SEQUENCE, torch.zeros(10, 2, dtype=torch.bool)),
        ValueError,
        "`key_padding_mask` must have the shape (batch, keys) = (2, 10); got (10, 2); give key_padding_mask.mT",
    ),
    "a transposed mask of pairs of a layer": (  # the advice was to expand it
        lambda: layer(SEQUENCE[:, :4], SEQUENCE, SEQUENCE, attn_mask=PAIRS[:, :4]),
        ValueError,
        "(batch * heads, queries, keys) = (8, 4, 10); got (10, 4); give attn_mask.mT",
    ),
    "transposed masks of the heads of a layer": (
        lambda: layer(SEQUENCE[:, :4], SEQUENCE, SEQUENCE, attn_mask=PAIRS[:, :4].expand(8, 10, 4)),
        ValueError,
        "(batch * heads, queries, keys) = (8, 4, 10); got (8, 10, 4); give attn_mask.mT",
    ),
    "a transposed mask of pairs": (  # the advice was to unsqueeze it
        lambda: effops.attention(QUERY[..., :4, :], QUERY, QUERY, PAIRS[:, :4]),
        ValueError,
        "`attn_mask` must broadcast to (queries, keys) = (4, 10); got (10, 4); give attn_mask.mT",
    ),
    "transposed keys": (  # the advice was to project them
        lambda: effops.attention(QUERY, QUERY.mT, QUERY),
        ValueError,
        "must be equal; .*; give key.mT",
    ),
    "transposed values": (  # the advice was to cut or pad them
        lambda: effops.attention(QUERY, QUERY, QUERY.mT),
        ValueError,
        "there must be one value for each key; .*; give value.mT",
    ),
    "transposed weights of a mixture": (
        lambda: mixture(torch.zeros(4, 10), LOC, SCALE, X.unsqueeze(1)),
        ValueError,
        "log_weights.* give log_weights.mT",
    ),
    "transposed scales of a distribution": (
        lambda: effops.distributions.PowerSpherical(torch.ones(2, 4, 3), torch.ones(4, 2)),
        ValueError,
        "got loc (2, 4) + (D,), scale (4, 2); give scale.mT",
    ),
    "a mask for each batch entry": (
        lambda: layer(SEQUENCE, SEQUENCE, SEQUENCE, attn_mask=PAIRS.expand(2, 10, 10)),
        ValueError,
        "`attn_mask` must have the shape (queries, keys) = (10, 10) or .*attn_mask.repeat_interleave(4, 0)",
    ),
    "features of another size": (
        lambda: layer(SEQUENCE[..., :8], SEQUENCE, SEQUENCE),
        ValueError,
        "last dimension of `query` must be 16, as the layer was made for; got 8",
    ),
    "a direction for its dimension": (
        lambda: effops.distributions.HypersphericalUniform(LOC[0]),
        TypeError,
        "HypersphericalUniform: `dim` must be an integer; got a tensor; give loc.shape[-1]",
    ),
    "explain without arguments": (
        lambda: effops.explain(effops.power_spherical_log_prob),
        TypeError,
        "power_spherical_log_prob: it takes loc, scale, x, variant; got no `loc` and no `scale` and no `x`; give each "
        "of these; give explain the function, and then its arguments",
    ),
    "a text for is_causal": (
        lambda: effops.attention(*[torch.ones(1, 2, 3)] * 3, is_causal="False"),
        TypeError,
        "attention: `is_causal` must be True or False; got 'False'",
    ),
    "a text for is_causal of the layer": (
        lambda: effops.nn.MultiheadAttention(4, 2)(*[torch.ones(3, 1, 4)] * 3, is_causal="no"),
        TypeError,
        "attention: `is_causal` must be True or False; got 'no'",
    ),
    "a list of variants": (
        lambda: effops.power_spherical_log_prob(LOC, torch.ones(len(LOC)), LOC, variant=["chunked"]),
        ValueError,
        "power_spherical_log_prob has no variant ['chunked']; choose from ",
    ),
    "another keyword in explain": (
        lambda: effops.explain(effops.power_spherical_log_prob, LOC, SCALE, y=X),
        TypeError,
        "power_spherical_log_prob: it takes loc, scale, x, variant; got `y`; give explain the function, and then",
    ),
    "a mistyped keyword": (
        lambda: effops.power_spherical_log_prob(LOC, SCALE, X, varient="naive"),
        TypeError,
        'power_spherical_log_prob: it takes loc, scale, x, variant; got `varient`; did you mean "variant"?',
    ),
    "the keyword of another library": (
        lambda: effops.attention(QUERY, QUERY, QUERY, mask=PAIRS),
        TypeError,
        'attention: it takes query, key, value, attn_mask, .*, variant; got `mask`; did you mean "attn_mask"?',
    ),
    "a keyword of a layer": (
        lambda: effops.nn.MultiheadAttention(16, heads=4),
        TypeError,
        'MultiheadAttention: it takes embed_dim, num_heads, .*, restart; got `heads`; did you mean "num_heads"?',
    ),
    "the width of a layer by another name": (
        lambda: effops.nn.MultiheadAttention(dim=16, num_heads=4),
        TypeError,
        'MultiheadAttention: it takes .*; got `dim`; did you mean "embed_dim"?',
    ),
    "a layer of no size": (lambda: effops.nn.MultiheadAttention(), TypeError, "got no `embed_dim` and no `num_heads`"),
    "a keyword of the call of a layer": (
        lambda: layer(SEQUENCE, SEQUENCE, SEQUENCE, mask=PAIRS),
        TypeError,
        'MultiheadAttention.forward: it takes query, .*; got `mask`; did you mean "attn_mask"?',
    ),
    "a layer that is called with one tensor": (
        lambda: layer(SEQUENCE),
        TypeError,
        "MultiheadAttention.forward: it takes .*; got no `key` and no `value`; give each of these",
    ),
    "no keys": (
        lambda: layer(SEQUENCE, None, None),
        TypeError,
        "MultiheadAttention: `key` must be a tensor; got NoneType; give query for self-attention",
    ),
    "heads that do not divide the width": (
        lambda: effops.nn.MultiheadAttention(16, 3),
        ValueError,
        "`embed_dim` must be a multiple of `num_heads`; got 16 and 3; give num_heads=2, or embed_dim=18",
    ),
    "a width that is no integer": (
        lambda: effops.nn.MultiheadAttention(16.0, 4),
        TypeError,
        "MultiheadAttention: `embed_dim` must be an integer; got float; convert it with int()",
    ),
    "no heads": (
        lambda: effops.nn.MultiheadAttention(16, 0),
        ValueError,
        "MultiheadAttention: `num_heads` must be at least 1; got 0",
    ),
    "a sequence in another dtype": (
        lambda: layer(SEQUENCE, SEQUENCE.double(), SEQUENCE),
        TypeError,
        "`key` must have the dtype of the layer, torch.float32; got torch.float64; convert one, as key.to(torch.float",
    ),
    "another keyword of a budget": (
        lambda: effops.budget(lmit="64 MiB"),
        TypeError,
        'budget: it takes limit; got `lmit`; did you mean "limit"?',
    ),
    "another keyword of lint as a block": (
        lambda: effops.lint(lest="64 MiB"),
        TypeError,
        'lint: without a function it takes least, times, fixes; got `lest`; give the function first; did you mean "le',
    ),
    "a budget with the arguments of the fixture": (
        lambda: effops.budget("64 MiB", X.square),
        TypeError,
        "by position; got 2 arguments; to check a call write effops.budget(",
    ),
    "a budget without a call": (
        lambda: entered(effops.budget),
        TypeError,
        "budget: `with` must enter a call of it; got the class; write `with effops.budget(limit):`",
    ),
    "a check of values without a call": (
        lambda: entered(effops.validate),
        TypeError,
        "write `with effops.validate():`",
    ),
    "a list of calls without a call": (lambda: entered(effops.record), TypeError, "write `with effops.record():`"),
    "a variant without a call": (
        lambda: entered(effops.use_variant),
        TypeError,
        "write `with effops.use_variant(name):`",
    ),
    "no variant": (
        lambda: effops.use_variant(),
        TypeError,
        "use_variant: it takes name; got no `name`; give each of these; name one, as in use_variant(",
    ),
    "nothing for variants": (lambda: effops.variants(), TypeError, "variants: it takes function; got no `function`"),
    "an argument too few": (
        lambda: effops.attention(QUERY, QUERY),
        TypeError,
        "attention: it takes query, key, value, attn_mask, .*, variant; got no `value`; give each of these",
    ),
    "a variant by position": (
        lambda: effops.broadcast_dot(X, X, "naive"),
        TypeError,
        "broadcast_dot: it takes a, b by position; got 3 arguments; give variant by name",
    ),
    "an argument by position and by name": (
        lambda: effops.broadcast_dot(X, X, a=X),
        TypeError,
        "broadcast_dot: it takes `a` once; got it by position and by name; leave one out",
    ),
    "explain of a module": (
        lambda: effops.explain(effops.nn.MultiheadAttention(4, 2)),
        ValueError,
        "explain: `function` must be an op of effops; got an object of class MultiheadAttention; "
        "effops.record() tells which ops run inside of other functions; effops.explain(effops.tiled(function), ...) "
        "tells how any other one runs in tiles; ops are power_spherical_log_prob, ",
    ),
    "explain of a result": (
        lambda: effops.explain(LOC),
        ValueError,
        "explain: `function` must be an op of effops; got an object of class Tensor; give the op without calling it, "
        "as effops.attention, and then its arguments; ops are power_spherical_log_prob, ",
    ),
    "explain of another function": (
        lambda: effops.explain(torch.cdist, X, X),
        ValueError,
        "must be an op of effops; got `cdist`; effops.record() tells which ops run inside of other functions; "
        "effops.explain(effops.tiled(function), ...) tells how any other one runs in tiles; ops are",
    ),
    "variants of a result": (
        lambda: effops.variants(X),
        ValueError,
        "got an object of class Tensor; give the op without calling it, as effops.attention; ops are",
    ),
}


@pytest.mark.parametrize(("call", "error", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_answers(call, error, answer):
    """The answer is in the message of one exception, without the exceptions from which it follows."""
    with pytest.raises(error) as caught:
        call()
    place = 0
    for part in answer.split(".*"):
        place = str(caught.value).find(part, place)
        assert place >= 0, (part, str(caught.value))
    chained = "".join(traceback.format_exception(caught.value)).count("Traceback (most recent call last)")
    assert chained == 1


@pytest.mark.parametrize("op", tried_ops().values(), ids=lambda op: op.name)
def test_every_op_tells_of_keywords(op):
    """It was Python's TypeError, which names neither the arguments that there are nor the nearest."""
    with pytest.raises(TypeError, match=rf"^{op.name}: .*variant; got `vriant`; did you mean \"variant\"\?$"):
        op(vriant="naive")


def test_errors_inside_of_an_op_stay():
    """A TypeError that is raised after an op has begun says nothing of its arguments' names."""
    with pytest.raises(TypeError, match="`loc` must be a tensor"):
        spherical(None, 1.0, X)


@pytest.mark.parametrize("name", [name for name in tried_ops() if name.endswith("log_prob")])
def test_densities_tell_that_mps_has_no_float64(name):
    """PyTorch told it without a remedy. A fake tensor stands for one of Apple's GPU."""
    with FakeTensorMode():
        loc, x, weights = (torch.empty(*shape, device="mps") for shape in ((4, 3), (10, 1, 3), (4,)))
    operands = (weights, loc, 1.0, x) if "mixture" in name else (loc, 1.0, x)
    message = (
        rf"^{name}: `loc` must be on a device with float64, .*; got mps:0; move the operands to the CPU, with .cpu()"
    )
    for call in (getattr(effops, name), functools.partial(effops.explain, name)):
        with pytest.raises(NotImplementedError, match=message):
            call(*operands)


def test_a_distribution_tells_that_mps_has_no_float64():
    with (
        FakeTensorMode(),
        pytest.raises(NotImplementedError, match=r"^PowerSpherical: `loc` must .* float64"),
    ):
        effops.distributions.PowerSpherical(torch.empty(4, 3, device="mps"), 1.0)


def test_no_answer_where_the_order_may_be_right():
    """As many components as coordinates: the last dimension of the scale says nothing."""
    with pytest.raises(ValueError, match="last dimension of `x` must equal that of `loc`"):
        spherical(torch.ones(3, 3), torch.ones(3), torch.ones(10, 1, 4))


def test_explain_takes_the_arguments_of_the_function():
    """By name too, though the densities of a family share the function that validates them."""
    named = effops.explain(effops.von_mises_fisher_log_prob, concentration=1.0, x=LOC, loc=LOC)
    assert named.chosen == effops.explain(effops.von_mises_fisher_log_prob, LOC, 1.0, LOC).chosen


LAYER_MISTAKES = {
    "dropout": (2.0, ValueError, "a probability from 0 to 1; got 2.0; give 0 for none"),
    "bias": ("no", TypeError, "True or False; got str 'no'; give False"),
    "add_bias_kv": (1, TypeError, "True or False; got int 1; give True"),
    "add_zero_attn": (None, TypeError, "True or False; got NoneType None; give False"),
    "kdim": ("16", TypeError, "an integer; got str; convert it with int()"),
    "vdim": (0, ValueError, "at least 1; got 0; give a larger one"),
    "batch_first": (torch.float32, TypeError, "True or False; got dtype torch.float32; give True"),
    "device": ("gpu", TypeError, "a device; got 'gpu'; give one"),
    "dtype": ("float32", TypeError, "real floating point; got 'float32'; give torch.float32"),
    "attention": (["fused"], ValueError, "one of fused, "),
    "local": (0, ValueError, "at least 1; got 0"),
    "restart": (2.5, TypeError, "an integer; got float; give a whole number, as 2"),
    "embed_dim": (True, TypeError, "an integer; got bool"),
    "num_heads": (16.0, TypeError, "an integer; got float; convert it with int()"),
}


@pytest.mark.parametrize("argument", LAYER_MISTAKES)
def test_a_layer_checks_what_it_is_made_of(argument):
    """A dropout of 2 was accepted, and attention's `dropout_p` was blamed for it in training."""
    given, error, text = LAYER_MISTAKES[argument]
    with pytest.raises(error, match=rf"^MultiheadAttention: `{argument}` must be {re.escape(text)}"):
        effops.nn.MultiheadAttention(**{"embed_dim": 16, "num_heads": 4, argument: given})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: effops.distributions.PowerSpherical(X, 1.0, "no"), "PowerSpherical: `validate_args` must be True"),
        (lambda: effops.distributions.VonMisesFisher(X, 1.0, 10), "VonMisesFisher: `validate_args` must be True"),
        (lambda: effops.distributions.HypersphericalUniform(3, "gpu"), "Uniform: `device` must be a device; got 'gpu'"),
        (lambda: effops.distributions.HypersphericalUniform(3, torch.half), "must be a device; .*; give dtype=torch."),
        (lambda: effops.distributions.HypersphericalUniform(3, dtype="half"), "`dtype` must be real floating point; "),
        (lambda: effops.distributions.HypersphericalUniform(True), "`dim` must be an integer; got bool"),
        (lambda: effops.distributions.HypersphericalUniform(3, validate_args=0), "`validate_args` must be True, False"),
        (
            lambda: effops.distributions.Mixture(
                torch.distributions.Categorical(torch.ones(3)), effops.distributions.PowerSpherical(X, 1.0, False), "no"
            ),
            "Mixture: `validate_args` must be True, False or None; got 'no'; leave it out",
        ),
    ],
)
def test_a_distribution_checks_what_it_is_made_of(call, text):
    with pytest.raises(TypeError, match=text):
        call()


HEADS, SHARED, FOLDED, FLAT = (2, 4, 10, 16), (2, 2, 10, 16), (8, 10, 16), (2, 10, 16)
MISFITS = {  # the axes of query, key and value, of a mask or a weight, what else is given, and what to write
    "a mask of batch entries": ((HEADS,) * 3, (2, 10, 10), {}, "attn_mask[:, None]"),
    "a mask of keys of batch entries": ((HEADS,) * 3, (2, 1, 10), {}, "attn_mask[:, None]"),
    "a mask of batch times heads": ((HEADS,) * 3, (8, 10, 10), {}, "attn_mask.unflatten(0, (2, 4))"),
    "a mask of heads first": ((HEADS,) * 3, (4, 2, 10, 10), {}, "attn_mask.transpose(0, 1)"),
    "a mask with an axis too many": ((HEADS,) * 3, (2, 4, 1, 10, 10), {}, "attn_mask.squeeze(2)"),
    "a mask of heads beside batch times heads": ((FOLDED,) * 3, (2, 4, 10, 10), {}, "attn_mask.flatten(0, 1)"),
    "a mask of batch entries beside them": ((FOLDED,) * 3, (2, 10, 10), {}, "attn_mask.repeat_interleave(4, 0) if"),
    "a mask beside shared heads": (
        (HEADS, SHARED, SHARED),
        (2, 10, 10),
        {"enable_gqa": True},
        "attn_mask[:, None]",
    ),
    "keys and values without heads": ((HEADS, FLAT, FLAT), None, {}, "key[:, None] and value[:, None]"),
    "values without heads": ((HEADS, HEADS, FLAT), None, {}, "value[:, None]"),
}


@pytest.mark.parametrize(("shapes", "mask", "given", "remedy"), MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_an_attention_that_does_not_fit_is_told_what_fits(shapes, mask, given, remedy, dtype):
    """Masks of batch entries were to be expanded, or transposed, or to share heads: none of it helped."""
    arguments = dict(zip(("query", "key", "value"), map(torch.randn, shapes)))
    if mask:
        arguments["attn_mask"] = torch.ones(mask, dtype=dtype)
    with pytest.raises(ValueError, match=rf"^attention: .*; give {re.escape(remedy)}"):
        effops.attention(**arguments, **given)
    for code in remedy.removesuffix(" if").split(" and "):
        arguments[re.match(r"\w+", code)[0]] = eval(code, dict(arguments))
    assert effops.attention(**arguments, **given).shape == shapes[0]


def test_other_attentions_that_do_not_fit_are_told_what_fits():
    query, flat, shared, vector = torch.randn(HEADS), torch.randn(FLAT), torch.randn(SHARED), torch.randn(16)
    mask = torch.ones(2, 10, 10, dtype=torch.bool)
    for call, remedy in (
        (lambda: effops.attention_scores(query, query, mask), "give attn_mask[:, None]"),
        (lambda: effops.attention_weights(query, flat), "give key[:, None]"),
        (lambda: effops.attention_scores(query, shared), "repeat_interleave the heads of keys and values if"),
        (lambda: effops.additive_attention(query, query, query, vector, mask), "give attn_mask[:, None]"),
        (lambda: effops.additive_attention(query, query, query, torch.ones(2, 1, 1, 16)), "give weight[:, None]"),
        (lambda: effops.log_sparse_attention(query, flat, flat), "give key[:, None] and value[:, None]"),
        (
            lambda: effops.attention(*[query.transpose(1, 2)] * 3, mask[0]),
            "give tensor.transpose(-3, -2) of the others if their heads follow their positions",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(remedy)):
            call()


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((2, 4, 10, 10), "attn_mask.expand(2, 4, 10, 10).flatten(0, 1)"),
        ((1, 1, 10, 10), "attn_mask.expand(2, 4, 10, 10).flatten(0, 1)"),
        ((4, 10, 10), "attn_mask.expand(2, 4, 10, 10).flatten(0, 1)"),
        ((2, 10, 10), "attn_mask.repeat_interleave(4, 0)"),
        ((2, 1, 10), "attn_mask.expand(2, 10, 10).repeat_interleave(4, 0)"),
        ((10,), "attn_mask.expand(10, 10)"),
        ((2, 1, 1, 10), "key_padding_mask=attn_mask[:, 0, 0]"),
    ],
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_mask_that_a_layer_does_not_take_is_told_what_it_takes(shape, remedy, batch_first):
    """Masks of four axes were to be masks of keys."""
    layer, mask = effops.nn.MultiheadAttention(16, 4, batch_first=batch_first), torch.zeros(shape, dtype=torch.bool)
    x = SEQUENCE if batch_first else SEQUENCE.transpose(0, 1)
    with pytest.raises(ValueError, match=rf"`attn_mask` must have the shape .*give {re.escape(remedy)}$"):
        layer(x, x, x, attn_mask=mask)
    name, code = remedy.split("=") if "=" in remedy else ("attn_mask", remedy)
    assert layer(x, x, x, **{name: eval(code, {"attn_mask": mask})})[0].shape == x.shape


@pytest.mark.parametrize("index", ["[:, 0, 0]", "[:, 0]", ".expand(2, -1)"])
def test_a_mask_of_keys_that_a_layer_does_not_take_is_told_what_it_takes(index):
    shape = {"[:, 0, 0]": (2, 1, 1, 10), "[:, 0]": (2, 1, 10), ".expand(2, -1)": (10,)}[index]
    layer, mask = effops.nn.MultiheadAttention(16, 4, batch_first=True), torch.zeros(shape, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"; give key_padding_mask{re.escape(index)}$"):
        layer(SEQUENCE, SEQUENCE, SEQUENCE, mask)
    layer(SEQUENCE, SEQUENCE, SEQUENCE, eval(f"mask{index}", {"mask": mask}))
    with pytest.raises(TypeError, match="`key_padding_mask` must be a tensor, boolean"):  # it was an AttributeError
        layer(SEQUENCE, SEQUENCE, SEQUENCE, [True] * 10)
