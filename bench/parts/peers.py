"""Other implementations that the benchmark stands effops's ops against: by op, by the name of their row."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from effops import power_spherical_log_prob, von_mises_fisher_log_prob
from effops.numerics.special import log_vmf_normaliser


@dataclass(frozen=True)
class Peer:
    """A function with an op's arguments.

    Attributes:
        function: takes the arguments of the op
        module: what must be importable for it
        always: whether it is shown without being asked for
        is_ready: whether its first forward pass compiles nothing
        memory_like: the variant of the op whose predicted memory stands for that of the peer
        exact: the function in float64, in as little memory as the inputs in float64 and the result need; None if
            the peer is no reference for values
    """

    function: Callable[..., Tensor]
    module: str
    always: bool = False
    is_ready: bool = False
    memory_like: str = "naive"
    exact: Callable[..., Tensor] | None = None

    @property
    def obstacle(self) -> str:
        """Why the peer cannot run; empty if it can."""
        return "" if importlib.util.find_spec(self.module) else f"the Python package {self.module} is not installed"


def power_spherical(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """The log density of the power_spherical package, as its users write it."""
    from power_spherical import PowerSpherical

    log_prob: Tensor = PowerSpherical(loc, scale).log_prob(x)
    return log_prob


def power_spherical_exact(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """The same in float64, for one index of the leading axis of `x` after the other: an axis of the result."""
    loc, scale, x = loc.double(), scale.double(), x.double()
    if x.dim() <= max(loc.dim(), scale.dim() + 1) or not len(x):
        return power_spherical(loc, scale, x)
    return torch.stack([power_spherical(loc, scale, part) for part in x])


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def power_spherical_compiled(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """torch.compile of the package's log density."""
    return _compiled(power_spherical)(loc, scale, x)


def normal(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """The log density of torch.distributions."""
    from torch.distributions import Independent, Normal

    return Independent(Normal(loc, scale, validate_args=False), 1, validate_args=False).log_prob(x)


def normal_compiled(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """torch.compile of the same."""
    return _compiled(normal)(loc, scale, x)


def einsum_logsumexp(log_prob: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What a user would write: the log densities of all pairs, by matrix products, and then torch's logsumexp."""

    def mixture(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        return torch.logsumexp(log_weights + log_prob(loc, scale, x, variant="einsum"), -1)

    return mixture


def power_spherical_mixture_keops(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """KeOps' reduction of the formula, for loc (T, M, D), scale (T, M) and x (N, T, 1, D) as in the workload."""
    b = 0.5 * (x.shape[-1] - 1)
    wide = scale.double()
    normaliser = torch.lgamma(wide + 2 * b) - torch.lgamma(wide + b) - b * math.log(4 * math.pi)
    dot = (_rows(x.transpose(0, 1)) * _columns(loc)).sum(-1)
    log_half = (0.5 + 0.5 * dot).log()
    values = _columns((log_weights + normaliser).to(x.dtype).unsqueeze(-1))
    return (values + _columns(scale.unsqueeze(-1)) * log_half).logsumexp(2).squeeze(-1).mT


def von_mises_fisher_mixture_keops(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """The same for von Mises-Fisher components; KeOps has no Bessel function, so the normaliser is effops's."""
    normaliser = log_vmf_normaliser(scale.double(), x.shape[-1])
    dot = (_rows(x.transpose(0, 1)) * _columns(loc)).sum(-1)
    values = _columns((log_weights + normaliser).to(x.dtype).unsqueeze(-1))
    return (values + _columns(scale.unsqueeze(-1)) * (dot - 1)).logsumexp(2).squeeze(-1).mT


def normal_mixture_keops(log_weights: Tensor, loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """KeOps' reduction of the formula, for loc (M, D), scale (M, 1) and x (N, 1, D) as in the workload."""
    normaliser = -x.shape[-1] * (scale.double().log() + 0.5 * math.log(2 * math.pi))
    values = _columns((log_weights.unsqueeze(-1) + normaliser).to(x.dtype))
    squares = ((_rows(x) - _columns(loc)) ** 2).sum(-1) * _columns(scale**-2)
    return (values - 0.5 * squares).logsumexp(1).squeeze(-1)


def plain_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """What a user would write: all scores by einsum, scaled, then masked, then their softmax."""
    scores = torch.einsum("...id,...jd->...ij", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1)


def additive_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    return (weight * torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3))).sum(-1)


def additive_sums(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    return additive_scores(query, key, weight).softmax(-1) @ value


def additive_scores_compiled(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """torch.compile of the plain expression."""
    return _compiled(additive_scores)(query, key, weight)


def additive_sums_compiled(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """torch.compile of the plain expression."""
    return _compiled(additive_sums)(query, key, value, weight)


def _rows(tensor: Tensor) -> Any:
    """(*B, N, 1, D) as KeOps' variable of the axis that is kept."""
    from pykeops.torch import LazyTensor

    return LazyTensor(tensor.contiguous())


def _columns(tensor: Tensor) -> Any:
    """(*B, M, D) as KeOps' variable of the axis that is reduced."""
    from pykeops.torch import LazyTensor

    return LazyTensor(tensor.unsqueeze(-3).contiguous())


def _mixture(log_prob: Callable[..., Tensor], keops: Callable[..., Tensor]) -> Mapping[str, Peer]:
    return {
        "einsum_logsumexp": Peer(einsum_logsumexp(log_prob), "effops", memory_like="einsum"),
        "keops": Peer(keops, "pykeops", memory_like="chunked"),
    }


PEERS: Mapping[str, Mapping[str, Peer]] = {
    "power_spherical_log_prob": {
        "power_spherical": Peer(
            power_spherical, "power_spherical", always=True, is_ready=True, exact=power_spherical_exact
        ),
        "power_spherical_compiled": Peer(power_spherical_compiled, "power_spherical"),
    },
    "normal_log_prob": {
        "torch_distributions": Peer(normal, "torch"),
        "torch_distributions_compiled": Peer(normal_compiled, "torch", memory_like="compile"),
    },
    "power_spherical_mixture_log_prob": _mixture(power_spherical_log_prob, power_spherical_mixture_keops),
    "von_mises_fisher_mixture_log_prob": _mixture(von_mises_fisher_log_prob, von_mises_fisher_mixture_keops),
    "normal_mixture_log_prob": {"keops": Peer(normal_mixture_keops, "pykeops", memory_like="chunked")},
    "attention": {"torch_sdpa": Peer(torch.nn.functional.scaled_dot_product_attention, "torch", memory_like="sdpa")},
    "attention_weights": {"einsum_mask_softmax": Peer(plain_weights, "torch", memory_like="einsum")},
    "additive_attention_scores": {"plain_compiled": Peer(additive_scores_compiled, "torch", memory_like="compile")},
    "additive_attention": {"plain_compiled": Peer(additive_sums_compiled, "torch", memory_like="compile")},
}
