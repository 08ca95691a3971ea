"""Contexts that change something for the whole process, and may be entered by several threads at once.

PyTorch's profiler is one of them. `profiled` is this profiler without the lines that its libraries write to standard
error.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity

KINETO_LEVEL, KINETO_NOTHING = "KINETO_LOG_LEVEL", "99"
ERRORS = 2  # the level of PyTorch's C++ code that is above warnings


class Shared:
    """A context that the first thread enters and the last one leaves. `make` makes it anew."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self.make, self.lock, self.users = make, threading.Lock(), 0
        self.entered = ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if self.users == 0:
                self.entered.enter_context(self.make())
            self.users += 1

    def __exit__(self, *exception: object) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.entered.close()


@contextmanager
def profiled(cuda: bool = False, **options: Any) -> Iterator[torch.profiler.profile]:
    """`torch.profiler.profile` with memory, of the CPU and with `cuda` of CUDA devices too.

    Kineto, its library, announces each start and stop. It reads the level of what it says from the environment when a
    process first profiles, and never again. So the variable is set for that moment, unless the user has set it. A
    process that has profiled before goes on as it began.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with ALLOCATOR_SILENT, ExitStack() as stack:
        is_set = KINETO_LEVEL in os.environ
        os.environ.setdefault(KINETO_LEVEL, KINETO_NOTHING)
        try:
            profiler = stack.enter_context(
                torch.profiler.profile(activities=activities, profile_memory=True, **options)
            )
        finally:
            if not is_set:
                os.environ.pop(KINETO_LEVEL, None)
        yield profiler


@contextmanager
def _silent_allocator() -> Iterator[None]:
    """Keep PyTorch's C++ code from warning.

    The allocator of the CPU warns where memory is released that is older than the profile, as gradients of the step
    before are. `TORCH_CPP_LOG_LEVEL` is read when PyTorch is imported, which is too late. Builds of PyTorch that hide
    the level keep their warnings.
    """
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_log_level")
    except ValueError:
        yield
        return
    before = level.value
    level.value = max(before, ERRORS)
    try:
        yield
    finally:
        level.value = before


ALLOCATOR_SILENT = Shared(_silent_allocator)
