"""Every package of the checkout, `kernels/` as `effops.kernels`, and its C++ library; all else is in pyproject.toml.

The library is left out where there is no C++ compiler, or with EFFOPS_CPP=0. With EFFOPS_CPP=1 it must be there.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError

FOLDER = Path("kernels/cpp")
SOURCES = sorted(map(str, FOLDER.glob("*.cpp")))
HEADERS = sorted(map(str, FOLDER.glob("*.h")))
OUTCOME = "built.json"
FLAGS = ["-O2", "-g0", "-std=c++17", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-mfma"]
INSTRUCTIONS = {
    "avx2": ["-mavx2", "-DVECTOR_BYTES=32"],
    "avx512": [
        *(f"-mavx512{kind}" for kind in ("f", "dq", "bw", "vl")),
        "-mprefer-vector-width=512",
        "-DVECTOR_BYTES=64",
    ],
}
REALS = {"": ["-DREAL_BYTES=4"], "_float64": ["-DREAL_BYTES=8"]}
FAILURE = re.compile("error|cannot|not found|undefined", re.IGNORECASE)  # "ld: cannot find" comes before "error"
LONGEST = 160  # letters of a reason
WANTED = os.environ.get("EFFOPS_CPP", "")


def extensions():
    if WANTED == "0" or platform.system() != "Linux" or platform.machine() != "x86_64":
        return []
    return [
        Extension(
            f"effops.kernels.cpp.{name}{ending}",
            SOURCES,
            depends=HEADERS,
            extra_compile_args=[*FLAGS, *flags, *sizes],
            optional=WANTED != "1",
            language="c++",
        )
        for name, flags in INSTRUCTIONS.items()
        for ending, sizes in REALS.items()
    ]


class Build(build_ext):
    """Builds libraries of plain names, and writes the outcome beside them."""

    def initialize_options(self):
        super().initialize_options()
        self.outcomes = {}  # what went wrong, by library

    def get_ext_filename(self, name):
        return f"{name.replace('.', '/')}.so"

    def run(self):
        folder = FOLDER if self.inplace else Path(self.build_lib, "effops", FOLDER)
        if self.inplace and WANTED != "1" and not os.access(folder, os.W_OK):  # the checkout of another user
            return
        for old in (*folder.glob("*.so"), *folder.glob(OUTCOME)):
            old.unlink()
        super().run()
        digest = hashlib.sha256(b"".join(Path(path).read_bytes() for path in [*SOURCES, *HEADERS])).hexdigest()[:16]
        outcome = {"compiler": self.compiler_version(), "digest": digest, **self.outcomes}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OUTCOME).write_text(json.dumps(outcome) + "\n")

    def build_extension(self, extension):
        own, self.build_temp = self.build_temp, str(Path(self.build_temp, extension.name))  # else objects are shared
        name = extension.name.rpartition(".")[2]
        try:
            with standard_error() as written:
                super().build_extension(extension)
            if not Path(self.get_ext_fullpath(extension.name)).exists():
                raise CCompilerError("it made no file")
            self.outcomes[name] = ""
        except Exception as error:
            self.outcomes[name] = self.reason(error, "".join(written))
            raise CCompilerError(f"{self.compiler_version()}: {self.outcomes[name]}") from error
        finally:
            self.build_temp = own

    def reason(self, error, written):
        """Why a library was not built, in a line: of what the compiler wrote, the first that tells an error."""
        if shutil.which(self.command) is None:
            return "it was not found"
        told = [line for line in written.splitlines() if FAILURE.search(line) and "warning:" not in line]
        while error.args and isinstance(error.args[0], Exception):  # setuptools wraps what the command raised
            error = error.args[0]
        code = re.search(r"exit code (-?\d+)$", str(error))  # as older versions of setuptools put it
        status = getattr(error, "returncode", int(code[1]) if code else None)
        if status is not None:  # else the text has all arguments of the command
            error = f"it ended {f'by signal {-status}' if status < 0 else f'with status {status}'}"
        return textwrap.shorten(told[0] if told else str(error), LONGEST, placeholder=" ...")

    @property
    def command(self):
        """The C++ compiler, as CXX or Python's own build names it, without arguments."""
        return self.compiler.compiler_so_cxx[0]

    def compiler_version(self):
        """The line with which the compiler tells its version, or its name."""
        options = {"capture_output": True, "stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
        with contextlib.suppress(OSError):
            told = subprocess.run([*self.compiler.compiler_so_cxx, "--version"], check=False, **options)
            if told.returncode == 0 and told.stdout.strip():
                return told.stdout.split("\n")[0].strip()
        return self.command


@contextlib.contextmanager
def standard_error():
    """Give a list, which gets what processes wrote to standard error, in English. It is written there too."""
    written, language = [], os.environ.get("LC_ALL")
    os.environ["LC_ALL"] = "C"
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield written
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            file.seek(0)
            written.append(file.read().decode(errors="replace"))
            sys.stderr.write(written[0])
            del os.environ["LC_ALL"]
            os.environ.update({"LC_ALL": language} if language is not None else {})


class Wheel(bdist_wheel):
    """A wheel for any Python 3, of this platform if the library is in it."""

    def get_tag(self):
        is_built = any(Path(self.bdist_dir).rglob("*.so"))
        return "py3", "none", super().get_tag()[2] if is_built else "any"


setup(
    packages=[*find_packages(include=["effops", "effops.*"]), "effops.kernels"],
    ext_modules=extensions(),
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
