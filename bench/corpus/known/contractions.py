"""Sums of products that a contraction would take without the products, and contractions that copy their operands."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..program import Expected, Program


def chunk_scan(c: Tensor, b: Tensor, decay: Tensor, hidden: Tensor) -> Tensor:
    scores = (c[:, :, :, None] * b[:, :, None]).sum(-1) * decay
    return (scores[..., None] * hidden[:, :, None]).sum(3)


def chunk_scan_mended(c: Tensor, b: Tensor, decay: Tensor, hidden: Tensor) -> Tensor:
    scores = torch.einsum("bklhn,bkshn->bklsh", c, b) * decay
    return torch.einsum("bklsh,bkshp->bklhp", scores, hidden)


def scan_arguments(chunks: int, length: int, h: int, n: int, p: int) -> tuple[Any, ...]:
    c, b = torch.randn(2, 1, chunks, length, h, n)
    return c, b, torch.rand(1, chunks, length, length, h), torch.randn(1, chunks, length, h, p)


def relative_positions(query: Tensor, distances: Tensor) -> Tensor:
    return torch.sum(query.unsqueeze(-2) * distances, dim=-1) / math.sqrt(query.shape[-1])


def relative_positions_mended(query: Tensor, distances: Tensor) -> Tensor:
    return torch.einsum("bnhcd,crd->bnhcr", query, distances) / math.sqrt(query.shape[-1])


def speech_arguments(blocks: int, h: int, c: int, d: int) -> tuple[Any, ...]:
    return torch.randn(1, blocks, h, c, d), torch.randn(c, c, d)


def product_of_batch(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


def product_of_batch_mended(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("nhij,hjk->nhik", a, b[0])


def batch_arguments(n: int, h: int, j: int, k: int) -> tuple[Any, ...]:
    return torch.rand(n, h, 1, j, dtype=torch.bfloat16), torch.rand(1, h, j, k, dtype=torch.bfloat16)


def template_differences(image: Tensor, template: Tensor) -> Tensor:
    windows = image.unfold(1, template.shape[1], 1).unfold(2, template.shape[2], 1)
    differences = -2 * torch.einsum("cijkl,ckl->cij", windows, template)
    differences += torch.einsum("cijkl,cijkl->cij", windows, windows)
    return differences + template.square().sum((1, 2), keepdim=True)


def template_differences_mended(image: Tensor, template: Tensor) -> Tensor:
    differences = -2 * functional.conv2d(image, template[:, None], groups=len(image))
    differences += functional.conv2d(image.square(), torch.ones_like(template)[:, None], groups=len(image))
    return differences + template.square().sum((1, 2), keepdim=True)


def image_and_template(side: int, window: int) -> tuple[Any, ...]:
    return torch.rand(3, side, side), torch.rand(3, window, window)


def windows_bytes(s: Any) -> int:
    return 4 * 3 * (s["side"] - s["window"] + 1) ** 2 * s["window"] ** 2


def frequency_response(gains: Tensor, delays: Tensor, frequencies: Tensor) -> Tensor:
    angles = -2 * math.pi * delays[..., None] * frequencies
    phases = torch.polar(torch.ones_like(angles), angles)
    return (gains[..., None] * phases.unsqueeze(-2)).sum(-3)


def frequency_response_mended(gains: Tensor, delays: Tensor, frequencies: Tensor) -> Tensor:
    angles = -2 * math.pi * delays[..., None] * frequencies
    phases = torch.polar(torch.ones_like(angles), angles)
    return torch.einsum("lpt,lpf->ltf", gains, phases)


def channels(links: int, paths: int, times: int, carriers: int) -> tuple[Any, ...]:
    gains = torch.randn(links, paths, times, dtype=torch.complex64)
    return gains, torch.rand(links, paths), torch.arange(carriers, dtype=torch.float32)


def product_with_squares(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    with torch.backends.opt_einsum.flags(enabled=False):  # so that machines with the package take the same path
        return torch.einsum("ij,jk,kl,jk->il", a, b, c, b)


def product_with_squares_mended(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a @ b.square() @ c


def three_matrices(n: int) -> tuple[Any, ...]:
    return torch.randn(n, n), torch.randn(n, n), torch.randn(n, n)


PROGRAMS = (
    Program(
        "chunk_scan",
        "https://github.com/huggingface/transformers/pull/48978",
        chunk_scan,
        scan_arguments,
        sizes={"chunks": 1, "length": 256, "h": 128, "n": 128, "p": 64},
        small={"chunks": 1, "length": 64, "h": 32, "n": 64, "p": 64},
        expected=(
            Expected(
                "(c[:, :, :, None] * b[:, :, None])",
                now=lambda s: 4 * s["chunks"] * s["length"] ** 2 * s["h"] * s["n"],
                after=lambda s: 4 * s["chunks"] * s["length"] ** 2 * s["h"],
            ),
            Expected(
                "(scores[..., None] * hidden[:, :, None])",
                now=lambda s: 4 * s["chunks"] * s["length"] ** 2 * s["h"] * s["p"],
                after=lambda s: 4 * s["chunks"] * s["length"] * s["h"] * max(s["length"], s["p"]),
            ),
        ),
        mended=chunk_scan_mended,
        note="4 GiB and 0.03 GiB in the source",
    ),
    Program(
        "relative_positions",
        "https://github.com/vllm-project/vllm/pull/42933",
        relative_positions,
        speech_arguments,
        sizes={"blocks": 8, "h": 8, "c": 200, "d": 128},
        small={"blocks": 4, "h": 4, "c": 112, "d": 48},
        expected=(
            Expected(
                "query.unsqueeze(-2) * distances",
                now=lambda s: 4 * s["blocks"] * s["h"] * s["c"] ** 2 * s["d"],
                after=lambda s: 4 * s["blocks"] * s["h"] * s["c"] ** 2,
            ),
        ),
        mended=relative_positions_mended,
    ),
    Program(
        "product_of_batch",
        "https://github.com/pytorch/pytorch/issues/149302",
        product_of_batch,
        batch_arguments,
        sizes={"n": 8_192, "h": 32, "j": 1_024, "k": 128},
        small={"n": 128, "h": 8, "j": 256, "k": 64},
        expected=(
            Expected(
                "torch.matmul(a, b)",
                now=lambda s: 2 * s["n"] * s["h"] * s["j"] * s["k"],
                after=lambda s: 2 * s["n"] * s["h"] * s["k"],
            ),
        ),
        mended=product_of_batch_mended,
        note="66 GiB in the source: matmul copies the second operand for each of the batch",
    ),
    Program(
        "template_differences",
        "https://github.com/pytorch/pytorch/issues/31655",
        template_differences,
        image_and_template,
        sizes={"side": 1_000, "window": 100},
        small={"side": 100, "window": 24},
        expected=(
            Expected(
                '"cijkl,ckl->cij"',
                now=windows_bytes,
                after=lambda s: 4 * 3 * s["side"] ** 2,
            ),
            Expected(
                '"cijkl,cijkl->cij"',
                now=windows_bytes,
                after=lambda s: 4 * 3 * s["side"] ** 2,
            ),
        ),
        mended=template_differences_mended,
        note="90.73 GiB in the source: the windows are a view, and a contraction copies them",
    ),
    Program(
        "frequency_response",
        "https://github.com/NVlabs/sionna/issues/1149",
        frequency_response,
        channels,
        sizes={"links": 4_096, "paths": 24, "times": 14, "carriers": 768},
        small={"links": 8, "paths": 24, "times": 14, "carriers": 1_536},
        expected=(
            Expected(
                "(gains[..., None] * phases.unsqueeze(-2))",
                now=lambda s: 8 * s["links"] * s["paths"] * s["times"] * s["carriers"],
                after=lambda s: 8 * s["links"] * max(s["paths"], s["times"]) * s["carriers"],
            ),
        ),
        mended=frequency_response_mended,
        note="the mended form makes the phases too, and they are larger than the result",
    ),
    Program(
        "product_with_squares",
        "https://github.com/pytorch/pytorch/issues/114943",
        product_with_squares,
        three_matrices,
        sizes={"n": 500},
        small={"n": 56},
        expected=(
            Expected(
                '"ij,jk,kl,jk->il"',
                now=lambda s: 4 * s["n"] ** 4,
                after=lambda s: 4 * s["n"] ** 2,
            ),
        ),
        mended=product_with_squares_mended,
        note="from left to right, no index of the second factor can be summed before the last",
    ),
)
