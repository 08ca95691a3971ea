"""Rules of attention: the softmax of products of all pairs, and its products with values; scores by tanh of sums."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from effops.programs.large.source.masks import CASTS, Mask, added, arguments_of, masked
from effops.programs.large.source.patterns import NAMED, Operation, Proposals, Reader, literal, rows, text
from effops.programs.large.source.trials import Trial

SCORES = re.compile(r"(\.\.\.|\w*)(\w)(\w),\1(\w)\3->\1\2\4")  # products of rows with rows
SUMS = re.compile(r"(\.\.\.|\w*)(\w)(\w),\1\3(\w)->\1\2\4")  # of rows with columns
MEANS_ARE_ZERO = "; a query that no key is left for has 0, and not the mean of the values"


class Scores(NamedTuple):
    """Products of all pairs, their factor if there is one, and their masks."""

    query: ast.expr
    key: ast.expr
    are_columns: bool = False  # whether the keys are those of a matrix product, as columns
    factor: Operation | None = None
    masks: tuple[Mask, ...] = ()


def attention(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    """`softmax(scores) @ value`, also with dropout of the weights."""
    pair = _product(reader, node, SUMS)
    if pair is None:
        return
    weights, value = pair
    dropout, why = "", "the weights of all pairs are not made"
    while (found := reader.read(weights)) is not None and found.name in (*CASTS, "dropout"):
        if found.name == "dropout":
            if dropout:
                return
            dropout = _dropout(reader, found)
        weights = found.operands[0]
    if dropout:
        why += "; other weights are dropped, with the same probability: compared without dropout"
    for query, key, rest, is_mean in _weights(reader, weights, node, trial):
        arguments = f"{query}, {key}, {text(value)}{rest}{dropout}"
        yield NAMED, f"effops.attention({arguments})", why + MEANS_ARE_ZERO * is_mean


def attention_weights(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    for query, key, rest, is_mean in _weights(reader, node, node, trial):
        why = "the scores are not made beside the weights" + MEANS_ARE_ZERO * is_mean
        yield NAMED, f"effops.attention_weights({query}, {key}{rest})", why


def _product(reader: Reader, node: ast.expr, equation: re.Pattern[str]) -> tuple[ast.expr, ast.expr] | None:
    """The operands of a matrix product, or of the einsum of an equation."""
    pair = reader.pair(node, "matmul")
    if pair is not None and equation is SUMS:
        return pair
    found = reader.read(node)
    if found is None or found.name != "einsum" or not found.only(3) or len(found.operands) < 3:
        return None
    given = literal(found.operands[0])
    is_product = isinstance(given, str) and equation.fullmatch(given.replace(" ", ""))
    return (found.operands[1], found.operands[2]) if is_product else None


def _dropout(reader: Reader, found: Operation) -> str:
    """The argument for the dropout of weights; nothing where none is dropped, now and later."""
    chance, training = found.argument(1, "p"), found.argument(2, "training", "train")
    if literal(training) is False or reader.number(chance) == 0:
        return ""
    source = "0.5" if chance is None else ast.unparse(chance)
    if training is not None and literal(training) is not True:
        source += f" if {ast.unparse(training)} else 0.0"
    return f", dropout_p={source}"


def _weights(reader: Reader, node: ast.expr, at: ast.expr, trial: Trial) -> Iterator[tuple[str, str, str, bool]]:
    """Query, key and further arguments of weights that are read at an expression; whether there were means."""
    scored = _softmax(reader, node, trial)
    found = None if scored is None else _scores(reader, scored)
    if found is None:
        return
    query, scale = _scaled(reader, found, at, trial)
    columns = reader.transposed(found.key, trial) if found.are_columns else None
    if columns is not None and not reader.definitions.are_same(columns, at):
        columns = None
    key = text(found.key) if columns is None else text(columns)
    if found.are_columns and columns is None:
        key += ".mT"
    factor = [] if found.factor is None else found.factor.operands
    read = [found.query, found.key if columns is None else columns, *(one.node for one in found.masks), *factor[1:]]
    if all(reader.definitions.are_same(one, at) for one in read):
        for mask, is_mean in arguments_of(found.masks):
            yield query, key, f"{mask}, scale={scale}", is_mean


def _softmax(reader: Reader, node: ast.expr, trial: Trial) -> ast.expr | None:
    """What a softmax over the last axis is taken of."""
    found = reader.read(node)
    if found is None or found.name != "softmax" or not found.only(2, "dim", "axis", "dtype"):
        return None
    axis = reader.number(found.argument(1, "dim", "axis"))
    if type(axis) is int and axis >= 0:
        known = trial.values(found.operands[:1])
        axis -= known[0].ndim if known is not None else 0
    return found.operands[0] if axis == -1 else None


def _scores(reader: Reader, node: ast.expr) -> Scores | None:
    pair = reader.pair(node, "matmul")
    if pair is not None:
        return Scores(*pair, are_columns=True)
    pair = _product(reader, node, SCORES)
    if pair is not None:
        return Scores(*pair)
    found = reader.read(node)
    if found is None:
        return None
    if found.name in CASTS:
        return _scores(reader, found.operands[0])
    for inner, mask in masked(reader, found):
        scores = _scores(reader, inner)
        if scores is not None:
            return scores._replace(masks=(*scores.masks, mask))
    if len(found.operands) != 2 or found.keywords:
        return None
    for one, other in (found.operands, found.operands[::-1])[: 1 if found.name in ("div", "sub") else 2]:
        scores = _scores(reader, one) if found.name in ("add", "sub", "mul", "div") else None
        if scores is None:
            continue
        if found.name in ("add", "sub"):
            mask = added(reader, other, is_negative=found.name == "sub")
            return scores._replace(masks=(*scores.masks, mask))
        if scores.factor is None and all(mask.is_condition for mask in scores.masks):
            return scores._replace(factor=Operation(found.name, [one, other], {}))
    return None


def _scaled(reader: Reader, found: Scores, at: ast.expr, trial: Trial) -> tuple[str, str]:
    """The query and the scale. A factor that is a tensor stays with the query."""
    query = found.query
    factor = found.factor
    if factor is None:
        scaled = reader.read(query)
        pairs = [] if scaled is None or scaled.name not in ("mul", "div") else [scaled.operands]
        pairs += [one[::-1] for one in pairs if scaled is not None and scaled.name == "mul"]
        for one, other in (pair for pair in pairs if len(pair) == 2):
            if reader.definitions.are_same(one, at) and _is_number(other, trial):
                return text(one), _power(scaled, other)
        return text(query), "1.0"
    other = factor.operands[1]
    if _is_number(other, trial):
        return text(query), _power(factor, other)
    sign = "*" if factor.name == "mul" else "/"
    return f"({text(query)} {sign} {text(other)})", "1.0"


def _power(factor: Operation | None, number: ast.expr) -> str:
    return ast.unparse(number) if factor is not None and factor.name == "mul" else f"1 / {text(number)}"


def _is_number(node: ast.expr, trial: Trial) -> bool:
    known = trial.values([node])
    return known is not None and not isinstance(known[0], Tensor)


class WeightedSum(NamedTuple):
    """A sum over the last axis of an expression, with a weight for each place there, as source.

    A product with a matrix of one column keeps an axis of size 1.
    """

    node: ast.expr
    weight: str
    bias: str = ""
    keeps_axis: bool = False


def additive_scores(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    for found in _weighted_sums(reader, node, trial):
        tanh = reader.read(found.node)
        if tanh is None or tanh.name != "tanh" or not tanh.only(1):
            continue
        sides = _sides(reader, tanh.operands[0], node, trial)
        if sides is not None:
            source = f"effops.additive_attention_scores({sides[0]}, {sides[1]}, {found.weight})"
            source += f" + {found.bias}" if found.bias else ""
            source = f"({source}).unsqueeze(-1)" if found.keeps_axis else source
            yield NAMED, source, "the sums of all pairs are not made"


def _weighted_sums(reader: Reader, node: ast.expr, trial: Trial) -> Iterator[WeightedSum]:
    """The ways to read an expression as such a sum."""
    node = reader.resolved(node)
    summed = reader.summed(node)
    sides = None if summed is None or summed[1] != (-1,) else reader.product(summed[0])
    for one, other in () if sides is None else (sides, sides[::-1]):
        yield WeightedSum(one, text(other))
    squeezed = _without_last_axis(reader, node)
    if squeezed is not None:
        products = _products_with_one_column(reader, squeezed, trial)
        yield from (one._replace(keeps_axis=False) for one in products if one.keeps_axis)
    yield from _products_with_one_column(reader, node, trial)


def _without_last_axis(reader: Reader, node: ast.expr) -> ast.expr | None:
    """What `x.squeeze(-1)` or `x[..., 0]` is taken of."""
    if isinstance(node, ast.Subscript):
        return node.value if ast.unparse(node.slice) in ("..., 0", "(..., 0)") else None
    found = reader.read(node)
    is_squeezed = found is not None and found.name == "squeeze" and literal(found.argument(1, "dim")) == -1
    return found.operands[0] if found is not None and is_squeezed else None


def _products_with_one_column(reader: Reader, node: ast.expr, trial: Trial) -> Iterator[WeightedSum]:
    """The ways to read an expression as a product with one vector: by a layer, by `linear`, or by `@`."""
    node = reader.resolved(node)
    pair, found = reader.pair(node, "matmul"), reader.read(node)
    if isinstance(node, ast.Call) and len(node.args) == 1 and reader.is_a(node.func, nn.Linear):
        layer, source = reader.described(node.func).values, text(node.func)
        if layer["weight"].shape[0] == 1:
            bias = "" if layer.get("bias") is None else f"{source}.bias"
            yield WeightedSum(node.args[0], f"{source}.weight.squeeze(0)", bias, True)
    elif pair is not None:
        yield from _with_vector(*pair, None, -1, trial)
    elif found is not None and found.name == "linear" and found.only(3, "weight", "bias"):
        weight = found.argument(1, "weight")
        if weight is not None:
            yield from _with_vector(found.operands[0], weight, found.argument(2, "bias"), 0, trial)


def _with_vector(
    node: ast.expr, weight: ast.expr, bias: ast.expr | None, axis: int, trial: Trial
) -> Iterator[WeightedSum]:
    """The product with a weight, if that is a vector or has one entry along an axis."""
    known = trial.values([weight])
    shape = known[0].shape if known is not None and isinstance(known[0], Tensor) else ()
    source = "" if bias is None or isinstance(bias, ast.Constant) else ast.unparse(bias)
    if len(shape) == 1:
        yield WeightedSum(node, text(weight), source)
    elif len(shape) == 2 and shape[axis] == 1:
        yield WeightedSum(node, f"{text(weight)}.squeeze({axis})", source, True)


def _sides(reader: Reader, node: ast.expr, at: ast.expr, trial: Trial) -> tuple[str, str] | None:
    """Queries and keys whose sums of all pairs an expression is. What is the same for all pairs goes to the queries."""
    terms = list(_terms(reader, node))
    known = trial.values(terms)
    if known is None or not all(isinstance(one, Tensor) for one in known):
        return None
    if not all(reader.definitions.are_same(one, at) for one in terms):
        return None
    queries: list[str] = []
    keys: list[str] = []
    for term, value in zip(terms, known):
        is_of_query = value.ndim < 2 or value.shape[-2] == 1
        source = rows(reader, term, trial, -2 if is_of_query else -3)
        if source is None:
            return None
        (queries if is_of_query else keys).append(source)
    return (" + ".join(queries), " + ".join(keys)) if queries and keys else None


def _terms(reader: Reader, node: ast.expr) -> Iterator[ast.expr]:
    pair = reader.pair(node, "add")
    if pair is None:
        yield node
    else:
        for one in pair:
            yield from _terms(reader, one)
