"""Rules of losses: the head of a language model, whose logits need not be made."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from effops.programs.large.source.patterns import LIBRARY, Operation, Proposals, Reader, literal, text
from effops.programs.large.source.trials import Trial


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
        "the logits are made in chunks, with their gradients at once, for one backward pass that is not differentiated"
    )
    yield LIBRARY, f"torch.nn.functional.linear_cross_entropy({arguments}, {chunks})", why


def _cross_entropy(reader: Reader, node: ast.expr) -> tuple[ast.expr, ast.expr, list[str]] | None:
    """Logits, targets and further arguments of the function, or of its module."""
    if isinstance(node, ast.Call) and reader.is_a(node.func, nn.CrossEntropyLoss) and len(node.args) == 2:
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
    if isinstance(node, ast.Call) and reader.is_a(node.func, nn.Linear) and len(node.args) == 1:
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
