"""A number that a program reads without there being values: NaN, which tells where a branch depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BRANCH = "comparisons with numbers that are read are taken to be false, and the other branch is not seen"
UNEQUAL = "numbers that are read are taken to be unequal to others, and the other branch is not seen"
TRUE = "numbers that are read are taken not to be 0, and the other branch is not seen"
UNSEEN = BRANCH, UNEQUAL, TRUE


class UnknownNumber(float):
    """NaN. What is computed of it is NaN too, and there is no integer of it.

    `decides` is told what a comparison takes for granted; `no_integer` makes the error for what needs an integer.
    """

    decides: Callable[[str], None]
    no_integer: Callable[[], Exception]

    def __new__(cls, decides: Callable[[str], None], no_integer: Callable[[], Exception]) -> UnknownNumber:
        made = super().__new__(cls, "nan")
        made.decides, made.no_integer = decides, no_integer
        return made

    def __bool__(self) -> bool:
        self.decides(TRUE)
        return True

    def __deepcopy__(self, memo: Any) -> UnknownNumber:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:  # what is written is a plain number
        return float, ("nan",)

    def is_integer(self) -> bool:
        self.decides(BRANCH)
        return False

    def __round__(self, digits: Any = None) -> Any:
        if digits is None:
            raise self.no_integer()
        return self

    __hash__ = float.__hash__


def _refused(self: UnknownNumber) -> Any:
    raise self.no_integer()


def _comparison(name: str, assumed: str) -> Any:
    compare = getattr(float, name)

    def compared(self: UnknownNumber, other: object) -> Any:
        result = compare(self, other)
        if result is not NotImplemented:
            self.decides(assumed)
        return result

    return compared


def _arithmetic(name: str) -> Any:
    compute = getattr(float, name)

    def computed(self: UnknownNumber, *others: Any) -> Any:
        result = compute(self, *others)
        return UnknownNumber(self.decides, self.no_integer) if type(result) is float else result

    return computed


for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__"):
    setattr(UnknownNumber, _name, _comparison(_name, BRANCH))
UnknownNumber.__ne__ = _comparison("__ne__", UNEQUAL)  # type: ignore[method-assign]
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _side in ("", "r"):
        setattr(UnknownNumber, f"__{_side}{_name}__", _arithmetic(f"__{_side}{_name}__"))
for _name in ("__neg__", "__pos__", "__abs__"):
    setattr(UnknownNumber, _name, _arithmetic(_name))
for _name in ("__int__", "__trunc__", "__floor__", "__ceil__", "as_integer_ratio"):
    setattr(UnknownNumber, _name, _refused)
