"""Call an op: validate its arguments, choose a variant, and run it.

Small calls of plain tensors on a CPU go a short way: what follows from the shapes and dtypes of their operands is found
once. All other calls go the long way, which has the errors too.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from effops.dispatch.choice import choose, current_variant
from effops.dispatch.custom_op import CustomOp, Gradients, is_plain, requires_grad
from effops.dispatch.op import Op
from effops.dispatch.record import add_to_records, is_recorded
from effops.dispatch.validation import check_values, is_validated
from effops.numerics.layout import is_negated, without_negation
from effops.numerics.precision import CPU, autocast_enabled, without_autocast
from effops.pytorch.calls import is_legacy_batchedtensor

_outline = attrgetter("shape", "dtype", "layout", "is_cpu")


def call(op: Op, *args: Any, variant: str | None = None, **kwargs: Any) -> Tensor:
    """The result of an op for the arguments of its public function."""
    if variant is None and op.shortcut is not None and not is_compiling() and not _is_watched():
        result = op.shortcut(*args, **kwargs)
        if result is not None:
            return result
    if _any_dtensor(args):
        from effops.dispatch.sharding import sharded_call

        return sharded_call(op, args, kwargs, variant)
    validated = op.prepare(*args, **kwargs)
    if not is_compiling() and any(map(is_negated, args)):  # traced code cannot ask, nor can PyTorch's
        validated = validated.map_tensors(Tensor, without_negation)
    check_values(op.name, op.conditions, validated)
    chosen = choose(op, validated, variant)
    add_to_records(op, chosen, validated, args)
    with without_autocast(validated.device):
        return chosen.run(validated)


def _is_watched() -> bool:
    """Whether a context that the user has entered concerns every call."""
    return is_validated() or is_recorded() or current_variant() is not None


def _any_dtensor(args: tuple[Any, ...]) -> bool:
    # The import takes a second. A module that nobody has imported has made no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and module.DTensor in map(type, _flat(args))


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    """The arguments, and the elements of those that are lists or tuples, without PyTorch's private `tree_leaves`."""
    for one in args:
        if isinstance(one, (list, tuple)):
            yield from _flat(one)
        else:
            yield one


class Small(Protocol):
    """Computes a call of known shapes and dtypes."""

    def forward(self, *arguments: Any) -> Tensor:
        """The result, from the tensors of the call and what else the op takes."""

    def gradients(self, tensors: Sequence[Tensor], dout: Tensor, wanted: Sequence[bool], /) -> Gradients: ...


class Known(NamedTuple):
    """What is known of calls with certain shapes and dtypes: how to compute them, and the operator's settings."""

    small: Small
    settings: tuple[Any, ...]


class Shortcut:
    """Computes the small calls of an op.

    Args:
        op: the op
        variant: the one that the automatic choice takes on a CPU
        custom: the operator that it runs, which computes all other derivatives
        small: finds out how to compute a call; None if it is not small
    """

    def __init__(self, op: Op, variant: str, custom: CustomOp, small: Callable[[Any], Small | None]) -> None:
        self.op, self.variant, self.custom, self.small = op, variant, custom, small
        self._known = functools.lru_cache(maxsize=4096)(self._find)

    def __call__(self, *arguments: Any, kept: Any = None) -> Tensor | None:
        """The result of a call, or None if it is not small, or none of plain tensors."""
        if self.op.variants[self.variant].run is not self.custom or not are_ordinary(arguments):
            return None
        try:
            outlines = tuple(map(_outline, arguments))
        except RuntimeError:  # a nested tensor has no shape
            return None
        known = self._known(outlines, torch.get_float32_matmul_precision())
        if known is None:
            return None
        return call_known(known, self.custom, arguments, kept)

    def _find(self, outlines: tuple[Any, ...], precision: str) -> Known | None:
        if not all(is_cpu and layout == torch.strided for *_, layout, is_cpu in outlines):
            return None
        tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype, *_ in outlines]
        try:
            call = self.op.prepare(*tensors)
        except (TypeError, ValueError):
            return None  # the long way tells why
        if any(one is not other for one, other in zip(call.tensors, tensors)):
            return None
        small = self.small(call)
        return None if small is None else Known(small, call.arguments[len(tensors) :])


def call_known(known: Known, custom: CustomOp, tensors: Sequence[Tensor], kept: Any = None) -> Tensor:
    """The result of a call of plain tensors, of which everything else is known."""
    if requires_grad(tensors):
        result: Tensor = super(torch.autograd.Function, _Short).apply(*tensors, kept, known, custom)
        return result
    return known.small.forward(*tensors, kept)


class _Short(torch.autograd.Function):
    """A small call of plain tensors. Its gradients are computed likewise, if their tensors are plain too."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, kept, ctx.known, ctx.custom = arguments
        ctx.save_for_backward(*tensors)
        result: Tensor = ctx.known.small.forward(*tensors, kept)
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        saved, others = ctx.saved_tensors, (None, None, None)
        tensors = (dout, *saved)
        if are_ordinary(tensors) and not is_legacy_batchedtensor(dout) and not requires_grad(tensors):
            return *ctx.known.small.gradients(saved, dout, ctx.needs_input_grad), *others
        ctx.settings = ctx.known.settings
        return *ctx.custom.pull_back(ctx, dout, ctx.needs_input_grad), *others


def are_ordinary(tensors: Sequence[Any]) -> bool:
    """Whether PyTorch's operations on the tensors do what they do without contexts, and read memory as it is."""
    return is_plain(tensors) and not any(map(Tensor.is_neg, tensors)) and not autocast_enabled(CPU)
