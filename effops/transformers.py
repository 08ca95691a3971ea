"""Attention of effops inside models of Hugging Face's transformers."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from effops.numerics.shapes import spreads
from effops.ops.attention.dot_product import attention
from effops.pytorch.calls import forward_pre_hooks
from effops.text import how_to_install

NAME = "effops"
# Models hand all of their keywords on to attention. These change nothing that it computes.
INERT = ("num_items_in_batch", "output_hidden_states", "output_router_logits", "position_ids", "use_cache")


def register_transformers() -> None:
    """Make `attn_implementation="effops"` compute the attention of transformers' models by `effops.attention`.

    One call serves all models of the process that are made afterwards, or given the name by
    `model.set_attn_implementation("effops")`. Their attention never holds queries times keys by default, unless a mask
    does. Masks are those that transformers makes for "sdpa", booleans of all pairs where there is padding or a sliding
    window. Heads that share keys, scaling, dropout in training, caches and T5's `position_bias` are honoured. A query
    that takes part with no key, as padding on the left makes them, gives 0, as with "sdpa"; "eager" gives an average.

    What it cannot honour raises in the forward pass: soft caps, sinks, selected keys, packed sequences that only
    `cu_seq_lens_q` tells of, `output_attentions`, a sliding window without a mask, and every keyword that it does not
    know. So does a model that makes masks through transformers but computes attention by itself. A model whose layers
    stand in a table by the names of attention, as Falcon's and SAM's, raises when such a layer is made. A model that
    has neither tables nor masks of transformers takes no notice of the name: `effops.record()` shows what is called.

    Raises:
        ImportError: transformers is not installed, or is older than 5.4

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> effops.register_transformers()
        >>> sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> config = LlamaConfig(vocab_size=99, intermediate_size=64, **sizes)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="effops")
        >>> with effops.record() as calls:
        ...     logits = model(torch.arange(20).unsqueeze(0)).logits
        >>> [call.op for call in calls]
        ['attention', 'attention']
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            f"register_transformers: transformers 5.4 or later cannot be imported; {how_to_install('transformers')}"
        ) from error
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(
            "register_transformers: transformers must be 5.4 or later, whose functions of masks take other arguments; "
            + how_to_install("transformers")
        )
    torch.compiler.assume_constant_result(_check_models)  # here, since it imports the compiler
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_mask)
    _watch(PreTrainedModel)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention (batch, queries, heads, D) of tensors (batch, heads, length, D), as `AttentionInterface` has it."""
    _check_models(type(getattr(module, "config", None)))
    for name, given in others.items():
        if given is not None and given is not False and name not in INERT:
            raise _refusal(module, f"`{name}` must be None", _described(given))
    queries, keys = query.shape[-2], key.shape[-2]
    if attention_mask is None and sliding_window is not None and keys > sliding_window:
        raise _refusal(module, "a sliding window must be in `attention_mask`", f"none for {keys} keys")
    declared: bool = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = queries > 1 and attention_mask is None and declared  # in this order a bool if traced with open sizes
    if causal and queries != keys:
        raise _refusal(
            module,
            "causal attention of another number of queries than keys must have an `attention_mask`, which tells where "
            "the queries are",
            f"none for {queries} queries and {keys} keys",
        )
    mask = attention_mask
    if position_bias is not None:
        mask, causal = _with_bias(position_bias, attention_mask, causal), False
    result = attention(
        query,
        key,
        value,
        mask,
        dropout if module.training else 0.0,
        causal,
        scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if result.dtype.itemsize > query.dtype.itemsize:  # by a mask of a wider dtype
        result = result.to(query.dtype)
    return result.transpose(1, 2).contiguous(), None


def _with_bias(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """What is added to the scores: a bias of all pairs, and the lowest number where a pair does not take part."""
    if causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def _make_mask(
    *, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, config: Any = None, **others: Any
) -> Tensor | None:
    """The mask of a model's pairs, True where they take part, or None, as `AttentionMaskInterface` has it.

    A causal mask is left out only if there are as many queries as keys, or one query. Of other numbers, nothing but the
    mask tells at which keys the queries are: models may cut queries off after the mask is made.
    """
    from transformers.masking_utils import sdpa_mask

    _check_models(type(config))
    mask: Tensor | None = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        allow_is_causal_skip=allow_is_causal_skip and spreads(q_length, kv_length),
        **others,
    )
    return mask


def _check_models(config: type) -> None:
    """Raise if no model of a config supports "sdpa": such models compute something else, or do it by themselves.

    Compiled code takes the answer as it is, and does not trace the search.
    """
    if not _supports_sdpa(config):
        raise NotImplementedError(
            f'attn_implementation="{NAME}": models must support "sdpa", which computes the same; got one of '
            f'{config.__name__}; use "eager", for a part of a model by a dictionary such as {{"": "{NAME}", '
            '"text_config": "eager"}; a class of yours sets _supports_sdpa = True'
        )


@functools.cache
def _supports_sdpa(config: type) -> bool:
    """Whether one of the models of a config supports "sdpa", or none is known."""
    from transformers import PreTrainedModel

    models = [PreTrainedModel]
    for model in models:
        models += model.__subclasses__()
    found = [model._supports_sdpa for model in models if model.config_class is config]
    return any(found) or not found


@functools.cache
def _watch(models: Any) -> None:
    """Have `_prepare` see each model that asks for this attention: when it is made, or given the name later."""
    own = models.get_correct_attn_implementation

    @functools.wraps(own)
    def get_correct_attn_implementation(model: Any, requested_attention: str | None, *others: Any, **named: Any) -> Any:
        if requested_attention == NAME:
            _prepare(model)
        return own(model, requested_attention, *others, **named)

    models.get_correct_attn_implementation = get_correct_attn_implementation


def _prepare(model: Any) -> None:
    """Have a model raise where it makes layers that compute attention by themselves, or is asked for weights.

    When a model is made, its layers do not exist yet. Later they do, and stay what they are.
    """
    for table in _tables_of_layers(type(model)):
        if any(type(module) in table.values() for module in _own_modules(model, model.config)):
            _refuse_layer(table)
        table.setdefault(NAME, functools.partial(_refuse_layer, table))
    if _refuse_weights not in forward_pre_hooks(model).values():
        model.register_forward_pre_hook(_refuse_weights, with_kwargs=True)


def _tables_of_layers(model: type) -> Iterator[dict[str, Any]]:
    """The dictionaries in which the file of a class of models looks layers up by the name of the attention."""
    for file in {base.__module__ for base in model.__mro__} & sys.modules.keys():
        for found in list(vars(sys.modules[file]).values()):
            layer = found.get("eager") if isinstance(found, dict) else None
            if isinstance(layer, type) and issubclass(layer, torch.nn.Module):
                yield found


def _own_modules(module: torch.nn.Module, config: Any) -> Iterator[torch.nn.Module]:
    """The modules inside, but for parts that are models with a config of their own: those are asked by themselves."""
    from transformers import PreTrainedModel

    for child in module.children():
        if not isinstance(child, PreTrainedModel) or child.config is config:
            yield child
            yield from _own_modules(child, config)


def _refuse_layer(table: dict[str, Any], *arguments: Any, **named: Any) -> NoReturn:
    names = " or ".join(f'"{name}"' for name in table if name != NAME)
    raise NotImplementedError(
        f'attn_implementation="{NAME}": layers must take their attention from AttentionInterface; got '
        f"{table['eager'].__name__}, which computes it by itself; use {names}, for a part of a model by a dictionary "
        f'such as {{"": "{NAME}", "vision_config": "eager"}}'
    )


def _refuse_weights(model: Any, arguments: Any, named: dict[str, Any]) -> None:
    """Raise if a call asks for weights. Some models drop the keyword before attention sees it."""
    config = model.config
    if config._attn_implementation != NAME:
        return
    if named.get("output_attentions"):
        raise _refusal(model, "`output_attentions` must be None", "True")
    if "output_attentions" not in named and getattr(config, "output_attentions", False):
        raise _refusal(model, "`config.output_attentions` must be False", "True")


def _refusal(module: torch.nn.Module, expected: str, got: str) -> NotImplementedError:
    return NotImplementedError(
        f'attn_implementation="{NAME}": {expected}; got {got} from {type(module).__name__}; leave it to "eager", or to '
        "another attn_implementation that computes it"
    )


def _described(given: Any) -> str:
    return f"a tensor {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
