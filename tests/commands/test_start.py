"""The start of the `effops` command: help and versions come without PyTorch, which takes seconds to import."""

import subprocess
import sys
from importlib import metadata

import pytest

import effops
from effops.commands import main as cli

START = """
import sys
from effops_command import main
try:
    sys.exit(main())
finally:
    assert "torch" not in sys.modules and "effops" not in sys.modules
"""


@pytest.mark.parametrize(("argument", "expected"), [("--help", "usage: effops "), ("--version", "effops ")])
def test_help_and_versions_import_no_pytorch(argument, expected):
    started = subprocess.run([sys.executable, "-c", START, argument], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    assert started.stdout.startswith(expected)


def test_version(capsys):
    with pytest.raises(SystemExit) as exited:
        cli.main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"effops {effops.__version__} (torch {metadata.version('torch')})\n"


def test_a_subcommand_runs_from_there():
    sizes = {"--blocks": 2, "--heads": 2, "--head-dim": 8, "--batch-size": 2, "--seq-len": 8}
    arguments = ["memory", "estimate", *(str(part) for option in sizes.items() for part in option)]
    code = f"import effops_command, sys; sys.argv[1:] = {arguments}; sys.exit(effops_command.main())"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    assert "MiB" in started.stdout or "KiB" in started.stdout
