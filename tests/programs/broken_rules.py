"""Break the rules of operators, one at a time, and see whether the check of the first call catches it.

    python -m tests.programs.broken_rules                  # all, with a line for each row of the table of rules
    python -m tests.programs.broken_rules cumsum gather    # those of some operators
    python -m tests.programs.broken_rules --write          # and write broken_rules.txt, which lists what is not caught

A broken rule tells one wrong thing of the node of a program in `rule_programs.py`: the program then can be cut along
nothing else. Texts of loops and combiners are broken too. A break counts if results or gradients are wrong, or if it
raises. One that changes nothing does not.
"""

import argparse
import collections
import contextlib
import inspect
import logging
import sys
import textwrap
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from effops.programs.rules import table
from effops.programs.rules.binding import Binding, Place, is_item, operands_of, shape_of, value_of
from effops.programs.tiles import cuts
from effops.programs.tiles.plans import program_of
from effops.programs.tiles.program import taken_bytes
from effops.programs.tiles.refusals import CannotTile, TilesDiffer
from effops.programs.tiles.traced import traced

from .forced_tiles import graph_of, is_float
from .loop_texts import OF_LOOPS, TEXTS
from .rule_programs import PROGRAMS, arguments

FILE = Path(__file__).with_suffix(".txt")
LEAST = 2**17  # bytes of a budget
CAUGHT, RAISED, REFUSED, EQUAL, SILENT, UNUSED = "differs", "raises", "refused", "equal", "SILENT", "unused"
FAULT = "fault"  # of the programs here, not of the tiles
WRONG = CAUGHT, RAISED, SILENT  # of a rule as it is


class Break(NamedTuple):
    what: str
    binding: Binding


class Row(NamedTuple):
    """A row of the table, the node that its program has of it, and what the program takes."""

    name: str
    graph: torch.fx.GraphModule
    node: torch.fx.Node
    args: list
    function: object
    budget: int


def finished(function):
    """The results of a function, those of floats changed once more."""

    def whole(*args):
        found = function(*args)
        found = list(found) if isinstance(found, (tuple, list)) else [found]
        return [torch.cos(one) if is_float(one) else one for one in found]

    return whole


def row_of(name):
    """None if no node of the program is one of the row."""
    function, args = finished(PROGRAMS[name]), arguments(PROGRAMS[name])
    captured = graph_of(function, args)
    graph = traced(captured, args)
    wanted = name.split()[0]
    nodes = [one for one in graph.graph.nodes if wanted in (_name(one), "an" if is_item(one) else "")]
    if not nodes:
        return None
    taken = taken_bytes(captured, args, backward=True)
    return Row(name, graph, nodes[0], args, function, max(LEAST, taken // 5))


def _name(node):
    return getattr(node.target, "__name__", str(node.target)).removeprefix("aten.")


def breaks_of(node):
    """Wrong things that a rule may tell of a node."""
    right = table.bindings(node)
    shape, shapes = shape_of(node), [shape_of(one) for one in operands_of(node)]
    found = [*_of_bindings(right, shape, shapes, value_of(node)), *_of_axes(right, shape, shapes, value_of(node))]
    unique = {one.binding: one for one in found if one.binding not in right}
    return [*unique.values()]


def _of_bindings(right, shape, shapes, value):
    """Bindings of which one thing is changed."""
    for one in right:
        axis = f"axis {one.axis}" if one.axis is not None else f"the {one.combined}"
        for number, place in enumerate(one.operands):
            others = one.operands[:number] + one.operands[number + 1 :]
            yield Break(f"{axis}: operand {place.operand} is read as a whole", one._replace(operands=others))
            for other, size in enumerate(shapes[place.operand]):
                if other != place.axis and size > 1:
                    wrong = place._replace(axis=other)
                    operands = (*one.operands[:number], wrong, *one.operands[number + 1 :])
                    yield Break(f"{axis}: operand {place.operand} by axis {other}", one._replace(operands=operands))
            if place.stretch != 1:
                operands = (*one.operands[:number], place._replace(stretch=1), *one.operands[number + 1 :])
                yield Break(f"{axis}: operand {place.operand} without stretch", one._replace(operands=operands))
        if one.stretch != 1:
            yield Break(f"{axis} without stretch", one._replace(stretch=1))
        if one.axis is None:
            for combined in _combiners(value):
                yield Break(f"{axis} is combined by {combined}", one._replace(combined=combined))
        else:
            for other, size in enumerate(shape):
                if other != one.axis and size > 1:
                    yield Break(f"{axis} is axis {other} of the result", one._replace(axis=other))
            yield Break(f"{axis} is added up", one._replace(axis=None, stretch=1, combined="sum"))


def _of_axes(right, shape, shapes, value):
    """Axes that are mixed, called "map" or reduced by a combiner."""
    mapped = {one.axis for one in right}
    for axis, size in enumerate(shape):
        if axis not in mapped and size > 1:
            for shift in {len(own) - len(shape) for own in shapes} | {0}:
                for alike in (True, False):
                    places, stretch = _places(axis + shift, size, shapes, alike)
                    if places:
                        yield Break(f"axis {axis} is a map", Binding(places, axis, stretch))
            yield Break(f"axis {axis} is one of the result alone", Binding((), axis))
    placed = {(place.operand, place.axis) for one in right for place in one.operands}
    for number, own in enumerate(shapes):
        for axis, size in enumerate(own):
            if (number, axis) not in placed and size > 1:
                for combined in _combiners(value):
                    binding = Binding((Place(number, axis),), None, combined=combined)
                    yield Break(f"axis {axis} of operand {number} is reduced by {combined}", binding)


def _places(axis, size, shapes, alike):
    """An axis of all operands that have it, if they are alike in their sizes, or of the first."""
    fitting = [(number, own[axis]) for number, own in enumerate(shapes) if 0 <= axis < len(own) and own[axis] > 1]
    fitting = [one for one in fitting if one[1] == fitting[0][1]][: None if alike else 1]
    if not fitting:
        return (), 1
    own = fitting[0][1]
    least = min(own, size)
    if own % least or size % least:
        return (), 1
    return tuple(Place(number, axis, own // least) for number, _ in fitting), size // least


def _combiners(value):
    first = value[0] if isinstance(value, (tuple, list)) else value
    return ("any", "all") if first.dtype == torch.bool else ("sum", "max", "min", "logsumexp")


@contextlib.contextmanager
def telling(node, binding):
    """The rule of a node tells a binding alone."""
    true = cuts.bindings
    cuts.bindings = lambda one: [binding] if one is node else true(one)
    try:
        yield
    finally:
        cuts.bindings = true


def outcome(row, binding):
    """What becomes of a program if the rule of its node tells a binding."""

    def planned():
        with telling(row.node, binding):
            program = program_of(row.graph, row.args, row.budget, backward=True)
        is_used = any(row.node in cut.placed or row.node in cut.combined for cut in _cuts(program))
        return program if is_used else None

    return end_of(planned, row.function, row.args)


def end_of(planned, function, args):
    """What becomes of a program that is broken."""
    try:
        program = planned()
        if program is None:
            return UNUSED, ""
        found = with_gradients(program, args)
    except CannotTile as error:
        return REFUSED, error.reason
    except TilesDiffer as error:
        return CAUGHT, str(error)
    except Exception as error:
        return RAISED, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    difference = differs(found, with_gradients(function, args))
    return (SILENT, difference) if difference else (EQUAL, "")


def _cuts(program):
    return [loop.stage.cut for loop in program.loops]


def with_gradients(function, args):
    results = function(*args)
    outputs = [one for one in results if one.requires_grad]
    leaves = [one for one in args if one.requires_grad]
    if not outputs or not leaves:
        return results
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in outputs]
    return [*results, *torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)]


def source_of(text):
    return textwrap.dedent(inspect.getsource(getattr(text.owner, text.name)))


@contextlib.contextmanager
def rewritten(text):
    """Another text of a function."""
    true = getattr(text.owner, text.name)
    place = {**vars(inspect.getmodule(true))}
    exec("from __future__ import annotations\n" + source_of(text).replace(text.old, text.new), place)
    setattr(text.owner, text.name, place[text.name])
    try:
        yield
    finally:
        setattr(text.owner, text.name, true)


def outcome_of_text(text, name):
    function, args = finished(OF_LOOPS[name]), arguments(OF_LOOPS[name])
    captured = graph_of(function, args)
    graph, budget = traced(captured, args), max(LEAST, taken_bytes(captured, args, backward=True) // 5)
    with rewritten(text) if text else contextlib.nullcontext():
        return end_of(lambda: program_of(graph, args, budget, backward=True), function, args)


def differs(found, expected):
    """What is wrong; empty if nothing is."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if (one is None) != (other is None):
            return f"value {number} is {one if one is None else 'a tensor'}"
        if one is None:
            continue
        if one.shape != other.shape:
            return f"value {number} has shape {tuple(one.shape)}"
        own, right = (torch.view_as_real(each.to(torch.complex128)) for each in (one, other))
        size = right.nan_to_num(0, 0, 0).abs().max().item() if right.numel() else 0.0
        if not torch.allclose(own, right, rtol=0, atol=1e-4 * max(1e-3, size), equal_nan=True):
            return f"value {number} has an error of {(own - right).abs().max():.2g}"
    return ""


class Result(NamedTuple):
    row: str
    what: str
    outcome: str
    why: str


def results_of(name):
    """The outcomes of the rule as it is, and of its breaks."""
    torch.manual_seed(0)
    row = row_of(name)
    if row is None:
        return None
    right = [(one, outcome(row, one)) for one in table.bindings(row.node)]
    wrong = [Result(name, one.what, *outcome(row, one.binding)) for one in breaks_of(row.node)]
    return right, wrong


def results_of_texts():
    """The outcomes of broken loops and combiners, each after that of its program as it is."""
    known = {}
    for text in TEXTS:
        for name in text.programs:
            if name not in known:
                known[name] = outcome_of_text(None, name)
            end, why = known[name]
            what = f"{text.what}, in {name!r}"
            if end != EQUAL:
                yield Result("loops", what, FAULT, f"as it is: {end} {why}")
            elif text.old not in source_of(text):
                yield Result("loops", what, FAULT, "the text is gone: write another one")
            else:
                yield Result("loops", what, *outcome_of_text(text, name))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of the names of operators, or `loops`")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--verbose", action="store_true", help="print each break")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # of shapes that do not fit, while a broken rule is planned
    warnings.simplefilter("ignore")
    names = [one for one in PROGRAMS if not options.names or any(part in one for part in options.names)]
    found, faults, unreached = [], [], []
    for number, name in enumerate(names, 1):
        results = results_of(name)
        if results is None:
            unreached.append(name)
            print(f"{number}/{len(names)} {name}: not in the graph of its program", flush=True)
            continue
        right, wrong = results
        found += wrong
        faults += [f"{name}: as it is, {binding}: {end} {why}" for binding, (end, why) in right if end in WRONG]
        ways = collections.Counter(end for _, (end, _) in right)
        print(f"{number}/{len(names)} {name}: as it is {dict(ways)}, broken {counts_of(wrong)}", flush=True)
        for one in wrong:
            if options.verbose or one.outcome == SILENT:
                print(f"    {one.what}: {one.outcome} {one.why}"[:300], flush=True)
    if not options.names or "loops" in options.names:
        for one in results_of_texts():
            found.append(one)
            faults += [f"{one.what}: {one.why}"] * (one.outcome == FAULT)
            print(f"loops: {one.what}: {one.outcome} {one.why}"[:200], flush=True)
    text = summary(found, unreached)
    print(text, *faults, sep="\n")
    if options.write:
        FILE.write_text(text)
    sys.exit(bool(faults))


def without_program():
    named = {name.split()[0] for name in PROGRAMS}
    return sorted({getattr(one, "__name__", str(one)).removeprefix("aten.") for one in table.RULES} - named)


def counts_of(results):
    return dict(collections.Counter(one.outcome for one in results))


def summary(found, unreached):
    counts = collections.Counter(one.outcome for one in found)
    silent, rows = [one for one in found if one.outcome == SILENT], {one.row for one in found}
    fitting, run = counts[CAUGHT] + counts[SILENT], counts[CAUGHT] + counts[SILENT] + counts[RAISED]

    def share(total):
        return f"{1 - counts[SILENT] / max(1, total):.1%} of {total}"

    lines = [
        "Broken rules, and whether the first call notices: `python -m tests.programs.broken_rules --write`",
        "",
        f"{len(rows - {'loops'})} of {len(PROGRAMS)} programs, and loops; {len(found)} breaks:",
        f"{counts[CAUGHT]:6} TilesDiffer",
        f"{counts[RAISED]:6} another error before there is a result",
        f"{counts[REFUSED]:6} CannotTile: the wrong rule fits no other rule of the program",
        f"{counts[SILENT]:6} not noticed",
        f"{counts[EQUAL]:6} change nothing, so that they do not count",
        f"{counts[UNUSED]:6} of which the program makes no use, so that they do not count",
        f"Noticed: {share(run + counts[REFUSED])}; of those that are planned {share(run)}; of those whose shapes fit",
        f"{share(fitting)}.",
        "",
        "Not noticed:",
        *(f"  {one.row}: {one.what} ({one.why})" for one in silent),
        "",
        "Without a program in rule_programs.py: " + (", ".join(without_program()) or "none"),
        "Not run: " + (", ".join(one for one in PROGRAMS if one not in {*rows, *unreached}) or "none"),
        "Not in a graph, since traced.py takes the operator apart: " + (", ".join(unreached) or "none"),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
