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

from .attention_backward import plan_backward
from .attention_forward import plan_attention, plan_scores, plan_weights
from .attention_tiles import AttentionInputs
from .launch import Launch, architecture_of, run

PLANS = {"scores": plan_scores, "weights": plan_weights, "sums": plan_attention}


def forward(call: AttentionInputs, out: Tensor) -> None:
    """Write the output of the call to `out`: (B, H, M, V) for sums, else (B, H, M, N). It may have any strides."""
    run(call.query, PLANS[call.output](architecture_of(call.query), call, out))


def backward(
    call: AttentionInputs,
    dout: Tensor,
    dquery: Tensor | None,
    dkey: Tensor | None,
    dvalue: Tensor | None,
    dmask: Tensor | None,
) -> None:
    """Write the gradients that are not None, given that of the output.

    dmask has the dtype of the arithmetic. It is summed over each axis along which it has size 1.
    """
    run(call.query, plan_backward(architecture_of(call.query), call, dout, dquery, dkey, dvalue, dmask))


def representatives(architecture: str, dtype: torch.dtype, precision: str) -> Iterator[Launch]:
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
    dmask = x.new_empty(B, H, M, 3, dtype=torch.promote_types(dtype, torch.float32))[..., :1]
    call = AttentionInputs("sums", x, x, x, full, seed, 0.125, 0, 0.25, precision)
    yield from plan_attention(architecture, call, x)
    for launch in plan_backward(architecture, call, x, x, x.clone(), x.clone(), dmask):
        if thorough or launch.constants.get("OF") == "key":
            yield launch
    if thorough:
        yield from plan_scores(architecture, call, full)
        for N in M, 512:
            row = replace(call, key=x[:, :, :N], mask=full[..., :N])
            yield from plan_weights(architecture, row, full[..., :N])
