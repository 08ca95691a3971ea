"""What PyTorch does otherwise while modes observe its operators, as they do in a prediction; seen in torch 2.13.

Autograd then computes nothing in place, and its formulas do not look at values. A linear layer of fake tensors does not
add its bias in place either.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import linear

from effops.prediction.shared import Shared
from effops.pytorch.calls import FakeTensor
from effops.pytorch.operators import aten
from effops.pytorch.prediction import (
    BackwardCFunction,
    _current_autograd_node,
    _storage_Use_Count,
    handle_of,
    sequence_number,
    tensor_use_count,
)

COUNT_BYTES = 8
# References to a tensor and to its storage, where autograd alone has it: each mode that sees a call holds one.
SOLE_OWNER_COUNTS = 5, 2
# Unobserved, autograd computes these in place where nobody else holds the first operand.
IN_PLACE = {
    aten.add.Tensor: (aten.add_.Tensor, SOLE_OWNER_COUNTS),
    aten.index_add.default: (aten.index_add_.default, SOLE_OWNER_COUNTS),
    aten.index_fill.int_Tensor: (aten.index_fill_.int_Tensor, SOLE_OWNER_COUNTS),
    aten.index_put.default: (aten.index_put_.default, (6, 2)),
    aten.scatter.src: (aten.scatter_.src, SOLE_OWNER_COUNTS),
    aten.scatter_add.default: (aten.scatter_add_.default, SOLE_OWNER_COUNTS),
}
IN_PLACE_IN = {  # the same in one formula alone
    ("Atan2Backward0", aten.masked_fill.Scalar): (aten.masked_fill_.Scalar, SOLE_OWNER_COUNTS),
    ("BinaryCrossEntropyWithLogitsBackward0", aten.mul.Tensor): (aten.mul_.Tensor, SOLE_OWNER_COUNTS),
    ("BinaryCrossEntropyWithLogitsBackward0", aten.sub.Tensor): (aten.sub_.Tensor, SOLE_OWNER_COUNTS),
    ("ClampBackward0", aten.masked_fill.Scalar): (aten.masked_fill_.Scalar, (6, 2)),  # in torch 2.15
    ("TakeBackward0", aten.put.default): (aten.put_.default, SOLE_OWNER_COUNTS),
}
NOT_IN_PLACE_AFTER = {  # the operator that makes a first operand which one formula does not overwrite
    ("BinaryCrossEntropyWithLogitsBackward0", aten.mul.Tensor): aten.neg.default,  # the gradient of the target
}
OUT_OF_PLACE = {("ScatterReduceBackward0", aten.scatter_add.default)}  # a formula that does not do so
# Formulas that call other operators while they are observed. Unobserved they look at values or at the places of a mask,
# or compute much in place. Beside each formula stands an operator that it calls only while it is observed.
OTHER_WAYS = {
    ("BinaryCrossEntropyBackward0", aten.logit.default),
    ("BinaryCrossEntropyWithLogitsBackward0", aten.add.Scalar),
    ("ClampBackward0", aten.ge.Tensor),
    ("CumprodBackward0", aten.cat.default),  # in torch 2.11
    ("CumprodBackward0", aten.cumsum.default),
    ("MaskedFillBackward1", aten.where.self),
    ("MaxBackward1", aten.isnan.default),
    ("MedianBackward0", aten.isnan.default),
    ("MinBackward1", aten.isnan.default),
    ("NanmedianBackward0", aten.isnan.default),
    ("NativeGroupNormBackward0", aten.clamp_min.default),
    ("ProdBackward0", aten.cumprod.default),
    ("ProdBackward1", aten.cumprod.default),
    ("ProdBackward1", aten.detach.default),
    ("SpecialI1EBackward0", aten.special_i0e.default),
    ("StdMeanBackward0", aten.add.Tensor),
    ("VarMeanBackward0", aten.add.Tensor),
}


class Form(NamedTuple):
    """What autograd does in place of an operator where nothing observes it.

    Attributes:
        operator: what it calls
        formula: the name of its formula, if that calls other operators altogether, else an empty text
        held_bytes: what the formula holds meanwhile, and makes by operators that it does not call while it is observed
    """

    operator: Any
    formula: str
    held_bytes: int


class Formulas:
    """Follows the formulas of autograd while a mode observes them, one at a time."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the formula that runs
        self.before: Any = None  # the operator that it called before
        self.held_bytes = 0

    def unobserved(self, func: Any, args: Sequence[Any]) -> Form:
        """What autograd does in place of `func` where nothing observes it."""
        node = _current_autograd_node()
        if node is None or isinstance(node, BackwardCFunction):
            return Form(func, "", 0)
        if sequence_number(node) != self.number:
            self.number, self.before, self.held_bytes = sequence_number(node), None, 0
        name = node.name()
        before, self.before = self.before, func
        formula = name if (name, func) in OTHER_WAYS else ""
        if name == "ProdBackward1":
            self.held_bytes = _zeros_bytes(func, args) or self.held_bytes
        held_bytes = self.held_bytes
        if (name, func) in OUT_OF_PLACE or NOT_IN_PLACE_AFTER.get((name, func), "") is before:
            return Form(func, formula, held_bytes)
        in_place, counts = IN_PLACE_IN.get((name, func)) or IN_PLACE.get(func) or (None, None)
        return Form(in_place if in_place and _is_in_place(func, args, counts) else func, formula, held_bytes)


def _zeros_bytes(func: Any, args: Sequence[Any]) -> int:
    """What the gradient of products along an axis holds to see whether there are zeros; 0 if `func` does not tell.

    It holds which elements are zero, and how many of each product. Observed it does not look, and goes the way of
    products with zeros: of the two ways this takes more.
    """
    if func is not aten.cumprod.default:
        return 0
    elements, size = args[0].numel(), args[0].shape[args[1]]
    return int(elements + COUNT_BYTES * (elements // size))


def _is_in_place(func: Any, args: Sequence[Any], counts: tuple[int, int] | None) -> bool:
    """Whether the first operand may be overwritten: `counts` are the references to it where nobody else holds it."""
    if torch.is_grad_enabled():
        return False
    first = args[0]
    if func is aten.add.Tensor:  # of gradients of a tensor that is used several times
        second = args[1]
        is_alike = isinstance(second, Tensor) and (first.shape, first.dtype) == (second.shape, second.dtype)
        if not is_alike or not aten.is_non_overlapping_and_dense.default(first):
            return False
    return (tensor_use_count(first), _storage_Use_Count(handle_of(first.untyped_storage()))) == counts


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    is_one_product = input.ndim == 2 or (input.ndim > 2 and input.is_contiguous())
    if bias is None or is_one_product or not isinstance(input, FakeTensor):
        return linear(input, weight, bias)
    product = linear(input, weight)
    return product.add_(bias.to(product.dtype))  # autocast has made the product


# A linear layer adds its bias in place where its input is not laid out in order, but not where tensors are fake. A mode
# that sees functions could do this too, but attention calls other operators under such a mode.
SUMS_IN_PLACE = Shared(lambda: mock.patch.object(torch.nn.functional, "linear", _linear))
