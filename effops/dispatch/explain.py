"""Why a variant is chosen, why the others are not, and what each would need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from effops.dispatch.choice import choose
from effops.dispatch.op import find_op
from effops.prediction.inside import caution
from effops.text import aligned, format_bytes


@dataclass(frozen=True)
class VariantReport:
    """What `explain` says of one variant.

    `reason` is empty where it is supported. Bytes and operations are None where they cannot be told. `unknown` names an
    operator that may allocate more inside than is predicted, and is empty if there is none.
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
    """The choice for one call and, of every variant, whether and why it can or cannot run and what it would need."""

    op: str
    chosen: str
    variants: Mapping[str, VariantReport]

    def __str__(self) -> str:
        header = ("variant", "", "output", "saved", "temporary", "operations", "why not")
        rows = [
            (
                name,
                "chosen" if name == self.chosen else "",
                _known(format_bytes, report.output_bytes),
                _known(format_bytes, report.saved_bytes),
                _known(format_bytes, report.temporary_bytes) + (" or more" if report.unknown else ""),
                _known("{:.3g}".format, report.flops),
                report.reason,
            )
            for name, report in self.variants.items()
        ]
        title = f"{self.op}: {self.chosen} (bytes predicted, beyond the inputs)"
        unknown = sorted({report.unknown for report in self.variants.values() if report.unknown})
        return "\n".join(filter(None, (title, aligned([header, *rows], left=len(header)), caution(unknown))))


def explain(function: Callable[..., Any] | str, *args: Any, variant: str | None = None, **kwargs: Any) -> Explanation:
    """Which variant a call would run, why every other would not, and what each would need; nothing is computed.

    Takes the arguments of the op and never allocates its result, so it may be asked about sizes that do not fit:
    give expanded or meta tensors. Raises what the call itself would raise for bad arguments or an unusable `variant`.

    >>> print(effops.explain(effops.power_spherical_log_prob, loc, scale, x))    # doctest: +ELLIPSIS
    power_spherical_log_prob: chunked (bytes predicted, beyond the inputs)
    ...
    """
    op = find_op(function)
    call = op.prepare(*args, **kwargs)
    chosen = choose(op, call, variant)

    def reports() -> Iterator[tuple[str, VariantReport]]:
        for name, candidate in op.variants.items():
            reason = candidate.obstacle(call)
            yield name, VariantReport(not reason, reason, *(candidate.cost(call) or ()))

    return Explanation(op.name, chosen.name, MappingProxyType(dict(reports())))


def _known(text: Callable[[float], str], number: float | None) -> str:
    return "-" if number is None else text(number)
