"""The subcommands of `effops memory`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from effops.commands.console import shown_progress, shown_result
from effops.memory.advise import advise
from effops.memory.anatomy import Anatomy, anatomy
from effops.memory.batches import max_batch_size, parse_bytes
from effops.memory.devices import NVMLUnavailableError, device_usage
from effops.memory.formula import FORMULAS, OPTIMIZERS, Details, estimate_transformer
from effops.memory.models import ARCHITECTURES, KINDS, Configuration, bert_large, workload_parts
from effops.memory.plot import plot_anatomy
from effops.memory.sweep import Sweep, sweep
from effops.memory.workload import Workload
from effops.prediction.cuda_forms import CONTEXT_BYTES

EXPECTED_ERRORS = ValueError, NotImplementedError, ImportError, OSError, NVMLUnavailableError
CONFIGURATION_TYPES = {field.name: type(field.default) for field in dataclasses.fields(Configuration)}
BERT_OPTIONS = ("layers", "seq_len", "attention")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Run = Callable[[argparse.Namespace], tuple[object, Any]]


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `effops memory` its subcommands."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)

    def command(name: str, run: Run, what: str) -> argparse.ArgumentParser:
        subparser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=f"Tell {what}.")
        subparser.add_argument("--json", metavar="FILE", help="write the same as JSON there; - for standard output")
        subparser.set_defaults(run=functools.partial(_run, run))
        return subparser

    _estimate_options(command("estimate", _estimate, "what closed forms say of training a transformer"))
    subparser = command("anatomy", _anatomy, "where the memory of a step goes")
    _workload_options(subparser)
    _device_options(subparser)
    subparser.add_argument("--batch-size", type=int, required=True)
    subparser.add_argument("--measure", action="store_true", help="also run the step on this CPU")
    subparser.add_argument("--plot", metavar="FILE", help="draw memory over the step")
    subparser = command("max-batch", _max_batch, "the largest batch whose step fits a budget")
    _workload_options(subparser)
    _device_options(subparser)
    subparser.add_argument("--budget", required=True, help='such as "6 GiB"')
    subparser.add_argument(
        "--budget-means",
        choices=("tensors", "device"),
        default="tensors",
        help="what tensors take, or what a CUDA device holds",
    )
    subparser.add_argument("--mode", choices=("predict", "probe"), default="predict", help="probe runs the steps")
    subparser.add_argument("--multiple-of", type=int, default=1, metavar="N")
    subparser.add_argument("--power-of-two", action="store_true", help="of the batch size")
    subparser = command("advise", _advise, "what would lower the memory of a step")
    _workload_options(subparser)
    _device_option(subparser)
    subparser.add_argument("--batch-size", type=int, required=True)
    subparser.add_argument("--budget", help='of tensors, such as "6 GiB"; asks which methods together fit it')
    subparser.add_argument("--devices", type=int, default=1, metavar="N", help="for ZeRO")
    subparser = command("sweep", _sweep, "how the largest batch, or the peak, answers to each size of a model")
    _workload_options(subparser)
    _device_option(subparser)
    subparser.add_argument(
        "--axis",
        action="append",
        required=True,
        metavar="NAME=VALUE,VALUE",
        help="an option of the architecture, or an argument of the workload's function; may be repeated",
    )
    asked = subparser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--budget", help='of tensors, such as "6 GiB": asks for the largest batch')
    asked.add_argument("--batch-size", type=int, help="asks for the peak")
    subparser.add_argument("--power-of-two", action="store_true", help="of the batch size")
    subparser.add_argument("--plot", metavar="FILE", help="draw it")
    command("devices", _devices, "what NVML says that each device of this machine holds")


def _run(run: Run, options: argparse.Namespace) -> int:
    """Show what a subcommand finds; returns 2 if it cannot."""
    try:
        with shown_progress() as progress:
            progress(f"{options.command}: predicting")
            found, content = run(options)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        shown_result(options.json, text, lambda console: console.print(str(found), soft_wrap=True))
    except EXPECTED_ERRORS as error:
        print(f"effops memory {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _estimate_options(parser: argparse.ArgumentParser) -> None:
    for name in ("blocks", "heads", "head-dim", "batch-size", "seq-len"):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="N")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--formula", choices=FORMULAS, default="rough")
    details = parser.add_argument_group("what the detailed formula knows besides")
    details.add_argument("--d-ff", type=int, metavar="N")
    details.add_argument("--attention", choices=("naive", "fused"))
    details.add_argument("--norm", choices=("fused", "composed"))
    details.add_argument("--dropout", action=argparse.BooleanOptionalAction)
    details.add_argument("--optimizer", choices=OPTIMIZERS)
    details.add_argument("--mixed-precision", action=argparse.BooleanOptionalAction)
    details.add_argument("--device", choices=("cpu", "cuda"))


def _workload_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--architecture", choices=(*ARCHITECTURES, "bert-large"), help="a model that has been published"
    )
    source.add_argument(
        "--workload",
        metavar="MODULE:NAME",
        help="one's own effops.memory.Workload, or a function that returns it; the current directory can be imported",
    )
    sizes = parser.add_argument_group("options of the architecture")
    for name, kind in CONFIGURATION_TYPES.items():
        choices = (*KINDS, "eager", "sdpa") if name == "attention" else None
        sizes.add_argument(_option(name), type=kind, choices=choices, metavar=None if choices else "N")
    step = parser.add_argument_group("options of the step")
    step.add_argument("--autocast", choices=("bfloat16", "float16"))
    step.add_argument("--checkpoint", action="store_true", help="compute each layer of a ModuleList again in backward")
    step.add_argument("--accumulation-steps", type=int, metavar="N")


def _device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="whose forms of operations are predicted"
    )


def _device_options(parser: argparse.ArgumentParser) -> None:
    _device_option(parser)
    parser.add_argument(
        "--context", default=CONTEXT_BYTES, metavar="BYTES", help="what a CUDA device holds before there are tensors"
    )


def _estimate(options: argparse.Namespace) -> tuple[object, Any]:
    names = (field.name for field in dataclasses.fields(Details))
    details = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
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
        measure=options.measure,
        context_bytes=parse_bytes(options.context),
    )
    if options.plot:
        plot_anatomy(found, options.plot)
    return found, _anatomy_content(found)


def _anatomy_content(found: Anatomy) -> dict[str, Any]:
    operations: dict[str, dict[str, int]] = defaultdict(dict)
    for (phase, kind), count in found.operations.items():
        operations[phase][kind] = count
    names = ("batch_size", "peak_bytes", "device_bytes", "categories", "instants", "unknown", "differences")
    return {
        **{name: getattr(found, name) for name in names},
        "overheads": dict(found.overheads),
        "operations": operations,
        "measured": None if found.measured is None else _anatomy_content(found.measured),
    }


def _max_batch(options: argparse.Namespace) -> tuple[object, Any]:
    found = max_batch_size(
        _workload(options),
        options.budget,
        budget_means=options.budget_means,
        device=options.device,
        mode=options.mode,
        multiple_of=options.multiple_of,
        power_of_two=options.power_of_two,
        context_bytes=parse_bytes(options.context),
    )
    return found, dataclasses.asdict(found)


def _advise(options: argparse.Namespace) -> tuple[object, Any]:
    found = advise(
        _workload(options),
        options.batch_size,
        options.budget,
        devices=options.devices,
        device=options.device,
        alternatives=_alternatives(options),
    )
    return found, {**dataclasses.asdict(found), "fits": found.fits}


def _alternatives(options: argparse.Namespace) -> dict[str, Workload]:
    """The same architecture with the attentions that hold less."""
    if options.architecture is None:
        return {}
    others = (
        {"sdpa": "attention sdpa"}
        if options.architecture == "bert-large"
        else {
            "fused": "attention fused",
            "log_sparse": "attention log_sparse, which is another model",
        }
    )
    others.pop(options.attention, None)
    return {name: _workload(options, {"attention": kind}) for kind, name in others.items()}


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
    )
    if options.plot:
        found.plot(options.plot)
    return found, _sweep_content(found)


def _sweep_content(found: Sweep) -> dict[str, Any]:
    axes = {
        axis: [{"value": value, "result": result} for value, result in results.items()]
        for axis, results in found.axes.items()
    }
    content = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return {**content, "quantity": found.quantity, "axes": axes}


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
        workload = _published(options, {**given, **(values or {})})
    changes: dict[str, Any] = {}
    if options.autocast:
        changes["autocast"] = DTYPES[options.autocast]
    if options.checkpoint:
        changes["checkpoint"] = True
    if options.accumulation_steps is not None:
        changes["accumulation_steps"] = options.accumulation_steps
    return dataclasses.replace(workload, **changes)


def _published(options: argparse.Namespace, values: Mapping[str, Any]) -> Workload:
    architecture = values.get("architecture", options.architecture)
    sizes = {name: value for name, value in values.items() if name != "architecture"}
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
    found = getattr(importlib.import_module(module), name, None) if module and name else None
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
