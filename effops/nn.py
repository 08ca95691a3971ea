"""Layers of `torch.nn` that compute their attention by effops."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from effops.dispatch.arguments import check_mask
from effops.ops.attention.additive import additive_attention
from effops.ops.attention.dot_product import attention, attention_weights
from effops.ops.attention.log_sparse import log_sparse_attention

KINDS = ("fused", "naive", "additive", "log_sparse")


class MultiheadAttention(torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with a choice of the attention that its heads compute.

    Parameters, their names and their initialisation are those of PyTorch's layer, so that either loads the other's
    state. `attention="additive"` has one more parameter, `additive_weight (num_heads, 1, 1, head_dim)`.

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype: as PyTorch's
        add_bias_kv, add_zero_attn: must be False
        attention: the attention that each head computes

            fused       `effops.attention`, which never holds queries times keys by default
            naive       the same function by its plain form, which holds queries times keys
            additive    `effops.additive_attention` of the projected queries and keys; without dropout
            log_sparse  `effops.log_sparse_attention`, which is causal; without dropout and masks
        local, restart: the arguments of that name of `log_sparse_attention`

    `forward` takes and returns what PyTorch's does: a boolean mask is True where a pair must *not* take part. With
    `is_causal` it needs no attn_mask. Where an attn_mask is given too, `is_causal` is a hint, as in PyTorch.
    `need_weights` holds queries times keys. It is for fused and naive attention, where it is True unless it is given,
    and gives the weights before dropout. Other attention returns None for them, and raises ValueError if it is True.

    Example:
        >>> layer = effops.nn.MultiheadAttention(64, 8, batch_first=True)
        >>> x = torch.randn(2, 100, 64)
        >>> layer(x, x, x, need_weights=False, is_causal=True)[0].shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        attention: str = "fused",
        local: int = 1,
        restart: int | None = None,
    ) -> None:
        if attention not in KINDS:
            raise ValueError(f"MultiheadAttention: `attention` must be one of {', '.join(KINDS)}; got {attention!r}")
        if add_bias_kv or add_zero_attn:
            raise ValueError(
                "MultiheadAttention: `add_bias_kv` and `add_zero_attn` must be False; append the key and value outside"
            )
        if dropout and attention in ("additive", "log_sparse"):
            raise ValueError(
                f"MultiheadAttention: `dropout` must be 0 if attention={attention!r}; got {dropout}; drop elements of "
                "the result instead"
            )
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self.attention, self.local, self.restart = attention, local, restart
        self.has_one_projection = self._qkv_same_embed_dim
        # If this were True, `torch.nn.TransformerEncoderLayer` would compute scaled dot products itself in inference.
        self._qkv_same_embed_dim = False
        if attention == "additive":
            weight = torch.empty(num_heads, 1, 1, self.head_dim, device=device, dtype=dtype)
            bound = 1 / math.sqrt(self.head_dim)
            self.additive_weight = torch.nn.Parameter(weight.uniform_(-bound, bound))

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, attention={self.attention!r}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the result, and the weights of all pairs if they are needed."""
        holds_weights = self.attention in ("fused", "naive")
        need_weights = holds_weights if need_weights is None else need_weights
        batched = query.ndim == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        self._check(query, key, value, key_padding_mask, attn_mask)
        query, key, value = (self._heads(tensor) for tensor in self._projected(query, key, value))
        # With a mask, `is_causal` only hints that the mask is causal.
        causal = is_causal if attn_mask is None else False
        if causal and (key_padding_mask is not None or self.attention == "additive"):
            pairs = query.shape[-2], key.shape[-2]
            attn_mask, causal = torch.ones(pairs, dtype=torch.bool, device=query.device).triu(1), False
        mask = self._mask(key_padding_mask, attn_mask, query)
        if need_weights and not holds_weights:
            raise ValueError(
                f"MultiheadAttention: `need_weights` must be False if attention={self.attention!r}, which never holds "
                "the weights of all pairs; got True"
            )
        result = self._attend(query, key, value, mask, causal).transpose(-3, -2).flatten(-2)
        result = linear(result, self.out_proj.weight, self.out_proj.bias)
        weights = None
        if need_weights:
            weights = attention_weights(query, key, mask, is_causal=causal, variant=self._variant())
            weights = weights.mean(-3) if average_attn_weights else weights
        if not batched:
            return result.squeeze(0), None if weights is None else weights.squeeze(0)
        return result if self.batch_first else result.transpose(0, 1), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, mask: Tensor | None) -> None:
        """Raise unless tensors (batch, length, features) and masks have the shapes and dtypes that the layer takes."""
        layer, batch, keys = "MultiheadAttention", query.shape[0], key.shape[-2]
        for name, tensor, size in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if tensor.shape[-1] != size:
                raise ValueError(
                    f"{layer}: last dimension of `{name}` must be {size}, as the layer was made for; got "
                    f"{tensor.shape[-1]}; project it, or make a layer of its size"
                )
        for name, given in (("key_padding_mask", padding), ("attn_mask", mask)):
            if given is not None:
                check_mask(layer, name, given, "for what is left out")
        if padding is not None and padding.shape != (batch, keys):
            raise ValueError(
                f"{layer}: `key_padding_mask` must have the shape (batch, keys) = {(batch, keys)}; got "
                f"{tuple(padding.shape)}; give a mask of pairs by name, as attn_mask"
            )
        heads = batch * self.num_heads
        if mask is not None and mask.ndim != 2 and not (mask.ndim == 3 and mask.shape[0] == heads):
            raise ValueError(
                f"{layer}: `attn_mask` must have the shape (queries, keys) or (batch * heads, queries, keys), with "
                f"batch * heads = {heads}; got {tuple(mask.shape)}; repeat one mask a batch entry by "
                f"attn_mask.repeat_interleave({self.num_heads}, 0)"
            )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        if self.attention == "log_sparse":
            if mask is not None:
                raise ValueError(
                    "MultiheadAttention: masks must be None if attention='log_sparse', which is causal by itself; got "
                    "one; cut padded keys off instead"
                )
            return log_sparse_attention(query, key, value, self.local, self.restart)
        if self.attention == "additive":
            return additive_attention(query, key, value, self.additive_weight, mask)
        dropout = self.dropout if self.training else 0.0
        return attention(query, key, value, mask, dropout, causal, variant=self._variant())

    def _variant(self) -> str | None:
        return "naive" if self.attention == "naive" else None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.has_one_projection and query is key and key is value:
            return linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights = self.in_proj_weight.chunk(3) if self.has_one_projection else separate
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(linear(*operands) for operands in zip((query, key, value), weights, biases))

    def _heads(self, projected: Tensor) -> Tensor:
        """The projected tensor as (batch, heads, length, head_dim)."""
        return projected.view(*projected.shape[:-1], self.num_heads, self.head_dim).transpose(-3, -2)

    def _mask(self, padding: Tensor | None, mask: Tensor | None, query: Tensor) -> Tensor | None:
        """Both masks as one that `effops.attention` takes. A boolean mask is True where a pair takes part."""
        if mask is not None and mask.ndim == 3:
            mask = mask.view(-1, self.num_heads, *mask.shape[1:])
        masks = [one for one in (mask, None if padding is None else padding[:, None, None, :]) if one is not None]
        if not masks:
            return None
        if all(one.dtype == torch.bool for one in masks):
            return torch.logical_not(masks[0] | masks[-1])
        added = [
            torch.zeros_like(one, dtype=query.dtype).masked_fill(one, -math.inf) if one.dtype == torch.bool else one
            for one in masks
        ]
        return added[0] if len(added) == 1 else added[0] + added[1]
