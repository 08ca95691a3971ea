"""What log densities of directions about a mean direction share: W(s) + s phi(<loc, x>) of every broadcast pair.

`Directional` makes a `Density` of phi and W. A family gives both twice: as a `DotMap`, which works in place, and as
functions of PyTorch operations. The latter phi is scriptable.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from effops.blocks import dots
from effops.blocks.dots import DotMap, contract
from effops.blocks.small import SmallCall
from effops.dispatch.validation import Condition
from effops.numerics.directions import lengths
from effops.numerics.precision import sphere_tolerance, unit_roundoff
from effops.ops.densities import cpp, triton
from effops.ops.densities.density import DensityCall, Form, Kernels, Native, Wanted


@dataclass
class Directional:
    """A density W(s) + s phi(<loc, x>), as `effops.ops.densities.density.Density`.

    Attributes:
        name: the name of the family
        scale_name: the name of the argument s
        phi: a scriptable function of the dot products and of `tolerance`
        normaliser: W, a function of a float64 scale and the dimension
        map: makes the `DotMap` of phi and W from the dimension, `floor` and `tolerance`
        kernel: the module of `effops.kernels` whose MAP has phi and W as Triton functions
        singular: whether phi is singular at t = 1 + <loc, x> = 0
        compiled_bytes_per_scale: as of every `Density`
    """

    name: str
    scale_name: str
    phi: Callable[[Tensor, float], Tensor]
    normaliser: Callable[[Tensor, int], Tensor]
    map: Callable[[int, float, float], DotMap]
    kernel: str
    singular: bool
    compiled_bytes_per_scale: int
    scale_dims: int = 0
    smallest: int = 2

    @functools.cached_property
    def forms(self) -> Mapping[str, Form]:
        phi = self.phi

        def naive(
            loc: Tensor, scale: Tensor, normaliser: Tensor, x: Tensor, arithmetic: torch.dtype, tolerance: float
        ) -> Tensor:
            dot = (loc.to(arithmetic) * x.to(arithmetic)).sum(-1)
            return torch.addcmul(normaliser.to(arithmetic), scale.to(arithmetic), phi(dot, tolerance))

        def einsum(
            loc: Tensor, scale: Tensor, normaliser: Tensor, x: Tensor, arithmetic: torch.dtype, tolerance: float
        ) -> Tensor:
            dot = contract(loc, x, arithmetic)
            # In this order the result has the layout of the product; `addcmul` gives it that of the normaliser.
            return phi(dot, tolerance) * scale.to(arithmetic) + normaliser.to(arithmetic)

        return {"naive": naive, "einsum": einsum}

    def tolerance(self, call: DensityCall) -> float:
        """How far below 0 rounding may take t = 1 + <loc, x>."""
        if not self.singular:
            return math.inf
        return sphere_tolerance(call.dimension, call.arithmetic, (call.loc.dtype, call.x.dtype))

    def conditions(self, call: DensityCall) -> Iterator[Condition]:
        for argument, vectors in (("loc", call.loc), ("x", call.x)):
            found, are_one = lengths(vectors)
            remedy = f"give torch.nn.functional.normalize({argument}, dim=-1)"
            expected = "have length 1 along its last dimension"
            yield Condition(argument, expected, found, are_one, functools.partial(self._remedy, call, remedy))
        is_concentration = (call.scale >= 0) & call.scale.isfinite()
        remedy = "give a positive function of what is learned, as torch.nn.functional.softplus"
        yield Condition(self.scale_name, "be finite and at least 0", call.scale, is_concentration, remedy)

    def _remedy(self, call: DensityCall, remedy: str) -> str:
        """What to do with vectors that are no directions. If another argument has some, the order is wrong."""
        names = ("log_weights", "loc", self.scale_name, "x")[-len(call.tensors) :]
        for name, tensor in zip(names, call.tensors):
            is_vector = name not in ("loc", "x") and tensor.ndim > 0 and tensor.shape[-1] >= self.smallest
            if is_vector and bool(lengths(tensor)[1].all()):
                return (
                    f"the order is {', '.join(names)}; here `{name}` has length 1 along its last dimension: "
                    "reorder the arguments, or give them by name"
                )
        return remedy

    def map_of(self, call: DensityCall) -> DotMap:
        return self.map(call.dimension, self.floor(call.arithmetic), self.tolerance(call))

    def floor(self, arithmetic: torch.dtype) -> float:
        """The smallest t that differs from 0 by more than rounding."""
        return unit_roundoff(arithmetic) if self.singular else -math.inf

    def kernels(self, call: DensityCall) -> Kernels:
        return triton.dot_kernels(self.kernel, self.tolerance(call))

    def native(self, call: DensityCall) -> Native:
        return cpp.of_map(self.map_of(call), call.dimension)

    def blocks(
        self, call: DensityCall, *, scored: bool = True, wanted: Wanted = (False, False, False)
    ) -> dots.DotScores:
        return dots.DotScores(
            self.map_of(call),
            call.plan,
            call.loc,
            call.scale,
            call.x,
            call.arithmetic,
            scored=scored,
            wanted=wanted,
            held=call.held_bytes,
            buffers=call.pair_buffers,
        )

    def small(self, call: DensityCall) -> SmallCall | None:
        small = SmallCall(self.map_of(call), call.plan, call.loc, call.scale, call.x, call.dtype)
        return small if small.is_small else None
