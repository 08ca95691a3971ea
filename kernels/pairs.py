"""Score every pair of rows by their dot product and map the score, without keeping the pairs.

    dot[b,m,n] = sum_k x[b,m,k] loc[b,n,k]
    out[b,m,n] = W(s) + s phi(dot),    s = scale[b,m,n]

    G = dout s phi'(dot)
    dx[b,m,:] = sum_n G loc[b,n,:],    dloc[b,n,:] = sum_m G x[b,m,:]
    dscale = dout (W'(s) + phi(dot)), summed over the axes along which scale is constant

A `Map` has phi and W. Backward recomputes the dot products in tiles. It is launched once for dx, and once for dloc with
the roles of x and loc exchanged. Each launch sums over the other axis alone, so it needs no atomics. A single row or
column needs no matrix product: the row-wise kernels read the memory once.

Arithmetic is float64 if x, loc or scale is, else float32. Results are rounded once, when they are stored.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Config, Launch, architecture_of, contraction_of, partial_sums, pointer, run, split, zero
from .tiles import Map, dots, entries, indices, load_tile, mask_if, store_tile


# fmt: off
@triton.jit
def _forward_kernel(
    first_pid,
    x_ptr, stride_xb, stride_xm, stride_xk,
    loc_ptr, stride_lb, stride_ln, stride_lk,
    scale_ptr, stride_sb, stride_sm, stride_sn,
    out_ptr, stride_ob, stride_om, stride_on,
    M, N, D, tolerance,
    phi: tl.constexpr, normaliser: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, SCALE_M: tl.constexpr, SCALE_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    pid_n, pid_m, pid_b = indices(first_pid, (tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)))
    x_ptr, loc_ptr, scale_ptr, out_ptr = entries(
        (pid_b,), ((x_ptr, stride_xb), (loc_ptr, stride_lb), (scale_ptr, stride_sb), (out_ptr, stride_ob)))
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)

    dot = dots(x_ptr, stride_xm, stride_xk, loc_ptr, stride_ln, stride_lk, offs_m, offs_n, M, N, D,
               DTYPE, UPCAST, PRECISION, BLOCK_K)
    scale = load_tile(scale_ptr, stride_sm, stride_sn, offs_m, offs_n, M, N, 1.0, SCALE_M, SCALE_N)
    value, _ = phi(dot, tolerance)
    out = normaliser(scale.to(tl.float64), D).to(DTYPE) + scale.to(DTYPE) * value
    store_tile(out_ptr, stride_om, stride_on, offs_m, offs_n, M, N, out)


@triton.jit
def _backward_kernel(
    first_pid,
    x_ptr, stride_xb, stride_xm, stride_xk,
    loc_ptr, stride_lb, stride_ln, stride_lk,
    scale_ptr, stride_sb, stride_sm, stride_sn,
    dout_ptr, stride_gb, stride_gm, stride_gn,
    dx_ptr, stride_dp, stride_db, stride_dm, stride_dk,
    dscale_ptr, stride_tp, stride_tb, stride_tm, stride_tn,
    B, M, N, D, tiles_d, part_n, tolerance,
    phi: tl.constexpr, normaliser_grad: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, SCALE_M: tl.constexpr, SCALE_N: tl.constexpr, SUM_DSCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):
    pid_d, pid_m, pid_b, part = indices(first_pid, (tiles_d, tl.cdiv(M, BLOCK_M), B))
    x_ptr, loc_ptr, scale_ptr, dout_ptr = entries(
        (pid_b,), ((x_ptr, stride_xb), (loc_ptr, stride_lb), (scale_ptr, stride_sb), (dout_ptr, stride_gb)))
    if dx_ptr is not None:
        dx_ptr += part * stride_dp + pid_b * stride_db
    if dscale_ptr is not None:
        dscale_ptr += part * stride_tp + pid_b * stride_tb
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)

    dx = tl.zeros((BLOCK_M, BLOCK_D), DTYPE)
    dscale = tl.zeros((BLOCK_M,), DTYPE)
    for start_n in range(part * part_n, tl.minimum((part + 1) * part_n, N), BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        dot = dots(x_ptr, stride_xm, stride_xk, loc_ptr, stride_ln, stride_lk, offs_m, offs_n, M, N, D,
                   DTYPE, UPCAST, PRECISION, BLOCK_K)
        # Beyond the edges 0 times an infinity may have given NaN.
        dot = tl.where((offs_m < M)[:, None] & (offs_n < N)[None, :], dot, 0.0)
        scale = load_tile(scale_ptr, stride_sm, stride_sn, offs_m, offs_n, M, N, 1.0, SCALE_M, SCALE_N)
        dout = load_tile(dout_ptr, stride_gm, stride_gn, offs_m, offs_n, M, N, 0.0).to(DTYPE)
        value, slope = phi(dot, tolerance)
        if dscale_ptr is not None:  # noqa: SIM102, known when compiling
            if pid_d == 0:
                term = dout * (normaliser_grad(scale.to(tl.float64), D).to(DTYPE) + value)
                if SUM_DSCALE:
                    dscale += tl.sum(term, 1)
                else:
                    store_tile(dscale_ptr, stride_tm, stride_tn, offs_m, offs_n, M, N, term)
        if dx_ptr is not None:
            grad = dout * scale.to(DTYPE) * slope
            loc = load_tile(loc_ptr, stride_ln, stride_lk, offs_n, offs_d, N, D, 0.0).to(DTYPE)
            dx = tl.dot(grad, loc, dx, input_precision=PRECISION, out_dtype=DTYPE)

    if dx_ptr is not None:
        store_tile(dx_ptr, stride_dm, stride_dk, offs_m, offs_d, M, D, dx)
    if SUM_DSCALE:
        tl.store(dscale_ptr + offs_m * stride_tm, dscale, mask=mask_if(pid_d == 0, offs_m < M))


@triton.jit
def _row_dots(
    x_ptr, stride_xm, stride_xk,
    loc_ptr, stride_lm, stride_lk,
    rows, loc_rows, M, D,
    DTYPE: tl.constexpr, BLOCK_K: tl.constexpr,
):
    products = tl.zeros((rows.shape[0], BLOCK_K), DTYPE)
    for start_k in range(0, D, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K).to(tl.int64)[None, :]
        mask_k = offs_k < D
        x = tl.load(x_ptr + rows * stride_xm + offs_k * stride_xk, mask=(rows < M) & mask_k, other=0.0)
        loc = tl.load(loc_ptr + loc_rows * stride_lm + offs_k * stride_lk, mask=(loc_rows < M) & mask_k, other=0.0)
        products += x.to(DTYPE) * loc.to(DTYPE)
    return tl.sum(products, 1)


@triton.jit
def _forward_rows_kernel(
    first_pid,
    x_ptr, stride_xb, stride_xm, stride_xk,
    loc_ptr, stride_lb, stride_lm, stride_lk,
    scale_ptr, stride_sb, stride_sm,
    out_ptr, stride_ob, stride_om,
    M, D, tolerance,
    phi: tl.constexpr, normaliser: tl.constexpr, DTYPE: tl.constexpr, LOC_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    pid_m, pid_b = indices(first_pid, (tl.cdiv(M, BLOCK_M),))
    x_ptr, loc_ptr = entries((pid_b,), ((x_ptr, stride_xb), (loc_ptr, stride_lb)))
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    rows = offs_m[:, None]
    loc_rows = rows if LOC_M else tl.zeros((1, 1), tl.int64)

    dot = _row_dots(x_ptr, stride_xm, stride_xk, loc_ptr, stride_lm, stride_lk, rows, loc_rows, M, D, DTYPE, BLOCK_K)
    scale = tl.load(scale_ptr + pid_b * stride_sb + offs_m * stride_sm, mask=mask_m, other=1.0)
    value, _ = phi(dot, tolerance)
    out = normaliser(scale.to(tl.float64), D).to(DTYPE) + scale.to(DTYPE) * value
    tl.store(out_ptr + pid_b * stride_ob + offs_m * stride_om, out, mask=mask_m)


@triton.jit
def _backward_rows_kernel(
    first_pid,
    x_ptr, stride_xb, stride_xm, stride_xk,
    loc_ptr, stride_lb, stride_lm, stride_lk,
    scale_ptr, stride_sb, stride_sm,
    dout_ptr, stride_gb, stride_gm,
    dx_ptr, stride_db, stride_dm, stride_dk,
    dloc_ptr, stride_ep, stride_eb, stride_em, stride_ek,
    dscale_ptr, stride_tp, stride_tb, stride_tm,
    B, M, D, tiles_k, part_m, tolerance,
    phi: tl.constexpr, normaliser_grad: tl.constexpr, DTYPE: tl.constexpr, LOC_M: tl.constexpr,
    SUM_DSCALE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    pid_k, pid_b, part = indices(first_pid, (tiles_k, B))
    x_ptr, loc_ptr, scale_ptr, dout_ptr = entries(
        (pid_b,), ((x_ptr, stride_xb), (loc_ptr, stride_lb), (scale_ptr, stride_sb), (dout_ptr, stride_gb)))
    if dx_ptr is not None:
        dx_ptr += pid_b * stride_db
    if dloc_ptr is not None:
        dloc_ptr += part * stride_ep + pid_b * stride_eb
    if dscale_ptr is not None:
        dscale_ptr += part * stride_tp + pid_b * stride_tb
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask_k = offs_k < D

    dloc = tl.zeros((BLOCK_M, BLOCK_K), DTYPE)
    dscale = tl.zeros((BLOCK_M,), DTYPE)
    for start_m in range(part * part_m, tl.minimum((part + 1) * part_m, M), BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        rows = offs_m[:, None]
        mask = (rows < M) & mask_k
        loc_rows = rows if LOC_M else tl.zeros((1, 1), tl.int64)
        dot = _row_dots(x_ptr, stride_xm, stride_xk, loc_ptr, stride_lm, stride_lk, rows, loc_rows, M, D,
                        DTYPE, BLOCK_K)
        dot = tl.where(mask_m, dot, 0.0)  # beyond the edges 0 times an infinity may have given NaN
        scale = tl.load(scale_ptr + offs_m * stride_sm, mask=mask_m, other=1.0)
        dout = tl.load(dout_ptr + offs_m * stride_gm, mask=mask_m, other=0.0).to(DTYPE)
        value, slope = phi(dot, tolerance)
        grad = (dout * scale.to(DTYPE) * slope)[:, None]
        if dscale_ptr is not None:  # noqa: SIM102, known when compiling
            if pid_k == 0:
                term = dout * (normaliser_grad(scale.to(tl.float64), D).to(DTYPE) + value)
                if SUM_DSCALE:
                    dscale += term
                else:
                    tl.store(dscale_ptr + offs_m * stride_tm, term, mask=mask_m)
        if dx_ptr is not None:
            loc_ptrs = loc_ptr + loc_rows * stride_lm + offs_k * stride_lk
            loc = tl.load(loc_ptrs, mask=(loc_rows < M) & mask_k, other=0.0).to(DTYPE)
            tl.store(dx_ptr + rows * stride_dm + offs_k * stride_dk, grad * loc, mask=mask)
        if dloc_ptr is not None:
            x = tl.load(x_ptr + rows * stride_xm + offs_k * stride_xk, mask=mask, other=0.0).to(DTYPE)
            if LOC_M:
                tl.store(dloc_ptr + rows * stride_em + offs_k * stride_ek, grad * x, mask=mask)
            else:
                dloc += grad * x

    if dloc_ptr is not None and not LOC_M:
        tl.store(dloc_ptr + offs_k * stride_ek, tl.sum(dloc, 0)[None, :], mask=mask_k)
    if SUM_DSCALE:
        tl.store(dscale_ptr, tl.sum(dscale, 0), mask=pid_k == 0)
# fmt: on


def choose_config(kernel: Any, architecture: str, contraction: dict[str, Any], D: int, pairwise_w: bool) -> Config:
    """The largest tiles that spill no register. `pairwise_w` says that W or W' varies along both axes of the tile.

    The choice is static, so that no result depends on a timing.
    """
    float64 = contraction["DTYPE"] is tl.float64
    if kernel in (_forward_rows_kernel, _backward_rows_kernel):
        BLOCK_K = 32 if D <= 32 else 128 if D <= 128 else 512
        # Each thread has 64 bytes of each operand: twice that spills in backward. In float64, W spills with fewer than
        # 4 rows.
        BLOCK_M = max((1024 if float64 else 2048) // BLOCK_K, 4)
        # ptxas spills a few values of W to fit into 64 or 128 registers unless it may take 255.
        hesitant = architecture != "gfx942" and (float64 or (kernel is _backward_rows_kernel and BLOCK_K == 128))
        maxnreg = 255 if hesitant else 0
        return Config(num_warps=4, num_stages=2, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K, maxnreg=maxnreg)
    if kernel is _forward_kernel:
        if pairwise_w:  # W takes about ten float64 values per element: four elements per thread
            return Config(num_warps=4, num_stages=3, BLOCK_M=32, BLOCK_N=16, BLOCK_K=32)
        return Config(num_warps=4, num_stages=3, BLOCK_M=64, BLOCK_N=32 if float64 else 64, BLOCK_K=32)
    if float64 and architecture == "sm_100":  # it has no fast float64 product: the plain one spills with more
        return Config(num_warps=8, num_stages=2, BLOCK_M=32, BLOCK_N=16, BLOCK_K=16, BLOCK_D=32)
    if pairwise_w:
        return Config(num_warps=8, num_stages=2, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, BLOCK_D=32)
    if float64:
        return Config(num_warps=8, num_stages=2, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, BLOCK_D=64)
    if contraction["PRECISION"] == "tf32x3":  # two registers per operand: 64 columns would spill
        return Config(num_warps=8, num_stages=2, BLOCK_M=64, BLOCK_N=32, BLOCK_K=16, BLOCK_D=128)
    return Config(num_warps=8, num_stages=2, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, BLOCK_D=128)


# fmt: off
def forward(
    map: Map, x: Tensor, loc: Tensor, scale: Tensor, out: Tensor, *, precision: str, tolerance: float,
) -> None:
    """Write W(scale) + scale phi(x loc^T) to `out`.

    x is (B, M, D), loc (B, N, D), scale and out are (B, M, N). They may have any strides, and any size may be 0.
    `precision` is the value of `torch.get_float32_matmul_precision()`. phi takes `tolerance`.
    """
    run(x, _plan_forward(architecture_of(x), map, x, loc, scale, out, precision, tolerance))


def backward(
    map: Map, x: Tensor, loc: Tensor, scale: Tensor, dout: Tensor,
    dx: Tensor | None, dloc: Tensor | None, dscale: Tensor | None, *, precision: str, tolerance: float,
) -> None:
    """Write the gradients that are not None to `dx`, `dloc` and `dscale`.

    Shapes are those of `forward`. dscale may be (B, 1, N) or (B, M, 1): it is then the sum over the axis of size 1.
    """
    run(x, _plan_backward(architecture_of(x), map, x, loc, scale, dout, dx, dloc, dscale, precision, tolerance))
# fmt: on


def representatives(map: Map, architecture: str, dtype: torch.dtype, precision: str) -> Iterator[Launch]:
    """Launches for all branches of `choose_config`, with every gradient, and W where it takes the most registers."""

    def launches(x_shape: tuple[int, ...], loc_shape: tuple[int, ...], full_scale: bool) -> Iterator[Launch]:
        x, loc = (torch.empty(shape, dtype=dtype, device="meta") for shape in (x_shape, loc_shape))
        out = x.new_empty(*x_shape[:2], loc_shape[1])
        dscale = out if full_scale else out[:, :1]
        scale = dscale.expand_as(out)
        yield from _plan_forward(architecture, map, x, loc, scale, out, precision, 1e-6)
        yield from _plan_backward(architecture, map, x, loc, scale, out, x, loc, dscale, precision, 1e-6)

    B, M = 16, 1600
    for full_scale in False, True:
        yield from launches((B, M, 128), (B, M, 128), full_scale)
    for D in 32, 128, 512:
        yield from launches((B, M, D), (B, 1, D), False)
        yield from launches((M, 1, D), (M, 1, D), True)


# fmt: off
def _plan_forward(
    architecture: str, map: Map, x: Tensor, loc: Tensor, scale: Tensor, out: Tensor, precision: str, tolerance: float,
) -> Iterator[Launch]:
    (B, M, N), D = out.shape, x.shape[2]
    if out.numel() == 0:
        return
    if M == 1 < N:
        yield from _plan_forward(architecture, map, loc, x, scale.mT, out.mT, precision, tolerance)
        return
    if M == 1:  # many single pairs become one batch entry with a loc for each row
        x, loc, scale, out = (t.transpose(0, 1) for t in (x, loc, scale, out))
        B, M = M, B
    constants = {"phi": map.phi, "normaliser": map.normaliser}
    contraction = contraction_of(architecture, precision, x, loc, scale)
    tensors = *pointer(x), *pointer(loc)
    if N == 1:
        config = choose_config(_forward_rows_kernel, architecture, contraction, D, False)
        yield Launch(
            _forward_rows_kernel, B * triton.cdiv(M, config.BLOCK_M),
            (*tensors, *pointer(scale[..., 0]), *pointer(out[..., 0]), M, D, tolerance),
            {**constants, "DTYPE": contraction["DTYPE"], "LOC_M": loc.shape[1] > 1, **config.options()},
        )
        return
    scale_axes = {"SCALE_M": scale.stride(1) != 0, "SCALE_N": scale.stride(2) != 0}
    config = choose_config(_forward_kernel, architecture, contraction, D, all(scale_axes.values()))
    yield Launch(
        _forward_kernel, B * triton.cdiv(M, config.BLOCK_M) * triton.cdiv(N, config.BLOCK_N),
        (*tensors, *pointer(scale), *pointer(out), M, N, D, tolerance),
        {**constants, **contraction, **scale_axes, **config.options()},
    )


def _plan_backward(
    architecture: str, map: Map, x: Tensor, loc: Tensor, scale: Tensor, dout: Tensor,
    dx: Tensor | None, dloc: Tensor | None, dscale: Tensor | None, precision: str, tolerance: float,
) -> Iterator[Launch]:
    _, M, N = dout.shape
    if dout.numel() == 0:
        zero(dx, dloc, dscale)
        return

    def plan(function: Callable[..., Iterator[Launch]], *tensors: Tensor | None) -> Iterator[Launch]:
        return function(architecture, map, *tensors, precision, tolerance)

    swapped = loc, x, scale.mT, dout.mT
    dscale_mT = None if dscale is None else dscale.mT
    if N == 1:
        yield from plan(_plan_backward_rows, x, loc, scale, dout, dx, dloc, dscale)
    elif M == 1:
        yield from plan(_plan_backward_rows, *swapped, dloc, dx, dscale_mT)
    else:
        # dscale goes with the gradient that sums over the same axis. If it is not summed it has its own launch, as W'
        # of every pair fills the registers.
        over_m, over_n = (dscale is not None and dscale.shape[axis] == 1 for axis in (1, 2))
        if dx is not None or over_n:
            yield from plan(_plan_backward_pairs, x, loc, scale, dout, dx, dscale if over_n else None)
        if dloc is not None or over_m:
            yield from plan(_plan_backward_pairs, *swapped, dloc, dscale_mT if over_m else None)
        if dscale is not None and not (over_m or over_n):
            yield from plan(_plan_backward_pairs, x, loc, scale, dout, None, dscale)


def _plan_backward_pairs(
    architecture: str, map: Map, x: Tensor, loc: Tensor, scale: Tensor, dout: Tensor,
    dx: Tensor | None, dscale: Tensor | None, precision: str, tolerance: float,
) -> Iterator[Launch]:
    (B, M, N), D = dout.shape, x.shape[2]
    contraction = contraction_of(architecture, precision, x, loc, scale)
    scale_axes = {"SCALE_M": scale.stride(1) != 0, "SCALE_N": scale.stride(2) != 0}
    pairwise_w = dscale is not None and all(scale_axes.values())
    config = choose_config(_backward_kernel, architecture, contraction, D, pairwise_w)
    sum_dscale = dscale is not None and dscale.shape[2] == 1
    tiles_d = 1 if dx is None else triton.cdiv(D, config.BLOCK_D)
    programs = B * triton.cdiv(M, config.BLOCK_M) * tiles_d
    parts, part_n = split(N, config.BLOCK_N, programs)
    with (
        partial_sums(dx, 3, parts, contraction["DTYPE"]) as dx_args,
        partial_sums(dscale, 3, parts if sum_dscale else 1, contraction["DTYPE"]) as dscale_args,
    ):
        yield Launch(
            _backward_kernel, programs * parts,
            (*pointer(x), *pointer(loc), *pointer(scale), *pointer(dout), *dx_args, *dscale_args,
             B, M, N, D, tiles_d, part_n, tolerance),
            {"phi": map.phi, "normaliser_grad": map.normaliser_grad, **contraction, **scale_axes,
             "SUM_DSCALE": sum_dscale, **config.options()},
        )


def _plan_backward_rows(
    architecture: str, map: Map, x: Tensor, loc: Tensor, scale: Tensor, dout: Tensor,
    dx: Tensor | None, dloc: Tensor | None, dscale: Tensor | None, precision: str, tolerance: float,
) -> Iterator[Launch]:
    if dout.shape[1] == 1:  # many single pairs become one batch entry with a loc for each row
        x, loc, scale, dout = (t.transpose(0, 1) for t in (x, loc, scale, dout))
        dx, dloc, dscale = (None if t is None else t.transpose(0, 1) for t in (dx, dloc, dscale))
    scale, dout, dscale = scale[..., 0], dout[..., 0], None if dscale is None else dscale[..., 0]
    (B, M), D = dout.shape, x.shape[2]
    contraction = contraction_of(architecture, precision, x, loc, scale)
    config = choose_config(_backward_rows_kernel, architecture, contraction, D, False)
    dtype = contraction["DTYPE"]
    loc_m = loc.shape[1] > 1
    sum_dloc = dloc is not None and not loc_m
    sum_dscale = dscale is not None and dscale.shape[1] == 1
    tiles_k = 1 if dx is None and dloc is None else triton.cdiv(D, config.BLOCK_K)
    if sum_dloc or sum_dscale:
        parts, part_m = split(M, config.BLOCK_M, B * tiles_k)
    else:
        parts, part_m = triton.cdiv(M, config.BLOCK_M), config.BLOCK_M
    with (
        partial_sums(dloc, 3, parts if sum_dloc else 1, dtype) as dloc_args,
        partial_sums(dscale, 2, parts if sum_dscale else 1, dtype) as dscale_args,
    ):
        yield Launch(
            _backward_rows_kernel, B * tiles_k * parts,
            (*pointer(x), *pointer(loc), *pointer(scale), *pointer(dout),
             *pointer(dx), *dloc_args, *dscale_args, B, M, D, tiles_k, part_m, tolerance),
            {"phi": map.phi, "normaliser_grad": map.normaliser_grad, "DTYPE": dtype, "LOC_M": loc_m,
             "SUM_DSCALE": sum_dscale, **config.options()},
        )
# fmt: on
