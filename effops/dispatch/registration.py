"""Register operators as variants of an op, with predictions of what they allocate."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from effops.dispatch.custom_op import CustomOp, is_subclassed, requires_grad
from effops.dispatch.op import Call, Cost, Op, Requirement, Variant, anywhere, untold
from effops.dispatch.requirements import kernels_error, library_error, on_cuda, requires_cpp, requires_triton
from effops.prediction.inside import predict_bytes


def add_custom_op(
    op: Op,
    custom: CustomOp,
    variant: str,
    *,
    run: Callable[[Any], Tensor] | None = None,
    cost: Callable[[Any], Cost | None] | None = None,
    requires: Sequence[Requirement] = (),
    automatic: Callable[[Any], bool] = anywhere,
    plan: Callable[[Any], str] = untold,
) -> None:
    """Register an operator as a variant of an op.

    `run` computes the result of a call, and `cost` predicts what it needs. Without them, both come from the operator.
    `plan` is that of `Variant`.
    """
    cost = cost or functools.partial(allocated, op, custom)
    statistics = custom if op.logsumexp else None
    op.add(Variant(variant, run or custom, cost, requires, automatic, statistics, plan))


def add_kernels(
    op: Op,
    custom: CustomOp,
    variant: str = "triton",
    *,
    cost: Callable[[Any], Cost] | None = None,
    requires: Sequence[Requirement] = (),
    **options: Any,
) -> None:
    """Register an operator made of Triton kernels, as `add_custom_op` does. The automatic choice takes it on CUDA.

    A launch on fake tensors allocates its workspace and does not run. Nothing is predicted where the kernels cannot be
    imported, or do not take operands of this layout.
    """
    predict = _unless(kernels_error, requires, cost or functools.partial(allocated, op, custom))
    requirements = [requires_triton, *requires]
    add_custom_op(op, custom, variant, cost=predict, requires=requirements, automatic=on_cuda, **options)


def add_native(
    op: Op,
    custom: CustomOp,
    variant: str = "cpp",
    *,
    cost: Callable[[Any], Cost] | None = None,
    requires: Sequence[Requirement] = (),
    **options: Any,
) -> None:
    """Register an operator made of C++ kernels, as `add_kernels` does. The automatic choice takes it on a CPU."""
    predict = _unless(library_error, requires, cost or functools.partial(allocated, op, custom))
    add_custom_op(op, custom, variant, cost=predict, requires=[requires_cpp, *requires], **options)


def _unless(
    error: Callable[[], str], requires: Sequence[Requirement], predict: Callable[[Any], Cost]
) -> Callable[[Any], Cost | None]:
    """What a call needs, where kernels can be run and take it."""

    def cost(call: Any) -> Cost | None:
        return None if error() or any(requirement(call) for requirement in requires) else predict(call)

    return cost


def allocated(op: Op, custom: CustomOp, call: Call) -> Cost:
    """What a call of an operator allocates, and what it keeps for backward."""
    held: list[Tensor] = []
    keeps = requires_grad(call.tensors)

    def forward(fake_call: Any) -> Tensor:
        result = custom.forward(fake_call)
        if keeps:
            held.extend([*fake_call.tensors, *(result,) * custom.saves_result])
        return op.finish(fake_call, result)

    keeps_graph = custom.native(call) and not any(map(is_subclassed, call.tensors))
    return predicted(custom.split, call, forward if keeps_graph else torch.no_grad()(forward))


def predicted(split: Callable[[Sequence[Any]], Any], call: Call, function: Callable[[Any], Tensor]) -> Cost:
    """What a function of a call allocates, found by running it on fake tensors."""

    def of_tensors(*tensors: Tensor) -> Tensor:
        return function(split((*tensors, *call.arguments[len(tensors) :])))

    return Cost.of(predict_bytes(of_tensors, *call.tensors, made=call.made), call.operations)
