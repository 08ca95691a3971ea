"""What this machine can run: versions, devices, and every variant of every op, checked against float64."""

import importlib
import math
import os
import platform
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

import effops
from effops.commands.console import Progress
from effops.dispatch.choice import choose
from effops.dispatch.devices import never_run_on
from effops.dispatch.op import Op, find_op, ops
from effops.dispatch.requirements import requires_inductor, requires_triton
from effops.measure import available_bytes, device_model, upstream_gradient
from effops.reference import error_ratio, gradient_error_ratio, reference_of
from effops.text import format_bytes

REASON_LENGTH = 400
SHORT = {"torchscript": "script"}  # names of variants in the matrix, which fits 80 columns
T = TypeVar("T")


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
    """Whether one variant is right on one case, forward and gradients. An unchecked one is supported, and did not run.

    Errors are in units of their budgets, and None where they were not found out or are infinite: `reason` tells.
    """

    variant: str
    status: Literal["ok", "failed", "unavailable", "unchecked"]
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

    @property
    def verdict(self) -> str:
        """One line: whether all that was checked is right, and what no check has seen."""
        wrong = list(self.failures())
        checked = [one for check in self.ops for one in check.variants if one.status in ("ok", "failed")]
        if wrong:
            return f"{len(wrong)} of {len(checked)} checks failed: {wrong[0]}"
        unseen = {never_run_on(check.automatic or "", torch.device(check.device)) for check in self.ops} - {""}
        caution = f"; an automatic choice was never run on {unseen.pop()}: see --full" if unseen else ""
        return f"All {len(checked)} checks of {len(self.ops)} ops passed{caution}."


def diagnose(progress: Progress, names: Sequence[str] = (), full: bool = False) -> Report:
    """Ask for versions and devices, and check ops on each device; `progress` is told what is being done.

    Without `names` it checks every op; without `full`, no variant that has to be compiled, which takes minutes.
    """
    progress("asking for versions and devices")
    obstacle = _cuda_obstacle()
    devices = [torch.device("cpu")]
    if not obstacle:
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return Report(
        versions(),
        tuple(describe(device) for device in devices),
        obstacle,
        tuple(
            check_op(op, device, progress, full)
            for op in (ops().values() if not names else map(find_op, names))
            for device in devices
        ),
    )


def versions() -> dict[str, str | None]:
    """Versions by name; None for CUDA or ROCm if torch is built without, and for a driver that torch cannot name."""
    from torch.utils import collect_env

    driver = collect_env.get_nvidia_driver_version(collect_env.run) if torch.version.cuda else None
    triton, obstacle = _attempted(importlib.import_module, "triton")
    return {
        "effops": effops.__version__,
        "torch": torch.__version__,
        "triton": str(triton.__version__) if triton else f"cannot be imported: {obstacle}",
        "python": platform.python_version(),
        "system": platform.platform(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": driver,
    }


def _cuda_obstacle() -> str:
    """An AssertionError if torch is built without CUDA, a RuntimeError without a driver or device; empty with one."""
    return _attempted(torch.cuda.init)[1]


def _attempted(run: Callable[..., T], *args: Any) -> tuple[T | None, str]:
    """What a call returns, and empty; or None, and a line for what it raised, which may be anything."""
    try:
        return run(*args), ""
    except Exception as error:
        return None, textwrap.shorten(f"{type(error).__name__}: {error}", REASON_LENGTH)


def describe(device: torch.device) -> Device:
    """The device's model, capability and memory, or why it fails although it is listed."""
    found, problem = _attempted(_describe_cuda if device.type == "cuda" else _describe_cpu, device)
    return found or Device(str(device), problem=f"raised {problem}")


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


def check_op(op: Op, device: torch.device, progress: Progress, full: bool = True) -> OpCheck:
    """Run variants on the op's first case in float32. What a variant raises becomes its reason.

    Without `full`, variants that are compiled by Inductor or Triton do not run.
    """
    reference = reference_of(op)
    case = next(iter(reference.cases))
    dtype = torch.float32

    def args() -> tuple[Tensor, ...]:
        sample = reference.sample_case(case, dtype=dtype, device=device, generator=torch.Generator().manual_seed(0))
        return tuple(arg.detach().requires_grad_() for arg in sample)

    automatic, error = _attempted(lambda: choose(op, op.prepare(*args()), None).name)
    checks = []
    for name in op.variants:
        progress(f"checking {op.name} {name} on {device}")
        check, problem = _attempted(_check_variant, op, name, args, full)
        checks.append(check or VariantCheck(name, "failed", f"raised {problem}"))
    return OpCheck(
        op.name,
        str(device),
        case,
        str(dtype).removeprefix("torch."),
        automatic,
        f"raised {error}" if error else "",
        tuple(checks),
    )


def _check_variant(op: Op, name: str, make_args: Callable[[], tuple[Tensor, ...]], full: bool) -> VariantCheck:
    args, variant = make_args(), op.variants[name]
    obstacle = variant.obstacle(op.prepare(*args))
    if obstacle:
        return VariantCheck(name, "unavailable", obstacle)
    if not full and {requires_inductor, requires_triton} & set(variant.requires):
        return VariantCheck(name, "unchecked", "is compiled, which --full does")
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


def print_report(report: Report, console: Console) -> None:
    """Versions, devices, and a table for each op and device."""
    for name, version in report.versions.items():
        console.print(f"{name}: {version or 'none'}", soft_wrap=True)
    for device in report.devices:
        console.print(f"{device.name}: {_description(device)}", soft_wrap=True)
    if report.cuda_obstacle:
        console.print(f"no CUDA or ROCm device: {report.cuda_obstacle}", soft_wrap=True)
    for device in report.devices:
        checks = [check for check in report.ops if check.device == device.name]
        console.print(f"\n{device.name}", style="bold")
        console.print(_matrix(checks))
        for line in _reasons(checks):
            console.print(line, soft_wrap=True)
    console.print(f"\n{report.verdict}", style="green" if report.passes else "red", soft_wrap=True)


def _description(device: Device) -> str:
    if device.problem:
        return device.problem
    parts = [device.model, device.capability, None if device.threads is None else f"{device.threads} threads"]
    if device.memory_bytes is not None and device.available_bytes is not None:
        parts.append(f"{format_bytes(device.memory_bytes)} of memory, {format_bytes(device.available_bytes)} free")
    return ", ".join(part for part in parts if part)


SIGNS = {"ok": "ok", "failed": "WRONG", "unavailable": "-", "unchecked": "runs"}


def _matrix(checks: Sequence[OpCheck]) -> Table:
    """Ops by variants. A star marks the automatic choice."""
    names = list(dict.fromkeys(variant.variant for check in checks for variant in check.variants))
    header = [Column("", no_wrap=True), *(Column(SHORT.get(name, name), no_wrap=True) for name in names)]
    table = Table(*header, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for check in checks:
        signs = {one.variant: SIGNS[one.status] + "*" * (one.variant == check.automatic) for one in check.variants}
        wrong = check.automatic is None or any(one.status == "failed" for one in check.variants)
        table.add_row(check.op, *(signs.get(name, "") for name in names), style="red" if wrong else None)
    return table


def _reasons(checks: Sequence[OpCheck]) -> Iterator[str]:
    """What the signs mean, and why variants are not ok: a line for each variant and reason, with its ops."""
    yield "*: the automatic choice.  ok: result and gradients are right.  runs: supported, and not checked."
    found: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        for one in check.variants:
            if one.reason:
                found.setdefault((one.variant, one.reason), []).append(check.op)
    for (variant, reason), names in found.items():
        yield f"{variant} {reason}" + ("" if len(names) == len(checks) else f" ({', '.join(names)})")
