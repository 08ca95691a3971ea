"""Rules of attention: softmax of products of all pairs, and scores of their sums."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from effops.programs.large.patterns import NAMED, Proposals, Reader, text
from effops.programs.large.sides import without_axis
from effops.programs.large.trials import Trial


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
            left = without_axis(reader, query, trial, -2)
            right = without_axis(reader, key, trial, -3)
            if left and right:
                why = "the sums of all pairs are not made"
                yield NAMED, f"effops.additive_attention_scores({left}, {right}, {text(other)})", why
