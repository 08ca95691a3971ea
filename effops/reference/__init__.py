"""What is right: cases, samples, benchmark sizes, and the float64 bounds of results and gradients: a `Reference` an op.

For tests, the benchmark and `effops doctor`; no call needs it. It may import `ops`, `dispatch`, `numerics`, and
`blocks`, from which `additive.py` takes pieces: its terms of all pairs would not fit into memory in float64.

Start with `reference.py`, then `broadcast_dot.py` for an example. All modules here are imported when a reference is
first asked for, so that a new op needs its own module and no other line.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from torch import Tensor

from effops.dispatch.op import Op, find_op
from effops.reference.bounds import worst_error_ratio
from effops.reference.reference import REFERENCES, Reference

__all__ = ["Reference", "error_ratio", "gradient_error_ratio", "reference_of"]


def reference_of(op: Op | Callable[..., Tensor]) -> Reference:
    """The reference of an op, or of a public function."""
    _import_all()
    op = op if isinstance(op, Op) else find_op(op)
    reference = REFERENCES.get(op.function)
    if reference is None:
        raise LookupError(
            f"reference_of: `op` must have a `Reference` in effops/reference/; got {op.name}, which has none; write "
            f"Reference({op.name}, cases=..., sample=..., workload=..., sizes=..., bounds=..., gradient_bounds=...) in "
            "a module there"
        )
    return reference


def error_ratio(op: Op, args: tuple[Any, ...], out: Tensor, **options: Any) -> float:
    """Error of a forward result in units of its budget: right if at most 1."""
    return reference_of(op).bounds(op.prepare(*args, **options)).error_ratio(out)


def gradient_error_ratio(
    op: Op, args: tuple[Any, ...], dout: Tensor, gradients: tuple[Tensor | None, ...], **options: Any
) -> float:
    """Largest error of the gradients of the arguments in units of their budgets: right if at most 1.

    A gradient that was not asked for is None; without any, there is nothing right: infinite.
    """
    return worst_error_ratio(reference_of(op).gradient_bounds(op.prepare(*args, **options), dout), gradients)


@functools.cache
def _import_all() -> None:
    """Import every module of the folder, so that its references are made."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
