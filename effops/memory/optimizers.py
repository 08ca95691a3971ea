"""Optimizers of other libraries whose memory is predicted."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

BLOCK_SIZE = 256
LEAST_ELEMENTS = 4096
MAP_ELEMENTS = 256


class AdamW8bit(Optimizer):
    """The states of bitsandbytes' `AdamW8bit`, to be predicted: nothing is updated.

    A parameter of 4096 elements or more has two bytes an element, and two float32 for each block of 256; a smaller one
    has two float32 an element. All share two maps of 256 float32. Its kernel needs no temporaries.

    Source: bitsandbytes, "8-bit optimizers"; Dettmers et al. 2021, arXiv:2110.02861, with larger blocks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        trained = (parameter for group in self.param_groups for parameter in group["params"])
        for parameter in trained:
            if parameter.grad is not None and not self.state[parameter]:
                self.state[parameter] = self._states(parameter)

    def _states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter.numel() < LEAST_ELEMENTS:
            return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
        maps = next((state for state in self.state.values() if "qmap1" in state), None)
        blocks = -(-parameter.numel() // BLOCK_SIZE)
        found: dict[str, Tensor] = {}
        for order in ("1", "2"):
            found["state" + order] = torch.zeros_like(parameter, dtype=torch.uint8)
            found["absmax" + order] = parameter.new_zeros(blocks, dtype=torch.float32)
            name = "qmap" + order
            found[name] = parameter.new_zeros(MAP_ELEMENTS, dtype=torch.float32) if maps is None else maps[name]
        return found
