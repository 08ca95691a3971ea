"""Make ops of a kind of scores: the scores, their softmax, and attention itself.

Each op gets the variants made of PyTorch operations and of blocks. `custom_op` makes the operators of other variants.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks import pairs, softmax
from effops.blocks.masked import Masked
from effops.dispatch.custom_op import CustomOp, Gradients, add_custom_op
from effops.dispatch.forms import add_forms, best_form
from effops.dispatch.op import Op
from effops.numerics.layout import as_gradient
from effops.ops.attention.call import (
    SETTINGS,
    AttentionCall,
    Form,
    Kind,
    join_arguments,
    prepare,
    split_arguments,
    tensor_dims,
)
from effops.prediction import inductor
from effops.prediction.allocations import Bytes


def attention_op(
    kind: Kind,
    name: str,
    output: str,
    *,
    arguments: Callable[..., Any],
    preference: tuple[str, ...],
) -> Op:
    """The op of the scores, the weights or the sums of a kind.

    `arguments` takes the arguments of the public function. It returns the operands of the scores, value, mask,
    is_causal, scale and dropout_p.
    """

    def prepare_call(*args: Any, **options: Any) -> AttentionCall:
        return prepare(kind, name, output, *arguments(*args, **options))

    op = Op(
        name,
        prepare=prepare_call,
        preference=preference,
        core_dims=tensor_dims(kind, output),
    )

    def composed(form: Form) -> Callable[..., Tensor]:
        return lambda *arguments: by_operations(kind, form, AttentionCall.split(output, arguments))

    add_forms(op, kind.forms, composed, lambda call: call.settings, functools.partial(compiled_bytes, kind))
    add_custom_op(op, custom_op(op, kind, output, "chunked", in_blocks, in_blocks_backward), "chunked")
    return op


def compiled_bytes(kind: Kind, program: inductor.Program, call: AttentionCall) -> Bytes:
    """What the compiled form allocates."""
    operands, plan = call.scored if "einsum" in kind.forms else (), call.plan
    if call.output == "scores":
        return inductor.scores(program, *operands)
    pairs, columns = plan.numel(plan.order), plan.shape[-1]
    return inductor.softmax(program, *operands, pairs=pairs, columns=columns, value=call.value)


def custom_op(
    op: Op,
    kind: Kind,
    output: str,
    variant: str,
    compute: Callable[[Kind, AttentionCall], Tensor],
    compute_backward: Callable[[Kind, Tensor, AttentionCall, Sequence[bool]], Gradients],
    *,
    empty: Callable[[AttentionCall], Tensor] | None = None,
    native: bool = False,
) -> CustomOp:
    """The operator of a forward and a backward function.

    `compute` takes the kind and a call. `compute_backward` takes the kind, the upstream gradient, a call, and which
    gradients are wanted.
    """

    def composite(call: AttentionCall) -> Tensor:
        if call.dropout_p:
            raise NotImplementedError(
                f'{op.name}(variant="{variant}"): with dropout there are no second derivatives and no forward mode; '
                'set dropout_p=0, or give variant="naive"'
            )
        return by_operations(kind, best_form(kind.forms), call)

    core_dims = {**tensor_dims(kind, output), **({"seed": 0} if output == "sums" else {})}
    return CustomOp(
        f"{op.name}_{variant}",
        parameters={**dict.fromkeys(core_dims, Tensor), **SETTINGS},
        split=functools.partial(AttentionCall.split, output),
        forward=functools.partial(compute, kind),
        backward=functools.partial(compute_backward, kind),
        composite=composite,
        empty=empty or (lambda call: call.result.empty(call.mask, call.dtype)),
        core_dims=tuple(core_dims.values()),
        native=native,
    )


def by_operations(kind: Kind, form: Form, call: AttentionCall) -> Tensor:
    """The result by PyTorch operations, from the scores that a form computes."""
    scores = form(*call.scored, kind.scale(call), call.arithmetic)
    if call.masked:
        mask = call.mask
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    if call.is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = torch.where(allowed, scores, -math.inf)
    if call.output == "scores":
        return scores.to(call.dtype)
    if call.masked:
        no_key = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(torch.where(no_key, 0, scores), -1)
        weights = torch.where(no_key, 0, weights)
    else:
        weights = torch.softmax(scores, -1)
    if call.value is None:
        return weights.to(call.dtype)
    if call.dropout_p:
        weights = torch.dropout(weights, call.dropout_p, True)
    return (weights @ call.value.to(weights.dtype)).to(call.dtype)


def in_blocks(kind: Kind, call: AttentionCall) -> Tensor:
    """The result, computed block by block."""
    mask = call.mask if call.masked else None
    scores = Masked(kind.blocks(call, (False,) * len(call.scored)), mask, causal=call.is_causal)
    out = call.result.empty(call.mask, call.dtype)
    if call.output == "scores":
        return pairs.forward(scores, out)
    if call.output == "weights":
        return softmax.forward_weights(scores, out)
    return softmax.forward_sums(scores, call.values, _dropout(call), out)


def _dropout(call: AttentionCall) -> softmax.Dropout | None:
    if not call.dropout_p or call.seed is None:
        return None
    return softmax.Dropout(call.plan, call.dropout_p, call.drawn_seed, call.device)


def in_blocks_backward(kind: Kind, dout: Tensor, call: AttentionCall, wanted: Sequence[bool]) -> Gradients:
    """The gradients of the tensors of a call that `wanted` asks for, computed block by block."""
    given = call.tensors
    wants_scored, wants_value, wants_mask, _ = split_arguments(call.output, wanted)
    call = _widened(call)
    mask = call.mask if call.masked else None
    scores = Masked(kind.blocks(call, wants_scored), mask, causal=call.is_causal, wants_mask=wants_mask)
    dvalue = None
    if call.value is None:
        found = (pairs.backward if call.output == "scores" else softmax.backward_weights)(scores, dout)
    else:
        found, dvalue = softmax.backward_sums(scores, call.values, _dropout(call), dout, bool(wants_value))
    return _restored(call, found, dvalue, given)


def _widened(call: AttentionCall) -> AttentionCall:
    """The call with expanded operands in the dtype of the arithmetic: their gradients are summed, then rounded."""
    (query, key, *others), value = call.scored, call.value
    batch = call.plan.shape[:-2]

    def wide(tensor: Tensor) -> Tensor:
        return tensor.to(call.arithmetic) if tensor.shape[:-2] != batch else tensor

    return call._replace(scored=(wide(query), wide(key), *others), value=None if value is None else wide(value))


def _restored(
    call: AttentionCall, of_scores: Sequence[Tensor | None], dvalue: Tensor | None, tensors: Sequence[Tensor]
) -> Gradients:
    """The gradients of the tensors of a call, from the gradients of its expanded operands and of the mask."""
    dquery, dkey, *others, dmask = of_scores
    scored = None if dquery is None else dquery.squeeze(-2), None if dkey is None else dkey.squeeze(-3), *others
    summed = [None if dvalue is None else dvalue.squeeze(-3)] if call.value is not None else []
    found = join_arguments(scored, summed, dmask, *(None for _ in summed))
    return [
        None if gradient is None else as_gradient(gradient, tensor)
        for gradient, tensor in zip(found, tensors, strict=True)
    ]
