"""Record which ops were called, by which variants, and what these calls need."""

import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from effops.dispatch.op import Call, Cost, Op, Variant, find_op
from effops.numerics.precision import without_autocast
from effops.prediction.allocations import fake_mode
from effops.prediction.inside import told_temporary_bytes
from effops.text import EnteredWhenCalled, aligned, format_bytes, tells_wrong_arguments


@dataclasses.dataclass(frozen=True)
class _Outline:
    """What a prediction needs to know of a tensor. It keeps no memory alive."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "_Outline":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def stand_in(self) -> Tensor:
        return torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad
        )


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """A call of an op that ran.

    Attributes:
        op: the name of the op
        variant: the name of the variant that ran
        shapes: the shapes of its tensor arguments, by name
        dtype: the dtype of the result
    """

    op: str
    variant: str
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    _outline: Call = dataclasses.field(repr=False)
    _grad: bool = dataclasses.field(repr=False)

    @functools.cached_property
    def cost(self) -> Cost | None:
        """What the forward pass of the call is predicted to need beyond its inputs; None where nothing predicts it."""
        if any(type(size) is not int for shape in self.shapes.values() for size in shape):  # traced, of any size
            return None
        with fake_mode():
            call = self._outline.map_tensors(_Outline, _Outline.stand_in)
        call.made = self._outline.made  # which tensors are the call's own: stand-ins do not tell
        with torch.set_grad_enabled(self._grad), without_autocast(call.device):
            return find_op(self.op).variants[self.variant].cost(call)


class Calls(list[RecordedCall]):
    """The calls that were recorded, in their order. `str()` is a table, where calls that are alike share a line."""

    def __str__(self) -> str:
        if not self:
            return "no op was called"
        lines = Counter(_cells(call) for call in self)
        header = ("calls", "op", "variant", "dtype", "output", "saved", "temporary", "shapes")
        rows = [(str(count), *cells) for cells, count in lines.items()]
        return f"bytes predicted, of one call, beyond the inputs\n{aligned([header, *rows], left=len(header))}"


def _cells(call: RecordedCall) -> tuple[str, ...]:
    cost = call.cost
    known = ("-",) * 3
    if cost is not None:
        temporary = told_temporary_bytes(cost.temporary_bytes, cost.unknown)
        known = format_bytes(cost.output_bytes), format_bytes(cost.saved_bytes), temporary
    shapes = ", ".join(f"{name} {shape}" for name, shape in call.shapes.items())
    return call.op, call.variant, str(call.dtype).removeprefix("torch."), *known, shapes


class _ThreadState(threading.local):
    """How many recorders this thread is inside of, for traced code. Dynamo can guard on it, but not on a ContextVar."""

    def __init__(self) -> None:
        self.recorders = 0


_in_context: ContextVar[tuple[Calls, ...]] = ContextVar("effops_record", default=())
_in_thread = _ThreadState()


class record(metaclass=EnteredWhenCalled):
    """Context manager: list every call of an op inside, with its variant, shapes, dtype and predicted bytes.

    It holds for the current thread and asyncio task. Recorders nest: each lists the calls inside of it. No tensor is
    kept. Bytes are predicted when they are asked for: `calls[0].cost.saved_bytes`, or all in a table by
    `print(calls)`. A backward pass calls no op, unless a checkpoint computes a forward pass again. The shapes and bytes
    are those of this process's shards for DTensors, and those of one example inside `torch.vmap`.

    A function compiled by torch.compile breaks its graph at every op inside, so that its calls are seen, and may go on
    so afterwards. It raises if it was compiled with `fullgraph=True`. Within
    `torch.compiler.set_stance("force_eager")` it runs uncompiled, and neither happens.

    Raises:
        torch._dynamo.exc.Unsupported: an op is called inside by a function compiled with `fullgraph=True`
        NotImplementedError: an op is called inside while `torch.export` traces

    >>> loc, x = torch.eye(3), torch.eye(3).unsqueeze(1)
    >>> with effops.record() as calls:
    ...     lp = effops.power_spherical_log_prob(loc, 2.0, x, variant="einsum")
    >>> calls[0].op, calls[0].variant
    ('power_spherical_log_prob', 'einsum')
    >>> print(calls)    # doctest: +ELLIPSIS
    bytes predicted, of one call, beyond the inputs
    ...
    """

    @functools.partial(tells_wrong_arguments, remedy="; write `with effops.record() as calls:` around the calls")
    def __init__(self) -> None:
        if is_compiling():
            raise _not_compiled()
        self._entered: list[tuple[Calls, dict[str, Any]]] = []

    def __repr__(self) -> str:
        return "effops.record(), which holds no calls: print those of `with effops.record() as calls:`"

    def __enter__(self) -> Calls:
        calls, thread = Calls(), vars(_in_thread)  # those of this thread alone, as in `choice.py`
        thread["recorders"] += 1
        self._entered.append((calls, thread))
        _in_context.set((*_in_context.get(), calls))
        return calls

    def __exit__(self, *error: object) -> None:
        calls, thread = self._entered.pop()  # perhaps in another context or thread, as a generator may be closed
        thread["recorders"] -= 1
        _in_context.set(tuple(other for other in _in_context.get() if other is not calls))


def is_recorded() -> bool:
    """Whether this call is inside of a `record`."""
    return bool(_in_context.get())


def add_to_records(op: Op, chosen: Variant, call: Call, arguments: Sequence[Any]) -> None:
    """Add a call to the lists of the recorders around it. `arguments` are those of the op's public function."""
    if is_compiling():
        if _in_thread.recorders:
            raise _not_compiled()
        return
    recorders = _in_context.get()
    if recorders:
        has_named_operands = bool(op.core_dims)  # an op of any number of operands has none
        named = zip(op.core_dims, arguments) if has_named_operands else _numbered(call.tensors)
        shapes = {name: tuple(argument.shape) for name, argument in named if isinstance(argument, Tensor)}
        outline = call.map_tensors(Tensor, _Outline.of)
        call.note_arguments(arguments)  # compares memory, which the outline has not
        outline.made = call.made
        found = RecordedCall(op.name, chosen.name, shapes, call.dtype, outline, torch.is_grad_enabled())
        for calls in recorders:
            calls.append(found)


def _numbered(operands: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((f"operand {number}", operand) for number, operand in enumerate(operands))


def _not_compiled() -> NotImplementedError:
    return NotImplementedError(
        "effops.record cannot see the calls of compiled code; run it without compiling: "
        'with effops.record() as calls, torch.compiler.set_stance("force_eager"): ...'
    )
