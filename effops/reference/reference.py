"""What every op is tried with and judged by: the `Reference` of an op, found by the op's public function."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effops.dispatch.op import Op, find_op
from effops.reference.bounds import Bounds, worst_error_ratio

Shape = tuple[int, ...]


@dataclass
class Reference:
    """What an op is tried with, and where its results may lie. Making one is enough for `reference_of` to find it.

    Attributes:
        function: the op's public function
        cases: shapes of the arguments, by a short name, that every test runs
        sample: makes arguments of given shapes: `sample(*shapes, dtype=, device=, generator=)`
        workload: makes the arguments of the benchmark: `workload(**sizes, dtype=, device=, generator=)`
        sizes: the benchmark's default sizes
        bounds: where a right result lies, from a call
        gradient_bounds: the same for the gradient of each tensor argument, from a call and the upstream gradient
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
        _references[self.function] = self

    def sample_case(self, case: str, **options: Any) -> tuple[Tensor, ...]:
        """Arguments of the shapes of a case; options are those of `sample`."""
        return self.sample(*self.cases[case], **options)


_references: dict[Any, Reference] = {}  # by the op's public function


def reference_of(op: Op | Callable[..., Tensor]) -> Reference:
    """The reference of an op, or of a public function."""
    _import_all()
    op = op if isinstance(op, Op) else find_op(op)
    reference = _references.get(op.function)
    if reference is None:
        raise LookupError(
            f"reference_of: `op` must have a `Reference` in effops/reference/; got {op.name}, which has none; write "
            f"Reference({op.name}, cases=..., sample=..., workload=..., sizes=..., bounds=..., gradient_bounds=...) in "
            "a module there"
        )
    return reference


@functools.cache
def _import_all() -> None:
    """Import every module of the folder, so that its references are made."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"effops.reference.{module.name}")


def error_ratio(op: Op, args: tuple[Any, ...], out: Tensor, **options: Any) -> float:
    """Error of a forward result in units of its budget: right if at most 1."""
    return reference_of(op).bounds(op.prepare(*args, **options)).error_ratio(out)


def gradient_error_ratio(
    op: Op, args: tuple[Any, ...], dout: Tensor, gradients: tuple[Tensor | None, ...], **options: Any
) -> float:
    """Largest error of the gradients of the arguments in units of their budgets: right if at most 1.

    A gradient that was not asked for is None; without any, there is nothing right: infinite.
    """
    return worst_error_ratio(reference_of(op).gradient_bounds(op.prepare(*args, **options), dout), gradients)


def normal_sample(
    *shapes: Shape,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """Normal tensors of given shapes: the `sample` of an op that takes any values."""
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype) for shape in shapes)
