"""The C++ kernels of `cpp/`, as a library that ctypes loads: which one of two, and why none is there.

The build makes one for AVX2 and one for AVX-512, and writes its outcome to `cpp/built.json`. ctypes lets go of Python's
lock while a call runs.
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
ROWS = 128  # queries of a block, at most, as in C++
SOME = 1024  # scales that a thread takes at a time
BY_CAPABILITY = {"AVX2": "avx2", "AVX512": "avx512"}  # PyTorch's name of the processor's instructions
TYPES = torch.float32, torch.bfloat16, torch.float16  # as `Type` in C++
MAPS = "linear", "power_spherical", "von_mises_fisher"
AGAIN = "install effops again, with a C++ compiler"


class _Strided(ctypes.Structure):
    """An address, strides along some axes, and what the numbers are."""

    AXES: int

    @classmethod
    def of(cls, tensor: Tensor, strides: Sequence[int]) -> Any:
        """Some strides of a tensor in memory. One that is not there has 0. A mask of booleans has no type here."""
        if tensor.data_ptr() == 0 and tensor.numel() > 0:
            raise RuntimeError("effops.kernels.library: an operand must have memory; got a tensor without")
        kind = 0 if tensor.dtype == torch.bool else TYPES.index(tensor.dtype)
        return cls(tensor.data_ptr(), (ctypes.c_int64 * cls.AXES)(*strides), kind)


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
        *((name, ctypes.c_float) for name in ("floor", "least", "offset")),
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
        ("factor", ctypes.c_float),
        ("dropped", ctypes.c_float),
    ]


class LogSparseCall(ctypes.Structure):
    """As `LogSparseCall` in C++."""

    OPERANDS = "query", "key", "value", "out", "dout", "statistics", "dquery", "dkey", "dvalue"
    _fields_ = [
        ("of_keys", Axes),
        *((name, ctypes.c_int64) for name in ("length", "depth", "features", "offsets", "threads")),
        ("offset", ctypes.POINTER(ctypes.c_int64)),
        *((name, Batched) for name in OPERANDS),
        ("factor", ctypes.c_float),
    ]


CALLS = {"pairs": PairsCall, "attention": AttentionCall, "log_sparse": LogSparseCall}


@functools.cache
def library() -> Any:
    """The loaded library. Raises OSError where there is none."""
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise OSError(f"is built on Linux x86-64 alone, got {platform.system()} {platform.machine()}")
    if capability not in BY_CAPABILITY:
        raise OSError(f"needs a processor with AVX2 or AVX-512, got {capability}")
    name, outcome = BY_CAPABILITY[capability], build_outcome()
    error = outcome.get(name, "the installation left it out")
    if error:
        raise OSError(f"was not built: {error}; {AGAIN}")
    if _digest() not in ("", outcome["digest"]):
        raise OSError("was built of other sources than those in kernels/cpp; run pip install -e . again")
    loaded = ctypes.CDLL(str(FOLDER / f"{name}.so"), mode=os.RTLD_NOW)
    for kernel, call in CALLS.items():
        call_bytes = getattr(loaded, f"effops_{kernel}_call_bytes")
        call_bytes.restype = ctypes.c_int64
        assert call_bytes() == ctypes.sizeof(call)
    return loaded


def _brief() -> Any:
    """The library for functions that take no time: they keep Python's lock, for which a call may wait 5 ms."""
    return _with_lock(library())


@functools.cache
def _with_lock(unlocked: Any) -> Any:
    loaded = ctypes.PyDLL(unlocked._name)
    for kernel, call in CALLS.items():
        for name in ("items", *(["workspace"] if hasattr(call, "workspace") else [])):
            getattr(loaded, f"effops_{kernel}_{name}").restype = ctypes.c_int64
    for name in MAPS:
        getattr(loaded, f"effops_{name}").restype = ctypes.c_void_p
    return loaded


@functools.cache
def obstacle() -> str:
    """Why there is no library; empty if there is one."""
    try:
        library()
    except OSError as error:
        return str(error)
    return ""


def description() -> str:
    """Which library is loaded, and what built it."""
    return f"{BY_CAPABILITY[torch.backends.cpu.get_cpu_capability()]}, built by {build_outcome()['compiler']}"


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


def pair_items(call: PairsCall, is_backward: bool) -> int:
    """How many parts a call of these sizes has at most, which threads take one after another."""
    return int(_brief().effops_pairs_items(ctypes.byref(call), ctypes.c_int64(is_backward)))


def pairs_workspace() -> int:
    """How many floats of workspace a thread needs."""
    return int(_brief().effops_pairs_workspace())


def normalisers(name_of_map: str, scale: Tensor, dimension: int, values: Tensor, slopes: Tensor | None) -> None:
    """Write the normalisers of contiguous scales, and their derivatives where these are wanted."""
    loaded, count = library(), scale.numel()
    loaded.effops_normaliser(
        ctypes.c_void_p(getattr(_brief(), f"effops_{name_of_map}")()),
        *(ctypes.c_void_p(None if one is None else one.data_ptr()) for one in (scale, values, slopes)),
        ctypes.c_double(dimension),
        ctypes.c_int64(count),
        ctypes.c_int64(threads_for(-(-count // SOME))),
    )


def normalisers_of_deviations(deviations: Tensor, dimension: int, values: Tensor) -> None:
    """Write the normalisers of contiguous deviations, of which the last dimension is all coordinates or 1."""
    count, coordinates = values.numel(), deviations.shape[-1]
    library().effops_normaliser_of_deviations(
        *(ctypes.c_void_p(one.data_ptr()) for one in (deviations, values)),
        *(ctypes.c_int64(one) for one in (count, coordinates, dimension, threads_for(-(-count // SOME)))),
    )


def run_pairs(call: PairsCall, name_of_map: str, settings: tuple[float, float, float], is_backward: bool) -> None:
    loaded = library()
    call.map = getattr(_brief(), f"effops_{name_of_map}")()
    call.floor, call.least, call.offset = settings
    (loaded.effops_pairs_backward if is_backward else loaded.effops_pairs_forward)(ctypes.byref(call))


def attention_items(call: AttentionCall, is_backward: bool) -> int:
    """As `pair_items`, of attention."""
    return int(_brief().effops_attention_items(ctypes.byref(call), ctypes.c_int64(is_backward)))


def attention_workspace() -> int:
    """As `pairs_workspace`, of attention."""
    return int(_brief().effops_attention_workspace())


def run_attention(call: AttentionCall, is_backward: bool) -> None:
    loaded = library()
    (loaded.effops_attention_backward if is_backward else loaded.effops_attention_forward)(ctypes.byref(call))


def log_sparse_items(call: LogSparseCall) -> int:
    """As `pair_items`, of log-sparse attention in either direction. It needs no workspace."""
    return int(_brief().effops_log_sparse_items(ctypes.byref(call)))


def run_log_sparse(call: LogSparseCall, offsets: Sequence[int], is_backward: bool) -> None:
    loaded = library()
    call.offset = (ctypes.c_int64 * len(offsets))(*offsets)
    (loaded.effops_log_sparse_backward if is_backward else loaded.effops_log_sparse_forward)(ctypes.byref(call))
