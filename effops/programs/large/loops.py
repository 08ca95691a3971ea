"""Checkpointed loops: a slice of a function, run on parts of one of its axes."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from effops.measure import tensors as tensors_of
from effops.programs.capture.scopes import Described, Fields
from effops.programs.large.rewrites import Rewrite
from effops.programs.large.source.slices import Slice, assigned, copied
from effops.programs.large.source.trials import FAILURES, Trial, compiled

LEAST_SIZE = 16  # of an axis that is cut
PART_BYTES = 2**22  # of the largest tensor of a part, about
PARTS = 64  # at most, about
IGNORES = {"cross_entropy", "nll_loss"}  # targets of a certain value do not count in their means
SMALL_PART = 2  # of the axis in a trial


@dataclass(frozen=True)
class Cut:
    """Names that are split along an axis, or one use of a name: `occurrence` counts where it is read.

    `number` is the one use of a number that is the size of the axis, where the size of a part takes its place.
    """

    names: tuple[str, ...]
    axis: int
    occurrence: int | None = None
    number: tuple[str, int] | None = None


def loops(part: Slice, trial: Trial, now_bytes: int) -> Iterator[Rewrite]:
    """Loops over parts of an axis, whose results were the same on small tensors.

    `part` may end before the slice that was tried does.
    """
    for cut in _cuts(part):
        combined = _combined(part, cut, trial)
        if combined is None:
            continue
        size = max(_described(part, name).shape[cut.axis] for name in cut.names)
        parts = min(max(-(-now_bytes // PART_BYTES), 2), PARTS)
        rows = 1 << max((size // parts).bit_length() - 1, 0)
        statements = _loop(part, cut, rows, combined)
        axis = f"axis {cut.axis} of {' and '.join(f'`{name}`' for name in cut.names)}"
        why = f"a part of {axis} is made at a time{_again(part)}"
        if any("MEANS" in one for one in combined) and IGNORES & _called(part):
            why += "; right only where no target is ignored, since parts then weigh alike"
        yield Rewrite("loop", [*statements, *part.rest], why, _is_differentiable(part))


def _called(found: Slice) -> set[str]:
    nodes = (node.func for one in found.statements for node in ast.walk(one) if isinstance(node, ast.Call))
    return {str(getattr(one, "attr", getattr(one, "id", ""))) for one in nodes}


def checkpointed(found: Slice) -> Rewrite | None:
    """The slice as it is, computed again in backward: each turn of a loop then keeps what it reads alone."""
    if not _is_differentiable(found) or not found.results:
        return None
    function, free = _unused(found, "part_of"), ", ".join(found.free)
    definition = found.definition(found.statements, function)
    call = f"checkpoint({function}, {free}, use_reentrant=False)"
    source = f"{_imports(found)}\n{definition}\n{', '.join(found.results)} = {call}"
    why = "backward computes each turn again; what a turn makes is not kept"
    return Rewrite("loop", ast.parse(source).body, why, keeps_operands_alone=True)


def _described(found: Slice, name: str) -> Described:
    value = found.value(name)
    assert isinstance(value, Described)
    return value


def _cuts(found: Slice) -> Iterator[Cut]:
    tensors = [name for name in found.free if isinstance(found.value(name), Described)]
    shapes = {name: _described(found, name).shape for name in tensors}
    axes = [(name, axis) for name in tensors for axis, size in enumerate(shapes[name]) if size >= LEAST_SIZE]
    axes.sort(key=lambda one: one[1])  # of rows first
    for name, axis in axes:
        yield Cut((name,), axis)
    for name, axis in axes:
        size = shapes[name][axis]
        alike = [one for one in tensors if len(shapes[one]) > axis and shapes[one][axis] == size]
        for first in range(len(alike)):
            for second in range(first + 1, len(alike)):
                if alike[first] == name:
                    yield Cut((name, alike[second]), axis)
        if len(alike) > 2 and alike[0] == name:
            yield Cut(tuple(alike), axis)
    for name, axis in axes:
        count = len(_reads(found.statements, name))
        if count > 1:
            for occurrence in range(count):
                yield Cut((name,), axis, occurrence)
    for name, axis in axes:
        count, size = len(_reads(found.statements, name)), shapes[name][axis]
        numbers = [one for one in found.free if type(found.value(one)) is int and found.value(one) == size]
        for occurrence in range(count if count > 1 else 0):
            for number in numbers:
                for use in range(len(_reads(found.statements, number))):
                    yield Cut((name,), axis, occurrence, (number, use))


def _reads(statements: Sequence[ast.stmt], name: str) -> list[ast.Name]:
    return [
        node
        for one in statements
        for node in ast.walk(one)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id == name
    ]


def _unused(found: Slice, name: str) -> str:
    taken = {*found.scope.names, *found.scope.surroundings, *found.free, *assigned(found.statements)}
    while name in taken:
        name += "_"
    return name


def _function(found: Slice, cut: Cut) -> tuple[str, list[str]]:
    """The source of `part_of`, and its parameters: those that are split come first."""
    statements, split = list(found.statements), list(cut.names)
    if cut.occurrence is not None:
        statements = [copied(one) for one in statements]
        part = _unused(found, f"{cut.names[0]}_part")
        replaced = _reads(statements, cut.names[0])[cut.occurrence]
        if cut.number is not None:
            use = _reads(statements, cut.number[0])[cut.number[1]]
            use.id = f"{part}.shape[{cut.axis}]"  # it is unparsed as it stands
        replaced.id = part
        split = [part]
    others = [name for name in found.free if name not in split]
    results = found.results
    last = statements[-1]
    if len(results) == 1 and isinstance(last, ast.Assign) and [*map(ast.unparse, last.targets)] == [*results]:
        statements = [*statements[:-1], ast.Return(last.value)]
        found = Slice(statements, found.scope, ())
    parameters = [*split, *others]
    return found.definition(statements, _unused(found, "part_of"), parameters), parameters


def _combined(found: Slice, cut: Cut, trial: Trial) -> list[str] | None:
    """How each result is put together from those of parts, as source with `PARTS` in it; None if none is right."""
    source, parameters = _function(found, cut)
    arguments = dict(trial.made.arguments)
    split = arguments[cut.names[0]]
    sizes = {arguments[name].shape[cut.axis] for name in cut.names}
    if len(sizes) > 1 or split.shape[cut.axis] <= SMALL_PART:
        return None
    try:
        function = compiled(source, found.scope.surroundings, _unused(found, "part_of"))
        others = [arguments[name] for name in parameters[len(cut.names) :]]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            versions = [one._version for one in trial.made.tensors]
            whole = tensors_of(function(*(arguments[name] for name in cut.names), *others))
            pieces = zip(*(arguments[name].split(SMALL_PART, cut.axis) for name in cut.names))
            parts = [tensors_of(function(*piece, *others)) for piece in pieces]
    except FAILURES:  # the code cannot take parts
        return None
    lengths = [one.shape[cut.axis] for one in split.split(SMALL_PART, cut.axis)]
    if versions != [one._version for one in trial.made.tensors]:  # a part that is made again would change it again
        return None
    if len(whole) != max(len(found.results), 1):
        return None
    found_forms = [_form(one, [part[place] for part in parts], lengths) for place, one in enumerate(whole)]
    return None if None in found_forms else [one for one in found_forms if one is not None]


def _form(whole: Tensor, parts: Sequence[Tensor], lengths: Sequence[int]) -> str | None:
    def equal(value: Tensor) -> bool:
        return value.shape == whole.shape and torch.allclose(value, whole, rtol=1e-6, equal_nan=True)

    for axis in range(whole.ndim):
        shapes = {(*one.shape[:axis], *one.shape[axis + 1 :]) for one in parts}
        if len(shapes) == 1 and parts[0].ndim == whole.ndim and equal(torch.cat(list(parts), axis)):
            return "torch.cat(PARTS)" if axis == 0 else f"torch.cat(PARTS, {axis})"
    if len({one.shape for one in parts}) != 1:
        return None
    if equal(sum(parts[1:], parts[0])):
        return "sum(PARTS)"
    if not whole.dtype.is_floating_point:
        return None
    weighted = [one * length for one, length in zip(parts, lengths)]
    if equal(sum(weighted[1:], weighted[0]) / sum(lengths)):
        return "sum(MEANS) / LENGTH"
    for name in ("amax", "amin", "logsumexp"):
        if equal(getattr(torch.stack(list(parts)), name)(0)):
            return f"torch.stack(PARTS).{name}(0)"
    return None


def _loop(found: Slice, cut: Cut, rows: int, forms: Sequence[str]) -> list[ast.stmt]:
    source, parameters = _function(found, cut)
    function = _unused(found, "part_of")
    split = len(cut.names)
    part_names = [_unused(found, "part" if split == 1 else f"{name}_part") for name in cut.names]
    given = ", ".join([*part_names, *parameters[split:]])
    call = f"{function}({given})"
    if _is_differentiable(found):
        call = f"checkpoint({function}, {given}, use_reentrant=False)"
    axis = f", {cut.axis}" if cut.axis else ""
    pieces = [f"{name}.split({rows}{axis})" for name in cut.names]
    over = pieces[0] if split == 1 else f"zip({', '.join(pieces)})"
    targets = ", ".join(part_names)
    lines = [_imports(found), source]
    length = f"{cut.names[0]}.shape[{cut.axis}]"
    counted = f"{part_names[0]}.shape[{cut.axis}]"
    is_single = len(forms) == 1 and "MEANS" not in forms[0]
    if not is_single:
        many = _unused(found, "parts")
        needs_lengths = any("MEANS" in one for one in forms)
        value = f"({call}, {counted})" if needs_lengths else call
        lines.append(f"{many} = [{value} for {targets} in {over}]")
    for place, form in enumerate(forms):
        if is_single:
            expression = form.replace("PARTS", f"[{call} for {targets} in {over}]")
        else:
            one = "one[0]" if needs_lengths else "one"
            one += f"[{place}]" if len(forms) > 1 else ""
            expression = form.replace("PARTS", f"[{one} for one in {many}]").replace("LENGTH", length)
            expression = expression.replace("MEANS", f"{one} * one[1] for one in {many}")
        lines.append(f"{found.results[place]} = {expression}" if found.results else f"return {expression}")
    parsed = ast.parse("def f():\n" + "\n".join(f"    {row}" for one in lines for row in one.splitlines())).body[0]
    assert isinstance(parsed, ast.FunctionDef)
    return parsed.body


def _is_differentiable(found: Slice) -> bool:
    return any(_needs_gradient(found.value(name)) for name in found.free)


def _needs_gradient(value: Any) -> bool:
    """Whether a tensor requires a gradient, or one in an object or a layer does."""
    if isinstance(value, Described):
        return value.requires_grad
    if isinstance(value, weakref.ref):
        value = value()
    if isinstance(value, nn.Module):
        return any(one.requires_grad for one in value.parameters())
    if isinstance(value, Fields):
        return any(map(_needs_gradient, value.values.values()))
    return isinstance(value, (list, tuple)) and any(map(_needs_gradient, value))


def _again(found: Slice) -> str:
    return ", and made again in backward" if _is_differentiable(found) else ""


def _imports(found: Slice) -> str:
    lines: list[str] = []
    known: Any = found.scope.surroundings
    if "torch" not in known:
        lines.append("import torch")
    if _is_differentiable(found) and "checkpoint" not in known:
        lines.append("from torch.utils.checkpoint import checkpoint")
    return "\n".join(lines)
