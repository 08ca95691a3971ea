"""The subcommands of `effops memory`."""

import argparse
import ast
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from effops.commands.console import Progress, check_file, check_json_file, shown_progress, shown_result
from effops.commands.workloads import BERT_OPTIONS, CONFIGURATION_TYPES, DTYPES, option, workload_of
from effops.memory.advise import advise
from effops.memory.anatomy import Anatomy, anatomy
from effops.memory.batches import MEANINGS, MODES, max_batch_size
from effops.memory.devices import NVMLUnavailableError, device_usage
from effops.memory.formula import FORMULAS, OPTIMIZERS, Details, estimate_transformer
from effops.memory.models import ARCHITECTURES, BERT_KINDS, KINDS
from effops.memory.models.layers import PUBLISHED
from effops.memory.plot import check_picture, plot_anatomy
from effops.memory.sweep import sweep
from effops.memory.workload import Workload
from effops.prediction.cuda_forms import CONTEXT_BYTES
from effops.text import did_you_mean, frames_of, line_of_program, parse_bytes, text_of

EXPECTED_ERRORS = ValueError, NotImplementedError, ImportError, OSError, NVMLUnavailableError
# The functions of the subcommands whose names are others; their errors begin with these names.
FUNCTIONS = {"max-batch": "max_batch_size", "estimate": "estimate_transformer", "devices": "device_usage"}


class Outcome(NamedTuple):
    """What a subcommand has found.

    Attributes:
        found: is printed
        content: is written as JSON
        draw: draws it into a file, where the subcommand can
    """

    found: object
    content: Any
    draw: Callable[[str], None] | None = None


Run = Callable[[argparse.Namespace, Progress], Outcome]


def _run(run: Run, options: argparse.Namespace) -> int:
    """Show what a subcommand finds, and write it; returns 2 if it cannot."""
    picture = getattr(options, "plot", None)
    try:
        check_json_file(options.json)
        if picture is not None:
            check_picture("argument --plot", picture)
            check_file("--plot", picture)
        module = (getattr(options, "workload", None) or "").partition(":")[0]
        doing = f"importing {module}" if module else "predicting"
        with shown_progress(f"{options.command}: {doing}", lines=True) as progress:
            found, content, draw = run(options, progress)
    except EXPECTED_ERRORS as error:
        return _failed(options.command, error)
    except Exception as error:
        if not text_of(error).startswith("Workload: ") and not line_of_program(frames_of(error)):
            raise  # no program of the user's has raised it
        return _failed(options.command, error)
    code = 0
    try:
        shown_result(options.json, content, lambda console: console.print(str(found), soft_wrap=True))
    except OSError as error:
        code = _failed(options.command, error)
    try:
        if draw is not None and picture is not None:
            draw(picture)
    except OSError as error:
        code = _failed(
            options.command,
            OSError(f"argument --plot: expected a file that can be written; got {picture!r}: {error}; name another"),
        )
    return code


def _failed(command: str, error: Exception) -> int:
    """Tell an error; returns the exit code. The function of the subcommand is not named beside it."""
    text = text_of(error).removeprefix(f"{FUNCTIONS.get(command, command)}: ")
    place = "" if isinstance(error, NVMLUnavailableError) else line_of_program(frames_of(error))
    if place and place not in text:
        is_told = text.startswith("argument ")
        text = f"{text}; raised {place}" if is_told else f"Workload: it raised {type(error).__name__} {place}: {text}"
    print(f"effops memory {command}: {text}", file=sys.stderr)
    return 2


def _estimate(options: argparse.Namespace, progress: Progress) -> Outcome:
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Details)}
    details = {name: value for name, value in given.items() if value is not None}
    found = estimate_transformer(
        options.blocks,
        options.heads,
        options.head_dim,
        options.batch_size,
        options.seq_len,
        DTYPES[options.dtype],
        options.formula,
        Details(**details) if details else None,
    )
    totals = {name: getattr(found, name) for name in ("state_bytes", "activation_bytes", "total_bytes")}
    return Outcome(found, {**dataclasses.asdict(found), **totals})


def _anatomy(options: argparse.Namespace, progress: Progress) -> Outcome:
    workload = workload_of(options)
    progress(f"predicting a step of batch size {options.batch_size:,}" + " and running it" * options.measure)
    found = anatomy(
        workload,
        options.batch_size,
        device=options.device,
        probe=options.probe,
        measure=options.measure,
        context_bytes=parse_bytes(options.context, "argument --context"),
    )
    return Outcome(found, _anatomy_content(found), functools.partial(plot_anatomy, found))


def _anatomy_content(found: Anatomy) -> dict[str, Any]:
    names = ("batch_size", "peak_bytes", "device_bytes", "categories", "instants", "unknown", "differences")
    return {
        **{name: getattr(found, name) for name in names},
        "overheads": dict(found.overheads),
        "operations": {
            phase: {kind: count for (counted, kind), count in found.operations.items() if counted == phase}
            for phase, _ in found.operations
        },
        "measured": None if found.measured is None else _anatomy_content(found.measured),
    }


def _max_batch(options: argparse.Namespace, progress: Progress) -> Outcome:
    found = max_batch_size(
        workload_of(options),
        options.budget,
        budget_means=options.budget_means,
        device=options.device,
        probe=options.probe,
        mode=options.mode,
        multiple_of=options.multiple_of,
        power_of_two=options.power_of_two,
        context_bytes=parse_bytes(options.context, "argument --context"),
        progress=progress,
    )
    return Outcome(found, dataclasses.asdict(found))


def _advise(options: argparse.Namespace, progress: Progress) -> Outcome:
    found = advise(
        workload_of(options),
        options.batch_size,
        options.budget,
        devices=options.devices,
        device=options.device,
        probe=options.probe,
        alternatives=_alternatives(options),
        progress=progress,
    )
    return Outcome(found, {**dataclasses.asdict(found), "fits": found.fits})


def _alternatives(options: argparse.Namespace) -> dict[str, Workload]:
    """The same architecture with the attentions that hold less."""
    if options.architecture is None:
        return {}
    others = {"fused": "attention fused", "log_sparse": "attention log_sparse, which is another model"}
    if options.architecture == "bert-large":
        others = {"sdpa": "attention sdpa"}
    return {
        name: workload_of(options, {"attention": kind}) for kind, name in others.items() if kind != options.attention
    }


def _sweep(options: argparse.Namespace, progress: Progress) -> Outcome:
    axes = dict(_axis(text) for text in options.axis)
    if options.architecture is not None:
        known = ["architecture", *(BERT_OPTIONS if options.architecture == "bert-large" else CONFIGURATION_TYPES)]
        if unknown := [name for name in axes if name not in known]:
            raise ValueError(
                f"argument --axis: expected an option of the architecture, {', '.join(known)}; got {', '.join(unknown)}"
                + did_you_mean(unknown[0], known)
            )
        for name, values in axes.items():
            _check_values(name, values)
    base = {name: given for name in axes if (given := getattr(options, name, None)) is not None}
    found = sweep(
        lambda **values: workload_of(options, values),
        axes,
        options.budget,
        options.batch_size,
        base=base,
        power_of_two=options.power_of_two,
        device=options.device,
        probe=options.probe,
        progress=progress,
    )
    results = {
        axis: [{"value": value, "result": result} for value, result in results.items()]
        for axis, results in found.axes.items()
    }
    return Outcome(found, {**dataclasses.asdict(found), "quantity": found.quantity, "axes": results}, found.plot)


def _axis(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    if not name or not values:
        raise ValueError(f"argument --axis: expected NAME=VALUE,VALUE, as layers=2,4,8; got {text!r}")
    return name.replace("-", "_"), [_value(one) for one in values.split(",")]


def _check_values(axis: str, values: Sequence[Any]) -> None:
    """Raise unless an option of an architecture may have these values."""
    kind = CONFIGURATION_TYPES.get(axis, str)
    if kind is str:
        expected = (*ARCHITECTURES, "bert-large") if axis == "architecture" else (*KINDS, *BERT_KINDS)
        if wrong := [value for value in values if value not in expected]:
            raise ValueError(
                f"argument --axis {axis}: expected some of {', '.join(expected)}; got {wrong[0]!r}"
                + (did_you_mean(wrong[0], expected) or f"; write {axis}={expected[0]},{expected[1]}")
            )
        return
    things, example = {int: ("integers", "2,4,8"), float: ("numbers", "0.1,0.2")}[kind]
    if wrong := [value for value in values if isinstance(value, bool) or not isinstance(value, (int, kind))]:
        name = option(axis).removeprefix("--")
        raise ValueError(
            f"argument --axis {name}: expected {things}; got {wrong[0]!r}; write them with commas, as {name}={example}"
        )


def _value(text: str) -> Any:
    """The number that a text spells, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _devices(options: argparse.Namespace, progress: Progress) -> Outcome:
    found = device_usage()
    return Outcome(found, {**dataclasses.asdict(found), "occupied_bytes": found.occupied_bytes})


def _argument(flag: str, group: str = "", **settings: Any) -> tuple[str, str, dict[str, Any]]:
    """An option of a subcommand: its group, its flag, and what `add_argument` is given besides."""
    return group, flag, settings


ONE_OF = "one of"  # a group of which exactly one option must be given; any other group is shown under its title
DETAILS = "what the detailed formula knows besides"
SIZES = "options of the architecture"
STEP = "options of the step"
DEVICES = ("cpu", "cuda")
SIZES_NOTE = "Defaults are those of the tst architectures. bert-large takes --layers, --seq-len and --attention alone."
SIZES_HELP = {
    "d_model": "width, a multiple of --heads and of 2",
    "layers": "encoder layers, and as many decoder layers; 24 in bert-large",
    "heads": "heads of each attention",
    "d_ff": "width inside of the feed-forward networks",
    "seq_len": "length of the sequences; 512 in bert-large, the most there",
    "dropout": "rate of dropout, but of weights of attention, where it is 0.1",
    "attention": f"{', '.join(KINDS)}: of the tst architectures; {', '.join(BERT_KINDS)}: of bert-large, there eager",
    "d_in": "features of a position of the sequences",
    "d_out": "features of a position of the result",
}
DEVICE = _argument("--device", choices=DEVICES, default="cpu", help="whose forms of operations are predicted")
PROBE = _argument(
    "--no-probe", dest="probe", action="store_false", help="do not run single operators to find what they hold"
)
CONTEXT = _argument(
    "--context", default=CONTEXT_BYTES, metavar="BYTES", help="what a CUDA device holds before there are tensors"
)
BATCH_SIZE = _argument("--batch-size", type=int, required=True, metavar="N", help="samples of each forward pass")
POWER_OF_TWO = _argument("--power-of-two", action="store_true", help="only batch sizes that are powers of two")
WORKLOAD = (
    _argument("--architecture", ONE_OF, choices=(*ARCHITECTURES, "bert-large"), help="a model that has been published"),
    _argument(
        "--workload",
        ONE_OF,
        metavar="MODULE:NAME",
        help="one's own effops.memory.Workload, or a function that returns it; the module is imported for real, from "
        "the current directory too, and what stands at its top level runs",
    ),
    *(
        _argument(
            option(name),
            SIZES,
            help=f"{SIZES_HELP[name]} (default {getattr(PUBLISHED, name)})",
            **(
                {"choices": (*KINDS, *BERT_KINDS), "metavar": "KIND"}
                if name == "attention"
                else {"type": kind, "metavar": "RATE" if kind is float else "N"}
            ),
        )
        for name, kind in CONFIGURATION_TYPES.items()
    ),
    _argument("--autocast", STEP, choices=("bfloat16", "float16"), help="the dtype of torch.autocast around the step"),
    _argument("--checkpoint", STEP, action="store_true", help="compute each layer of a ModuleList again in backward"),
    _argument("--accumulation-steps", STEP, type=int, metavar="N", help="batches of one step of the optimizer"),
)
COMMANDS: Mapping[str, tuple[Run, str, Sequence[tuple[str, str, dict[str, Any]]]]] = {
    "estimate": (
        _estimate,
        "what closed forms say of training a transformer",
        (
            _argument("--blocks", type=int, required=True, metavar="N", help="transformer blocks"),
            _argument("--heads", type=int, required=True, metavar="N", help="heads of each attention"),
            _argument("--head-dim", type=int, required=True, metavar="N", help="features of a head"),
            BATCH_SIZE,
            _argument("--seq-len", type=int, required=True, metavar="N", help="length of the sequences"),
            _argument("--dtype", choices=DTYPES, default="float32", help="of weights and activations"),
            _argument("--formula", choices=FORMULAS, default="rough", help="rough is the one that is published"),
            _argument("--d-ff", DETAILS, type=int, metavar="N", help="width inside of the feed-forward networks"),
            _argument("--attention", DETAILS, choices=("naive", "fused"), help="fused holds no weights of pairs"),
            _argument("--norm", DETAILS, choices=("fused", "composed"), help="fused is torch.nn.LayerNorm"),
            _argument("--dropout", DETAILS, action=argparse.BooleanOptionalAction, help="whether there is dropout"),
            _argument("--optimizer", DETAILS, choices=OPTIMIZERS, help="whose states are counted"),
            _argument(
                "--mixed-precision",
                DETAILS,
                action=argparse.BooleanOptionalAction,
                help="--dtype is autocast's, beside weights in float32",
            ),
            _argument("--device", DETAILS, choices=DEVICES, help="whose forms of operations are counted"),
        ),
    ),
    "anatomy": (
        _anatomy,
        "where the memory of a step goes",
        (
            *WORKLOAD,
            DEVICE,
            PROBE,
            CONTEXT,
            BATCH_SIZE,
            _argument("--measure", action="store_true", help="also run the step on this CPU"),
            _argument("--plot", metavar="FILE", help="draw memory over the step"),
        ),
    ),
    "max-batch": (
        _max_batch,
        "the largest batch whose step fits a budget",
        (
            *WORKLOAD,
            DEVICE,
            PROBE,
            CONTEXT,
            _argument("--budget", required=True, metavar="BYTES", help="such as 6G"),
            _argument(
                "--budget-means",
                choices=MEANINGS,
                help="what tensors take, or what a CUDA device holds, which is the default for CUDA",
            ),
            _argument("--mode", choices=MODES, default="predict", help="probe runs the steps"),
            _argument(
                "--multiple-of", type=int, default=1, metavar="N", help="only batch sizes that are multiples of N"
            ),
            POWER_OF_TWO,
        ),
    ),
    "advise": (
        _advise,
        "what would lower the memory of a step",
        (
            *WORKLOAD,
            DEVICE,
            PROBE,
            BATCH_SIZE,
            _argument("--budget", metavar="BYTES", help="of tensors, such as 6G; asks which methods together fit it"),
            _argument("--devices", type=int, default=1, metavar="N", help="for ZeRO"),
        ),
    ),
    "sweep": (
        _sweep,
        "how the largest batch, or the peak, follows sizes of a model",
        (
            *WORKLOAD,
            DEVICE,
            PROBE,
            _argument(
                "--axis",
                action="append",
                required=True,
                metavar="NAME=VALUE,VALUE",
                help="an option of the architecture, or an argument of the workload's function; may be repeated",
            ),
            _argument("--budget", ONE_OF, metavar="BYTES", help="of tensors, such as 6G: asks for the largest batch"),
            _argument("--batch-size", ONE_OF, type=int, metavar="N", help="asks for the peak"),
            POWER_OF_TWO,
            _argument("--plot", metavar="FILE", help="draw it"),
        ),
    ),
    "devices": (_devices, "what NVML says that each device of this machine holds", ()),
}


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `effops memory` its subcommands."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (run, what, arguments) in COMMANDS.items():
        subparser = commands.add_parser(name, help=what, description=f"Tell {what}.")
        subparser.add_argument("--json", metavar="FILE", help="write the same as JSON there; - for standard output")
        subparser.set_defaults(run=functools.partial(_run, run))
        for title, members in itertools.groupby(arguments, key=lambda one: one[0]):
            note = SIZES_NOTE if title == SIZES else None
            group = subparser.add_argument_group(title, note) if title not in ("", ONE_OF) else subparser
            if title == ONE_OF:
                group = subparser.add_mutually_exclusive_group(required=True)
            for _, flag, settings in members:
                group.add_argument(flag, **settings)
