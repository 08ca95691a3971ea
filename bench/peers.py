"""Other implementations that the benchmark stands effops's ops against: by op, by the name of their row."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Peer:
    """A function with an op's arguments.

    Attributes:
        function: takes the arguments of the op
        module: what must be importable for it
        always: whether it is shown without being asked for
        memory_like: the variant of the op whose predicted memory stands for that of the peer
        exact: the function in float64, in as little memory as the inputs in float64 and the result need; None if
            the peer is no reference for values
    """

    function: Callable[..., Tensor]
    module: str
    always: bool = False
    memory_like: str = "naive"
    exact: Callable[..., Tensor] | None = None

    @property
    def obstacle(self) -> str:
        """Why the peer cannot run; empty if it can."""
        return "" if importlib.util.find_spec(self.module) else f"the Python package {self.module} is not installed"


def power_spherical(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """The log density of the power_spherical package, as its users write it."""
    from power_spherical import PowerSpherical

    log_prob: Tensor = PowerSpherical(loc, scale).log_prob(x)
    return log_prob


def power_spherical_exact(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """The same in float64, for one index of the leading axis of `x` after the other: an axis of the result."""
    loc, scale, x = loc.double(), scale.double(), x.double()
    if x.dim() <= max(loc.dim(), scale.dim() + 1) or not len(x):
        return power_spherical(loc, scale, x)
    return torch.stack([power_spherical(loc, scale, part) for part in x])


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def power_spherical_compiled(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """torch.compile of the package's log density."""
    return _compiled(power_spherical)(loc, scale, x)


PEERS: Mapping[str, Mapping[str, Peer]] = {
    "power_spherical_log_prob": {
        "power_spherical": Peer(power_spherical, "power_spherical", always=True, exact=power_spherical_exact),
        "power_spherical_compiled": Peer(power_spherical_compiled, "power_spherical"),
    },
}
