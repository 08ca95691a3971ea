"""The contraction of any number of operands by an equation, as `torch.einsum`, within a memory budget."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from effops.dispatch.arguments import check_devices, check_operand
from effops.dispatch.call import Known, are_ordinary, call, call_known
from effops.dispatch.choice import AUTO, current_variant
from effops.dispatch.custom_op import CustomOp, Gradients, is_plain, requires_grad
from effops.dispatch.forms import add_forms
from effops.dispatch.op import Call, Cost, Op
from effops.dispatch.registration import add_custom_op, allocated
from effops.dispatch.validation import finite
from effops.numerics.equations import (
    Contraction,
    Shape,
    check_sizes,
    contraction,
    letters_of,
    parse,
    spelled_out,
    written,
)
from effops.numerics.precision import autocast_enabled, wider
from effops.ops.einsum.paths import MOST_SLICES, Operand, PassLayout, find, keeps_intermediates, least_budget
from effops.ops.einsum.program import Program, backward, forward
from effops.prediction import inductor
from effops.prediction.allocations import Bytes
from effops.prediction.inside import predict_bytes
from effops.pytorch.missing import PREDICTIONS, obstacle, tested
from effops.text import format_bytes, parse_bytes

NAME = "einsum"
UNPREDICTED = obstacle(PREDICTIONS)  # why no variant keeps a budget; empty as a rule
BUDGET = "64 MiB"
SETTINGS = {"equation": str, "budget": int, "dtype": torch.dtype}
MOST_LABELS = 52  # of torch.einsum, which computes the products
MOST_BYTES = 2**62  # that an operator's schema can tell


@dataclass
class EinsumCall(Call):
    """A validated call: its operands, the equation spelled out for them, the budget in bytes, the result's dtype."""

    operands: tuple[Tensor, ...]
    equation: str
    budget: int
    dtype: torch.dtype

    @classmethod
    def split(cls, arguments: Sequence[Any]) -> EinsumCall:
        """The inverse of `arguments`."""
        *operands, equation, budget, dtype = arguments
        return cls(tuple(operands), equation, budget, dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.operands

    @property
    def arguments(self) -> tuple[Any, ...]:
        return *self.operands, self.equation, self.budget, self.dtype

    @property
    def contraction(self) -> Contraction:
        return contraction(self.equation, tuple(operand.shape for operand in self.operands))

    @property
    def shape(self) -> Shape:
        return self.contraction.shape(self.contraction.output)

    @property
    def operations(self) -> int:
        """Those of the product of all operands, which a path takes fewer than."""
        return len(self.operands) * math.prod(self.contraction.sizes.values())

    def described(self) -> PassLayout:
        """The forward pass."""
        return PassLayout(self.equation, tuple(map(Operand.of, self.operands)), self.dtype, torch.get_num_threads())

    @property
    def keeps_intermediates(self) -> bool:
        """Whether autograd keeps them for the backward pass."""
        if is_compiling() or not requires_grad(self.operands):
            return False
        if any(type(one) is not int for operand in self.operands for one in (*operand.shape, *operand.stride())):
            return False
        wanted = tuple(operand.requires_grad for operand in self.operands)
        return keeps_intermediates(self.described().of_backward(wanted), self.budget)


def prepare(equation: Any, *operands: Any, budget: Any = BUDGET) -> EinsumCall:
    """Validate the equation, shapes, dtypes and devices (never values)."""
    terms, output, given = parse(NAME, equation, operands)
    for number, operand in enumerate(given):
        check_operand(NAME, f"operand {number}", operand)
    check_devices(NAME, **{f"operand {number}": operand for number, operand in enumerate(given)})
    text = spelled_out(NAME, terms, output, tuple(operand.ndim for operand in given))
    check_sizes(NAME, text, [operand.shape for operand in given], lambda: written(terms, output))
    dtype = functools.reduce(wider, {operand.dtype: None for operand in given})
    device = given[0].device
    if autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
    if len(_labels(text)) > MOST_LABELS:
        raise NotImplementedError(
            f"{NAME}: `equation` must have at most {MOST_LABELS} labels, each axis of an ellipsis among them, as in "
            f"torch.einsum; got {len(_labels(text))}; flatten axes that belong together"
        )
    nbytes = min(parse_bytes(budget, f"{NAME}: `budget`"), MOST_BYTES)
    return EinsumCall(tuple(given), text, nbytes, dtype)


def _labels(equation: str) -> set[str]:
    return set(equation) - set(",.->")


def naive(operands: Sequence[Tensor], equation: str) -> Tensor:
    normal = contraction(equation, tuple(operand.shape for operand in operands))
    summed = tuple(label for label in normal.sizes if label not in normal.output)
    order = *normal.output, *summed
    product = None
    for view, term, operand in zip(normal.views, normal.terms, operands):
        aligned = view.of(operand).permute([term.index(label) for label in order if label in term])
        aligned = aligned[tuple(slice(None) if label in term else None for label in order)]
        product = aligned if product is None else product * aligned
    assert product is not None
    axes = tuple(range(len(normal.output), len(order)))
    return product.sum(axes) if axes else product.clone()


def einsum_form(operands: list[Tensor], equation: str) -> Tensor:
    result = torch.einsum(equation, operands)
    return result.clone() if len(operands) == 1 else result  # that of one operand may be its memory


def _composed(form: Any) -> Any:
    def contracted(*arguments: Any) -> Tensor:
        *operands, equation, dtype = arguments
        result: Tensor = form([operand.to(dtype) for operand in operands], equation)
        return result

    return contracted


def _forward(call: EinsumCall) -> Tensor:
    return forward(_program(call.described(), call.budget), call.operands, call.dtype)


def _backward(dout: Tensor, call: EinsumCall, wanted: Sequence[bool]) -> Gradients:
    layout = replace(call.described(), upstream=Operand.of(dout), wanted=tuple(wanted))
    return backward(_program(layout, call.budget), call.operands, dout, wanted)


def _program(layout: PassLayout, budget: int) -> Program:
    _check(budget, layout)
    program = find(layout, budget)
    assert program is not None
    return program


def _check(budget: int, *passes: PassLayout) -> None:
    """Raise if one of the passes cannot keep the budget; tell one that lets all of them run."""
    wrong = next((one for one in passes if find(one, budget) is None), None)
    if wrong is None:
        return
    kind = "forward" if wrong.upstream is None else "backward"
    least = format_bytes(max(least_budget(one, budget) for one in passes if find(one, budget) is None))
    raise ValueError(
        f"{NAME}: `budget` must let a {kind} pass run in at most {MOST_SLICES:,} slices; got "
        f"{format_bytes(budget)}; give at least {least!r}"
    )


def _empty(call: EinsumCall) -> Tensor:
    return call.contraction.empty(call.operands[0], call.dtype)


def _compiled_bytes(program: inductor.Program, call: EinsumCall) -> Bytes:
    best = _composed(einsum_form)
    return predict_bytes(lambda *operands: best(*operands, call.equation, call.dtype), *call.tensors, made=call.made)


op = Op(
    NAME,
    prepare=prepare,
    preference=("chunked", "compile", "einsum", "torchscript", "naive"),
    conditions=lambda call: [finite(f"operand {number}", one) for number, one in enumerate(call.operands)],
)

add_forms(
    op,
    {"naive": naive, "einsum": einsum_form},
    _composed,
    lambda call: (call.equation, call.dtype),
    _compiled_bytes,
)


def _requires_a_product(call: EinsumCall) -> str:
    """The naive form multiplies all operands before it sums."""
    nbytes = call.dtype.itemsize * math.prod(tuple(call.contraction.sizes.values()))
    return "" if nbytes <= MOST_BYTES else f"needs a product of {nbytes:.1e} bytes"


def _cost_of_product(call: EinsumCall) -> Cost | None:
    return None if _requires_a_product(call) else _naive.cost(call)


_naive = op.variants["naive"]
op.add(replace(_naive, cost=_cost_of_product, requires=(_requires_a_product,)))

custom = CustomOp(
    f"{NAME}_chunked",
    parameters={"operands": list[Tensor], **SETTINGS},
    split=EinsumCall.split,
    forward=_forward,
    backward=_backward,
    composite=lambda call: _composed(einsum_form)(*call.operands, call.equation, call.dtype),
    empty=_empty,
    native=lambda call: call.keeps_intermediates,
    core_dims=lambda settings: [len(term) - len("...") for term in settings[0].split("->")[0].split(",")],
)


def _requires_predictions(call: EinsumCall) -> str:
    """A budget is kept by predictions of what a path takes."""
    return f"cannot keep a budget: {UNPREDICTED}" if UNPREDICTED else ""


def _run(call: EinsumCall) -> Tensor:
    if requires_grad(call.tensors) and is_plain(call.tensors) and not call.keeps_intermediates:
        wanted = [one.requires_grad for one in call.tensors]
        _check(call.budget, call.described(), call.described().of_backward(wanted))
    return custom(call)


def _cost(call: EinsumCall) -> Cost | None:
    """What the variant takes; None where no program keeps the budget, which a call tells."""
    return None if find(call.described(), call.budget) is None else allocated(op, custom, call)


def _plan(call: EinsumCall) -> str:
    """The slices of the forward pass, by the letters of its equation."""
    program = find(call.described(), call.budget)
    if program is None or not program.extents:
        return ""
    letters = letters_of(call.equation)
    cuts = [
        f"{extent:,} of the {program.contraction.sizes[label]:,} of {letters.get(label, 'a batch axis')}"
        for label, extent in program.extents.items()
    ]
    return (
        f"chunked cuts {call.equation.replace('...', '')} into {program.slices:,} slices, which take {', '.join(cuts)}"
    )


add_custom_op(op, custom, "chunked", run=_run, cost=_cost, requires=[_requires_predictions], plan=_plan)


class _Planned:
    """Computes calls whose operands are laid out alike, by programs that are found once."""

    def __init__(self, layout: PassLayout, budget: int) -> None:
        self.layout, self.budget = layout, budget
        self.program = _program(layout, budget)

    def forward(self, *arguments: Any) -> Tensor:
        *operands, _ = arguments
        return forward(self.program, operands, self.layout.dtype)

    def gradients(self, tensors: Sequence[Tensor], dout: Tensor, wanted: Sequence[bool]) -> Gradients:
        wanted = tuple(wanted[: len(tensors)])
        layout = replace(self.layout, upstream=Operand.of(dout), wanted=wanted)
        return backward(_program(layout, self.budget), tensors, dout, wanted)


def _shortcut(equation: Any, *operands: Any, budget: Any = BUDGET) -> Tensor | None:
    """The result of a call of plain tensors that is like one before, or None."""
    if type(equation) is not str or type(budget) not in (str, int) or not are_ordinary(operands):
        return None
    if UNPREDICTED:
        return None
    try:
        outlines = tuple([(one.layout, one.shape, one.stride(), one.dtype, one.device) for one in operands])
    except RuntimeError:  # a nested tensor has no shape
        return None
    wanted = tuple([one.requires_grad for one in operands]) if torch.is_grad_enabled() else ()
    known = _known(equation, budget, outlines, torch.get_num_threads(), wanted)
    return None if known is None else call_known(known, custom, operands)


@functools.lru_cache(maxsize=4096)
def _known(
    equation: str, budget: Any, outlines: tuple[Any, ...], threads: int, wanted: tuple[bool, ...]
) -> Known | None:
    operands = tuple(Operand(tuple(shape), *others) for _, shape, *others in outlines)
    if any(layout != torch.strided or device.type != "cpu" for layout, *_, device in outlines):
        return None
    try:
        meta = [torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta") for one in operands]
        found = prepare(equation, *meta, budget=budget)
    except (NotImplementedError, TypeError, ValueError):
        return None  # the long way tells why
    layout = PassLayout(found.equation, operands, found.dtype, threads)
    if any(wanted):
        if keeps_intermediates(layout.of_backward(wanted), found.budget):
            return None
        _check(found.budget, layout, layout.of_backward(wanted))
    return Known(_Planned(layout, found.budget), found.arguments[len(meta) :])


op.shortcut = _shortcut


@op.public
def einsum(equation: Any, *operands: Any, budget: str | float = BUDGET, variant: str | None = None) -> Tensor:
    """Sum of products of operands by an equation, as `torch.einsum`, within a memory budget.

    Operands are multiplied two by two, in an order that opt_einsum finds. Where no order keeps the budget, axes are
    cut, of the result or summed ones, and one slice is computed after another. The backward pass keeps the budget too.

    Args:
        equation: labels of the axes of each operand, and of the result: `"bi,ijk,bj->bk"`. Labels that the result lacks
            are summed; a label that an operand has twice takes its diagonal; an ellipsis stands for axes that
            broadcast; without an arrow the result has the labels that occur once, in alphabetical order. As in
            `torch.einsum`, operands may also come each with a list of its labels: `einsum(a, [0, 1], b, [1], [0])`
        operands: real floating-point tensors, on any one device, whose axes of one label have one size, or 1
        budget: bytes, as `"64 MiB"` or `2**26`, for the most memory that is allocated at any moment besides operands,
            result and gradients: intermediates, slices, copies of operands in another dtype or layout. What forward
            keeps for backward counts in both passes. Each call has a budget of its own
        variant: the implementation to run. None or "auto" takes chunked, which alone keeps the budget. The others
            ignore it: einsum, compile, torchscript, naive; `effops.explain` tells what they would take, and which
            labels chunked cuts

    Returns:
        The result, of the dtype to which those of the operands promote (under autocast, of autocast's). Chunked lays
        that of two operands out in memory as `torch.einsum` does, and that of more contiguously. Sums of slices in
        float16 and bfloat16 are added up in float32.

    Chunked saves operands for backward. It saves intermediates too where that saves time and the budget allows it: such
    a call may hold as much as its budget until its backward pass. Second derivatives and forward mode work, but keep no
    budget. What oneDNN and libraries of GPUs allocate inside is not counted.

    The first call for an equation, shapes, strides and dtypes takes some milliseconds longer, some tenths of a second
    where axes are cut, and more with many operands. Slices take time too, the more of them the smaller the budget.

    Raises:
        TypeError: an operand is no tensor, or not of a floating-point dtype
        ValueError: the equation does not fit the operands, devices differ, there is no such variant, or the budget
            would take more than 10,000 slices. That is told by the call, for backward too, with a budget that suffices
        NotImplementedError: the named variant cannot run this call

    Example:
        >>> a, b, c = torch.randn(500, 40), torch.randn(500, 30), torch.randn(40, 30, 20)
        >>> effops.einsum("bi,bj,ijk->bk", a, b, c, budget="1 MiB").shape
        torch.Size([500, 20])
    """
    if UNPREDICTED and (variant or current_variant()) in (None, AUTO):
        told = f"{NAME}: `budget` is not kept: {UNPREDICTED}; {tested()}; install a torch that has it"
        warnings.warn(f'{told}, or give variant="einsum", which is taken now', stacklevel=3)
        variant = "einsum"
    return call(op, equation, *operands, budget=budget, variant=variant)
