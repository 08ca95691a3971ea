"""Where in the source an operator was called: the user's line, and the line of a library that the user called."""

from __future__ import annotations

import ast
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

from effops.pytorch import _current_autograd_node, _engine_run_backward, _get_sequence_nr

TORCH = os.path.join(os.path.dirname(torch.__file__), "")
EFFOPS = os.path.join(Path(__file__).parents[2], "")
DISTRIBUTIONS = os.path.join(TORCH, "distributions", "")  # a library like others, whose lines tell something
# Libraries lie there. What belongs to a user does not, even in a virtual environment inside of a project.
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
ENGINE = _engine_run_backward.__code__


class Spot(NamedTuple):
    """An instruction of a function. It is cheap to note, and `place_of` tells its line."""

    code: CodeType
    instruction: int


class Site(NamedTuple):
    """Where an operator was called: by the user, and by the innermost library that the user called, if there is one."""

    user: Spot | None
    library: Spot | None

    @property
    def place(self) -> Place | None:
        """The user's place, or else that of the library."""
        spot = self.user or self.library
        return None if spot is None else place_of(spot)


class Place(NamedTuple):
    """A file, its line, and the source of the expression that stands there."""

    file: str
    line: int
    last_line: int
    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Sites:
    """Tells the site of each operator while it runs. Backward operators have that of their forward operator."""

    def __init__(self) -> None:
        self.by_number: dict[int, Site] = {}

    def current(self) -> tuple[Site, bool]:
        """The site of the operator that runs, and whether autograd runs it."""
        node = _current_autograd_node()
        user, library, from_engine = _walk(sys._getframe(1))
        if node is None:
            found = Site(user, library)
            # The node of an operator is made before the operator runs; the first operator after it is the node's own.
            self.by_number.setdefault(_get_sequence_nr() - 1, found)
            return found, False
        # What checkpointing computes again, and what functions in Python do in backward, have frames of their own.
        own = library or user
        forward = self.by_number.get(node._sequence_nr(), Site(None, None))
        if from_engine or own is None:
            return forward, True
        return Site(user or forward.user, library), True


def innermost(frame: FrameType | None) -> Site:
    """The innermost spots of a user and of a library, from a frame outwards."""
    user, library, _ = _walk(frame)
    return Site(user, library)


def raised_at(error: BaseException) -> Place | None:
    """The innermost place of a user's code that an error has come through."""
    frames = [(frame.f_code, at) for frame, at in _instructions(error.__traceback__)]
    spot = next((Spot(*one) for one in reversed(frames) if kind_of(one[0].co_filename) == "user"), None)
    return None if spot is None else place_of(spot)


def _instructions(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lasti
        traceback = traceback.tb_next


def _walk(frame: FrameType | None) -> tuple[Spot | None, Spot | None, bool]:
    """The innermost spots of a user and of a library, and whether autograd's engine stands below both."""
    library = None
    while frame is not None:
        code = frame.f_code
        if code is ENGINE:
            return None, library, library is None
        kind = kind_of(code.co_filename)
        if kind == "user":
            return Spot(code, frame.f_lasti), library, False
        if kind == "library" and library is None:
            library = Spot(code, frame.f_lasti)
        frame = frame.f_back
    return None, library, False


@functools.lru_cache(4096)
def kind_of(file: str) -> str:
    """Whose a file is: "user", "library", or "" for what is on the way to each operator."""
    if file.startswith(DISTRIBUTIONS):
        return "library"
    if file.startswith((TORCH, EFFOPS)) or (file.startswith("<") and not file.startswith(("<stdin>", "<ipython"))):
        return ""
    if file.startswith(LIBRARIES):
        return "library" if "site-packages" in file or "dist-packages" in file else ""
    return "user"


def place_of(spot: Spot) -> Place:
    """The line of a spot. Python 3.10 knows no columns: there the source is the whole line."""
    return _place(spot.code.co_filename, spot)  # code is equal to that of another file if it reads the same


@functools.lru_cache(4096)
def _place(file: str, spot: Spot) -> Place:
    code, instruction = spot
    first, last, begin, end = _positions(code, instruction)
    lines = [linecache.getline(code.co_filename, number) for number in range(first, last + 1)]
    source = " ".join(line.strip() for line in lines)
    if begin is not None and end is not None and lines and lines[-1]:
        cut = [line.encode() for line in lines]
        cut[-1] = cut[-1][:end]
        cut[0] = cut[0][begin:]
        source = " ".join(line.decode(errors="replace").strip() for line in cut)
    return Place(code.co_filename, first, last, getattr(code, "co_qualname", code.co_name), source)


def _positions(code: CodeType, instruction: int) -> tuple[int, int, int | None, int | None]:
    if sys.version_info >= (3, 11):
        first, last, begin, end = list(code.co_positions())[instruction // 2]
        if first is not None:
            return first, last or first, begin, end
    number = next((line for start, stop, line in code.co_lines() if start <= instruction < stop and line), 0)
    return number, number, None, None


def statement(place: Place) -> str:
    """The line of a place as it stands in the file."""
    return linecache.getline(place.file, place.line).strip()


def operands(place: Place) -> Iterator[str]:
    """The sources of what a binary operation or a call at a place is made of; nothing where Python cannot tell."""
    try:
        tree = ast.parse(place.source, mode="eval").body
    except SyntaxError:
        return
    if isinstance(tree, ast.BinOp):
        yield from (ast.unparse(tree.left), ast.unparse(tree.right))
    elif isinstance(tree, ast.Call):
        yield from map(ast.unparse, tree.args)
