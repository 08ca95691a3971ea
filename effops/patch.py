"""Replace the log density of an installed package by an op."""

from __future__ import annotations

import atexit
import warnings
from types import TracebackType
from typing import Any

from torch import Tensor

from effops.ops.densities.power_spherical import power_spherical_log_prob
from effops.text import tells_wrong_arguments


class _Replacement:
    """The op in place of a class's own `log_prob`. It knows whether it was called since."""

    def __init__(self, target: type) -> None:
        self._target = target
        self._own = vars(target).get("log_prob")  # None where it is inherited
        self._was_called = False

        def log_prob(distribution: Any, value: Tensor) -> Tensor:
            """`effops.power_spherical_log_prob`"""
            self._was_called = True
            return power_spherical_log_prob(distribution.loc, distribution.scale, value)

        target.log_prob = log_prob  # type: ignore[attr-defined]

    def undo(self) -> None:
        if self._own is None:
            del self._target.log_prob  # type: ignore[attr-defined]
        else:
            self._target.log_prob = self._own  # type: ignore[attr-defined]

    def warn_if_unused(self, stacklevel: int) -> None:
        if not self._was_called:
            name = f"{self._target.__module__}.{self._target.__qualname__}"
            warnings.warn(
                f"patch_power_spherical: the patched `log_prob` of {name} was never called, so the patch changed "
                "nothing; where the program has its own copy of the class, give it: patch_power_spherical(that_class)",
                stacklevel=stacklevel + 1,
            )


_replacements: dict[type, _Replacement] = {}  # of each class that is patched


@atexit.register
def _warn_at_exit() -> None:
    for replacement in _replacements.values():
        replacement.warn_if_unused(stacklevel=1)


class Patch:
    """A class whose `log_prob` is replaced. The end of a `with` block undoes what its own call did, and no more."""

    def __init__(self, target: type) -> None:
        self._target = target
        self._applied = target not in _replacements
        if self._applied:
            _replacements[target] = _Replacement(target)

    def undo(self) -> None:
        """Give the class its own `log_prob` back, whichever call replaced it. A second `undo` does nothing.

        It warns if the replacement was never called.
        """
        self._undo(stacklevel=2)

    def _undo(self, stacklevel: int) -> None:
        """The same. `stacklevel` is that of a warning in the caller: 2 names the line that called the caller."""
        replacement = _replacements.pop(self._target, None)
        if replacement is not None:
            replacement.undo()
            replacement.warn_if_unused(stacklevel + 1)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._applied:
            self._undo(stacklevel=2)


@tells_wrong_arguments
def patch_power_spherical(target: type | None = None) -> Patch:
    """Replace `log_prob` of a class, or of the installed package's `power_spherical.PowerSpherical`, by the op.

    Args:
        target: the class, such as a project's own copy of the package's, whose instances have the directions `loc` and
            the concentrations `scale`; None for the class of the installed package

    The patch is in effect from the call on, until `undo()` or the end of a `with` block. A second call changes nothing.
    A `with` block that finds the class already patched leaves it patched. Like the package, the op does not validate
    values. A subclass with a `log_prob` of its own keeps that. A UserWarning says, when the patch is undone or Python
    ends, that no instance has called the op: the program then uses another class, often a copy of the package's.

    Raises:
        ImportError: no class is given, and the package is not installed
        TypeError: `target` is no class, or has no `log_prob`

    Example:
        >>> import power_spherical
        >>> loc = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
        >>> p = power_spherical.PowerSpherical(loc, torch.full((4,), 10.0))
        >>> with effops.patch_power_spherical():
        ...     p.log_prob(p.sample((1000,))).shape    # without the package's intermediate of (1000, 4, 3)
        torch.Size([1000, 4])
    """
    if target is not None:
        if not isinstance(target, type) or not callable(getattr(target, "log_prob", None)):
            got = target.__name__ if isinstance(target, type) else f"an instance of {type(target).__name__}"
            raise TypeError(
                f"patch_power_spherical: `target` must be a class with a method `log_prob`; got {got}; "
                "give the class that the program makes its distributions of"
            )
        return Patch(target)
    try:
        from power_spherical import PowerSpherical
    except ImportError as error:
        raise ImportError(
            "patch_power_spherical: the package power_spherical cannot be imported; "
            "pip install power-spherical, or use effops.distributions.PowerSpherical, which does not need it"
        ) from error
    return Patch(PowerSpherical)
