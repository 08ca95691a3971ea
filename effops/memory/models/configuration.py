"""The sizes of the time-series transformers, and their kinds of attention."""

from dataclasses import dataclass

KINDS = ("naive", "fused", "log_sparse")


@dataclass(frozen=True)
class Configuration:
    """What the transformers differ in; the defaults are those of the published search.

    Args:
        d_model: width, a multiple of `heads` and of 2
        layers: number of encoder layers, and of decoder layers
        heads: of each attention
        d_ff: width inside of the feed-forward networks
        seq_len: length of the sequences in a batch
        dropout: of everything but the weights of attention, of which 0.1 are dropped
        attention: of the heads

            naive       the published form: weights of all pairs, which stay on the module as `attn` after dropout
            fused       `effops.attention` with dropout, which never holds queries times keys
            log_sparse  `effops.log_sparse_attention` in self-attention, which thereby becomes causal and takes no
                        mask. Dropout acts on its result, since there are no weights to drop. Attention to the memory
                        of the encoder, which may have another length, is fused.

        d_in, d_out: features of a position of the sequences, and of the result
    """

    d_model: int = 64
    layers: int = 8
    heads: int = 8
    d_ff: int = 128
    seq_len: int = 256
    dropout: float = 0.2
    attention: str = "naive"
    d_in: int = 1
    d_out: int = 1

    def __post_init__(self) -> None:
        for name in ("d_model", "layers", "heads", "d_ff", "seq_len", "d_in", "d_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"Configuration: `{name}` must be at least 1; got {getattr(self, name)}")
        if self.d_model % self.heads or self.d_model % 2:
            raise ValueError(
                f"Configuration: `d_model` must be a multiple of heads={self.heads} and of 2; got {self.d_model}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"Configuration: `dropout` must be at least 0 and below 1; got {self.dropout}")
        if self.attention not in KINDS:
            raise ValueError(f"Configuration: `attention` must be one of {', '.join(KINDS)}; got {self.attention!r}")


PUBLISHED = Configuration()
