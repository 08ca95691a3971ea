"""The C++ kernels of `cpp/`, as libraries that ctypes loads: which ones, and why none is there.

The build makes those for AVX2 and those for AVX-512, each for float32 and for float64, and writes its outcome to
`cpp/built.json`. ctypes lets go of Python's lock while a kernel runs.
"""

import ctypes
import functools
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "cpp"
OUTCOME = "built.json"
ROWS = {torch.float32: 128, torch.float64: 64}  # queries of a block, at most, as in C++
SOME = 1024  # scales that a thread takes at a time
BRIEF = 64 * SOME  # normalisers of so many numbers take a thread 1 to 6 ms: no longer than others keep Python's lock
# The libraries that a processor runs, the fastest first, by PyTorch's name of its instructions.
BY_CAPABILITY = {"AVX2": ("avx2",), "AVX512": ("avx512", "avx2")}
REALS = {torch.float32: "", torch.float64: "_float64"}  # what kernels compute in, and how the names of libraries end
TYPES = {torch.bfloat16: 1, torch.float16: 2}  # as `Type` in C++; others are what kernels compute in, or booleans
MAPS = "linear", "power_spherical", "von_mises_fisher"
AGAIN = "install GCC 9 or newer, and then effops again; the variable CXX names another compiler"
LEFT_OUT = "the installation left it out; install effops again, without EFFOPS_CPP=0, where kernels/ can be written"


class _Strided(ctypes.Structure):
    """An address, strides along some axes, and what the numbers are."""

    AXES: int

    @classmethod
    def of(cls, tensor: Tensor, strides: Sequence[int], first: int = 0) -> Any:
        """Some strides of a tensor in memory, from one of its numbers on. One that is not there has 0."""
        if tensor.data_ptr() == 0 and tensor.numel() > 0:
            raise RuntimeError("effops.kernels.library: an operand must have memory; got a tensor without")
        at = tensor.data_ptr() + first * tensor.itemsize
        return cls(at, (ctypes.c_int64 * cls.AXES)(*strides), TYPES.get(tensor.dtype, 0))


class Operand(_Strided):
    """As `Operand` in C++."""

    AXES = 4
    _fields_ = [("at", ctypes.c_void_p), ("strides", ctypes.c_int64 * AXES), ("type", ctypes.c_int64)]


class Batched(_Strided):
    """As `Batched` in C++."""

    AXES = 10
    _fields_ = [("at", ctypes.c_void_p), ("strides", ctypes.c_int64 * AXES), ("type", ctypes.c_int64)]


class PairsCall(ctypes.Structure):
    """As `PairsCall` in C++."""

    OPERANDS = (
        *("left", "right", "deviations", "weights", "scale", "normaliser", "slope", "most", "rest", "dout"),
        *("dleft", "dright", "ddeviations", "dweights", "dscale"),
    )
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "others", "points", "components", "depth", "threads")),
        *((name, ctypes.c_int64) for name in ("is_reduced", "scales_along", "weights_along")),
        *((name, Operand) for name in OPERANDS),
        ("workspace", ctypes.c_void_p),
        ("map", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("floor", "least", "offset")),
    ]


class Axes(ctypes.Structure):
    """As `Axes` in C++."""

    COUNT = Batched.AXES - 2
    _fields_ = [("sizes", ctypes.c_int64 * COUNT), ("is_shared", ctypes.c_int64 * COUNT)]

    @classmethod
    def of(cls, sizes: Sequence[int], is_shared: Sequence[bool]) -> "Axes":
        missing = cls.COUNT - len(sizes)
        return cls((1,) * missing + tuple(sizes), (False,) * missing + tuple(is_shared))


class AttentionCall(ctypes.Structure):
    """As `AttentionCall` in C++."""

    NUMBERS = "queries", "keys", "depth", "features", "threads", "output", "mask_is", "may_exclude", "diagonal", "seed"
    OPERANDS = (
        *("query", "key", "weight", "value", "mask", "out", "dout", "statistics"),
        *("dquery", "dkey", "dweight", "dvalue", "dmask"),
    )
    _fields_ = [
        ("of_keys", Axes),
        ("of_mask", Axes),
        *((name, ctypes.c_int64) for name in NUMBERS),
        *((name, Batched) for name in OPERANDS),
        ("workspace", ctypes.c_void_p),
        ("factor", ctypes.c_double),
        ("dropped", ctypes.c_double),
    ]


class LogSparseCall(ctypes.Structure):
    """As `LogSparseCall` in C++."""

    OPERANDS = "query", "key", "value", "out", "dout", "statistics", "dquery", "dkey", "dvalue"
    _fields_ = [
        ("of_keys", Axes),
        *((name, ctypes.c_int64) for name in ("length", "depth", "features", "offsets", "threads")),
        ("offset", ctypes.POINTER(ctypes.c_int64)),
        *((name, Batched) for name in OPERANDS),
        ("factor", ctypes.c_double),
    ]

    def take(self, offsets: Sequence[int]) -> None:
        """Take the offsets of the pattern."""
        self.offsets, self.offset = len(offsets), (ctypes.c_int64 * len(offsets))(*offsets)


CALLS: dict[type[ctypes.Structure], str] = {PairsCall: "pairs", AttentionCall: "attention", LogSparseCall: "log_sparse"}


class Library:
    """The kernels for float32, or those for float64."""

    def __init__(self, path: Path) -> None:
        self._long = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
        # Functions that take no time keep Python's lock, for which a call may wait 5 ms.
        self._brief = ctypes.PyDLL(str(path))
        for call, kernel in CALLS.items():
            for name in ("call_bytes", "items", *(["workspace"] if hasattr(call, "workspace") else [])):
                getattr(self._brief, f"effops_{kernel}_{name}").restype = ctypes.c_int64
            assert getattr(self._brief, f"effops_{kernel}_call_bytes")() == ctypes.sizeof(call)
        for name in MAPS:
            getattr(self._brief, f"effops_{name}").restype = ctypes.c_void_p

    def items(self, call: ctypes.Structure, is_backward: bool) -> int:
        """How many parts a call of these sizes has at most, which threads take one after another."""
        count = getattr(self._brief, f"effops_{CALLS[type(call)]}_items")
        return int(count(ctypes.byref(call), ctypes.c_int64(is_backward)))

    def workspace(self, call: ctypes.Structure) -> int:
        """How many numbers of workspace a thread needs."""
        return int(getattr(self._brief, f"effops_{CALLS[type(call)]}_workspace")(ctypes.byref(call)))

    def map(self, name: str) -> int:
        """The address of a map."""
        return int(getattr(self._brief, f"effops_{name}")())

    def run(self, call: ctypes.Structure, is_backward: bool) -> None:
        direction = "backward" if is_backward else "forward"
        getattr(self._long, f"effops_{CALLS[type(call)]}_{direction}")(ctypes.byref(call))

    def _normalising(self, numbers: int) -> ctypes.CDLL:
        """The library as it computes normalisers of so many numbers: of few it keeps Python's lock."""
        return self._brief if numbers <= BRIEF else self._long

    def normalisers(
        self, name_of_map: str, scale: Tensor, dimension: int, values: Tensor, slopes: Tensor | None
    ) -> None:
        """Write the normalisers of contiguous scales, and their derivatives where these are wanted.

        They have the digits of float32.
        """
        count = scale.numel()
        self._normalising(count).effops_normaliser(
            ctypes.c_void_p(self.map(name_of_map)),
            *(ctypes.c_void_p(None if one is None else one.data_ptr()) for one in (scale, values, slopes)),
            ctypes.c_double(dimension),
            ctypes.c_int64(count),
            ctypes.c_int64(threads_for(-(-count // SOME))),
        )

    def normalisers_of_deviations(self, deviations: Tensor, dimension: int, values: Tensor) -> None:
        """Write the normalisers of contiguous deviations, of which the last dimension is all coordinates or 1."""
        count, coordinates = values.numel(), deviations.shape[-1]
        self._normalising(deviations.numel()).effops_normaliser_of_deviations(
            *(ctypes.c_void_p(one.data_ptr()) for one in (deviations, values)),
            *(ctypes.c_int64(one) for one in (count, coordinates, dimension, threads_for(-(-count // SOME)))),
        )


@functools.cache
def library(real: torch.dtype) -> Library:
    """The loaded kernels that compute in float32 or float64. Raises OSError where there are none."""
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise OSError(f"is built on Linux x86-64 alone, got {platform.system()} {platform.machine()}")
    if capability not in BY_CAPABILITY:
        raise OSError(f"needs a processor with AVX2 or AVX-512, got {capability}")
    outcome = build_outcome()
    if not outcome:
        raise OSError(f"was not built: {LEFT_OUT}")
    first, chosen = BY_CAPABILITY[capability][0], _instructions(capability)
    if chosen is None:
        raise OSError(f"{_failure(first)}; {AGAIN}")
    if _digest() not in ("", outcome["digest"]):
        raise OSError("was built of other sources than those in kernels/cpp; run pip install -e . again")
    try:
        return Library(FOLDER / f"{chosen}{REALS[real]}.so")
    except OSError as error:
        raise OSError(f"cannot be loaded: {error}; install effops again on this machine") from error


def _instructions(capability: str) -> str | None:
    """The fastest instructions that a processor runs and for which all libraries were built, if any."""
    return next((name for name in BY_CAPABILITY[capability] if not _failure(name)), None)


def _failure(name: str) -> str:
    """Why there is no library for these instructions; empty if there is one, for float32 and for float64."""
    outcome = build_outcome()
    for ending in REALS.values():
        reason = outcome.get(name + ending, "the build did not come to it")
        if reason:
            return f"was not built for {name + ending} by {outcome.get('compiler', 'an unknown compiler')}: {reason}"
    return ""


@functools.cache
def obstacle() -> str:
    """Why there are no kernels; empty if there are."""
    try:
        for real in REALS:
            library(real)
    except OSError as error:
        return str(error)
    return ""


def description() -> str:
    """Which library is loaded, and what built it; where the processor runs faster ones, why these are not there."""
    capability = torch.backends.cpu.get_cpu_capability()
    first, chosen = BY_CAPABILITY[capability][0], _instructions(capability)
    slower = "" if chosen == first else f"; a faster one {_failure(first)}; {AGAIN}"
    return f"{chosen}, built by {build_outcome()['compiler']}{slower}"


def build_outcome() -> dict[str, str]:
    """What the build wrote: the compiler, the digest of the sources, and for each library what went wrong."""
    try:
        found: dict[str, str] = json.loads((FOLDER / OUTCOME).read_text())
    except FileNotFoundError:
        return {}
    return found


def _digest() -> str:
    """A number that changes with the sources; empty where they are not, as in a wheel."""
    sources = sorted(FOLDER.glob("*.cpp")) + sorted(FOLDER.glob("*.h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16] if sources else ""


class _Process:
    """Whether this process was forked: the threads of the other one are not in it, and a region would wait for them."""

    is_forked = False


def _note_fork() -> None:
    _Process.is_forked = True


os.register_at_fork(after_in_child=_note_fork)


def threads_for(items: int) -> int:
    """How many threads serve so many items of work."""
    return 1 if _Process.is_forked else max(1, min(torch.get_num_threads(), items))
