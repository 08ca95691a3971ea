"""bench/corpus.py: what it counts as found and as false, and what it says where a form does not apply."""

import dataclasses
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
NAME = "squared_distances"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which is named as the folder beside it is."""
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("corpus_command", BENCH / "corpus.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def program_of(command: ModuleType, name: str = NAME, half: str = "known") -> Any:
    return next(one for own, one in command.programs() if (own, one.name) == (half, name))


def test_both_tables(command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert command.main(["--half", "known", "--program", NAME, "--quick", "--json", str(file)]) == 0
    found, costs = json.loads(file.read_text())["rows"]
    counts = {key: found[key] for key in ("expected", "found", "findings", "false_findings")}
    assert counts == {"expected": 1, "found": 1, "findings": 1, "false_findings": 0}
    forms, small = costs["forms"], program_of(command).small
    result = 4 * small["n"] * small["k"]
    assert forms["as it is"]["budget_bytes"] == 2 * result * small["d"]  # differences and their squares
    for name in ("mended", "vmap", "loop"):
        assert 0 < forms[name]["budget_bytes"] < forms["as it is"]["budget_bytes"] / 8
        assert forms[name]["time_ms"] > 0
    assert (forms["KeOps"]["reason"], forms["named op"]["reason"]) == ("returns all pairs", "-")
    assert costs["mended"] == "contraction"
    assert {forms[name]["reason"] for name in ("compiled", "auto-chunker")} == {"not with --quick"}
    assert costs["fix_bytes"] == result
    printed = capsys.readouterr().out
    assert "recall: 1 of 1 lines (100.0%); false: 0 of 1 findings" in printed
    assert "contraction" in printed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"now": lambda sizes: 1.01 * 4 * sizes["n"] * sizes["k"] * sizes["d"]}, "instead of"),
        ({"line": "def squared_distances(points"}, "missed: def squared_distances(points: 23.8 GiB"),
    ],
)
def test_a_finding_of_other_bytes_or_of_another_line_is_false(
    command: ModuleType, change: dict[str, Any], said: str
) -> None:
    program = program_of(command)
    other = dataclasses.replace(program, expected=(dataclasses.replace(program.expected[0], **change),))
    row = command.recall("known", other)
    assert (row.found, row.findings, row.false_findings) == (0, 1, 1)
    assert said in row.notes[0]
    assert row.notes[1].startswith("false: ")


def test_a_clean_program_with_a_finding_is_counted(command: ModuleType) -> None:
    clean = dataclasses.replace(program_of(command), expected=())
    row = command.recall("known", clean)
    assert row.false_findings == 1
    assert "on 1 of 1 clean programs" in command.summary([row])


def test_what_does_not_fit_is_predicted(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(command)
    monkeypatch.setattr(command, "FREE_SHARE", 0.0)
    costs = command.costs_of("known", program)
    as_it_is = costs.forms[command.AS_IS]
    assert (as_it_is.predicted, as_it_is.time_ms) == (True, None)
    assert "MiB*" in str(as_it_is)
    assert costs.forms[command.COMPILED].reason == "does not fit"


def test_an_unknown_program_is_refused(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--program", "squared_distance"])
    assert "squared_distances" in capsys.readouterr().err


def test_what_gives_other_results_is_not_listed(command: ModuleType) -> None:
    program = dataclasses.replace(program_of(command), mended=lambda points, centres: torch.cdist(points, centres))
    costs = command.costs_of("known", program, quick=True, without=["vmap"])
    told = costs.forms[command.MENDED]
    assert (told.budget_bytes, told.time_ms, told.reason) == (None, None, "other results")
    assert told.note.startswith("1 of 1: Tensor-likes are not close")
    assert costs.forms[command.VMAP].reason == "left out"
    assert costs.forms[command.LOOP].budget_bytes > 0


def test_a_way_that_cannot_run_says_why(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(command, "gaussian_sum")
    own = command.ways("known")["gaussian_sum"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.forms_of(program, own, quick=True)[command.KEOPS] == "not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(command.shutil, "which", lambda name: None)
    assert command.forms_of(program, own, quick=True)[command.KEOPS] == "no compiler"


def test_a_program_that_goes_on_from_where_it_was_is_not_compared(command: ModuleType) -> None:
    runs = []

    def count(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return points.sum() + len(runs)

    program = dataclasses.replace(program_of(command), run=count, mended=count)
    forms = {command.AS_IS: program, command.MENDED: program}
    costs = dict.fromkeys(forms, command.Cost(1))
    assert command.checked(costs, forms, program.arguments(**program.small)) == costs
