"""Closed forms for the memory of training a transformer: the rough one that is published, and a detailed one.

print(estimate_transformer(8, 8, 8, 32, 256))
print(estimate_transformer(8, 8, 8, 32, 256, formula="detailed", details=Details(attention="fused")))
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from effops.memory.checked import AUTOCAST_DTYPES, check_count, check_flags
from effops.text import aligned, did_you_mean, format_bytes, tells_wrong_arguments

FORMULAS = ("rough", "detailed")
STATES_PER_PARAMETER = {"sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2}
OPTIMIZERS = (*STATES_PER_PARAMETER, "adafactor", "adamw_8bit")
ADAMW_8BIT_BYTES = 2
SINGLE_BYTES = 4
ROUGH_OMISSIONS = (
    "feed-forward networks, normalisations, biases, embeddings and head",
    "dropout, and every activation but one of all pairs and two of all features a block",
    "gradients and optimizer states",
    "temporaries, inputs, allocator and context",
)
DETAILED_OMISSIONS = (
    "embeddings, head, loss, inputs and masks",
    "temporaries of the forward pass, the backward pass and the optimizer",
    "allocator and context",
)


@dataclass(frozen=True)
class Details:
    """What the detailed formula knows besides the sizes.

    Args:
        d_ff: width inside of the feed-forward networks; None for 4 heads x head_dim
        attention: "naive" keeps the weights of all pairs, once more after dropout; "fused" saves no more than a
            statistic of each query
        norm: "fused" is `torch.nn.LayerNorm`; "composed" is made of its parts, as in `effops.memory.models`
        dropout: whether there is dropout: of weights of attention, hidden features and results of sublayers
        optimizer: sgd, sgd_momentum, adam, adamw, adafactor (as `torch.optim.Adafactor`) or adamw_8bit
        mixed_precision: whether `dtype` is autocast's, beside float32 weights, gradients and optimizer states
        device: "cuda" has dropout masks of a byte, and softmax in float32 under autocast; "cpu" has neither
    """

    d_ff: int | None = None
    attention: str = "naive"
    norm: str = "fused"
    dropout: bool = True
    optimizer: str = "adam"
    mixed_precision: bool = False
    device: str = "cuda"

    def __post_init__(self) -> None:
        choices = {
            "attention": ("naive", "fused"),
            "norm": ("fused", "composed"),
            "optimizer": OPTIMIZERS,
            "device": ("cuda", "cpu"),
        }
        for name, expected in choices.items():
            if getattr(self, name) not in expected:
                got = getattr(self, name)
                raise ValueError(
                    f"Details: `{name}` must be one of {', '.join(expected)}; got {got!r}{did_you_mean(got, expected)}"
                )
        check_flags("Details", dropout=self.dropout, mixed_precision=self.mixed_precision)
        if self.d_ff is not None:
            check_count("Details", "d_ff", self.d_ff, "give None for 4 heads x head_dim")


@dataclass(frozen=True)
class Estimate:
    """Bytes by terms; `str()` is a table.

    Attributes:
        formula: its name
        state: terms that do not depend on the batch
        activations: terms that do
        readings: totals by the ways in which the formula has been published; empty for the detailed one
        omissions: what is not counted
    """

    formula: str
    state: Mapping[str, int]
    activations: Mapping[str, int]
    readings: Mapping[str, int]
    omissions: tuple[str, ...]

    @property
    def terms(self) -> dict[str, int]:
        return {**self.state, **self.activations}

    @property
    def state_bytes(self) -> int:
        return sum(self.state.values())

    @property
    def activation_bytes(self) -> int:
        return sum(self.activations.values())

    @property
    def total_bytes(self) -> int:
        """The sum of all terms: more than there is at one instant, as gradients come while activations go."""
        return self.state_bytes + self.activation_bytes

    def __str__(self) -> str:
        readings = {f"read as {reading}": count for reading, count in self.readings.items()}
        counts = {**self.terms, "total": self.total_bytes, **readings}
        rows = [(name, format_bytes(count), f"{count:,} B") for name, count in counts.items()]
        return "\n".join([aligned(rows), *(f"not counted: {omission}" for omission in self.omissions)])


@tells_wrong_arguments
def estimate_transformer(
    blocks: int,
    heads: int,
    head_dim: int,
    batch: int,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    formula: str = "rough",
    details: Details | None = None,
) -> Estimate:
    """Memory of training `blocks` encoder blocks of width `heads x head_dim`, by a closed form.

    The rough formula, of R blocks, N heads, head dimension D, batch B and sequence S, in elements:

        weights 4 R N^2 D^2,   activations R B N S (S + 2 D)

    It has been published as weights + 2 x activations, which is the total here, and as weights + activations; both are
    among the estimate's `readings`, times the bytes of `dtype` (float64 as published).

    The detailed one counts the parameters of blocks `x + dropout(sublayer(norm(x)))` and of a last normalisation, with
    their gradients and optimizer states. It also counts what autograd saves and naive attention keeps, tensor by
    tensor.

    Args:
        blocks, heads, head_dim, batch, seq_len: sizes
        dtype: of the activations, and unless `Details.mixed_precision` of the weights
        formula: "rough" or "detailed"
        details: what the detailed formula knows besides; None for the defaults of `Details`

    Raises:
        ValueError: a size is below 1, `dtype` is not of floating point, there is no such formula, or `details` are
            given to the rough one or do not fit `dtype`

    Example:
        >>> estimate = estimate_transformer(8, 8, 8, 32, 256, torch.float64)
        >>> estimate.readings["weights + activations"], estimate.total_bytes
        (1141899264, 2282749952)
        >>> print(estimate_transformer(1, 2, 8, 4, 16, formula="detailed", details=Details(attention="fused")))
        weights                        12.9 KiB   13,248 B
        gradients                      12.9 KiB   13,248 B
        optimizer states               25.9 KiB   26,496 B
        inputs of normalisations       12.0 KiB   12,288 B
        statistics of normalisations    1.5 KiB    1,536 B
        inputs of projections          12.0 KiB   12,288 B
        queries, keys and values       12.0 KiB   12,288 B
        statistics of attention           512 B      512 B
        hidden features                32.0 KiB   32,768 B
        dropout masks                   6.0 KiB    6,144 B
        total                         127.8 KiB  130,816 B
        not counted: embeddings, head, loss, inputs and masks
        not counted: temporaries of the forward pass, the backward pass and the optimizer
        not counted: allocator and context
    """
    sizes = {"blocks": blocks, "heads": heads, "head_dim": head_dim, "batch": batch, "seq_len": seq_len}
    for name, size in sizes.items():
        check_count("estimate_transformer", name, size)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"estimate_transformer: `dtype` must be a dtype; got {dtype!r}; give torch.float32")
    if not dtype.is_floating_point:
        raise ValueError(f"estimate_transformer: `dtype` must be of floating point; got {dtype}; give torch.float32")
    if formula not in FORMULAS:
        raise ValueError(
            f"estimate_transformer: `formula` must be one of {', '.join(FORMULAS)}; got {formula!r}"
            + did_you_mean(formula, FORMULAS)
        )
    if details is not None and not isinstance(details, Details):
        raise TypeError(f"estimate_transformer: `details` must be a Details; got {type(details).__name__}; make one")
    if formula == "detailed":
        return _detailed(blocks, heads, heads * head_dim, batch, seq_len, dtype, details or Details())
    if details is not None:
        raise ValueError(
            "estimate_transformer: `details` must be None for the rough formula, which knows none; got some; give "
            'formula="detailed"'
        )
    return _rough(blocks, heads, head_dim, batch, seq_len, dtype)


def _rough(blocks: int, heads: int, head_dim: int, batch: int, seq_len: int, dtype: torch.dtype) -> Estimate:
    weights = dtype.itemsize * 4 * blocks * heads**2 * head_dim**2
    activations = dtype.itemsize * blocks * batch * heads * seq_len * (seq_len + 2 * head_dim)
    return Estimate(
        "rough",
        {"weights": weights},
        {"activations": activations, "activations once more": activations},
        {"weights + 2 x activations": weights + 2 * activations, "weights + activations": weights + activations},
        ROUGH_OMISSIONS,
    )


def _detailed(
    blocks: int, heads: int, width: int, batch: int, seq_len: int, dtype: torch.dtype, details: Details
) -> Estimate:
    if details.mixed_precision and dtype not in AUTOCAST_DTYPES:
        raise ValueError(
            f"estimate_transformer: `dtype` must be torch.bfloat16 or torch.float16 with mixed precision; got {dtype}; "
            "give one, or Details(mixed_precision=False)"
        )
    hidden = 4 * width if details.d_ff is None else details.d_ff
    return Estimate(
        "detailed",
        _state(blocks, width, hidden, dtype, details),
        _activations(blocks, heads, width, hidden, batch, seq_len, dtype, details),
        {},
        DETAILED_OMISSIONS,
    )


def _state(blocks: int, width: int, hidden: int, dtype: torch.dtype, details: Details) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states."""
    matrices = [(width, width)] * 4 * blocks + [(width, hidden)] * 2 * blocks
    biases = blocks * (5 * width + hidden)
    vectors = biases + (2 * blocks + 1) * 2 * width
    linear = sum(rows * columns for rows, columns in matrices) + biases
    parameters = linear - biases + vectors
    wide = SINGLE_BYTES if details.mixed_precision else dtype.itemsize
    states = {name: wide * count * parameters for name, count in STATES_PER_PARAMETER.items()}
    states["adafactor"] = wide * (sum(rows + columns for rows, columns in matrices) + vectors)
    states["adamw_8bit"] = ADAMW_8BIT_BYTES * parameters
    copies = {"weights as autocast copies them": dtype.itemsize * linear} if details.mixed_precision else {}
    return {
        "weights": wide * parameters,
        **copies,
        "gradients": wide * parameters,
        "optimizer states": states[details.optimizer],
    }


def _activations(
    blocks: int, heads: int, width: int, hidden: int, batch: int, seq_len: int, dtype: torch.dtype, details: Details
) -> dict[str, int]:
    """Bytes that autograd saves and naive attention keeps."""
    narrow = dtype.itemsize
    wide = SINGLE_BYTES if details.mixed_precision else narrow  # an element of the sum that runs through the blocks
    rows, norms = batch * seq_len, 2 * blocks + 1
    features, inside, pairs = rows * width, rows * hidden, batch * heads * seq_len**2
    on_cuda = details.device == "cuda"
    softmax = wide if on_cuda else narrow

    def mask(itemsize: int) -> int:
        """Bytes an element of what dropout saves."""
        return 0 if not details.dropout else 1 if on_cuda else itemsize

    naive, composed = details.attention == "naive", details.norm == "composed"
    keeps_statistics = not naive and (on_cuda or not details.dropout)  # dropout on a CPU attends in blocks, without any
    inputs = 5 if details.mixed_precision else 3  # queries, keys and values share one; autocast copies it for each
    terms = {
        "inputs of normalisations": norms * wide * features,
        "statistics of normalisations": norms * 2 * max(SINGLE_BYTES, wide) * rows * (not composed),
        # These are x - mean, its product with the scale, the deviation, and that plus epsilon.
        "parts of normalisations": norms * wide * (2 * features + 2 * rows) * composed,
        "inputs of projections": blocks * narrow * inputs * features,
        "queries, keys and values": blocks * narrow * 3 * features,
        "weights of attention": blocks * softmax * pairs * naive,
        "weights of attention, dropped": blocks * softmax * pairs * (naive and details.dropout),
        "weights of attention, rounded": blocks * narrow * pairs * (naive and softmax != narrow),
        "statistics of attention": blocks * max(SINGLE_BYTES, narrow) * batch * heads * seq_len * keeps_statistics,
        "hidden features": blocks * narrow * inside * (2 if details.dropout else 1),
        "dropout masks": blocks * (mask(narrow) * (2 * features + inside) + mask(softmax) * pairs * naive),
    }
    return {name: count for name, count in terms.items() if count}
