"""The command that runs rows of versions. Nothing is installed here: that takes minutes and gigabytes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from effops.pytorch.missing import TESTED

from . import versions
from .versions import Environment, Row, rows

needs_tomllib = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_toy" name="test_right"/>
<testcase classname="tests.test_toy" name="test_left[1.5-a]"><skipped message="no device"/></testcase>
<testcase classname="tests.test_toy" name="test_wrong"><failure message="long">def test_wrong():
&gt;       assert one == two
E       AssertionError: in {checkout}/effops/text.py
E         of {folder}/environment/lib/torch/nn.py

tests/test_toy.py:3: AssertionError</failure></testcase>
<testcase classname="tests.test_toy" name="test_twice"><failure message="first"/></testcase>
<testcase classname="tests.test_toy" name="test_twice"><error message="second">E   second</error></testcase>
<testcase classname="" name="tests.test_other"><error message="collection failure">no such operator</error></testcase>
</testsuite></testsuites>"""


def result(name: str, **others: Any) -> dict[str, Any]:
    step = {"ok": True, "passed": 1, "failed": 0, "skipped": 0, "failures": []}
    common = {"date": "2026-01-02T03:04:05+00:00", "installed": True, "versions": {"torch": "2.0"}}
    return {"row": name, **common, "steps": {"tests": step, "doctor": {"ok": True}}, **others}


@needs_tomllib
def test_lowest_versions_are_those_of_the_project() -> None:
    """They are written once: every lower bound of pyproject.toml, of the test extra and those that it has."""
    lowest = dict(one.split("==") for one in rows()["lowest"].requirements)
    project = (versions.ROOT / "pyproject.toml").read_text()
    asked = dict(
        re.findall(r'"([\w-]+)>=([\d.]+)', project.partition("[project]")[2].partition("[project.scripts]")[0])
    )
    assert lowest == {name: bound for name, bound in asked.items() if name not in ("ruff", "mypy")}
    assert Version(lowest["torch"]) == min(map(Version, versions.PYTHONS))


@needs_tomllib
def test_rows_have_the_versions_that_their_names_tell() -> None:
    assert len(rows()) == 13
    for name, row in rows().items():
        if row.requirements[0].startswith("torch==="):
            assert row.requirements == (f"torch==={name.partition('-')[0]}",)
            assert name == f"{row.requirements[0].removeprefix('torch===')}-{row.python}"
    build_of_row = {name: SpecifierSet(rows()[name].requirements[0][5:]) for name in ("2.13.0-3.11", "2.13.0-3.11-cpu")}
    assert [list(one.filter(["2.13.0", "2.13.0+cpu"])) for one in build_of_row.values()] == [["2.13.0"], ["2.13.0+cpu"]]


@needs_tomllib
def test_a_row_without_interpreter_is_told_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(versions.os, "get_exec_path", lambda: [str(tmp_path)])
    monkeypatch.setattr(versions, "RESULTS", tmp_path)
    monkeypatch.setattr(versions, "git", lambda *arguments: "")
    monkeypatch.setenv("COLUMNS", "200")
    assert versions.main(["2.14.1-3.14"]) == 1
    assert "there is no python3.14 on PATH, and none of pyenv" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_that_cannot_make_environments_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The python3.10 that pyenv puts on PATH may fail, and that of Debian may lack ensurepip and headers."""
    folders = [tmp_path / name for name in ("fails", "other", "works")]
    for folder, text in zip(folders, ("exit 1", "echo 3.99 cpython without Python.h", "echo 3.99 cpython usable")):
        folder.mkdir()
        (folder / "python3.99").write_text(f"#!/bin/sh\n{text}\n")
        (folder / "python3.99").chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(versions.os, "get_exec_path", lambda: list(map(str, folders)))
    assert versions.interpreter("3.99") == folders[-1] / "python3.99"
    monkeypatch.setattr(versions.os, "get_exec_path", lambda: list(map(str, folders[:2])))
    with pytest.raises(LookupError, match="of those found, 2, none has ensurepip"):
        versions.interpreter("3.99")


def test_failures_have_their_last_line_and_nothing_of_the_machine(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    found = versions.counts(environment, REPORT.format(folder=tmp_path, checkout=environment.checkout))
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 3, 1)
    assert found["failures"] == [
        {"test": "tests/test_toy.py::test_wrong", "error": "of nn.py"},
        {"test": "tests/test_toy.py::test_twice", "error": "second"},
        {"test": "tests.test_other", "error": "no such operator"},
    ]
    assert environment.without_folders(f"{environment.checkout}/effops/text.py:1: 1/2") == "effops/text.py:1: 1/2"
    assert environment.without_folders("<function f at 0x7fd19c3a>, 0x10") == "<function f at 0x..>, 0x10"


def test_a_step_has_the_last_line_of_what_fails(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.checkout.mkdir()
    environment.programs.mkdir(parents=True)
    (environment.programs / "python").symlink_to(sys.executable)
    failed = environment.step("-c", "import no_such_module")
    assert (failed["ok"], failed["error"]) == (False, "ModuleNotFoundError: No module named 'no_such_module'")
    verdict = "import sys; print('checking', file=sys.stderr); print('1 failed'); sys.exit(1)"
    assert environment.step("-c", verdict)["error"] == "1 failed"
    after_output = environment.step("-c", "print('checked'); import no_such_module")
    assert after_output["error"] == failed["error"]
    passed = environment.step("-c", "import os; assert os.environ['TRITON_INTERPRET'] == '0'", TRITON_INTERPRET="0")
    assert passed["ok"]
    assert "error" not in passed
    stopped = environment.step("-c", "import time; time.sleep(60)", hours=1 / 3600)
    assert (stopped["ok"], stopped["error"]) == (False, f"stopped after {1 / 3600} hours")


@needs_tomllib
def test_a_row_that_ran_again_replaces_its_result_of_that_date(tmp_path: Path) -> None:
    for name, device in (("lowest", "first"), ("2.11.0-3.10", "first"), ("lowest", "second")):
        file = versions.write(result(name, device=device), tmp_path)
    versions.write(result("lowest", date="2026-01-03T00:00:00+00:00"), tmp_path)
    found = json.loads(file.read_text())["rows"]
    assert file.name == "versions-2026-01-02.json"
    assert [(one["row"], one["device"]) for one in found] == [("2.11.0-3.10", "first"), ("lowest", "second")]
    assert len(list(tmp_path.iterdir())) == 2


@needs_tomllib
@pytest.mark.parametrize(
    ("others", "code"),
    [
        ({}, 0),
        ({"steps": {"tests": {"ok": False, "error": "no tests"}}}, 1),
        ({"installed": False, "error": "no such version"}, 1),
    ],
)
def test_a_quick_look_is_not_written(
    others: dict[str, Any],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(versions, "RESULTS", tmp_path)
    monkeypatch.setattr(versions, "git", lambda *arguments: "")

    def run_row(row: Row, paths: list[str], progress: Any) -> dict[str, Any]:
        return result(row.name, **others)

    monkeypatch.setattr(versions, "run_row", run_row)
    assert versions.main(["lowest", "--tests", "tests/test_text.py"]) == code
    assert list(tmp_path.iterdir()) == []
    printed = capsys.readouterr().out
    assert str(others.get("error", others.get("steps", {}).get("tests", {}).get("error", "1 passed"))) in printed


def test_scripts_for_environments_run() -> None:
    """What an environment is asked is a text here, so that nothing of this checkout is needed there."""
    told = subprocess.run([sys.executable, "-c", versions.FOUND, "torch", "no-such"], capture_output=True, text=True)
    found = json.loads(told.stdout)
    assert found["no-such"] is None
    assert found["torch"][0].isdigit()
    assert found["build"].split()[0] in ("CPU", "CUDA", "ROCm")
    told = subprocess.run([sys.executable, "-c", versions.USABLE], capture_output=True, text=True)
    assert told.stdout.split()[0] == "{}.{}".format(*sys.version_info)


@needs_tomllib
def test_the_versions_that_an_error_names_ran() -> None:
    """Every row ran, and all those of a version held."""
    results = [json.loads(path.read_text())["rows"] for path in sorted(versions.RESULTS.glob("versions-*.json"))]
    latest = {row["row"]: row for found in results for row in found}
    assert latest.keys() == rows().keys()
    held: dict[str, list[bool]] = {}
    for row in latest.values():
        held.setdefault(row["versions"]["torch"].partition("+")[0], []).append(versions.holds(row))
    assert set(TESTED) == {version for version, verdicts in held.items() if all(verdicts)}
