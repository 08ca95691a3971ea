"""What a run on fake tensors takes for granted where a program reads values: that its checks hold."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from effops.prediction.known_values import CHECK, READS, KnownValues, is_small
from effops.prediction.recorder import ITEM
from effops.prediction.shared import Shared
from effops.programs.capture.places import CallSites, Place, innermost, place_of, source_line
from effops.programs.capture.unknown_numbers import BRANCH, UnknownNumber
from effops.pytorch import FakeTensor, _disable_current_modes, _get_current_dispatch_mode_stack

aten = torch.ops.aten
HOLDS = {aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default}
FAILS = {aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default}
NOT_FINITE = {aten.isnan.default, aten.isinf.default}
PERMUTATIONS = {aten.randperm.default, aten.randperm.generator}
BRANCHES = "if ", "elif ", "while "
OF_ARRAY = (
    "to print or log numbers write `[one.item() for one in x.flatten()]`, which are NaN here; for sizes and indices "
    "keep the list or array that the tensor was made of"
)
OF_INTEGER = (
    "take it from shapes, or from the list or array that the tensor was made of; to print or log it write `x.item()`, "
    "which is NaN here"
)
OF_BRANCH = (
    "write torch.where where it chooses between tensors, decide it by shapes, or compare `x.item()`, which is NaN "
    "here: then one branch is followed and the report says so"
)
FINITE = aten._amp_foreach_non_finite_check_and_unscale_.default


class CannotFollow(NotImplementedError):  # noqa: N818, it says what a run cannot do
    """A line depends on values, which a run on fake tensors does not have."""


class AssumedValues(KnownValues):
    """Takes checks of values to hold, and counts where. A number that is read is not known: it is NaN."""

    def __init__(self, sites: CallSites) -> None:
        super().__init__()
        self.sites = sites
        self.assumed: Counter[tuple[str, Place | None]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and not all(self.knows(one) for one in args if isinstance(one, Tensor)):
            return self._read(func, args)
        if func is aten.bincount.default and not self.knows(args[0]) and (least := _least_length(args, kwargs)):
            self.assume("values that are counted are taken to be below `minlength`")
            weights = args[1] if len(args) > 1 else (kwargs or {}).get("weights")
            dtype = torch.int64 if weights is None else torch.promote_types(weights.dtype, torch.float32)
            # An operator that reads what is counted, and gives as many numbers.
            read = args[0] if weights is None else weights
            cut = super().__torch_dispatch__(aten.constant_pad_nd.default, types, (read, [0, least - read.numel()]), {})
            return (
                cut
                if cut.dtype is dtype
                else super().__torch_dispatch__(aten._to_copy.default, types, (cut,), {"dtype": dtype})
            )
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is FINITE:
            self._take_to_be(args[1], torch.zeros_like)
            self.assume("gradients are taken to be finite")
        elif func in PERMUTATIONS and is_small(result):  # any will do
            self._take_to_be(result, lambda one: torch.randperm(len(one), generator=torch.Generator().manual_seed(0)))
        answer = _of_finite_numbers(func, args)
        if answer is not None and is_small(result) and not self.knows(result):
            self._take_to_be(result, lambda one: torch.full_like(one, answer))
            self.assume("numbers are taken to be finite")
        if isinstance(result, FakeTensor) and not self.knows(result) and (func in HOLDS or func in FAILS):
            with _disable_current_modes():
                self._note(result, torch.full(result.shape, func in HOLDS))
            self.assume("checks are taken to hold")
        elif func is CHECK:
            self.assume("checks are taken to hold")
        return result

    def _read(self, func: Any, args: Any) -> Any:
        if func is not ITEM:
            self.assume("tensors that are compared are taken to be equal")
            return True
        if args[0].dtype is torch.bool:
            raise self.cannot("a branch on a value", OF_BRANCH)
        # NaN is no size and no index, so that an integer that matters is not taken for another one.
        self.assume("numbers that are read are taken to be NaN")
        place = self._place()
        if place is not None and source_line(place).startswith(BRANCHES):  # `float(loss) > 5` tells nobody
            self.assumed[BRANCH, place] += 1
        return complex("nan") if args[0].is_complex() else float("nan")

    def number(self, tensor: FakeTensor) -> Any:
        """What `tensor.item()` gives."""
        value = _item_of_fakes(tensor)
        if self.knows(tensor) or not isinstance(value, float):
            return value
        return UnknownNumber(lambda what: self.assumed.update([(what, innermost(sys._getframe(1)).place)]))

    def cannot(self, what: str, remedy: str) -> CannotFollow:
        site = self.sites.current()[0]
        library = None if site.user is None or site.library is None else place_of(site.library)
        called = "" if library is None else f", which calls {library}: {library.source}"
        return CannotFollow(f"{what} cannot be followed without values{at(site.place)}{called}; {remedy}")

    def in_python(self, convert: Callable[..., Any], tensor: Tensor, *args: Any, **options: Any) -> Any:
        """A list or an array of a tensor, if its values are known."""
        with _disable_current_modes():
            value = self._value(tensor)
            if value is not None:
                return convert(value, *args, **options)
        raise self.cannot(f".{convert.__name__}() of a tensor", OF_ARRAY)

    def _take_to_be(self, fake: Tensor, make: Callable[[Tensor], Tensor]) -> None:
        with _disable_current_modes():
            self._note(fake, make(torch.empty(fake.shape, dtype=fake.dtype)))

    def assume(self, what: str) -> None:
        self.assumed[what, self._place()] += 1

    def _place(self) -> Place | None:
        return self.sites.current()[0].place


def at(place: Place | None) -> str:
    return "" if place is None else f", at {place}: {place.source}"


class ValuesInPython(TorchFunctionMode):
    """Gives a program arrays of the values that are known, and names the line where they are not."""

    def __init__(self, values: AssumedValues) -> None:
        super().__init__()
        self.values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_ARRAY and isinstance(args[0], FakeTensor):
            return self.values.in_python(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


TO_ARRAY: set[Any] = {Tensor.numpy, Tensor.__array__}


def _list(tensor: FakeTensor) -> Any:
    """What `tolist` gives in a thread that follows a program; PyTorch's own reads each number by itself."""
    values = _follower()
    return _list_of_fakes(tensor) if values is None else values.in_python(Tensor.tolist, tensor)


def _item(tensor: FakeTensor) -> Any:
    """A number that tells where a branch depends on it."""
    values = _follower()
    return _item_of_fakes(tensor) if values is None else values.number(tensor)


def _formatted(tensor: FakeTensor, form: str) -> str:
    """`f"{loss:.3f}"`, which PyTorch allows plain tensors alone."""
    is_number = tensor.dim() == 0 and _follower() is not None
    return format(tensor.item(), form) if is_number else _format_of_fakes(tensor, form)


def _follower() -> AssumedValues | None:
    """What follows a program in this thread."""
    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, AssumedValues)), None)


_list_of_fakes, _item_of_fakes, _format_of_fakes = FakeTensor.tolist, FakeTensor.item, FakeTensor.__format__
READ_IN_PYTHON = Shared(lambda: mock.patch.multiple(FakeTensor, tolist=_list, item=_item, __format__=_formatted))


def _of_finite_numbers(func: Any, args: Any) -> bool | None:
    """What a question about infinity or NaN gives for finite numbers; None if an operator asks no such question.

    `torch.isfinite` asks whether a tensor equals itself, and whether its size differs from infinity.
    """
    if func in NOT_FINITE:
        return False
    asks = (func is aten.eq.Tensor and args[0] is args[1]) or (func is aten.ne.Scalar and args[1] == float("inf"))
    return True if asks else None


def _least_length(args: Any, kwargs: Any) -> int:
    """The `minlength` of a call of bincount."""
    return int(args[2] if len(args) > 2 else (kwargs or {}).get("minlength", 0))
