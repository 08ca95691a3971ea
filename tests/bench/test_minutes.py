"""What makes the benchmark's default answer within minutes, and its tables: pieces, the summary, 80 columns."""

import dataclasses
import importlib
import io
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from effops.measure import Profile, ProfileRow
from effops.reference import reference_of, tried_ops

BENCH = Path(__file__).resolve().parents[2] / "bench"
MODULES = ("comparison", "expected", "outlook", "report", "summary", "timeleft")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    return {name: importlib.import_module(f"parts.{name}") for name in MODULES}


def expected_of(bench: dict[str, ModuleType], op: str, most_flops: float, **sizes: int) -> tuple[Any, torch.Tensor]:
    """What a small workload is judged by, in pieces, and the naive variant's result."""
    found = tried_ops()[op]
    workload = bench["expected"].Workload(found, sizes, torch.float32, torch.device("cpu"), backward=False)
    args = workload.args()
    return bench["expected"].Expected(workload, args, most_flops), found(*args, variant="naive")


@pytest.mark.parametrize("op", tried_ops())
def test_pieces_make_the_whole(op: str, bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of the pieces are those of the whole result, and all of it is covered once."""
    monkeypatch.setattr(bench["expected"], "PIECE_FLOPS", 64)
    sizes = {name: min(size, 6) for name, size in reference_of(tried_ops()[op]).sizes.items()}
    expected, result = expected_of(bench, op, float("inf"), **sizes)
    whole = reference_of(tried_ops()[op]).bounds(expected.call)
    assert expected.shape == result.shape == whole.value.shape
    assert expected.checked_share == 1
    covered = torch.zeros(result.shape)
    for bounds, piece in zip(expected.bounds, expected.pieces, strict=True):
        covered[piece.index] += 1
        torch.testing.assert_close(bounds.value, whole.value[piece.index])
    assert bool((covered == 1).all())
    assert expected.error_ratio(result) <= 1


def test_a_share_is_evenly_spread(bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a piece that is checked is found; the first and the last piece are."""
    monkeypatch.setattr(bench["expected"], "PIECE_FLOPS", 1)
    expected, result = expected_of(bench, "normal_log_prob", 3 * 5 * 4 * 4, N=11, M=5, D=4)
    assert 0 < expected.checked_share < 1
    assert expected.pieces[0].index[0].start == 0
    assert expected.pieces[-1].index[0].stop == len(result)
    assert expected.error_ratio(result) <= 1
    for row in (0, len(result) - 1):
        wrong = result.clone()
        wrong[row, 2] += 1
        assert expected.error_ratio(wrong) > 1
        assert not expected.close([wrong], [result])
    assert expected.error_ratio(result[:-1]) == float("inf")
    assert expected.close([result], [result])


def test_a_share_is_checked_on_one_thread(bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads, beside other work, took twenty times as much CPU time. Whole results need all cores."""
    threads: list[int] = []
    reference = reference_of(tried_ops()["normal_log_prob"])
    bounds = reference.bounds
    monkeypatch.setattr(reference, "bounds", lambda call: threads.append(torch.get_num_threads()) or bounds(call))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for most_flops in (2.0**20, float("inf")):
            expected, result = expected_of(bench, "normal_log_prob", most_flops, N=11, M=5, D=4)
            assert expected.error_ratio(result) <= 1
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == [1, 2]


def rows_of(comparison: ModuleType) -> list[Any]:
    """Rows with the longest names and figures there are."""
    row = comparison.Row("von_mises_fisher_mixture_log_prob", "chunked", "forward", "cpu", "float32", {"M": 128}, False)
    full = dataclasses.replace(
        row,
        time_ms=99.94,
        time_ms_min=99.1,
        time_ms_iqr=10.1,
        repeats=20,
        speedup=104.0,
        peak_bytes=2**33,
        output_bytes=2**30 - 1,
        saved_bytes=0,
        temporary_bytes=2**20 * 1023,
        predicted_temporary_bytes=2**20 * 999,
        gbps=11.1,
        copy_share=0.333,
        error_ratio=0.0123,
        allclose={"naive": True, "package_float64": None},
    )
    naive = dataclasses.replace(full, variant="naive", temporary_bytes=2**33, speedup=1.0, time_ms=8123.0)
    peer = dataclasses.replace(full, variant="torch_distributions_compiled", is_peer=True, error_ratio=1.5)
    triton = dataclasses.replace(row, variant="triton", status="skipped", reason="needs CUDA tensors, got cpu")
    return [triton, full, naive, peer]


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit(width: int, bench: dict[str, ModuleType]) -> None:
    """No line is longer than the terminal, and no cell is cut."""
    rows = rows_of(bench["comparison"])
    profile = Profile("cpu", tuple(ProfileRow(row.variant, -(2**30), 1e6, 0, 0.4567, 1e6, 0, 0) for row in rows), {})
    found = bench["comparison"].Found(rows, profile, 0.12, 1e-4)
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    bench["report"].print_tables(console, found, wide=True)
    bench["summary"].print_summary(console, [rows])
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    for begin in ("Self CPU Mem is", "allclose: ", "Summary: "):  # lines were cut at 100 columns, and again at 80
        paragraph = printed[printed.index(begin) :].partition(".\n")[0].splitlines()
        for line, following in itertools.pairwise(paragraph):
            assert len(f"{line} {following.split()[0]}") > min(width, 100)
    assert "…" not in printed
    for text in ("1023.0 MiB*", "torch_distributions_compiled", "inexact", "needs CUDA tensors", "-/yes", "8.12 s"):
        assert (text in printed) == (text != "-/yes")
    assert "yes/-" in printed
    assert "12.0% of the results" in " ".join(printed.split())
    summary = " ".join(printed[printed.index("Summary") :].split())
    assert "von_mises_fisher_mixture_log_prob naive 8.0 GiB 8.12 s chunked 1023.0 MiB 99.9 ms 8.0x 104x" in summary


def test_a_summary_tells_sizes_apart(bench: dict[str, ModuleType]) -> None:
    """Where naive had not run, the sizes of a sweep were missing."""
    _, full, *_ = rows_of(bench["comparison"])
    groups = [[dataclasses.replace(full, size={"M": size})] for size in (64, 128)]
    console = Console(file=io.StringIO(), width=120)
    bench["summary"].print_summary(console, groups)
    assert [size in console.file.getvalue() for size in ("M=64", "M=128")] == [True, True]


def test_ratios(bench: dict[str, ModuleType]) -> None:
    format_ratio = bench["report"].format_ratio
    assert [format_ratio(ratio) for ratio in (None, 0.5, 2.25, 41.4, 12345.0)] == [
        "-",
        "0.50x",
        "2.2x",
        "41x",
        ">9999x",
    ]


def test_time_left_follows_what_was_taken(bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    timeleft = bench["timeleft"]
    now = 100.0
    monkeypatch.setattr(timeleft.time, "perf_counter", lambda: now)
    left = timeleft.TimeLeft([25.0, 20.0, 30.0])
    assert left.next_step() == "op 1 of 3, about 1:15 left"
    now += 2 * 25
    assert left.next_step() == "op 2 of 3, about 1:10 left"
    now += 2 * 20
    assert left.next_step() == "op 3 of 3, about 0:45 left"


def test_a_first_op_unlike_the_others_tells_little_of_them(
    bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 62 s and not 25, and the others, which took 128 s, were said to take 4:20."""
    timeleft = bench["timeleft"]
    now = 100.0
    monkeypatch.setattr(timeleft.time, "perf_counter", lambda: now)
    left = timeleft.TimeLeft([25.0, *[105 / 12] * 12])
    left.next_step()
    now += 62
    assert left.next_step() == "op 2 of 13, about 2:30 left"


def test_a_slower_machine_is_said_to_take_longer(bench: dict[str, ModuleType]) -> None:
    """What was announced was for one machine, and another took twice as long."""
    outlook, comparison = bench["outlook"], bench["comparison"]
    op = tried_ops()["normal_log_prob"]
    workload = bench["expected"].Workload(op, {"N": 64, "M": 32, "D": 16}, torch.float32, torch.device("cpu"), False)
    effort = comparison.Effort(least_repeats=1, budget_s=0.0, most_flops=2**28)

    def seconds(checked_s: float, naive_s: float, first_compiled_s: float, *variants: str) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(outlook.Speed, "measured", lambda *_: outlook.Speed(checked_s, naive_s))
            one = outlook.outlook(workload, variants, effort, with_peers=False, profiled=False)
        return sum(outlook.seconds_of_steps([[one], [one], [one]], first_compiled_s))

    variants = "naive", "chunked", "compile"
    once = seconds(0.04, 1.0, 10.0, *variants)
    assert seconds(0.08, 2.0, 20.0, *variants) == pytest.approx(2 * once)
    assert once < min(seconds(0.04, 2.0, 10.0, *variants), seconds(0.08, 1.0, 10.0, *variants))
    compiling = once - seconds(0.04, 1.0, 0.0, *variants)
    assert compiling == pytest.approx(2 * 10.0 * outlook.LATER)  # the first of the three is done


def test_a_piece_tells_the_time_of_the_whole(bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Float64 and plain forms were in proportion to one speed of the machine, which is not that of each op."""
    monkeypatch.setattr(bench["expected"], "PIECE_FLOPS", 64)
    outlook, comparison = bench["outlook"], bench["comparison"]
    op = tried_ops()["normal_log_prob"]
    workload = bench["expected"].Workload(op, {"N": 64, "M": 4, "D": 4}, torch.float32, torch.device("cpu"), False)
    seen: list[int] = []

    def measured(workload: Any, piece: Any) -> Any:
        seen.append(workload.op(*piece.args, variant="naive").numel())
        return outlook.Speed(0.0, 1.0)

    monkeypatch.setattr(outlook.Speed, "measured", measured)
    effort = comparison.Effort(least_repeats=1, budget_s=0.0, most_flops=2**28)
    one = outlook.outlook(workload, ["naive"], effort, with_peers=False, profiled=False)
    assert seen[0] < 64 * 4
    assert one.seconds == pytest.approx(64 * 4 / seen[0])


def test_the_first_compilation_is_done_and_timed_before(bench: dict[str, ModuleType]) -> None:
    """It was guessed: 31 s for what took 11 s, and 4 s where the kernel lay on disk or the op needed none."""
    outlook, calls = bench["outlook"], []
    op = tried_ops()["normal_log_prob"]
    workload = bench["expected"].Workload(op, {"N": 4, "M": 3, "D": 2}, torch.float32, torch.device("cpu"), False)

    def contenders(*_: Any) -> list[Any]:
        make = bench["comparison"].Contender
        return [
            make(name, lambda *args, name=name: calls.append(name), "", None) for name in ("naive", "flex", "compile")
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outlook, "contenders_of", contenders)
        assert outlook.compile_first(workload, ("naive", "flex", "compile")) < 60
    assert calls == ["flex"]


def test_few_seconds_are_told_one_by_one(bench: dict[str, ModuleType]) -> None:
    """Two seconds were announced as five."""
    left = [bench["timeleft"].TimeLeft([guess]).next_step() for guess in (0.2, 2.2, 18.0, 23.0)]
    assert [text[-9:-5] for text in left] == ["0:01", "0:02", "0:18", "0:25"]
