"""What a distribution says of arguments that it does not take: function, argument, expected, got, remedy."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributions import Distribution

from effops.dispatch.arguments import check_operand, reshaped
from effops.distributions.constraints import unit_vector
from effops.numerics.directions import lengths
from effops.numerics.shapes import do_broadcast
from effops.pytorch.calls import _size
from effops.text import tells_wrong_arguments


class TellingDistribution(Distribution):
    """A distribution of vectors that tells in the words of effops what PyTorch's checks refuse."""

    _value_name: ClassVar[str] = "value"  # the argument of `log_prob`

    @tells_wrong_arguments
    def expand(self, batch_shape: _size, _instance: Any = None) -> Any:
        function = f"{type(self).__name__}.expand"
        shape = checked_sizes(function, "batch_shape", batch_shape)
        try:
            return self._expand_into(self.__new__(type(self)) if _instance is None else _instance, shape)
        except (RuntimeError, ValueError):
            raise ValueError(
                f"{function}: `batch_shape` must be one to which {tuple(self._batch_shape)} expands; got "
                f"{tuple(shape)}; put new axes first"
            ) from None

    def _expand_into(self, new: Any, shape: torch.Size) -> Any:
        """A new distribution, made the same as this one but of that batch shape."""
        raise NotImplementedError

    @tells_wrong_arguments
    def sample(self, sample_shape: _size = ()) -> Tensor:
        return super().sample(sample_shape)

    def cdf(self, value: Tensor) -> NoReturn:
        self._is_of_vectors("cdf", "scalars", "count the draws of sample((1000,)) that are in a region instead")

    def icdf(self, value: Tensor) -> NoReturn:
        self._is_of_vectors("icdf", "scalars", "take torch.quantile of a number of each draw, as its first coordinate")

    def enumerate_support(self, expand: bool = True) -> NoReturn:
        self._is_of_vectors("enumerate_support", "finitely many values", "take draws, as of sample((1000,))")

    def _is_of_vectors(self, method: str, expected: str, remedy: str) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}.{method}: only distributions of {expected} have one; got one of vectors of "
            f"{self._event_shape[0]} coordinates; {remedy}"
        )

    def _extended_shape(self, sample_shape: _size = ()) -> torch.Size:
        return super()._extended_shape(checked_sizes(type(self).__name__, "sample_shape", sample_shape))

    def _validate_sample(self, value: Tensor) -> None:
        function = f"{type(self).__name__}.log_prob"
        try:
            super()._validate_sample(value)
        except ValueError as error:
            check_operand(function, self._value_name, value)
            problem = self._shape_problem(value) or self._support_problem(value)
            raise ValueError(f"{function}: `{self._value_name}` {problem}" if problem else str(error)) from None
        except RuntimeError:  # of what the support is asked of other dtypes
            check_operand(function, self._value_name, value)
            raise

    def _shape_problem(self, value: Tensor) -> str:
        event, name, shape = self._event_shape, self._value_name, tuple(value.shape)
        if shape[-1:] != event:
            remedy = reshaped(name, shape, lambda other: tuple(other[-1:]) == event)
            return (
                f"must have a last dimension of {event[0]}, as event_shape says; got {shape}; "
                f"{remedy or 'give vectors of as many coordinates'}"
            )
        if do_broadcast(shape[:-1], self._batch_shape):
            return ""
        remedy = "unsqueeze the axes that should pair up"
        if len(self._batch_shape) == 1:
            remedy = f"for every pair give {name}.unsqueeze(-2)"
        return f"must broadcast with batch_shape + event_shape = {(*self._batch_shape, *event)}; got {shape}; {remedy}"

    def _support_problem(self, value: Tensor) -> str:
        name = self._value_name
        if getattr(self, "component_distribution", self).support is not unit_vector:
            return "must hold numbers, the support; got nan; look where it comes from" if value.isnan().any() else ""
        return length_problem(name, value, ", the support")


def length_problem(name: str, vectors: Tensor, what: str = "") -> str:
    """What is wrong with vectors that must have length 1; empty if nothing is."""
    found, are_one = lengths(vectors.detach())
    wrong = found[~are_one]
    if not wrong.numel():
        return ""
    remedy = f"give torch.nn.functional.normalize({name}, dim=-1)"
    if wrong.isnan().any():
        remedy = "look where it comes from"
    return f"must hold unit vectors{what}; got one of length {wrong.max():.7g}; {remedy}"


def check_validate_args(function: str, validate_args: Any) -> None:
    """Raise unless this is what `validate_args` may be."""
    if validate_args is not None and not isinstance(validate_args, bool):
        raise TypeError(
            f"{function}: `validate_args` must be True, False or None; got {validate_args!r}; leave it out, or give "
            "arguments after it by name"
        )


def checked_sizes(function: str, argument: str, sizes: _size) -> torch.Size:
    """Sizes as a `torch.Size`.

    Raises:
        TypeError: they are no tuple of integers
        ValueError: one is below 0
    """
    try:
        found = torch.Size(sizes)
    except TypeError:
        given: Any = sizes
        remedy = f"give ({given},)" if isinstance(given, int) else "give (100,) for 100, or () for one"
        raise TypeError(f"{function}: `{argument}` must be a tuple of integers; got {given!r}; {remedy}") from None
    if not is_compiling() and any(type(size) is int and size < 0 for size in found):
        raise ValueError(
            f"{function}: `{argument}` must hold sizes of at least 0; got {tuple(found)}; give as many as are wanted"
        )
    return found
