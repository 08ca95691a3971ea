"""`lint`: names the lines of a program whose intermediates are large.

A hump is a large tensor, or several, between the small ones of which it is made and those that it is reduced to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

import torch
from torch import Tensor

from effops.measure import tensors_of
from effops.programs.capture.assumed_values import AssumedValues
from effops.programs.capture.faked import faked
from effops.programs.capture.observed import Observed
from effops.programs.large import humps
from effops.programs.large.findings import LintReport, report_of
from effops.pytorch.calls import FakeTensor
from effops.text import did_you_mean, parse_bytes

LEAST = "16 MiB"


@overload
def lint(
    fn: Callable[..., Any],
    /,
    *args: Any,
    least: str | float = ...,
    times: float = ...,
    fixes: bool = ...,
    **kwargs: Any,
) -> LintReport: ...
@overload
def lint(*, least: str | float = ..., times: float = ..., fixes: bool = ...) -> AbstractContextManager[LintReport]: ...
def lint(
    fn: Callable[..., Any] | None = None,
    /,
    *args: Any,
    least: str | float = LEAST,
    times: float = humps.LEAST_TIMES,
    fixes: bool = True,
    **kwargs: Any,
) -> LintReport | AbstractContextManager[LintReport]:
    """The lines of a program that make large tensors from small ones, and reduce them to small ones again.

    Nothing is computed: the program runs on fake tensors, which have shapes and no memory, with the real arguments
    left as they are. If the result requires gradients, its backward pass runs too. Without `fn`, it is a context:
    what runs inside is looked at, on fake tensors, and the report is filled when the block ends.

    Args:
        fn: called with `args` and `kwargs`, which may be real or fake tensors, modules and anything else
        least: the least bytes of a tensor that is named, as "16 MiB" or a number
        times: it has at least so many times the bytes of what goes in and of what comes out; a product that a loss
            alone reads, as the logits of a language model, is named from 4 times on
        fixes: look for what to write instead; the statements of a finding are then run on small random tensors, to see
            that a fix gives their results and gradients

    Returns:
        a `LintReport`, whose `str()` names each line, its bytes now and after, and what is kept for backward

    Raises:
        CannotFollow: a branch or a shape depends on values; names the line
        ValueError: `least` is no amount of bytes, or `times` is not above 1
        TypeError: `fn` is no function

    Example:
        >>> a, b = torch.randn(4000, 64), torch.randn(4000, 64)
        >>> report = effops.lint(lambda: (a[:, None] * b).sum(-1))
        >>> report.findings[0].now_bytes == 4 * 4000 * 4000 * 64
        True
    """
    least_bytes = parse_bytes(least, "lint: `least`")
    if isinstance(times, bool) or not isinstance(times, (int, float)):
        raise TypeError(f"lint: `times` must be a number; got {type(times).__name__} {times!r}; give 8, as by default")
    if not times > 1:
        raise ValueError(f"lint: `times` must be above 1; got {times}; give 8, as by default")
    if fn is not None and not callable(fn):
        remedy = "give the function and its arguments apart, as lint(f, x)"
        if isinstance(fn, str):
            remedy = f"for a script, run `effops lint {fn}` in a shell"
        raise TypeError(f"lint: `fn` must be a function; got {type(fn).__name__}; {remedy}")
    if fn is None and (args or kwargs):
        known = ("least", "times", "fixes")
        given = next(iter(kwargs), "")
        raise TypeError(
            f"lint: without a function it takes {', '.join(known)}; got {f'`{given}`' if given else 'None'}; "
            f"give the function first{did_you_mean(given, known)}"
        )
    if fn is None:
        return _block(least_bytes, times, fixes)
    observed = Observed()
    with faked("lint", observed, probe=False) as values:
        outputs = [one for one in tensors_of(fn(*args, **kwargs)) if isinstance(one, FakeTensor)]
        returned = [observed.storage_of(one) for one in outputs]
        assert observed.recorder is not None
        last_forward_tick = observed.recorder.tick
        _differentiate(outputs)
        del outputs
    found = humps.find(observed, returned, last_forward_tick, least_bytes, times)
    return report_of(observed, values.assumed, found, with_fixes=fixes)


@contextmanager
def _block(least: float, times: float, fixes: bool) -> Iterator[LintReport]:
    observed, report = Observed(), LintReport(has_ended=False)
    with faked("lint", observed, probe=False) as values:
        yield report
    report.take_over(report_of_block(observed, values, least, times, fixes=fixes))


def report_of_block(
    observed: Observed, values: AssumedValues, least: float, times: float, *, fixes: bool = True
) -> LintReport:
    """The report of what ran in a block, of which nobody knows what it returns: what is alive and was never read."""
    assert observed.recorder is not None
    last_tick = last_forward_tick = observed.recorder.tick
    if observed.backward_begins is not None:
        last_forward_tick = observed.backward_begins - 1
    returned = [one for one in observed.storages.values() if one.allocation.is_there(last_tick) and not one.readers]
    found = humps.find(observed, returned, last_forward_tick, least, times)
    return report_of(observed, values.assumed, found, with_fixes=fixes)


def _differentiate(outputs: Sequence[Tensor]) -> None:
    """Run the backward pass of the results that require gradients."""
    wanted = [one for one in outputs if one.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(one) for one in wanted])
