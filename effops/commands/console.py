"""What commands show and write: a console that is plain where it is no terminal, progress, and files."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as ProgressBar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

Progress = Callable[[str], None]
PLAIN_WIDTH = 240
OR_STANDARD_OUTPUT = "name another, or - for standard output"


def plain_or_rich_console(least_width: int = 0) -> Console:
    """A console for standard output, plain and wide if that is no terminal; text is printed as it is."""
    console = Console(highlight=False, markup=False, emoji=False)
    width = max(console.width, least_width) if console.is_terminal else PLAIN_WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width, no_color=not console.is_terminal)


@contextmanager
def shown_progress(first: str = "starting", *, lines: bool = False) -> Iterator[Progress]:
    """Show what is being done, on standard error; yields the function that is told so.

    A terminal has one line that changes, with the time. Elsewhere nothing is shown, or with `lines` a line each.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield (lambda text: print(text, file=sys.stderr, flush=True)) if lines else (lambda text: None)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=None)
        yield lambda text: bar.update(task, description=text)


def why_not_written(file: str) -> str:
    """Why a file cannot be written, or nothing if it can. A "-" that means standard output is none to ask about."""
    path = Path(file)
    if not file:
        return "it has no name"
    if file == "-":
        return "it names standard output, which the text takes"
    if not path.parent.is_dir():
        return f"there is no folder {str(path.parent)!r}"
    if path.is_dir():
        return "it is a folder"
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "its permissions forbid it"


def check_file(option: str, file: str | None, remedy: str = "name another") -> None:
    """Raise if a file that an option names, if it does, cannot be written: before what it is to hold is computed.

    Raises:
        OSError: there is no such folder, or it or the file must not be written
    """
    problem = "" if file is None else why_not_written(file)
    if problem:
        raise OSError(f"argument {option}: expected a file that can be written; got {file!r}: {problem}; {remedy}")


def check_json_file(file: str | None) -> None:
    """Raise an OSError if the JSON that `shown_result` is to write cannot be written."""
    check_file("--json", None if file == "-" else file, OR_STANDARD_OUTPUT)


def shown_result(json_file: str | None, content: Any, show: Callable[[Console], None]) -> None:
    """Show a result on standard output and write its content as JSON to a file, if one is named; "-" gives that alone.

    Raises:
        OSError: the file cannot be written
    """
    json_text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    if json_file == "-":
        sys.stdout.write(json_text)
        return
    show(plain_or_rich_console())
    if json_file is not None:
        try:
            Path(json_file).write_text(json_text)
        except OSError as error:
            raise OSError(
                f"argument --json: expected a file that can be written; got {json_file!r}: {error}; "
                + OR_STANDARD_OUTPUT
            ) from error
