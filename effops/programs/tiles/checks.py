"""Compare tiles with the whole, on a part of the tensors that a loop reads, forward and backward."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from effops.numerics.precision import in_float64
from effops.programs.rules.draws import constant, drawn
from effops.programs.tiles.loops import Loop, Tiles, device_of
from effops.programs.tiles.refusals import TilesDiffer
from effops.programs.tiles.results import part
from effops.programs.tiles.traced import lines_of

LENGTHS = (7, 5, 3)  # of the part, cut into three tiles
LARGEST = 2**21  # bytes of the part's intermediates
FINEST = 2.0**-36  # what is told apart of float64: its exact results have the roundings of the whole
WORSE = 4  # times the error of the whole that tiles may have


def check(loop: Loop, tensors: Sequence[Tensor]) -> None:
    """Raise if tiles give another result or gradients than the whole, on a few indices from the middle of the cut.

    Errors are those against float64. What it cannot see: offsets that overflow, ties and -inf that the part does not
    hold, and sums in 16 bits over many tiles.
    """
    length = min(next((one for one in LENGTHS if loop.bytes_of(one) <= LARGEST), LENGTHS[-1]), loop.whole)
    if length < 2:
        return
    start = (loop.whole - length) // 2
    some = [
        part(one.detach(), along, start, length).requires_grad_(one.requires_grad)
        for one, (_, along) in zip(tensors, loop.stage.inputs)
    ]
    tiles, whole = _part_of(loop, length, -(-length // 3)), _part_of(loop, length, length)
    whole.combiners = [None] * len(loop.combiners)  # autograd runs it, and none of what runs tiles
    exact = copy.copy(whole)
    exact.bodies, exact.body_of = {}, lambda graph: _graph_in_float64(_without_chance(graph))
    rounded = [_with_roundings(one) for one in some]
    runs = (tiles, some), (whole, some), (whole, rounded), (exact, [in_float64(one) for one in some])
    found, *others, expected = (_results(one, given, with_roundings=given is rounded) for one, given in runs)
    if len({len(found), len(expected), *map(len, others)}) > 1:
        _raise(loop, "this loop", f"{len(found)} results and gradients", f"{len(expected)}")
    for number, (own, right, *one_piece) in enumerate(zip(found, expected, *others)):
        _compare(loop, number, own, one_piece, right)


def _part_of(loop: Loop, length: int, tile: int) -> Loop:
    """The loop over a few indices, in tiles of a length."""
    own = copy.copy(loop)
    own.bodies, own.compiles = {}, False  # Inductor compiles no rule, and takes seconds
    own.whole, own.length, own.backward_length = length, tile, tile
    own.body_of, own.kept_tiles = _without_chance, min(own.kept_tiles, 1)  # of both kinds
    return own


def _results(loop: Loop, tensors: Sequence[Tensor], *, with_roundings: bool) -> list[Tensor | None]:
    """The results, and the gradients for upstream gradients that are the same for all loops, but for roundings.

    Where the whole is a single tile, it runs without the loop.
    """
    is_whole = loop.length == loop.whole
    if is_whole:
        given = [*tensors, *loop.first_carried(device_of(tensors))]
        results = loop.body(loop.whole, given)(*given)[: len(loop.stage.outputs)]
    else:
        results = Tiles.apply(loop, *tensors)
    leaves = [one for one in tensors if one.requires_grad]
    outputs = [one for one in results if one.requires_grad]
    if not outputs or not leaves:
        return [*results]
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one) for one in outputs]
    if with_roundings:
        upstream = [_with_roundings(one) for one in upstream]
    with torch.no_grad():
        return [*results, *torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)]


def _compare(
    loop: Loop, number: int, own: Tensor | None, one_piece: Sequence[Tensor | None], right: Tensor | None
) -> None:
    """Compare a result of tiles with those of the whole: one, and one for arguments changed by roundings."""
    other, rounded = one_piece
    if own is None or other is None or rounded is None or right is None:
        if own is not other:
            _raise(loop, _name(loop, number), *("none" if one is None else "one" for one in (own, other)))
        return
    if own.is_complex():
        own, other, rounded, right = (torch.view_as_real(one) for one in (own, other, rounded, right))
    if not own.is_floating_point():
        known = (other == rounded) & (other == right)  # what roundings do not change, as they do a comparison
        if not torch.equal(own[known], other[known]):
            _raise(loop, _name(loop, number), "other values", "those of float64")
        return
    right = right.to(torch.float64)
    patterns = [one.isfinite() for one in (own, other, right)]
    same = torch.equal(patterns[0], patterns[1]) or torch.equal(patterns[0], patterns[2])
    known = patterns[0] & patterns[1] & patterns[2] & rounded.isfinite()
    error, *of_whole = (_largest((one.to(torch.float64) - right)[known]) for one in (own, other, rounded))
    rounding = max(FINEST, torch.finfo(own.dtype).eps) * math.sqrt(loop.whole) * _largest(right[known])
    if not same or not error <= WORSE * (max(of_whole) + rounding):
        _raise(loop, _name(loop, number), f"an error of {error:.3g}", f"one of {max(of_whole):.3g}")


def _largest(values: Tensor) -> float:
    return values.abs().amax().item() if values.numel() else 0.0


def _name(loop: Loop, number: int) -> str:
    """What one of the results is, of which gradients are the last."""
    outputs = loop.stage.outputs
    return f"the result of {outputs[number].target}" if number < len(outputs) else "a gradient"


def _raise(loop: Loop, what: str, tiles: str, whole: str) -> None:
    line, _ = lines_of(loop.stage.outputs[0])
    raise TilesDiffer(
        f"tiled: on a part of the arguments, tiles give {tiles} for {what}, and the whole gives {whole}"
        + (f", in {line}" if line else "")
        + "; please report the function, and call it without tiled"
    )


def _with_roundings(tensor: Tensor) -> Tensor:
    """The tensor with each value changed by about a rounding, which shows how much roundings matter."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.linspace(-1, 1, max(1, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
    changed = tensor.detach() * (1 + torch.finfo(tensor.dtype).eps * noise[: tensor.numel()].reshape(tensor.shape))
    return changed.requires_grad_(tensor.requires_grad)


def _without_chance(graph: GraphModule) -> GraphModule:
    """The graph with a constant for all random numbers, which a tile draws otherwise than the whole."""
    draws = [node for node in graph.graph.nodes if node.target is drawn]
    for node in draws:
        node.target = constant
    if draws:  # writing its code takes a third of what a check does
        graph.recompile()
    return graph


def _graph_in_float64(graph: GraphModule) -> GraphModule:
    """The graph with float64 for all floating-point dtypes among its arguments."""

    def widened(argument: object) -> object:
        if not isinstance(argument, torch.dtype):
            return argument
        return torch.float64 if argument.is_floating_point else torch.complex128 if argument.is_complex else argument

    with_dtypes = [node for node in graph.graph.nodes if any(map(_is_dtype, (*node.args, *node.kwargs.values())))]
    for node in with_dtypes:
        node.args = tuple(map(widened, node.args))
        node.kwargs = {name: widened(one) for name, one in node.kwargs.items()}
    if with_dtypes:
        graph.recompile()
    return graph


def _is_dtype(argument: object) -> bool:
    return isinstance(argument, torch.dtype)
