"""Attention with scaled dot products: its scores, its weights, and `F.scaled_dot_product_attention`."""

import torch
from torch import Tensor

from effops.blocks.dots import contract
from effops.dispatch.call import call
from effops.dispatch.registration import add_custom_op, add_kernels, add_native, allocated
from effops.ops.attention import cpp, sdpa, triton
from effops.ops.attention.call import empty, group_heads, prepare_scores, prepare_sums
from effops.ops.attention.variants import Kind, attention_op, custom_op, scaled_dots


def naive(query: Tensor, key: Tensor, scale: float, arithmetic: torch.dtype) -> Tensor:
    return (query.to(arithmetic).unsqueeze(-2) * key.to(arithmetic).unsqueeze(-3)).sum(-1) * scale


def einsum(query: Tensor, key: Tensor, scale: float, arithmetic: torch.dtype) -> Tensor:
    return contract(key.unsqueeze(-3), query.unsqueeze(-2), arithmetic) * scale


KIND = Kind({"query": 2, "key": 2}, {"naive": naive, "einsum": einsum}, scaled_dots)
PREFERENCE = ("triton", "cpp", "chunked", "compile", "einsum", "torchscript", "naive")
scores_op = attention_op(KIND, "attention_scores", "scores", prepare_scores, PREFERENCE)
weights_op = attention_op(KIND, "attention_weights", "weights", prepare_scores, PREFERENCE)
op = attention_op(KIND, "attention", "sums", prepare_sums, ("sdpa", *PREFERENCE), fused=sdpa.FUSED)
for with_kernels, output in ((scores_op, "scores"), (weights_op, "weights"), (op, "sums")):
    in_kernels = custom_op(with_kernels, KIND, output, "triton", triton.forward, triton.backward, empty=empty)
    add_kernels(with_kernels, in_kernels)
    in_library = custom_op(with_kernels, KIND, output, "cpp", cpp.forward, cpp.backward, fills_axes=cpp.fills_axes)
    add_native(with_kernels, in_library, requires=[cpp.obstacle], automatic=cpp.is_faster)
in_sdpa = custom_op(op, KIND, "sums", "sdpa", sdpa.forward, sdpa.backward, empty=sdpa.forward, native=lambda call: True)
add_custom_op(
    op,
    in_sdpa,
    "sdpa",
    cost=lambda call: None if sdpa.requires_one_dtype(call) else allocated(op, in_sdpa, call),
    requires=[sdpa.requires_one_dtype, sdpa.requires_ordinary_scale, sdpa.requires_upper_left, sdpa.requires_features],
    automatic=sdpa.is_fused,
)


@scores_op.public
def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    variant: str | None = None,
) -> Tensor:
    """Masked, scaled dot products of all pairs of queries and keys: `scale * query @ key.mT + attn_mask`.

    Args:
        query: `(*batch, L, D)`
        key: `(*batch, S, D)`; batch axes, heads among them, broadcast
        attn_mask: broadcasts to the result `(*batch, L, S)`; booleans are True for pairs that take part, and other
            pairs score -inf; numbers are added, so that zeros and ones exclude nothing (`effops.validate()` raises for
            them); a bias of `torch.nn.attention.bias`, of either corner, is honoured without a mask in memory
        is_causal: no query takes part with a later key: pair (i, j) needs j <= i, also for L != S
        scale: `1 / sqrt(D)` if None
        variant: the implementation to run; "auto" for the best that supports the call (see `effops.explain`), and None
            for that of `effops.use_variant`, or else the best

    Returns:
        The scores `(*batch, L, S)`, in the dtype to which the tensors promote (under autocast float32 or wider). The
        arithmetic is float32, or float64 for float64.

    A pair that booleans or `is_causal` exclude scores -inf, even where its key is NaN or infinite. Numbers that are
    added leave NaN as it is. The gradient of the query may be NaN for such a key in either case.

    For backward, variants cpp and chunked save their inputs and no more.

    Raises:
        TypeError: an argument is no tensor, or not of a floating-point dtype; is_causal is no bool
        ValueError: shapes do not fit, attn_mask and is_causal together, devices differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> query, key = torch.randn(2, 8, 100, 64), torch.randn(2, 8, 120, 64)
        >>> effops.attention_scores(query, key, is_causal=True).shape
        torch.Size([2, 8, 100, 120])
    """
    return call(scores_op, query, key, attn_mask, is_causal=is_causal, scale=scale, variant=variant)


@weights_op.public
def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    variant: str | None = None,
) -> Tensor:
    """The softmax of attention scores over the keys: `softmax(attention_scores(...), -1)`, written once.

    Arguments, errors and dtypes are those of `attention_scores`. A query that takes part with no key has weights of 0,
    as inside `F.scaled_dot_product_attention`, and gradients of 0. So has a query under a mask whose scores all
    overflow to -inf. Without a mask its weights are NaN, or 0 in variant triton.

    A key that is NaN and that booleans or `is_causal` exclude has a weight of 0, and leaves the others as they are.

    For backward, variants cpp and chunked save their inputs and no more.

    Example:
        >>> query, key = torch.randn(2, 8, 100, 64), torch.randn(2, 8, 120, 64)
        >>> effops.attention_weights(query, key).sum(-1).allclose(torch.ones(2, 8, 100))
        True
    """
    return call(weights_op, query, key, attn_mask, is_causal=is_causal, scale=scale, variant=variant)


@op.public
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    variant: str | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, which never holds queries times keys by default.

    It computes `softmax(scale * query @ key.mT + attn_mask) @ value`. Where PyTorch fuses this, its kernels run
    (variant sdpa). Where PyTorch would hold the weights of all pairs, variant cpp or chunked runs instead. On a CPU
    that is so with dropout, for a mask that requires gradients, and for values of another dimension than keys. PyTorch
    converts a boolean mask to numbers, in a tensor of the mask's own size.

    Args:
        query: `(*batch, L, D)`
        key: `(*batch, S, D)`
        value: `(*batch, S, V)`; batch axes, heads among them, broadcast
        attn_mask: broadcasts to `(*batch, L, S)`; booleans are True for pairs that take part; numbers are added to the
            scores, so that zeros and ones exclude nothing (`effops.validate()` raises for them);
            a bias of `torch.nn.attention.bias`, of either corner, is honoured without a mask in memory
        dropout_p: the probability to drop a weight; the others are scaled by 1 / (1 - dropout_p). PyTorch's seed and
            the variant determine which weights are dropped
        is_causal: no query takes part with a later key: pair (i, j) needs j <= i, also for L != S
        scale: `1 / sqrt(D)` if None
        enable_gqa: several heads of queries, axis -3, share one of keys and values
        variant: the implementation to run; "auto" for the best that supports the call (see `effops.explain`), and None
            for that of `effops.use_variant`, or else the best

    Returns:
        The attention `(*batch, L, V)`, in the dtype to which the tensors promote. It is 0 for a query that takes part
        with no key. Under autocast the operands are rounded as PyTorch's function rounds them. Variant sdpa rounds
        weights to 16 bits if the operands have 16 bits. The arithmetic of all other variants is float32, or float64 for
        float64.

    Where padding holds NaN or infinity, a mask does not always keep it out. Overwrite it, as by `nan_to_num`:

    - A key that booleans or `is_causal` exclude leaves no trace in a result, with one exception. Under booleans,
      variant sdpa, which is the choice for most of them, may give NaN: PyTorch adds -inf to the score. A mask of
      numbers does the same in every variant. The gradient of the query may be NaN in all of them.
    - A value has a weight of 0 where its key is excluded. If the value is NaN or infinite, the result may be NaN, in
      every variant.

    Under a mask, the result is also 0 where all scores of a query overflow to -inf. Without one it is NaN, or 0 as in
    PyTorch in variants sdpa, compile and triton.

    For backward, variants cpp and chunked save their inputs. Variant sdpa saves two more tensors: the result, and a
    number for each query.

    Raises:
        TypeError: an argument is no tensor, or not of a floating-point dtype; is_causal is no bool
        ValueError: shapes or numbers of heads do not fit, attn_mask and is_causal together, dropout_p is no
            probability, devices differ, no such variant
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> query, key, value = (torch.randn(2, 8, 100, 64) for _ in range(3))
        >>> effops.attention(query, key, value, is_causal=True).shape
        torch.Size([2, 8, 100, 64])
    """
    operands = group_heads(query, key, value, attn_mask) if enable_gqa else (query, key, value, attn_mask)
    result = call(op, *operands, dropout_p=dropout_p, is_causal=is_causal, scale=scale, variant=variant)
    return result.flatten(-4, -3) if enable_gqa else result
