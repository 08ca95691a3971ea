"""The tensors and settings of a random call, and the mistakes that may be made of them."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.nn.attention import bias

from effops.dispatch.op import Op
from effops.reference import reference_of, tried_ops

from ..support.layouts import channels_last, negated, odd_where_single, offset, strided
from .draw import CAUSAL_BIASES, Operand, RandomCall

EXAMPLES = 3  # of a call under `vmap`
LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "channels last": channels_last,
    "offset": offset,
    "odd where single": odd_where_single,
    "negated": negated,
}


MODES = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
}


class Plain(Tensor):
    """A subclass that overrides nothing."""


class Overriding(Tensor):
    """A subclass that gives PyTorch's functions another meaning."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@dataclass
class Built:
    """What an op is called with.

    Attributes:
        op: the op
        args: its arguments in their order
        options: its arguments by name
        places: where those arguments are that require gradients
        in_dims: for each argument, the axis of the examples under `vmap`, or None
        upstream: makes a gradient of a result
        mode: what the call runs in
    """

    op: Op
    args: list[Any]
    options: dict[str, Any]
    places: tuple[int, ...]
    in_dims: tuple[int | None, ...]
    upstream: Callable[[Tensor], Tensor]
    mode: contextlib.AbstractContextManager[Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the plain expression, which has no variants."""
        return {name: value for name, value in self.options.items() if name != "variant"}

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        return tuple(self.args[place] for place in self.places)

    @property
    def has_empty(self) -> bool:
        return any(isinstance(arg, Tensor) and arg.numel() == 0 for arg in self.args)

    def of_wanted(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function of those arguments alone that require gradients."""

        def restricted(*some: Tensor) -> Tensor:
            given = dict(zip(self.places, some))
            return function(*(given.get(place, arg) for place, arg in enumerate(self.args)))

        return restricted

    def example(self, number: int | None) -> list[Any]:
        """The values of one example; of a call without examples, its own."""
        chosen = (one if dim is None else one.select(dim, number) for one, dim in zip(self.args, self.in_dims))
        return [one.detach().as_subclass(Tensor).clone() if isinstance(one, Tensor) else one for one in chosen]


def build(call: RandomCall) -> Built:
    """The arguments of a call."""
    op, generator = tried_ops()[call.op], torch.Generator().manual_seed(call.seed)
    is_batched = call.transform.startswith("vmap")
    batched = [is_batched and operand.batched for operand in call.operands]
    shapes = [(EXAMPLES,) * one + operand.shape for operand, one in zip(call.operands, batched)]
    mode = FakeTensorMode() if call.device == "fake" else MODES.get(call.surroundings, contextlib.nullcontext)()
    move = mode.from_tensor if call.device == "fake" else on_meta if call.device == "meta" else lambda one: one
    tensors = [
        _laid_out(values.movedim(0, operand.axis) if one else values, operand)
        for values, operand, one in zip(_values(call, shapes, generator), call.operands, batched)
    ]
    args, places = [], []
    for place, (tensor, operand) in enumerate(zip(tensors, call.operands)):
        wanted = operand.wanted and tensor.is_floating_point() and operand.kind not in ("number", "integers")
        args.append(_as_kind(tensor, operand.kind, wanted, move))
        places += [place] * wanted
    options = {**call.settings, "variant": call.variant}
    if call.mask == "is_causal":
        options["is_causal"] = True
    if call.mask in CAUSAL_BIASES:
        queries, keys = call.operands[0].shape[-2], call.operands[1].shape[-2]
        options["attn_mask"] = getattr(bias, f"causal_{call.mask}")(queries, keys)
    in_dims = tuple(
        operand.axis if one and isinstance(arg, Tensor) else None
        for operand, one, arg in zip(call.operands, batched, args)
    )

    def upstream(out: Tensor) -> Tensor:
        return move(lay_out(values_like(out, call.seed), call.upstream))

    if call.mistake:
        place = make_mistake(call.mistake, args, options, call.seed)
        places = [one for one in places if one != place]
    return Built(op, args, options, tuple(places), in_dims, upstream, mode)


def values_like(tensor: Tensor, seed: int) -> Tensor:
    """Random values of the shape and the dtype of a tensor, the same ones for all transforms."""
    # NumPy draws them, since transforms forbid or batch what PyTorch draws.
    drawn = numpy.random.default_rng(seed).normal(size=tuple(tensor.shape))
    return torch.from_numpy(numpy.asarray(drawn)).to(tensor.dtype)


def _values(call: RandomCall, shapes: list[tuple[int, ...]], generator: torch.Generator) -> list[Tensor]:
    """Values in float64 and masks, of these shapes."""
    masked = call.mask in ("boolean", "additive")
    own = shapes[:-1] if masked else shapes
    # A direction of no coordinates cannot be drawn: empty axes are cut off.
    positive = [tuple(max(1, size) for size in shape) for shape in own]
    drawn = reference_of(tried_ops()[call.op]).sample(*positive, dtype=torch.float64, generator=generator)
    values = [
        scaled(tensor[tuple(slice(size) for size in shape)], operand.factor)
        for tensor, shape, operand in zip(drawn, own, call.operands)
    ]
    if call.rows:
        align_rows(dict(zip(tried_ops()[call.op].core_dims, values)), -1.0 if call.rows == "opposite" else 1.0)
    if masked:
        chance, number = torch.rand(shapes[-1], generator=generator), torch.randn(shapes[-1], generator=generator)
        takes_part = chance < 0.7
        if takes_part.ndim > 1:
            takes_part[..., :1, :] = False  # a query with no key
        values.append(takes_part if call.mask == "boolean" else number.masked_fill(~takes_part, -math.inf))
    return values


def scaled(values: Tensor, factor: float) -> Tensor:
    """The values times a factor; directions stay of length 1."""
    lengths = values.norm(dim=-1) if values.ndim and values.shape[-1] > 1 else values.new_zeros(1)
    return values if torch.allclose(lengths, torch.ones_like(lengths)) else values * factor


def align_rows(values: Mapping[str, Tensor], sign: float) -> None:
    """Make all rows of a second operand those of the first row of another, or their opposite, in place."""
    for one, other in (("a", "b"), ("loc", "x"), ("query", "key")):
        if one in values and values[one].numel() and values[one].shape[-1] == values[other].shape[-1]:
            values[other].copy_(sign * values[one].reshape(-1, values[one].shape[-1])[0])


def _laid_out(values: Tensor, operand: Operand) -> Tensor:
    return lay_out(values if values.dtype == torch.bool else values.to(operand.dtype), operand.layout)


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    if layout == "sliced" and tensor.dtype == torch.bool:
        return tensor
    return LAYOUTS[layout](tensor) if layout in LAYOUTS else strided(tensor, layout)


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _as_kind(tensor: Tensor, kind: str, wanted: bool, move: Callable[[Tensor], Tensor]) -> Any:
    if kind == "number":
        return float(tensor.flatten()[0])
    if kind == "integers":
        return move(tensor.ceil().long())
    tensor = move(tensor.detach())
    if kind == "Parameter":
        return Parameter(tensor, requires_grad=wanted)
    return (tensor.as_subclass(Plain) if kind == "Plain" else tensor).requires_grad_(wanted)


def make_mistake(mistake: str, args: list[Any], options: dict[str, Any], seed: int) -> int:
    """Make a mistake in one of the arguments, chosen by the seed, and return its place."""
    place = seed % len(args)
    arg = args[place]
    if mistake == "a setting of text":
        for name in sorted(options.keys() - {"attn_mask", "variant"})[:1]:
            options[name] = "much"
    elif mistake == "an unknown variant":
        options["variant"] = "fastest"
    elif isinstance(arg, Tensor):
        args[place] = MISTAKES[mistake](arg.detach())
    return place


MISTAKES = {
    "another size": lambda tensor: torch.cat((tensor, tensor[..., :1]), -1) if tensor.ndim else tensor,
    "an axis less": lambda tensor: tensor.select(0, 0) if tensor.ndim and len(tensor) else tensor,
    "no axis": lambda tensor: tensor.sum(),
    "integers": lambda tensor: tensor.long(),
    "booleans": lambda tensor: tensor > 0,
    "complex": lambda tensor: tensor.to(torch.complex64),
    "another device": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.as_subclass(Tensor).to_sparse(),
    "a list": lambda tensor: tensor.tolist(),
    "a number": lambda tensor: 1.0,
    "an array": lambda tensor: tensor.resolve_neg().float().numpy(),
    "None": lambda tensor: None,
    "a subclass": lambda tensor: tensor.as_subclass(Overriding),
}
