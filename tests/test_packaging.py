"""A wheel holds every module, and works without what is installed for tests alone."""

import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_folder_of_modules_is_a_package_of_the_wheel(monkeypatch):
    """A folder that setup.py or its own __init__.py leaves out is missing from the wheel, not from the checkout."""
    setuptools = pytest.importorskip("setuptools")
    named = []
    monkeypatch.setattr(setuptools, "setup", lambda packages, **others: named.extend(packages))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    folders = {
        file.parent.relative_to(ROOT).parts for name in ("effops", "kernels") for file in (ROOT / name).rglob("*.py")
    }
    expected = {".".join(folder if folder[0] == "effops" else ("effops", *folder)) for folder in folders}
    assert sorted(named) == sorted(expected)
    assert (ROOT / "effops" / "py.typed").exists()


def test_one_tested_set_pins_what_the_package_asks_for():
    """A plot looked different, or failed, with the matplotlib of the day."""
    project = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[0]
    asked = set(re.findall(r'"([a-z][a-z-]*)>=', project)) - {"setuptools"}
    pinned = set(re.findall(r"^([a-z][a-z-]*)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert len(asked) > 10
    assert asked <= pinned


def test_no_text_asks_for_effops_from_an_index():
    """`pip install 'effops[bench]'` finds nothing before there is a release."""
    files = [
        *ROOT.glob("*.md"),
        *(file for folder in ("effops", "docs", "bench") for file in (ROOT / folder).rglob("*.[mp][dy]")),
    ]
    assert [file for file in files if re.search(r"pip install [^\n]*['\"]effops", file.read_text())] == []


@pytest.mark.slow
def test_without_triton():
    """PyTorch brings Triton where there is a GPU. Elsewhere nothing needs it."""
    code = """
        import sys
        sys.modules["triton"] = None
        import torch, effops
        x, ones = torch.randn(2, 3), torch.ones(2)
        out = effops.power_spherical_log_prob(x, ones, x)
        reports = effops.explain(effops.power_spherical_log_prob, x, ones, x).variants
        assert reports["triton"].temporary_bytes is None
        assert reports["chunked"].supported
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.slow
def test_the_benchmark_without_triton():
    code = """
        import sys
        sys.modules["triton"] = None
        sys.path.insert(0, "bench")
        import run
        variants = ["--variants", "triton,chunked,naive", "--device", "cpu", "--pass", "both", "--repeats", "1"]
        assert run.main(["--op", "broadcast_dot", "--size", "M=2,T=2,D=3", *variants]) == 0
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    printed = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert "triton skipped: " in printed


def test_numpy_is_installed_with_it():
    """PyTorch works without, and every start then printed "UserWarning: Failed to initialize NumPy"."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    for name in ("torch", "numpy", "rich"):
        assert any(one.startswith(f"{name}>=") for one in dependencies)
        assert any(one.startswith(f"{name}==") for one in pinned)
