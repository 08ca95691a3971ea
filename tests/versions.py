"""Run the tests and README with other versions of Python, PyTorch and all else: a fresh environment for each row.

    python -m tests.versions                                    # every row: hours, and gigabytes of downloads each
    python -m tests.versions 2.14.1-3.14 lowest                 # these rows
    python -m tests.versions lowest --tests tests/test_text.py  # a quick look at few tests, which is not written

A row clones the commit of the checkout into a temporary folder, and installs it there without `constraints.txt`. It
runs the default tests, `effops doctor`, two examples of README, and the kernels in Triton's interpreter. The folder is
removed in the end. What was found replaces the row's earlier result in `bench/results/versions-DATE.json`.

Interpreters are those on PATH, and those of pyenv. pip is configured by its environment variables: the row of the CPU
build of PyTorch needs an index or a folder that has it. The exit code is 1 if anything fails.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.requirements import Requirement
from rich.table import Table

from .test_docs import PYTHON

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PYTHONS = {  # of CPython, for each version of PyTorch
    "2.11.0": ("3.10", "3.12"),
    "2.12.1": ("3.11",),
    "2.13.0": ("3.11", "3.13"),
    "2.14.1": ("3.10", "3.12", "3.14"),
    "2.15.0": ("3.11", "3.13"),
}
HOUR = 3600.0
LONGEST_ERROR = 300  # characters of an error that are kept
PACKAGES = "torch", "triton", "numpy", "transformers", "rich", "opt_einsum"
NOT_OF_THE_ROW = "PYTHONHOME", "PYTHONPATH", "TRITON_INTERPRET", "VIRTUAL_ENV"
USABLE = """
import ensurepip, pathlib, sys, sysconfig
has_headers = pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()
print("%d.%d" % sys.version_info[:2], sys.implementation.name, "usable" if has_headers else "without Python.h")
"""  # TorchInductor and Triton compile with the headers
FOUND = """
import importlib.metadata, json, platform, sys
versions = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        versions[name] = None
try:
    from torch import version
    builds = [f"CUDA {version.cuda}"] * bool(version.cuda) + [f"ROCm {version.hip}"] * bool(version.hip)
    versions["build"] = (builds or ["CPU"])[0]
except Exception:  # the steps tell of an import that fails
    versions["build"] = None
print(json.dumps(versions))
"""
IMPORTED = """
import time
start = time.perf_counter()
import torch
with_torch = time.perf_counter()
import effops
print(with_torch - start, time.perf_counter() - with_torch)
"""

Outcome = dict[str, Any]  # of a step: whether it is "ok", its seconds, and what else it tells


@dataclass(frozen=True)
class Row:
    """A set of versions: CPython's, and what pip is asked for besides effops and its extra `test`."""

    name: str
    python: str
    requirements: tuple[str, ...]


def rows() -> dict[str, Row]:
    """All rows by name. `===` takes the build of that very name, of which `2.13.0+cpu` is another."""
    found = [
        Row(f"{torch}-{python}", python, (f"torch==={torch}",)) for torch, own in PYTHONS.items() for python in own
    ]
    # The CPU build brings no triton; this is the one that the other build brings.
    found.append(Row("2.13.0-3.11-cpu", "3.11", ("torch==2.13.0+cpu", "triton==3.7.1")))
    found.append(Row("lowest", "3.11", tuple(dict.fromkeys(lowest_versions()))))
    found.append(Row("newest", "3.14", ("torch",)))
    return {row.name: row for row in found}


def lowest_versions(extra: str = "test") -> Iterator[str]:
    """The lowest versions that pyproject.toml allows of what effops needs, and of what an extra and its extras do."""
    import tomllib  # of Python 3.11, where the command runs; its tests run on 3.10 too

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from _lowest(project["dependencies"], project["optional-dependencies"])
    yield from _lowest(project["optional-dependencies"][extra], project["optional-dependencies"])


def _lowest(texts: Sequence[str], extras: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for asked in map(Requirement, texts):
        if asked.name == "effops":
            for extra in sorted(asked.extras):
                yield from _lowest(extras[extra], extras)
        else:
            (bound,) = asked.specifier
            assert bound.operator == ">=", f"pyproject.toml: {asked} has no lowest version"
            yield f"{asked.name}=={bound.version}"


def interpreter(version: str) -> Path:
    """The first CPython of that version, such as "3.11", that can make an environment, on PATH or of pyenv.

    Raises:
        LookupError: there is none
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [Path(folder, f"python{version}") for folder in os.get_exec_path()]
    found += sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    found = [one for one in found if one.exists()]
    for one in found:
        told = subprocess.run([one, "-c", USABLE], capture_output=True, text=True)
        if told.stdout.split() == [version, "cpython", "usable"]:
            return one
    others = f"; of those found, {len(found)}, none has ensurepip and Python.h" if found else ""
    raise LookupError(f"there is no python{version} on PATH, and none of pyenv{others}")


@dataclass(frozen=True)
class Environment:
    """A temporary folder: a clone of the checkout, an environment that it is installed in, and a folder for scripts."""

    folder: Path

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    @property
    def programs(self) -> Path:
        return self.folder / "environment" / "bin"

    def run(
        self, *command: str | Path, hours: float = 1, stderr: int = subprocess.PIPE, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the clone to its end, or until its time is over, with the programs of the environment."""
        own = {name: value for name, value in os.environ.items() if name not in NOT_OF_THE_ROW}
        own["PATH"] = os.pathsep.join([str(self.programs), own.get("PATH", os.defpath)])
        for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            place = self.folder / name.lower()
            place.mkdir(exist_ok=True)
            own[name] = str(place)
        try:
            return subprocess.run(
                command,
                cwd=self.checkout,
                env=own | variables,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                timeout=hours * HOUR,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"stopped after {hours} hours")

    def python(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run(self.programs / "python", *arguments)

    def step(self, *arguments: str | Path, hours: float = 1, **variables: str) -> Outcome:
        """Whether Python exits with 0, and if not, its last line: of an error, or of a verdict after progress."""
        start = time.perf_counter()
        # Without a buffer, lines of both streams come in the order in which they were written.
        command = self.programs / "python", "-u", *arguments
        done = self.run(*command, hours=hours, stderr=subprocess.STDOUT, **variables)
        outcome: Outcome = {"ok": done.returncode == 0, "seconds": round(time.perf_counter() - start, 1)}
        return outcome if outcome["ok"] else {**outcome, "error": self.last_line(done.stderr or done.stdout)}

    def last_line(self, text: str) -> str:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return self.without_folders(lines[-1]) if lines else "it printed nothing"

    def without_folders(self, text: str) -> str:
        """The text, cut if long, without addresses, with files by their place in the checkout or their names alone."""
        text = text.replace(f"{self.checkout}{os.sep}", "")
        text = re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text)
        text = re.sub(r"\b0x[0-9a-f]{8,}\b", "0x..", text)
        return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]} .."


def installed(environment: Environment, row: Row) -> str:
    """Clone, and install as CONTRIBUTING does but for the constraints; why that fails, or nothing if it does not."""
    subprocess.run(["git", "clone", "--quiet", ROOT, environment.checkout], check=True)
    command = [interpreter(row.python), "-m", "venv", environment.programs.parent]
    subprocess.run(command, check=True, capture_output=True)
    done = environment.python("-m", "pip", "install", "-e", ".[test]", *row.requirements)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    return environment.last_line("\n".join(errors) or done.stderr) if done.returncode else ""


def found_versions(environment: Environment) -> Outcome:
    """Versions, and how many seconds the imports of torch, and then of effops, take: the least of three."""
    versions = json.loads(environment.python("-c", FOUND, *PACKAGES).stdout)
    runs = [environment.python("-c", IMPORTED) for _ in range(3)]
    times = [map(float, run.stdout.split()) for run in runs if run.returncode == 0]
    least = [round(min(own), 2) for own in zip(*times)] or [None, None]
    return {"versions": versions, "import_seconds": dict(zip(("torch", "effops"), least))}


def tests(environment: Environment, paths: Sequence[str]) -> Outcome:
    """The default tests, or those of some paths: how many passed, failed and were skipped, and each failure."""
    report = environment.folder / "tests.xml"
    outcome = environment.step("-m", "pytest", "-q", f"--junitxml={report}", *paths, hours=4)
    return {**outcome, **counts(environment, report.read_text())} if report.exists() else outcome


def counts(environment: Environment, report: str) -> Outcome:
    """What JUnit's XML says. A test that fails twice, in its call and when it ends, counts once."""
    cases: dict[str, Any] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "")
        place = f"{module.replace('.', '/')}.py::{name}" if module else name
        cases[place] = next((one for one in case if one.tag in ("failure", "error")), cases.get(place, case))
    failures = [
        {"test": place, "error": environment.without_folders(error_of(one))}
        for place, one in cases.items()
        if one.tag in ("failure", "error")
    ]
    skipped = sum(one.find("skipped") is not None for one in cases.values())
    passed = len(cases) - len(failures) - skipped
    return {"passed": passed, "failed": len(failures), "skipped": skipped, "failures": failures}


def error_of(failure: ElementTree.Element) -> str:
    """The last line that pytest marks as one of the error; of an error without such lines, its last one."""
    lines = [line.strip() for line in (failure.text or failure.get("message", "")).splitlines() if line.strip()]
    marked = [line.removeprefix("E ").strip() for line in lines if line.startswith("E  ")]
    return (marked or lines or [""])[-1]


def steps(environment: Environment, paths: Sequence[str]) -> Mapping[str, Callable[[], Outcome]]:
    """What a row runs, by name."""
    blocks = PYTHON.findall((environment.checkout / "README.md").read_text())
    five_lines, tiled = blocks[0], next(block for block in blocks if "effops.tiled" in block)

    def example(name: str, text: str) -> Outcome:
        script = environment.folder / "scripts" / f"readme_{name}.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(text)
        return environment.step(script)

    return {
        "doctor": lambda: environment.step(environment.programs / "effops", "doctor"),
        "five_lines": lambda: example("five_lines", five_lines),
        "tiled": lambda: example("tiled", f"import torch, effops\n{tiled}"),
        "interpreted": lambda: environment.step("tests/support/interpreted_ops.py", TRITON_INTERPRET="1"),
        "tests": lambda: tests(environment, paths),
    }


def run_row(row: Row, paths: Sequence[str], progress: Callable[[str], None]) -> Outcome:
    """Everything about a row, as it is written.

    Raises:
        LookupError: there is no such interpreter
    """
    import torch

    from effops.measure import device_model
    from effops.text import counted

    interpreter(row.python)
    result = {
        "row": row.name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "device": f"{device_model(torch.device('cpu'))}, {counted(os.cpu_count() or 1, 'threads')}",
        "asked_for": list(row.requirements),
    }
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder).resolve())
        progress(f"{row.name}: installing")
        error = installed(environment, row)
        if error:
            return {**result, "installed": False, "error": error}
        progress(f"{row.name}: versions and imports")
        result |= {"installed": True, **found_versions(environment), "steps": {}}
        for name, step in steps(environment, paths).items():
            progress(f"{row.name}: {name.replace('_', ' ')}")
            result["steps"][name] = step()
        return result


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def write(result: Outcome, folder: Path) -> Path:
    """Put a row into the file of its date, in the order of the rows, in place of the row's earlier result there."""
    file = folder / f"versions-{result['date'][:10]}.json"
    earlier = json.loads(file.read_text())["rows"] if file.exists() else []
    by_name = {one["row"]: one for one in [*earlier, result]}
    order = [*(name for name in rows() if name in by_name), *(name for name in by_name if name not in rows())]
    file.write_text(json.dumps({"rows": [by_name[name] for name in order]}, indent=1) + "\n")
    return file


def holds(result: Outcome) -> bool:
    return bool(result["installed"]) and all(step["ok"] for step in result["steps"].values())


def summary(results: Sequence[Outcome], not_run: Mapping[str, str]) -> Table:
    table = Table("row", "versions", "tests", "all else", box=None)
    for result in results:
        if not result["installed"]:
            table.add_row(result["row"], "", "not installed", result["error"])
            continue
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        own = dict(result["steps"])
        of_tests = own.pop("tests")
        told = [f"{of_tests[name]} {name}" for name in ("passed", "failed", "skipped") if name in of_tests]
        others = [f"{name.replace('_', ' ')}: {step.get('error', 'ok')}" for name, step in own.items()]
        table.add_row(result["row"], versions, ", ".join(told) or of_tests.get("error"), "\n".join(others))
    for name, reason in not_run.items():
        table.add_row(name, "", "not run", reason)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    from effops.commands.console import plain_or_rich_console, shown_progress

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"one of {', '.join(rows())}; all without any")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="run these alone, and write no result")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.rows if name not in rows()]
    if unknown:
        parser.error(f"there is no row {unknown[0]}; choose from {', '.join(rows())}")
    results, not_run, console = [], {}, plain_or_rich_console()
    with shown_progress(lines=True) as progress:
        if git("status", "--porcelain", "--untracked-files=no"):
            progress("the checkout has changes without a commit, which no row has")
        for name in options.rows or rows():
            try:
                results.append(run_row(rows()[name], options.tests, progress))
            except LookupError as error:
                not_run[name] = str(error)
                continue
            if not options.tests:
                progress(f"{name}: written to {write(results[-1], RESULTS).relative_to(ROOT)}")
    console.print(summary(results, not_run))
    for result in results:
        for failure in result.get("steps", {}).get("tests", {}).get("failures", ()):
            console.print(f"{result['row']}: {failure['test']}: {failure['error']}", soft_wrap=True)
    return int(bool(not_run) or not all(map(holds, results)))


if __name__ == "__main__":
    sys.exit(main())
