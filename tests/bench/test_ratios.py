"""bench/studies/ratios.py at tiny sizes, without compilers and new processes, which take minutes."""

import importlib
import json
import os
import subprocess
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from effops.dispatch.op import Op
from effops.dispatch.requirements import library_error
from effops.reference import reference_of, tried_ops

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH / "studies"))
    module = importlib.import_module("ratios")
    for op in tried_ops().values():
        sizes = reference_of(op).sizes
        small = {name: min(size, 24 if size == max(sizes.values()) else 6) for name, size in sizes.items()}
        monkeypatch.setattr(reference_of(op), "sizes", small)
    monkeypatch.setattr(module, "PEER_VARIANTS", ("einsum",))
    monkeypatch.setattr(importlib.import_module("parts.comparison"), "PEERS", {})
    monkeypatch.setattr(module.measure, "copy_bandwidth_gbps", lambda device: 10.0)
    return module


@pytest.mark.parametrize("op", tried_ops().values(), ids=tried_ops())
def test_every_case_is_a_call(op: Op, ratios: ModuleType) -> None:
    default, *others = ratios.cases_of(op)
    plain = default.args(torch.float32)
    for case in others:
        args = case.args(torch.float32)
        call = op.prepare(*args, **case.options(args))
        shapes, plain_shapes = ([tensor.shape for tensor in tensors] for tensors in (args, plain))
        if case.name in ("strided", "expanded"):
            assert shapes == plain_shapes
            assert len(args[0]) == 1 or any(not tensor.is_contiguous() for tensor in args)
        elif case.name in ("a quarter", "four times"):
            factor = call.operations / op.prepare(*plain).operations
            assert 0.5 < factor / (4 if case.name == "four times" else 0.25) < 2
        elif case.name.endswith("components"):
            assert shapes == plain_shapes  # there are six


def test_rows(ratios: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, threads = tmp_path / "rows.json", torch.get_num_threads()
    chosen = ["--op", "broadcast_dot", "--op", "attention", "--case", "default", "--case", "strided"]
    try:
        ratios.main(
            [*chosen, "--dtype", "float32", "--threads", "1", "--repeats", "2", "--budget", "0", "--json", str(path)]
        )
    finally:
        torch.set_num_threads(threads)
    content = json.loads(path.read_text())
    assert "left_out" not in content["header"]
    rows = content["rows"]
    forward = {(row["op"], row["subject"]) for row in rows if (row["pass"], row["case"]) == ("forward", "strided")}
    # The automatic choices are sdpa and chunked, so that other variants have lines of their own.
    own = {("attention", "cpp"), ("broadcast_dot", "cpp")} if not library_error() else set()
    assert forward == {("broadcast_dot", "auto"), ("attention", "auto"), ("attention", "chunked"), *own}
    for row in rows:
        assert row["time_ms"] > 0
        assert row["control"] > 0
        if row["peers_ms"]:  # a hopeless one is left out where the size is another
            assert row["ratio"] == row["time_ms"] / min(row["peers_ms"].values())
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(ratios.LINE.format(*ratios.TITLES))
    assert all(len(line) <= 100 for line in lines[start : start + 1 + len(rows)])


@pytest.mark.parametrize("factor", [0.004, 1.0, 99.999, 102.53, 1234.56, 99998.7])
def test_a_line_fits_whatever_was_measured(ratios: ModuleType, factor: float) -> None:
    row = ratios.Row(
        "o" * 40, "c" * 20, "both", 2, "bfloat16", {}, "auto", "cpp", 10 * factor, factor, {"p" * 20: 10.0}
    )
    line = ratios.LINE.format(*ratios.cells(row))
    assert len(line) == 100
    assert line.split()[-1] == line.split()[-2]
    assert float(line.split()[-1]) == pytest.approx(factor, abs=0.5 if factor > 100 else 0.005)


def test_what_comes_too_late_is_told(ratios: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    ratios.main(["--op", "broadcast_dot", "--quick", "--minutes", "0", "--json", str(path)])
    content = json.loads(path.read_text())
    assert (len(content["header"]["left_out"]), content["rows"]) == (1, [])


def test_a_load_begins_and_ends(ratios: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("parts.load")
    begun: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            begun.append(self)

    monkeypatch.setattr(module.subprocess, "Popen", Popen)
    cores = os.sched_getaffinity(0)
    for load, count, width in (("processes:2", 2, 1), ("moving:1", 1, len(cores))):
        begun.clear()
        with module.beside(load):
            assert [process.poll() for process in begun] == [None] * count
            assert [len(os.sched_getaffinity(process.pid)) for process in begun] == [width] * count
        assert all(process.poll() is not None for process in begun)
    threads = threading.active_count()
    with module.beside("thread"):
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    with module.beside(None):
        assert threading.active_count() == threads


@pytest.mark.parametrize("text", ["processes", "processes:0", "processes:two", "threads", ""])
def test_a_load_that_is_none_is_refused(text: str, ratios: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ratios.main(["--beside", text])
    assert "expected thread, or processes:N" in capsys.readouterr().err
