"""The Kullback-Leibler divergences between distributions of directions, for `torch.distributions.kl_divergence`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.kl import register_kl

from effops.distributions.mixture import Mixture
from effops.distributions.power_spherical import PowerSpherical
from effops.distributions.uniform import HypersphericalUniform
from effops.distributions.von_mises_fisher import VonMisesFisher
from effops.numerics.layout import repeated
from effops.numerics.shapes import broadcast_shapes
from effops.numerics.special import digamma_ratio


def _kl_divergence(p: Any, q: Any, cross_entropy: Callable[[], Tensor]) -> Tensor:
    if p.event_shape != q.event_shape:
        raise ValueError(
            f"kl_divergence: p and q must have one event shape; got {tuple(p.event_shape)} and {tuple(q.event_shape)}; "
            "a divergence needs directions of one dimension"
        )
    try:
        batch_shape = broadcast_shapes(p.batch_shape, q.batch_shape)
    except RuntimeError:
        raise ValueError(
            "kl_divergence: the batch shapes of p and q must broadcast; "
            f"got {tuple(p.batch_shape)} and {tuple(q.batch_shape)}; unsqueeze the axes that should pair up"
        ) from None
    result: Tensor = (cross_entropy() - p._entropy()).to(torch.promote_types(p._dtype, q._dtype))
    return repeated(result, batch_shape)


def _kl_to_uniform(p: Any, q: HypersphericalUniform) -> Tensor:
    return _kl_divergence(p, q, q._entropy)


def _kl_to_von_mises_fisher(p: Any, q: VonMisesFisher) -> Tensor:
    return _kl_divergence(p, q, lambda: q._cross_entropy(p._gap(q._parameters[0])))


def _kl_uniform_to_power_spherical(p: HypersphericalUniform, q: PowerSpherical) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64, device=q.loc.device)
    return _kl_divergence(p, q, lambda: q._cross_entropy(digamma_ratio(zero, q._b)))  # -E log((1 + t) / 2)


def _no_kl_to_power_spherical(p: Any, q: PowerSpherical) -> Tensor:
    name = type(p).__name__
    raise NotImplementedError(
        f"kl_divergence({name}, PowerSpherical) has no closed form for two mean directions, and is not computed by "
        "quadrature; estimate it: x = p.rsample((1000,)); (p.log_prob(x) - q.log_prob(x)).mean(0)"
    )


def _no_kl_of_mixtures(p: Any, q: Any) -> Tensor:
    raise NotImplementedError(
        f"kl_divergence({type(p).__name__}, {type(q).__name__}) has no closed form for a mixture; estimate it: "
        "x = p.sample((1000,)); (p.log_prob(x) - q.log_prob(x)).mean(0)"
    )


for _pair in ((Mixture, Distribution), (Distribution, Mixture), (Mixture, Mixture)):
    register_kl(*_pair)(_no_kl_of_mixtures)
for _p in (PowerSpherical, VonMisesFisher, HypersphericalUniform):
    register_kl(_p, HypersphericalUniform)(_kl_to_uniform)
    register_kl(_p, VonMisesFisher)(_kl_to_von_mises_fisher)
register_kl(HypersphericalUniform, PowerSpherical)(_kl_uniform_to_power_spherical)
for _p in (PowerSpherical, VonMisesFisher):
    register_kl(_p, PowerSpherical)(_no_kl_to_power_spherical)
