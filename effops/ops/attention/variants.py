"""Make ops of a kind of scores: the scores, their softmax, and attention itself.

Each op gets the variants made of PyTorch operations and of blocks. `custom_op` makes the operators of other variants.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from effops.blocks import cutting, limits, pairs, softmax
from effops.blocks.dots import MatrixOperand, Products
from effops.blocks.masked import Masked
from effops.blocks.pairs import Scores
from effops.dispatch.custom_op import CustomOp, Gradients
from effops.dispatch.forms import add_forms, best_form
from effops.dispatch.op import Op
from effops.dispatch.registration import add_custom_op
from effops.dispatch.validation import Condition, below_infinity, finite
from effops.numerics.layout import as_gradient
from effops.ops.attention.call import SETTINGS, AttentionCall, given, join_arguments, split_arguments
from effops.prediction import inductor
from effops.prediction.allocations import Bytes
from effops.prediction.inside import predict_bytes

Form = Callable[..., Tensor]  # a scriptable function of the operands of the scores, the scale, and the arithmetic dtype
# A function of a call and of which gradients of the operands are wanted. It returns the scores block by block.
Blocks = Callable[[AttentionCall, Sequence[bool]], Scores]


@dataclass(frozen=True)
class Kind:
    """A kind of scores.

    Attributes:
        operands: the names of the operands, query and key first, and how many of the last dimensions of each are no
            batch axes
        forms: functions that compute the scores by PyTorch operations: naive and, where it differs, einsum
        blocks: computes them block by block
    """

    operands: Mapping[str, int]
    forms: Mapping[str, Form]
    blocks: Blocks


@dataclass(frozen=True)
class Fused:
    """PyTorch's own fused attention, for the calls that `serves` accepts."""

    serves: Callable[[AttentionCall], bool]
    forward: Callable[[AttentionCall], Tensor]


def attention_op(
    kind: Kind,
    name: str,
    output: str,
    prepare: Callable[..., AttentionCall],
    preference: tuple[str, ...],
    fused: Fused | None = None,
) -> Op:
    """The op of the scores, the weights or the sums of a kind.

    `prepare` takes the name of the op, the output, and the arguments of the public function. The compiled form calls
    `fused` where it can: a compiler does not find it in the form.
    """
    values = [("value", 2)] if output == "sums" else []
    op = Op(
        name,
        prepare=functools.partial(prepare, name, output),
        preference=preference,
        core_dims=dict(join_arguments(kind.operands.items(), values, ("attn_mask", 2))),
        conditions=functools.partial(conditions, tuple(kind.operands)),
    )

    def composed(form: Form) -> Callable[..., Tensor]:
        return lambda *arguments: by_operations(form, AttentionCall.split(output, arguments))

    def compiled(*arguments: Any) -> Tensor:
        call = AttentionCall.split(output, arguments)
        if fused is not None and fused.serves(call):
            return fused.forward(call)
        return by_operations(best_form(kind.forms), call)

    def allocated(program: inductor.Program, call: AttentionCall) -> Bytes:
        if fused is not None and fused.serves(call):
            return predict_bytes(lambda *tensors: compiled(*tensors, *call.settings), *call.tensors, made=call.made)
        return compiled_bytes(kind, program, call)

    add_forms(op, kind.forms, composed, lambda call: call.settings, allocated, compiled_form=compiled)
    forward, backward = functools.partial(in_blocks, kind.blocks), functools.partial(in_blocks_backward, kind.blocks)
    add_custom_op(op, custom_op(op, kind, output, "chunked", forward, backward), "chunked")
    return op


def conditions(operands: Sequence[str], call: AttentionCall) -> Iterator[Condition]:
    """What must hold of the values of the operands of the scores, of those that are summed, and of the mask."""
    yield from map(finite, operands, call.scored)
    yield from (finite("value", value) for value in given(call.value))
    mask = call.mask
    if call.masked and mask.dtype != torch.bool:
        yield below_infinity("attn_mask", mask)
        is_switch = ((mask == 0) | (mask == 1)).all() & (mask == 0).any() & (mask == 1).any()
        expected, got = "be boolean, or numbers that are added to the scores", "zeros and ones alone"
        yield Condition("attn_mask", expected, mask, ~is_switch, "give attn_mask.bool()", got)


DROPOUT_P = list(SETTINGS).index("dropout_p") - len(SETTINGS)  # its place among the arguments of an operator


def compiled_bytes(kind: Kind, program: inductor.Program, call: AttentionCall) -> Bytes:
    """What the compiled form allocates."""
    operands, plan = call.scored if "einsum" in kind.forms else (), call.plan
    if call.output == "scores":
        return inductor.scores(program, *operands)
    pairs, columns = plan.numel(plan.order), plan.shape[-1]
    return inductor.softmax(program, *operands, pairs=pairs, columns=columns, value=call.value)


def ordered_empty(call: AttentionCall) -> Tensor:
    """An uninitialised result, in the plan's order of axes."""
    return replace(call.plan, shape=call.shape).empty(call.mask, call.dtype)


def custom_op(
    op: Op,
    kind: Kind,
    output: str,
    variant: str,
    forward: Callable[[AttentionCall], Tensor],
    backward: Callable[[Tensor, AttentionCall, Sequence[bool]], Gradients],
    empty: Callable[[AttentionCall], Tensor] = ordered_empty,
    native: Callable[[AttentionCall], bool] = lambda call: False,
    fills_axes: Callable[[Sequence[Any], Sequence[int]], bool] = lambda arguments, core_dims: False,
) -> CustomOp:
    """The operator of a forward and a backward function.

    `empty` and `native` are as in `CustomOp`. `fills_axes` tells of arguments, and of their dimensions that are no
    batch axes, that the functions may not take another such axis.
    """

    def composite(call: AttentionCall) -> Tensor:
        if call.dropout_p:
            raise NotImplementedError(
                f'{op.name}(variant="{variant}"): with dropout there are no second derivatives and no forward mode; '
                'set dropout_p=0, or give variant="naive"'
            )
        return by_operations(best_form(kind.forms), call)

    core_dims = {**op.core_dims, **({"seed": 1} if output == "sums" else {})}
    return CustomOp(
        f"{op.name}_{variant}",
        parameters={**dict.fromkeys(core_dims, Tensor), **SETTINGS},
        split=functools.partial(AttentionCall.split, output),
        forward=forward,
        backward=backward,
        composite=composite,
        empty=empty,
        core_dims=tuple(core_dims.values()),
        by_example=lambda arguments: arguments[DROPOUT_P] > 0 or fills_axes(arguments, tuple(core_dims.values())),
        native=native,
    )


def by_operations(form: Form, call: AttentionCall) -> Tensor:
    """The result by PyTorch operations, from the scores that a form computes."""
    scores = form(*call.scored, call.factor, call.arithmetic)
    if call.masked:
        # With one number of axes, fake tensors are laid out as others are.
        scores, mask = (one[(None,) * (len(call.plan.shape) - one.ndim)] for one in (scores, call.mask))
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    if call.diagonal is not None:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(call.diagonal)
        scores = torch.where(allowed, scores, -math.inf)
    if call.output == "scores":
        return scores.to(call.dtype)
    if call.may_lack_keys:
        no_key = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(torch.where(no_key, 0, scores), -1)
        weights = torch.where(no_key, 0, weights)
    else:
        weights = torch.softmax(scores, -1)
    if call.value is None:
        return weights.to(call.dtype)
    if call.dropout_p:
        weights = torch.dropout(weights, call.dropout_p, True)
    # Not `@`: it takes another way for fake tensors, whose bytes would be others.
    return torch.einsum("...ij,...jk->...ik", weights, call.value.to(weights.dtype)).to(call.dtype)


def in_blocks(blocks: Blocks, call: AttentionCall) -> Tensor:
    """The result, computed block by block."""
    mask = call.mask if call.masked else None
    scores = Masked(blocks(call, (False,) * len(call.scored)), mask, call.mask, diagonal=call.diagonal)
    out = ordered_empty(call)
    if call.output == "scores":
        return pairs.forward(scores, out)
    if call.value is None:
        return softmax.forward_weights(scores, out)
    return softmax.forward_sums(scores, _keyed(call, call.value), _dropout(call), out)


def in_blocks_backward(blocks: Blocks, dout: Tensor, call: AttentionCall, wanted: Sequence[bool]) -> Gradients:
    """The gradients of the tensors of a call that `wanted` asks for, computed block by block."""
    wants_scored, wants_value, wants_mask, _ = split_arguments(call.output, wanted)
    wide = _widened(call)
    mask = call.mask if call.masked else None
    scores = Masked(blocks(wide, wants_scored), mask, call.mask, diagonal=call.diagonal, wants_mask=wants_mask)
    dvalue = None
    if wide.value is None:
        found = (pairs.backward if call.output == "scores" else softmax.backward_weights)(scores, dout)
    else:
        value = _keyed(wide, wide.value)
        found, dvalue = softmax.backward_sums(scores, value, _dropout(call), dout, bool(wants_value))
    dquery, dkey, *others, dmask = found
    summed = [_squeezed(dvalue, -3) for _ in given(call.value)]
    seeds = [None for _ in given(call.seed)]
    gradients = join_arguments((_squeezed(dquery, -2), _squeezed(dkey, -3), *others), summed, dmask, *seeds)
    return [
        None if gradient is None else as_gradient(gradient, tensor)
        for gradient, tensor in zip(gradients, call.tensors, strict=True)
    ]


def scaled_dots(call: AttentionCall, wanted: Sequence[bool]) -> Products:
    """The scores scale <query, key>, and the gradients of query and key that `wanted` asks for."""
    query, key = operands_of_pairs(call)
    plan, arithmetic = call.plan, call.arithmetic
    summed = [_keyed(call, value) for value in given(call.value)]
    placed = [(query, plan.rows), *((tensor, plan.columns) for tensor in (key, *summed))]
    # Blocks of forward and backward must be the same for dropout. A backward pass may copy other operands.
    copied = call.dropout_p > 0 or any(MatrixOperand(plan, *operand, arithmetic).copied for operand in placed)
    # Copies and dropout take as much again.
    pair_bytes = limits.PAIR_BYTES // 2 if copied and summed else limits.PAIR_BYTES
    whole_keys = limits.WHOLE_KEYS
    if any(wanted) and call.output != "scores" and not call.dropout_p:
        whole_keys = max(whole_keys, pair_bytes // arithmetic.itemsize // limits.LEAST_QUERIES)
    extents = cutting.block_extents(
        plan,
        max(1, query.shape[-1], *(value.shape[-1] for value in summed)),
        arithmetic.itemsize,
        values_per_coordinate=float(copied),
        values_per_row=2 * (softmax.VALUES_PER_ROW + sum(value.shape[-1] for value in summed)),  # half of `pair_bytes`
        pair_bytes=pair_bytes,
        target_columns=plan.shape[-1] if plan.shape[-1] <= whole_keys else limits.KEYS,
        rows_per_entry=limits.QUERIES if summed else None,
    )
    wants_query, wants_key = wanted
    return Products(
        plan, key, query, arithmetic, factor=call.factor, extents=extents, wants_loc=wants_key, wants_x=wants_query
    )


def operands_of_pairs(call: AttentionCall) -> tuple[Tensor, ...]:
    """The operands query (*batch, queries, 1, D), key (*batch, 1, keys, D), and the others."""
    query, key, *others = call.scored
    return query.expand(*call.plan.shape[:-2], *query.shape[-2:]).unsqueeze(-2), _keyed(call, key), *others


def _keyed(call: AttentionCall, tensor: Tensor) -> Tensor:
    """Keys or values as an operand (*batch, 1, keys, D), expanded along the axes where either of them varies."""
    batch = [size if axis in call.plan.batch else 1 for axis, size in enumerate(call.plan.shape[:-2])]
    return tensor.expand(*batch, *tensor.shape[-2:]).unsqueeze(-3)


def _dropout(call: AttentionCall) -> softmax.Dropout | None:
    return softmax.Dropout(call.plan, call.dropout_p, call.drawn_seed, call.device) if call.dropout_p else None


def _widened(call: AttentionCall) -> AttentionCall:
    """The call with expanded operands in the dtype of the arithmetic: their gradients are summed, then rounded."""
    (query, key, *others), value = call.scored, call.value
    batch = call.plan.shape[:-2]

    def wide(tensor: Tensor) -> Tensor:
        return tensor.to(call.arithmetic) if tensor.shape[:-2] != batch else tensor

    return replace(call, scored=(wide(query), wide(key), *others), value=None if value is None else wide(value))


def _squeezed(gradient: Tensor | None, axis: int) -> Tensor | None:
    return None if gradient is None else gradient.squeeze(axis)
