"""Capture a function of tensors as a graph, with guards that tell when it must be captured again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import Unsupported
from torch.distributions import Distribution
from torch.fx import GraphModule
from torch.fx.experimental import _config as shapes_config

MOST_CAPTURES = 64
Run = Callable[[GraphModule, Sequence[Any]], Sequence[Any]]


class Captured:
    """A function whose calls run through its graph.

    Dynamo captures it, with a symbol for each size above 1, so that calls with other sizes need no other graph. What a
    call depends on besides its arguments is guarded: closures, globals, attributes, modes.

    Args:
        fn: the function
        run: computes the results of a graph, for its inputs: tensors, and sizes as numbers
    """

    def __init__(self, fn: Callable[..., Any], run: Run) -> None:
        self.run, self.lock = run, threading.RLock()
        self.graphs: list[GraphModule] = []
        compiled: Any = torch.compile  # its stub lacks `recompile_limit`
        with _validation_as_it_is():  # PyTorch turns the validation of distributions off for the process
            self.compiled = compiled(
                fn,
                backend=self._backend,
                fullgraph=True,
                dynamic=True,
                recompile_limit=MOST_CAPTURES,
                options={"guard_filter_fn": _without_validation},
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _settings.of_capture, _settings.of_shapes:
            if self.graphs:
                seen = len(self.graphs)
                try:
                    return self.compiled(*args, **kwargs)
                except Unsupported:
                    if len(self.graphs) != seen:
                        raise
            # A distribution that checks its values cannot be captured.
            with self.lock, _validation_as_it_is():
                Distribution.set_default_validate_args(False)
                return self.compiled(*args, **kwargs)

    def _backend(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return lambda *args: self.run(graph, args)


class _Settings(threading.local):
    """Sizes are symbols that differ, numbers are constants, and hooks of submodules are guarded.

    Each thread has settings of its own, which a call that captures nothing needs too, since it cannot know.
    """

    def __init__(self) -> None:
        self.of_capture = dynamo_config.patch(
            specialize_int=True, specialize_float=True, skip_nnmodule_hook_guards=False
        )
        self.of_shapes = shapes_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]


_settings = _Settings()


@contextmanager
def _validation_as_it_is() -> Iterator[None]:
    before = Distribution._validate_args
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _without_validation(guards: Sequence[Any]) -> list[bool]:
    """Which guards are kept: not those on whether distributions check their values."""
    return ["_validate_args" not in guard.name for guard in guards]
