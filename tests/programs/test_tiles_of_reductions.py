"""Reductions of the axis that is cut, in tiles of forced lengths: values and gradients are those of PyTorch."""

import functools
import math

import pytest
import torch

import effops
from effops.measure import Pass, memory

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


SOME_SLOW = [pytest.param(name, marks=() if name == "ties" else pytest.mark.slow) for name in VALUES]
INFINITE = "prod", "var", "std", "var_mean", "std_mean"


def copies(values, dtype=torch.float32):
    x = torch.tensor(values, dtype=dtype)
    return x.requires_grad_() if dtype.is_floating_point else x


def results(out):
    return list(out) if isinstance(out, (tuple, list)) else [out]


def hold(function, args, lengths=(1, 2)):
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
                upstream = [
                    torch.linspace(1, 2, expected[place].numel()).reshape_as(expected[place]) for place in places
                ]
                pulled = (
                    torch.autograd.grad([out[place] for place in places], wanted, upstream, allow_unused=True)
                    for out in (found, expected)
                )
                for own, other in zip(*pulled):
                    assert (own is None) == (other is None), about
                    if other is not None:
                        assert torch.allclose(own, other, rtol=1e-4, atol=1e-5, equal_nan=True), (about, own, other)
    return [axis for axis, _ in programs], blocked


@pytest.mark.each_value(all=True)
@pytest.mark.parametrize("values", SOME_SLOW)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name, values):
    """Both axes are cut: the one that is reduced, and the other."""
    if values == "-inf" and name in INFINITE:
        pytest.skip("gradients may be NaN instead of infinite")
    given = [copies(VALUES[values])]
    if name == "aminmax" and torch.__version__ < "2.12":
        given = [one.detach() for one in given]  # torch 2.11 has no derivative of it
    for axis, keepdim in ((0, False), (-1, True)):
        function = functools.partial(of_sum, REDUCTIONS[name], axis, keepdim)
        cut, blocked = hold(function, given)
        assert cut == [0, 1], blocked


def of_sum(reduction, axis, keepdim, x):
    return reduction(x + 0, axis, keepdim)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_number_among_all(name, keepdim):
    """It is cut along the first axis: numbers of the others do not follow one another."""
    for values in ("ties", "nan"):
        function = functools.partial(of_sum, REDUCTIONS[name], None, keepdim)
        cut, _ = hold(function, [copies(VALUES[values])])
        assert cut == [0]


OF_AXES = {
    "any": lambda x, dims: torch.any(x + 0 > 1, dims),
    "all": lambda x, dims: torch.all(x + 0 > 1, dims),
    "sum": lambda x, dims: torch.sum(x + 0, dims),
    "amax": lambda x, dims: torch.amax(x + 0, dims),
    "logsumexp": lambda x, dims: torch.logsumexp(x + 0, dims or (0, 1, 2)),
    "var": lambda x, dims: torch.var(x + 0, dims or None),  # PyTorch's gradient of no axes is infinite
    "norm": lambda x, dims: torch.norm(x + 0, dim=dims),
    "count_nonzero": lambda x, dims: torch.count_nonzero(x + 0, dims),
}


@pytest.mark.parametrize("name", OF_AXES)
def test_several_axes_and_none(name):
    """No axes are all of them for some operators, and none for others."""
    x = torch.tensor(VALUES["zeros"])[:, None].expand(3, 2, 5).clone().requires_grad_()
    for dims in ((0, 2), (1, -1), ()):
        cut, _ = hold(lambda x, dims=dims: OF_AXES[name](x, dims), [x], lengths=(2,))
        assert cut == [0, 1, 2], dims


@pytest.mark.parametrize(
    "name", ["prod", "sum", "amax", "amin", "max.dim", "argmin", "cumsum", "cummin", "count_nonzero"]
)
def test_integers(name):
    for axis in (0, 1):
        function = functools.partial(of_sum, {**REDUCTIONS, **SCANS}[name], axis, False)
        cut, _ = hold(
            function, [torch.tensor([[3, -1, 3, 0, 3], [3, 2, -1, 7, 7], [1, 7, 3, -4, 5]], dtype=torch.int32)]
        )
        assert cut == [0, 1]


SCANS = {
    "cumsum": lambda x, axis, _: x.cumsum(axis),
    "cumprod": lambda x, axis, _: x.cumprod(axis),
    "logcumsumexp": lambda x, axis, _: x.logcumsumexp(axis),
    "cummax": lambda x, axis, _: tuple(x.cummax(axis)),
    "cummin": lambda x, axis, _: tuple(x.cummin(axis)),
    "numbers of cummax": lambda x, axis, _: x.cummax(axis).indices,
    "sums of cumsum": lambda x, axis, _: (x.cumsum(axis).sin().cumsum(axis) * x).sum(axis),
    "softmax of cumsum": lambda x, axis, _: (x - x.cumsum(axis).logsumexp(axis, keepdim=True)).exp().cumsum(axis),
    "without gradients": lambda x, axis, _: x * x.detach().cumsum(axis) + x.detach().cummax(axis).values,
}


@pytest.mark.parametrize("values", SOME_SLOW)
@pytest.mark.parametrize("name", SCANS)
def test_scan(name, values):
    if (name, values) in {("cumprod", "-inf"), ("logcumsumexp", "nan")}:
        pytest.skip("gradients may be NaN instead of infinite, or finite where all are NaN")
    for axis in (0, 1):
        cut, blocked = hold(functools.partial(of_sum, SCANS[name], axis, False), [copies(VALUES[values])])
        assert cut == [0, 1], blocked


def test_scan_that_no_gradient_enters_from_another_operand():
    x, y = copies(VALUES["numbers"]).detach(), copies(VALUES["zeros"])
    assert hold(lambda x, y: x.cumsum(0) * y + 0 * x.cumprod(0), [x, y])[0] == [0, 1]
    assert hold(lambda x, y: y.cumsum(1) * x.cumsum(1).detach(), [x, y])[0] == [0, 1]


def test_scan_of_merged_axes():
    """A tile has several indices of the axis that is scanned for each of the cut."""
    for name in ("cumsum", "cummax", "logcumsumexp"):
        x = copies(VALUES["ties"], torch.float64)  # the axes of the largest tensor are tried
        assert hold(lambda x, name=name: SCANS[name]((x + 0).flatten(), 0, None), [x])[0] == [0]
        assert hold(lambda x, name=name: SCANS[name]((x + 0).mT.flatten(), 0, None), [x])[0] == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["sum", "cumsum"])
def test_sums_in_16_bits(name, dtype):
    """Parts are kept in float32: the sum of a tile overflowed where that of all does not."""
    x = torch.tensor([30000.0, 40000, 50000, -45000, -35000, -39990]).to(dtype)[:, None].expand(6, 3)
    for length in (2, 3):
        programs, _ = forced(lambda x: [of_sum({**REDUCTIONS, **SCANS}[name], 0, False, x)], [x], length)
        assert len(programs) == 2
        for _, program in programs:
            (found,), expected = program(x), of_sum({**REDUCTIONS, **SCANS}[name], 0, False, x.double()).to(dtype)
            assert found.dtype == dtype
            assert torch.allclose(found.double(), expected.double(), rtol=1e-2)


def test_what_is_reduced_to_a_number_is_not_kept():
    x = torch.randn(90_000)
    for reduce in (torch.argmax, lambda x: torch.max(x, 0).indices, lambda x: torch.min(x, 0).values):
        tiled = effops.tiled(lambda x, reduce=reduce: reduce(x.sin()), budget="128 KiB")
        assert torch.equal(tiled(x), reduce(x.sin()))
        assert memory(Pass(tiled, (x,))).temporary_bytes <= 2**17
