"""`effops.nn.MultiheadAttention` against PyTorch's layer, and inside PyTorch's models."""

import copy
import re

import pytest
import torch

import effops

EMBED, HEADS = 24, 4


def layers(device, generator, **options):
    """PyTorch's layer, and ours with its state."""
    torch.manual_seed(0)
    attention = options.pop("attention", "fused")
    theirs = torch.nn.MultiheadAttention(EMBED, HEADS, **options, device=device, dtype=torch.float64)
    ours = effops.nn.MultiheadAttention(
        EMBED, HEADS, **options, device=device, dtype=torch.float64, attention=attention
    )
    ours.load_state_dict(theirs.state_dict())
    assert {name: p.shape for name, p in ours.named_parameters()} == {
        name: p.shape for name, p in theirs.named_parameters()
    }
    return theirs, ours


def random(*shape, device, generator):
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)


@pytest.mark.parametrize("attention", ["fused", "naive"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"bias": False},
        {"kdim": 7, "vdim": 9, "batch_first": True},
        {"add_bias_kv": True},
        {"add_zero_attn": True, "batch_first": True},
        {"add_bias_kv": True, "add_zero_attn": True, "kdim": 7},
    ],
    ids=["time first", "batch first", "no bias", "other dimensions", "learned key", "zero key", "both keys"],
)
def test_is_a_drop_in(options, attention, device, generator):
    theirs, ours = layers(device, generator, attention=attention, **options)
    batch, queries, keys = 3, 5, 6
    sizes = (EMBED, options.get("kdim", EMBED), options.get("vdim", EMBED))
    tensors = [
        random(batch, length, size, device=device, generator=generator)
        for length, size in zip((queries, keys, keys), sizes)
    ]
    if not options.get("batch_first"):
        tensors = [tensor.transpose(0, 1) for tensor in tensors]
    padding = (torch.rand(batch, keys, generator=generator) < 0.3).to(device)
    padding[:, 0] = False
    excluded = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)
    additive = random(batch * HEADS, queries, keys, device=device, generator=generator)
    for masks in (
        {},
        {"key_padding_mask": padding},
        {"attn_mask": excluded},
        {"attn_mask": excluded, "key_padding_mask": padding},
        {"attn_mask": additive},
        {"attn_mask": additive[0], "key_padding_mask": torch.zeros_like(padding, dtype=torch.float64)},
    ):
        for weights in ({"need_weights": False}, {}, {"average_attn_weights": False}):
            expected, found = (layer(*tensors, **masks, **weights) for layer in (theirs, ours))
            torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        ours(*tensors, is_causal=True, need_weights=False)[0],
        theirs(*tensors, attn_mask=excluded, need_weights=False)[0],
    )
    torch.testing.assert_close(
        ours(*tensors, key_padding_mask=padding, is_causal=True, need_weights=False)[0],
        theirs(*tensors, key_padding_mask=padding, attn_mask=excluded, need_weights=False)[0],
    )
    alone = [tensor[0] if options.get("batch_first") else tensor[:, 0] for tensor in tensors]
    torch.testing.assert_close(ours(*alone), theirs(*alone))


def test_gradients_of_every_parameter(device, generator):
    theirs, ours = layers(device, generator, batch_first=True)
    x = random(2, 7, EMBED, device=device, generator=generator)
    for layer in (theirs, ours):
        layer(x, x, x, need_weights=False)[0].square().sum().backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_one_argument_switches_a_model(device, generator):
    """Inside PyTorch's encoder, which in inference computes fused attention by itself where it can."""
    encoder = torch.nn.TransformerEncoderLayer(
        EMBED, HEADS, 32, dropout=0.0, batch_first=True, device=device, dtype=torch.float64
    ).eval()
    x = random(2, 9, EMBED, device=device, generator=generator)
    state = encoder.self_attn.state_dict()
    found = {}
    with torch.no_grad():
        expected = encoder(x)
        for attention in ("fused", "naive", "additive", "log_sparse"):
            switched = copy.deepcopy(encoder)
            switched.self_attn = effops.nn.MultiheadAttention(
                EMBED, HEADS, batch_first=True, device=device, dtype=torch.float64, attention=attention
            ).eval()
            switched.self_attn.load_state_dict(state, strict=attention != "additive")
            found[attention] = switched(x)
    torch.testing.assert_close(found["fused"], expected)
    torch.testing.assert_close(found["naive"], expected)
    assert not torch.allclose(found["additive"], expected)
    assert not torch.allclose(found["log_sparse"], expected)


@pytest.mark.parametrize("attention", ["additive", "log_sparse"])
def test_heads_attend_as_the_ops_do(attention, device, generator):
    layer = effops.nn.MultiheadAttention(
        EMBED, HEADS, batch_first=True, device=device, dtype=torch.float64, attention=attention, local=2
    )
    x = random(2, 9, EMBED, device=device, generator=generator)
    found, weights = layer(x, x, x, need_weights=False)
    assert weights is None
    projected = torch.nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    query, key, value = (one.view(2, 9, HEADS, -1).transpose(1, 2) for one in projected.chunk(3, -1))
    if attention == "additive":
        expected = effops.additive_attention(query, key, value, layer.additive_weight)
    else:
        expected = effops.log_sparse_attention(query, key, value, 2)
    torch.testing.assert_close(found, layer.out_proj(expected.transpose(1, 2).flatten(2)))
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_causal_additive_attention_sees_no_later_key(device, generator):
    layer = effops.nn.MultiheadAttention(
        EMBED, HEADS, batch_first=True, device=device, dtype=torch.float64, attention="additive"
    )
    x = random(1, 9, EMBED, device=device, generator=generator)
    changed = x.clone()
    changed[:, 5:] = 0
    first, second = (layer(one, one, one, need_weights=False, is_causal=True)[0] for one in (x, changed))
    torch.testing.assert_close(first[:, :5], second[:, :5])


def test_dropout_is_for_training(device, generator):
    layer = effops.nn.MultiheadAttention(EMBED, HEADS, dropout=0.5, batch_first=True, device=device)
    x = torch.randn(1, 9, EMBED, generator=generator).to(device)
    assert not torch.equal(*(layer(x, x, x, need_weights=False)[0] for _ in range(2)))
    layer.eval()
    assert torch.equal(*(layer(x, x, x, need_weights=False)[0] for _ in range(2)))


def test_bad_arguments(device):
    for options, message in (
        ({"attention": "linear"}, "`attention` must be one of fused, naive, additive, log_sparse"),
        ({"add_zero_attn": True, "attention": "log_sparse"}, "`add_bias_kv` and `add_zero_attn` must be False"),
        ({"dropout": 0.1, "attention": "additive"}, "`dropout` must be 0 if attention='additive'"),
    ):
        with pytest.raises(ValueError, match=message):
            effops.nn.MultiheadAttention(EMBED, HEADS, **options)
    layer = effops.nn.MultiheadAttention(EMBED, HEADS, attention="log_sparse", device=device)
    x = torch.zeros(9, 1, EMBED, device=device)
    with pytest.raises(ValueError, match="`need_weights` must be False"):
        layer(x, x, x, need_weights=True)
    with pytest.raises(ValueError, match="masks must be None"):
        layer(x, x, x, need_weights=False, attn_mask=torch.zeros(9, 9, device=device))


@pytest.mark.parametrize("attention", ["additive", "log_sparse"])
def test_layers_without_weights_of_all_pairs_return_none_for_them(attention, device):
    layer = effops.nn.MultiheadAttention(EMBED, HEADS, attention=attention, device=device)
    x = torch.randn(9, 2, EMBED, device=device)
    result, weights = layer(x, x, x)
    assert weights is None
    assert torch.equal(result, layer(x, x, x, need_weights=False)[0])
    with pytest.raises(ValueError, match=f"`need_weights` must be False if attention='{attention}'.*; got True"):
        layer(x, x, x, need_weights=True)


@pytest.mark.parametrize(
    ("shapes", "masks", "message"),
    [
        (((5, 3, EMBED), (7, EMBED), (7, EMBED)), {}, "`key` must have 3 dimensions, as `query`"),
        (((5, EMBED), (7, 3, EMBED), (7, 3, EMBED)), {}, "`key` must have 2 dimensions, as `query`"),
        (((5, EMBED), (7, EMBED), (7, 3, EMBED)), {}, "`value` must have 2 dimensions, as `query`"),
        (((EMBED,), (EMBED,), (EMBED,)), {}, "`query` must have 3 dimensions, or 2 without a batch"),
        (((2, 5, 3, EMBED),) * 3, {}, "`query` must have 3 dimensions, or 2 without a batch"),
        (((5, 3, EMBED), (7, 2, EMBED), (7, 2, EMBED)), {}, "must have one batch size"),
        (((5, 1, EMBED), (7, 3, EMBED), (7, 3, EMBED)), {}, "must have one batch size"),
        (((5, 3, EMBED), (7, 3, EMBED), (6, 3, EMBED)), {}, "`key` and `value` one length"),
        (((5, 3, EMBED), (7, 3, EMBED), (7, 3, EMBED)), {"attn_mask": (7,)}, "`attn_mask` must have the shape"),
        (((5, 3, EMBED), (7, 3, EMBED), (7, 3, EMBED)), {"attn_mask": (1, 7)}, "`attn_mask` must have the shape"),
        (((5, 3, EMBED), (7, 3, EMBED), (7, 3, EMBED)), {"attn_mask": (3, 5, 7)}, "`attn_mask` must have the shape"),
        (((5, EMBED), (7, EMBED), (7, EMBED)), {"attn_mask": (1, 5, 7)}, "`attn_mask` must have the shape"),
        (((5, 3, EMBED), (7, 3, EMBED), (7, 3, EMBED)), {"key_padding_mask": (7,)}, "must have 2 dimensions"),
        (((5, 3, EMBED), (7, 3, EMBED), (7, 3, EMBED)), {"key_padding_mask": (1, 7)}, "shape (batch, keys) = (3, 7)"),
        (((5, EMBED), (7, EMBED), (7, EMBED)), {"key_padding_mask": (1, 7)}, "must have 1 dimension, as"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_shapes_that_pytorch_refuses(shapes, masks, message, device, generator):
    """Some of them broadcast, and would attend over other axes than meant."""
    theirs, ours = layers(device, generator)
    tensors = [random(*shape, device=device, generator=generator) for shape in shapes]
    masks = {name: torch.zeros(shape, dtype=torch.bool, device=device) for name, shape in masks.items()}
    with pytest.raises((AssertionError, RuntimeError)):
        theirs(*tensors, **masks)
    with pytest.raises(ValueError, match=re.escape(message)):
        ours(*tensors, **masks)


def test_a_scripted_model_is_refused(device, generator):
    model = torch.nn.Sequential(layers(device, generator)[1])
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script cannot compile .* use torch\.compile"):
        torch.jit.script(model)
