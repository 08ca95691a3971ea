"""Choose the variant of an op: the one that the call or `use_variant` names, else the best that supports the call."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.compiler import is_compiling

from effops.dispatch.op import Call, Op, Variant, find_op, ops
from effops.text import EnteredWhenCalled, did_you_mean, tells_wrong_arguments

AUTO = "auto"  # the name of the automatic choice, which None also means where no `use_variant` is entered


def choose(op: Op, call: Call, variant: str | None) -> Variant:
    """The variant that the argument or `use_variant` names, else the best that supports the call."""
    name = variant if variant is not None else current_variant()
    if name is None or name == AUTO:
        best = _best(op, call)
        if best is None:
            raise NotImplementedError(f"{op.name}: no variant supports this call; see effops.explain")
        return best
    named = op.variants.get(name) if isinstance(name, str) else None
    if named is None:
        known = *op.preference, AUTO
        raise ValueError(
            f"{op.name} has no variant {name!r}; choose from {', '.join(known)}{did_you_mean(name, known)}"
        )
    obstacle = named.obstacle(call)
    if obstacle:
        best = _best(op, call)
        remedy = (
            f'leave it to variant="{AUTO}", which takes "{best.name}"'
            if best
            else "no other variant supports it either"
        )
        raise NotImplementedError(f'{op.name}(variant="{name}") {obstacle}; {remedy}')
    return named


def _best(op: Op, call: Call) -> Variant | None:
    for candidate in op.variants.values():
        if candidate.automatic(call) and not candidate.obstacle(call):
            return candidate
    return None


@tells_wrong_arguments
def variants(function: Callable[..., Any] | str) -> list[str]:
    """The names of the variants of an op, in order of preference.

    >>> effops.variants(effops.power_spherical_log_prob)[0]
    'triton'
    """
    return list(find_op(function, "variants").preference)


class _ThreadState(threading.local):
    """What `use_variant` has set in this thread. Traced code reads it, since Dynamo cannot guard on a ContextVar.

    A `threading.local` runs `__init__` in each thread that asks for an attribute. So the attributes exist in every
    thread, and Dynamo guards on their values.

    Attributes:
        entered: the variants that were entered outside of asyncio tasks, the innermost last
        entries_in_tasks: how many were entered inside of asyncio tasks
    """

    def __init__(self) -> None:
        self.entered: tuple[str, ...] = ()
        self.entries_in_tasks = 0


@dataclass(eq=False)
class _Entry:
    """One entry into a `use_variant`. It may be left from another thread or context, as a generator may be closed."""

    owner: use_variant
    thread: dict[str, Any]  # the attributes of the state of the thread that entered
    in_task: bool
    is_active: bool = True

    def leave(self) -> None:
        self.is_active = False
        if self.in_task:
            self.thread["entries_in_tasks"] -= 1
        else:
            outer = list(reversed(self.thread["entered"]))
            outer.remove(self.owner.name)
            self.thread["entered"] = tuple(reversed(outer))


_in_context: ContextVar[tuple[_Entry, ...]] = ContextVar("effops_variant", default=())
_in_thread = _ThreadState()


def current_variant() -> str | None:
    """The variant that the innermost `use_variant` around this call names, or None without one."""
    if not is_compiling():
        entries = _in_context.get()
        return next((entry.owner.name for entry in reversed(entries) if _holds_here(entry)), None) if entries else None
    if _in_thread.entries_in_tasks:
        raise NotImplementedError(
            "use_variant inside an asyncio task cannot be seen by compiled code; pass variant= to the op instead"
        )
    return _in_thread.entered[-1] if _in_thread.entered else None


def _holds_here(entry: _Entry) -> bool:
    """Threads and tasks that begin inside a context inherit its variables. The entry holds in its own thread alone."""
    return entry.is_active and entry.thread is vars(_in_thread)


class use_variant(metaclass=EnteredWhenCalled):
    """Context manager: every op called inside runs the named variant, or raises if it cannot.

    It holds for the current thread and asyncio task, and for tasks that begin inside while it is entered. Threads and
    tasks may enter the same object, and one may enter it again inside. Compiled functions called inside follow it too:
    each variant is compiled once. Inside an asyncio task they raise instead, since compiled code cannot tell tasks
    apart. The name "auto" is the automatic choice.

    >>> with effops.use_variant("einsum"):
    ...     lp = effops.power_spherical_log_prob(loc, scale, x)
    """

    @functools.partial(tells_wrong_arguments, name="use_variant", remedy='; name one, as in use_variant("chunked")')
    def __init__(self, name: str) -> None:
        known = [*sorted({variant for op in ops().values() for variant in op.preference}), AUTO]
        if name not in known:
            raise ValueError(
                f"use_variant: no op has a variant {name!r}; choose from {', '.join(known)}{did_you_mean(name, known)}"
            )
        self.name = name
        self._entries: list[_Entry] = []

    def __enter__(self) -> None:
        if is_compiling():
            _in_thread.entered = (*_in_thread.entered, self.name)
            return
        entry = _Entry(self, vars(_in_thread), _running_in_task())
        if entry.in_task:
            _in_thread.entries_in_tasks += 1
        else:
            _in_thread.entered = (*_in_thread.entered, self.name)
        self._entries.append(entry)
        _in_context.set((*_in_context.get(), entry))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if is_compiling():
            _in_thread.entered = _in_thread.entered[:-1]
            return
        entered = _in_context.get()
        own = [entry for entry in entered if entry in self._entries]  # none if another context has entered
        entry = (own or self._entries)[-1]
        self._entries.remove(entry)
        entry.leave()
        _in_context.set(tuple(other for other in entered if other is not entry))


def _running_in_task() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
