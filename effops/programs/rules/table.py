"""The table of all rules."""

from collections.abc import Iterable

from torch.fx import Node

from effops.programs.rules import draws, elementwise, image, index, linalg, product, reduction, scan, view
from effops.programs.rules.binding import Binding, aligned, is_item, is_operator, moved, operands_of, shape_of
from effops.pytorch.operators import is_elementwise

RULES = {
    rule_of: rule
    for file in (elementwise, view, reduction, product, linalg, image, index, scan, draws)
    for rule_of, rule in file.RULES.items()
}


def bindings(node: Node) -> list[Binding]:
    """The axes along which an operator can be cut; none for one without a rule."""
    return list(_bindings(node))


def why_none(node: Node) -> str:
    """Why an operator cannot be cut along any axis; empty if it has a rule."""
    if is_item(node) or node.target in RULES:
        return ""
    if not is_operator(node):
        return "is no operator of PyTorch"
    return "" if is_elementwise(node.target) else "has no rule"


def _bindings(node: Node) -> Iterable[Binding]:
    if why_none(node):
        return ()
    if is_item(node):
        shape, whole = shape_of(node), shape_of(operands_of(node)[0])
        return moved(node, {axis: axis for axis, (own, size) in enumerate(zip(shape, whole)) if own == size})
    rule = RULES.get(node.target)
    found: Iterable[Binding] = aligned(node) if rule is None else rule(node)
    return found
