"""Builds models of fake tensors."""

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch import Tensor, nn

from effops.prediction.shared import Shared
from effops.pytorch import FakeTensor, _no_grad_trunc_normal_


def build_model(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model on the fake tensors of a mode that is on."""
    try:
        with SKIPPED_INITIALISATION:
            model: nn.Module = build()
    except RuntimeError as error:
        if "UninitializedParameter" not in str(error):
            raise
        raise NotImplementedError(
            "Workload: `model` must know the shapes of its parameters; got a lazy module, which takes them from the "
            "first batch; construct the layer with the size of its input"
        ) from error
    return model


def _initialise(tensor: Tensor, *bounds: Any, **options: Any) -> Any:
    """Skip an initialisation that draws until all values are right, which those of fake tensors never are."""
    return tensor if isinstance(tensor, FakeTensor) else _no_grad_trunc_normal_(tensor, *bounds, **options)


SKIPPED_INITIALISATION = Shared(lambda: mock.patch.object(nn.init, "_no_grad_trunc_normal_", _initialise))
