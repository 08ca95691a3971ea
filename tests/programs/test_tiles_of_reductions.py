"""Reductions of the axis that is cut, in tiles of forced lengths: values and gradients are those of PyTorch."""

import math

import pytest
import torch

from .forced_tiles import forced

NAN, INF = math.nan, math.inf
VALUES = {
    "numbers": [[0.5, -1.25, 3.0, 2.0, -0.75], [1.5, 0.25, -2.0, 4.0, -3.5], [2.5, 5.0, 0.75, -4.5, 1.0]],
    "ties": [[3.0, -1.0, 3.0, -1.0, 3.0], [3.0, -1.0, 3.0, 2.0, -1.0], [3.0, 3.0, -1.0, -1.0, 2.0]],
    "zeros": [[0.0, 2.0, 0.0, 1.5, 3.0], [1.5, 0.0, 2.0, 2.5, 0.5], [2.0, 3.0, 0.0, 1.0, 0.0]],
    "nan": [[1.0, NAN, 2.0, NAN, 0.5], [NAN, NAN, 3.0, 3.0, NAN], [2.0, 1.0, 4.0, -INF, NAN]],
    "-inf": [[-INF, -INF, 2.0, -INF, 1.0], [-INF, -INF, -INF, -INF, -INF], [-INF, 1.0, -INF, -INF, 1.0]],
}
REDUCTIONS = {
    "argmax": lambda x, axis, keepdim: x.argmax(axis, keepdim),
    "argmin": lambda x, axis, keepdim: x.argmin(axis, keepdim),
    "max.dim": lambda x, axis, keepdim: tuple(x.max(axis, keepdim)),
    "min.dim": lambda x, axis, keepdim: tuple(x.min(axis, keepdim)),
    "values of max.dim": lambda x, axis, keepdim: x.max(axis, keepdim).values * 2,
    "number of min.dim": lambda x, axis, keepdim: x.min(axis, keepdim).indices,
    "amax": torch.amax,
    "amin": torch.amin,
    "aminmax": lambda x, axis, keepdim: tuple(torch.aminmax(x, dim=axis, keepdim=keepdim)),
    "sum": torch.sum,
    "nansum": torch.nansum,
    "mean": torch.mean,
    "prod": torch.prod,
    "logsumexp": torch.logsumexp,
    "var": lambda x, axis, keepdim: x.var(axis, keepdim=keepdim),
    "std": lambda x, axis, keepdim: x.std(axis, keepdim=keepdim),
    "var_mean": lambda x, axis, keepdim: tuple(torch.var_mean(x, axis, keepdim=keepdim)),
    "std_mean": lambda x, axis, keepdim: tuple(torch.std_mean(x, axis, correction=0, keepdim=keepdim)),
    "norm": lambda x, axis, keepdim: x.norm(dim=axis, keepdim=keepdim),
    "norm of order 1": lambda x, axis, keepdim: x.norm(1, dim=axis, keepdim=keepdim),
    "any": lambda x, axis, keepdim: (x > 2).any(axis, keepdim),
    "all": lambda x, axis, keepdim: (x < 4).all(axis, keepdim),
    "count_nonzero": lambda x, axis, keepdim: x.count_nonzero(axis),
}


def copies(values, dtype=torch.float32):
    x = torch.tensor(values, dtype=dtype)
    return x.requires_grad_() if dtype.is_floating_point else x


def results(out):
    return list(out) if isinstance(out, (tuple, list)) else [out]


def hold(function, args, lengths=(1, 2, 3)):
    """Compare tiles with the whole along each axis; the axes that are cut, and why others are not."""
    for length in lengths:
        programs, blocked = forced(lambda *given: results(function(*given)), args, length)
        for axis, program in programs:
            about = f"axis {axis}, tiles of {length}, {args}"
            found, expected = program(*args), results(function(*args))
            for own, other in zip(found, expected, strict=True):
                assert (own.shape, own.dtype, own.requires_grad) == (other.shape, other.dtype, other.requires_grad)
                assert torch.allclose(own, other, rtol=1e-5, atol=1e-6, equal_nan=True), (about, own, other)
            wanted = [one for one in args if one.requires_grad]
            places = [number for number, one in enumerate(expected) if one.requires_grad]
            if wanted and places:
                upstream = [torch.linspace(1, 2, expected[place].numel()).reshape_as(expected[place]) for place in places]
                pulled = (
                    torch.autograd.grad([out[place] for place in places], wanted, upstream, allow_unused=True)
                    for out in (found, expected)
                )
                for own, other in zip(*pulled):
                    assert (own is None) == (other is None), about
                    if other is not None:
                        assert torch.allclose(own, other, rtol=1e-4, atol=1e-5, equal_nan=True), (about, own, other)
    return [axis for axis, _ in programs], blocked


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name, values):
    """Both axes are cut: the one that is reduced, and the other."""
    for axis in (0, 1, -1):
        for keepdim in (False, True):
            cut, blocked = hold(lambda x: REDUCTIONS[name](x + 0, axis, keepdim), [copies(VALUES[values])])
            assert cut == [0, 1], blocked
