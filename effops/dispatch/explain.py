"""Explain which variant a call takes, why it cannot take others, and what each would need."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from effops.dispatch.choice import choose
from effops.dispatch.devices import RUN_ON, never_run_on
from effops.dispatch.op import find_op
from effops.numerics.precision import without_autocast
from effops.prediction.inside import caution, told_temporary_bytes
from effops.text import aligned, format_bytes, why_not_bound


@dataclass(frozen=True)
class VariantReport:
    """What `explain` says of one variant.

    `reason` is empty if the variant is supported. Bytes and operations are None where nothing predicts them. `unknown`
    names an operator that may allocate more inside than is predicted, or "TorchInductor", whose bytes are a guess. It
    is empty if there is none.
    """

    supported: bool
    reason: str
    output_bytes: int | None = None
    saved_bytes: int | None = None
    temporary_bytes: int | None = None
    flops: int | None = None
    unknown: str = ""


@dataclass(frozen=True)
class Explanation:
    """The choice for one call, and a report for every variant: whether it can run, why not, and what it would need.

    `never_run_on` is the kind of the call's device ("a CUDA GPU") if the chosen variant was never run on one. It is
    empty if it was. `plan` tells how the chosen variant runs the call, as what einsum cuts; it is empty if nothing is
    to be told.
    """

    op: str
    chosen: str
    variants: Mapping[str, VariantReport]
    never_run_on: str = ""
    plan: str = ""

    def __str__(self) -> str:
        header = ("variant", "", "output", "saved", "temporary", "operations", "why not")
        rows = [
            (
                name,
                "chosen" if name == self.chosen else "",
                _known(format_bytes, report.output_bytes),
                _known(format_bytes, report.saved_bytes),
                _known(partial(told_temporary_bytes, unknown=report.unknown), report.temporary_bytes),
                _known("{:.3g}".format, report.flops),
                report.reason,
            )
            for name, report in self.variants.items()
        ]
        title = f"{self.op}: {self.chosen} (bytes predicted, beyond the inputs)"
        unknown = sorted({report.unknown for report in self.variants.values() if report.unknown})
        table = aligned([header, *rows], left=len(header))
        return "\n".join(filter(None, (title, table, self.plan, caution(unknown), self._untried())))

    def _untried(self) -> str:
        """A line for a choice that was never run on such a device; empty if it was."""
        if not self.never_run_on:
            return ""
        checked = f"`effops doctor --full --op {self.op}` checks and times it on yours"
        remedy = checked if self.never_run_on in RUN_ON else "compare it with the same call on a CPU"
        return f"{self.chosen} was never run on {self.never_run_on}; {remedy}"


def explain(function: Callable[..., Any] | str, *args: Any, variant: str | None = None, **kwargs: Any) -> Any:
    """Explain which variant a call would run, why others cannot run, and what each would need; nothing is computed.

    It takes the arguments of the op and never allocates the result. So it can be asked about sizes that do not fit
    into memory: give expanded or meta tensors. For bad arguments or an unusable `variant` it raises what the call
    itself would raise.

    >>> loc, x = torch.eye(3), torch.eye(3).unsqueeze(1)
    >>> print(effops.explain(effops.power_spherical_log_prob, loc, 2.0, x, variant="einsum"))    # doctest: +ELLIPSIS
    power_spherical_log_prob: einsum (bytes predicted, beyond the inputs)
    ...
    """
    if (explained := getattr(function, "explained", None)) is not None:  # `tiled` has made it: it has no variants
        return explained(*args, **kwargs)
    op = find_op(function, "explain")
    assert op.function is not None
    if problem := why_not_bound(op.function, args, kwargs):
        raise TypeError(f"{op.name}: {problem}; give explain the function, and then its arguments")
    given = inspect.signature(op.function).bind(*args, **kwargs)
    given.apply_defaults()
    options = {name: value for name, value in given.kwargs.items() if name != "variant"}
    call = op.prepare(*given.args, **options)
    call.note_arguments(given.args)
    chosen = choose(op, call, variant)

    def reports() -> Iterator[tuple[str, VariantReport]]:
        for name, candidate in op.variants.items():
            reason = candidate.obstacle(call)
            yield name, VariantReport(not reason, reason, *(candidate.cost(call) or ()))

    with without_autocast(call.device):  # as when the call runs
        found = dict(reports())
        plan = chosen.plan(call)
    return Explanation(op.name, chosen.name, found, never_run_on(chosen.name, call.device), plan)


def _known(text: Callable[[float], str], number: float | None) -> str:
    return "-" if number is None else text(number)
