"""Calls of attention: masked scores of all pairs of queries and keys, their softmax, or the weighted sums of values.

`prepare` validates a call, and `prepare_log_sparse` one over the log-sparse pattern.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from effops.blocks.log_sparse import Pattern
from effops.blocks.plan import Plan, Shape, broadcast_plan
from effops.dispatch.arguments import check_devices, check_mask, check_operand, is_causal_bias, reshaped
from effops.dispatch.custom_op import requires_grad
from effops.dispatch.op import Call
from effops.numerics.precision import autocast_enabled, promote, wider
from effops.numerics.shapes import broadcast_shapes, do_broadcast, spreads
from effops.numerics.values import is_captured, observed
from effops.ops.attention.misfits import check_batches, check_pairs, shapes_of, sharing_heads, widens
from effops.pytorch.calls import _are_functorch_transforms_active, _neg_view
from effops.text import integer_remedy

SETTINGS = {
    "masked": bool,
    "is_causal": bool,
    "scale": float | None,
    "dropout_p": float,
    "dtype": torch.dtype,
    "is_lower_right": bool,
}
PAIRED = "query", "key", "value", "attn_mask"  # these have two axes beside those of the batch
T = TypeVar("T")


def join_arguments(scored: Iterable[T], value: Iterable[T], *masks: T) -> tuple[T, ...]:
    """Join one item per tensor of a call, in the order of the public function: the value, if any, follows the key."""
    query, key, *others = scored
    return query, key, *value, *others, *masks


def split_arguments(output: str, tensors: Sequence[T]) -> tuple[tuple[T, ...], T | None, T, T | None]:
    """The inverse of `join_arguments`: the items of the operands of the scores, the value, the mask and the seed."""
    if output != "sums":
        *scored, mask = tensors
        return tuple(scored), None, mask, None
    query, key, value, *others, mask, seed = tensors
    return (query, key, *others), value, mask, seed


@dataclass
class AttentionCall(Call):
    """A validated call.

    Attributes:
        output: "scores" of all pairs, "weights" (their softmax), or "sums" of values, weighted by it
        scored: the operands of the scores, query and key first
        value: the values that are summed, or None
        mask: the mask, or an empty tensor if none was given
        seed: the seed of dropout; an empty tensor without dropout, or None without a value
        plan: the plan of all pairs
        masked: whether a mask was given
        is_causal: whether pairs beyond the `diagonal` take no part
        scale: the factor of the scores; None for 1 / sqrt(D)
        dtype: the dtype of the result
        is_lower_right: whether the last query, and not the first, takes part with all keys up to its own place
    """

    output: str
    scored: tuple[Tensor, ...]
    value: Tensor | None
    mask: Tensor
    seed: Tensor | None
    plan: Plan
    masked: bool
    is_causal: bool
    scale: float | None
    dropout_p: float
    dtype: torch.dtype
    is_lower_right: bool

    @classmethod
    def split(cls, output: str, arguments: Sequence[Any]) -> AttentionCall:
        """The inverse of `arguments`."""
        count = len(arguments) - len(SETTINGS)
        scored, value, mask, seed = split_arguments(output, arguments[:count])
        settings = dict(zip(SETTINGS, arguments[count:]))
        plan = plan_of(scored, value, mask if settings["masked"] else None)
        return cls(output, scored, value, mask, seed, plan, **settings)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the order of the public function, and then the seed."""
        return join_arguments(self.scored, given(self.value), self.mask, *given(self.seed))

    @property
    def settings(self) -> tuple[Any, ...]:
        return self.masked, self.is_causal, self.scale, self.dropout_p, self.dtype, self.is_lower_right

    @property
    def arguments(self) -> tuple[Any, ...]:
        return *self.tensors, *self.settings

    @property
    def operations(self) -> int:
        features = sum(tensor.shape[-1] for tensor in (self.scored[0], *given(self.value)))
        return self.plan.numel(self.plan.order) * (2 * features + 4)

    @property
    def shape(self) -> Shape:
        """The shape of the result. The last axis of sums is the dimension of the values, not that of the keys."""
        return self.plan.shape if self.value is None else (*self.plan.shape[:-1], self.value.shape[-1])

    @property
    def diagonal(self) -> int | None:
        """How far a key may come after the query with which it takes part. None if it may anywhere."""
        if not self.is_causal:
            return None
        return self.scored[1].shape[-2] - self.scored[0].shape[-2] if self.is_lower_right else 0

    @property
    def may_lack_keys(self) -> bool:
        """Whether a query may have no key to take part with."""
        return self.masked or self.is_lower_right

    @property
    def factor(self) -> float:
        """The factor of the scores."""
        return factor(self.scored[0], self.scale)

    @property
    def drawn_seed(self) -> int:
        """The seed as a number. A CUDA graph would keep it, and every replay would drop the same weights."""
        assert self.seed is not None
        if is_captured(self.device):
            raise NotImplementedError(
                "attention: this variant must not draw dropout while a CUDA graph is captured, since every replay "
                f"would drop the same weights; got dropout_p={self.dropout_p}; give dropout_p=0, capture variant "
                '"einsum", which holds all pairs, or run it outside of the graph, compiled without '
                'mode="reduce-overhead"'
            )
        return int(observed(self.seed, ordinary=0))


def given(tensor: T | None) -> tuple[T, ...]:
    return () if tensor is None else (tensor,)


def factor(query: Tensor, scale: float | None) -> float:
    """The factor of the scores: `scale`, or 1 / sqrt(D) if it is None; scriptable."""
    if scale is None:
        return 1.0 / math.sqrt(max(1, query.shape[-1]))
    return scale


def plan_of(scored: Sequence[Tensor], value: Tensor | None, mask: Tensor | None) -> Plan:
    """The plan of all pairs; raises RuntimeError if batch axes do not broadcast.

    Queries count as varying along all batch axes, so that only queries vary along the rows. Keys and values count as
    varying where another of them does.
    """
    query, key, *others = scored
    values = (tensor.shape[:-2] for tensor in given(value))
    keyed = broadcast_shapes(key.shape[:-2], *values, *(other.shape[:-3] for other in others))
    masks = [tensor.shape for tensor in given(mask)]
    batch = broadcast_shapes(query.shape[:-2], keyed, *(shape[:-2] for shape in masks))
    rows, columns = (*batch, query.shape[-2], 1), (*keyed, 1, key.shape[-2])
    return broadcast_plan(rows, columns, *masks, *(other.shape[:-1] for other in others))


def prepare_scores(
    function: str,
    output: str,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> AttentionCall:
    """The call of `attention_scores` or `attention_weights` with these arguments."""
    return prepare(function, output, {"query": query, "key": key}, None, attn_mask, is_causal, scale)


def prepare_sums(
    function: str,
    output: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """The call of `attention` with these arguments."""
    if enable_gqa:
        query, key, value, attn_mask = group_heads(query, key, value, attn_mask)
    check_operand(function, "value", value, dims=2)
    return prepare(function, output, {"query": query, "key": key}, value, attn_mask, is_causal, scale, dropout_p)


def prepare(
    function: str,
    output: str,
    scored: Mapping[str, Tensor],
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> AttentionCall:
    """Validate shapes, dtypes and devices (never values), and round the operands of sums as autocast would.

    `scored` are the operands of the scores by name, query and key first. The others broadcast with the pairs.
    """
    tensors = dict(scored) if value is None else {**scored, "value": value}
    for name, tensor in tensors.items():
        check_operand(function, name, tensor, dims=2 if name in PAIRED else 1)
    query, key, *others = scored.values()
    pairs = query.shape[-2], key.shape[-2]
    is_lower_right = False
    if is_causal_bias(type(attn_mask)) and not is_causal:
        attn_mask, is_causal, is_lower_right = None, True, _is_lower_right(function, attn_mask, pairs)
    if attn_mask is not None:
        _check_mask(function, attn_mask, is_causal, query, key)
    check_devices(function, **tensors, **({} if attn_mask is None else {"attn_mask": attn_mask}))
    if any(tensor.shape[-1] != query.shape[-1] for tensor in scored.values()):
        *first, last = (f"`{name}`" for name in scored)
        features = query.shape[-1:]
        remedies = (reshaped(name, one.shape, lambda own: tuple(own[-1:]) == features) for name, one in scored.items())
        raise ValueError(
            f"{function}: last dimensions of {', '.join(first)} and {last} must be equal; got "
            f"{shapes_of(tensors)}; {next(filter(None, remedies), 'project them alike')}"
        )
    if value is not None and value.shape[-2] != key.shape[-2]:
        remedy = reshaped("value", value.shape, lambda own: own[-2] == key.shape[-2]) or "cut or pad one"
        raise ValueError(f"{function}: there must be one value for each key; got {shapes_of(tensors)}; {remedy}")
    for name, other in list(scored.items())[2:]:
        if widens(other.shape[:-1], pairs):
            raise ValueError(
                f"{function}: `{name}` must broadcast to (queries, keys, D) = {(*pairs, query.shape[-1])}; got "
                f"{tuple(other.shape)}; unsqueeze it: (*batch, 1, 1, D) is the same for all pairs"
            )
    if value is not None:
        query, key, value, attn_mask, *others = rounded_by_autocast(query, key, value, attn_mask, *others)
    mask = query.new_empty((0, 0), dtype=torch.bool) if attn_mask is None else attn_mask
    operands = (query, key, *others)
    try:
        plan = plan_of(operands, value, attn_mask)
    except RuntimeError:
        all_tensors = tensors if attn_mask is None else {**tensors, "attn_mask": attn_mask}
        own_axes = {name: 2 if name in PAIRED else 3 for name in all_tensors}
        check_batches(function, all_tensors, own_axes, sharing_heads(function))
        raise
    _check_scale(function, scale)
    check_dropout(function, "dropout_p", dropout_p)
    if not isinstance(is_causal, bool):
        raise TypeError(f"{function}: `is_causal` must be True or False; got {is_causal!r}")
    dtype = query.dtype
    for tensor in (key, *others, *given(value)):
        dtype = wider(dtype, tensor.dtype)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        dtype = promote(dtype, query.ndim, attn_mask.dtype, attn_mask.ndim)
    if value is None and dtype.itemsize < 4 and autocast_enabled(query.device):
        dtype = torch.float32
    seed = None
    if value is not None:  # without dropout no seed is drawn
        seed = torch.randint(2**62, (1,), device="cpu") if dropout_p else query.new_empty(0, dtype=torch.int64)
    number = None if scale is None else float(scale)
    settings = attn_mask is not None, is_causal, number, float(dropout_p), dtype, is_lower_right
    return AttentionCall(output, operands, value, mask, seed, plan, *settings)


def rounded_by_autocast(query: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors as autocast rounds them where it is on."""
    tensors = query, *others
    if not autocast_enabled(query.device):
        return tensors
    dtype = torch.get_autocast_dtype(query.device.type)
    return tuple(
        _rounded(tensor, dtype)
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        else tensor
        for tensor in tensors
    )


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype; one that is expanded stays so, and takes no more memory.

    One that requires gradients is copied, since each of its elements has a gradient of its own. Inside of a transform,
    which hides what requires gradients, every one is.
    """
    if requires_grad((tensor,)) or _are_functorch_transforms_active():
        return _converted(tensor, dtype)
    distinct = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    return _converted(distinct, dtype).expand(tensor.shape)


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which would first copy a tensor whose memory holds the negatives of its values."""
    if is_compiling() or _are_functorch_transforms_active() or not tensor.is_neg():
        return tensor.to(dtype)
    return _neg_view(tensor).to(dtype, copy=True).neg_()


def group_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
    """The query (*batch, heads, L, D) as (*batch, heads of keys, group, L, D), and the others to broadcast with it."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_operand("attention", name, tensor, dims=3)
    heads, shared = query.shape[-3], key.shape[-3]
    if shared == 0 or heads % shared or not spreads(value.shape[-3], shared):
        raise ValueError(
            "attention: with enable_gqa the heads of `query`, axis -3, must be a multiple of those of `key` and "
            f"`value`; got {heads}, {shared} and {value.shape[-3]}; repeat heads, or transpose"
        )
    group = heads // shared
    tensors = {"query": query, "key": key, "value": value}
    if mask is not None and not is_causal_bias(type(mask)):
        _check_mask("attention", mask, False, query, key)
        tensors["attn_mask"] = mask
    batches = [tensor.shape[: max(0, tensor.ndim - 3)] for tensor in tensors.values()]
    if not do_broadcast(*batches):
        check_batches("attention", tensors, dict.fromkeys(tensors, 3), "expand them")
    if is_causal_bias(type(mask)):
        return query.unflatten(-3, (shared, group)), key.unsqueeze(-3), value.unsqueeze(-3), mask
    if mask is not None and mask.ndim >= 3:
        if not spreads(mask.shape[-3], heads):
            axis = mask.ndim - 3
            remedy = "repeat those of a group"
            if mask.ndim < query.ndim and mask.shape[axis] == query.shape[axis]:  # of batch entries, not of heads
                remedy = f"give attn_mask[{':, ' * (axis + 1)}None]"
            raise ValueError(
                f"attention: `attn_mask` must have 1 or {heads} heads, axis -3, as `query` has; got "
                f"{tuple(mask.shape)}; {remedy}"
            )
        mask = mask.unflatten(-3, (shared, group)) if mask.shape[-3] == heads else mask.unsqueeze(-3)
    return query.unflatten(-3, (shared, group)), key.unsqueeze(-3), value.unsqueeze(-3), mask


def _is_lower_right(function: str, bias: Any, pairs: tuple[int, int]) -> bool:
    """Whether a bias of PyTorch's differs from `is_causal`, which is that of the upper left corner."""
    if (bias.seq_len_q, bias.seq_len_kv) != pairs:
        raise ValueError(
            f"{function}: `attn_mask` must be a CausalBias of (queries, keys) = {pairs}; got one of "
            f"{(bias.seq_len_q, bias.seq_len_kv)}; make it for these lengths"
        )
    return bias.variant.name == "LOWER_RIGHT" and pairs[0] != pairs[1]


def check_dropout(function: str, argument: str, probability: Any) -> None:
    """Raise unless this is a probability."""
    if isinstance(probability, bool) or not isinstance(probability, Real) or not 0 <= float(probability) <= 1:
        raise ValueError(
            f"{function}: `{argument}` must be a probability from 0 to 1; got {probability!r}; give 0 for none"
        )


def _check_scale(function: str, scale: Any) -> None:
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (Real, torch.SymFloat))):
        remedy = "multiply query by it, and give scale=1.0" if isinstance(scale, Tensor) else "give a float"
        raise TypeError(f"{function}: `scale` must be a number or None; got {type(scale).__name__}; {remedy}")


def _check_mask(function: str, mask: Tensor, is_causal: bool, query: Tensor, key: Tensor) -> None:
    if is_causal:
        raise ValueError(
            f"{function}: `is_causal` and `attn_mask` exclude each other; got both; mask future keys in attn_mask: "
            "attn_mask & torch.ones(queries, keys, dtype=torch.bool).tril()"
        )
    check_mask(function, "attn_mask", mask, "for pairs that take part")
    check_pairs(function, mask, query, key)


LOG_SPARSE = "log_sparse_attention"


@dataclass
class LogSparseCall(Call):
    """A validated call of log-sparse attention: its tensors, the dtype of the result, and the settings."""

    query: Tensor
    key: Tensor
    value: Tensor
    dtype: torch.dtype
    local: int
    restart: int | None
    scale: float | None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def arguments(self) -> tuple[Any, ...]:
        return *self.tensors, self.dtype, self.local, self.restart, self.scale

    @property
    def batch(self) -> Shape:
        return tuple(broadcast_shapes(*(tensor.shape[:-2] for tensor in self.tensors)))

    @property
    def shape(self) -> Shape:
        return *self.batch, *self.value.shape[-2:]

    @property
    def factor(self) -> float:
        """The factor of the scores."""
        return factor(self.query, self.scale)

    @property
    def pattern(self) -> Pattern:
        return Pattern(self.local, self.restart)

    @property
    def operations(self) -> int:
        """About how many floating-point operations the pairs of the pattern take."""
        return self.operations_of(self.pattern.pairs(self.query.shape[-2]))

    def operations_of(self, pairs: int) -> int:
        """A multiplication and an addition for each feature of keys and values, and the operations of the softmax."""
        return math.prod(self.batch) * pairs * 2 * (self.query.shape[-1] + self.value.shape[-1] + 4)

    @property
    def matrices(self) -> list[Tensor]:
        """The tensors with one batch axis. It merges the axes of the shape to which their batch axes broadcast."""
        return [matrix(tensor.expand(*self.batch, *tensor.shape[-2:])) for tensor in self.tensors]


def matrix(tensor: Tensor) -> Tensor:
    """A tensor with one batch axis."""
    return tensor.reshape(math.prod(tensor.shape[:-2]), *tensor.shape[-2:])


def empty(call: AttentionCall | LogSparseCall, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised result, contiguous."""
    return call.tensors[0].new_empty(call.shape, dtype=dtype or call.dtype)


def prepare_log_sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    local: int = 1,
    restart: int | None = None,
    scale: float | None = None,
) -> LogSparseCall:
    """Validate shapes, dtypes, devices and settings (never values of tensors), and round as autocast would."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        check_operand(LOG_SPARSE, name, tensor, dims=2)
    check_devices(LOG_SPARSE, **tensors)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{LOG_SPARSE}: last dimension of `key` must equal that of `query`; got query {tuple(query.shape)}, key "
            f"{tuple(key.shape)}; project one to the size of the other"
        )
    for name in ("key", "value"):
        if tensors[name].shape[-2] != query.shape[-2]:
            raise ValueError(
                f"{LOG_SPARSE}: `{name}` must have as many positions as `query`; got query {tuple(query.shape)}, "
                f"{name} {tuple(tensors[name].shape)}; the pattern is that of self-attention: pad or cut the shorter "
                "one"
            )
    if not do_broadcast(*(tensor.shape[:-2] for tensor in tensors.values())):
        check_batches(LOG_SPARSE, tensors, dict.fromkeys(tensors, 2), sharing_heads(LOG_SPARSE))
    check_pattern(LOG_SPARSE, local, restart)
    _check_scale(LOG_SPARSE, scale)
    query, key, value = rounded_by_autocast(query, key, value)
    dtype = wider(wider(query.dtype, key.dtype), value.dtype)
    return LogSparseCall(query, key, value, dtype, local, restart, None if scale is None else float(scale))


def check_pattern(function: str, local: int, restart: int | None) -> None:
    """Raise unless these make a log-sparse pattern."""
    for name, number in {"local": local, **({} if restart is None else {"restart": restart})}.items():
        if not isinstance(number, int) or isinstance(number, bool):
            remedy = integer_remedy(number)
            if isinstance(number, Tensor):
                remedy = "it takes no mask, since the pattern says which pairs take part; cut padded positions off"
            raise TypeError(f"{function}: `{name}` must be an integer; got {type(number).__name__}; {remedy}")
        if number < 1:
            remedy = "1 is a position's attention to itself" if name == "local" else "None is no restart"
            raise ValueError(f"{function}: `{name}` must be at least 1; got {number}; {remedy}")
    if restart is not None and local > restart:
        raise ValueError(
            f"{function}: `local` must be at most `restart`, where every earlier position is attended to; got local="
            f"{local}, restart={restart}; lower `local` or raise `restart`"
        )
