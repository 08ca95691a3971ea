"""The one way to look at the values of a tensor."""

from __future__ import annotations

from torch import Tensor

from effops.pytorch import FakeTensor


def observed(number: Tensor, ordinary: float) -> float:
    """The value of a tensor of one element. A fake tensor has none: its value is the ordinary one.

    What a function allocates is found by running it on fake tensors. So `ordinary` is the answer on common inputs, for
    which the prediction shall be exact.
    """
    return ordinary if isinstance(number, FakeTensor) else number.item()
