"""`effops lint`: names the lines of a script whose intermediates are large."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback

from effops.commands.console import check_json_file, shown_result
from effops.programs.large.findings import LintReport
from effops.programs.large_lines import report_of_block
from effops.programs.scripts import ScriptRun, own_traceback, run_script
from effops.text import parse_bytes

FAILED = 2
OVER = 1


def lint(options: argparse.Namespace) -> int:
    """Follow a script and show what was found; returns the exit code."""
    try:
        least = parse_bytes(options.least, "argument --least")
        limit = None if options.fail_over is None else parse_bytes(options.fail_over, "argument --fail-over")
        check_json_file(options.json)
        given = [one for one in options.arguments if one.partition("=")[0] in options.flags]
        if any(one.startswith("--fail-over") for one in given):  # a check that checks nothing
            raise ValueError(
                "argument --fail-over: options of effops must stand before the script; got it behind; move it"
            )
        if given:
            print(f"effops lint: {given[0]} goes to the script; options of effops stand before it", file=sys.stderr)
        if options.json == "-" and options.format == "github":
            raise ValueError('argument --json: "-" cannot stand beside --format github; name a file')
        if not options.times > 1:
            raise ValueError(f"argument --times: expected a number above 1; got {options.times}; give 8, as by default")
        run = _followed(options)
    except Exception as error:
        if str(error).startswith("lint: ") or own_traceback(error) is None:
            print(f"effops lint: {str(error).removeprefix('lint: ')}", file=sys.stderr)
        else:  # the script's own
            traceback.print_exception(type(error), error, own_traceback(error))
        return FAILED
    report = report_of_block(run.observed, run.values, least, options.times, fixes=not options.no_fixes)
    try:
        _show(report, run, options)
    except OSError as error:
        print(f"effops lint: {error}", file=sys.stderr)
        return FAILED
    return OVER if limit is not None and any(one.now_bytes > limit for one in report.findings) else 0


def _followed(options: argparse.Namespace) -> ScriptRun:
    """What was observed of the script. What it prints goes to standard error, since the report has the other."""
    print(
        f"effops lint: {options.script} runs on fake tensors until optimizer step {options.steps}",
        file=sys.stderr,
        flush=True,
    )
    with contextlib.redirect_stdout(sys.stderr):
        return run_script(
            options.script,
            options.arguments,
            name="lint",
            steps=options.steps,
            device=options.device,
            allow_writes=options.allow_writes,
        )


def _show(report: LintReport, run: ScriptRun, options: argparse.Namespace) -> None:
    notes = run.notes()
    if not run.steps:
        notes.append("the script ended without an optimizer step; one that trains may lack arguments, after its name")
    elif run.steps < options.steps:
        notes.append(f"the script ended after {run.steps} of {options.steps} optimizer steps")
    elif run.stopped is not None and (told := run.stopped.told(run.steps)):
        notes.append(told)
    content = {"report": report.to_json(), "notes": notes} if options.json else {}
    text = report.github() if options.format == "github" else "\n".join([str(report), *notes])
    shown_result(options.json, content, lambda console: console.print(text, soft_wrap=True))
