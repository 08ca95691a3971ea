"""The one way to look at the values of a tensor."""

import torch
from torch import Tensor

from effops.pytorch.calls import FakeTensor


def observed(number: Tensor, ordinary: float) -> float:
    """The value of a tensor of one element. A fake tensor has no value and gives `ordinary`.

    Predictions run a function on fake tensors to find what it allocates. `ordinary` is the value on common inputs, so
    that predictions are exact for these.
    """
    return ordinary if isinstance(number, FakeTensor) else number.item()


def is_captured(device: torch.device) -> bool:
    """Whether work on a device goes into a CUDA graph now.

    What the host reads or draws meanwhile is the same in every replay. Where CUDA is not initialised it is not asked:
    fake tensors may be on a device that is not there.
    """
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
