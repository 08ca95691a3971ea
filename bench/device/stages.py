"""Runs the stages of on_device.sh, each as a process with a limit of its own; see `--help`.

OUT_DIR/NAME.log holds what a stage printed, as it printed it. OUT_DIR/results.json holds the outcome of every stage and
what it measured, and is written anew every second: a job that is killed leaves both.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
BROUGHT = ROOT / "brought"  # what `--bring` leaves for a machine without git and network
TOTAL_S = 540
TICK_S = 1.0
LOG_BYTES = 8 * 2**20
TAIL_LINES = 8
FOUNDING = "power_spherical_log_prob"
TRIAL_SIZE = 48  # --device cpu tries the script out: the largest size of its benchmarks


@dataclass(frozen=True)
class Stage:
    """What is run, as command lines for Python, one after the other, and within how many seconds.

    Attributes:
        tool: the program that runs Python, with its options; empty for none
        needs_cuda: whether a machine without a CUDA device has nothing to run
        variables: of the environment, besides those that are set
    """

    name: str
    limit_s: int
    commands: Sequence[Sequence[str]]
    tool: Sequence[str] = ()
    needs_cuda: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What became of a stage. `report` is what it wrote and what its log says, as far as it came."""

    name: str
    outcome: str
    seconds: float = 0.0
    last_lines: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)


NCU_METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "sm__inst_executed_pipe_fp64.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
)
NCU = ("ncu", "--csv", "--page", "raw", "--clock-control", "none", "--metrics", ",".join(NCU_METRICS))
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # an access beyond a tensor is then one beyond an allocation
KERNELS = "regex:_(forward|backward|logsumexp)(_rows|_columns)?_kernel"


def benchmark(*options: str) -> list[str]:
    return [str(BENCH / "run.py"), *options]


def stages_of(device: str) -> list[Stage]:
    """The stages in the order of their value."""
    from effops.dispatch.op import ops

    trial = device == "cpu"
    small = trial_options if trial else lambda op: ["--peers"]
    common = ["--device", device, "--pass", "both", "--all"]
    tests = ["-m", "pytest", "-v", "-n", str(os.cpu_count()), "--dist", "worksteal", "-p", "no:cacheprovider"]
    order = [name for name in ops() if name != FOUNDING]
    order.sort(key=lambda name: ("mixture" not in name, "attention" not in name))
    founding = [
        benchmark("--op", FOUNDING, *common, "--dtype", dtype, *small(FOUNDING)) for dtype in ("float32", "bfloat16")
    ]
    rest = [
        benchmark("--op", op, *common, "--dtype", dtype, *small(op))
        for dtype in (("float32",) if trial else ("float32", "bfloat16", "float64"))
        for op in ([*order, FOUNDING] if dtype == "float64" else order)
    ]
    checked = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    profiled = (*NCU, "--kernel-name", KERNELS)
    return [
        Stage("memcheck", 110, [[str(BENCH / "device" / "kernel_calls.py"), "risky"]], checked, True, UNCACHED),
        Stage("founding", 110, founding),
        Stage("ncu", 80, [[str(BENCH / "device" / "kernel_calls.py"), "profiled"]], profiled, needs_cuda=True),
        Stage("kernels", 240, [[*tests, "--few-compilations", str(ROOT / "tests" / "kernels")]]),
        Stage("rest", 400, rest),
        Stage("streams", 60, [[str(BENCH / "device" / "streams.py")]], needs_cuda=True),
        Stage("ops", 400, [[*tests, *(str(ROOT / "tests" / name) for name in ("matrix", "ops"))]], needs_cuda=True),
    ]


def trial_options(op: str) -> list[str]:
    """The options that make a benchmark quick: small sizes, and nothing that TorchInductor compiles first."""
    from effops.dispatch.op import ops
    from effops.reference import reference_of

    sizes = [f"{name}={min(size, TRIAL_SIZE)}" for name, size in reference_of(ops()[op]).sizes.items()]
    variants = [name for name in ops()[op].variants if name not in ("compile", "flex")]
    return ["--size", ",".join(sizes), "--variants", ",".join(variants), "--repeats", "2"]


def obstacle(stage: Stage, device: str) -> str:
    """Why a stage cannot run here; empty if it can."""
    if stage.needs_cuda and device == "cpu":
        return "needs a CUDA device"
    if stage.tool and not shutil.which(stage.tool[0]):
        return f"{stage.tool[0]} is not installed"
    return ""


class Job:
    """The stages of one run of the script, and the file that tells of them."""

    def __init__(self, out: Path, work: Path, head: Mapping[str, Any], total_s: float) -> None:
        self.out, self.work, self.head = out, work, dict(head)
        self.deadline = time.monotonic() + total_s
        self.outcomes: list[Outcome] = []

    def run(self, stage: Stage, reason: str) -> None:
        """Run a stage, or note why it does not run."""
        left = min(stage.limit_s, self.deadline - time.monotonic())
        found = Outcome(stage.name, "running")
        self.outcomes.append(found)
        if reason or left <= 0:
            found.outcome = f"skipped: {reason or 'no time left'}"
            self.write()
            return
        print(f"== {stage.name}: at most {left:.0f} s", flush=True)
        start = time.monotonic()
        for number, command in enumerate(stage.commands):
            json_file = self.work / f"{stage.name}-{number}.json"
            found.outcome = self._run_command(stage, command, json_file, start + left, found, start)
            if found.outcome.startswith("over"):
                break
        found.seconds = round(time.monotonic() - start, 1)
        self.write()
        print(f"== {stage.name}: {found.outcome}, {found.seconds:.0f} s", flush=True)

    def _run_command(
        self, stage: Stage, command: Sequence[str], json_file: Path, end: float, found: Outcome, start: float
    ) -> str:
        """The outcome of the stage after one command more. The command's group of processes is killed at the end."""
        written = ["--json", str(json_file)] if command[0] != "-m" else []
        log = self.out / f"{stage.name}.log"
        line = [*stage.tool, sys.executable, *command, *written]
        before = found.outcome
        with log.open("ab") as output:
            output.write(f"$ {' '.join(line)}\n".encode())
            output.flush()
            environment = {**os.environ, **stage.variables}
            process = subprocess.Popen(
                line, cwd=self.work, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            while process.poll() is None and time.monotonic() < end and log.stat().st_size < LOG_BYTES:
                time.sleep(min(TICK_S, max(0.0, end - time.monotonic())))
                self._look(stage, found, time.monotonic() - start)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        self._look(stage, found, time.monotonic() - start)
        if log.stat().st_size >= LOG_BYTES:
            return f"over {LOG_BYTES} bytes of log"
        if time.monotonic() >= end and code == -signal.SIGKILL:
            return f"over {time.monotonic() - start:.0f} s"
        if code:
            return f"exit code {code}"
        return "ok" if before == "running" else before

    def _look(self, stage: Stage, found: Outcome, seconds: float) -> None:
        """Read what the stage has written so far, and write it down."""
        log = self.out / f"{stage.name}.log"
        text = log.read_text(errors="replace")
        found.seconds, found.last_lines = round(seconds, 1), text.splitlines()[-TAIL_LINES:]
        rows: list[Any] = []
        for file in sorted(self.work.glob(f"{stage.name}-*.json"), key=lambda file: int(file.stem.split("-")[-1])):
            try:
                written = json.loads(file.read_text())
            except json.JSONDecodeError:  # it is being written just now
                return
            rows += written.pop("rows", [])
            found.report.update({key: value for key, value in written.items() if key != "header"})
        found.report |= {"rows": rows} if rows else {}
        found.report |= tests_in(text) | counters_in(text)
        self.write()

    def write(self) -> None:
        """Write results.json: whole or not at all."""
        new = self.out / "results.json.new"
        content = {"header": self.head, "stages": [asdict(outcome) for outcome in self.outcomes]}
        new.write_text(json.dumps(content, indent=1) + "\n")
        new.replace(self.out / "results.json")


def tests_in(log: str) -> dict[str, Any]:
    """How many tests passed, by the lines of `pytest -v`, which tell paths from any folder, and which did not."""
    outcomes = "(PASSED|FAILED|ERROR|SKIPPED)"
    found = re.findall(rf"^\[gw\d+\] \[ *\d+%\] {outcomes} \S*?(tests/.*?) *$", log, re.MULTILINE)
    without_workers = re.findall(rf"^\S*?(tests/.*?) {outcomes}\b", log, re.MULTILINE)
    found += [(outcome, name) for name, outcome in without_workers]
    if not found:
        return {}
    bad = sorted({name for outcome, name in found if outcome in ("FAILED", "ERROR")})
    return {"tests": {"passed": sum(outcome == "PASSED" for outcome, _ in found), "failed": bad}}


def counters_in(log: str) -> dict[str, Any]:
    """What ncu read of each kernel, by the lines of its CSV: names, then units, then a line for each launch."""
    lines = [line for line in log.splitlines() if line.startswith('"')]
    if not lines or not lines[0].startswith('"ID"'):
        return {}
    units, *launches = list(csv.DictReader(lines))[:1000] or [{}]
    names = {key: f"{key} {units.get(key) or ''}".strip() for key in ("Kernel Name", *NCU_METRICS)}
    return {"counters": [{name: launch[key] for key, name in names.items() if key in launch} for launch in launches]}


def summary(job: Job) -> str:
    """What a person wants to read: a line a stage, and what failed. It is the end of what is printed."""
    lines = ["", *(f"{key}: {value}" for key, value in job.head.items())]
    for found in job.outcomes:
        rows, tests = found.report.get("rows", []), found.report.get("tests")
        counted = f", {len(rows)} rows" if rows else ""
        counted += f", {tests['passed']} tests passed, {len(tests['failed'])} failed" if tests else ""
        lines.append(f"{found.name}: {found.outcome}, {found.seconds:.0f} s{counted}")
        for row in rows:
            if found.name == "founding" or row["status"] == "failed":
                time_text = "-" if row["time_ms"] is None else f"{row['time_ms']:.3f} ms"
                words = row["op"], row["pass"], row["dtype"], row["variant"], time_text, row["status"], row["reason"]
                lines.append("  " + " ".join(words)[:160])
        lines += ["  " + ", ".join(map(str, one.values()))[:160] for one in found.report.get("counters", [])[:12]]
        lines += [f"  failed: {name}"[:160] for name in (tests or {}).get("failed", [])[:10]]
        if not found.outcome.startswith(("ok", "skipped")):
            lines += [f"  | {line[:160]}" for line in found.last_lines]
    return "\n".join(lines)


def assemble(work: Path) -> None:
    """A folder that holds the package as it would be installed, and the packages that were brought along."""
    package = work / "effops"
    package.mkdir()
    for path in (ROOT / "effops").iterdir():
        (package / path.name).symlink_to(path)
    (package / "kernels").symlink_to(ROOT / "kernels")
    for wheel in BROUGHT.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(work)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(work), os.environ.get("PYTHONPATH", "")])
    os.environ["PYTHONUNBUFFERED"] = "1"
    sys.path.insert(0, str(work))


def header(device: str) -> dict[str, Any]:
    """What the figures depend on; it says what is not known or lacks."""
    import importlib.util

    import torch
    from parts.report import header as measured_header

    head = measured_header(torch.device(device), None)
    file = BROUGHT / "commit"
    if head["commit"] is None:
        head["commit"] = file.read_text().strip() if file.exists() else None
    remedy = "run `bash bench/on_device.sh --bring` where they are, and bring the folder brought/ along"
    lacking = [
        *(["the commit is not known"] if head["commit"] is None else []),
        *(["power_spherical is not installed"] if importlib.util.find_spec("power_spherical") is None else []),
    ]
    return {**head, "lacking": f"{'; '.join(lacking)}: {remedy}" if lacking else ""}


def bring() -> int:
    """Write into brought/ what a machine without git and network lacks: the commit, and power_spherical as a wheel."""
    from parts.report import _commit

    BROUGHT.mkdir(exist_ok=True)
    commit = _commit()
    if commit is None:
        raise SystemExit("on_device.sh --bring: needs a git checkout; got none; run it where the checkout is")
    (BROUGHT / "commit").write_text(commit + "\n")
    download = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "power-spherical"]
    return subprocess.run([sys.executable, "-m", *download, "--dest", str(BROUGHT)], check=False).returncode


def main() -> int:
    """Returns the exit code: 1 if a stage failed."""
    parser = argparse.ArgumentParser(prog="bench/on_device.sh", description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=Path("results"), metavar="OUT_DIR")
    parser.add_argument("--stage", action="append", metavar="NAME", help="this stage only; may be repeated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu tries the script out")
    parser.add_argument("--total", type=float, default=TOTAL_S, metavar="S", help=f"seconds for all, {TOTAL_S}")
    parser.add_argument("--limit", type=int, metavar="S", help="seconds for each stage instead of its own limit")
    parser.add_argument("--bring", action="store_true", help="write brought/ for a machine without git and network")
    options = parser.parse_args()
    out = options.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        assemble(work)
        if options.bring:
            return bring()
        import torch

        if options.device == "cuda" and not torch.cuda.is_available():
            parser.error("argument --device: cuda needs a CUDA device; got none; use --device cpu")
        known = stages_of(options.device)
        unknown = set(options.stage or ()) - {stage.name for stage in known}
        if unknown:
            names = ", ".join(stage.name for stage in known)
            parser.error(f"argument --stage: expected one of {names}; got {', '.join(sorted(unknown))}")
        out.mkdir(parents=True, exist_ok=True)
        job = Job(out, work, header(options.device), options.total)
        for stage in known:
            if options.stage is None or stage.name in options.stage:
                (out / f"{stage.name}.log").unlink(missing_ok=True)
                limit_s = options.limit or stage.limit_s
                job.run(Stage(**{**vars(stage), "limit_s": limit_s}), obstacle(stage, options.device))
        print(summary(job), flush=True)
    return int(any(not found.outcome.startswith(("ok", "skipped")) for found in job.outcomes))


if __name__ == "__main__":
    sys.exit(main())
