"""Find the steps of a contraction, and the labels to cut, so that a forward or backward pass keeps a memory budget.

A path is one of opt_einsum's. The recorder, which runs a program on fake tensors, tells whether it keeps the budget.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effops.dispatch.native import without_hooks
from effops.numerics.equations import Contraction, Labels, Shape, contraction, symbol
from effops.ops.einsum.program import Program, Step, backward, forward
from effops.prediction.allocations import fake_mode
from effops.prediction.inside import InsideUntilReturned
from effops.pytorch import DisableTorchFunction, _disable_current_modes

MOST_SLICES = 10_000
COMPARED, SEARCHED = 5, 20  # operands up to which opt_einsum compares all paths, and searches beyond a greedy one
# A rough machine, by which programs are compared.
FLOPS_PER_SECOND, BYTES_PER_SECOND, SECONDS_PER_STEP = 5e10, 5e9, 2e-5
WORTH_KEEPING_SECONDS = 2e-4  # autograd's graph of a call takes about as long


class Operand(NamedTuple):
    """What a program's memory depends on."""

    shape: Shape
    stride: Shape
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self, requires_grad: bool = False) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, requires_grad=requires_grad, device="cpu")

    @property
    def expanded(self) -> Operand:
        """The same with one element for all, as the gradient of a sum is."""
        return self._replace(stride=(0,) * len(self.stride))

    @property
    def reversed_axes(self) -> Operand:
        """The same with its axes the other way round in memory."""
        strides = [math.prod(max(1, size) for size in self.shape[:axis]) for axis in range(len(self.shape))]
        return self._replace(stride=tuple(strides))


@dataclass(frozen=True)
class PassLayout:
    """A forward pass, or the backward pass from an `upstream` gradient to those of operands that are `wanted`.

    Bytes depend on the number of threads, which operators ask for.
    """

    equation: str
    operands: tuple[Operand, ...]
    dtype: torch.dtype
    threads: int
    upstream: Operand | None = None
    wanted: tuple[bool, ...] = ()

    @functools.cached_property
    def contraction(self) -> Contraction:
        return contraction(self.equation, tuple(one.shape for one in self.operands))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def backward(self, wanted: Sequence[bool]) -> PassLayout:
        """The backward pass from a gradient that is laid out like the result."""
        result = self.contraction.empty(torch.empty(0, device="meta"), self.dtype)
        upstream = Operand.of(result)._replace(device=self.operands[0].device)
        return replace(self, upstream=upstream, wanted=tuple(wanted))

    def taken_bytes(self, program: Program) -> int:
        """The most bytes that live at once, without the results."""
        with self._fakes() as (operands, dout, allocations):
            if dout is None:
                results: Sequence[Tensor | None] = [forward(program, operands, self.dtype)]
            else:
                results = backward(program, operands, dout, self.wanted)
            return int(allocations.most_bytes_without(results))

    def taken_bytes_of_graph(self, program: Program) -> int:
        """The same of a forward and a backward pass of autograd, which keeps intermediates between them."""
        with self._fakes() as (operands, dout, allocations), torch.enable_grad(), without_hooks():
            leaves = [operand for operand in operands if operand.requires_grad]
            result = forward(program, operands, self.dtype)
            gradients = torch.autograd.grad(result, leaves, dout, retain_graph=True, allow_unused=True)
            return int(allocations.most_bytes_without([result, *gradients]))

    @contextmanager
    def _fakes(self) -> Iterator[tuple[Sequence[Tensor], Tensor | None, InsideUntilReturned]]:
        """The operands and the gradient from above on fake memory, and the count of all else."""
        with (
            _disable_current_modes(),
            DisableTorchFunction(),
            torch.inference_mode(False),
            torch.no_grad(),
            fake_mode(),
        ):
            wanted = self.wanted or (False,) * len(self.operands)
            operands = [one.empty(is_wanted) for one, is_wanted in zip(self.operands, wanted)]
            dout = None if self.upstream is None else self.upstream.empty()
            with InsideUntilReturned(cuda=self.operands[0].device.type == "cuda") as allocations:
                for tensor in (*operands, dout):
                    if tensor is not None:
                        allocations.count(tensor, nbytes=0)
                yield operands, dout, allocations


@functools.lru_cache(maxsize=1024)
def keeps_intermediates(layout: PassLayout, budget: int) -> bool:
    """Whether the intermediates of a backward pass are kept by the forward pass: that saves time, and fits the budget.

    The gradient from above may have another layout than is known when they are kept: then it is copied.
    """
    program = find(replace(layout, upstream=None, wanted=()), budget)
    if program is None or program.extents or layout.upstream is None:
        return False
    again = replace(program, steps=program.steps[:-1])
    if _seconds(again) < WORTH_KEEPING_SECONDS:
        return False
    copied_bytes = layout.itemsize * math.prod(layout.upstream.shape)
    taken_bytes = [layout.taken_bytes_of_graph(program) + copied_bytes]
    for upstream in (layout.upstream.expanded, layout.upstream.reversed_axes):
        taken_bytes.append(replace(layout, upstream=upstream).taken_bytes_of_graph(program))
    return max(taken_bytes) <= budget


@functools.lru_cache(maxsize=1024)
def find(layout: PassLayout, budget: int) -> Program | None:
    """The program that is predicted to be the fastest of those that keep the budget; None if it takes too many slices.

    The fastest path is taken if it fits as it is. Otherwise one whose intermediates may fit is looked for too.
    """
    found = []
    for steps in _paths(layout, budget):
        program = _sliced(layout, Program(layout.contraction, steps, {}), budget)
        if program is not None:
            found.append(program)
            if not program.extents:
                break
    return min(found, key=_seconds, default=None)


def least_budget(layout: PassLayout, budget: int) -> int:
    """The least power of two above `budget` for which `find` succeeds."""
    while True:
        budget = 2 ** (2 * budget - 1).bit_length() if budget else 1024
        if find(layout, budget) is not None:
            return budget


def _paths(layout: PassLayout, budget: int) -> Iterator[tuple[Step, ...]]:
    """The steps of the paths that are tried: the fastest one, and that whose intermediates may fit the budget."""
    import opt_einsum

    contraction = layout.contraction
    symbols = {label: symbol(number) for number, label in enumerate(contraction.sizes)}
    *inputs, output = ("".join(symbols[label] for label in term) for term in (*contraction.terms, contraction.output))
    shapes = [contraction.shape(term) for term in contraction.terms]
    kind = "optimal" if len(inputs) <= COMPARED else "auto" if len(inputs) <= SEARCHED else "greedy"
    seen = set()
    for limit in (None, max(1, budget // layout.itemsize)):
        equation = f"{','.join(inputs)}->{output}"
        if limit is not None and len(inputs) > SEARCHED:  # a limit makes opt_einsum's search cubic
            return
        path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=kind, memory_limit=limit)
        steps = _steps(contraction, path)
        if steps not in seen:
            seen.add(steps)
            yield steps


def _steps(contraction: Contraction, path: Sequence[tuple[int, ...]]) -> tuple[Step, ...]:
    """The steps of a path. A label that one operand alone has, and the result lacks, is summed first."""
    labels = list(contraction.terms)
    steps: list[Step] = []
    alive = list(range(len(labels)))

    def add(inputs: tuple[int, ...], kept: Labels) -> int:
        steps.append(Step(inputs, kept))
        labels.append(kept)
        return len(labels) - 1

    def needed(others: Sequence[int]) -> set[int]:
        return {*contraction.output, *(label for one in others for label in labels[one])}

    if len(alive) > 1:
        for place, value in enumerate(alive):
            later = needed([*alive[:place], *alive[place + 1 :]])
            kept = tuple(label for label in labels[value] if label in later)
            if kept != labels[value]:
                alive[place] = add((value,), kept)
    for places in path:
        first, *others = [alive[place] for place in places]
        alive = [value for place, value in enumerate(alive) if place not in places]
        for number, other in enumerate(others):
            later = needed([*alive, *others[number + 1 :]])
            both = dict.fromkeys((*labels[first], *labels[other]))
            kept = _ordered([label for label in both if label in later], contraction.output)
            first = add((first, other), kept)
        alive.append(first)
    if labels[alive[0]] != contraction.output:
        add((alive[0],), contraction.output)
    return tuple(steps)


def _ordered(labels: Sequence[int], output: Labels) -> Labels:
    """Labels of the result in its order, before those that are summed later."""
    return tuple(sorted(labels, key=lambda label: output.index(label) if label in output else len(output)))


def _sliced(layout: PassLayout, program: Program, budget: int) -> Program | None:
    """The program, cut until it keeps the budget; None if that takes too many slices."""
    target = min(float(budget), 0.9 * _held_bytes(layout, program))
    while (taken := layout.taken_bytes(program)) > budget:
        cut = _cut(layout, program, target)
        if cut is program or cut.slices > MOST_SLICES:
            return None
        program = cut
        target = _held_bytes(layout, program) * max(0.5, min(0.9, budget / taken))
    return program


def _cut(layout: PassLayout, program: Program, target: float) -> Program:
    """Halve labels until values take at most `target` bytes.

    Each time it is the label that costs the least time for what it saves.
    """
    held = _held_bytes(layout, program)
    while held > target:
        best: tuple[Any, ...] | None = None
        for label, size in program.contraction.sizes.items():
            extent = program.extents.get(label, size)
            if extent == 1:
                continue
            candidate = replace(program, extents={**program.extents, label: -(-extent // 2)})
            less = _held_bytes(layout, candidate)
            if less < held:
                cost = math.log(_seconds(candidate) / _seconds(program)) / math.log(held / max(1, less))
                rank = cost, label not in program.contraction.output, label
                if best is None or rank < best[0]:
                    best = rank, candidate, less
        if best is None:
            return program
        _, program, held = best
    return program


def _sizes(program: Program) -> Mapping[int, int]:
    return {**program.contraction.sizes, **program.extents}


def _held_bytes(layout: PassLayout, program: Program) -> int:
    """About what a slice holds at once: values, and perhaps copies of the factors of a product, and of its result.

    In backward all values are held, and a product is that of a gradient.
    """
    sizes = _sizes(program)
    numels = [math.prod(sizes[label] for label in labels) for labels in program.contraction.terms]
    count, held, most = len(numels), 0, 0
    for number, step in enumerate(program.steps):
        numels.append(math.prod(sizes[label] for label in step.labels))
        most = max(most, held + numels[-1] + sum(numels[value] for value in step.inputs))
        held += numels[-1]
        if layout.upstream is None:
            held -= sum(numels[value] for value in step.inputs if value >= count and program.last_use[value] == number)
    if layout.upstream is not None:
        most += held
    return most * layout.itemsize


def _seconds(program: Program) -> float:
    """About how long a forward pass takes."""
    sizes = _sizes(program)
    seconds = SECONDS_PER_STEP
    for step in program.steps:
        factors = [program.labels_of(value) for value in step.inputs]
        elements = sum(math.prod(sizes[label] for label in one) for one in (step.labels, *factors))
        flops = 2 * math.prod(sizes[label] for label in {label for one in factors for label in one})
        seconds += flops / FLOPS_PER_SECOND + 4 * elements / BYTES_PER_SECOND + SECONDS_PER_STEP
    return program.slices * seconds
