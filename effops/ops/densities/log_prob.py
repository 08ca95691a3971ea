"""Make the op of the log densities of all pairs of a family."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from effops.blocks import limits, pairs
from effops.dispatch.call import Shortcut
from effops.dispatch.custom_op import CustomOp, Gradients
from effops.dispatch.forms import add_forms, best_form
from effops.dispatch.op import Op
from effops.dispatch.registration import add_custom_op, add_kernels, add_native
from effops.numerics.precision import arithmetic_dtype
from effops.numerics.shapes import is_certain, may_be_open
from effops.ops.densities import cpp, triton
from effops.ops.densities.density import Density, DensityCall, Form, Wanted, plan_of, prepare
from effops.ops.densities.layout import Layout
from effops.prediction import inductor
from effops.prediction.allocations import Bytes


class LogProb:
    """The op of the log densities of all pairs of a family."""

    def __init__(self, density: Density) -> None:
        self.density = density
        name = f"{density.name}_log_prob"
        self.op = Op(
            name,
            prepare=functools.partial(prepare, density, name),
            preference=preference(density),
            core_dims=tensor_dims(density),
            conditions=density.conditions,
        )
        add_forms(self.op, density.forms, self.composed, self.settings, functools.partial(compiled_bytes, density))
        best = self.composed(best_form(density.forms))
        custom = functools.partial(
            CustomOp,
            parameters={"loc": Tensor, "scale": Tensor, "x": Tensor, "dtype": torch.dtype},
            split=self.split,
            composite=lambda call: best(*call.tensors, *self.settings(call)),
            empty=self.empty,
            core_dims=tuple(self.op.core_dims.values()),
        )
        chunked = custom(f"{name}_chunked", forward=self.forward, backward=self.backward)
        add_custom_op(self.op, chunked, "chunked")
        self.op.shortcut = Shortcut(self.op, "chunked", chunked, density.small)
        kernels = custom(f"{name}_triton", forward=self.triton_forward, backward=self.triton_backward)
        add_kernels(self.op, kernels, requires=[self.requires_layout])
        native = custom(
            f"{name}_cpp",
            forward=self.native_forward,
            backward=self.native_backward,
            by_example=lambda arguments: True,  # in a batch scales may vary as `requires_native` rules out
        )
        add_native(self.op, native, requires=[self.requires_native], automatic=self.prefers_native)

    def split(self, arguments: Sequence[Any]) -> DensityCall:
        """The call with these arguments."""
        loc, scale, x, dtype = arguments
        return DensityCall(loc, scale, x, plan_of(self.density, loc, scale, x), dtype)

    def requires_layout(self, call: DensityCall) -> str:
        return Layout.of_pairs(call.plan).obstacle(call.scale, self.density.scale_dims)

    def requires_native(self, call: DensityCall) -> str:
        return requires_native(call, self.density.scale_dims)

    def prefers_native(self, call: DensityCall) -> bool:
        """Whether the C++ kernels are the faster ones. A small call takes the short way, which is that of `chunked`."""
        is_open = may_be_open(*call.plan.shape, call.dimension)
        return prefers_native(call) and (is_open or self.density.small(call) is None)

    def composed(self, form: Form) -> Callable[..., Tensor]:
        """The op as a form computes it: a function of the tensors of a call and of its `settings`."""
        density = self.density

        def log_prob(loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, tolerance: float) -> Tensor:
            return scores(density, form, loc, scale, x, dtype, tolerance).to(dtype)

        return log_prob

    def settings(self, call: DensityCall) -> tuple[Any, ...]:
        return call.dtype, self.density.tolerance(call)

    def empty(self, call: DensityCall) -> Tensor:
        """An uninitialised result."""
        return call.plan.empty(call.x, call.dtype)

    def forward(self, call: DensityCall) -> Tensor:
        small = self.density.small(call)
        if small is not None:
            return small.forward(call.loc, call.scale, call.x, call.kept)
        return pairs.forward(self.density.blocks(call), self.empty(call))

    def backward(self, dout: Tensor, call: DensityCall, wanted: Wanted) -> Gradients:
        small = self.density.small(call)
        if small is not None:
            return small.gradients(call.tensors, dout, wanted)
        return pairs.backward(self.density.blocks(call, scored=False, wanted=wanted), dout)

    def triton_forward(self, call: DensityCall) -> Tensor:
        return triton.forward(self.density.kernels(call), call)

    def triton_backward(self, dout: Tensor, call: DensityCall, wanted: Wanted) -> Gradients:
        return triton.backward(self.density.kernels(call), call, dout, wanted)

    def native_forward(self, call: DensityCall) -> Tensor:
        return cpp.forward(self.density.native(call), call)

    def native_backward(self, dout: Tensor, call: DensityCall, wanted: Wanted) -> Gradients:
        return cpp.backward(self.density.native(call), call, dout, wanted)


def requires_native(call: DensityCall, scale_dims: int = 0) -> str:
    """Whether the C++ kernels take all pairs of a call."""
    return cpp.obstacle(Layout.of_pairs(call.plan), call.x, call.loc, scale=(call.scale, scale_dims))


def prefers_native(call: DensityCall) -> bool:
    """Whether so many rows of x and of loc meet each other that the C++ kernels are the faster ones."""
    return all(is_certain(call.plan.numel(axes) >= limits.LEAST_SIDE) for axes in (call.plan.rows, call.plan.columns))


def tensor_dims(density: Density) -> dict[str, int]:
    """The tensor arguments, and how many of the last dimensions of each are no batch axes."""
    return {"loc": 1, density.scale_name: density.scale_dims, "x": 1}


def preference(density: Density) -> tuple[str, ...]:
    """The names of the variants, from the best on."""
    everywhere = ("triton", "cpp", "chunked", "compile", "einsum", "torchscript", "naive")
    return tuple(name for name in everywhere if name != "einsum" or name in density.forms)


def scores(
    density: Density, form: Form, loc: Tensor, scale: Tensor, x: Tensor, dtype: torch.dtype, tolerance: float
) -> Tensor:
    """All scores as a form computes them, in the dtype of the arithmetic for a result in `dtype`."""
    arithmetic = arithmetic_dtype(dtype)
    # One conversion, so that the two parts of its gradient cancel before they are rounded. A scale of coordinates is
    # converted to no wider a dtype than needed, since a compiled form converts it again for every pair.
    scale = scale.to(torch.promote_types(scale.dtype, arithmetic)) if density.scale_dims else scale.double()
    return form(loc, scale, density.normaliser(scale.double(), x.shape[-1]), x, arithmetic, tolerance)


def compiled_bytes(density: Density, program: inductor.Program, call: DensityCall, *, reduced: bool = False) -> Bytes:
    """What the compiled form of the densities of all pairs allocates, or that of their logsumexp."""
    plan, scale = call.plan, call.scale
    pairs = plan.numel(plan.order)
    if "einsum" not in density.forms:
        return inductor.distances(
            program, pairs=pairs, scale=scale, bytes_per_scale=density.compiled_bytes_per_scale, reduced=reduced
        )
    return inductor.mapped_dot_products(
        program,
        call.loc,
        call.x,
        pairs=pairs,
        scales=scale.numel(),
        bytes_per_scale=density.compiled_bytes_per_scale,
        is_product=min(plan.numel(plan.rows), plan.numel(plan.columns)) > 1,
        masked=density.tolerance(call) < math.inf,
        reduced=reduced,
    )
