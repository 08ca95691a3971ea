"""Where in the source an operator was called: the user's line, and the line of a library that the user called."""

from __future__ import annotations

import dis
import functools
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

import torch

from effops.programs.capture.columns import span_of
from effops.pytorch.capture import _get_sequence_nr
from effops.pytorch.prediction import _current_autograd_node, _engine_run_backward, sequence_number

TORCH = os.path.join(os.path.dirname(torch.__file__), "")
EFFOPS = os.path.join(Path(__file__).parents[2], "")
DISTRIBUTIONS = os.path.join(TORCH, "distributions", "")  # in torch, but a library: its lines help the reader
# Folders of installed code and of Python itself. A user's code is in none, even with its environment in its project.
LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in {
        *site.getsitepackages(),
        site.getusersitepackages(),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        os.path.dirname(os.path.dirname(torch.__file__)),
    }
)
CODE_OF_FIX = "<fix>"  # of code that is tried
ENGINE_CODE = _engine_run_backward.__code__


class Instruction(NamedTuple):
    """An instruction of a function. It is cheap to note, and `place_of` tells its line."""

    code: CodeType
    offset: int


class CallSite(NamedTuple):
    """Where an operator was called: by the user, and by the innermost library that the user called, if there is one."""

    user: Instruction | None
    library: Instruction | None

    @property
    def place(self) -> Place | None:
        """The user's place, or else that of the library."""
        instruction = self.user or self.library
        return None if instruction is None else place_of(instruction)


class Place(NamedTuple):
    """A file, its line, and the source of the expression that stands there."""

    file: str
    line: int
    last_line: int
    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class CallSites:
    """Tells where each operator is called while it runs. A backward operator has the site of its forward operator."""

    def __init__(self) -> None:
        self.by_sequence_number: dict[int, CallSite] = {}

    def current(self) -> tuple[CallSite, bool]:
        """The site of the operator that runs, and whether autograd runs it."""
        node = _current_autograd_node()
        own_site = innermost(sys._getframe(1))
        if node is None:
            # Autograd numbers a node just before its operator runs, so the latest number is this operator's. Later
            # operators without a node see the same number: the first entry stays.
            self.by_sequence_number.setdefault(_get_sequence_nr() - 1, own_site)
            return own_site, False
        forward_site = self.by_sequence_number.get(sequence_number(node), CallSite(None, None))
        if own_site.user is None and own_site.library is None:
            return forward_site, True
        # What checkpointing computes again, and what functions in Python do in backward, have frames of their own.
        return CallSite(own_site.user or forward_site.user, own_site.library), True


def innermost(frame: FrameType | None) -> CallSite:
    """The innermost instructions of a user and of a library, from a frame outwards.

    The walk ends at autograd's engine: the line that calls `backward` does not tell where its operators come from.
    """
    library = None
    while frame is not None and frame.f_code is not ENGINE_CODE:
        kind = kind_of(frame.f_code.co_filename)
        if kind == "user":
            return CallSite(Instruction(frame.f_code, frame.f_lasti), library)
        if kind == "library" and library is None:
            library = Instruction(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return CallSite(None, library)


def raised_at(error: BaseException) -> Place | None:
    """The innermost place of a user's code that an error has come through."""
    found = user_instructions(error)
    return place_of(found[-1]) if found else None


def user_instructions(error: BaseException) -> list[Instruction]:
    """Those of a user's code that an error has come through, from the outermost inwards."""
    return [one for one in _instructions_of(error.__traceback__) if kind_of(one.code.co_filename) == "user"]


def is_raised_by_program(error: BaseException) -> bool:
    """Whether a statement `raise` of a user's or a library's code has raised an error."""
    *_, last = _instructions_of(error.__traceback__)
    is_raise = dis.opname[last.code.co_code[last.offset]] == "RAISE_VARARGS"
    return is_raise and kind_of(last.code.co_filename) != ""


def _instructions_of(traceback: TracebackType | None) -> Iterator[Instruction]:
    """Those that a traceback has come through, from the outermost inwards."""
    while traceback is not None:
        yield Instruction(traceback.tb_frame.f_code, traceback.tb_lasti)
        traceback = traceback.tb_next


@functools.lru_cache(4096)
def kind_of(file: str) -> str:
    """Whose a file is: "user" or "library"; "" for torch, effops and Python itself, which are passed over."""
    if file.startswith(DISTRIBUTIONS):
        return "library"
    is_made = file.startswith("<") and not file.startswith(("<stdin>", "<ipython", CODE_OF_FIX))
    if is_made or file.startswith((TORCH, EFFOPS)):
        return ""
    if file.startswith(LIBRARIES):
        return "library" if "site-packages" in file or "dist-packages" in file else ""
    return "user"


def place_of(instruction: Instruction) -> Place:
    """The line of an instruction, and its expression. If Python does not know that, the source is the whole line."""
    return _place_of(instruction.code.co_filename, instruction)


# The file is a part of the cache's key, since the code of two files is equal if it reads the same.
@functools.lru_cache(4096)
def _place_of(file: str, instruction: Instruction) -> Place:
    code = instruction.code
    first, last, begin_column, end_column = _positions(instruction)
    lines = [linecache.getline(file, number) for number in range(first, last + 1)]
    source = " ".join(line.strip() for line in lines)
    if begin_column is not None and end_column is not None and lines and lines[-1]:
        clipped = [line.encode() for line in lines]  # columns count bytes of UTF-8
        clipped[-1] = clipped[-1][:end_column]  # before the first line, which may be the same
        clipped[0] = clipped[0][begin_column:]
        source = " ".join(line.decode(errors="replace").strip() for line in clipped)
    return Place(file, first, last, getattr(code, "co_qualname", code.co_name), source)


def _positions(instruction: Instruction) -> tuple[int, int, int | None, int | None]:
    """The first and the last line of an expression, its first column, and the column behind it."""
    code, offset = instruction
    if sys.version_info >= (3, 11):
        first, last, begin_column, end_column = list(code.co_positions())[offset // 2]  # of two bytes each
        if first is not None:
            return first, last or first, begin_column, end_column
    elif span := span_of(code, offset, "".join(linecache.getlines(code.co_filename))):
        return span
    line_number = next((line for start, stop, line in code.co_lines() if start <= offset < stop and line), 0)
    return line_number, line_number, None, None


def source_line(place: Place) -> str:
    """The first line of a place as it stands in the file."""
    return linecache.getline(place.file, place.line).strip()
