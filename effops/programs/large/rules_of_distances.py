"""Rules of distances and similarities of all pairs."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from torch import Tensor

from effops.programs.large.rules_of_products import equation_of
from effops.programs.large.source.patterns import CONTRACTION, LIBRARY, NAMED, Proposals, Reader, literal, rows, text
from effops.programs.large.source.trials import Trial

FEW = 8  # coordinates: a difference keeps digits there that a product loses, and broadcasting is fast


def squared_distances(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    """Sums of squares of differences, and their roots."""
    found, root = reader.summed(node), ""
    difference = None
    if found is not None:
        base = reader.squared(found[0])
        difference = reader.pair(base, "sub")
    else:
        normed = reader.norm(node)
        if normed is not None and normed[2] == 2:
            found, root = normed[:2], ".sqrt()"
            difference = reader.pair(normed[0], "sub")
    if found is None or difference is None:
        return
    known = trial.values(difference)
    if known is None or not all(isinstance(one, Tensor) for one in known):
        return
    dimensions = max(one.ndim for one in known)
    axis = found[1][0] % dimensions - dimensions
    if len(found[1]) > 1:
        return
    left, right = map(text, difference)
    size = max(one.shape[axis] if one.ndim >= -axis else 1 for one in known)
    cdist = _cdist(reader, difference, trial, 2.0) if axis == -1 else None
    power = "" if root else ".square()"
    if trial.full(size) <= FEW:
        if cdist:
            yield LIBRARY, f"{cdist}{power}", "distances are made without differences, and keep their digits"
        return
    product = f"torch.einsum({equation_of(known, {axis % dimensions})!r}, {ast.unparse(difference[0])}, "
    product += f"{ast.unparse(difference[1])})"
    squares = [f"{side}.square().sum({axis})" for side in (left, right)]
    why = "squares and a product take the place of the differences; small distances lose digits"
    # By rounding a distance of 0 becomes a negative one, of which a root further on is NaN.
    yield CONTRACTION, f"({squares[0]} + {squares[1]} - 2 * {product}).clamp(min=0){root}", why
    if cdist:
        yield LIBRARY, f"{cdist}{power}", "distances are made without differences"


def _cdist(reader: Reader, sides: Sequence[ast.expr], trial: Trial, p: float) -> str | None:
    """`torch.cdist` of two sides that are broadcast along each other's rows."""
    for turned, (one, other) in ((False, sides), (True, sides[::-1])):
        left, right = rows(reader, one, trial, -2), rows(reader, other, trial, -3)
        if left and right:
            more = ", compute_mode='donot_use_mm_for_euclid_dist'" if p == 2 else f", p={p}"
            return f"torch.cdist({left}, {right}{more})" + (".mT" if turned else "")
    return None


def absolute_distances(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    found = reader.summed(node)
    difference = None
    if found is not None:
        magnitude = reader.read(found[0])
        if magnitude is not None and magnitude.name == "abs":
            difference = reader.pair(magnitude.operands[0], "sub")
    else:
        normed = reader.norm(node)
        if normed is not None and normed[2] == 1:
            found = normed[:2]
            difference = reader.pair(normed[0], "sub")
    if found is None or difference is None or found[1] != (-1,):
        return
    known = trial.values(difference)
    if known is None or trial.full(max(one.shape[-1] for one in known)) <= FEW:
        return
    cdist = _cdist(reader, difference, trial, 1.0)
    if cdist:
        yield LIBRARY, cdist, "differences are added up as they are made; on a GPU it can take longer than broadcasting"


def cosine_similarity(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    found = reader.read(node)
    if found is None or found.name != "cosine_similarity" or not found.only(4, "dim", "eps") or len(found.operands) < 2:
        return
    sides = found.operands[:2]
    given, eps = found.argument(2, "dim"), found.argument(3, "eps")
    dim = 1 if given is None else literal(given)
    known = trial.values(sides)
    if known is None or type(dim) is not int:
        return
    dimensions = max(one.ndim for one in known)
    more = "" if eps is None else f", eps={ast.unparse(eps)}"
    axis = dim % dimensions
    unit = [
        f"torch.nn.functional.normalize({ast.unparse(side)}, dim={axis - dimensions}{more})"
        for side, one in zip(sides, known)
        if one.ndim >= dimensions - axis
    ]
    if len(unit) != 2:
        return
    why = "unit vectors are multiplied, and the products are added up as they are made"
    if axis == dimensions - 1:
        yield NAMED, f"effops.broadcast_dot({unit[0]}, {unit[1]})", why
    yield CONTRACTION, f"torch.einsum({equation_of(known, {axis})!r}, {unit[0]}, {unit[1]})", why
