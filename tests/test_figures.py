"""The figures of README.md and docs/*.md follow from committed results; `docs/figures.py --check` says where not."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"<!-- figures: (\w+) -->\n(.+?)\n<!-- end -->", re.DOTALL)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the command reads and writes."""
    for folder in ("docs", "bench"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def figures(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, root / "docs" / "figures.py", *arguments], capture_output=True, text=True)


def blocks(root: Path) -> dict[Path, list[str]]:
    pages = (root / "README.md", *sorted((root / "docs").glob("*.md")))
    return {page: found for page in pages if (found := BLOCK.findall(page.read_text()))}


@pytest.mark.slow
def test_a_figure_that_no_result_has_is_found_and_mended(copy: Path) -> None:
    pages = {page: page.read_text() for page in blocks(copy)}
    for page, text in pages.items():
        last = list(BLOCK.finditer(text))[-1]
        page.write_text(text[: last.start(2)] + re.sub(r"\d", "7", last[2]) + text[last.end(2) :])
    checked = figures(copy, "--check")
    assert checked.returncode == 1, checked.stderr
    assert checked.stdout == f"differ from the results: {', '.join(page.name for page in pages)}\n"
    assert figures(copy).returncode == 0
    assert {page: page.read_text() for page in pages} == pages


def test_every_text_is_on_one_page() -> None:
    """A page that lost the marks around a figure would not be checked."""
    texts = runpy.run_path(str(ROOT / "docs" / "tables.py"))["TEXTS"]
    assert sorted(texts) == sorted(name for found in blocks(ROOT).values() for name, _ in found)
