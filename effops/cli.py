"""The `effops` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    options = argument_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="effops", description="Memory-efficient operations for PyTorch.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    what = "what this machine can run: versions, devices, the variants of every op, each checked against float64"
    doctor_parser = commands.add_parser("doctor", help=what, description=f"Tell {what}. Exit code 1 if a check fails.")
    doctor_parser.add_argument("--json", metavar="FILE", help="write the same as JSON there; - for standard output")
    doctor_parser.set_defaults(run=doctor)
    return parser


def doctor(options: argparse.Namespace) -> int:
    """Print what this machine can run; returns 1 if a self-check fails, 2 if the JSON file cannot be written."""
    from effops.console import plain_or_rich_console, shown_progress
    from effops.doctor import diagnose, json_text, print_report

    with shown_progress() as progress:
        report = diagnose(progress)
    if options.json == "-":
        sys.stdout.write(json_text(report))
    else:
        print_report(report, plain_or_rich_console())
    for failure in report.failures():
        print(f"failed: {failure}", file=sys.stderr)
    if options.json not in (None, "-"):
        try:
            Path(options.json).write_text(json_text(report))
        except OSError as error:
            print(
                f"effops doctor: argument --json: expected a file that can be written; got {options.json!r}: {error}; "
                "name another, or - for standard output",
                file=sys.stderr,
            )
            return 2
    return int(not report.passes)
