"""Checkpointed loops: statements of a function, run on parts of an axis of tensors that they read."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from effops.measure import tensors_of
from effops.programs.capture.scopes import Described, Fields
from effops.programs.large.rewrites import Rewrite
from effops.programs.large.source.slices import Slice, assigned, copied
from effops.programs.large.source.trials import Trial, attempt, compiled
from effops.pytorch.capture import version_of

LEAST_SIZE = 16  # shorter axes are not split
PART_BYTES = 2**22  # about what the largest tensor of a part takes
MOST_PARTS = 64  # about, since each turn of a loop takes time of its own
SMALL_PART = 2  # the length of a part in a trial, whose axes are short
LOSSES = {"cross_entropy", "nll_loss"}  # their means leave out targets of a certain value


@dataclass(frozen=True)
class Split:
    """Names of tensors that are split along an axis.

    If `occurrence` is given, only that read of the one name, counted from 0, is split. `size_read` then is the name of
    a number that equals the size of the axis, and which read of it becomes the size of the part.
    """

    names: tuple[str, ...]
    axis: int
    occurrence: int | None = None
    size_read: tuple[str, int] | None = None


def loops(found: Slice, trial: Trial, largest_bytes: int) -> Iterator[Rewrite]:
    """Loops over parts of an axis, whose results were the same on small tensors.

    `found` may end before the slice that was tried does. Its largest tensor takes `largest_bytes`.
    """
    for split in _splits(found):
        forms = _forms(found, split, trial)
        if forms is None:
            continue
        size = max(_described(found, name).shape[split.axis] for name in split.names)
        statements = _loop(found, split, _part_length(size, largest_bytes), forms)
        axis = f"axis {split.axis} of {' and '.join(f'`{name}`' for name in split.names)}"
        why = f"a part of {axis} is made at a time{_note_on_backward(found)}"
        if any("WEIGHTED" in one for one in forms) and LOSSES & _called(found):
            why += "; right only where no target is ignored, since parts then weigh alike"
        yield Rewrite("loop", [*statements, *found.rest], why)


def _part_length(size: int, largest_bytes: int) -> int:
    """The length of a part, rounded down to a power of two: it stands as a number in the code of the fix."""
    wanted = -(-largest_bytes // PART_BYTES)
    parts = min(max(wanted, 2), MOST_PARTS)
    exponent = (size // parts).bit_length() - 1
    return 1 << max(exponent, 0)


def _called(found: Slice) -> set[str]:
    nodes = (node.func for one in found.statements for node in ast.walk(one) if isinstance(node, ast.Call))
    return {str(getattr(one, "attr", getattr(one, "id", ""))) for one in nodes}


def checkpointed(found: Slice) -> Rewrite | None:
    """The slice as it is, computed again in backward: each turn of a loop then keeps only what it reads."""
    if not _is_differentiable(found) or not found.results:
        return None
    function, free = _unused(found, "part_of"), ", ".join(found.free)
    definition = found.definition(found.statements, function)
    call = f"checkpoint({function}, {free}, use_reentrant=False)"
    source = f"{_imports(found)}\n{definition}\n{', '.join(found.results)} = {call}"
    why = "backward computes each turn again; what a turn makes is not kept"
    return Rewrite("loop", ast.parse(source).body, why)


def _described(found: Slice, name: str) -> Described:
    value = found.value(name)
    assert isinstance(value, Described)
    return value


def _splits(found: Slice) -> Iterator[Split]:
    """Splits of a tensor, of tensors of one size, of one read, and of one read with the size; the lowest axis first."""
    tensors = [name for name in found.free if isinstance(found.value(name), Described)]
    shapes = {name: _described(found, name).shape for name in tensors}
    axes = [(name, axis) for name in tensors for axis, size in enumerate(shapes[name]) if size >= LEAST_SIZE]
    axes.sort(key=lambda one: one[1])
    for name, axis in axes:
        yield Split((name,), axis)
    for name, axis in axes:
        size = shapes[name][axis]
        alike = [one for one in tensors if len(shapes[one]) > axis and shapes[one][axis] == size]
        for other in alike[alike.index(name) + 1 :]:
            yield Split((name, other), axis)
        if len(alike) > 2 and alike[0] == name:
            yield Split(tuple(alike), axis)
    read_again = [(name, axis, count) for name, axis in axes if (count := len(_reads(found.statements, name))) > 1]
    for name, axis, count in read_again:
        for occurrence in range(count):
            yield Split((name,), axis, occurrence)
    for name, axis, count in read_again:
        size = shapes[name][axis]
        sizes = [one for one in found.free if type(found.value(one)) is int and found.value(one) == size]
        for occurrence in range(count):
            for size_name in sizes:
                for number in range(len(_reads(found.statements, size_name))):
                    yield Split((name,), axis, occurrence, (size_name, number))


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


def _function(found: Slice, split: Split) -> tuple[str, list[str]]:
    """The source of `part_of`, and its parameters: those that are split come first."""
    statements, split_names = list(found.statements), list(split.names)
    if split.occurrence is not None:
        statements = [copied(one) for one in statements]
        part = _unused(found, f"{split.names[0]}_part")
        read = _reads(statements, split.names[0])[split.occurrence]
        if split.size_read is not None:
            size_name, number = split.size_read
            size_read = _reads(statements, size_name)[number]
            size_read.id = f"{part}.shape[{split.axis}]"  # no identifier; `ast.unparse` prints it unchanged
        read.id = part
        split_names = [part]
    others = [name for name in found.free if name not in split_names]
    results = found.results
    last = statements[-1]
    if len(results) == 1 and isinstance(last, ast.Assign) and [*map(ast.unparse, last.targets)] == [*results]:
        statements = [*statements[:-1], ast.Return(last.value)]  # `x = expression` becomes `return expression`
        found = Slice(statements, found.scope, ())
    parameters = [*split_names, *others]
    return found.definition(statements, _unused(found, "part_of"), parameters), parameters


def _forms(found: Slice, split: Split, trial: Trial) -> list[str] | None:
    """How each result is put together from those of parts; None if one cannot be."""
    source, parameters = _function(found, split)
    arguments = dict(trial.made.arguments)
    wholes = [arguments[name] for name in split.names]
    sizes = {one.shape[split.axis] for one in wholes}
    if len(sizes) > 1 or wholes[0].shape[split.axis] <= SMALL_PART:
        return None
    expected = None
    with attempt():  # the code cannot take parts
        function = compiled(source, found.scope.surroundings, _unused(found, "part_of"))
        others = [arguments[name] for name in parameters[len(split.names) :]]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            versions = [version_of(one) for one in trial.made.tensors]
            of_wholes = tensors_of(function(*wholes, *others))
            pieces = zip(*(one.split(SMALL_PART, split.axis) for one in wholes))
            results_of_parts = [tensors_of(function(*piece, *others)) for piece in pieces]
        expected = of_wholes
    if expected is None:
        return None
    if versions != [version_of(one) for one in trial.made.tensors]:
        return None  # the code changes its arguments in place, so it must not run twice
    if len(expected) != max(len(found.results), 1):
        return None
    lengths = [one.shape[split.axis] for one in wholes[0].split(SMALL_PART, split.axis)]
    forms: list[str] = []
    for number, whole in enumerate(expected):
        form = _form(whole, [results[number] for results in results_of_parts], lengths)
        if form is None:
            return None
        forms.append(form)
    return forms


def _form(whole: Tensor, parts: Sequence[Tensor], lengths: Sequence[int]) -> str | None:
    """How a result is put together from those of parts, as source with placeholders; None if no way is right.

    `PARTS` stands for a list of the parts, `LENGTH` for the length of the whole axis, and `WEIGHTED` for the parts
    times their lengths.
    """

    def equal(value: Tensor) -> bool:
        # trials are in float64, and compare to 1e-6 too
        return value.shape == whole.shape and torch.allclose(value, whole, rtol=1e-6, equal_nan=True)

    for axis in range(whole.ndim):
        shapes = {(*one.shape[:axis], *one.shape[axis + 1 :]) for one in parts}
        if len(shapes) == 1 and parts[0].ndim == whole.ndim and equal(torch.cat(list(parts), axis)):
            return "torch.cat(PARTS)" if axis == 0 else f"torch.cat(PARTS, {axis})"
    if len({one.shape for one in parts}) != 1:
        return None
    reductions: tuple[str, ...] = ("any", "all") if whole.dtype is torch.bool else ()
    if whole.dtype is not torch.bool and equal(sum(parts[1:], parts[0])):
        return "sum(PARTS)"
    if whole.dtype.is_floating_point:
        weighted = [one * length for one, length in zip(parts, lengths)]
        if equal(sum(weighted[1:], weighted[0]) / sum(lengths)):
            return "sum(WEIGHTED) / LENGTH"
        reductions = "amax", "amin", "logsumexp"
    for name in reductions:
        if equal(getattr(torch.stack(list(parts)), name)(0)):
            return f"torch.stack(PARTS).{name}(0)"
    return None


def _loop(found: Slice, split: Split, part_length: int, forms: Sequence[str]) -> list[ast.stmt]:
    """Statements that run `part_of` on each part, and put the results together."""
    source, parameters = _function(found, split)
    function = _unused(found, "part_of")
    count = len(split.names)
    part_names = [_unused(found, "part" if count == 1 else f"{name}_part") for name in split.names]
    given = ", ".join([*part_names, *parameters[count:]])
    call = f"{function}({given})"
    if _is_differentiable(found):
        call = f"checkpoint({function}, {given}, use_reentrant=False)"
    axis_argument = f", {split.axis}" if split.axis else ""
    pieces = [f"{name}.split({part_length}{axis_argument})" for name in split.names]
    all_pieces = pieces[0] if count == 1 else f"zip({', '.join(pieces)})"
    turns = f"for {', '.join(part_names)} in {all_pieces}"
    lines = [_imports(found), source]
    needs_lengths = any("WEIGHTED" in one for one in forms)
    is_one_line = len(forms) == 1 and not needs_lengths
    parts = _unused(found, "parts")
    if not is_one_line:
        value = f"({call}, {part_names[0]}.shape[{split.axis}])" if needs_lengths else call
        lines.append(f"{parts} = [{value} {turns}]")
    for number, form in enumerate(forms):
        if is_one_line:
            expression = form.replace("PARTS", f"[{call} {turns}]")
        else:
            result = "one[0]" if needs_lengths else "one"
            result += f"[{number}]" if len(forms) > 1 else ""
            expression = form.replace("PARTS", f"[{result} for one in {parts}]")
            expression = expression.replace("LENGTH", f"{split.names[0]}.shape[{split.axis}]")
            expression = expression.replace("WEIGHTED", f"{result} * one[1] for one in {parts}")
        lines.append(f"{found.results[number]} = {expression}" if found.results else f"return {expression}")
    body = "\n".join(f"    {row}" for one in lines for row in one.splitlines())
    parsed = ast.parse(f"def f():\n{body}").body[0]
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


def _note_on_backward(found: Slice) -> str:
    return ", and made again in backward" if _is_differentiable(found) else ""


def _imports(found: Slice) -> str:
    lines: list[str] = []
    known: Any = found.scope.surroundings
    if "torch" not in known:
        lines.append("import torch")
    if _is_differentiable(found) and "checkpoint" not in known:
        lines.append("from torch.utils.checkpoint import checkpoint")
    return "\n".join(lines)
