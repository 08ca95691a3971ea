"""The `effops` command, and what its subcommands share."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import effops
from effops.commands import main as cli


def test_the_exit_code_is_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", lambda: 1)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(Path(effops.__file__).with_name("__main__.py")), run_name="__main__")
    assert stop.value.code == 1


def test_no_subcommand_loads_another_ones_modules() -> None:
    code = (
        "import sys, effops.commands.main\n"
        "try: effops.commands.main.main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'rich', 'effops.commands.doctor'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "doctor" in done.stdout


def test_a_subcommand_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 2
    assert "required: COMMAND" in capsys.readouterr().err
