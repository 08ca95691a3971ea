"""`effops doctor`, run on right variants and on variants that are wrong, raise or cannot run."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from effops.kernels import library

import effops
from effops.commands import doctor as module
from effops.commands import main as cli
from effops.commands import speed
from effops.dispatch import op as registry
from effops.dispatch import requirements
from effops.dispatch.op import find_op
from effops.dispatch.requirements import requires_inductor
from effops.measure import Pass, Timing
from effops.pytorch import missing
from effops.reference import reference_of, tried_ops

from ..support.calls import on_this_python

OP = find_op(effops.broadcast_dot)
CHECKED = on_this_python(("chunked", "einsum", "torchscript", "naive"))  # of this op, and of einsum
NAIVE = OP.variants["naive"].run
PROGRESS = f"asking for versions and devices\nchecking {OP.name} on cpu\n"
Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Doctor:
    """`effops doctor` of one op on the CPU without compiling; gives the exit code and the JSON file's content."""
    monkeypatch.setattr(module, "_cuda_obstacle", lambda: "not in this test")
    # The first call of reference_of imports the references of all ops, which must be registered then.
    monkeypatch.setattr(reference_of(OP), "sizes", {"M": 4, "T": 2, "D": 8})
    monkeypatch.setattr(registry, "_ops", {OP.name: OP})
    for variant, reason in (("compile", "needs a compiler, got none"), ("cpp", "needs the library, got none")):
        change(monkeypatch, variant, requires=[lambda call, reason=reason: reason])

    def run(*options: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "report.json"
        code = cli.main(["doctor", "--json", str(path), *options])
        return code, json.loads(path.read_text())

    return run


def change(monkeypatch: pytest.MonkeyPatch, variant: str, **changes: Any) -> None:
    monkeypatch.setitem(OP.variants, variant, dataclasses.replace(OP.variants[variant], **changes))


def check_of(content: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    return next(check for check in content["ops"] if (check["op"], check["device"]) == (OP.name, device))


def rows(content: dict[str, Any], device: str = "cpu") -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in check_of(content, device)["variants"]}


def statuses(content: dict[str, Any], device: str = "cpu") -> dict[str, str]:
    return {name: row["status"] for name, row in rows(content, device).items()}


@pytest.mark.slow
def test_module_is_the_command(tmp_path: Path) -> None:
    """All ops in an environment like a user's, but without compiling each of them, which takes minutes."""
    path = tmp_path / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TORCH_COMPILE_DISABLE"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "effops", "doctor", "--json", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("checking")] == [
        f"checking {name} on {device}"  # it was silent for a minute
        for name in tried_ops()
        for device in ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    ]
    content = json.loads(path.read_text())
    assert content["passes"] is True
    devices = [device["name"] for device in content["devices"]]
    assert devices[0] == "cpu"
    assert len(devices) == 1 + torch.cuda.device_count()
    assert [(check["op"], check["device"]) for check in content["ops"]] == [
        (name, device) for name in tried_ops() for device in devices
    ]
    for check in content["ops"]:
        op = tried_ops()[check["op"]]
        assert [row["variant"] for row in check["variants"]] == list(op.preference)
        for row in check["variants"]:
            if row["status"] == "ok":
                assert 0 <= row["error_ratio"] <= 1
                assert 0 <= row["gradient_error_ratio"] <= 1
            else:
                assert row["status"] == "unavailable"
                assert row["reason"]
        assert f"\n{op.name} " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("all ")
    matrix = done.stdout.partition("results and gradients")[2].partition("*: ")[0]
    assert max(map(len, matrix.splitlines())) <= 80
    assert rows(content)["triton"]["reason"] == "needs CUDA tensors, got cpu"
    assert rows(content)["compile"]["reason"] == "needs torch.compile, which TORCH_COMPILE_DISABLE=1 turns off"
    assert check_of(content)["automatic"] == "chunked"


def test_right_variants_pass(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    code, content = doctor()
    printed = capsys.readouterr()
    assert (code, content["passes"], printed.err) == (0, True, PROGRESS)
    named = {"effops", "torch", "triton", "C++ library", "opt_einsum", "python", "system", "cuda", "rocm", "driver"}
    assert named == content["versions"].keys()
    assert f"torch: {torch.__version__}" in printed.out
    (cpu,) = content["devices"]
    assert (cpu["name"], cpu["threads"], cpu["problem"]) == ("cpu", torch.get_num_threads(), "")
    assert 0 < cpu["available_bytes"] <= cpu["memory_bytes"]
    assert f"cpu: {cpu['model']}, {cpu['capability']}, {cpu['threads']} thread" in printed.out
    assert "no CUDA or ROCm device: not in this test" in printed.out
    assert rows(content)["compile"] == {
        "variant": "compile",
        "status": "unavailable",
        "reason": "needs a compiler, got none",
        "error_ratio": None,
        "gradient_error_ratio": None,
    }
    assert "needs a compiler, got none" in printed.out


def test_the_last_line_is_the_verdict(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor("--op", OP.name)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"all {len(CHECKED)} checked variants are right; the automatic choice runs for every op"
    )
    change(monkeypatch, "einsum", run=lambda call: NAIVE(call) + 1)
    doctor()
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 failed, the first: broadcast_dot einsum on cpu: ")


def test_an_unknown_op_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--op", "nothing"]) == 2
    assert "'nothing' is no op of effops; choose from" in capsys.readouterr().err
    assert cli.main(["doctor", "--op", "attn"]) == 2
    err = capsys.readouterr().err
    assert err.endswith(', einsum; did you mean "attention"?\n')
    assert cli.main(["doctor", "--op", "normal"]) == 2
    err += capsys.readouterr().err
    assert err.endswith('did you mean "normal_log_prob"?\n')
    assert "effops doctor: argument --op: 'normal' is no op" in err
    assert "record()" not in err  # of Python, not of the command


def test_full_times_right_variants(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake_times(passes: Mapping[str, Pass], **options: Any) -> dict[str, Timing]:
        medians_ms = {"chunked": 30.0, "chunked backward": 100.0, "einsum": 20.0, "einsum backward": 105.0}
        assert passes.keys() == medians_ms.keys()
        assert all(work.backward == name.endswith(" backward") for name, work in passes.items())
        return {name: Timing(ms, ms, 0.0, 1, 0.0) for name, ms in medians_ms.items()}

    monkeypatch.setattr(speed, "times", fake_times)
    assert doctor()[1]["speeds"] == []
    code, content = doctor("--full")
    (found,) = content["speeds"]
    assert (code, found["op"], found["device"], found["automatic"]) == (0, OP.name, "cpu", "chunked")
    assert found["forward_ms"] == {"chunked": 30, "einsum": 20}
    assert found["training_ms"] == {"chunked": 130, "einsum": 125}
    printed = capsys.readouterr().out
    assert 'broadcast_dot forward on cpu: prefer variant="einsum", 1.5 times as fast as chunked\n' in printed
    assert "broadcast_dot forward and backward on cpu: prefer" not in printed
    assert printed.splitlines()[-1].endswith("; another variant is faster for broadcast_dot")


def test_full_measures(doctor: Doctor) -> None:
    (found,) = doctor("--full")[1]["speeds"]
    assert found["forward_ms"].keys() == found["training_ms"].keys() == {"chunked", "einsum"}
    assert all(0 < ms < found["training_ms"][name] for name, ms in found["forward_ms"].items())


def test_a_wrong_variant_is_not_timed(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, "einsum", run=lambda call: NAIVE(call) + 1)
    (found,) = doctor("--full")[1]["speeds"]
    assert found["forward_ms"].keys() == {"chunked"}


def test_a_variant_that_raises_at_reference_sizes_fails(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def limited(call: Any) -> torch.Tensor:
        if call.a.shape == (4, 1, 2, 8):
            raise RuntimeError("too large")
        return NAIVE(call)

    change(monkeypatch, "einsum", run=limited)
    code, content = doctor("--full")
    assert (code, content["speeds"][0]["problems"]) == (1, {"einsum": "raised RuntimeError: too large"})
    failure = "broadcast_dot einsum on cpu at its reference sizes: raised RuntimeError: too large"
    assert capsys.readouterr().out.splitlines()[-1] == f"1 failed, the first: {failure}"


@pytest.mark.parametrize("status", ["unchecked", "ok"])
def test_the_verdict_names_choices_that_were_never_run(status: Any) -> None:
    checks = (module.VariantCheck("triton", status), module.VariantCheck("naive", "ok"))
    check = module.OpCheck("attention", "cuda:0", "founding", "float32", "triton", "", checks)
    caution = "triton was never run on a CUDA GPU: `effops doctor --full` checks and times it"
    verdict = module.Report({}, (), "", (check,)).verdict
    assert verdict.endswith(f"; {caution}") == (status == "unchecked")


@pytest.mark.compiled
def test_compiled_variants_are_checked_too(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, "compile", requires=[requires_inductor])
    code, content = doctor()
    assert (code, statuses(content)["compile"]) == (0, "unchecked")
    code, content = doctor("--full")
    assert (code, statuses(content)["compile"]) == (0, "ok")
    run = OP.variants["compile"].run
    change(monkeypatch, "compile", run=lambda call: run(call) + 0.01)
    code, content = doctor("--full")
    assert (code, statuses(content)["compile"]) == (1, "failed")


def test_auto_is_the_variant_that_a_call_takes(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, "chunked", requires=[lambda call: "needs a blue moon, got none"])
    code, content = doctor()
    assert (code, check_of(content)["automatic"]) == (0, "einsum")


def test_json_on_standard_output_is_alone(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    _, content = doctor()
    capsys.readouterr()
    assert cli.main(["doctor", "--json", "-"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert printed.err == PROGRESS
    assert (found["ops"], found["versions"]) == (content["ops"], content["versions"])


def test_one_thread_is_no_plural() -> None:
    cpu = module.Device("cpu", "a model", "AVX2", threads=1)
    assert module._description(cpu) == "a model, AVX2, 1 thread"
    check = module.OpCheck("attention", "cpu", "case", "float32", "naive", "", (module.VariantCheck("naive", "ok"),))
    assert module.Report({}, (), "", (check,)).verdict.startswith("the one checked variant is right; ")


def test_a_file_that_cannot_be_written_is_told(
    doctor: Doctor, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "check_op", lambda *arguments: pytest.fail("the file is checked first"))
    assert cli.main(["doctor", "--json", str(tmp_path)]) == 2
    assert f"--json: expected a file that can be written; got '{tmp_path}': it is a folder" in capsys.readouterr().err


def test_a_wrong_result_fails(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change(monkeypatch, "einsum", run=lambda call: NAIVE(call) + 0.01)
    code, content = doctor()
    assert (code, content["passes"]) == (1, False)
    wrong = rows(content)["einsum"]
    assert wrong["status"] == "failed"
    assert wrong["error_ratio"] > 1
    assert wrong["reason"].startswith("the result's error is ")
    assert [name for name, status in statuses(content).items() if status == "failed"] == ["einsum"]
    printed = capsys.readouterr()
    assert printed.err == PROGRESS + f"failed: {OP.name} einsum on cpu: {wrong['reason']}\n"
    assert wrong["reason"] in printed.out


@pytest.mark.parametrize(
    "run", [lambda call: NAIVE(call) * float("nan"), lambda call: NAIVE(call)[..., :1]], ids=["nan", "shape"]
)
def test_an_infinite_error_is_null(doctor: Doctor, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    change(monkeypatch, "einsum", run=run)
    code, content = doctor()
    row = rows(content)["einsum"]
    assert (code, row["status"], row["error_ratio"]) == (1, "failed", None)
    assert row["reason"] == "the result's error is inf times its budget"


def test_wrong_gradients_fail(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, "einsum", run=lambda call: NAIVE(call) * 2 - NAIVE(call).detach())
    code, content = doctor()
    row = rows(content)["einsum"]
    assert (code, row["status"]) == (1, "failed")
    assert row["error_ratio"] <= 1 < row["gradient_error_ratio"]
    assert row["reason"].startswith("the gradients' error is ")


def test_a_variant_without_gradients_fails(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, "einsum", run=lambda call: NAIVE(call).detach())
    code, content = doctor()
    assert (code, rows(content)["einsum"]["status"]) == (1, "failed")
    assert "does not require grad" in rows(content)["einsum"]["reason"]


def test_a_raising_variant_fails(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(call: Any) -> torch.Tensor:
        raise RuntimeError("no such\nkernel [red] for :cat: [/blue]")

    change(monkeypatch, "einsum", run=raising)
    code, content = doctor()
    reason = "raised RuntimeError: no such kernel [red] for :cat: [/blue]"
    assert (code, rows(content)["einsum"]["status"], rows(content)["einsum"]["reason"]) == (1, "failed", reason)
    assert statuses(content)["naive"] == "ok"
    printed = capsys.readouterr()
    assert reason in printed.out
    assert printed.err == PROGRESS + f"failed: {OP.name} einsum on cpu: {reason}\n"


def test_an_automatic_choice_that_raises_fails(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, "triton", automatic=lambda call: False, requires=[lambda call: "needs to be out of the way"])
    change(monkeypatch, "chunked", requires=[lambda call: 1 / 0])
    code, content = doctor()
    check = check_of(content)
    assert (code, check["automatic"]) == (1, None)
    assert check["reason"] == "raised ZeroDivisionError: division by zero"
    assert rows(content)["chunked"]["reason"] == check["reason"]
    assert statuses(content)["naive"] == "ok"


def test_an_op_that_no_variant_can_run_fails(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OP.variants:
        change(monkeypatch, name, requires=[lambda call: "needs another machine"])
    code, content = doctor()
    assert (code, check_of(content)["automatic"]) == (1, None)
    assert set(statuses(content).values()) == {"unavailable"}
    assert "no variant supports this call" in check_of(content)["reason"]


def test_a_device_out_of_order_fails(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")

    def sample_on_cpu(*shapes: Any, sample: Callable[..., Any], device: torch.device, **options: Any) -> Any:
        return broken() if device.type == "cuda" else sample(*shapes, device=device, **options)

    monkeypatch.setattr(module, "_cuda_obstacle", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    for op in tried_ops().values():
        reference = reference_of(op)
        monkeypatch.setattr(reference, "sample", functools.partial(sample_on_cpu, sample=reference.sample))
    code, content = doctor("--full")
    problem = "raised RuntimeError: CUDA error: unspecified launch failure"
    assert code == 1
    assert [(device["name"], device["problem"]) for device in content["devices"]] == [("cpu", ""), ("cuda:0", problem)]
    assert check_of(content, "cuda:0")["automatic"] is None
    assert {row["reason"] for row in rows(content, "cuda:0").values()} == {problem}
    assert set(statuses(content).values()) == {"ok", "unavailable"}
    printed = capsys.readouterr()
    assert f"cuda:0: {problem}" in printed.out
    assert f"failed: cuda:0: {problem}\n" in printed.err


@pytest.mark.parametrize(("hip", "capability"), [(None, "9.4"), ("6.4", "gfx942")])
def test_cuda_device(monkeypatch: pytest.MonkeyPatch, hip: str | None, capability: str) -> None:
    properties = SimpleNamespace(name="Accelerator", major=9, minor=4, gcnArchName="gfx942", total_memory=2**34)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(module, "available_bytes", lambda device: 2**33)
    device = module.describe(torch.device("cuda", 1))
    assert device == module.Device(
        "cuda:1", "Accelerator", capability, memory_bytes=2**34, available_bytes=2**33, problem=""
    )
    assert module._description(device) == f"Accelerator, {capability}, 16.0 GiB of memory, 8.0 GiB free"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_why_there_is_no_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said `AssertionError: Torch not compiled with CUDA enabled`."""
    assert module._cuda_obstacle()
    assert "Error: " not in module._cuda_obstacle()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert module._cuda_obstacle().startswith("this PyTorch is built for the CPU alone; to use a GPU, install one ")


def test_a_triton_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert str(module.versions()["triton"]).startswith("cannot be imported: ModuleNotFoundError: ")


def test_a_named_op_is_checked_with_the_arguments_before_its_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--op", "einsum"]) == 0
    assert f"all {len(CHECKED)} checked variants are right" in capsys.readouterr().out


def test_why_there_is_no_library_is_told(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = {"compiler": "g++ (Debian) 8.3.0", "digest": "", "avx2": "a.h:2: error: no such thing"}
    (tmp_path / library.OUTCOME).write_text(json.dumps(outcome))
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(library.platform, "system", lambda: "Linux")
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    for function in (library.library, library.obstacle):
        monkeypatch.setattr(library, function.__name__, function.__wrapped__)
    monkeypatch.setattr(requirements, "library_error", requirements.library_error.__wrapped__)
    reason = "not built for avx2 by g++ (Debian) 8.3.0: a.h:2: error: no such thing; install GCC 9 or newer, and then"
    assert f"none: it was {reason} effops again" in doctor()[1]["versions"]["C++ library"]
    assert f"C++ library: none: it was {reason} effops again" in capsys.readouterr().out


def test_what_pytorch_lacks_is_told(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(missing, "LACKING", missing.LACKING[:])
    monkeypatch.setattr(module, "LACKING", missing.LACKING)
    missing.stand_in("tiles", "torch._C._absent")
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    told = "tiles need torch._C._absent, which torch 9.9.0 lacks"
    assert told in doctor()[1]["lacking"]
    printed = capsys.readouterr().out
    assert f"missing: {told}" in printed
    assert re.search(r"effops was tested with torch .*, not with 9\.9\.0", printed)


@pytest.mark.parametrize("variant", ["einsum", "chunked"])  # of which the second is the automatic choice
def test_a_variant_that_needs_what_pytorch_lacks(doctor: Doctor, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    monkeypatch.setattr(missing, "LACKING", missing.LACKING[:])
    change(monkeypatch, variant, run=lambda call: missing.stand_in("calls of ops", "torch._C._absent")())
    code, content = doctor()
    found = rows(content)[variant]
    assert (code, found["status"]) == ((1, "failed") if variant == "chunked" else (0, "unavailable"))
    assert "calls of ops need torch._C._absent, which torch" in found["reason"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "{} was not found"),
        ("#!/bin/sh\nexit 3\n", "`{} --version` ended with status 3"),
        ("no program\n", "{} cannot be run: Exec format error"),
    ],
)
def test_a_compiler_that_inductor_cannot_call_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, reason: str
) -> None:
    """One that was there and did not run counted as one; the call then raised what Inductor says."""
    compiler = tmp_path / "g++"
    if script is not None:
        compiler.write_text(script)
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(requirements, "lack_of_compiler", requirements.lack_of_compiler.__wrapped__)
    expected = reason.format(compiler)
    call = OP.prepare(torch.ones(2, 3), torch.ones(2, 3))
    assert requires_inductor(call) == f"needs a C++ compiler, and {expected}; install one or name it in CXX"


def test_a_compiler_without_the_header_of_python_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It counted as one that compiles: the call raised what Inductor says. A folder in CPATH may have the header."""
    include = sysconfig.get_path("include")
    for name in ("CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(requirements, "lack_of_compiler", requirements.lack_of_compiler.__wrapped__)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    call = OP.prepare(torch.ones(2, 3), torch.ones(2, 3))
    version = "{}.{}".format(*sys.version_info)
    expected = f"needs Python.h, which is not in {tmp_path}; install the headers of Python {version}"
    assert requires_inductor(call) == expected
    monkeypatch.setenv("CPATH", include)
    assert requires_inductor(call) == ""
