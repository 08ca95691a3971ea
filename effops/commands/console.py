"""What commands show: a console that is plain where it is no terminal, and progress."""

import json
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


def plain_or_rich_console(least_width: int = 0) -> Console:
    """A console for standard output, plain and wide if that is no terminal; text is printed as it is."""
    console = Console(highlight=False, markup=False, emoji=False)
    width = max(console.width, least_width) if console.is_terminal else PLAIN_WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width, no_color=not console.is_terminal)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Show what is being done, on standard error if that is a terminal; yields the function that is told so."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text: bar.update(task, description=text)


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
                f"argument --json: expected a file that can be written; got {json_file!r}: {error}; name another, or - "
                "for standard output"
            ) from error
