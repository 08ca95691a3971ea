"""Choose the variant of an op: the one that the call or `use_variant` names, else the best that supports the call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

from torch.compiler import is_compiling

from effops.dispatch.op import Call, Op, Variant, find_op, ops


def choose(op: Op, call: Call, variant: str | None) -> Variant:
    """The variant that the argument or `use_variant` names, else the best that supports the call."""
    name = variant if variant is not None else current_variant()
    if name is None:
        best = _best(op, call)
        if best is None:
            raise NotImplementedError(f"{op.name}: no variant supports this call; see effops.explain")
        return best
    named = op.variants.get(name)
    if named is None:
        raise ValueError(f"{op.name} has no variant {name!r}; choose from {', '.join(op.preference)}")
    obstacle = named.obstacle(call)
    if obstacle:
        best = _best(op, call)
        remedy = f'leave variant=None, which takes "{best.name}"' if best else "no other variant supports it either"
        raise NotImplementedError(f'{op.name}(variant="{name}") {obstacle}; {remedy}')
    return named


def _best(op: Op, call: Call) -> Variant | None:
    for candidate in op.variants.values():
        if candidate.automatic(call) and not candidate.obstacle(call):
            return candidate
    return None


def variants(function: Callable[..., Any] | str) -> list[str]:
    """The names of the variants of an op, in order of preference.

    >>> effops.variants(effops.power_spherical_log_prob)[0]
    'triton'
    """
    return list(find_op(function).preference)


class _ThreadState(threading.local):
    """What `use_variant` set in this thread, for traced code. Dynamo can guard on this, but not on a ContextVar.

    `__init__` runs once in each thread. So the attributes exist wherever they are read, and Dynamo guards on their
    values.
    """

    def __init__(self) -> None:
        self.variant: str | None = None
        self.tasks = 0


_in_context: ContextVar[str | None] = ContextVar("effops_variant", default=None)


_in_thread = _ThreadState()


def current_variant() -> str | None:
    """The variant that the innermost `use_variant` around this call names, or None without one."""
    if not is_compiling():
        return _in_context.get()
    if _in_thread.tasks:
        raise NotImplementedError(
            "use_variant inside an asyncio task cannot be seen by compiled code; pass variant= to the op instead"
        )
    return _in_thread.variant


class use_variant:
    """Context manager: every op called inside runs the named variant, or raises if it cannot.

    It holds for the current thread and asyncio task. Compiled functions called inside follow it too: each variant is
    compiled once. Inside an asyncio task they raise instead, since compiled code cannot tell tasks apart.

    >>> with effops.use_variant("einsum"):
    ...     lp = effops.power_spherical_log_prob(loc, scale, x)
    """

    def __init__(self, name: str) -> None:
        known = sorted({variant for op in ops().values() for variant in op.preference})
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
