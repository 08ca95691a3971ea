"""Contractions of several operands along a path of products, slice by slice, and their gradients.

Slices cut labels. A label of the result cuts the result, into which slices are written. A label that is summed makes
slices that are added up. Backward computes the products of a slice again, and goes back along the path.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effops.blocks.cutting import visited_pieces, whole
from effops.numerics.equations import LETTERS, Contraction, Labels, matrices
from effops.numerics.layout import as_gradient, empty_gradient, zero_gradient
from effops.numerics.precision import arithmetic_dtype, converted
from effops.pytorch.calls import _is_alias_of
from effops.pytorch.operators import aten

Piece = Mapping[int, slice]  # of the labels that are cut


@dataclass(frozen=True)
class Step:
    """A product of two values, or the sum of one of them, with the labels that it keeps.

    Values are numbered: the operands first, then the result of each step.
    """

    inputs: tuple[int, ...]
    labels: Labels


@dataclass(frozen=True)
class Program:
    """The steps of a contraction, and how many indices of a label a slice takes: all, but for labels in `extents`."""

    contraction: Contraction
    steps: tuple[Step, ...]
    extents: Mapping[int, int]

    @functools.cached_property
    def cut_from_result(self) -> Labels:
        return tuple(label for label in self.extents if label in self.contraction.output)

    @functools.cached_property
    def cut_from_sums(self) -> Labels:
        return tuple(label for label in self.extents if label not in self.contraction.output)

    @property
    def slices(self) -> int:
        return math.prod(-(-self.contraction.sizes[label] // extent) for label, extent in self.extents.items())

    def labels_of(self, value: int) -> Labels:
        terms = self.contraction.terms
        return terms[value] if value < len(terms) else self.steps[value - len(terms)].labels

    @functools.cached_property
    def ends_in_product(self) -> bool:
        return bool(self.steps) and len(self.steps[-1].inputs) == 2

    @functools.cached_property
    def last_use(self) -> Mapping[int, int]:
        """The step after which a value is not read again."""
        return {value: number for number, step in enumerate(self.steps) for value in step.inputs}

    def pieces(self, labels: Labels) -> Iterator[Piece]:
        """The slices of labels that are cut."""
        extents = tuple(self.extents[label] for label in labels)
        for slices in visited_pieces(whole(self.contraction.shape(labels)), extents):
            yield dict(zip(labels, slices))


def forward(program: Program, operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The result, in memory of its own."""
    contraction = program.contraction
    if torch.is_grad_enabled():  # autograd keeps the intermediates
        operands = [_GradientLaidOut.apply(one) if one.requires_grad else one for one in operands]
    views = contraction.viewed(operands)
    if not program.extents:
        result = _result(program, _slice(program, views, {}, dtype))
        is_given = not program.ends_in_product and any(_is_alias_of(result, one) for one in operands)
        if is_given:
            return without_view(contraction.empty(operands[0], dtype).copy_(result))
        return without_view(contraction.laid_out(result))
    out = contraction.empty(operands[0], dtype)
    for piece in program.pieces(program.cut_from_result):
        part = _narrowed(out, contraction.output, piece)
        # Sums of slices are rounded once.
        rounds = bool(program.cut_from_sums) and arithmetic_dtype(dtype) != dtype
        total = torch.empty_like(part, dtype=arithmetic_dtype(dtype)) if rounds else part
        for number, inner in enumerate(program.pieces(program.cut_from_sums)):
            value = _result(program, _slice(program, views, {**piece, **inner}, dtype))
            if number:
                total.add_(value)
            else:
                total.copy_(value)
            del value
        if rounds:
            part.copy_(total)
    return without_view(out)


class _GradientLaidOut(torch.autograd.Function):
    """The tensor itself, whose gradient gets its strides, so that autograd adds it up without a copy."""

    @staticmethod
    def forward(ctx: Any, operand: Tensor) -> Tensor:
        ctx.save_for_backward(operand)
        return operand.view_as(operand)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (operand,) = ctx.saved_tensors
        return as_gradient(gradient, operand)


def without_view(result: Tensor) -> Tensor:
    """The result in the same memory, which is no view to PyTorch, so that users may change it."""
    unsafe_view: Tensor = aten._unsafe_view.default(result, result.shape)  # only a private interface tells views
    return unsafe_view


def backward(program: Program, operands: Sequence[Tensor], dout: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of the operands that are wanted, from that of the result."""
    contraction = program.contraction
    views = contraction.viewed(operands)
    sums = [_Sum(program, number, operand) for number, operand in enumerate(operands)]
    for outer in program.pieces(program.cut_from_result):
        upstream = _narrowed(dout, contraction.output, outer)
        for inner in program.pieces(program.cut_from_sums):
            piece = {**outer, **inner}
            for number, gradient in _gradients(program, _slice(program, views, piece, dout.dtype), upstream, wanted):
                sums[number].add(gradient, piece)
                del gradient
    return [one.result(dout) if is_wanted else None for one, is_wanted in zip(sums, wanted)]


class _Sum:
    """The gradient of an operand, to which slices add."""

    def __init__(self, program: Program, number: int, operand: Tensor) -> None:
        self.operand, self.view = operand, program.contraction.views[number]
        self.labels = program.contraction.terms[number]
        is_summed = any(label not in self.labels for label in program.extents)
        self.dtype = arithmetic_dtype(operand.dtype) if is_summed else operand.dtype
        self.total: Tensor | None = None

    def add(self, gradient: Tensor, piece: Piece) -> None:
        if self.total is None:
            if not piece and not self.view.diagonals:
                self.total = gradient
                return
            self.total = zero_gradient(self.operand, self.dtype)
        _narrowed(self.view.of(self.total), self.labels, piece).add_(gradient)

    def result(self, dout: Tensor) -> Tensor:
        """The gradient, in memory of its own: where nothing is multiplied, it may be that from above."""
        total = zero_gradient(self.operand, self.operand.dtype) if self.total is None else self.total
        found = as_gradient(total, self.operand)
        return empty_gradient(self.operand).copy_(found) if _is_alias_of(found, dout) else found


def _slice(program: Program, views: Sequence[Tensor], piece: Piece, dtype: torch.dtype) -> list[Tensor]:
    """What a slice takes of operands in normal form, in the dtype of the result."""
    return [converted(_narrowed(view, term, piece), dtype) for view, term in zip(views, program.contraction.terms)]


def _narrowed(tensor: Tensor, labels: Labels, piece: Piece) -> Tensor:
    return tensor[tuple(piece.get(label, slice(None)) for label in labels)] if piece else tensor


def _result(program: Program, operands: Sequence[Tensor]) -> Tensor:
    """The result of the last step. What no later step reads is released."""
    if len(program.steps) == 1:
        return product([*zip(operands, program.contraction.terms)], program.steps[0].labels)
    values = _values(program, operands, program.steps)
    result = values[-1]
    assert result is not None
    return result


def _values(
    program: Program, operands: Sequence[Tensor], steps: Sequence[Step], keeps_all: bool = False
) -> list[Tensor | None]:
    """The operands, and the results of steps. What no later step reads is released, unless `keeps_all`."""
    values: list[Tensor | None] = list(operands)
    for number, step in enumerate(steps):
        values.append(product([_factor(program, values, one) for one in step.inputs], step.labels))
        if not keeps_all:
            for value in step.inputs:
                if program.last_use[value] == number:
                    values[value] = None
    return values


Factor = tuple[Tensor, Labels]


def _factor(program: Program, values: Sequence[Tensor | None], number: int) -> Factor:
    value = values[number]
    assert value is not None
    return value, program.labels_of(number)


def product(factors: Sequence[Factor], labels: Labels) -> Tensor:
    """The product of one or two factors, summed over the labels that it lacks.

    That of two becomes one of matrices where it sums, in a third of the time that a small `torch.einsum` takes.
    """
    if len(factors) == 2:
        (first, own), (second, others) = factors
        found = _multiplication(own, others, labels)
        if found is not None:
            return found.of(second, first) if found.is_swapped else found.of(first, second)
    result: Tensor = torch.einsum(_equation(tuple(own for _, own in factors), labels), *(one for one, _ in factors))
    return result


class _Multiplication(NamedTuple):
    """A product of matrices: the axes of its factors, those of its result, and the numbers of axes of each kind.

    Axes that have their places already are None.
    """

    is_swapped: bool
    first: tuple[int, ...] | None  # batch, rows, summed
    second: tuple[int, ...] | None  # batch, summed, columns
    result: tuple[int, ...] | None  # of batch, rows, columns
    batch: int
    rows: int
    summed: int

    def of(self, first: Tensor, second: Tensor) -> Tensor:
        first = first if self.first is None else first.permute(self.first)
        second = second if self.second is None else second.permute(self.second)
        multiply = torch.bmm if self.batch else torch.mm
        left = self.batch + self.rows
        batch, rows, summed = first.shape[: self.batch], first.shape[self.batch : left], first.shape[left:]
        columns = second.shape[self.batch + self.summed :]
        if self.batch <= 1 and len(rows) == len(summed) == len(columns) == 1:
            found = multiply(first, second)
        else:
            number = (math.prod(batch),) if batch else ()
            row, inner, column = math.prod(rows), math.prod(summed), math.prod(columns)
            found = multiply(first.reshape(*number, row, inner), second.reshape(*number, inner, column))
            found = found.view((*batch, *rows, *columns))
        return found if self.result is None else found.permute(self.result)


@functools.lru_cache(maxsize=4096)
def _multiplication(first: Labels, second: Labels, output: Labels) -> _Multiplication | None:
    found = matrices(first, second, output)
    if found is None:
        return None
    batch, rows, summed, columns, is_swapped = found
    if is_swapped:
        first, second = second, first
    order = *batch, *rows, *columns
    return _Multiplication(
        is_swapped,
        _axes(first, (*batch, *rows, *summed)),
        _axes(second, (*batch, *summed, *columns)),
        _axes(order, output),
        len(batch),
        len(rows),
        len(summed),
    )


def _axes(labels: Labels, order: Labels) -> tuple[int, ...] | None:
    return None if labels == order else tuple(map(labels.index, order))


@functools.lru_cache(maxsize=4096)
def _equation(terms: tuple[Labels, ...], output: Labels) -> str:
    letters = {label: LETTERS[number] for number, label in enumerate(dict.fromkeys(itertools.chain(*terms)))}
    *inputs, result = ("".join(letters[label] for label in term) for term in (*terms, output))
    return f"{','.join(inputs)}->{result}"


def _gradients(
    program: Program, operands: Sequence[Tensor], upstream: Tensor, wanted: Sequence[bool]
) -> Iterator[tuple[int, Tensor]]:
    """The gradients of the operands of a slice, with their numbers. The products of the slice are computed again."""
    count = len(operands)
    values = _values(program, operands, program.steps[:-1], keeps_all=True)
    needed = _needed(program, wanted)
    gradients: dict[int, Tensor] = {count + len(program.steps) - 1: upstream}
    for number in reversed(range(len(program.steps))):
        step, gradient = program.steps[number], gradients.pop(count + number, None)
        del values[count + number :]  # the result of this step, which only later steps read
        if gradient is None:
            continue
        for place, value in enumerate(step.inputs):
            if value not in needed:
                continue
            others = [_factor(program, values, one) for other, one in enumerate(step.inputs) if other != place]
            found = _pulled_back((gradient, step.labels), others, _factor(program, values, value))
            if value < count:
                yield value, found
            else:
                gradients[value] = found
            del found
        del gradient
    if not program.steps and wanted[0]:
        yield 0, upstream


def _needed(program: Program, wanted: Sequence[bool]) -> set[int]:
    """The values whose gradients lead to those that are wanted."""
    needed = {value for value, is_wanted in enumerate(wanted) if is_wanted}
    for number, step in enumerate(program.steps, len(wanted)):
        if needed.intersection(step.inputs):
            needed.add(number)
    return needed


def _pulled_back(gradient: Factor, others: Sequence[Factor], factor: Factor) -> Tensor:
    """The gradient of a factor of a product. It repeats along labels that the product and other factors lack."""
    value, labels = factor
    known = {label for _, own in (gradient, *others) for label in own}
    found = product([gradient, *others], tuple(label for label in labels if label in known))
    index = tuple(slice(None) if label in known else None for label in labels)
    return found[index].expand(value.shape)
