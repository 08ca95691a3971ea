"""What `import effops` shows: the public names, and none of the folders inside."""

import subprocess
import sys

import pytest

import effops
import effops.measure
import effops.memory
import effops.memory.models

# As docs/versions.md has it.
MODULES = (effops, effops.distributions, effops.measure, effops.memory, effops.memory.models, effops.nn)


def test_names():
    assert dir(effops) == sorted([*effops.__all__, "MemoryBudgetExceeded", "budget", "lint", "measure", "memory"])
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


def test_a_misspelt_name():
    with pytest.raises(AttributeError, match="module 'effops' has no attribute 'power_spherical'") as caught:
        _ = effops.power_spherical
    assert caught.value.name == "power_spherical"
    assert caught.value.obj is effops  # of which Python suggests a name
