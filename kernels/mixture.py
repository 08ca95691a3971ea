"""The log density of a mixture: score every pair of rows as `pairs` does and sum over n, without keeping the pairs.

    e[b,c,m,n] = log_weights + W(s) + s phi(<x[b,c,m], loc[b,c,n]>),    s = scale[b,c,m,n]
    out[b,c,m] = logsumexp_n e = max + log_sum,    max = max_n e,    log_sum = log sum_n exp(e - max)

    r = exp(e - max - log_sum),    G = dout r
    dx[b,c,m,:] = sum_n G s phi' loc,    dloc[b,c,n,:] = sum_m G s phi' x
    dlog_weights = G,    dscale = G (W'(s) + phi), each summed over m or n where the operand is constant

Forward writes max and log_sum, and backward takes both: from their sum alone, r would carry the rounding of out. r is
as exact only if e has the same bits in backward as in forward. So all launches compute e in the same tiles, of the same
orientation, whichever axis they sum over.

A component with log weight -inf is left out, whatever else it holds. No gradient passes where r is 0, not even 0 times
an infinity. Without components the result is -inf, and all gradients are 0. Where it is -inf since all densities
overflow, r is unknown and NaN.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import (
    Config,
    Launch,
    architecture_of,
    contraction_of,
    partial_statistics,
    partial_sums,
    pointer,
    run,
    split,
    varies,
    zero,
)
from .tiles import Map, add_scores, dots, entries, finite, indices, load_tile, mask_if, store_tile, upstream


# fmt: off
@triton.jit
def _scores(
    x_ptr, stride_xm, stride_xk,
    loc_ptr, stride_ln, stride_lk,
    scale_ptr, stride_sm, stride_sn,
    weights_ptr, stride_wm, stride_wn,
    offs_m, offs_n, M, N, D, tolerance,
    phi: tl.constexpr, normaliser: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    SCALE_M: tl.constexpr, SCALE_N: tl.constexpr, WEIGHTS_M: tl.constexpr, WEIGHTS_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of e, which is -inf but where a component is present, and where one is; its scale, phi and phi'."""
    scale = load_tile(scale_ptr, stride_sm, stride_sn, offs_m, offs_n, M, N, 1.0, SCALE_M, SCALE_N)
    constant = normaliser(scale.to(tl.float64), D).to(DTYPE)
    weights = load_tile(weights_ptr, stride_wm, stride_wn, offs_m, offs_n, M, N, 0.0, WEIGHTS_M, WEIGHTS_N).to(DTYPE)
    dot = dots(x_ptr, stride_xm, stride_xk, loc_ptr, stride_ln, stride_lk, offs_m, offs_n, M, N, D,
               DTYPE, UPCAST, PRECISION, BLOCK_K)
    value, slope = phi(dot, tolerance)
    score = weights + constant + scale.to(DTYPE) * value
    present = (offs_m < M)[:, None] & (offs_n < N)[None, :] & (weights != float("-inf"))
    return tl.where(present, score, float("-inf")), present, scale, value, slope


@triton.jit
def _gradients(
    x_ptr, stride_xm, stride_xk,
    loc_ptr, stride_ln, stride_lk,
    scale_ptr, stride_sm, stride_sn,
    weights_ptr, stride_wm, stride_wn,
    statistics_ptr, stride_zm, stride_zi,
    dout_ptr, stride_gm,
    offs_m, offs_n, M, N, D, tolerance,
    phi: tl.constexpr, normaliser: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    SCALE_M: tl.constexpr, SCALE_N: tl.constexpr, WEIGHTS_M: tl.constexpr, WEIGHTS_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """G s phi', G and G phi of a tile. All are 0 where r is 0."""
    score, present, scale, value, slope = _scores(
        x_ptr, stride_xm, stride_xk, loc_ptr, stride_ln, stride_lk,
        scale_ptr, stride_sm, stride_sn, weights_ptr, stride_wm, stride_wn, offs_m, offs_n, M, N, D, tolerance,
        phi, normaliser, DTYPE, UPCAST, PRECISION, SCALE_M, SCALE_N, WEIGHTS_M, WEIGHTS_N, BLOCK_K)
    G, absent = upstream(
        score, present, statistics_ptr, stride_zm, stride_zi, dout_ptr, stride_gm, offs_m, M, DTYPE)
    return tl.where(absent, 0.0, G * scale.to(DTYPE) * slope), G, tl.where(absent, 0.0, G * value)


@triton.jit
def _dscale(G, G_phi, scale, D, normaliser_grad: tl.constexpr):
    """G (W' + phi), or its sum over an axis along which scale is constant, from G and G phi or their sums."""
    return G_phi + tl.where(G == 0, 0.0, G * normaliser_grad(scale.to(tl.float64), D).to(G.dtype))


@triton.jit
def _forward_kernel(
    first_pid,
    x_ptr, stride_xb, stride_xc, stride_xm, stride_xk,
    loc_ptr, stride_lb, stride_lc, stride_ln, stride_lk,
    scale_ptr, stride_sb, stride_sc, stride_sm, stride_sn,
    weights_ptr, stride_wb, stride_wc, stride_wm, stride_wn,
    statistics_ptr, stride_zp, stride_zb, stride_zc, stride_zm, stride_zi,
    B, C, M, N, D, part_n, tolerance,
    phi: tl.constexpr, normaliser: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    SCALE_M: tl.constexpr, SCALE_N: tl.constexpr, WEIGHTS_M: tl.constexpr, WEIGHTS_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    pid_m, pid_c, pid_b, part = indices(first_pid, (tl.cdiv(M, BLOCK_M), C, B))
    x_ptr, loc_ptr, scale_ptr, weights_ptr = entries(
        (pid_b, pid_c), ((x_ptr, stride_xb, stride_xc), (loc_ptr, stride_lb, stride_lc),
                         (scale_ptr, stride_sb, stride_sc), (weights_ptr, stride_wb, stride_wc)))
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)

    maximum = tl.full((BLOCK_M,), float("-inf"), DTYPE)
    total = tl.zeros((BLOCK_M,), DTYPE)
    for start_n in range(part * part_n, tl.minimum((part + 1) * part_n, N), BLOCK_N):
        score, _, _, _, _ = _scores(
            x_ptr, stride_xm, stride_xk, loc_ptr, stride_ln, stride_lk,
            scale_ptr, stride_sm, stride_sn, weights_ptr, stride_wm, stride_wn,
            offs_m, start_n + tl.arange(0, BLOCK_N), M, N, D, tolerance,
            phi, normaliser, DTYPE, UPCAST, PRECISION, SCALE_M, SCALE_N, WEIGHTS_M, WEIGHTS_N, BLOCK_K)
        maximum, total = add_scores(score, maximum, total)

    statistics_ptr += part * stride_zp + pid_b * stride_zb + pid_c * stride_zc
    tl.store(statistics_ptr + offs_m * stride_zm, maximum, mask=offs_m < M)
    tl.store(statistics_ptr + offs_m * stride_zm + stride_zi, tl.log(total), mask=offs_m < M)


@triton.jit
def _backward_rows_kernel(
    first_pid,
    x_ptr, stride_xb, stride_xc, stride_xm, stride_xk,
    loc_ptr, stride_lb, stride_lc, stride_ln, stride_lk,
    scale_ptr, stride_sb, stride_sc, stride_sm, stride_sn,
    weights_ptr, stride_wb, stride_wc, stride_wm, stride_wn,
    statistics_ptr, stride_zb, stride_zc, stride_zm, stride_zi,
    dout_ptr, stride_gb, stride_gc, stride_gm,
    dx_ptr, stride_dp, stride_db, stride_dc, stride_dm, stride_dk,
    dscale_ptr, stride_tp, stride_tb, stride_tc, stride_tm, stride_tn,
    dweights_ptr, stride_up, stride_ub, stride_uc, stride_um, stride_un,
    B, C, sum_c, M, N, D, tiles_d, part_tiles, tolerance,
    phi: tl.constexpr, normaliser: tl.constexpr, normaliser_grad: tl.constexpr, DTYPE: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, SCALE_M: tl.constexpr, SCALE_N: tl.constexpr,
    WEIGHTS_M: tl.constexpr, WEIGHTS_N: tl.constexpr, SUM_DSCALE: tl.constexpr, SUM_DWEIGHTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Write sums over n, of dx also over `sum_c` entries of c; or write dscale and dlog_weights of every pair."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_d, pid_m, pid_c, pid_b, part = indices(first_pid, (tiles_d, tl.cdiv(M, BLOCK_M), C, B))
    x_ptr, loc_ptr, scale_ptr, weights_ptr, statistics_ptr, dout_ptr = entries(
        (pid_b,), ((x_ptr, stride_xb), (loc_ptr, stride_lb), (scale_ptr, stride_sb), (weights_ptr, stride_wb),
                   (statistics_ptr, stride_zb), (dout_ptr, stride_gb)))
    if dx_ptr is not None:
        dx_ptr += part * stride_dp + pid_b * stride_db + pid_c * stride_dc
    if dscale_ptr is not None:
        dscale_ptr += part * stride_tp + pid_b * stride_tb + pid_c * stride_tc
    if dweights_ptr is not None:
        dweights_ptr += part * stride_up + pid_b * stride_ub + pid_c * stride_uc
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)

    dx = tl.zeros((BLOCK_M, BLOCK_D), DTYPE)
    sum_G = tl.zeros((BLOCK_M, 1), DTYPE)
    sum_G_phi = tl.zeros((BLOCK_M, 1), DTYPE)
    for tile in range(part * part_tiles, tl.minimum((part + 1) * part_tiles, sum_c * tiles_n)):
        c = pid_c + tile // tiles_n
        offs_n = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
        G_dot, G, G_phi = _gradients(
            x_ptr + c * stride_xc, stride_xm, stride_xk, loc_ptr + c * stride_lc, stride_ln, stride_lk,
            scale_ptr + c * stride_sc, stride_sm, stride_sn, weights_ptr + c * stride_wc, stride_wm, stride_wn,
            statistics_ptr + c * stride_zc, stride_zm, stride_zi, dout_ptr + c * stride_gc, stride_gm,
            offs_m, offs_n, M, N, D, tolerance,
            phi, normaliser, DTYPE, UPCAST, PRECISION, SCALE_M, SCALE_N, WEIGHTS_M, WEIGHTS_N, BLOCK_K)
        if dx_ptr is not None:
            loc = load_tile(loc_ptr + c * stride_lc, stride_ln, stride_lk, offs_n, offs_d, N, D, 0.0).to(DTYPE)
            dx = tl.dot(G_dot, finite(loc), dx, input_precision=PRECISION, out_dtype=DTYPE)
        if SUM_DSCALE or SUM_DWEIGHTS:
            sum_G += tl.sum(G, 1, keep_dims=True)
            sum_G_phi += tl.sum(G_phi, 1, keep_dims=True)
        if dscale_ptr is not None and not SUM_DSCALE:
            scale = load_tile(scale_ptr + c * stride_sc, stride_sm, stride_sn, offs_m, offs_n, M, N, 1.0,
                              SCALE_M, SCALE_N)
            dscale = _dscale(G, G_phi, scale, D, normaliser_grad)
            store_tile(dscale_ptr, stride_tm, stride_tn, offs_m, offs_n, M, N, dscale)
        if dweights_ptr is not None and not SUM_DWEIGHTS:
            store_tile(dweights_ptr, stride_um, stride_un, offs_m, offs_n, M, N, G)

    if dx_ptr is not None:
        store_tile(dx_ptr, stride_dm, stride_dk, offs_m, offs_d, M, D, dx)
    if SUM_DSCALE:
        scale = load_tile(scale_ptr + pid_c * stride_sc, stride_sm, stride_sn, offs_m, offs_m, M, N, 1.0,
                          SCALE_M, False)
        dscale = _dscale(sum_G, sum_G_phi, scale, D, normaliser_grad)
        tl.store(dscale_ptr + offs_m[:, None] * stride_tm, dscale, mask=(offs_m < M)[:, None])
    if SUM_DWEIGHTS:
        tl.store(dweights_ptr + offs_m[:, None] * stride_um, sum_G, mask=(offs_m < M)[:, None])


@triton.jit
def _backward_columns_kernel(
    first_pid,
    x_ptr, stride_xb, stride_xc, stride_xm, stride_xk,
    loc_ptr, stride_lb, stride_lc, stride_ln, stride_lk,
    scale_ptr, stride_sb, stride_sc, stride_sm, stride_sn,
    weights_ptr, stride_wb, stride_wc, stride_wm, stride_wn,
    statistics_ptr, stride_zb, stride_zc, stride_zm, stride_zi,
    dout_ptr, stride_gb, stride_gc, stride_gm,
    dloc_ptr, stride_ep, stride_eb, stride_ec, stride_en, stride_ek,
    dscale_ptr, stride_tp, stride_tb, stride_tc, stride_tm, stride_tn,
    dweights_ptr, stride_up, stride_ub, stride_uc, stride_um, stride_un,
    B, C, M, N, D, tiles_d, part_m, tolerance,
    phi: tl.constexpr, normaliser: tl.constexpr, normaliser_grad: tl.constexpr,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    SCALE_M: tl.constexpr, SCALE_N: tl.constexpr, WEIGHTS_M: tl.constexpr, WEIGHTS_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Write sums over m of dloc, dscale and dlog_weights."""
    pid_d, pid_n, pid_c, pid_b, part = indices(first_pid, (tiles_d, tl.cdiv(N, BLOCK_N), C, B))
    x_ptr, loc_ptr, scale_ptr, weights_ptr, statistics_ptr, dout_ptr = entries(
        (pid_b, pid_c), ((x_ptr, stride_xb, stride_xc), (loc_ptr, stride_lb, stride_lc),
                         (scale_ptr, stride_sb, stride_sc), (weights_ptr, stride_wb, stride_wc),
                         (statistics_ptr, stride_zb, stride_zc), (dout_ptr, stride_gb, stride_gc)))
    if dloc_ptr is not None:
        dloc_ptr += part * stride_ep + pid_b * stride_eb + pid_c * stride_ec
    if dscale_ptr is not None:
        dscale_ptr += part * stride_tp + pid_b * stride_tb + pid_c * stride_tc
    if dweights_ptr is not None:
        dweights_ptr += part * stride_up + pid_b * stride_ub + pid_c * stride_uc
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)

    dloc = tl.zeros((BLOCK_D, BLOCK_N), DTYPE)
    sum_G = tl.zeros((1, BLOCK_N), DTYPE)
    sum_G_phi = tl.zeros((1, BLOCK_N), DTYPE)
    for start_m in range(part * part_m, tl.minimum((part + 1) * part_m, M), BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        G_dot, G, G_phi = _gradients(
            x_ptr, stride_xm, stride_xk, loc_ptr, stride_ln, stride_lk,
            scale_ptr, stride_sm, stride_sn, weights_ptr, stride_wm, stride_wn,
            statistics_ptr, stride_zm, stride_zi, dout_ptr, stride_gm, offs_m, offs_n, M, N, D, tolerance,
            phi, normaliser, DTYPE, UPCAST, PRECISION, SCALE_M, SCALE_N, WEIGHTS_M, WEIGHTS_N, BLOCK_K)
        if dscale_ptr is not None or dweights_ptr is not None:
            sum_G += tl.sum(G, 0, keep_dims=True)
            sum_G_phi += tl.sum(G_phi, 0, keep_dims=True)
        if dloc_ptr is not None:
            x = load_tile(x_ptr, stride_xk, stride_xm, offs_d, offs_m, D, M, 0.0).to(DTYPE)
            dloc = tl.dot(finite(x), G_dot, dloc, input_precision=PRECISION, out_dtype=DTYPE)

    if dloc_ptr is not None:
        store_tile(dloc_ptr, stride_ek, stride_en, offs_d, offs_n, D, N, dloc)
    mask_n = mask_if(pid_d == 0, (offs_n < N)[None, :])
    if dscale_ptr is not None:
        scale = load_tile(scale_ptr, stride_sm, stride_sn, offs_n, offs_n, M, N, 1.0, False, SCALE_N)
        dscale = _dscale(sum_G, sum_G_phi, scale, D, normaliser_grad)
        tl.store(dscale_ptr + offs_n[None, :] * stride_tn, dscale, mask=mask_n)
    if dweights_ptr is not None:
        tl.store(dweights_ptr + offs_n[None, :] * stride_un, sum_G, mask=mask_n)
# fmt: on


def choose_config(architecture: str, contraction: dict[str, Any], pairwise_w: bool) -> Config:
    """The largest tiles with which no kernel spills a register. `pairwise_w` says that W varies along both axes.

    All kernels share them, so that their scores have the same bits. The choice is static, so that no result depends on
    a timing.
    """
    # CDNA has 512 registers per thread for 4 warps and 256 for 8. ptxas spills a few values of W to fit into 128
    # registers unless it may take 255.
    threads = {"num_warps": 4} if architecture == "gfx942" else {"num_warps": 8, "maxnreg": 255}
    float64 = contraction["DTYPE"] is tl.float64
    if pairwise_w:  # W takes about ten float64 values per element: two elements per thread
        BLOCK_K, BLOCK_D = (16, 32) if float64 else (32, 64)
        return Config(**threads, num_stages=2, BLOCK_M=16, BLOCK_N=32, BLOCK_K=BLOCK_K, BLOCK_D=BLOCK_D)
    if float64:  # sm_90 holds more than sm_80; sm_100 has no fast float64 product: the plain one spills first
        BLOCK_K = 16 if architecture in ("sm_90", "sm_100") else 32
        BLOCK_D = 32 if architecture == "sm_100" else 64
        return Config(**threads, num_stages=2, BLOCK_M=32, BLOCK_N=32, BLOCK_K=BLOCK_K, BLOCK_D=BLOCK_D)
    if contraction["PRECISION"] == "tf32x3":  # two registers per operand: 64 columns would spill
        return Config(**threads, num_stages=2, BLOCK_M=64, BLOCK_N=32, BLOCK_K=16, BLOCK_D=128)
    return Config(**threads, num_stages=2, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, BLOCK_D=128)


# fmt: off
def forward(
    map: Map, x: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, statistics: Tensor, *,
    precision: str, tolerance: float,
) -> None:
    """Write max and log_sum over n, whose sum is the result, to `statistics[..., 0]` and `[..., 1]`.

    x is (B, C, M, D), loc (B, C, N, D), scale and log_weights are (B, C, M, N). statistics are (B, C, M, 2) in the
    dtype of the arithmetic: float64 if an operand is, else float32. They may have any strides, and any size may be 0.
    `precision` is the value of `torch.get_float32_matmul_precision()`. phi takes `tolerance`.
    """
    run(x, _plan_forward(architecture_of(x), map, x, loc, scale, log_weights, statistics, precision, tolerance))


def backward(
    map: Map, x: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, statistics: Tensor, dout: Tensor,
    dlog_weights: Tensor | None, dx: Tensor | None, dloc: Tensor | None, dscale: Tensor | None, *,
    precision: str, tolerance: float,
) -> None:
    """Write the gradients that are not None, given dout (B, C, M) and the operands of `forward`.

    dx is (B, C, M, D), or (B, 1, M, D) for the sum over C. dloc is (B, C, N, D). dscale and dlog_weights are
    (B, C, 1, N), (B, C, M, 1) or (B, C, M, N). An axis of size 1 is summed, and their operands must be constant along
    it. Nothing of the size of all pairs is allocated here.
    """
    run(x, _plan_backward(
        architecture_of(x), map, x, loc, scale, log_weights, statistics, dout,
        dlog_weights, dx, dloc, dscale, precision, tolerance,
    ))


def _prepare(
    architecture: str, map: Map, x: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, precision: str,
) -> tuple[Config, dict[str, Any]]:
    contraction = contraction_of(architecture, precision, x, loc, scale, log_weights)
    axes = {
        f"{name}_{axis}": varies(operand, i)
        for name, operand in (("SCALE", scale), ("WEIGHTS", log_weights)) for axis, i in (("M", 2), ("N", 3))
    }
    config = choose_config(architecture, contraction, axes["SCALE_M"] and axes["SCALE_N"])
    return config, {"phi": map.phi, "normaliser": map.normaliser, **contraction, **axes}


def _plan_forward(
    architecture: str, map: Map, x: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, statistics: Tensor,
    precision: str, tolerance: float,
) -> Iterator[Launch]:
    (B, C, M, N), D = scale.shape, x.shape[3]
    if scale.numel() == 0:
        statistics.fill_(float("-inf"))
        return
    config, constants = _prepare(architecture, map, x, loc, scale, log_weights, precision)
    programs = B * C * triton.cdiv(M, config.BLOCK_M)
    parts, part_n = split(N, config.BLOCK_N, programs)
    with partial_statistics(statistics, parts) as statistics_args:
        yield Launch(
            _forward_kernel, programs * parts,
            (*pointer(x), *pointer(loc), *pointer(scale), *pointer(log_weights), *statistics_args,
             B, C, M, N, D, part_n, tolerance),
            {**constants, **replace(config, BLOCK_D=0).options()},
        )


def _plan_backward(
    architecture: str, map: Map, x: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, statistics: Tensor,
    dout: Tensor, dlog_weights: Tensor | None, dx: Tensor | None, dloc: Tensor | None, dscale: Tensor | None,
    precision: str, tolerance: float,
) -> Iterator[Launch]:
    (B, C, M, N), D = scale.shape, x.shape[3]
    if scale.numel() == 0:
        zero(dlog_weights, dx, dloc, dscale)
        return
    config, constants = _prepare(architecture, map, x, loc, scale, log_weights, precision)
    constants = {**constants, "normaliser_grad": map.normaliser_grad, **config.options()}
    dtype = constants["DTYPE"]
    operands = tuple(a for t in (x, loc, scale, log_weights, statistics, dout) for a in pointer(t))

    def rows(dx: Tensor | None, dscale: Tensor | None, dweights: Tensor | None) -> Iterator[Launch]:
        kept_c = C if dx is None else dx.shape[1]
        sum_dscale, sum_dweights = (grad is not None and grad.shape[3] == 1 for grad in (dscale, dweights))
        tiles = C // kept_c * triton.cdiv(N, config.BLOCK_N)
        tiles_d = 1 if dx is None else triton.cdiv(D, config.BLOCK_D)
        programs = B * kept_c * triton.cdiv(M, config.BLOCK_M) * tiles_d
        parts, part_tiles = split(tiles, 1, programs)
        with (
            partial_sums(dx, 4, parts, dtype) as dx_args,
            partial_sums(dscale, 4, parts if sum_dscale else 1, dtype) as dscale_args,
            partial_sums(dweights, 4, parts if sum_dweights else 1, dtype) as dweights_args,
        ):
            yield Launch(
                _backward_rows_kernel, programs * parts,
                (*operands, *dx_args, *dscale_args, *dweights_args,
                 B, kept_c, C // kept_c, M, N, D, tiles_d, part_tiles, tolerance),
                {**constants, "SUM_DSCALE": sum_dscale, "SUM_DWEIGHTS": sum_dweights},
            )

    def columns(dloc: Tensor | None, dscale: Tensor | None, dweights: Tensor | None) -> Iterator[Launch]:
        tiles_d = 1 if dloc is None else triton.cdiv(D, config.BLOCK_D)
        programs = B * C * triton.cdiv(N, config.BLOCK_N) * tiles_d
        parts, part_m = split(M, config.BLOCK_M, programs)
        with (
            partial_sums(dloc, 4, parts, dtype) as dloc_args,
            partial_sums(dscale, 4, parts, dtype) as dscale_args,
            partial_sums(dweights, 4, parts, dtype) as dweights_args,
        ):
            yield Launch(
                _backward_columns_kernel, programs * parts,
                (*operands, *dloc_args, *dscale_args, *dweights_args, B, C, M, N, D, tiles_d, part_m, tolerance),
                constants,
            )

    over_m = [grad if grad is not None and grad.shape[2] == 1 else None for grad in (dscale, dlog_weights)]
    others = [grad if grad is not None and grad.shape[2] != 1 else None for grad in (dscale, dlog_weights)]
    if dx is not None:
        yield from rows(dx, None, None)
    if any(grad is not None for grad in (dloc, *over_m)):
        yield from columns(dloc, *over_m)
    if any(grad is not None for grad in others):  # in their own launch: W' of every pair fills the registers
        yield from rows(None, *others)
# fmt: on


def representatives(map: Map, architecture: str, dtype: torch.dtype, precision: str) -> Iterator[Launch]:
    """Launches with every gradient, and W of one row or of every pair.

    W of every pair is compiled at the highest precision alone. Others have the same tiles and take fewer registers.
    """
    B, C, M, D = 16, 16, 1600, 128
    x = torch.empty(B, C, M, D, dtype=dtype, device="meta")
    full = x.new_empty(B, C, M, M)
    statistics = x.new_empty(B, C, M, 2, dtype=torch.promote_types(dtype, torch.float32))
    for parameter in (full[:, :, :1], full) if precision == "highest" else (full[:, :, :1],):
        operands = x, x, parameter.expand_as(full), parameter.expand_as(full), statistics
        yield from _plan_forward(architecture, map, *operands, precision, 1e-6)
        gradients = parameter, x, x, parameter
        yield from _plan_backward(architecture, map, *operands, full[..., 0], *gradients, precision, 1e-6)
