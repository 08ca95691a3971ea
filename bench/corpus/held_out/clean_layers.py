"""Real layers and training steps whose large tensors are right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential

from ..program import Program

PYTORCH = "https://docs.pytorch.org/docs/stable/generated/torch.nn."


def apply_layer(layer: nn.Module, inputs: Tensor) -> Any:
    return layer(inputs)


def encoder_layer(batch: int, length: int, d: int) -> tuple[Any, ...]:
    layer = nn.TransformerEncoderLayer(d, 8, 4 * d, dropout=0.0, batch_first=True)
    return layer, torch.randn(batch, length, d, requires_grad=True)


def sum_of_states(layer: nn.LSTM, inputs: Tensor) -> Tensor:
    states, _ = layer(inputs)
    return states.mean(1)


def recurrent_layer(batch: int, length: int, d: int) -> tuple[Any, ...]:
    return nn.LSTM(d, d, batch_first=True), torch.randn(batch, length, d)


def image_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels)


def image_classifier(batch: int, side: int, classes: int) -> tuple[Any, ...]:
    blocks: list[nn.Module] = []
    for narrow, wide in ((3, 16), (16, 32), (32, 64)):
        blocks += [nn.Conv2d(narrow, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    return model, torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))


def embed_and_normalize(table: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor) -> Tensor:
    return functional.layer_norm(functional.embedding(tokens, table), weight.shape, weight, bias)


def table_and_tokens(vocabulary: int, d: int, batch: int, length: int) -> tuple[Any, ...]:
    table = torch.randn(vocabulary, d, requires_grad=True)
    weight, bias = torch.ones(d, requires_grad=True), torch.zeros(d, requires_grad=True)
    return table, weight, bias, torch.randint(vocabulary, (batch, length))


def wide_linear(n: int, inputs: int, outputs: int) -> tuple[Any, ...]:
    return nn.Linear(inputs, outputs), torch.randn(n, inputs, requires_grad=True)


def residual_blocks(model: nn.Sequential, inputs: Tensor, segments: int) -> Tensor:
    return checkpoint_sequential(model, segments, inputs, use_reentrant=False)


def deep_network(n: int, d: int, layers: int) -> tuple[Any, ...]:
    blocks = [nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks), torch.randn(n, d, requires_grad=True), 4


def rotary_attention(queries: Tensor, keys: Tensor, values: Tensor, angles: Tensor) -> Tensor:
    cosines, sines = angles.cos(), angles.sin()
    queries, keys = (x * cosines + rotate_half(x) * sines for x in (queries, keys))
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def attention_inputs(batch: int, heads: int, length: int, d: int) -> tuple[Any, ...]:
    tensors = (torch.randn(batch, heads, length, d, requires_grad=True) for _ in range(3))
    return *tensors, torch.arange(length)[:, None] / 10_000 ** (torch.arange(d) / d)


def enlarge(model: nn.Module, images: Tensor) -> Tensor:
    return functional.interpolate(model(images), scale_factor=4, mode="bilinear")


def small_images(batch: int, side: int) -> tuple[Any, ...]:
    return nn.Conv2d(3, 3, 3, padding=1), torch.randn(batch, 3, side, side)


def autoencoder_loss(encoder: nn.Module, decoder: nn.Module, images: Tensor) -> Tensor:
    mean, log_scale = encoder(images).chunk(2, dim=-1)
    latent = torch.distributions.Normal(mean, log_scale.exp())
    sample = latent.rsample()
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    likelihood = torch.distributions.Normal(decoder(sample), 1.0).log_prob(images)
    return likelihood.sum(-1) + (prior.log_prob(sample) - latent.log_prob(sample)).sum(-1)


def autoencoder(n: int, pixels: int, d: int) -> tuple[Any, ...]:
    return nn.Linear(pixels, 2 * d), nn.Linear(d, pixels), torch.randn(n, pixels)


def depthwise_block(model: nn.Module, signals: Tensor) -> Tensor:
    return signals + model(signals)


def signals_and_filters(batch: int, channels: int, length: int) -> tuple[Any, ...]:
    filters = nn.Conv1d(channels, channels, 31, padding=15, groups=channels)
    model = nn.Sequential(nn.GroupNorm(8, channels), filters, nn.SiLU(), nn.Conv1d(channels, channels, 1))
    return model, torch.randn(batch, channels, length, requires_grad=True)


PROGRAMS = (
    Program(
        "encoder_layer",
        PYTORCH + "TransformerEncoderLayer.html",
        apply_layer,
        encoder_layer,
        sizes={"batch": 64, "length": 512, "d": 768},
        small={"batch": 16, "length": 64, "d": 256},
        backward=True,
        note="the feed-forward layer is four times as wide as the input, which is the layer's shape",
    ),
    Program(
        "recurrent_layer",
        PYTORCH + "LSTM.html",
        sum_of_states,
        recurrent_layer,
        sizes={"batch": 64, "length": 1_000, "d": 512},
        small={"batch": 32, "length": 200, "d": 128},
        backward=True,
        note="the states of all steps are needed for backward",
    ),
    Program(
        "image_classifier",
        PYTORCH + "BatchNorm2d.html",
        image_loss,
        image_classifier,
        sizes={"batch": 256, "side": 224, "classes": 1_000},
        small={"batch": 8, "side": 96, "classes": 10},
        backward=True,
        note="channels are more than colours: the model's own activations",
    ),
    Program(
        "embed_and_normalize",
        PYTORCH + "Embedding.html",
        embed_and_normalize,
        table_and_tokens,
        sizes={"vocabulary": 50_000, "d": 768, "batch": 64, "length": 512},
        small={"vocabulary": 50_000, "d": 128, "batch": 32, "length": 128},
        backward=True,
        note="a large table, looked up",
    ),
    Program(
        "wide_linear",
        PYTORCH + "Linear.html",
        apply_layer,
        wide_linear,
        sizes={"n": 16, "inputs": 16_384, "outputs": 16_384},
        small={"n": 8, "inputs": 2_048, "outputs": 3_000},
        backward=True,
        note="a large weight, and its gradient",
    ),
    Program(
        "residual_blocks",
        "https://docs.pytorch.org/docs/stable/checkpoint.html",
        residual_blocks,
        deep_network,
        sizes={"n": 65_536, "d": 1_024, "layers": 64},
        small={"n": 3_500, "d": 128, "layers": 16},
        backward=True,
        note="already checkpointed in segments",
    ),
    Program(
        "rotary_attention",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
        rotary_attention,
        attention_inputs,
        sizes={"batch": 8, "heads": 32, "length": 4_096, "d": 128},
        small={"batch": 2, "heads": 8, "length": 1_024, "d": 64},
        backward=True,
        note="broadcasts of a small table of angles, and fused attention",
    ),
    Program(
        "enlarge",
        PYTORCH + "functional.interpolate.html",
        enlarge,
        small_images,
        sizes={"batch": 16, "side": 512},
        small={"batch": 4, "side": 192},
        note="the result is itself sixteen times as large as the input",
    ),
    Program(
        "autoencoder_loss",
        "https://docs.pytorch.org/docs/stable/distributions.html",
        autoencoder_loss,
        autoencoder,
        sizes={"n": 65_536, "pixels": 784, "d": 32},
        small={"n": 2_000, "pixels": 784, "d": 32},
        backward=True,
        note="the same line of Normal.log_prob, but of one value for each pixel",
    ),
    Program(
        "depthwise_block",
        PYTORCH + "Conv1d.html",
        depthwise_block,
        signals_and_filters,
        sizes={"batch": 32, "channels": 512, "length": 16_000},
        small={"batch": 4, "channels": 64, "length": 8_000},
        backward=True,
        note="the convolution makes no tensor of windows",
    ),
)
