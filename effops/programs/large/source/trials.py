"""Runs code with what its names stood for: on small real tensors for the results, on fake ones for the bytes."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from effops.measure import tensors_of
from effops.prediction.timeline import Allocation, highest
from effops.programs.capture.faked import faked
from effops.programs.capture.observed import TURNS, Call, Observed
from effops.programs.capture.places import CODE_OF_FIX, innermost
from effops.programs.capture.scopes import Described, Fields
from effops.programs.large.source.slices import Slice, copied
from effops.pytorch.calls import FakeTensor, tree_leaves, tree_map_only
from effops.pytorch.capture import version_of
from effops.pytorch.missing import MissingInterfaceError

REAL_BYTES = 2**25  # of a trial
SMALL = 8  # sizes up to it are kept: coordinates, heads
NORMAL, POSITIVE, ASCENDING = KINDS = "normal", "positive", "ascending"  # along the last axis, as corners of boxes
WITH_ZEROS = "with zeros"  # every other number of a tensor that needs no gradient, as in a mask
FIRST_COLUMNS = (False, False, True, True), (False, True, False, True)  # of one mask, of another
CHOICES = {"masked_fill", "masked_fill_", "where"}
DROPOUTS = {nn.functional.dropout, torch.dropout}
ROUNDING = 1e-13  # of float64, with room for sums
BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 1e10, 1e11  # of a core or two; only ratios matter
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # nothing is written yet
OTHER_SEEDS = 1, 2, 3
STAND_INS = 5, 6, 7, 9, 10, 11, 13, 14, 15
# Modules that are called by themselves in a trial: they hold tensors and numbers alone.
LAYERS = {
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Dropout,
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softmax,
    nn.LogSoftmax,
    nn.CrossEntropyLoss,
    nn.NLLLoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.CosineSimilarity,
    nn.PairwiseDistance,
}
Function = Callable[..., Any]
Redrawn = Callable[[int], Iterator[tuple["Made", "Outcome"]]]  # a run with numbers of another seed, if it takes them


@dataclass
class Made:
    """Arguments for a slice, and the tensors in them."""

    arguments: dict[str, Any]
    tensors: list[Tensor] = field(default_factory=list)

    def copies(self) -> dict[str, Any]:
        """The arguments, with copies of the tensors, so that code may change them."""
        return tree_map_only(Tensor, torch.clone, self.arguments)  # type: ignore[no-any-return]


@contextmanager
def attempt() -> Iterator[None]:
    """Run code that may fail, and leave the block if it does. A function that reads arguments ends the program."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, MissingInterfaceError):  # of effops, which would find no fix for that alone
            raise


def compiled(source: str, surroundings: Mapping[str, Any], name: str = "part_of") -> Function:
    """The function that a source defines. It sees the names of a module."""
    namespace = dict(surroundings)
    exec(compile(source, CODE_OF_FIX, "exec"), namespace)
    return namespace[name]  # type: ignore[no-any-return]


def sizes_of(values: Any) -> Iterator[int]:
    """All sizes of tensors among values."""
    if isinstance(values, Described):
        yield from values.shape
    elif isinstance(values, Fields):
        yield from sizes_of(list(values.values.values()))
    elif isinstance(values, (list, tuple)):
        for one in values:
            yield from sizes_of(one)


def shrunk(values: Mapping[str, Any], operand_bytes: int) -> Iterator[dict[int, int]]:
    """Smaller sizes in place of those of tensors, each size by one other; all as they are where they fit."""
    sizes = sorted({size for size in sizes_of(list(values.values())) if size > SMALL})
    if 0 < len(sizes) <= len(STAND_INS):  # without any, the statements make what is large of numbers alone
        yield dict(zip(sizes, STAND_INS))
    for factor in (64, 16, 4):  # ratios are kept
        smaller = {size: max(size // factor, 2) for size in sizes}
        if sizes and all(size % factor == 0 for size in sizes) and len(set(smaller.values())) == len(sizes):
            yield smaller
    common = math.gcd(*sizes) if sizes else 1
    if common > 1 and max(sizes, default=0) // common <= max(STAND_INS):
        yield {size: 2 * size // common for size in sizes}
    if operand_bytes <= REAL_BYTES:
        yield {}


def operand_bytes(found: Slice) -> int:
    """What the tensors of a slice take as they are, in float64."""
    return 8 * sum(_elements(found.value(name)) for name in found.free)


def _elements(value: Any) -> int:
    if isinstance(value, Described):
        return math.prod(size for size, stride in zip(value.shape, value.stride) if stride)
    return sum(map(_elements, value.values.values())) if isinstance(value, Fields) else 0


def real(found: Slice, sizes: Mapping[int, int], kind: str, seed: int = 0) -> Made:
    """Random arguments of a slice, of one of the `KINDS`, or `WITH_ZEROS`."""
    generator = torch.Generator().manual_seed(seed)
    made = Made({})
    masks = itertools.count()

    def tensor(one: Described) -> Tensor:
        shape = [sizes.get(size, size) if size > SMALL else size for size in one.shape]
        # a repeated axis stays one row
        held = [1 if stride == 0 else size for size, stride in zip(shape, one.stride)]
        if one.dtype.is_floating_point or one.dtype.is_complex:
            dtype = torch.complex128 if one.dtype.is_complex else torch.float64
            value = torch.rand(held, generator=generator, dtype=dtype) + 0.5
            if kind == NORMAL:
                value = torch.randn(held, generator=generator, dtype=dtype)
            elif kind == ASCENDING and held:
                value = value.cumsum(-1)
            elif kind == WITH_ZEROS and not one.requires_grad:
                value = value * _mixed(torch.rand(held, generator=generator) > 0.5, next(masks))
            value.requires_grad_(one.requires_grad)
            made.tensors.append(value)
        elif one.dtype is torch.bool:
            value = _mixed(torch.rand(held, generator=generator) > 0.5, next(masks))
        else:
            value = _mixed(torch.randint(0, 2, held, generator=generator) > 0, next(masks)).to(one.dtype)
        return value.expand(shape)

    values = {name: found.value(name) for name in found.free}
    numbers = with_products(sizes, set(sizes_of(list(values.values()))))
    made.arguments = {name: _instance(value, tensor, numbers) for name, value in values.items()}
    return made


def _mixed(value: Tensor, number: int) -> Tensor:
    """Random booleans of which no row is all the same, and no row of two together: masks may not leave out all of it.

    The first columns see to that. They are not as often true in each two of them, as they would be in turns.
    """
    columns = value.shape[-1] if value.ndim else 0
    if columns > 1:
        first = torch.tensor(FIRST_COLUMNS[1 if columns < len(FIRST_COLUMNS[0]) else number % 2][:columns])
        value[..., : len(first)] = first ^ value[..., :1]
    return value


def with_products(sizes: Mapping[int, int], known: set[int]) -> dict[int, int]:
    """Smaller sizes, also of the products of two sizes, as of all heads together."""
    products: dict[int, set[int]] = defaultdict(set)
    for one, other in itertools.combinations_with_replacement(sorted(known - {0, 1}), 2):
        products[one * other].add(sizes.get(one, one) * sizes.get(other, other))
    return {**{one: smaller.pop() for one, smaller in products.items() if len(smaller) == 1}, **sizes}


def fake(found: Slice) -> Made:
    """Arguments of a slice as the program had them, inside of a fake mode."""
    made = Made({})

    def tensor(one: Described) -> Tensor:
        value = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=one.device)
        if one.requires_grad:
            value.requires_grad_()
        made.tensors.append(value)
        return value if 0 in one.stride else value.clone()  # code may change it

    made.arguments = {name: _instance(found.value(name), tensor, {}) for name in found.free}
    return made


def _instance(value: Any, tensor: Callable[[Described], Tensor], sizes: Mapping[int, int]) -> Any:
    if isinstance(value, Described):
        return tensor(value)
    if isinstance(value, Fields):
        values = {name: _instance(one, tensor, sizes) for name, one in value.values.items()}
        return _object(value.kind, values)
    if isinstance(value, (list, tuple)):
        return type(value)([_instance(one, tensor, sizes) for one in value])
    if isinstance(value, weakref.ref):
        return value()
    if type(value) is int and value > SMALL:
        return sizes.get(value, value)
    return value


def _object(kind: type, values: Mapping[str, Any]) -> Any:
    """An object with these fields. Distributions and layers have their methods; of others code reads fields alone."""
    if not issubclass(kind, Distribution) and kind not in LAYERS:
        return types.SimpleNamespace(**values)
    made: Any = object.__new__(kind)
    if isinstance(made, nn.Module):
        nn.Module.__init__(made)
    made.__dict__.update(values)  # tensors in the places of parameters too
    return made


@dataclass
class Outcome:
    """What a function gave: its tensors and numbers, and the gradients of their weighted sum."""

    results: list[Any]
    gradients: list[Tensor | None]


def outcome(function: Function, made: Made) -> Outcome:
    """Run a function, and backward. What it changes of its arguments counts as a result."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        copies = made.copies()
        versions = [version_of(one) for one in tensors_of(copies)]
        given = function(**copies)
        leaves = tensors_of(given)
        leaves += [torch.tensor(one, dtype=torch.float64) for one in tree_leaves(given) if type(one) is float]
        leaves += [one for one, version in zip(tensors_of(copies), versions) if version_of(one) != version]
        wanted = [one for one in made.tensors if one.requires_grad]
        differentiable = [one for one in leaves if one.requires_grad]
        gradients: Sequence[Tensor | None] = []
        if wanted and differentiable:
            weights = [torch.linspace(0.5, 1.5, one.numel(), dtype=torch.float64) for one in differentiable]
            weighted = [w.view(one.shape).to(one.dtype) for w, one in zip(weights, differentiable)]
            gradients = torch.autograd.grad(differentiable, wanted, weighted, allow_unused=True)
    return Outcome([one.detach() for one in leaves], list(gradients))


def agree(one: Outcome, other: Outcome) -> bool:
    if len(one.results) != len(other.results) or len(one.gradients) != len(other.gradients):
        return False
    noise = ROUNDING * max(map(_scale, (*one.results, *one.gradients)), default=0.0)  # a gradient can be that alone
    results = all(map(_close, one.results, other.results))
    return results and all(_close(*both, noise) for both in zip(one.gradients, other.gradients))


def _scale(value: Tensor | None) -> float:
    return float(value.abs().amax()) if value is not None and value.numel() else 0.0


def _close(one: Tensor | None, other: Tensor | None, noise: float = 0.0) -> bool:
    if one is None or other is None:
        present = one if other is None else other
        return present is None or not present.any()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.dtype.is_floating_point and not one.dtype.is_complex:
        return bool(torch.equal(one, other))
    return bool(torch.allclose(one, other, rtol=1e-6, atol=max(1e-7 * _scale(one), noise, 1e-37)))


def is_finite(one: Outcome) -> bool:
    found = [*one.results, *(gradient for gradient in one.gradients if gradient is not None)]
    return bool(one.results) and all(bool(value.isfinite().all()) for value in found)


class FullSize(NamedTuple):
    """What code takes at the program's own sizes, with backward, and a rough time.

    `largest_bytes` are those of the largest tensor that it makes, or of as many as an expression in a loop holds at
    once. It saves `saved_bytes` of what it makes for backward; `left_bytes` are those and the ones of its results.
    """

    largest_bytes: int
    seconds: float
    saved_bytes: int
    left_bytes: int


def at_full_size(function: Function, found: Slice) -> FullSize:
    """What a function in the place of a slice takes."""
    return observed_on_fakes(lambda: fake(found), lambda made: function(**made.arguments))


def observed_on_fakes(make: Callable[[], Made], call: Callable[[Made], Any]) -> FullSize:
    """What a call takes, and its backward pass, on fake arguments that are made in a fake mode. Its results count."""
    observed = Observed(scope_bytes=math.inf)
    with faked("lint", observed, probe=False, escapes=False):
        made = make()
        begin = len(observed.calls)
        results = tensors_of(call(made))
        end, left = len(observed.calls), _bytes_made_before(observed, begin)
        differentiable = [one for one in results if one.requires_grad and isinstance(one, FakeTensor)]
        sums = [one.sum() if not one.is_complex() else one.abs().sum() for one in differentiable]
        del results, differentiable  # so that only what backward needs is there
        saved = _bytes_made_before(observed, begin, end)
        wanted = [one for one in made.tensors if one.requires_grad]
        if sums and wanted:
            torch.autograd.grad(sums, wanted, allow_unused=True)
    inputs = max((one.untyped_storage().nbytes() for one in made.tensors), default=0)
    forward = max((_bytes(call) for call in observed.calls[begin:end]), default=0)
    backward = max((_bytes(call) for call in observed.calls[end:]), default=0)
    largest = max(forward, backward if backward > inputs else 0, _bytes_of_turns(observed.calls[begin:]))
    return FullSize(largest, seconds_of(observed.calls[begin:]), saved, left)


def _bytes_made_before(observed: Observed, begin: int, end: int | None = None) -> int:
    """The bytes that some operators have made, and that are there now."""
    made = {id(one): one for call in observed.calls[begin:end] for one in call.makes}
    return sum(one.nbytes for one in made.values() if one.allocation.died is None)


def _bytes_of_turns(calls: Iterable[Call]) -> int:
    """The most bytes of tensors that one expression makes and that are there at once, as in the turns of a loop."""
    outside = innermost(sys._getframe(1))  # whoever asked: its line is no loop
    made: dict[Any, list[Allocation]] = defaultdict(list)
    for call in calls:
        if call.site != outside:
            made[call.site, call.name, tuple(call.shapes)] += [one.allocation for one in call.makes]
    most = 0
    for turns in made.values():
        nbytes, tick = highest(turns)
        if sum(one.is_there(tick) for one in turns) >= TURNS:
            most = max(most, nbytes)
    return most


def seconds_of(calls: Iterable[Call]) -> float:
    """A rough time of operators: the longer of moving their bytes and making their operations."""
    return sum(
        max(_moved_bytes(call) / BYTES_PER_SECOND, call.operations / OPERATIONS_PER_SECOND)
        for call in calls
        if call.name not in EMPTY
    )


def _moved_bytes(call: Call) -> int:
    reads = call.reads[1:] if call.name == "copy_" else call.reads  # it does not read what it writes over
    return sum(read.nbytes for read in reads) + call.result_bytes


def _bytes(call: Call) -> int:
    return max([call.temporary_bytes, *(storage.nbytes for storage in call.makes)])


class Trial:
    """A slice that was run on small tensors. Other statements are compared with it."""

    def __init__(
        self, found: Slice, runs: Sequence[tuple[Made, Outcome]], sizes: Mapping[int, int], redrawn: Redrawn
    ) -> None:
        self.found, self.runs, self.redrawn = found, runs, redrawn
        self.made, self.expected = runs[0]
        self._full = {small: size for size, small in sizes.items()}

    def full(self, size: int) -> int:
        """The size in the program that a size in the trial stands for."""
        return self._full.get(size, size)

    @classmethod
    def of(cls, found: Slice, operand_bytes: int) -> Trial | None:
        """At the first sizes and numbers that the slice takes; None if it takes none.

        Where values choose, as by a mask, it runs with zeros among the numbers too: no random number is 0.
        """
        function = compiled(found.definition(found.statements), found.scope.surroundings)

        def run(sizes: Mapping[int, int], kind: str, seed: int = 0) -> Iterator[tuple[Made, Outcome]]:
            with attempt():  # whatever the user's code raises at other sizes
                made = real(found, sizes, kind, seed)
                expected = outcome(function, made)
                if is_finite(expected):
                    yield made, expected

        for sizes in shrunk({name: found.value(name) for name in found.free}, operand_bytes):
            for kind in KINDS:
                if runs := list(run(sizes, kind)):
                    more = run(sizes, WITH_ZEROS) if _chooses(found) else ()
                    return cls(found, [*runs, *more], sizes, functools.partial(run, sizes, kind))
        return None

    def agrees(self, statements: Sequence[ast.stmt]) -> bool:
        """Whether statements give the same results and gradients."""
        return self._agree(statements, self.runs)

    def agrees_in_other_draws(self, statements: Sequence[ast.stmt]) -> bool:
        """Whether statements give the same for other numbers, and whether each result depends on the numbers.

        A threshold may make a result the same for all numbers that are drawn: then a wrong computation may give it too.
        """
        return self._results_depend and self._agree(statements, self._other_runs)

    @functools.cached_property
    def _other_runs(self) -> Sequence[tuple[Made, Outcome]]:
        return [run for seed in OTHER_SEEDS for run in self.redrawn(seed)]

    @functools.cached_property
    def _results_depend(self) -> bool:
        """Whether each result is another one for other numbers."""
        of_runs = zip(*(found.results for _, found in self._other_runs))
        others = zip(self.expected.results, of_runs)
        return bool(self._other_runs) and all(any(not _close(first, one) for one in more) for first, more in others)

    def agrees_without_dropout(self, statements: Sequence[ast.stmt]) -> bool:
        """Whether statements do where neither they nor the slice drop anything: other numbers are drawn for them."""
        function = compiled(self.found.definition(self.found.statements), self.found.scope.surroundings)
        with attempt(), _KeepsAll():
            runs = [(made, outcome(function, made)) for made, _ in self.runs]
            return self._agree([_WithoutDropout().visit(copied(one)) for one in statements], runs)
        return False

    def agrees_in(self, function: Function) -> bool:
        """Whether a function of the same names gives the same results and gradients."""
        return all(agree(expected, outcome(function, made)) for made, expected in self.runs)

    def _agree(self, statements: Sequence[ast.stmt], runs: Sequence[tuple[Made, Outcome]]) -> bool:
        with attempt():  # a proposal that fails is none
            function = compiled(self.found.definition(statements, free=self.found.free), self.found.scope.surroundings)
            return all(agree(expected, outcome(function, made)) for made, expected in runs)
        return False

    def values(self, nodes: Sequence[ast.expr]) -> Sequence[Any] | None:
        """What expressions of the slice are, where they stand; None if one is not reached."""
        seen: dict[int, Any] = {}
        statements = list(self.found.statements)
        for place, node in enumerate(nodes):
            statements = [_Noted(node, place).visit(copied(one)) for one in statements]

        def noted(place: int, value: Any) -> Any:
            seen.setdefault(place, value)
            return value

        with attempt():  # an expression that is not evaluated by itself
            source = self.found.definition(statements, free=self.found.free)
            function = compiled(source, {**self.found.scope.surroundings, "__noted__": noted})
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                function(**self.made.arguments)
            return [seen[place] for place in range(len(nodes))] if len(seen) == len(nodes) else None
        return None


def _chooses(found: Slice) -> bool:
    """Whether statements compare numbers, or mask by them."""
    nodes = [node for one in found.statements for node in ast.walk(one)]
    calls = {getattr(node.func, "attr", getattr(node.func, "id", "")) for node in nodes if isinstance(node, ast.Call)}
    return bool(calls & CHOICES) or any(isinstance(node, ast.Compare) for node in nodes)


class _KeepsAll(TorchFunctionMode):
    """Lets dropout drop nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))


class _WithoutDropout(ast.NodeTransformer):
    """Leaves out what `effops.attention` would drop."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        node.keywords = [one for one in node.keywords if one.arg != "dropout_p"]
        return self.generic_visit(node)  # type: ignore[return-value]


class _Noted(ast.NodeTransformer):
    def __init__(self, node: ast.expr, place: int) -> None:
        self.node, self.place = node, place

    def visit(self, node: ast.AST) -> Any:
        if getattr(node, "copy_of", node) is self.node:
            call = ast.parse(f"__noted__({self.place}, 0)", mode="eval").body
            assert isinstance(call, ast.Call)
            inner: Any = self.generic_visit(node)
            call.args[1] = inner
            return call
        return self.generic_visit(node)
