"""Products that are summed at once: a contraction, a look-up or a formula makes none of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..program import Expected, Program


def codes_to_vectors(codes: Tensor, codebook: Tensor) -> Tensor:
    return functional.one_hot(codes, len(codebook)).to(codebook.dtype) @ codebook


def codes_to_vectors_mended(codes: Tensor, codebook: Tensor) -> Tensor:
    return functional.embedding(codes, codebook)


def codes_and_codebook(n: int, codes: int, d: int) -> tuple[Any, ...]:
    return torch.randint(codes, (n,)), torch.randn(codes, d, requires_grad=True)


def dispatch_tokens(tokens: Tensor, experts: Tensor, slots: Tensor, count: int, capacity: int) -> Tensor:
    mask = functional.one_hot(experts * capacity + slots, count * capacity).to(tokens.dtype)
    return torch.einsum("sp,sm->pm", mask, tokens).unflatten(0, (count, capacity))


def dispatch_tokens_mended(tokens: Tensor, experts: Tensor, slots: Tensor, count: int, capacity: int) -> Tensor:
    dispatched = tokens.new_zeros(count * capacity, tokens.shape[-1])
    return dispatched.index_copy(0, experts * capacity + slots, tokens).unflatten(0, (count, capacity))


def routed_tokens(tokens: int, experts: int, d: int) -> tuple[Any, ...]:
    places = torch.randperm(tokens)
    return torch.randn(tokens, d, requires_grad=True), places % experts, places // experts, experts, tokens // experts


def transform_groups(vectors: Tensor, matrices: Tensor) -> Tensor:
    return torch.matmul(vectors[:, :, None], matrices).squeeze(2)


def transform_groups_mended(vectors: Tensor, matrices: Tensor) -> Tensor:
    return torch.bmm(vectors.transpose(0, 1), matrices).transpose(0, 1)


def vectors_and_matrices(batch: int, groups: int, d: int) -> tuple[Any, ...]:
    return torch.randn(batch, groups, d, requires_grad=True), torch.randn(groups, d, d, requires_grad=True)


def fourier_layer(inputs: Tensor, coefficients: Tensor) -> Tensor:
    frequencies = torch.arange(1, coefficients.shape[-1] + 1, device=inputs.device)
    angles = inputs[:, None, :, None] * frequencies
    even = (torch.cos(angles) * coefficients[0]).sum((-2, -1))
    odd = (torch.sin(angles) * coefficients[1]).sum((-2, -1))
    return even + odd


def fourier_layer_mended(inputs: Tensor, coefficients: Tensor) -> Tensor:
    frequencies = torch.arange(1, coefficients.shape[-1] + 1, device=inputs.device)
    angles = (inputs[:, :, None] * frequencies).flatten(1)
    waves = torch.stack([torch.cos(angles), torch.sin(angles)])
    return torch.bmm(waves, coefficients.flatten(2).mT).sum(0)


def fourier_arguments(batch: int, inputs: int, outputs: int, frequencies: int) -> tuple[Any, ...]:
    scale = (inputs * frequencies) ** -0.5
    coefficients = (torch.randn(2, outputs, inputs, frequencies) * scale).requires_grad_()
    return torch.randn(batch, inputs, requires_grad=True), coefficients


def mixture_covariances(points: Tensor, means: Tensor, shares: Tensor) -> Tensor:
    centred = points[:, None] - means
    covariances = (shares[..., None, None] * centred[..., :, None] * centred[..., None, :]).sum(0)
    return covariances / shares.sum(0)[:, None, None]


def mixture_covariances_mended(points: Tensor, means: Tensor, shares: Tensor) -> Tensor:
    centred = points - means[:, None]
    covariances = (shares.mT[..., None] * centred).mT @ centred
    return covariances / shares.sum(0)[:, None, None]


def points_and_shares(n: int, components: int, d: int) -> tuple[Any, ...]:
    return torch.randn(n, d), torch.randn(components, d), torch.randn(n, components).softmax(-1)


def sample_gradient_norms(activations: Tensor, output_gradients: Tensor) -> Tensor:
    gradients = torch.einsum("bo,bi->boi", output_gradients, activations)
    return torch.linalg.vector_norm(gradients, dim=(1, 2))


def sample_gradient_norms_mended(activations: Tensor, output_gradients: Tensor) -> Tensor:
    return torch.linalg.vector_norm(activations, dim=1) * torch.linalg.vector_norm(output_gradients, dim=1)


def layer_of_samples(samples: int, inputs: int, outputs: int) -> tuple[Any, ...]:
    return torch.randn(samples, inputs), torch.randn(samples, outputs)


def pair_interactions(fields: Tensor) -> Tensor:
    products = (fields[:, :, None] * fields[:, None]).sum(-1)
    return products.triu(1).sum((1, 2))


def pair_interactions_mended(fields: Tensor) -> Tensor:
    return (fields.sum(1).square() - fields.square().sum(1)).sum(-1) / 2


def embedded_fields(batch: int, fields: int, d: int) -> tuple[Any, ...]:
    return (torch.randn(batch, fields, d, requires_grad=True),)


def score_all_tails(heads: Tensor, relations: Tensor, entities: Tensor) -> Tensor:
    with torch.backends.opt_einsum.flags(enabled=False):  # as where it is not installed
        return torch.einsum("bd,nd,bd->bn", heads, entities, relations)


def score_all_tails_mended(heads: Tensor, relations: Tensor, entities: Tensor) -> Tensor:
    return (heads * relations) @ entities.mT


def triples(batch: int, entities: int, d: int) -> tuple[Any, ...]:
    return tuple(torch.randn(n, d, requires_grad=True) for n in (batch, batch, entities))


PROGRAMS = (
    Program(
        "codes_to_vectors",
        "https://github.com/MishaLaskin/vqvae/issues/2",
        codes_to_vectors,
        codes_and_codebook,
        sizes={"n": 262_144, "codes": 8_192, "d": 64},
        small={"n": 1_000, "codes": 3_000, "d": 32},
        expected=(
            Expected(
                "functional.one_hot(codes, len(codebook)).to(codebook.dtype)",
                now=lambda s: 8 * s["n"] * s["codes"],
                after=lambda s: 4 * s["d"] * max(s["n"], s["codes"]),
            ),
        ),
        mended=codes_to_vectors_mended,
        backward=True,
        note="one_hot makes int64",
    ),
    Program(
        "dispatch_tokens",
        "https://github.com/deepspeedai/DeepSpeed/pull/8195",
        dispatch_tokens,
        routed_tokens,
        sizes={"tokens": 32_768, "experts": 64, "d": 4_096},
        small={"tokens": 2_048, "experts": 16, "d": 64},
        expected=(
            Expected(
                "mask = functional.one_hot(experts * capacity + slots, count * capacity)",
                now=lambda s: 8 * s["tokens"] ** 2,
                after=lambda s: 4 * s["tokens"] * s["d"],
            ),
        ),
        mended=dispatch_tokens_mended,
        backward=True,
        note="experts times capacity is the number of tokens",
    ),
    Program(
        "transform_groups",
        "https://github.com/pytorch/pytorch/issues/154128",
        transform_groups,
        vectors_and_matrices,
        sizes={"batch": 4_096, "groups": 256, "d": 100},
        small={"batch": 128, "groups": 16, "d": 64},
        expected=(
            Expected(
                "torch.matmul(vectors[:, :, None], matrices)",
                now=lambda s: 4 * s["batch"] * s["groups"] * s["d"] ** 2,
                after=lambda s: 4 * s["groups"] * s["d"] * max(s["batch"], s["d"]),
            ),
        ),
        mended=transform_groups_mended,
        backward=True,
        note="matmul copies the matrices for each element of the batch",
    ),
    Program(
        "fourier_layer",
        "https://github.com/GistNoesis/FourierKAN/issues/1",
        fourier_layer,
        fourier_arguments,
        sizes={"batch": 128, "inputs": 3_072, "outputs": 2_000, "frequencies": 300},
        small={"batch": 200, "inputs": 32, "outputs": 128, "frequencies": 8},
        expected=tuple(
            Expected(
                line,
                now=lambda s: 4 * s["batch"] * s["outputs"] * s["inputs"] * s["frequencies"],
                after=lambda s: 8 * s["inputs"] * s["frequencies"] * max(s["batch"], s["outputs"]),
            )
            for line in ("even = (torch.cos(angles) * coefficients[0])", "odd = (torch.sin(angles) * coefficients[1])")
        ),
        mended=fourier_layer_mended,
        backward=True,
    ),
    Program(
        "mixture_covariances",
        "https://github.com/ldeecke/gmm-torch/pull/23",
        mixture_covariances,
        points_and_shares,
        sizes={"n": 100_000, "components": 4, "d": 128},
        small={"n": 2_000, "components": 4, "d": 32},
        expected=(
            Expected(
                "covariances = (shares[..., None, None] * centred[..., :, None]",
                now=lambda s: 4 * s["n"] * s["components"] * s["d"] ** 2,
                after=lambda s: 4 * s["n"] * s["components"] * s["d"],
            ),
        ),
        mended=mixture_covariances_mended,
    ),
    Program(
        "sample_gradient_norms",
        "https://github.com/meta-pytorch/opacus/pull/724",
        sample_gradient_norms,
        layer_of_samples,
        sizes={"samples": 1_024, "inputs": 3_072, "outputs": 768},
        small={"samples": 128, "inputs": 256, "outputs": 256},
        expected=(
            Expected(
                'gradients = torch.einsum("bo,bi->boi", output_gradients, activations)',
                now=lambda s: 4 * s["samples"] * s["inputs"] * s["outputs"],
                after=lambda s: 4 * s["samples"],
            ),
        ),
        mended=sample_gradient_norms_mended,
    ),
    Program(
        "pair_interactions",
        "https://github.com/rixwew/pytorch-fm/issues/22",
        pair_interactions,
        embedded_fields,
        sizes={"batch": 16_384, "fields": 100, "d": 64},
        small={"batch": 128, "fields": 40, "d": 32},
        expected=(
            Expected(
                "products = (fields[:, :, None] * fields[:, None])",
                now=lambda s: 4 * s["batch"] * s["fields"] ** 2 * s["d"],
                after=lambda s: 4 * s["batch"] * s["fields"] * s["d"],
            ),
        ),
        mended=pair_interactions_mended,
        backward=True,
    ),
    Program(
        "score_all_tails",
        "https://github.com/pytorch/pytorch/issues/35299",
        score_all_tails,
        triples,
        sizes={"batch": 1_024, "entities": 40_000, "d": 256},
        small={"batch": 128, "entities": 2_000, "d": 32},
        expected=(
            Expected(
                'return torch.einsum("bd,nd,bd->bn", heads, entities, relations)',
                now=lambda s: 4 * s["batch"] * s["entities"] * s["d"],
                after=lambda s: 4 * s["batch"] * s["entities"],
            ),
        ),
        mended=score_all_tails_mended,
        backward=True,
        note="einsum goes from left to right where opt_einsum is not installed",
    ),
)
