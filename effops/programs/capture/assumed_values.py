"""What a run on fake tensors takes for granted where a program reads values: that its checks hold."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from effops.prediction.known_values import CHECK, READS, KnownValues, is_small
from effops.prediction.recorder import ITEM
from effops.programs.capture.places import CallSites, Place, innermost, place_of, source_line
from effops.programs.capture.unknown_numbers import BRANCH, UnknownNumber
from effops.pytorch.calls import FakeTensor, tree_leaves
from effops.pytorch.operators import aten
from effops.pytorch.prediction import _disable_current_modes, schema_of

HOLDS = {aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default}
FAILS = {aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default}
NOT_FINITE = {aten.isnan.default, aten.isinf.default}
PERMUTATIONS = {aten.randperm.default, aten.randperm.generator}
SIZED_BY_NUMBERS = "aten::arange", "aten::range"  # which need no integers; what PyTorch says of NaN changes by version
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
NAN = "numbers that are read are taken to be NaN"
INTEGER = "an integer that is read from a tensor"
FINITE = aten._amp_foreach_non_finite_check_and_unscale_.default


class CannotFollow(NotImplementedError):  # noqa: N818, it says what a run cannot do
    """A line depends on values, which a run on fake tensors does not have."""


class AssumedValues(KnownValues):
    """Takes checks of values to hold, and counts where. A number that is read is not known: it is NaN."""

    def __init__(self, sites: CallSites) -> None:
        super().__init__()
        self.sites = sites
        self.assumed: Counter[tuple[str, Place | None]] = Counter()
        self.reads_numbers = False  # then NaN may stand for one
        self.is_given_nan = False  # the operator that runs
        self.lends_arrays = False  # which must not be written to

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
        self.is_given_nan = self.reads_numbers and any(map(_is_nan, tree_leaves((args, kwargs))))
        if self.is_given_nan and schema_of(func).name in SIZED_BY_NUMBERS:
            raise self.no_integer()
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

    def _follows(self, func: Any, given: list[Tensor], changes: bool) -> bool:
        return not self.is_given_nan and super()._follows(func, given, changes)

    def _note(self, fake: Tensor, value: Tensor) -> None:
        if not (self.reads_numbers and _has_nan(value)):
            super()._note(fake, value)

    def _read(self, func: Any, args: Any) -> Any:
        if func is not ITEM:
            self.assume("tensors that are compared are taken to be equal")
            return True
        if args[0].dtype is torch.bool:
            raise self.cannot("a branch on a value", OF_BRANCH)
        # NaN is no size and no index, so that an integer that matters is not taken for another one.
        self.assume(NAN)
        self.reads_numbers = True
        place = self._place()
        if place is not None and source_line(place).startswith(BRANCHES):  # `float(loss) > 5` tells nobody
            self.assumed[BRANCH, place] += 1
        return complex("nan") if args[0].is_complex() else float("nan")

    def number(self, own: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """What `tensor.item()` gives, which is `own`."""
        value = own(tensor)
        if not isinstance(value, float) or tensor.layout is not torch.strided or self.knows(tensor):
            return value
        told = lambda what: self.assumed.update([(what, innermost(sys._getframe(1)).place)])  # noqa: E731
        return UnknownNumber(told, self.no_integer)

    def no_integer(self) -> CannotFollow:
        return self.cannot(INTEGER, OF_INTEGER)

    def cannot(self, what: str, remedy: str) -> CannotFollow:
        site = self.sites.current()[0]
        library = None if site.user is None or site.library is None else place_of(site.library)
        called = "" if library is None else f", which calls {library}: {library.source}"
        return CannotFollow(f"{what} cannot be followed without values{at(site.place)}{called}; {remedy}")

    def in_python(self, convert: Callable[..., Any], tensor: Tensor, *args: Any, **options: Any) -> Any:
        """A list or an array of a tensor, if its values are known."""
        if not _is_plain(tensor):
            return convert(tensor, *args, **options)
        with _disable_current_modes():
            value = self._readable(tensor)
            if value is not None:
                result = convert(value, *args, **options)
                # Real tensors stay as they are, and what is written to a copy would be missing in them.
                if isinstance(result, numpy.ndarray) and result.base is not None and self._sources_of(tensor):
                    result.flags.writeable, self.lends_arrays = False, True
                return result
        raise self.cannot(f".{convert.__name__}() of a tensor", OF_ARRAY)

    def shared(self, give: Callable[..., Any], tensor: Tensor, *args: Any, **options: Any) -> Any:
        """A copy of a tensor's memory in the form that `give` has. Who gets it may write to it."""
        if not _is_plain(tensor):
            return give(tensor, *args, **options)
        with _disable_current_modes():
            value = self._readable(tensor)
            if value is not None:
                given = give(value.detach().clone().requires_grad_(value.requires_grad), *args, **options)
                self._forget([tensor])
                return given
        raise self.cannot("memory of a tensor that others share, as by dlpack,", "leave it out here")

    def _readable(self, tensor: Tensor) -> Tensor | None:
        """The values, if they are known; those of a real tensor that nothing has changed are, whatever its size."""
        if not isinstance(tensor, FakeTensor):
            return None if self.is_changed(tensor) else tensor
        value = self._value(tensor)
        return value.detach().requires_grad_() if value is not None and tensor.requires_grad else value

    def _take_to_be(self, fake: Tensor, make: Callable[[Tensor], Tensor]) -> None:
        with _disable_current_modes():
            self._note(fake, make(torch.empty(fake.shape, dtype=fake.dtype)))

    def assume(self, what: str) -> None:
        self.assumed[what, self._place()] += 1

    def _place(self) -> Place | None:
        return self.sites.current()[0].place


def _is_nan(value: Any) -> bool:
    return isinstance(value, (float, complex)) and value != value


def _has_nan(value: Tensor) -> bool:
    with _disable_current_modes():
        return (value.is_floating_point() or value.is_complex()) and bool(value.isnan().any())


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor) and tensor.layout is torch.strided


def at(place: Place | None) -> str:
    return "" if place is None else f", at {place}: {place.source}"


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
