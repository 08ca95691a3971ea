"""Follows what `x[mask]` selects to where `x[mask] = ..` puts it back, through operators of single elements."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from effops.pytorch.capture import version_of
from effops.pytorch.operators import aten, is_elementwise
from effops.pytorch.prediction import TorchDispatchMode, map_arg

# They raise for integers, where they divide by 0.
DIVISIONS = {aten.div.packet, aten.floor_divide.packet, aten.remainder.packet, aten.fmod.packet}


class ReadSelectionError(Exception):
    """A program reads what a mask selects, whose shape depends on values."""


class Selection(NamedTuple):
    """A mask that has selected: its node, and how often its memory had been written to."""

    mask: Node
    version: int


class _OfElements(TorchDispatchMode):
    """Notes whether all operators compute each element from the elements at its place, and raise for none."""

    def __init__(self) -> None:
        super().__init__()
        self.are_all = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        of_elements = is_elementwise(func) or func.namespace == "prim"  # which asks for devices
        if func.overloadpacket in DIVISIONS and not (isinstance(found, Tensor) and found.is_floating_point()):
            of_elements = False
        self.are_all = self.are_all and of_elements
        return found


class Selections(Interpreter):
    """Runs a captured graph. What a mask selects has the shape of the whole in it, with ones where the mask is false.

    Attributes:
        selected: the nodes that hold what a mask selects
        counts: the nodes that hold how many elements that are, or what the front end checks of it
        read: how often the operands of a node had been written to when it ran
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.selected, self.counts = dict[Node, Selection](), set[Node]()
        self.read: dict[Node, list[int]] = {}

    def run_node(self, n: Node) -> Any:
        self.read[n] = [_writes_to(one) for one in map(self.env.get, n.all_input_nodes) if isinstance(one, Tensor)]
        index = n.args[1] if n.target is operator.getitem else None
        if isinstance(index, Node) and _selects(*self._values(n)):
            x, mask = self._values(n)
            self.selected[n] = Selection(index, _writes_to(mask))
            return torch.where(_like_axes_of(x, mask), x, torch.ones((), dtype=x.dtype, device=x.device))
        if any(one in self.counts for one in n.all_input_nodes):
            return self._checked(n)
        selections = [self.selected[one] for one in n.all_input_nodes if one in self.selected]
        return self._run_on_selected(n, selections) if selections else super().run_node(n)

    def _values(self, n: Node) -> tuple[Any, ...]:
        return map_arg(n.args, self.env.__getitem__)

    def _checked(self, n: Node) -> bool:
        """The front end's check that a count is not negative."""
        if n.target not in (operator.ge, aten._assert_scalar.default):
            raise ReadSelectionError
        self.counts.add(n)
        return True

    def _run_on_selected(self, n: Node, selections: Sequence[Selection]) -> Any:
        """Run a node that reads what masks select."""
        first = selections[0]
        if n.target is aten.sym_size.int:
            self.counts.add(n)
            return 0
        if not all(self._are_alike(one, first) for one in selections):
            raise ReadSelectionError
        if n.target is operator.setitem and n.args[0] not in self.selected:
            target, mask, value = self._values(n)
            index = n.args[1]
            is_put = isinstance(index, Node) and _selects(target, mask) and isinstance(value, Tensor)
            if not is_put or not self._are_alike(Selection(index, _writes_to(mask)), first):  # type: ignore[arg-type]
                raise ReadSelectionError
            if value.shape != target.shape or value.dtype != target.dtype:
                raise ReadSelectionError
            target.copy_(where(_like_axes_of(target, mask), value, target))
            return None
        return self._of_elements(n, first)

    def _of_elements(self, n: Node, selection: Selection) -> Any:
        """Run a node that must treat each element alone. Other tensors that it reads must be numbers."""
        own = [self.env[one] for one in n.all_input_nodes if one in self.selected]
        others = {one: self.env[one] for one in n.all_input_nodes if one not in self.selected}
        numbers = {one: value for one, value in others.items() if isinstance(value, Tensor)}
        whole, mask = own[0], self.env.get(selection.mask)
        if any(one.numel() != 1 or one.dim() > 1 for one in numbers.values()):
            raise ReadSelectionError
        # The gradient of a number is that of selected elements alone: elsewhere it may be infinite or NaN.
        trained = [one for one, value in numbers.items() if value.requires_grad]
        if trained and (mask is None or any(numbers[one].dtype != whole.dtype for one in trained)):
            raise ReadSelectionError
        for one in trained:
            like = torch.ones((), dtype=whole.dtype, device=whole.device)
            self.env[one] = torch.where(_like_axes_of(whole, mask), numbers[one].expand(whole.shape), like)  # type: ignore[arg-type]
        try:
            with _OfElements() as of_elements:
                found = super().run_node(n)
        finally:
            self.env.update({one: numbers[one] for one in trained})
        if not of_elements.are_all or not isinstance(found, Tensor) or found.shape != whole.shape:
            raise ReadSelectionError
        self.selected[n] = selection
        return found

    def _are_alike(self, one: Selection, other: Selection) -> bool:
        """Whether two masks have the same values."""
        return one.version == other.version and self._is_written_alike(one.mask, other.mask)

    def _is_written_alike(self, one: Node, other: Node) -> bool:
        """Whether two nodes compute the same of operands that were not changed between them."""
        if one is other:
            return True
        if one.op == "placeholder" or (one.op, one.target) != (other.op, other.target):
            return False
        if self.read.get(one) != self.read.get(other) or len(one.args) != len(other.args) or one.kwargs != other.kwargs:
            return False
        return all(
            self._is_written_alike(a, b) if isinstance(a, Node) and isinstance(b, Node) else a == b
            for a, b in zip(one.args, other.args)
        )


def _writes_to(tensor: Tensor) -> int:
    """How often the memory of a tensor was written to. A constant of inference mode tells none, and is not changed."""
    return 0 if tensor.is_inference() else version_of(tensor)


def _selects(x: Any, mask: Any) -> bool:
    are_tensors = isinstance(x, Tensor) and isinstance(mask, Tensor)
    return are_tensors and mask.dtype == torch.bool and mask.dim() > 0 and x.shape[: mask.dim()] == mask.shape


def _like_axes_of(x: Tensor, mask: Tensor) -> Tensor:
    """A mask of the first axes, which broadcasts with all."""
    return mask.reshape([*mask.shape, *[1] * (x.dim() - mask.dim())])


def where(mask: Tensor, value: Tensor, x: Tensor) -> Tensor:
    """`torch.where(mask, value, x)` with the strides of `x`; PyTorch takes those of the mask."""
    found = torch.where(mask, value, x)
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda axis: -strides[axis])
    if found.stride() == strides or not x.permute(order).is_contiguous():
        return found
    mask, value, whole = (one.expand(x.shape).permute(order) for one in (mask, value, x))
    found = torch.where(mask.clone(memory_format=torch.contiguous_format), value, whole)
    return found.permute([order.index(axis) for axis in range(x.dim())])
