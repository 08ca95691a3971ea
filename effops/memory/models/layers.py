"""The sizes and layers of the time-series transformers: attention, `x + dropout(sublayer(norm(x)))`, and stacks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from effops.memory.checked import check_count, check_number
from effops.ops.attention.dot_product import attention
from effops.ops.attention.log_sparse import log_sparse_attention
from effops.text import did_you_mean

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
            default = type(self).__dataclass_fields__[name].default
            check_count("Configuration", name, getattr(self, name), f"leave it out for {default}")
        check_number("Configuration", "dropout", self.dropout)
        if self.d_model % self.heads or self.d_model % 2:
            raise ValueError(
                f"Configuration: `d_model` must be a multiple of heads={self.heads} and of 2; got {self.d_model}; "
                f"{self._how_to_divide()}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"Configuration: `dropout` must be at least 0 and below 1; got {self.dropout}; give 0.1 for one tenth"
            )
        if self.attention not in KINDS:
            raise ValueError(
                f"Configuration: `attention` must be one of {', '.join(KINDS)}; got {self.attention!r}"
                + did_you_mean(self.attention, KINDS)
            )

    def _how_to_divide(self) -> str:
        """The nearest width that these heads divide, and the nearest number of heads that divides this width."""
        step = math.lcm(self.heads, 2)
        widths = f"d_model={max(1, round(self.d_model / step)) * step}"
        if self.d_model % 2:
            return f"give {widths}"
        divisors = [count for count in range(1, self.d_model + 1) if self.d_model % count == 0]
        return f"give heads={min(divisors, key=lambda count: abs(count - self.heads))}, or {widths}"


PUBLISHED = Configuration()


class Attention(nn.Module):
    """Attention of several heads with four biased projections; `kind` as in `Configuration`.

    `forward(query, key, value, mask)` takes `(batch, length, d_model)`, and a mask or None. The mask broadcasts to
    `(batch, queries, keys)` and is 0 where a pair takes no part. If all pairs of a query are masked, naive attention
    gives it the mean of all values, as published, and fused attention 0.
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

    def __init__(self, layer: Callable[[Configuration], nn.Module], configuration: Configuration) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(configuration) for _ in range(configuration.layers))
        self.norm = Norm(configuration.d_model)

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
    return Stack(EncoderLayer, configuration)
