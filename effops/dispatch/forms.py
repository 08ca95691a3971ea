"""The variants of an op that are made of PyTorch operations: naive, einsum, torchscript and compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from effops.dispatch.jit import compile_by_signature, script
from effops.dispatch.op import Cost, Op, Requirement
from effops.dispatch.requirements import requires_inductor, requires_torchscript
from effops.prediction.allocations import predict_bytes


def add_forms(
    op: Op,
    forms: Mapping[str, Callable[..., Tensor]],
    composed: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
    settings: Callable[[Any], tuple[Any, ...]],
    compiled_cost: Callable[[Any], Cost],
    operations: Callable[[Any], int] = lambda call: call.operations,
) -> None:
    """Add each form as a variant, and the last one, which is the best, scripted and compiled.

    `composed(form)` is the op by a form: a function of the tensors of a call, and then of its `settings`.
    """

    def add(name: str, function: Callable[..., Tensor], requires: Sequence[Requirement] = (), cost: Any = None) -> None:
        def computed(call: Any) -> Tensor:
            return function(*call.tensors, *settings(call))

        def predicted(call: Any) -> Cost:
            def of_tensors(*tensors: Tensor) -> Tensor:
                return op.finish(call, function(*tensors, *settings(call)))

            return Cost(*predict_bytes(of_tensors, *call.tensors), operations(call))

        statistics = None if op.logsumexp is None else computed
        register = op.variant(name, cost=cost or predicted, requires=requires, statistics=statistics)
        register(lambda call: op.finish(call, computed(call)))

    for name, form in forms.items():
        add(name, composed(form))
    best = best_form(forms)
    add("torchscript", composed(script(best)), [requires_torchscript])
    add("compile", compile_by_signature(composed(best)), [requires_inductor], compiled_cost)


def best_form(forms: Mapping[str, Callable[..., Tensor]]) -> Callable[..., Tensor]:
    """The form with the least memory."""
    return list(forms.values())[-1]
