"""Equations of `torch.einsum`: what they say of operands, and the normal form that contractions are computed in.

In normal form an operand has each label once, and a label has one size. Diagonals are taken, and axes of size 1 that
broadcast are left out; both are views.
"""

from __future__ import annotations

import functools
import itertools
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effops.numerics.shapes import is_known, remembered, spreads
from effops.text import counted

Shape = tuple[int, ...]
Labels = tuple[int, ...]

LETTERS = string.ascii_uppercase + string.ascii_lowercase  # in lists of labels 0 to 51
ELLIPSIS = -1  # stands for an ellipsis in labels
LAST_AXIS = len(LETTERS)  # the label of the last axis of an ellipsis; the axes before it have the next numbers
PARTS_OF_ARROWS = "-=<>→⟶⇒"
ONE_LETTER = 'a label is one letter, as in "ij,jk->ik", and no word'
LAST_BATCH_AXIS = 1000  # the same of the axes that come before those of an equation that is spelled out


class View(NamedTuple):
    """How an operand gets its normal form: pairs of axes whose diagonal becomes the last axis, and axes left out."""

    diagonals: tuple[tuple[int, int], ...]
    squeezed: tuple[int, ...]

    def of(self, operand: Tensor) -> Tensor:
        for first, second in self.diagonals:
            operand = operand.diagonal(0, first, second)
        return operand.squeeze(self.squeezed) if self.squeezed else operand


@dataclass(frozen=True)
class Contraction:
    """The labels of each operand and of the result in normal form, the size of each label, and the views."""

    terms: tuple[Labels, ...]
    output: Labels
    sizes: Mapping[int, int]
    views: tuple[View, ...]

    def viewed(self, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        """The operands in normal form."""
        return [view.of(operand) for view, operand in zip(self.views, operands)] if self.has_views else operands

    @functools.cached_property
    def has_views(self) -> bool:
        return any(view.diagonals or view.squeezed for view in self.views)

    def shape(self, labels: Labels) -> Shape:
        return tuple(self.sizes[label] for label in labels)

    @functools.cached_property
    def memory_order(self) -> Labels:
        """The labels of the result, as they lie in memory: of one product of matrices as that makes it, else in order.

        `torch.einsum` lays such a product out likewise.
        """
        found = matrices(*self.terms, self.output) if len(self.terms) == 2 else None
        return self.output if found is None else (*found.batch, *found.rows, *found.columns)

    def laid_out(self, result: Tensor) -> Tensor:
        """A result, copied if it does not lie in memory like that of `empty`."""
        order = self.memory_order
        if order == self.output:
            return result.contiguous()
        permuted = result.permute([self.output.index(label) for label in order]).contiguous()
        return permuted.permute([order.index(label) for label in self.output])

    def empty(self, operand: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised result on the device of an operand."""
        order = self.memory_order
        out = operand.new_empty(self.shape(order), dtype=dtype)
        return out if order == self.output else out.permute([order.index(label) for label in self.output])


class Matrices(NamedTuple):
    """The labels of a product of two factors as one of matrices; `is_swapped` if the second factor has the rows."""

    batch: Labels
    rows: Labels
    summed: Labels
    columns: Labels
    is_swapped: bool


@functools.lru_cache(maxsize=4096)
def matrices(first: Labels, second: Labels, output: Labels) -> Matrices | None:
    """The matrices of a product, rows before columns if they can be; None if nothing that both have is summed."""
    summed = tuple(label for label in first if label in second and label not in output)
    if not summed:
        return None
    batch = tuple(label for label in output if label in first and label in second)
    rows, columns = (tuple(label for label in output if label in own and label not in batch) for own in (first, second))
    is_swapped = bool(rows and columns) and output.index(columns[-1]) < output.index(rows[0])
    return Matrices(batch, *((columns, summed, rows) if is_swapped else (rows, summed, columns)), is_swapped)


def parse(function: str, equation: Any, operands: Sequence[Any]) -> tuple[tuple[Labels, ...], Labels | None, list[Any]]:
    """The labels of each operand, those of the result if they are given, and the operands, of either form of call."""
    if isinstance(equation, str):
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = operands[0]
        terms, output = _parsed(function, equation)
        texts = [one for one in operands if isinstance(one, str)]
        if texts:
            raise TypeError(
                f"{function}: operands must be tensors; got {texts[0]!r}; give `budget` by name, as budget=.."
            )
        if len(terms) != len(operands):
            raise ValueError(
                f"{function}: `equation` must have a term for each operand; got {equation!r}, with "
                f"{counted(len(terms), 'terms')}, and {counted(len(operands), 'operands')}; separate terms by commas"
            )
        return terms, output, list(operands)
    arguments = equation, *operands
    if not operands:
        raise TypeError(
            f"{function}: `equation` must be a text, or operands must come each with a list of its labels; got "
            f'{type(equation).__name__}; give an equation such as "ij,jk->ik" first'
        )
    pairs = len(arguments) // 2
    terms = tuple(_listed(function, one) for one in arguments[1 : 2 * pairs : 2])
    output = _listed(function, arguments[-1]) if len(arguments) % 2 else None
    return terms, output, list(arguments[: 2 * pairs : 2])


@remembered
def _parsed(function: str, equation: str) -> tuple[tuple[Labels, ...], Labels | None]:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = tuple(_labels(function, term, equation) for term in inputs.split(","))
    return terms, _labels(function, output, equation) if arrow else None


def _labels(function: str, term: str, equation: str) -> Labels:
    before, dots, after = term.partition("...")
    wrong = next((one for one in before + after if one not in LETTERS), "")
    if wrong:
        remedy = "use a letter for each axis"
        if wrong == ".":
            remedy = "write an ellipsis as three dots, once a term"
        elif wrong in PARTS_OF_ARROWS:
            remedy = "write the arrow once, as ->, before the labels of the result"
        raise ValueError(
            f"{function}: `equation` must consist of letters, ellipses, commas and an arrow; got {equation!r}; {remedy}"
        )
    ellipsis = (ELLIPSIS,) if dots else ()
    return *map(LETTERS.index, before), *ellipsis, *map(LETTERS.index, after)


def _listed(function: str, given: Any) -> Labels:
    if (
        not isinstance(given, (list, tuple))
        or any(one is not Ellipsis and (type(one) is not int or not 0 <= one < len(LETTERS)) for one in given)
        or given.count(Ellipsis) > 1
    ):
        raise TypeError(
            f"{function}: labels must be a list of integers from 0 to {len(LETTERS) - 1}, and at most one ellipsis; "
            f"got {type(given).__name__ if isinstance(given, Tensor) else repr(given)}; or give an equation such as "
            '"ij,jk->ik" before all operands'
        )
    return tuple(ELLIPSIS if one is Ellipsis else one for one in given)


@remembered
def spelled_out(function: str, terms: tuple[Labels, ...], output: Labels | None, ranks: tuple[int, ...]) -> str:
    """The equation with a letter for each axis of an ellipsis, and an ellipsis before each term for more batch axes."""
    expanded = [_expanded(function, number, *one) for number, one in enumerate(zip(terms, ranks))]
    known = dict.fromkeys(label for term in expanded for label in term)
    axes = tuple(sorted((label for label in known if label >= LAST_AXIS), reverse=True))
    if output is None:
        counts = [label for term in expanded for label in term]
        once = (label for label in sorted(known) if label < LAST_AXIS and counts.count(label) == 1)
        output = *axes, *once
    elif ELLIPSIS in output:
        place = output.index(ELLIPSIS)
        output = *output[:place], *axes, *output[place + 1 :]
    for label in output:
        if label not in known or output.count(label) > 1:
            got = "which no operand has" if label not in known else "twice"
            raise ValueError(
                f"{function}: labels of the result must be those of operands, each once; got {name(label)!r}, {got}; "
                f"change what stands behind the arrow; {ONE_LETTER}"
            )
    own = {label: LETTERS[label] for label in known if label < LAST_AXIS}  # errors name them
    free = (letter for letter in map(symbol, itertools.count()) if letter not in own.values())
    letters = own | {label: next(free) for label in known if label not in own}
    *inputs, result = ("..." + "".join(letters[label] for label in term) for term in (*expanded, output))
    return f"{','.join(inputs)}->{result}"


def written(terms: Sequence[Labels], output: Labels | None) -> str:
    """The equation of labels, as a user writes it."""
    texts = [
        "".join("..." if label == ELLIPSIS else LETTERS[label] for label in term) for term in (*terms, output or ())
    ]
    return ",".join(texts[:-1]) + (f"->{texts[-1]}" if output is not None else "")


def symbol(number: int) -> str:
    """The letter of a label in an equation that is spelled out; behind 52 letters come those beyond ASCII."""
    return (string.ascii_lowercase + string.ascii_uppercase)[number] if number < 52 else chr(number + 140)


def name(label: int) -> str:
    return LETTERS[label] if label < LAST_AXIS else f"axis {LAST_AXIS - label - 1} of the ellipsis"


def _expanded(function: str, number: int, term: Labels, rank: int) -> Labels:
    """The labels of an operand with `rank` axes, with one for each axis of an ellipsis."""
    axes = rank - len(term) + (ELLIPSIS in term)
    if axes < 0 or (axes and ELLIPSIS not in term):
        remedy = "an ellipsis stands for axes without a label" if axes > 0 else f"leave labels out; {ONE_LETTER}"
        raise ValueError(
            f"{function}: operand {number} must have an axis for each of its labels; got {counted(rank, 'axes')} and "
            f"{counted(len(term) - (ELLIPSIS in term), 'labels')}; {remedy}"
        )
    if ELLIPSIS not in term:
        return term
    place = term.index(ELLIPSIS)
    return *term[:place], *_axes(LAST_AXIS, axes), *term[place + 1 :]


def _axes(last: int, count: int) -> Labels:
    """The labels of axes without a letter, which are numbered from the last one on."""
    return tuple(range(last + count - 1, last - 1, -1))


@remembered
def contraction(equation: str, shapes: tuple[Shape, ...]) -> Contraction:
    """The normal form of an equation that is spelled out, for operands of given shapes. Their sizes must fit."""
    terms, output = _numbered(equation)
    ranks = [len(shape) - len(term) for shape, term in zip(shapes, terms)]
    terms = tuple((*_axes(LAST_BATCH_AXIS, rank), *term) for rank, term in zip(ranks, terms))
    output = *_axes(LAST_BATCH_AXIS, max(ranks)), *output
    sizes: dict[int, int] = {}
    for term, shape in zip(terms, shapes):
        for label, size in zip(term, shape):
            if is_known(sizes.setdefault(label, size) == 1):
                sizes[label] = size
    found = [_view(term, shape, sizes) for term, shape in zip(terms, shapes)]
    return Contraction(tuple(term for term, _ in found), output, sizes, tuple(view for _, view in found))


@remembered
def _numbered(equation: str) -> tuple[tuple[Labels, ...], Labels]:
    numbers: dict[str, int] = {}
    terms = [
        [numbers.setdefault(one, len(numbers)) for one in term]
        for term in equation.replace("...", "").replace("->", ",").split(",")
    ]
    *inputs, output = map(tuple, terms)
    return tuple(inputs), output


def letters_of(equation: str) -> dict[int, str]:
    """The letter of each label of the normal form of an equation that is spelled out."""
    return dict(enumerate(dict.fromkeys(equation.replace("...", "").replace("->", ",").replace(",", ""))))


def check_sizes(function: str, equation: str, shapes: Sequence[Sequence[int]], quoted: Callable[[], str]) -> None:
    """Raise unless the axes of a label have one size, or 1. The axes of a label in one operand have one size.

    `equation` is spelled out. An error has it as it was given, which `quoted` tells.
    """

    def named(letter: str) -> str:
        return repr(letter) if letter in quoted() else "an axis of an ellipsis"

    terms = equation.replace("...", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for number, (term, shape) in enumerate(zip(terms, shapes)):
        own: dict[str, int] = {}
        for letter, size in zip(term, shape):
            same = own.setdefault(letter, size)
            known = sizes.setdefault(letter, size)
            if same != size:
                raise ValueError(
                    f"{function}: axes of one label must have one size in an operand; got {same} and {size} for "
                    f"{named(letter)} in operand {number} of {quoted()!r}; give the axes different labels"
                )
            if known == 1:
                sizes[letter] = size
            elif not spreads(size, known):
                raise ValueError(
                    f"{function}: axes of one label must have one size, or 1; got {known} and {size} for "
                    f"{named(letter)}, the latter in operand {number} of {quoted()!r}; check the order of the labels"
                )


def _view(term: Labels, shape: Sequence[int], sizes: Mapping[int, int]) -> tuple[Labels, View]:
    """The labels of an operand in normal form, and how it is brought there."""
    labels, lengths = list(term), list(shape)
    diagonals = []
    for label in dict.fromkeys(term):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            diagonals.append((first, second))
            length = lengths[first]
            for place in (second, first):
                del labels[place], lengths[place]
            labels.append(label)
            lengths.append(length)
    squeezed = [
        place for place, label in enumerate(labels) if is_known(lengths[place] == 1) and not is_known(sizes[label] == 1)
    ]
    kept = tuple(label for place, label in enumerate(labels) if place not in squeezed)
    return kept, View(tuple(diagonals), tuple(squeezed))
