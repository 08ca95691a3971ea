"""What the names in statements stand for where they are read, as far as the statements follow one another."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from effops.programs.large.source.slices import assigned


class Definition(NamedTuple):
    """The statement that a name was assigned by last, by its number, and the expression.

    The number is -1 for a name that was there before. The expression is None where it is not known, as after a loop.
    """

    statement: int
    value: ast.expr | None


BEFORE = Definition(-1, None)


class Definitions:
    """Those of all names, wherever an expression of the statements stands."""

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        self._there: dict[ast.AST, Mapping[str, Definition]] = {}
        self._times: Counter[str] = Counter()
        last: dict[str, Definition] = {}
        for number, one in enumerate(statements):
            unknown = Definition(number, None)
            there = {**last, **dict.fromkeys(_bound_inside(one), unknown)}
            self._there.update(dict.fromkeys(ast.walk(one), there))
            names = assigned([one])
            self._times.update(names)
            last.update(dict.fromkeys(names, unknown))
            for name, value in self._values(one, there):
                last[name] = Definition(number, value)

    def _values(self, one: ast.stmt, there: Mapping[str, Definition]) -> Iterator[tuple[str, ast.expr]]:
        """The names to which a statement assigns an expression as it is. `a += b` assigns `a + b`."""
        value = getattr(one, "value", None)
        if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name):
            left = ast.Name(one.target.id, ast.Load())
            value = ast.BinOp(left, one.op, one.value)
            self._there.update(dict.fromkeys((left, value), there))
        for target in targets(one):
            if isinstance(target, ast.Name) and value is not None:
                yield target.id, value

    def of(self, name: ast.Name) -> Definition:
        """The definition of a name where it is read."""
        return self._there.get(name, {}).get(name.id, BEFORE)

    def times(self, name: str) -> int:
        """How many statements assign a name."""
        return self._times[name]

    def are_same(self, node: ast.expr, at: ast.expr) -> bool:
        """Whether the names in an expression would stand for the same in the place of another one."""
        there = self._there.get(at, {})
        names = (one for one in ast.walk(node) if isinstance(one, ast.Name))
        return all(self.of(one) == there.get(one.id, BEFORE) for one in names)


def targets(statement: ast.stmt) -> Sequence[ast.expr]:
    """What an assignment assigns to; nothing for other statements."""
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, (ast.AnnAssign, ast.AugAssign)) else []


def _bound_inside(statement: ast.stmt) -> set[str]:
    """The names that a statement assigns while it reads others: in loops and comprehensions, and as parameters."""
    own = {node for target in targets(statement) for node in ast.walk(target)}
    nodes = [node for node in ast.walk(statement) if node not in own]
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}
