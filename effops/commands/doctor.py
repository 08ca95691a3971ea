"""What this machine can run: versions, devices, and every variant of every op, checked against float64."""

import importlib.metadata
import math
import os
import pkgutil
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor

import effops
from effops import pytorch
from effops.commands.attempt import attempted
from effops.commands.console import Progress
from effops.commands.speed import LEAST_GAIN, OpSpeed, speed_of
from effops.dispatch.choice import choose
from effops.dispatch.devices import never_run_on
from effops.dispatch.op import Op, find_op
from effops.dispatch.requirements import library_description, requires_inductor, requires_triton
from effops.measure import available_bytes, device_model, upstream_gradient
from effops.pytorch.measure import collect_env
from effops.pytorch.missing import LACKING, MissingInterfaceError, is_tested, tested
from effops.reference import error_ratio, gradient_error_ratio, reference_of, tried_ops
from effops.text import counted, format_bytes

TURNS = 3  # lines that the names of variants take by turns
SIGNS = {"ok": "ok", "failed": "FAIL", "unavailable": "-", "unchecked": "runs"}


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

    @property
    def right(self) -> list[str]:
        """The variants whose result and gradients are right."""
        return [check.variant for check in self.variants if check.status == "ok"]


@dataclass(frozen=True)
class Report:
    """What was found. `cuda_obstacle` is why there is no CUDA or ROCm device; empty if there is one.

    `lacking` tells of features that need an interface of PyTorch which the installed one lacks.
    """

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    cuda_obstacle: str
    ops: tuple[OpCheck, ...]
    speeds: tuple[OpSpeed, ...] = ()
    lacking: tuple[str, ...] = ()

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
        for speed in self.speeds:
            for name, problem in speed.problems.items():
                yield f"{speed.op} {name} on {speed.device} at its reference sizes: {problem}"

    @property
    def passes(self) -> bool:
        return not any(self.failures())

    @property
    def verdict(self) -> str:
        """One line: whether all that was checked is right, what is faster, and what was never run."""
        wrong = list(self.failures())
        if wrong:
            return f"{len(wrong)} failed, the first: {wrong[0]}"
        checked = sum(len(check.right) for check in self.ops)
        right = "the one checked variant is right" if checked == 1 else f"all {checked} checked variants are right"
        parts = [right, "the automatic choice runs for every op"]
        faster = {speed.op for speed in self.speeds if any(speed.advice)}
        if faster:
            parts.append(f"another variant is faster for {', '.join(sorted(faster))}")
        return "; ".join([*parts, *self._never_run()])

    def _never_run(self) -> Iterator[str]:
        """For each kind of device, the automatic choices that were never run on one, and not here either."""
        found: dict[str, set[str]] = {}
        for check in self.ops:
            for one in check.variants:
                if one.variant == check.automatic and one.status == "unchecked":
                    found.setdefault(never_run_on(one.variant, torch.device(check.device)), set()).add(one.variant)
        for kind, names in found.items():
            if kind:
                yield f"{', '.join(sorted(names))} was never run on {kind}: `effops doctor --full` checks and times it"


def diagnose(progress: Progress, names: Sequence[str] = (), full: bool = False) -> Report:
    """Ask for versions and devices, and check ops on each device; `progress` is told what is being done.

    Without `names` it checks every op. With `full` it also checks variants that have to be compiled, and times all that
    are right, which takes minutes.
    """
    progress("asking for versions and devices")
    obstacle = _cuda_obstacle()
    devices = [torch.device("cpu")]
    if not obstacle:
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    chosen = [reference_of(find_op(name, "argument --op")).op for name in names] or list(tried_ops().values())
    checks = tuple(check_op(op, device, progress, full) for op in chosen for device in devices)
    speeds = tuple(
        speed_of(reference_of(find_op(check.op)).op, torch.device(check.device), check.right, progress)
        for check in checks
        if full and check.right
    )
    return Report(versions(), tuple(describe(device) for device in devices), obstacle, checks, speeds, lacking())


def lacking() -> tuple[str, ...]:
    """Which interfaces of PyTorch are missing, and the features that need them. Imports all that any feature needs."""
    for module in pkgutil.iter_modules(pytorch.__path__):
        importlib.import_module(f"{pytorch.__name__}.{module.name}")
    return tuple(map(str, LACKING))


def versions() -> dict[str, str | None]:
    """Versions by name; None for CUDA or ROCm if torch is built without, and for a driver that torch cannot name."""
    driver = attempted(_driver_version)[0] if torch.version.cuda else None
    triton, obstacle = attempted(importlib.import_module, "triton")
    return {
        "effops": effops.__version__,
        "torch": torch.__version__,
        "triton": str(triton.__version__) if triton else f"cannot be imported: {obstacle}",
        "C++ library": library_description(),
        "opt_einsum": f"{importlib.metadata.version('opt_einsum')}; torch.einsum of three operands takes its paths too",
        "python": platform.python_version(),
        "system": platform.platform(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": driver,
    }


def _driver_version() -> str | None:
    version: str | None = collect_env.get_nvidia_driver_version(collect_env.run)
    return version


def _cuda_obstacle() -> str:
    """Why there is no CUDA or ROCm device: how torch is built, or what is said of driver and device; empty with one."""
    if not torch.backends.cuda.is_built():  # ROCm counts as CUDA
        return "this PyTorch is built for the CPU alone; to use a GPU, install one that is built for CUDA or ROCm"
    return attempted(torch.cuda.init)[1].removeprefix("RuntimeError: ")


def describe(device: torch.device) -> Device:
    """The device's model, capability and memory, or why it fails although it is listed."""
    found, problem = attempted(_describe_cuda if device.type == "cuda" else _describe_cpu, device)
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

    automatic, error = attempted(lambda: choose(op, op.prepare(*args()), None).name)
    checks = []
    progress(f"checking {op.name} on {device}")
    for name in op.variants:
        if full:
            progress(f"checking {op.name} {name} on {device}")
        check, problem = attempted(_check_variant, op, name, args, full)
        if check is not None and check.status == "unavailable" and name == automatic:
            problem, check = check.reason, None
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
        return VariantCheck(name, "unchecked", "can run, not checked: `--full` compiles and checks it")
    values = tuple(arg.detach() for arg in args)
    try:
        out = op(*args, variant=name)
    except MissingInterfaceError as missing:
        return VariantCheck(name, "unavailable", str(missing))
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
    """Versions and devices; for each device a matrix of ops and variants, and times if there are; the verdict."""
    for name, version in report.versions.items():
        console.print(f"{name}: {version or 'none'}", soft_wrap=True)
    if not is_tested():
        console.print(tested(), style="yellow", soft_wrap=True)
    for line in report.lacking:
        console.print(f"missing: {line}", style="red", soft_wrap=True)
    for device in report.devices:
        console.print(f"{device.name}: {_description(device)}", soft_wrap=True)
    if report.cuda_obstacle:
        console.print(f"no CUDA or ROCm device: {report.cuda_obstacle}", soft_wrap=True)
    for device in report.devices:
        checks = [check for check in report.ops if check.device == device.name]
        console.print(f"\nresults and gradients on {device.name}", style="bold")
        for line, style in _matrix(map(_signs, checks)):
            console.print(line, style=style, soft_wrap=True)
        for text in _reasons(checks):
            console.print(text, soft_wrap=True)
        _print_speeds([speed for speed in report.speeds if speed.device == device.name], console)
    console.print(f"\n{report.verdict}", style="green" if report.passes else "red", soft_wrap=True)


def _print_speeds(speeds: Sequence[OpSpeed], console: Console) -> None:
    """Two matrices of milliseconds, and what to prefer to the automatic choice."""
    if not speeds:
        return
    for title, found_ms in (("forward", "forward_ms"), ("forward and backward", "training_ms")):
        console.print(f"\nmilliseconds on {speeds[0].device}, {title}, at the ops' reference sizes", style="bold")
        rows = ((speed.op, _starred(getattr(speed, found_ms), speed.automatic), None) for speed in speeds)
        for line, _ in _matrix(rows):
            console.print(line, soft_wrap=True)
    advice = [line for speed in speeds for line in speed.advice]
    for line in advice or [f"no variant is {LEAST_GAIN} times as fast as the automatic choice"]:
        console.print(line, soft_wrap=True)


def _description(device: Device) -> str:
    if device.problem:
        return device.problem
    parts = [device.model, device.capability, None if device.threads is None else counted(device.threads, "threads")]
    if device.memory_bytes is not None and device.available_bytes is not None:
        parts.append(f"{format_bytes(device.memory_bytes)} of memory, {format_bytes(device.available_bytes)} free")
    return ", ".join(part for part in parts if part)


Row = tuple[str, Mapping[str, str], str | None]  # an op, a cell for each of its variants, and the style of its line


def _signs(check: OpCheck) -> Row:
    signs = {one.variant: SIGNS[one.status] + "*" * (one.variant == check.automatic) for one in check.variants}
    wrong = check.automatic is None or any(one.status == "failed" for one in check.variants)
    return check.op, signs, "red" if wrong else None


def _starred(found_ms: Mapping[str, float], automatic: str) -> dict[str, str]:
    return {name: f"{ms:.{0 if ms >= 100 else 1}f}" + "*" * (name == automatic) for name, ms in found_ms.items()}


def _matrix(rows: Iterable[Row]) -> Iterator[tuple[str, str | None]]:
    """Lines and styles: ops by variants, whose names take turns on some lines, so that all fit 80 columns."""
    rows = list(rows)
    names = list(dict.fromkeys(name for _, cells, _ in rows for name in cells))
    first = max((len(op) for op, _, _ in rows), default=0)
    longest = max((len(cell) for _, cells, _ in rows for cell in cells.values()), default=0)
    width = max(1 + longest, 1 + max(map(len, names), default=0) // TURNS)  # a name may take some columns
    for turn in range(TURNS):
        header = "".join(name.ljust(TURNS * width) for name in names[turn::TURNS])
        yield (" " * (first + 1 + turn * width) + header).rstrip(), None
    for op, cells, style in rows:
        line = "".join(cells.get(name, "").ljust(width) for name in names)
        yield f"{op.ljust(first)} {line}".rstrip(), style


def _reasons(checks: Sequence[OpCheck]) -> Iterator[str]:
    """What the signs mean, and why variants are not ok: a line for each variant and reason, with its ops."""
    yield "*: the automatic choice. ok: result and gradients are right."
    yield "runs: can run, not checked. -: cannot run. FAIL: wrong, or raises."
    found: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        for one in check.variants:
            if one.reason:
                found.setdefault((one.variant, one.reason), []).append(check.op)
    for (variant, reason), ops_with in found.items():
        having = [check.op for check in checks if variant in {one.variant for one in check.variants}]
        yield f"{variant}: {reason}" + ("" if ops_with == having else f" ({', '.join(ops_with)})")
