"""Where memory goes in inference: one pass of a decoder, and the generation of text by beam search, taken apart.

Nothing is run: the steps are predicted on fake tensors. "Generation state" is what lives between the calls of the
model: the keys and values of past positions, and the copies that beams make of them.
"""

import torch
from torch import Tensor, nn

import effops
from effops.memory import Workload, anatomy

WORDS, WIDTH, HEADS, LAYERS = 8000, 256, 8, 4
PROMPT, GENERATED, BEAMS, BATCH = 128, 32, 4, 8

Cache = list[tuple[Tensor, Tensor]]


class Layer(nn.Module):
    """Causal attention to past positions and its own, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        query, key, value = self.projection(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = torch.cat((past[0], key), -2), torch.cat((past[1], value), -2)
        attended = effops.attention(query, key, value, is_causal=past is None)
        x = x + self.out(attended.transpose(-3, -2).flatten(-2))
        return x + self.feed_forward(self.norms[1](x)), (key, value)


class Decoder(nn.Module):
    """`forward(words, cache)` gives the logits of the next word and the keys and values of all positions so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, words: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        x, kept = self.embedding(words), []
        for layer, past in zip(self.layers, cache or [None] * LAYERS):
            x, present = layer(x, past)
            kept.append(present)
        return x[:, -1] @ self.embedding.weight.T, kept


def beam_search(model: nn.Module, prompt: Tensor) -> Tensor:
    """The most probable continuations, `BEAMS` of each prompt; keys and values are copied to where their beam goes."""
    batch = prompt.shape[0]
    logits, cache = model(prompt)
    scores, words = logits.log_softmax(-1).topk(BEAMS)
    cache = [(key.repeat_interleave(BEAMS, 0), value.repeat_interleave(BEAMS, 0)) for key, value in cache]
    first = BEAMS * torch.arange(batch).unsqueeze(-1)
    found = words.view(-1, 1)
    for _ in range(GENERATED - 1):
        logits, cache = model(found[:, -1:], cache)
        every = (scores.view(-1, 1) + logits.log_softmax(-1)).view(batch, -1)
        scores, best = every.topk(BEAMS)
        beams = (first + best // WORDS).flatten()
        found = torch.cat((found[beams], (best % WORDS).view(-1, 1)), -1)
        cache = [(key[beams], value[beams]) for key, value in cache]
    return found.view(batch, BEAMS, GENERATED)


def prompts(batch_size: int) -> Tensor:
    return torch.randint(WORDS, (batch_size, PROMPT))


def main() -> None:
    print(f"one pass over {BATCH} x {PROMPT} words:\n")
    print(anatomy(Workload(model=Decoder, batch=prompts), BATCH))
    print(f"\n{GENERATED} more words of each by {BEAMS} beams:\n")
    print(anatomy(Workload(model=Decoder, batch=prompts, generate=beam_search), BATCH, measure=True))
    cache_bytes = 2 * 4 * LAYERS * WIDTH * BATCH * BEAMS * (PROMPT + GENERATED - 1)
    print(f"\nkeys and values of all beams at the end, by their shapes: {cache_bytes:,} bytes")


if __name__ == "__main__":
    main()
