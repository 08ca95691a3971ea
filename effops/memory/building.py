"""Builds models of fake tensors.

What a constructor computes from numbers alone keeps its values, such as a rate of dropout for each layer.
"""

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from effops.prediction.shared import Shared
from effops.pytorch import (
    FakeTensor,
    TorchDispatchMode,
    _disable_current_modes,
    _no_grad_trunc_normal_,
    tree_leaves,
    tree_map_only,
)

MOST_ELEMENTS = 4096
aten = torch.ops.aten
NUMBER_FACTORIES = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.full.default,
    aten.linspace.default,
    aten.logspace.default,
    aten.ones.default,
    aten.zeros.default,
}


def build_model(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model. It may ask for values that follow from numbers, in tensors of up to `MOST_ELEMENTS`."""
    try:
        with _KnownValues(), SKIPPED_INITIALISATION:
            model: nn.Module = build()
    except RuntimeError as error:
        if "UninitializedParameter" not in str(error):
            raise
        raise NotImplementedError(
            "Workload: `model` must know the shapes of its parameters; got a lazy module, which takes them from the "
            "first batch; construct the layer with the size of its input"
        ) from error
    return model


def _initialise(tensor: Tensor, *bounds: Any, **options: Any) -> Any:
    """Skip an initialisation that draws until all values are right, which those of fake tensors never are."""
    return tensor if isinstance(tensor, FakeTensor) else _no_grad_trunc_normal_(tensor, *bounds, **options)


SKIPPED_INITIALISATION = Shared(lambda: mock.patch.object(nn.init, "_no_grad_trunc_normal_", _initialise))


class _KnownValues(TorchDispatchMode):
    """Computes beside fake tensors the values that follow from numbers."""

    def __init__(self) -> None:
        super().__init__()
        # Of the storage of fake tensors, by their layouts. What refers to a tensor itself would keep `Module.to` from
        # putting another one in its place.
        self.known: weakref.WeakKeyDictionary[Any, dict[Any, Tensor]] = weakref.WeakKeyDictionary()
        self.changed: list[Tensor] = []  # real tensors that are out of date: a fake one was changed instead

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        follows = all(self._value(tensor) is not None for tensor in given) if given else func in NUMBER_FACTORIES
        changes_real = func._schema.is_mutable and not all(isinstance(tensor, FakeTensor) for tensor in given)
        if not follows or changes_real or torch.Tag.nondeterministic_seeded in func.tags:
            if func._schema.is_mutable:
                self._forget(given)
            return func(*args, **kwargs)
        with _disable_current_modes():
            arguments, options = tree_map_only(Tensor, self._value, (args, kwargs))
            value = func(*arguments, **options)
        if func is aten._local_scalar_dense.default:
            return value
        result = func(*args, **kwargs)
        for fake, real in zip(tree_leaves(result), tree_leaves(value)):
            if isinstance(real, Tensor) and real.numel() <= MOST_ELEMENTS:
                self.known.setdefault(fake.untyped_storage(), {})[_layout(fake)] = real
        return result

    def _value(self, tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, FakeTensor):
            return self.known.get(tensor.untyped_storage(), {}).get(_layout(tensor))
        is_changed = any(tensor is other for other in self.changed)
        return None if is_changed or tensor.numel() > MOST_ELEMENTS else tensor

    def _forget(self, changed: list[Tensor]) -> None:
        """Forget the values of all that shares a storage with changed tensors: the new ones are not known."""
        self.changed += [tensor for tensor in changed if not isinstance(tensor, FakeTensor)]
        for tensor in changed:
            self.known.pop(tensor.untyped_storage(), None)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """What tells the values of a tensor, beside those of its storage."""
    place = tensor.shape, tensor.stride(), tensor.storage_offset()
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()
