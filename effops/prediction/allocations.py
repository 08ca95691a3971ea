"""Counts the bytes that operators on fake tensors would allocate: nothing is computed or allocated."""

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from effops.pytorch.calls import tree_leaves
from effops.pytorch.prediction import FakeTensorMode, TorchDispatchMode

INDUCTOR = "TorchInductor"  # takes the place of an unknown operator: the bytes of what it compiles are a guess


class Bytes(NamedTuple):
    """The bytes that a call needs beyond its inputs: its output, what else it keeps for backward, and temporaries.

    `unknown` names an operator that may allocate more inside than `temporary_bytes`; it is empty if there is none.
    """

    output_bytes: int
    saved_bytes: int
    temporary_bytes: int
    unknown: str = ""


class Workspace(NamedTuple):
    """What a call of an operator allocates inside.

    `temporary_bytes` are allocated and released within the call, beside its results. `result_bytes` tells the storage
    of some results, by index, where fake tensors show another one, and `result_strides` the strides of some. If `known`
    is False, the call may allocate more. `early_bytes` are there before the largest result is, and may be more than
    `temporary_bytes`: a call that makes its result last has released some of its memory by then.
    """

    temporary_bytes: int = 0
    result_bytes: Mapping[int, int] = {}
    known: bool = True
    result_strides: Mapping[int, tuple[int, ...]] = {}
    early_bytes: int = 0


def fake_mode(**settings: Any) -> FakeTensorMode:
    """A mode that remembers no operator in PyTorch's cache, which is that of the process and has no bound."""
    mode = FakeTensorMode(**settings)
    mode.cache_enabled = False
    return mode


class Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that operations create, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.storages: dict[weakref.ref[Any], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count_all(result)
        return result

    def count_all(self, result: Any) -> None:
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)

    def count(self, tensor: Tensor, *, nbytes: int | None = None) -> None:
        """Count the storage of a tensor once, until it is released; `nbytes` stands in for its size."""
        storage = tensor.untyped_storage()
        reference = weakref.ref(storage, self.release)
        if reference not in self.storages:
            self.allocate(reference, storage.nbytes() if nbytes is None else nbytes)

    def allocate(self, reference: weakref.ref[Any], nbytes: int) -> None:
        self.storages[reference] = nbytes
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, reference: weakref.ref[Any]) -> None:
        self.live_bytes -= self.storages.pop(reference)


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
