"""Device functions that families share: programs and their operands, tiles, products and the logsumexp of a mixture."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Map(NamedTuple):
    """The score of a pair as a function of its dot product: W(scale) + scale phi(dot). See `pairs`."""

    phi: Any  # (dot, tolerance) -> phi(dot), phi'(dot)
    normaliser: Any  # (scale in float64, D) -> W(scale)
    normaliser_grad: Any  # (scale in float64, D) -> W'(scale)


# fmt: off
@triton.jit
def indices(first_pid, sizes):
    """The index of this program along each axis of the grid, fastest first. The last axis, of any size, has no size."""
    pid = first_pid + tl.program_id(0).to(tl.int64)
    found = ()
    for axis in tl.static_range(len(sizes)):
        found += (pid % sizes[axis],)
        pid //= sizes[axis]
    found += (pid,)
    return found


@triton.jit
def entries(index, operands):
    """The pointers of operands, which come with strides, moved to the entry with an index."""
    found = ()
    for i in tl.static_range(len(operands)):
        ptr = operands[i][0]
        for axis in tl.static_range(len(index)):
            ptr += index[axis] * operands[i][axis + 1]
        found += (ptr,)
    return found


@triton.jit
def dots(
    x_ptr, stride_xm, stride_xk,
    loc_ptr, stride_ln, stride_lk,
    offs_m, offs_n, M, N, D,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """A tile of the dot products of rows of x and of loc, summed over slices of D."""
    dot = tl.zeros((offs_m.shape[0], offs_n.shape[0]), DTYPE)
    for start_k in range(0, D, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K).to(tl.int64)
        x = load_tile(x_ptr, stride_xm, stride_xk, offs_m, offs_k, M, D, 0.0)
        loc = load_tile(loc_ptr, stride_lk, stride_ln, offs_k, offs_n, D, N, 0.0)
        if UPCAST:
            x = x.to(DTYPE)
            loc = loc.to(DTYPE)
        dot = tl.dot(x, loc, dot, input_precision=PRECISION, out_dtype=DTYPE)
    return dot


@triton.jit
def load_tile(
    ptr, stride_m, stride_n,
    offs_m, offs_n, M, N, other,
    ALONG_M: tl.constexpr = True, ALONG_N: tl.constexpr = True,
):
    """A tile, of size 1 along each axis along which the operand is constant: W is computed once along it."""
    rows = offs_m[:, None] if ALONG_M else tl.zeros((1, 1), tl.int64)
    columns = offs_n[None, :] if ALONG_N else tl.zeros((1, 1), tl.int64)
    return tl.load(ptr + rows * stride_m + columns * stride_n, mask=(rows < M) & (columns < N), other=other)


@triton.jit
def store_tile(
    ptr, stride_m, stride_n,
    offs_m, offs_n, M, N, tile,
):
    """Store what of a tile is within the edges."""
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(ptr + offs_m[:, None] * stride_m + offs_n[None, :] * stride_n, tile, mask=mask)


@triton.jit
def mask_if(condition, mask):
    """The mask if a condition holds that is one for all elements, else a mask of none.

    As `mask & condition` it has integers in Triton's interpreter, which 3.9 refuses.
    """
    return tl.where(condition, mask, False)


@triton.jit
def finite(value):
    """The value, or 0 if it is NaN or infinite."""
    return tl.where(tl.abs(value) < float("inf"), value, 0.0)


@triton.jit
def add_scores(score, maximum, total):
    """The maximum of each row and the sum of exp(e - maximum), after one more tile of e."""
    larger = tl.maximum(maximum, tl.max(score, 1))
    shift = finite(larger)
    return larger, total * tl.exp(maximum - shift) + tl.sum(tl.exp(score - shift[:, None]), 1)


@triton.jit
def upstream(
    score, present, statistics_ptr, stride_zm, stride_zi, dout_ptr, stride_gm, offs_m, M,
    DTYPE: tl.constexpr,
):
    """G of a tile of e, and where r is 0. G is 0 there too.

    If all that is `present` in a row scores -inf, it has overflowed: r and G are NaN, unless dout is 0.
    """
    mask_m = offs_m < M
    maximum = tl.load(statistics_ptr + offs_m * stride_zm, mask=mask_m, other=0.0)
    log_sum = tl.load(statistics_ptr + offs_m * stride_zm + stride_zi, mask=mask_m, other=0.0)
    dout = tl.load(dout_ptr + offs_m * stride_gm, mask=mask_m, other=0.0).to(DTYPE)
    r = tl.exp(score - finite(maximum)[:, None] - log_sum[:, None])
    absent = ~present | (r == 0) | ((maximum == float("-inf")) & (dout == 0))[:, None]
    return tl.where(absent, 0.0, dout[:, None] * r), absent
# fmt: on
