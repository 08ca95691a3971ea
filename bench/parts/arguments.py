"""What is given on the command line, as values; what is no such value says what was expected."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

from effops.commands.console import why_not_written


def positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"expected a positive integer; got {text!r}")
    return number


def file_to_write(text: str) -> Path:
    """A file, in a folder that is made if there is none. What forbids it is seen before the work and not after it."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        problem = why_not_written(text)
    except OSError as error:
        problem = f"the folder cannot be made: {error.strerror}"
    if problem:
        raise argparse.ArgumentTypeError(f"expected a file that can be written; got {text!r}: {problem}; name another")
    return path


def comma_separated(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def sizes(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in comma_separated(text)]
    if not all(key and number.isdecimal() and int(number) for key, _, number in pairs):
        raise argparse.ArgumentTypeError(f"expected KEY=N,KEY=N with positive integers; got {text!r}")
    return {key: int(number) for key, _, number in pairs}


def sweep(text: str) -> tuple[str, list[int]]:
    key, _, numbers = text.partition("=")
    if not key or not all(number.isdecimal() and int(number) for number in numbers.split(",")):
        raise argparse.ArgumentTypeError(f"expected KEY=N,N,N with positive integers; got {text!r}")
    return key, [int(number) for number in numbers.split(",")]


def keywords(text: str) -> dict[str, Any]:
    pairs = [part.partition("=") for part in comma_separated(text)]
    try:
        return {key: ast.literal_eval(value) for key, _, value in pairs}
    except (SyntaxError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE,NAME=VALUE of Python; got {text!r}") from error
