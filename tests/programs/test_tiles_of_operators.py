"""PyTorch's own samples of its operators, in tiles of two: results and gradients are those of the whole, or refused."""

import warnings

import pytest

pytest.importorskip("expecttest", reason="PyTorch's samples need it")
from .operators_in_tiles import NAMES, hold, samples_of


def pytest_generate_tests(metafunc):
    option = metafunc.config.option
    step = 1 if option.exhaustive else 12 if option.ci else 120
    metafunc.parametrize("name", sorted({*NAMES[::step], "addr"}))  # of addr a gradient is a sum that cancels


def test_operator(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = list(samples_of(name))
        except Exception as error:
            pytest.skip(f"no samples: {error}")
        for op, sample in samples:
            hold(op, sample)
