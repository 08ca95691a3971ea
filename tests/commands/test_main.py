"""The `effops` command, and what its subcommands share."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("arguments", [[], ["--help"], ["memory"], ["memory", "--help"]], ids=" ".join)
def test_commands_are_listed_with_a_line_each(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a command, nothing told which there are. Their lines were two, in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(arguments)
    shown = "".join(capsys.readouterr())
    listed = shown.partition("  COMMAND\n")[2].partition("\n\n")[0].splitlines()
    names = ["doctor", "memory", "lint"]
    if "memory" in arguments:
        names = ["estimate", "anatomy", "max-batch", "advise", "sweep", "devices"]
    assert [line.split()[0] for line in listed if line.startswith("    ")][: len(names)] == names
    assert all(re.match(r"    \S+ +\S", line) for line in listed[: len(names)])


def test_json_is_another_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["lint", "--format", "json", "train.py"])
    assert "; for JSON give --json FILE, or --json - for standard output\n" in capsys.readouterr().err


def test_a_command_of_a_command_is_named_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["max-batch"])
    assert capsys.readouterr().err.endswith('; write "effops memory max-batch"\n')


def test_another_format_is_not_taken_for_a_mistyped_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["lint", "--format", "gitlab", "train.py"])
    err = capsys.readouterr().err
    assert "invalid choice: 'gitlab' (choose from" in err
    assert "did you mean" not in err
