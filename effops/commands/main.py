"""The `effops` command. Each subcommand imports what it needs when it runs.

It is also read as a file, by `effops_command.py`, without the package. So nothing but functions may import effops.
"""

import argparse
import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    options = argument_parser().parse_args(arguments)
    return int(options.run(options))


def argument_parser() -> argparse.ArgumentParser:
    remark = "`effops COMMAND --help` tells the options of a command."
    parser = Parser(prog="effops", description="Memory-efficient operations for PyTorch.", epilog=remark)
    parser.add_argument("--version", action=Version, nargs=0, help="show the versions of effops and PyTorch, and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    what = "what this machine can run: versions, devices, the variants of every op, each checked against float64"
    line = "what this machine can run, checked against float64"
    doctor_parser = commands.add_parser("doctor", help=line, description=f"Tell {what}. Exit code 1 if a check fails.")
    doctor_parser.add_argument("--full", action="store_true", help="compiled variants too, and times: minutes")
    doctor_parser.add_argument("--op", action="append", default=[], metavar="NAME", help="this op; may be repeated")
    doctor_parser.add_argument("--json", metavar="FILE", help="write the same as JSON there; - for standard output")
    doctor_parser.set_defaults(run=doctor)
    what = "the memory of a training step: where it goes, the largest batch that fits, and what would help"
    line = "the memory of a training step, and the largest batch that fits"
    commands.add_parser("memory", help=line, description=f"Tell {what}, without running it.", fill=memory_commands)
    what = "the lines of a script whose intermediates are large: bytes now and after, and what to write instead"
    line = "the lines of a script that make large tensors, and what to write"
    lint_parser = commands.add_parser("lint", help=line, description=f"Tell {what}. {LINT}", epilog=LINT_CODES)
    lint_arguments(lint_parser)
    lint_parser.set_defaults(run=lint, flags=lint_parser.flags())
    return parser


LINT = """The script runs on fake tensors until its first optimizer step: nothing is computed and no GPU is needed. Its
data is read as ever, and what it prints goes to standard error. Checkpoints are skipped; other writes outside of
throw-away folders are refused. Numbers that it reads, as by loss.item(), are NaN. "cuda" means the device of --device,
while torch.cuda.is_available() tells of this machine."""
LINT_CODES = "Exit codes: 0; 1 if a finding is over --fail-over; 2 for errors, also those of the script."


def lint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--least", default="16MiB", metavar="SIZE", help="of an intermediate that is named (16MiB); 0: any"
    )
    parser.add_argument(
        "--times", type=float, default=8.0, metavar="N", help="as large as what goes in and comes out, at least (8)"
    )
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="optimizer steps after which it stops (1)")
    parser.add_argument("--no-fixes", action="store_true", help="look for no fixes, which takes less time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help='that is predicted, and "cuda" means')
    parser.add_argument("--json", metavar="FILE", help="write the same as JSON there; - for standard output")
    parser.add_argument("--format", choices=("text", "github"), default="text", help="github: annotations of lines")
    parser.add_argument("--fail-over", metavar="SIZE", help="exit code 1 if a finding takes more")
    parser.add_argument("--allow-writes", action="store_true", help="let the script write files and start programs")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file; options of effops stand before it")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    rest.required = False  # argparse says of all that remains, which may be nothing, that it is required


class Version(argparse.Action):
    """Prints versions. A package that is imported tells its own, as in a checkout that is not installed."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> None:
        effops = sys.modules.get("effops")
        own = metadata.version("effops") if effops is None else effops.__version__
        print(f"effops {own} (torch {metadata.version('torch')})")
        parser.exit()


class Formatter(argparse.HelpFormatter):
    """Help in which the name of a command never takes a line of its own."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if action.nargs == argparse.PARSER:  # commands, which are indented once more than argparse thinks
            longest = max(map(len, action.choices or ("",)))
            least = self._current_indent + self._indent_increment + longest
            self._action_max_length = max(self._action_max_length, least)


class Parser(argparse.ArgumentParser):
    """A parser that `fill` gives its arguments when it is first used."""

    def __init__(self, *args: Any, fill: Callable[[argparse.ArgumentParser], None] | None = None, **options: Any):
        super().__init__(*args, **{"formatter_class": Formatter, **options})
        self.fill = fill
        self.given: list[str] = []

    def flags(self) -> set[str]:
        """The options, as --json, without that of the help, which a script has too."""
        actions = (action for action in self._actions if action.default is not argparse.SUPPRESS)
        return {flag for action in actions for flag in action.option_strings}

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            from effops.text import did_you_mean

            inner = next((one for one in (action.choices or ()) if value in self._inner_commands(action, one)), None)
            if inner:
                error.message += f'; write "{self.prog} {inner} {value}"'
                raise
            is_json = value == "json" and "--json" in self.flags()
            error.message += "; for JSON give --json FILE, or --json - for standard output" if is_json else ""
            error.message += did_you_mean(value, map(str, action.choices or ()))
            raise

    def _inner_commands(self, action: argparse.Action, name: str) -> Any:
        """The commands of a command, as those of `memory`; none if the action is no choice of commands."""
        parser = action.choices[name] if isinstance(action.choices, dict) else None
        if not isinstance(parser, Parser):
            return ()
        parser.filled()
        return [one for inner in parser._actions if inner.nargs == argparse.PARSER for one in inner.choices or ()]

    def filled(self) -> None:
        if self.fill is not None:
            self.fill(self)
            self.fill = None

    def parse_known_args(self, args: Any = None, *others: Any, **options: Any) -> Any:
        self.filled()
        self.given = list(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(args, *others, **options)
        if unknown:  # told by the command that was given them, with its own usage
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: COMMAND"):  # who names none learns which there are
            self.print_help(sys.stderr)
            self.exit(2, f"{self.prog}: error: {message}\n")
        super().error(message + self._remedy(message))

    def _remedy(self, message: str) -> str:
        """What to write in place of an amount that argparse takes apart, or for an option; empty if there is none."""
        given = [*self.given, "", ""]
        flag = re.fullmatch(r"argument (--[\w-]+): expected one argument", message)
        value = given[given.index(flag[1]) + 1] if flag and flag[1] in given else ""
        if flag and re.match(r"-\.?\d", value):  # before Python 3.14, where argparse takes it for an option
            return f", not below 0; got {value!r}; write it without the sign"
        for number, unit in itertools.pairwise(given):
            is_apart = re.fullmatch(r"[\d.e]*\d", number) and re.fullmatch(r"([kmgt]i?)?b?", unit.lower()) and unit
            if is_apart and message.endswith(f"arguments: {unit}"):
                return f'; write "{number}{unit}" as one word'
        options = [one.partition("=")[0] for one in self.given if one.startswith("--")]
        # argparse takes what one option alone begins with for that option
        unknown = [one for one in options if not any(flag.startswith(one) for flag in self.flags())]
        if unknown and ("unrecognized" in message or "required" in message):
            return self._nearest_flag(unknown[0])
        return ""

    def _nearest_flag(self, given: str) -> str:
        from effops.text import did_you_mean

        word, *known = (flag.strip("-").replace("-", "_") for flag in (given, *self.flags()))
        near = did_you_mean(word, known).replace("_", "-").replace('"', '"--', 1)
        return f"; for {given}{near.removeprefix(';')}" if near else ""


def _tell_of_import() -> None:
    """Say on standard error that PyTorch is being imported, which takes seconds, and a minute on a busy machine."""
    if "torch" not in sys.modules:
        print("importing PyTorch", file=sys.stderr, flush=True)


def memory_commands(parser: argparse.ArgumentParser) -> None:
    _tell_of_import()
    from effops.commands.memory import add_commands

    add_commands(parser)


def doctor(options: argparse.Namespace) -> int:
    """Print what this machine can run; returns 1 if a self-check fails, 2 if the JSON file cannot be written."""
    _tell_of_import()
    from effops.commands.console import check_json_file, shown_progress, shown_result
    from effops.commands.doctor import diagnose, print_report

    try:
        check_json_file(options.json)
        with shown_progress(lines=True) as progress:
            report = diagnose(progress, options.op, options.full)
    except (OSError, ValueError) as error:  # the file cannot be written, or there is no such op
        print(f"effops doctor: {error}", file=sys.stderr)
        return 2
    code = int(not report.passes)
    try:
        content = {**dataclasses.asdict(report), "passes": report.passes}
        shown_result(options.json, content, lambda console: print_report(report, console))
    except OSError as error:
        print(f"effops doctor: {error}", file=sys.stderr)
        code = 2
    for failure in report.failures():
        print(f"failed: {failure}", file=sys.stderr)
    return code


def lint(options: argparse.Namespace) -> int:
    from effops.commands.lint import lint

    return lint(options)
