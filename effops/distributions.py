"""Distributions of directions, and mixtures: the ops with the interface of `torch.distributions`.

A draw of a directional distribution is x = t loc + sqrt(1 - t^2) w with w uniform and orthogonal to loc. Its mean is
E[t] loc. Its covariance is var(t) loc loc^T + q (I - loc loc^T) with q = E[1 - t^2] / (D - 1). Normalisers and moments
of t are computed in float64 and rounded once, so that they are right at any concentration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, Normal
from torch.distributions.constraints import Constraint, nonnegative, positive
from torch.distributions.kl import register_kl

from effops.numerics.directions import lengths, random_directions
from effops.numerics.precision import FLOATS, arithmetic_dtype
from effops.numerics.shapes import broadcast_shapes
from effops.numerics.special import bessel_ratio, digamma_ratio
from effops.ops.densities import normal, power_spherical, von_mises_fisher
from effops.pytorch import _size

__all__ = ["HypersphericalUniform", "Mixture", "PowerSpherical", "VonMisesFisher", "unit_vector"]


class _UnitVector(Constraint):
    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        return lengths(value)[1]


unit_vector = _UnitVector()
"""The constraint of vectors of length 1, up to rounding to their dtype."""


class _Directional(Distribution):
    """The part of a distribution with log density W(s) + s phi(<loc, x>) that does not depend on phi."""

    support = unit_vector
    _concentration_name: ClassVar[str]
    _family: ClassVar[ModuleType]  # of `effops.ops.densities`
    _log_prob: ClassVar[staticmethod[..., Tensor]]

    def __init__(self, loc: Tensor, concentration: Tensor | float, validate_args: bool | None) -> None:
        name = type(self).__name__
        if not isinstance(loc, Tensor) or loc.dtype not in FLOATS:
            got = loc.dtype if isinstance(loc, Tensor) else type(loc).__name__
            raise TypeError(f"{name}: `loc` must be a real floating-point tensor; got {got}; convert it first")
        if loc.ndim == 0 or loc.shape[-1] < 2:
            raise ValueError(
                f"{name}: the last dimension of `loc` must be at least 2, a circle; got {tuple(loc.shape)}; "
                "put the coordinates of a direction into the last dimension"
            )
        if not isinstance(concentration, Tensor) or not concentration.is_floating_point():
            concentration = torch.as_tensor(concentration, dtype=loc.dtype, device=loc.device)
        try:
            batch_shape = broadcast_shapes(loc.shape[:-1], concentration.shape)
        except RuntimeError:
            raise ValueError(
                f"{name}: batch shapes must broadcast; got loc {tuple(loc.shape[:-1])} + (D,), "
                f"{self._concentration_name} {tuple(concentration.shape)}; unsqueeze the axes that should pair up"
            ) from None
        self._parameters = loc, concentration  # not expanded, so that an op makes no expanded gradients
        self._expand_parameters(loc, concentration, batch_shape)
        super().__init__(batch_shape, loc.shape[-1:], validate_args)

    def _expand_parameters(self, loc: Tensor, concentration: Tensor, batch_shape: torch.Size) -> None:
        self._batch_shape = batch_shape
        self.loc = _expanded(loc, batch_shape + loc.shape[-1:])
        setattr(self, self._concentration_name, _expanded(concentration, batch_shape))

    def expand(self, batch_shape: _size, _instance: Any = None) -> Any:
        new = self.__new__(type(self)) if _instance is None else _instance
        new.__dict__.update(self.__dict__)
        new._expand_parameters(self.loc, getattr(self, self._concentration_name), torch.Size(batch_shape))
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        log_prob = self._log_prob(*self._parameters, value)
        return log_prob.expand(broadcast_shapes(value.shape[:-1], self._batch_shape))

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

    def entropy(self) -> Tensor:
        return self._entropy().to(self._dtype).expand(self._batch_shape)


def _expanded(tensor: Tensor, shape: torch.Size) -> Tensor:
    """The tensor expanded to a shape. One of that shape is returned itself, so that autograd can copy a leaf."""
    return tensor if tensor.shape == shape else tensor.expand(shape)


class PowerSpherical(_Directional):
    """Directions about a mean direction. A draw needs no rejection and has gradients.

        log p(x | loc, s) = W(s) + s log((1 + <loc, x>) / 2)
        W(s) = lgamma(s + 2 b) - lgamma(s + b) - b log(4 pi),    b = (D - 1) / 2

    Args:
        loc: mean directions `(*L, D)`, unit vectors, D >= 2
        scale: concentrations `(*S)` or a number, positive

    The batch shape is that to which `L` and `S` broadcast. The event shape is `(D,)`. `log_prob` is
    `effops.power_spherical_log_prob`: it needs no memory for the pairs of values and components. `rsample` is
    differentiable in loc and scale, once. `variance` is that of each coordinate, `(*batch, D)`, as in torch's
    MultivariateNormal. In the package power_spherical it is the covariance matrix instead. Vectors have the dtype of
    loc, and `entropy` has that of scale. `kl_divergence` has a closed form to HypersphericalUniform and VonMisesFisher,
    and from HypersphericalUniform.

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

    arg_constraints: ClassVar[dict[str, Constraint]] = {"loc": unit_vector, "scale": positive}
    has_rsample = True
    scale: Tensor
    _concentration_name = "scale"
    _family: ClassVar[ModuleType] = power_spherical
    _log_prob = staticmethod(power_spherical.power_spherical_log_prob)

    def __init__(self, loc: Tensor, scale: Tensor | float, validate_args: bool | None = None) -> None:
        super().__init__(loc, scale, validate_args)

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


class VonMisesFisher(_Directional):
    """Directions about a mean direction: a normal distribution that is restricted to the unit sphere.

        log p(x | loc, k) = W(k) + k (<loc, x> - 1)
        W(k) = (D / 2 - 1) log k - D / 2 log(2 pi) - log I_{D/2-1}(k) + k

    Args:
        loc: mean directions `(*L, D)`, unit vectors, D >= 2
        concentration: k, of shape `(*S)` or a number, not negative; at 0 the distribution is uniform

    The batch shape is that to which `L` and `S` broadcast. The event shape is `(D,)`. `log_prob` is
    `effops.von_mises_fisher_log_prob`: it needs no memory for the pairs of values and components. `sample` works by
    rejection and has no gradients. There is no `rsample`. `variance` is that of each coordinate, `(*batch, D)`. Vectors
    have the dtype of loc, and `entropy` has that of concentration. `kl_divergence` has a closed form to VonMisesFisher
    and HypersphericalUniform, and from PowerSpherical and HypersphericalUniform.

    Raises:
        TypeError: loc is no tensor of a real floating-point dtype
        ValueError: shapes do not fit; with validation, which is torch's, a parameter or value outside its domain

    Example:
        >>> loc = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
        >>> p = effops.distributions.VonMisesFisher(loc, 10.0)
        >>> p.log_prob(p.sample((1000,))).shape
        torch.Size([1000, 4])
        >>> torch.distributions.kl_divergence(p, effops.distributions.HypersphericalUniform(3))
        tensor([1.9957, 1.9957, 1.9957, 1.9957])

    Source: Mardia & Jupp 2000, Directional Statistics, section 9.3.2; Wood 1994, Simulation of the von Mises Fisher
    distribution.
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {"loc": unit_vector, "concentration": nonnegative}
    concentration: Tensor
    _concentration_name = "concentration"
    _family: ClassVar[ModuleType] = von_mises_fisher
    _log_prob = staticmethod(von_mises_fisher.von_mises_fisher_log_prob)

    def __init__(self, loc: Tensor, concentration: Tensor | float, validate_args: bool | None = None) -> None:
        super().__init__(loc, concentration, validate_args)

    @torch.no_grad()
    def sample(self, sample_shape: _size = ()) -> Tensor:
        return self._sample(sample_shape)

    def _mean_cosine(self) -> tuple[Tensor, Tensor]:
        return bessel_ratio(self._wide, self._dimension)

    def _variances(self) -> tuple[Tensor, Tensor]:
        k, dimension = self._wide, self._dimension
        along = -torch.func.grad(lambda k: bessel_ratio(k, dimension)[1].sum())(k)
        return along, 1 / (dimension + k * bessel_ratio(k, dimension + 2)[0])  # the recurrence of the I gives A / k

    def _entropy(self) -> Tensor:
        return self._cross_entropy(self._mean_cosine()[1])


class HypersphericalUniform(Distribution):
    """The uniform distribution of directions.

        log p(x) = lgamma(D / 2) - log 2 - D / 2 log pi

    Args:
        dimension: D, the number of coordinates of a direction, at least 2 (`dim` in the package power_spherical)
        device, dtype: the device and dtype of draws; torch's defaults if None

    The batch shape is empty (see `expand`), and the event shape is `(D,)`. `rsample` is the same as `sample`, since
    there are no parameters.

    Raises:
        ValueError: the dimension is below 2; with validation, which is torch's, a value outside the sphere

    Example:
        >>> p = effops.distributions.HypersphericalUniform(3)
        >>> p.log_prob(p.sample((2,)))
        tensor([-2.5310, -2.5310])
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {}
    support = unit_vector
    has_rsample = True

    def __init__(
        self,
        dimension: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if isinstance(dimension, Tensor):
            raise TypeError("HypersphericalUniform: `dimension` must be an integer; got a tensor; give loc.shape[-1]")
        if dimension < 2:
            raise ValueError(
                f"HypersphericalUniform: `dimension` must be at least 2, a circle; got {dimension}; "
                "give the number of coordinates of a direction"
            )
        self.dimension = dimension
        self._dtype = dtype or torch.get_default_dtype()
        self._device = torch.get_default_device() if device is None else torch.device(device)
        super().__init__(torch.Size(), torch.Size((dimension,)), validate_args)

    def expand(self, batch_shape: _size, _instance: Any = None) -> Any:
        new = self.__new__(type(self)) if _instance is None else _instance
        new.__dict__.update(self.__dict__)
        new._batch_shape = torch.empty(self._batch_shape, device="meta").expand(batch_shape).shape
        return new

    def __repr__(self) -> str:
        return f"HypersphericalUniform(dimension: {self.dimension}, batch_shape: {self._batch_shape})"

    def rsample(self, sample_shape: _size = ()) -> Tensor:
        shape, arithmetic = self._extended_shape(sample_shape), arithmetic_dtype(self._dtype)
        return random_directions(shape, dtype=arithmetic, device=self._device).to(self._dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        shape = broadcast_shapes(value.shape[:-1], self._batch_shape)
        return value.new_full(shape, -self._log_area, dtype=torch.promote_types(value.dtype, self._dtype))

    @property
    def _log_area(self) -> float:
        return math.log(2) + 0.5 * self.dimension * math.log(math.pi) - math.lgamma(0.5 * self.dimension)

    def _entropy(self) -> Tensor:
        return torch.full((), self._log_area, dtype=torch.float64, device=self._device)

    def _gap(self, direction: Tensor) -> Tensor:
        """The expectation E[1 - <direction, x>]."""
        return torch.ones((), dtype=torch.float64, device=self._device)

    @property
    def mean(self) -> Tensor:
        return torch.zeros(self._batch_shape + self._event_shape, dtype=self._dtype, device=self._device)

    @property
    def variance(self) -> Tensor:
        return torch.full_like(self.mean, 1 / self.dimension)

    def entropy(self) -> Tensor:
        return self._entropy().to(self._dtype).expand(self._batch_shape)


class Mixture(MixtureSameFamily):
    """A `torch.distributions.MixtureSameFamily` that never holds the log densities of the components.

        log p(x) = logsumexp_k(log weight_k + log p_k(x))

    Args:
        mixture_distribution: Categorical over the components, `(*B)`
        component_distribution: PowerSpherical, VonMisesFisher or Independent(Normal, 1) of batch shape `(*B, K)`; the
            two `B` broadcast

    `log_prob` is the fused op of the components, for example `effops.power_spherical_mixture_log_prob`. `sample` draws
    from the chosen components only. Both need memory for the values, not for each pair of value and component. Mean and
    variance are torch's. There is no `rsample`.

    Raises:
        TypeError: another mixture distribution or component
        ValueError: the numbers of components differ; with validation, which is torch's, a value outside the support

    Example:
        >>> loc = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
        >>> components = effops.distributions.PowerSpherical(loc, 10.0)
        >>> p = effops.distributions.Mixture(torch.distributions.Categorical(torch.ones(4)), components)
        >>> p.sample((1000,)).shape
        torch.Size([1000, 3])
    """

    def __init__(
        self,
        mixture_distribution: Categorical,
        component_distribution: Distribution,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(mixture_distribution, Categorical):
            raise TypeError(
                "Mixture: `mixture_distribution` must be a torch.distributions.Categorical; "
                f"got {type(mixture_distribution).__name__}; build one from the weights"
            )
        _mixture_op(component_distribution)
        shape, weights_shape = component_distribution.batch_shape, mixture_distribution.batch_shape
        try:
            *component_batch, count = shape
            batch_shape = broadcast_shapes(weights_shape, component_batch)
        except (RuntimeError, ValueError):
            raise ValueError(
                f"Mixture: `component_distribution` must have a batch shape (*B, K) that broadcasts with (*B) of "
                f"`mixture_distribution`; got {tuple(shape)} and {tuple(weights_shape)}; put the components last"
            ) from None
        components = component_distribution.expand((*batch_shape, count))
        super().__init__(mixture_distribution.expand(batch_shape), components, validate_args)

    def expand(self, batch_shape: _size, _instance: Any = None) -> Any:
        return super().expand(batch_shape, self.__new__(type(self)) if _instance is None else _instance)

    def log_prob(self, x: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(x)
        log_prob, parameters = _mixture_op(self.component_distribution)
        log_weights = torch.log_softmax(self.mixture_distribution.logits, dim=-1)
        return log_prob(log_weights, *parameters, self._pad(x), dim=-1)

    @torch.no_grad()
    def sample(self, sample_shape: _size = ()) -> Tensor:
        index = self.mixture_distribution.sample(sample_shape).unsqueeze(-1)
        base = _base(self.component_distribution)
        if isinstance(base, Normal):
            return torch.normal(_chosen(base.loc, index), _chosen(base.scale, index))
        concentration = getattr(base, base._concentration_name)
        concentration = concentration.expand((*index.shape[:-1], -1)).gather(-1, index).squeeze(-1)
        chosen: _Directional = type(base)(_chosen(base.loc, index), concentration, validate_args=False)
        return chosen._sample(())

    def __repr__(self) -> str:
        return f"Mixture(\n  {self.mixture_distribution},\n  {self.component_distribution})"


def _chosen(vectors: Tensor, index: Tensor) -> Tensor:
    """The vectors (*S, *B, D) that an index (*S, *B, 1) chooses from vectors (*B, K, D)."""
    vectors = vectors.expand(index.shape[:-1] + vectors.shape[-2:])
    index = index.unsqueeze(-1).expand(index.shape + vectors.shape[-1:])
    return vectors.gather(-2, index).squeeze(-2)


_MIXTURE_OPS = {
    PowerSpherical: power_spherical.power_spherical_mixture_log_prob,
    VonMisesFisher: von_mises_fisher.von_mises_fisher_mixture_log_prob,
    Normal: normal.normal_mixture_log_prob,
}


def _base(components: Any) -> Any:
    return components.base_dist if isinstance(components, Independent) else components


def _mixture_op(components: Distribution) -> tuple[Callable[..., Tensor], tuple[Tensor, Tensor]]:
    """The fused op for mixtures of these components, and the parameters that it takes."""
    base = _base(components)
    if type(base) not in _MIXTURE_OPS or len(components.event_shape) != 1:
        raise TypeError(
            "Mixture: `component_distribution` must be PowerSpherical, VonMisesFisher or Independent(Normal, 1); "
            f"got {components!r}; use torch.distributions.MixtureSameFamily"
        )
    parameters = base._parameters if isinstance(base, _Directional) else (base.loc, base.scale)
    return _MIXTURE_OPS[type(base)], parameters


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
    result = (cross_entropy() - p._entropy()).to(torch.promote_types(p._dtype, q._dtype))
    return result.expand(batch_shape)


def _kl_to_uniform(p: Any, q: HypersphericalUniform) -> Tensor:
    return _kl_divergence(p, q, q._entropy)


def _kl_to_von_mises_fisher(p: Any, q: VonMisesFisher) -> Tensor:
    return _kl_divergence(p, q, lambda: q._cross_entropy(p._gap(q._parameters[0])))


def _kl_uniform_to_power_spherical(p: HypersphericalUniform, q: PowerSpherical) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64, device=q.loc.device)
    return _kl_divergence(p, q, lambda: q._cross_entropy(digamma_ratio(zero, q._b)))  # -E log((1 + t) / 2)


for _p in (PowerSpherical, VonMisesFisher, HypersphericalUniform):
    register_kl(_p, HypersphericalUniform)(_kl_to_uniform)
    register_kl(_p, VonMisesFisher)(_kl_to_von_mises_fisher)
register_kl(HypersphericalUniform, PowerSpherical)(_kl_uniform_to_power_spherical)
