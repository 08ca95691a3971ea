"""The package's log_prob, replaced and given back."""

import doctest
import sys

import pytest
import torch

import effops
from effops import patch
from effops.measure import Pass, memory
from effops.reference import reference_of

power_spherical = pytest.importorskip("power_spherical")


@pytest.fixture
def original():
    own = vars(power_spherical.PowerSpherical)["log_prob"]
    yield own
    assert vars(power_spherical.PowerSpherical)["log_prob"] is own


def current():
    return vars(power_spherical.PowerSpherical)["log_prob"]


@pytest.fixture
def call(generator):
    loc, scale, x = reference_of(effops.power_spherical_log_prob).workload(M=50, T=40, D=64, generator=generator)
    return power_spherical.PowerSpherical(loc, scale, validate_args=False), x


def test_patched_instances_take_the_op(original, call):
    p, x = call
    with effops.patch_power_spherical():
        assert torch.equal(p.log_prob(x), effops.power_spherical_log_prob(p.loc, p.scale, x))
        assert memory(Pass(p.log_prob, (x,))).temporary_bytes <= 4 * 2**20
    assert memory(Pass(p.log_prob, (x,))).temporary_bytes > 20 * 2**20


def test_a_patch_lasts_until_it_is_undone(original):
    applied = effops.patch_power_spherical()
    assert current() is not original
    applied.undo()
    assert current() is original
    applied.undo()
    assert current() is original


def test_patching_twice_is_patching_once(original):
    effops.patch_power_spherical()
    replaced = current()
    again = effops.patch_power_spherical()
    assert current() is replaced
    again.undo()
    assert current() is original


def test_a_block_inside_leaves_what_it_found(original):
    outer = effops.patch_power_spherical()
    with effops.patch_power_spherical():
        pass
    assert current() is not original
    outer.undo()


def test_an_error_in_the_block_undoes_too(original):
    with pytest.raises(KeyError), effops.patch_power_spherical():
        raise KeyError


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "power_spherical", None)
    with pytest.raises(ImportError, match=r"pip install power-spherical, or use effops\.distributions"):
        effops.patch_power_spherical()


def test_example_of_the_docstring(original):
    found = doctest.testmod(patch, extraglobs={"torch": torch, "effops": effops})
    assert found.attempted >= 4
    assert found.failed == 0
