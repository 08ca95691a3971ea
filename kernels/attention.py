"""Attention: score every pair of queries and keys, softmax over the keys, sum the values, without keeping the pairs.

    s[b,h,m,n] = scale <query[b,h,m], key[b,h,n]> + mask[b,h,m,n]
    P[b,h,m,n] = exp(s - max) / total,    max = max_n s,    total = sum_n exp(s - max)
    out[b,h,m,:] = sum_n P' value[b,h,n,:],    P' = P keep / (1 - p),    keep = 0 with probability p, else 1

    dP = (dout value^T) keep / (1 - p),    delta = sum_n P dP,    ds = P (dP - delta)
    dquery = scale ds key,    dkey = scale ds^T query,    dvalue = P'^T dout,    dmask = ds

Scores (s) and weights (P) are results of their own too. If dout is the gradient of s, ds = dout. If it is that of P,
dP = dout. A boolean mask says which pairs take part, and a causal call keeps those with n <= m. The other pairs have
s = -inf and ds = 0. A row without pairs has P = 0 and passes no gradient. Nor does a pair with P = 0, not even
0 times an infinity.

Forward saves nothing. Backward first computes max, 1 / total and delta of every row. Each gradient then has its own
launch, which recomputes P in tiles and sums over the other axis alone, so it needs no atomics. `keep` depends on the
seed and the index of the pair alone, so it is the same in every launch.

Arithmetic is float64 if an operand is, else float32. Results are rounded once, when they are stored.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .attention_backward import new_statistics, plan_backward
from .attention_forward import plan_attention, plan_scores, plan_weights
from .attention_tiles import AttentionCall
from .launch import Launch, architecture_of, distinct, run


# fmt: off
def scores(
    query: Tensor, key: Tensor, mask: Tensor | None, out: Tensor, *, scale: float, causal: bool, precision: str,
) -> None:
    """Write s to `out`.

    query is (B, H, M, E), key (B, H, N, E), mask and out are (B, H, M, N). They may have any strides, and any size may
    be 0. A boolean mask is True where a pair takes part; a floating-point mask is added. `precision` is the value of
    `torch.get_float32_matmul_precision()`.
    """
    call = AttentionCall(query, key, None, mask, None, scale, causal, 0.0, precision)
    run(query, plan_scores(architecture_of(query), call, out))


def weights(
    query: Tensor, key: Tensor, mask: Tensor | None, out: Tensor, *, scale: float, causal: bool, precision: str,
) -> None:
    """Write P to `out`, given the operands of `scores`."""
    call = AttentionCall(query, key, None, mask, None, scale, causal, 0.0, precision)
    run(query, plan_weights(architecture_of(query), call, out))


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, out: Tensor, *,
    scale: float, causal: bool, dropout_p: float, precision: str,
) -> None:
    """Write P' value to `out`, given the operands of `scores`.

    value is (B, H, N, V), out (B, H, M, V). `seed` holds one int64, which decides together with the index of a pair
    whether dropout keeps it. Without a seed nothing is dropped.
    """
    call = AttentionCall(query, key, value, mask, seed, scale, causal, dropout_p, precision)
    run(query, plan_attention(architecture_of(query), call, out))


def backward_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, dout: Tensor,
    dquery: Tensor | None, dkey: Tensor | None, dmask: Tensor | None, *, scale: float, causal: bool, precision: str,
) -> None:
    """Write the gradients that are not None, given the operands of `scores`.

    dmask has the dtype of the arithmetic. It is summed over each axis along which it has size 1.
    """
    call = AttentionCall(query, key, None, mask, None, scale, causal, 0.0, precision)
    run(query, plan_backward(architecture_of(query), call, None, dout, dquery, dkey, None, dmask))


def backward_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, dout: Tensor,
    dquery: Tensor | None, dkey: Tensor | None, dmask: Tensor | None, *, scale: float, causal: bool, precision: str,
) -> None:
    """Write the gradients of `weights` that are not None, as `backward_scores` does."""
    call = AttentionCall(query, key, None, mask, None, scale, causal, 0.0, precision)
    statistics = new_statistics(call)
    run(query, plan_backward(architecture_of(query), call, statistics, dout, dquery, dkey, None, dmask))


def backward_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, dout: Tensor,
    dquery: Tensor | None, dkey: Tensor | None, dvalue: Tensor | None, dmask: Tensor | None, *,
    scale: float, causal: bool, dropout_p: float, precision: str,
) -> None:
    """Write the gradients of `attention` that are not None, as `backward_scores` does."""
    call = AttentionCall(query, key, value, mask, seed, scale, causal, dropout_p, precision)
    statistics = new_statistics(call)
    run(query, plan_backward(architecture_of(query), call, statistics, dout, dquery, dkey, dvalue, dmask))
# fmt: on


def shipped() -> Iterator[tuple[str, Launch]]:
    """One launch of every kernel and configuration, as `launch.distinct` gives them."""
    return distinct(_representatives)


def _representatives(architecture: str, dtype: torch.dtype, precision: str) -> Iterator[Launch]:
    """Launches of every kernel with what takes the most registers: the widest tiles, an additive mask and dropout.

    Other dtypes and precisions have the same tiles or smaller ones. Of those, the two kernels that hold the most are
    compiled, on architectures whose products take 16-bit or TF32 operands from shared or tensor memory.
    """
    thorough = dtype == torch.float32 and precision == "highest"
    if not thorough and (architecture not in ("sm_90", "sm_100") or (precision, dtype) == ("medium", torch.bfloat16)):
        return
    B, H, M, D = 16, 16, 1600, 128
    x = torch.empty(B, H, M, D, dtype=dtype, device="meta")
    full = x.new_empty(B, H, M, M)
    seed = x.new_empty(1, dtype=torch.int64)
    statistics = x.new_empty(B, H, M, 3, dtype=torch.promote_types(dtype, torch.float32))
    call = AttentionCall(x, x, x, full, seed, 0.125, True, 0.25, precision)
    yield from plan_attention(architecture, call, x)
    for launch in plan_backward(architecture, call, statistics, x, x, x.clone(), x.clone(), statistics[..., :1]):
        if thorough or launch.constants.get("OF") == "key":
            yield launch
    if thorough:
        yield from plan_scores(architecture, call, full)
        for N in M, 512:
            row = replace(call, key=x[:, :, :N], mask=full[..., :N])
            yield from plan_weights(architecture, row, full[..., :N])
