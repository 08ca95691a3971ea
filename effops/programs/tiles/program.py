"""The program of a call: its steps, and the bytes that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from effops.dispatch.native import without_hooks
from effops.numerics.precision import CPU, without_autocast
from effops.prediction.allocations import Allocations, fake_mode
from effops.prediction.inside import InsideUntilReturned
from effops.programs.rules.binding import is_without_gradients, operands_of
from effops.programs.tiles.checks import Check
from effops.programs.tiles.loops import Loop, Tiles
from effops.programs.tiles.refusals import CannotTile
from effops.pytorch.calls import FakeTensor
from effops.pytorch.prediction import (
    DynamicOutputShapeException,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    map_arg,
)


class Program:
    """The steps of a graph: nodes, and loops over tiles.

    Attributes:
        taken_bytes: those of a call, as predicted
        first_call_bytes: those of one that checks the loops, at most
        checks: of the loops that did not run yet, by their patterns
        unchecked: how many loops the first call has no room to check
        live_bytes: those of all that is there when a loop first begins, by its pattern
    """

    def __init__(self, graph: GraphModule, loops: Sequence[Loop]) -> None:
        self.module, self.loops, self.taken_bytes, self.first_call_bytes = graph, loops, 0, 0
        self.checks: dict[str, Check] = {}
        self.unchecked, self.live_bytes = 0, dict[str, int]()
        self.steps: list[Node | Loop] = []
        self.placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        (self.output,) = (node for node in graph.graph.nodes if node.op == "output")
        made_by = {node: loop for loop in loops for node in loop.stage.outputs}
        self._order(made_by)
        last_use = {read: number for number, step in enumerate(self.steps) for read in _read_by(step)}
        self.released: list[list[Node]] = [[] for _ in self.steps]  # what no later step reads
        for node, number in last_use.items():
            self.released[number].append(node)

    def with_loops(self, loops: Sequence[Loop]) -> Program:
        """The program with some of its loops alone: all else runs as it is."""
        other = Program(self.module, loops)
        patterns = {loop.pattern for loop in loops}
        other.checks = {pattern: check for pattern, check in self.checks.items() if pattern in patterns}
        return other

    def _order(self, made_by: dict[Node, Loop]) -> None:
        """Steps in an order in which each comes after what it reads."""
        done: set[Node] = set(self.placeholders)
        todo: list[Node] = [self.output]
        while todo:
            node = todo[-1]
            step = made_by.get(node, node)
            missing = [one for one in _read_by(step) if one not in done]
            if node in done:
                todo.pop()
            elif missing:
                todo += missing
            else:
                todo.pop()
                self.steps.append(step)
                done.update(step.stage.outputs if isinstance(step, Loop) else [node])

    def __call__(self, *args: Any) -> Any:
        device = next((one.device for one in args if isinstance(one, Tensor)), CPU)
        with without_autocast(device):  # its casts are nodes of the graph
            return self._run(args)

    def _run(self, args: Sequence[Any]) -> Any:
        values = dict(zip(self.placeholders, args))
        self.live_bytes.clear()
        for number, step in enumerate(self.steps):
            if isinstance(step, Loop):
                tensors = [values[node] for node, _ in step.stage.inputs]
                if step.pattern in self.checks:
                    self._check(step, tensors)
                found = Tiles.apply(step, *tensors)
                values.update(zip(step.stage.outputs, found))
                del found, tensors
            elif step is self.output:
                return map_arg(step.args[0], values.__getitem__)
            else:
                values[step] = self._computed(step, values)
            for node in self.released[number]:
                del values[node]
        raise AssertionError

    def _check(self, loop: Loop, tensors: Sequence[Tensor]) -> None:
        """Compare a loop with the whole; without values, note what is there beside."""
        if any(map(_has_no_values, tensors)):
            counted = (one for one in _get_current_dispatch_mode_stack() if isinstance(one, Allocations))
            self.live_bytes.setdefault(loop.pattern, max((one.live_bytes for one in counted), default=0))
            return
        with without_hooks():  # which would see its operators once, and not when a checkpoint runs again
            self.checks[loop.pattern](tensors)
        self.checks.pop(loop.pattern, None)

    def _computed(self, node: Node, values: dict[Node, Any]) -> Any:
        if node.op == "get_attr":
            return getattr(self.module, str(node.target))
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_without_gradients(node)):
            return node.target(*args, **kwargs)  # type: ignore[operator]


def _has_no_values(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _read_by(step: Node | Loop) -> list[Node]:
    if isinstance(step, Loop):
        return list(dict.fromkeys(node for node, _ in step.stage.inputs))
    return list(dict.fromkeys(operands_of(step)))


def taken_bytes(function: Any, args: Sequence[Any], *, backward: bool, with_results: bool = False) -> int:
    """The highest sum, at any moment, of what a call and its backward pass allocate on fake memory, and keep inside.

    Results count `with_results`: those of a tile are copied to where they belong.
    """
    with _disable_current_modes(), torch.inference_mode(False), fake_mode(allow_non_fake_inputs=True):
        fakes = [faked(one, backward) for one in args]
        tensors = [one for one in fakes if isinstance(one, Tensor)]
        allocations = InsideUntilReturned()
        with torch.set_grad_enabled(backward), without_hooks(), allocations:
            for one in tensors:
                allocations.count(one, nbytes=0)
            results = [one for one in _flat(function(*fakes)) if isinstance(one, Tensor)]
        outputs = [one for one in results if one.requires_grad]
        leaves = [one for one in tensors if one.requires_grad]
        gradients: Sequence[Tensor | None] = ()
        if outputs and leaves:
            upstream = [torch.empty_like(one) for one in outputs]
            with without_hooks(), allocations:
                for one in upstream:
                    allocations.count(one, nbytes=0)
                try:
                    gradients = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
                except DynamicOutputShapeException as error:
                    raise CannotTile(
                        f"a shape must not depend on values: in a gradient, that of {error.func} does",
                        remedy="call the function without tiled, or under torch.no_grad()",
                    ) from None
        return int(allocations.most_bytes_without([*([] if with_results else results), *gradients]))


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def faked(one: Any, backward: bool) -> Any:
    if not isinstance(one, Tensor):
        return one
    fake = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cpu")
    return fake.requires_grad_(backward and one.requires_grad)
