"""NaN in rows that a mask excludes, and in rows of their own: what docs/pytorch.md says of them."""

import pytest
import torch

import effops

QUERY, KEY, VALUE = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (5, 6, 7))
KEY, VALUE = KEY.repeat(1, 1, 2, 1)[..., :7, :], VALUE
VALID = torch.tensor([True] * 5 + [False] * 2)
VARIANTS = ["sdpa", "chunked", "einsum", "naive"]


def padded(tensor):
    return tensor.masked_fill(~VALID.unsqueeze(-1), torch.nan)


@pytest.mark.parametrize("variant", VARIANTS)
def test_excluded_keys(variant):
    """Only PyTorch's kernels let NaN of an excluded key through; none keeps that of a value out."""
    found = effops.attention(QUERY, padded(KEY), VALUE, VALID, variant=variant)
    expected = effops.attention(QUERY, KEY, VALUE, VALID, variant="naive")
    assert torch.allclose(found, expected, atol=1e-5) == (variant != "sdpa")
    assert effops.attention(QUERY, KEY, padded(VALUE), VALID, variant=variant).isnan().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_their_own(variant):
    query = QUERY.clone()
    query[..., 4, :] = torch.nan
    found = effops.attention(query, KEY, VALUE, VALID, variant=variant)
    assert found.isnan().any(-1).sum() == found[..., 4, 0].numel()
    loc = torch.eye(8)[:3]
    points = torch.nn.functional.normalize(query[0, 0], dim=-1)
    densities = effops.power_spherical_log_prob(loc, torch.ones(3), points.unsqueeze(1))
    assert densities.isnan().any(-1).tolist() == [False] * 4 + [True]
