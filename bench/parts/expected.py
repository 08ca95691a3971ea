"""What every result of a workload is judged by: float64 bounds, computed once, in pieces that fit the cache.

A forward pass may be judged by some of the pieces, which lie evenly spread over an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from effops import measure
from effops.dispatch.op import Op
from effops.reference import reference_of
from effops.reference.reference import Bounds, worst_error_ratio

PIECE_FLOPS = 2**25  # float64 temporaries of so many operations fit the cache, and outweigh Python


@dataclass(frozen=True)
class Workload:
    """What is run: an op on arguments of given sizes, with options by keyword, and which pass of it."""

    op: Op
    sizes: Mapping[str, int]
    dtype: torch.dtype
    device: torch.device
    backward: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pass_name(self) -> str:
        return "backward" if self.backward else "forward"

    def args(self) -> tuple[Tensor, ...]:
        """The arguments of the op: the same values at every call."""
        generator = torch.Generator(self.device).manual_seed(0)
        args = reference_of(self.op).workload(**self.sizes, dtype=self.dtype, device=self.device, generator=generator)
        return tuple(arg.detach().requires_grad_(self.backward) for arg in args)


@dataclass(frozen=True)
class Piece:
    """A part of a call along one batch axis: its arguments, and where its part of the result lies."""

    args: tuple[Tensor, ...]
    index: tuple[slice, ...]


def pieces(op: Op, call: Any, args: Sequence[Tensor], flops: int) -> list[Piece]:
    """The call in parts along the batch axis that cuts most of the arguments' elements; one part if there is none."""
    ranks = [arg.ndim - core for arg, core in zip(args, op.core_dims.values())]
    rank, reduced = max(ranks, default=0), None if op.logsumexp is None else op.logsumexp(call)

    def length(number: int, axis: int) -> int:
        """The size of an argument along a batch axis, 1 where it has no such axis."""
        own = axis - rank + ranks[number]
        return args[number].shape[own] if own >= 0 else 1

    def elements_cut(axis: int) -> int:
        return sum(arg.numel() for number, arg in enumerate(args) if length(number, axis) > 1)

    axis = max((axis for axis in range(rank) if axis != reduced), key=elements_cut, default=None)
    if axis is None or not elements_cut(axis):
        return [Piece(tuple(args), ())]
    size = max(length(number, axis) for number in range(len(args)))
    step = max(1, size * PIECE_FLOPS // flops)
    before = axis - (reduced is not None and reduced < axis)
    return [
        Piece(
            tuple(
                arg.narrow(axis - rank + ranks[number], start, min(step, size - start))
                if length(number, axis) > 1
                else arg
                for number, arg in enumerate(args)
            ),
            (*[slice(None)] * before, slice(start, min(size, start + step))),
        )
        for start in range(0, size, step)
    ]


def evenly_spread(every: Sequence[Piece], most: float) -> list[Piece]:
    """At most so many of the pieces, but the first and the last of them."""
    gaps = max(1, int(min(most, len(every))) - 1)
    return [every[number] for number in sorted({gap * (len(every) - 1) // gaps for gap in range(gaps + 1)})]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: others wait at the end of each small operation, and burn a busy machine's time with it.

    The float64 values of 134 million pairs' coordinates took 1.8 s of CPU time on one thread, and 41 s on two threads
    beside other work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Expected:
    """What every result of a workload is judged by. All of it is computed where it is first asked for.

    `checked_share` is the part of the result that is judged. Bounds of gradients are for the gradient that
    `measure.upstream_gradient` makes for a result of any layout.
    """

    def __init__(self, workload: Workload, args: tuple[Tensor, ...], most_flops: float = math.inf) -> None:
        detached = tuple(arg.detach() for arg in args)
        self.op, self.options, self.backward = workload.op, workload.options, workload.backward
        self.reference = reference_of(workload.op)
        self.call = self.op.prepare(*detached, **self.options)
        self.like, flops = detached[0], max(1, self.op.variants["naive"].cost(self.call).flops)
        every = pieces(self.op, self.call, detached, flops)
        self.pieces = evenly_spread(every, most_flops * len(every) / flops)
        self.checked_share = 1.0 if self.backward else len(self.pieces) / len(every)
        # A share is small, and many cores help little with it. Whole results are theirs.
        self.threads: Callable[[], AbstractContextManager[None]] = one_thread if most_flops < math.inf else nullcontext

    @cached_property
    def bounds(self) -> list[Bounds]:
        """The bounds of each piece of the result."""
        with self.threads():
            return [self.reference.bounds(self.op.prepare(*piece.args, **self.options)) for piece in self.pieces]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        first, index = self.bounds[0].value.shape, self.pieces[-1].index
        return (*first[: len(index) - 1], index[-1].stop, *first[len(index) :]) if index else tuple(first)

    @cached_property
    def gradient_bounds(self) -> tuple[Bounds, ...]:
        result = self.like.new_empty(self.shape, dtype=self.call.dtype)
        return self.reference.gradient_bounds(self.call, measure.upstream_gradient(result))

    def error_ratio(self, out: Tensor, gradients: Sequence[Tensor] = ()) -> float:
        """The largest error of a result and its gradients in units of their budgets; infinite for a wrong shape."""
        if out.shape != self.shape:
            return float("inf")
        with self.threads():
            error = max(bounds.error_ratio(out[piece.index]) for bounds, piece in zip(self.bounds, self.pieces))
        return max(error, worst_error_ratio(self.gradient_bounds, gradients)) if self.backward else error

    def close(self, found: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Whether every element of right results, or gradients, is within twice its error budget of that of others.

        Two right results never differ by more.
        """
        with self.threads():
            return all(
                replace(bounds, value=other.to(bounds.value)).error_ratio(result)
                <= 2 * (1 + torch.finfo(result.dtype).eps)
                for bounds, result, other in self._parts(found, others)
            )

    @cached_property
    def tolerance(self) -> float:
        """The most by which two right results may differ anywhere, besides the rounding to their own dtype."""
        every = self.gradient_bounds if self.backward else self.bounds
        widest = (2 * torch.maximum(bounds.below, bounds.above).nan_to_num(posinf=0.0) for bounds in every)
        return max(float(tensor.max()) for tensor in widest if tensor.numel())

    def _parts(self, found: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[tuple[Bounds, Tensor, Tensor]]:
        """Bounds, results and others, piece by piece or gradient by gradient."""
        if self.backward:
            yield from zip(self.gradient_bounds, found, others, strict=True)
            return
        for bounds, piece in zip(self.bounds, self.pieces):
            yield bounds, found[0][piece.index], others[0][piece.index]
