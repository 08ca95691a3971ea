"""NaN and infinity in keys and values that a mask excludes: what each variant makes of them is what its docstring says.

A row is right, or NaN where the docstring allows it. No row is a wrong number.
"""

import contextlib
import inspect
import math

import pytest
import torch

from effops.reference import tried_ops

from ..support.blocks import small_blocks

MASKED = [op for op in tried_ops().values() if "attn_mask" in inspect.signature(op.function).parameters]
CALLS = [
    *(pytest.param(op, v, contextlib.nullcontext, id=f"{op.name}-{v}") for op in MASKED for v in op.variants),
    *(pytest.param(op, "chunked", small_blocks, id=f"{op.name}-small blocks") for op in MASKED),
]
QUERIES, KEYS, PLACE = 30, 50, 17  # the place of the key or value that is NaN or infinite
MASKS = ("of all queries", "of some queries", "of numbers", "is_causal")


def arguments(op, device, generator):
    shapes = {"query": (2, QUERIES, 5), "key": (2, KEYS, 5), "value": (2, KEYS, 5), "weight": (5,)}
    return {name: torch.randn(shapes[name], generator=generator).to(device) for name in op.core_dims if name in shapes}


def excluding(kind, device):
    """Options under which some queries take no part with the key in question, and which queries these are."""
    takes_part = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    if kind == "is_causal":
        return {"is_causal": True}, torch.arange(QUERIES) < PLACE
    takes_part[QUERIES // 2 if kind == "of some queries" else 0 :, PLACE] = False
    takes_part[QUERIES - 3] = False  # which takes part with no key
    mask = takes_part if kind != "of numbers" else torch.zeros(QUERIES, KEYS).masked_fill_(~takes_part, -math.inf)
    return {"attn_mask": mask.to(device)}, ~takes_part[:, PLACE]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize(("op", "variant", "context"), CALLS)
def test_excluded_keys_and_values(op, variant, context, name, bad, device, generator):
    """Variant sdpa gave NaN where the others gave numbers, and no docstring said so."""
    args = arguments(op, device, generator)
    if name not in args:
        pytest.skip("sums no values")
    spoiled = {**args, name: args[name].clone()}
    spoiled[name][:, PLACE] = bad
    for kind in MASKS[:1] if variant == "compile" else MASKS:
        options, excludes = excluding(kind, device)
        if not options.keys() <= inspect.signature(op.function).parameters.keys():
            continue
        obstacle = op.variants[variant].obstacle(op.prepare(**spoiled, **options))
        if obstacle:
            pytest.skip(f"{variant} {obstacle}")
        expected = op(**args, **options, variant="naive")[:, excludes]
        with context():
            out = op(**spoiled, **options, variant=variant)
        found, seen = out[:, excludes], out[:, ~excludes]
        may_be_nan = name == "value" or kind == "of numbers" or (variant == "sdpa" and kind != "is_causal")
        assert may_be_nan or not found.isnan().any(), kind
        torch.testing.assert_close(torch.where(found.isnan(), expected, found), expected, msg=kind)
        if math.isnan(bad):  # a query that takes part with it has NaN
            assert seen.isnan().any(-1).all(), kind


@pytest.mark.parametrize(("op", "variant", "context"), CALLS)
def test_gradients_of_excluded_keys(op, variant, context, device, generator):
    """Those of the query are NaN: the weight of 0 times the key. In `attention` the others are as without the key."""
    args, (options, _) = arguments(op, device, generator), excluding("of all queries", device)
    spoiled = {name: arg.clone() for name, arg in args.items()}
    spoiled["key"][:, PLACE] = math.nan
    obstacle = op.variants[variant].obstacle(op.prepare(**spoiled, **options))
    if obstacle:
        pytest.skip(f"{variant} {obstacle}")
    leaves = [arg.requires_grad_() for arg in spoiled.values()]
    with context():
        out = op(**spoiled, **options, variant=variant)
        query, *others = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert query.isnan().all()
    if variant != "sdpa" and not op.name.startswith("additive"):
        assert not any(gradient.isnan().any() for gradient in others)


@pytest.mark.parametrize("kind", ["no mask", "boolean", "numbers"])
@pytest.mark.parametrize(
    ("op", "variant", "context"), [call for call in CALLS if call.values[0].name in ("attention", "attention_weights")]
)
def test_scores_that_all_overflow(op, variant, context, kind, device, generator):
    """They give 0 under a mask, as where no key takes part. Else, but for sdpa and triton, NaN, whatever the blocks.

    Variant chunked gave 0 where a row had several blocks.
    """
    args = arguments(op, device, generator)
    args["query"][:, 3], args["key"][:] = 1e20, -1e20
    options = {
        "no mask": {},
        "boolean": {"attn_mask": torch.ones(1, KEYS, dtype=torch.bool, device=device)},
        "numbers": {"attn_mask": torch.zeros(1, KEYS, device=device)},
    }[kind]
    obstacle = op.variants[variant].obstacle(op.prepare(**args, **options))
    if obstacle:
        pytest.skip(f"{variant} {obstacle}")
    with context():
        row = op(**args, **options, variant=variant)[:, 3]
    if kind == "no mask" and variant not in ("sdpa", "triton"):
        assert row.isnan().all()
    else:
        assert not row.any()
