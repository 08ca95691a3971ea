"""The `Reference` of an op, found by its public function: inputs to try the op with, and `Bounds` of right results.

A result is judged by its error against float64, in units of a budget, which is the rounding error of a correct variant.
An error ratio of at most 1 passes. Budgets follow from the dtype of the arithmetic and from the error allowed to a
contraction. They do not follow from the error that some variant happens to have.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from effops.dispatch.op import Op, find_op
from effops.numerics.shapes import broadcast_shapes

Shape = tuple[int, ...]

PART_NUMEL = 2**16  # float64 temporaries of so many elements fit the cache, and outweigh Python


@dataclass(frozen=True)
class Bounds:
    """The float64 value of a result and how far below and above it a correct result may lie, elementwise.

    NaN is required where `value` is NaN, and accepted where `may_be_nan` holds. If `dtype` is given, the result must
    have it.
    """

    value: Tensor
    below: Tensor
    above: Tensor
    may_be_nan: Tensor | None = None
    dtype: torch.dtype | None = None

    def error_ratio(self, result: Tensor) -> float:
        """The largest error of `result` in units of its budget. It is infinite for a wrong shape, dtype or NaN."""
        if result.shape != self.value.shape or result.dtype != (self.dtype or result.dtype):
            return float("inf")
        if result.numel() == 0:
            return 0.0
        may_be_nan = self.value.new_zeros((), dtype=torch.bool) if self.may_be_nan is None else self.may_be_nan
        tensors = torch.broadcast_tensors(result.detach(), self.value, self.below, self.above, may_be_nan)
        return max(_error_ratio(*part) for part in _parts(tensors))


def _parts(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Tensors of one shape in parts, so that what is computed of them stays in the cache."""
    shape = tensors[0].shape
    if shape.numel() <= PART_NUMEL:
        yield tensors
        return
    axis = max(range(len(shape)), key=shape.__getitem__)
    for half in zip(*(tensor.chunk(2, axis) for tensor in tensors)):
        yield from _parts(half)


def _error_ratio(result: Tensor, value: Tensor, below: Tensor, above: Tensor, may_be_nan: Tensor) -> float:
    finite = torch.finfo(result.dtype)
    found = result.to(value)
    # The result is rounded once to its own dtype.
    rounding = value.abs() * (finite.eps / 2) + finite.smallest_normal
    error = found - value
    ratio = torch.where(error < 0, -error / (below + rounding), error / (above + rounding))
    overflow = (found.sign() == value.sign()) & found.isinf() & (value.abs() + above + rounding >= finite.max)
    ratio = torch.where(overflow | (found == value), 0.0, ratio)
    ratio = torch.where(found.isnan() & (value.isnan() | may_be_nan), 0.0, ratio)
    return float(torch.nan_to_num(ratio, nan=float("inf")).max())


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
        given: the arguments before the tensors, such as an equation
        core_dims: those of the tensors, where they follow from what is given; see `Op`
        op: the op behind the function, with these arguments given
    """

    function: Callable[..., Tensor]
    cases: Mapping[str, tuple[Shape, ...]]
    sample: Callable[..., tuple[Tensor, ...]]
    workload: Callable[..., tuple[Tensor, ...]]
    sizes: Mapping[str, int]
    bounds: Callable[[Any], Bounds]
    gradient_bounds: Callable[..., tuple[Bounds, ...]]
    given: tuple[Any, ...] = ()
    core_dims: Mapping[str, int] | None = None
    op: Op = field(init=False)

    def __post_init__(self) -> None:
        op = find_op(self.function)
        self.op = op.given(*self.given, core_dims=self.core_dims) if self.given else op
        REFERENCES[op.name] = self

    def sample_case(self, case: str, **options: Any) -> tuple[Tensor, ...]:
        """Arguments with the shapes of a case. The options are those of `sample`."""
        return self.sample(*self.cases[case], **options)


REFERENCES: dict[str, Reference] = {}  # by the op's name


def normal_sample(
    *shapes: Shape,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """Normally distributed tensors of given shapes: the `sample` of an op that takes any values."""
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype) for shape in shapes)


def normal_workload(*axes: str) -> Callable[..., tuple[Tensor, ...]]:
    """The `workload` of an op that takes any values: normally distributed tensors.

    A text for each tensor names its axes, each by the letter of its size or as 1.
    """

    def workload(
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        **sizes: int,
    ) -> tuple[Tensor, ...]:
        lengths = {"1": 1, **sizes}
        shapes = (tuple(lengths[letter] for letter in letters) for letters in axes)
        return normal_sample(*shapes, dtype=dtype, device=device, generator=generator)

    return workload


def worst_error_ratio(expected: Sequence[Bounds], results: Sequence[Tensor | None]) -> float:
    """The largest error of results in units of their budgets. It is infinite if all results are None."""
    found = [(bounds, result) for bounds, result in zip(expected, results, strict=True) if result is not None]
    return max((bounds.error_ratio(result) for bounds, result in found), default=float("inf"))


def exact_dot(loc: Tensor, x: Tensor) -> Tensor:
    """The dot product <loc, x> of every pair, in float64. For float64 inputs it is computed in extended precision."""
    if torch.float64 not in (loc.dtype, x.dtype):
        return torch.einsum("...d,...d->...", loc.double(), x.double())
    import numpy

    dot = numpy.einsum(
        "...d,...d->...", *(t.detach().cpu().double().numpy().astype(numpy.longdouble) for t in (loc, x))
    )
    return torch.tensor(dot.astype(numpy.float64), device=loc.device)


def summed_bounds(value: Tensor, error: Tensor, size: Tensor, terms: int, operand: Tensor, u: float) -> Bounds:
    """The bounds of a gradient that is summed to the shape of its operand.

    Each entry of `value` is already a sum of `terms` terms, and `size` the sum of their absolute values. A sum of n
    terms is off by (4 + n) u times that, since rounding adds up where all terms are alike, and by `error`.
    """
    shape = operand.shape
    value, error, size = (tensor.expand(broadcast_shapes(tensor.shape, shape)) for tensor in (value, error, size))
    terms *= value.numel() // max(1, operand.numel())
    radius = error.sum_to_size(shape) + (4 + terms) * u * size.sum_to_size(shape)
    return Bounds(value.sum_to_size(shape), radius, radius)
