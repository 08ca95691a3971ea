"""How the largest batch, or the peak, answers to each size of a model."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effops.memory.anatomy import anatomy
from effops.memory.batches import BudgetTooSmallError, max_batch_size
from effops.memory.checked import check_count, check_device, check_flags, check_progress
from effops.memory.plot import plot_sweep
from effops.memory.workload import Workload
from effops.prediction.inside import caution
from effops.text import (
    aligned,
    did_you_mean,
    format_bytes,
    parse_bytes,
    tells_wrong_arguments,
    why_not_bound,
)


@dataclass(frozen=True)
class Sweep:
    """What was found for each value of each axis, with the other axes at their base.

    Attributes:
        axes: by axis and value, the largest batch size that fits the budget, 0 if none does; or the bytes at the peak
        base: the value of each axis while another one is varied
        budget_bytes, batch_size: what was given; the other is None
        unknown: operators, in any of the steps, that may allocate more inside than is predicted

    `str()` is a table.
    """

    axes: Mapping[str, Mapping[Any, int]]
    base: Mapping[str, Any]
    budget_bytes: int | None
    batch_size: int | None
    unknown: tuple[str, ...] = ()

    @property
    def quantity(self) -> str:
        return "largest batch" if self.batch_size is None else "peak"

    def __str__(self) -> str:
        rows = [("axis", "value", self.quantity, "of the base")]
        for axis, results in self.axes.items():
            at_base = results.get(self.base[axis])
            for value, result in results.items():
                shown = f"{result:,}" if self.batch_size is None else format_bytes(result)
                rows.append((axis, str(value), shown, f"x {result / at_base:.2f}" if at_base else "-"))
        base = ", ".join(f"{axis}={value}" for axis, value in self.base.items())
        budget = self.budget_bytes
        given = f"batch size {self.batch_size}" if budget is None else f"a budget of {format_bytes(budget)}"
        head = f"{self.quantity} with {given}, each axis varied alone around {base}"
        return "\n\n".join(part for part in (head, aligned(rows), caution(self.unknown)) if part)

    def plot(self, path: str | Path) -> None:
        """Draw it; needs matplotlib. The ending of `path` chooses the format."""
        plot_sweep(self.axes, self.quantity, self.batch_size is not None, path)


@tells_wrong_arguments
def sweep(
    workload_of: Callable[..., Workload],
    axes: Mapping[str, Sequence[Any]],
    budget: str | float | None = None,
    batch_size: int | None = None,
    *,
    base: Mapping[str, Any] | None = None,
    power_of_two: bool = False,
    device: str = "cpu",
    probe: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """Vary each axis alone around a base, and predict the largest batch that fits a budget, or the peak of a batch.

    Args:
        workload_of: the workload of a value for each axis, given by name
        axes: the values of each axis
        budget: bytes of tensors, as a number such as 6e9, or as a text such as "6G": asks for the largest batch
        batch_size: asks for the peak
        base: the value of each axis while another one is varied; an axis that is not given has its first value
        power_of_two: the largest batch is a power of two
        device: "cpu" or "cuda", as in `anatomy`
        probe: as in `anatomy`
        progress: is told of each value, and with a budget of each batch size, before it is tried

    Raises:
        TypeError: an argument is of another type; `workload_of` takes other names, or returns no workload
        ValueError: not exactly one of `budget` and `batch_size` is given, an axis has no values, or `base` has a name
            that is no axis

    Example:
        >>> workload_of = lambda width: effops.memory.Workload(
        ...     model=lambda: torch.nn.Linear(width, width),
        ...     batch=lambda size: torch.randn(size, width),
        ...     loss=lambda model, batch: model(batch).square().mean(),
        ...     optimizer=torch.optim.SGD,
        ... )
        >>> effops.memory.sweep(workload_of, {"width": [64, 256]}, "1 MiB").axes
        {'width': {64: 671, 256: 127}}
    """
    _check_arguments(workload_of, axes, budget, batch_size, base)
    check_device("sweep", device)
    check_flags("sweep", power_of_two=power_of_two, probe=probe)
    check_progress("sweep", progress)
    base_values = {axis: values[0] for axis, values in axes.items()} | dict(base or {})
    _check_names(workload_of, axes, base_values)
    budget_bytes = None if budget is None else parse_bytes(budget, "sweep: `budget`")
    unknown: set[str] = set()

    @functools.cache
    def result(*values: Any) -> int:
        workload = _workload(workload_of, dict(zip(base_values, values)))
        place = ", ".join(f"{axis}={value}" for axis, value in zip(base_values, values))
        if batch_size is not None:
            progress(f"{place}: predicting a step of batch size {batch_size:,}")
            predicted = anatomy(workload, batch_size, device=device, probe=probe)
            unknown.update(predicted.unknown)
            return predicted.peak_bytes
        try:
            largest = max_batch_size(
                workload,
                budget_bytes,
                power_of_two=power_of_two,
                device=device,
                probe=probe,
                progress=lambda text: progress(f"{place}: {text}"),
            )
        except BudgetTooSmallError:
            return 0
        unknown.update(largest.unknown)
        return largest.batch_size

    found = {
        axis: {value: result(*(base_values | {axis: value}).values()) for value in values}
        for axis, values in axes.items()
    }
    return Sweep(found, base_values, budget_bytes, batch_size, tuple(sorted(unknown)))


def _check_names(workload_of: Callable[..., Workload], axes: Mapping[str, Any], base_values: Mapping[str, Any]) -> None:
    if unknown_names := [axis for axis in base_values if axis not in axes]:
        near = did_you_mean(unknown_names[0], axes)
        raise ValueError(f"sweep: `base` must name axes, {', '.join(axes)}; got {', '.join(unknown_names)}{near}")
    if problem := why_not_bound(workload_of, (), dict.fromkeys(axes)):
        raise TypeError(
            f"sweep: `workload_of` must be a function of the axes: {problem}; give lambda {', '.join(axes)}: "
            "Workload(...), or axes of its names"
        )


def _check_arguments(
    workload_of: Any,
    axes: Mapping[str, Sequence[Any]],
    budget: str | float | None,
    batch_size: int | None,
    base: Mapping[str, Any] | None,
) -> None:
    if (budget is None) == (batch_size is None):
        raise ValueError(
            f"sweep: give `budget` for the largest batch or `batch_size` for the peak; got {budget!r}, {batch_size!r}"
        )
    if batch_size is not None:
        check_count("sweep", "batch_size", batch_size)
    if not isinstance(axes, Mapping):
        raise TypeError(f"sweep: `axes` must be a dict of lists; got {type(axes).__name__}; give {{'width': [8, 16]}}")
    if not axes or not all(isinstance(values, Sequence) and values for values in axes.values()):
        raise ValueError(f"sweep: `axes` must have at least one axis, each with values; got {dict(axes)!r}; give lists")
    for axis, values in axes.items():
        if not isinstance(axis, str) or isinstance(values, str):
            raise TypeError(
                f"sweep: `axes` must be lists of values by name; got {axis!r}: {values!r}; give {{'width': [8, 16]}}"
            )
        if unhashable := [value for value in values if not _is_hashable(value)]:
            raise TypeError(
                f"sweep: values of `axes` must be hashable, as results are by value; got {unhashable[0]!r} for "
                f"{axis}; give a tuple, or a name from which `workload_of` makes it"
            )
    if base is not None and not isinstance(base, Mapping):
        got = type(base).__name__
        raise TypeError(f"sweep: `base` must be a dict of a value for each axis; got {got}; give {{'width': 8}}")
    if not callable(workload_of):
        raise TypeError(
            f"sweep: `workload_of` must be a function that returns a workload; got {type(workload_of).__name__}; give "
            f"lambda {', '.join(axes)}: Workload(...)"
        )


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _workload(workload_of: Callable[..., Any], values: Mapping[str, Any]) -> Workload:
    workload = workload_of(**values)
    if not isinstance(workload, Workload):
        raise TypeError(
            f"sweep: `workload_of` must return a Workload; got {type(workload).__name__}; give "
            f"lambda {', '.join(values)}: Workload(...)"
        )
    return workload
