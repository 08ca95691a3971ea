"""Call an op: validate its arguments, choose a variant, and run it."""

import sys
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from effops.dispatch.choice import choose, current_variant
from effops.dispatch.op import Op
from effops.dispatch.record import add_to_records, is_recorded
from effops.dispatch.validation import check_values, is_validated
from effops.numerics.layout import without_negation
from effops.numerics.precision import without_autocast


def call(op: Op, *args: Any, variant: str | None = None, **kwargs: Any) -> Tensor:
    """The result of an op for the arguments of its public function."""
    if variant is None and op.shortcut is not None and not is_compiling() and not _is_watched():
        result = op.shortcut(*args, **kwargs)
        if result is not None:
            return result
    if _any_dtensor(args):
        from effops.dispatch.sharding import sharded_call

        return sharded_call(op, args, kwargs, variant)
    operands = args if is_compiling() else map(without_negation, args)  # traced code cannot ask, nor can PyTorch's
    validated = op.prepare(*operands, **kwargs)
    check_values(op.name, op.conditions, validated)
    chosen = choose(op, validated, variant)
    add_to_records(op, chosen, validated, args)
    with without_autocast(validated.device):
        return chosen.run(validated)


def _is_watched() -> bool:
    """Whether a context that the user has entered concerns every call."""
    return is_validated() or is_recorded() or current_variant() is not None


def _any_dtensor(args: tuple[Any, ...]) -> bool:
    # The import takes a second. A module that nobody has imported has made no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and module.DTensor in map(type, args)
