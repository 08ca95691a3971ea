"""Builds models of fake tensors."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from effops.prediction.named_devices import OneDeviceRecorder
from effops.prediction.recorder import SKIPPED_INITIALISATION


class StepRecorder(OneDeviceRecorder):
    """Follows a training step, and refuses what requires gradients and was not made by its model."""

    def check_real(self, tensor: Tensor) -> None:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "Workload: what requires gradients must be made by `model`; got a tensor of shape "
                f"{tuple(tensor.shape)} that exists already; construct it inside of the function"
            )


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
