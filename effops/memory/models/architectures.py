"""Models whose training memory has been published: three time-series transformers, and BERT-large.

    parts = workload_parts("tst", Configuration(seq_len=256, attention="fused"))
    model, batch = parts["model"](), parts["batch"](32)
    parts["loss"](model, batch).backward()

The transformers have the form of The Annotated Transformer (Rush 2018): `x + dropout(sublayer(norm(x)))`, and a
normalisation after each stack. Nothing is copied or looked at, so that they also build and train under fake tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from effops.ops.attention.dot_product import attention
from effops.ops.attention.log_sparse import log_sparse_attention

KINDS = ("naive", "fused", "log_sparse")
ATTENTION_DROPOUT = 0.1
MAX_LENGTH = 5000


@dataclass(frozen=True)
class Configuration:
    """What the transformers differ in; the defaults are those of the published search.

    Args:
        d_model: width, a multiple of `heads` and of 2
        layers: number of encoder layers, and of decoder layers
        heads: of each attention
        d_ff: width inside of the feed-forward networks
        seq_len: length of the sequences in a batch
        dropout: of everything but the weights of attention, of which 0.1 are dropped
        attention: of the heads

            naive       the published form: weights of all pairs, which stay on the module as `attn` after dropout
            fused       `effops.attention` with dropout, which never holds queries times keys
            log_sparse  `effops.log_sparse_attention` in self-attention, which thereby becomes causal and takes no
                        mask. Dropout acts on its result, since there are no weights to drop. Attention to the memory
                        of the encoder, which may have another length, is fused.

        d_in, d_out: features of a position of the sequences, and of the result
    """

    d_model: int = 64
    layers: int = 8
    heads: int = 8
    d_ff: int = 128
    seq_len: int = 256
    dropout: float = 0.2
    attention: str = "naive"
    d_in: int = 1
    d_out: int = 1

    def __post_init__(self) -> None:
        for name in ("d_model", "layers", "heads", "d_ff", "seq_len", "d_in", "d_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"Configuration: `{name}` must be at least 1; got {getattr(self, name)}")
        if self.d_model % self.heads or self.d_model % 2:
            raise ValueError(
                f"Configuration: `d_model` must be a multiple of heads={self.heads} and of 2; got {self.d_model}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"Configuration: `dropout` must be at least 0 and below 1; got {self.dropout}")
        if self.attention not in KINDS:
            raise ValueError(f"Configuration: `attention` must be one of {', '.join(KINDS)}; got {self.attention!r}")


class Attention(nn.Module):
    """Attention of several heads with four biased projections; `kind` as in `Configuration`.

    `forward(query, key, value, mask)` takes `(batch, length, d_model)` and a mask that broadcasts to `(batch, queries,
    keys)`, 0 where a pair takes no part, or None. A query that no key takes part with gets the mean of all values from
    naive attention, as published, and 0 from fused.
    """

    def __init__(self, d_model: int, heads: int, kind: str) -> None:
        super().__init__()
        self.heads, self.kind = heads, kind
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(ATTENTION_DROPOUT)
        self.attn: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self._heads(self.query(query)), self._heads(self.key(key)), self._heads(self.value(value))
        mask = None if mask is None else mask.unsqueeze(-3)
        result = self._attend(query, key, value, mask).transpose(-3, -2).flatten(-2)
        out: Tensor = self.out(result)
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.kind == "naive":
            scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -1e9)
            self.attn = self.dropout(scores.softmax(-1))
            return self.attn @ value
        if self.kind == "fused":
            dropout = self.dropout.p if self.training else 0.0
            return attention(query, key, value, None if mask is None else mask != 0, dropout)
        if mask is not None:
            raise ValueError(
                "Attention: `mask` must be None if kind='log_sparse', which is causal by itself; got one; cut padded "
                "positions off instead"
            )
        result: Tensor = self.dropout(log_sparse_attention(query, key, value))
        return result

    def _heads(self, projected: Tensor) -> Tensor:
        """(batch, heads, length, d_model / heads)"""
        return projected.view(*projected.shape[:-1], self.heads, projected.shape[-1] // self.heads).transpose(-3, -2)


class Norm(nn.Module):
    """Layer normalisation by the unbiased standard deviation, with epsilon outside of the root."""

    def __init__(self, d_model: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.scale * (x - mean) / (std + self.epsilon) + self.shift


class Residual(nn.Module):
    """x + dropout(sublayer(norm(x)))"""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.norm, self.dropout = Norm(configuration.d_model), nn.Dropout(configuration.dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        result: Tensor = x + self.dropout(sublayer(self.norm(x)))
        return result


class EncoderLayer(nn.Module):
    """Self-attention, and a feed-forward network."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.self_attention = Attention(configuration.d_model, configuration.heads, configuration.attention)
        self.feed_forward = feed_forward(configuration)
        self.residuals = nn.ModuleList(Residual(configuration) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.residuals[0](x, lambda x: self.self_attention(x, x, x, mask))
        x = self.residuals[1](x, self.feed_forward)
        return x


class DecoderLayer(nn.Module):
    """Self-attention, attention to the memory of the encoder, and a feed-forward network."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        width, heads, kind = configuration.d_model, configuration.heads, configuration.attention
        self.self_attention = Attention(width, heads, kind)
        self.cross_attention = Attention(width, heads, "fused" if kind == "log_sparse" else kind)
        self.feed_forward = feed_forward(configuration)
        self.residuals = nn.ModuleList(Residual(configuration) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None) -> Tensor:
        x = self.residuals[0](x, lambda x: self.self_attention(x, x, x, tgt_mask))
        x = self.residuals[1](x, lambda x: self.cross_attention(x, memory, memory, src_mask))
        x = self.residuals[2](x, self.feed_forward)
        return x


def feed_forward(configuration: Configuration) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(configuration.d_model, configuration.d_ff),
        nn.ReLU(),
        nn.Dropout(configuration.dropout),
        nn.Linear(configuration.d_ff, configuration.d_model),
    )


class Stack(nn.Module):
    """Layers one after the other, each given the same further arguments, and a normalisation."""

    def __init__(self, layers: Iterable[nn.Module], d_model: int) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), Norm(d_model)

    def forward(self, x: Tensor, *args: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, *args)
        result: Tensor = self.norm(x)
        return result


class Positions(nn.Module):
    """Adds sines and cosines of the position, and drops."""

    table: Tensor

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.dropout = nn.Dropout(configuration.dropout)
        length, width = max(MAX_LENGTH, configuration.seq_len), configuration.d_model
        frequencies = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        angles = torch.arange(length).unsqueeze(-1) * frequencies
        self.register_buffer("table", torch.stack((angles.sin(), angles.cos()), -1).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(x + self.table[: x.shape[-2]])
        return result


def embedding(configuration: Configuration) -> nn.Sequential:
    return nn.Sequential(nn.Linear(configuration.d_in, configuration.d_model), Positions(configuration))


def encoder(configuration: Configuration) -> Stack:
    return Stack((EncoderLayer(configuration) for _ in range(configuration.layers)), configuration.d_model)


def decoder(configuration: Configuration) -> Stack:
    return Stack((DecoderLayer(configuration) for _ in range(configuration.layers)), configuration.d_model)


def initialise(model: nn.Module) -> None:
    """Draw matrices as Glorot and Bengio do, uniformly."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)


class TST(nn.Module):
    """A time-series transformer: an encoder of the source, and a decoder of the target, with a sigmoid at the end.

    `forward(src, tgt, src_mask, tgt_mask)` takes `(batch, length, d_in)` and masks that broadcast to `(batch, queries,
    keys)`, 0 where a pair takes no part, or None; the result is `(batch, length of tgt, d_out)`. As published the
    model has a `generator` that it never calls, whose parameters get neither gradients nor optimizer states.

    Example:
        >>> model = TST(Configuration(layers=2, attention="fused"))
        >>> model(torch.rand(3, 100, 1), torch.rand(3, 80, 1)).shape
        torch.Size([3, 80, 1])
    """

    def __init__(self, configuration: Configuration = Configuration()) -> None:
        super().__init__()
        width, features = configuration.d_model, configuration.d_out
        self.src_embedding, self.tgt_embedding = embedding(configuration), embedding(configuration)
        self.encoder, self.decoder = encoder(configuration), decoder(configuration)
        self.generator, self.head = nn.Linear(width, features), nn.Linear(width, features)
        initialise(self)

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        memory = self.encoder(self.src_embedding(src), src_mask)
        result: Tensor = self.head(self.decoder(self.tgt_embedding(tgt), memory, src_mask, tgt_mask))
        return result.sigmoid()


class Enc2DecTST(TST):
    """`TST` with what the encoder gives as the decoder's input too: the target is taken, and not used."""

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        memory = self.encoder(self.src_embedding(src), src_mask)
        result: Tensor = self.head(self.decoder(memory, memory, src_mask, tgt_mask))
        return result.sigmoid()


class EncoderOnlyTST(nn.Module):
    """The encoder of `TST` with dropout and a linear head; `forward(src, src_mask)`."""

    def __init__(self, configuration: Configuration = Configuration()) -> None:
        super().__init__()
        self.src_embedding, self.encoder = embedding(configuration), encoder(configuration)
        self.dropout, self.head = (
            nn.Dropout(configuration.dropout),
            nn.Linear(configuration.d_model, configuration.d_out),
        )
        initialise(self)

    def forward(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        result: Tensor = self.head(self.dropout(self.encoder(self.src_embedding(src), src_mask)))
        return result


ARCHITECTURES: Mapping[str, Callable[[Configuration], nn.Module]] = {
    "tst": TST,
    "encoder_only_tst": EncoderOnlyTST,
    "enc2dec_tst": Enc2DecTST,
}


class Parts(TypedDict):
    """The callables that a workload is made of, by the names of its arguments."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def workload_parts(architecture: str, configuration: Configuration = Configuration()) -> Parts:
    """Training of one of `ARCHITECTURES` as in the published search: smooth L1 loss, Adam, masks of ones.

    A batch is a tuple of the arguments of the model's `forward` and the targets `(batch, seq_len, d_out)`. Masks are
    `(batch, 1, seq_len)`; a batch for log-sparse attention has none. Tensors are made on PyTorch's default device.

    Raises:
        ValueError: there is no such architecture

    Example:
        >>> parts = workload_parts("encoder_only_tst", Configuration(layers=1))
        >>> parts["loss"](parts["model"](), parts["batch"](4)).shape
        torch.Size([])
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"workload_parts: `architecture` must be one of {', '.join(ARCHITECTURES)}; got {architecture!r}"
        )
    sequences = 1 if architecture == "encoder_only_tst" else 2
    masks = 0 if configuration.attention == "log_sparse" else sequences
    length = configuration.seq_len

    def batch(batch_size: int) -> tuple[Tensor, ...]:
        return (
            *(torch.rand(batch_size, length, configuration.d_in) for _ in range(sequences)),
            *(torch.ones(batch_size, 1, length) for _ in range(masks)),
            torch.rand(batch_size, length, configuration.d_out),
        )

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        *inputs, targets = batch
        return nn.functional.smooth_l1_loss(model(*inputs), targets)

    return Parts(
        model=lambda: ARCHITECTURES[architecture](configuration), batch=batch, loss=loss, optimizer=torch.optim.Adam
    )


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
            "bert_large: needs the package transformers, which cannot be imported; pip install 'effops[bert]'"
        ) from error
    if attention not in ("eager", "sdpa"):
        raise ValueError(f"bert_large: `attention` must be eager or sdpa; got {attention!r}")
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        intermediate_size=4096,
        use_cache=False,
        attn_implementation=attention,
    )
    if not 1 <= seq_len <= config.max_position_embeddings:
        raise ValueError(f"bert_large: `seq_len` must be in 1..{config.max_position_embeddings}; got {seq_len}")

    def model() -> nn.Module:
        built: nn.Module = BertForSequenceClassification(config)
        if checkpointing:
            name = "activation_checkpointing_enable"
            enable = getattr(built, name if hasattr(built, name) else "gradient_checkpointing_enable")  # until 4
            enable({"use_reentrant": False})
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
