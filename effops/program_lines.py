"""Finds the line of a user's program from which an error or a call came."""

import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType

import torch

Frames = Iterable[tuple[FrameType, int]]  # with the line of each, the innermost frame first

FOLDERS = os.path.dirname(torch.__file__), os.path.dirname(__file__)
PACKAGES = tuple(os.path.join(folder, "") for folder in FOLDERS)  # PyTorch and effops
INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
PYTHON = os.path.join(sysconfig.get_path("stdlib"), ""), "<frozen"


def line_of_program(frames: Frames) -> str:
    """The place of the innermost frame that is neither PyTorch's, effops' nor Python's; empty if there is none.

    If it lies in an installed package, the place where the user's own program called that is named too.
    """
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    places = [place for place in places if not place[0].startswith(PACKAGES) and not _is_of_python(place[0])]
    own = [place for place in places if not _is_installed(place[0])]
    if not places:
        return ""
    text = "in {}, line {}".format(*places[0])
    return text + ", called in {}, line {}".format(*own[0]) if own and own[0] != places[0] else text


def frames_of(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames that an error went through, the innermost first: those of its cause come before its own."""
    if error.__cause__ is not None:
        yield from frames_of(error.__cause__)
    yield from reversed(list(traceback.walk_tb(error.__traceback__)))


def _is_installed(file: str) -> bool:
    return any(folder in file for folder in INSTALLED)


def _is_of_python(file: str) -> bool:
    return file.startswith(PYTHON) and not _is_installed(file)
