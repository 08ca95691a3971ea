"""Define what an op and a variant are, and keep the registry of ops."""

import copy
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from effops.dispatch.validation import Conditions, no_conditions
from effops.numerics.precision import arithmetic_dtype, converted
from effops.prediction.allocations import Bytes
from effops.pytorch.calls import _is_alias_of, base_of, tree_leaves, tree_map_only
from effops.text import did_you_mean, tells_wrong_arguments

FunctionT = TypeVar("FunctionT", bound=Callable[..., Tensor])
CallT = TypeVar("CallT", bound="Call")


class Call(ABC):
    """The validated arguments of a call, as `prepare` of an op returns them.

    `dtype` is that of the result. `made` tells a prediction which of the tensors are no arguments, but made of them.
    """

    dtype: torch.dtype
    made: Sequence[bool] = ()

    def map_tensors(self: CallT, kind: type, function: Callable[[Any], Any]) -> CallT:
        """The call with every tensor, or what stands for one, replaced by a function of it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return type(self)(**tree_map_only(kind, function, fields))

    def note_arguments(self, arguments: Iterable[Any]) -> None:
        """Tell which of the tensors are neither among the arguments of the public function, nor views of them."""
        given = [argument for argument in tree_leaves(list(arguments)) if isinstance(argument, Tensor)]
        known = {*map(id, given), *(id(base_of(tensor)) for tensor in given if base_of(tensor) is not None)}

        def is_given(tensor: Tensor) -> bool:
            # A view that was made in inference mode has no base. A tensor inside of a transform has no memory.
            shares = any(_is_alias_of(tensor, argument) for argument in given)
            return shares or id(tensor) in known or id(base_of(tensor)) in known

        self.made = [not is_given(tensor) for tensor in self.tensors]

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, on one device."""

    @property
    @abstractmethod
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the op's operators: the tensors, then the settings."""

    @property
    @abstractmethod
    def operations(self) -> int:
        """About how many floating-point operations the call takes."""

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def arithmetic(self) -> torch.dtype:
        return arithmetic_dtype(self.dtype)


class Cost(NamedTuple):
    """What a variant is predicted to need for the forward pass of one call, beyond the inputs.

    `saved_bytes` stay allocated for backward, besides inputs and output. They are 0 if nothing requires gradients.
    `unknown` names an operator that may allocate more inside than `temporary_bytes`; it is empty if there is none.
    """

    output_bytes: int
    saved_bytes: int
    temporary_bytes: int
    flops: int
    unknown: str = ""

    @classmethod
    def of(cls, predicted: Bytes, operations: int) -> "Cost":
        output_bytes, saved_bytes, temporary_bytes, unknown = predicted
        return cls(output_bytes, saved_bytes, temporary_bytes, operations, unknown)


Requirement = Callable[[Any], str]


def anywhere(call: Call) -> bool:
    return True


def untold(call: Call) -> str:
    return ""


@dataclass(frozen=True)
class Variant:
    """One implementation of an op.

    `run` computes the result of a call. `cost` predicts what it needs, or returns None if nothing can be predicted.
    Each of `requires` returns why the variant cannot run a call, or an empty string. `automatic` tells whether the
    automatic choice may take the variant for a call. `statistics` computes the statistics from which `Op.finish` makes
    the result. It is None if the op is no logsumexp. `plan` tells in words how the variant runs a call.
    """

    name: str
    run: Callable[[Any], Tensor]
    cost: Callable[[Any], Cost | None]
    requires: Sequence[Requirement] = ()
    automatic: Callable[[Any], bool] = anywhere
    statistics: Callable[[Any], Tensor] | None = None
    plan: Callable[[Any], str] = untold

    def obstacle(self, call: Call) -> str:
        """Why this variant cannot run `call`; empty if it can."""
        return next(filter(None, (requirement(call) for requirement in self.requires)), "")


@dataclass
class Op:
    """A named operation with several variants behind one public function.

    Attributes:
        name: the public function's name
        prepare: validates the arguments of the public function and returns the call that variants receive
        preference: names of the variants, the best first
        core_dims: the tensor arguments, by name and in order, and how many of the last dimensions of each are no batch
            axes; an op without core_dims takes no DTensors
        logsumexp: for an op that is a logsumexp along a batch axis, the function that returns this axis of a call; the
            variants of the op return the statistics of `effops.blocks.logsumexp.Reduction`, whose sum is the result
        conditions: what must hold of the values of a call's operands, which `effops.validate` checks
        shortcut: computes small calls of the automatic choice from the arguments of the public function; it returns
            None for others; an op may have none
    """

    name: str
    prepare: Callable[..., Any]
    preference: tuple[str, ...]
    core_dims: Mapping[str, int] = field(default_factory=dict)
    logsumexp: Callable[[Any], int] | None = None
    conditions: Conditions = no_conditions
    shortcut: Callable[..., Tensor | None] | None = field(default=None, init=False)
    function: Callable[..., Tensor] | None = field(default=None, init=False)
    variants: dict[str, Variant] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        _ops[self.name] = self

    def add(self, variant: Variant) -> None:
        """Register a variant."""
        if variant.name not in self.preference:
            raise ValueError(
                f"{self.name}: variant {variant.name!r} has no place in the order of preference {self.preference}"
            )
        registered = {**self.variants, variant.name: variant}
        self.variants = {name: registered[name] for name in self.preference if name in registered}

    def public(self, function: FunctionT) -> FunctionT:
        """Make the decorated function the public function of this op. It tells of arguments that it does not take."""
        told = tells_wrong_arguments(function)
        self.function = told
        return told

    def given(self, *arguments: Any, core_dims: Mapping[str, int] | None = None) -> "Op":
        """This op with its first arguments given, as an equation, and perhaps `core_dims`. It is not registered."""
        assert self.function is not None
        op = copy.copy(self)
        op.prepare, op.function = (functools.partial(one, *arguments) for one in (self.prepare, self.function))
        op.core_dims = core_dims or {}
        return op

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        """The result of the public function."""
        assert self.function is not None
        return self.function(*args, **options)

    def finish(self, call: Call, computed: Tensor) -> Tensor:
        """The result, from what forms and operators compute: the statistics of a logsumexp, else the result itself."""
        return computed if self.logsumexp is None else converted(torch.sum(computed, -1), call.dtype)


_ops: dict[str, Op] = {}


def ops() -> Mapping[str, Op]:
    """Every registered op by name."""
    return MappingProxyType(_ops)


def find_op(function: Callable[..., Any] | str, asked_by: str = "") -> Op:
    """The op that a public function calls, or the op of that name. An error begins with who has asked, if anybody.

    The function may be a `functools.partial`, whose arguments are then given.
    """
    if isinstance(function, functools.partial) and not function.keywords:
        return find_op(function.func, asked_by).given(*function.args)
    asker = f"{asked_by}: " if asked_by else ""
    op = next((op for op in _ops.values() if function in (op.name, op.function)), None)
    if op is None and isinstance(function, str):
        raise ValueError(
            f"{asker}{function!r} is no op of effops; choose from {', '.join(_ops)}{did_you_mean(function, _ops)}"
        )
    if op is None:
        name = getattr(function, "__name__", None)
        got = f"`{name}`" if name else f"an object of class {type(function).__name__}"
        remedy = "effops.record() tells which ops run inside of other functions"
        if not callable(function):  # perhaps what an op has returned
            arguments = ", and then its arguments" if asked_by == "explain" else ""
            remedy = f"give the op without calling it, as effops.attention{arguments}"
        elif asked_by == "explain":
            remedy += "; effops.explain(effops.tiled(function), ...) tells how any other one runs in tiles"
        raise ValueError(f"{asker}`function` must be an op of effops; got {got}; {remedy}; ops are {', '.join(_ops)}")
    return op
