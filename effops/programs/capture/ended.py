"""Tensors of a run on fake tensors that has ended: they have no values, and each use raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from effops.programs.capture.tracked import tracked
from effops.pytorch.calls import FakeTensor, tree_leaves
from effops.pytorch.operators import aten
from effops.pytorch.prediction import FakeTensorMode


class EscapedTensor(RuntimeError):  # noqa: N818, it names the tensor
    """A tensor that was made on fake tensors is used after that run has ended."""


class EndingMode(FakeTensorMode):
    """A fake mode that ends: its tensors have no values, and cannot be used with real ones."""

    def __init__(self, name: str) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False
        self._allow_unsafe_data_ptr_access = False  # what stands at that address is no value
        self.name, self.has_ended = name, False
        self.zeroed: list[Any] = []  # modules and optimizers whose gradients were dropped, which no operator tells

    def end(self, escapes: bool) -> None:
        """Have each use of the mode's tensors raise from now on; also those that are no operators, if any escapes."""
        self.has_ended = True
        for one in tracked() if escapes else ():
            if type(one) is FakeTensor and one.fake_mode is self:
                one.__class__ = _Ended

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.has_ended and func is not torch.ops.prim.device.default:
            shapes = [tuple(one.shape) for one in tree_leaves(args) if isinstance(one, FakeTensor)]
            used = ".item()" if func is aten._local_scalar_dense.default else func
            raise self.escaped(str(used), shapes[0] if shapes else ())
        return super().dispatch(func, types, args, kwargs or {})

    def escaped(self, used: str, shape: tuple[int, ...]) -> EscapedTensor:
        """The error for a use of a tensor of this shape."""
        return EscapedTensor(
            f"{self.name}: a tensor that was made on fake tensors must not be used after them; {used} got one of "
            f"shape {shape}, which has no values; make it again outside"
        )


def _raising(used: str) -> Callable[..., Any]:
    def use(self: _Ended, *args: Any, **options: Any) -> Any:
        raise self.fake_mode.escaped(used, tuple(self.shape))

    return use


class _Ended(FakeTensor):
    """A tensor of a run that has ended."""

    fake_mode: EndingMode
    numpy = _raising(".numpy()")
    __array__ = _raising("numpy.asarray")
    __deepcopy__ = _raising("copy.deepcopy")
    __reduce_ex__ = _raising("a pickle, or copy.copy,")
    __dlpack__ = _raising("__dlpack__")

    def __format__(self, form: str) -> str:
        if form:
            raise self.fake_mode.escaped("a format", tuple(self.shape))
        return repr(self)
