"""Attention of several heads: as published, fused, or log-sparse."""

from __future__ import annotations

import math

from torch import Tensor, nn

from effops.ops.attention.dot_product import attention
from effops.ops.attention.log_sparse import log_sparse_attention

ATTENTION_DROPOUT = 0.1


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
