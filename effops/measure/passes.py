"""What is measured: the pass of a function, and the tensors and storages of it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from effops.pytorch.calls import FakeTensor
from effops.text import integer_remedy, tells_wrong_arguments

AS_A_PASS = "Pass(function, (a, b))"


@dataclass(frozen=True)
class Prepared:
    """A pass ready to run: `run()` is what is measured. The tensors in `held` are allocated before it."""

    run: Callable[[], Any]
    held: tuple[Any, ...]


@dataclass(frozen=True)
class Pass:
    """What is measured: `function(*args)`, or with `backward` only the backward pass from its result to `args`.

    A backward pass differentiates by the tensors among `args` that require gradients. Its forward pass runs anew before
    every measurement, and outside of it. The gradient that comes from above is normal noise of the result's shape and
    layout: no constant, which an implementation could profit from.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    backward: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            got = type(self.function).__name__
            raise TypeError(f"Pass: `function` must be a function; got {got}; give it uncalled, as in {AS_A_PASS}")
        if not isinstance(self.args, (tuple, list)):
            got = type(self.args).__name__
            raise TypeError(
                f"Pass: `args` must be a tuple of the arguments of `function`; got {got}; give one in parentheses with "
                f"a comma, as (a,), and two as in {AS_A_PASS}"
            )
        if not isinstance(self.backward, bool):
            got = type(self.backward).__name__
            raise TypeError(
                f"Pass: `backward` must be True or False; got {got}; give all arguments of `function` as one tuple, as "
                f"in {AS_A_PASS}"
            )

    @property
    def device(self) -> torch.device:
        """Where the first tensor among the arguments is; the CPU if there is none."""
        return next((tensor.device for tensor in tensors_of(self.args)), torch.device("cpu"))

    def prepare(self) -> Prepared:
        """Do what comes before the measured part."""
        if not self.backward:
            return Prepared(lambda: self.function(*self.args), self.args)
        leaves = [tensor for tensor in tensors_of(self.args) if tensor.requires_grad]
        if not leaves:
            raise ValueError(
                "Pass(backward=True): one of `args` must require gradients; got none that does; call "
                ".requires_grad_() on one, or leave `backward` out"
            )
        outputs = [output for output in tensors_of(self.function(*self.args)) if output.requires_grad]
        if not outputs:
            raise ValueError(
                "Pass(backward=True): the result of `function` must require gradients; got none that does; compute it "
                "without .detach(), .item() and no_grad, or leave `backward` out"
            )
        upstream = [upstream_gradient(output) for output in outputs]
        held = (*tensors_of(self.args), *outputs, *upstream)
        return Prepared(lambda: torch.autograd.grad(outputs, leaves, upstream), held)


# A dataclass makes its `__init__` itself, so no decorator can stand above it.
Pass.__init__ = tells_wrong_arguments(  # type: ignore[method-assign]
    Pass.__init__, name="Pass", remedy=f"; give the arguments as one tuple, as in {AS_A_PASS}"
)


def check_pass(caller: str, argument: str, work: Any) -> None:
    """Raise unless this is a pass of tensors that have memory which can be measured."""
    if not isinstance(work, Pass):
        raise TypeError(f"{caller}: `{argument}` must be a Pass; got {type(work).__name__}; give {AS_A_PASS}")
    for tensor in tensors_of(work.args):
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            raise ValueError(
                f"{caller}: tensors of `{argument}` must have memory; got a {'meta' if tensor.is_meta else 'fake'} "
                "tensor; effops.lint(function, *args).peak_bytes predicts without any"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"{caller}: tensors of `{argument}` must be on a CPU or a CUDA device; got {tensor.device}; move them"
            )


def check_passes(caller: str, passes: Any) -> None:
    """Raise unless these are passes by name."""
    if not isinstance(passes, Mapping):
        raise TypeError(
            f"{caller}: `passes` must be a dict of names and passes; got {type(passes).__name__}; give "
            f'{{"name": {AS_A_PASS}}}'
        )
    for name, work in passes.items():
        if not isinstance(name, str):
            raise TypeError(f"{caller}: names of `passes` must be texts; got {name!r}; give {str(name)!r}")
        check_pass(caller, f"passes[{name!r}]", work)


def check_integer(caller: str, argument: str, number: Any, least: int) -> None:
    """Raise unless this is an integer, at least `least`."""
    if isinstance(number, bool) or not isinstance(number, int):
        remedy = f"give a number, as {max(1, least)}" if isinstance(number, bool) else integer_remedy(number)
        raise TypeError(f"{caller}: `{argument}` must be an integer; got {number!r}; {remedy}")
    if number < least:
        raise ValueError(f"{caller}: `{argument}` must be at least {least}; got {number}; leave it out for the default")


def check_seconds(caller: str, argument: str, seconds: Any) -> None:
    """Raise unless this is a number of seconds, 0 or more."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{caller}: `{argument}` must be a number of seconds; got {seconds!r}; give a float, as 10.0")
    if not seconds >= 0:
        raise ValueError(f"{caller}: `{argument}` must be at least 0; got {seconds}; leave it out for the default")


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, one.name) for one in fields(value)]
    elif isinstance(value, (tuple, list)):
        parts = value
    return [tensor for part in parts for tensor in tensors_of(part)]


def upstream_gradient(output: Tensor) -> Tensor:
    """Normal noise of the shape, layout, dtype and device of `output`, the same in every call and layout."""
    generator = torch.Generator(output.device).manual_seed(0)
    values = torch.randn(output.shape, dtype=output.dtype, device=output.device, generator=generator)
    return torch.empty_like(output, requires_grad=False).copy_(values)


def storage_bytes(value: Any, *, excluding: Any = (), block_bytes: int = 1) -> int:
    """Bytes of the storages under the tensors in `value`, each once, without those under the tensors in `excluding`.

    Every storage is rounded up to a multiple of `block_bytes`.
    """
    excluded = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(excluding)}
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors_of(value)}
    rounded = {pointer: -(-nbytes // block_bytes) * block_bytes for pointer, nbytes in storages.items()}
    return sum(nbytes for pointer, nbytes in rounded.items() if pointer not in excluded)


def warm_up(passes: Iterable[Pass], runs: int) -> None:
    """Run each pass `runs` times, one pass after another."""
    for work in passes:
        for _ in range(runs):
            work.prepare().run()
