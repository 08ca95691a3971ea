"""A wheel holds every module."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_folder_of_modules_is_a_package_of_the_wheel(monkeypatch):
    """A folder that setup.py or its own __init__.py leaves out is missing from the wheel, not from the checkout."""
    setuptools = pytest.importorskip("setuptools")
    named = []
    monkeypatch.setattr(setuptools, "setup", lambda packages: named.extend(packages))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    folders = {
        file.parent.relative_to(ROOT).parts for name in ("effops", "kernels") for file in (ROOT / name).rglob("*.py")
    }
    expected = {".".join(folder if folder[0] == "effops" else ("effops", *folder)) for folder in folders}
    assert sorted(named) == sorted(expected)
    assert (ROOT / "effops" / "py.typed").exists()
