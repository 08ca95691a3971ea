"""Make ops of log densities: a `Density` describes a family of densities, and `LogProb` makes an op of all its pairs.

A log density is `normaliser(scale)` plus a part that depends on loc and x too. Both together are the score of a pair.
`effops.ops.densities.mixture` makes the op of their logsumexp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from effops.blocks import pairs
from effops.blocks.pairs import Scores
from effops.dispatch.custom_op import CustomOp, Gradients, add_custom_op, add_kernels
from effops.dispatch.forms import add_forms, best_form
from effops.dispatch.op import Op
from effops.numerics.precision import arithmetic_dtype
from effops.ops.densities import triton
from effops.ops.densities.call import Arguments, DensityCall, prepare
from effops.prediction import inductor
from effops.prediction.allocations import Bytes

# A scriptable function of loc, scale in float64, the normaliser of scale, x, the dtype of the arithmetic, and the
# tolerance. It returns the scores in that dtype.
Form = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype, float], Tensor]
Wanted = Sequence[bool]  # whether the gradients of loc, scale and x are wanted


class Density(Arguments, Protocol):
    """A family of densities."""

    @property
    def name(self) -> str:
        """The name of the family."""

    @property
    def forms(self) -> Mapping[str, Form]:
        """The scores by PyTorch operations: naive and, where it differs, einsum."""

    @property
    def normaliser(self) -> Callable[[Tensor, int], Tensor]:
        """A differentiable function of a float64 scale and the dimension: the part that depends on these alone."""

    def kernels(self, tolerance: float) -> triton.Kernels:
        """The Triton kernels."""

    def tolerance(self, loc: Tensor, x: Tensor, dtype: torch.dtype) -> float:
        """How far rounding may take inputs on the boundary of the domain beyond it, in the argument of phi."""

    def blocks(self, call: Any, *, scored: bool = True, wanted: Wanted = (False, False, False)) -> Scores:
        """The scores of a call of either op, block by block, and the gradients that `wanted` asks for."""

    def at_once(self, call: DensityCall) -> Tensor | None:
        """The result of a call that is too small to be cut into blocks, or None for a larger one."""


class LogProb:
    """The op of the log densities of all pairs of a family."""

    parameters: Mapping[str, Any] = {"loc": Tensor, "scale": Tensor, "x": Tensor, "dtype": torch.dtype}

    def __init__(self, density: Density) -> None:
        self.density = density
        name = f"{density.name}_log_prob"
        self.op = Op(
            name,
            prepare=functools.partial(prepare, density, name),
            preference=preference(density),
            core_dims=tensor_dims(density),
        )
        self.best = self.composed(best_form(density.forms))
        add_forms(self.op, density.forms, self.composed, self.settings, functools.partial(compiled_bytes, density))
        self._add(add_custom_op, "chunked", self.forward, self.backward)
        self._add(add_kernels, "triton", self.triton_forward, self.triton_backward, requires=[self._requires_layout])

    def _add(
        self,
        add: Callable[..., None],
        variant: str,
        forward: Callable[..., Tensor],
        backward: Callable[..., Gradients],
        **options: Any,
    ) -> None:
        custom = CustomOp(
            f"{self.op.name}_{variant}",
            parameters=self.parameters,
            split=functools.partial(DensityCall.split, self.density.scale_dims),
            forward=forward,
            backward=backward,
            composite=self.composite,
            empty=self.empty,
            core_dims=tuple(self.op.core_dims.values()),
        )
        add(self.op, custom, variant, **options)

    def _requires_layout(self, call: DensityCall) -> str:
        return triton.Layout.of_pairs(call.plan).obstacle(call.scale, self.density.scale_dims)

    def composed(self, form: Form) -> Callable[..., Tensor]:
        """The op as a form computes it: a function of the tensors of a call and of its `settings`."""
        density = self.density

        def log_prob(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, tolerance: float) -> Tensor:
            return scores(density, form, loc, scale, x, dtype, tolerance).to(dtype)

        return log_prob

    def settings(self, call: DensityCall) -> tuple[Any, ...]:
        return call.dtype, self.density.tolerance(call.loc, call.x, call.dtype)

    def composite(self, call: DensityCall) -> Tensor:
        """The result by differentiable PyTorch operations, in the form with the least memory."""
        return self.best(*call.tensors, *self.settings(call))

    def empty(self, call: DensityCall) -> Tensor:
        """An uninitialised result."""
        return call.plan.empty(call.x, call.dtype)

    def forward(self, call: DensityCall) -> Tensor:
        at_once = self.density.at_once(call)
        return pairs.forward(self.density.blocks(call), self.empty(call)) if at_once is None else at_once

    def backward(self, dout: Tensor, call: DensityCall, wanted: Wanted) -> Gradients:
        return pairs.backward(self.density.blocks(call, scored=False, wanted=wanted), dout)

    def triton_forward(self, call: DensityCall) -> Tensor:
        return triton.forward(self._kernels(call), call.plan, *call.tensors, call.dtype)

    def triton_backward(self, dout: Tensor, call: DensityCall, wanted: Wanted) -> Gradients:
        return triton.backward(self._kernels(call), call.plan, *call.tensors, dout, call.dtype, wanted)

    def _kernels(self, call: DensityCall) -> triton.Kernels:
        return self.density.kernels(self.density.tolerance(call.loc, call.x, call.dtype))


def tensor_dims(density: Arguments) -> dict[str, int]:
    """The tensor arguments, and how many of the last dimensions of each are no batch axes."""
    return {"loc": 1, density.scale_name: density.scale_dims, "x": 1}


def preference(density: Density) -> tuple[str, ...]:
    """The names of the variants, from the best on."""
    everywhere = ("triton", "chunked", "compile", "einsum", "torchscript", "naive")
    return tuple(name for name in everywhere if name != "einsum" or name in density.forms)


def scores(
    density: Density, form: Form, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, tolerance: float
) -> Tensor:
    """All scores as a form computes them, in the dtype of the arithmetic for a result in `dtype`."""
    wide = scale.double()  # one conversion, so that the two parts of its gradient cancel before they are rounded
    return form(loc, wide, density.normaliser(wide, x.shape[-1]), x, arithmetic_dtype(dtype), tolerance)


def compiled_bytes(density: Density, program: inductor.Program, call: Any, *, reduced: bool = False) -> Bytes:
    """What the compiled form of the densities of all pairs allocates, or that of their logsumexp."""
    plan, scale = call.plan, call.scale
    pairs = plan.numel(plan.order)
    if "einsum" not in density.forms:
        return inductor.distances(program, pairs=pairs, scale=scale, reduced=reduced)
    return inductor.mapped_dot_products(
        program,
        call.loc,
        call.x,
        pairs=pairs,
        scales=scale.numel(),
        is_product=min(plan.numel(plan.rows), plan.numel(plan.columns)) > 1,
        is_permuted=plan.is_permuted,
        masked=density.tolerance(call.loc, call.x, call.dtype) < math.inf,
        reduced=reduced,
    )
