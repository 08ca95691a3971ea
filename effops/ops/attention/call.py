"""Calls of attention: masked scores of all pairs of queries and keys, their softmax, or the weighted sums of values.

A `Kind` tells how scores are computed: as scaled dot products or as additive scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from effops.blocks.pairs import Scores
from effops.blocks.plan import Plan, Shape, broadcast_plan
from effops.dispatch.arguments import check_dense, check_devices, check_operand
from effops.numerics.precision import arithmetic_dtype, autocast_enabled, wider, without_autocast
from effops.numerics.values import observed

SETTINGS = {"masked": bool, "is_causal": bool, "scale": float | None, "dropout_p": float, "dtype": torch.dtype}
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


def tensor_dims(kind: Kind, output: str) -> dict[str, int]:
    """The tensors of the public function, and how many of the last dimensions of each are no batch axes."""
    return dict(join_arguments(kind.operands.items(), [("value", 2)] if output == "sums" else [], ("attn_mask", 2)))


class AttentionCall(NamedTuple):
    """A validated call.

    Attributes:
        output: "scores" of all pairs, "weights" (their softmax), or "sums" of values, weighted by it
        scored: the operands of the scores, query and key first
        value: the values that are summed, or None
        mask: a boolean tensor of one element if no mask was given
        seed: the seed of dropout, or None without a value
        masked: whether a mask was given
        scale: the factor of the scores; None for that of the kind
        dtype: the dtype of the result
    """

    output: str
    scored: tuple[Tensor, ...]
    value: Tensor | None
    mask: Tensor
    seed: Tensor | None
    masked: bool
    is_causal: bool
    scale: float | None
    dropout_p: float
    dtype: torch.dtype

    @classmethod
    def split(cls, output: str, arguments: Sequence[Any]) -> AttentionCall:
        """The inverse of `arguments`."""
        count = len(arguments) - len(SETTINGS)
        return cls(output, *split_arguments(output, arguments[:count]), *arguments[count:])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the order of the public function, and then the seed."""
        return join_arguments(self.scored, _given(self.value), self.mask, *_given(self.seed))

    @property
    def settings(self) -> tuple[Any, ...]:
        return self.masked, self.is_causal, self.scale, self.dropout_p, self.dtype

    @property
    def arguments(self) -> tuple[Any, ...]:
        return *self.tensors, *self.settings

    @property
    def operations(self) -> int:
        return self.plan.numel(self.plan.order) * (2 * self.dimension + 4)

    @property
    def device(self) -> torch.device:
        return self.mask.device

    @property
    def arithmetic(self) -> torch.dtype:
        return arithmetic_dtype(self.dtype)

    @property
    def plan(self) -> Plan:
        """The plan of all pairs.

        Along axes where another operand varies the queries are expanded. So only queries vary along the rows.
        """
        query, key = self.pairs
        weights = (weight.shape[:-1] for weight in self.scored[2:])
        return broadcast_plan(query.shape[:-1], key.shape[:-1], self.mask.shape, *weights)

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """The operands query (*batch, queries, 1, D) and key (*batch, 1, keys, D)."""
        query, key = self.scored[:2]
        shapes = self._keyed, self.mask.shape[:-2]
        batch = torch.broadcast_shapes(query.shape[:-2], *shapes)
        padded = (1,) * (len(batch) - query.ndim + 2) + tuple(query.shape[:-2])
        others = torch.broadcast_shapes((1,) * len(batch), *shapes)
        sizes = tuple(own if other == 1 else size for own, other, size in zip(padded, others, batch))
        return _expand(query, sizes).unsqueeze(-2), _expand(key, self._keyed).unsqueeze(-3)

    @property
    def values(self) -> Tensor:
        """The operand value (*batch, 1, keys, V)."""
        assert self.value is not None
        return _expand(self.value, self._keyed).unsqueeze(-3)

    @property
    def _keyed(self) -> Shape:
        """The shape to which the batch axes of keys, values and weights broadcast."""
        values = () if self.value is None else (self.value.shape[:-2],)
        weights = (weight.shape[:-3] for weight in self.scored[2:])
        return tuple(torch.broadcast_shapes(self.scored[1].shape[:-2], *values, *weights))

    @property
    def result(self) -> Plan:
        """The plan of the result. The last axis of sums is the dimension of the values, not that of the keys."""
        plan = self.plan
        return plan if self.value is None else replace(plan, shape=(*plan.shape[:-1], self.value.shape[-1]))

    @property
    def shape(self) -> Shape:
        return self.result.shape

    @property
    def drawn_seed(self) -> int:
        """The seed as a number. A call has one seed, even for a batch of examples."""
        if self.seed is None or self.seed.numel() != 1:
            raise NotImplementedError(
                "attention: vmap(randomness='different') cannot be had with dropout in this variant; give "
                "randomness='same', or variant='naive'"
            )
        return int(observed(self.seed, ordinary=0))

    @property
    def dimension(self) -> int:
        """How many coordinates of query and value a pair needs."""
        return self.scored[0].shape[-1] + (0 if self.value is None else self.value.shape[-1])


def _given(tensor: Tensor | None) -> tuple[Tensor, ...]:
    return () if tensor is None else (tensor,)


def _expand(tensor: Tensor, batch: Shape) -> Tensor:
    return tensor if tensor.shape[:-2] == batch else tensor.expand(*batch, *tensor.shape[-2:])


Form = Callable[..., Tensor]  # a scriptable function of the operands of the scores, the scale, and the arithmetic dtype


class Kind(Protocol):
    """A kind of scores.

    Attributes:
        operands: the names of the operands, query and key first, and how many of the last dimensions of each are no
            batch axes
        forms: functions that compute the scores by PyTorch operations: naive and, where it differs, einsum
    """

    @property
    def operands(self) -> Mapping[str, int]: ...

    @property
    def forms(self) -> Mapping[str, Form]: ...

    def scale(self, call: AttentionCall) -> float:
        """The factor of the scores."""

    def blocks(self, call: AttentionCall, wanted: Sequence[bool]) -> Scores:
        """The scores block by block, and the gradients that `wanted` asks for."""


def prepare(
    kind: Kind,
    function: str,
    output: str,
    scored: Sequence[Tensor],
    value: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
) -> AttentionCall:
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
    if value is not None:  # without dropout no seed is drawn
        seed = torch.randint(2**62, ()) if dropout_p else query.new_zeros((), dtype=torch.int64)
    causal, factor = bool(is_causal), None if scale is None else float(scale)
    return AttentionCall(output, tuple(scored), value, mask, seed, bool(masks), causal, factor, float(dropout_p), dtype)


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


@contextmanager
def rounded_by_autocast(function: str, query: Tensor, **others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """A context in which autocast is off. It gives the tensors as autocast would round them."""
    check_operand(function, "query", query, dims=2)
    for name, tensor in others.items():
        if isinstance(tensor, Tensor):
            check_dense(function, name, tensor)
    tensors: tuple[Any, ...] = (query, *others.values())
    if autocast_enabled(query.device):
        dtype = torch.get_autocast_dtype(query.device.type)
        tensors = tuple(
            tensor.to(dtype)
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
            else tensor
            for tensor in tensors
        )
    with without_autocast(query.device):
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
    else:
        check_dense(function, "attn_mask", mask)
    if _widens(mask.shape, pairs):
        raise ValueError(
            f"{function}: `attn_mask` must broadcast to (queries, keys) = {pairs}; got {tuple(mask.shape)}; "
            "unsqueeze it: (*batch, 1, keys) masks keys for all queries"
        )


def _widens(own: Shape, pairs: tuple[int, int]) -> bool:
    """Whether the last two axes of a shape would enlarge those of the pairs, not just broadcast to them."""
    return any(size not in (1, wanted) for size, wanted in zip((1, 1, *own)[-2:], pairs))
