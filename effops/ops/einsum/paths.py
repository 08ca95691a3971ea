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
from effops.numerics.equations import Contraction, Labels, Shape, symbol
from effops.numerics.equations import contraction as contraction_of
from effops.ops.einsum.program import Program, Step, backward, forward
from effops.prediction.allocations import fake_mode
from effops.prediction.inside import InsideUntilReturned
from effops.pytorch.prediction import DisableTorchFunction, _disable_current_modes

MOST_SLICES = 10_000
MOST_OPERANDS_FOR_ALL_PATHS = 5  # opt_einsum compares all paths of so many
MOST_OPERANDS_FOR_A_SEARCH = 20  # it searches for a path of so many; with more it takes the greedy one
# A rough machine, by which programs are compared.
FLOPS_PER_SECOND, BYTES_PER_SECOND, SECONDS_PER_STEP = 5e10, 5e9, 2e-5
BYTES_PER_ELEMENT = 4  # whatever the dtype
WORTH_KEEPING_SECONDS = 2e-4  # autograd's graph of a call takes about as long
# What one more round of cuts leaves of the bytes that are held: less, but not far less, since they are estimated.
LEAST_LEFT, MOST_LEFT = 0.5, 0.9


class Operand(NamedTuple):
    """The layout of an operand, which a program's memory depends on."""

    shape: Shape
    stride: Shape
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self, requires_grad: bool = False) -> Tensor:
        """An uninitialised tensor of this layout. It is on the CPU; `_fakes` says which device it stands for."""
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

    `threads` is there for the keys of caches alone: what operators allocate depends on their number.
    """

    equation: str
    operands: tuple[Operand, ...]
    dtype: torch.dtype
    threads: int
    upstream: Operand | None = None
    wanted: tuple[bool, ...] = ()

    @functools.cached_property
    def contraction(self) -> Contraction:
        return contraction_of(self.equation, tuple(one.shape for one in self.operands))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def of_backward(self, wanted: Sequence[bool]) -> PassLayout:
        """The backward pass from a gradient that is laid out like the result."""
        result = self.contraction.empty(torch.empty(0, device="meta"), self.dtype)
        upstream = Operand.of(result)._replace(device=self.operands[0].device)
        return replace(self, upstream=upstream, wanted=tuple(wanted))

    def taken_bytes(self, program: Program) -> int:
        """The most bytes that live at once, without the results."""
        with self._fakes() as (operands, upstream, allocations):
            if upstream is None:
                results: Sequence[Tensor | None] = [forward(program, operands, self.dtype)]
            else:
                results = backward(program, operands, upstream, self.wanted)
            return int(allocations.most_bytes_without(results))

    def taken_bytes_of_graph(self, program: Program) -> int:
        """The same of a forward and a backward pass of autograd, which keeps intermediates between them."""
        with self._fakes() as (operands, upstream, allocations), torch.enable_grad(), without_hooks():
            leaves = [operand for operand in operands if operand.requires_grad]
            result = forward(program, operands, self.dtype)
            # A pass takes the most where a user retains the graph.
            gradients = torch.autograd.grad(result, leaves, upstream, retain_graph=True, allow_unused=True)
            return int(allocations.most_bytes_without([result, *gradients]))

    @contextmanager
    def _fakes(self) -> Iterator[tuple[Sequence[Tensor], Tensor | None, InsideUntilReturned]]:
        """The operands and the upstream gradient as fake tensors, and the count of all else."""
        with (
            _disable_current_modes(),
            DisableTorchFunction(),
            torch.inference_mode(False),
            torch.no_grad(),
            fake_mode(),
        ):
            wanted = self.wanted or (False,) * len(self.operands)
            operands = [one.empty(is_wanted) for one, is_wanted in zip(self.operands, wanted)]
            upstream = None if self.upstream is None else self.upstream.empty()
            with InsideUntilReturned(cuda=self.operands[0].device.type == "cuda") as allocations:
                for tensor in (*operands, upstream):
                    if tensor is not None:
                        allocations.count(tensor, nbytes=0)  # given tensors are free
                yield operands, upstream, allocations


@functools.lru_cache(maxsize=1024)
def keeps_intermediates(layout: PassLayout, budget: int) -> bool:
    """Whether forward should keep intermediates for backward: if that saves enough time, and fits the budget.

    Forward cannot know the layout of the upstream gradient. If it is another one than the result's, it may be copied.
    """
    program = find(replace(layout, upstream=None, wanted=()), budget)
    if program is None or program.extents or layout.upstream is None:
        return False
    recomputed = replace(program, steps=program.steps[:-1])
    if _seconds(recomputed) < WORTH_KEEPING_SECONDS:
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
    """The least power of two, not below twice `budget`, for which `find` succeeds; 1024 or more if `budget` is 0."""
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
    equation = f"{','.join(inputs)}->{output}"
    shapes = [contraction.shape(term) for term in contraction.terms]
    optimizer, limits = "auto", [None, max(1, budget // layout.itemsize)]
    if len(inputs) <= MOST_OPERANDS_FOR_ALL_PATHS:
        optimizer = "optimal"
    elif len(inputs) > MOST_OPERANDS_FOR_A_SEARCH:
        optimizer, limits = "greedy", [None]  # a limit makes opt_einsum's search cubic
    seen = set()
    for limit in limits:
        path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=optimizer, memory_limit=limit)
        steps = _steps(contraction, path)
        if steps not in seen:
            seen.add(steps)
            yield steps


def _steps(contraction: Contraction, path: Sequence[tuple[int, ...]]) -> tuple[Step, ...]:
    """The steps of a path. A label that one operand alone has, and the result lacks, is summed first."""
    labels_of_value = list(contraction.terms)
    steps: list[Step] = []
    alive = list(range(len(labels_of_value)))  # values that no step has read yet

    def add(inputs: tuple[int, ...], kept: Labels) -> int:
        steps.append(Step(inputs, kept))
        labels_of_value.append(kept)
        return len(labels_of_value) - 1

    def needed(others: Sequence[int]) -> set[int]:
        return {*contraction.output, *(label for one in others for label in labels_of_value[one])}

    if len(alive) > 1:
        for position, value in enumerate(alive):
            later = needed([*alive[:position], *alive[position + 1 :]])
            kept = tuple(label for label in labels_of_value[value] if label in later)
            if kept != labels_of_value[value]:
                alive[position] = add((value,), kept)
    for positions in path:
        product, *others = [alive[position] for position in positions]
        alive = [value for position, value in enumerate(alive) if position not in positions]
        for number, other in enumerate(others):
            later = needed([*alive, *others[number + 1 :]])
            both = dict.fromkeys((*labels_of_value[product], *labels_of_value[other]))
            kept = _ordered([label for label in both if label in later], contraction.output)
            product = add((product, other), kept)
        alive.append(product)
    if labels_of_value[alive[0]] != contraction.output:
        add((alive[0],), contraction.output)
    return tuple(steps)


def _ordered(labels: Sequence[int], output: Labels) -> Labels:
    """Labels of the result in its order, before those that are summed later."""
    return tuple(sorted(labels, key=lambda label: output.index(label) if label in output else len(output)))


def _sliced(layout: PassLayout, program: Program, budget: int) -> Program | None:
    """The program, cut until it keeps the budget; None if that takes too many slices."""
    target = min(float(budget), MOST_LEFT * _held_bytes(layout, program))
    while (taken := layout.taken_bytes(program)) > budget:
        finer = _cut(layout, program, target)
        nothing_to_cut = finer is program
        if nothing_to_cut or finer.slices > MOST_SLICES:
            return None
        program = finer
        target = _held_bytes(layout, program) * max(LEAST_LEFT, min(MOST_LEFT, budget / taken))
    return program


def _cut(layout: PassLayout, program: Program, target: float) -> Program:
    """Halve labels until values take at most `target` bytes, or until no label saves any.

    Each time, halve the label that costs the least time for what it saves.
    """
    held = _held_bytes(layout, program)
    while held > target:
        best: tuple[Any, ...] | None = None
        for label, size in program.contraction.sizes.items():
            extent = program.extents.get(label, size)
            if extent == 1:
                continue
            candidate = replace(program, extents={**program.extents, label: -(-extent // 2)})
            candidate_bytes = _held_bytes(layout, candidate)
            if candidate_bytes < held:
                slowdown, saving = _seconds(candidate) / _seconds(program), held / max(1, candidate_bytes)
                cost = math.log(slowdown) / math.log(saving)  # 1 if time doubles where memory halves
                rank = cost, label not in program.contraction.output, label
                if best is None or rank < best[0]:
                    best = rank, candidate, candidate_bytes
        if best is None:
            return program
        _, program, held = best
    return program


def _sizes(program: Program) -> Mapping[int, int]:
    return {**program.contraction.sizes, **program.extents}


def _held_bytes(layout: PassLayout, program: Program) -> int:
    """About what a slice holds at once: values, and perhaps copies of the factors of a product, and of its result.

    Backward holds the values of all steps, besides one product for a gradient.
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
        seconds += flops / FLOPS_PER_SECOND + BYTES_PER_ELEMENT * elements / BYTES_PER_SECOND + SECONDS_PER_STEP
    return program.slices * seconds
