"""effops.measure: bytes of functions that are known exactly, times, profiler rows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from effops import measure
from effops.measure import Memory, Pass, machine, time_of_pass
from effops.text import format_us

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SIDE = 128
TENSOR_BYTES = SIDE * SIDE * 4


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def square(device: str, *, requires_grad: bool = False) -> Tensor:
    return torch.randn(SIDE, SIDE, device=device, requires_grad=requires_grad)


def three_temporaries(a: Tensor, b: Tensor) -> Tensor:
    p, q, r = a * b, a + b, torch.sub(a, b)
    return torch.stack([p, q, r]).sum(0)


def units(memory: Memory) -> tuple[float, ...]:
    """Inputs, output, saved, temporary and peak in tensors of SIDE x SIDE."""
    parts = (
        memory.input_bytes,
        memory.output_bytes,
        memory.saved_bytes,
        memory.temporary_bytes,
        memory.peak_bytes,
    )
    return tuple(part / TENSOR_BYTES for part in parts)


def test_temporaries_alive_at_once(device: str) -> None:
    found = measure.memory(Pass(three_temporaries, (square(device), square(device))))
    # p, q, r and their stack of three; at the sum q, p, r, the stack and the output.
    assert units(found) == (2, 1, 0, 6, 9)


def test_temporaries_released_in_turn(device: str) -> None:
    found = measure.memory(Pass(lambda a: a.sin().cos().sin().cos(), (square(device),)))
    assert units(found) == (1, 1, 0, 1, 3)


def test_saved_for_backward(device: str) -> None:
    saves_sine = Pass(lambda a: a.sin().square(), (square(device, requires_grad=True),))
    assert units(measure.memory(saves_sine)) == (1, 1, 1, 0, 3)
    saves_its_output = Pass(torch.exp, (square(device, requires_grad=True),))
    assert units(measure.memory(saves_its_output)) == (1, 1, 0, 0, 2)


def test_nothing_is_saved_without_gradients(device: str) -> None:
    assert units(measure.memory(Pass(lambda a: a.sin().square(), (square(device),)))) == (1, 1, 0, 1, 3)


def test_in_place_and_aliasing_results_take_nothing(device: str) -> None:
    for function in (Tensor.sin_, lambda a: a[3:].mT, lambda a: a):
        assert units(measure.memory(Pass(function, (square(device),)))) == (1, 0, 0, 0, 1)


def test_views_count_their_storage_once(device: str) -> None:
    def halves_and_whole(a: Tensor) -> dict[str, object]:
        out = a.sin()
        return {"halves": out.chunk(2), "whole": [out.mT]}

    expanded = torch.randn(SIDE, 1, device=device).expand(SIDE, SIDE)
    assert units(measure.memory(Pass(halves_and_whole, (square(device),)))) == (1, 1, 0, 0, 2)
    assert measure.memory(Pass(torch.sin, (expanded,))).input_bytes == SIDE * 4


def test_a_view_keeps_its_whole_storage(device: str) -> None:
    assert units(measure.memory(Pass(lambda a: a.sin()[0], (square(device),)))) == (1, 1, 0, 0, 2)


def test_backward_alone(device: str) -> None:
    a, b = square(device, requires_grad=True), square(device, requires_grad=True)
    # Inputs a, b, the result and the gradient from above; output the two gradients, made one after the other.
    assert units(measure.memory(Pass(torch.mul, (a, b), backward=True))) == (4, 2, 0, 0, 6)
    # Saved is the sine. Two temporaries: the gradient by the sine, and one factor on the way to it or after it.
    found = measure.memory(Pass(lambda a: a.sin().square(), (a,), backward=True))
    assert units(found)[:3] == (3, 1, 1)
    assert 1 <= units(found)[3] <= 2
    assert found.peak_bytes == sum(vars(found).values()) - found.peak_bytes


def test_backward_counts_gradients_that_view_the_one_from_above_as_nothing(device: str) -> None:
    a, b = square(device, requires_grad=True), square(device, requires_grad=True)
    assert units(measure.memory(Pass(torch.add, (a, b), backward=True))) == (4, 0, 0, 0, 4)


def test_backward_needs_a_tensor_that_requires_gradients(device: str) -> None:
    with pytest.raises(ValueError, match="must require gradients"):
        measure.memory(Pass(torch.sin, (square(device),), backward=True))


def test_what_a_first_call_keeps_is_not_counted(device: str) -> None:
    kept: list[Tensor] = []

    def caches(a: Tensor) -> Tensor:
        if not kept:
            kept.append(a.cos())
        return a.sin()

    assert units(measure.memory(Pass(caches, (square(device),)))) == (1, 1, 0, 0, 2)
    kept.clear()
    assert units(measure.memory(Pass(caches, (square(device),)), warmup=0)) == (1, 1, 1, 0, 3)


def test_memory_is_the_same_from_run_to_run() -> None:
    work = Pass(lambda a, b: torch.logsumexp(a @ b, 0) * 2.5, (square("cpu"), square("cpu")))
    assert len({measure.memory(work) for _ in range(5)}) == 1


def test_upstream_gradient_varies_and_does_not_depend_on_layout() -> None:
    out = torch.empty(3, 4)
    first, permuted = measure.upstream_gradient(out), measure.upstream_gradient(out.mT.contiguous().mT)
    assert torch.equal(first, permuted)
    assert permuted.stride() == (1, 3)
    assert len(first.unique()) == 12


def test_times_count_only_the_pass(device: str) -> None:
    def slow_forward(a: Tensor) -> Tensor:
        time.sleep(0.1)
        return a.sin()

    a = square(device, requires_grad=True)
    found = measure.times(
        {"forward": Pass(slow_forward, (a,)), "backward": Pass(slow_forward, (a,), backward=True)}, repeats=4
    )
    forward, backward = found["forward"], found["backward"]
    assert forward.min_ms >= 90 > backward.median_ms
    assert forward.min_ms <= forward.median_ms
    assert forward.repeats == backward.repeats == 4


def test_times_of_a_slow_pass_keep_to_the_budget() -> None:
    calls: list[str] = []

    def called(name: str, seconds: float) -> None:
        calls.append(name)
        time.sleep(seconds)

    passes = {"slow": Pass(called, ("slow", 0.03)), "fast": Pass(called, ("fast", 0.0))}
    found = measure.times(passes, repeats=10, least_repeats=3, budget_s=0.05, warmup=1)
    assert (found["slow"].repeats, found["fast"].repeats) == (3, 10)
    assert (calls.count("slow"), calls.count("fast")) == (4, 11)
    assert set(calls[2:8]) == {"slow", "fast"}


def test_median_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    samples_ms: Iterator[float] = iter([1.0, 4.0, 2.0, 3.0, 100.0])
    monkeypatch.setattr(time_of_pass, "_stopwatch", lambda device: lambda run: (next(samples_ms), 0.5))
    found = measure.times({"varied": Pass(lambda: None, ())}, repeats=5)["varied"]
    assert found == measure.Timing(median_ms=3, min_ms=1, iqr_ms=2, repeats=5, host_ms=0.5)


class FakeCuda:
    """A device with a queue: what the host issues starts when the host has issued it and the device is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_ms = self.device_ms = 0.0
        self.sleeps_ms: list[float] = []
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.host_ms * 1e6)
        monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: torch.zeros(1))
        cuda: dict[str, Any] = {
            "device": lambda device: nullcontext(),
            "synchronize": self.synchronize,
            "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1),
            "Event": lambda enable_timing: FakeEvent(self),
        }
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(time_of_pass, "keep_busy", self.sleep)

    def issue(self, device_ms: float) -> None:
        self.device_ms = max(self.device_ms, self.host_ms) + device_ms

    def synchronize(self) -> None:
        self.host_ms = max(self.device_ms, self.host_ms)

    def sleep(self, cycles: int) -> None:
        self.sleeps_ms.append(cycles / 2e6)
        self.issue(cycles / 2e6)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = max(self.cuda.device_ms, self.cuda.host_ms)

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


def test_time_on_cuda_does_not_count_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels of 40 us, each behind 120 us of Python: an idle device would wait for both."""
    cuda = FakeCuda(monkeypatch)

    def run() -> None:
        for _ in range(2):
            cuda.host_ms += 0.12
            cuda.issue(0.04)

    assert time_of_pass._stopwatch(torch.device("cuda"))(run) == (pytest.approx(0.08), pytest.approx(0.24))
    assert cuda.sleeps_ms[-1] >= 1


def test_the_device_is_busy_for_longer_than_a_slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def run() -> None:
        cuda.host_ms += 5
        cuda.issue(0.04)

    watch = time_of_pass._stopwatch(torch.device("cuda"))
    assert [watch(run)[0] for _ in range(2)] == [pytest.approx(4.04), pytest.approx(0.04)]
    assert cuda.sleeps_ms[-1] == pytest.approx(10)


def test_copy_bandwidth_counts_bytes_read_and_written(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        time_of_pass,
        "times",
        lambda passes, repeats: {"copy": measure.Timing(median_ms=2.0, min_ms=1, iqr_ms=0, repeats=1, host_ms=0.1)},
    )
    assert measure.copy_bandwidth_gbps(torch.device(device), size_bytes=10**6) == pytest.approx(1.0)


def test_available_bytes_is_what_the_tighter_of_system_and_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal:       900 kB\nMemAvailable:       500 kB\n"}
    monkeypatch.setattr(machine, "_file_text", lambda path: files.get(path, ""))
    cpu = torch.device("cpu")
    assert measure.available_bytes(cpu) == 500 * 1024
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    files["/sys/fs/cgroup/memory.current"] = "400000\n"
    assert measure.available_bytes(cpu) == 500 * 1024
    files["/sys/fs/cgroup/memory.max"] = "600000\n"
    files["/sys/fs/cgroup/memory.stat"] = "anon 1\ninactive_file 100000\nactive_file 7\n"
    assert measure.available_bytes(cpu) == 300000
    files["/sys/fs/cgroup/memory.current"] = "900000\n"
    assert measure.available_bytes(cpu) == 0


def test_profile_has_a_row_a_pass_and_the_columns(device: str) -> None:
    passes = {
        "three": Pass(three_temporaries, (square(device), square(device))),
        "sine": Pass(torch.sin, (square(device),)),
    }
    found = measure.profile(passes)
    assert [row.name for row in found.rows] == ["three", "sine"]
    host = ("CPU total %", "CPU total", "CPU time avg")
    on_cuda = ("Name", "Self CUDA Mem", "CUDA time avg", *host, "Self CUDA", "Self CUDA %")
    assert found.columns == (on_cuda if device == "cuda" else ("Name", "Self CPU Mem", *host))
    assert all(len(found.cells(row)) == len(found.columns) for row in found.rows)
    three, sine = found.rows
    # The range itself frees the three temporaries and their stack, which operators inside it allocated.
    assert three.self_mem_bytes == -6 * TENSOR_BYTES
    assert sine.self_mem_bytes == 0
    assert three.cpu_total_us == three.cpu_time_avg_us > 0
    assert 0 < three.cpu_total_percent + sine.cpu_total_percent <= 100.01
    assert (three.device_time_avg_us > 0) == (device == "cuda")
    assert not found.operators
    text = " ".join(str(found).split())
    assert text.endswith("is negative where a range frees what they allocated.")


def test_profile_by_stack_tells_the_lines(device: str) -> None:
    work = Pass(three_temporaries, (square(device), square(device)))
    found = measure.profile({"three": work}, group_by_stack=1)
    operators = {row.name: row for row in found.operators["three"]}
    assert {"aten::mul", "aten::add", "aten::sub", "aten::stack", "aten::sum"} <= operators.keys()
    assert operators["aten::mul"].self_mem_bytes == TENSOR_BYTES
    assert len(operators["aten::mul"].stack) == 1
    assert "three_temporaries" in operators["aten::mul"].stack[0]
    assert found.rows[0].self_mem_bytes == -6 * TENSOR_BYTES


@pytest.mark.parametrize(
    ("microseconds", "text"), [(0.25, "0.2 us"), (999, "999.0 us"), (1234.5, "1.234 ms"), (2e6, "2.000 s")]
)
def test_format_us(microseconds: float, text: str) -> None:
    assert format_us(microseconds) == text


NOISY = """
import os, sys, torch
from effops import measure
kept = []

def replaces_what_it_kept(x):
    kept.clear()  # memory that is older than the profile
    kept.append(x * 2)
    return x + 1

work = measure.Pass(replaces_what_it_kept, (torch.ones(100),))
print(measure.memory(work), measure.profile({"work": work}))
assert "KINETO_LOG_LEVEL" not in os.environ
"""


@pytest.mark.slow
@pytest.mark.parametrize(("level", "expected"), [(None, False), ("0", True)])
def test_the_profiler_is_silent(level: str | None, expected: bool) -> None:
    """PyTorch wrote lines of "USDT", or "STAGE", and of "CPUAllocator". Who sets the variable may have the former."""
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    code = NOISY
    if level is not None:
        environment["KINETO_LOG_LEVEL"] = level
        code = NOISY.replace("not in os.environ", "in os.environ")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert bool(re.search(r"^(USDT|STAGE):", done.stderr, re.MULTILINE)) == expected
    assert "CPUAllocator" not in done.stderr
    assert expected or done.stderr == ""


ONE = Pass(torch.neg, (torch.ones(2),))
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a function": (
        lambda: measure.memory(torch.neg),
        TypeError,
        "memory: `work` must be a Pass; got builtin_function_or_method; give Pass(function, (a, b))",
    ),
    "a function and its arguments": (
        lambda: measure.memory(torch.neg, torch.ones(2)),
        TypeError,
        "memory: it takes work by position; got 2 arguments; give warmup by name; give one pass, as in memory(Pass(",
    ),
    "a list": (
        lambda: measure.times([ONE]),
        TypeError,
        'times: `passes` must be a dict of names and passes; got list; give {"name": Pass(function, (a, b))}',
    ),
    "a pass without a name": (lambda: measure.profile(ONE), TypeError, "profile: `passes` must be a dict of names"),
    "a function by name": (
        lambda: measure.times({"neg": torch.neg}),
        TypeError,
        "times: `passes['neg']` must be a Pass; got builtin_function_or_method; give Pass(function, (a, b))",
    ),
    "a number for a name": (
        lambda: measure.profile({1: ONE}),
        TypeError,
        "profile: names of `passes` must be texts; got 1; give '1'",
    ),
    "the name of an operator": (
        lambda: measure.profile({"aten::neg": ONE}),
        ValueError,
        "profile: names of `passes` must differ from PyTorch's operators; got 'aten::neg'; leave the colons out",
    ),
    "one argument of a pass, bare": (
        lambda: Pass(torch.neg, torch.ones(2)),
        TypeError,
        "Pass: `args` must be a tuple of the arguments of `function`; got Tensor; give one in parentheses with a comma",
    ),
    "two arguments of a pass, bare": (
        lambda: Pass(torch.add, 1, 2),
        TypeError,
        "as (a,), and two as in Pass(function,",
    ),
    "three arguments of a pass, bare": (
        lambda: Pass(torch.add, 1, 2, 3),
        TypeError,
        "Pass: it takes function, args, backward by position; got 4 arguments; give the arguments as one tuple",
    ),
    "a pass without arguments": (lambda: Pass(torch.neg), TypeError, "Pass: it takes .*; got no `args`"),
    "a result for a function": (
        lambda: Pass(torch.ones(2), (1,)),
        TypeError,
        "Pass: `function` must be a function; got Tensor; give it uncalled, as in Pass(function, (a, b))",
    ),
    "a text for backward": (
        lambda: Pass(torch.neg, (1,), "yes"),
        TypeError,
        "Pass: `backward` must be True or False; got str; give all arguments of `function` as one tuple",
    ),
    "a backward pass of nothing": (
        lambda: measure.memory(Pass(torch.neg, (torch.ones(2),), backward=True)),
        ValueError,
        "one of `args` must require gradients; got none that does; call .requires_grad_() on one",
    ),
    "a backward pass of a detached result": (
        lambda: measure.memory(Pass(Tensor.detach, (torch.ones(2, requires_grad=True),), backward=True)),
        ValueError,
        "the result of `function` must require gradients; got none that does; compute it without .detach()",
    ),
    "meta tensors": (
        lambda: measure.memory(Pass(torch.neg, (torch.ones(2, device="meta"),))),
        ValueError,
        "memory: tensors of `work` must have memory; got a meta tensor; effops.lint(function, *args).peak_bytes",
    ),
    "no repeats": (lambda: measure.times({"neg": ONE}, repeats=0), ValueError, "`repeats` must be at least 1; got 0"),
    "half a repeat": (
        lambda: measure.times({"neg": ONE}, repeats=2.5),
        TypeError,
        "times: `repeats` must be an integer; got 2.5; give a whole number, as 2",
    ),
    "a time below 0": (
        lambda: measure.times({"neg": ONE}, budget_s=-1),
        ValueError,
        "times: `budget_s` must be at least 0; got -1; leave it out for the default",
    ),
    "a time in a text": (lambda: measure.times({"neg": ONE}, budget_s="1"), TypeError, "give a float, as 10.0"),
    "progress that is shown": (
        lambda: measure.times({"neg": ONE}, progress=True),
        TypeError,
        "times: `progress` must be a function of a name; got True; give one, as print",
    ),
    "warming up below 0": (lambda: measure.memory(ONE, warmup=-1), ValueError, "`warmup` must be at least 0; got -1"),
    "stacks without a depth": (
        lambda: measure.profile({"neg": ONE}, group_by_stack=True),
        TypeError,
        "profile: `group_by_stack` must be an integer; got True; give a number, as 1",
    ),
}


@pytest.mark.parametrize(("call", "error", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_answered(call: Callable[[], Any], error: type[Exception], answer: str) -> None:
    """They gave Python's errors of what is inside, or bytes and times of nothing."""
    with pytest.raises(error) as caught:
        call()
    place = 0
    for part in answer.split(".*"):
        place = str(caught.value).find(part, place)
        assert place >= 0, (part, str(caught.value))
