"""The gradients of attention: kernels and the plans that launch them. `attention` has the formulas."""

import math
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
    dscores_tile,
    dweights_tile,
    exponentials,
    inverse_of,
    narrowed,
    score_tile,
    shift_of,
    weights_tile,
)
from .launch import Config, Launch, contraction_of, partial_sums, pointer, split, torch_dtype, zero
from .tiles import entries, indices, load_tile, store_tile


# fmt: off
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
    """Write max, 1 / total and delta of every row, side by side. All are 0 for a row without pairs."""
    pid_m, pid_h, pid_b = indices(first_pid, (tl.cdiv(M, BLOCK_M), H))
    query_ptr, key_ptr, dout_ptr = entries(
        (pid_b, pid_h), ((query_ptr, stride_qb, stride_qh), (key_ptr, stride_kb, stride_kh),
                         (dout_ptr, stride_gb, stride_gh)))
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
        score, present = score_tile(
            query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
            offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
        weights, maximum, decay = exponentials(score, maximum)
        dweights = dweights_tile(
            dout_ptr, stride_gm, stride_gk, value_ptr, stride_vn, stride_vk, seed_ptr, offs_row, offs_m, offs_n,
            present, M, N, V, dropout_p, DTYPE, UPCAST_VALUE, PRECISION, BLOCK_K)
        total = total * decay + tl.sum(weights, 1)
        delta = delta * decay + tl.sum(tl.where(weights == 0, 0.0, weights * dweights), 1)

    inverse = inverse_of(total)
    tl.store(statistics_ptr + offs_row * 3, shift_of(maximum), mask=mask_m)
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
    """Write the gradient of rows i of an operand, or one part of its sum over j: a query has i = m, others i = n."""
    pid_d, pid_i, pid_h, pid_b, part = indices(first_pid, (tiles_d, tiles_i, H, B))
    query_ptr, key_ptr, dout_ptr = entries(
        (pid_b, pid_h), ((query_ptr, stride_qb, stride_qh), (key_ptr, stride_kb, stride_kh),
                         (dout_ptr, stride_gb, stride_gh)))
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

    grad = tl.zeros((BLOCK_I, BLOCK_D), DTYPE)
    for start_j in range(first_j, end_j, BLOCK_J):
        offs_j = start_j + tl.arange(0, BLOCK_J).to(tl.int64)
        if OF == "query":
            offs_m, offs_n = offs_i, offs_j
        else:
            offs_m, offs_n = offs_j, offs_i
        offs_row = (pid_b * H + pid_h) * M + offs_m
        if OF == "value":
            score, _ = score_tile(
                query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
                offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
            pairs = weights_tile(score, statistics_ptr, offs_row, offs_m < M)
            pairs = dropped(pairs, seed_ptr, offs_row, offs_n, N, dropout_p, DTYPE)
        else:
            pairs = dscores_tile(
                query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, value_ptr, stride_vn, stride_vk,
                mask_ptr, stride_am, stride_an, dout_ptr, stride_gm, stride_gk, seed_ptr, statistics_ptr, offs_row,
                offs_m, offs_n, M, N, E, V, reach, scale, dropout_p, DTYPE, UPCAST, UPCAST_VALUE, PRECISION, BLOCK_K)
        factor = load_tile(factor_ptr, stride_fj, stride_fk, offs_j, offs_d, size_j, D, 0.0).to(DTYPE)
        if OF != "query":
            pairs = tl.trans(pairs)
        grad = tl.dot(pairs, factor, grad, input_precision=PRECISION, out_dtype=DTYPE)

    if OF != "value":
        grad *= tl.full((1, 1), scale, DTYPE)
    grad_ptr += part * stride_dp + pid_b * stride_db + pid_h * stride_dh
    store_tile(grad_ptr, stride_di, stride_dk, offs_i, offs_d, size_i, D, grad)


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
    """Write the gradient of the mask, or one part of its sum.

    It has kept_b entries of b, kept_h of h, and kept_m by kept_n tiles. An axis with one entry is summed.
    """
    pid_n, pid_m, pid_h, pid_b, part = indices(first_pid, (kept_n, kept_m, kept_h, kept_b))

    total = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    for tile in range(part * part_tiles, tl.minimum((part + 1) * part_tiles, sum_all)):
        start_n = (pid_n + tile % sum_n) * BLOCK_N
        start_m = (pid_m + tile // sum_n % sum_m) * BLOCK_M
        h = pid_h + tile // sum_n // sum_m % sum_h
        b = pid_b + tile // sum_n // sum_m // sum_h
        offs_m = start_m + tl.arange(0, BLOCK_M)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        beyond = start_n >= start_m + BLOCK_M + reach
        total += dscores_tile(
            query_ptr + b * stride_qb + h * stride_qh, stride_qm, stride_qk,
            key_ptr + b * stride_kb + h * stride_kh, stride_kn, stride_kk,
            value_ptr if value_ptr is None else value_ptr + b * stride_vb + h * stride_vh, stride_vn, stride_vk,
            mask_ptr if mask_ptr is None else mask_ptr + b * stride_ab + h * stride_ah, stride_am, stride_an,
            dout_ptr + b * stride_gb + h * stride_gh, stride_gm, stride_gk,
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


# fmt: off
def plan_backward(
    architecture: str, call: AttentionInputs, dout: Tensor,
    dquery: Tensor | None, dkey: Tensor | None, dvalue: Tensor | None, dmask: Tensor | None,
) -> Iterator[Launch]:
    B, H, M, N, E, V = call.sizes
    grads = [grad for grad in (dquery, dkey, dvalue, dmask) if grad is not None and grad.numel() > 0]
    if B * H * M * N == 0:
        zero(*grads)
        return
    contraction = call.contraction(architecture)
    statistics = None
    if call.output != "scores":
        statistics = call.query.new_empty((B, H, M, 3), dtype=torch_dtype(contraction["DTYPE"]))
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
        block_d = narrowed(config, grad.shape[3]).BLOCK_D
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
    call: AttentionInputs, args: tuple[Any, ...], dmask: Tensor, constants: dict[str, Any], config: Config,
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
