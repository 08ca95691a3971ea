"""The subcommands of `effops memory`."""

import argparse
import ast
import dataclasses
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from effops.commands.console import shown_progress, shown_result
from effops.memory.advise import advise
from effops.memory.anatomy import Anatomy, anatomy
from effops.memory.batches import MEANINGS, MODES, max_batch_size
from effops.memory.devices import NVMLUnavailableError, device_usage
from effops.memory.formula import FORMULAS, OPTIMIZERS, Details, estimate_transformer
from effops.memory.models import ARCHITECTURES, KINDS, Configuration, bert_large, workload_parts
from effops.memory.plot import plot_anatomy
from effops.memory.sweep import sweep
from effops.memory.workload import Workload
from effops.prediction.cuda_forms import CONTEXT_BYTES
from effops.text import parse_bytes

EXPECTED_ERRORS = ValueError, NotImplementedError, ImportError, OSError, NVMLUnavailableError
CONFIGURATION_TYPES = {field.name: type(field.default) for field in dataclasses.fields(Configuration)}
BERT_OPTIONS = ("layers", "seq_len", "attention")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Run = Callable[[argparse.Namespace], tuple[object, Any]]


def _run(run: Run, options: argparse.Namespace) -> int:
    """Show what a subcommand finds; returns 2 if it cannot."""
    try:
        with shown_progress() as progress:
            progress(f"{options.command}: predicting")
            found, content = run(options)
        shown_result(options.json, content, lambda console: console.print(str(found), soft_wrap=True))
    except EXPECTED_ERRORS as error:
        print(f"effops memory {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _estimate(options: argparse.Namespace) -> tuple[object, Any]:
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
    return found, {**dataclasses.asdict(found), **totals}


def _anatomy(options: argparse.Namespace) -> tuple[object, Any]:
    found = anatomy(
        _workload(options),
        options.batch_size,
        device=options.device,
        probe=options.probe,
        measure=options.measure,
        context_bytes=parse_bytes(options.context, "argument --context"),
    )
    if options.plot:
        plot_anatomy(found, options.plot)
    return found, _anatomy_content(found)


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


def _max_batch(options: argparse.Namespace) -> tuple[object, Any]:
    found = max_batch_size(
        _workload(options),
        options.budget,
        budget_means=options.budget_means,
        device=options.device,
        probe=options.probe,
        mode=options.mode,
        multiple_of=options.multiple_of,
        power_of_two=options.power_of_two,
        context_bytes=parse_bytes(options.context, "argument --context"),
    )
    return found, dataclasses.asdict(found)


def _advise(options: argparse.Namespace) -> tuple[object, Any]:
    found = advise(
        _workload(options),
        options.batch_size,
        options.budget,
        devices=options.devices,
        device=options.device,
        probe=options.probe,
        alternatives=_alternatives(options),
    )
    return found, {**dataclasses.asdict(found), "fits": found.fits}


def _alternatives(options: argparse.Namespace) -> dict[str, Workload]:
    """The same architecture with the attentions that hold less."""
    if options.architecture is None:
        return {}
    others = {"fused": "attention fused", "log_sparse": "attention log_sparse, which is another model"}
    if options.architecture == "bert-large":
        others = {"sdpa": "attention sdpa"}
    return {name: _workload(options, {"attention": kind}) for kind, name in others.items() if kind != options.attention}


def _sweep(options: argparse.Namespace) -> tuple[object, Any]:
    axes = dict(_axis(text) for text in options.axis)
    if options.architecture is not None:
        known = ["architecture", *(BERT_OPTIONS if options.architecture == "bert-large" else CONFIGURATION_TYPES)]
        if unknown := [name for name in axes if name not in known]:
            raise ValueError(
                f"argument --axis: expected an option of the architecture, {', '.join(known)}; got {', '.join(unknown)}"
            )
    base = {name: given for name in axes if (given := getattr(options, name, None)) is not None}
    found = sweep(
        lambda **values: _workload(options, values),
        axes,
        options.budget,
        options.batch_size,
        base=base,
        power_of_two=options.power_of_two,
        device=options.device,
        probe=options.probe,
    )
    if options.plot:
        found.plot(options.plot)
    results = {
        axis: [{"value": value, "result": result} for value, result in results.items()]
        for axis, results in found.axes.items()
    }
    return found, {**dataclasses.asdict(found), "quantity": found.quantity, "axes": results}


def _axis(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    if not name or not values:
        raise ValueError(f"argument --axis: expected NAME=VALUE,VALUE, as layers=2,4,8; got {text!r}")
    return name.replace("-", "_"), [_value(one) for one in values.split(",")]


def _value(text: str) -> Any:
    """The number that a text spells, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _devices(options: argparse.Namespace) -> tuple[object, Any]:
    found = device_usage()
    return found, {**dataclasses.asdict(found), "occupied_bytes": found.occupied_bytes}


def _workload(options: argparse.Namespace, values: Mapping[str, Any] | None = None) -> Workload:
    """The workload that the options name; `values` replace some of them, or are its function's arguments."""
    given = {name: getattr(options, name) for name in CONFIGURATION_TYPES if getattr(options, name) is not None}
    if options.workload is not None:
        if given:
            raise ValueError(f"argument {_option(next(iter(given)))}: expected an --architecture beside it; got none")
        workload = _imported(options.workload, values or {})
    else:
        workload = _published(**{"architecture": options.architecture, **given, **(values or {})})
    changes = {
        "autocast": DTYPES.get(options.autocast),
        "checkpoint": options.checkpoint or None,
        "accumulation_steps": options.accumulation_steps,
    }
    return dataclasses.replace(workload, **{name: value for name, value in changes.items() if value is not None})


def _published(architecture: str, **sizes: Any) -> Workload:
    if architecture != "bert-large":
        return Workload(**workload_parts(architecture, Configuration(**sizes)))
    if unknown := [_option(name) for name in sizes if name not in BERT_OPTIONS]:
        raise ValueError(
            f"argument {', '.join(unknown)}: expected none of it for bert-large, whose sizes are published"
        )
    return Workload(**bert_large(**sizes))


def _imported(place: str, values: Mapping[str, Any]) -> Workload:
    module, _, name = place.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None) if module and name else None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module imports another one, which is missing
        raise ValueError(
            f"argument --workload: expected MODULE:NAME of a workload; got {place!r}: {error}; write it as an "
            "import does, without .py, in the current directory or an installed package"
        ) from None
    if found is None:
        raise ValueError(f"argument --workload: expected MODULE:NAME of a workload; got {place!r}, where there is none")
    if callable(found):
        found = found(**values)
    elif values:
        raise ValueError(
            f"argument --axis: expected {place!r} to be a function of {', '.join(values)}; got {type(found).__name__}"
        )
    if not isinstance(found, Workload):
        raise ValueError(
            f"argument --workload: expected a Workload, or a function that returns one; got {type(found).__name__} "
            f"from {place!r}"
        )
    return found


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _argument(flag: str, group: str = "", **settings: Any) -> tuple[str, str, dict[str, Any]]:
    """An option of a subcommand: its group, its flag, and what `add_argument` is given besides."""
    return group, flag, settings


ONE_OF = "one of"  # a group of which exactly one option must be given; any other group is shown under its title
DETAILS = "what the detailed formula knows besides"
SIZES = "options of the architecture"
STEP = "options of the step"
DEVICES = ("cpu", "cuda")
DEVICE = _argument("--device", choices=DEVICES, default="cpu", help="whose forms of operations are predicted")
PROBE = _argument(
    "--no-probe", dest="probe", action="store_false", help="do not run single operators to find what they hold"
)
CONTEXT = _argument(
    "--context", default=CONTEXT_BYTES, metavar="BYTES", help="what a CUDA device holds before there are tensors"
)
BATCH_SIZE = _argument("--batch-size", type=int, required=True)
POWER_OF_TWO = _argument("--power-of-two", action="store_true", help="of the batch size")
WORKLOAD = (
    _argument("--architecture", ONE_OF, choices=(*ARCHITECTURES, "bert-large"), help="a model that has been published"),
    _argument(
        "--workload",
        ONE_OF,
        metavar="MODULE:NAME",
        help="one's own effops.memory.Workload, or a function that returns it; the current directory can be imported",
    ),
    *(
        _argument(_option(name), SIZES, choices=(*KINDS, "eager", "sdpa"))
        if name == "attention"
        else _argument(_option(name), SIZES, type=kind, metavar="N")
        for name, kind in CONFIGURATION_TYPES.items()
    ),
    _argument("--autocast", STEP, choices=("bfloat16", "float16")),
    _argument("--checkpoint", STEP, action="store_true", help="compute each layer of a ModuleList again in backward"),
    _argument("--accumulation-steps", STEP, type=int, metavar="N"),
)
COMMANDS: Mapping[str, tuple[Run, str, Sequence[tuple[str, str, dict[str, Any]]]]] = {
    "estimate": (
        _estimate,
        "what closed forms say of training a transformer",
        (
            _argument("--blocks", type=int, required=True, metavar="N"),
            _argument("--heads", type=int, required=True, metavar="N"),
            _argument("--head-dim", type=int, required=True, metavar="N"),
            _argument("--batch-size", type=int, required=True, metavar="N"),
            _argument("--seq-len", type=int, required=True, metavar="N"),
            _argument("--dtype", choices=DTYPES, default="float32"),
            _argument("--formula", choices=FORMULAS, default="rough"),
            _argument("--d-ff", DETAILS, type=int, metavar="N"),
            _argument("--attention", DETAILS, choices=("naive", "fused")),
            _argument("--norm", DETAILS, choices=("fused", "composed")),
            _argument("--dropout", DETAILS, action=argparse.BooleanOptionalAction),
            _argument("--optimizer", DETAILS, choices=OPTIMIZERS),
            _argument("--mixed-precision", DETAILS, action=argparse.BooleanOptionalAction),
            _argument("--device", DETAILS, choices=DEVICES),
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
            _argument("--budget", required=True, help="such as 6G"),
            _argument(
                "--budget-means",
                choices=MEANINGS,
                default="tensors",
                help="what tensors take, or what a CUDA device holds",
            ),
            _argument("--mode", choices=MODES, default="predict", help="probe runs the steps"),
            _argument("--multiple-of", type=int, default=1, metavar="N"),
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
            _argument("--budget", help="of tensors, such as 6G; asks which methods together fit it"),
            _argument("--devices", type=int, default=1, metavar="N", help="for ZeRO"),
        ),
    ),
    "sweep": (
        _sweep,
        "how the largest batch, or the peak, answers to each size of a model",
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
            _argument("--budget", ONE_OF, help="of tensors, such as 6G: asks for the largest batch"),
            _argument("--batch-size", ONE_OF, type=int, help="asks for the peak"),
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
            group = subparser.add_argument_group(title) if title not in ("", ONE_OF) else subparser
            if title == ONE_OF:
                group = subparser.add_mutually_exclusive_group(required=True)
            for _, flag, settings in members:
                group.add_argument(flag, **settings)
