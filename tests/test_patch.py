"""The package's log_prob, replaced and given back."""

import subprocess
import sys
import warnings

import pytest
import torch

import effops
from effops.measure import Pass, memory
from effops.reference import reference_of

power_spherical = pytest.importorskip("power_spherical")
NEVER_CALLED = r"patched `log_prob` of .*PowerSpherical was never called.* patch_power_spherical\(that_class\)"
unused = pytest.mark.filterwarnings("ignore:patch_power_spherical")


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


@unused
def test_a_patch_lasts_until_it_is_undone(original):
    applied = effops.patch_power_spherical()
    assert current() is not original
    applied.undo()
    assert current() is original
    applied.undo()
    assert current() is original


@unused
def test_patching_twice_is_patching_once(original):
    effops.patch_power_spherical()
    replaced = current()
    again = effops.patch_power_spherical()
    assert current() is replaced
    again.undo()
    assert current() is original


@unused
def test_a_block_inside_leaves_what_it_found(original):
    outer = effops.patch_power_spherical()
    with effops.patch_power_spherical():
        pass
    assert current() is not original
    outer.undo()


@unused
def test_an_error_in_the_block_undoes_too(original):
    with pytest.raises(KeyError), effops.patch_power_spherical():
        raise KeyError


class Copy(torch.distributions.Distribution):
    """What a project carries of the package's class."""

    def __init__(self, loc, scale):
        super().__init__(validate_args=False)
        self.loc, self.scale = loc, scale

    def log_prob(self, value):
        raise AssertionError("the class's own")


class Heir(Copy):
    pass


@pytest.mark.parametrize("target", [Copy, Heir])
def test_a_class_of_the_project_is_patched(original, call, target):
    p, x = call
    own = vars(target).get("log_prob")
    with warnings.catch_warnings(), effops.patch_power_spherical(target):
        warnings.simplefilter("error")
        assert current() is original
        log_prob = target(p.loc, p.scale).log_prob(x)
    assert torch.equal(log_prob, effops.power_spherical_log_prob(p.loc, p.scale, x))
    assert vars(target).get("log_prob") is own


@pytest.mark.parametrize("target", [Copy(torch.ones(3), 1.0), "Copy", int])
def test_what_is_no_distribution_is_refused(target):
    with pytest.raises(TypeError, match="`target` must be a class with a method `log_prob`"):
        effops.patch_power_spherical(target)


def test_a_patch_that_is_never_called_warns(original, call):
    """A project with a copy of the class once patched the package's, and nothing changed."""
    with pytest.warns(UserWarning, match=NEVER_CALLED) as caught, effops.patch_power_spherical():
        pass
    assert [warning.filename for warning in caught] == [__file__]
    applied = effops.patch_power_spherical()
    with pytest.warns(UserWarning, match=NEVER_CALLED) as caught:
        applied.undo()
    assert [warning.filename for warning in caught] == [__file__]
    p, x = call
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with effops.patch_power_spherical():
            p.log_prob(x)


@pytest.mark.slow
@pytest.mark.parametrize("called", [False, True])
def test_a_patch_that_is_never_called_warns_at_the_end_of_python(called):
    program = "import effops, torch, power_spherical as p; effops.patch_power_spherical();" + (
        "p.PowerSpherical(torch.eye(3)[0], torch.tensor(1.0)).log_prob(torch.eye(3))" if called else ""
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ("was never called" in result.stderr) != called


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "power_spherical", None)
    with pytest.raises(ImportError, match=r"pip install power-spherical, or use effops\.distributions"):
        effops.patch_power_spherical()
