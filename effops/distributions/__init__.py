"""Distributions of directions, and mixtures: the ops with the interface of `torch.distributions`.

`PowerSpherical`, `VonMisesFisher` and `HypersphericalUniform` are distributions of unit vectors. `Mixture` mixes
components of one family, also those of normal distributions. `torch.distributions.kl_divergence` takes them where there
is a closed form. `unit_vector` is the constraint of their values.

    >>> loc = torch.nn.functional.normalize(torch.randn(16, 8), dim=-1)
    >>> effops.distributions.PowerSpherical(loc, torch.full((16,), 10.0)).rsample((100,)).shape
    torch.Size([100, 16, 8])
"""

# This folder may import `ops`, `dispatch`, `numerics`, `text` and `pytorch`. Start with `directional.py`, which the
# families of `power_spherical.py` and `von_mises_fisher.py` share; `divergence.py` registers every `kl_divergence`.

from typing import TYPE_CHECKING, NoReturn

from effops.distributions import divergence as divergence
from effops.distributions.constraints import unit_vector
from effops.distributions.mixture import Mixture
from effops.distributions.power_spherical import PowerSpherical
from effops.distributions.uniform import HypersphericalUniform
from effops.distributions.von_mises_fisher import VonMisesFisher
from effops.text import missing_name

__all__ = ["HypersphericalUniform", "Mixture", "PowerSpherical", "VonMisesFisher", "unit_vector"]


if not TYPE_CHECKING:  # a type checker knows the names

    def __getattr__(name: str) -> NoReturn:
        raise missing_name(__name__, name, __all__)
