"""What PyTorch's own tests check of its layer, asked of `effops.nn.MultiheadAttention`: scripting and nesting aside."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import effops

BOTH = pytest.mark.parametrize("batch_first", [False, True], ids=["time first", "batch first"])


def random(*shape, generator, device, dtype=torch.float64):
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


def layers(embed, heads, generator, device, dtype=torch.float64, **options):
    """PyTorch's layer with parameters at random, none of them 0, and ours with its state."""
    theirs = nn.MultiheadAttention(embed, heads, **options, device=device, dtype=dtype)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(random(*parameter.shape, generator=generator, device=device) / 2)
    ours = effops.nn.MultiheadAttention(embed, heads, **options, device=device, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def definition(layer, query, key, value, taken):
    """Result and weights of one example, head by head. `taken` (queries, keys) says which pairs take part."""
    weights, biases = layer.in_proj_weight, layer.in_proj_bias.chunk(3)
    weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight) if weights is None else weights.chunk(3)
    query, key, value = (x @ w.T + b for x, w, b in zip((query, key, value), weights, biases))
    if layer.bias_k is not None:
        key, value = torch.cat((key, layer.bias_k[0])), torch.cat((value, layer.bias_v[0]))
    if layer.add_zero_attn:
        key, value = (torch.cat((one, torch.zeros_like(one[:1]))) for one in (key, value))
    added = key.shape[0] - taken.shape[1]
    taken = torch.cat((taken, torch.ones_like(taken[:, :1]).expand(-1, added)), 1)
    results, shares = [], []
    for q, k, v in zip(*(one.chunk(layer.num_heads, 1) for one in (query, key, value))):
        exponentials = torch.exp(q @ k.T / q.shape[1] ** 0.5) * taken
        shares.append(exponentials / exponentials.sum(1, keepdim=True))
        results.append(shares[-1] @ v)
    return torch.cat(results, 1) @ layer.out_proj.weight.T + layer.out_proj.bias, torch.stack(shares)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    ("added", "padded", "other_sizes"),
    [("", False, False), ("", True, True), ("zero", False, True), ("kv", True, False), ("kv zero", True, True)],
)
def test_result_and_weights_are_those_of_the_definition(added, padded, other_sizes, average, device, generator):
    sizes = {"kdim": 5, "vdim": 7} if other_sizes else {}
    for batch, queries, keys, heads, per_head in ((2, 1, 9, 2, 3), (1, 4, 4, 3, 1), (3, 5, 2, 1, 4)):
        embed = heads * per_head
        options = {"add_bias_kv": "kv" in added, "add_zero_attn": "zero" in added, **sizes}
        layer = layers(embed, heads, generator, device, **options)[1]
        widths = (embed, layer.kdim, layer.vdim)
        tensors = [
            random(length, batch, width, generator=generator, device=device)
            for length, width in zip((queries, keys, keys), widths)
        ]
        left_out = (torch.rand(queries, keys, generator=generator) < 0.3).to(device)
        padding = (torch.rand(batch, keys, generator=generator) < 0.3 * padded).to(device)
        left_out[:, 0] = padding[:, 0] = False
        result, weights = layer(
            *tensors,
            key_padding_mask=padding if padded else None,
            attn_mask=torch.zeros_like(left_out, dtype=torch.float64).masked_fill(left_out, -torch.inf),
            average_attn_weights=average,
        )
        for i in range(batch):
            taken = ~(left_out | padding[i])
            found = definition(layer, *(tensor[:, i] for tensor in tensors), taken)
            torch.testing.assert_close(result[:, i], found[0])
            torch.testing.assert_close(weights[i], found[1].mean(0) if average else found[1])


def test_a_mask_of_each_example_and_head(device, generator):
    """One call equals a call for each example. Some queries take part with no key."""
    batch, queries, keys, heads = 8, 2, 3, 4
    layer = layers(8, heads, generator, device)[1]
    query, key = (random(length, batch, 8, generator=generator, device=device) for length in (queries, keys))
    masks = (torch.rand(batch, queries, keys, generator=generator) < 0.5).to(device)
    assert masks.all(-1).any()
    together = layer(query, key, key, attn_mask=masks.repeat_interleave(heads, 0))[0]
    for i in range(batch):
        alone = layer(query[:, i : i + 1], key[:, i : i + 1], key[:, i : i + 1], attn_mask=masks[i])[0]
        torch.testing.assert_close(together[:, i : i + 1], alone)


def test_no_bias():
    layer = effops.nn.MultiheadAttention(8, 4, bias=False)
    assert layer.in_proj_bias is None
    assert layer.out_proj.bias is None


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype, batch_first, device, generator):
    layer = effops.nn.MultiheadAttention(16, 4, batch_first=batch_first).to(device, dtype)
    x = random(5, 3, 16, generator=generator, device=device, dtype=dtype)
    for training, weights in itertools.product((True, False), repeat=2):
        with torch.set_grad_enabled(training):
            result, held = layer.train(training)(x, x, x, need_weights=weights)
        assert (result.shape, result.dtype) == (x.shape, dtype)
        assert (held is not None) == weights


def test_a_bias_of_a_narrower_dtype(device, generator):
    theirs, ours = layers(4, 4, generator, device, batch_first=True)
    x = random(4, 4, 4, generator=generator, device=device)
    for layer in (theirs, ours):
        layer.in_proj_bias = nn.Parameter(layer.in_proj_bias.half())
    with torch.no_grad():
        for tensors in ((x, x, x), (x, x.clone(), x.clone())):
            torch.testing.assert_close(ours.eval()(*tensors), theirs.eval()(*tensors))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["wider", "narrower"])
@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_a_mask_of_another_dtype_leaves_that_of_the_result(name, dtype, device, generator):
    layer = layers(4, 2, generator, device, dtype=torch.float32)[1]
    x = random(3, 2, 4, generator=generator, device=device, dtype=torch.float32)
    mask = torch.zeros(*((3, 3) if name == "attn_mask" else (2, 3)), device=device)
    mask[:, 1] = -2.5
    torch.testing.assert_close(layer(x, x, x, **{name: mask.to(dtype)})[0], layer(x, x, x, **{name: mask})[0])


@pytest.mark.parametrize("numbers", [False, True], ids=["booleans", "numbers"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("dims", [None, 2, 3])
def test_masks_in_training_and_after(dims, padded, numbers, device, generator):
    """PyTorch's layer takes another path in evaluation. There it may give NaN where nothing takes part."""
    batch, length, heads = 2, 4, 4
    theirs, ours = layers(8, heads, generator, device, batch_first=True)
    x = random(batch, length, 8, generator=generator, device=device)
    shapes = {"attn_mask": (length, length) if dims == 2 else (batch * heads, length, length) if dims else None}
    shapes["key_padding_mask"] = (batch, length) if padded else None
    masks = {name: random(*shape, generator=generator, device=device) for name, shape in shapes.items() if shape}
    masks = masks if numbers else {name: mask < -0.5 for name, mask in masks.items()}
    with torch.no_grad():
        for training, other in itertools.product((True, False), repeat=2):
            found = ours.train(training)(x, x, x, **masks, need_weights=False)[0]
            expected = theirs.train(other)(x, x, x, **masks, need_weights=False)[0]
            expected = expected if other else torch.where(expected.isnan(), found, expected)
            torch.testing.assert_close(found, expected)


@BOTH
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=["none", "kv", "zero"])
def test_no_batch_is_a_batch_of_one(added, bias, batch_first, device, generator):
    """Also its gradients, and of tensors that are not contiguous."""
    theirs, ours = layers(3, 3, generator, device, bias=bias, batch_first=batch_first, **added)
    tensors = [random(3, 3, generator=generator, device=device).T.requires_grad_() for _ in range(3)]
    masked = torch.tensor([False, False, True], device=device)
    axis = 0 if batch_first else 1
    for padding, mask in itertools.product((None, masked), (None, masked.expand(3, 3, 3))):
        found = ours(*tensors, key_padding_mask=padding, attn_mask=mask)
        batched = [tensor.unsqueeze(axis) for tensor in tensors]
        one = ours(*batched, key_padding_mask=None if padding is None else padding.unsqueeze(0), attn_mask=mask)
        expected = theirs(*tensors, key_padding_mask=padding, attn_mask=mask)
        torch.testing.assert_close(found, (one[0].squeeze(axis), one[1].squeeze(0)))
        torch.testing.assert_close(found, expected)
        gradients = (torch.autograd.grad(result.square().sum(), tensors) for result, _ in (found, expected))
        torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [True, False])
def test_derivatives(weights, device, generator):
    options = {"add_bias_kv": True, "add_zero_attn": True}
    layer = layers(4, 2, generator, device, **options)[1]
    tensors = [random(3, 2, 4, generator=generator, device=device).requires_grad_() for _ in range(3)]
    parameters = dict(layer.named_parameters())

    def function(query, key, value, *values):
        given = dict(zip(parameters, values))
        found = torch.func.functional_call(layer, given, (query, key, value), {"need_weights": weights})
        return found if weights else found[0]

    assert torch.autograd.gradcheck(function, (*tensors, *parameters.values()))
    assert torch.autograd.gradgradcheck(function, (*tensors, *parameters.values()))


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 2), (2, 0, 2), (2, 3, 0), (2, 0, 0)])
def test_nothing_is_a_size_too(batch, queries, keys, device, generator):
    """Masks of each example and head once raised."""
    layer = layers(8, 4, generator, device, batch_first=True)[1]
    query, key = (random(batch, length, 8, generator=generator, device=device) for length in (queries, keys))
    for shape in (None, (queries, keys), (batch * 4, queries, keys)):
        mask = None if shape is None else torch.zeros(shape, dtype=torch.bool, device=device)
        padding = torch.zeros(batch, keys, dtype=torch.bool, device=device)
        result, weights = layer(query, key, key, key_padding_mask=padding, attn_mask=mask)
        assert weights.shape == (batch, queries, keys)
        assert result.shape == (batch, queries, 8)
        if keys == 0:
            torch.testing.assert_close(result, layer.out_proj.bias.expand_as(result))


def test_a_layer_is_made_where_it_is_told(device):
    layer = effops.nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=3, device="meta", dtype=torch.float64)
    assert {(str(one.device), one.dtype) for one in layer.parameters()} == {("meta", torch.float64)}
    made = nn.utils.skip_init(effops.nn.MultiheadAttention, 8, 2, device=device)
    assert {one.device.type for one in made.parameters()} == {torch.device(device).type}


@pytest.mark.parametrize("options", [{}, {"kdim": 3}, {"add_bias_kv": True}], ids=["", "kdim", "kv"])
def test_the_same_seed_gives_the_same_parameters(options):
    """When a layer is made, and when one that was made elsewhere is initialised."""
    found = {}
    for made in (nn.MultiheadAttention, effops.nn.MultiheadAttention):
        torch.manual_seed(0)
        layer = made(8, 2, **options)
        first = [one.clone() for one in layer.parameters()]
        torch.manual_seed(1)
        layer._reset_parameters()
        found[made] = [*first, *layer.parameters()]
    torch.testing.assert_close(*found.values(), rtol=0, atol=0)
    additive = effops.nn.MultiheadAttention(8, 2, attention="additive")
    before = additive.additive_weight.clone()
    additive._reset_parameters()
    assert not torch.equal(additive.additive_weight, before)
    assert additive.additive_weight.abs().max() <= 0.5


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies(way, device, generator):
    layer = layers(8, 2, generator, device, add_bias_kv=True)[1].eval()
    x = random(3, 2, 8, generator=generator, device=device)
    if way == "save":
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    else:
        other = copy.deepcopy(layer) if way == "deepcopy" else pickle.loads(pickle.dumps(layer))
    torch.testing.assert_close(other(x, x, x), layer(x, x, x), rtol=0, atol=0)
    assert not other.training


def test_parameters_that_something_else_computes(device, generator):
    """Pruned and normalised weights are attributes, no longer parameters."""
    x = random(3, 2, 8, generator=generator, device=device)
    results = []
    for layer in layers(8, 2, generator, device):
        prune.l1_unstructured(layer, "in_proj_weight", 0.5)
        parametrizations.spectral_norm(layer.out_proj)
        layer.eval()
        layer.out_proj.parametrizations.weight[0]._v.fill_(1)
        layer.out_proj.parametrizations.weight[0]._u.fill_(1)
        results.append(layer(x, x, x))
    torch.testing.assert_close(*results)


def test_hooks_of_the_layer_run(device, generator):
    encoder = nn.TransformerEncoderLayer(12, 4, 12, batch_first=True, device=device, dtype=torch.float64).eval()
    encoder = switched(encoder)
    seen = []
    encoder.self_attn.register_forward_hook(lambda module, inputs, output: seen.append(output[0].shape))
    with torch.inference_mode():
        encoder(random(2, 4, 12, generator=generator, device=device))
    assert seen == [(2, 4, 12)]


def switched(model):
    """A copy of a model of PyTorch's with our layers in the place of its own."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.MultiheadAttention):
                options = {"bias": child.in_proj_bias is not None, "batch_first": child.batch_first}
                ours = effops.nn.MultiheadAttention(child.embed_dim, child.num_heads, child.dropout, **options)
                ours.to(child.out_proj.weight).load_state_dict(child.state_dict())
                setattr(parent, name, ours.train(child.training))
    return model


@BOTH
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("heads", [1, 2])
def test_inside_encoders_and_decoders(heads, training, batch_first, device, generator):
    """With every mask, alone and together; with a batch as long as its sequences; and with an empty one."""
    options = {"dropout": 0.0, "batch_first": batch_first, "device": device, "dtype": torch.float64}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, heads, 6, **options), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, heads, 6, **options), 2)
    for batch, length in ((2, 5), (3, 3), (0, 4)):
        shape = (batch, length, 4) if batch_first else (length, batch, 4)
        x, memory = (random(*shape, generator=generator, device=device) for _ in range(2))
        causal = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        padding = torch.zeros(batch, length, dtype=torch.bool, device=device)
        padding[:1, -1:] = padding[1:, 1:2] = True
        added = [torch.zeros_like(one, dtype=x.dtype).masked_fill(one, -torch.inf) for one in (causal, padding)]
        for given in ({}, {"mask": causal}, {"mask": added[0], "is_causal": True}):
            of_target = {f"tgt_{name}": one for name, one in given.items()}
            compare(encoder.train(training), (x,), given)
            compare(decoder.train(training), (x, memory), of_target)
            if batch:  # PyTorch's layer raises for the padding of an empty one
                padded = added[1] if "is_causal" in given else padding
                compare(encoder, (x,), {**given, "src_key_padding_mask": padded})
                of_target |= {"tgt_key_padding_mask": padded, "memory_key_padding_mask": padding}
                compare(decoder, (x, memory), of_target)


def compare(model, tensors, options):
    with torch.set_grad_enabled(model.training):
        torch.testing.assert_close(switched(model)(*tensors, **options), model(*tensors, **options))


@pytest.mark.compiled
def test_an_encoder_in_one_graph(device, generator):
    options = {"batch_first": True, "device": device, "dtype": torch.float64}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, **options), 2, enable_nested_tensor=False)
    encoder = switched(encoder).eval()
    x = random(1, 41, 16, generator=generator, device=device)
    padding = (torch.rand(1, 41, generator=generator) < 0.5).to(device)
    padding[:, 0] = True
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(x, mask=None, src_key_padding_mask=padding), encoder(x, src_key_padding_mask=padding)
    )


def test_nested_tensors_are_refused(device):
    """An encoder that was made with PyTorch's layers makes nested tensors of padded ones."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), 1).to(device).eval()
    padding = torch.tensor([[False, False, True], [False, False, False]], device=device)
    with torch.no_grad(), pytest.raises(TypeError, match=r"`query` must be dense.*; .*enable_nested_tensor=False"):
        switched(encoder)(torch.zeros(2, 3, 4, device=device), src_key_padding_mask=padding)
    ragged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged, device=device)
    with pytest.raises(TypeError, match="`query` must be dense; got a nested tensor; pad it"):
        effops.nn.MultiheadAttention(4, 2, batch_first=True, device=device)(ragged, ragged, ragged)
