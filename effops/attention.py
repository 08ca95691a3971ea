"""Attention as ops: masked scores of all pairs of queries and keys, their softmax, and the sums of values it weighs.

What scores are is a `Kind`: scaled dot products, additive ones. From it come the op of its scores, that of the weights,
and attention itself, each with the variants made of PyTorch operations, of blocks and of kernels.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from effops import attend, chunked
from effops.binding import Binding, Gradients, requires_grad
from effops.broadcast import Plan, Shape, broadcast_plan
from effops.density import add_forms, best_form, predict
from effops.op import Cost, Op
from effops.operands import check_devices, check_operand
from effops.precision import (
    arithmetic_dtype,
    autocast_enabled,
    contraction_error,
    matmul_precision,
    unit_roundoff,
    wider,
    without_autocast,
)
from effops.testing import Bounds

SETTINGS = {"masked": bool, "is_causal": bool, "scale": float | None, "dropout_p": float, "dtype": torch.dtype}


class Call(NamedTuple):
    """A validated call.

    Attributes:
        reduced: to what: "scores" of all pairs, their softmax, "weights", or "sums" of values that it weighs
        scored: the operands of the scores, query and key first
        value: what the weights sum, or None
        mask: a boolean tensor of one element if there is none
        seed: of dropout; only where there is a value
        masked: whether a mask was given
        scale: of the scores; None for the kind's own
        dtype: of the result
    """

    reduced: str
    scored: tuple[Tensor, ...]
    value: Tensor | None
    mask: Tensor
    seed: Tensor | None
    masked: bool
    is_causal: bool
    scale: float | None
    dropout_p: float
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """As the public function takes them, and the seed."""
        query, key, *others = self.scored
        if self.value is None or self.seed is None:
            return query, key, *others, self.mask
        return query, key, self.value, *others, self.mask, self.seed

    @property
    def settings(self) -> tuple[Any, ...]:
        return self.masked, self.is_causal, self.scale, self.dropout_p, self.dtype

    @property
    def device(self) -> torch.device:
        return self.mask.device

    @property
    def arithmetic(self) -> torch.dtype:
        return arithmetic_dtype(self.dtype)

    @property
    def plan(self) -> Plan:
        """Of all pairs. Wherever anything but the queries varies they are expanded: rows are theirs alone."""
        query, key = self.pairs
        weights = (weight.shape[:-1] for weight in self.scored[2:])
        return broadcast_plan(query.shape[:-1], key.shape[:-1], self.mask.shape, *weights)

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """query (*batch, queries, 1, D) and key (*batch, 1, keys, D)."""
        query, key = self.scored[:2]
        shapes = self._keyed, self.mask.shape[:-2]
        batch = torch.broadcast_shapes(query.shape[:-2], *shapes)
        padded = (1,) * (len(batch) - query.ndim + 2) + tuple(query.shape[:-2])
        others = torch.broadcast_shapes((1,) * len(batch), *shapes)
        sizes = tuple(own if other == 1 else size for own, other, size in zip(padded, others, batch))
        return _expand(query, sizes).unsqueeze(-2), _expand(key, self._keyed).unsqueeze(-3)

    @property
    def values(self) -> Tensor:
        """value (*batch, 1, keys, V)."""
        assert self.value is not None
        return _expand(self.value, self._keyed).unsqueeze(-3)

    @property
    def _keyed(self) -> Shape:
        """Batch axes along which keys, values or weights vary."""
        values = () if self.value is None else (self.value.shape[:-2],)
        weights = (weight.shape[:-3] for weight in self.scored[2:])
        return tuple(torch.broadcast_shapes(self.scored[1].shape[:-2], *values, *weights))

    @property
    def result(self) -> Plan:
        """The plan of the result: sums have the dimension of a value where pairs have the keys."""
        plan = self.plan
        return plan if self.value is None else replace(plan, shape=(*plan.shape[:-1], self.value.shape[-1]))

    @property
    def shape(self) -> Shape:
        return self.result.shape

    @property
    def drawn_seed(self) -> int:
        """The seed as a number; there is one for a call, not for each example of a batch."""
        if self.seed is None or self.seed.numel() != 1:
            raise NotImplementedError(
                "attention: vmap(randomness='different') cannot be had with dropout in this variant; give "
                "randomness='same', or variant='naive'"
            )
        return int(self.seed)

    @property
    def dimension(self) -> int:
        """How many coordinates of its operands a pair takes."""
        return self.scored[0].shape[-1] + (0 if self.value is None else self.value.shape[-1])


def _expand(tensor: Tensor, batch: Shape) -> Tensor:
    return tensor if tensor.shape[:-2] == batch else tensor.expand(*batch, *tensor.shape[-2:])


Form = Callable[..., Tensor]  # of the operands of the scores, scale and dtype of the arithmetic; scriptable


class Kind(Protocol):
    """What scores are.

    Attributes:
        operands: the tensors that make them, query and key first, and how many of their last dimensions are no batch
            axes
        forms: the scores by PyTorch operations, naive and, where it differs, einsum
    """

    @property
    def operands(self) -> Mapping[str, int]: ...

    @property
    def forms(self) -> Mapping[str, Form]: ...

    def scale(self, call: Call) -> float:
        """The factor of the scores."""

    def blocks(self, call: Call, needs: Sequence[bool]) -> chunked.Scores:
        """The scores block by block, and the gradients that `needs` asks for."""

    def exact(self, call: Call) -> tuple[Tensor, Tensor]:
        """The scores in float64, without a mask, and by how much correct ones may be off."""

    def gradient_bounds(self, call: Call, dscores: Tensor, error: Tensor) -> tuple[Bounds, ...]:
        """Where correct gradients of the operands lie, if those of the scores may be off by `error`."""


def prepare(
    kind: Kind,
    function: str,
    reduced: str,
    scored: Sequence[Tensor],
    value: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
) -> Call:
    """Validate shapes, dtypes and devices (never values)."""
    tensors = dict(zip(kind.operands, scored)) | ({} if value is None else {"value": value})
    for name, tensor in tensors.items():
        check_operand(function, name, tensor, dims=2 if name in ("query", "key", "value") else 1)
    query, key = scored[:2]
    pairs = query.shape[-2], key.shape[-2]
    if attn_mask is not None:
        _check_mask(function, attn_mask, is_causal, pairs)
    check_devices(function, **tensors, **({} if attn_mask is None else {"attn_mask": attn_mask}))
    if any(tensor.shape[-1] != query.shape[-1] for tensor in scored):
        raise ValueError(
            f"{function}: last dimensions of {_listed(kind.operands)} must be equal; got "
            f"{_shapes(tensors)}; project them alike"
        )
    if value is not None and value.shape[-2] != key.shape[-2]:
        raise ValueError(f"{function}: there must be one value for each key; got {_shapes(tensors)}; cut or pad one")
    masks = () if attn_mask is None else (attn_mask,)
    for name, other in list(zip(kind.operands, scored))[2:]:
        if _widens(other.shape[:-1], pairs):
            raise ValueError(
                f"{function}: `{name}` must broadcast to (queries, keys, D) = {(*pairs, query.shape[-1])}; got "
                f"{tuple(other.shape)}; unsqueeze it: (*batch, 1, 1, D) is the same for all pairs"
            )
    batches = [tensor.shape[: -2 - (name not in ("query", "key", "value"))] for name, tensor in tensors.items()]
    try:
        torch.broadcast_shapes(*batches, *(mask.shape[:-2] for mask in masks))
    except RuntimeError as error:
        raise ValueError(
            f"{function}: batch axes, heads among them, must broadcast; got {_shapes(tensors)}"
            + "".join(f", attn_mask {tuple(mask.shape)}" for mask in masks)
            + "; expand them, or set enable_gqa=True if several heads of queries share one of keys"
        ) from error
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (Real, torch.SymFloat))):
        raise TypeError(f"{function}: `scale` must be a number or None; got {scale!r}; multiply query by a tensor")
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, Real) or not 0 <= dropout_p <= 1:
        raise ValueError(
            f"{function}: `dropout_p` must be a probability from 0 to 1; got {dropout_p!r}; give 0 for none"
        )
    dtype = query.dtype
    for tensor in (*tensors.values(), *(mask for mask in masks if mask.dtype != torch.bool)):
        dtype = wider(dtype, tensor.dtype)
    if dtype.itemsize < 4 and autocast_enabled(query.device):
        dtype = torch.float32
    mask = query.new_ones((1, 1), dtype=torch.bool) if attn_mask is None else attn_mask
    seed = None
    if value is not None:  # drawn where it is needed
        seed = torch.randint(2**62, ()) if dropout_p else query.new_zeros((), dtype=torch.int64)
    causal, factor = bool(is_causal), None if scale is None else float(scale)
    return Call(reduced, tuple(scored), value, mask, seed, bool(masks), causal, factor, float(dropout_p), dtype)


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


@contextmanager
def rounded_by_autocast(function: str, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """In this context autocast is off; gives the tensors as it would round them, the first of which must be one."""
    first = tensors[0]
    check_operand(function, "query", first, dims=2)
    assert first is not None
    if autocast_enabled(first.device):
        dtype = torch.get_autocast_dtype(first.device.type)
        tensors = tuple(
            tensor.to(dtype)
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
            else tensor
            for tensor in tensors
        )
    with without_autocast(first.device):
        yield tensors


def _listed(names: Sequence[str] | Mapping[str, int]) -> str:
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} and {last}"


def _check_mask(function: str, mask: Tensor, is_causal: bool, pairs: tuple[int, int]) -> None:
    if is_causal:
        raise ValueError(
            f"{function}: `is_causal` and `attn_mask` exclude each other; got both; mask future keys in attn_mask: "
            "attn_mask & torch.ones(queries, keys, dtype=torch.bool).tril()"
        )
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        check_operand(function, "attn_mask", mask)
    if _widens(mask.shape, pairs):
        raise ValueError(
            f"{function}: `attn_mask` must broadcast to (queries, keys) = {pairs}; got {tuple(mask.shape)}; "
            "unsqueeze it: (*batch, 1, keys) masks keys for all queries"
        )


def _widens(own: Shape, pairs: tuple[int, int]) -> bool:
    """Whether the last two axes of a shape would broadcast those of the pairs, not with them."""
    return any(size not in (1, wanted) for size, wanted in zip((1, 1, *own)[-2:], pairs))


def attention_op(
    kind: Kind,
    name: str,
    reduced: str,
    *,
    cases: Mapping[str, tuple[Shape, ...]],
    sample: Callable[..., tuple[Tensor, ...]],
    workload: Callable[..., tuple[Tensor, ...]],
    sizes: Mapping[str, int],
    arguments: Callable[..., Any],
    preference: tuple[str, ...],
) -> Op:
    """The op of the scores, the weights or the sums of a kind.

    `arguments` takes what the public function takes and returns the operands of the scores, value, mask, is_causal,
    scale and dropout_p.
    """

    def prepare_call(*args: Any, **options: Any) -> Call:
        return prepare(kind, name, reduced, *arguments(*args, **options))

    op = Op(
        name,
        prepare=prepare_call,
        preference=preference,
        cases=cases,
        sample=sample,
        workload=workload,
        sizes=sizes,
        bounds=lambda call: bounds(kind, call, rounded=True),
        gradient_bounds=lambda call, dout: gradient_bounds(kind, call, dout, rounded=True),
        core_dims=tensor_dims(kind, reduced),
    )

    def composed(form: Form) -> Callable[..., Tensor]:
        return lambda *arguments: by_operations(kind, form, unpacked(kind, reduced, arguments))

    add_forms(op, kind.forms, composed, lambda call: call.settings, functools.partial(compiled_cost, kind))

    add_blocks(op, kind, reduced, "chunked")
    return op


def add_blocks(op: Op, kind: Kind, reduced: str, variant: str, **options: Any) -> None:
    """Add the variant of the blocks of a kind."""
    rehearse = torch.no_grad()(functools.partial(in_blocks, rehearsed=True))
    cost = functools.partial(predicted, kind, function=rehearse)
    add_bound(op, kind, reduced, variant, in_blocks, in_blocks_backward, cost=cost, **options)


def compiled_cost(kind: Kind, call: Call) -> Cost:
    """What TorchInductor allocates, as measured: it fuses all but products, and copies their operands if it must."""
    plan, size, wide = call.plan, call.arithmetic.itemsize, call.dtype != call.arithmetic
    count = plan.numel(plan.order)
    pairs, results = size * count, math.prod(call.shape)
    output, unrounded = call.dtype.itemsize * results, size * results * wide
    statistics = 0 if call.reduced == "scores" else 13 * count // max(1, plan.shape[-1])
    copied = call.scored if "einsum" in kind.forms else ()
    copies = size * sum(tensor.numel() for tensor in copied if tensor.dtype != call.arithmetic)
    summed = call.value is not None
    value_copy = size * call.value.numel() if call.value is not None and call.value.dtype != call.arithmetic else 0
    operations = count * (2 * call.dimension + 4)
    if requires_grad(call.tensors):
        saved = copies + value_copy + pairs * (summed or (wide and call.reduced == "weights"))
        temporary = {"scores": pairs * wide, "weights": pairs, "sums": unrounded}[call.reduced] + statistics
        return Cost(output, saved, temporary, operations)
    if call.reduced == "scores":
        return Cost(output, 0, max(copies + pairs - output, pairs) if wide else 0, operations)
    temporary = max(copies + pairs - output, pairs, pairs + value_copy + unrounded - output)
    return Cost(output, 0, temporary + statistics * (summed or not copies), operations)


def predicted(kind: Kind, call: Call, function: Callable[[Kind, Call], Tensor]) -> Cost:
    """The cost of a call that a function computes, or rehearses."""
    return predict(call, lambda *tensors: function(kind, unpacked(kind, call.reduced, (*tensors, *call.settings))))


def add_bound(
    op: Op,
    kind: Kind,
    reduced: str,
    variant: str,
    compute: Callable[[Kind, Call], Tensor],
    compute_backward: Callable[[Kind, Tensor, Call, Sequence[bool]], Gradients],
    *,
    empty: Callable[[Call], Tensor] = lambda call: call.result.empty(call.mask, call.dtype),
    empty_gradients: Callable[[Call], Sequence[Tensor]] | None = None,
    native: bool = False,
    **options: Any,
) -> None:
    """Add the variant of a pair of functions, of a call and of an upstream gradient, a call and the needs."""

    def unpack(arguments: Sequence[Any]) -> Call:
        return unpacked(kind, reduced, arguments)

    def composite(*arguments: Any) -> Tensor:
        call = unpack(arguments)
        if call.dropout_p:
            raise NotImplementedError(
                f'{op.name}(variant="{variant}"): with dropout there are no second derivatives and no forward mode; '
                'set dropout_p=0, or give variant="naive"'
            )
        return by_operations(kind, best_form(kind.forms), call)

    def forward(*arguments: Any) -> Tensor:
        return compute(kind, unpack(arguments))

    def backward(dout: Tensor, *arguments: Any) -> Gradients:
        return compute_backward(kind, dout, unpack(arguments[:-1]), arguments[-1])

    core_dims = {**tensor_dims(kind, reduced), **({"seed": 0} if reduced == "sums" else {})}
    forward.__signature__ = _signature(core_dims)  # type: ignore[attr-defined]
    binding = Binding(
        f"{op.name}_{variant}",
        forward=forward,
        backward=backward,
        composite=composite,
        empty=lambda *arguments: empty(unpack(arguments)),
        empty_gradients=lambda *arguments: (empty_gradients or gradients_of_blocks)(unpack(arguments)),
        core_dims=tuple(core_dims.values()),
        native=native,
    )
    op.variant(variant, **options)(lambda call: binding(*call.tensors, *call.settings))


def tensor_dims(kind: Kind, reduced: str) -> dict[str, int]:
    """The tensors of a call in the order of the public function, and how many of the last dimensions of each are no
    batch axes."""
    query, key, *others = kind.operands.items()
    value = [("value", 2)] if reduced == "sums" else []
    return dict([query, key, *value, *others, ("attn_mask", 2)])


def _signature(tensors: Mapping[str, int]) -> inspect.Signature:
    """Of an operator on these tensors and the settings of a call."""
    annotations = {**dict.fromkeys(tensors, Tensor), **SETTINGS}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in annotations.items()]
    return inspect.Signature(parameters, return_annotation=Tensor)


def unpacked(kind: Kind, reduced: str, arguments: Sequence[Any]) -> Call:
    """The call with these tensors and settings."""
    summed, others = reduced == "sums", len(kind.operands) - 2
    query, key, *rest = arguments
    value = rest.pop(0) if summed else None
    mask = rest.pop(others)
    seed = rest.pop(others) if summed else None
    return Call(reduced, (query, key, *rest[:others]), value, mask, seed, *rest[others:])


def by_operations(kind: Kind, form: Form, call: Call) -> Tensor:
    """The result of PyTorch operations, from scores by a form."""
    scores = form(*call.scored, kind.scale(call), call.arithmetic)
    if call.masked:
        mask = call.mask
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    if call.is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = torch.where(allowed, scores, -math.inf)
    if call.reduced == "scores":
        return scores.to(call.dtype)
    if call.masked:
        nowhere = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(torch.where(nowhere, 0, scores), -1)
        weights = torch.where(nowhere, 0, weights)
    else:
        weights = torch.softmax(scores, -1)
    if call.value is None:
        return weights.to(call.dtype)
    if call.dropout_p:
        weights = torch.dropout(weights, call.dropout_p, True)
    return (weights @ call.value.to(weights.dtype)).to(call.dtype)


def in_blocks(kind: Kind, call: Call, *, rehearsed: bool = False) -> Tensor:
    """The result block by block; allocated, but not computed, if `rehearsed`."""
    scores = attend.Masked(
        kind.blocks(call, (False,) * len(call.scored)), call.mask if call.masked else None, call.is_causal
    )
    out = call.result.empty(call.mask, call.dtype)
    if call.reduced == "scores":
        return (chunked.rehearse if rehearsed else chunked.forward)(scores, out)
    if call.reduced == "weights":
        return attend.forward_weights(scores, out, rehearsed=rehearsed)
    return attend.forward_sums(scores, call.values, _dropout(call, rehearsed), out, rehearsed=rehearsed)


def _dropout(call: Call, rehearsed: bool = False) -> attend.Dropout | None:
    if not call.dropout_p or call.seed is None:
        return None
    return attend.Dropout(call.plan, call.dropout_p, 0 if rehearsed else call.drawn_seed, call.device)


def in_blocks_backward(kind: Kind, dout: Tensor, call: Call, needs: Sequence[bool]) -> Gradients:
    """Gradients of the tensors of a call, each where `needs` asks for it."""
    given = call.tensors
    wanted: Any = unpacked(kind, call.reduced, (*needs, *call.settings))
    call = _widened(call)
    mask = call.mask if call.masked else None
    scores = attend.Masked(kind.blocks(call, wanted.scored), mask, call.is_causal, wanted.mask)
    dvalue = None
    if call.value is None:
        found = (chunked.backward if call.reduced == "scores" else attend.backward_weights)(scores, dout)
    else:
        found, dvalue = attend.backward_sums(scores, call.values, _dropout(call), dout, wanted.value)
    return _restored(call, found, dvalue, given)


def _widened(call: Call) -> Call:
    """With operands in the dtype of the arithmetic where they are expanded: their gradients are sums to be rounded."""
    (query, key, *others), value = call.scored, call.value
    batch = call.plan.shape[:-2]

    def wide(tensor: Tensor) -> Tensor:
        return tensor.to(call.arithmetic) if tensor.shape[:-2] != batch else tensor

    return call._replace(scored=(wide(query), wide(key), *others), value=None if value is None else wide(value))


def _restored(
    call: Call, of_scores: Sequence[Tensor | None], dvalue: Tensor | None, tensors: Sequence[Tensor]
) -> Gradients:
    """Gradients of the tensors of a call, from those of what its operands were expanded to and of the mask."""
    dquery, dkey, *others, dmask = of_scores
    found = [
        None if dquery is None else dquery.squeeze(-2),
        None if dkey is None else dkey.squeeze(-3),
        *(() if call.value is None else (None if dvalue is None else dvalue.squeeze(-3),)),
        *others,
        dmask,
        *(() if call.seed is None else (None,)),
    ]
    return [
        None
        if gradient is None
        else (gradient if gradient.shape == tensor.shape else gradient.sum_to_size(tensor.shape)).to(tensor.dtype)
        for gradient, tensor in zip(found, tensors, strict=True)
    ]


def gradients_of_blocks(call: Call) -> Sequence[Tensor]:
    """Uninitialised, laid out as those of blocks and kernels."""
    plan, (query, key) = call.plan, call.pairs
    dvalue = None
    if call.value is not None:
        dvalue = plan.empty_gradient(call.values, plan.batch + plan.columns, trailing=1)
    of_scores = (
        plan.empty_gradient(query, plan.batch + plan.rows, trailing=1),
        plan.empty_gradient(key, plan.batch + plan.columns, trailing=1),
        *(plan.empty_gradient(other, plan.order, trailing=1) for other in call.scored[2:]),
        plan.empty_gradient(call.mask, plan.order),
    )
    found = _restored(call, of_scores, dvalue, call.tensors)
    return [torch.empty_like(tensor) if one is None else one for one, tensor in zip(found, call.tensors, strict=True)]


class _Exact(NamedTuple):
    """Of a call in float64: masked scores, weights and sums, by how much correct ones may be off, those of the weights
    in proportion; and where no pair takes part."""

    scores: Tensor
    error: Tensor
    excluded: Tensor
    weights: Tensor
    relative: Tensor


def _exact(kind: Kind, call: Call) -> _Exact:
    scores, error = kind.exact(call)
    u = unit_roundoff(call.arithmetic)
    excluded = torch.zeros(call.plan.shape, dtype=torch.bool, device=call.device)
    if call.masked and call.mask.dtype == torch.bool:
        excluded = excluded | ~call.mask
    elif call.masked:
        scores = scores + call.mask.double()
        error = error + 2 * u * (scores.abs() + call.mask.double().abs()).nan_to_num(posinf=0.0)
    if call.is_causal:
        excluded = (
            excluded | torch.ones(call.plan.shape[-2:], dtype=torch.bool, device=call.device).tril().logical_not()
        )
    scores = scores.masked_fill(excluded, -math.inf)
    error = torch.where(scores == -math.inf, 0.0, error.expand(scores.shape))
    nowhere = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(nowhere, 0).softmax(-1).masked_fill(nowhere, 0)
    relative = torch.expm1(error + (weights * error).sum(-1, keepdim=True)) + (8 + scores.shape[-1]) * u
    return _Exact(scores, error, excluded, weights, relative)


def bounds(kind: Kind, call: Call, *, rounded: bool) -> Bounds:
    """Where a correct result lies. If `rounded`, weights may be so to the dtype of a sum, as PyTorch does."""
    exact, u = _exact(kind, call), unit_roundoff(call.arithmetic)
    if call.reduced == "scores":
        return Bounds(exact.scores, exact.error, exact.error, dtype=call.dtype)
    if call.value is None:
        radius = exact.weights * exact.relative
        return Bounds(exact.weights, radius, radius, dtype=call.dtype)
    value = call.value.double()
    rounding = (4 + value.shape[-2]) * u + _rounding(call, rounded)
    radius = (exact.weights * (exact.relative + rounding)) @ value.abs()
    return Bounds(exact.weights @ value, radius, radius, dtype=call.dtype)


def _rounding(call: Call, rounded: bool) -> float:
    """Of what is kept for every pair, beyond that of the arithmetic."""
    return unit_roundoff(call.dtype) if rounded and call.dtype != call.arithmetic else 0.0


def gradient_bounds(kind: Kind, call: Call, dout: Tensor, *, rounded: bool) -> tuple[Bounds, ...]:
    """Where correct gradients lie, of the tensors that a caller gives; `rounded` as for `bounds`."""
    exact, u, g = _exact(kind, call), unit_roundoff(call.arithmetic), dout.double()
    weights, relative, keys = exact.weights, exact.relative, exact.weights.shape[-1]
    coarse = _rounding(call, rounded)
    of_value: tuple[Bounds, ...] = ()
    if call.reduced == "scores":
        dscores, error = g.masked_fill(exact.excluded, 0), torch.zeros_like(g)
    else:
        dweights, off, mean_error = g, torch.zeros_like(g), torch.zeros(())
        if call.value is not None:
            value = call.value.double()
            dweights = g @ value.mT
            products = contraction_error(value.shape[-1], call.arithmetic, matmul_precision())
            off = products * u * (g.norm(dim=-1).unsqueeze(-1) * value.norm(dim=-1).unsqueeze(-2))
            mean_error = coarse * (g.abs() * (weights @ value).abs()).sum(-1, keepdim=True)
            size = weights.mT @ g.abs()
            error = (weights * (relative + 2 * coarse)).mT @ g.abs()
            of_value = (summed_bounds(weights.mT @ g, error, size, weights.shape[-2], call.value, u),)
        mean = (weights * dweights).sum(-1, keepdim=True)
        mean_error = mean_error + (weights * ((relative + (4 + keys) * u) * dweights.abs() + off)).sum(-1, keepdim=True)
        dscores = weights * (dweights - mean)
        error = weights * (
            (relative + 2 * coarse) * (dweights - mean).abs() + off + mean_error + 2 * u * (dweights.abs() + mean.abs())
        )
    query, key, *others = kind.gradient_bounds(call, dscores, error)
    of_mask = (summed_bounds(dscores, error, dscores.abs(), 1, call.mask, u),) if call.masked else ()
    return query, key, *of_value, *others, *of_mask


def summed_bounds(value: Tensor, error: Tensor, size: Tensor, terms: int, operand: Tensor, u: float) -> Bounds:
    """The bounds of a gradient that is summed to the shape of its operand; `terms` of `size` were summed before."""
    value, error, size = (
        tensor.expand(torch.broadcast_shapes(tensor.shape, operand.shape)) for tensor in (value, error, size)
    )
    terms *= value.numel() // max(1, operand.numel())
    shape = operand.shape
    radius = error.sum_to_size(shape) + (4 + terms) * u * size.sum_to_size(shape)
    return Bounds(value.sum_to_size(shape), radius, radius)
