"""PyTorch's profiler, without the lines that its libraries write to standard error."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from effops.prediction.shared import Shared

KINETO_LEVEL = "KINETO_LOG_LEVEL"
ERRORS = 2  # the level of PyTorch's C++ code that is above warnings


@contextmanager
def profiled(cuda: bool = False, **options: Any) -> Iterator[torch.profiler.profile]:
    """`torch.profiler.profile` with memory, of the CPU and with `cuda` of CUDA devices too.

    Its library announces each start and stop. It reads the level of what it says from the environment when a process
    first profiles, and never again. So the variable is set for that moment, unless the user has set it. A process that
    has profiled before goes on as it began.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with ALLOCATOR_SILENT, ExitStack() as stack:
        is_set = KINETO_LEVEL in os.environ
        os.environ.setdefault(KINETO_LEVEL, "99")
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
