"""Contexts that change something for the whole process, and may be entered by several threads at once.

PyTorch's profiler is one of them. `profiled` is this profiler without the lines that its libraries write to standard
error. Another one refuses functions that torch.compile compiles: what TorchInductor allocates for them is not
predicted. Under a dispatch mode, as in a prediction, torch.compile runs such a function uncompiled, without a word. It
also remembers never to compile it, until `torch._dynamo.reset()`.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity

from effops.prediction.allocations import Allocations
from effops.pytorch.missing import present
from effops.pytorch.prediction import KEEPS_EVENTS, _get_current_dispatch_mode_stack, library_path

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
                torch.profiler.profile(activities=activities, profile_memory=True, acc_events=KEEPS_EVENTS, **options)
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
        level = ctypes.c_int.in_dll(ctypes.CDLL(present(library_path)), "FLAGS_caffe2_log_level")
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


class CompiledFunctionError(NotImplementedError):
    """A prediction came to a compiled function."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Let torch.compile ask `refuse` where it would compile a frame of a thread that predicts."""
    from effops.pytorch.dynamo import ConvertFrameReturn, callback_from_stance, eval_frame, trace_rules

    def refuse(frame: Any, *state: Any) -> ConvertFrameReturn:
        if trace_rules.check(frame.f_code):  # a frame of PyTorch's own, on the way to the compiled function
            return ConvertFrameReturn()
        code = frame.f_code
        raise CompiledFunctionError(f"`{code.co_name}` in {code.co_filename}, line {code.co_firstlineno}")

    def callback_of_thread(callback: Any) -> Any:
        found = callback_from_stance(callback)
        predicts = any(isinstance(mode, Allocations) for mode in _get_current_dispatch_mode_stack())
        return refuse if predicts and callable(found) else found

    # A frame is refused, not the call: so torch.compile leaves the call as after any error, with its state in order.
    with mock.patch.object(eval_frame, present(callback_from_stance).__name__, callback_of_thread):
        yield


# All compiled functions pass this place, however they came to be compiled. Those of other threads are compiled as ever.
COMPILED_REFUSED = Shared(_refusing)


@contextmanager
def without_logged_failures() -> Iterator[None]:
    """Keep PyTorch from logging an operator that fails on fake tensors: the error that it raises says the same."""
    thread = threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        logger.removeFilter(is_of_another_thread)
