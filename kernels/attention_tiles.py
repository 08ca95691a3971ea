"""What forward and backward of attention share: the call, the sizes of tiles, and functions that compute a tile."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Config, contraction_of, pointer
from .tiles import dots


@dataclass(frozen=True)
class AttentionInputs:
    """The operands and settings of a call, and what all kernels take of them.

    Attributes:
        output: "scores" (s), "weights" (P) or "sums" (P' value)
        query: (B, H, M, E). Operands may have any strides, and any size may be 0
        key: (B, H, N, E)
        value: (B, H, N, V), or None without sums
        mask: (B, H, M, N). A boolean mask is True where a pair takes part; a floating-point mask is added
        seed: one int64, which decides together with the index of a pair whether dropout keeps it. Without a seed
            nothing is dropped
        diagonal: how far n may exceed m in a pair that takes part, or None if it may always
        precision: the value of `torch.get_float32_matmul_precision()`
    """

    output: str
    query: Tensor
    key: Tensor
    value: Tensor | None
    mask: Tensor | None
    seed: Tensor | None
    scale: float
    diagonal: int | None
    dropout_p: float
    precision: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """B, H, M, N, E, V."""
        return *self.query.shape[:3], *self.key.shape[2:], 0 if self.value is None else self.value.shape[3]

    @property
    def reach(self) -> int:
        """How far n may exceed m in a pair that takes part."""
        return self.key.shape[2] if self.diagonal is None else self.diagonal

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


def choose_config(architecture: str, contraction: dict[str, Any]) -> Config:
    """The largest tiles with which no kernel spills a register.

    All kernels of backward share it, so that P has the same bits in each. The choice is static, so that no result
    depends on a timing.
    """
    # CDNA has 512 registers per thread for 4 warps and 256 for 8. ptxas spills a few unless it may take 255.
    threads = {"num_warps": 4} if architecture == "gfx942" else {"num_warps": 8, "maxnreg": 255}
    num_stages = 3 if architecture == "sm_90" else 2
    if contraction["DTYPE"] is tl.float64:
        return Config(**threads, num_stages=num_stages, BLOCK_M=32, BLOCK_N=16, BLOCK_K=16, BLOCK_D=32)
    return Config(**threads, num_stages=num_stages, BLOCK_M=64, BLOCK_N=32, BLOCK_K=16, BLOCK_D=128)


def narrowed(config: Config, D: int) -> Config:
    """The configuration with BLOCK_D no wider than D needs. A product takes 16 columns at least."""
    return replace(config, BLOCK_D=min(config.BLOCK_D, max(16, triton.next_power_of_2(D))))


# fmt: off
@triton.jit
def score_tile(
    query_ptr, stride_qm, stride_qk,
    key_ptr, stride_kn, stride_kk,
    mask_ptr, stride_am, stride_an,
    offs_m, offs_n, M, N, E, reach, scale,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """A tile of s, and which of its pairs take part. None beyond n = m + reach does."""
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
def exponentials(score, maximum):
    """exp(s - max) of a tile, the new maximum, and the factor that rescales sums made with the old one."""
    larger = tl.maximum(maximum, tl.max(score, 1))
    shift = shift_of(larger)
    return tl.exp(score - shift[:, None]), larger, tl.exp(maximum - shift)


@triton.jit
def shift_of(maximum):
    """The maximum, or 0 for a row without pairs, where -inf would give NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def inverse_of(total):
    """1 / total, or 0 for a row without pairs."""
    return tl.where(total == 0, 0.0, 1 / total)


@triton.jit
def dropped(tile, seed_ptr, offs_row, offs_n, N, dropout_p, DTYPE: tl.constexpr):
    """A tile of pairs times keep / (1 - p)."""
    if seed_ptr is not None:
        index = offs_row[:, None] * N + offs_n[None, :]
        low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
        random, _, _, _ = tl.philox(tl.load(seed_ptr), low, high, high * 0, high * 0)
        p = tl.full((1, 1), dropout_p, DTYPE)
        tile = tl.where(tl.uint_to_uniform_float(random) >= p, tile / (1 - p), 0.0)
    return tile


@triton.jit
def dweights_tile(
    dout_ptr, stride_gm, stride_gk,
    value_ptr, stride_vn, stride_vk,
    seed_ptr, offs_row, offs_m, offs_n, present, M, N, V, dropout_p,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """A tile of dP. Without values it is the tile of dout."""
    if value_ptr is None:
        dout_ptrs = dout_ptr + offs_m[:, None] * stride_gm + offs_n[None, :] * stride_gk
        dweights = tl.load(dout_ptrs, mask=present, other=0.0).to(DTYPE)
    else:
        dweights = dots(dout_ptr, stride_gm, stride_gk, value_ptr, stride_vn, stride_vk, offs_m, offs_n, M, N, V,
                        DTYPE, UPCAST, PRECISION, BLOCK_K)
        dweights = dropped(dweights, seed_ptr, offs_row, offs_n, N, dropout_p, DTYPE)
    return dweights


@triton.jit
def weights_tile(score, statistics_ptr, offs_row, mask_m):
    """A tile of P, from its scores and the statistics of its rows."""
    shift = tl.load(statistics_ptr + offs_row * 3, mask=mask_m, other=0.0)
    inverse = tl.load(statistics_ptr + offs_row * 3 + 1, mask=mask_m, other=0.0)
    return tl.exp(score - shift[:, None]) * inverse[:, None]


@triton.jit
def dscores_tile(
    query_ptr, stride_qm, stride_qk,
    key_ptr, stride_kn, stride_kk,
    value_ptr, stride_vn, stride_vk,
    mask_ptr, stride_am, stride_an,
    dout_ptr, stride_gm, stride_gk,
    seed_ptr, statistics_ptr, offs_row, offs_m, offs_n, M, N, E, V, reach, scale, dropout_p,
    DTYPE: tl.constexpr, UPCAST: tl.constexpr, UPCAST_VALUE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of ds, from the operands and the statistics of its rows."""
    score, present = score_tile(
        query_ptr, stride_qm, stride_qk, key_ptr, stride_kn, stride_kk, mask_ptr, stride_am, stride_an,
        offs_m, offs_n, M, N, E, reach, scale, DTYPE, UPCAST, PRECISION, BLOCK_K)
    dscores = dweights_tile(
        dout_ptr, stride_gm, stride_gk, value_ptr, stride_vn, stride_vk, seed_ptr, offs_row, offs_m, offs_n, present,
        M, N, V, dropout_p, DTYPE, UPCAST_VALUE, PRECISION, BLOCK_K)
    if statistics_ptr is not None:
        mask_m = offs_m < M
        weights = weights_tile(score, statistics_ptr, offs_row, mask_m)
        delta = tl.load(statistics_ptr + offs_row * 3 + 2, mask=mask_m, other=0.0)
        dscores = tl.where(weights == 0, 0.0, weights * (dscores - delta[:, None]))
    return dscores
# fmt: on
