"""The examples of docs/examples/ run by the commands of their pages, are short, and tell bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES = {"tour": 120}
LAUNCHERS = {
    "sharded_mixture": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "budget_in_a_test": ("-m", "pytest", "-s", "-n", "0", "-p", "no:cacheprovider"),
}
NEEDS = {"hyperspherical_vae": ("sklearn", "power_spherical"), "bert_memory": ("transformers",)}
NAMES = (
    "mixture_objective",
    "hyperspherical_vae",
    "density_estimation",
    "contrastive_in_tiles",
    "largest_batch",
    "bert_memory",
    "sharded_mixture",
    "budget_in_a_test",
    "tour",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_example_runs(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    script = ROOT / "examples" / f"{name}.py"
    found = subprocess.run(
        [sys.executable, *LAUNCHERS.get(name, ()), script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"\d bytes\b.*\b(measured|predicted)", found.stdout), found.stdout
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_example_is_short_and_has_a_page(name: str) -> None:
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    assert len(lines) <= MOST_LINES.get(name, 80)
    page = (ROOT / "docs" / "examples" / f"{name}.md").read_text()
    assert f"```{{literalinclude}} ../../examples/{name}.py\n" in page
    assert f"]({name}.md)" in (ROOT / "docs" / "examples" / "index.md").read_text()
