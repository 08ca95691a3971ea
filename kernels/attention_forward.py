"""Scores, weights and sums of attention: kernels and the plans that launch them. `attention` has the formulas."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .attention_tiles import (
    AttentionInputs,
    choose_config,
    dropped,
    exponentials,
    inverse_of,
    narrowed,
    score_tile,
    shift_of,
)
from .launch import Config, Launch, pointer
from .tiles import entries, indices, load_tile, store_tile


# fmt: off
@triton.jit
def _scores_kernel(
    first_pid,
    query_ptr, stride_qb, stride_qh, stride_qm, stride_qk,
    key_ptr, stride_kb, stride_kh, stride_kn, stride_kk,
    mask_ptr, stride_ab, stride_ah, stride_am, stride_an,
    out_ptr, stride_ob, stride_oh, stride_om, stride_on,
    H, M, N, E, reach, scale: tl.float64,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    pid_n, pid_m, pid_h, pid_b = indices(first_pid, (tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M), H))
    query_ptr, key_ptr, out_ptr = entries(
        (pid_b, pid_h), ((query_ptr, stride_qb, stride_qh), (key_ptr, stride_kb, stride_kh),
                         (out_ptr, stride_ob, stride_oh)))
    if mask_ptr is not None:
        mask_ptr += pid_b * stride_ab + pid_h * stride_ah
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)

    E = tl.where(pid_n * BLOCK_N < (pid_m + 1) * BLOCK_M + reach, E, 0)  # beyond the diagonal no product is computed
    score, _ = score_tile(
        query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
        offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
    store_tile(out_ptr, stride_om, stride_on, offs_m, offs_n, M, N, score)


@triton.jit
def _weights_kernel(
    first_pid,
    query_ptr, stride_qb, stride_qh, stride_qm, stride_qk,
    key_ptr, stride_kb, stride_kh, stride_kn, stride_kk,
    mask_ptr, stride_ab, stride_ah, stride_am, stride_an,
    out_ptr, stride_ob, stride_oh, stride_om, stride_on,
    H, M, N, E, reach, scale: tl.float64,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Write P. If WHOLE, one tile holds a row; else the scores of each tile are computed twice."""
    pid_m, pid_h, pid_b = indices(first_pid, (tl.cdiv(M, BLOCK_M), H))
    query_ptr, key_ptr, out_ptr = entries(
        (pid_b, pid_h), ((query_ptr, stride_qb, stride_qh), (key_ptr, stride_kb, stride_kh),
                         (out_ptr, stride_ob, stride_oh)))
    if mask_ptr is not None:
        mask_ptr += pid_b * stride_ab + pid_h * stride_ah
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)

    maximum = tl.full((BLOCK_M,), float("-inf"), DTYPE)
    total = tl.zeros((BLOCK_M,), DTYPE)
    end = tl.minimum(N, (pid_m + 1) * BLOCK_M + reach)
    if WHOLE:
        offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
        score, _ = score_tile(
            query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
            offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
        weights, _, _ = exponentials(score, maximum)
        weights *= inverse_of(tl.sum(weights, 1))[:, None]
        store_tile(out_ptr, stride_om, stride_on, offs_m, offs_n, M, N, weights)
    else:
        for start_n in range(0, end, BLOCK_N):
            offs_n = start_n + tl.arange(0, BLOCK_N).to(tl.int64)
            score, _ = score_tile(
                query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
                offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
            weights, maximum, decay = exponentials(score, maximum)
            total = total * decay + tl.sum(weights, 1)
        shift, inverse = shift_of(maximum), inverse_of(total)
        for start_n in range(0, N, BLOCK_N):
            offs_n = start_n + tl.arange(0, BLOCK_N).to(tl.int64)
            score, _ = score_tile(
                query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
                offs_m, offs_n, M, N, tl.where(start_n < end, E, 0), reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
            weights = tl.exp(score - shift[:, None]) * inverse[:, None]
            store_tile(out_ptr, stride_om, stride_on, offs_m, offs_n, M, N, weights)


@triton.jit
def _attention_kernel(
    first_pid,
    query_ptr, stride_qb, stride_qh, stride_qm, stride_qk,
    key_ptr, stride_kb, stride_kh, stride_kn, stride_kk,
    value_ptr, stride_vb, stride_vh, stride_vn, stride_vk,
    mask_ptr, stride_ab, stride_ah, stride_am, stride_an,
    seed_ptr,
    out_ptr, stride_ob, stride_oh, stride_om, stride_ok,
    H, M, N, E, V, reach, scale: tl.float64, dropout_p: tl.float64,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):
    pid_d, pid_m, pid_h, pid_b = indices(first_pid, (tl.cdiv(V, BLOCK_D), tl.cdiv(M, BLOCK_M), H))
    query_ptr, key_ptr, value_ptr, out_ptr = entries(
        (pid_b, pid_h), ((query_ptr, stride_qb, stride_qh), (key_ptr, stride_kb, stride_kh),
                         (value_ptr, stride_vb, stride_vh), (out_ptr, stride_ob, stride_oh)))
    if mask_ptr is not None:
        mask_ptr += pid_b * stride_ab + pid_h * stride_ah
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_row = (pid_b * H + pid_h) * M + offs_m

    maximum = tl.full((BLOCK_M,), float("-inf"), DTYPE)
    total = tl.zeros((BLOCK_M,), DTYPE)
    out = tl.zeros((BLOCK_M, BLOCK_D), DTYPE)
    for start_n in range(0, tl.minimum(N, (pid_m + 1) * BLOCK_M + reach), BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N).to(tl.int64)
        score, _ = score_tile(
            query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
            offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
        weights, maximum, decay = exponentials(score, maximum)
        total = total * decay + tl.sum(weights, 1)
        weights = dropped(weights, seed_ptr, offs_row, offs_n, N, dropout_p, DTYPE)
        value = load_tile(value_ptr, stride_vn, stride_vk, offs_n, offs_d, N, V, 0.0).to(DTYPE)
        out = tl.dot(weights, value, out * decay[:, None], input_precision=PRECISION, out_dtype=DTYPE)

    out *= inverse_of(total)[:, None]
    store_tile(out_ptr, stride_om, stride_ok, offs_m, offs_d, M, V, out)
# fmt: on


def choose_row_config(architecture: str, contraction: dict[str, Any], N: int) -> Config | None:
    """Tiles as wide as a row of weights, if those fit the registers; else None."""
    config = replace(choose_config(architecture, contraction), BLOCK_D=0)
    if N <= config.BLOCK_N:
        return config
    if contraction["DTYPE"] is tl.float64 or N > 512:
        return None
    return replace(config, BLOCK_N=128) if N <= 128 else replace(config, BLOCK_M=32, BLOCK_N=512)


# fmt: off
def plan_scores(architecture: str, call: AttentionInputs, out: Tensor) -> Iterator[Launch]:
    B, H, M, N, E, _ = call.sizes
    contraction = call.contraction(architecture)
    config = replace(choose_config(architecture, contraction), BLOCK_D=0)
    yield Launch(
        _scores_kernel, B * H * triton.cdiv(M, config.BLOCK_M) * triton.cdiv(N, config.BLOCK_N),
        (*call.pair_args, *call.mask_args, *pointer(out), H, M, N, E, call.reach, call.scale),
        {**contraction, **config.options()},
    )


def plan_weights(architecture: str, call: AttentionInputs, out: Tensor) -> Iterator[Launch]:
    B, H, M, N, E, _ = call.sizes
    contraction = call.contraction(architecture)
    whole = choose_row_config(architecture, contraction, N)
    config = whole or replace(choose_config(architecture, contraction), BLOCK_D=0)
    yield Launch(
        _weights_kernel, B * H * triton.cdiv(M, config.BLOCK_M),
        (*call.pair_args, *call.mask_args, *pointer(out), H, M, N, E, call.reach, call.scale),
        {**contraction, "WHOLE": whole is not None, **config.options()},
    )


def plan_attention(architecture: str, call: AttentionInputs, out: Tensor) -> Iterator[Launch]:
    B, H, M, N, E, V = call.sizes
    contraction = call.contraction(architecture)
    config = narrowed(choose_config(architecture, contraction), V)
    yield Launch(
        _attention_kernel, B * H * triton.cdiv(M, config.BLOCK_M) * triton.cdiv(V, config.BLOCK_D),
        (*call.pair_args, *pointer(call.value), *call.mask_args, call.seed, *pointer(out),
         H, M, N, E, V, call.reach, call.scale, call.dropout_p),
        {**contraction, **config.options()},
    )
# fmt: on
