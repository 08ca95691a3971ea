"""What variants require of a call and of the machine.

Each function returns why a variant cannot run a call, or an empty string if it can.
"""

import functools
import importlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from torch.compiler import is_compiling

from effops.dispatch.op import Call
from effops.numerics.precision import CPU
from effops.pytorch.calls import FakeTensor, _are_functorch_transforms_active, dual_level

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, for tests


def on_cuda(call: Call) -> bool:
    return call.device != CPU and call.device.type == "cuda"


def requires_torchscript(call: Call) -> str:
    if sys.version_info >= (3, 14):
        return "needs torch.jit.script, which PyTorch does not support on Python 3.14 and later"
    if is_compiling():
        return "cannot be traced by torch.compile: call it outside of the compiled function"
    return ""


def requires_inductor(call: Call) -> str:
    if is_compiling():
        return ""
    if any(isinstance(tensor, FakeTensor) for tensor in call.tensors):  # compiled code would read their memory
        return "needs tensors in memory, got fake ones"
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "needs torch.compile, which TORCH_COMPILE_DISABLE=1 turns off"
    if call.device.type == "cpu" and (lack := lack_of_compiler()):
        return f"needs {lack.what}; {lack.remedy}"
    if call.device.type == "cuda" and _import_error("triton"):
        return f"needs triton for TorchInductor, which cannot be imported: {_import_error('triton')}"
    if dual_level() >= 0:
        return "cannot be differentiated in forward mode, since TorchInductor cannot"
    if _are_functorch_transforms_active():
        return "cannot be transformed by torch.func from outside; compile the transformed function instead"
    return ""


def requires_triton(call: Call) -> str:
    if call.device.type != "cuda" and not (call.device.type == "cpu" and INTERPRETED):
        return f"needs CUDA tensors, got {call.device.type}"
    if is_compiling():  # an import cannot be traced; if it fails, the operator raises its error
        return ""
    error = kernels_error()
    return f"needs effops.kernels, which cannot be imported: {error}" if error else ""


def requires_cpp(call: Call) -> str:
    if call.device.type != "cpu":
        return f"needs CPU tensors, got {call.device.type}"
    error = _traced_library_error()
    return f"needs the C++ library of effops, which {error}" if error else ""


def _traced_library_error() -> str:
    return library_error()


# A trace takes the result for a constant, since it cannot follow the import. `torch.compiler.assume_constant_result`
# does the same, and imports the compiler.
_traced_library_error._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def library_error() -> str:
    """Why the C++ kernels cannot be loaded; empty if they can."""
    error = _import_error("effops.kernels.library")
    if error:
        return f"cannot be imported: {error}"
    from effops.kernels import library

    return library.obstacle()


def library_description() -> str:
    """Which C++ library is loaded, and what built it; or why none is."""
    if library_error():
        return f"none: it {library_error()}"
    from effops.kernels import library

    return library.description()


def kernels_error() -> str:
    """Why the Triton kernels cannot be imported; empty if they can."""
    return _import_error("effops.kernels.pairs")


class Lack(NamedTuple):
    """What is missing, as "needs" goes on, and what to do about it."""

    what: str
    remedy: str


@functools.cache
def lack_of_compiler() -> Lack | None:
    """What TorchInductor lacks to compile for CPUs: it runs a C++ compiler on code that includes Python's header."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    error = _compiler_error(compiler)
    if error:
        return Lack(f"a C++ compiler, and {error}", "install one or name it in CXX")
    folder = Path(sysconfig.get_path("include"))
    # A framework of macOS has its headers elsewhere, where TorchInductor finds them.
    if sys.platform == "darwin" or (folder / "Python.h").exists() or _includes_header(compiler, folder):
        return None
    headers = f"the headers of Python {sysconfig.get_python_version()}"
    return Lack(f"Python.h, which is not in {folder}", f"install {headers}")


def _compiler_error(compiler: str) -> str:
    """Why it cannot be run; empty if it can."""
    try:
        told = subprocess.run([compiler, "--version"], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        return f"{compiler} was not found"
    except OSError as error:
        return f"{compiler} cannot be run: {error.strerror}"
    return f"`{compiler} --version` ended with status {told.returncode}" if told.returncode else ""


def _includes_header(compiler: str, folder: Path) -> bool:
    """Whether it finds Python's header elsewhere, as where CPATH names a folder."""
    command = [compiler, "-E", "-I", str(folder), "-x", "c++", "-"]
    return subprocess.run(command, input=b"#include <Python.h>\n", capture_output=True, check=False).returncode == 0


@functools.cache
def _import_error(module: str) -> str:
    """Why a module cannot be imported; empty if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # an import may raise anything, and any of it is the reason
        return f"{type(error).__name__}: {error}"
    return ""
