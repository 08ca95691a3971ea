"""Models of Hugging Face's transformers, small and random, with attention of effops against "sdpa" and "eager"."""

import contextlib
import copy
import doctest
import functools
import importlib
import inspect
import pathlib
import re
import sys

import pytest
import torch
from packaging.version import Version

import effops
from effops.measure import Pass, memory
from effops.memory.models.bert import checkpoint_layers

hf = pytest.importorskip("transformers")
LENGTH, LAYERS, HEADS, VOCABULARY = 9, 2, 4, 50
NAME = "effops"
# Some models compute eager attention in float32, whatever their dtype. In float64 that is less exact than the tests
# ask, and gives NaN to queries that are padding.
OTHERS = [("sdpa", torch.float64), ("eager", torch.float32)]
LARGE = 0.2  # weights so large that attention prefers some keys
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "initializer_range": LARGE,
    **TOKENS,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": LAYERS, "n_head": HEADS, "initializer_range": LARGE, **TOKENS}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 20, "num_layers": LAYERS, "num_heads": HEADS, "decoder_start_token_id": 1}
BART = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 20}.items()
}
BART |= {"d_model": 32, "init_std": LARGE, "tie_word_embeddings": False, **TOKENS}
T5_SUPPORTS_SDPA = hf.T5Model._supports_sdpa
MODELS = {
    "bert": (hf.BertModel, hf.BertConfig, SIZES),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, GROUPED),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {**GROUPED, "sliding_window": 4}),
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config, {**T5, **TOKENS}),
    "bart": (hf.BartForConditionalGeneration, hf.BartConfig, BART),
}
PICTURES = {name: size for name, size in SIZES.items() if name not in TOKENS} | {"image_size": 8, "patch_size": 4}
SAM = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS, "mlp_dim": 20, "output_channels": 8}
SAM |= {"image_size": 32, "patch_size": 8, "global_attn_indexes": [1], "window_size": 2}


@pytest.fixture(autouse=True)
def registered():
    effops.register_transformers()


def model(name, attention, device, dtype=torch.float64, **options):
    """The same weights for every attention."""
    made, config, sizes = MODELS[name]
    if name == "t5" and not T5_SUPPORTS_SDPA:
        pytest.skip('T5 of this transformers does not support "sdpa"')
    torch.manual_seed(0)
    return made._from_config(config(**sizes, **options), attn_implementation=attention).to(device, dtype).eval()


def inputs(name, device, generator, padded=False):
    """Arguments of a model, and where its result means something. Decoders are padded on the left, encoders on both."""
    tokens, others = torch.randint(3, VOCABULARY, (2, 2, LENGTH), generator=generator).to(device)
    present = torch.ones(2, LENGTH, dtype=torch.bool, device=device)
    if padded:
        present[0, :3] = False
        if name in ("bert", "t5", "bart"):
            present[1, -2:] = False
    masks = {"attention_mask": present.long()} if padded else {}
    if name not in ("t5", "bart"):
        return {"input_ids": tokens, **masks}, present
    return {"input_ids": tokens, **masks, "decoder_input_ids": others}, torch.ones_like(present)


def picture_model(attention, device, dtype=torch.float64, **options):
    torch.manual_seed(0)
    config = hf.ViTConfig(**PICTURES, **options)
    return hf.ViTModel._from_config(config, attn_implementation=attention).to(device, dtype).eval()


def pictures(device, generator, dtype=torch.float64):
    return torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64).to(device, dtype)


def calls_of(name):
    return LAYERS * (3 if name in ("t5", "bart") else 1)  # of an encoder, a decoder, and between them


def assert_close(found, expected):
    """Compare gradients by name, in units of the largest."""
    scale = max(gradient.abs().max() for gradient in expected.values())
    torch.testing.assert_close(*({name: one / scale for name, one in side.items()} for side in (found, expected)))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("other", "dtype"), OTHERS)
@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients(name, other, dtype, padded, device, generator):
    arguments, meaningful = inputs(name, device, generator, padded)
    results, gradients = [], []
    for attention in (NAME, other):
        one = model(name, attention, device, dtype)
        with effops.record() as calls:
            result = one(**arguments)[0][meaningful]
        assert [call.op for call in calls] == ["attention"] * (calls_of(name) if attention == NAME else 0)
        result.square().sum().backward()
        results.append(result)
        gradients.append({weight: p.grad for weight, p in one.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*results)
    assert_close(*gradients)


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize(("other", "dtype"), OTHERS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "bert"])
def test_generated_tokens(name, other, dtype, cache, device, generator):
    """A step has one query and all keys seen so far; with a static cache, also keys that are still to come."""
    options = {"use_cache": False} if cache == "none" else {"cache_implementation": cache}
    arguments, _ = inputs(name, device, generator, padded=True)
    arguments.pop("decoder_input_ids", None)
    options |= {"max_new_tokens": 7, "do_sample": False, "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model(name, other, device, dtype).generate(**arguments, **options)
    with effops.record() as calls:
        found = model(name, NAME, device, dtype).generate(**arguments, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits)
    shapes = [(call.shapes["query"][-2], call.shapes["key"][-2]) for call in calls]
    assert len(shapes) >= 7 * LAYERS
    assert any(queries != keys for queries, keys in shapes) == (cache != "none" or name in ("t5", "bart"))


def test_a_static_cache_without_padding(device, generator):
    """The first step has keys that are still to come; there, transformers makes no mask for "sdpa"."""
    arguments, _ = inputs("llama", device, generator)
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    found, expected = (model("llama", name, device).generate(**arguments, **options) for name in (NAME, "sdpa"))
    assert torch.equal(found, expected)


def test_generated_beams(device, generator):
    arguments, _ = inputs("llama", device, generator, padded=True)
    options = {"max_new_tokens": 7, "do_sample": False, "num_beams": 3}
    found, expected = (model("llama", name, device).generate(**arguments, **options) for name in (NAME, "sdpa"))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["packed", "four axes", "numbers"])
def test_masks_of_other_kinds(kind, device, generator):
    """Sequences one after another, which their positions tell apart; a mask of all pairs; one that is added."""
    arguments, _ = inputs("llama", device, generator)
    if kind == "packed":
        positions = torch.cat((torch.arange(4), torch.arange(LENGTH - 4))).to(device)
        arguments.update(position_ids=positions.expand(2, LENGTH), use_cache=False)
    else:
        pairs = (torch.rand(2, 1, LENGTH, LENGTH, generator=generator) < 0.5) | torch.eye(LENGTH, dtype=torch.bool)
        added = torch.zeros(pairs.shape, dtype=torch.float64).masked_fill(~pairs, torch.finfo(torch.float64).min)
        arguments["attention_mask"] = (pairs if kind == "four axes" else added).to(device)
    whole = model("llama", NAME, device)(input_ids=arguments["input_ids"])[0]
    found = model("llama", NAME, device)(**arguments)[0]
    assert not torch.allclose(found, whole)
    torch.testing.assert_close(found, model("llama", "sdpa", device)(**arguments)[0])


def test_a_model_that_exists_switches(device, generator):
    arguments, _ = inputs("llama", device, generator)
    switched = model("llama", "sdpa", device)
    expected = switched(**arguments)[0]
    switched.set_attn_implementation(NAME)
    with effops.record() as calls:
        torch.testing.assert_close(switched(**arguments)[0], expected)
    assert len(calls) == calls_of("llama")


def test_checkpoints(device, generator):
    arguments, _ = inputs("llama", device, generator, padded=True)
    gradients = []
    for checkpoints in (False, True):
        one = model("llama", NAME, device).train()
        if checkpoints:
            checkpoint_layers(one)
        with effops.record() as calls:
            one(**arguments, use_cache=False)[0].square().mean().backward()
        assert len(calls) == LAYERS * (1 + checkpoints)
        gradients.append([p.grad for p in one.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.compiled
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_compiled_in_one_graph(padded, device, generator):
    arguments, _ = inputs("llama", device, generator, padded)
    one = model("llama", NAME, device)
    compiled = torch.compile(one, fullgraph=True, backend="eager")
    for length in (LENGTH, LENGTH - 1):  # at the second one sizes are left open
        cut = {name: tensor[:, :length] for name, tensor in arguments.items()}
        torch.testing.assert_close(compiled(**cut)[0], one(**cut)[0])


class Layer(torch.nn.Module):
    """What transformers hands over as the module: it has a mode, and may say whether it is causal."""

    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)


def attend(layer, query, key, value, mask=None, **options):
    """What the registered function gives, as (batch, heads, queries, D)."""
    result, weights = hf.AttentionInterface()[NAME](layer, query, key, value, mask, **options)
    assert weights is None
    assert result.is_contiguous()
    return result.transpose(1, 2)


def operands(generator, device, queries=5, keys=5, dtype=torch.float64):
    shapes = (2, HEADS, queries, 8), (2, 2, keys, 8), (2, 2, keys, 6)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def expected(query, key, value, added=0.0, scale=None):
    scores = query @ key.repeat_interleave(2, 1).mT * (8**-0.5 if scale is None else scale) + added
    return scores.softmax(-1) @ value.repeat_interleave(2, 1)


def test_who_says_what_is_causal(device, generator):
    """The argument, else the module, else it is; but a mask says all, and one query sees all keys."""
    given, later = operands(generator, device), torch.full((5, 5), -torch.inf, device=device).triu(1)
    causal, whole = expected(*given, later), expected(*given)
    torch.testing.assert_close(attend(Layer(), *given), causal)
    torch.testing.assert_close(attend(Layer(is_causal=True), *given), causal)
    torch.testing.assert_close(attend(Layer(is_causal=False), *given), whole)
    torch.testing.assert_close(attend(Layer(is_causal=True), *given, is_causal=False), whole)
    torch.testing.assert_close(attend(Layer(is_causal=False), *given, is_causal=True), causal)
    every = torch.ones(2, 1, 5, 5, dtype=torch.bool, device=device)
    torch.testing.assert_close(attend(Layer(is_causal=True), *given, every), whole)
    one = operands(generator, device, queries=1)
    torch.testing.assert_close(attend(Layer(is_causal=True), *one), expected(*one))


def test_arguments_of_the_interface(device, generator):
    given, layer = operands(generator, device, keys=7), Layer(is_causal=False)
    torch.testing.assert_close(attend(layer, *given, scaling=0.3), expected(*given, scale=0.3))
    torch.testing.assert_close(attend(layer, *given, sliding_window=7), expected(*given))
    bias = torch.randn(1, HEADS, 5, 7, generator=generator, dtype=torch.float64).to(device)
    torch.testing.assert_close(attend(layer, *given, position_bias=bias), expected(*given, bias))
    added = torch.randn(2, 1, 5, 7, generator=generator, dtype=torch.float64).to(device)
    torch.testing.assert_close(attend(layer, *given, added, position_bias=bias), expected(*given, bias + added))
    taken = torch.ones(2, 1, 5, 7, dtype=torch.bool, device=device).tril()
    lowest = torch.zeros_like(added).masked_fill(~taken, -torch.inf)
    torch.testing.assert_close(attend(layer, *given, taken, position_bias=bias), expected(*given, bias + lowest))
    square = operands(generator, device)
    later = torch.full((5, 5), -torch.inf, device=device).triu(1)
    found = attend(layer, *square, position_bias=bias[..., :5], is_causal=True)
    torch.testing.assert_close(found, expected(*square, bias[..., :5] + later))


def test_a_mask_of_a_wider_dtype_widens_nothing(device, generator):
    given = operands(generator, device, dtype=torch.bfloat16)
    mask = torch.randn(2, 1, 5, 5, generator=generator).to(device)
    found = attend(Layer(), *given, mask)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected(*(one.double() for one in given), mask).to(torch.bfloat16))


def test_dropout_is_for_training(device, generator):
    """A layer may give its probability in either mode, as eager attention expects it."""
    layer, given = Layer(), operands(generator, device)
    assert attend(layer.train(), *given, dropout=1.0).count_nonzero() == 0
    torch.testing.assert_close(attend(layer.eval(), *given, dropout=1.0), attend(layer, *given))
    trained = model("llama", NAME, device, attention_dropout=0.5).train()
    arguments, _ = inputs("llama", device, generator)
    assert not torch.equal(*(trained(**arguments)[0] for _ in range(2)))
    assert torch.equal(*(trained.eval()(**arguments)[0] for _ in range(2)))


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("softcap", 50.0),
        ("s_aux", torch.zeros(HEADS)),
        ("sinks", torch.zeros(2, HEADS, 5, 1)),
        ("indices", torch.zeros(2, 5, 3, dtype=torch.long)),
        ("head_mask", torch.ones(LAYERS, HEADS)),
        ("cu_seq_lens_q", torch.tensor([0, 3, 5])),
        ("cache", object()),
        ("output_attentions", True),
        ("unheard_of", 1),
    ],
)
def test_keywords_that_are_not_honoured(keyword, value, device, generator):
    given = operands(generator, device)
    with pytest.raises(NotImplementedError, match=rf'"effops": `{keyword}` must be None; got .* from Layer; leave it'):
        attend(Layer(), *given, **{keyword: value})
    torch.testing.assert_close(attend(Layer(), *given, **{keyword: None}), attend(Layer(), *given))


def test_keywords_that_change_nothing(device, generator):
    given, tokens = operands(generator, device), torch.arange(5, device=device)
    options = {"position_ids": tokens, "num_items_in_batch": tokens.sum(), "use_cache": True}
    options |= {"output_hidden_states": True, "output_router_logits": True, "output_attentions": False}
    torch.testing.assert_close(attend(Layer(), *given, **options), attend(Layer(), *given))


def test_missing_masks(device, generator):
    """Without a mask, nothing says where fewer queries than keys are, nor that a window is already in it."""
    longer = operands(generator, device, keys=7)
    with pytest.raises(NotImplementedError, match=r"must have an `attention_mask`.*got none for 5 queries and 7 keys"):
        attend(Layer(is_causal=True), *longer)
    with pytest.raises(NotImplementedError, match="sliding window must be in `attention_mask`; got none for 7 keys"):
        attend(Layer(is_causal=False), *longer, sliding_window=6)


@pytest.mark.parametrize("name", [*MODELS, "vit"])
def test_weights_are_not_returned(name, device, generator):
    """GPT-2 once returned no weights, as an empty tuple, since it drops the keyword before attention sees it."""
    one, arguments = picture_model, {"pixel_values": pictures(device, generator)}
    if name != "vit":
        one, (arguments, _) = functools.partial(model, name), inputs(name, device, generator)
    with pytest.raises(NotImplementedError, match="`output_attentions` must be None; got True from "):
        one(NAME, device)(**arguments, output_attentions=True)
    configured = one(NAME, device, output_attentions=True)
    with pytest.raises(NotImplementedError, match=r"`config.output_attentions` must be False; got True from .*"):
        configured(**arguments)
    configured(**arguments, output_attentions=False)
    configured.set_attn_implementation("eager")
    configured(**arguments, output_attentions=True)


def test_weights_are_not_returned_while_generating(device, generator):
    arguments, _ = inputs("gpt2", device, generator)
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_attentions": True}
    with pytest.raises(NotImplementedError, match="`output_attentions` must be None; got True from GPT2LMHeadModel"):
        model("gpt2", NAME, device).generate(**arguments, **options)


@pytest.mark.parametrize(("other", "dtype"), OTHERS)
def test_pictures(other, dtype, device, generator):
    given, results, gradients = pictures(device, generator, dtype), [], []
    for attention in (NAME, other):
        one = picture_model(attention, device, dtype)
        with effops.record() as calls:
            results.append(one(given)[0])
        assert len(calls) == LAYERS * (attention == NAME)
        results[-1].square().sum().backward()
        gradients.append({weight: p.grad for weight, p in one.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*results)
    assert_close(*gradients)


TABLES = {  # a model, its config, and the sizes of it
    "falcon": ("FalconForCausalLM", "FalconConfig", {"hidden_size": 32, "num_attention_heads": HEADS, **TOKENS}),
    "gptj": ("GPTJModel", "GPTJConfig", {"n_embd": 32, "n_layer": 1, "n_head": HEADS, "rotary_dim": 4, **TOKENS}),
    "gpt_neo": ("GPTNeoModel", "GPTNeoConfig", {"hidden_size": 32, "num_heads": HEADS, **TOKENS}),
    "data2vec": ("Data2VecVisionModel", "Data2VecVisionConfig", {**PICTURES, "num_hidden_layers": 1}),
    "git": ("GitModel", "GitConfig", {**SIZES, "vision_config": PICTURES}),
    "sam": ("SamModel", "SamConfig", {"vision_config": SAM}),
}


LOOKED_UP = re.compile(r"(\w+_CLASSES)\[[\w.]*attn_implementation\]")


@pytest.mark.parametrize("name", TABLES)
def test_layers_by_the_name_of_the_attention(name):
    """They compute attention by themselves. Making one once raised a KeyError of transformers, `'effops'`."""
    made, config, sizes = TABLES[name]
    has_table = LOOKED_UP.search(inspect.getsource(inspect.getmodule(getattr(hf, made))))
    assert has_table or name == "gptj"  # which has none from transformers 5.24 on
    message = r'"effops": layers must take their attention from AttentionInterface; got \w+, which .*; use "eager"'
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=message) if has_table else contextlib.nullcontext():
            getattr(hf, made)._from_config(getattr(hf, config)(**copy.deepcopy(sizes)), attn_implementation=NAME)


def test_layers_that_exist_are_not_renamed():
    """SAM has layers in a table and others that take their attention from the interface."""
    parts = {"": NAME, "vision_config": "eager"}
    one = hf.SamModel._from_config(hf.SamConfig(vision_config=SAM), attn_implementation=parts)
    assert one.mask_decoder.config._attn_implementation == NAME
    one = hf.SamModel._from_config(hf.SamConfig(vision_config=SAM), attn_implementation="sdpa")
    one.set_attn_implementation({"": NAME, "vision_config": "sdpa"})
    with pytest.raises(NotImplementedError, match="layers must take their attention from AttentionInterface"):
        one.set_attn_implementation(NAME)


def test_every_table_of_layers_is_found():
    folder = pathlib.Path(hf.__file__).parent / "models"
    found = {file: set(LOOKED_UP.findall(file.read_text())) for file in folder.glob("*/modeling_*.py")}
    found = {file: names for file, names in found.items() if names}
    assert len(found) >= 10 + any(file.parent.name == "gptj" for file in found)
    for file, names in found.items():
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        one = type("Model", (), {"__module__": module.__name__})
        tables = list(effops.transformers._tables_of_layers(one))
        assert all(any(vars(module)[name] is table for table in tables) for name in names)


def test_models_that_take_no_notice_of_the_name(caplog):
    """Where effops is never asked, as the page says. A model that exists may refuse the name by a logged warning."""
    made, config, sizes = TABLES["falcon"]
    one = getattr(hf, made)._from_config(getattr(hf, config)(**sizes), attn_implementation="sdpa")
    hf.utils.logging.enable_propagation()
    one.set_attn_implementation(NAME)
    assert "does not support setting its attention implementation dynamically" in caplog.text
    assert one.config._attn_implementation == "sdpa"
    sizes = {"d_model": 32, "n_layer": 1, "n_head": HEADS, "d_inner": 20, "vocab_size": VOCABULARY}
    one = hf.XLNetModel._from_config(hf.XLNetConfig(**sizes), attn_implementation=NAME)
    with effops.record() as calls:
        one(torch.arange(5).unsqueeze(0))
    assert not calls


WITHOUT_SDPA = {"Bloom": {"n_layer": 1, "hidden_size": 32, "n_head": HEADS}, "BigBirdPegasus": BART}
if not T5_SUPPORTS_SDPA:
    WITHOUT_SDPA["T5"] = T5


@pytest.mark.parametrize("name", WITHOUT_SDPA)
def test_models_that_do_not_support_sdpa(name, device, generator):
    """Bloom and old T5 add the mask to scores of their own. BigBirdPegasus differs from its eager form."""
    made, config = getattr(hf, f"{name}Model"), getattr(hf, f"{name}Config")
    one = made._from_config(config(**TOKENS | WITHOUT_SDPA[name]), attn_implementation=NAME).to(device)
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator).to(device)
    message = rf'models must support "sdpa".*; got one of {name}Config; use "eager"'
    with pytest.raises(NotImplementedError, match=message):
        one(tokens)
    with pytest.raises(NotImplementedError, match=message):  # whoever makes the mask
        attend(Layer(config=one.config), *operands(generator, device))


@pytest.mark.skipif(not hasattr(hf, "Gemma4TextConfig"), reason="this transformers has no Gemma 4")
def test_a_model_that_cuts_queries_off_its_mask(device, generator):
    """Layers that share keys see the last queries alone. There, no mask once meant the first queries, silently."""
    layers = ["sliding_attention", "full_attention", "full_attention"]
    sizes = {**GROUPED, "num_hidden_layers": 3, "layer_types": layers, "num_kv_shared_layers": 1, "head_dim": 8}
    config = hf.Gemma4TextConfig(
        **sizes, global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY
    )
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator).to(device)
    found = []
    for attention in ("eager", "sdpa", NAME):
        torch.manual_seed(0)
        one = hf.Gemma4ForCausalLM._from_config(copy.deepcopy(config), attn_implementation=attention).to(device).eval()
        with effops.record() as calls:
            found.append(one(tokens, logits_to_keep=1).logits)
    torch.testing.assert_close(found[2], found[0])
    torch.testing.assert_close(found[2], found[1])
    queries = [call.shapes["query"][-2] for call in calls]
    if queries == [LENGTH] * 3:
        assert Version(hf.__version__) < Version("5.23")
        pytest.skip("all layers see all queries in Gemma 4 of this transformers")
    with pytest.raises(NotImplementedError, match="got none for 3 queries and 9 keys"):
        one(tokens, logits_to_keep=3)


@pytest.mark.parametrize("trained", [False, True], ids=["evaluated", "trained"])
def test_memory_is_that_of_no_weights(trained, generator):
    """Eager attention saves the weights of all pairs for backward; with dropout on a CPU, PyTorch's own does too."""
    length, pairs = 600, HEADS * 600 * 600 * 8
    tokens = torch.randint(3, VOCABULARY, (1, length), generator=generator)
    found = {}
    for attention in (NAME, "sdpa", "eager"):
        one = model("bert", attention, "cpu", max_position_embeddings=length).train(trained)
        found[attention] = memory(Pass(lambda tokens, one=one: one(tokens).last_hidden_state, (tokens,)))
    assert found["eager"].saved_bytes >= LAYERS * pairs
    assert (found["sdpa"].saved_bytes >= LAYERS * pairs) == trained
    assert found[NAME].saved_bytes + found[NAME].temporary_bytes < pairs


def test_without_the_package(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "transformers", None)
        with pytest.raises(ImportError, match=r'cannot be imported; .*pip install .*"\.\[transformers\]"'):
            effops.register_transformers()
    monkeypatch.setattr(hf.masking_utils, "sdpa_mask", lambda batch_size, cache_position, kv_length: None)
    with pytest.raises(ImportError, match=r"must be 5.4 or later.*; .*pip install .*transformers"):
        effops.register_transformers()


def test_example_of_the_docstring():
    found = doctest.testmod(effops.transformers, extraglobs={"torch": torch, "effops": effops})
    assert found.attempted >= 6
    assert found.failed == 0
