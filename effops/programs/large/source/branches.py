"""The branches that a slice took, as statements that follow one another: so that rules read them.

A branch can be told where it asks whether something is None, or for a flag. Both are the same in a trial as they were
in the program. A fix has to be right for other calls too. So it has the mask under the same condition, where a trial of
the other branch agrees. Else it stands under the condition, and calls that take other branches run as before.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from effops.programs.capture.scopes import Fields
from effops.programs.large.source.slices import Slice, assigned, copied
from effops.programs.large.source.trials import REAL_BYTES, Trial

MASKS = {"attn_mask", "is_causal"}


@dataclass(frozen=True, eq=False)
class Straight:
    """A slice without the branches that can be told.

    Attributes:
        found: its statements are those that ran
        tests: the conditions of the branches, whether each held, and whether there is an `else`
        whole: the slice with its branches
    """

    found: Slice
    tests: Sequence[tuple[ast.expr, bool, bool]]
    whole: Slice

    def for_all_calls(self, statements: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
        """Statements that are right whatever branches a call takes, if these are for the branches that were taken."""
        if not self.tests:
            yield statements
            return
        conditional = self._with_conditional_mask(statements)
        if conditional is not None:
            yield conditional
        held = [ast.unparse(test if is_taken else _opposite(test)) for test, is_taken, _ in self.tests]
        condition = held[0] if len(held) == 1 else " and ".join(f"({one})" for one in dict.fromkeys(held))
        guarded = ast.parse(f"if {condition}:\n    pass\nelse:\n    pass").body[0]
        assert isinstance(guarded, ast.If)
        guarded.body, guarded.orelse = statements, [copied(one) for one in self.whole.statements]
        yield [guarded]

    def _with_conditional_mask(self, statements: Sequence[ast.stmt]) -> list[ast.stmt] | None:
        """Statements whose mask is there where the only branch is taken; None if they are wrong where it is not."""
        (test, is_taken, has_else), *others = self.tests
        if others or not is_taken or has_else:
            return None
        made = [copied(one) for one in statements]
        keywords = [node for one in made for node in ast.walk(one) if isinstance(node, ast.keyword)]
        for one in keywords:
            if one.arg == "is_causal":
                one.value = test
            elif one.arg == "attn_mask" and ast.unparse(one.value) != ast.unparse(_asked(test)):
                one.value = ast.IfExp(test, one.value, ast.Constant(None))
        if not any(one.arg in MASKS for one in keywords):
            return None
        turned = _turned(self.whole, test)
        trial = None if turned is None else Trial.of(turned, 2 * REAL_BYTES)
        runs = [ast.parse("import effops").body[0], *made]
        return made if trial is not None and trial.agrees(runs) else None


def straightened(found: Slice, trial: Trial) -> Straight:
    """A slice that was run, with the statements of its branches in their place."""
    tests: list[tuple[ast.expr, bool, bool]] = []
    statements: list[ast.stmt] = []

    def add(more: Sequence[ast.stmt]) -> None:
        for one in more:
            is_taken = _taken(one.test, trial, assigned(statements)) if isinstance(one, ast.If) else None
            if is_taken is None or not isinstance(one, ast.If):
                statements.append(one)
            else:
                tests.append((one.test, is_taken, bool(one.orelse)))
                add(one.body if is_taken else one.orelse)

    add(found.statements)
    return Straight(replace(found, statements=statements) if tests else found, tests, found)


def _taken(test: ast.expr, trial: Trial, changed: Sequence[str]) -> bool | None:
    """Whether a condition held; None if that cannot be told, as where numbers are compared."""
    leaves = list(_leaves(test))
    if {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} & set(changed):
        return None
    for one in leaves:
        if one is None:
            return None
        known = trial.values([one])  # none where what stands before it decides
        if known is not None and type(known[0]) is not bool:
            return None
    value = trial.values([test])
    return None if value is None else bool(value[0])


def _leaves(test: ast.expr) -> Iterator[ast.expr | None]:
    """What a condition is made of: comparisons with None, and flags. None for anything else."""
    if isinstance(test, ast.BoolOp):
        for one in test.values:
            yield from _leaves(one)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand)
    else:
        yield test if _is_flag(_asked(test)) else None


def _asked(test: ast.expr) -> ast.expr:
    """The `x` of `x is None` and `x is not None`; else the condition itself."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        (other,) = test.comparators
        return test.left if isinstance(other, ast.Constant) and other.value is None else test
    return test


def _is_flag(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_flag(node.value))


def _opposite(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        other = ast.IsNot() if isinstance(test.ops[0], ast.Is) else ast.Is()
        return ast.Compare(test.left, [other], test.comparators)
    return ast.UnaryOp(ast.Not(), test)


def _turned(found: Slice, test: ast.expr) -> Slice | None:
    """A slice in whose scope a condition that held does not; None if it asks for more than one thing."""
    asked = _asked(test)
    if not _is_flag(asked) or (isinstance(test, ast.Compare) and not isinstance(test.ops[0], ast.IsNot)):
        return None
    value = None if isinstance(test, ast.Compare) else False
    names = ast.unparse(asked).split(".")
    known = _put(found.scope.names, names, value)
    return None if known is None else replace(found, scope=replace(found.scope, names=known))


def _put(values: Any, names: Sequence[str], value: Any) -> dict[str, Any] | None:
    """Values by name with another value for one of them, which may be a field of an object."""
    first, *rest = names
    if first not in values:
        return None
    if not rest:
        return {**values, first: value}
    inner = values[first]
    known = _put(inner.values, rest, value) if isinstance(inner, Fields) else None
    return None if known is None else {**values, first: Fields(inner.kind, known)}
