"""The sides of an operation on all pairs, as source without the axis of size 1 along which each is repeated."""

from __future__ import annotations

import ast

from torch import Tensor

from effops.programs.large.patterns import Reader, literal, text
from effops.programs.large.trials import Trial


def rows(reader: Reader, node: ast.expr, trial: Trial, axis: int) -> str | None:
    """A side without the axis along which it is repeated: as it was before an index or `unsqueeze` put that in."""
    known = trial.values([node])
    if known is None or not isinstance(known[0], Tensor):
        return None
    shorter = without_axis(reader, node, trial, axis)
    plain = _before_new_axis(node, known[0].ndim + axis)
    return plain or shorter


def _before_new_axis(node: ast.expr, place: int) -> str | None:
    """The `x` of `x[:, None]`, where None alone makes the axis at a place."""
    if not isinstance(node, ast.Subscript):
        return None
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    is_whole = all(isinstance(one, ast.Slice) and not (one.lower or one.upper or one.step) for one in parts[:place])
    rest = parts[place:]
    is_new = len(rest) > 0 and isinstance(rest[0], ast.Constant) and rest[0].value is None
    plain = all(isinstance(one, ast.Slice) and not (one.lower or one.upper or one.step) for one in rest[1:])
    return text(node.value) if is_whole and is_new and plain and len(parts) > place else None


def without_axis(reader: Reader, node: ast.expr, trial: Trial, axis: int) -> str | None:
    """The source of a tensor without an axis of size 1, which its expression may have put in."""
    known = trial.values([node])
    if known is None or not isinstance(known[0], Tensor):
        return None
    found = reader.read(node)
    if found is not None and found.name == "unsqueeze":
        place = literal(found.argument(1, "dim"))
        if type(place) is int and place % known[0].ndim == axis % known[0].ndim:
            return text(found.operands[0])
    shape = known[0].shape
    if len(shape) < -axis:
        return text(node) if len(shape) == -axis - 1 else None
    return f"{text(node)}.squeeze({axis})" if shape[axis] == 1 else None
