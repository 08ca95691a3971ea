"""Calls of `tiled` inside of a run on fake tensors, as those of lint, budgets and predictions of training memory.

PyTorch's front end captures nothing under modes. So those of the run are set aside for the capture, and are there again
for the program: they see its tiles.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from effops.prediction.allocations import Allocations
from effops.pytorch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_torch_dispatch_stack,
    _pop_torch_function_stack,
    _push_on_torch_dispatch_stack,
    _push_on_torch_function_stack,
)


def is_predicted() -> bool:
    """Whether what runs here is only to tell how many bytes it takes."""
    if not _len_torch_dispatch_stack():  # as in most calls
        return False
    return any(isinstance(mode, Allocations) for mode in _get_current_dispatch_mode_stack())


class ModesAside(threading.local):
    """The modes of a run, while one of its functions is captured."""

    dispatch: Sequence[Any] = ()
    functions: Sequence[Any] = ()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """No mode is active inside."""
        before = self.dispatch, self.functions
        with ExitStack() as stack:
            self.functions = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
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
