"""Watches what a script writes: checkpoints are skipped, and other writes outside throw-away folders raise.

Python cannot take an audit hook back. So there is one, which looks at a variable of the thread and otherwise does
nothing.
"""

from __future__ import annotations

import contextvars
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any
from unittest import mock

from effops.prediction.shared import Shared
from effops.programs.capture.places import Place, innermost

# Functions that save a model, by their modules. A script may import these after it has begun.
SAVING = {
    "torch": ("save",),
    "torch.serialization": ("save",),
    "safetensors.torch": ("save_file", "save_model"),
    "safetensors.numpy": ("save_file",),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained",),
    "transformers.configuration_utils": ("PretrainedConfig.save_pretrained", "PreTrainedConfig.save_pretrained"),
    "transformers.generation.configuration_utils": ("GenerationConfig.save_pretrained",),
    "transformers.tokenization_utils_base": ("PreTrainedTokenizerBase.save_pretrained",),
    "transformers.processing_utils": ("ProcessorMixin.save_pretrained",),
    "transformers.image_processing_base": ("ImageProcessingMixin.save_pretrained",),
    "transformers.feature_extraction_utils": ("FeatureExtractionMixin.save_pretrained",),
    "huggingface_hub.hub_mixin": ("ModelHubMixin.save_pretrained",),
    "peft.peft_model": ("PeftModel.save_pretrained",),
    "diffusers.models.modeling_utils": ("ModelMixin.save_pretrained",),
    "diffusers.pipelines.pipeline_utils": ("DiffusionPipeline.save_pretrained",),
    "accelerate.accelerator": ("Accelerator.save_state", "Accelerator.save_model"),
}
OPENS_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
# The events of Python that change files: which arguments are paths, and which the numbers of their folders.
CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "shutil.rmtree": ((0, 1 if sys.version_info >= (3, 11) else None),),  # Python 3.10 tells no folder
}
STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"}
DEVICES = "/dev/", "/proc/"


class RefusedWriteError(PermissionError):
    """A script would write to a file that it must not change."""


@dataclass(eq=False)
class Writes:
    """What a script wrote and what was skipped, with the places.

    `name` begins the errors. `may_throw_away` tells whether it may write to throw-away folders.
    """

    name: str
    is_allowed: bool = False
    may_throw_away: bool = True
    skipped: list[tuple[str, Place | None]] = field(default_factory=list)
    written: list[tuple[str, Place | None]] = field(default_factory=list)
    has_ended: bool = False
    # Asked for before the watch begins: Python writes a file to find the folder.
    throw_away: str = field(default_factory=lambda: os.path.realpath(tempfile.gettempdir()))

    def skip(self, what: str) -> None:
        self.skipped.append((what, _place()))

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Look at an event of Python before it happens."""
        if event == "open":
            path, mode, flags = arguments
            is_write = any(sign in mode for sign in "wax+") if mode else (flags or 0) & OPENS_TO_WRITE
            if is_write:
                self._change("open a file to write", path, None)
        elif event in CHANGES:
            for index, folder in CHANGES[event]:
                self._change(event, arguments[index], None if folder is None else arguments[folder])
        elif event in STARTS:
            site = innermost(sys._getframe(2))
            if site.library is None:  # what libraries start asks for the machine
                self._note(event, str(arguments[0] or arguments[1]), starts=True)

    def _change(self, what: str, given: Any, folder: Any) -> None:
        path = _full(given, folder)
        if path is None or self._is_throw_away(path) or (what == "os.mkdir" and os.path.isdir(path)):
            return
        self._note(what, path)

    def _note(self, what: str, path: str, *, starts: bool = False) -> None:
        place = _place()
        self.written.append((path, place))
        if self.is_allowed:
            return
        at = "" if place is None else f", at {place}: {place.source}"
        expected = "write outside throw-away folders"
        remedy = (
            f"allow it with --allow-writes, or let it write below {self.throw_away!r}, as by an argument of the script"
        )
        if starts:
            expected = "start programs, which may write,"
            remedy = "allow it and what it writes with --allow-writes, or leave that line out"
        raise RefusedWriteError(
            f"{self.name}: a script must not {expected} while it is followed; got {what} {path!r}{at}; {remedy}"
        )

    def _is_throw_away(self, path: str) -> bool:
        if path.startswith(DEVICES) or f"{os.sep}__pycache__{os.sep}" in path + os.sep:
            return True
        return self.may_throw_away and path.startswith(os.path.join(self.throw_away, ""))


WATCH: contextvars.ContextVar[Writes | None] = contextvars.ContextVar("effops_writes", default=None)
_installed = threading.Lock()
_is_installed = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Called by Python at each event of the process."""
    if event == "open" or event in CHANGES or event in STARTS:
        watch = WATCH.get()
        if watch is not None and not watch.has_ended:
            watch.see(event, arguments)


@contextmanager
def watched(name: str, allow: bool, *, throw_away: bool = True) -> Iterator[Writes]:
    """A context in which what this thread writes is watched, and what threads write that it starts.

    Args:
        name: begins the errors
        allow: whether it may write, and start programs
        throw_away: whether it may write to throw-away folders
    """
    global _is_installed
    with _installed:
        if not _is_installed:
            sys.addaudithook(_hook)
            _is_installed = True
    writes = Writes(name, allow, throw_away)
    token = WATCH.set(writes)
    try:
        with SAVES_SKIPPED, THREADS_WATCHED:
            yield writes
    finally:
        writes.has_ended = True
        WATCH.reset(token)


def _full(given: Any, folder: Any) -> str | None:
    """The whole path of a file; None if Python cannot tell it."""
    try:
        path = os.fsdecode(given)
        if isinstance(folder, int) and folder >= 0 and not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        return os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))
    except (TypeError, OSError):  # an open file's number, or a folder's
        return None


def _place() -> Place | None:
    return innermost(sys._getframe(1)).place


class _AfterImport(MetaPathFinder):
    """Finds modules as Python does, and calls `patch` with those of `SAVING` after they were imported."""

    def __init__(self, patch: Callable[[ModuleType], None]) -> None:
        self.patch = patch
        self.finding = threading.local()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in SAVING or getattr(self.finding, "is_on", False):
            return None
        self.finding.is_on = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.finding.is_on = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self.patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def _saves_skipped() -> Iterator[None]:
    """Let functions that save do nothing but note it, in threads that are watched."""
    with ExitStack() as stack:

        def patch(module: ModuleType) -> None:
            for name in SAVING[module.__name__]:
                holder_name, _, attribute = name.rpartition(".")
                shown = name if holder_name else f"{module.__name__}.{name}"
                holder = getattr(module, holder_name, None) if holder_name else module
                if holder is not None and attribute in vars(holder):
                    stack.enter_context(mock.patch.object(holder, attribute, _skipping(vars(holder)[attribute], shown)))

        for known in SAVING:
            if known in sys.modules:
                patch(sys.modules[known])
        finder = _AfterImport(patch)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


def _skipping(save: Callable[..., Any], name: str) -> Callable[..., Any]:
    def skip(*args: Any, **kwargs: Any) -> Any:
        watch = WATCH.get()
        if watch is None or watch.has_ended:
            return save(*args, **kwargs)
        named = (one for one in (*args[1:], *kwargs.values()) if isinstance(one, (str, os.PathLike)))
        target = next((os.fspath(one) for one in named), "")
        watch.skip(f"{name} {target!r}" if target else name)
        return None

    skip.__name__, skip.__doc__ = name.rpartition(".")[2], save.__doc__
    return skip


SAVES_SKIPPED = Shared(_saves_skipped)


def _start(thread: threading.Thread) -> None:
    """Let a thread that a watched one starts be watched too."""
    if WATCH.get() is not None:
        context, run = contextvars.copy_context(), thread.run
        thread.run = lambda: context.run(run)  # type: ignore[method-assign]
    _start_thread(thread)


_start_thread = threading.Thread.start
THREADS_WATCHED = Shared(lambda: mock.patch.object(threading.Thread, "start", _start))
