"""Where the memory of a step goes: predicted on fake tensors without running it, and measured beside that if asked."""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from effops.measure import tensors_of
from effops.memory.building import StepRecorder, build_model
from effops.memory.checked import check_device, check_flags
from effops.memory.measured import measured_timeline
from effops.memory.surroundings import isolated_from_caller
from effops.memory.workload import Step, Workload, called_as, check_step
from effops.prediction.cuda_forms import ASSUMPTIONS, CONTEXT_BYTES, overheads
from effops.prediction.inside import caution
from effops.prediction.known_values import KNOWN_TO_TRANSFORMERS, KnownValues
from effops.prediction.named_devices import NAMED_BY_AUTOCAST, NamedCudaForms, missing_devices_named
from effops.prediction.observed_forms import SUMS_IN_PLACE
from effops.prediction.operations import CLASSES
from effops.prediction.recorder import DEEP_COPIES, GENERATOR_STATES
from effops.prediction.shared import COMPILED_REFUSED, CompiledFunctionError
from effops.prediction.timeline import Timeline
from effops.pytorch.calls import FakeTensor
from effops.pytorch.prediction import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from effops.text import aligned, format_bytes, frames_of, line_of_program, parse_bytes, tells_wrong_arguments

UNPREDICTABLE = DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
# What PyTorch says of fake tensors whose values are read, and what reads them; those errors have no class of their own.
READS_VALUES = {
    "its data is not allocated yet": "an operator that reads their memory",
    ".numpy() is not supported": "Tensor.numpy(), or an array of numpy made of a tensor,",
    ".tolist() is not supported": "Tensor.tolist()",
    "Cannot access data pointer of Tensor": "Tensor.numpy(), dlpack or data_ptr()",
}
# What a program has written where these operators are called.
WRITTEN_AS = {
    "aten._local_scalar_dense.default": ", as of .item(), .tolist(), float(), or `if` of a tensor,",
    "aten.nonzero.default": ", as of torch.nonzero, or of a boolean mask as index,",
}
SHOWN_DIFFERENCES = 8
SHOWN_MAKERS = 3
NEGLIGIBLE = 1e-3  # of the peak


@dataclass(frozen=True)
class Anatomy:
    """The memory of one step in steady state: the states of the optimizer exist, the inputs are counted.

    Attributes:
        batch_size: of each forward pass
        timeline: every allocation of the step
        overheads: on a CUDA device, what it holds beside the tensors, by the names of
            `effops.prediction.cuda_forms.ASSUMPTIONS`
        operations: how many of each class of `effops.prediction.operations` each phase makes; empty if measured
        unknown: operators of the step that may allocate more inside than is known and predicted
        measured: the same step as it ran, if it did
        peak_bytes: the most bytes that tensors take at any instant
        device_bytes: the same with the overheads
        categories: the most bytes that each category takes, each at an instant of its own
        instants: bytes of each category after setup, at the ends of forward, backward and step, and at the peak

    `str()` is a table of the categories at several instants.
    """

    batch_size: int
    timeline: Timeline = field(repr=False)
    overheads: Mapping[str, int] = field(default_factory=dict)
    operations: Mapping[tuple[str, str], int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    measured: "Anatomy | None" = None

    @property
    def peak_bytes(self) -> int:
        """The most bytes that tensors take at any instant of the step."""
        return self.timeline.peak_bytes

    @property
    def device_bytes(self) -> int:
        """What the device holds at most: tensors and overheads."""
        return self.peak_bytes + sum(self.overheads.values())

    @property
    def categories(self) -> dict[str, int]:
        """The most bytes that each category takes, each at an instant of its own."""
        return {category: max(curve) for category, curve in self.timeline.curves.items()}

    @property
    def instants(self) -> dict[str, dict[str, int]]:
        """Bytes of each category after setup, at the ends of forward, backward and step, and at the peak.

        Inference has no end of backward.
        """
        timeline = self.timeline
        ticks = {
            "after setup": timeline.start,
            "end of forward": timeline.ends.get("forward"),
            "peak": timeline.peak_tick,
            "end of backward": timeline.ends.get("backward"),
            "end of step": timeline.end,
        }
        return {
            name: {category: curve[tick - timeline.start] for category, curve in timeline.curves.items()}
            for name, tick in ticks.items()
            if tick is not None
        }

    @property
    def differences(self) -> list[str]:
        """Storages that only one side has at its peak, the predicted or the measured one; the largest sums first."""
        if self.measured is None:
            return []
        sides = {"predicted": self.timeline, "measured": self.measured.timeline}
        alive = {name: list(timeline.alive(timeline.peak_tick)) for name, timeline in sides.items()}
        sizes = {name: Counter(one.nbytes for one in allocations) for name, allocations in alive.items()}
        found = []
        for name, other in (("predicted", "measured"), ("measured", "predicted")):
            for nbytes, count in (sizes[name] - sizes[other]).items():
                operators = sorted({one.operator for one in alive[name] if one.nbytes == nbytes})
                found.append((count * nbytes, f"{name} only: {count} x {nbytes:,} bytes of {', '.join(operators)}"))
        return [text for _, text in sorted(found, reverse=True)]

    def __str__(self) -> str:
        return "\n\n".join(
            part for part in (self._instants_table(), self._peaks_table(), self._operations_table()) if part
        )

    def _instants_table(self) -> str:
        instants = self.instants
        rows = {
            category: [*(instant[category] for instant in instants.values()), most]
            for category, most in self.categories.items()
            if most > (NEGLIGIBLE * self.peak_bytes if category == "other" else 0)
        }
        rows["all tensors"] = [*(sum(instant.values()) for instant in instants.values()), self.peak_bytes]
        head = ["predicted" if self.operations else "measured", *instants, "most"]
        table = aligned([head, *([name, *map(format_bytes, row)] for name, row in rows.items())])
        if "other" in rows:
            makers = list(self.timeline.makers("other").items())[:SHOWN_MAKERS]
            made = ", ".join(f"{format_bytes(nbytes)} of {operator}" for operator, nbytes in makers)
            why = "outlives the pass that made it, as a result that the model or the loop keeps"
            if not instants["end of step"]["other"]:
                why = "left by setup or by the step before, until this step releases it"
            table += f"\nother: {made}; {why}"
        return table

    def _peaks_table(self) -> str:
        lines = [f"peak of the tensors at batch size {self.batch_size}: {self.peak_bytes:,} bytes"]
        if self.measured is not None:
            off = self.peak_bytes / self.measured.peak_bytes - 1
            lines[0] += f" predicted, {self.measured.peak_bytes:,} measured ({off:+.3%})"
            lines += self.differences[:SHOWN_DIFFERENCES]
        if self.unknown:
            lines.append(caution(self.unknown))
        rows = [[name, format_bytes(nbytes), ASSUMPTIONS[name]] for name, nbytes in self.overheads.items()]
        if rows:
            rows.append(["device", format_bytes(self.device_bytes), "tensors and all of these"])
            lines += [f"{name}: {amount}  ({why})" for name, amount, why in rows]
            lines += [f"{name}: {why}" for name, why in ASSUMPTIONS.items() if name not in self.overheads]
        return "\n".join(lines)

    def _operations_table(self) -> str:
        if not self.operations:
            return ""
        phases = list(dict.fromkeys(phase for phase, _ in self.operations))
        counts = {kind: [self.operations.get((phase, kind), 0) for phase in phases] for kind in CLASSES}
        rows = ([kind, *(f"{count:.3g}" for count in row)] for kind, row in counts.items() if any(row))
        return aligned([["operations", *phases], *rows])


@tells_wrong_arguments
def anatomy(
    workload: Workload,
    batch_size: int,
    *,
    device: str = "cpu",
    measure: bool = False,
    probe: bool = True,
    context_bytes: str | float = CONTEXT_BYTES,
) -> Anatomy:
    """The memory of one step, predicted without running it.

    Model, batch, loss and optimizer run on fake tensors, which have shapes and no memory, and no GPU is needed. Values
    that follow from numbers are known, such as those of `torch.arange` and of a mask of ones. Two steps are recorded,
    so that the second one finds what training leaves between steps. All sizes are bytes of storages, whatever the
    dtypes.

    Args:
        workload: what a step runs
        batch_size: of each of its forward passes
        device: "cpu", or "cuda" for the forms and overheads that a CUDA device has; a workload may name "cuda" then, in
            `.to`, `.cuda`, factories and autocast
        measure: also run the step, on this CPU, and put what it allocates beside the prediction
        probe: run single operators on this CPU, once each in a process, to find what they allocate inside where no rule
            tells; those of convolutions and of products in bfloat16 depend on the CPU. Nothing of "cuda" is probed.
        context_bytes: what a CUDA device holds before there are tensors, as a number or as a text such as "600 MiB"

    Raises:
        ValueError: the batch does not depend on its size, the model is not built anew, or the device is unknown
        NotImplementedError: the model depends on values, which fake tensors do not have, or is compiled by
            torch.compile; names the module. The workload names another device than the one predicted; names the line

    Example:
        >>> workload = effops.memory.Workload(lambda: torch.nn.Linear(256, 1), lambda size: torch.randn(size, 256))
        >>> effops.memory.anatomy(workload, 32).peak_bytes
        33924
    """
    check_step("anatomy", workload, batch_size)
    check_device("anatomy", device)
    check_flags("anatomy", measure=measure, probe=probe)
    held_bytes = parse_bytes(context_bytes, "anatomy: `context_bytes`")
    if measure and device != "cpu":
        raise ValueError('anatomy: `measure` runs the step on the CPU; leave `device="cpu"`, or `measure=False`')
    recorder, timeline = _followed(workload, batch_size, device == "cuda", probe)
    return Anatomy(
        batch_size,
        timeline,
        overheads(timeline, recorder.convolution_bytes, held_bytes) if device == "cuda" else {},
        dict(recorder.operations),
        tuple(sorted(recorder.unknown)),
        Anatomy(batch_size, measured_timeline(workload, batch_size)) if measure else None,
    )


def _followed(workload: Workload, batch_size: int, cuda: bool, probe: bool) -> tuple[StepRecorder, Timeline]:
    """What has followed two steps, with what it tells of the second, and the timeline."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False  # what stands at that address is no value
    recorder = StepRecorder(mode, cuda, probe)
    recorder.enter("setup")
    modules = _CalledModules()
    workload = replace(workload, model=functools.partial(_build_new, workload.model))
    with (
        isolated_from_caller(),
        mode,
        NamedCudaForms(recorder.unknown) if cuda else nullcontext(),
        recorder,
        KnownValues(),
        GENERATOR_STATES,
        DEEP_COPIES,
        SUMS_IN_PLACE,
        COMPILED_REFUSED,
        NAMED_BY_AUTOCAST,
        # torch.compile leaves hooks alone, so that the first function that it finds is one of the model.
        register_module_forward_pre_hook(torch.compiler.disable(modules.enter)),
        register_module_forward_hook(torch.compiler.disable(modules.leave)),
        missing_devices_named(recorder),
    ):
        try:
            _check_batch(workload, batch_size)
            step = Step(workload, batch_size, recorder.enter, recorder.mark)
            modules.model = step.model
            for group in step.optimizer.param_groups if cuda and step.optimizer else ():
                if group.get("foreach", True) is None and not group.get("fused"):
                    group["foreach"] = True
            with KNOWN_TO_TRANSFORMERS:  # the model has imported it by now
                step.run(batches=1)
                recorder.begin()
                step.run()
        except CompiledFunctionError as error:
            raise NotImplementedError(
                f"anatomy: {modules.where()} must not be compiled, since a prediction does not know what TorchInductor "
                f"allocates; got torch.compile of {error}; predict it uncompiled, under "
                '`torch.compiler.set_stance("force_eager")`, or let `max_batch_size(..., mode="probe")` run it'
            ) from error
        except RuntimeError as error:
            found = next((what for message, what in READS_VALUES.items() if message in str(error)), "")
            if isinstance(error, UNPREDICTABLE):
                operator = getattr(error, "func", "an operator that reads them")
                found = f"{type(error).__name__} from {operator}{WRITTEN_AS.get(str(operator), '')}"
            if not found:
                raise
            place = line_of_program(frames_of(error)) or "in PyTorch"
            raise NotImplementedError(
                f"anatomy: {modules.where()} must not depend on the values of tensors, which a prediction does not "
                f"have; got {found} {place}; make shapes and branches there independent of them, or let "
                '`max_batch_size(..., mode="probe")` run the model'
            ) from error
        return recorder, recorder.timeline()


def _check_batch(workload: Workload, batch_size: int) -> None:
    other = batch_size - 1 if batch_size > 1 else 2
    with called_as("batch(batch_size)"):
        shapes = _shapes(workload.batch(batch_size))
    try:
        others = _shapes(workload.batch(other))
    except UNPREDICTABLE:
        raise
    except Exception:  # a workload need not allow every size
        return
    if shapes and shapes == others:
        raise ValueError(
            f"Workload: `batch` must make a batch of the size that it is given; got {shapes} for batch sizes "
            f"{batch_size} and {other}; make the first dimension of its tensors the argument"
        )


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors_of(batch)]


def _build_new(build: Callable[[], nn.Module]) -> nn.Module:
    """A new model, whose parameters are fake tensors."""
    model = build_model(build)
    for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
        if not isinstance(parameter, FakeTensor):
            raise ValueError(
                f"Workload: `model` must build the model anew at each call; got one whose parameter `{name}` "
                "exists already; construct the module inside of the function, and load weights into it without "
                "`assign=True`"
            )
    return model


class _CalledModules(threading.local):
    """The modules that are being called, from the outermost to the innermost; each thread has its own."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.called: list[nn.Module] = []

    def enter(self, module: nn.Module, arguments: object) -> None:
        self.called.append(module)

    def leave(self, module: nn.Module, arguments: object, result: object) -> None:
        del self.called[-1:]  # of another thread there is none, if it entered the module before this was told

    def where(self) -> str:
        """The innermost module that is being called."""
        if not self.called or self.model is None:
            return "the workload"
        names = {id(module): name for name, module in self.model.named_modules()}
        innermost = self.called[-1]
        return f"module `{names.get(id(innermost), '') or 'model'}` ({type(innermost).__name__})"
