"""How the time-series transformers are trained: the parts of a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from effops.memory.models.configuration import PUBLISHED, Configuration
from effops.memory.models.time_series import ARCHITECTURES


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
