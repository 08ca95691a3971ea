"""The `Reference` of an op, found by its public function: inputs to try the op with, and bounds of right results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from effops.dispatch.op import Op, find_op
from effops.reference.bounds import Bounds

Shape = tuple[int, ...]


@dataclass
class Reference:
    """The inputs to try an op with, and the bounds of right results. `reference_of` finds every instance.

    Attributes:
        function: the op's public function
        cases: shapes of the arguments that every test runs, each under a short name
        sample: makes arguments of given shapes: `sample(*shapes, dtype=, device=, generator=)`
        workload: makes the arguments of the benchmark: `workload(**sizes, dtype=, device=, generator=)`
        sizes: the benchmark's default sizes
        bounds: takes a call, and returns the bounds of a right result
        gradient_bounds: takes a call and the upstream gradient, and returns the bounds of the gradient of each tensor
            argument
        op: the op behind the function
    """

    function: Callable[..., Tensor]
    cases: Mapping[str, tuple[Shape, ...]]
    sample: Callable[..., tuple[Tensor, ...]]
    workload: Callable[..., tuple[Tensor, ...]]
    sizes: Mapping[str, int]
    bounds: Callable[[Any], Bounds]
    gradient_bounds: Callable[..., tuple[Bounds, ...]]
    op: Op = field(init=False)

    def __post_init__(self) -> None:
        self.op = find_op(self.function)
        REFERENCES[self.function] = self

    def sample_case(self, case: str, **options: Any) -> tuple[Tensor, ...]:
        """Arguments with the shapes of a case. The options are those of `sample`."""
        return self.sample(*self.cases[case], **options)


REFERENCES: dict[Any, Reference] = {}  # the reference of each public function


def normal_sample(
    *shapes: Shape,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """Normally distributed tensors of given shapes: the `sample` of an op that takes any values."""
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype) for shape in shapes)
