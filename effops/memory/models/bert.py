"""BERT-large of the package transformers, with random weights."""

import torch
from torch import Tensor, nn

from effops.memory.checked import check_count, check_flags
from effops.memory.models.time_series import Parts
from effops.text import did_you_mean, how_to_install

BERT_KINDS = ("eager", "sdpa")  # of attention, as transformers names them


def bert_large(*, layers: int = 24, seq_len: int = 512, attention: str = "eager", checkpointing: bool = False) -> Parts:
    """Training of BERT-large for the classification of sequences, with random weights: cross-entropy, AdamW.

    The model is transformers' `BertForSequenceClassification` of width 1024, 16 heads and 335 million parameters,
    built from its configuration; nothing is downloaded. A batch is a dictionary of `input_ids (batch, seq_len)` and
    `labels (batch,)`.

    Args:
        layers: 24 in BERT-large
        seq_len: length of the sequences, at most 512
        attention: transformers' `attn_implementation`: "eager" holds the weights of all pairs, as when the memory of
            BERT-large was published; "sdpa" is `F.scaled_dot_product_attention`
        checkpointing: whether each layer saves its input alone, and is computed again in the backward pass

    Raises:
        ImportError: transformers is not installed
        ValueError: `seq_len` or `attention` is out of range

    Source: Devlin et al. 2018, arXiv:1810.04805.
    """
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError as error:
        raise ImportError(
            f"bert_large: needs the package transformers, which cannot be imported; {how_to_install('bert')}"
        ) from error
    if attention not in BERT_KINDS:
        raise ValueError(
            f"bert_large: `attention` must be one of {', '.join(BERT_KINDS)}; got {attention!r}"
            + did_you_mean(attention, BERT_KINDS)
        )
    check_count("bert_large", "layers", layers, "leave it out for 24")
    check_count("bert_large", "seq_len", seq_len, "leave it out for the longest")
    check_flags("bert_large", checkpointing=checkpointing)
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        intermediate_size=4096,
        use_cache=False,
        attn_implementation=attention,
    )
    if seq_len > config.max_position_embeddings:
        raise ValueError(
            f"bert_large: `seq_len` must be at most {config.max_position_embeddings}; got {seq_len}; "
            "leave it out for the longest"
        )

    def model() -> nn.Module:
        built: nn.Module = BertForSequenceClassification(config)
        if checkpointing:
            checkpoint_layers(built)
        return built.train()

    def batch(batch_size: int) -> dict[str, Tensor]:
        return {
            "input_ids": torch.randint(config.vocab_size, (batch_size, seq_len)),
            "labels": torch.randint(config.num_labels, (batch_size,)),
        }

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    return Parts(model=model, batch=batch, loss=loss, optimizer=torch.optim.AdamW)


def checkpoint_layers(model: nn.Module) -> None:
    """Have each layer of a model of transformers save its input alone, and be computed again in the backward pass."""
    name = "activation_checkpointing_enable"
    if not hasattr(model, name):
        name = "gradient_checkpointing_enable"  # its older name, at which newer versions warn
    getattr(model, name)({"use_reentrant": False})
