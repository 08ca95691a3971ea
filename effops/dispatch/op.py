"""Ops, their variants, the choice between them and its explanation. Knows no op by name."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from effops.blocks.plan import Shape
from effops.numerics.precision import CPU, without_autocast
from effops.text import aligned, format_bytes


class Call(Protocol):
    """The validated arguments of one call, as an op's `prepare` returns them; this much of it every op shares."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


class Cost(NamedTuple):
    """What a variant is predicted to need for the forward pass of one call, beyond the inputs.

    `saved_bytes` is what stays allocated for backward, besides inputs and output (0 if nothing requires gradients).
    """

    output_bytes: int
    saved_bytes: int
    temporary_bytes: int
    flops: int


Need = Callable[[Any], str]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Tensor])


def anywhere(call: Call) -> bool:
    return True


def on_cuda(call: Call) -> bool:
    return call.device != CPU and call.device.type == "cuda"


@dataclass(frozen=True)
class Variant:
    """One implementation of an op.

    Each of `needs` takes a call and returns why the variant cannot run it, or an empty string. `automatic` tells
    whether the automatic choice may take the variant for a call. `whole`, of an op that is a logsumexp, computes the
    finished result; None where `run` and `Op.finish` do.
    """

    name: str
    run: Callable[[Any], Tensor]
    cost: Callable[[Any], Cost]
    needs: Sequence[Need] = ()
    automatic: Callable[[Any], bool] = anywhere
    whole: Callable[[Any], Tensor] | None = None

    def obstacle(self, call: Call) -> str:
        """Why this variant cannot run `call`; empty if it can."""
        for need in self.needs:
            if reason := need(call):
                return reason
        return ""


@dataclass
class Op:
    """A named operation with several variants behind one public function.

    Attributes:
        name: the public function's name
        prepare: validates the arguments of the public function and returns the call that variants receive
        preference: names of the variants, the best first
        cases: shapes of the arguments, by a short name, that every test runs
        sample: makes arguments of given shapes: `sample(*shapes, dtype=, device=, generator=)`
        workload: makes the arguments of the benchmark: `workload(**sizes, dtype=, device=, generator=)`
        sizes: the benchmark's default sizes
        bounds: `effops.reference.bounds.Bounds` of a right result, from a call
        gradient_bounds: the same for the gradient of each tensor argument, from a call and the upstream gradient
        core_dims: the tensor arguments, by name and in order, and how many of the last dimensions of each are no batch
            axes; an op that does not say so takes no DTensors
        logsumexp: for an op that is a logsumexp along a batch axis, that axis of a call; its variants return the
            statistics of `effops.blocks.tiling.Reduction`, which are added up in the end
    """

    name: str
    prepare: Callable[..., Any]
    preference: tuple[str, ...]
    cases: Mapping[str, tuple[Shape, ...]]
    sample: Callable[..., tuple[Tensor, ...]]
    workload: Callable[..., tuple[Tensor, ...]]
    sizes: Mapping[str, int]
    bounds: Callable[..., Any]
    gradient_bounds: Callable[..., Any]
    core_dims: Mapping[str, int] = field(default_factory=dict)
    logsumexp: Callable[[Any], int] | None = None
    function: Callable[..., Tensor] | None = field(default=None, init=False)
    _variants: dict[str, Variant] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        _ops[self.name] = self

    @property
    def variants(self) -> Mapping[str, Variant]:
        """The variants by name, in order of preference."""
        return MappingProxyType({name: self._variants[name] for name in self.preference})

    def variant(
        self,
        name: str,
        *,
        cost: Callable[[Any], Cost],
        needs: Sequence[Need] = (),
        automatic: Callable[[Any], bool] = anywhere,
        whole: Callable[[Any], Tensor] | None = None,
    ) -> Callable[[Callable[[Any], Tensor]], Callable[[Any], Tensor]]:
        """Register the decorated function of a call as the variant `name`."""
        if name not in self.preference:
            raise ValueError(f"{self.name}: variant {name!r} has no place in the order of preference {self.preference}")

        def register(run: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
            self._variants[name] = Variant(name, run, cost, needs, automatic, whole)
            return run

        return register

    def public(self, function: FunctionT) -> FunctionT:
        """Mark the decorated function as the public one of this op."""
        self.function = function
        return function

    def __call__(self, *args: Any, variant: str | None = None, **kwargs: Any) -> Tensor:
        if _any_dtensor(args):
            from effops.dispatch.sharding import sharded_call

            return sharded_call(self, args, kwargs, variant)
        return self.compute(self.prepare(*args, **kwargs), variant)

    def compute(self, call: Call, variant: str | None) -> Tensor:
        """The result by the chosen variant."""
        chosen = self.choose(call, variant)
        with without_autocast(call.device):
            return self.finish(call, chosen.run(call)) if chosen.whole is None else chosen.whole(call)

    def statistics(self, call: Call, variant: str | None) -> Tensor:
        """Of an op that is a logsumexp, what `finish` makes its result of."""
        chosen = self.choose(call, variant)
        with without_autocast(call.device):
            return chosen.run(call)

    def finish(self, call: Call, result: Tensor) -> Tensor:
        return result if self.logsumexp is None else result.sum(-1).to(call.dtype)

    def choose(self, call: Call, variant: str | None) -> Variant:
        """The variant named by the argument or by `use_variant`, or the best that supports the call."""
        name = variant if variant is not None else current_variant()
        if name is None:
            best = self._best(call)
            if best is None:
                raise NotImplementedError(f"{self.name}: no variant supports this call; see effops.explain")
            return best
        named = self._variants.get(name)
        if named is None:
            raise ValueError(f"{self.name} has no variant {name!r}; choose from {', '.join(self.preference)}")
        obstacle = named.obstacle(call)
        if obstacle:
            best = self._best(call)
            remedy = f'leave variant=None, which takes "{best.name}"' if best else "no other variant supports it either"
            raise NotImplementedError(f'{self.name}(variant="{name}") {obstacle}; {remedy}')
        return named

    def _best(self, call: Call) -> Variant | None:
        for name in self.preference:
            candidate = self._variants[name]
            if candidate.automatic(call) and not candidate.obstacle(call):
                return candidate
        return None


def _any_dtensor(args: tuple[Any, ...]) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # to import it takes a second; without it there is none
    return module is not None and module.DTensor in map(type, args)


_ops: dict[str, Op] = {}


def ops() -> Mapping[str, Op]:
    """Every registered op by name."""
    return MappingProxyType(_ops)


def find_op(function: Callable[..., Any] | str) -> Op:
    """The op behind a public function, or of that name."""
    op = next((op for op in _ops.values() if function in (op.name, op.function)), None)
    if op is None:
        raise ValueError(f"{function!r} is no op of effops; choose from {', '.join(_ops)}")
    return op


def variants(function: Callable[..., Any] | str) -> list[str]:
    """Names of the variants of an op, in order of preference.

    >>> effops.variants(effops.power_spherical_log_prob)[0]
    'triton'
    """
    return list(find_op(function).preference)


class _ThreadState(threading.local):
    """What `use_variant` set in this thread, for traced code, which can guard on this but not on a ContextVar.

    `__init__` runs once a thread, so the attributes exist wherever they are read and Dynamo guards on their values.
    """

    def __init__(self) -> None:
        self.variant: str | None = None
        self.tasks = 0


_in_context: ContextVar[str | None] = ContextVar("effops_variant", default=None)
_in_thread = _ThreadState()


def current_variant() -> str | None:
    """The variant that the innermost `use_variant` around this call names, or None."""
    if not is_compiling():
        return _in_context.get()
    if _in_thread.tasks:
        raise NotImplementedError(
            "use_variant inside an asyncio task cannot be seen by compiled code; pass variant= to the op instead"
        )
    return _in_thread.variant


class use_variant:
    """Context manager: every op called inside runs the named variant, or raises if it cannot.

    Holds for the current thread and asyncio task. Compiled functions called inside follow it too (each variant is
    compiled once); inside an asyncio task they raise instead, since compiled code cannot tell tasks apart.

    >>> with effops.use_variant("einsum"):
    ...     lp = effops.power_spherical_log_prob(loc, scale, x)
    """

    def __init__(self, name: str) -> None:
        known = sorted({variant for op in _ops.values() for variant in op.preference})
        if name not in known:
            raise ValueError(f"use_variant: no op has a variant {name!r}; choose from {', '.join(known)}")
        self.name = name
        self._outer: list[tuple[str | None, bool, Token[str | None]]] = []
        self._traced_outer: str | None = None

    def __enter__(self) -> None:
        if is_compiling():
            self._traced_outer, _in_thread.variant = _in_thread.variant, self.name
            return
        in_task = _running_in_task()
        self._outer.append((_in_thread.variant, in_task, _in_context.set(self.name)))
        if in_task:
            _in_thread.tasks += 1
        else:
            _in_thread.variant = self.name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if is_compiling():
            _in_thread.variant = self._traced_outer
            return
        outer, in_task, token = self._outer.pop()
        _in_context.reset(token)
        if in_task:
            _in_thread.tasks -= 1
        else:
            _in_thread.variant = outer


def _running_in_task() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True)
class VariantReport:
    """What `explain` says of one variant; `reason` is empty where it is supported."""

    supported: bool
    reason: str
    output_bytes: int
    saved_bytes: int
    temporary_bytes: int
    flops: int


@dataclass(frozen=True)
class Explanation:
    """The choice for one call and, of every variant, whether and why it can or cannot run and what it would need."""

    op: str
    chosen: str
    variants: Mapping[str, VariantReport]

    def __str__(self) -> str:
        header = ("variant", "", "output", "saved", "temporary", "operations", "why not")
        rows = [
            (
                name,
                "chosen" if name == self.chosen else "",
                format_bytes(report.output_bytes),
                format_bytes(report.saved_bytes),
                format_bytes(report.temporary_bytes),
                f"{report.flops:.3g}",
                report.reason,
            )
            for name, report in self.variants.items()
        ]
        title = f"{self.op}: {self.chosen} (bytes predicted, beyond the inputs)"
        return f"{title}\n{aligned([header, *rows], left=len(header))}"


def explain(function: Callable[..., Any] | str, *args: Any, variant: str | None = None, **kwargs: Any) -> Explanation:
    """Which variant a call would run, why every other would not, and what each would need; nothing is computed.

    Takes the arguments of the op and never allocates its result, so it may be asked about sizes that do not fit:
    give expanded or meta tensors. Raises what the call itself would raise for bad arguments or an unusable `variant`.

    >>> print(effops.explain(effops.power_spherical_log_prob, loc, scale, x))    # doctest: +ELLIPSIS
    power_spherical_log_prob: chunked (bytes predicted, beyond the inputs)
    ...
    """
    op = find_op(function)
    call = op.prepare(*args, **kwargs)
    chosen = op.choose(call, variant)

    def reports() -> Iterator[tuple[str, VariantReport]]:
        for name, candidate in op.variants.items():
            reason = candidate.obstacle(call)
            yield name, VariantReport(not reason, reason, *candidate.cost(call))

    return Explanation(op.name, chosen.name, MappingProxyType(dict(reports())))
