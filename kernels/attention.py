"""Attention: score every pair of queries and keys, softmax over the keys, sum the values, without keeping the pairs.

    s[b,h,m,n] = scale <query[b,h,m], key[b,h,n]> + mask[b,h,m,n]
    P[b,h,m,n] = exp(s - max) / total,    max = max_n s,    total = sum_n exp(s - max)
    out[b,h,m,:] = sum_n P' value[b,h,n,:],    P' = P keep / (1 - p),    keep = 0 with probability p, else 1

    dP = (dout value^T) keep / (1 - p),    delta = sum_n P dP,    ds = P (dP - delta)
    dquery = scale ds key,    dkey = scale ds^T query,    dvalue = P'^T dout,    dmask = ds

Scores and P are results of their own too: with dout of s, ds = dout, and with dout of P, dP = dout. A boolean mask says
which pairs take part, and so does j <= i if causal: s of the others is -inf, and ds is 0. A row without pairs has P = 0
and passes no gradient; nor does a pair with P = 0, not even 0 times an infinity.

Forward saves nothing. Backward computes max, 1 / total and delta of every row, and then each gradient in a launch of
its own that recomputes P in tiles and sums over the other axis alone, so it needs no atomics. `keep` is a function of
the seed and the index of the pair: the same in every launch.

Arithmetic is float64 if an operand is, else float32. Results are rounded once, when they are stored.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pairs import (
    Config,
    Launch,
    architecture_of,
    contraction_of,
    distinct,
    dots,
    partial_sums,
    pointer,
    split,
)


# fmt: off
@triton.jit
def _scores(
    query_ptr, stride_qm, stride_qk,
    key_ptr, stride_kn, stride_kk,
    mask_ptr, stride_am, stride_an,
    offs_m, offs_n, M, N, E, reach, scale,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """A tile of s, and which of its pairs take part: n <= m + reach at most."""
    present = (offs_m < M)[:, None] & (offs_n < N)[None, :] & (offs_n[None, :] <= offs_m[:, None] + reach)
    dot = dots(query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, offs_m, offs_n, M, N, E,
               DTYPE, UPCAST, PRECISION, BLOCK_K)
    score = tl.full((1, 1), scale, DTYPE) * dot
    if mask_ptr is not None:
        mask = tl.load(mask_ptr + offs_m[:, None] * stride_am + offs_n[None, :] * stride_an, mask=present, other=0)
        if mask.dtype == tl.uint8:
            present = present & (mask != 0)
        else:
            score += mask.to(DTYPE)
    return tl.where(present, score, float("-inf")), present


@triton.jit
def _exponentials(score, maximum):
    """exp(s - max) of a tile, the max with the tile taken in, and the factor of what was summed with the one before."""
    larger = tl.maximum(maximum, tl.max(score, 1))
    shift = _shift(larger)
    return tl.exp(score - shift[:, None]), larger, tl.exp(maximum - shift)


@triton.jit
def _shift(maximum):
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _inverse(total):
    return tl.where(total == 0, 0.0, 1 / total)


@triton.jit
def _dropped(tile, seed_ptr, offs_row, offs_n, N, dropout_p, DTYPE: tl.constexpr):
    """keep / (1 - p) times a tile of pairs."""
    if seed_ptr is not None:
        index = offs_row[:, None] * N + offs_n[None, :]
        low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
        random, _, _, _ = tl.philox(tl.load(seed_ptr), low, high, high * 0, high * 0)
        p = tl.full((1, 1), dropout_p, DTYPE)
        tile = tl.where(tl.uint_to_uniform_float(random) >= p, tile / (1 - p), 0.0)
    return tile


@triton.jit
def _dweights(
    dout_ptr, stride_gm, stride_gk,
    value_ptr, stride_vn, stride_vk,
    seed_ptr, offs_row, offs_m, offs_n, present, M, N, V, dropout_p,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """A tile of dP; without values, of dout."""
    if value_ptr is None:
        dout_ptrs = dout_ptr + offs_m[:, None] * stride_gm + offs_n[None, :] * stride_gk
        dweights = tl.load(dout_ptrs, mask=present, other=0.0).to(DTYPE)
    else:
        dweights = dots(dout_ptr, stride_gm, stride_gk, value_ptr, stride_vn, stride_vk, offs_m, offs_n, M, N, V,
                        DTYPE, UPCAST, PRECISION, BLOCK_K)
        dweights = _dropped(dweights, seed_ptr, offs_row, offs_n, N, dropout_p, DTYPE)
    return dweights


@triton.jit
def _weights(score, statistics_ptr, offs_row, mask_m):
    """A tile of P."""
    shift = tl.load(statistics_ptr + offs_row * 3, mask=mask_m, other=0.0)
    inverse = tl.load(statistics_ptr + offs_row * 3 + 1, mask=mask_m, other=0.0)
    return tl.exp(score - shift[:, None]) * inverse[:, None]


@triton.jit
def _dscores(
    query_ptr, stride_qm, stride_qk,
    key_ptr, stride_kn, stride_kk,
    value_ptr, stride_vn, stride_vk,
    mask_ptr, stride_am, stride_an,
    dout_ptr, stride_gm, stride_gk,
    seed_ptr, statistics_ptr, offs_row, offs_m, offs_n, M, N, E, V, reach, scale, dropout_p,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, UPCAST_VALUE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of ds."""
    score, present = _scores(
        query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
        offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
    dscores = _dweights(
        dout_ptr, stride_gm, stride_gk, value_ptr, stride_vn, stride_vk, seed_ptr, offs_row, offs_m, offs_n, present,
        M, N, V, dropout_p, DTYPE, UPCAST_VALUE, PRECISION, BLOCK_K)
    if statistics_ptr is not None:
        mask_m = offs_m < M
        weights = _weights(score, statistics_ptr, offs_row, mask_m)
        delta = tl.load(statistics_ptr + offs_row * 3 + 2, mask=mask_m, other=0.0)
        dscores = tl.where(weights == 0, 0.0, weights * (dscores - delta[:, None]))
    return dscores


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
    pid = first_pid + tl.program_id(0).to(tl.int64)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_n = pid % tiles_n
    pid_m = pid // tiles_n % tiles_m
    pid_h = pid // tiles_n // tiles_m % H
    pid_b = pid // tiles_n // tiles_m // H
    if mask_ptr is not None:
        mask_ptr += pid_b * stride_ab + pid_h * stride_ah
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)

    E = tl.where(pid_n * BLOCK_N < (pid_m + 1) * BLOCK_M + reach, E, 0)  # nothing to compute beyond the diagonal
    score, _ = _scores(
        query_ptr + pid_b * stride_qb + pid_h * stride_qh, stride_qm, stride_qk,
        key_ptr + pid_b * stride_kb + pid_h * stride_kh, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
        offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
    out_ptr += pid_b * stride_ob + pid_h * stride_oh
    out_ptrs = out_ptr + offs_m[:, None] * stride_om + offs_n[None, :] * stride_on
    tl.store(out_ptrs, score, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


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
    """Rows of one tile if WHOLE; else P of each tile is computed from its scores a second time."""
    pid = first_pid + tl.program_id(0).to(tl.int64)
    tiles_m = tl.cdiv(M, BLOCK_M)
    pid_m = pid % tiles_m
    pid_h = pid // tiles_m % H
    pid_b = pid // tiles_m // H
    query_ptr += pid_b * stride_qb + pid_h * stride_qh
    key_ptr += pid_b * stride_kb + pid_h * stride_kh
    if mask_ptr is not None:
        mask_ptr += pid_b * stride_ab + pid_h * stride_ah
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    out_ptrs = out_ptr + pid_b * stride_ob + pid_h * stride_oh + offs_m[:, None] * stride_om

    maximum = tl.full((BLOCK_M,), float("-inf"), DTYPE)
    total = tl.zeros((BLOCK_M,), DTYPE)
    end = tl.minimum(N, (pid_m + 1) * BLOCK_M + reach)
    if WHOLE:
        offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
        score, _ = _scores(
            query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
            offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
        weights, _, _ = _exponentials(score, maximum)
        weights *= _inverse(tl.sum(weights, 1))[:, None]
        tl.store(out_ptrs + offs_n[None, :] * stride_on, weights, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])
    else:
        for start_n in range(0, end, BLOCK_N):
            offs_n = start_n + tl.arange(0, BLOCK_N).to(tl.int64)
            score, _ = _scores(
                query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
                offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
            weights, maximum, decay = _exponentials(score, maximum)
            total = total * decay + tl.sum(weights, 1)
        shift, inverse = _shift(maximum), _inverse(total)
        for start_n in range(0, N, BLOCK_N):
            offs_n = start_n + tl.arange(0, BLOCK_N).to(tl.int64)
            score, _ = _scores(
                query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
                offs_m, offs_n, M, N, tl.where(start_n < end, E, 0), reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
            weights = tl.exp(score - shift[:, None]) * inverse[:, None]
            mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
            tl.store(out_ptrs + offs_n[None, :] * stride_on, weights, mask=mask)


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
    pid = first_pid + tl.program_id(0).to(tl.int64)
    tiles_d = tl.cdiv(V, BLOCK_D)
    tiles_m = tl.cdiv(M, BLOCK_M)
    pid_d = pid % tiles_d
    pid_m = pid // tiles_d % tiles_m
    pid_h = pid // tiles_d // tiles_m % H
    pid_b = pid // tiles_d // tiles_m // H
    query_ptr += pid_b * stride_qb + pid_h * stride_qh
    key_ptr += pid_b * stride_kb + pid_h * stride_kh
    value_ptr += pid_b * stride_vb + pid_h * stride_vh
    if mask_ptr is not None:
        mask_ptr += pid_b * stride_ab + pid_h * stride_ah
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_row = (pid_b * H + pid_h) * M + offs_m
    mask_d = (offs_d < V)[None, :]

    maximum = tl.full((BLOCK_M,), float("-inf"), DTYPE)
    total = tl.zeros((BLOCK_M,), DTYPE)
    out = tl.zeros((BLOCK_M, BLOCK_D), DTYPE)
    for start_n in range(0, tl.minimum(N, (pid_m + 1) * BLOCK_M + reach), BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N).to(tl.int64)
        score, _ = _scores(
            query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
            offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
        weights, maximum, decay = _exponentials(score, maximum)
        total = total * decay + tl.sum(weights, 1)
        weights = _dropped(weights, seed_ptr, offs_row, offs_n, N, dropout_p, DTYPE)
        # (BLOCK_N, BLOCK_D)
        value_ptrs = value_ptr + offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vk
        value = tl.load(value_ptrs, mask=(offs_n < N)[:, None] & mask_d, other=0.0).to(DTYPE)
        out = tl.dot(weights, value, out * decay[:, None], input_precision=PRECISION, out_dtype=DTYPE)

    out *= _inverse(total)[:, None]
    out_ptr += pid_b * stride_ob + pid_h * stride_oh
    out_ptrs = out_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_ok
    tl.store(out_ptrs, out, mask=(offs_m < M)[:, None] & mask_d)


@triton.jit
def _statistics_kernel(
    first_pid,
    query_ptr, stride_qb, stride_qh, stride_qm, stride_qk,
    key_ptr, stride_kb, stride_kh, stride_kn, stride_kk,
    value_ptr, stride_vb, stride_vh, stride_vn, stride_vk,
    mask_ptr, stride_ab, stride_ah, stride_am, stride_an,
    dout_ptr, stride_gb, stride_gh, stride_gm, stride_gk,
    seed_ptr, statistics_ptr,
    H, M, N, E, V, reach, scale: tl.float64, dropout_p: tl.float64,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, UPCAST_VALUE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """max (0 if there is no pair), 1 / total (likewise) and delta of every row, side by side."""
    pid = first_pid + tl.program_id(0).to(tl.int64)
    tiles_m = tl.cdiv(M, BLOCK_M)
    pid_m = pid % tiles_m
    pid_h = pid // tiles_m % H
    pid_b = pid // tiles_m // H
    query_ptr += pid_b * stride_qb + pid_h * stride_qh
    key_ptr += pid_b * stride_kb + pid_h * stride_kh
    dout_ptr += pid_b * stride_gb + pid_h * stride_gh
    if value_ptr is not None:
        value_ptr += pid_b * stride_vb + pid_h * stride_vh
    if mask_ptr is not None:
        mask_ptr += pid_b * stride_ab + pid_h * stride_ah
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_row = (pid_b * H + pid_h) * M + offs_m
    mask_m = offs_m < M

    maximum = tl.full((BLOCK_M,), float("-inf"), DTYPE)
    total = tl.zeros((BLOCK_M,), DTYPE)
    delta = tl.zeros((BLOCK_M,), DTYPE)
    for start_n in range(0, tl.minimum(N, (pid_m + 1) * BLOCK_M + reach), BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N).to(tl.int64)
        score, present = _scores(
            query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
            offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
        weights, maximum, decay = _exponentials(score, maximum)
        dweights = _dweights(
            dout_ptr, stride_gm, stride_gk, value_ptr, stride_vn, stride_vk, seed_ptr, offs_row, offs_m, offs_n,
            present, M, N, V, dropout_p, DTYPE, UPCAST_VALUE, PRECISION, BLOCK_K)
        total = total * decay + tl.sum(weights, 1)
        delta = delta * decay + tl.sum(tl.where(weights == 0, 0.0, weights * dweights), 1)

    inverse = _inverse(total)
    tl.store(statistics_ptr + offs_row * 3, _shift(maximum), mask=mask_m)
    tl.store(statistics_ptr + offs_row * 3 + 1, inverse, mask=mask_m)
    tl.store(statistics_ptr + offs_row * 3 + 2, delta * inverse, mask=mask_m)


@triton.jit
def _gradient_kernel(
    first_pid,
    query_ptr, stride_qb, stride_qh, stride_qm, stride_qk,
    key_ptr, stride_kb, stride_kh, stride_kn, stride_kk,
    value_ptr, stride_vb, stride_vh, stride_vn, stride_vk,
    mask_ptr, stride_ab, stride_ah, stride_am, stride_an,
    dout_ptr, stride_gb, stride_gh, stride_gm, stride_gk,
    seed_ptr, statistics_ptr,
    grad_ptr, stride_dp, stride_db, stride_dh, stride_di, stride_dk,
    B, H, M, N, E, V, tiles_i, tiles_d, part_j, reach, scale: tl.float64, dropout_p: tl.float64,
    OF: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr, UPCAST_VALUE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """That of the query, summed over n, or of the key or value, summed over m: of rows i, summed over j."""
    pid = first_pid + tl.program_id(0).to(tl.int64)
    pid_d = pid % tiles_d
    pid_i = pid // tiles_d % tiles_i
    pid_h = pid // tiles_d // tiles_i % H
    pid_b = pid // tiles_d // tiles_i // H % B
    part = pid // tiles_d // tiles_i // H // B
    query_ptr += pid_b * stride_qb + pid_h * stride_qh
    key_ptr += pid_b * stride_kb + pid_h * stride_kh
    dout_ptr += pid_b * stride_gb + pid_h * stride_gh
    if value_ptr is not None:
        value_ptr += pid_b * stride_vb + pid_h * stride_vh
    if mask_ptr is not None:
        mask_ptr += pid_b * stride_ab + pid_h * stride_ah
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    BLOCK_I: tl.constexpr = BLOCK_M if OF == "query" else BLOCK_N
    BLOCK_J: tl.constexpr = BLOCK_N if OF == "query" else BLOCK_M
    if OF == "query":
        size_i, size_j, D = M, N, E
        factor_ptr, stride_fj, stride_fk = key_ptr, stride_kn, stride_kk
        first_j = part * part_j
        end_j = tl.minimum(tl.minimum(first_j + part_j, N), (pid_i + 1) * BLOCK_M + reach)
    else:
        size_i, size_j = N, M
        if OF == "key":
            D = E
            factor_ptr, stride_fj, stride_fk = query_ptr, stride_qm, stride_qk
        else:
            D = V
            factor_ptr, stride_fj, stride_fk = dout_ptr, stride_gm, stride_gk
        end_j = tl.minimum((part + 1) * part_j, M)
        first_j = tl.maximum(part * part_j, tl.maximum(pid_i * BLOCK_N - reach, 0) // BLOCK_M * BLOCK_M)
    offs_i = pid_i * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_d = (offs_d < D)[None, :]

    grad = tl.zeros((BLOCK_I, BLOCK_D), DTYPE)
    for start_j in range(first_j, end_j, BLOCK_J):
        offs_j = start_j + tl.arange(0, BLOCK_J).to(tl.int64)
        if OF == "query":
            offs_m, offs_n = offs_i, offs_j
        else:
            offs_m, offs_n = offs_j, offs_i
        offs_row = (pid_b * H + pid_h) * M + offs_m
        if OF == "value":
            score, _ = _scores(
                query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
                offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
            pairs = _weights(score, statistics_ptr, offs_row, offs_m < M)
            pairs = _dropped(pairs, seed_ptr, offs_row, offs_n, N, dropout_p, DTYPE)
        else:
            pairs = _dscores(
                query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, value_ptr, stride_vn, stride_vk,
                mask_ptr, stride_am, stride_an, dout_ptr, stride_gm, stride_gk, seed_ptr, statistics_ptr, offs_row,
                offs_m, offs_n, M, N, E, V, reach, scale, dropout_p, DTYPE, UPCAST, UPCAST_VALUE, PRECISION, BLOCK_K)
        # (BLOCK_J, BLOCK_D)
        factor_ptrs = factor_ptr + offs_j[:, None] * stride_fj + offs_d[None, :] * stride_fk
        factor = tl.load(factor_ptrs, mask=(offs_j < size_j)[:, None] & mask_d, other=0.0).to(DTYPE)
        if OF != "query":
            pairs = tl.trans(pairs)
        grad = tl.dot(pairs, factor, grad, input_precision=PRECISION, out_dtype=DTYPE)

    if OF != "value":
        grad *= tl.full((1, 1), scale, DTYPE)
    grad_ptr += part * stride_dp + pid_b * stride_db + pid_h * stride_dh
    grad_ptrs = grad_ptr + offs_i[:, None] * stride_di + offs_d[None, :] * stride_dk
    tl.store(grad_ptrs, grad, mask=(offs_i < size_i)[:, None] & mask_d)


@triton.jit
def _dmask_kernel(
    first_pid,
    query_ptr, stride_qb, stride_qh, stride_qm, stride_qk,
    key_ptr, stride_kb, stride_kh, stride_kn, stride_kk,
    value_ptr, stride_vb, stride_vh, stride_vn, stride_vk,
    mask_ptr, stride_ab, stride_ah, stride_am, stride_an,
    dout_ptr, stride_gb, stride_gh, stride_gm, stride_gk,
    seed_ptr, statistics_ptr,
    dmask_ptr, stride_dp, stride_db, stride_dh, stride_dm, stride_dn,
    H, M, N, E, V, kept_b, kept_h, kept_m, kept_n, sum_h, sum_m, sum_n, sum_all, part_tiles,
    reach, scale: tl.float64, dropout_p: tl.float64,
    SUM_M: tl.constexpr, SUM_N: tl.constexpr,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, UPCAST_VALUE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Of b, h and tiles of m and n there are kept_b, ..., and each axis of which one is kept is summed."""
    pid = first_pid + tl.program_id(0).to(tl.int64)
    pid_n = pid % kept_n
    pid_m = pid // kept_n % kept_m
    pid_h = pid // kept_n // kept_m % kept_h
    pid_b = pid // kept_n // kept_m // kept_h % kept_b
    part = pid // kept_n // kept_m // kept_h // kept_b

    total = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    for tile in range(part * part_tiles, tl.minimum((part + 1) * part_tiles, sum_all)):
        start_n = (pid_n + tile % sum_n) * BLOCK_N
        start_m = (pid_m + tile // sum_n % sum_m) * BLOCK_M
        h = pid_h + tile // sum_n // sum_m % sum_h
        b = pid_b + tile // sum_n // sum_m // sum_h
        offs_m = start_m + tl.arange(0, BLOCK_M)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        beyond = start_n >= start_m + BLOCK_M + reach
        value_ptrs, mask_ptrs = value_ptr, mask_ptr
        if value_ptr is not None:
            value_ptrs += b * stride_vb + h * stride_vh
        if mask_ptr is not None:
            mask_ptrs += b * stride_ab + h * stride_ah
        total += _dscores(
            query_ptr + b * stride_qb + h * stride_qh, stride_qm, stride_qk,
            key_ptr + b * stride_kb + h * stride_kh, stride_kn, stride_kk, value_ptrs, stride_vn, stride_vk,
            mask_ptrs, stride_am, stride_an, dout_ptr + b * stride_gb + h * stride_gh, stride_gm, stride_gk,
            seed_ptr, statistics_ptr, (b * H + h) * M + offs_m, offs_m, offs_n, M, N,
            tl.where(beyond, 0, E), tl.where(beyond, 0, V), reach, scale, dropout_p,
            DTYPE, UPCAST, UPCAST_VALUE, PRECISION, BLOCK_K)

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if SUM_M:
        total = tl.sum(total, 0, keep_dims=True)
        offs_m = tl.zeros((1, 1), tl.int64)
    if SUM_N:
        total = tl.sum(total, 1, keep_dims=True)
        offs_n = tl.zeros((1, 1), tl.int64)
    dmask_ptr += part * stride_dp + pid_b * stride_db + pid_h * stride_dh
    tl.store(dmask_ptr + offs_m * stride_dm + offs_n * stride_dn, total, mask=(offs_m < M) & (offs_n < N))
# fmt: on


def choose_config(architecture: str, contraction: dict[str, Any]) -> Config:
    """The largest tiles with which no kernel spills a register.

    The same for all kernels of backward, that P has the same bits. Static, so that no result depends on a timing.
    """
    # CDNA has 512 registers a thread for 4 warps, 256 for 8. ptxas, unless told that it may take 255, spills a few.
    threads = {"num_warps": 4} if architecture == "gfx942" else {"num_warps": 8, "maxnreg": 255}
    num_stages = 3 if architecture == "sm_90" else 2
    if contraction["DTYPE"] is tl.float64:
        return Config(**threads, num_stages=num_stages, BLOCK_M=32, BLOCK_N=16, BLOCK_K=16, BLOCK_D=32)
    return Config(**threads, num_stages=num_stages, BLOCK_M=64, BLOCK_N=32, BLOCK_K=16, BLOCK_D=128)


def choose_row_config(architecture: str, contraction: dict[str, Any], N: int) -> Config | None:
    """Tiles as wide as a row of weights, where they fit the registers."""
    config = replace(choose_config(architecture, contraction), BLOCK_D=0)
    if N <= config.BLOCK_N:
        return config
    if contraction["DTYPE"] is tl.float64 or N > 512:
        return None
    return replace(config, BLOCK_N=128) if N <= 128 else replace(config, BLOCK_M=32, BLOCK_N=512)


# fmt: off
def scores(
    query: Tensor, key: Tensor, mask: Tensor | None, out: Tensor, *, scale: float, causal: bool, precision: str,
) -> None:
    """Write s to `out`.

    query is (B, H, M, E), key (B, H, N, E), mask (B, H, M, N), of bool, where True takes part, or of a floating-point
    dtype, out (B, H, M, N). Any strides, any size may be 0. `precision` is the value of
    `torch.get_float32_matmul_precision()`.
    """
    call = _Call(query, key, None, mask, None, scale, causal, 0.0, precision)
    _run(query, _plan_scores(architecture_of(query.device), call, out))


def weights(
    query: Tensor, key: Tensor, mask: Tensor | None, out: Tensor, *, scale: float, causal: bool, precision: str,
) -> None:
    """Write P to `out`, given the operands of `scores`."""
    call = _Call(query, key, None, mask, None, scale, causal, 0.0, precision)
    _run(query, _plan_weights(architecture_of(query.device), call, out))


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, out: Tensor, *,
    scale: float, causal: bool, dropout_p: float, precision: str,
) -> None:
    """Write P' value to `out`, given the operands of `scores`.

    value is (B, H, N, V), out (B, H, M, V). The int64 in `seed` decides with the index of a pair whether it is kept;
    None drops nothing.
    """
    call = _Call(query, key, value, mask, seed, scale, causal, dropout_p, precision)
    _run(query, _plan_attention(architecture_of(query.device), call, out))


def backward_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, dout: Tensor,
    dquery: Tensor | None, dkey: Tensor | None, dmask: Tensor | None, *, scale: float, causal: bool, precision: str,
) -> None:
    """Write the gradients that are not None, given the operands of `scores`.

    dmask is in the dtype of the arithmetic, and is summed over each axis along which it has size 1.
    """
    call = _Call(query, key, None, mask, None, scale, causal, 0.0, precision)
    _run(query, _plan_backward(architecture_of(query.device), call, None, dout, dquery, dkey, None, dmask))


def backward_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, dout: Tensor,
    dquery: Tensor | None, dkey: Tensor | None, dmask: Tensor | None, *, scale: float, causal: bool, precision: str,
) -> None:
    """As `backward_scores`, for `weights`."""
    call = _Call(query, key, None, mask, None, scale, causal, 0.0, precision)
    statistics = _new_statistics(call)
    _run(query, _plan_backward(architecture_of(query.device), call, statistics, dout, dquery, dkey, None, dmask))


def backward_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, dout: Tensor,
    dquery: Tensor | None, dkey: Tensor | None, dvalue: Tensor | None, dmask: Tensor | None, *,
    scale: float, causal: bool, dropout_p: float, precision: str,
) -> None:
    """As `backward_scores`, for `attention`."""
    call = _Call(query, key, value, mask, seed, scale, causal, dropout_p, precision)
    statistics = _new_statistics(call)
    _run(query, _plan_backward(architecture_of(query.device), call, statistics, dout, dquery, dkey, dvalue, dmask))
# fmt: on


def _run(query: Tensor, launches: Iterator[Launch]) -> None:
    with torch.cuda.device_of(query):
        for launch in launches:
            launch()


@dataclass(frozen=True)
class _Call:
    query: Tensor
    key: Tensor
    value: Tensor | None
    mask: Tensor | None
    seed: Tensor | None
    scale: float
    causal: bool
    dropout_p: float
    precision: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """B, H, M, N, E, V."""
        return *self.query.shape[:3], *self.key.shape[2:], 0 if self.value is None else self.value.shape[3]

    @property
    def reach(self) -> int:
        return 0 if self.causal else self.key.shape[2]

    @property
    def pair_args(self) -> tuple[Any, ...]:
        return *pointer(self.query), *pointer(self.key)

    @property
    def mask_args(self) -> tuple[Any, ...]:
        if self.mask is None or self.mask.dtype != torch.bool:
            return pointer(self.mask, 4)
        return pointer(self.mask.view(torch.uint8))

    def contraction(self, architecture: str) -> dict[str, Any]:
        others = [operand for operand in (self.value, self.mask) if operand is not None]
        return contraction_of(architecture, self.precision, self.query, self.key, *others)


def _new_statistics(call: _Call) -> Tensor:
    dtypes = [operand.dtype for operand in (call.query, call.key, call.value, call.mask) if operand is not None]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    return call.query.new_empty((*call.query.shape[:3], 3), dtype=dtype)


# fmt: off
def _plan_scores(architecture: str, call: _Call, out: Tensor) -> Iterator[Launch]:
    B, H, M, N, E, _ = call.sizes
    contraction = call.contraction(architecture)
    config = replace(choose_config(architecture, contraction), BLOCK_D=0)
    yield Launch(
        _scores_kernel, B * H * triton.cdiv(M, config.BLOCK_M) * triton.cdiv(N, config.BLOCK_N),
        (*call.pair_args, *call.mask_args, *pointer(out), H, M, N, E, call.reach, call.scale),
        {**contraction, **config.options()},
    )


def _plan_weights(architecture: str, call: _Call, out: Tensor) -> Iterator[Launch]:
    B, H, M, N, E, _ = call.sizes
    contraction = call.contraction(architecture)
    whole = choose_row_config(architecture, contraction, N)
    config = whole or replace(choose_config(architecture, contraction), BLOCK_D=0)
    yield Launch(
        _weights_kernel, B * H * triton.cdiv(M, config.BLOCK_M),
        (*call.pair_args, *call.mask_args, *pointer(out), H, M, N, E, call.reach, call.scale),
        {**contraction, "WHOLE": whole is not None, **config.options()},
    )


def _plan_attention(architecture: str, call: _Call, out: Tensor) -> Iterator[Launch]:
    B, H, M, N, E, V = call.sizes
    contraction = call.contraction(architecture)
    config = _narrowed(choose_config(architecture, contraction), V)
    yield Launch(
        _attention_kernel, B * H * triton.cdiv(M, config.BLOCK_M) * triton.cdiv(V, config.BLOCK_D),
        (*call.pair_args, *pointer(call.value), *call.mask_args, call.seed, *pointer(out),
         H, M, N, E, V, call.reach, call.scale, call.dropout_p),
        {**contraction, **config.options()},
    )


def _plan_backward(
    architecture: str, call: _Call, statistics: Tensor | None, dout: Tensor,
    dquery: Tensor | None, dkey: Tensor | None, dvalue: Tensor | None, dmask: Tensor | None,
) -> Iterator[Launch]:
    B, H, M, N, E, V = call.sizes
    grads = [grad for grad in (dquery, dkey, dvalue, dmask) if grad is not None and grad.numel() > 0]
    if B * H * M * N == 0:
        for grad in grads:
            grad.zero_()
        return
    contraction = call.contraction(architecture)
    config = choose_config(architecture, contraction)
    upcast_value = contraction["UPCAST"]
    if call.value is not None:
        upcast_value = contraction_of(architecture, call.precision, dout, call.value)["UPCAST"] or upcast_value
    constants = {**contraction, "UPCAST_VALUE": upcast_value, **replace(config, BLOCK_D=0).options()}
    args = (*call.pair_args, *pointer(call.value, 4), *call.mask_args, *pointer(dout), call.seed, statistics)
    settings = call.reach, call.scale, call.dropout_p
    if statistics is not None:
        yield Launch(
            _statistics_kernel, B * H * triton.cdiv(M, config.BLOCK_M), (*args, H, M, N, E, V, *settings), constants)
    for grad in grads:
        if grad is dmask:
            yield from _plan_dmask(call, args, grad, constants, config)
            continue
        of = "query" if grad is dquery else "key" if grad is dkey else "value"
        block_i, size_j, block_j = config.BLOCK_M, N, config.BLOCK_N
        if of != "query":
            block_i, size_j, block_j = config.BLOCK_N, M, config.BLOCK_M
        block_d = _narrowed(config, grad.shape[3]).BLOCK_D
        tiles_i, tiles_d = triton.cdiv(grad.shape[2], block_i), triton.cdiv(grad.shape[3], block_d)
        programs = B * H * tiles_i * tiles_d
        parts, part_j = split(size_j, block_j, programs)
        with partial_sums(grad, 4, parts, contraction["DTYPE"]) as grad_args:
            yield Launch(
                _gradient_kernel, programs * parts,
                (*args, *grad_args, B, H, M, N, E, V, tiles_i, tiles_d, part_j, *settings),
                {"OF": of, **constants, "BLOCK_D": block_d},
            )


def _plan_dmask(
    call: _Call, args: tuple[Any, ...], dmask: Tensor, constants: dict[str, Any], config: Config,
) -> Iterator[Launch]:
    B, H, M, N, E, V = call.sizes
    tiles = B, H, triton.cdiv(M, config.BLOCK_M), triton.cdiv(N, config.BLOCK_N)
    kept = [1 if size == 1 else count for size, count in zip(dmask.shape, tiles)]
    summed = [count // own for count, own in zip(tiles, kept)]
    programs, count = math.prod(kept), math.prod(summed)
    parts, part_tiles = split(count, 1, programs)
    with partial_sums(dmask, 4, parts, constants["DTYPE"]) as dmask_args:
        yield Launch(
            _dmask_kernel, programs * parts,
            (*args, *dmask_args, H, M, N, E, V, *kept, *summed[1:], count, part_tiles,
             call.reach, call.scale, call.dropout_p),
            {"SUM_M": dmask.shape[2] == 1, "SUM_N": dmask.shape[3] == 1, **constants},
        )
# fmt: on


def _narrowed(config: Config, D: int) -> Config:
    return replace(config, BLOCK_D=min(config.BLOCK_D, max(16, triton.next_power_of_2(D))))


def shipped() -> Iterator[tuple[str, Launch]]:
    """As `pairs.shipped`."""
    return distinct(_representatives)


def _representatives(architecture: str, dtype: torch.dtype, precision: str) -> Iterator[Launch]:
    """Every kernel with its widest tiles, an additive mask of every pair and dropout, which take the most registers.

    Of other dtypes and precisions, with the same tiles or smaller, the two that hold the most, on the architectures
    whose products take operands of 16 bits or TF32 from shared or tensor memory.
    """
    thorough = dtype == torch.float32 and precision == "highest"
    if not thorough and (architecture not in ("sm_90", "sm_100") or (precision, dtype) == ("medium", torch.bfloat16)):
        return
    B, H, M, D = 16, 16, 1600, 128
    x = torch.empty(B, H, M, D, dtype=dtype, device="meta")
    full = x.new_empty(B, H, M, M)
    seed = x.new_empty(1, dtype=torch.int64)
    statistics = x.new_empty(B, H, M, 3, dtype=torch.promote_types(dtype, torch.float32))
    call = _Call(x, x, x, full, seed, 0.125, True, 0.25, precision)
    yield from _plan_attention(architecture, call, x)
    for launch in _plan_backward(architecture, call, statistics, x, x, x.clone(), x.clone(), statistics[..., :1]):
        if thorough or launch.constants.get("OF") == "key":
            yield launch
    if thorough:
        yield from _plan_scores(architecture, call, full)
        for N in M, 512:
            row = replace(call, key=x[:, :, :N], mask=full[..., :N])
            yield from _plan_weights(architecture, row, full[..., :N])
