"""VonMisesFisher: a normal distribution that is restricted to the unit sphere."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions.constraints import Constraint, nonnegative

from effops.distributions.constraints import unit_vector
from effops.distributions.directional import Directional
from effops.numerics.special import bessel_ratio
from effops.ops.densities import von_mises_fisher
from effops.pytorch.calls import _size
from effops.text import tells_wrong_arguments


class VonMisesFisher(Directional):
    """Directions about a mean direction: a normal distribution that is restricted to the unit sphere.

        log p(x | loc, k) = W(k) + k (<loc, x> - 1)
        W(k) = (D / 2 - 1) log k - D / 2 log(2 pi) - log I_{D/2-1}(k) + k

    Args:
        loc: mean directions `(*L, D)`, unit vectors, D >= 2
        concentration: k, of shape `(*S)` or a number, not negative; at 0 the distribution is uniform

    The batch shape is that to which `L` and `S` broadcast. The event shape is `(D,)`. `log_prob` is
    `effops.von_mises_fisher_log_prob`: it needs no memory for the pairs of values and components. `rsample` is
    differentiable in loc and concentration, once: draws are by rejection, and their gradient is implicit, by quadrature
    of the distribution function of the angle. For backward it saves the concentration and one number per draw beside
    what directions need. `variance` is that of each coordinate, `(*batch, D)`, and `covariance` the matrix
    `(*batch, D, D)`. Vectors have the dtype of loc, and `entropy` has that of concentration. `kl_divergence` has a
    closed form to VonMisesFisher and HypersphericalUniform, and from PowerSpherical and HypersphericalUniform. To
    PowerSpherical it has none, and says so.

    A concentration `(B, 1)` beside a loc `(B, D)` gives a batch `(B, B)`: a UserWarning says so, once.
    With validation, which is torch's, a loc in float64 that was normalised in float32 is normalised again.

    Raises:
        TypeError: loc is no tensor of a real floating-point dtype
        ValueError: shapes do not fit; with validation, which is torch's, a parameter or value outside its domain

    Example:
        >>> loc = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
        >>> p = effops.distributions.VonMisesFisher(loc, 10.0)
        >>> p.log_prob(p.rsample((1000,))).shape
        torch.Size([1000, 4])
        >>> torch.distributions.kl_divergence(p, effops.distributions.HypersphericalUniform(3))
        tensor([1.9957, 1.9957, 1.9957, 1.9957])

    Source: Mardia & Jupp 2000, Directional Statistics, section 9.3.2; Wood 1994, Simulation of the von Mises Fisher
    distribution; Figurnov, Mohamed & Mnih 2018, Implicit Reparameterization Gradients, arXiv:1805.08498.
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {"loc": unit_vector, "concentration": nonnegative}
    has_rsample = True
    concentration: Tensor
    _concentration_name = "concentration"
    _family: ClassVar[ModuleType] = von_mises_fisher

    @tells_wrong_arguments
    def __init__(self, loc: Tensor, concentration: Tensor | float, validate_args: bool | None = None) -> None:
        super().__init__(loc, concentration, validate_args)

    @tells_wrong_arguments
    def rsample(self, sample_shape: _size = ()) -> Tensor:
        return self._sample(sample_shape)

    def _mean_cosine(self) -> tuple[Tensor, Tensor]:
        return bessel_ratio(self._wide, self._dimension)

    def _variances(self) -> tuple[Tensor, Tensor]:
        k, dimension = self._wide, self._dimension
        along = -torch.func.grad(lambda k: bessel_ratio(k, dimension)[1].sum())(k)
        return along, 1 / (dimension + k * bessel_ratio(k, dimension + 2)[0])  # the recurrence of the I gives A / k

    def _entropy(self) -> Tensor:
        return self._cross_entropy(self._mean_cosine()[1])
