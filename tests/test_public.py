"""What `import effops` shows: the public names, and none of the folders inside."""

import subprocess
import sys

import pytest

import effops


def test_names():
    assert dir(effops) == sorted([*effops.__all__, "measure", "memory"])
    assert all(hasattr(effops, name) for name in dir(effops))


def test_modules_are_imported_when_they_are_asked_for():
    code = """
import sys, effops
assert "effops.memory" not in sys.modules
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
