"""limits.py and cores.py in bench/studies/: what sizes of blocks cost, and what the distance of two cores costs."""

import importlib
import json
import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from effops.blocks import limits as sizes

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH / "studies"))
    return importlib.import_module("limits")


def test_every_limit_is_measured_or_named(limits: ModuleType) -> None:
    names = {name for name in vars(sizes) if name.isupper()}
    assert names == {case.limit for case in limits.CASES} | {*limits.NOT_OF_SPEED, *limits.WITHOUT_A_CASE}


def test_limits_come_back(limits: ModuleType) -> None:
    before = sizes.PAIR_BYTES, sizes.DENSE_SHARE
    with limits.scaled("PAIR_BYTES", 0.5), limits.scaled("DENSE_SHARE", 2.0):
        assert (before[0] // 2, 2 * before[1]) == (sizes.PAIR_BYTES, sizes.DENSE_SHARE)
    assert before == (sizes.PAIR_BYTES, sizes.DENSE_SHARE)


def test_rows_of_a_limit(limits: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the limit makes the call one of blocks, which shows in its bytes."""
    limits.main(["--limit", "BLOCK_BYTES", "--repeats", "2", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["limit"] for row in rows] == ["BLOCK_BYTES"] * 2
    assert rows[0]["temporary_bytes"]["half"] < rows[0]["temporary_bytes"]["own"]
    assert all(row["ratios"].keys() == {"own again", "half", "twice"} for row in rows)
    assert "BLOCK_BYTES" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None or (os.cpu_count() or 1) < 2, reason="needs cc and two cores")
def test_distance_of_two_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCH / "studies"))
    cores = importlib.import_module("cores")
    cores.main(["--op", "broadcast_dot", "--seconds", "1", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["op"], row["pass"]) for row in rows] == [("broadcast_dot", "forward"), ("broadcast_dot", "both")]
    assert 1 < cores.stopwatch_of_cores(tmp_path)() < 1e6
