"""A family of log densities, and its calls: their validated arguments, and the plan of their pairs.

A log density is `normaliser(scale)` plus a part that depends on loc and x too. Both together are the score of a pair.
`effops.ops.densities.log_prob` makes the op of all pairs, and `effops.ops.densities.mixture` that of their logsumexp.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from effops.blocks.dots import DotMap, normalisers_of
from effops.blocks.pairs import Scores
from effops.blocks.plan import Plan, Shape, broadcast_plan
from effops.blocks.small import SmallCall
from effops.dispatch.arguments import (
    check_dense,
    check_devices,
    check_float64,
    check_operand,
    check_order,
    conversion,
)
from effops.dispatch.op import Call
from effops.dispatch.validation import Condition
from effops.numerics.precision import FLOATS, INTEGERS, arithmetic_dtype, autocast_enabled, promote, wider
from effops.numerics.shapes import broadcast_shapes, do_broadcast, spreads

# A scriptable function of loc, scale in no narrower a dtype than that of the arithmetic, the normaliser of scale in
# float64, x, the dtype of the arithmetic, and the tolerance. It returns the scores in the dtype of the arithmetic.
Form = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype, float], Tensor]
Wanted = Sequence[bool]  # whether the gradients of loc, scale and x are wanted


class KeptNormaliser:
    """The normaliser that the last small call needed, of whoever calls with the same scale again. Ops keep nothing."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None  # a copy of the scale, and its normaliser

    def of(self, dot_map: DotMap, scale: Tensor, arithmetic: torch.dtype) -> Tensor:
        """The normaliser of a scale, in the dtype of the arithmetic. It is that of the last call if the values are."""
        if self._kept is not None:
            known, normaliser = self._kept
            is_alike = known.dtype == scale.dtype and known.device == scale.device and normaliser.dtype == arithmetic
            if is_alike and torch.equal(known, scale):
                return normaliser
        normaliser = normalisers_of(dot_map, scale, arithmetic)
        self._kept = scale.clone(), normaliser
        return normaliser


@dataclass
class DensityCall(Call):
    """A validated call: its tensors, the plan of their pairs, and the dtype of the result."""

    loc: Tensor
    scale: Tensor
    x: Tensor
    plan: Plan
    dtype: torch.dtype
    kept: KeptNormaliser | None = field(default=None, kw_only=True)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.loc, self.scale, self.x

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.loc, self.scale, self.x, self.dtype

    @property
    def shape(self) -> Shape:
        return self.plan.shape

    @property
    def dimension(self) -> int:
        return self.x.shape[-1]

    @property
    def held_bytes(self) -> int:
        """What a forward pass by blocks holds of other sizes than a block."""
        return 0

    @property
    def pair_buffers(self) -> int:
        """How many buffers of the size of a block it has for the scores."""
        return int(self.dtype != self.arithmetic)

    @property
    def operations(self) -> int:
        return self.plan.numel(self.plan.order) * (2 * self.dimension + 4)


@dataclass(frozen=True)
class Kernels:
    """The kernels of a score. Each writes its results to its last operands: see `effops.kernels.distances`.

    The last `scale_dims` dimensions of scale are no batch axes.
    """

    scale_dims: int
    forward: Callable[..., None]
    backward: Callable[..., None]
    forward_logsumexp: Callable[..., None]
    backward_logsumexp: Callable[..., None]


@dataclass(frozen=True)
class Native:
    """A score as C++ kernels take it: the name of its map, and settings of that. See `maps.h`.

    `normalisers` tells those of scales, and their derivatives if these are asked for, each as it varies. The last
    `scale_dims` dimensions of scale are no batch axes.
    """

    scale_dims: int
    map: str
    settings: tuple[float, float, float]
    normalisers: Callable[[Tensor, bool], tuple[Tensor | None, Tensor | None]]


class Density(Protocol):
    """A family of densities.

    Attributes:
        name: the name of the family
        scale_name: the name of the argument `scale`
        scale_dims: how many of the last dimensions of `scale` are no batch axes: 0 or 1
        smallest: the smallest last dimension that x may have
        compiled_bytes_per_scale: what the compiled form takes for each scale while it computes the normaliser, measured
    """

    name: str
    scale_name: str
    scale_dims: int
    smallest: int
    compiled_bytes_per_scale: int

    @property
    def forms(self) -> Mapping[str, Form]:
        """The scores by PyTorch operations: naive and, where it differs, einsum."""

    def normaliser(self, scale: Tensor, dimension: int, /) -> Tensor:
        """A differentiable function of a float64 scale and the dimension: the part that depends on these alone."""

    def kernels(self, call: DensityCall) -> Kernels:
        """The Triton kernels."""

    def native(self, call: DensityCall) -> Native:
        """The score as C++ kernels take it."""

    def tolerance(self, call: DensityCall) -> float:
        """How far rounding may take inputs on the boundary of the domain beyond it, in the argument of phi."""

    def blocks(self, call: DensityCall, *, scored: bool = True, wanted: Wanted = (False, False, False)) -> Scores:
        """The scores of a call of either op, block by block, and the gradients that `wanted` asks for."""

    def conditions(self, call: DensityCall) -> Iterator[Condition]:
        """What must hold of the values of loc, scale and x."""

    def small(self, call: DensityCall) -> SmallCall | None:
        """How to compute a call that is too small to be cut into blocks, or None for a larger one."""


def plan_of(density: Density, loc: Tensor, scale: Tensor, x: Tensor, *others: Tensor) -> Plan:
    """The plan of a call. Operands `others` have batch axes only."""
    scale_shape = scale.shape[: scale.ndim - density.scale_dims]
    return broadcast_plan(x.shape[:-1], loc.shape[:-1], scale_shape, *(other.shape for other in others))


def prepare(
    density: Density,
    function: str,
    loc: Tensor,
    scale: Tensor | float,
    x: Tensor,
    *,
    kept: KeptNormaliser | None = None,
) -> DensityCall:
    """Validate shapes, dtypes and devices (never values)."""
    try:
        return validated(density, function, loc, scale, x, kept=kept)
    except (TypeError, ValueError) as error:
        check = functools.partial(validated, density, function)
        check_order(function, {"loc": loc, density.scale_name: scale, "x": x}, ("loc", "x"), check, error)
        raise


def validated(
    density: Density,
    function: str,
    loc: Tensor,
    scale: Tensor | float,
    x: Tensor,
    *,
    kept: KeptNormaliser | None = None,
) -> DensityCall:
    """The call, if shapes, dtypes and devices fit in this order of the arguments."""
    _check_vectors(density, function, loc, x)
    if loc.device != x.device:  # this costs less than a call of `check_devices`
        check_devices(function, loc=loc, x=x)
    check_float64(function, "loc", loc)
    common = wider(loc.dtype, x.dtype)
    given, scale = scale, _prepare_scale(density, function, scale, common, x)
    dims = density.scale_dims
    try:
        plan = broadcast_plan(x.shape[:-1], loc.shape[:-1], scale.shape[: scale.ndim - dims])
    except RuntimeError:
        operands = {"loc": loc, density.scale_name: scale, "x": x}
        raise ValueError(
            f"{function}: batch shapes must broadcast; got loc {tuple(loc.shape[:-1])} + (D,), {density.scale_name} "
            f"{tuple(scale.shape[: scale.ndim - dims])}{' + (D or 1,)' * dims}, x {tuple(x.shape[:-1])} + (D,); "
            f"{_how_to_pair(operands, {'loc': 1, density.scale_name: dims, 'x': 1})}"
        ) from None
    dtype = common
    if isinstance(given, Tensor) and scale.dtype != common:
        ndim = max(loc.ndim, x.ndim) + dims - 1  # 0-d tensors do not widen others
        dtype = promote(common, ndim, scale.dtype, given.ndim)
    if dtype.itemsize < 4 and autocast_enabled(x.device):
        dtype = torch.float32
    return DensityCall(loc, scale, x, plan, dtype, kept=kept)


def _check_vectors(density: Density, function: str, loc: Tensor, x: Tensor) -> None:
    check_operand(function, "loc", loc, dims=1)
    check_operand(function, "x", x, dims=1)
    dimension = x.shape[-1]
    if loc.shape[-1] != dimension:
        raise ValueError(
            f"{function}: last dimension of `x` must equal that of `loc`; got x {tuple(x.shape)}, loc "
            f"{tuple(loc.shape)}; {_alike(density, loc, x)}"
        )
    if dimension < density.smallest:
        raise ValueError(
            f"{function}: the last dimension must be at least {density.smallest}; got x {tuple(x.shape)}; "
            "put the coordinates of a point into the last dimension"
        )


def _alike(density: Density, loc: Tensor, x: Tensor) -> str:
    """How to make the last dimensions of loc and x equal."""
    for name, given, other in (("x", x, loc), ("loc", loc, x)):
        if given.shape[-1] == 1 < density.smallest:  # an expanded number would be no point of such a density
            if given.shape[-2:-1] == other.shape[-1:]:
                return f"give {name}.squeeze(-1), if its coordinates are along the dimension before the last"
        elif given.shape[-1] == 1:
            return f"expand `{name}`, whose last dimension is 1"
        if given.ndim > 1 and given.shape[-2] == other.shape[-1]:
            return f"give {name}.mT, if its last dimension should be the one before it"
    return "give points and parameters of one dimension"


def _is_part(shape: Shape, whole: Shape) -> bool:
    """Whether a shape broadcasts to another."""
    return do_broadcast(shape, whole) and tuple(broadcast_shapes(shape, whole)) == tuple(whole)


def _how_to_pair(operands: Mapping[str, Tensor], dims: Mapping[str, int]) -> str:
    """How to reshape operands that do not broadcast, so that each x meets each loc.

    Batch axes of size 1 are added, or the last axis of the scale is taken away if its size is 1. Of the ways that
    succeed it is the one with the fewest pairs, and of these the shortest. A scale belongs to each loc or to each x.
    """
    shapes = {name: tuple(operand.shape) for name, operand in operands.items()}
    scale = next(name for name in shapes if name not in ("loc", "x"))
    starts: list[tuple[list[str], dict[str, Shape]]] = [([], shapes)]
    shorter = shapes[scale][:-1]
    if shapes[scale][-1:] == (1,) and (not dims[scale] or shorter[-1:] in ((1,), shapes["x"][-1:])):
        starts.append(([f"{scale}.squeeze(-1)"], {**shapes, scale: shorter}))
    ways, is_alone = [], True
    for steps, given in starts:
        batch = {name: shape[: len(shape) - dims[name]] for name, shape in given.items()}
        if not (do_broadcast(batch["loc"], batch[scale]) or _is_part(batch[scale], batch["x"])):
            continue
        is_alone = False
        inner = {name: -2 for name in ("loc", scale) if batch[name]}
        for axes in ({}, inner, {"x": -1}, {"x": -1, scale: -1}, {"x": -1, **inner}):  # where axes of size 1 are added
            places = {name: len(batch[name]) + 1 + axis for name, axis in axes.items()}
            unsqueezed = [
                (*shape[: places[name]], 1, *shape[places[name] :]) if name in places else shape
                for name, shape in batch.items()
            ]
            if do_broadcast(*unsqueezed):
                result = tuple(broadcast_shapes(*unsqueezed))
                added = [f"{name}.unsqueeze({axis - dims[name]})" for name, axis in axes.items()]
                ways.append((math.prod(result), len(steps + added), steps + added, result))
    if is_alone:
        return f"give `{scale}` the batch shape {shapes['loc'][:-1]}, one for each loc, or (), one for all"
    if not ways:
        return "unsqueeze the axes that should pair up"
    _, _, found, result = min(ways)
    return f"for every pair of x and loc give {', '.join(found)}, and the result is {result}"


def _prepare_scale(density: Density, function: str, scale: Tensor | float, common: torch.dtype, x: Tensor) -> Tensor:
    name, dims = density.scale_name, density.scale_dims
    if not isinstance(scale, Tensor):
        if not isinstance(scale, Real):
            got = type(scale).__name__
            remedy = conversion(scale, "give a number, as 1.0")
            raise TypeError(f"{function}: `{name}` must be a tensor or a number; got {got}; {remedy}")
        return torch.full((1,) * dims, float(scale), dtype=arithmetic_dtype(common), device=x.device)
    check_dense(function, name, scale)
    if scale.dtype not in FLOATS:
        if scale.dtype not in INTEGERS:
            raise TypeError(f"{function}: `{name}` must be real; got {scale.dtype}; convert it first")
        scale = scale.to(common)
    if scale.device != x.device:
        if scale.ndim or scale.is_meta:
            check_devices(function, **{name: scale, "x": x})
        scale = scale.to(x.device)
    if scale.ndim < dims:
        scale = scale.unsqueeze(-1)
    if dims and not spreads(scale.shape[-1], x.shape[-1]):
        raise ValueError(
            f"{function}: last dimension of `{name}` must be that of `x`, or 1; got {name} {tuple(scale.shape)}, x "
            f"{tuple(x.shape)}; give {name}.unsqueeze(-1) if it has one value for all coordinates"
        )
    return scale
