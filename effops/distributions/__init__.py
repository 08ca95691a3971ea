"""Distributions of directions, and mixtures: the ops with the interface of `torch.distributions`.

It may import `ops`, `dispatch`, `numerics`, `text` and `pytorch`. Start with `directional.py`, which the families of
`power_spherical.py` and `von_mises_fisher.py` share; `divergence.py` registers every `kl_divergence`.
"""

from effops.distributions import divergence as divergence
from effops.distributions.constraints import unit_vector
from effops.distributions.mixture import Mixture
from effops.distributions.power_spherical import PowerSpherical
from effops.distributions.uniform import HypersphericalUniform
from effops.distributions.von_mises_fisher import VonMisesFisher

__all__ = ["HypersphericalUniform", "Mixture", "PowerSpherical", "VonMisesFisher", "unit_vector"]
