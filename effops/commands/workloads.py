"""The workload that the options of `effops memory` name: a published architecture, or one's own of a module."""

import argparse
import ast
import dataclasses
import importlib
import inspect
import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from effops.memory.models import Configuration, bert_large, workload_parts
from effops.memory.workload import Workload, called_as
from effops.text import did_you_mean, frames_of, line_of_program, told_syntax_error, why_not_bound

CONFIGURATION_TYPES = {field.name: type(field.default) for field in dataclasses.fields(Configuration)}
BERT_OPTIONS = ("layers", "seq_len", "attention")
NO_WORKLOAD = "expected an effops.memory.Workload, or a function that returns one"
HOW_TO_WRITE_ONE = (
    "write effops.memory.Workload(model=lambda: ..., batch=lambda size: ..., loss=lambda model, batch: ..., "
    "optimizer=torch.optim.Adam), which docs/memory.md explains"
)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def workload_of(options: argparse.Namespace, values: Mapping[str, Any] | None = None) -> Workload:
    """The workload that the options name; `values` replace some of them, or are its function's arguments."""
    given = {name: getattr(options, name) for name in CONFIGURATION_TYPES if getattr(options, name) is not None}
    if options.workload is not None:
        if given:
            raise ValueError(f"argument {option(next(iter(given)))}: expected an --architecture beside it; got none")
        workload = _imported(options.workload, values or {})
    else:
        sizes = {"architecture": options.architecture, **given, **(values or {})}
        workload = _published(sizes.pop("architecture"), sizes, values or {})
    changes = {
        "autocast": DTYPES.get(options.autocast),
        "checkpoint": options.checkpoint or None,
        "accumulation_steps": options.accumulation_steps,
    }
    return dataclasses.replace(workload, **{name: value for name, value in changes.items() if value is not None})


def _published(architecture: str, sizes: Mapping[str, Any], swept: Collection[str]) -> Workload:
    """The workload of an architecture; those of its sizes that are `swept` are values of axes."""
    if architecture != "bert-large":
        return Workload(**workload_parts(architecture, _configuration(sizes, swept)))
    if unknown := [option(name, name in swept) for name in sizes if name not in BERT_OPTIONS]:
        raise ValueError(
            f"argument {', '.join(unknown)}: expected none of it for bert-large, whose sizes are published"
        )
    return Workload(**bert_large(**sizes))


def _configuration(sizes: Mapping[str, Any], swept: Collection[str]) -> Configuration:
    try:
        return Configuration(**sizes)
    except ValueError as error:
        told = str(error).removeprefix("Configuration: ")
        named = [option(name, name in swept) for name in sizes if re.search(rf"\b{name}\b", told.partition(";")[0])]
        raise ValueError(f"argument {', '.join(named)}: {told}") from None


def _imported(place: str, values: Mapping[str, Any]) -> Workload:
    module_name, colon, name = place.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name) if module_name else None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):  # the module imports another one
            text = f"argument --workload: {place!r} must import what is installed; got: {error}; install it"
            raise ModuleNotFoundError(text).with_traceback(error.__traceback__) from error
        defining = [path.stem for path in sorted(Path.cwd().glob("*.py")) if name in _defined_names(path)]
        near = did_you_mean(place, (f"{one}{colon}{name}" for one in defining))
        raise ValueError(
            f"argument --workload: expected MODULE:NAME of a workload; got {place!r}: {error}; write it as an "
            f"import does, without .py, in the current directory or an installed package{near}"
        ) from None
    except SyntaxError as error:
        raise ImportError(
            f"argument --workload: {place!r} must be importable; got {told_syntax_error(error)}; mend it"
        ) from error
    except Exception as error:
        place_of_error = line_of_program(frames_of(error)) or "in PyTorch"
        raise ImportError(
            f"argument --workload: {place!r} must be importable; got {type(error).__name__} {place_of_error}: {error}; "
            "mend it"
        ) from error
    found = getattr(module, name, None) if name else None
    if found is None:
        places = [f"{module_name}:{one}" for one in _workload_names(module)] if module else []
        there = f"; choose from {', '.join(places)}{did_you_mean(place, places)}" if places else f"; {HOW_TO_WRITE_ONE}"
        raise ValueError(
            f"argument --workload: expected MODULE:NAME of a workload; got {place!r}, where there is none{there}"
        )
    if isinstance(found, nn.Module) or (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(
            f"argument --workload: {NO_WORKLOAD}; got {_described(found)} from {place!r}; {HOW_TO_WRITE_ONE}"
        )
    if callable(found):
        if problem := why_not_bound(found, (), values):
            how = ", as a default or by `effops memory sweep --axis`" if problem.endswith("give each of these") else ""
            raise ValueError(f"argument {'--axis' if values else '--workload'}: {place!r}: {problem}{how}")
        with called_as(f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"):
            found = found(**values)
    elif values:
        raise ValueError(
            f"argument --axis: expected {place!r} to be a function of {', '.join(values)}; got {type(found).__name__}"
        )
    if not isinstance(found, Workload):
        raise ValueError(
            f"argument --workload: {NO_WORKLOAD}; got {_described(found)} from {place!r}; {HOW_TO_WRITE_ONE}"
        )
    return found


def _defined_names(file: Path) -> set[str]:
    """The names at the top level of a module, read without running it; none of what is no Python."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in body:
        is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        for one in [node] if is_definition else ast.walk(node):  # a local name is none of the module
            if isinstance(one, (ast.FunctionDef, ast.ClassDef)):
                names.add(one.name)
            elif isinstance(one, (ast.Import, ast.ImportFrom)):
                names.update(alias.asname or alias.name for alias in one.names)
            elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                names.add(one.id)
    return names


def _described(found: Any) -> str:
    """What stands in the place of a workload: "the class Net", or "a Linear"."""
    return f"the class {found.__name__}" if isinstance(found, type) else f"an object of class {type(found).__name__}"


def _workload_names(module: ModuleType) -> list[str]:
    """The names of workloads in a module, and of functions that it defines, which may return one."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, Workload) or (inspect.isfunction(value) and value.__module__ == module.__name__)
    ]


def option(name: str, is_axis: bool = False) -> str:
    """How the value of that name is given."""
    spelt = name.replace("_", "-")
    return f"--axis {spelt}" if is_axis else f"--{spelt}"
