"""What this machine can run: versions, devices, and every variant of every op, checked against float64."""

from __future__ import annotations

import json
import math
import os
import platform
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import effops
from effops.commands.console import Progress
from effops.dispatch.choice import choose
from effops.dispatch.op import Op, ops
from effops.measure import available_bytes, device_model, upstream_gradient
from effops.reference import error_ratio, gradient_error_ratio, reference_of
from effops.text import format_bytes

REASON_LENGTH = 400


@dataclass(frozen=True)
class Device:
    """A device and its memory. What is unknown is None; `problem` is why it could not be asked, or empty.

    `capability` is the compute capability of an NVIDIA GPU ("9.0") or the architecture of an AMD one ("gfx942"). On a
    CPU it is the instruction set that PyTorch uses ("AVX2").
    """

    name: str
    model: str | None = None
    capability: str | None = None
    threads: int | None = None
    memory_bytes: int | None = None
    available_bytes: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class VariantCheck:
    """Whether one variant is right on one case, forward and gradients.

    Errors are in units of their budgets, and None where they were not found out or are infinite: `reason` tells.
    """

    variant: str
    status: Literal["ok", "failed", "unavailable"]
    reason: str = ""
    error_ratio: float | None = None
    gradient_error_ratio: float | None = None


@dataclass(frozen=True)
class OpCheck:
    """The variants of one op on one device. `automatic` is the one that `auto` takes; None if it raises `reason`."""

    op: str
    device: str
    case: str
    dtype: str
    automatic: str | None
    reason: str
    variants: tuple[VariantCheck, ...]


@dataclass(frozen=True)
class Report:
    """What was found. `cuda_obstacle` is why there is no CUDA or ROCm device; empty if there is one."""

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    cuda_obstacle: str
    ops: tuple[OpCheck, ...]

    def failures(self) -> Iterator[str]:
        """A line for everything that is wrong."""
        for device in self.devices:
            if device.problem:
                yield f"{device.name}: {device.problem}"
        for check in self.ops:
            if check.automatic is None:
                yield f"{check.op} auto on {check.device}: {check.reason}"
            for variant in check.variants:
                if variant.status == "failed":
                    yield f"{check.op} {variant.variant} on {check.device}: {variant.reason}"

    @property
    def passes(self) -> bool:
        return not any(self.failures())


def diagnose(progress: Progress) -> Report:
    """Ask for versions and devices, and check every op on each device; `progress` is told what is being done."""
    progress("asking for versions and devices")
    obstacle = _cuda_obstacle()
    devices = [torch.device("cpu")]
    if not obstacle:
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return Report(
        versions(),
        tuple(describe(device) for device in devices),
        obstacle,
        tuple(check_op(op, device, progress) for op in ops().values() for device in devices),
    )


def versions() -> dict[str, str | None]:
    """Versions by name; None for CUDA or ROCm if torch is built without, and for a driver that torch cannot name."""
    from torch.utils import collect_env

    driver = collect_env.get_nvidia_driver_version(collect_env.run) if torch.version.cuda else None
    return {
        "effops": effops.__version__,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": driver,
    }


def _triton_version() -> str:
    try:
        import triton
    except Exception as error:  # an import may raise anything, which the report shows
        return f"cannot be imported: {_one_line(error)}"
    return str(triton.__version__)


def _cuda_obstacle() -> str:
    try:
        torch.cuda.init()
    except Exception as error:  # AssertionError if torch is built without it, RuntimeError without a driver or device
        return _one_line(error)
    return ""


def describe(device: torch.device) -> Device:
    """The device's model, capability and memory."""
    try:
        return _describe_cuda(device) if device.type == "cuda" else _describe_cpu(device)
    except Exception as error:  # a device that is listed may still fail
        return Device(str(device), problem=f"raised {_one_line(error)}")


def _describe_cpu(device: torch.device) -> Device:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return Device(
        str(device),
        device_model(device),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        total,
        None if total is None else min(total, available_bytes(device)),
    )


def _describe_cuda(device: torch.device) -> Device:
    properties = torch.cuda.get_device_properties(device)
    capability = properties.gcnArchName if torch.version.hip else f"{properties.major}.{properties.minor}"
    return Device(
        str(device),
        device_model(device),
        capability,
        memory_bytes=properties.total_memory,
        available_bytes=available_bytes(device),
    )


def check_op(op: Op, device: torch.device, progress: Progress) -> OpCheck:
    """Run every variant on the op's first case in float32. What a variant raises becomes its reason."""
    reference = reference_of(op)
    case = next(iter(reference.cases))
    dtype = torch.float32

    def args() -> tuple[Tensor, ...]:
        sample = reference.sample_case(case, dtype=dtype, device=device, generator=torch.Generator().manual_seed(0))
        return tuple(arg.detach().requires_grad_() for arg in sample)

    automatic, reason = None, ""
    try:
        automatic = choose(op, op.prepare(*args()), None).name
    except Exception as error:
        reason = f"raised {_one_line(error)}"
    checks = []
    for name in op.variants:
        progress(f"checking {op.name} {name} on {device}")
        try:
            checks.append(_check_variant(op, name, args()))
        except Exception as error:
            checks.append(VariantCheck(name, "failed", f"raised {_one_line(error)}"))
    return OpCheck(op.name, str(device), case, str(dtype).removeprefix("torch."), automatic, reason, tuple(checks))


def _check_variant(op: Op, name: str, args: tuple[Tensor, ...]) -> VariantCheck:
    obstacle = op.variants[name].obstacle(op.prepare(*args))
    if obstacle:
        return VariantCheck(name, "unavailable", obstacle)
    values = tuple(arg.detach() for arg in args)
    out = op(*args, variant=name)
    error = error_ratio(op, values, out.detach())
    if not error <= 1:
        return VariantCheck(name, "failed", f"the result's error is {error:.3g} times its budget", _finite(error))
    dout = upstream_gradient(out)
    gradients = torch.autograd.grad(out, args, dout)
    gradient_error = gradient_error_ratio(op, values, dout, gradients)
    wrong = "" if gradient_error <= 1 else f"the gradients' error is {gradient_error:.3g} times its budget"
    return VariantCheck(name, "failed" if wrong else "ok", wrong, _finite(error), _finite(gradient_error))


def _finite(ratio: float) -> float | None:
    return ratio if math.isfinite(ratio) else None


def _one_line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", REASON_LENGTH)


def json_text(report: Report) -> str:
    """The report as JSON, with `passes`: whether every self-check does."""
    return json.dumps({**asdict(report), "passes": report.passes}, indent=1, allow_nan=False) + "\n"


def print_report(report: Report, console: Console) -> None:
    """Versions, devices, and a table for each op and device."""
    for name, version in report.versions.items():
        console.print(f"{name}: {version or 'none'}", soft_wrap=True)
    for device in report.devices:
        console.print(f"{device.name}: {_description(device)}", soft_wrap=True)
    if report.cuda_obstacle:
        console.print(f"no CUDA or ROCm device: {report.cuda_obstacle}", soft_wrap=True)
    for check in report.ops:
        choice = f"auto takes {check.automatic}" if check.automatic else f"auto {check.reason}"
        console.print(f"\n{check.op} on {check.device}: {choice}", style="bold", soft_wrap=True)
        console.print(_table(check))
    console.print("Errors are those on an op's first case in units of their budgets: 1 or less is right.")


def _description(device: Device) -> str:
    if device.problem:
        return device.problem
    parts = [device.model, device.capability, None if device.threads is None else f"{device.threads} threads"]
    if device.memory_bytes is not None and device.available_bytes is not None:
        parts.append(f"{format_bytes(device.memory_bytes)} of memory, {format_bytes(device.available_bytes)} free")
    return ", ".join(part for part in parts if part)


def _table(check: OpCheck) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("Variant", no_wrap=True)
    table.add_column("Status", no_wrap=True)
    table.add_column("Error", no_wrap=True, justify="right")
    table.add_column("Gradients' error", no_wrap=True, justify="right")
    table.add_column("Reason", overflow="fold")
    for variant in check.variants:
        errors = (variant.error_ratio, variant.gradient_error_ratio)
        cells = ("-" if error is None else f"{error:.2f}" for error in errors)
        style = "red" if variant.status == "failed" else None
        table.add_row(variant.variant, variant.status, *cells, variant.reason, style=style)
    return table
