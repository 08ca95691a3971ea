"""Masks of scores, as the arguments of the named ops that stand for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from effops.programs.large.source.patterns import Operation, Reader, literal, text

CASTS = {"to", "type", "type_as", "float", "double", "half", "bfloat16"}
# What has the same pairs as what it is called on.
SAME_PAIRS = {*CASTS, "bool", "byte", "int", "long", "view", "reshape", "unsqueeze", "expand", "contiguous"}
ONES = {"ones", "new_ones", "ones_like"}
# Whether a comparison with a number says the same of a mask of ones and zeros.
COMPARISONS: dict[tuple[type, int], bool] = {
    (ast.Eq, 0): False,
    (ast.Eq, 1): True,
    (ast.NotEq, 0): True,
    (ast.NotEq, 1): False,
    (ast.Gt, 0): True,
    (ast.GtE, 1): True,
    (ast.Lt, 1): False,
    (ast.LtE, 0): False,
}
NAMED_COMPARISONS = {"eq": ast.Eq, "ne": ast.NotEq, "gt": ast.Gt, "ge": ast.GtE, "lt": ast.Lt, "le": ast.LtE}
OPPOSITES: dict[type, type[ast.cmpop]] = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


class Mask(NamedTuple):
    """A condition of the pairs that take part, or numbers that are added to the scores.

    Attributes:
        node: the expression in the user's code
        source: the condition, or the numbers
        is_condition: whether it is one
        is_causal: whether it visibly leaves out later keys, and these alone
        is_finite: whether pairs that are left out may keep a score, so that a query without a key has the mean
    """

    node: ast.expr
    source: str
    is_condition: bool
    is_causal: bool
    is_finite: bool = False


def masked(reader: Reader, found: Operation) -> Iterator[tuple[ast.expr, Mask]]:
    """What may be masked in an operation, and the mask."""
    if found.name == "masked_fill":
        condition, value = found.argument(1, "mask"), found.argument(2, "value")
        if condition is not None and value is not None:
            yield found.operands[0], _condition(reader, condition, value, leaves_out=True)
    if found.name == "where" and len(found.operands) == 3 and not found.keywords:
        first, second, third = found.operands
        yield second, _condition(reader, first, third, leaves_out=False)  # torch.where(kept, scores, value)
        yield third, _condition(reader, first, second, leaves_out=True)
        yield first, _condition(reader, second, third, leaves_out=False)  # scores.where(kept, value)


def added(reader: Reader, node: ast.expr, *, is_negative: bool = False) -> Mask:
    """The mask of what is added to scores, or taken from them."""
    source = f"-{text(node)}" if is_negative else ast.unparse(node)
    return Mask(node, source, False, not is_negative and _adds_to_later_keys(reader, node))


def arguments_of(masks: Sequence[Mask]) -> Iterator[tuple[str, bool]]:
    """The arguments that stand for masks, the shortest first, and whether a query without a key had the mean."""
    if not masks:
        yield "", False
        return
    if len(masks) == 1 and masks[0].is_causal:
        yield ", is_causal=True", False
    conditions = [one.source for one in masks if one.is_condition]
    numbers = " + ".join(one.source for one in masks if not one.is_condition)
    condition = conditions[0] if len(conditions) == 1 else " & ".join(f"({one})" for one in conditions)
    both = f"torch.where({condition}, {numbers}, float('-inf'))"
    yield f", attn_mask={both if condition and numbers else condition or numbers}", any(one.is_finite for one in masks)


def _condition(reader: Reader, node: ast.expr, value: ast.expr, *, leaves_out: bool) -> Mask:
    is_up_to_diagonal = _triangle(reader, node)
    filled = ast.unparse(reader.resolved(value)).lower()
    is_finite = "inf" not in filled.replace("finfo", "")
    is_causal = is_up_to_diagonal is (not leaves_out)
    return Mask(node, _opposite(node) if leaves_out else ast.unparse(node), True, is_causal, is_finite)


def _opposite(node: ast.expr) -> str:
    """The opposite of a condition, as source."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ast.unparse(node.operand)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPPOSITES:
        return ast.unparse(ast.Compare(node.left, [OPPOSITES[type(node.ops[0])]()], node.comparators))
    return f"~{text(node)}"


def _triangle(reader: Reader, node: ast.expr) -> bool | None:
    """Whether a mask of numbers alone is true of the pairs up to the diagonal, or (False) of those after it.

    None if neither is certain at every size. A part of a mask begins at its upper left corner.
    """
    node = reader.resolved(node)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return _turned(_triangle(reader, node.operand), False)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compared(reader, node.left, type(node.ops[0]), node.comparators[0])
    if isinstance(node, ast.Subscript):
        return _triangle(reader, node.value) if _begins_at_corner(node) else None
    found = reader.read(node)
    if found is None:
        return None
    if found.name in ("tril", "triu") and _is_of_ones(reader, found.operands[0]):
        given = found.argument(1, "diagonal")
        diagonal = 0 if given is None else reader.number(given)
        known = {("tril", 0): True, ("triu", 1): False}
        return known.get((found.name, diagonal))
    if found.name in NAMED_COMPARISONS and len(found.operands) == 2:
        return _compared(reader, found.operands[0], NAMED_COMPARISONS[found.name], found.operands[1])
    if found.name == "sub" and literal(found.operands[0]) == 1:
        return _turned(_triangle(reader, found.operands[1]), False)
    if found.name == "logical_not":
        return _turned(_triangle(reader, found.operands[0]), False)
    return _triangle(reader, found.operands[0]) if found.name in SAME_PAIRS else None


def _turned(triangle: bool | None, is_same: bool | None) -> bool | None:
    return None if triangle is None or is_same is None else triangle is is_same


def _compared(reader: Reader, node: ast.expr, operator: type, number: ast.expr) -> bool | None:
    value = literal(number)
    is_same = COMPARISONS.get((operator, value)) if isinstance(value, int) else None
    return _turned(_triangle(reader, node), is_same)


def _begins_at_corner(node: ast.Subscript) -> bool:
    """Whether a part has the first rows and columns of what it is taken of: `mask[None, :n, :n]`."""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return all(
        (isinstance(one, ast.Slice) and one.lower is None and one.step is None)
        or (isinstance(one, ast.Constant) and one.value in (None, ...))
        for one in parts
    )


def _is_of_ones(reader: Reader, node: ast.expr) -> bool:
    found = reader.read(node)
    while found is not None and found.name in SAME_PAIRS:
        found = reader.read(found.operands[0])
    return found is not None and found.name in ONES


def _adds_to_later_keys(reader: Reader, node: ast.expr) -> bool:
    """Whether numbers that are added visibly differ from 0 for later keys alone. A trial tells whether they mask."""
    node = reader.resolved(node)
    if isinstance(node, ast.Subscript):
        return _begins_at_corner(node) and _adds_to_later_keys(reader, node.value)
    found = reader.read(node)
    if found is None:
        return False
    if found.name == "triu":
        return bool(reader.number(found.argument(1, "diagonal")) == 1)
    if found.name == "generate_square_subsequent_mask":
        return True
    if found.name == "masked_fill":
        zeros, condition = reader.read(found.operands[0]), found.argument(1, "mask")
        is_of_zeros = zeros is not None and zeros.name in ("zeros", "new_zeros", "zeros_like")
        return is_of_zeros and condition is not None and _triangle(reader, condition) is False
    return found.name in SAME_PAIRS and _adds_to_later_keys(reader, found.operands[0])
