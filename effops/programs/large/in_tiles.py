"""`effops.tiled` around the function of a finding, as a fix: the smallest function of the user that can be cut.

The function is run on small tensors, whole and in tiles that are forced, and planned at the program's own sizes.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from effops.prediction.allocations import fake_mode
from effops.programs.capture.captured import Captured
from effops.programs.capture.scopes import Described, Fields, Scope
from effops.programs.large.held import bytes_after
from effops.programs.large.humps import CONSTANTS, Found
from effops.programs.large.source.slices import Slice, function_of, is_plain, is_top_level
from effops.programs.large.source.trials import (
    FullSize,
    Function,
    Made,
    Trial,
    at_full_size,
    attempt,
    compiled,
    fake,
    observed_on_fakes,
    operand_bytes,
)
from effops.programs.rules.binding import nbytes_of
from effops.programs.tiles.function import Planned, Tiled
from effops.programs.tiles.plans import DEEPEST, first_program, program_of
from effops.programs.tiles.program import Program
from effops.programs.tiles.refusals import CannotTile
from effops.programs.tiles.traced import refuse_what_autograd_would_lose, tracings
from effops.pytorch.missing import IN_TILES, obstacle

MOST_BUDGET, LEAST_BUDGET = 2**26, 2**16  # of a fix
LESS = 8  # times less than now is a budget at first
TRIED = 2  # functions at most, from the innermost outwards
TILES = 4  # at least, of the largest tensor of a trial


@dataclass(frozen=True, eq=False)
class Whole:
    """What is put into tiles, as statements that end with a return, and the source of its call in tiles.

    Attributes:
        body: the statements
        code: the lines to write, for a budget
        lines: the numbers of those that they replace
        run: the statements in tiles, for a budget
        name: of the function
    """

    body: Slice
    code: Callable[[int], str]
    lines: tuple[int, ...]
    run: Callable[[int], str]
    name: str

    @property
    def imports(self) -> tuple[str, ...]:
        """Those that the file lacks."""
        return () if "effops" in self.body.scope.surroundings else ("import effops",)

    @property
    def source(self) -> str:
        """The statements as a function of the names that they read."""
        return self.body.definition(self.body.statements, free=self.body.free)

    def tiled_source(self, budget: int) -> str:
        """The same in tiles."""
        imported = f"import effops\n{self.run(budget)}"
        return f"def part_of({', '.join(self.body.free)}):\n{textwrap.indent(imported, '    ')}"


def of_function(definition: ast.FunctionDef, scope: Scope) -> Whole:
    """A user's function, with a decorator above its `def`."""
    statements = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    body = Slice(statements, scope, ())
    first, last = definition.lineno, max(definition.lineno, definition.body[0].lineno - 1)
    header = "".join(linecache.getline(scope.code.co_filename, number) for number in range(first, last + 1))

    def code(budget: int) -> str:
        return f"@effops.tiled({_told(budget)})\n{textwrap.dedent(header).rstrip()}"

    def run(budget: int) -> str:
        inner = body.definition(statements, definition.name, body.free)  # it may call itself
        return f"@effops.tiled({_told(budget)})\n{inner}\nreturn {definition.name}({', '.join(body.free)})"

    return Whole(body, code, tuple(range(first, last + 1)), run, definition.name)


def of_call(call: ast.Call, scope: Scope) -> Whole:
    """A function of a library or a lambda, in tiles where it is called."""
    function, arguments = ast.unparse(call.func), ", ".join(map(ast.unparse, (*call.args, *call.keywords)))
    name = f"{function.replace('.', '_')}_in_tiles"

    def made(budget: int) -> str:
        return f"{name} = effops.tiled({function}, {_told(budget)})  # once, above all loops"

    def code(budget: int) -> str:
        return f"{made(budget)}\n{name}({arguments})  # in place of {function}({arguments})"

    return Whole(
        Slice([ast.Return(call)], scope, ()),
        code,
        (),
        lambda budget: f"{made(budget)}\nreturn {name}({arguments})",
        function,
    )


class InTiles(NamedTuple):
    """What runs in tiles, what it takes, and rough times: as it is, and how much more in tiles."""

    whole: Whole
    budget: int
    bytes_after: int
    seconds: float
    more_seconds: float


def _told(budget: int) -> str:
    return f'budget="{budget >> 20} MiB"' if budget >= 2**20 else f'budget="{budget >> 10} KiB"'


def in_tiles(found: Found) -> InTiles | None:
    """The function of a finding in tiles that take half the bytes at most; None where that is not certain."""
    if obstacle(IN_TILES):  # which `hint` tells
        return None
    for whole in itertools.islice(_wholes(found), TRIED):
        if _agrees(found, whole):
            made = _planned(found, whole)
            if made is not None:
                return made
    return None


def accepted_by_tiled(found: Found) -> str | None:
    """The name of a function that `tiled` accepts at the program's own sizes, where no trial could be run of it."""
    if obstacle(IN_TILES):
        return None
    for whole in itertools.islice(_wholes(found), TRIED):
        if _trial(found, whole) is None and _planned(found, whole) is not None:
            return whole.name
    return None


def _trial(found: Found, whole: Whole) -> Trial | None:
    """A run of a function on small tensors; at its own sizes only where all that it makes is small."""
    with attempt():  # whatever stands in the function
        return Trial.of(whole.body, operand_bytes(whole.body) + found.largest_bytes)
    return None


def _wholes(found: Found) -> Iterator[Whole]:
    """The user's functions that make what is large, and reduce it, of tensors that they are given; innermost first.

    None where a loop of the user's reads it part by part, since tiles of all turns take long to plan.
    Where the user's code is no such function, but calls one of a library, that is taken.
    """
    if found.top.in_parts:
        return
    members = sorted(found.top.members, key=lambda one: one.allocation.born)
    makers = [one.maker.scopes for one in members if one.maker is not None]
    for last in found.top.reducer.scopes:
        alike = [[scope for scope in outer if scope.code is last.code] for outer in makers]
        if last.is_library or not alike or not all(alike):
            continue
        first = alike[0][0]  # names may be assigned again later
        definition = function_of(last.code)
        if isinstance(definition, ast.FunctionDef) and is_top_level(last.code):
            if any("tiled" in ast.unparse(one) for one in definition.decorator_list):
                return
            whole = of_function(definition, first)
            is_plain_function = all(map(is_plain, whole.body.statements))
            if is_plain_function and _is_given_tensors(whole, definition.args) and not _draws(found, last):
                yield whole
                continue
        call = _call_of_a_function(last)
        if call is not None and {scope.instruction for own in alike for scope in own} == {last.instruction}:
            whole = of_call(call, first)
            if any(_has_tensors(whole.body.value(name)) for name in whole.body.free):  # no `main()`
                yield whole


def _is_given_tensors(whole: Whole, arguments: ast.arguments) -> bool:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    names = {one.arg for one in named if one is not None}
    return any(_has_tensors(whole.body.value(name)) for name in whole.body.free if name in names)


def _call_of_a_function(scope: Scope) -> ast.Call | None:
    """The call that a frame is in, if it is one of a function written in Python."""
    try:
        call = ast.parse(scope.place.source, mode="eval").body
    except SyntaxError:  # a part of a line, where Python knows no columns
        return None
    if not isinstance(call, ast.Call) or not is_plain(ast.Return(call)):
        return None
    first, *fields = ast.unparse(call.func).split(".")
    value = scope.surroundings.get(first)
    for name in fields:
        value = getattr(value, name, None) if isinstance(value, ModuleType) else None
    return call if isinstance(value, FunctionType) and not str(value.__module__).startswith("torch.") else None


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Fields):
        return any(map(_has_tensors, value.values.values()))
    return isinstance(value, Described) or (isinstance(value, (list, tuple)) and any(map(_has_tensors, value)))


def _draws(found: Found, scope: Scope) -> bool:
    """Whether a function makes what is large of numbers that it makes itself, as random ones: a trial would, too."""
    seen, waiting = set(), [*found.top.members, *found.top.roots]
    while waiting:
        storage = waiting.pop()
        if id(storage) in seen or storage.maker is None or storage.is_parameter:
            continue
        seen.add(id(storage))
        call = storage.maker
        if any(one.code is scope.code for one in call.scopes):
            if not call.reads and call.name not in CONSTANTS:
                return True
            waiting += [read.storage for read in call.reads]
    return False


def _agrees(found: Found, whole: Whole) -> bool:
    """Whether a function that is forced into tiles gives its results and gradients on small tensors."""
    with attempt():  # whatever stands in the function
        trial = _trial(found, whole)
        tiles = forced(compiled(whole.source, whole.body.scope.surroundings))
        return trial is not None and trial.agrees_in(lambda **given: tiles(*(given[name] for name in whole.body.free)))
    return False


def forced(function: Function) -> Function:
    """A function in tiles, whatever it takes; raises `CannotTile`."""

    def run(graph: GraphModule, args: Sequence[Any]) -> Sequence[Any]:
        refuse_what_autograd_would_lose(graph)

        def plan(found: GraphModule) -> Program:
            most = max((nbytes_of(node) for node in found.graph.nodes if node.op == "call_function"), default=0)
            return program_of(found, args, most // TILES, backward=True, verify=False, depth=DEEPEST)

        program = first_program(tracings(graph, args), plan)
        if not program.loops:
            raise CannotTile("nothing is large enough for a cut")
        return program(*args)  # type: ignore[no-any-return]

    return Captured(function, run)


def _planned(found: Found, whole: Whole) -> InTiles | None:
    """The function with the first budget that it keeps, at the program's own sizes."""
    function = compiled(whole.source, whole.body.scope.surroundings)
    budget = MOST_BUDGET
    while budget > max(found.largest_bytes // LESS, LEAST_BUDGET):
        budget //= 2
    tiled = Tiled(function, budget, compiles=False, verify=False, randomness="error")
    with attempt():  # code that does not run on fake tensors is not proposed
        as_it_is = at_full_size(function, whole.body)
        if as_it_is.largest_bytes < found.largest_bytes:  # it was not given what its arguments stand for now
            return None
        with fake_mode():
            given = fake(whole.body).arguments
        while 2 * tiled.budget <= found.now_bytes:
            try:
                planned = tiled.planned(*(given[name] for name in whole.body.free))
            except CannotTile:
                tiled.budget *= 2
                tiled.programs.clear()
                continue
            taken = _taken(planned)
            after = 0 if taken is None else bytes_after(found, whole.body, taken)
            if taken is None or 2 * after > found.now_bytes:
                return None
            return InTiles(whole, tiled.budget, after, as_it_is.seconds, taken.seconds - as_it_is.seconds)
    return None


def _taken(planned: Planned) -> FullSize | None:
    """What a program takes: the largest tensor in tiles, and the time of all of them."""
    program = planned.program
    if program is None:
        return None
    largest = observed_on_fakes(lambda: _graph_inputs(planned.args), lambda made: program(*made.arguments["args"]))
    seconds = observed_on_fakes(
        lambda: _graph_inputs(planned.args), lambda made: _as_one_tile(program)(*made.arguments["args"])
    )
    return largest._replace(seconds=seconds.seconds)


def _as_one_tile(program: Program) -> Program:
    """The program with tiles as long as their axes, which reads and computes as much: of fake tensors few tiles run."""
    for loop in program.loops:
        loop.length = loop.backward_length = loop.whole
        loop.nested = None
        loop.bodies.clear()
    return program


def _graph_inputs(args: Sequence[Any]) -> Made:
    made = Made({})

    def like(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        fresh = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
        made.tensors.append(fresh.requires_grad_(one.requires_grad))
        return fresh

    made.arguments = {"args": [like(one) for one in args]}
    return made
