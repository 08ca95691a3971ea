"""Rules of products that are added up: contractions, and look-ups in their place."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator, Sequence

import numpy
from torch import Tensor

from effops.ops.einsum.contraction import BUDGET
from effops.programs.large.source.patterns import CONTRACTION, LIBRARY, NAMED, Proposals, Reader, literal, text
from effops.programs.large.source.trials import Trial

WITHIN_BUDGET = f"two are multiplied at a time, within {BUDGET}: in slices where that takes more"


def products(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    """`(a * b).sum(-1)`, also with more factors, and over other axes."""
    summed = reader.summed(node)
    sides = None if summed is None else reader.product(summed[0])
    if summed is None or sides is None:
        return
    factors = list(_factors(reader, summed[0]))
    if len(factors) > 2 and all(reader.definitions.are_same(one, node) for one in factors):
        known = trial.values(factors)
        if known is not None and all(isinstance(one, Tensor) for one in known):
            dimensions = max(one.ndim for one in known)
            equation = equation_of(known, {axis % dimensions for axis in summed[1]})
            yield NAMED, f"effops.einsum({equation!r}, {', '.join(map(ast.unparse, factors))})", WITHIN_BUDGET
    left, right = map(ast.unparse, sides)
    known = trial.values(sides)
    if known is None or not all(isinstance(one, Tensor) for one in known):
        return
    dimensions = max(one.ndim for one in known)
    axes = {axis % dimensions for axis in summed[1]}
    why = "the products are added up as they are made"
    if axes == {dimensions - 1}:
        yield NAMED, f"effops.broadcast_dot({left}, {right})", why
    yield CONTRACTION, f"torch.einsum({equation_of(known, axes)!r}, {left}, {right})", why


def _factors(reader: Reader, node: ast.expr) -> Iterator[ast.expr]:
    pair = reader.product(node)
    if pair is None:
        yield node
    else:
        for one in pair:
            yield from _factors(reader, one)


def equation_of(operands: Sequence[Tensor], axes: set[int]) -> str:
    """The equation of a sum over axes of broadcast operands. Axes of size 1 may stand beside others."""
    letters = string.ascii_lowercase[: max(one.ndim for one in operands)]
    inputs = [letters[len(letters) - one.ndim :] for one in operands]
    return ",".join(inputs) + "->" + "".join(one for place, one in enumerate(letters) if place not in axes)


def expanded_products(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    sides = reader.pair(node, "matmul")
    known = None if sides is None else trial.values(sides)
    if sides is None or known is None or min(one.ndim for one in known) < 2 or max(one.ndim for one in known) < 3:
        return
    letters = string.ascii_lowercase[: max(one.ndim for one in known) + 1]
    batch, row, inner, column = letters[:-3], letters[-3], letters[-2], letters[-1]
    first = batch[len(batch) - known[0].ndim + 2 :] + row + inner
    second = batch[len(batch) - known[1].ndim + 2 :] + inner + column
    left, right = map(ast.unparse, sides)
    equation = f"{first},{second}->{batch}{row}{column}"
    yield CONTRACTION, f"torch.einsum({equation!r}, {left}, {right})", "matmul copies what it repeats; einsum does not"


def contractions(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    """`torch.einsum` of three operands and more."""
    found = reader.read(node)
    if found is not None and found.name == "einsum" and len(found.operands) > 3 and not found.keywords:
        yield NAMED, f"effops.einsum({', '.join(map(ast.unparse, found.operands))})", WITHIN_BUDGET


def contraction_paths(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    found = reader.read(node)
    equation = literal(found.operands[0]) if found is not None and found.name == "einsum" else None
    if found is None or not isinstance(equation, str) or len(found.operands) < 4 or "..." in equation:
        return
    known = trial.values(found.operands[1:])
    if known is None:
        return
    equation = equation.replace(" ", "")
    arrays = [numpy.broadcast_to(numpy.float32(0), tuple(one.shape)) for one in known]
    path, _ = numpy.einsum_path(equation, *arrays, optimize="optimal")
    inputs, result = equation.split("->")
    terms = list(zip(inputs.split(","), map(ast.unparse, found.operands[1:])))
    for step in path[1:]:
        taken = [terms.pop(place) for place in sorted(step, reverse=True)][::-1]
        remaining = set(result).union(*(letters for letters, _ in terms))
        letters = "".join(sorted(set("".join(one for one, _ in taken)) & remaining)) if terms else result
        source = f"torch.einsum({','.join(one for one, _ in taken) + '->' + letters!r}, "
        terms.append((letters, source + ", ".join(one for _, one in taken) + ")"))
    yield CONTRACTION, terms[0][1], "no step of this order makes more than its operands and result"


def one_hot(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    pair = reader.pair(node, "matmul")
    cast = None if pair is None else reader.read(pair[0])
    while cast is not None and cast.name in ("float", "to", "type_as", "double", "half", "bfloat16", "type"):
        cast = reader.read(cast.operands[0])
    if pair is not None and cast is not None and cast.name == "one_hot":
        yield LIBRARY, f"{text(pair[1])}[{ast.unparse(cast.operands[0])}]", "rows are taken where they stand"
