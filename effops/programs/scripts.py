"""Runs somebody's script on fake tensors, up to an optimizer step: nothing is computed, and no checkpoint is written.

It knows nothing of what is asked about the script: `ScriptRun` gives back what was observed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from effops.prediction.recorder import Recorder
from effops.prediction.shared import Shared
from effops.programs.capture.assumed_values import AssumedValues
from effops.programs.capture.faked import faked
from effops.programs.capture.observed import Observed
from effops.programs.capture.places import EFFOPS, Place, raised_at
from effops.programs.capture.writes import watched
from effops.programs.unreached import Stopped, stopped_at
from effops.pytorch.calls import FakeTensor
from effops.pytorch.capture import _BaseDataLoaderIter, _SingleProcessDataLoaderIter
from effops.pytorch.prediction import _disable_current_modes, _get_current_dispatch_mode_stack
from effops.text import told_syntax_error

DEEPEST = 8  # levels of a batch in which tensors are looked for
ONE_SCRIPT = threading.Lock()  # `__main__` and the arguments are those of the process


@dataclass(frozen=True)
class ScriptRun:
    """What was observed of a script.

    Attributes:
        observed: its operators and storages
        values: what was assumed of values
        steps: the optimizer steps that it made; fewer than were asked for if it ended before
        skipped: checkpoints that were not written, with their places
        written: files that it wrote, or programs that it started, with their places
        stopped: where it was stopped; None if it ended by itself
    """

    observed: Observed
    values: AssumedValues
    steps: int
    skipped: Sequence[tuple[str, Place | None]]
    written: Sequence[tuple[str, Place | None]]
    stopped: Stopped | None

    @property
    def assumed(self) -> Mapping[tuple[str, Place | None], int]:
        """What was taken to hold, and where, with how often."""
        return self.values.assumed

    def notes(self) -> list[str]:
        """What was skipped and written, a line each."""
        lines = [f"skipped: {what}{_at(place)}" for what, place in self.skipped]
        lines += [f"written: {path}{_at(place)}" for path, place in self.written]
        return list(dict.fromkeys(lines))


class ScriptEndedError(RuntimeError):
    """A script ended itself with an exit code before it could be followed to its end."""


class _EnoughSteps(BaseException):
    """Ends a script. A script that catches every Exception does not catch it."""


def run_script(
    path: str,
    arguments: Sequence[str] = (),
    *,
    name: str = "run_script",
    steps: int = 1,
    device: str = "cpu",
    allow_writes: bool = False,
    probe: bool = False,
    observed: Observed | None = None,
) -> ScriptRun:
    """Run a script as `python path arguments...` would, on fake tensors, until it has made so many optimizer steps.

    Data is read and loaded as ever, in this process, and becomes fake where a `DataLoader` gives it. Checkpoints are
    skipped. Compiled functions run uncompiled. `torch.cuda.is_available()` tells of this machine; "cuda" means the
    device that is predicted.

    Args:
        path: the script
        arguments: those after its name in `sys.argv`
        name: begins the errors
        steps: stop after so many steps of optimizers, each of any optimizer
        device: that is predicted, "cpu" or "cuda"
        allow_writes: let it write files outside of throw-away folders, and start programs
        probe: run single operators to learn what they allocate inside
        observed: is filled; a new one if it is None

    Raises:
        ValueError: `steps` is below 1, the device is unknown, or the script is a notebook
        OSError: the script cannot be read
        CannotFollow: a line depends on values; names it, and the remedy
        RefusedWriteError: it writes a file; names the line
        SyntaxError: it is no Python, or a module that it imports; names the line
        ScriptEndedError: it ended itself with an exit code
        Exception: those of the script are its own
    """
    if steps < 1:
        raise ValueError(f"{name}: `--steps` must be at least 1; got {steps}; leave it out for the first step")
    if device not in ("cpu", "cuda"):
        raise ValueError(f'{name}: `device` must be "cpu" or "cuda"; got {device!r}; name one of these')
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        raise FileNotFoundError(
            f"{name}: a script must be a file that can be read; got {path!r}; name the .py file, with options before it"
        )
    _check_python(path, name)
    observed = Observed() if observed is None else observed
    counter = _StepCounter(steps)
    with (
        ONE_SCRIPT,
        watched(name, allow_writes) as writes,
        faked(name, observed, probe=probe, device=device, program="script", alone=True) as values,
        LOADED_DATA,
        UNCOMPILED,
        FINITE_NUMBERS,
        counter.counting(),
    ):
        stopped = _run(path, arguments, name, values, steps)
    return ScriptRun(observed, values, counter.count, writes.skipped, writes.written, stopped)


def _check_python(path: str, name: str) -> None:
    """Raise if a file is a notebook or other JSON, which Python would run as an expression that does nothing."""
    with open(path, "rb") as file:
        text = file.read()
    is_notebook, content = path.endswith(".ipynb"), None
    if text.lstrip()[:1] in (b"{", b"["):
        with contextlib.suppress(ValueError):
            content = json.loads(text)
    if is_notebook or (isinstance(content, dict) and "cells" in content):
        raise ValueError(
            f"{name}: a script must be Python; got the notebook {path!r}; save it as one, by "
            f"`jupyter nbconvert --to script {path}`"
        )
    if isinstance(content, (dict, list)):
        raise ValueError(f"{name}: a script must be Python; got {path!r}, which is JSON; name the .py file")


def _run(path: str, arguments: Sequence[str], name: str, values: AssumedValues, steps: int) -> Stopped | None:
    """Run a script; returns where it was stopped after so many steps, or None if it ended before."""
    try:
        with _as_main(path, arguments):
            runpy.run_path(path, run_name="__main__")
    except _EnoughSteps as error:
        return stopped_at(error, steps)
    except SystemExit as error:
        if error.code not in (None, 0):
            read = "; it has read numbers, which are taken to be NaN" if values.assumed else ""
            place = raised_at(error)
            raise ScriptEndedError(
                f"{name}: a script must run until its first optimizer step; got exit code {error.code!r}{_at(place)}"
                f"{read}; give it the arguments that it needs, after its name, or leave that exit out"
            ) from error
    except SyntaxError as error:
        if own_traceback(error) is not None and not os.path.isfile(error.filename or ""):
            raise  # of code that the script has made itself
        told = told_syntax_error(error) if error.filename else f"{path!r}: {error}"
        place = raised_at(error)
        imported = f" (imported at {place})" if place is not None else ""
        raise SyntaxError(
            f"{name}: a script and what it imports must be Python; got {told}{imported}; mend it"
        ) from error
    except (TypeError, ValueError) as error:
        if own_traceback(error) is None:  # nothing of it has run: Python 3.10 says so of null bytes
            raise ValueError(f"{name}: a script must be Python; got {path!r}: {error}; name the .py file") from error
        raise
    return None


@contextmanager
def _as_main(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """The arguments and the first folder of modules are those of a script."""
    folder = os.path.dirname(os.path.abspath(path))
    argv, folders, before = sys.argv, list(sys.path), set(sys.modules)
    sys.argv, sys.path[:] = [path, *arguments], [folder, *folders]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, folders
        for module in set(sys.modules) - before:  # the script's own modules may hold fake tensors
            if (getattr(sys.modules[module], "__file__", None) or "").startswith(os.path.join(folder, "")):
                del sys.modules[module]


class _StepCounter:
    """Counts the steps of optimizers in this thread, and ends the script after the last one."""

    def __init__(self, steps: int) -> None:
        self.steps, self.count, self.thread = steps, 0, threading.get_ident()

    @contextmanager
    def counting(self) -> Iterator[None]:
        hook = register_optimizer_step_post_hook(self._count)
        try:
            yield
        finally:
            hook.remove()

    def _count(self, *ignored: object) -> None:
        if threading.get_ident() != self.thread:
            return
        self.count = min(self.count + 1, self.steps)
        if self.count == self.steps:
            raise _EnoughSteps


def _at(place: Place | None) -> str:
    return "" if place is None else f", at {place}"


def _recorder() -> Recorder | None:
    """What follows a script in this thread; None if nothing does."""
    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)), None)


@contextmanager
def _loaded_data() -> Iterator[None]:
    """Let loaders read real data where a script is followed, in this process, and give fake tensors."""
    begin, proceed = DataLoader.__iter__, _BaseDataLoaderIter.__next__

    def begin_here(loader: Any) -> Any:
        if _recorder() is None:
            return begin(loader)
        with _disable_current_modes():
            if not loader.num_workers and not loader.pin_memory:
                return begin(loader)
            # Workers would read batches ahead of which none is used, and cannot send fake tensors.
            alone = object.__new__(type(loader))
            alone.__dict__.update(loader.__dict__, num_workers=0, timeout=0, pin_memory=False, persistent_workers=False)
            return _SingleProcessDataLoaderIter(alone)

    def proceed_to_fake(iterator: Any) -> Any:
        recorder = _recorder()
        if recorder is None:
            return proceed(iterator)
        with _disable_current_modes():
            batch = proceed(iterator)
            return _faked_data(batch, recorder, DEEPEST)

    with (
        mock.patch.object(DataLoader, "__iter__", begin_here),
        mock.patch.object(_BaseDataLoaderIter, "__next__", proceed_to_fake),
    ):
        yield


LOADED_DATA = Shared(_loaded_data)


def _faked_data(data: Any, recorder: Recorder, depth: int) -> Any:
    """A batch with fake tensors in place of real ones. Their bytes count as the script's."""
    if isinstance(data, Tensor):
        if data.layout is not torch.strided:
            return data
        fake = data if isinstance(data, FakeTensor) else recorder.mode.from_tensor(data)
        recorder.operator = "DataLoader"
        recorder.count(fake)
        return fake
    if depth == 0 or isinstance(data, (str, bytes, int, float, type, nn.Module)):
        return data
    if isinstance(data, tuple):
        parts = [_faked_data(one, recorder, depth - 1) for one in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    if isinstance(data, list):
        data[:] = [_faked_data(one, recorder, depth - 1) for one in data]
    elif isinstance(data, MutableMapping):
        for key in list(data):
            data[key] = _faked_data(data[key], recorder, depth - 1)
    elif hasattr(data, "__dict__"):  # such as the batches of PyTorch Geometric
        for key, value in list(vars(data).items()):
            changed = _faked_data(value, recorder, depth - 1)
            if changed is not value:
                setattr(data, key, changed)
    return data


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Let `torch.compile` give back what it is given, where a script is followed."""
    compiled = torch.compile

    def compile(model: Any = None, **options: Any) -> Any:
        if _recorder() is None:
            return compiled(model, **options)
        _assume("what is compiled runs uncompiled")
        return (lambda function: function) if model is None else model

    with mock.patch.object(torch, "compile", compile):
        yield


UNCOMPILED = Shared(_uncompiled)


@contextmanager
def _finite_numbers() -> Iterator[None]:
    """Take numbers that are read, which are NaN, to be finite: many scripts end themselves where a loss is not."""

    def answering(ask: Callable[[Any], bool], answer: bool) -> Callable[[Any], bool]:
        def asked(number: Any, /) -> bool:
            if isinstance(number, Tensor) and _recorder() is not None:
                number = number.item()
            if _recorder() is None or not (isinstance(number, float) and float.__ne__(number, number)):
                return ask(number)
            _assume("numbers that are read are taken to be finite")
            return answer

        return asked

    with ExitStack() as stack:
        for name, answer in (("isfinite", True), ("isnan", False), ("isinf", False)):
            stack.enter_context(mock.patch.object(math, name, answering(getattr(math, name), answer)))
        yield


FINITE_NUMBERS = Shared(_finite_numbers)


def _assume(what: str) -> None:
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, AssumedValues):
            mode.assume(what)


def own_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of an error without the frames of effops and of what runs the script."""
    kept = []
    part = error.__traceback__
    while part is not None:
        file = part.tb_frame.f_code.co_filename
        if not file.startswith((EFFOPS, "<frozen runpy>")) and file not in (runpy.__file__, contextlib.__file__):
            kept.append(part)
        part = part.tb_next
    found = None
    for part in reversed(kept):
        found = TracebackType(found, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return found
