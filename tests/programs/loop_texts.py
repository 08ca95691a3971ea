"""Texts of the loops over tiles and of combiners that `broken_rules.py` breaks, and programs that run them."""

from typing import NamedTuple

import torch

from effops.programs.tiles import combiners, gradients, loops

aten = torch.ops.aten


class Text(NamedTuple):
    """A text of a function of the tiles, what takes its place, and programs that run it."""

    what: str
    owner: object
    name: str
    old: str
    new: str
    programs: tuple[str, ...]


TEXTS = [
    Text(
        "the last tile is left out", loops.Loop, "tiles", "0, end, length", "0, end - length, length", ("place", "all")
    ),
    Text(
        "the offset of numbers",
        loops,
        "part",
        "start * along",
        "(start if tensor.dtype.is_floating_point else 0) * along",
        ("place", "triangle"),
    ),
    Text("the offset of all that is read", loops, "part", "start * along.stretch", "0", ("place", "mapped")),
    Text("the stretch of what is read", loops, "part", "length * along.stretch", "length", ("merged",)),
    Text("gradients are not added up", loops.Loop, "backward", ".add_(gradient)", ".copy_(gradient)", ("shared",)),
    Text(
        "gradients of all but the first result",
        loops.Loop,
        "_upstream_of_tile",
        "gradient is None or",
        "outputs or gradient is None or",
        ("several",),
    ),
    Text(
        "the upstream gradient's offset",
        loops.Loop,
        "_upstream_of_tile",
        "placed[node], start, length)",
        "placed[node], 0, length)",
        ("mapped",),
    ),
    Text("sums are not added up", combiners.Combiner, "add", "add_(parts[0])", "copy_(parts[0])", ("all",)),
    Text(
        "sums in the dtype of the tiles",
        combiners.Combiner,
        "start",
        "arithmetic_dtype(part.dtype)",
        "part.dtype",
        ("half",),
    ),
    Text(
        "logsumexp by the largest alone",
        combiners.LogSumExp,
        "add",
        ".add_(torch.exp(part - unit))",
        "",
        ("log of all",),
    ),
    Text(
        "the known logsumexp of other rows",
        loops.Loop,
        "_known_parts",
        "placed.get(node), start,",
        "placed.get(node), 0,",
        ("logs",),
    ),
    Text(
        "the gradient of a known logsumexp",
        gradients._LogSum,
        "backward",
        ".mul_(gradient)",
        "",
        ("logs", "log of all"),
    ),
    Text(
        "what a gradient reads is not computed",
        loops,
        "unread",
        "needed.update(operands_of(node))",
        "pass",
        ("weight",),
    ),
    Text("the shape of a sum that is not read", gradients, "_axes", "axis % rank", "0", ("rows",)),
    Text(
        "the last of the extrema",
        combiners.Extremum,
        "add",
        "torch.where(better, part, best, out=best)",
        "best.copy_(part)",
        ("largest", "least"),
    ),
    Text(
        "equal extrema are not counted",
        combiners.Extremum,
        "add",
        "count.add_(torch.where(same, equal, 0))",
        "pass",
        ("ties", "seldom ties"),
    ),
    Text(
        "extrema do not share gradients",
        combiners.Extremum,
        "pulled_back",
        "upstream * share",
        "upstream",
        ("ties", "seldom ties"),
    ),
    Text(
        "gradients of all tiles, not of the largest",
        combiners.Extremum,
        "pulled_back",
        "part == best",
        "part == part",
        ("largest", "ties"),
    ),
    Text(
        "an extremum that is NaN",
        combiners,
        "_is_better",
        "better | (part.isnan() & ~best.isnan())",
        "better",
        ("largest NaN",),
    ),
    Text(
        "the first of several extrema",
        combiners.FirstExtremum,
        "numbered",
        "parts[number] + first",
        "parts[number]",
        ("first",),
    ),
    Text(
        "any becomes all",
        combiners.AnyTrue,
        "add",
        "logical_or_",
        "logical_and_",
        ("any of few",),
    ),
    Text(
        "all becomes any",
        combiners.AllTrue,
        "add",
        "logical_and_",
        "logical_or_",
        ("all of most",),
    ),
    Text(
        "the last of the truths",
        combiners.AnyTrue,
        "add",
        "totals[0].logical_or_(parts[0])",
        "totals[0].copy_(parts[0])",
        ("any of few",),
    ),
    Text(
        "gradients of a whole operand",
        gradients.GradientSum,
        "add_product",
        "total.addmm_",
        "torch.zeros_like(total).addmm_",
        ("weight",),
    ),
]


def _several(x, y):
    found = (x - y).sin()
    return [found.cos(), found.sum(1)]


def _extrema(x, y):
    found = x - y
    found = found.detach().round().clamp(-2, 2) + (found - found.detach())
    return torch.amax(found, (0, 1, 2)) + torch.amin(found, (0, 1, 2))


def _half_infinite(x, y):
    return (x - y).masked_fill(torch.arange(40)[:, None, None] < 20, -torch.inf)


OF_LOOPS = {  # programs of which the loops are broken
    "mapped": lambda x, y: (x - y).sin(),
    "all": lambda x, y: (x - y).sin().sum(),
    "shared": lambda x, row, column: (x * row + column).sin(),
    "several": _several,
    "place": lambda x: x * torch.arange(40)[:, None, None] * torch.arange(48)[:, None] * torch.arange(36) / 9000,
    "triangle": lambda square: square.sin().tril().sum(0),
    "merged": lambda x: (x.sin().reshape(40 * 48, 36) * 2).cos().sum(1),
    "first": lambda long: torch.max(long.sin(), 0).indices,
    "weight": lambda x, matrix: (x.flatten(0, 1) @ matrix[:36]).sin(),
    "half": lambda x, y: ((x - y).half().cos() + 1).sum((0, 1, 2)),
    "log of all": lambda x, y: torch.logsumexp(x - y, (0, 1, 2)),
    "logs": lambda x, y: torch.logsumexp(x - y, 2),
    "rows": lambda x, y: (x - y).sin().sum((1, 2)),
    "log of -inf": lambda x, y: torch.logsumexp(_half_infinite(x, y), (0, 1, 2)),
    "largest": lambda x, y: torch.amax(x - y, (0, 1, 2)),
    "least": lambda x, y: torch.amin(x - y, (0, 1, 2)),
    "ties": _extrema,
    "seldom ties": lambda seldom, x: torch.amax(torch.where(seldom, 5.0, 1.0) + (x - x.detach()), (0, 1, 2)),
    "largest NaN": lambda seldom, x: torch.amax(torch.where(seldom, torch.nan, x * 0.1), (0, 1, 2)),
    "all of most": lambda mostly, bits: aten.all.dims(mostly | bits, [0, 1, 2]),
    "any of few": lambda seldom, bits: aten.any.dims(seldom & bits, [0, 1, 2]),
}
