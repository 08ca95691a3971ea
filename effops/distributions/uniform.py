"""HypersphericalUniform: every direction alike."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.distributions.constraints import Constraint

from effops.dispatch.arguments import check_new_tensors
from effops.distributions.constraints import unit_vector
from effops.distributions.told import TellingDistribution, check_validate_args
from effops.numerics.directions import random_directions
from effops.numerics.precision import arithmetic_dtype
from effops.numerics.shapes import broadcast_shapes
from effops.pytorch.calls import _size
from effops.text import integer_remedy, tells_wrong_arguments


class HypersphericalUniform(TellingDistribution):
    """The uniform distribution of directions.

        log p(x) = lgamma(D / 2) - log 2 - D / 2 log pi

    Args:
        dim: D, the number of coordinates of a direction, at least 2
        device, dtype: the device and dtype of draws; torch's defaults if None

    The batch shape is empty (see `expand`), and the event shape is `(D,)`. `rsample` is the same as `sample`, since
    there are no parameters. Arguments are named and ordered as in the package power_spherical.

    Raises:
        TypeError: `dim` is no integer; `dtype` is none of real floating-point numbers
        ValueError: `dim` is below 2; with validation, which is torch's, a value outside the sphere

    Example:
        >>> p = effops.distributions.HypersphericalUniform(3)
        >>> p.log_prob(p.sample((2,)))
        tensor([-2.5310, -2.5310])
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {}
    support = unit_vector
    has_rsample = True

    @tells_wrong_arguments
    def __init__(
        self,
        dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if isinstance(dim, Tensor):
            raise TypeError("HypersphericalUniform: `dim` must be an integer; got a tensor; give loc.shape[-1]")
        if not hasattr(dim, "__index__") or isinstance(dim, bool):
            raise TypeError(
                f"HypersphericalUniform: `dim` must be an integer; got {type(dim).__name__}; {integer_remedy(dim)}"
            )
        check_new_tensors("HypersphericalUniform", device, dtype)
        check_validate_args("HypersphericalUniform", validate_args)
        if dim < 2:
            raise ValueError(
                f"HypersphericalUniform: `dim` must be at least 2, a circle; got {dim}; "
                "give the number of coordinates of a direction"
            )
        self.dim = dim
        self._dtype = dtype or torch.get_default_dtype()
        self._device = torch.get_default_device() if device is None else torch.device(device)
        super().__init__(torch.Size(), torch.Size((dim,)), validate_args)

    def _expand_into(self, new: Any, shape: torch.Size) -> Any:
        new.__dict__.update(self.__dict__)
        new._batch_shape = torch.empty(self._batch_shape, device="meta").expand(shape).shape
        return new

    def __repr__(self) -> str:
        return f"HypersphericalUniform(dim: {self.dim}, batch_shape: {self._batch_shape})"

    @tells_wrong_arguments
    def rsample(self, sample_shape: _size = ()) -> Tensor:
        shape, arithmetic = self._extended_shape(sample_shape), arithmetic_dtype(self._dtype)
        return random_directions(shape, dtype=arithmetic, device=self._device).to(self._dtype)

    @tells_wrong_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        shape = broadcast_shapes(value.shape[:-1], self._batch_shape)
        return value.new_full(shape, -self._log_area, dtype=torch.promote_types(value.dtype, self._dtype))

    @property
    def _log_area(self) -> float:
        return math.log(2) + 0.5 * self.dim * math.log(math.pi) - math.lgamma(0.5 * self.dim)

    def _entropy(self) -> Tensor:
        return torch.full((), self._log_area, dtype=torch.float64, device=self._device)

    def _gap(self, direction: Tensor) -> Tensor:
        """The expectation E[1 - <direction, x>]."""
        return torch.ones((), dtype=torch.float64, device=self._device)

    @property
    def mean(self) -> Tensor:
        return torch.zeros(self._batch_shape + self._event_shape, dtype=self._dtype, device=self._device)

    @property
    def mode(self) -> NoReturn:
        raise NotImplementedError(
            "HypersphericalUniform.mode: one direction must be the likeliest; got all alike; draw one by sample()"
        )

    @property
    def variance(self) -> Tensor:
        return torch.full_like(self.mean, 1 / self.dim)

    @property
    def covariance(self) -> Tensor:
        """The covariance matrix `(*batch, D, D)`."""
        return torch.diag_embed(self.variance)

    def entropy(self) -> Tensor:
        return torch.full(self._batch_shape, self._log_area, dtype=self._dtype, device=self._device)
