"""Make the variants of an op that consist of PyTorch operations: naive, einsum, torchscript and compile."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from effops.dispatch.custom_op import requires_grad
from effops.dispatch.jit import compile_by_signature, script
from effops.dispatch.op import Cost, Op, Requirement, Variant
from effops.dispatch.requirements import requires_inductor, requires_torchscript
from effops.prediction.allocations import INDUCTOR, Bytes
from effops.prediction.inductor import Program
from effops.prediction.inside import predict_bytes


def add_forms(
    op: Op,
    forms: Mapping[str, Callable[..., Tensor]],
    composed: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
    settings: Callable[[Any], tuple[Any, ...]],
    compiled_bytes: Callable[[Program, Any], Bytes],
    operations: Callable[[Any], int] = lambda call: call.operations,
    compiled_form: Callable[..., Tensor] | None = None,
) -> None:
    """Add each form as a variant. The last form is the best: add it scripted and compiled too.

    `composed(form)` computes the op by a form. It takes the tensors of a call, and then its `settings`.
    `compiled_bytes(program, call)` predicts what the compiled form allocates; `operations`, what any form computes.
    `compiled_form` is what is compiled, if not the best form: a function with the arguments of `composed(form)`.
    """

    def add(
        name: str,
        function: Callable[..., Tensor],
        *requires: Requirement,
        allocated: Callable[[Any], Bytes] | None = None,
    ) -> None:
        def computed(call: Any) -> Tensor:
            return function(*call.tensors, *settings(call))

        def predicted(call: Any) -> Bytes:
            def finished(*tensors: Tensor) -> Tensor:
                return op.finish(call, function(*tensors, *settings(call)))

            return predict_bytes(finished, *call.tensors, made=call.made)

        def cost(call: Any) -> Cost:
            return Cost.of((allocated or predicted)(call), operations(call))

        statistics = computed if op.logsumexp else None
        op.add(Variant(name, lambda call: op.finish(call, computed(call)), cost, requires, statistics=statistics))

    def compiled(call: Any) -> Bytes:
        program = Program(math.prod(call.shape), call.dtype, call.arithmetic, requires_grad(call.tensors))
        # Which operations it fuses depends on sizes and layouts. The formulas fit some, and come near the others.
        return compiled_bytes(program, call)._replace(unknown=INDUCTOR)

    for name, form in forms.items():
        add(name, composed(form))
    best = best_form(forms)
    add("torchscript", composed(script(best)), requires_torchscript)
    add("compile", compile_by_signature(compiled_form or composed(best)), requires_inductor, allocated=compiled)


def best_form(forms: Mapping[str, Callable[..., Tensor]]) -> Callable[..., Tensor]:
    """The form with the least memory."""
    return list(forms.values())[-1]
