"""What distributions of directions about a mean direction share.

A draw is x = t loc + sqrt(1 - t^2) w with w uniform and orthogonal to loc. Its mean is E[t] loc. Its covariance is
var(t) loc loc^T + q (I - loc loc^T) with q = E[1 - t^2] / (D - 1). Normalisers and moments of t are computed in float64
and rounded once, so that they are right at any concentration.
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from effops.dispatch.arguments import check_float64, conversion, reshaped
from effops.dispatch.call import call
from effops.dispatch.custom_op import is_plain
from effops.distributions.constraints import unit_vector
from effops.distributions.told import TellingDistribution, check_validate_args, length_problem
from effops.numerics.directions import have_length_one, lengths
from effops.numerics.layout import repeated
from effops.numerics.precision import FLOATS, arithmetic_dtype, sphere_tolerance
from effops.numerics.shapes import broadcast_shapes, do_broadcast, is_known, spreads
from effops.ops.densities.density import KeptNormaliser
from effops.pytorch.calls import _size
from effops.text import tells_wrong_arguments


class Directional(TellingDistribution):
    """The part of a distribution with log density W(s) + s phi(<loc, x>) that does not depend on phi."""

    support = unit_vector
    _concentration_name: ClassVar[str]
    _family: ClassVar[ModuleType]  # of `effops.ops.densities`

    def __init__(self, loc: Tensor, concentration: Tensor | float, validate_args: bool | None) -> None:
        name = type(self).__name__
        check_validate_args(name, validate_args)
        if not isinstance(loc, Tensor) or loc.dtype not in FLOATS:
            got = loc.dtype if isinstance(loc, Tensor) else type(loc).__name__
            raise TypeError(f"{name}: `loc` must be a real floating-point tensor; got {got}; convert it first")
        check_float64(name, "loc", loc)
        if loc.ndim == 0 or loc.shape[-1] < 2:
            raise ValueError(
                f"{name}: the last dimension of `loc` must be at least 2, a circle; got {tuple(loc.shape)}; "
                "put the coordinates of a direction into the last dimension"
            )
        if not isinstance(concentration, Tensor) or not concentration.is_floating_point():
            concentration = _as_tensor(name, self._concentration_name, concentration, loc)
        try:
            batch_shape = loc.shape[:-1]
            if concentration.ndim:
                batch_shape = broadcast_shapes(batch_shape, concentration.shape)
        except RuntimeError:
            given = self._concentration_name
            remedy = reshaped(given, concentration.shape, lambda shape: do_broadcast(shape, loc.shape[:-1]))
            raise ValueError(
                f"{name}: batch shapes must broadcast; got loc {tuple(loc.shape[:-1])} + (D,), {given} "
                f"{tuple(concentration.shape)}; {remedy or 'unsqueeze the axes that should pair up'}"
            ) from None
        if loc.ndim > 1 and is_known(loc.shape[-2] > 1) and concentration.shape == (*loc.shape[:-1], 1):
            _warn_of_pairs(name, self._concentration_name)
        if self._validate_args if validate_args is None else validate_args:
            loc = _lengthened(loc)
        self._parameters = loc, concentration  # not expanded, so that an op makes no expanded gradients
        self._kept = KeptNormaliser()
        self._expand_parameters(loc, concentration, batch_shape)
        super().__init__(batch_shape, loc.shape[-1:], validate_args=False)
        del self._validate_args  # the class has a default
        if validate_args is not None:
            self._validate_args = validate_args
        if self._validate_args and not _are_surely_parameters(loc, concentration):
            try:
                super().__init__(batch_shape, loc.shape[-1:], validate_args)
            except ValueError as error:
                raise ValueError(_parameter_problem(name, self._concentration_name, loc, concentration)) from error

    def _expand_parameters(self, loc: Tensor, concentration: Tensor, batch_shape: torch.Size) -> None:
        self._batch_shape = batch_shape
        self.loc = _expanded(loc, batch_shape + loc.shape[-1:])
        setattr(self, self._concentration_name, _expanded(concentration, batch_shape))

    def _expand_into(self, new: Any, shape: torch.Size) -> Any:
        new.__dict__.update(self.__dict__)
        new._expand_parameters(self.loc, getattr(self, self._concentration_name), shape)
        return new

    @tells_wrong_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args and not self._surely_supports(value):
            self._validate_sample(value)
        log_prob = call(self._family.op, *self._parameters, value, kept=self._kept)
        shape = broadcast_shapes(value.shape[:-1], self._batch_shape) if self._batch_shape else log_prob.shape
        return repeated(log_prob, shape)

    def _surely_supports(self, value: Any) -> bool:
        """Whether torch's validation would accept a value, in a third of its time. If it may not, torch says why."""
        if not isinstance(value, Tensor) or value.shape[-1:] != self._event_shape:
            return False
        if self._batch_shape and value.ndim > 1:
            sizes = zip(reversed(value.shape[:-1]), reversed(self._batch_shape))
            if not all(size == 1 or spreads(other, size) for size, other in sizes):
                return False
        return _are_surely_directions(value)

    def _sample(self, sample_shape: _size) -> Tensor:
        shape = self._extended_shape(sample_shape)
        loc, concentration = (parameter.to(arithmetic_dtype(self.loc.dtype)) for parameter in self._parameters)
        loc = torch.nn.functional.normalize(loc, dim=-1)  # removes the error of its length in a narrow dtype
        x: Tensor = self._family.draw(loc.expand(shape), concentration.expand(shape[:-1]))
        return x.to(self.loc.dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return self._parameters[1].dtype

    @property
    def _dimension(self) -> int:
        return self._event_shape[0]

    @property
    def _wide(self) -> Tensor:
        """The concentration in float64."""
        return self._parameters[1].double()

    def _cross_entropy(self, gap: Tensor) -> Tensor:
        """The expectation -E log p(x) for x of any distribution, which `gap` = -E phi(<loc, x>) tells."""
        normaliser: Tensor = self._family.density.normaliser(self._wide, self._dimension)
        return self._wide * gap - normaliser

    def _mean_cosine(self) -> tuple[Tensor, Tensor]:
        """The mean cosine E t, and 1 - E t."""
        raise NotImplementedError

    def _variances(self) -> tuple[Tensor, Tensor]:
        """The variances of x along loc, var t, and across loc, E[1 - t^2] / (D - 1)."""
        raise NotImplementedError

    def _entropy(self) -> Tensor:
        raise NotImplementedError

    def _gap(self, direction: Tensor) -> Tensor:
        """The expectation E[1 - <direction, x>] = 1 - E t + E t (1 - <direction, loc>)."""
        length, rest = self._mean_cosine()
        vectors = (torch.nn.functional.normalize(v.double(), dim=-1) for v in (direction, self._parameters[0]))
        return rest + length * (1 - torch.einsum("...d,...d->...", *vectors))

    @property
    def mean(self) -> Tensor:
        return self._mean_cosine()[0].to(self.loc.dtype).unsqueeze(-1) * self.loc

    @property
    def mode(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        along, across = (variance.to(self.loc.dtype).unsqueeze(-1) for variance in self._variances())
        return torch.lerp(across, along, self.loc**2)

    @property
    def covariance(self) -> Tensor:
        """The covariance matrix `(*batch, D, D)`. Its diagonal is `variance`, whose digits at large concentrations the
        sum of the two parts would lose."""
        along, across = self._variances()
        outer = self.loc.unsqueeze(-1) * self.loc.unsqueeze(-2)
        apart = (along - across).to(self.loc.dtype)[..., None, None] * outer
        return torch.diagonal_scatter(apart, self.variance, dim1=-2, dim2=-1)

    def entropy(self) -> Tensor:
        return repeated(self._entropy().to(self._dtype), self._batch_shape)


@functools.cache  # so that it warns once, whatever the filters are
def _warn_of_pairs(name: str, concentration_name: str) -> None:
    warnings.warn(
        f"{name}: `{concentration_name}` (B, 1) beside `loc` (B, D) gives a batch (B, B), every pair of the two; "
        f"for one {concentration_name} a direction give (B,), as {concentration_name}.squeeze(-1); for every pair "
        "give loc.unsqueeze(-3) and (B, 1). This warning comes once",
        stacklevel=5,
    )


def _as_tensor(name: str, concentration_name: str, concentration: Any, loc: Tensor) -> Tensor:
    try:
        return torch.as_tensor(concentration, dtype=loc.dtype, device=loc.device)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}: `{concentration_name}` must be a tensor or a number; got {type(concentration).__name__}; "
            + conversion(concentration, "give a number")
        ) from None


def _parameter_problem(name: str, concentration_name: str, loc: Tensor, concentration: Tensor) -> str:
    """What is wrong with parameters of which PyTorch says that they are not in their domains."""
    if problem := length_problem("loc", loc):
        return f"{name}: `loc` {problem}"
    least = concentration.detach().amin()
    remedy = "look where it comes from" if least.isnan() else "softplus, for one, gives only such numbers"
    return f"{name}: `{concentration_name}` must be at least 0; got {least:.7g}; {remedy}"


def _lengthened(loc: Tensor) -> Tensor:
    """The directions, normalised in float64 where they are in float64, but of length 1 up to float32's rounding only.

    Directions that a model has normalised in float32 are so. Any others are left for validation to judge.
    """
    if loc.dtype != torch.float64:
        return loc
    found, are_one = lengths(loc)
    if are_one.all():
        return loc  # itself, a leaf that autograd can copy
    rounded = (found**2 - 1).abs() <= sphere_tolerance(loc.shape[-1], torch.float32, (torch.float32,))
    return torch.where(rounded.unsqueeze(-1), loc / found.unsqueeze(-1), loc)


def _are_surely_directions(vectors: Tensor) -> bool:
    """Whether torch's validation would accept directions."""
    return vectors.numel() > 0 and is_plain((vectors,)) and have_length_one(vectors)


def _are_surely_parameters(loc: Tensor, concentration: Tensor) -> bool:
    """Likewise of directions and concentrations."""
    if loc.numel() == 0 or concentration.numel() == 0 or not is_plain((loc, concentration)):
        return False
    least = concentration.detach().amin() if concentration.ndim else concentration
    return least.item() >= 0 and have_length_one(loc)


def _expanded(tensor: Tensor, shape: torch.Size) -> Tensor:
    """The tensor expanded to a shape. One of that shape is returned itself, so that autograd can copy a leaf."""
    return tensor if tensor.shape == shape else tensor.expand(shape)
