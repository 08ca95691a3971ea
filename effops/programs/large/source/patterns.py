"""Recognises operations in Python's syntax: `torch.sum(x, -1)` and `x.sum(dim=-1)` are the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from effops.programs.capture.scopes import Fields
from effops.programs.large.source.definitions import Definitions, targets
from effops.programs.large.source.slices import Slice, copied
from effops.programs.large.source.trials import Trial

NAMED, CONTRACTION, LIBRARY = "named op", "contraction", "library function"
Proposals = Iterator[tuple[str, str, str]]  # how, an expression as source, and why it takes less


class Operation(NamedTuple):
    """A call of a method, or of a function of a module, on its operands."""

    name: str
    operands: list[ast.expr]
    keywords: dict[str, ast.expr]

    def argument(self, place: int, *names: str) -> ast.expr | None:
        if len(self.operands) > place:
            return self.operands[place]
        return next((self.keywords[name] for name in names if name in self.keywords), None)

    def only(self, count: int, *keywords: str) -> bool:
        """Whether there are at most so many operands, and no keyword but these."""
        return len(self.operands) <= count and set(self.keywords) <= set(keywords)


BINARY = {
    ast.Mult: "mul",
    ast.Sub: "sub",
    ast.Add: "add",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}
SYNONYMS = {
    "multiply": "mul",
    "subtract": "sub",
    "bmm": "matmul",
    "absolute": "abs",
    "divide": "div",
    "mm": "matmul",
    "cosine_similarity": "cosine_similarity",
    "abs_": "abs",
    "square_": "square",
    "pow_": "pow",
    "mul_": "mul",
    "vector_norm": "norm",
    "masked_fill_": "masked_fill",
    "add_": "add",
    "sub_": "sub",
    "div_": "div",
    "true_divide": "div",
    "tanh_": "tanh",
}
# Layers that are operations, with the numbers that these take.
LAYERS: dict[Any, tuple[str, tuple[str, ...]]] = {
    nn.Softmax: ("softmax", ("dim",)),
    nn.Dropout: ("dropout", ("p", "training")),
    nn.Tanh: ("tanh", ()),
}


class Reader:
    """Reads the operations of a slice. A name stands for what it was assigned last, where that is certain."""

    def __init__(self, found: Slice) -> None:
        self.found = found
        self.definitions = Definitions(found.statements)

    def nodes(self) -> Iterator[ast.expr]:
        """The expressions of the slice, the outermost first; not names, which stand for what was assigned above."""
        nodes = (node for one in self.found.statements for node in ast.walk(one))
        return (node for node in nodes if isinstance(node, ast.expr) and not isinstance(node, ast.Name))

    def resolved(self, node: ast.expr) -> ast.expr:
        while isinstance(node, ast.Name):
            value = self.definitions.of(node).value
            if value is None:
                break
            node = value
        return node

    def read(self, node: ast.expr | None) -> Operation | None:
        """The operation of an expression, if it is one."""
        if node is None:
            return None
        node = self.resolved(node)
        if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
            return Operation(BINARY[type(node.op)], [node.left, node.right], {})
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return Operation("neg", [node.operand], {})
        layer = self._layer(node) if isinstance(node, ast.Call) else None
        if layer is not None:
            return layer
        if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Attribute, ast.Name)):
            return None
        if any(isinstance(one, ast.Starred) for one in node.args) or any(one.arg is None for one in node.keywords):
            return None
        keywords = {str(one.arg): one.value for one in node.keywords}
        if isinstance(node.func, ast.Name):
            return Operation(SYNONYMS.get(node.func.id, node.func.id), list(node.args), keywords)
        name = SYNONYMS.get(node.func.attr, node.func.attr)
        operands = list(node.args) if self.is_module(node.func.value) else [node.func.value, *node.args]
        if "input" in keywords:
            operands.insert(0, keywords.pop("input"))
        return Operation(name, operands, keywords) if operands else None

    def _layer(self, node: ast.Call) -> Operation | None:
        """The operation of a layer that is called, as `self.drop(x)` and `nn.Softmax(dim=-1)(x)`, with its numbers."""
        made = node.func
        if len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
            return None
        if not isinstance(made, ast.Call):
            layer = self.described(made)
            name, fields = LAYERS.get(layer.kind, ("", ())) if isinstance(layer, Fields) else ("", ())
            numbers: dict[str, ast.expr] = {field: ast.Attribute(made, field, ast.Load()) for field in fields}
        else:
            name, fields = LAYERS.get(self._class(made.func), ("", ()))
            numbers = {**dict(zip(fields, made.args[:1])), **{str(one.arg): one.value for one in made.keywords}}
        return Operation(name, [node.args[0]], numbers) if name else None

    def _class(self, node: ast.expr) -> Any:
        is_named = isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and self.is_module(node.value))
        value = self.module(node) if is_named else None
        return value if isinstance(value, type) else None

    def number(self, node: ast.expr | None) -> Any:
        """The number that an expression is, or stands for; None if it is not known."""
        if node is None:
            return None
        node = self.resolved(node)
        value = literal(node)
        value = self.described(node) if value is None else value
        return value if isinstance(value, (int, float)) else None

    def described(self, node: ast.expr) -> Any:
        """What a name or a field stands for; NotImplemented if that is unknown."""
        if isinstance(node, ast.Name):
            is_certain = self.definitions.times(node.id) <= 1
            return self.found.value(node.id) if is_certain else NotImplemented
        if isinstance(node, ast.Attribute):
            value = self.described(node.value)
            if isinstance(value, Fields):
                return value.values.get(node.attr, NotImplemented)
        return NotImplemented

    def is_a(self, node: ast.expr, kind: type) -> bool:
        """Whether an expression stands for an object of a class."""
        value = self.described(node)
        return isinstance(value, Fields) and issubclass(value.kind, kind)

    def is_module(self, node: ast.expr) -> bool:
        value: Any = None
        if isinstance(node, ast.Name):
            value = self.found.scope.names.get(node.id, self.found.scope.surroundings.get(node.id))
        elif isinstance(node, ast.Attribute) and self.is_module(node.value):
            value = getattr(self.module(node.value), node.attr, None)
        return isinstance(value, ModuleType)

    def module(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self.found.scope.names.get(node.id, self.found.scope.surroundings.get(node.id))
        assert isinstance(node, ast.Attribute)
        return getattr(self.module(node.value), node.attr, None)

    # What is made of operations.

    def summed(self, node: ast.expr) -> tuple[ast.expr, tuple[int, ...]] | None:
        """What a sum without `keepdim` is taken of, and its axes."""
        found = self.read(node)
        if found is None or found.name != "sum" or not found.only(2, "dim", "axis"):
            return None
        axes = found.argument(1, "dim", "axis")
        return None if axes is None else _with_axes(found.operands[0], axes)

    def norm(self, node: ast.expr) -> tuple[ast.expr, tuple[int, ...], int] | None:
        """What a norm without `keepdim` is taken of, its axes and its exponent."""
        found = self.read(node)
        if found is None or found.name != "norm" or not found.only(3, "dim", "axis", "p", "ord"):
            return None
        power = found.argument(1, "p", "ord")
        axes = found.argument(2, "dim", "axis")
        exponent = 2 if power is None else literal(power)
        if axes is None or exponent not in (1, 2):
            return None
        taken = _with_axes(found.operands[0], axes)
        return None if taken is None else (*taken, exponent)

    def product(self, node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
        return self.pair(node, "mul")

    def pair(self, node: ast.expr | None, name: str) -> tuple[ast.expr, ast.expr] | None:
        """The operands of an operation on two."""
        found = self.read(node)
        if found is None or found.name != name or len(found.operands) != 2 or found.keywords:
            return None
        return found.operands[0], found.operands[1]

    def squared(self, node: ast.expr) -> ast.expr | None:
        found = self.read(node)
        if found is None:
            return None
        if found.name == "square" and found.only(1):
            return found.operands[0]
        if found.name == "pow" and literal(found.argument(1, "exponent")) == 2:
            return found.operands[0]
        if found.name == "mul" and len(found.operands) == 2:
            left, right = found.operands
            if ast.dump(left) == ast.dump(right):
                return left
        return None

    def transposed(self, node: ast.expr, trial: Trial | None = None) -> ast.expr | None:
        """The matrices whose transposes an expression is. A trial knows axes that are counted from the first one."""
        node = self.resolved(node)
        if isinstance(node, ast.Attribute) and node.attr in ("mT", "T"):
            return node.value
        found = self.read(node)
        if found is None or found.name not in ("transpose", "swapaxes") or len(found.operands) != 3:
            return None
        axes = {literal(one) for one in found.operands[1:]}
        if axes == {-1, -2}:
            return found.operands[0]
        known = None if trial is None else trial.values(found.operands[:1])
        count = known[0].ndim if known is not None and isinstance(known[0], Tensor) else 0
        return found.operands[0] if axes == {count - 1, count - 2} else None


def literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _with_axes(operand: ast.expr, axes: ast.expr) -> tuple[ast.expr, tuple[int, ...]] | None:
    value = literal(axes)
    if type(value) is int:
        return operand, (value,)
    if isinstance(value, (tuple, list)) and value and all(type(one) is int for one in value):
        return operand, tuple(value)
    return None


def text(node: ast.expr) -> str:
    """An expression as source that can stand before a dot."""
    source = ast.unparse(node)
    is_closed = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return source if is_closed else f"({source})"


def with_replaced(found: Slice, node: ast.expr, source: str) -> list[ast.stmt]:
    """The statements of a slice, with another expression in the place of one. What nobody reads then is left out."""
    new = ast.parse(source, mode="eval").body
    statements = [_Replace(node, new).visit(one) for one in map(copied, found.statements)]
    return without_dead(statements, found.results)


def without_dead(statements: Sequence[ast.stmt], results: Sequence[str]) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    needed = set(results)
    for one in reversed(statements):
        nodes = [node for target in targets(one) for node in ast.walk(target)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        if names and not names & needed:
            continue
        kept.append(one)
        needed -= names  # an earlier value of them is not read any more
        needed |= {node.id for node in ast.walk(one) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        if isinstance(one, ast.AugAssign):
            needed |= names
    return kept[::-1]


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        if getattr(node, "copy_of", node) is self.old:
            return self.new
        return self.generic_visit(node)


def rows(reader: Reader, node: ast.expr, trial: Trial, axis: int) -> str | None:
    """A side of all pairs as source without the axis along which it is repeated, which an index may have put in."""
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


def _without_axis(reader: Reader, node: ast.expr, trial: Trial, axis: int) -> str | None:
    """The source of a tensor without an axis of size 1, which its expression may have put in."""
    known = trial.values([node])
    if known is None or not isinstance(known[0], Tensor):
        return None
    found = reader.read(node)
    if found is not None and found.name == "unsqueeze":
        place = literal(found.argument(1, "dim"))
        is_there = type(place) is int and place % known[0].ndim == axis % known[0].ndim
        if is_there and reader.definitions.are_same(found.operands[0], node):
            return text(found.operands[0])
    shape = known[0].shape
    if len(shape) < -axis:
        return text(node) if len(shape) == -axis - 1 else None
    return f"{text(node)}.squeeze({axis})" if shape[axis] == 1 else None
