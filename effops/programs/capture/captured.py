"""Capture a function of tensors as a graph, with guards that tell when it must be captured again."""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.backends import opt_einsum
from torch.distributions import Distribution
from torch.fx import GraphModule

from effops.pytorch.calls import tree_leaves
from effops.pytorch.tiles import _LazyGraphModule, dynamo_config, optimize, shapes_config, validation_of

MOST_CAPTURES, MANY_CAPTURES = 64, 8
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
        self.run = run
        self.graphs: list[GraphModule] = []
        with _validation_as_it_is():  # PyTorch turns the validation of distributions off for the process
            context: Any = optimize(
                backend=self._backend,
                nopython=True,
                guard_filter_fn=_without_validation,
            )
            context.callback = _Capture(context.callback)
            self.compiled = context(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def _backend(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        _LazyGraphModule.force_recompile(graph)  # else its first call runs the hooks that all modules have
        return lambda *args: self.run(graph, args)


class _Capture:
    """What Dynamo calls for arguments that no graph has been captured for, with the settings that a capture needs.

    Sizes are symbols that differ, numbers are constants, hooks of submodules are guarded, and distributions do not
    check their values: those that do cannot be captured. A call that captures nothing pays for none of it.
    """

    lock = threading.RLock()  # the validation of distributions is the process's

    def __init__(self, capture: Any) -> None:
        self._torchdynamo_orig_backend = capture  # by which Dynamo finds the backend
        self.numbers: dict[str, set[Any]] = defaultdict(set)  # of the captures so far, by the argument

    def __call__(self, frame: Any, *args: Any) -> Any:
        self._look_at_arguments(frame)
        of_capture = dynamo_config.patch(
            recompile_limit=MOST_CAPTURES,
            assume_static_by_default=False,
            specialize_int=True,
            specialize_float=True,
            skip_nnmodule_hook_guards=False,
        )
        of_shapes = shapes_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        # With paths of opt_einsum, an einsum of three operands could not be captured. Graphs call it with them.
        with self.lock, _validation_as_it_is(), of_capture, of_shapes, opt_einsum.flags(enabled=False):
            Distribution.set_default_validate_args(False)
            return self._torchdynamo_orig_backend(frame, *args)

    def _look_at_arguments(self, frame: Any) -> None:
        """Refuse arrays, and warn of an argument each of whose values takes a capture."""
        for name, value in frame.f_locals.items():
            leaves = tree_leaves(value)
            if any(type(one).__module__ == "numpy" for one in leaves):
                raise TypeError(f"tiled: `{name}` must be a tensor or a number; got one of numpy; give torch.as_tensor")
            numbers = tuple(one for one in leaves if isinstance(one, (bool, int, float, str)))
            if numbers not in self.numbers[name]:
                self.numbers[name].add(numbers)
                if len(self.numbers[name]) == MANY_CAPTURES:
                    warnings.warn(
                        f"tiled: `{name}` of {frame.f_code.co_name} had {MANY_CAPTURES} values, each of which was "
                        "captured anew; give it as a tensor",
                        stacklevel=4,
                    )


@contextmanager
def _validation_as_it_is() -> Iterator[None]:
    before = validation_of(Distribution)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _without_validation(guards: Sequence[Any]) -> list[bool]:
    """Which guards are kept: not those on whether distributions check their values."""
    return ["_validate_args" not in guard.name for guard in guards]
