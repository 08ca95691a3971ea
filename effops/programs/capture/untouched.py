"""Puts back what a run on fake tensors has touched: gradients, optimizers, modules, random states."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from effops.prediction.recorder import Recorder
from effops.prediction.shared import Shared
from effops.programs.capture.ended import EndingMode
from effops.programs.capture.tracked import tracked
from effops.pytorch.calls import FakeTensor, _get_dispatch_mode, _TorchDispatchModeKey
from effops.pytorch.capture import _unsafe_set_version_counter, is_functorch_wrapped_tensor, version_of
from effops.pytorch.prediction import DeviceContext, FakeTensorMode, _get_current_function_mode_stack


@contextmanager
def _noting_zeroed() -> Iterator[None]:
    def noting(zero_grad: Any) -> Any:
        @functools.wraps(zero_grad)
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            mode = _get_dispatch_mode(_TorchDispatchModeKey.FAKE)
            if isinstance(mode, EndingMode):
                mode.zeroed.append(self)
            return zero_grad(self, *args, **kwargs)

        return noted

    with (
        mock.patch.object(Optimizer, "zero_grad", noting(Optimizer.zero_grad)),
        mock.patch.object(nn.Module, "zero_grad", noting(nn.Module.zero_grad)),
    ):
        yield


# Notes who drops gradients in a thread that runs on fake tensors. In other threads nothing is noted.
ZEROED = Shared(_noting_zeroed)


def _parameters(holder: Any) -> Iterator[Tensor]:
    if isinstance(holder, nn.Module):
        yield from holder.parameters()
    else:
        yield from (one for group in holder.param_groups for one in group["params"])


def _is_leaf(tensor: Tensor) -> bool:
    """Whether it is one. PyTorch raises for a view made under no_grad whose base was changed, which is none."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


class VersionedRecorder(Recorder):
    """Notes the version of each real tensor that an operator changes, though its values stay as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.versions: dict[int, int] = {}

    def check_real(self, tensor: Tensor) -> None:
        if not tensor.is_inference():  # which has none
            self.versions.setdefault(id(tensor), version_of(tensor))


@contextmanager
def untouched(mode: EndingMode, recorder: VersionedRecorder, alone: bool) -> Iterator[None]:
    """Put gradients, data, versions, modules, optimizers, schedulers, scalers and random states back as they were.

    What all threads share, such as random states, is put back where no other thread has worked meanwhile, or `alone`
    says that none did.
    """
    interesting = _Interesting()
    objects = [one for one in tracked() if interesting[type(one)] and not _is_wrapped(one)]
    leaves = [(one, one.grad, _alias(one)) for one in objects if isinstance(one, Tensor) and _is_leaf(one)]
    holders = [(one, _kept(one)) for one in objects if not isinstance(one, Tensor)]
    del objects
    states = random.getstate(), numpy.random.get_state(), _torch_states()
    default_device, default_dtype = _default_device(), torch.get_default_dtype()
    stepped: list[Any] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: stepped.append(optimizer) if _runs(mode) else None)
    work_before = _work_of_others()
    try:
        yield
    finally:
        hook.remove()
        _set_default_device(default_device)
        alone = alone or _work_of_others() == work_before
        seen = {id(real) for real, _ in recorder.fakes.values()}
        dropped = {id(one) for holder in mode.zeroed for one in _parameters(holder)}
        for real, gradient, alias in leaves:  # tensors that were there before
            if alias is not None and real.device != alias.device and real.device.type == "meta":
                real.data = alias
            ours = alone or id(real) in seen or id(real) in dropped or _is_of(real.grad, mode)
            if ours and real.grad is not gradient:
                real.grad = gradient
        for real, _ in recorder.fakes.values():  # those that were made meanwhile, too
            if real.is_leaf and _is_of(real.grad, mode):
                real.grad = None
            if id(real) in recorder.versions and version_of(real) != recorder.versions[id(real)]:
                _unsafe_set_version_counter((real,), (recorder.versions[id(real)],))
        for holder, kept in holders:
            touched = alone or _is_touched(holder, stepped, seen, mode)
            _put_back(holder, kept, mode, touched)
        if alone:
            torch.set_default_dtype(default_dtype)
            random.setstate(states[0])
            numpy.random.set_state(states[1])
            _set_torch_states(states[2])
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):  # which keeps casts, here fake ones
            torch.clear_autocast_cache()


def _is_wrapped(value: Any) -> bool:
    """Whether a tensor is one of a transform, as vmap. It is no leaf, and nearly any use raises after that."""
    return isinstance(value, Tensor) and is_functorch_wrapped_tensor(value)


def _alias(tensor: Tensor) -> Tensor | None:
    """Another tensor of the same memory, to give it back by; None for subclasses, which may do anything."""
    return tensor.detach() if type(tensor) in (Tensor, nn.Parameter) else None


# Threads of these modules run nothing of a program, so that they draw nothing and train nothing. They work at any time:
# after a compilation tqdm's monitor does so every 10 s, a timer of TorchInductor's every 30 s, and in a notebook each
# `print` wakes a thread.
BESIDE_PROGRAMS = (
    "torch._inductor.compile_worker.",
    "tqdm._monitor",
    "ipykernel.heartbeat",
    "ipykernel.iostream",
    "IPython.core.history",
)


def _work_of_others() -> dict[Any, str]:
    """The processor's time of each other thread that may run a program: equal as long as none of them works."""
    others = [
        thread.native_id
        for thread in threading.enumerate()
        if thread is not threading.current_thread() and not _module_of(thread).startswith(BESIDE_PROGRAMS)
    ]
    try:
        return {number: _work_of(number) for number in others}
    except OSError:
        return {0: f"{threading.get_ident()} {time.perf_counter_ns()}"}  # equal to none


def _module_of(thread: threading.Thread) -> str:
    """The module of the code that a thread runs."""
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", "") if type(thread) is threading.Thread else type(thread).__module__)


def _work_of(number: int | None) -> str:
    """The processor's time of a thread; that of one which has ended stays as it is, though Python may still list it."""
    tasks = Path("/proc/self/task")
    if (tasks / str(threading.get_native_id())).exists() and not (tasks / str(number)).exists():
        return "ended"
    return (tasks / str(number) / "schedstat").read_text().split()[0]


def _default_device() -> DeviceContext | None:
    """What gives tensors of this thread a device where none is named: it is below all other modes of functions."""
    modes = _get_current_function_mode_stack()
    return modes[0] if modes and isinstance(modes[0], DeviceContext) else None


def _set_default_device(before: DeviceContext | None) -> None:
    if _default_device() is not before:
        torch.set_default_device(None)  # this puts back a context that was entered before
    if before is not None and _default_device() is not before:
        torch.set_default_device(before.device)


def _torch_states() -> tuple[Tensor, list[Tensor]]:
    """The states of the generators of the CPU and of the CUDA devices in use."""
    return torch.random.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _set_torch_states(states: tuple[Tensor, list[Tensor]]) -> None:
    torch.random.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])


STATEFUL = nn.Module, Optimizer, LRScheduler, GradScaler


class _Interesting(dict[type, bool]):
    """Whether objects of a type hold what is put back."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, (Tensor, *STATEFUL)) and not issubclass(kind, FakeTensor)
        return self[kind]


def _runs(mode: FakeTensorMode) -> bool:
    """Whether this thread runs on the mode's tensors now."""
    return _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is mode


def _is_of(value: Any, mode: FakeTensorMode) -> bool:
    return isinstance(value, FakeTensor) and value.fake_mode is mode


def _is_touched(holder: Any, stepped: list[Any], seen: set[int], mode: FakeTensorMode) -> bool:
    """Whether this thread has used an optimizer, scheduler or scaler."""
    values = list(holder.__dict__.values())
    if any(_is_of(value, mode) or (isinstance(value, Tensor) and id(value) in seen) for value in values):
        return True
    return any(one is optimizer for one in (holder, *values) for optimizer in stepped)


def _kept(holder: Any) -> dict[str, Any]:
    """What is put back of a module, optimizer, scheduler or scaler."""
    if isinstance(holder, nn.Module):
        registered: dict[str, Any] = {
            name: dict(holder.__dict__[name]) for name in ("_parameters", "_buffers") if name in holder.__dict__
        }
        return {**holder.__dict__, **registered}
    return {name: _Kept.of(value) for name, value in holder.__dict__.items()}


class _Kept(NamedTuple):
    """A value, and what it holds if it is a list or dictionary: others refer to it, so that it stays the same one."""

    value: Any
    held: Any

    @classmethod
    def of(cls, value: Any, depth: int = 3) -> _Kept:
        held: Any = None
        if depth and isinstance(value, dict):
            held = {key: cls.of(one, depth - 1) for key, one in value.items()}
        elif depth and isinstance(value, list):
            held = [cls.of(one, depth - 1) for one in value]
        return cls(value, held)

    def restored(self) -> Any:
        if isinstance(self.held, dict):
            held = {key: one.restored() for key, one in self.held.items()}
            dict.clear(self.value)
            dict.update(self.value, held)
        elif isinstance(self.held, list):
            self.value[:] = [one.restored() for one in self.held]
        return self.value


def _put_back(holder: Any, kept: dict[str, Any], mode: FakeTensorMode, is_touched: bool) -> None:
    if isinstance(holder, nn.Module):
        for name in ("_parameters", "_buffers"):
            _replace_fakes(holder.__dict__.get(name, {}), kept.get(name, {}), mode)
        _replace_fakes(holder.__dict__, kept, mode)
        return
    if not is_touched:
        return
    for name, value in kept.items():
        holder.__dict__[name] = value.restored()
    for name in holder.__dict__.keys() - kept.keys():
        del holder.__dict__[name]


def _replace_fakes(current: dict[str, Any], kept: dict[str, Any], mode: FakeTensorMode) -> None:
    """Put back what was there before in place of a mode's tensors, and remove those that took no place."""
    for name in [name for name, value in current.items() if _is_of(value, mode)]:
        if name in kept:
            current[name] = kept[name]
        else:
            del current[name]
