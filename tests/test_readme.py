"""README's two commands, as they stand there: each does everything in an empty directory."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
TOP = (ROOT / "README.md").read_text().partition("\n## ")[0]
COMMANDS = re.findall(r"^ {4}(\S.*)$", TOP, re.MULTILINE)
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*cache", ".hypothesis", "__pycache__", "*.egg-info", "brought")
SHORTEST = {
    "bench/run.py": ["--op broadcast_dot --size M=4,T=5,D=6", "Summary", "broadcast_dot"],
    "pytest": ["-n0 tests/test_sizes.py", " passed"],
}


def test_two_commands_stand_at_the_top() -> None:
    """Installing took three commands, far below, and the first of them was for machines without a GPU alone."""
    assert len(COMMANDS) == len(SHORTEST)
    for command, (last, extra) in zip(COMMANDS, (("bench/run.py", "bench"), ("pytest", "test")), strict=True):
        create, install, run = command.split(" && ")
        assert create == "python3 -m venv .venv"
        assert install == f'.venv/bin/pip install -c constraints.txt -e ".[{extra}]"'
        assert run.startswith(".venv/bin/python ")
        assert run.endswith(last)
    assert len((ROOT / "README.md").read_text().splitlines()) <= 121


def test_the_pinned_torch_may_be_the_wheel_for_cpus() -> None:
    """With PyTorch's CPU wheels among its indexes, pip takes the one that needs no CUDA: PEP 440 has it so."""
    assert "export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in TOP
    pinned = re.search(r"^torch(==(.+))$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    wheel = Version(f"{pinned[2]}+cpu")
    assert wheel in SpecifierSet(pinned[1])
    assert wheel > Version(pinned[2])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[-1])
def test_the_command_runs(command: str, tmp_path: Path) -> None:
    """With its shortest option. Packages that are installed here are seen by the environment that the command makes.

    So pip takes them where they are the ones that `constraints.txt` pins, and asks its index for the rest, which is
    what builds effops.
    """
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, ignore=NOT_COPIED, symlinks=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    subprocess.run([sys.executable, "-m", "venv", checkout / ".venv"], check=True)
    (packages,) = (checkout / ".venv" / "lib").glob("python*/site-packages")
    (packages / "installed_here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    option, *words = SHORTEST[command.split()[-1]]
    shell = ["bash", "-c", f"{command} {option}"]
    done = subprocess.run(shell, cwd=checkout, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Editable project location: {checkout}" in pip_show(checkout)
    assert all(word in done.stdout for word in words), done.stdout


def pip_show(checkout: Path) -> str:
    """What the environment says of the effops that is installed in it."""
    command = [checkout / ".venv" / "bin" / "pip", "show", "effops"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
