"""Budgets of memory: a function, or a block, that would take more raises before anything is computed."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from effops.measure import tensors_of
from effops.prediction.inside import caution
from effops.prediction.timeline import Allocation, highest
from effops.programs.capture.assumed_values import AssumedValues
from effops.programs.capture.faked import faked
from effops.programs.capture.observed import Observed
from effops.programs.capture.places import Place
from effops.programs.signatures import IteratorGivenError, signature
from effops.pytorch.calls import FakeTensor, _are_functorch_transforms_active, _get_dispatch_mode, _TorchDispatchModeKey
from effops.pytorch.prediction import _disable_current_modes
from effops.text import (
    EnteredWhenCalled,
    aligned,
    format_bytes,
    format_distinct_bytes,
    parse_bytes,
    tells_wrong_arguments,
)

__all__ = ["LargeLine", "MemoryBudgetExceeded", "MemoryReport", "budget", "predict"]

SHOWN_LINES = 3
LONGEST_SOURCE = 100
MOST_SIGNATURES = 256  # remembered of one function; the oldest goes

HOW_TO_CHECK = (
    '; to check a call write effops.budget("64 MiB").check(fn, *args), or use the fixture memory_budget in a test'
)

P = ParamSpec("P")
R = TypeVar("R")


class LargeLine(NamedTuple):
    """A line, and the bytes of what it made that are there at the peak. `place` is None where no line is known."""

    place: Place | None
    nbytes: int

    def __str__(self) -> str:
        if self.place is None:
            return f"{format_bytes(self.nbytes)} of lines that are not known"
        return f"{self.place}: {format_bytes(self.nbytes)}: {_shortened(self.place.source)}"


@dataclass
class MemoryReport:
    """What a call or a block takes.

    Attributes:
        limit_bytes: the budget; None where there is none
        peak_bytes: the highest sum, at any moment, of live storages that it allocated and does not return
        lines: those that made what is there at that moment, the largest first
        returned_bytes: the results, and gradients; of a block, all that is there at its end
        assumed: checks of values and numbers that were taken to be so, each with its line and how often
        unknown: operators that may allocate more inside than is counted
    """

    limit_bytes: int | None = None
    peak_bytes: int = 0
    lines: Sequence[LargeLine] = ()
    returned_bytes: int = 0
    assumed: Mapping[tuple[str, Place | None], int] | None = None
    unknown: tuple[str, ...] = ()

    @property
    def is_exceeded(self) -> bool:
        return self.limit_bytes is not None and self.peak_bytes > self.limit_bytes

    def __str__(self) -> str:
        shown = [f"peak of what is not returned: {format_bytes(self.peak_bytes)}"]
        shown[0] += f"; returned: {format_bytes(self.returned_bytes)}"
        shown.append(_table(self.lines[:SHOWN_LINES]))
        for (what, place), count in (self.assumed or {}).items():
            shown.append(f"{what}: {count} times, at {place or 'a line that is not known'}")
        if self.unknown:
            shown.append(caution(self.unknown))
        return "\n".join(line for line in shown if line)


class MemoryBudgetExceeded(MemoryError):  # noqa: N818, as MemoryError says what happened
    """A call or a block would take more memory than its budget. Nothing has run.

    Attributes:
        report: what it would take
    """

    def __init__(self, what: str, report: MemoryReport) -> None:
        assert report.limit_bytes is not None
        needed, limit = format_distinct_bytes(report.peak_bytes, report.limit_bytes)
        lines = report.lines[:SHOWN_LINES]
        super().__init__(
            f"budget: {what} must take at most {limit} beyond its arguments and results; it would take {needed}. Of "
            f"these, the largest lines hold at the peak:\n{_table(lines)}\n"
            "`effops.lint` names what to write in their place; or raise the budget"
        )
        self.report = report


def _table(lines: Iterable[LargeLine]) -> str:
    rows = [
        (
            f"  {format_bytes(one.nbytes)}",
            str(one.place or "lines that are not known"),
            _shortened(one.place.source) if one.place else "",
        )
        for one in lines
    ]
    return aligned(rows, left=3) if rows else ""


def _shortened(source: str) -> str:
    return source if len(source) <= LONGEST_SOURCE else f"{source[: LONGEST_SOURCE - 3]}..."


class budget(metaclass=EnteredWhenCalled):
    """A bound on the memory of a function or of a block, checked on fake tensors before anything is computed.

    What counts is the highest sum, at any moment, of live storages that a call allocated and does not return: its
    results, and with backward the gradients, are not counted. Arguments are not counted; what is kept for backward is,
    and so is a new optimizer state. In a `with` block what is alive at its end counts as returned. A backward pass
    counts where it runs inside: one that runs behind a function is not predicted.

    **As a decorator** it predicts once for each signature, raises before anything runs, and then runs for real. The
    signature is: shapes, strides, dtypes, devices and `requires_grad` of tensors; train or eval of all modules among
    the arguments, also in containers; grad mode, inference mode, autocast and its dtype, and the number of threads.
    Other arguments count by value if they can be hashed, else by their type and by the tensors and modules that they
    hold. Globals and what closures hold are not seen. 256 signatures are remembered. A prediction takes about a tenth
    of a second, more where operators are probed. A call whose signature is known takes some 6 us more, and some 2 us
    for each tensor or module inside of a module among the arguments.

    Where a signature is new, the function runs on fake tensors first. So what it does in Python, such as `print` or
    `list.append`, happens twice. Inside of `torch.compile`, of transforms of `torch.func` and of another run on fake
    tensors it runs unchecked.

    **As a context** nothing is computed: inside all is fake, and the budget is checked at the end. Parameters, `.grad`,
    buffers, optimizers, schedulers, scalers and random states come back untouched, but an iterator that was advanced
    inside stays so. Random states are left alone where other threads work meanwhile, since they share them; those
    threads must not train the same parameters. A tensor that was made inside has no values: after the block it raises
    `EscapedTensor`. The report is filled at the end.

    Args:
        limit: bytes, as 6e9, "64 MiB" or "6 GB"; MB are powers of 1000, M and MiB of 1024

    Raises:
        ValueError: the limit is no amount, or 0
        TypeError: what is decorated gives its results later, as a generator does, or an argument is an iterator
        MemoryBudgetExceeded: the memory is more than the budget; it names the three largest lines
        CannotFollow: a line depends on values, which fake tensors do not have

    Example:
        >>> @effops.budget("1 MiB")
        ... def distances(points, centres):
        ...     return (points[:, None] - centres).square().sum(-1)
        >>> distances(torch.zeros(8, 2), torch.zeros(4, 2)).shape
        torch.Size([8, 4])
        >>> distances(torch.zeros(1000, 64), torch.zeros(100, 64))
        Traceback (most recent call last):
            ...
        effops.programs.limits_of_memory.MemoryBudgetExceeded: budget: distances must take at most 1.0 MiB ...
        >>> with effops.budget("64 MiB") as report:
        ...     scores = torch.empty(1000, 1000) @ torch.empty(1000, 10)
        >>> report.peak_bytes, report.returned_bytes
        (4040000, 40000)
    """

    @functools.partial(tells_wrong_arguments, name="budget", remedy=HOW_TO_CHECK)
    def __init__(self, limit: str | float) -> None:
        if callable(limit):
            raise ValueError(
                f"budget: `limit` must be an amount of bytes; got {_name(limit)}; write "
                '`@effops.budget("64 MiB")` above the function'
            )
        self.limit_bytes = parse_bytes(limit, "budget: `limit`")
        if self.limit_bytes == 0:
            raise ValueError(
                f'budget: `limit` must be at least 1 byte; got {limit!r}; give what may be allocated, as "64 MiB"'
            )
        self.entered = threading.local()  # an object may be entered in several threads at once

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """A function that checks the budget, then does the same."""
        if not callable(function) or isinstance(function, type):
            raise TypeError(f"budget: expected a function to decorate; got {function!r}; decorate a function or method")
        inner = inspect.unwrap(function)
        if (
            inspect.isgeneratorfunction(inner)
            or inspect.iscoroutinefunction(inner)
            or inspect.isasyncgenfunction(inner)
        ):
            raise TypeError(
                f"budget: {_name(function)} must return its results; got a generator or coroutine function, which "
                "gives them later; decorate what it calls"
            )
        remembered: dict[Any, MemoryReport] = {}
        lock = threading.Lock()

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if _is_followed_already():
                return function(*args, **kwargs)
            key = _key(function, args, kwargs)
            with lock:
                report = remembered.get(key)
            if report is None:
                report = self._predicted(function, args, kwargs)
                with lock:
                    remembered[key] = report
                    if len(remembered) > MOST_SIGNATURES:
                        del remembered[next(iter(remembered))]
            if report.is_exceeded:
                raise MemoryBudgetExceeded(_name(function), report)
            return function(*args, **kwargs)

        return checked

    def check(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> MemoryReport:
        """What a call takes. It raises as the decorated function does, and computes nothing."""
        report = self._predicted(function, args, kwargs)
        if report.is_exceeded:
            raise MemoryBudgetExceeded(_name(function), report)
        return report

    def _predicted(self, function: Callable[..., Any], args: Any, kwargs: Any) -> MemoryReport:
        report = predict(function, *args, **kwargs)
        report.limit_bytes = self.limit_bytes
        return report

    def __enter__(self) -> MemoryReport:
        if _is_followed_already():
            raise RuntimeError(
                "budget: a block runs on fake tensors by itself; got one inside of another such run, of torch.compile "
                "or of a transform of torch.func; use one block alone"
            )
        run = _Followed()
        run.__enter__()
        report = MemoryReport(self.limit_bytes)
        self.entered.runs = [*getattr(self.entered, "runs", ()), (run, report)]
        return report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        *self.entered.runs, (run, report) = self.entered.runs
        if error is None:
            run.fill(report, run.alive())
        run.__exit__(kind, error, traceback)
        if error is None:
            run.name_unknown(report)
            if report.is_exceeded:
                raise MemoryBudgetExceeded("the block", report)


def predict(function: Callable[..., Any], *args: Any, **kwargs: Any) -> MemoryReport:
    """What a call takes, by the meaning of `budget`, without a limit. The function runs once, on fake tensors.

    Example:
        >>> from effops.programs.limits_of_memory import predict
        >>> predict(torch.cumsum, torch.zeros(1000, 1000).T, 0).peak_bytes
        0
    """
    report = MemoryReport()
    with _Followed() as run:
        result = function(*args, **kwargs)
        run.fill(report, run.returned(result))
        del result
    run.name_unknown(report)
    return report


class _Followed(AbstractContextManager["_Followed"]):
    """A run on fake tensors, and what it takes."""

    def __init__(self) -> None:
        self.observed = Observed()
        self.stack = ExitStack()

    def __enter__(self) -> _Followed:
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            self.values: AssumedValues = stack.enter_context(faked("budget", self.observed, probe=True))
            self.stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stack.__exit__(kind, error, traceback)

    @property
    def records(self) -> list[Allocation]:
        assert self.observed.recorder is not None
        return self.observed.recorder.records

    def alive(self) -> set[int]:
        """The allocations that are there now, by their ids."""
        return {id(one) for one in self.records if one.died is None}

    def returned(self, result: Any) -> set[int]:
        """The allocations of a result, and of the gradients of what is real. These are fake until the run ends."""
        assert self.observed.recorder is not None
        reals = [real for real, _ in self.observed.recorder.fakes.values() if real.is_leaf]
        kept = [*_tensors_of(result), *(real.grad for real in reals)]
        return {id(self.observed.storage_of(one).allocation) for one in kept if isinstance(one, FakeTensor)}

    def fill(self, report: MemoryReport, returned: set[int]) -> None:
        """Tell bytes and lines, before the run ends: then its tensors go, and with them what is alive."""
        records = self.records
        counted = [one for one in records if one.nbytes and id(one) not in returned]
        report.peak_bytes, tick = highest(counted)
        at_peak = self.observed.bytes_by_line(one for one in counted if one.is_there(tick))
        report.lines = [LargeLine(place, nbytes) for place, nbytes in at_peak]
        report.returned_bytes = sum(one.nbytes for one in records if id(one) in returned)
        report.assumed = dict(self.values.assumed)

    def name_unknown(self, report: MemoryReport) -> None:
        """Name what may take more than is counted, after the run has ended, which gathers these names."""
        report.unknown = tuple(sorted(self.observed.unknown))


def _tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a result, of modules in it, and of the attributes of another object."""
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors_of(one)]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    found = tensors_of(value)
    if not found and hasattr(value, "__dict__"):
        found = [one for held in vars(value).values() for one in tensors_of(held)]
    return found


def _is_followed_already() -> bool:
    if torch.compiler.is_compiling():
        return True
    return _are_functorch_transforms_active() or _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None


def _key(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    try:
        return signature(function, args, kwargs)
    except IteratorGivenError as error:
        raise TypeError(
            f"budget: arguments of {_name(function)} must not be iterators; got a {error}, which the prediction "
            "would advance; give a list of what it yields"
        ) from None


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)
