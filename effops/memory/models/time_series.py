"""Three time-series transformers, and how they are trained: the parts of a workload."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from effops.memory.models.layers import PUBLISHED, Configuration, DecoderLayer, Stack, embedding, encoder
from effops.text import did_you_mean


class TST(nn.Module):
    """A time-series transformer: an encoder of the source, and a decoder of the target, with a sigmoid at the end.

    `forward(src, tgt, src_mask, tgt_mask)` takes `(batch, length, d_in)` and masks that broadcast to `(batch, queries,
    keys)`, 0 where a pair takes no part, or None; the result is `(batch, length of tgt, d_out)`. As published the
    model has a `generator` that it never calls, whose parameters get neither gradients nor optimizer states.

    Example:
        >>> model = TST(Configuration(layers=2, attention="fused"))
        >>> model(torch.rand(3, 100, 1), torch.rand(3, 80, 1)).shape
        torch.Size([3, 80, 1])
    """

    def __init__(self, configuration: Configuration = PUBLISHED) -> None:
        super().__init__()
        width, features = configuration.d_model, configuration.d_out
        self.src_embedding, self.tgt_embedding = embedding(configuration), embedding(configuration)
        self.encoder, self.decoder = encoder(configuration), Stack(DecoderLayer, configuration)
        self.generator, self.head = nn.Linear(width, features), nn.Linear(width, features)
        initialise(self)

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        memory = self.encoder(self.src_embedding(src), src_mask)
        return torch.sigmoid(self.head(self.decoder(self.tgt_embedding(tgt), memory, src_mask, tgt_mask)))


class Enc2DecTST(TST):
    """`TST` with what the encoder gives as the decoder's input too: the target is taken, and not used."""

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        memory = self.encoder(self.src_embedding(src), src_mask)
        return torch.sigmoid(self.head(self.decoder(memory, memory, src_mask, tgt_mask)))


class EncoderOnlyTST(nn.Module):
    """The encoder of `TST` with dropout and a linear head; `forward(src, src_mask)`."""

    def __init__(self, configuration: Configuration = PUBLISHED) -> None:
        super().__init__()
        self.src_embedding, self.encoder = embedding(configuration), encoder(configuration)
        self.dropout = nn.Dropout(configuration.dropout)
        self.head = nn.Linear(configuration.d_model, configuration.d_out)
        initialise(self)

    def forward(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        result: Tensor = self.head(self.dropout(self.encoder(self.src_embedding(src), src_mask)))
        return result


def initialise(model: nn.Module) -> None:
    """Draw matrices as Glorot and Bengio do, uniformly."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)


ARCHITECTURES: Mapping[str, Callable[[Configuration], nn.Module]] = {
    "tst": TST,
    "encoder_only_tst": EncoderOnlyTST,
    "enc2dec_tst": Enc2DecTST,
}


class Parts(TypedDict):
    """The callables that a workload is made of, by the names of its arguments."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def workload_parts(architecture: str, configuration: Configuration = PUBLISHED) -> Parts:
    """Training of one of `ARCHITECTURES` as in the published search: smooth L1 loss, Adam, masks of ones.

    A batch is a tuple of the arguments of the model's `forward` and the targets `(batch, seq_len, d_out)`. Masks are
    `(batch, 1, seq_len)`; a batch for log-sparse attention has none. Tensors are made on PyTorch's default device.

    Raises:
        ValueError: there is no such architecture

    Example:
        >>> parts = workload_parts("encoder_only_tst", Configuration(layers=1))
        >>> parts["loss"](parts["model"](), parts["batch"](4)).shape
        torch.Size([])
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"workload_parts: `architecture` must be one of {', '.join(ARCHITECTURES)}; got {architecture!r}"
            + did_you_mean(architecture, ARCHITECTURES)
        )
    sequences = 1 if architecture == "encoder_only_tst" else 2
    masks = 0 if configuration.attention == "log_sparse" else sequences
    length = configuration.seq_len

    def batch(batch_size: int) -> tuple[Tensor, ...]:
        return (
            *(torch.rand(batch_size, length, configuration.d_in) for _ in range(sequences)),
            *(torch.ones(batch_size, 1, length) for _ in range(masks)),
            torch.rand(batch_size, length, configuration.d_out),
        )

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        *inputs, targets = batch
        return nn.functional.smooth_l1_loss(model(*inputs), targets)

    return Parts(
        model=lambda: ARCHITECTURES[architecture](configuration), batch=batch, loss=loss, optimizer=torch.optim.Adam
    )
