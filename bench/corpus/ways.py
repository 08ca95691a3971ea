"""Ways to write a program of the corpus by hand, beside the one that its author wrote and the mended one.

`known/ways.py` and `held_out/ways.py` have those of each program. `looped` and `mapped` make the common ones: they run
the program itself on parts of its arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from effops.measure import tensors_of

from .budgets import leaves, run
from .program import Program

Function = Callable[..., Any]
Axes = Mapping[int, int]  # the axis that is cut, by the place of the argument
MOST_OTHERS = 1e-3


@dataclass(frozen=True)
class Ways:
    """How a program can be written otherwise. What does not apply is None.

    Attributes:
        mended: what the mended program is: "loop", "contraction", "formula", "function" or "look-up"
        loop: a loop over parts, each of which backward computes again; None if the mended program is one
        vmap: `torch.func.vmap(chunk_size=)`
        keops: KeOps' reduction of the formula
        op: the named op of effops
        no_keops: why there is none, where one would expect it
    """

    mended: str
    loop: Function | None = None
    vmap: Function | None = None
    keops: Function | None = None
    op: Function | None = None
    no_keops: str = ""


def ways(half: str) -> Mapping[str, Ways]:
    """The ways of a half's wasteful programs, by their names."""
    found: Mapping[str, Ways] = importlib.import_module(f".{half}.ways", __package__).WAYS
    return found


def outcome(program: Program, arguments: tuple[Any, ...]) -> list[Tensor]:
    """The results of a run, and the gradients of the arguments."""
    for one in leaves(arguments):
        one.grad = None
    results = tensors_of(run(program, arguments))
    return [one.detach() for one in results] + [one.grad for one in leaves(arguments) if one.grad is not None]


def differences(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """In what outcomes differ by more than rounding; empty if they do not.

    Of integers, one in a thousand may be another one: where two distances are almost the same, either is the smallest.
    """
    if len(found) != len(expected):
        return f"{len(found)} results and gradients instead of {len(expected)}"
    for index, (one, right) in enumerate(zip(found, expected, strict=True)):
        if not (right.is_floating_point() or right.is_complex()):
            share = float((one != right).double().mean()) if one.shape == right.shape else 1.0
            if share > MOST_OTHERS:
                return f"{index + 1} of {len(expected)}: {share:.2%} of the integers are others"
            continue
        scale = float(right.abs().max().clamp(min=1e-6)) if right.numel() else 1.0
        try:
            torch.testing.assert_close(one, right, rtol=2e-2 if right.itemsize == 2 else 1e-3, atol=1e-4 * scale)
        except AssertionError as error:
            return f"{index + 1} of {len(expected)}: {' '.join(str(error).split())}"
    return ""


def looped(run: Function, axes: Axes, rows: int, join: Callable[[Iterable[Tensor]], Tensor]) -> Function:
    """A program that runs on parts of some arguments, and joins its results. Backward computes a part again."""

    def loop(*args: Any) -> Tensor:
        def of_part(*part: Tensor) -> Any:
            given = dict(enumerate(args)) | dict(zip(axes, part, strict=True))
            return run(*given.values())

        parts = zip(*(args[place].split(rows, axis) for place, axis in axes.items()), strict=True)
        return join(checkpoint(of_part, *part, use_reentrant=False) for part in parts)

    return loop


def mapped(run: Function, axes: Axes, rows: int, out: int = 0) -> Function:
    """A program by vmap over an axis of some arguments; the axis `out` of the result is that axis."""

    def vmapped(*args: Any) -> Tensor:
        def of_one(*ones: Tensor) -> Tensor:
            cut = {place: one.unsqueeze(axis) for (place, axis), one in zip(axes.items(), ones, strict=True)}
            result: Tensor = run(*(dict(enumerate(args)) | cut).values())
            return result.squeeze(out)

        over = torch.func.vmap(of_one, in_dims=tuple(axes.values()), out_dims=out, chunk_size=rows)
        result: Tensor = over(*(args[place] for place in axes))
        return result

    return vmapped


def along(axis: int = 0) -> Callable[[Iterable[Tensor]], Tensor]:
    return lambda parts: torch.cat(tuple(parts), axis)


def added(parts: Iterable[Tensor]) -> Tensor:
    """The sum of parts, of which one at a time is there."""
    iterator = iter(parts)
    total = next(iterator)
    for part in iterator:
        total = total + part
    return total


def kept(tensor: Tensor) -> Any:
    """KeOps' variable of rows (*B, N, D) of the axis that is kept."""
    from pykeops.torch import LazyTensor

    return LazyTensor(tensor.unsqueeze(-2).contiguous())


def reduced(tensor: Tensor) -> Any:
    """KeOps' variable of rows (*B, M, D) of the axis that is reduced."""
    from pykeops.torch import LazyTensor

    return LazyTensor(tensor.unsqueeze(-3).contiguous())


def squared(rows: Tensor, others: Tensor) -> Any:
    """KeOps' squared distances of all pairs."""
    return ((kept(rows) - reduced(others)) ** 2).sum(-1)
