"""Layers written by hand: splines, products of spectra, samples of an image at offsets.

Written later than the modules of scores and losses, by somebody who had not seen a rule of the lint either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..program import Expected, Program


def hat_functions(inputs: Tensor, grid: int) -> Tensor:
    """Splines of the first degree."""
    knots = torch.linspace(-1, 1, grid, device=inputs.device)
    return functional.relu(1 - (inputs[..., None] - knots).abs() * (grid - 1) / 2)


def spline_layer(inputs: Tensor, coefficients: Tensor, scales: Tensor) -> Tensor:
    """Each edge from an input to an output has a curve of its own; an output sums its edges."""
    curves = torch.einsum("big,iog->bio", hat_functions(inputs, coefficients.shape[-1]), coefficients)
    return (scales * (functional.silu(inputs)[..., None] + curves)).sum(1)


def spline_layer_mended(inputs: Tensor, coefficients: Tensor, scales: Tensor) -> Tensor:
    bases = hat_functions(inputs, coefficients.shape[-1]).flatten(1)
    scaled = (coefficients * scales[..., None]).mT.flatten(0, 1)
    return functional.silu(inputs) @ scales + bases @ scaled


def spline_arguments(batch: int, inputs: int, outputs: int, grid: int) -> tuple[Any, ...]:
    coefficients = torch.randn(inputs, outputs, grid, requires_grad=True)
    scales = (torch.rand(inputs, outputs) / inputs).requires_grad_()
    return (2 * torch.rand(batch, inputs) - 1).requires_grad_(), coefficients, scales


def fft_convolution(images: Tensor, kernels: Tensor) -> Tensor:
    shape = images.shape[-2:]
    spectra, filters = torch.fft.rfft2(images), torch.fft.rfft2(kernels, s=shape)
    products = (spectra[:, None] * filters.conj()).sum(2)
    return torch.fft.irfft2(products, s=shape)


def fft_convolution_mended(images: Tensor, kernels: Tensor) -> Tensor:
    shape = images.shape[-2:]
    spectra, filters = torch.fft.rfft2(images), torch.fft.rfft2(kernels, s=shape)
    return torch.fft.irfft2(torch.einsum("bcxy,ocxy->boxy", spectra, filters.conj()), s=shape)


def images_and_kernels(batch: int, inputs: int, outputs: int, side: int, window: int) -> tuple[Any, ...]:
    images = torch.randn(batch, inputs, side, side, requires_grad=True)
    return images, (torch.randn(outputs, inputs, window, window) / window).requires_grad_()


def sampling_places(offsets: Tensor, window: int) -> Tensor:
    """Where each tap of each pixel reads, from -1 to 1. Offsets are in pixels: b h w t 2."""
    height, width = offsets.shape[1:3]
    taps = torch.arange(window, device=offsets.device) - window // 2
    around = torch.cartesian_prod(taps, taps).flip(-1)
    rows, columns = torch.arange(height, device=offsets.device), torch.arange(width, device=offsets.device)
    pixels = torch.cartesian_prod(rows, columns).flip(-1).view(height, width, 1, 2)
    return (2 * (pixels + around + offsets) + 1) / torch.tensor([width, height], device=offsets.device) - 1


def deformable_convolution(features: Tensor, offsets: Tensor, weight: Tensor, window: int) -> Tensor:
    places = sampling_places(offsets, window)
    sampled = functional.grid_sample(features, places.flatten(2, 3), align_corners=False)
    return torch.einsum("bchwt,oct->bohw", sampled.unflatten(-1, places.shape[2:4]), weight)


def deformable_convolution_mended(features: Tensor, offsets: Tensor, weight: Tensor, window: int) -> Tensor:
    def of_tap(places: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("bchw,oc->bohw", functional.grid_sample(features, places, align_corners=False), weight)

    taps = zip(sampling_places(offsets, window).unbind(3), weight.unbind(2))
    first, *others = (checkpoint(of_tap, *tap, use_reentrant=False) for tap in taps)
    return sum(others, first)


def features_and_offsets(batch: int, channels: int, side: int, window: int) -> tuple[Any, ...]:
    features = torch.randn(batch, channels, side, side, requires_grad=True)
    offsets = torch.randn(batch, side, side, window**2, 2, requires_grad=True)
    weight = torch.randn(channels, channels, window**2) / channels**0.5
    return features, offsets, weight.requires_grad_(), window


PROGRAMS = (
    Program(
        "spline_layer",
        "https://github.com/KindXiaoming/pykan/blob/master/kan/KANLayer.py",
        spline_layer,
        spline_arguments,
        sizes={"batch": 16_384, "inputs": 1_152, "outputs": 4_608, "grid": 6},
        small={"batch": 256, "inputs": 64, "outputs": 384, "grid": 6},
        expected=tuple(
            Expected(
                line,
                now=lambda s: 4 * s["batch"] * s["inputs"] * s["outputs"],
                after=lambda s: (
                    4 * max(s["inputs"] * s["grid"] * max(s["batch"], s["outputs"]), s["batch"] * s["outputs"])
                ),
            )
            for line in (
                'curves = torch.einsum("big,iog->bio", hat_functions(inputs',
                "return (scales * (functional.silu(inputs)[..., None] + curves)).sum(1)",
            )
        ),
        mended=spline_layer_mended,
        backward=True,
        note="the sizes are those of https://github.com/Blealtan/efficient-kan/issues/24",
    ),
    Program(
        "fft_convolution",
        "https://github.com/fkodom/fft-conv-pytorch/issues/20",
        fft_convolution,
        images_and_kernels,
        sizes={"batch": 32, "inputs": 64, "outputs": 64, "side": 56, "window": 7},
        small={"batch": 24, "inputs": 16, "outputs": 24, "side": 32, "window": 7},
        expected=(
            Expected(
                "products = (spectra[:, None] * filters.conj()).sum(2)",
                now=lambda s: 8 * s["batch"] * s["inputs"] * s["outputs"] * s["side"] * (s["side"] // 2 + 1),
                after=lambda s: (
                    8
                    * s["side"] ** 2
                    * max(s["batch"] * s["inputs"], s["inputs"] * s["outputs"], s["batch"] * s["outputs"])
                ),
            ),
        ),
        mended=fft_convolution_mended,
        backward=True,
        note="complex numbers of 8 bytes; the mended form's backward makes spectra of both halves",
    ),
    Program(
        "deformable_convolution",
        "https://github.com/4uiiurz1/pytorch-deform-conv-v2/issues/24",
        deformable_convolution,
        features_and_offsets,
        sizes={"batch": 8, "channels": 64, "side": 128, "window": 5},
        small={"batch": 2, "channels": 48, "side": 56, "window": 5},
        expected=tuple(
            Expected(
                line,
                now=lambda s: 4 * s["batch"] * s["channels"] * s["side"] ** 2 * s["window"] ** 2,
                after=lambda s: 4 * s["batch"] * s["side"] ** 2 * max(s["channels"], 2 * s["window"] ** 2),
            )
            for line in (
                "sampled = functional.grid_sample(features, places.flatten(2, 3), align_corners=False)",
                'return torch.einsum("bchwt,oct->bohw", sampled',
            )
        ),
        mended=deformable_convolution_mended,
        backward=True,
        note="the contraction copies the samples, to have channels and taps side by side",
    ),
)
