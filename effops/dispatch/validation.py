"""Check the values of operands while `effops.validate()` is entered. Each op says what must hold of its operands."""

import math
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from effops.pytorch.calls import FakeTensor, _are_functorch_transforms_active
from effops.text import EnteredWhenCalled, tells_wrong_arguments


class Condition(NamedTuple):
    """What must hold of the values of an operand.

    Attributes:
        argument: the name of the operand
        expected: what it must be or have
        measured: the numbers that are compared: the values themselves, or lengths or sums of them
        holds: where they are as expected
        remedy: what to do where they are not, or a function that finds out
        got: what is there instead, where that is not a single number
    """

    argument: str
    expected: str
    measured: Tensor
    holds: Tensor
    remedy: str | Callable[[], str]
    got: str = ""


Conditions = Callable[[Any], Iterable[Condition]]  # of a call


def no_conditions(call: Any) -> Iterable[Condition]:
    return ()


NOT_FINITE = "look for what made NaN or infinity"


def finite(argument: str, tensor: Tensor) -> Condition:
    return Condition(argument, "have finite values", tensor, tensor.isfinite(), NOT_FINITE)


def below_infinity(argument: str, tensor: Tensor) -> Condition:
    """The condition of logarithms, of which -inf is that of 0."""
    expected = "have values below infinity, and no NaN"
    return Condition(argument, expected, tensor, tensor < torch.inf, NOT_FINITE)


class _ThreadState(threading.local):
    """How often `validate` is entered in this thread, in any task, for traced code, which can guard on it."""

    def __init__(self) -> None:
        self.entered = 0


@dataclass(eq=False)
class _Entry:
    """One entry into a `validate`."""

    thread: dict[str, Any]  # the attributes of the state of the thread that entered
    is_active: bool = True


_in_context: ContextVar[tuple[_Entry, ...]] = ContextVar("effops_validate", default=())
_in_thread = _ThreadState()


class validate(metaclass=EnteredWhenCalled):
    """Context manager: every op called inside checks the values of its operands, and raises ValueError if one is wrong.

    Without it ops check shapes, dtypes and devices, and wrong values give wrong numbers or NaN: vectors that are not of
    length 1, negative scales, weights in place of their logarithms. With it they raise, and so they do for values that
    are not finite. What an op expects is in its docstring. A mixture takes it that log_weights from 0 on that add up to
    1 are weights, and attention that a mask of floating-point zeros and ones alone is to be boolean.

    It is for finding mistakes: it reads every operand once more, and waits for a GPU. It holds for the current thread
    and asyncio task. Compiled code, `torch.export` and `torch.func.vmap` cannot look at values. An op runs without
    compilation there, or raises: `torch._dynamo.exc.Unsupported` in code compiled with `fullgraph=True`, else
    NotImplementedError. So does compiled code while another task of the thread is inside. Fake and meta tensors have no
    values to check.

    >>> loc, x = torch.eye(3), torch.eye(3).unsqueeze(1)
    >>> with effops.validate():    # doctest: +ELLIPSIS
    ...     effops.power_spherical_log_prob(loc, 2.0, 2 * x)
    Traceback (most recent call last):
        ...
    ValueError: power_spherical_log_prob: `x` must have length 1 along its last dimension; got 2 at (0, 0), ...
    """

    @tells_wrong_arguments
    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __enter__(self) -> None:
        if is_compiling():
            _in_thread.entered += 1
            return
        entry = _Entry(vars(_in_thread))
        entry.thread["entered"] += 1
        self._entries.append(entry)
        _in_context.set((*_in_context.get(), entry))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if is_compiling():
            _in_thread.entered -= 1
            return
        entry = self._entries.pop()  # perhaps in another context or thread, as a generator may be closed
        entry.is_active = False
        entry.thread["entered"] -= 1
        _in_context.set(tuple(other for other in _in_context.get() if other is not entry))


def check_values(function: str, conditions: Conditions, call: Any) -> None:
    """Raise if `validate` is entered and a condition of a call does not hold."""
    if is_compiling():
        if _in_thread.entered:
            raise NotImplementedError(
                f"{function}: effops.validate() needs values, which compiled code cannot look at; call the function "
                "without torch.compile, or outside of validate()"
            )
    elif is_validated() and not any(_has_no_values(tensor) for tensor in call.tensors):
        with torch.no_grad():
            for condition in conditions(call):
                _check(function, condition)


def is_validated() -> bool:
    """Whether a `validate` around this call is entered."""
    entries = _in_context.get()
    return bool(entries) and any(entry.is_active for entry in entries)


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _check(function: str, condition: Condition) -> None:
    try:
        if condition.holds.all():
            return
    except RuntimeError as error:
        if not _are_functorch_transforms_active():
            raise
        raise NotImplementedError(
            f"{function}: effops.validate() needs values, which torch.func.vmap hides; call the function outside of one"
        ) from error
    start = f"{function}: `{condition.argument}` must {condition.expected}; got"
    if condition.got:
        raise ValueError(f"{start} {condition.got}; {condition.remedy}") from None
    wrong = condition.holds.logical_not().nonzero()
    place = tuple(wrong[0].tolist())
    are = "is" if len(wrong) == 1 else "are"
    number, remedy = condition.measured[place].item(), condition.remedy
    if not math.isfinite(number):
        remedy = NOT_FINITE
    elif callable(remedy):
        remedy = remedy()
    raise ValueError(
        f"{start} {number:.9g}"
        f"{f' at {place}' if place else ''}, {len(wrong)} of {condition.holds.numel()} {are} wrong; {remedy}"
    ) from None
