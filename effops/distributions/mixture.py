"""Mixture: the fused ops of its components with the interface of `MixtureSameFamily`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, Normal

from effops.distributions.directional import Directional
from effops.distributions.power_spherical import PowerSpherical
from effops.distributions.told import TellingDistribution, check_validate_args, checked_sizes
from effops.distributions.von_mises_fisher import VonMisesFisher
from effops.numerics.shapes import broadcast_shapes
from effops.ops.densities import normal, power_spherical, von_mises_fisher
from effops.pytorch.calls import _size
from effops.text import tells_wrong_arguments


class Mixture(TellingDistribution, MixtureSameFamily):
    """A `torch.distributions.MixtureSameFamily` that holds log densities of components in blocks alone.

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

    _value_name: ClassVar[str] = "x"

    @tells_wrong_arguments
    def __init__(
        self,
        mixture_distribution: Categorical,
        component_distribution: Distribution,
        validate_args: bool | None = None,
    ) -> None:
        check_validate_args("Mixture", validate_args)
        if not isinstance(mixture_distribution, Categorical):
            is_swapped = isinstance(component_distribution, Categorical)
            raise TypeError(
                "Mixture: `mixture_distribution` must be a torch.distributions.Categorical; "
                f"got {type(mixture_distribution).__name__}; "
                + ("swap it with `component_distribution`" if is_swapped else "build one from the weights")
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
        if mixture_distribution.logits.shape[-1] != count:
            raise ValueError(
                "Mixture: `component_distribution` must have as many components as `mixture_distribution` has weights, "
                f"{mixture_distribution.logits.shape[-1]}; got {count}, the last of its batch shape; give one for each"
            )
        components = component_distribution.expand((*batch_shape, count))
        super().__init__(mixture_distribution.expand(batch_shape), components, validate_args)

    def _expand_into(self, new: Any, shape: torch.Size) -> Any:
        return MixtureSameFamily.expand(self, shape, new)

    @tells_wrong_arguments
    def log_prob(self, x: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(x)
        log_prob, parameters = _mixture_op(self.component_distribution)
        log_weights = torch.log_softmax(self.mixture_distribution.logits, dim=-1)
        return log_prob(log_weights, *parameters, self._pad(x), dim=-1)

    @torch.no_grad()
    @tells_wrong_arguments
    def sample(self, sample_shape: _size = ()) -> Tensor:
        sample_shape = checked_sizes("Mixture", "sample_shape", sample_shape)
        index = self.mixture_distribution.sample(sample_shape).unsqueeze(-1)
        base = _base(self.component_distribution)
        if isinstance(base, Normal):
            return torch.normal(_chosen(base.loc, index), _chosen(base.scale, index))
        concentration = getattr(base, base._concentration_name)
        concentration = concentration.expand((*index.shape[:-1], -1)).gather(-1, index).squeeze(-1)
        chosen: Directional = type(base)(_chosen(base.loc, index), concentration, validate_args=False)
        return chosen._sample(())

    def rsample(self, sample_shape: _size = ()) -> NoReturn:
        raise NotImplementedError(
            "Mixture.rsample: a draw must have a gradient; got the choice of a component, which has none; draw by "
            "sample, or weigh what rsample of component_distribution gives"
        )

    def entropy(self) -> NoReturn:
        raise NotImplementedError(
            "Mixture.entropy has no closed form; estimate it: x = p.sample((1000,)); -p.log_prob(x).mean(0)"
        )

    @property
    def mode(self) -> NoReturn:
        raise NotImplementedError(
            "Mixture.mode has no closed form; seek the maximum of log_prob from component_distribution.mode"
        )

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
        given = components if isinstance(components, Distribution) else type(components).__name__
        raise TypeError(
            "Mixture: `component_distribution` must be PowerSpherical, VonMisesFisher or Independent(Normal, 1); "
            f"got {given}; use torch.distributions.MixtureSameFamily"
        )
    parameters = base._parameters if isinstance(base, Directional) else (base.loc, base.scale)
    return _MIXTURE_OPS[type(base)], parameters
