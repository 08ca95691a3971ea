"""Normal log densities of every pair of rows, from squared scaled distances, and of their mixtures.

    e[b,c,m,n] = W(s) - 1/2 sum_k z^2,    z = (x[b,c,m,k] - loc[b,c,n,k]) / s,    s = scale[b,c,m,n,k]
    W(s) = - sum_k log s - D/2 log(2 pi)

    G = de:    dx = - sum_n G z / s,    dloc = sum_m G z / s,    dscale = sum G (z^2 - 1) / s

The logsumexp over n of e + log_weights is that of `mixture`, with G = dout r and dlog_weights = G.

A matrix product would cancel |x|^2 against |loc|^2 in these sums. So kernels take differences, in tiles of three axes,
and sum over one of them. A score sums over k. A gradient sums over any axis along which its operand is constant.

Scores need W of every row of scales in float64, which PyTorch computes before the launch. Gradients are sums of terms
in G. For plain scores G is the gradient of the result. For a mixture a launch computes G from scores, in the same tiles
as forward, and stores it. It does so for as many pairs at a time as `CHUNK` allows.

Each quotient is a product with 1 / s, which is rounded once: float32 holds it for s of 2^-128 and above. Arithmetic is
float64 if an operand is, else float32. Results are rounded once, when they are stored. There are no atomics.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import (
    Config,
    Launch,
    arithmetic_of,
    partial_statistics,
    partial_sums,
    pointer,
    run,
    split,
    torch_dtype,
    varies,
    zero,
)
from .tiles import add_scores, indices, load_tile, mask_if, store_tile, upstream

# How many G of a mixture, or gradients of x if those are more, are held at a time: 16 MiB in float32. One row of pairs
# may exceed it.
CHUNK = 2**22
HALF_LOG_2PI = math.log(2 * math.pi) / 2


# fmt: off
@triton.jit
def _tile(ptr, stride_i, stride_j, i, j, size_i, size_j, ALONG_I: tl.constexpr, ALONG_J: tl.constexpr):
    """Pointers to a tile, and their mask. The tile has size 1 along each axis along which the operand is constant."""
    start = tl.zeros((1, 1, 1), tl.int64)
    i = i if ALONG_I else start
    j = j if ALONG_J else start
    return ptr + i * stride_i + j * stride_j, (i < size_i) & (j < size_j)


@triton.jit
def _inverse(scale, DTYPE: tl.constexpr):
    """1 / scale, rounded once."""
    scale = scale.to(DTYPE)
    return 1 / scale if scale.dtype == tl.float64 else tl.div_rn(tl.full(scale.shape, 1.0, DTYPE), scale)


@triton.jit
def _scores(
    x_ptr, stride_xm, stride_xn, stride_xk,
    loc_ptr, stride_lm, stride_ln, stride_lk,
    scale_ptr, stride_sm, stride_sn, stride_sk,
    constant_ptr, stride_wm, stride_wn,
    weights_ptr, stride_vm, stride_vn,
    offs_m, offs_n, M, N, D,
    DTYPE: tl.constexpr, X: tl.constexpr, LOC: tl.constexpr, SCALE: tl.constexpr,
    CONSTANT_M: tl.constexpr, CONSTANT_N: tl.constexpr, WEIGHTS_M: tl.constexpr, WEIGHTS_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of e, and where it has a component. If log_weights are given they are added, and e is -inf elsewhere."""
    m, n = offs_m[:, None, None], offs_n[None, :, None]
    x_ptrs, x_mask = _tile(x_ptr, stride_xm, stride_xn, m, n, M, N, X & 4, X & 2)
    loc_ptrs, loc_mask = _tile(loc_ptr, stride_lm, stride_ln, m, n, M, N, LOC & 4, LOC & 2)
    scale_ptrs, scale_mask = _tile(scale_ptr, stride_sm, stride_sn, m, n, M, N, SCALE & 4, SCALE & 2)
    if not SCALE & 1:
        inverse = _inverse(tl.load(scale_ptrs, mask=mask_if(D > 0, scale_mask), other=1.0), DTYPE)
    squares = tl.zeros((offs_m.shape[0], offs_n.shape[0], BLOCK_K), DTYPE)
    for start_k in range(0, D, BLOCK_K):
        k = start_k + tl.arange(0, BLOCK_K).to(tl.int64)[None, None, :]
        mask_k = k < D
        x = tl.load(x_ptrs + k * stride_xk, mask=x_mask & mask_k, other=0.0).to(DTYPE)
        loc = tl.load(loc_ptrs + k * stride_lk, mask=loc_mask & mask_k, other=0.0).to(DTYPE)
        if SCALE & 1:
            inverse = _inverse(tl.load(scale_ptrs + k * stride_sk, mask=scale_mask & mask_k, other=1.0), DTYPE)
        z = (x - loc) * inverse
        squares += z * z
    constant = load_tile(constant_ptr, stride_wm, stride_wn, offs_m, offs_n, M, N, 0.0, CONSTANT_M, CONSTANT_N)
    score = constant.to(DTYPE) - 0.5 * tl.sum(squares, 2)
    present = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    if weights_ptr is not None:
        weights = load_tile(weights_ptr, stride_vm, stride_vn, offs_m, offs_n, M, N, 0.0, WEIGHTS_M, WEIGHTS_N)
        present &= weights != float("-inf")
        score = tl.where(present, weights.to(DTYPE) + score, float("-inf"))
    return score, present


@triton.jit
def _scores_kernel(
    first_pid,
    x_ptr, stride_xb, stride_xc, stride_xm, stride_xn, stride_xk,
    loc_ptr, stride_lb, stride_lc, stride_lm, stride_ln, stride_lk,
    scale_ptr, stride_sb, stride_sc, stride_sm, stride_sn, stride_sk,
    constant_ptr, stride_wb, stride_wc, stride_wm, stride_wn,
    weights_ptr, stride_vb, stride_vc, stride_vm, stride_vn,
    statistics_ptr, stride_zb, stride_zc, stride_zm, stride_zi,
    dout_ptr, stride_gb, stride_gc, stride_gm,
    out_ptr, stride_ob, stride_oc, stride_om, stride_on,
    C, M, N, D,
    DTYPE: tl.constexpr, X: tl.constexpr, LOC: tl.constexpr, SCALE: tl.constexpr,
    CONSTANT_M: tl.constexpr, CONSTANT_N: tl.constexpr, WEIGHTS_M: tl.constexpr, WEIGHTS_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Write e, or G if the statistics of a mixture are given."""
    pid_n, pid_m, pid_c, pid_b = indices(first_pid, (tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M), C))
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)

    out, present = _scores(
        x_ptr + pid_b * stride_xb + pid_c * stride_xc, stride_xm, stride_xn, stride_xk,
        loc_ptr + pid_b * stride_lb + pid_c * stride_lc, stride_lm, stride_ln, stride_lk,
        scale_ptr + pid_b * stride_sb + pid_c * stride_sc, stride_sm, stride_sn, stride_sk,
        constant_ptr + pid_b * stride_wb + pid_c * stride_wc, stride_wm, stride_wn,
        weights_ptr if weights_ptr is None else weights_ptr + pid_b * stride_vb + pid_c * stride_vc,
        stride_vm, stride_vn, offs_m, offs_n, M, N, D,
        DTYPE, X, LOC, SCALE, CONSTANT_M, CONSTANT_N, WEIGHTS_M, WEIGHTS_N, BLOCK_K)
    if statistics_ptr is not None:
        out, _ = upstream(out, present, statistics_ptr + pid_b * stride_zb + pid_c * stride_zc, stride_zm, stride_zi,
                          dout_ptr + pid_b * stride_gb + pid_c * stride_gc, stride_gm, offs_m, M, DTYPE)
    store_tile(out_ptr + pid_b * stride_ob + pid_c * stride_oc, stride_om, stride_on, offs_m, offs_n, M, N, out)


@triton.jit
def _logsumexp_kernel(
    first_pid,
    x_ptr, stride_xb, stride_xc, stride_xm, stride_xn, stride_xk,
    loc_ptr, stride_lb, stride_lc, stride_lm, stride_ln, stride_lk,
    scale_ptr, stride_sb, stride_sc, stride_sm, stride_sn, stride_sk,
    constant_ptr, stride_wb, stride_wc, stride_wm, stride_wn,
    weights_ptr, stride_vb, stride_vc, stride_vm, stride_vn,
    statistics_ptr, stride_zp, stride_zb, stride_zc, stride_zm, stride_zi,
    B, C, M, N, D, part_n,
    DTYPE: tl.constexpr, X: tl.constexpr, LOC: tl.constexpr, SCALE: tl.constexpr,
    CONSTANT_M: tl.constexpr, CONSTANT_N: tl.constexpr, WEIGHTS_M: tl.constexpr, WEIGHTS_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    pid_m, pid_c, pid_b, part = indices(first_pid, (tl.cdiv(M, BLOCK_M), C, B))
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)

    maximum = tl.full((BLOCK_M,), float("-inf"), DTYPE)
    total = tl.zeros((BLOCK_M,), DTYPE)
    for start_n in range(part * part_n, tl.minimum((part + 1) * part_n, N), BLOCK_N):
        score, _ = _scores(
            x_ptr + pid_b * stride_xb + pid_c * stride_xc, stride_xm, stride_xn, stride_xk,
            loc_ptr + pid_b * stride_lb + pid_c * stride_lc, stride_lm, stride_ln, stride_lk,
            scale_ptr + pid_b * stride_sb + pid_c * stride_sc, stride_sm, stride_sn, stride_sk,
            constant_ptr + pid_b * stride_wb + pid_c * stride_wc, stride_wm, stride_wn,
            weights_ptr + pid_b * stride_vb + pid_c * stride_vc, stride_vm, stride_vn,
            offs_m, start_n + tl.arange(0, BLOCK_N), M, N, D,
            DTYPE, X, LOC, SCALE, CONSTANT_M, CONSTANT_N, WEIGHTS_M, WEIGHTS_N, BLOCK_K)
        maximum, total = add_scores(score, maximum, total)

    statistics_ptr += part * stride_zp + pid_b * stride_zb + pid_c * stride_zc
    tl.store(statistics_ptr + offs_m * stride_zm, maximum, mask=offs_m < M)
    tl.store(statistics_ptr + offs_m * stride_zm + stride_zi, tl.log(total), mask=offs_m < M)


@triton.jit
def _gradient_kernel(
    first_pid,
    x_ptr, stride_xb, stride_xc, stride_xm, stride_xn, stride_xk,
    loc_ptr, stride_lb, stride_lc, stride_lm, stride_ln, stride_lk,
    scale_ptr, stride_sb, stride_sc, stride_sm, stride_sn, stride_sk,
    dout_ptr, stride_gb, stride_gc, stride_gm, stride_gn, stride_gk,
    grad_ptr, stride_dp, stride_db, stride_dc, stride_dm, stride_dk,
    B, C, M, N, K, part_n,
    DTYPE: tl.constexpr, X: tl.constexpr, LOC: tl.constexpr, SCALE: tl.constexpr, DOUT: tl.constexpr,
    OF_SCALE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Write the sum over n, whichever axis that is, of -G z / s, or of G (z^2 - 1) / s if OF_SCALE."""
    pid_k, pid_m, pid_c, pid_b, part = indices(first_pid, (tl.cdiv(K, BLOCK_K), tl.cdiv(M, BLOCK_M), C, B))
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    m, k = offs_m[:, None, None], offs_k[None, None, :]
    x_ptrs, x_mask = _tile(
        x_ptr + pid_b * stride_xb + pid_c * stride_xc, stride_xm, stride_xk, m, k, M, K, X & 4, X & 1)
    loc_ptrs, loc_mask = _tile(
        loc_ptr + pid_b * stride_lb + pid_c * stride_lc, stride_lm, stride_lk, m, k, M, K, LOC & 4, LOC & 1)
    scale_ptrs, scale_mask = _tile(
        scale_ptr + pid_b * stride_sb + pid_c * stride_sc, stride_sm, stride_sk, m, k, M, K, SCALE & 4, SCALE & 1)
    dout_ptrs, dout_mask = _tile(
        dout_ptr + pid_b * stride_gb + pid_c * stride_gc, stride_gm, stride_gk, m, k, M, K, DOUT & 4, DOUT & 1)
    if not X & 2:
        x = tl.load(x_ptrs, mask=x_mask, other=0.0).to(DTYPE)
    if not LOC & 2:
        loc = tl.load(loc_ptrs, mask=loc_mask, other=0.0).to(DTYPE)
    if not SCALE & 2:
        inverse = _inverse(tl.load(scale_ptrs, mask=scale_mask, other=1.0), DTYPE)

    grad = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), DTYPE)
    for start_n in range(part * part_n, tl.minimum((part + 1) * part_n, N), BLOCK_N):
        n = start_n + tl.arange(0, BLOCK_N)[None, :, None]
        mask_n = n < N
        if X & 2:
            x = tl.load(x_ptrs + n * stride_xn, mask=x_mask & mask_n, other=0.0).to(DTYPE)
        if LOC & 2:
            loc = tl.load(loc_ptrs + n * stride_ln, mask=loc_mask & mask_n, other=0.0).to(DTYPE)
        if SCALE & 2:
            inverse = _inverse(tl.load(scale_ptrs + n * stride_sn, mask=scale_mask & mask_n, other=1.0), DTYPE)
        G = tl.load(dout_ptrs + n * stride_gn, mask=dout_mask & mask_n, other=0.0).to(DTYPE)
        z = (x - loc) * inverse
        term = G * (z * z - 1) * inverse if OF_SCALE else -(G * z * inverse)
        grad += tl.where(G == 0, 0.0, term)  # where G is 0 nothing is added, not even 0 times an infinity

    grad_ptr += part * stride_dp + pid_b * stride_db + pid_c * stride_dc
    store_tile(grad_ptr, stride_dm, stride_dk, offs_m, offs_k, M, K, tl.sum(grad, 1))
# fmt: on


def choose_config(kernel: Any, dtype: tl.dtype, M: int, N: int) -> Config:
    """Tiles of 32 float32 or 16 float64 elements per thread, whatever the axes: twice as many spill.

    The scores of a mixture have the tiles of `_logsumexp_kernel`. The choice is static, so that no result depends on a
    timing.
    """
    half = 2 if dtype is tl.float64 else 1
    if kernel is _gradient_kernel:
        BLOCK_M, BLOCK_N, BLOCK_K = (1, 256, 32) if M == 1 else (256, 1, 32) if N == 1 else (32, 16, 16)
        BLOCK_M, BLOCK_N = (BLOCK_M, BLOCK_N // half) if M == 1 else (BLOCK_M // half, BLOCK_N)
    elif kernel is _scores_kernel and N == 1:
        BLOCK_M, BLOCK_N, BLOCK_K = 64 // half, 1, 128
    else:
        BLOCK_M, BLOCK_N, BLOCK_K = 32, 32 // half, 8
    return Config(num_warps=8, num_stages=2, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K)


# fmt: off
def forward(x: Tensor, loc: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write the log densities to `out`.

    x is (B, M, D), loc (B, N, D), scale (B, M, N, D) or (B, M, N, 1), out (B, M, N). They may have any strides, and any
    size may be 0.
    """
    run(x, _plan_forward(x, loc, scale, out))


def backward(
    x: Tensor, loc: Tensor, scale: Tensor, dout: Tensor,
    dx: Tensor | None, dloc: Tensor | None, dscale: Tensor | None,
) -> None:
    """Write the gradients that are not None to `dx`, `dloc` and `dscale`.

    Shapes are those of `forward`. dscale may have size 1 along any axis along which scale is constant: it is then the
    sum over that axis.
    """
    run(x, _plan_backward(x, loc, scale, dout, dx, dloc, dscale))


def forward_logsumexp(x: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, statistics: Tensor) -> None:
    """Write max and log_sum over n, whose sum is the result, to `statistics[..., 0]` and `[..., 1]`.

    x is (B, C, M, D), loc (B, C, N, D), log_weights (B, C, M, N). scale is (B, C, M, N, D) or (B, C, M, N, 1).
    statistics are (B, C, M, 2) in the dtype of the arithmetic. They may have any strides, and any size may be 0.
    """
    run(x, _plan_forward_logsumexp(x, loc, scale, log_weights, statistics))


def backward_logsumexp(
    x: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, statistics: Tensor, dout: Tensor,
    dlog_weights: Tensor | None, dx: Tensor | None, dloc: Tensor | None, dscale: Tensor | None,
) -> None:
    """Write the gradients that are not None, given dout (B, C, M) and the operands of `forward_logsumexp`.

    dx is (B, C, M, D), or (B, 1, M, D) for the sum over C. dloc is (B, C, N, D). dscale and dlog_weights may have size
    1 along any axis along which their operands are constant. Each is added up in its own dtype.
    """
    run(x, _plan_backward_logsumexp(x, loc, scale, log_weights, statistics, dout, dlog_weights, dx, dloc, dscale))


def _plan_forward(x: Tensor, loc: Tensor, scale: Tensor, out: Tensor) -> Iterator[Launch]:
    if out.numel() == 0:
        return
    constant = _normaliser(scale, x.shape[-1]).unsqueeze(1)
    x, loc, scale, out = (t.unsqueeze(1) for t in (*_of_pairs(x, loc, scale), out))
    if 1 in out.shape[2:]:  # a single row or column: tiles go along the longest axis
        shortest, *others, longest = sorted(range(4), key=lambda axis: out.shape[axis])
        order = *others, longest, shortest
        x, loc, scale = (t.permute(*order, 4) for t in (x, loc, scale))
        constant, out = (t.permute(order) for t in (constant, out))
    dtype = arithmetic_of(x, loc, scale)
    config = choose_config(_scores_kernel, dtype, *out.shape[2:])
    yield _plan_scores(x, loc, scale, constant, None, None, None, out, dtype, config)


def _plan_backward(
    x: Tensor, loc: Tensor, scale: Tensor, dout: Tensor,
    dx: Tensor | None, dloc: Tensor | None, dscale: Tensor | None,
) -> Iterator[Launch]:
    x, loc, scale, dout = (t.unsqueeze(1) for t in (*_of_pairs(x, loc, scale), dout))
    if dx is not None:
        yield from _plan_gradient(x, loc, scale, dout, dx[:, None, :, None])
    if dloc is not None:
        yield from _plan_gradient(loc, x, scale, dout, dloc[:, None, None])
    if dscale is not None:
        yield from _plan_gradient(x, loc, scale, dout, dscale[:, None], of_scale=True)


def _plan_forward_logsumexp(
    x: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, statistics: Tensor,
) -> Iterator[Launch]:
    if log_weights.numel() == 0:
        statistics.fill_(-math.inf)
        return
    constant = _normaliser(scale, x.shape[-1])
    x, loc, scale, constant, log_weights, statistics = _by_rows(
        *_of_pairs(x, loc, scale), constant, log_weights, statistics)
    B, C, M, N, D = x.shape
    dtype = arithmetic_of(statistics)
    config = choose_config(_logsumexp_kernel, dtype, M, N)
    programs = B * C * triton.cdiv(M, config.BLOCK_M)
    parts, part_n = split(N, config.BLOCK_N, programs)
    operands, axes = _operands(x, loc, scale, constant, log_weights)
    with partial_statistics(statistics, parts) as statistics_args:
        yield Launch(
            _logsumexp_kernel, programs * parts, (*operands, *statistics_args, B, C, M, N, D, part_n),
            {"DTYPE": dtype, **axes, **config.options()},
        )


def _plan_backward_logsumexp(
    x: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, statistics: Tensor, dout: Tensor,
    dlog_weights: Tensor | None, dx: Tensor | None, dloc: Tensor | None, dscale: Tensor | None,
) -> Iterator[Launch]:
    grads = [dlog_weights, None if dx is None else dx.unsqueeze(3), None if dloc is None else dloc.unsqueeze(2), dscale]
    zero(*grads)
    if log_weights.numel() == 0:
        return
    constant = _normaliser(scale, x.shape[-1])
    tensors = _by_rows(*_of_pairs(x, loc, scale), constant, log_weights, statistics, dout, *grads)
    sizes = tensors[0].shape
    dtype = arithmetic_of(statistics)
    config = choose_config(_logsumexp_kernel, dtype, *sizes[2:4])
    for chunk in _chunks(sizes):
        x, loc, scale, constant, log_weights, statistics, dout, of_weights, of_x, of_loc, of_scale = (
            _cut(t, chunk) for t in tensors
        )
        G = statistics.new_empty(x.shape[:4])
        yield _plan_scores(x, loc, scale, constant, log_weights, statistics, dout, G, dtype, config)
        if of_weights is not None:
            of_weights += G.sum_to_size(of_weights.shape)
        for total, own, other in (of_x, x, loc), (of_loc, loc, x), (of_scale, x, loc):
            if total is not None:
                part = G.new_empty(total.shape)
                yield from _plan_gradient(own, other, scale, G, part, of_scale=total is of_scale)
                total += part


def _plan_scores(
    x: Tensor, loc: Tensor, scale: Tensor, constant: Tensor, log_weights: Tensor | None, statistics: Tensor | None,
    dout: Tensor | None, out: Tensor, dtype: tl.dtype, config: Config,
) -> Launch:
    B, C, M, N, D = x.shape
    operands, axes = _operands(x, loc, scale, constant, log_weights)
    return Launch(
        _scores_kernel, B * C * triton.cdiv(M, config.BLOCK_M) * triton.cdiv(N, config.BLOCK_N),
        (*operands, *pointer(statistics, 4), *pointer(dout, 3), *pointer(out), C, M, N, D),
        {"DTYPE": dtype, **axes, **config.options()},
    )


def _plan_gradient(
    x: Tensor, loc: Tensor, scale: Tensor, dout: Tensor, total: Tensor, *, of_scale: bool = False,
) -> Iterator[Launch]:
    """Write the gradient of x or scale to `total`, summed over the axes along which `total` has size 1.

    The kernel sums over one of these axes, and PyTorch over the others. The kernel takes n or m if it can, so that at
    most the size of x or loc is left. Else it takes the coordinates, which leaves the pairs.
    """
    if x.numel() == 0:
        total.zero_()
        return
    sizes = x.shape
    summed = [axis for axis in range(5) if total.shape[axis] < sizes[axis]]
    reduced = _axis_to_reduce(sizes, summed)
    kept = [axis for axis in range(5) if axis != reduced]
    *outer, rows, columns = sorted(kept, key=lambda axis: (axis == 4 and sizes[4] > 1, sizes[axis]))
    order = *outer, rows, reduced, columns
    x, loc, scale, dout = (t.permute(order) for t in (x, loc, scale, dout.unsqueeze(4).expand(sizes)))
    B, C, M, N, K = x.shape
    dtype = arithmetic_of(x, loc, scale, dout)
    config = choose_config(_gradient_kernel, dtype, M, N)
    programs = B * C * triton.cdiv(M, config.BLOCK_M) * triton.cdiv(K, config.BLOCK_K)
    parts, part_n = split(N, config.BLOCK_N, programs)
    further = [axis for axis in summed if axis != reduced]
    grad = total
    if further:
        grad = total.new_empty(
            [1 if axis == reduced else size for axis, size in enumerate(sizes)],
            dtype=torch_dtype(dtype),
        )
    with partial_sums(grad.permute(order).select(3, 0), 4, parts, dtype) as grad_args:
        yield Launch(
            _gradient_kernel, programs * parts,
            (*pointer(x), *pointer(loc), *pointer(scale), *pointer(dout), *grad_args, B, C, M, N, K, part_n),
            {"DTYPE": dtype, "X": _axes(x), "LOC": _axes(loc), "SCALE": _axes(scale), "DOUT": _axes(dout),
             "OF_SCALE": of_scale, **config.options()},
        )
    if further:
        total.copy_(grad.sum(further, keepdim=True))
# fmt: on


def _axis_to_reduce(sizes: Sequence[int], summed: Sequence[int]) -> int:
    """The axis over which the kernel sums: one of those to sum over, or if there are none one of size 1.

    b or c has size 1 then, as `_chunks` sees to.
    """
    for axes in (2, 3), (4,), (0, 1):
        found = [axis for axis in axes if axis in summed]
        if found:
            return max(found, key=lambda axis: sizes[axis])
    return min((0, 1), key=lambda axis: sizes[axis])


def _of_pairs(x: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every operand with the axes of all pairs: (B, M, N, D) or (B, C, M, N, D)."""
    shape = *scale.shape[:-1], x.shape[-1]
    return x.unsqueeze(-2).expand(shape), loc.unsqueeze(-3).expand(shape), scale.expand(shape)


def _normaliser(scale: Tensor, D: int) -> Tensor:
    """W in float64, computed once along each axis along which scale is constant."""
    own = scale[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in scale.stride()[:-1])]
    logs = own.to(torch.float64, copy=True).log_().sum(-1).mul_(D // max(1, own.shape[-1]))
    return logs.add_(D * HALF_LOG_2PI).neg_().expand(scale.shape[:-1])


def _by_rows(*tensors: Any) -> tuple[Any, ...]:
    """Tensors whose rows fill the tiles: in place of single rows, the larger of the axes b and c."""
    sizes = tensors[0].shape
    rows = 2 if sizes[2] > 1 else max((0, 1), key=lambda axis: sizes[axis])
    return tuple(None if t is None else t.transpose(2, rows) for t in tensors)


def _chunks(sizes: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Slices of b, c and m that fit `CHUNK`. Each has one entry of b or of c."""
    B, C, M, N, D = sizes
    row = max(N, D)
    steps = max(1, CHUNK // (M * row)), 1, max(1, CHUNK // row)
    if B < C:
        steps = 1, steps[0], steps[2]
    for starts in product(*(range(0, size, step) for size, step in zip(sizes, steps))):
        yield tuple(slice(start, start + step) for start, step in zip(starts, steps))


def _cut(tensor: Any, chunk: tuple[slice, ...]) -> Any:
    """The part of a tensor that a chunk needs: along an axis of size 1, all of it."""
    if tensor is None:
        return None
    return tensor[tuple(slice(None) if size == 1 else piece for size, piece in zip(tensor.shape, chunk))]


def _operands(
    x: Tensor, loc: Tensor, scale: Tensor, constant: Tensor, log_weights: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operands of a score as a kernel takes them: its arguments and its constants."""
    tensors = *pointer(x), *pointer(loc), *pointer(scale), *pointer(constant), *pointer(log_weights, 4)
    axes: dict[str, Any] = {"X": _axes(x), "LOC": _axes(loc), "SCALE": _axes(scale)}
    for name, operand in ("CONSTANT", constant), ("WEIGHTS", log_weights):
        for axis in 2, 3:
            axes[f"{name}_{'M' if axis == 2 else 'N'}"] = operand is not None and varies(operand, axis)
    return tensors, axes


def _axes(operand: Tensor) -> int:
    """Which of the last three axes an operand varies along, as bits: 4, 2 and 1."""
    return sum(varies(operand, axis) << (4 - axis) for axis in (2, 3, 4))


def representatives(architecture: str, dtype: torch.dtype, precision: str) -> Iterator[Launch]:
    """Launches of every tile with what takes the most registers: operands that vary along as many axes as they can.

    Operands of 16 bits are converted when they are loaded, so their launches are those of float32.
    """
    if dtype.itemsize < 4:
        return
    M, D = 1600, 128
    x, pairs = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((M, M, D), (M, M, M, D)))
    rows = x[:, :1], x[:, :1], pairs[:, :1, :1]
    yield from _plan_forward(*rows, pairs[:, :1, :1, 0])
    yield from _plan_backward(*rows, pairs[:, :1, :1, 0], None, None, rows[2])
    yield from _plan_backward(x[:1], x[:1, :1], pairs[:1, :, :1], pairs[:1, :, :1, 0], None, x[:1, :1], None)
    yield from _plan_backward(x, x, pairs, pairs[..., 0], x, None, None)
    mixture = x[:2, None, :1], x[:2, None], pairs[:2, None, :1], pairs[:2, None, :1, :, 0]
    statistics = pairs[:2, None, :1, 0, :2]
    yield from _plan_forward_logsumexp(*mixture, statistics)
    yield from _plan_backward_logsumexp(*mixture, statistics, statistics[..., 0], None, None, None, None)
    yield from _plan_backward(x, x, pairs[:, :, :1].expand_as(pairs), pairs[..., 0], None, None, pairs[:, :, :1])
