"""Why PyTorch's front end cannot capture a function, in words for those who wrote the function."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from effops.prediction.allocations import fake_mode
from effops.pytorch.calls import tree_map_only
from effops.pytorch.prediction import _disable_current_modes

READ = "numbers of a tensor are not there while it is captured"
OUTSIDE = "put only what computes with tensors into the function"
# The function's own error, which the front end meets on the way: it tells that in words of its own.
OWN_ERRORS = (
    "Observed exception",
    "RuntimeError when making fake tensor call",
    "Dynamo failed to run FX node with fake tensors",
    "TypeError when making fake tensor call",
    "failed to find name",
    "Unhandled tensor method",
    "Missing attribute",
    "Attribute",
)
BRANCHES = "Data-dependent branching", "Data-dependent assertion", "Could not guard on data-dependent expression"
# What the function calls that is no computation, as the front end names it.
CALLED = (
    r"builtin operator `([\w.]+)`",
    r"Python builtin `([\w.]+)`",
    r"qualname: ([\w.]+),",
    r"method: <Logger [^>]*>\.(\w+)",
)


class WhyNot(NamedTuple):
    """Why a function cannot be captured, and what to do."""

    reason: str
    remedy: str


def why_not_captured(
    error: Exception, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> WhyNot:
    """What stops the capture of a call. Where it is an error of the function itself, that is told."""
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if first.startswith(OWN_ERRORS):
        own = _own_error(function, args, kwargs)
        if own is not None:
            message = f"{type(own).__name__}: {own}".replace("FakeTensor", "Tensor")
            return WhyNot(message, "the function itself raises that: mend it, or give it other arguments")
    if any(one in text for one in BRANCHES):
        return WhyNot(
            f"a branch must not depend on values of tensors: {READ}",
            "write torch.where(condition, one, other) in place of `if`, or branch outside of the function",
        )
    if "tolist()" in first:
        return WhyNot(f"a tensor must not become a list: {READ}", "do that outside of the function")
    if first.startswith("Attempt to trace generator"):
        return WhyNot("the function must return its results; got a generator", "return them in a list")
    called = next((found for found in (re.search(one, text) for one in CALLED) if found), None)
    if called:
        name = called[1].removeprefix("_")
        return WhyNot(
            f"the function must only compute with tensors; it calls `{name}`",
            "call it outside of the function, as on what that returns",
        )
    return WhyNot(f"the function cannot be captured: {first}", OUTSIDE)


def _own_error(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """What a function raises, for tensors like these without values: the sizes in it are those of the call."""
    mode = fake_mode(allow_non_fake_inputs=True)
    with _disable_current_modes():
        fakes, named = tree_map_only(Tensor, mode.from_tensor, (tuple(args), dict(kwargs)))
        try:
            with mode:
                function(*fakes, **named)
        except Exception as error:
            return error
    return None
