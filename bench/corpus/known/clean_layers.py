"""Clean programs: layers and steps of training, as most programs have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..program import Program

DOCUMENTATION = "https://docs.pytorch.org/docs/stable/generated/"


def call(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def last_output(module: nn.Module, x: Tensor) -> Tensor:
    outputs, _ = module(x)
    return outputs[:, -1]


def encoder_layer(batch: int, length: int, d: int, h: int) -> tuple[Any, ...]:
    layer = nn.TransformerEncoderLayer(d, h, 4 * d, dropout=0.0, batch_first=True)
    return layer, torch.randn(batch, length, d)


def lstm(batch: int, length: int, d: int, h: int) -> tuple[Any, ...]:
    return nn.LSTM(d, h, batch_first=True), torch.randn(batch, length, d)


def convolutions(batch: int, side: int, channels: int) -> tuple[Any, ...]:
    layers = nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers), torch.randn(batch, 3, side, side)


def step_of_adam(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def classifier(batch: int, d: int, h: int, classes: int) -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, h), nn.GELU(), nn.Linear(h, classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, torch.randn(batch, d), torch.arange(batch) % classes


def classify(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.nll_loss((x @ weight.mT).log_softmax(-1), labels)


def few_classes(batch: int, d: int, classes: int) -> tuple[Any, ...]:
    return torch.randn(batch, d), torch.randn(classes, d, requires_grad=True), torch.arange(batch) % classes


def embed(words: Tensor, table: nn.Embedding, normalise: nn.LayerNorm) -> Tensor:
    return normalise(table(words))


def vocabulary(batch: int, length: int, words: int, d: int) -> tuple[Any, ...]:
    return torch.randint(words, (batch, length)), nn.Embedding(words, d), nn.LayerNorm(d)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def heads(batch: int, h: int, length: int, d: int) -> tuple[Any, ...]:
    return tuple(torch.randn(batch, h, length, d, requires_grad=True) for _ in range(3))


def attend_to_few(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


def windows(batch: int, h: int, length: int, d: int) -> tuple[Any, ...]:
    return tuple(torch.randn(batch, h, length, d, requires_grad=True) for _ in range(3))


def head_in_blocks(hidden: Tensor, weight: Tensor, targets: Tensor, tokens: int) -> Tensor:
    def block(hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(hidden @ weight.mT, targets, reduction="sum")

    blocks = zip(hidden.split(tokens), targets.split(tokens), strict=True)
    losses = [checkpoint(block, part, target, use_reentrant=False) for part, target in blocks]
    return torch.stack(losses).sum() / len(hidden)


def head(n: int, d: int, words: int, tokens: int) -> tuple[Any, ...]:
    weight = (torch.randn(words, d) / d**0.5).requires_grad_()
    return torch.randn(n, d, requires_grad=True), weight, torch.arange(n) * 7 % words, tokens


def large_head(hidden: Tensor, layer: nn.Linear) -> Tensor:
    return layer(hidden).argmax(-1)


def next_words(batch: int, d: int, words: int) -> tuple[Any, ...]:
    return torch.randn(batch, d), nn.Linear(d, words, bias=False)


def depthwise(batch: int, channels: int, side: int) -> tuple[Any, ...]:
    return nn.Conv2d(channels, channels, 5, padding=2, groups=channels), torch.randn(batch, channels, side, side)


def gated(x: Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Tensor:
    return down(functional.silu(gate(x)) * up(x))


def gated_layers(tokens: int, d: int, h: int) -> tuple[Any, ...]:
    return torch.randn(tokens, d), nn.Linear(d, h, False), nn.Linear(d, h, False), nn.Linear(h, d, False)


PROGRAMS = (
    Program(
        "encoder_layer",
        DOCUMENTATION + "torch.nn.TransformerEncoderLayer.html",
        call,
        encoder_layer,
        sizes={"batch": 32, "length": 512, "d": 768, "h": 12},
        small={"batch": 32, "length": 256, "d": 128, "h": 4},
        backward=True,
        note="the layer's middle is four times its input, and each element of it is wanted by a matrix product",
    ),
    Program(
        "lstm",
        DOCUMENTATION + "torch.nn.LSTM.html",
        last_output,
        lstm,
        sizes={"batch": 64, "length": 512, "d": 512, "h": 1_024},
        small={"batch": 32, "length": 64, "d": 128, "h": 128},
        backward=True,
        note="the states of all times are kept for backward, the last one is used",
    ),
    Program(
        "convolutions",
        DOCUMENTATION + "torch.nn.Conv2d.html",
        call,
        convolutions,
        sizes={"batch": 64, "side": 224, "channels": 64},
        small={"batch": 16, "side": 96, "channels": 32},
        backward=True,
        note="a convolution of three channels into many makes more than it takes; a pool reduces it at once",
    ),
    Program(
        "step_of_adam",
        "https://docs.pytorch.org/tutorials/beginner/basics/optimization_tutorial.html",
        step_of_adam,
        classifier,
        sizes={"batch": 4_096, "d": 1_024, "h": 4_096, "classes": 10},
        small={"batch": 4_096, "d": 128, "h": 1_024, "classes": 10},
        note="backward and the step are inside",
    ),
    Program(
        "classify",
        "https://github.com/pytorch/examples/blob/main/mnist/main.py",
        classify,
        few_classes,
        sizes={"batch": 60_000, "d": 784, "classes": 10},
        small={"batch": 8_000, "d": 784, "classes": 10},
        backward=True,
        note="the logits are far smaller than the input",
    ),
    Program(
        "embed",
        DOCUMENTATION + "torch.nn.Embedding.html",
        embed,
        vocabulary,
        sizes={"batch": 64, "length": 512, "words": 50_000, "d": 768},
        small={"batch": 32, "length": 256, "words": 4_000, "d": 512},
        backward=True,
        note="the gradient of the table is dense, which its layer offers a switch for",
    ),
    Program(
        "attend",
        DOCUMENTATION + "torch.nn.functional.scaled_dot_product_attention.html",
        attend,
        heads,
        sizes={"batch": 8, "h": 16, "length": 4_096, "d": 64},
        small={"batch": 2, "h": 8, "length": 1_024, "d": 64},
        backward=True,
        note="fused: the scores of all pairs never exist",
    ),
    Program(
        "attend_to_few",
        "https://github.com/microsoft/Swin-Transformer/blob/main/models/swin_transformer.py",
        attend_to_few,
        windows,
        sizes={"batch": 4_096, "h": 4, "length": 49, "d": 32},
        small={"batch": 512, "h": 4, "length": 49, "d": 32},
        backward=True,
        note="windows of 49 positions: the scores are half as large again as a query",
    ),
    Program(
        "head_in_blocks",
        "https://github.com/meta-pytorch/torchtune/pull/1390",
        head_in_blocks,
        head,
        sizes={"n": 8_192, "d": 4_096, "words": 128_256, "tokens": 512},
        small={"n": 1_024, "d": 128, "words": 16_000, "tokens": 128},
        backward=True,
        note="each block is computed again in backward, so that one at a time is kept",
    ),
    Program(
        "large_head",
        DOCUMENTATION + "torch.nn.Linear.html",
        large_head,
        next_words,
        sizes={"batch": 64, "d": 4_096, "words": 128_256},
        small={"batch": 64, "d": 256, "words": 32_000},
        note="the weight is four times the logits",
    ),
    Program(
        "depthwise",
        "https://github.com/facebookresearch/ConvNeXt/blob/main/models/convnext.py",
        call,
        depthwise,
        sizes={"batch": 64, "channels": 96, "side": 56},
        small={"batch": 8, "channels": 64, "side": 96},
        backward=True,
        note="windows overlap, and the convolution reads them where they are",
    ),
    Program(
        "gated",
        "https://github.com/meta-llama/llama/blob/main/llama/model.py",
        gated,
        gated_layers,
        sizes={"tokens": 8_192, "d": 4_096, "h": 11_008},
        small={"tokens": 8_192, "d": 128, "h": 512},
        backward=True,
        note="a product of two results of matrix products, reduced by a third",
    ),
)
