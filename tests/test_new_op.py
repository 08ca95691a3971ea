"""The op that docs/new_op.md adds, as the page has it: in a copy of the checkout it passes its part of the matrix."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "new_op.md").read_text()
BLOCKS = re.findall(r"^```py\n# (\S+\.py)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)  # a path, and code
MATRIX = re.findall(r"^\$ python (-m pytest tests/matrix .*)$", PAGE, re.MULTILINE)
EXPORTS, EXAMPLE = "effops/__init__.py", "explain.py"
LINE_BEFORE = "from effops.ops.broadcast_dot import broadcast_dot\n"
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".*cache", ".hypothesis", "__pycache__", "*.egg-info", "brought", "results", "_site"
)


def checkout_with_the_op(folder: Path) -> Path:
    """A copy of the checkout, with the files of the page. Blocks of one file follow one another."""
    checkout = folder / "checkout"
    shutil.copytree(ROOT, checkout, ignore=NOT_COPIED, symlinks=True)
    # Python takes effops from the copy, and the finder of an editable installation has the kernels of the original.
    (checkout / "effops" / "kernels").symlink_to(Path("..") / "kernels")
    files: dict[str, list[str]] = {}
    for path, code in BLOCKS:
        files.setdefault(path, []).append(code)
    for path, parts in files.items():
        file, code = checkout / path, "\n\n".join(parts)
        if path == EXPORTS:
            before, line, after = file.read_text().partition(LINE_BEFORE)
            assert line
            code = before + line + code + after
        else:
            assert not file.exists(), f"{path} is there already"
        file.write_text(code)
    return checkout


def run(checkout: Path, *arguments: str) -> str:
    """What Python prints in the copy."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_op_of_the_page_passes_its_matrix(tmp_path: Path) -> None:
    """No other test runs the code of this page, so that a name that changes would leave it wrong."""
    (matrix,) = MATRIX
    checkout = checkout_with_the_op(tmp_path)
    explained = [line.rstrip() for line in run(checkout, EXAMPLE).splitlines()]
    assert explained[0] in PAGE
    assert [line for line in explained if " chosen " in line and line in PAGE]
    found = re.search(r"(\d+) passed", run(checkout, *matrix.split(), "-n0", "-q", "-p", "no:cacheprovider"))
    assert found is not None
    assert int(found[1]) > 100
