"""The Python of README.md and of every page runs as it stands, the blocks of a page one after the other."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if PYTHON.search(page.read_text())
]


def code(text: str) -> str:
    """The Python of a page, in the lines where the page has it, so that an error names the line."""
    lines = [""] * (text.count("\n") + 1)
    for block in PYTHON.finditer(text):
        first = text.count("\n", 0, block.start(1))
        lines[first : first + block[1].count("\n")] = block[1].splitlines()
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_run(page: Path, tmp_path: Path) -> None:
    """The first example of docs/memory.md could not be pasted: it named a model that nobody has."""
    script = tmp_path / f"page_{page.stem}.py"  # no module that the page imports has such a name
    script.write_text(code(page.read_text()))
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_the_report_of_lint_is_that_of_the_script(tmp_path: Path) -> None:
    """The page's script is a block of Python and an indented one; its report is the first block of text."""
    page = (ROOT / "docs" / "out_of_memory.md").read_text()
    main = re.search(r"^    if __name__ == .*?\n\n", page, re.DOTALL | re.MULTILINE)
    report = re.search(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    first = PYTHON.search(page)
    assert main
    assert report
    assert first
    (tmp_path / "train.py").write_text(f"{first[1]}\n\n{textwrap.dedent(main[0])}")
    command = [sys.executable, "-m", "effops", "lint", "--device", "cuda", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert found.stdout.strip() == report[1].strip(), found.stderr


def test_variants_without_gradients_are_named() -> None:
    """The page said that all variants have gradients, and six lines below that one has none."""
    page = (ROOT / "docs" / "variants.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", page, re.MULTILINE))
    without = [name for name, row in rows.items() if "without gradients" in row]
    assert f"All variants have gradients but `{without[0]}`, and" in page
    assert "float32 without gradients" in rows[without[0]]
    assert f"in `{without[0]}` float32 alone" in page
    assert len(without) == 1


def test_anchors_of_the_readme_exist() -> None:
    """No page listed the tools for a result that is wrong; README names the section that does."""
    links = re.findall(r"\]\((docs/[\w.]+)#([\w-]+)\)", (ROOT / "README.md").read_text())
    assert ("docs/variants.md", "if-a-result-looks-wrong") in links
    for page, anchor in links:
        titles = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
