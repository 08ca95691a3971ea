"""Random unit vectors: uniform ones, and ones at given angles to others."""

import functools

import torch
from torch import Tensor

from effops.numerics.precision import (
    INPUT_SLACK,
    arithmetic_dtype,
    contraction_error,
    sphere_tolerance,
    unit_roundoff,
)


def random_directions(
    shape: tuple[int, ...],
    generator: torch.Generator | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Unit vectors, uniform on the sphere."""
    vectors = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    # A float32 draw is 0 once in 2^24 draws. A vector of one coordinate would then have no direction.
    vectors[..., -1] += 1e-12
    vectors /= torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors


def directions_at_angle(loc: Tensor, ratio: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Unit vectors at an angle to `loc` with tan(angle / 2)^2 = `ratio`. Otherwise their direction is uniform.

    The Householder reflection along loc + sign(loc_1) e_1 turns a direction orthogonal to e_1 into one orthogonal to
    loc. Nothing cancels in it, so the result has its gradient wherever loc is, at e_1 and -e_1 too.
    """
    orthogonal = loc.new_zeros(loc.shape)
    orthogonal[..., 1:] = random_directions(orthogonal[..., 1:].shape, generator, dtype=loc.dtype, device=loc.device)
    first, ratio = loc[..., :1], ratio.unsqueeze(-1)
    sign = torch.copysign(torch.ones_like(first), first).detach()
    weight = 2 / (1 + ratio)  # 1 + cosine
    sine = weight * ratio.sqrt()
    step = sine * torch.linalg.vecdot(orthogonal, loc).unsqueeze(-1) / (1 + sign * first)
    x = (sine * orthogonal).addcmul_(weight - 1 - step, loc)
    x[..., :1] -= sign * step
    x /= torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True)  # the length differs from 1 by rounding alone
    return x


def have_length_one(vectors: Tensor) -> bool:
    """Whether a quick check finds that all vectors (..., D) have length 1. If it does not, `lengths` decides."""
    if vectors.dtype not in (torch.float32, torch.float64):
        return False
    vectors = vectors.detach() if vectors.requires_grad else vectors  # no graph, since numbers are read below
    shortest, longest = torch.linalg.vector_norm(vectors, dim=-1).aminmax()
    tolerance = _narrow_tolerance(vectors.shape[-1], vectors.dtype)
    least, most = float(shortest) ** 2, float(longest) ** 2
    return 1 - tolerance <= least and most <= 1 + tolerance  # False for NaN


@functools.lru_cache
def _narrow_tolerance(dimension: int, dtype: torch.dtype) -> float:
    """Half of `sphere_tolerance` at the highest precision of matrix products, where it is the smallest."""
    return 0.5 * (contraction_error(dimension, dtype) * unit_roundoff(dtype) + INPUT_SLACK[dtype])


def lengths(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The lengths of vectors (..., D), and where they are 1 up to rounding of the coordinates to their dtype."""
    arithmetic = arithmetic_dtype(vectors.dtype)
    found: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=arithmetic)
    return found, (found**2 - 1).abs() <= sphere_tolerance(vectors.shape[-1], arithmetic, (vectors.dtype,))
