"""What Python reads of tensors while a program is followed: values that are known, or an error that names the line.

Otherwise PyTorch gives whatever stands in a memory that fake tensors do not have, or what stood in a real tensor before
the program changed it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from effops.prediction.shared import Shared
from effops.programs.capture.assumed_values import AssumedValues
from effops.pytorch.calls import FakeTensor
from effops.pytorch.prediction import _get_current_dispatch_mode_stack

_list_of_fakes, _format_of_fakes = FakeTensor.tolist, FakeTensor.__format__


def follower() -> AssumedValues | None:
    """What follows a program in this thread."""
    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, AssumedValues)), None)


def _list(tensor: FakeTensor) -> Any:
    """What `tolist` gives in a thread that follows a program; PyTorch's own reads each number by itself."""
    values = follower()
    return _list_of_fakes(tensor) if values is None else values.in_python(Tensor.tolist, tensor)


def _formatted(tensor: FakeTensor, form: str) -> str:
    """`f"{loss:.3f}"`, which PyTorch allows plain tensors alone."""
    is_number = tensor.dim() == 0 and follower() is not None
    return format(tensor.item(), form) if is_number else _format_of_fakes(tensor, form)


def _whole(own: Callable[..., Any]) -> Callable[..., Any]:
    """Reads all of a tensor, if its values are known."""

    @functools.wraps(own)
    def read(self: Tensor, *args: Any, **options: Any) -> Any:
        values = follower()
        return own(self, *args, **options) if values is None else values.in_python(own, self, *args, **options)

    return read


def _item(own: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A number, which tells where a branch depends on it."""

    @functools.wraps(own)
    def read(self: Tensor) -> Any:
        values = follower()
        return own(self) if values is None else values.number(own, self)

    return read


def _integer(own: Callable[[Tensor], int]) -> Callable[[Tensor], int]:
    """An integer, which has no NaN that could stand for it."""

    @functools.wraps(own)
    def read(self: Tensor) -> int:
        values = follower()
        # PyTorch says what is wrong with several numbers, and with a fraction as an index.
        is_one = self.numel() == 1 and (own.__name__ == "__int__" or not self.is_floating_point())
        if values is not None and is_one and not self.is_complex() and not values.knows(self):
            raise values.no_integer()
        return own(self)

    return read


def _shared(own: Callable[..., Any]) -> Callable[..., Any]:
    """Gives memory away, of which others may write to a copy. So its values are not known from then on."""

    @functools.wraps(own)
    def given(tensor: Tensor, *args: Any, **options: Any) -> Any:
        values = follower()
        return own(tensor, *args, **options) if values is None else values.shared(own, tensor, *args, **options)

    return given


def _reduced(own: Callable[..., Any]) -> Callable[..., Any]:
    """Pickles a tensor, or copies it by `copy.copy`."""

    @functools.wraps(own)
    def reduced(self: Tensor, protocol: Any) -> Any:
        values = follower()
        if values is not None and values.is_changed(self):
            raise values.cannot("a pickle of a tensor that was changed", "leave it out here")
        return own(self, protocol)

    return reduced


READERS: dict[str, Callable[..., Any]] = {
    "numpy": _whole,
    "__array__": _whole,
    "tolist": _whole,
    "item": _item,
    "__int__": _integer,
    "__index__": _integer,
    "__dlpack__": _shared,
    "__reduce_ex__": _reduced,
}


@contextmanager
def _read_in_python() -> Iterator[None]:
    with ExitStack() as stack:
        for name, reader in READERS.items():
            stack.enter_context(mock.patch.object(Tensor, name, reader(getattr(Tensor, name))))
        to_dlpack = _shared(torch.utils.dlpack.to_dlpack)  # type: ignore[attr-defined]
        for module in (torch, torch.utils.dlpack):
            stack.enter_context(mock.patch.object(module, "to_dlpack", to_dlpack))
        stack.enter_context(mock.patch.multiple(FakeTensor, tolist=_list, __format__=_formatted))
        yield


READ_IN_PYTHON = Shared(_read_in_python)
