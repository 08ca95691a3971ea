"""Additive scores of every pair of rows, without keeping the pairs and coordinates.

    score[b,m,n] = sum_k weight[b,k] tanh(query[b,m,k] + key[b,n,k])

    r = 1 / (1 + e^(2z)),    z = query + key,    tanh z = 1 - 2 r,    tanh' z = 4 r (1 - r)
    dquery = sum_n G weight tanh',    dkey = sum_m G weight tanh',    dweight = sum_mn G tanh,    G = dscore

The exponential may overflow to infinity or vanish: r is 0 or 1 then, which is right. Each term adds an absolute error
of a few roundoffs of |weight|. Tiles have three axes, and kernels sum over one or two of them. With query and key
exchanged, dkey is computed as dquery is. Each launch completes its own sums, so it needs no atomics.

Arithmetic is float64 if an operand is, else float32. Results are rounded once, when they are stored.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Config, Launch, arithmetic_of, partial_sums, pointer, run, split, zero
from .tiles import entries, indices, store_tile


# fmt: off
@triton.jit
def _load(ptr, stride_i, stride_k, i, k, size_i, size_k, DTYPE: tl.constexpr):
    return tl.load(ptr + i * stride_i + k * stride_k, mask=(i < size_i) & (k < size_k), other=0.0).to(DTYPE)


@triton.jit
def _ratio(query, key):
    return 1 / (1 + tl.exp(2 * (query + key)))


@triton.jit
def _scores_kernel(
    first_pid,
    query_ptr, stride_qb, stride_qm, stride_qk,
    key_ptr, stride_kb, stride_kn, stride_kk,
    weight_ptr, stride_wb, stride_wk,
    out_ptr, stride_ob, stride_om, stride_on,
    M, N, D,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    pid_n, pid_m, pid_b = indices(first_pid, (tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)))
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m, n = offs_m[:, None, None], offs_n[None, :, None]
    query_ptr, key_ptr, weight_ptr = entries(
        (pid_b,), ((query_ptr, stride_qb), (key_ptr, stride_kb), (weight_ptr, stride_wb)))

    terms = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), DTYPE)
    for start_k in range(0, D, BLOCK_K):
        k = start_k + tl.arange(0, BLOCK_K).to(tl.int64)[None, None, :]
        query = _load(query_ptr, stride_qm, stride_qk, m, k, M, D, DTYPE)
        key = _load(key_ptr, stride_kn, stride_kk, n, k, N, D, DTYPE)
        weight = tl.load(weight_ptr + k * stride_wk, mask=k < D, other=0.0).to(DTYPE)
        terms += weight * (1 - 2 * _ratio(query, key))
    store_tile(out_ptr + pid_b * stride_ob, stride_om, stride_on, offs_m, offs_n, M, N, tl.sum(terms, 2))


@triton.jit
def _query_kernel(
    first_pid,
    query_ptr, stride_qb, stride_qm, stride_qk,
    key_ptr, stride_kb, stride_kn, stride_kk,
    weight_ptr, stride_wb, stride_wk,
    dscore_ptr, stride_gb, stride_gm, stride_gn,
    grad_ptr, stride_dp, stride_db, stride_dm, stride_dk,
    B, M, N, D, part_n,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Write dquery, or one part of its sum over n."""
    pid_k, pid_m, pid_b, part = indices(first_pid, (tl.cdiv(D, BLOCK_K), tl.cdiv(M, BLOCK_M), B))
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    m, k = offs_m[:, None, None], offs_k[None, None, :]
    query = _load(query_ptr + pid_b * stride_qb, stride_qm, stride_qk, m, k, M, D, DTYPE)
    key_ptr, dscore_ptr = entries((pid_b,), ((key_ptr, stride_kb), (dscore_ptr, stride_gb)))

    terms = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), DTYPE)
    for start_n in range(part * part_n, tl.minimum((part + 1) * part_n, N), BLOCK_N):
        n = start_n + tl.arange(0, BLOCK_N)[None, :, None]
        key = _load(key_ptr, stride_kn, stride_kk, n, k, N, D, DTYPE)
        G = _load(dscore_ptr, stride_gm, stride_gn, m, n, M, N, DTYPE)
        r = _ratio(query, key)
        terms += G * (r * (1 - r))

    weight = tl.load(weight_ptr + pid_b * stride_wb + offs_k * stride_wk, mask=offs_k < D, other=0.0).to(DTYPE)
    grad = 4 * weight[None, :] * tl.sum(terms, 1)
    grad_ptr += part * stride_dp + pid_b * stride_db
    store_tile(grad_ptr, stride_dm, stride_dk, offs_m, offs_k, M, D, grad)


@triton.jit
def _weight_kernel(
    first_pid,
    query_ptr, stride_qb, stride_qm, stride_qk,
    key_ptr, stride_kb, stride_kn, stride_kk,
    dscore_ptr, stride_gb, stride_gm, stride_gn,
    grad_ptr, stride_dp, stride_db, stride_dk,
    B, M, N, D, part_m,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Write dweight, or one part of its sum over m."""
    pid_k, pid_b, part = indices(first_pid, (tl.cdiv(D, BLOCK_K), B))
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    k = offs_k[None, None, :]
    query_ptr, key_ptr, dscore_ptr = entries(
        (pid_b,), ((query_ptr, stride_qb), (key_ptr, stride_kb), (dscore_ptr, stride_gb)))

    terms = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), DTYPE)
    for start_m in range(part * part_m, tl.minimum((part + 1) * part_m, M), BLOCK_M):
        m = start_m + tl.arange(0, BLOCK_M)[:, None, None]
        query = _load(query_ptr, stride_qm, stride_qk, m, k, M, D, DTYPE)
        for start_n in range(0, N, BLOCK_N):
            n = start_n + tl.arange(0, BLOCK_N).to(tl.int64)[None, :, None]
            key = _load(key_ptr, stride_kn, stride_kk, n, k, N, D, DTYPE)
            G = _load(dscore_ptr, stride_gm, stride_gn, m, n, M, N, DTYPE)
            terms += G * (1 - 2 * _ratio(query, key))

    grad_ptr += part * stride_dp + pid_b * stride_db
    tl.store(grad_ptr + offs_k * stride_dk, tl.sum(tl.sum(terms, 0), 0), mask=offs_k < D)


def choose_config(kernel: Any, dtype: tl.dtype, M: int, N: int) -> Config:
    """Tiles of 32 float32 or 16 float64 elements per thread, as for distances.

    The choice is static, so that no result depends on a timing.
    """
    half = 2 if dtype is tl.float64 else 1
    if M == 1 and N == 1:
        BLOCK_M, BLOCK_N, BLOCK_K = 1, 1, 512
    elif kernel is _scores_kernel:
        BLOCK_M, BLOCK_N, BLOCK_K = (64 // half, 1, 128) if N == 1 else (32, 32 // half, 8)
    elif M == 1:
        BLOCK_M, BLOCK_N, BLOCK_K = 1, 256 // half, 32
    else:
        BLOCK_M, BLOCK_N, BLOCK_K = (256 // half, 1, 32) if N == 1 else (32, 16 // half, 16)
    return Config(num_warps=8, num_stages=2, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K)


def scores(query: Tensor, key: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write the scores to `out`.

    query is (B, M, D), key (B, N, D), weight (B, D), out (B, M, N). They may have any strides, and any size may be 0.
    """
    run(query, _plan_scores(query, key, weight, out))


def backward(
    query: Tensor, key: Tensor, weight: Tensor, dscore: Tensor,
    dquery: Tensor | None, dkey: Tensor | None, dweight: Tensor | None,
) -> None:
    """Write the gradients that are not None. Each has the shape of its operand, as `scores` takes it."""
    run(query, _plan_backward(query, key, weight, dscore, dquery, dkey, dweight))


def _plan_scores(query: Tensor, key: Tensor, weight: Tensor, out: Tensor) -> Iterator[Launch]:
    if out.numel() == 0:
        return
    if out.shape[1] == 1:  # tiles are longest along rows: a single row becomes a single column
        query, key, out = key, query, out.mT
    (B, M, N), D = out.shape, query.shape[2]
    dtype = arithmetic_of(query, key, weight)
    config = choose_config(_scores_kernel, dtype, M, N)
    yield Launch(
        _scores_kernel, B * triton.cdiv(M, config.BLOCK_M) * triton.cdiv(N, config.BLOCK_N),
        (*pointer(query), *pointer(key), *pointer(weight, 2), *pointer(out), M, N, D),
        {"DTYPE": dtype, **config.options()},
    )


def _plan_backward(
    query: Tensor, key: Tensor, weight: Tensor, dscore: Tensor,
    dquery: Tensor | None, dkey: Tensor | None, dweight: Tensor | None,
) -> Iterator[Launch]:
    if dscore.numel() == 0 or query.shape[2] == 0:
        zero(dquery, dkey, dweight)
        return
    if dquery is not None:
        yield from _plan_query(query, key, weight, dscore, dquery)
    if dkey is not None:
        yield from _plan_query(key, query, weight, dscore.mT, dkey)
    if dweight is not None:
        yield from _plan_weight(query, key, weight, dscore, dweight)


def _plan_query(query: Tensor, key: Tensor, weight: Tensor, dscore: Tensor, dquery: Tensor) -> Iterator[Launch]:
    (B, M, N), D = dscore.shape, query.shape[2]
    dtype = arithmetic_of(query, key, weight, dscore)
    config = choose_config(_query_kernel, dtype, M, N)
    programs = B * triton.cdiv(M, config.BLOCK_M) * triton.cdiv(D, config.BLOCK_K)
    parts, part_n = split(N, config.BLOCK_N, programs)
    with partial_sums(dquery, 3, parts, dtype) as grad_args:
        yield Launch(
            _query_kernel, programs * parts,
            (*pointer(query), *pointer(key), *pointer(weight, 2), *pointer(dscore), *grad_args, B, M, N, D, part_n),
            {"DTYPE": dtype, **config.options()},
        )


def _plan_weight(query: Tensor, key: Tensor, weight: Tensor, dscore: Tensor, dweight: Tensor) -> Iterator[Launch]:
    if dscore.shape[1] < dscore.shape[2]:  # only the sum over rows is split: rows become the longer axis
        query, key, dscore = key, query, dscore.mT
    (B, M, N), D = dscore.shape, query.shape[2]
    dtype = arithmetic_of(query, key, weight, dscore)
    config = choose_config(_weight_kernel, dtype, M, N)
    programs = B * triton.cdiv(D, config.BLOCK_K)
    parts, part_m = split(M, config.BLOCK_M, programs)
    with partial_sums(dweight, 2, parts, dtype) as grad_args:
        yield Launch(
            _weight_kernel, programs * parts,
            (*pointer(query), *pointer(key), *pointer(dscore), *grad_args, B, M, N, D, part_m),
            {"DTYPE": dtype, **config.options()},
        )
# fmt: on


def representatives(architecture: str, dtype: torch.dtype, precision: str) -> Iterator[Launch]:
    """Launches of every kernel, on tiles and on single columns.

    Operands of 16 bits are converted when they are loaded, so their launches are those of float32.
    """
    if dtype.itemsize < 4:
        return
    query, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((2, 1600, 128), (2, 128)))
    dscore = query.new_empty(2, 1600, 1600)
    yield from _plan_scores(query, query, weight, dscore)
    yield from _plan_scores(query, query[:, :1], weight, dscore[..., :1])
    yield from _plan_backward(query, query, weight, dscore, query, None, weight)
