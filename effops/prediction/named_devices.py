"""Reads the devices that a program names as the one that is predicted, whose tensors are fake tensors of a CPU.

A program for CUDA moves its model there, and switches CUDA's autocast on. Without CUDA PyTorch raises at the first, and
leaves the second out. Here "cuda" is the predicted device where the recorder says so. Every other name is refused.
"""

import os
import re
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from effops.prediction.cuda_forms import CudaForms
from effops.prediction.recorder import Recorder
from effops.prediction.shared import Shared
from effops.pytorch.missing import present
from effops.pytorch.operators import aten
from effops.pytorch.prediction import (
    DeviceContext,
    _device_constructors,
    _get_current_dispatch_mode_stack,
    _get_current_function_mode_stack,
    amp_definitely_not_available,
    autocast_enabled,
    autocast_mode,
    cast_by_autocast,
)
from effops.text import frames_of, line_of_program

HERE = "cpu", "meta"  # fake tensors of the prediction, and tensors without memory
MODULES = {kind: os.path.join(os.path.dirname(torch.__file__), kind, "") for kind in ("cuda", "mps", "mtia", "xpu")}
# PyTorch says so where a tensor goes to a device that is not there; those errors have no class of their own.
MISSING_BACKEND = re.compile("from the '(CUDA|HIP|XPU|MPS|XLA|HPU)' backend|not linked with support for (\\w+) devices")
NO_INDEX = "Cannot access accelerator device"  # of a device that is named by its index alone
LACKS_CUDA = "not compiled with CUDA", "without ATen_cuda library", NO_INDEX
IN_PYTORCH = "in PyTorch"
MOVED, PINNED = "a tensor is made there, or moved to it", "memory is pinned for it"
Function = tuple[Any, Sequence[Any], Mapping[str, Any]]  # a function and its arguments


class MissingDeviceError(RuntimeError):
    """A tensor is made on a kind of device that this machine lacks, or moved to it. PyTorch's own error is one too."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"a tensor cannot be on a device of the kind {kind}, which this machine lacks")
        self.kind = kind


def is_lacking(kind: str) -> bool:
    """Whether PyTorch's module for a kind of device says that this machine has none."""
    return kind in MODULES and not getattr(torch, kind).is_available()


def missing_device(error: BaseException) -> str | None:
    """The kind of device whose lack has raised an error; None if the error is another one.

    What PyTorch raises depends on how it was built: with CUDA, but on a machine without a driver, it says other things
    than a build without CUDA.
    """
    if isinstance(error, MissingDeviceError):
        return error.kind
    said = str(error)
    lacking = MISSING_BACKEND.search(said)
    if lacking:
        return str(next(filter(None, lacking.groups()))).lower()
    if any(text in said for text in LACKS_CUDA):
        return "cuda"
    own = _own_error(error)
    if isinstance(own, torch.AcceleratorError) and is_lacking("cuda"):
        return "cuda"
    return _module_of(own) if isinstance(own, (AssertionError, AttributeError, RuntimeError)) else None


def _own_error(error: BaseException) -> BaseException:
    """PyTorch's error. A workload names its function before that text."""
    cause = error.__cause__
    return cause if cause is not None and str(cause) in str(error) else error


def _module_of(error: BaseException) -> str | None:
    """The missing kind of device whose module of PyTorch the program called when it got an error."""
    torch_folder = os.path.join(os.path.dirname(torch.__file__), "")
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if not file.startswith(torch_folder):
            return None
        for kind, folder in MODULES.items():
            if file.startswith(folder) and is_lacking(kind):
                return kind
    return None


def device_asked_for(func: Any, options: Mapping[str, Any] | None) -> str | None:
    """The kind of device that a call of an operator names, or pins memory for; None if it names none."""
    if _pins(func, options):
        return "cuda"
    device = options.get("device") if options else None
    return None if device is None else str(device.type)


def _pins(func: Any, options: Mapping[str, Any] | None) -> bool:
    """Whether a call of an operator pins memory, so that copies to a device are quick."""
    return func is aten._pin_memory.default or bool(options and options.get("pin_memory"))


def _on_predicted_device(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Function:
    """A function and its arguments, with the fake tensors' device in place of CUDA, which is predicted."""
    if func is Tensor.cuda:
        kept = {name: value for name, value in options.items() if name == "memory_format"}
        return Tensor.to, (args[0], "cpu"), kept
    if func is Tensor.pin_memory:  # as a tensor that is moved: it counts once, on the device
        return Tensor.to, (args[0], "cpu"), {}
    if func is Tensor.to and len(args) > 1 and _is_cuda(args[1]):
        args = (args[0], "cpu", *args[2:])
    if options.get("pin_memory"):
        options = {**options, "pin_memory": False}
    named = options.get("device")
    is_default = named is None and func in _device_constructors() and _cuda_is_default()
    if is_default or (func is not torch.device and _is_cuda(named)):
        options = {**options, "device": "cpu"}
    return func, args, options


def _cuda_is_default() -> bool:
    """Whether PyTorch puts CUDA where no device is named. It does so behind all modes of functions."""
    modes = _get_current_function_mode_stack()
    return any(isinstance(mode, DeviceContext) and mode.device.type == "cuda" for mode in modes)


def _is_cuda(device: Any) -> bool:
    return type(device) is int or (isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda")


class NamedCuda(TorchFunctionMode):
    """Reads CUDA, where functions name it, as the fake tensors' device, and leaves them the forms of a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, args, options = _on_predicted_device(func, args, kwargs or {})
        return func(*args, **options)


class NamedCudaForms(CudaForms):
    """Gives functions the form that they have on CUDA, also where they name it.

    It is one mode with the forms, so that what checkpointing computes again in the backward pass may name CUDA too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, args, options = _on_predicted_device(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, options)


class OneDeviceRecorder(Recorder):
    """Follows a program, and refuses tensors on a device that is not predicted.

    `reads_cuda` tells whether the program's "cuda" is the predicted device. `reader` and `program` name the function
    that predicts, and what it predicts, in errors.
    """

    reader, program = "anatomy", "workload"

    @property
    def reads_cuda(self) -> bool:
        return self.cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = device_asked_for(func, kwargs)
        if kind is not None:
            self.check_device(kind, PINNED if _pins(func, kwargs) else MOVED)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def check_device(self, kind: str, use: str = MOVED) -> None:
        """Refuse a device that is not predicted, with the line of the program."""
        if kind not in HERE:
            raise self.refusal(kind, line_of_program(traceback.walk_stack(None)) or IN_PYTORCH, use)

    def refusal(self, kind: str, place: str, use: str) -> NotImplementedError:
        predicted = "cuda" if self.cuda else "cpu"
        remedy = 'predict with device="cuda"'
        if kind != "cuda":
            remedy = f'since what "{kind}" allocates is not known, name "cuda", and predict with device="cuda"'
        return NotImplementedError(
            f'{self.reader}: a {self.program} that is predicted with device="{predicted}" must name no other device; '
            f'got "{kind}" {place}, where {use}; {remedy}, or leave it out there'
        )


@contextmanager
def missing_devices_named(recorder: OneDeviceRecorder) -> Iterator[None]:
    """Say where a program uses a device that is not there, instead of PyTorch's own error."""
    try:
        yield
    except (AssertionError, AttributeError, RuntimeError, TypeError) as error:
        kind = missing_device(error)
        if kind is None:
            raise
        place = line_of_program(frames_of(error)) or IN_PYTORCH
        if MISSING_BACKEND.search(str(error)) or NO_INDEX in str(error):
            raise recorder.refusal(kind, place, MOVED) from error
        own = str(_own_error(error)).partition("\n")[0].partition(". ")[0]
        raise NotImplementedError(
            f"{recorder.reader}: a {recorder.program} must use a device by tensors, modules and autocast alone; got "
            f'"{own}" {place}; leave that call out of the {recorder.program}, or make it where '
            f"torch.{kind}.is_available()"
        ) from error


def _recorder() -> OneDeviceRecorder | None:
    """What predicts in this thread; None if it predicts nothing, or has no devices."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in modes if isinstance(mode, OneDeviceRecorder)), None)


def _reads_cuda() -> bool:
    recorder = _recorder()
    return recorder is not None and recorder.reads_cuda


@contextmanager
def _read_by_autocast() -> Iterator[None]:
    """Let autocast of the predicted device be that of its fake tensors."""
    autocast, cast = autocast_mode.autocast, cast_by_autocast
    init, enter = autocast.__init__, autocast.__enter__
    is_enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    made_inside: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        recorder = _recorder()
        if recorder is not None:
            made_inside.add(self)
            if recorder.reads_cuda and device_type == "cuda":
                device_type, dtype = "cpu", dtype_of("cuda") if dtype is None else dtype
            elif enabled:
                recorder.check_device(device_type, "autocast would change nothing")
        init(self, device_type, dtype, enabled, cache_enabled)

    def enter_predicted(self: Any) -> Any:
        is_unsure = self.device == "cuda" and amp_definitely_not_available()  # then it is off, whatever was asked for
        may_be_on = self.device not in HERE and (autocast_enabled(self) or is_unsure)
        recorder = _recorder()
        if may_be_on and self not in made_inside and recorder is not None:
            place = line_of_program(traceback.walk_stack(None)) or IN_PYTORCH
            raise NotImplementedError(
                f"{recorder.reader}: contexts of autocast must be made while a {recorder.program} is predicted; got "
                f'one of "{self.device}" {place}, which was made before, perhaps as a decorator; '
                'write `with torch.autocast("cuda", ...):` inside of the function'
            )
        return enter(self)

    def is_enabled_predicted(device_type: str | None = None) -> bool:
        found = "cpu" if device_type in (None, "cuda") and _reads_cuda() else device_type
        return is_enabled() if found is None else is_enabled(found)

    def dtype_predicted(device_type: str) -> torch.dtype:
        on = device_type == "cuda" and _reads_cuda() and is_enabled("cpu")
        return dtype_of("cpu" if on else device_type)

    def cast_predicted(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, "cpu" if device_type == "cuda" and _reads_cuda() else device_type, dtype)

    with (
        mock.patch.multiple(autocast, __init__=begin, __enter__=enter_predicted),
        mock.patch.multiple(torch, is_autocast_enabled=is_enabled_predicted, get_autocast_dtype=dtype_predicted),
        mock.patch.object(autocast_mode, present(cast_by_autocast).__name__, cast_predicted),
    ):
        yield


NAMED_BY_AUTOCAST = Shared(_read_by_autocast)
