"""Causal attention over a log-sparse pattern: a few offsets, the same for every row.

    s[b,l,d] = scale <q[b,l], k[b,l-d]>,    p = softmax_d s,    out[b,l,:] = sum_d p v[b,l-d,:]

    dp = <dout[b,l], v[b,l-d]>,    delta[b,l] = sum_d p dp,    ds = scale p (dp - delta)
    dq[b,l,:] = sum_d ds k[b,l-d,:],    dk[b,j,:] = sum_d ds q[b,j+d,:],    dv[b,j,:] = sum_d p dout[b,j+d,:]

The offsets are d = restart i + j and d = restart i + local - 1 + 2^k, for all i and k and 0 <= j < local. What is added
to restart i stays below restart.

A program takes a block of rows, and goes through the offsets. The rows at one offset are contiguous too, and no matrix
product is needed. Backward first goes by queries, and stores the maximum, the sum and delta of each row. Then it goes
by keys. Neither needs atomics.

Arithmetic is float64 if an operand is, else float32. Results are rounded once, when they are stored.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, pointer, run, zero
from .tiles import entries, indices, store_tile

LARGEST = 2048  # the most features of a row, which registers hold


# fmt: off
@triton.jit
def _offset(number, local, restart, base):
    """The offset with a given number. Each period of `restart` rows has `base` offsets."""
    number = tl.full((), 0, tl.int64) + number
    i = number % base
    doubled = tl.full((), 1, tl.int64) << tl.maximum(i - local, 0)
    return number // base * restart + tl.where(i < local, i, local - 1 + doubled)


@triton.jit
def _load_rows(
    ptr, stride_l, stride_e, rows, L, E,
    DTYPE: tl.constexpr, BLOCK_E: tl.constexpr,
):
    """Rows as a tile of BLOCK_E columns, with 0 for a row or a feature that does not exist."""
    offs_e = tl.arange(0, BLOCK_E).to(tl.int64)
    mask = ((rows >= 0) & (rows < L))[:, None] & (offs_e < E)[None, :]
    return tl.load(ptr + rows[:, None] * stride_l + offs_e[None, :] * stride_e, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def _store_rows(
    ptr, stride_l, stride_e, rows, L, E, value,
    BLOCK_E: tl.constexpr,
):
    store_tile(ptr, stride_l, stride_e, rows, tl.arange(0, BLOCK_E).to(tl.int64), L, E, value)


@triton.jit
def _score(q, k, scale, keys):
    return tl.where(keys >= 0, tl.sum(q * k, 1) * scale, float("-inf"))


@triton.jit
def _sums(
    q, dout,
    k_ptr, stride_kl, stride_ke,
    v_ptr, stride_vl, stride_ve,
    rows, count, scale, L, E, V, local, restart, base,
    DTYPE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """The maximum of s of each row, and the sums of exp(s - max) and of exp(s - max) v, or of its product with dout."""
    maximum = tl.full((BLOCK_L,), float("-inf"), DTYPE)
    total = tl.zeros((BLOCK_L,), DTYPE)
    acc = tl.zeros((BLOCK_L, BLOCK_V) if dout is None else (BLOCK_L,), DTYPE)
    for number in range(0, count):
        keys = rows - _offset(number, local, restart, base)
        k = _load_rows(k_ptr, stride_kl, stride_ke, keys, L, E, DTYPE, BLOCK_E)
        v = _load_rows(v_ptr, stride_vl, stride_ve, keys, L, V, DTYPE, BLOCK_V)
        score = _score(q, k, scale, keys)
        larger = tl.maximum(maximum, score)
        shrink = tl.exp(maximum - larger)
        share = tl.exp(score - larger)
        total = total * shrink + share
        if dout is None:  # noqa: SIM108, known when compiling
            acc = acc * shrink[:, None] + share[:, None] * v
        else:
            acc = acc * shrink + share * tl.sum(dout * v, 1)
        maximum = larger
    return maximum, total, acc


@triton.jit
def _forward_kernel(
    first_pid,
    q_ptr, stride_qb, stride_ql, stride_qe,
    k_ptr, stride_kb, stride_kl, stride_ke,
    v_ptr, stride_vb, stride_vl, stride_ve,
    out_ptr, stride_ob, stride_ol, stride_oe,
    scale_ptr, L, E, V, local, restart, base,
    DTYPE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):
    pid_l, pid_b = indices(first_pid, (tl.cdiv(L, BLOCK_L),))
    rows = pid_l * BLOCK_L + tl.arange(0, BLOCK_L)
    q = _load_rows(q_ptr + pid_b * stride_qb, stride_ql, stride_qe, rows, L, E, DTYPE, BLOCK_E)
    count = tl.cdiv(tl.minimum((pid_l + 1) * BLOCK_L, L), restart) * base
    _, total, acc = _sums(
        q, None, k_ptr + pid_b * stride_kb, stride_kl, stride_ke, v_ptr + pid_b * stride_vb, stride_vl, stride_ve,
        rows, count, tl.load(scale_ptr), L, E, V, local, restart, base, DTYPE, BLOCK_L, BLOCK_E, BLOCK_V)
    _store_rows(out_ptr + pid_b * stride_ob, stride_ol, stride_oe, rows, L, V, acc / total[:, None], BLOCK_V)


@triton.jit
def _backward_queries_kernel(
    first_pid,
    q_ptr, stride_qb, stride_ql, stride_qe,
    k_ptr, stride_kb, stride_kl, stride_ke,
    v_ptr, stride_vb, stride_vl, stride_ve,
    dout_ptr, stride_gb, stride_gl, stride_ge,
    statistics_ptr, stride_zb, stride_zl, stride_zi,
    dq_ptr, stride_dqb, stride_dql, stride_dqe,
    scale_ptr, L, E, V, local, restart, base,
    DTYPE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Write dq, and the statistics of each row: maximum, sum and delta."""
    pid_l, pid_b = indices(first_pid, (tl.cdiv(L, BLOCK_L),))
    rows = pid_l * BLOCK_L + tl.arange(0, BLOCK_L)
    k_ptr, v_ptr = entries((pid_b,), ((k_ptr, stride_kb), (v_ptr, stride_vb)))
    q = _load_rows(q_ptr + pid_b * stride_qb, stride_ql, stride_qe, rows, L, E, DTYPE, BLOCK_E)
    dout = _load_rows(dout_ptr + pid_b * stride_gb, stride_gl, stride_ge, rows, L, V, DTYPE, BLOCK_V)
    scale = tl.load(scale_ptr)
    count = tl.cdiv(tl.minimum((pid_l + 1) * BLOCK_L, L), restart) * base
    maximum, total, delta = _sums(
        q, dout, k_ptr, stride_kl, stride_ke, v_ptr, stride_vl, stride_ve,
        rows, count, scale, L, E, V, local, restart, base, DTYPE, BLOCK_L, BLOCK_E, BLOCK_V)
    delta /= total
    statistics_ptr += pid_b * stride_zb + rows * stride_zl
    mask = rows < L
    tl.store(statistics_ptr, maximum, mask=mask)
    tl.store(statistics_ptr + stride_zi, total, mask=mask)
    tl.store(statistics_ptr + 2 * stride_zi, delta, mask=mask)
    if dq_ptr is not None:
        dq = tl.zeros((BLOCK_L, BLOCK_E), DTYPE)
        for number in range(0, count):
            keys = rows - _offset(number, local, restart, base)
            k = _load_rows(k_ptr, stride_kl, stride_ke, keys, L, E, DTYPE, BLOCK_E)
            v = _load_rows(v_ptr, stride_vl, stride_ve, keys, L, V, DTYPE, BLOCK_V)
            share = tl.exp(_score(q, k, scale, keys) - maximum) / total
            dq += (scale * share * (tl.sum(dout * v, 1) - delta))[:, None] * k
        _store_rows(dq_ptr + pid_b * stride_dqb, stride_dql, stride_dqe, rows, L, E, dq, BLOCK_E)


@triton.jit
def _backward_keys_kernel(
    first_pid,
    q_ptr, stride_qb, stride_ql, stride_qe,
    k_ptr, stride_kb, stride_kl, stride_ke,
    v_ptr, stride_vb, stride_vl, stride_ve,
    dout_ptr, stride_gb, stride_gl, stride_ge,
    statistics_ptr, stride_zb, stride_zl, stride_zi,
    dk_ptr, stride_dkb, stride_dkl, stride_dke,
    dv_ptr, stride_dvb, stride_dvl, stride_dve,
    scale_ptr, L, E, V, local, restart, base,
    DTYPE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):
    pid_l, pid_b = indices(first_pid, (tl.cdiv(L, BLOCK_L),))
    keys = pid_l * BLOCK_L + tl.arange(0, BLOCK_L)
    statistics_ptr += pid_b * stride_zb
    k = _load_rows(k_ptr + pid_b * stride_kb, stride_kl, stride_ke, keys, L, E, DTYPE, BLOCK_E)
    v = _load_rows(v_ptr + pid_b * stride_vb, stride_vl, stride_ve, keys, L, V, DTYPE, BLOCK_V)
    scale = tl.load(scale_ptr)
    dk = tl.zeros((BLOCK_L, BLOCK_E), DTYPE)
    dv = tl.zeros((BLOCK_L, BLOCK_V), DTYPE)
    for number in range(0, tl.cdiv(L - pid_l * BLOCK_L, restart) * base):
        rows = keys + _offset(number, local, restart, base)
        mask = rows < L
        q = _load_rows(q_ptr + pid_b * stride_qb, stride_ql, stride_qe, rows, L, E, DTYPE, BLOCK_E)
        dout = _load_rows(dout_ptr + pid_b * stride_gb, stride_gl, stride_ge, rows, L, V, DTYPE, BLOCK_V)
        maximum = tl.load(statistics_ptr + rows * stride_zl, mask=mask, other=float("inf"))
        total = tl.load(statistics_ptr + rows * stride_zl + stride_zi, mask=mask, other=1.0)
        delta = tl.load(statistics_ptr + rows * stride_zl + 2 * stride_zi, mask=mask, other=0.0)
        share = tl.exp(_score(q, k, scale, keys) - maximum) / total
        if dk_ptr is not None:
            dk += (scale * share * (tl.sum(dout * v, 1) - delta))[:, None] * q
        if dv_ptr is not None:
            dv += share[:, None] * dout
    if dk_ptr is not None:
        _store_rows(dk_ptr + pid_b * stride_dkb, stride_dkl, stride_dke, keys, L, E, dk, BLOCK_E)
    if dv_ptr is not None:
        _store_rows(dv_ptr + pid_b * stride_dvb, stride_dvl, stride_dve, keys, L, V, dv, BLOCK_V)
# fmt: on


# fmt: off
def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: Tensor, *, local: int, restart: int | None,
) -> None:
    """Write the attention to `out`.

    q and k are (B, L, E), v and out (B, L, V). They may have any strides and any sizes, up to `LARGEST` features.
    `scale` is a tensor of one element, in the dtype of the arithmetic. Without `restart` the offsets double to the end.
    """
    run(q, _plan_forward(q, k, v, out, scale, local, restart))


def backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, scale: Tensor, *, local: int, restart: int | None,
) -> None:
    """Write the gradients that are not None to `dq`, `dk` and `dv`, given the operands of `forward`."""
    run(q, _plan_backward(q, k, v, dout, dq, dk, dv, scale, local, restart))
# fmt: on


def representatives(architecture: str, dtype: torch.dtype, precision: str) -> Iterator[Launch]:
    """Launches of every kernel, in float64 with rows of the most features.

    Operands of 16 bits are converted when they are loaded, so their launches are those of float32.
    """
    if dtype.itemsize < 4:
        return
    q = torch.empty(16, 16384, LARGEST if dtype == torch.float64 else 64, dtype=dtype, device="meta")
    scale = q.new_empty(1)
    yield from _plan_forward(q, q, q, q, scale, 1, None)
    yield from _plan_backward(q, q, q, q, q, q, q, scale, 1, None)


# fmt: off
def _plan_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: Tensor, local: int, restart: int | None,
) -> Iterator[Launch]:
    if out.numel():
        grid, arguments, constants = _settings(q, v, scale, local, restart)
        tensors = *pointer(q), *pointer(k), *pointer(v), *pointer(out)
        yield Launch(_forward_kernel, grid, (*tensors, *arguments), constants)


def _plan_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, scale: Tensor, local: int, restart: int | None,
) -> Iterator[Launch]:
    if dout.numel() == 0:
        zero(dq, dk, dv)
        return
    grid, arguments, constants = _settings(q, v, scale, local, restart)
    statistics = scale.new_empty((3, *q.shape[:2])).permute(1, 2, 0)
    tensors = *pointer(q), *pointer(k), *pointer(v), *pointer(dout), *pointer(statistics)
    yield Launch(_backward_queries_kernel, grid, (*tensors, *pointer(dq), *arguments), constants)
    if dk is not None or dv is not None:
        gradients = *pointer(dk), *pointer(dv)
        yield Launch(_backward_keys_kernel, grid, (*tensors, *gradients, *arguments), constants)
# fmt: on


def _settings(
    q: Tensor, v: Tensor, scale: Tensor, local: int, restart: int | None
) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """The grid of every kernel, the arguments after its tensors, and its constants."""
    B, L, E = q.shape
    V = v.shape[2]
    period = min(L, restart or L)
    base = min(local, period) + max(0, period - local).bit_length()
    BLOCK_E, BLOCK_V = (triton.next_power_of_2(max(1, size)) for size in (E, V))
    widest = max(BLOCK_E, BLOCK_V)
    # Backward holds three tiles of queries and three of keys, with 16 floats or 8 doubles of each per thread.
    float64 = scale.dtype == torch.float64
    BLOCK_L = max(1, (1024 if float64 else 2048) // widest)
    constants = {
        "DTYPE": tl.float64 if float64 else tl.float32,
        "BLOCK_L": BLOCK_L,
        "BLOCK_E": BLOCK_E,
        "BLOCK_V": BLOCK_V,
        "num_warps": max(4, BLOCK_L * widest // (256 if float64 else 512)),
    }
    return B * triton.cdiv(L, BLOCK_L), (scale, L, E, V, local, period, base), constants
