"""Replace the log density of an installed package by an op."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor

from effops.ops.densities.power_spherical import power_spherical_log_prob

_originals: dict[type, Callable[..., Tensor]] = {}  # the own `log_prob` of each patched class


def _log_prob(self: Any, value: Tensor) -> Tensor:
    """`effops.power_spherical_log_prob`"""
    return power_spherical_log_prob(self.loc, self.scale, value)


class Patch:
    """A class whose `log_prob` is replaced. The end of a `with` block undoes what its own call did, and no more."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._applied = target not in _originals
        if self._applied:
            _originals[target] = target.log_prob
            target.log_prob = _log_prob

    def undo(self) -> None:
        """Give the class its own `log_prob` back, whichever call replaced it. A second `undo` does nothing."""
        original = _originals.pop(self._target, None)
        if original is not None:
            self._target.log_prob = original

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._applied:
            self.undo()


def patch_power_spherical() -> Patch:
    """Replace `log_prob` of the installed package's `power_spherical.PowerSpherical` by the op, for every instance.

    The patch is in effect from the call on, until `undo()` or the end of a `with` block. A second call changes nothing.
    A `with` block that finds the class already patched leaves it patched. Like the package, the op does not validate
    values.

    Raises:
        ImportError: the package is not installed

    Example:
        >>> import power_spherical
        >>> loc = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
        >>> p = power_spherical.PowerSpherical(loc, torch.full((4,), 10.0))
        >>> with effops.patch_power_spherical():
        ...     p.log_prob(p.sample((1000,))).shape    # without the package's intermediate of (1000, 4, 3)
        torch.Size([1000, 4])
    """
    try:
        from power_spherical import PowerSpherical
    except ImportError as error:
        raise ImportError(
            "patch_power_spherical: the package power_spherical cannot be imported; "
            "pip install power-spherical, or use effops.distributions.PowerSpherical, which does not need it"
        ) from error
    return Patch(PowerSpherical)
