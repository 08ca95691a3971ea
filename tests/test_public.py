"""What `import effops` shows: the public names, and none of the folders inside."""

import subprocess
import sys

import pytest

import effops
import effops.measure
import effops.memory
import effops.memory.models
from effops import text

# As docs/versions.md has it.
MODULES = (effops, effops.distributions, effops.measure, effops.memory, effops.memory.models, effops.nn)


def test_names():
    when_asked_for = "CannotTile", "MemoryBudgetExceeded", "TilesDiffer", "budget", "compare", "lint", "tiled"
    assert dir(effops) == sorted([*effops.__all__, *when_asked_for, "measure", "memory"])
    assert all(hasattr(effops, name) for name in dir(effops))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_modules_name_what_is_public(module):
    """`effops.measure` and `effops.nn` had no `__all__`, so that what they import seemed to be theirs."""
    assert module.__all__
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_help_is_for_users(module):
    """`help(effops.memory)` began with what the folder may import, which is for those who change it."""
    assert module.__doc__
    assert "may import" not in module.__doc__


def test_modules_are_imported_when_they_are_asked_for():
    code = """
import sys, effops
assert "effops.memory" not in sys.modules
assert "effops.programs" not in sys.modules
assert "transformers" not in sys.modules
exec("from effops import *")
assert "effops.memory" not in sys.modules
print(effops.memory.anatomy.__name__, effops.measure.memory.__name__)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "anatomy memory\n", found.stderr


def wrongly_spelt(module):
    """A public name of a module without its last letter, and with it."""
    name = max(module.__all__, key=len)
    return name[:-1], name


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_misspelt_name(module):
    """Python adds a suggestion where it prints a traceback, and a notebook or a log has none."""
    given, near = wrongly_spelt(module)
    with pytest.raises(AttributeError) as caught:
        getattr(module, given)
    assert str(caught.value) == f'module {module.__name__!r} has no attribute {given!r}; did you mean "{near}"?'
    assert caught.value.name == given
    assert caught.value.obj is None  # so that Python adds no second one
    assert not hasattr(module, given)
    assert getattr(module, given, 3) == 3


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_misspelt_name_is_imported(module):
    given, near = wrongly_spelt(module)
    with pytest.raises(ImportError) as caught:
        exec(f"from {module.__name__} import {given} as found", {})
    assert str(caught.value) == f'cannot import name {given!r} from {module.__name__!r}; did you mean "{near}"?'


def test_a_name_of_one_of_its_modules():
    with pytest.raises(
        AttributeError, match=r"no attribute 'PowerSpherical'; it is effops.distributions.PowerSpherical$"
    ):
        effops.PowerSpherical  # noqa: B018
    with pytest.raises(ImportError, match=r"'max_batch_size' from 'effops'; it is effops.memory.max_batch_size$"):
        exec("from effops import max_batch_size", {})
    assert not hasattr(effops, "nn.MultiheadAttention")


@pytest.mark.parametrize("name", ["gitlab", "__wrapped__", "_nn"])
def test_no_name_is_near(name):
    """What Python or a notebook asks of any object has two underscores, or one."""
    with pytest.raises(AttributeError) as caught:
        getattr(effops, name)
    assert str(caught.value) == f"module 'effops' has no attribute {name!r}"
    assert caught.value.obj is effops
    with pytest.raises(ImportError, match=rf"^cannot import name {name!r} from 'effops' \("):
        exec(f"from effops import {name}", {})


def test_a_module_of_effops_is_imported_by_its_name():
    """Python asks a package for the name first, and takes the module if the package lacks it."""
    code = "from effops import programs, reference; from effops.memory import models; print(models.__name__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "effops.memory.models\n", found.stderr


def test_a_name_that_is_asked_for_again_is_found_quickly(monkeypatch):
    """`hasattr` of what walks through all modules asks for one name many times."""
    asked = []
    monkeypatch.setattr(text, "did_you_mean", lambda *args: asked.append(args) or "")
    assert not any([hasattr(effops, "never_heard_of"), hasattr(effops, "never_heard_of")])
    assert len(asked) == 1
    text._nearest.cache_clear()
