"""PowerSpherical: directions about a mean direction, drawn without rejection."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributions import AffineTransform, Beta, TransformedDistribution
from torch.distributions.constraints import Constraint, nonnegative

from effops.distributions.constraints import unit_vector
from effops.distributions.directional import Directional
from effops.distributions.uniform import HypersphericalUniform
from effops.numerics.special import digamma_ratio
from effops.ops.densities import power_spherical
from effops.pytorch.calls import _size
from effops.text import tells_wrong_arguments


class MarginalT(TransformedDistribution):
    """The cosine t = <loc, x> of a PowerSpherical x: (1 + t) / 2 has the law Beta(s + b, b), with b = (D - 1) / 2.

    Args:
        dim: D, at least 2
        scale: s, of shape `(*S)`, which is the batch shape; the event shape is empty
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {"scale": nonnegative}  # type: ignore[misc]
    base_dist: Beta

    def __init__(self, dim: int, scale: Tensor, validate_args: bool | None = None) -> None:
        self.dim, self.scale = dim, scale
        b = 0.5 * (dim - 1)
        super().__init__(Beta(scale + b, torch.full_like(scale, b)), AffineTransform(-1, 2), validate_args)

    def expand(self, batch_shape: _size, _instance: Any = None) -> MarginalT:
        return MarginalT(self.dim, self.scale.expand(batch_shape), self._validate_args)

    @property
    def mean(self) -> Tensor:
        return self.scale / (self.scale + (self.dim - 1))

    @property
    def variance(self) -> Tensor:
        variance: Tensor = 4 * self.base_dist.variance
        return variance

    def entropy(self) -> Tensor:
        entropy: Tensor = self.base_dist.entropy() + math.log(2)
        return entropy


class BaseDistributions(NamedTuple):
    """The two independent parts of a PowerSpherical draw."""

    marginal_t: MarginalT
    marginal_s: HypersphericalUniform


class PowerSpherical(Directional):
    """Directions about a mean direction. A draw needs no rejection and has gradients.

        log p(x | loc, s) = W(s) + s log((1 + <loc, x>) / 2)
        W(s) = lgamma(s + 2 b) - lgamma(s + b) - b log(4 pi),    b = (D - 1) / 2

    Args:
        loc: mean directions `(*L, D)`, unit vectors, D >= 2
        scale: concentrations `(*S)` or a number, not negative; at 0 the distribution is uniform

    The batch shape is that to which `L` and `S` broadcast. The event shape is `(D,)`. `log_prob` is
    `effops.power_spherical_log_prob`: it needs no memory for the pairs of values and components. `rsample` is
    differentiable in loc and scale, once. `variance` is that of each coordinate, `(*batch, D)`, as in torch's
    MultivariateNormal. In the package power_spherical it is the covariance matrix instead, here `covariance`. Vectors
    have the dtype of loc, and `entropy` has that of scale. `marginal_t` is the distribution of the cosine `<loc, x>`,
    and `base_dist` has it and that of the rest, as in the package. `kl_divergence` has a closed form to
    HypersphericalUniform and VonMisesFisher, and from HypersphericalUniform; to PowerSpherical it has none,
    and says so.

    A scale `(B, 1)` beside a loc `(B, D)` gives a batch `(B, B)`: a UserWarning says so, once.
    With validation, which is torch's, a loc in float64 that was normalised in float32 is normalised again.

    Raises:
        TypeError: loc is no tensor of a real floating-point dtype
        ValueError: shapes do not fit; with validation, which is torch's, a parameter or value outside its domain

    Example:
        >>> loc = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1).requires_grad_()
        >>> p = effops.distributions.PowerSpherical(loc, 10.0)
        >>> x = p.rsample((1000,))
        >>> p.log_prob(x).shape, x.requires_grad
        (torch.Size([1000, 4]), True)

    Source: De Cao & Aziz 2020, The Power Spherical distribution, arXiv:2006.04437.
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {"loc": unit_vector, "scale": nonnegative}
    has_rsample = True
    scale: Tensor
    _concentration_name = "scale"
    _family: ClassVar[ModuleType] = power_spherical

    @tells_wrong_arguments
    def __init__(self, loc: Tensor, scale: Tensor | float, validate_args: bool | None = None) -> None:
        super().__init__(loc, scale, validate_args)

    @tells_wrong_arguments
    def rsample(self, sample_shape: _size = ()) -> Tensor:
        return self._sample(sample_shape)

    @property
    def _b(self) -> float:
        return 0.5 * (self._dimension - 1)

    def _mean_cosine(self) -> tuple[Tensor, Tensor]:
        s, b = self._wide, self._b
        return s / (s + 2 * b), 2 * b / (s + 2 * b)

    def _variances(self) -> tuple[Tensor, Tensor]:
        s, b = self._wide, self._b
        across = 2 * (s + b) / (s + 2 * b) / (s + 2 * b + 1)
        return across * (2 * b / (s + 2 * b)), across

    def _entropy(self) -> Tensor:
        return self._cross_entropy(digamma_ratio(self._wide, self._b))

    @property
    def marginal_t(self) -> MarginalT:
        return MarginalT(self._dimension, self.scale)

    @property
    def base_dist(self) -> BaseDistributions:
        """What a draw t loc + sqrt(1 - t^2) s is made of, s being uniform among the directions orthogonal to loc."""
        if self._dimension < 3:
            raise NotImplementedError(
                "PowerSpherical.base_dist: `loc` must have at least 3 coordinates; got 2, where the part orthogonal to "
                "loc is one of two points; use marginal_t"
            )
        orthogonal = HypersphericalUniform(self._dimension - 1, self.loc.device, self.loc.dtype)
        return BaseDistributions(self.marginal_t, orthogonal.expand(self._batch_shape))
