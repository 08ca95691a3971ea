"""Every package of the checkout, `kernels/` as `effops.kernels`, and its C++ library; all else is in pyproject.toml.

The library is left out where there is no C++ compiler, or with EFFOPS_CPP=0. With EFFOPS_CPP=1 it must be there.
"""

import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

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
            super().build_extension(extension)
            self.outcomes[name] = ""
        except Exception as error:
            self.outcomes[name] = " ".join(str(error).split())
            raise
        finally:
            self.build_temp = own

    def compiler_version(self):
        try:
            told = subprocess.run([self.compiler.compiler[0], "--version"], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            return str(error)
        return told.stdout.splitlines()[0]


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
