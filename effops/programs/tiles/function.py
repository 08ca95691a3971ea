"""`tiled`: any function of tensors within a memory budget."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule
from torch.nn import Parameter

from effops.dispatch.requirements import lack_of_compiler
from effops.programs.capture.captured import Captured
from effops.programs.capture.places import raised_at
from effops.programs.capture.uncaptured import why_not_captured
from effops.programs.rules.draws import give_seeds
from effops.programs.tiles.modes import ModesAside, watched
from effops.programs.tiles.plans import first_program, fit_checks, program_of, with_less_again
from effops.programs.tiles.program import Program, taken_bytes
from effops.programs.tiles.refusals import CannotTile
from effops.programs.tiles.report import TilesReport, report_of
from effops.programs.tiles.traced import refuse_what_autograd_would_lose, tracings
from effops.pytorch.calls import (
    FakeTensor,
    _are_functorch_transforms_active,
    _get_dispatch_mode,
    _get_tracing_state,
    _TorchDispatchModeKey,
    dual_level,
)
from effops.pytorch.dynamo import stance
from effops.pytorch.prediction import DynamicOutputShapeException
from effops.pytorch.tiles import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchRuntimeError,
    Unsupported,
    UserError,
    _len_torch_function_stack,
)
from effops.text import check_flags, parse_bytes, tells_wrong_arguments

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
BUDGET = "64 MiB"
RANDOMNESS = "error", "different"
LEAST_WITHOUT_UNIT = 2**10  # no tile is that small: somebody means another unit


class Planned(NamedTuple):
    """How a call runs: its program, or None where it runs as it is; and the graph that was captured, with inputs."""

    program: Program | None
    as_it_is_bytes: int
    graph: GraphModule
    args: Sequence[Any]


class Tiled:
    """A function that runs in tiles where it would not keep its budget as it is."""

    def __init__(self, fn: Callable[..., Any], budget: int, compiles: bool, verify: bool, randomness: str) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.budget, self.compiles, self.verify, self.randomness = fn, budget, compiles, verify, randomness
        self.captured = Captured(fn, self._run)
        self.programs: dict[Any, tuple[Program | None, int] | CannotTile] = {}
        self.lock, self.asked, self.modes = threading.RLock(), _Asked(), ModesAside()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_predicted, has_modes = watched()
        if has_modes:
            with self.modes.set_aside(with_functions=is_predicted):
                return self._called(args, kwargs)
        return self._called(args, kwargs)

    def _called(self, args: Any, kwargs: Any) -> Any:
        reason = _why_not_here()
        if reason:
            raise CannotTile(reason[0], remedy=reason[1])
        try:
            return self.captured(*args, **kwargs)
        except (Unsupported, UserError, TorchRuntimeError, BackendCompilerFailed, FailOnRecompileLimitHit) as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, CannotTile):
                raise inner from None
            raise self._not_captured(error, args, kwargs) from error

    def _not_captured(self, error: Exception, args: Any, kwargs: Any) -> CannotTile:
        """Why Dynamo could not capture a call, with the user's line; or why Inductor could not compile a tile."""
        if self.compiles:
            from effops.pytorch.compiled import InductorError  # takes seconds, unless tiles are compiled

            if isinstance(error, InductorError):
                return _not_compiled(error)
        user, place = re.search(r'File "([^"]*)", line (\d+)', str(error)), raised_at(error)
        line = f"{user[1]}:{user[2]}" if user else str(place or "")
        reason, remedy = why_not_captured(error, self.fn, args, kwargs)
        return CannotTile(reason, line=line, remedy=remedy)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        return Tiled, (self.fn, self.budget, self.compiles, self.verify, self.randomness)

    def explained(self, *args: Any, **kwargs: Any) -> TilesReport | CannotTile:
        """How a call runs, or why it cannot. Nothing is computed."""
        try:
            planned = self.planned(*args, **kwargs)
        except CannotTile as refusal:
            return refusal
        return report_of(planned.program, planned.as_it_is_bytes, self.budget)

    def planned(self, *args: Any, **kwargs: Any) -> Planned:
        """The program of a call, whose tensors may be fake. Nothing is computed; raises `CannotTile`."""
        self.asked.is_set = True
        try:
            self(*args, **kwargs)
        except _Answer as answer:
            return answer.planned
        finally:
            self.asked.is_set = False
        raise AssertionError

    def _run(self, graph: GraphModule, args: Sequence[Any]) -> Sequence[Any]:
        # A graph has its guards: on dtypes, devices, gradients that are required, modes, and the number of threads.
        try:
            key = id(graph), *[_outline(one) if isinstance(one, Tensor) else one for one in args]
        except RuntimeError:  # a nested tensor has no shape
            raise _not_dense(args) from None
        planned = self.programs.get(key)
        if planned is None:
            with self.lock:
                planned = self.programs.get(key) or self._planned_or_refused(graph, args)
                self.programs[key] = planned
        if isinstance(planned, CannotTile):
            raise copy.copy(planned)  # whose traceback holds no tensors
        program, as_it_is_bytes = planned
        if self.asked.is_set:
            raise _Answer(Planned(program, as_it_is_bytes, graph, args))
        with self.modes.again():
            return graph.forward(*args) if program is None else program(*args)  # type: ignore[no-any-return]

    def _planned_or_refused(self, graph: GraphModule, args: Sequence[Any]) -> tuple[Program | None, int] | CannotTile:
        try:
            return self._planned(graph, args)
        except CannotTile as refusal:
            return copy.copy(refusal)

    def _planned(self, graph: GraphModule, args: Sequence[Any]) -> tuple[Program | None, int]:
        """The program for arguments like these, or None if the function keeps the budget as it is, and its bytes so."""
        if any(isinstance(one, Tensor) and not _is_ordinary(one) for one in args):
            raise _not_dense(args)
        backward = torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in args)
        graphs = self._tracings(graph, args)
        found = next(graphs)
        try:
            as_it_is_bytes, is_known = taken_bytes(graph.forward, args, backward=backward), True
        except (
            CannotTile,
            DynamicOutputShapeException,
        ):  # a mask selects: the trace runs, whose shapes are known
            as_it_is_bytes, is_known = taken_bytes(found.forward, args, backward=backward), False
        if is_known and as_it_is_bytes <= self.budget:
            return None, as_it_is_bytes
        refuse_what_autograd_would_lose(graph)
        if as_it_is_bytes <= self.budget:
            whole = Program(found, [])
            whole.taken_bytes = whole.first_call_bytes = as_it_is_bytes
            return whole, as_it_is_bytes
        if self.compiles:
            _refuse_without_compiler(args)
        how = {"backward": backward, "compiles": self.compiles, "verify": self.verify}
        every = itertools.chain([found], graphs)
        program = first_program(every, lambda found: program_of(found, args, self.budget, **how))
        if backward:
            program = with_less_again(program, args, self.budget, as_it_is_bytes)
        fit_checks(program, args, self.budget, backward=backward)
        return program, as_it_is_bytes

    def _tracings(self, graph: GraphModule, args: Sequence[Any]) -> Iterator[GraphModule]:
        for found in tracings(graph, args):
            if self.randomness == "different":
                give_seeds(found.graph)
            yield found


def _refuse_without_compiler(args: Sequence[Any]) -> None:
    lack = lack_of_compiler()
    if lack and any(isinstance(one, Tensor) and one.device.type == "cpu" for one in args):
        raise CannotTile(f"compile=True needs {lack.what}", remedy=f"{lack.remedy}, or leave out compile=True")


def _is_ordinary(tensor: Tensor) -> bool:
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return type(tensor) in (Tensor, Parameter, FakeTensor) and tensor.layout == torch.strided and not is_lazy


def _not_dense(args: Sequence[Any]) -> CannotTile:
    kinds = {f"{type(one).__name__} of layout {one.layout}" for one in args if isinstance(one, Tensor)}
    return CannotTile(
        f"tensors must be dense, of no subclass, and hold their own values; got {', '.join(sorted(kinds))}",
        remedy="give `.to_dense()`, the local part of a DTensor, or `.resolve_conj().resolve_neg()`",
    )


def _outline(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.is_conj() or tensor.is_neg()


class _Asked(threading.local):
    """Whether a call of this thread only asks how it would run."""

    is_set = False


class _Answer(Exception):  # noqa: N818
    """Ends a call that only asks how it would run."""

    def __init__(self, planned: Planned) -> None:
        super().__init__()
        self.planned = planned


def _why_not_here() -> tuple[str, str] | None:
    """Why a call cannot be cut where it is made, and what to do."""
    if is_dynamo_compiling():
        return "a call inside torch.compile is not cut", "call tiled outside, or leave it out"
    if _are_functorch_transforms_active():
        return "a call inside a transform of torch.func is not cut", "apply the transform inside of the function"
    if dual_level() >= 0:
        return (
            "a call under forward-mode differentiation is not cut",
            "call the function without tiled, or use backward",
        )
    if _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None or _get_tracing_state() is not None:
        return "a call that is traced is not cut", "trace the function without tiled"
    if stance().stance != "default":
        return (
            f"torch.compiler's stance {stance().stance!r} would run all of it at once",
            "set the default one",
        )
    if _len_torch_function_stack():
        return "a call under a TorchFunctionMode is not cut", "enter the mode inside of the function"
    return None


def _not_compiled(error: Exception) -> CannotTile:
    """Why Inductor could not compile a tile: the first line with an error, which a C++ compiler may have written."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "error: " in line), lines[0] if lines else type(error).__name__)
    return CannotTile(
        f"Inductor cannot compile a tile: {textwrap.shorten(told, 200)}",
        remedy="mend that, or leave out compile=True",
    )


@overload
def tiled(
    fn: FunctionT, *, budget: str | float = ..., compile: bool = ..., verify: bool = ..., randomness: str = ...
) -> FunctionT: ...
@overload
def tiled(
    fn: None = None, *, budget: str | float = ..., compile: bool = ..., verify: bool = ..., randomness: str = ...
) -> Callable[[FunctionT], FunctionT]: ...
@functools.partial(tells_wrong_arguments, remedy="; what it returns is called, as effops.tiled(fn)(*args)")
def tiled(
    fn: Any = None,
    *,
    budget: str | float = BUDGET,
    compile: bool = False,
    verify: bool = True,
    randomness: str = "error",
) -> Any:
    """The same function within a memory budget: where it would take more, it runs tile by tile.

    Its operators run on a part of the axes that none of them mixes, or whose reductions can be combined. Backward
    computes again those tiles for which the budget has no room: of them arguments and totals alone are kept. A cut that
    ends in one number, as a loss does, has its gradients computed forward.

    Args:
        fn: a function of tensors, or a module, whose parameters count as arguments. Arguments and results may be
            nested in lists, dictionaries and the like. It is captured at its first call. Numbers among the arguments
            are constants: each value is captured anew. Sizes are not
        budget: the highest sum, at any moment, of live storages that a call and its backward pass allocate and do not
            return, as "64 MiB" or in bytes. A function that keeps it as it is runs as it is
        compile: whether Inductor compiles the tiles, which takes seconds at the first call
        verify: whether the first call compares the tiles of a few indices with the whole, in float64 too
        randomness: "error" refuses to cut what draws random numbers; with "different" each tile draws its own, backward
            those of forward, and `torch.manual_seed` repeats a call. They are not those that `fn` draws

    Returns:
        The function: the same results, in the same dtypes and strides, and gradients in the order of summation of the
        tiles. `effops.explain` tells the tiles of a call.

    Raises:
        CannotTile: an operator needs what would be cut, or the function cannot be captured; it names the line. Or
            Inductor is to compile, and has no compiler
        TilesDiffer: the tiles give other values: a defect of effops

    Example:
        >>> line = lambda x, y: (x[:, None] - y).square().sum(-1).exp().sum(1)
        >>> x, y = torch.rand(3000, 8), torch.rand(2000, 8)
        >>> in_tiles = effops.tiled(line, budget="1 MiB")
        >>> torch.allclose(in_tiles(x, y), line(x, y))
        True
    """
    if randomness not in RANDOMNESS:
        raise ValueError(f"tiled: `randomness`: expected one of {', '.join(RANDOMNESS)}; got {randomness!r}")
    check_flags("tiled", compile=compile, verify=verify)
    if fn is not None and not callable(fn):
        size = fn if isinstance(fn, (str, int, float)) else BUDGET
        raise TypeError(
            f"tiled: `fn` must be a function or a module; got {type(fn).__name__}; give the function without calling "
            f"it, or write @effops.tiled(budget={size!r})"
        )
    if fn is None:
        return functools.partial(tiled, budget=budget, compile=compile, verify=verify, randomness=randomness)
    budget_bytes = parse_bytes(budget, "tiled: `budget`")
    if isinstance(budget, (int, float)) and budget_bytes < LEAST_WITHOUT_UNIT:
        raise ValueError(
            f"tiled: `budget`: expected a unit behind so small a number; got {budget!r}, which is {budget_bytes} "
            f'bytes; write "{budget!r} MiB"'
        )
    return Tiled(fn, budget_bytes, compile, verify, randomness)
