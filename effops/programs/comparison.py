"""`compare`: results, gradients, bytes and time of a function beside those of another one, against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from effops.measure import Pass, memory, tensors_of, times
from effops.numerics.precision import in_float64
from effops.pytorch.calls import tree_map_only
from effops.text import aligned, format_bytes, tells_wrong_arguments, why_not_bound

REPEATS, SECONDS = 5, 2.0  # of each time


@dataclass(frozen=True)
class Side:
    """One of the two functions.

    Attributes:
        error: the largest error of a floating-point result against float64, in units of the first function's own, at
            least a rounding of the largest value; None without such results
        gradient_error: the same of the gradients; None without
        differing: how many elements of the other results, integers and booleans, differ from those in float64; None
            without such results
        taken_bytes: the most that a call and its backward pass allocate besides results and gradients
        time_ms: the median of a call and its backward pass
    """

    error: float | None
    gradient_error: float | None
    differing: int | None
    taken_bytes: int
    time_ms: float


@dataclass(frozen=True)
class Comparison:
    """What `compare` found of the function and of the other one."""

    function: Side
    other: Side

    def __str__(self) -> str:
        header = "", "error", "of gradients", "differing", "bytes", "ms"
        rows = [
            (
                name,
                *("-" if error is None else f"{error:.2f}" for error in (side.error, side.gradient_error)),
                "-" if side.differing is None else f"{side.differing:,}",
                format_bytes(side.taken_bytes),
                f"{side.time_ms:.1f}",
            )
            for name, side in (("function", self.function), ("other", self.other))
        ]
        title = (
            "errors against float64, in units of the function's own or of a rounding of the largest value, whichever "
            "is more;\nhow many integers and booleans differ from those in float64; bytes and time with backward"
        )
        return f"{title}\n{aligned([header, *rows], left=1)}"


@tells_wrong_arguments
def compare(fn: Callable[..., Any], other: Callable[..., Any], *args: Any) -> Comparison:
    """Compare a function with another one that should equal it, such as `effops.tiled(fn)`.

    Both run on the arguments. Results, and the gradients of arguments and parameters that require them, are compared
    with those of `fn` in float64. Of integers and booleans those that differ are counted: rounding may move an argmin
    among values that are almost equal.

    Args:
        fn: the function, or a module; it runs in float64 too, with floating-point arguments converted
        other: what stands for it
        args: the arguments of both

    Returns:
        `function` and `other`, each with `error`, `gradient_error`, `differing`, `taken_bytes` and `time_ms`. `str()`
        makes a table of them.

    Raises:
        TypeError: what is compared is no function
        ValueError: the results differ in number or shape

    Example:
        >>> line = lambda x, y: (x[:, None] - y).square().sum(-1).exp().sum(1)
        >>> x, y = torch.rand(300, 8, requires_grad=True), torch.rand(200, 8)
        >>> effops.compare(line, effops.tiled(line, budget="1 MiB"), x, y).other.taken_bytes <= 2**20
        True
    """
    for name, one in (("fn", fn), ("other", other)):
        if not callable(one):
            raise TypeError(
                f"compare: `{name}` must be a function or a module; got {type(one).__name__}; give both functions "
                "first, and then their arguments"
            )
    missing = why_not_bound(fn, args, {})
    if missing:
        raise TypeError(f"compare: `fn`: {missing}; give the arguments of both behind them")
    wide = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
    converted: dict[int, Tensor] = {}  # a tensor that is given twice stays one
    doubled = tree_map_only(Tensor, lambda one: converted.setdefault(id(one), in_float64(one)), args)
    expected = _outcome(wide, doubled)
    first, second = _outcome(fn, args), _outcome(other, args)
    shapes, right = _shapes(second), _shapes(first)
    if shapes != right:
        raise ValueError(
            f"compare: `other` must give results and gradients of the shapes that `fn` gives: {right}; got {shapes}; "
            "give functions that are equal"
        )
    if _shapes(expected) != right:
        raise ValueError(
            f"compare: `fn` must give the same shapes in float64: {right}; got {_shapes(expected)}; give a function "
            "whose shapes do not depend on values"
        )
    passes = {name: Pass(_with_backward(one, args), args) for name, one in (("function", fn), ("other", other))}
    timings = times(passes, repeats=REPEATS, budget_s=SECONDS)
    sides = []
    for name, found in (("function", first), ("other", second)):
        errors = [
            [_error(one, right) / _unit(of_fn, right) for one, of_fn, right in zip(*parts) if _has_roundings(right)]
            for parts in zip(found, first, expected)
        ]
        exact = [(one, right) for one, right in zip(found[0], expected[0]) if not _has_roundings(right)]
        differing = sum(int((one != right).sum()) for one, right in exact) if exact else None
        error, gradient_error = (max(one, default=None) for one in errors)
        taken = memory(passes[name]).temporary_bytes
        sides.append(Side(error, gradient_error, differing, taken, timings[name].median_ms))
    return Comparison(*sides)


def _shapes(outcome: Sequence[Sequence[Tensor]]) -> str:
    results, gradients = (", ".join(str(tuple(one.shape)) for one in part) or "none" for part in outcome)
    return f"results {results}; gradients {gradients}"


def _has_roundings(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _leaves(fn: Any, args: Sequence[Any]) -> list[Tensor]:
    modules = [one for one in (fn, getattr(fn, "fn", None), *args) if isinstance(one, nn.Module)]
    given = [*tensors_of(args), *(parameter for module in modules for parameter in module.parameters())]
    return [one for one in dict.fromkeys(given) if one.requires_grad]


def _outcome(fn: Any, args: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The results, and the gradients of their sum."""
    results, gradients = _with_backward(fn, args)(*args)
    found = [one.detach() for one in tensors_of(results)]
    return found, [one for one in gradients if one is not None]


def _with_backward(fn: Any, args: Sequence[Any]) -> Callable[..., Any]:
    leaves = _leaves(fn, args)

    def both(*args: Any) -> Any:
        results = fn(*args)
        outputs = [one for one in tensors_of(results) if one.requires_grad and one.grad_fn is not None]
        if not outputs or not leaves:
            return results, ()
        sums = [one.real.sum() for one in outputs]
        return results, torch.autograd.grad(sums, leaves, allow_unused=True)

    return both


def _error(own: Tensor, right: Tensor) -> float:
    """The largest difference; infinite where one is finite and the other is not."""
    known = right.isfinite()
    if not torch.equal(known, own.isfinite()):
        return float("inf")
    difference = (own.to(right.dtype) - right)[known]
    return difference.abs().amax().item() if difference.numel() else 0.0


def _unit(own: Tensor, right: Tensor) -> float:
    """The function's own error, at least a rounding of the largest value."""
    if not own.numel():
        return 1.0
    known = right.isfinite()
    largest = right[known].abs().amax().item() if known.any() else 0.0
    floor = max(torch.finfo(own.dtype).eps * largest, torch.finfo(own.dtype).tiny)
    own_error = _error(own, right)
    return max(own_error, floor) if own_error < float("inf") else floor
