"""Layers of `torch.nn` that compute their attention by effops."""

import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from effops.dispatch.arguments import (
    check_dense,
    check_mask,
    check_new_tensors,
    conversion,
    reshaped,
)
from effops.numerics.shapes import broadcast_shapes, do_broadcast
from effops.ops.attention.additive import additive_attention
from effops.ops.attention.call import check_dropout, check_pattern
from effops.ops.attention.dot_product import attention, attention_weights
from effops.ops.attention.log_sparse import log_sparse_attention
from effops.text import check_flags, counted, did_you_mean, integer_remedy, missing_name, tells_wrong_arguments

__all__ = ["MultiheadAttention"]

KINDS = ("fused", "naive", "additive", "log_sparse")


class MultiheadAttention(torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with a choice of the attention that its heads compute.

    Parameters, their names and their initialisation are those of PyTorch's layer, so that either loads the other's
    state. `attention="additive"` has one more parameter, `additive_weight (num_heads, 1, 1, head_dim)`.

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype: as PyTorch's
        add_bias_kv, add_zero_attn: as PyTorch's: a learned key and value, and ones of 0, that all queries see; False
            for log_sparse attention
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
    The result has the dtype of the projected query: a mask of a wider dtype does not widen it.

    Raises:
        TypeError: a tensor is sparse or nested; a mask is no tensor, or of a dtype that is neither boolean nor
            floating-point
        ValueError: arguments that do not go together; shapes that PyTorch's layer does not take either
        NotImplementedError: the layer is compiled by `torch.jit.script`

    Example:
        >>> layer = effops.nn.MultiheadAttention(64, 8, batch_first=True)
        >>> x = torch.randn(2, 100, 64)
        >>> layer(x, x, x, need_weights=False, is_causal=True)[0].shape
        torch.Size([2, 100, 64])
    """

    @tells_wrong_arguments
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
        layer = "MultiheadAttention"
        _check_sizes(embed_dim, num_heads, kdim=kdim, vdim=vdim)
        flags = {"bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn, "batch_first": batch_first}
        check_flags(layer, **flags)
        check_dropout(layer, "dropout", dropout)
        check_new_tensors(layer, device, dtype)
        check_pattern(layer, local, restart)
        if attention not in KINDS:
            raise ValueError(
                f"MultiheadAttention: `attention` must be one of {', '.join(KINDS)}; got {attention!r}"
                + did_you_mean(attention, KINDS)
            )
        if (add_bias_kv or add_zero_attn) and attention == "log_sparse":
            raise ValueError(
                "MultiheadAttention: `add_bias_kv` and `add_zero_attn` must be False if attention='log_sparse', whose "
                "queries see keys by their distance; got True; choose another attention"
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
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self.attention, self.local, self.restart = attention, local, restart
        if attention == "additive":
            weight = torch.empty(num_heads, 1, 1, self.head_dim, device=device, dtype=dtype)
            self.additive_weight = torch.nn.Parameter(weight)
            self._reset_additive_weight()

    def _reset_parameters(self) -> None:
        """Initialise the parameters, as PyTorch's layer does when it is made."""
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # If this were True, `torch.nn.TransformerEncoderLayer` would compute scaled dot products itself in inference.
        self._qkv_same_embed_dim = False
        if "additive_weight" in self._parameters:
            self._reset_additive_weight()

    def _reset_additive_weight(self) -> None:
        bound = 1 / math.sqrt(self.head_dim)
        torch.nn.init.uniform_(self.additive_weight, -bound, bound)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, attention={self.attention!r}"

    def __prepare_scriptable__(self) -> torch.nn.Module:
        raise NotImplementedError(
            "MultiheadAttention: torch.jit.script cannot compile the choice of an attention; got a layer with "
            f"attention={self.attention!r}; use torch.compile or torch.export, or torch.nn.MultiheadAttention with its "
            "state"
        )

    @tells_wrong_arguments
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
        for name, given in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if given is not None:
                check_mask("MultiheadAttention", name, given, "for what is left out")
        self._check_dims(query, key, value, key_padding_mask)
        batched = query.ndim == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        self._check(query, key, value, key_padding_mask, attn_mask)
        keys = key.shape[-2]
        try:
            projected = self._projected(query, key, value)
        except RuntimeError:
            self._check_dtypes(query=query, key=key, value=value)
            raise
        query, key, value = (self._heads(tensor) for tensor in projected)
        # With a mask, `is_causal` only hints that the mask is causal.
        causal = is_causal if attn_mask is None else False
        if causal and (key_padding_mask is not None or self.attention == "additive" or key.shape[-2] > keys):
            pairs = query.shape[-2], keys
            attn_mask, causal = torch.ones(pairs, dtype=torch.bool, device=query.device).triu(1), False
        mask = self._mask(key_padding_mask, attn_mask, query)
        if mask is not None:  # the keys that the layer adds take part
            mask = pad(mask, (0, key.shape[-2] - keys), value=mask.dtype == torch.bool)
        if need_weights and not holds_weights:
            raise ValueError(
                f"MultiheadAttention: `need_weights` must be False if attention={self.attention!r}, which never holds "
                "the weights of all pairs; got True"
            )
        result = self._attend(query, key, value, mask, causal).to(query.dtype)  # that of a mask may be wider
        result = result.transpose(-3, -2).flatten(-2)
        result = linear(result, self.out_proj.weight, self.out_proj.bias)
        weights = None
        if need_weights:
            weights = attention_weights(query, key, mask, is_causal=causal, variant=self._variant())
            weights = weights.mean(-3) if average_attn_weights else weights
        if not batched:
            return result.squeeze(0), None if weights is None else weights.squeeze(0)
        return result if self.batch_first else result.transpose(0, 1), weights

    def _check_dims(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None) -> None:
        """Raise unless all tensors are dense, and all have a batch axis, or none has."""
        for name, given in (("query", query), ("key", key), ("value", value)):
            if not isinstance(given, Tensor):
                remedy = "give query for self-attention" if given is None else conversion(given)
                raise TypeError(f"MultiheadAttention: `{name}` must be a tensor; got {type(given).__name__}; {remedy}")
            if given.is_nested:
                raise TypeError(
                    f"MultiheadAttention: `{name}` must be dense; got a nested tensor; pad it and give a "
                    "key_padding_mask; torch.nn.TransformerEncoder makes none with enable_nested_tensor=False"
                )
            check_dense("MultiheadAttention", name, given)
        if query.ndim not in (2, 3):
            raise ValueError(
                "MultiheadAttention: `query` must have 3 dimensions, or 2 without a batch; got "
                f"{tuple(query.shape)}; flatten its batch axes into one"
            )
        dims = {"key": (key, query.ndim), "value": (value, query.ndim), "key_padding_mask": (padding, query.ndim - 1)}
        for name, (tensor, ndim) in dims.items():
            if tensor is not None and tensor.ndim != ndim:
                remedy = reshaped(name, tensor.shape, lambda shape: len(shape) == ndim)  # noqa: B023
                if tensor is padding and ndim == 2:
                    remedy = remedy or _mask_of_keys(tensor.shape, query.shape[0 if self.batch_first else 1])
                raise ValueError(
                    f"MultiheadAttention: `{name}` must have {counted(ndim, 'dimensions')}, as `query` "
                    f"{tuple(query.shape)} has {query.ndim}; got {tuple(tensor.shape)}; "
                    + (remedy or "give all tensors a batch axis, or none")
                )

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
        if key.shape[0] != batch or value.shape[:2] != key.shape[:2]:
            raise ValueError(
                f"{layer}: `query`, `key` and `value` must have one batch size, `key` and `value` one length; got "
                f"(batch, length) {tuple(query.shape[:2])}, {tuple(key.shape[:2])} and {tuple(value.shape[:2])}; "
                "expand what all share; batch_first tells which axis is the batch"
            )
        if padding is not None and padding.shape != (batch, keys):
            remedy = reshaped("key_padding_mask", padding.shape, lambda shape: shape == (batch, keys))
            if remedy and not self.batch_first:
                remedy += ", or make the layer with batch_first=True if the batch is the first axis of `query`"
            raise ValueError(
                f"{layer}: `key_padding_mask` must have the shape (batch, keys) = {(batch, keys)}; got "
                f"{tuple(padding.shape)}; {remedy or 'give a mask of pairs by name, as attn_mask'}"
            )
        pairs = query.shape[-2], keys
        per_head = (batch * self.num_heads, *pairs)
        if mask is not None and mask.shape != pairs and mask.shape != per_head:
            remedy = reshaped("attn_mask", mask.shape, lambda shape: shape in (pairs, per_head))
            raise ValueError(
                f"{layer}: `attn_mask` must have the shape (queries, keys) = {pairs} or (batch * heads, queries, keys) "
                f"= {per_head}; got {tuple(mask.shape)}; "
                + (remedy or _mask_of_pairs(tuple(mask.shape), (batch, self.num_heads, *pairs)))
            )

    def _check_dtypes(self, **tensors: Tensor) -> None:
        """Raise if a tensor, which could not be projected, has not the dtype of the parameters."""
        dtype = self.out_proj.weight.dtype
        for name, tensor in tensors.items():
            if tensor.dtype != dtype:
                raise TypeError(
                    f"MultiheadAttention: `{name}` must have the dtype of the layer, {dtype}; got {tensor.dtype}; "
                    f"convert one, as {name}.to({dtype})"
                ) from None

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
        weight: Tensor | None = self.in_proj_weight
        bias: Tensor | None = self.in_proj_bias
        if bias is not None:
            bias = bias.to(torch.promote_types(bias.dtype, query.dtype))  # PyTorch adds one of a narrower dtype
        if weight is not None and query is key and key is value:
            query, key, value = linear(query, weight, bias).chunk(3, -1)
        else:
            separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            weights = separate if weight is None else weight.chunk(3)
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            query, key, value = (linear(*operands) for operands in zip((query, key, value), weights, biases))
        return query, self._extended(key, self.bias_k), self._extended(value, self.bias_v)

    def _extended(self, projected: Tensor, learned: Tensor | None) -> Tensor:
        """Projected keys or values (batch, length, features) and those that the layer adds."""
        one = (projected.shape[0], 1, projected.shape[2])
        added = [] if learned is None else [learned.expand(one)]
        added += [projected.new_zeros(one)] * self.add_zero_attn
        return torch.cat((projected, *added), 1) if added else projected

    def _heads(self, projected: Tensor) -> Tensor:
        """The projected tensor as (batch, heads, length, head_dim)."""
        return projected.view(*projected.shape[:-1], self.num_heads, self.head_dim).transpose(-3, -2)

    def _mask(self, padding: Tensor | None, mask: Tensor | None, query: Tensor) -> Tensor | None:
        """Both masks as one that `effops.attention` takes. A boolean mask is True where a pair takes part."""
        if mask is not None and mask.ndim == 3:
            mask = mask.view(query.shape[0], self.num_heads, *mask.shape[1:])
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


def _mask_of_keys(shape: tuple[int, ...], batch: int) -> str:
    """What to write for a mask of keys with too many axes, or too few."""
    if len(shape) < 2:
        return f"give key_padding_mask.expand({batch}, -1)"
    if all(size == 1 for size in shape[1:-1]):
        return f"give key_padding_mask[:{', 0' * (len(shape) - 2)}]"
    return "give a mask of pairs by name, as attn_mask"


def _mask_of_pairs(shape: tuple[int, ...], wanted: tuple[int, int, int, int]) -> str:
    """What to write for a mask of pairs that is none of each head; `wanted` is (batch, heads, queries, keys)."""
    batch, heads, *pairs = wanted

    def expands_to(*sizes: int) -> bool:
        return do_broadcast(shape, sizes) and broadcast_shapes(shape, sizes) == sizes

    if len(shape) == 4 and shape[1:3] == (1, 1) and shape[0] in (1, batch) and shape[3] == pairs[1]:
        return f"give key_padding_mask=attn_mask[:, 0, 0]{'' if shape[0] == batch else f'.expand({batch}, -1)'}"
    if expands_to(*pairs):
        return f"give attn_mask.expand{tuple(pairs)}"
    if len(shape) == 3 and expands_to(batch, *pairs):
        expanded = "" if shape == (batch, *pairs) else f".expand{(batch, *pairs)}"
        return f"for one mask a batch entry give attn_mask{expanded}.repeat_interleave({heads}, 0)"
    if expands_to(*wanted):
        return f"give attn_mask.expand{wanted}.flatten(0, 1)"
    return "give a mask of keys by name, as key_padding_mask"


def _check_sizes(embed_dim: int, num_heads: int, **others: int | None) -> None:
    """Raise unless all sizes are integers above 0, and the heads share the width of the layer; others may be None."""
    for name, size in {"embed_dim": embed_dim, "num_heads": num_heads, **others}.items():
        if size is None and name in others:
            continue
        if size is None or not hasattr(size, "__index__") or isinstance(size, bool):
            raise TypeError(
                f"MultiheadAttention: `{name}` must be an integer; got {type(size).__name__}; {integer_remedy(size)}"
            )
        if size < 1:
            raise ValueError(f"MultiheadAttention: `{name}` must be at least 1; got {size}; give a larger one")
    if embed_dim % num_heads:
        heads = [count for count in range(1, embed_dim + 1) if embed_dim % count == 0]
        near = min(heads, key=lambda count: abs(count - num_heads))
        raise ValueError(
            f"MultiheadAttention: `embed_dim` must be a multiple of `num_heads`; got {embed_dim} and {num_heads}; give "
            f"num_heads={near}, or embed_dim={-(-embed_dim // num_heads) * num_heads}"
        )


if not TYPE_CHECKING:  # a type checker knows the names

    def __getattr__(name: str) -> NoReturn:
        raise missing_name(__name__, name, __all__)
