"""The one way to look at the values of a tensor."""

from torch import Tensor

from effops.pytorch import FakeTensor


def observed(number: Tensor, ordinary: float) -> float:
    """The value of a tensor of one element. A fake tensor has no value and gives `ordinary`.

    Predictions run a function on fake tensors to find what it allocates. `ordinary` is the value on common inputs, so
    that predictions are exact for these.
    """
    return ordinary if isinstance(number, FakeTensor) else number.item()
