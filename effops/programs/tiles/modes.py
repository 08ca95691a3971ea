"""Calls of `tiled` under modes, as those of lint, budgets, predictions of training memory, and counters of operations.

PyTorch's front end captures nothing under them. So they are set aside for the capture, and are there again for the
program: they see its tiles.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from effops.prediction.allocations import Allocations
from effops.pytorch.calls import _len_torch_dispatch_stack
from effops.pytorch.prediction import _disable_current_modes, _get_current_dispatch_mode_stack
from effops.pytorch.tiles import (
    _len_torch_function_stack,
    _pop_torch_dispatch_stack,
    _pop_torch_function_stack,
    _push_on_torch_dispatch_stack,
    _push_on_torch_function_stack,
)


class Watched(NamedTuple):
    """Who sees the operators of a call: prediction, on fake tensors, or modes of the user."""

    is_predicted: bool
    has_modes: bool


def watched() -> Watched:
    if not _len_torch_dispatch_stack():  # as in most calls
        return Watched(False, False)
    modes = _get_current_dispatch_mode_stack()
    is_predicted = any(isinstance(mode, Allocations) for mode in modes)
    return Watched(is_predicted, is_predicted or not any(mode.is_infra_mode() for mode in modes))


class ModesAside(threading.local):
    """The modes of a run, while one of its functions is captured."""

    dispatch: Sequence[Any] = ()
    functions: Sequence[Any] = ()

    @contextmanager
    def set_aside(self, *, with_functions: bool) -> Iterator[None]:
        """No dispatch mode is active inside, nor, if those of functions are set aside too, is any mode."""
        before, count = (self.dispatch, self.functions), _len_torch_function_stack() if with_functions else 0
        with ExitStack() as stack:
            self.functions = [_pop_torch_function_stack() for _ in range(count)]
            for mode in self.functions:
                stack.callback(_push_on_torch_function_stack, mode)
            self.dispatch = stack.enter_context(_disable_current_modes())
            try:
                yield
            finally:
                self.dispatch, self.functions = before

    @contextmanager
    def again(self) -> Iterator[None]:
        """Those that were set aside are active inside."""
        with ExitStack() as stack:
            for mode in reversed(self.dispatch):
                _push_on_torch_dispatch_stack(mode)
                stack.callback(_pop_torch_dispatch_stack, None)
            for mode in reversed(self.functions):
                _push_on_torch_function_stack(mode)
                stack.callback(_pop_torch_function_stack)
            yield
