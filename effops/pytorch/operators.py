"""Operators by name, also those that the installed PyTorch lacks: ATen's, and oneDNN's, which not every build has.

`aten.add.Tensor` is an overload, and `aten.add.packet` stands for all of them. A missing one equals no operator, and
raises when it is called. So a table may have operators that some versions lack.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from effops.pytorch.missing import Lacking


class MissingOperator:
    """Stands for an operator that the installed PyTorch lacks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}, which torch {torch.__version__} lacks>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise Lacking("programs of this kind", self.name).error


class _Overloads:
    """The overloads of one operator, and `packet`, which PyTorch calls its overload packet."""

    # Else a table could have it in place of a packet, and would never find one.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, library: str, name: str) -> None:
        self._library, self._name = library, name

    def __getattr__(self, overload: str) -> Any:
        if overload.startswith("__"):
            raise AttributeError(overload)
        try:
            packet = getattr(getattr(torch.ops, self._library), self._name)
            found = packet if overload == "packet" else getattr(packet, overload)
        except AttributeError:
            found = MissingOperator(f"{self._library}.{self._name}.{overload}")
        setattr(self, overload, found)
        return found


class _Operators:
    """The operators of a library by name, as `torch.ops.aten`."""

    def __init__(self, library: str) -> None:
        self._library = library

    def __getattr__(self, name: str) -> _Overloads:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Overloads(self._library, name)
        setattr(self, name, found)
        return found


aten: Any = _Operators("aten")
onednn: Any = _Operators("mkldnn")


# Each of these computes its elements one by one, though PyTorch does not say so.
_UNTAGGED = {
    aten.eq_.packet,
    aten.floor_divide.packet,
    aten.floor_divide_.packet,
    aten.ge_.packet,
    aten.gt_.packet,
    aten.le_.packet,
    aten.lt_.packet,
    aten.ne_.packet,
    # of the others torch 2.11 alone does not say so
    aten.celu_.packet,
    aten.elu_.packet,
    aten.hardsigmoid_.packet,
    aten.hardtanh_.packet,
    aten.leaky_relu.packet,
    aten.leaky_relu_.packet,
    aten.selu_.packet,
}


def is_elementwise(func: Any) -> bool:
    """Whether an overload of an operator computes each element of its result from the elements at its place."""
    return torch.Tag.pointwise in func.tags or func.overloadpacket in _UNTAGGED
