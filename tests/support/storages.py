"""The storages that a function makes: how large each is, which lines made it, and which are alive at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Line = tuple[str, int]


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors in a structure of values, and the parameters of the modules in it."""
    leaves = tree_leaves(values)
    parameters = [one for leaf in leaves if isinstance(leaf, torch.nn.Module) for one in leaf.parameters()]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] + parameters


def largest(tensors: Iterable[torch.Tensor]) -> int:
    return max((one.untyped_storage().nbytes() for one in tensors), default=0)


@dataclass(frozen=True)
class Storage:
    bytes: int
    lines: frozenset[Line]  # of all functions that were running
    reference: StorageWeakRef

    @property
    def is_alive(self) -> bool:
        return not self.reference.expired()


class Storages(TorchDispatchMode):
    """Records the storages that operators make while it is entered. Those of `arguments` are known before."""

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        references = [StorageWeakRef(one.untyped_storage()) for one in tensors_of(arguments)]
        self.known = {reference.cdata: reference for reference in references}  # a reference keeps its address taken
        self.made: list[Storage] = []
        self.alive: list[Storage] = []
        self.peak_bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = operator(*args, **(kwargs or {}))
        for tensor in tensors_of(results):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in self.known:
                self.known[reference.cdata] = reference
                self.record(Storage(tensor.untyped_storage().nbytes(), running_lines(), reference))
        return results

    def record(self, storage: Storage) -> None:
        self.made.append(storage)
        self.alive = [one for one in self.alive if one.is_alive] + [storage]
        self.peak_bytes = max(self.peak_bytes, sum(one.bytes for one in self.alive))

    def made_by(self, line: Line) -> list[Storage]:
        return [one for one in self.made if line in one.lines]


def running_lines() -> frozenset[Line]:
    frame, lines = sys._getframe(1), set()
    while frame is not None:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return frozenset(lines)
