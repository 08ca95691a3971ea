"""Follows a step on fake tensors: every storage, its bytes, when it lives, and the operations."""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.random import get_rng_state, set_rng_state

from effops.prediction.allocations import Allocations, Workspace
from effops.prediction.convolutions import CONVOLUTIONS
from effops.prediction.inside import workspace
from effops.prediction.known_values import NEW_CONSTANTS
from effops.prediction.observed_forms import Formulas
from effops.prediction.operations import operations
from effops.prediction.outcomes import OperatorCall, Outcome, result_of
from effops.prediction.probes import lies_otherwise, probed
from effops.prediction.shared import Shared
from effops.prediction.timeline import Allocation, Timeline
from effops.pytorch.calls import FakeTensor, _get_dispatch_mode, _TorchDispatchModeKey, tree_leaves, tree_map_only
from effops.pytorch.missing import present
from effops.pytorch.operators import aten
from effops.pytorch.prediction import (
    DataDependentOutputException,
    FakeTensorMode,
    _no_grad_trunc_normal_,
    clear_cached_data,
    schema_of,
)

ITEM = aten._local_scalar_dense.default
STATE_BYTES = get_rng_state().nbytes  # of the CPU's random number generator


Observer = Callable[[OperatorCall, Any, Workspace, tuple[str, int]], None]


class Recorder(Allocations):
    """Observes a step on the fake tensors of `mode`. It is a mode itself, so that it sees all operators.

    With `probe`, operators of which no rule tells enough are run once by themselves.

    Some attributes tell of the last step: `operations` counts those of each phase and class, `unknown` names the
    operators that may allocate more than is recorded, and `convolution_bytes` are those of the operands and results of
    the largest convolution.

    `observe`, if given, is called after each operator with the call, its result, what it allocated inside, and the
    class and number of its operations.
    """

    def __init__(
        self, mode: FakeTensorMode, cuda: bool = False, probe: bool = False, observe: Observer | None = None
    ) -> None:
        super().__init__()
        self.mode, self.cuda, self.probe, self.observe = mode, cuda, probe and not cuda, observe
        self.tick = 0
        self.records: list[Allocation] = []
        self.living: dict[weakref.ref[Any], Allocation] = {}
        self.phases: list[tuple[str, int]] = []
        self.start = 0
        self.operations: Counter[tuple[str, str]] = Counter()
        self.unknown: set[str] = set()
        self.operator = ""
        self.formulas = Formulas()
        self.remembered: dict[Any, tuple[Outcome, Workspace, tuple[str, int]]] = {}
        self.fakes: dict[int, tuple[Tensor, Tensor]] = {}
        self.convolution_bytes = 0

    def begin(self) -> None:
        """Begin the last step: forget what was counted and named before."""
        self.start = self.tick
        self.operations.clear()
        self.unknown.clear()
        self.convolution_bytes = 0

    def enter(self, phase: str) -> None:
        self.phases.append((phase, self.tick + 1))

    def mark(self, category: str, marked: Iterable[Tensor]) -> None:
        for tensor in marked:
            self.count(tensor)
            self.living[weakref.ref(tensor.untyped_storage())].category = category

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a third of all calls, and the mode below is slow at it
        phase = self.phases[-1][0]
        kwargs = kwargs or {}
        func, formula, held_bytes = self.formulas.unobserved(func, args)
        if formula:
            self.unknown.add(formula)
        self.operator = schema_of(func).name
        call = OperatorCall(func, args, kwargs)
        if call.key is None and func not in NEW_CONSTANTS and _has_real((*args, *kwargs.values())):
            call = OperatorCall(func, *tree_map_only(Tensor, self._fake, (args, kwargs)))
        try:
            result, allocated, (kind, count) = self._run(call)
        except DataDependentOutputException:
            if phase != "optimizer" or func is not ITEM:
                raise
            # In an optimizer, values hardly ever decide what is allocated, so that any value will do.
            return 1.0 if args[0].is_floating_point() else 1
        self._record_inside(allocated.early_bytes)
        for index, leaf in enumerate((result,) if isinstance(result, Tensor) else tree_leaves(result)):
            if isinstance(leaf, Tensor):
                if leaf.layout is not torch.strided:
                    raise NotImplementedError(
                        f"anatomy: tensors must be dense; got one of layout {leaf.layout} from {self.operator}; leave "
                        "`sparse=False` in embeddings, or convert it by `to_dense`"
                    )
                self.count(leaf, nbytes=allocated.result_bytes.get(index))
        self._record_inside(allocated.temporary_bytes + held_bytes)
        if not allocated.known:
            self.unknown.add(self.operator)
        self.operations[phase, kind] += count
        if self.observe is not None:
            self.observe(call, result, allocated, (kind, count))
        if func in CONVOLUTIONS:
            used = (leaf for leaf in tree_leaves((call.args, result)) if isinstance(leaf, Tensor))
            self.convolution_bytes = max(self.convolution_bytes, sum(one.nbytes for one in used))
        # What the mode remembers of a tensor would keep `Module.to` from putting another one in its place.
        converter = self.mode.fake_tensor_converter.meta_converter
        converter.tensor_memo.clear()
        converter.describer.lookup_tensor.clear()
        return result

    def _record_inside(self, nbytes: int) -> None:
        """Record memory that the operator allocates and releases inside."""
        if nbytes:
            self.tick += 2
            self.records.append(Allocation(nbytes, self.tick - 1, self.tick, self.operator))

    def _run(self, call: OperatorCall) -> tuple[Any, Workspace, tuple[str, int]]:
        """The result of a call, the workspace of the operator, and the operations that it makes."""
        if call.key in self.remembered:
            outcome, allocated, counted = self.remembered[call.key]
            return outcome(call.tensors), allocated, counted
        func, args, kwargs = call.func, call.args, call.kwargs
        if "nested" in schema_of(func).name:
            raise NotImplementedError(
                f"anatomy: tensors must be dense; got a nested one from {schema_of(func).name}; leave padding in "
                "place, as `enable_nested_tensor=False` does in nn.TransformerEncoder"
            )
        result = result_of(func, args, kwargs)
        allocated = workspace(func, args, kwargs, result, self.cuda)
        # Convolutions depend on the CPU in many ways.
        if self.probe and (not allocated.known or func in CONVOLUTIONS or lies_otherwise(call, result)):
            allocated = probed(call, result) or allocated
            result = _with_strides(result, allocated.result_strides)
        counted = operations(func, args, kwargs, result)
        made = call.outcome(result)
        if made is not None:
            self.remembered[call.key] = made, allocated, counted
        return result, allocated, counted

    def _fake(self, tensor: Tensor) -> Tensor:
        """A fake tensor in place of a real one, which a step may not change; its bytes are not the step's."""
        if not _is_real(tensor):
            return tensor
        self.check_real(tensor)
        if id(tensor) not in self.fakes:
            fake = self.mode.from_tensor(tensor)
            self.count(fake, nbytes=0)
            self.fakes[id(tensor)] = tensor, fake
        return self.fakes[id(tensor)][1]

    def check_real(self, tensor: Tensor) -> None:
        """Called with each real tensor that an operator is given."""

    def allocate(self, reference: weakref.ref[Any], nbytes: int) -> None:
        super().allocate(reference, nbytes)
        self.tick += 1
        self.living[reference] = Allocation(nbytes, self.tick, None, self.operator)
        self.records.append(self.living[reference])

    def release(self, reference: weakref.ref[Any]) -> None:
        super().release(reference)
        self.tick += 1
        self.living.pop(reference).died = self.tick

    def timeline(self) -> Timeline:
        """The record so far."""
        return Timeline([replace(record) for record in self.records], tuple(self.phases), self.start, self.tick)


def _with_strides(result: Any, strides: Mapping[int, tuple[int, ...]]) -> Any:
    """A result of an operator with other strides of its new tensors, by index."""
    if isinstance(result, Tensor):
        return _laid_out(result, strides.get(0))
    if not strides:
        return result
    return type(result)(_laid_out(leaf, strides.get(index)) for index, leaf in enumerate(result))


def _laid_out(leaf: Any, stride: tuple[int, ...] | None) -> Any:
    if stride is None or leaf.stride() == stride:
        return leaf
    return leaf.new_empty_strided(leaf.shape, stride)


def _is_fake() -> bool:
    return _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None


def _generator_state() -> Tensor:
    if _is_fake():
        state = torch.empty(STATE_BYTES, dtype=torch.uint8, device="cpu")
        if isinstance(state, FakeTensor):  # it is none where modes are on, but kept from dispatching
            return state
    return get_rng_state()


def _set_generator_state(new_state: Tensor) -> None:
    if not isinstance(new_state, FakeTensor):
        set_rng_state(new_state)


# The states of the random number generator are fake tensors where a fake mode is on: checkpointing keeps them. They are
# no results of operators, so that PyTorch offers no other place to exchange them. Other threads get real ones as ever.
GENERATOR_STATES = Shared(
    lambda: mock.patch.multiple(torch, get_rng_state=_generator_state, set_rng_state=_set_generator_state)
)


def _deep_copy(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
    """A copy of the same mode: a copied mode would make other tensors of it in every operator.

    PyTorch's own asks a fake tensor for the address of its memory, which warns, and makes a clone as this one does.
    """
    if id(tensor) in memo or not tensor.is_leaf:  # PyTorch's raises for the latter
        known: Tensor = Tensor.__deepcopy__(tensor, memo)
        return known
    memo.update({id(shared): shared for shared in (tensor.fake_mode, tensor.constant)})
    with torch.no_grad():
        copied = tensor.clone().requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copied.grad = copy.deepcopy(tensor.grad, memo)
    clear_cached_data(tensor)
    copied.__dict__ = copy.deepcopy(tensor.__dict__, memo)
    memo[id(tensor)] = copied
    return copied


_deep_copy_of_pytorch = Tensor.__deepcopy__


def _deep_copy_of_real(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A fake copy of a real tensor where a fake mode is on: PyTorch's asks for real memory, and gets none."""
    if type(tensor) is not Tensor or not tensor.is_leaf or id(tensor) in memo or not _is_fake():
        known: Tensor = _deep_copy_of_pytorch(tensor, memo)
        return known
    with torch.no_grad():
        copied = memo[id(tensor)] = tensor.clone().requires_grad_(tensor.requires_grad)
    return copied


@contextmanager
def _deep_copies() -> Iterator[None]:
    with (
        mock.patch.object(FakeTensor, "__deepcopy__", _deep_copy),
        mock.patch.object(Tensor, "__deepcopy__", _deep_copy_of_real),
    ):
        yield


DEEP_COPIES = Shared(_deep_copies)


def _initialise(tensor: Tensor, *bounds: Any, **options: Any) -> Any:
    """Skip an initialisation that draws until all values are right, which those of fake tensors never are."""
    return tensor if isinstance(tensor, FakeTensor) else _no_grad_trunc_normal_(tensor, *bounds, **options)


SKIPPED_INITIALISATION = Shared(
    lambda: mock.patch.object(torch.nn.init, present(_no_grad_trunc_normal_).__name__, _initialise)
)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _has_real(arguments: Iterable[Any]) -> bool:
    """Whether there is a real tensor among the arguments of an operator, or in a list of them."""
    return any(any(map(_is_real, one)) if isinstance(one, (list, tuple)) else _is_real(one) for one in arguments)
