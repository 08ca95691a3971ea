"""PyTorch's own samples of its operators, in tiles of two: results and gradients are those of the whole, or refused."""

import functools
import warnings

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from effops.programs.tiles.refusals import CannotTile

from .forced_tiles import forced, is_float

pytest.importorskip("expecttest", reason="PyTorch's samples need it")
from torch.testing._internal.common_methods_invocations import op_db

NAMES = sorted({op.full_name for op in op_db})
SAMPLES = 6  # of an operator
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


def pytest_generate_tests(metafunc):
    option = metafunc.config.option
    step = 1 if option.exhaustive else 12 if option.ci else 120
    metafunc.parametrize("name", NAMES[::step])


def test_operator(name):
    for op in (one for one in op_db if one.full_name == name and one.name not in UNDEFINED):
        if torch.float32 not in op.dtypes:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))[:SAMPLES]
            except Exception as error:
                pytest.skip(f"no samples: {error}")
            for sample in samples:
                hold(op, sample)


def hold(op, sample):
    """Compare tiles with the whole; returns how many axes were cut."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    given = [leaves[place].detach().requires_grad_(leaves[place].requires_grad) for place in places]

    def function(*tensors):
        filled = list(leaves)
        for place, tensor in zip(places, tensors):
            filled[place] = tensor
        first, args, kwargs = tree_unflatten(filled, spec)
        return tree_leaves(op(first, *args, **kwargs))

    if not given or any(one.layout != torch.strided for one in given):
        return 0
    try:
        expected = function(*given)
    except Exception:
        return 0  # a sample that does not run here
    if not all(isinstance(one, torch.Tensor) for one in expected):
        return 0
    try:
        programs, _ = forced(function, given, 2)
    except (CannotTile, RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
        return 0  # not traced: a call is refused
    for axis, program in programs:
        about = f"{op.full_name}, axis {axis}, {[tuple(one.shape) for one in given]}, {sample.args}, {sample.kwargs}"
        torch.manual_seed(0)
        found = program(*given)
        torch.manual_seed(0)
        close(found, function(*given), about)
        outputs = [number for number, one in enumerate(expected) if is_float(one) and one.requires_grad]
        wanted = [one for one in given if one.requires_grad]
        if outputs and wanted:
            upstream = [torch.randn_like(expected[number]) for number in outputs]
            pulled = [
                torch.autograd.grad([all_of_them[number] for number in outputs], wanted, upstream, allow_unused=True)
                for all_of_them in (found, function(*given))
            ]
            exact = functools.partial(gradients_in_float64, function, given, outputs, upstream)
            close(*pulled, f"gradients of {about}", exact)
    return len(programs)


def gradients_in_float64(function, given, outputs, upstream):
    wide = [(one.detach().double() if is_float(one) else one).requires_grad_(one.requires_grad) for one in given]
    results = function(*wide)
    wanted = [one for one in wide if one.requires_grad]
    upstream = [one.double() for one in upstream]
    return torch.autograd.grad([results[number] for number in outputs], wanted, upstream, allow_unused=True)


def close(found, expected, about, exact=None):
    """Whether all are equal but for roundings, of which tiles may have more by a factor; `exact` tells the errors."""
    assert len(found) == len(expected), about
    for number, (one, other) in enumerate(zip(found, expected)):
        assert (one is None) == (other is None), about
        if other is not None:
            assert (one.shape, one.dtype) == (other.shape, other.dtype), about
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-4, equal_nan=True):
                assert exact is not None, (about, one, other)
                error, own = ((each - exact()[number]).abs().max() for each in (one, other))
                assert error <= 8 * own, (about, one, other)
