"""Values that follow from numbers alone, computed beside fake tensors, which have none.

Such are the positions that `arange` makes, a mask of ones, or a rate of dropout for each layer. Arguments are taken to
be what checks ask of them, since a step whose check fails has no peak.
"""

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from effops.prediction.shared import Shared
from effops.pytorch.calls import FakeTensor, tree_leaves, tree_map_only
from effops.pytorch.operators import aten
from effops.pytorch.prediction import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    handle_of,
    schema_of,
)

MOST_FLOATS, MOST_INTEGERS = 2**12, 2**20  # elements; positions and masks are integers or booleans
READS = aten._local_scalar_dense.default, aten.equal.default  # they return values to the program, and no tensors
FACTORIES = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.full.default,
    aten.linspace.default,
    aten.logspace.default,
    aten.ones.default,
    aten.zeros.default,
}
FACTORIES_BY_SHAPE = {  # factories that take the shape of a tensor, and no values
    aten.full_like.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones_like.default,
    aten.zeros_like.default,
}
# Checks of arguments, as those of torch.distributions, call this and raise unless it returns true.
CHECK = aten._is_all_true.default
# These make tensors of new constants, whose memory nobody else has.
NEW_CONSTANTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
# These change running statistics, which their schemas do not say.
UNDECLARED_CHANGES = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default}
# These give a tensor other memory or another layout, also to those that share its values.
EXCHANGES_OF_MEMORY = {"aten::set_", "aten::resize_"}


class KnownValues(TorchDispatchMode):
    """Computes beside fake tensors the values that follow from numbers; a program may ask for them.

    Tensors that exist already are read, and never changed: what would change them makes them unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        # The keys of both are storages of fake tensors. `Module.to` cannot exchange a tensor that something refers to.
        # The values that are known, by the layout in which a tensor sees the storage:
        self.known: weakref.WeakKeyDictionary[Any, dict[Any, Tensor]] = weakref.WeakKeyDictionary()
        # The real tensors that may share memory with the storage:
        self.sources: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()
        self.changed: list[Tensor] = []  # real tensors that are out of date: a fake one was changed instead

    def knows(self, tensor: Tensor) -> bool:
        return self._value(tensor) is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*_tensors(args), *_tensors(kwargs.values())]
        real = [] if func in NEW_CONSTANTS else [one for one in given if not isinstance(one, FakeTensor)]
        changes = schema_of(func).is_mutable or func in UNDECLARED_CHANGES
        if not self._follows(func, given, changes):
            if changes:
                self._forget(given)
            result = func(*args, **kwargs)
            self._note_sources(result, real)
            if func is CHECK:
                with _disable_current_modes():
                    self._note(result, torch.tensor(True))
            return result
        with _disable_current_modes():
            values, options = tree_map_only(Tensor, self._value_or_shape, (args, kwargs))
            if func in READS:
                return func(*values, **options)
        result = func(*args, **kwargs)
        self._note_sources(result, real)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        if not all(map(is_small, made)):
            if changes:
                self._forget(given)
            return result
        with _disable_current_modes():
            found = func(*values, **options)
        for fake, value in zip(made, (leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor))):
            self._note(fake, value)
        return result

    def _note(self, fake: Tensor, value: Tensor) -> None:
        self.known.setdefault(fake.untyped_storage(), {})[_layout(fake)] = value

    def _follows(self, func: Any, given: list[Tensor], changes: bool) -> bool:
        """Whether the values of a result follow from known values. `changes` tells whether the operator changes any."""
        if func in FACTORIES_BY_SHAPE:
            return is_small(given[0])
        if func.namespace != "aten" or not (all(map(self.knows, given)) if given else func in FACTORIES):
            return False
        if torch.Tag.inplace_view in func.tags or schema_of(func).name in EXCHANGES_OF_MEMORY:
            return False
        changes_real = changes and any(self._sources_of(one) for one in given)
        return (
            not changes_real and func not in UNDECLARED_CHANGES and torch.Tag.nondeterministic_seeded not in func.tags
        )

    def _value_or_shape(self, tensor: Tensor) -> Tensor:
        value = self._value(tensor)
        if value is None:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return value if isinstance(tensor, FakeTensor) else value.detach().clone()

    def _value(self, tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, FakeTensor):
            return self.known.get(tensor.untyped_storage(), {}).get(_layout(tensor))
        return None if not is_small(tensor) or self.is_changed(tensor) else tensor

    def is_changed(self, tensor: Tensor) -> bool:
        """Whether a real tensor does not have the values that it would have by now."""
        is_real = not isinstance(tensor, FakeTensor) and tensor.layout is torch.strided
        return is_real and _shares_storage(tensor, self.changed)

    def _note_sources(self, result: Any, real: list[Tensor]) -> None:
        for leaf in tree_leaves(result) if real else ():
            if isinstance(leaf, FakeTensor):
                self.sources.setdefault(leaf.untyped_storage(), []).extend(real)

    def _sources_of(self, tensor: Tensor) -> list[Tensor]:
        """The real tensors whose memory a tensor may have."""
        return self.sources.get(tensor.untyped_storage(), []) if isinstance(tensor, FakeTensor) else [tensor]

    def _forget(self, changed: list[Tensor]) -> None:
        """Forget the values of all that shares a storage with changed tensors: the new ones are not known."""
        for tensor in changed:
            self.known.pop(tensor.untyped_storage(), None)
        real = [source for tensor in changed for source in self._sources_of(tensor)]
        self.changed += real
        for storage, sources in self.sources.items() if real else ():
            if any(_shares_storage(source, real) for source in sources):
                self.known.pop(storage, None)


def _shares_storage(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return any(handle_of(tensor.untyped_storage()) == handle_of(other.untyped_storage()) for other in others)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operator, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (one for one in value if isinstance(one, Tensor))


def is_small(tensor: Tensor) -> bool:
    has_fraction = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (MOST_FLOATS if has_fraction else MOST_INTEGERS)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Where in its storage a tensor has its values, and how it reads them."""
    place = tensor.shape, tensor.stride(), tensor.storage_offset()
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _known_to_transformers() -> AbstractContextManager[Any]:
    """Let transformers read the values that are known, so that it leaves out a mask that hides nothing.

    It takes any fake tensor for one without values, and then computes attention as for a batch with padding.
    """
    library = sys.modules.get("transformers.utils.import_utils")
    is_fake_tensor = getattr(library, "is_fake_tensor", None)
    if library is None or is_fake_tensor is None:
        return nullcontext()

    def is_without_values(tensor: Any) -> bool:
        modes = _get_current_dispatch_mode_stack()
        is_known = any(isinstance(mode, KnownValues) and mode.knows(tensor) for mode in modes)
        return bool(is_fake_tensor(tensor)) and not is_known

    return mock.patch.object(library, "is_fake_tensor", is_without_values)


KNOWN_TO_TRANSFORMERS = Shared(_known_to_transformers)
