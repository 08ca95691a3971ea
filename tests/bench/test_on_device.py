"""bench/on_device.sh: what a stage leaves that is killed, what cannot run, and what comes back."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
SCRIPT = """
import json, sys, time
print("one of many", flush=True)
json.dump({"rows": [{"time_ms": 1.0}]}, open(sys.argv[-1], "w"))
print("tests/kernels/test_a.py::test_b PASSED", flush=True)
time.sleep(SECONDS)
"""


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH / "device"))
    return importlib.import_module("stages")


def sleeper(folder: Path, seconds: float) -> list[str]:
    script = folder / f"sleep{seconds}.py"
    script.write_text(SCRIPT.replace("SECONDS", str(seconds)))
    return [str(script)]


def results(folder: Path) -> dict[str, object]:
    stage = json.loads((folder / "results.json").read_text())["stages"][-1]
    assert isinstance(stage, dict)
    return stage


def test_a_stage_over_its_limit_leaves_its_log_and_its_rows(stages: ModuleType, tmp_path: Path) -> None:
    job = stages.Job(tmp_path, tmp_path, {}, 60)
    job.run(stages.Stage("slow", 3, [sleeper(tmp_path, 60), sleeper(tmp_path, 0)]), "")
    found = results(tmp_path)
    assert str(found["outcome"]).startswith("over 3")
    assert found["report"] == {"rows": [{"time_ms": 1.0}], "tests": {"passed": 1, "failed": []}}
    assert "one of many" in (tmp_path / "slow.log").read_text()


def test_a_stage_that_prints_too_much_is_stopped(
    stages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "LOG_BYTES", 100)
    job = stages.Job(tmp_path, tmp_path, {}, 60)
    job.run(stages.Stage("loud", 30, [["-c", "print('x' * 200, flush=True); import time; time.sleep(60)"]]), "")
    assert results(tmp_path)["outcome"] == "over 100 bytes of log"


def test_a_killed_job_leaves_the_log_and_the_rows_of_its_stage(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(BENCH / "device")!r})
import stages; from pathlib import Path
folder = Path({str(tmp_path)!r})
stages.Job(folder, folder, {{}}, 60).run(stages.Stage("slow", 60, [{sleeper(tmp_path, 8)!r}]), "")
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        for _ in range(200):
            if (tmp_path / "results.json").exists() and results(tmp_path)["report"]:
                break
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = results(tmp_path)
    assert (found["outcome"], found["report"]["rows"]) == ("running", [{"time_ms": 1.0}])
    assert "one of many" in (tmp_path / "slow.log").read_text()


def test_a_command_that_fails_does_not_stop_the_next(stages: ModuleType, tmp_path: Path) -> None:
    job = stages.Job(tmp_path, tmp_path, {}, 60)
    job.run(stages.Stage("two", 30, [["-c", "raise SystemExit(5)"], sleeper(tmp_path, 0)]), "")
    found = results(tmp_path)
    assert (found["outcome"], found["report"]["rows"]) == ("exit code 5", [{"time_ms": 1.0}])


def test_what_cannot_run_says_why(stages: ModuleType, tmp_path: Path) -> None:
    for stage in stages.stages_of("cpu"):
        assert stages.obstacle(stage, "cpu") == ("needs a CUDA device" if stage.needs_cuda else "")
    absent = stages.Stage("absent", 3, [], tool=("no-such-tool",))
    assert stages.obstacle(absent, "cuda") == "no-such-tool is not installed"
    job = stages.Job(tmp_path, tmp_path, {}, 0)
    job.run(absent, "no-such-tool is not installed")
    assert results(tmp_path)["outcome"] == "skipped: no-such-tool is not installed"
    job.run(stages.Stage("late", 3, [["-c", ""]]), "")
    assert results(tmp_path)["outcome"] == "skipped: no time left"


def test_a_job_fits_into_ten_minutes_and_eight_files(stages: ModuleType) -> None:
    for device in "cpu", "cuda":
        assert len(stages.stages_of(device)) + 1 <= 8
    assert stages.TOTAL_S < 600


def test_the_commit_and_a_package_that_are_brought_along(
    stages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = importlib.import_module("parts.report")
    monkeypatch.setattr(report, "_commit", lambda: None)
    monkeypatch.setattr(stages, "BROUGHT", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lacking = stages.header("cpu")["lacking"]
    assert "the commit is not known; power_spherical is not installed" in lacking
    assert "--bring" in lacking
    (tmp_path / "commit").write_text("abc\n")
    head = stages.header("cpu")
    assert head["commit"] == "abc"
    assert "commit" not in head["lacking"].partition(":")[0]


def test_summary_is_short_and_names_what_failed(stages: ModuleType, tmp_path: Path) -> None:
    job = stages.Job(tmp_path, tmp_path, {"device": "a GPU"}, 60)
    bad = [f"tests/kernels/test_a.py::test_{number}" for number in range(40)]
    report = {"tests": {"passed": 2, "failed": bad}}
    job.outcomes.append(stages.Outcome("kernels", "exit code 1", 5.0, ["last"], report))
    text = stages.summary(job)
    assert "kernels: exit code 1, 5 s, 2 tests passed, 40 failed" in text
    assert "test_9" in text
    assert "| last" in text
    assert len(text) < 12000


def test_tests_of_workers_are_read_from_the_log(stages: ModuleType) -> None:
    lines = (
        "[gw3] [ 12%] PASSED ../tests/a.py::b[x y] ",
        "[gw1] [ 13%] FAILED tests/a.py::c ",
        "FAILED tests/a.py::c - no",
    )
    log = "\n".join(lines)
    assert stages.tests_in(log)["tests"] == {"passed": 1, "failed": ["tests/a.py::c"]}


def test_the_script_from_any_folder(tmp_path: Path) -> None:
    command = ["bash", str(BENCH / "on_device.sh"), "out", "--device", "cpu", "--stage", "memcheck"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "memcheck: skipped: needs a CUDA device" in done.stdout
    assert results(tmp_path / "out")["name"] == "memcheck"


def test_counters_are_read_from_the_log(stages: ModuleType) -> None:
    lines = (
        "==PROF== Connected",
        '"ID","Kernel Name","dram__bytes_read.sum"',
        '"","","Mbyte"',
        '"0","_forward_kernel","68"',
    )
    counters = stages.counters_in("\n".join(lines))["counters"]
    assert counters == [{"Kernel Name": "_forward_kernel", "dram__bytes_read.sum Mbyte": "68"}]


def test_jobs_on_one_device_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH / "device"))
    merge = importlib.import_module("merge")
    head = {"device": "NVIDIA H200 (x)", "commit": "abc", "date": "2026-01-02T03:04:05+00:00"}

    def job(name: str, **other: str) -> dict[str, object]:
        return {"header": {**head, **other}, "stages": [{"name": name, "report": {"rows": [name]}}]}

    content = merge.merged([job("founding"), job("rest", date="2026-01-03")])
    assert content["header"] == head
    assert [stage["name"] for stage in content["stages"]] == content["rows"] == ["founding", "rest"]
    with pytest.raises(ValueError, match="one commit; got abc, def"):
        merge.merged([job("founding"), job("rest", commit="def")])
    assert merge.slug(head["device"]) == "nvidia-h200-x"
    assert merge.file_date(head["date"]) == "2026-01-02T030405Z"


@pytest.mark.slow
def test_the_chosen_tests_of_kernels_exist() -> None:
    """A test that was renamed is missed by its list, and the list is then refused."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--few-compilations", "tests/kernels"]
    done = subprocess.run(command, cwd=BENCH.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    chosen = (BENCH.parent / "tests" / "kernels" / "few_compilations.txt").read_text().splitlines()
    assert f"{len(chosen)}/" in done.stdout


@pytest.mark.slow
def test_an_error_that_stays_ends_the_worker(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("""
import torch

def synchronize():
    raise RuntimeError("CUDA error: misaligned address")

torch.cuda.is_available = lambda: True
torch.cuda.synchronize = synchronize
""")
    test = "tests/kernels/test_workspaces.py::test_a_fake_device_needs_no_driver"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for options, words in (
        ([], "misaligned address"),
        (["-n", "1", "--max-worker-restart", "0"], "crashed while running"),
    ):
        command = [sys.executable, "-m", "pytest", "-p", "broken", *options, test]
        done = subprocess.run(command, cwd=BENCH.parent, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode != 0
        assert words in done.stdout + done.stderr
