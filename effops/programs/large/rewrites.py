"""Other expressions for what a slice makes: named ops, contractions and functions of libraries.

Each is proposed by its syntax alone. Whether it is equal, and takes less, is found by running it.
"""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.distributions import MixtureSameFamily

from effops.programs.capture.scopes import Fields
from effops.programs.large.patterns import Operation, Reader, literal, text, with_replaced
from effops.programs.large.slices import Slice
from effops.programs.large.trials import Trial

FEW = 8  # coordinates: a difference keeps digits there that a product loses, and broadcasting is fast
NAMED, CONTRACTION, LIBRARY = "named op", "contraction", "library function"


@dataclass(frozen=True, eq=False)
class Rewrite:
    """Statements with the same results, and why they take less.

    Attributes:
        how: "named op", "contraction", "library function" or "loop"
        why: why they take less, and what they cost
        keeps_operands_alone: whether backward finds what it needs in the operands, and what is made is not kept
    """

    how: str
    statements: list[ast.stmt]
    why: str
    keeps_operands_alone: bool = False


def rewrites(found: Slice, trial: Trial) -> Iterator[Rewrite]:
    """Named ops first, then contractions and functions of libraries."""
    reader = Reader(found)
    proposals: list[tuple[str, ast.expr, str, str]] = []
    for node in reader.nodes():
        for rule in RULES:
            try:
                proposals += [(how, node, source, why) for how, source, why in rule(reader, node, trial)]
            except (AttributeError, IndexError, KeyError):
                continue
    for wanted in (NAMED, CONTRACTION, LIBRARY):
        for how, node, source, why in proposals:
            if how == wanted:
                yield Rewrite(how, with_replaced(found, node, source), why, how == NAMED)


Proposals = Iterator[tuple[str, str, str]]


def attention(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    pair = reader.pair(node, "matmul")
    if pair is None:
        return
    dropped = reader.read(pair[0])
    inner = dropped.operands[0] if dropped is not None and dropped.name == "dropout" else pair[0]
    scores = reader.softmax(inner)
    parts = scores and _scores(reader, scores)
    if parts and inner is pair[0]:
        query, key, rest = parts
        yield NAMED, f"effops.attention({query}, {key}, {text(pair[1])}{rest})", "the weights of all pairs are not made"


def attention_weights(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    scores = reader.softmax(node)
    parts = scores and _scores(reader, scores)
    if parts:
        query, key, rest = parts
        yield NAMED, f"effops.attention_weights({query}, {key}{rest})", "the scores are not made beside the weights"


def _scores(reader: Reader, node: ast.expr) -> tuple[str, str, str] | None:
    """Query, key and further arguments of scaled and masked products."""
    mask, scale = "", "1.0"
    found = reader.read(node)
    if found is not None and found.name == "masked_fill" and len(found.operands) == 3:
        filled = found.operands[1]
        is_inverted = isinstance(filled, ast.UnaryOp) and isinstance(filled.op, ast.Invert)
        kept = ast.unparse(filled.operand) if is_inverted else f"~{text(filled)}"  # type: ignore[attr-defined]
        mask = f", attn_mask={kept}"
        node = found.operands[0]
    elif found is not None and found.name == "add":
        sides = found.operands
        scored = next((one for one in sides if _scores(reader, one)), None)
        if scored is None:
            return None
        mask = f", attn_mask={ast.unparse(sides[0] if scored is sides[1] else sides[1])}"
        node = scored
    found = reader.read(node)
    if found is not None and found.name in ("mul", "div") and len(found.operands) == 2:
        left, right = found.operands
        if found.name == "mul" and reader.pair(right, "matmul"):
            left, right = right, left
        node, scale = left, ast.unparse(right) if found.name == "mul" else f"1 / {text(right)}"
    pair = reader.pair(node, "matmul")
    if pair is None:
        return None
    query, key = pair
    scaled = reader.read(query)
    if scaled is not None and scaled.name in ("mul", "div") and scale == "1.0" and len(scaled.operands) == 2:
        query = scaled.operands[0]
        scale = ast.unparse(scaled.operands[1]) if scaled.name == "mul" else f"1 / {text(scaled.operands[1])}"
    matrices = reader.transposed(key)
    return text(query), text(matrices) if matrices is not None else f"{text(key)}.mT", f"{mask}, scale={scale}"


def additive_scores(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    summed = reader.summed(node)
    sides: Sequence[ast.expr] | None = None
    if summed is not None and summed[1] == (-1,):
        sides = reader.product(summed[0])
    pair = reader.pair(node, "matmul")
    for one, other in [*([(sides[0], sides[1]), (sides[1], sides[0])] if sides else []), *([pair] if pair else [])]:
        tanh = reader.read(one)
        sums = reader.pair(tanh.operands[0], "add") if tanh is not None and tanh.name == "tanh" else None
        if sums is None:
            continue
        for query, key in (sums, sums[::-1]):
            left = _without_axis(reader, query, trial, -2)
            right = _without_axis(reader, key, trial, -3)
            if left and right:
                why = "the sums of all pairs are not made"
                yield NAMED, f"effops.additive_attention_scores({left}, {right}, {text(other)})", why


def _without_axis(reader: Reader, node: ast.expr, trial: Trial, axis: int) -> str | None:
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


def products(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    summed = reader.summed(node)
    sides = None if summed is None else reader.product(summed[0])
    if summed is None or sides is None:
        return
    left, right = map(ast.unparse, sides)
    known = trial.values(sides)
    if known is None or not all(isinstance(one, Tensor) for one in known):
        return
    dimensions = max(one.ndim for one in known)
    axes = {axis % dimensions for axis in summed[1]}
    why = "the products are added up as they are made"
    if axes == {dimensions - 1}:
        yield NAMED, f"effops.broadcast_dot({left}, {right})", why
    yield CONTRACTION, f"torch.einsum({_equation(known, axes)!r}, {left}, {right})", why


def _equation(operands: Sequence[Tensor], axes: set[int]) -> str:
    """The equation of a sum over axes of broadcast operands. Axes of size 1 may stand beside others."""
    letters = string.ascii_lowercase[: max(one.ndim for one in operands)]
    inputs = [letters[len(letters) - one.ndim :] for one in operands]
    return ",".join(inputs) + "->" + "".join(one for place, one in enumerate(letters) if place not in axes)


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
    product = f"torch.einsum({_equation(known, {axis % dimensions})!r}, {ast.unparse(difference[0])}, "
    product += f"{ast.unparse(difference[1])})"
    squares = [f"{side}.square().sum({axis})" for side in (left, right)]
    why = "squares and a product take the place of the differences; small distances lose digits"
    yield CONTRACTION, f"({squares[0]} + {squares[1]} - 2 * {product}){'.clamp(min=0)' + root if root else ''}", why
    if cdist:
        yield LIBRARY, f"{cdist}{power}", "distances are made without differences"


def _cdist(reader: Reader, sides: Sequence[ast.expr], trial: Trial, p: float) -> str | None:
    """`torch.cdist` of two sides that are broadcast along each other's rows."""
    for turned, (one, other) in ((False, sides), (True, sides[::-1])):
        left, right = _rows(reader, one, trial, -2), _rows(reader, other, trial, -3)
        if left and right:
            more = ", compute_mode='donot_use_mm_for_euclid_dist'" if p == 2 else f", p={p}"
            return f"torch.cdist({left}, {right}{more})" + (".mT" if turned else "")
    return None


def _rows(reader: Reader, node: ast.expr, trial: Trial, axis: int) -> str | None:
    """A side without the axis along which it is repeated: as it was before an index or `unsqueeze` put that in."""
    known = trial.values([node])
    if known is None or not isinstance(known[0], Tensor):
        return None
    shorter = _without_axis(reader, node, trial, axis)
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
    yield CONTRACTION, f"torch.einsum({_equation(known, {axis})!r}, {unit[0]}, {unit[1]})", why


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


def linear_cross_entropy(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    loss = _cross_entropy(reader, node)
    if loss is None or not hasattr(torch.nn.functional, "linear_cross_entropy"):
        return
    logits, target, rest = loss
    hidden = _linear(reader, logits)
    if hidden is None:
        return
    targets = f"{text(target)}.flatten()" if hidden.classes_come_second else ast.unparse(target)
    arguments = ", ".join([hidden.rows, hidden.weight, targets, *hidden.bias, *rest])
    chunks = "options=torch.nn.LinearCrossEntropyOptions()"
    why = (
        "the logits are made in chunks, with their gradients at once; backward runs once, and not twice differentiated"
    )
    yield LIBRARY, f"torch.nn.functional.linear_cross_entropy({arguments}, {chunks})", why


def _cross_entropy(reader: Reader, node: ast.expr) -> tuple[ast.expr, ast.expr, list[str]] | None:
    """Logits, targets and further arguments of the function, or of its module."""
    if isinstance(node, ast.Call) and _is(reader, node.func, nn.CrossEntropyLoss) and len(node.args) == 2:
        fields = reader.described(node.func).values
        usual = {"weight": None, "label_smoothing": 0.0, "reduction": "mean", "ignore_index": -100}
        changed = [name for name, value in usual.items() if fields[name] != value]
        if {"weight", "label_smoothing"} & {*changed}:
            return None
        return node.args[0], node.args[1], [f"{one}={text(node.func)}.{one}" for one in changed]
    found = reader.read(node)
    if found is None or found.name != "cross_entropy" or len(found.operands) > 2:
        return None
    logits, target = found.argument(0, "input"), found.argument(1, "target")
    if logits is None or target is None or "label_smoothing" in found.keywords:  # which is not made in chunks
        return None
    rest = [f"{name}={ast.unparse(one)}" for name, one in found.keywords.items() if name not in ("input", "target")]
    return logits, target, rest


class Linear(NamedTuple):
    """A product of rows with a weight, as source."""

    rows: str
    weight: str
    bias: Sequence[str]  # the argument, if there is one
    classes_come_second: bool = False  # before the positions, which the targets have too


def _linear(reader: Reader, node: ast.expr | None) -> Linear | None:
    node = None if node is None else reader.resolved(node)
    pair = reader.pair(node, "matmul")
    if pair is not None:
        weight = reader.transposed(pair[1])
        return Linear(text(pair[0]), f"{text(pair[1])}.mT" if weight is None else ast.unparse(weight), ())
    if isinstance(node, ast.Call) and _is(reader, node.func, nn.Linear) and len(node.args) == 1:
        module = text(node.func)
        has_bias = reader.described(node.func).values.get("bias") is not None
        bias = [f"linear_bias={module}.bias"] if has_bias else []
        return Linear(text(node.args[0]), f"{module}.weight", bias)
    if isinstance(node, ast.Subscript):  # positions, as those that have a next one
        found = _linear(reader, node.value)
        if found is None:
            return None
        rows = ast.Subscript(ast.parse(found.rows, mode="eval").body, node.slice, ast.Load())
        return found._replace(rows=ast.unparse(rows))
    read: Operation | None = reader.read(node)
    if read is None:
        return None
    if read.name == "linear" and len(read.operands) >= 2:
        added = read.argument(2, "bias")
        more = () if added is None else (f"linear_bias={ast.unparse(added)}",)
        return Linear(text(read.operands[0]), ast.unparse(read.operands[1]), more)
    sizes = [literal(one) for one in read.operands[1:]]
    flat = read.name in ("view", "reshape") and len(sizes) == 2 and sizes[0] == -1
    flat |= read.name == "flatten" and sizes in ([0, 1], [0, -2], [0])
    turned = read.name == "transpose" and sizes in ([1, 2], [-1, -2], [-2, -1], [2, 1])
    if not (flat or turned or read.name == "contiguous"):
        return None
    found = _linear(reader, read.operands[0])
    if found is None or read.name == "contiguous":
        return found
    return found._replace(rows=f"{found.rows}.flatten(0, -2)", classes_come_second=turned)


def one_hot(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    pair = reader.pair(node, "matmul")
    cast = None if pair is None else reader.read(pair[0])
    while cast is not None and cast.name in ("float", "to", "type_as", "double", "half", "bfloat16", "type"):
        cast = reader.read(cast.operands[0])
    if pair is not None and cast is not None and cast.name == "one_hot":
        yield LIBRARY, f"{text(pair[1])}[{ast.unparse(cast.operands[0])}]", "rows are taken where they stand"


def mixtures(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    """Log densities of `torch.distributions`, whose objects are made in the slice or are known."""
    found = reader.read(node)
    if found is None or found.name != "log_prob" or len(found.operands) != 2:
        return
    distribution, value = found.operands
    made = reader.read(distribution)
    x, source = ast.unparse(value), text(distribution)
    why = "differences of all pairs are not made"
    if made is not None and made.name == "MixtureSameFamily":
        arguments = ", ".join(map(ast.unparse, made.operands))
        yield NAMED, f"effops.distributions.Mixture({arguments}).log_prob({x})", why
    if made is None and _is(reader, distribution, MixtureSameFamily):
        arguments = f"{source}.mixture_distribution, {source}.component_distribution"
        yield NAMED, f"effops.distributions.Mixture({arguments}).log_prob({x})", why
    if made is not None and made.name == "Independent":
        base = text(made.operands[0])
        parts = reader.read(made.operands[0])
        loc, scale = f"{base}.loc", f"{base}.scale"
        if parts is not None and parts.name == "Normal" and len(parts.operands) == 2:
            loc, scale = map(ast.unparse, parts.operands)
        yield NAMED, f"effops.normal_log_prob({loc}, {scale}, {x})", why
    weights = f"{source}.mixture_distribution.logits, "
    base = f"{source}.component_distribution.base_dist"
    yield NAMED, f"effops.normal_mixture_log_prob({weights}{base}.loc, {base}.scale, ({x}).unsqueeze(-2))", why
    yield NAMED, f"effops.normal_log_prob({source}.base_dist.loc, {source}.base_dist.scale, {x})", why


def _is(reader: Reader, node: ast.expr, kind: type) -> bool:
    value = reader.described(node)
    return isinstance(value, Fields) and issubclass(value.kind, kind)


def normal_sums(reader: Reader, node: ast.expr, trial: Trial) -> Proposals:
    """`Normal(loc, scale).log_prob(x).sum(-1)`."""
    summed = reader.summed(node)
    found = None if summed is None else reader.read(summed[0])
    if summed is None or found is None or summed[1] != (-1,) or found.name != "log_prob" or len(found.operands) != 2:
        return
    made = reader.read(found.operands[0])
    source = text(found.operands[0])
    loc, scale = f"{source}.loc", f"{source}.scale"
    if made is not None and made.name == "Normal" and len(made.operands) == 2:
        loc, scale = map(ast.unparse, made.operands)
    x = ast.unparse(found.operands[1])
    yield NAMED, f"effops.normal_log_prob({loc}, {scale}, {x})", "differences of all pairs are not made"


RULES = (
    attention,
    attention_weights,
    additive_scores,
    mixtures,
    normal_sums,
    products,
    squared_distances,
    absolute_distances,
    cosine_similarity,
    contraction_paths,
    linear_cross_entropy,
    one_hot,
    expanded_products,
)
