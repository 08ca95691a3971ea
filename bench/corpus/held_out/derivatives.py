"""Gradients of samples and Jacobians, with axes that nobody needs.

Written later than the modules of scores and losses, by somebody who had not seen a rule of the lint either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..program import Expected, Program


def gradients_of_tokens(activations: Tensor, output_gradients: Tensor) -> Tensor:
    """The gradient of a layer's weight, for each sample of many tokens."""
    products = torch.einsum("nto,nti->ntoi", output_gradients, activations)
    return torch.einsum("ntoi->noi", products)


def gradients_of_tokens_mended(activations: Tensor, output_gradients: Tensor) -> Tensor:
    return torch.einsum("nto,nti->noi", output_gradients, activations)


def layer_of_tokens(samples: int, tokens: int, inputs: int, outputs: int) -> tuple[Any, ...]:
    return torch.randn(samples, tokens, inputs), torch.randn(samples, tokens, outputs)


def batch_jacobian(network: nn.Module, inputs: Tensor) -> Tensor:
    """The squared norm of each sample's Jacobian."""
    outputs = network(inputs)
    jacobian = inputs.new_zeros(*outputs.shape, *inputs.shape)
    for i in range(outputs.shape[0]):
        for j in range(outputs.shape[1]):
            (jacobian[i, j],) = torch.autograd.grad(outputs[i, j], inputs, retain_graph=True)
    return torch.diagonal(jacobian, dim1=0, dim2=2).square().sum((0, 1))


def batch_jacobian_mended(network: nn.Module, inputs: Tensor) -> Tensor:
    norms = inputs.new_zeros(len(inputs))
    for output in network(inputs).unbind(1):  # a sample's outputs depend on its own inputs alone
        (gradients,) = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
        norms += gradients.square().sum(1)
    return norms


def classifier_and_images(batch: int, pixels: int, hidden: int, classes: int) -> tuple[Any, ...]:
    network = nn.Sequential(nn.Linear(pixels, hidden), nn.Tanh(), nn.Linear(hidden, classes))
    return network, torch.randn(batch, pixels, requires_grad=True)


PROGRAMS = (
    Program(
        "gradients_of_tokens",
        "https://github.com/meta-pytorch/opacus/pull/192",
        gradients_of_tokens,
        layer_of_tokens,
        sizes={"samples": 8, "tokens": 128, "inputs": 3_072, "outputs": 768},
        small={"samples": 4, "tokens": 64, "inputs": 192, "outputs": 128},
        expected=(
            Expected(
                'products = torch.einsum("nto,nti->ntoi", output_gradients, activations)',
                now=lambda s: 4 * s["samples"] * s["tokens"] * s["inputs"] * s["outputs"],
                after=lambda s: 4 * s["samples"] * s["inputs"] * s["outputs"],
            ),
        ),
        mended=gradients_of_tokens_mended,
        note="9 GB and 72 MB in the source: one contraction in two steps",
    ),
    Program(
        "batch_jacobian",
        "https://github.com/pytorch/pytorch/issues/37129",
        batch_jacobian,
        classifier_and_images,
        sizes={"batch": 128, "pixels": 3_072, "hidden": 512, "classes": 10},
        small={"batch": 40, "pixels": 384, "hidden": 64, "classes": 10},
        expected=(
            Expected(
                "jacobian = inputs.new_zeros(*outputs.shape, *inputs.shape)",
                now=lambda s: 4 * s["batch"] ** 2 * s["classes"] * s["pixels"],
                after=lambda s: 4 * s["batch"] * s["pixels"],
            ),
        ),
        mended=batch_jacobian_mended,
        note="the derivatives of one sample's outputs by the others' inputs are zeros",
    ),
)
