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

AUTO = "auto"  # the name of the automatic choice; None means it too, outside of `use_variant`


def choose(op: Op, call: Call, variant: str | None) -> Variant:
    """The variant that the argument or `use_variant` names, else the best that supports the call."""
    name = variant if variant is not None else current_variant()
    if name is None or name == AUTO:
        best = _best(op, call)
        if best is None:
            raise NotImplementedError(f"{op.name}: no variant supports this call; see effops.explain")
        return best
    named = op.variants.get(name) if isinstance(name, str) else None  # what cannot be hashed raises the error below
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
        given = f'{op.name}(variant="{name}")' if variant is not None else f'{op.name} in use_variant("{name}")'
        raise NotImplementedError(f"{given} {obstacle}; {remedy}")
    return named


def _best(op: Op, call: Call) -> Variant | None:
    for candidate in op.variants.values():
        if candidate.automatic(call) and not candidate.obstacle(call):
            return candidate
    return None


@tells_wrong_arguments
def variants(function: Callable[..., Any] | str) -> list[str]:
    """The names of the variants of an op, in order of preference. The op is given as its function or name.

    >>> effops.variants(effops.power_spherical_log_prob)[0]
    'triton'
    """
    return list(find_op(function, "variants").preference)


class _ThreadState(threading.local):
    """What `use_variant` has set in this thread. Traced code reads it, since Dynamo cannot guard on a ContextVar.

    A `threading.local` runs `__init__` in each thread that asks for an attribute. So the attributes exist in every
    thread, and Dynamo guards on their values. `vars` of it is a dict of the thread's own.

    Attributes:
        names: the variants that were entered outside of asyncio tasks, the innermost last
        entries_in_tasks: how many were entered inside of asyncio tasks
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.entries_in_tasks = 0


@dataclass(eq=False)
class _Entry:
    """One entry into a `use_variant`.

    It may be left in another thread or context than it was entered in: a generator can be closed anywhere. So it keeps
    `vars(_in_thread)` of the thread that entered, by which any thread can change that one's state.
    """

    owner: use_variant
    thread_state: dict[str, Any]
    is_in_task: bool
    is_active: bool = True

    def leave(self) -> None:
        self.is_active = False
        if self.is_in_task:
            self.thread_state["entries_in_tasks"] -= 1
        else:
            innermost_first = list(reversed(self.thread_state["names"]))
            innermost_first.remove(self.owner.name)  # the innermost of that name; others may have been entered since
            self.thread_state["names"] = tuple(reversed(innermost_first))


_in_context: ContextVar[tuple[_Entry, ...]] = ContextVar("effops_variant", default=())
_in_thread = _ThreadState()


def current_variant() -> str | None:
    """The variant that the innermost `use_variant` around this call names, or None without one.

    Eager calls read the context, which tells tasks apart. Traced code reads the state of the thread, which Dynamo
    guards on.
    """
    if not is_compiling():
        entries = _in_context.get()
        if not entries:  # saves time in most calls
            return None
        return next((entry.owner.name for entry in reversed(entries) if _holds_here(entry)), None)
    if _in_thread.entries_in_tasks:
        raise NotImplementedError(
            "use_variant inside an asyncio task cannot be seen by compiled code; pass variant= to the op instead"
        )
    return _in_thread.names[-1] if _in_thread.names else None


def _holds_here(entry: _Entry) -> bool:
    """Whether an entry was made in this thread, and not left. Threads that begin inside inherit entries of others."""
    return entry.is_active and entry.thread_state is vars(_in_thread)


class use_variant(metaclass=EnteredWhenCalled):
    """Context manager: every op called inside runs the named variant, or raises if it cannot.

    It holds for the current thread and asyncio task, and for tasks that begin inside while it is entered. Several
    threads and tasks may enter the same object, each more than once. Compiled functions called inside follow it too:
    each variant is compiled once. Inside an asyncio task compiled functions run uncompiled or, with `fullgraph=True`,
    raise `torch._dynamo.exc.Unsupported`, since compiled code cannot tell tasks apart. The name "auto" is the
    automatic choice. The innermost block counts, and a call's own `variant`, "auto" too, goes before all blocks.

    >>> loc, x = torch.eye(3), torch.eye(3).unsqueeze(1)
    >>> with effops.use_variant("einsum"):
    ...     lp = effops.power_spherical_log_prob(loc, 2.0, x)
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
        if is_compiling():  # no entry is made, since Dynamo traces no ContextVar; `__exit__` takes off the last name
            _in_thread.names = (*_in_thread.names, self.name)
            return
        entry = _Entry(self, vars(_in_thread), _running_in_task())
        if entry.is_in_task:
            _in_thread.entries_in_tasks += 1
        else:
            _in_thread.names = (*_in_thread.names, self.name)
        self._entries.append(entry)
        _in_context.set((*_in_context.get(), entry))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if is_compiling():
            _in_thread.names = _in_thread.names[:-1]
            return
        entries = _in_context.get()
        entered_here = [entry for entry in entries if entry in self._entries]
        entry = entered_here[-1] if entered_here else self._entries[-1]  # that of another context, as of a generator
        self._entries.remove(entry)
        entry.leave()
        _in_context.set(tuple(other for other in entries if other is not entry))


def _running_in_task() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
