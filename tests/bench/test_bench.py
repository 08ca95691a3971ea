"""bench/run.py end to end at tiny sizes, and on an op made for the purpose: right, wrong, raising, too large."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import effops.dispatch.op
import effops.reference.reference
from effops.dispatch.call import call
from effops.dispatch.op import Cost, Op, Variant
from effops.reference import Reference, reference_of, tried_ops
from effops.reference.reference import Bounds

BENCH = Path(__file__).resolve().parents[2] / "bench"
SCRIPTS = sorted(script for folder in (".", "studies", "device") for script in (BENCH / folder).glob("*.py"))
ROW_KEYS = {
    "op",
    "variant",
    "pass",
    "device",
    "dtype",
    "size",
    "status",
    "time_ms",
    "time_ms_min",
    "self_mem_bytes",
    "peak_bytes",
    "output_bytes",
    "saved_bytes",
    "temporary_bytes",
    "predicted_temporary_bytes",
    "gbps",
    "error_ratio",
    "allclose",
}
HEADER_KEYS = {"device", "torch", "triton", "python", "commit", "date", "copy_gbps"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench/run.py as a module, on the CPU, without the second that measuring the copy bandwidth takes."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("run")
    monkeypatch.setattr(module, "copy_bandwidth_gbps", lambda device: 10.0)
    return module


def row_sum_naive(a: Tensor) -> Tensor:
    return (a * a).sum(-1)


@pytest.fixture
def toy() -> Iterator[Op]:
    """The sum of squares of rows, in a right variant, two wrong ones, one that raises and one that cannot run."""

    def sample(
        shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> tuple[Tensor]:
        return (torch.randn(shape, dtype=dtype, device=device, generator=generator),)

    def workload(N: int, K: int, **options: Any) -> tuple[Tensor]:
        return sample((N, K), **options)

    def bounds(a: Tensor) -> Bounds:
        value = row_sum_naive(a.detach().double())
        return Bounds(value, 1e-5 * value, 1e-5 * value)

    def gradient_bounds(a: Tensor, dout: Tensor) -> tuple[Bounds]:
        value = 2 * dout.double().unsqueeze(-1) * a.detach().double()
        return (Bounds(value, 1e-5 * value.abs(), 1e-5 * value.abs()),)

    op = Op(
        "toy_row_sum",
        prepare=lambda a: a,
        preference=("wrong", "nan", "wrong_gradient", "raising", "elsewhere", "naive"),
    )

    def cost(a: Tensor) -> Cost:
        return Cost(4 * len(a), 0, 4 * a.numel(), 2 * a.numel())

    def raising(a: Tensor) -> Tensor:
        raise RuntimeError("no such kernel\nand a trace")

    function = op.public(lambda a, **options: call(op, a, **options))
    Reference(
        function,
        cases={"small": ((3, 5),)},
        sample=sample,
        workload=workload,
        sizes={"N": 64, "K": 32},
        bounds=bounds,
        gradient_bounds=gradient_bounds,
    )
    op.add(Variant("naive", row_sum_naive, cost))
    op.add(Variant("wrong", lambda a: row_sum_naive(a) * 1.01, cost))
    op.add(Variant("nan", lambda a: row_sum_naive(a) * float("nan"), cost))
    op.add(Variant("wrong_gradient", lambda a: row_sum_naive(a) * 2 - row_sum_naive(a).detach(), cost))
    op.add(Variant("raising", raising, cost))
    op.add(Variant("elsewhere", row_sum_naive, cost, [lambda a: "needs another device"]))
    yield op
    del effops.dispatch.op._ops["toy_row_sum"]
    del effops.reference.reference.REFERENCES[op.name]


Bench = Callable[..., tuple[int, dict[str, dict[str, Any]]]]


@pytest.fixture
def bench(run: ModuleType, toy: Op, tmp_path: Path) -> Bench:
    """Runs the toy op with further options; gives the exit code and the JSON rows by variant."""

    def call(*options: str) -> tuple[int, dict[str, dict[str, Any]]]:
        path = tmp_path / "made" / "rows.json"
        code = run.main(
            ["--op", toy.name, "--size", "N=64", "--device", "cpu", "--repeats", "3", "--json", str(path), *options]
        )
        return code, {row["variant"]: row for row in json.loads(path.read_text())["rows"]}

    return call


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_find_what_they_import(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    runpy.run_path(str(script))


def test_the_index_has_every_script() -> None:
    """A user runs one of twenty scripts; each line of the index tells how, and its command is that of a file."""
    commands = re.findall(r"`(?:python|bash) bench/(\S+?)[` ]", (BENCH / "README.md").read_text())
    assert sorted({BENCH / name for name in commands}) == sorted([*SCRIPTS, BENCH / "on_device.sh"])


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, str(BENCH / "run.py"), "--op", "power_spherical_log_prob", "--size", "M=3,T=5,D=7"]
    options = ["--variants", "naive,einsum,triton", "--device", "cpu", "--pass", "both", "--repeats", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, *options, "--json", str(path)],
        cwd=BENCH.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    # The allocator warns of blocks older than the profiler, at times.
    said = [line for line in done.stderr.splitlines() if "CPUAllocator.cpp" not in line]
    assert done.returncode == 0
    assert all(line.startswith(("measuring", "predicting", "op 1 of 1", "forward: ", "backward: ")) for line in said)
    assert "\x1b" not in done.stdout
    for column in ("Name", "Self CPU Mem", "CPU total %", "CPU total", "CPU time avg", "allclose"):
        assert column in done.stdout
    assert "CUDA time" not in done.stdout
    assert "It is not peak memory" in done.stdout
    assert "M=3, T=5, D=7" in done.stdout
    content = json.loads(path.read_text())
    assert content["header"].keys() >= HEADER_KEYS
    assert content["header"]["copy_gbps"] > 0
    assert all(row.keys() >= ROW_KEYS for row in content["rows"])
    rows = {row["variant"]: row for row in content["rows"] if row["pass"] == "forward"}
    assert rows.keys() == {"naive", "einsum", "triton", "power_spherical"}
    assert len(content["rows"]) == 2 * len(rows)
    assert (rows["naive"]["status"], rows["einsum"]["status"], rows["triton"]["status"]) == ("ok", "ok", "skipped")
    naive = rows["naive"]
    assert naive["size"] == {"M": 3, "T": 5, "D": 7}
    assert (naive["pass"], naive["device"], naive["dtype"]) == ("forward", "cpu", "float32")
    assert 0 < naive["time_ms_min"] <= naive["time_ms"]
    assert naive["output_bytes"] == 3 * 3 * 5 * 4
    assert naive["temporary_bytes"] >= 3 * 3 * 5 * 7 * 4
    assert naive["error_ratio"] <= 1


def test_bad_options_are_told(run: ModuleType, toy: Op, capsys: pytest.CaptureFixture[str]) -> None:
    for options, complaint in {
        ("--op", "power_sphericl"): f"--op: expected one of {', '.join(tried_ops())}; got 'power_sphericl'",
        ("--op", toy.name, "--size", "N=3,L=2"): "--size: expected some of K, N; got L",
        ("--op", toy.name, "--size", "N=3,K"): "expected KEY=N,KEY=N with positive integers; got 'N=3,K'",
        ("--op", toy.name, "--size", "N=0"): "expected KEY=N,KEY=N with positive integers; got 'N=0'",
        (
            "--op",
            toy.name,
            "--variants",
            "naive,tritn",
        ): "--variants: expected some of elsewhere, naive, nan, raising, wrong",
        ("--repeats", "0"): "expected a positive integer; got '0'",
        (
            "--op",
            "attention",
            "--size",
            "L=64",
            "--set",
            "dropout_p=2",
        ): "argument --set: attention: `dropout_p` must be",
        ("--sort-by", "colour"): "invalid choice: 'colour'",
        ("--dtype", "int8"): "invalid choice: 'int8'",
    }.items():
        with pytest.raises(SystemExit) as stop:
            run.main(list(options))
        assert stop.value.code == 2
        assert complaint in capsys.readouterr().err


def test_ops_without_a_size_are_named(run: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """They are measured at their own sizes, which a reader of the table would not expect."""
    parser = run.argument_parser()
    run.selected_ops(parser, parser.parse_args(["--size", "L=64"]))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("L: no size of power_spherical_log_prob, ")
    assert "log_sparse_attention" not in line


def test_a_wrong_variant_fails_the_run(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = bench("--variants", "wrong,naive")
    assert code == 1
    wrong, naive = rows["wrong"], rows["naive"]
    assert (wrong["status"], naive["status"]) == ("failed", "ok")
    assert wrong["error_ratio"] > 100 > 1 > naive["error_ratio"]
    assert wrong["time_ms"] is None
    assert wrong["allclose"] == {"naive": False}
    printed = capsys.readouterr()
    assert "failed: the error is" in printed.out
    assert "failed: toy_row_sum wrong, forward: the error is" in printed.err


def test_an_infinite_error_fails_and_is_null(bench: Bench) -> None:
    code, rows = bench("--variants", "nan")
    assert code == 1
    assert (rows["nan"]["status"], rows["nan"]["error_ratio"]) == ("failed", None)
    assert "inf times" in rows["nan"]["reason"]


def test_a_raising_variant_fails_the_run(bench: Bench) -> None:
    code, rows = bench("--variants", "raising,naive")
    assert (code, rows["raising"]["status"], rows["naive"]["status"]) == (1, "failed", "ok")
    assert rows["raising"]["reason"] == "raised RuntimeError: no such kernel"


def test_wrong_gradients_fail_the_backward_pass_only(bench: Bench) -> None:
    assert bench("--variants", "wrong_gradient")[0] == 0
    code, rows = bench("--variants", "wrong_gradient,naive", "--pass", "backward")
    assert (code, rows["wrong_gradient"]["status"], rows["naive"]["status"]) == (1, "failed", "ok")


def test_backward_rows(bench: Bench) -> None:
    code, rows = bench("--variants", "naive", "--pass", "backward")
    naive = rows["naive"]
    assert (code, naive["pass"]) == (0, "backward")
    assert naive["output_bytes"] == 64 * 32 * 4
    assert naive["input_bytes"] == 64 * 32 * 4 + 2 * 64 * 4
    assert naive["predicted_temporary_bytes"] is None
    moved_bytes = 2 * 64 * 32 * 4 + 64 * 4
    assert naive["gbps"] == pytest.approx(moved_bytes / naive["time_ms"] / 1e6)
    assert naive["copy_share"] == pytest.approx(naive["gbps"] / 10)


def test_both_passes(run: ModuleType, toy: Op, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    toy_naive = ["--op", toy.name, "--size", "N=64", "--device", "cpu", "--variants", "naive"]
    assert run.main([*toy_naive, "--pass", "both", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["pass"] for row in rows] == ["forward", "backward"]
    assert rows[0]["temporary_bytes"] == rows[0]["predicted_temporary_bytes"] == 64 * 32 * 4
    assert rows[0]["saved_bytes"] == 0


def test_what_cannot_run_is_skipped(bench: Bench) -> None:
    code, rows = bench("--variants", "elsewhere")
    assert (code, rows["elsewhere"]["status"], rows["elsewhere"]["reason"]) == (0, "skipped", "needs another device")


def test_what_would_not_fit_is_skipped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("effops.measure.available_bytes", lambda device: 64 * 32 * 4 + 64 * 4 - 1)
    code, rows = bench("--variants", "naive")
    assert (code, rows["naive"]["status"], rows["naive"]["time_ms"]) == (0, "skipped", None)
    assert rows["naive"]["reason"].startswith("needs 0.0 GiB")
    printed = capsys.readouterr().out
    assert "skipped: needs 0.0 GiB" in printed
    # Before it starts, for what was skipped after minutes came as a surprise.
    assert "Left out: toy_row_sum naive, which needs 0.0 GiB" in printed.partition("op 1 of 1")[0]
    monkeypatch.setattr("effops.measure.available_bytes", lambda device: 64 * 32 * 4 + 64 * 4)
    assert bench("--variants", "naive")[1]["naive"]["status"] == "ok"
    assert "Naive rows take up to 8.2 KiB of memory; 8.2 KiB are free." in capsys.readouterr().out


def test_the_default_runs_a_part_of_each_op_but_the_founding_one(run: ModuleType, toy: Op) -> None:
    """All rows at whole sizes took five minutes on a slower machine, most of them in naive rows."""
    assert run.default_sizes(toy, whole=False) == {"N": 8, "K": 32}
    assert run.default_sizes(toy, whole=True) == {"N": 64, "K": 32}
    founding = tried_ops()[run.FOUNDING]
    assert run.default_sizes(founding, whole=False) == reference_of(founding).sizes


def test_what_is_printed_first_fits(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """The header was a line of 230 characters, and the summary did not say less of what."""
    bench("--variants", "naive")
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert "copy_gbps: 10.0" in printed
    assert "Less memory" in printed


def test_a_peer_is_shown_and_does_not_fail_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = importlib.import_module("parts.peers")

    def rounded(a: Tensor) -> Tensor:
        return row_sum_naive(a).bfloat16().float()

    def exact(a: Tensor) -> Tensor:
        return row_sum_naive(a.double())

    monkeypatch.setitem(
        peers.PEERS,
        "toy_row_sum",
        {
            "package": peers.Peer(rounded, "torch", always=True, exact=exact),
            "absent": peers.Peer(rounded, "no_such_module", always=True),
            "asked": peers.Peer(row_sum_naive, "torch"),
        },
    )
    code, rows = bench("--variants", "naive")
    assert code == 0
    assert "package: a peer, which is another implementation" in capsys.readouterr().out
    assert rows.keys() == {"naive", "package", "absent"}
    package, absent = rows["package"], rows["absent"]
    assert package["status"] == "ok"
    assert package["error_ratio"] > 1
    assert package["allclose"] == {"naive": False, "package_float64": False}
    assert rows["naive"]["allclose"] == {"naive": None, "package_float64": True}
    assert (absent["status"], absent["reason"]) == ("skipped", "the Python package no_such_module is not installed")
    assert "asked" in bench("--variants", "naive", "--peers")[1]


def test_bounds_are_computed_once(bench: Bench, toy: Op) -> None:
    """They cost more than the variants that are judged by them."""
    calls = []
    reference = reference_of(toy)
    bounds, gradient_bounds = reference.bounds, reference.gradient_bounds
    reference.bounds = lambda *args: calls.append("forward") or bounds(*args)
    reference.gradient_bounds = lambda *args: calls.append("backward") or gradient_bounds(*args)
    code, rows = bench("--variants", "naive,wrong,wrong_gradient", "--pass", "backward")
    assert code == 1
    assert (rows["naive"]["status"], rows["wrong_gradient"]["status"]) == ("ok", "failed")
    assert calls == [*["forward"] * 2, "forward", "backward"]  # first a piece is timed, in a second run


def test_options_of_the_op_and_a_sweep(run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each size is a table of its own; memory is drawn against them; the option reaches the op."""
    rows, picture = tmp_path / "rows.json", tmp_path / "memory.png"
    small = ["--op", "attention_weights", "--size", "B=1,H=2,D=4", "--variants", "naive,chunked", "--repeats", "2"]
    sweep = ["--sweep", "L=8,16,32", "--set", "is_causal=True,scale=0.5", "--device", "cpu"]
    assert run.main([*small, *sweep, "--json", str(rows), "--plot", str(picture)]) == 0
    content = json.loads(rows.read_text())["rows"]
    assert [(row["size"]["L"], row["variant"]) for row in content] == [
        (size, variant) for size in (8, 16, 32) for variant in ("chunked", "naive")
    ]
    assert all(row["options"] == {"is_causal": True, "scale": 0.5} for row in content)
    assert picture.read_bytes().startswith(b"\x89PNG")
    for wrong in (
        ["--set", "causal=True"],
        ["--set", "is_causal=yes"],
        ["--sweep", "Q=1,2"],
        ["--sweep", "L=1,x"],
        ["--plot", str(picture)],
    ):
        with pytest.raises(SystemExit):
            run.main([*small, *wrong])
        assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--op", "attention_weight"], 'did you mean "attention_weights"?'),
        (["--variants", "chunkt"], 'did you mean "chunked"?'),
        (["--json", "a_file/rows.json"], "the folder cannot be made"),
        (["--json", "."], "it is a folder"),
        (["--json", ""], "got '': it has no name; name another"),
        (["--plot", "-"], "got '-': it names standard output, which the text takes; name another"),
        (["--json", "-"], "got '-': it names standard output, which the text takes; name another"),
        (
            ["--html", "a_file/page.html"],
            "--html: expected a file that can be written; got 'a_file/page.html': the folder",
        ),
        (["--html", "."], "it is a folder"),
        (["--html", "-"], "got '-': it names standard output, which the text takes; name another"),
        (["--device", "gpu"], 'did you mean "cuda"?'),
        (["--dtype", "float"], 'did you mean "float'),
        (["--dtype", "bf16"], 'did you mean "bfloat16"?'),
        (["--pass", "backwards"], 'did you mean "backward"?'),
        (["--sort-by", "times"], 'did you mean "time"?'),
        (["--sweep", "L=8", "--plot", "memory.foo"], "png"),
    ],
    ids=str,
)
def test_mistakes_are_told_before_the_work(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong, told
) -> None:
    """Files were opened after all the work, and names of ops and variants had no suggestion."""
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    monkeypatch.setattr(run, "compare", None)
    with pytest.raises(SystemExit):
        run.main(["--op", "attention_weights", *wrong])
    assert told in capsys.readouterr().err


class Pipe(io.StringIO):
    """What a reader has of what was written: that which was flushed."""

    arrived = ""

    def flush(self) -> None:
        self.arrived = self.getvalue()


def test_a_pipe_has_each_table_when_it_is_made(
    run: ModuleType, toy: Op, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python bench/run.py > file` was silent for minutes. What is being done is told once, beside the tables."""
    pipe, before = Pipe(), []
    monkeypatch.setattr("sys.stdout", pipe)
    compare = run.compare
    monkeypatch.setattr(
        run, "compare", lambda *args, **options: before.append(pipe.arrived) or compare(*args, **options)
    )
    small = ["--op", toy.name, "--size", "N=64", "--device", "cpu", "--repeats", "5", "--variants", "naive,elsewhere"]
    assert run.main([*small, "--pass", "both"]) == 0
    assert [text.count("Speed-up") for text in before] == [0, 1]
    told = capsys.readouterr().err.splitlines()
    step, *rows = told[2:]
    assert told[:2] == ["predicting memory and time", "measuring the bandwidth of a copy"]
    assert step.startswith("op 1 of 1, about ")
    assert rows == [
        f"{name}: {what}"
        for name in ("forward", "backward")
        for what in ("checking naive", "checking elsewhere", "timing naive")
    ]


def test_sorting(run: ModuleType) -> None:
    comparison, report = importlib.import_module("parts.comparison"), importlib.import_module("parts.report")
    measure = importlib.import_module("effops.measure")
    times_ms = {"slow": 3.0, "skipped": None, "fast": 1.0, "middle": 2.0}
    rows = [
        comparison.Row("op", name, "forward", "cpu", "float32", {}, is_peer=False, time_ms=time_ms)
        for name, time_ms in times_ms.items()
    ]
    profiled = [measure.ProfileRow(name, size, 0, 0, 0, 0, 0, 0) for name, size in (("fast", 5), ("slow", -5))]
    profile = measure.Profile("cpu", tuple(profiled), {})
    by_time = report._order(rows, profile, "time")
    assert sorted(by_time, key=by_time.__getitem__) == ["fast", "middle", "slow", "skipped"]
    by_memory = report._order(rows, profile, "self-mem")
    assert sorted(by_memory, key=by_memory.__getitem__) == ["slow", "fast", "skipped", "middle"]
    as_given = report._order(rows, profile, "")
    assert sorted(as_given, key=as_given.__getitem__) == list(times_ms)


def test_stacks_name_the_lines(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--variants", "naive", "--group-by-stack", "1")[0] == 0
    printed = capsys.readouterr().out
    assert "inside naive:" in printed
    assert "aten::mul" in printed
    assert "row_sum_naive" in printed


def test_files_of_the_repository_are_named_by_their_place(bench: ModuleType, tmp_path: Path) -> None:
    @dataclass
    class Row:
        note: str

    report, file = importlib.import_module("parts.report"), tmp_path / "result.json"
    report.write_json(file, {}, [Row(f"in {report.ROOT}/bench/run.py:1")])
    assert json.loads(file.read_text())["rows"] == [{"note": "in bench/run.py:1"}]
    results = (Path(report.ROOT) / "bench" / "results").rglob("*.json")
    assert not [one for one in results if re.search(r"(?<![\w.])/(work|home|root|tmp)/", one.read_text())]
