"""Fixtures of the tests of kernels."""

import pytest


@pytest.fixture
def whole_sums(monkeypatch):
    """Each sum in one program, which goes through all of its tiles: sums of tests are short and would be split."""
    from effops.kernels import launch

    monkeypatch.setattr(launch, "BUSY", 1)
