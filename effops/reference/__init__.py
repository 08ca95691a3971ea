"""A `Reference` for each op: its cases, samples and benchmark sizes, and the float64 bounds of results and gradients.

Tests, the benchmark and `effops doctor` use it, and no call needs it. It may import `ops`, `dispatch`, `numerics` and
`blocks`. From `blocks`, `additive.py` takes functions that cut pairs into pieces: its terms of all pairs would not fit
into memory in float64.

Start with `reference.py`, then read `broadcast_dot.py` as an example. The first question for a reference imports all
modules here. So a new op needs a module of its own and no other line.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from effops.dispatch.op import Op, find_op, ops
from effops.reference.reference import REFERENCES, Reference, worst_error_ratio

__all__ = ["Reference", "error_ratio", "gradient_error_ratio", "reference_of", "tried_ops"]


def reference_of(op: Op | Callable[..., Tensor]) -> Reference:
    """The reference of an op, or of a public function's op."""
    _import_all()
    op = op if isinstance(op, Op) else find_op(op)
    reference = REFERENCES.get(op.name)
    if reference is None:
        raise LookupError(
            f"reference_of: `op` must have a `Reference` in effops/reference/; got {op.name}, which has none; write "
            f"Reference({op.name}, cases=..., sample=..., workload=..., sizes=..., bounds=..., gradient_bounds=...) in "
            "a module there"
        )
    return reference


def tried_ops() -> Mapping[str, Op]:
    """Every op by name, with the arguments given that its reference has before the tensors. All others are tensors."""
    return {name: reference_of(op).op for name, op in ops().items()}


def error_ratio(op: Op, args: tuple[Any, ...], out: Tensor, **options: Any) -> float:
    """The error of a forward result in units of its budget. The result is right if this is at most 1."""
    return reference_of(op).bounds(op.prepare(*args, **options)).error_ratio(out)


def gradient_error_ratio(
    op: Op, args: tuple[Any, ...], dout: Tensor, gradients: tuple[Tensor | None, ...], **options: Any
) -> float:
    """The largest error of the gradients of the arguments in units of their budgets. They are right if it is at most 1.

    A gradient that is not wanted is None. If all are None, the ratio is infinite.
    """
    return worst_error_ratio(reference_of(op).gradient_bounds(op.prepare(*args, **options), dout), gradients)


@functools.cache
def _import_all() -> None:
    """Import every module of the folder, so that its references are made."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
