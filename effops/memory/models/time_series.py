"""Three time-series transformers: encoder and decoder, one of them fed by the other, and the encoder alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from effops.memory.models.configuration import PUBLISHED, Configuration
from effops.memory.models.layers import decoder, embedding, encoder


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
        self.encoder, self.decoder = encoder(configuration), decoder(configuration)
        self.generator, self.head = nn.Linear(width, features), nn.Linear(width, features)
        initialise(self)

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        memory = self.encoder(self.src_embedding(src), src_mask)
        result: Tensor = self.head(self.decoder(self.tgt_embedding(tgt), memory, src_mask, tgt_mask))
        return result.sigmoid()


class Enc2DecTST(TST):
    """`TST` with what the encoder gives as the decoder's input too: the target is taken, and not used."""

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        memory = self.encoder(self.src_embedding(src), src_mask)
        result: Tensor = self.head(self.decoder(memory, memory, src_mask, tgt_mask))
        return result.sigmoid()


class EncoderOnlyTST(nn.Module):
    """The encoder of `TST` with dropout and a linear head; `forward(src, src_mask)`."""

    def __init__(self, configuration: Configuration = PUBLISHED) -> None:
        super().__init__()
        self.src_embedding, self.encoder = embedding(configuration), encoder(configuration)
        self.dropout, self.head = (
            nn.Dropout(configuration.dropout),
            nn.Linear(configuration.d_model, configuration.d_out),
        )
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
