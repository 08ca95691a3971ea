"""A wheel holds every module, and works without what is installed for tests alone."""

import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from effops.kernels import library

ROOT = Path(__file__).parents[1]


def test_every_folder_of_modules_is_a_package_of_the_wheel(monkeypatch):
    """A folder that setup.py or its own __init__.py leaves out is missing from the wheel, not from the checkout."""
    setuptools = pytest.importorskip("setuptools")
    named = []
    monkeypatch.setattr(setuptools, "setup", lambda packages, **others: named.extend(packages))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    folders = {
        file.parent.relative_to(ROOT).parts for name in ("effops", "kernels") for file in (ROOT / name).rglob("*.py")
    }
    expected = {".".join(folder if folder[0] == "effops" else ("effops", *folder)) for folder in folders}
    assert sorted(named) == sorted(expected)
    assert (ROOT / "effops" / "py.typed").exists()


def test_one_tested_set_pins_what_the_package_asks_for():
    """A plot looked different, or failed, with the matplotlib of the day."""
    project = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[0]
    asked = set(re.findall(r'"([a-z][a-z-]*)>=', project))
    pinned = set(re.findall(r"^([a-z][a-z-]*)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert len(asked) > 10
    assert asked <= pinned


def test_no_text_asks_for_effops_from_an_index():
    """`pip install 'effops[bench]'` finds nothing before there is a release."""
    files = [
        *ROOT.glob("*.md"),
        *(file for folder in ("effops", "docs", "bench") for file in (ROOT / folder).rglob("*.[mp][dy]")),
    ]
    assert [file for file in files if re.search(r"pip install [^\n]*['\"]effops", file.read_text())] == []


@pytest.mark.slow
def test_without_triton():
    """PyTorch brings Triton where there is a GPU. Elsewhere nothing needs it."""
    code = """
        import sys
        sys.modules["triton"] = None
        import torch, effops
        x, ones = torch.randn(2, 3), torch.ones(2)
        out = effops.power_spherical_log_prob(x, ones, x)
        reports = effops.explain(effops.power_spherical_log_prob, x, ones, x).variants
        assert reports["triton"].temporary_bytes is None
        assert reports["chunked"].supported
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.slow
def test_the_benchmark_without_triton():
    code = """
        import sys
        sys.modules["triton"] = None
        sys.path.insert(0, "bench")
        import run
        variants = ["--variants", "triton,chunked,naive", "--device", "cpu", "--pass", "both", "--repeats", "1"]
        assert run.main(["--op", "broadcast_dot", "--size", "M=2,T=2,D=3", *variants]) == 0
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    printed = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert "triton skipped: " in printed


def test_numpy_is_installed_with_it():
    """PyTorch works without, and every start then printed "UserWarning: Failed to initialize NumPy"."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    for name in ("torch", "numpy", "rich"):
        assert any(one.startswith(f"{name}>=") for one in dependencies)
        assert any(one.startswith(f"{name}==") for one in pinned)


class Build:
    """The library as a compiler builds it, which is a script of the shell; without one there is no compiler."""

    def __init__(self, monkeypatch, folder):
        self.setuptools = pytest.importorskip("setuptools")
        self.monkeypatch, self.folder, self.compiler = monkeypatch, folder, folder / "g++-8"
        self.library = folder / "lib" / "effops" / "kernels" / "cpp"
        monkeypatch.setattr(library, "FOLDER", self.library)
        monkeypatch.setattr(library.platform, "system", lambda: "Linux")
        monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")

    def by(self, script, must="", in_place=False):
        """What the build wrote, where the compiler is this script."""
        if script is not None:
            self.compiler.write_text(f"#!/bin/sh\n{script}\n")
            self.compiler.chmod(0o755)
        self.monkeypatch.setenv("CXX", str(self.compiler))
        self.monkeypatch.setenv("EFFOPS_CPP", must)
        self.monkeypatch.chdir(self.folder if in_place else ROOT)
        given = {}
        self.monkeypatch.setattr(self.setuptools, "setup", given.update)
        runpy.run_path(str(ROOT / "setup.py"))
        distribution = self.setuptools.Distribution({"name": "effops", "ext_modules": given["ext_modules"]})
        command = given["cmdclass"]["build_ext"](distribution)
        command.build_lib, command.build_temp = str(self.folder / "lib"), str(self.folder / "temp")
        command.ensure_finalized()
        command.inplace = in_place
        command.run()
        return json.loads((self.library / library.OUTCOME).read_text())

    def said(self, capability):
        """Why there is no library on such a processor, or which one there is."""
        self.monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        library.library.cache_clear()
        try:
            library.library(torch.float32)
        except OSError as error:
            return str(error)
        finally:
            library.library.cache_clear()
        return library.description()


@pytest.fixture
def build(monkeypatch, tmp_path):
    return Build(monkeypatch, tmp_path)


VERSION = 'case "$*" in *--version) echo "g++-8 (Debian 8.3.0) 8.3.0"; exit;; esac'
WRITES = 'for last; do [ "$before" = -o ] && : > "$last"; before=$last; done'  # an empty file
FAILURES = {
    "no compiler": (None, "it was not found"),
    "a silent failure": ("exit 3", "it ended with status 3"),
    "a crash": ("kill -SEGV $$", "it ended by signal 11"),
    "nothing": ("exit 0", "it made no file"),
    "an error": (
        'echo "In file included from a.cpp:\na.h:1: warning: error-prone\na.h:2: error: no such thing\n a" >&2; exit 1',
        "a.h:2: error: no such thing",
    ),
    "no linker": (
        'case "$*" in *-shared*) echo "ld: cannot find -lgcc\nerror: 1" >&2; exit 1;; esac',
        "ld: cannot find -lgcc",
    ),
    "a long error": (f'echo "error: {"of a template " * 100}" >&2; exit 1', "of a ..."),
    "no text": ("printf 'error: \\377' >&2; exit 1", "error: \ufffd"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_build_that_fails_is_left_out_and_told_in_a_line(build, name):
    """The reason had all arguments of the command, 600 letters, and not the error.

    A compiler that wrote no version made the installation fail.
    """
    script, expected = FAILURES[name]
    outcome = build.by(script)
    assert outcome["compiler"] == str(build.compiler)
    for each in ("avx2", "avx2_float64", "avx512", "avx512_float64"):
        assert expected in outcome[each]
        assert len(outcome[each]) <= 160
    assert build.said("AVX512") == f"was not built for avx512 by {build.compiler}: {outcome['avx512']}; {library.AGAIN}"


def test_a_checkout_that_cannot_be_written_is_installed_without_the_library(build, monkeypatch):
    (build.folder / "effops").mkdir()
    (build.folder / "kernels" / "cpp").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FileNotFoundError):  # it wrote no outcome
        build.by("exit 1", in_place=True)
    assert not any((build.folder / "kernels" / "cpp").iterdir())
    assert build.said("AVX512") == f"was not built: {library.LEFT_OUT}"


def test_the_compiler_of_cxx_is_named(build):
    """It was the C compiler, which compiles nothing here."""
    assert build.by(f"{VERSION}; exit 1")["compiler"] == "g++-8 (Debian 8.3.0) 8.3.0"


def test_a_compiler_without_avx512_leaves_the_other_library(build, monkeypatch):
    script = f'{VERSION}; case "$*" in *-mavx512f*) echo "error: unknown option" >&2; exit 1;; esac; {WRITES}'
    outcome = build.by(script)
    assert (outcome["avx2"], outcome["avx512"]) == ("", "error: unknown option")
    monkeypatch.setattr(library, "Library", str)
    reason = "a faster one was not built for avx512 by g++-8 (Debian 8.3.0) 8.3.0: error: unknown option"
    assert build.said("AVX2") == "avx2, built by g++-8 (Debian 8.3.0) 8.3.0"
    assert build.said("AVX512") == f"avx2, built by g++-8 (Debian 8.3.0) 8.3.0; {reason}; {library.AGAIN}"


def test_a_library_that_cannot_be_loaded_is_told(build):
    build.by(WRITES)
    assert re.fullmatch(r"cannot be loaded: \S+/avx2.so: .*; install effops again on this machine", build.said("AVX2"))


def test_a_library_that_must_be_there_fails_with_the_error(build):
    with pytest.raises(Exception, match=r"^g\+\+-8 \(Debian 8.3.0\) 8.3.0: error: unknown option$"):
        build.by(f'{VERSION}; echo "error: unknown option" >&2; exit 1', must="1")
