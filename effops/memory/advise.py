"""Tells what would lower the memory of a step, and which methods together fit a budget.

Each method is predicted by the anatomy of the step with it.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from effops.memory.anatomy import Anatomy, anatomy
from effops.memory.building import StepRecorder, build_model
from effops.memory.checked import check_count, check_device, check_flags, check_progress
from effops.memory.optimizers import AdamW8bit
from effops.memory.surroundings import isolated_from_caller
from effops.memory.swapped import Swapped, is_swappable
from effops.memory.workload import Workload, check_step
from effops.prediction.inside import caution
from effops.prediction.known_values import KnownValues
from effops.prediction.named_devices import NamedCudaForms
from effops.prediction.operations import CONTRACTION, UNCOUNTED
from effops.prediction.timeline import Timeline
from effops.pytorch.prediction import FakeTensorMode, _BatchNorm
from effops.text import aligned, counted, format_bytes, format_distinct_bytes, parse_bytes, tells_wrong_arguments

SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": AdamW,
    "AdamW with 8-bit states": AdamW8bit,
    "Adafactor": Adafactor,
    "SGD with momentum": lambda parameters: SGD(parameters, momentum=0.9),
    "SGD": SGD,
}
ADDS_STATES = "momentum", "amsgrad"  # options of optimizers with which they keep one more state
STAGES = ("optimizer states", "gradients", "weights")
COMMUNICATION = {1: "as much as", 2: "as much as", 3: "1.5 times as much as"}
# Methods are applied in this order, whichever was chosen first: an alternative is another workload, which the others
# then change, and half a batch is half of what accumulation leaves of it. So the same methods give the same step, which
# is predicted once.
FAMILIES = ("operation", "mixed precision", "gradient accumulation", "ZeRO", "checkpointing", "optimizer", "batch size")


@dataclass(frozen=True)
class Method:
    """One way to lower memory.

    Attributes:
        name: of the method
        helps: "memory", "speed" or "both", as published
        peak_bytes: of a step with it, predicted; None if there is no such step, for the reason that `note` tells
        operations: tensor contractions a sample, relative to the step as it is; None if there are none, or if kernels
            are called whose operations are not counted
        note: what it costs, changes or assumes
    """

    name: str
    helps: str
    peak_bytes: int | None
    operations: float | None
    note: str


@dataclass(frozen=True)
class Advice:
    """What would help.

    Attributes:
        batch_size: samples of an optimizer step on one device, over `Workload.accumulation_steps`
        peak_bytes: of the step as it is, predicted
        methods: those with the lowest peak first, those that cannot be applied last
        budget_bytes: as given
        combination: methods by name that together fit the budget, each with the peak of it and all before; the lowest
            peak found if none fits; empty without a budget, and where the step fits as it is
        unknown: operators, in any of the steps, that may allocate more inside than is predicted
        left_out: the other methods that can be applied, each with the reason why it is not in the combination

    `str()` is a table.
    """

    batch_size: int
    peak_bytes: int
    methods: tuple[Method, ...]
    budget_bytes: int | None
    combination: Mapping[str, int]
    unknown: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether the step with `combination` is within the budget."""
        least = min(self.combination.values(), default=self.peak_bytes)
        return self.budget_bytes is None or least <= self.budget_bytes

    def __str__(self) -> str:
        rows = [
            ("method", "helps", "peak", "saves", "operations"),
            ("as it is", "", format_bytes(self.peak_bytes), "", "x 1.00"),
        ]
        for method in self.methods:
            peak = method.peak_bytes
            saved = "-" if peak is None else f"{1 - peak / self.peak_bytes:.1%}"
            ratio = "-" if peak is None else "uncounted" if method.operations is None else f"x {method.operations:.2f}"
            rows.append((method.name, method.helps, "-" if peak is None else format_bytes(peak), saved, ratio))
        notes = ("note", "", *(method.note for method in self.methods))
        table = "\n".join(f"{line}  {note}".rstrip() for line, note in zip(aligned(rows).splitlines(), notes))
        head = f"a step of batch size {self.batch_size}; operations are tensor contractions a sample"
        return "\n\n".join(part for part in (head, table, caution(self.unknown), self._combination_text()) if part)

    def _combination_text(self) -> str:
        if self.budget_bytes is None:
            return ""
        budget = f"the budget of {format_bytes(self.budget_bytes)}"
        if not self.combination:
            if self.fits:
                return f"{budget} holds the step as it is: no method is needed"
            return f"nothing here lowers the peak to {budget}"
        peaks = {"as it is": self.peak_bytes, **{f"and {name}": peak for name, peak in self.combination.items()}}
        *shown, _ = format_distinct_bytes(*peaks.values(), self.budget_bytes)
        head = f"within {budget}:" if self.fits else f"no combination fits {budget}; the lowest peak found:"
        left_out = ["left out:", aligned(list(self.left_out.items()), left=2)] if self.left_out else []
        return "\n".join((head, aligned(list(zip(peaks, shown))), *left_out))


@tells_wrong_arguments
def advise(
    workload: Workload,
    batch_size: int,
    budget: str | float | None = None,
    *,
    devices: int = 1,
    device: str = "cpu",
    probe: bool = True,
    alternatives: Mapping[str, Workload] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Advice:
    """What would lower the memory of a step, and by how much.

    Each method is predicted by `anatomy` of the step with it. ZeRO divides the curves of optimizer states, gradients
    and weights by the number of devices, instant by instant. It keeps the gradients and weights of one module whole,
    the largest. Towards a budget the methods are put together one by one: first those that leave the training as it
    is, then those that round otherwise, then those that alter it. Among these the fewest operations come first. Each
    stays if it lowers the peak, unless the others make do without it.

    Args:
        workload: what a step runs
        batch_size: of each of its forward passes; with ZeRO on each device
        budget: bytes of tensors, as a number such as 6e9, or as a text such as "6G" or "6 GiB"
        devices: for ZeRO
        device: "cpu" or "cuda", as in `anatomy`
        probe: as in `anatomy`
        alternatives: workloads that may stand in for this one, by name: first one that computes the same
        progress: is told of each step before it is predicted

    Raises:
        TypeError: as `anatomy`; or `alternatives` are no workloads by name
        ValueError: as `anatomy`; or `devices` is below 1
        NotImplementedError: as `anatomy`

    Example:
        >>> workload = effops.memory.Workload(
        ...     model=lambda: torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))),
        ...     batch=lambda size: torch.randn(size, 64),
        ...     loss=lambda model, batch: model(batch).square().mean(),
        ...     optimizer=torch.optim.Adam,
        ... )
        >>> advice = effops.memory.advise(workload, 512, "600 KiB")
        >>> advice.peak_bytes, dict(advice.combination)
        (1379368, {'gradient accumulation, 4 x 128': 561196})

    Source: Hugging Face transformers, "Efficient training on a single GPU"; Rajbhandari et al. 2019, arXiv:1910.02054.
    """
    check_step("advise", workload, batch_size)
    check_device("advise", device)
    check_flags("advise", probe=probe)
    check_count("advise", "devices", devices, "leave it out for 1")
    check_progress("advise", progress)
    _check_alternatives(alternatives)
    budget_bytes = None if budget is None else parse_bytes(budget, "advise: `budget`")
    predict = _Predictor(devices, device, probe, progress)
    start = _Setting(workload, batch_size)
    present = predict(start, "the step as it is")
    model = fake_model(workload, device)
    options = _options(start, present.anatomy, model, devices, alternatives or {})
    tried = [(option, option.predicted(start, present, predict)) for option in options]
    methods = [
        *(method for _, method in tried),
        Method(
            "data loading", "speed", present.peak_bytes, 1.0, "no memory of the device: workers and pins are the host's"
        ),
    ]
    combination, left_out = ({}, {}) if budget_bytes is None else _combination(start, tried, predict, budget_bytes)
    return Advice(
        batch_size * workload.accumulation_steps,
        present.peak_bytes,
        tuple(sorted(methods, key=lambda method: (method.peak_bytes is None, method.peak_bytes))),
        budget_bytes,
        combination,
        tuple(sorted({name for found in predict.known.values() for name in found.anatomy.unknown})),
        left_out,
    )


def _check_alternatives(alternatives: Any) -> None:
    """Raise unless these are workloads by name, or None."""
    remedy = 'give a dict of names and workloads, as {"fused": Workload(...)}'
    if alternatives is None:
        return
    if not isinstance(alternatives, Mapping):
        got = type(alternatives).__name__
        raise TypeError(f"advise: `alternatives` must be workloads by name; got {got}; {remedy}")
    for name, other in alternatives.items():
        if not isinstance(name, str):
            raise TypeError(f"advise: names of `alternatives` must be texts; got {name!r}; {remedy}")
        check_step(f"advise: `alternatives[{name!r}]`", other)


@dataclass(frozen=True)
class _Setting:
    """A step with some of the methods."""

    workload: Workload
    batch_size: int
    stage: int = 0


@dataclass(frozen=True)
class _Prediction:
    """What is predicted of a step; `contractions` are those of a sample, None where kernels are not counted."""

    anatomy: Anatomy
    peak_bytes: int
    contractions: float | None


class _Predictor:
    """Predicts settings, each once, and tells `progress` what they are called."""

    def __init__(self, devices: int, device: str, probe: bool, progress: Callable[[str], None]) -> None:
        self.devices, self.device, self.probe, self.progress = devices, device, probe, progress
        self.known: dict[tuple[Workload, int], _Prediction] = {}

    def __call__(self, setting: _Setting, name: str) -> _Prediction:
        key = setting.workload, setting.batch_size  # a stage of ZeRO runs the same step, and divides its curves
        if key not in self.known:
            self.progress(f"predicting {name}")
            self.known[key] = self._predicted(*key)
        found = self.known[key]
        if not setting.stage:
            return found
        model = fake_model(setting.workload, self.device)
        module_bytes = max(_total_bytes(module.parameters(recurse=False)) for module in model.modules())
        peak_bytes = sharded_peak_bytes(
            found.anatomy.timeline, setting.stage, self.devices, module_bytes, _total_bytes(model.buffers())
        )
        return replace(found, peak_bytes=peak_bytes)

    def _predicted(self, workload: Workload, batch_size: int) -> _Prediction:
        steps = min(workload.accumulation_steps, 2)  # each batch after the second one finds what the second one does
        step = replace(workload, accumulation_steps=steps)
        found = anatomy(step, batch_size, device=self.device, probe=self.probe)
        computed = {key: count for key, count in found.operations.items() if key[0] not in ("optimizer", "release")}

        def total(kind: str) -> int:
            return sum(count for (_, counted), count in computed.items() if counted == kind)

        contractions = None if total(UNCOUNTED) else total(CONTRACTION) / (batch_size * steps)
        return _Prediction(found, found.peak_bytes, contractions)


class _Results(IntEnum):
    """What a method does to the results of training, the least first."""

    SAME = 0  # but for the order of sums
    ROUNDED = 1  # the same computation in a dtype of fewer digits
    OTHER = 2


@dataclass(frozen=True)
class _Option:
    """A method that may be applied, at most one of each family.

    `change` applies it to a setting. It is None if the method cannot be applied, and `note` tells why.
    """

    family: str
    name: str
    helps: str
    change: Callable[[_Setting], _Setting] | None
    note: str = ""
    results: _Results = _Results.SAME

    def predicted(self, start: _Setting, present: _Prediction, predict: _Predictor) -> Method:
        if self.change is None:
            return Method(self.name, self.helps, None, None, self.note)
        try:
            found = predict(self.change(start), self.name)
        except (ValueError, RuntimeError) as error:
            return Method(self.name, self.helps, None, None, f"cannot be predicted: {error}")
        ratio = found.contractions / present.contractions if found.contractions and present.contractions else None
        return Method(self.name, self.helps, found.peak_bytes, ratio, self.note)


def _options(
    start: _Setting, present: Anatomy, model: nn.Module, devices: int, alternatives: Mapping[str, Workload]
) -> Iterator[_Option]:
    workload, batch_size = start.workload, start.batch_size
    for index, (name, other) in enumerate(alternatives.items()):
        change = functools.partial(replace, workload=other)
        results = _Results.OTHER if index else _Results.SAME
        yield _Option("operation", name, "memory", change, "the alternative that was given", results)
    swappable = sum(is_swappable(module) for module in model.modules())
    if swappable:
        yield _Option(
            "operation",
            "effops.nn.MultiheadAttention",
            "memory",
            lambda setting: _changed(setting, model=Swapped(setting.workload.model)),
            f"in place of {swappable} torch.nn.MultiheadAttention, whose state it loads",
        )
    yield (
        _Option(
            "mixed precision",
            "mixed precision",
            "speed",
            functools.partial(_changed, autocast=torch.bfloat16),
            "autocast to bfloat16, weights and optimizer states stay as they are",
            _Results.ROUNDED,
        )
        if workload.autocast is None
        else _Option("mixed precision", "mixed precision", "speed", None, f"is there: {workload.autocast}")
    )
    if workload.trains:
        yield from _training_options(workload, batch_size, model, devices)
    if batch_size > 1:
        yield _Option(
            "batch size",
            f"batch size {batch_size // 2}",
            "both",
            lambda setting: replace(setting, batch_size=max(1, setting.batch_size // 2)),
            "fewer samples a step" + (", noisier gradients" if workload.trains else ""),
            _Results.OTHER,
        )
    alive = present.timeline.alive(present.timeline.peak_tick)
    softmax_bytes = [one.nbytes for one in alive if one.operator in SOFTMAX]
    if softmax_bytes and not swappable:
        note = (
            f"{counted(len(softmax_bytes), 'results')} of softmax: {format_bytes(sum(softmax_bytes))} at the peak; for "
            "weights of attention write effops.attention(query, key, value, attn_mask, dropout_p), which holds none"
        )
        yield _Option("operation", "effops.attention", "memory", None, note)


def _training_options(workload: Workload, batch_size: int, model: nn.Module, devices: int) -> Iterator[_Option]:
    normalises = any(isinstance(module, _BatchNorm) for module in model.modules())
    parts = [2**power for power in range(1, batch_size.bit_length()) if batch_size % 2**power == 0]
    for count in parts:
        yield _Option(
            "gradient accumulation",
            f"gradient accumulation, {count} x {batch_size // count}",
            "memory",
            functools.partial(_split, count),
            "smaller kernels" + (", batch normalisation of smaller batches" if normalises else ""),
            _Results.OTHER if normalises else _Results.SAME,
        )
    if not parts:
        yield _Option("gradient accumulation", "gradient accumulation", "memory", None, "needs an even batch size")
    for stage in (1, 2, 3):
        name, note = f"ZeRO stage {stage}", "needs more than one of `devices`"
        if devices > 1:
            name += f", {devices} devices"
            note = f"{', '.join(STAGES[:stage])} divided; communicates {COMMUNICATION[stage]} data parallelism"
        yield _Option("ZeRO", name, "memory", functools.partial(replace, stage=stage) if devices > 1 else None, note)
    yield _checkpointing(workload, model)
    for name, optimizer in OPTIMIZERS.items():
        if _keeps_same_states(workload, optimizer, model):
            yield _Option("optimizer", f"optimizer {name}", "both", None, "is there")
            continue
        note = "its states as bitsandbytes documents them" if optimizer is AdamW8bit else ""
        change = functools.partial(_changed, optimizer=optimizer)
        yield _Option("optimizer", f"optimizer {name}", "both", change, note, _Results.OTHER)


def _keeps_same_states(workload: Workload, other: Callable[..., Optimizer], model: nn.Module) -> bool:
    """Whether the optimizer of the workload is of the class of another one, and keeps the states that it keeps."""
    assert workload.optimizer is not None
    present, proposed = workload.optimizer(model.parameters()), other(model.parameters())
    return type(present) is type(proposed) and all(
        bool(present.defaults.get(option)) == bool(proposed.defaults.get(option)) for option in ADDS_STATES
    )


def _checkpointing(workload: Workload, model: nn.Module) -> _Option:
    option = functools.partial(_Option, "checkpointing", "activation checkpointing", "memory")
    if workload.checkpoint:
        return option(None, "is there")
    if not any(isinstance(module, nn.ModuleList) for module in model.modules()):
        note = "needs a torch.nn.ModuleList of layers; give Workload(checkpoint=...) the classes to compute again"
        return option(None, note)
    change = functools.partial(_changed, checkpoint=True)
    return option(change, "each module of a torch.nn.ModuleList is computed again in backward")


def _changed(setting: _Setting, **changes: object) -> _Setting:
    return replace(setting, workload=replace(setting.workload, **changes))  # type: ignore[arg-type]


def _split(count: int, setting: _Setting) -> _Setting:
    """The same samples in so many forward passes."""
    steps = setting.workload.accumulation_steps * count
    return replace(_changed(setting, accumulation_steps=steps), batch_size=setting.batch_size // count)


def sharded_peak_bytes(timeline: Timeline, stage: int, devices: int, module_bytes: int, buffer_bytes: int) -> int:
    """The peak of one device of several under ZeRO.

    Args:
        timeline: of a step on one device
        stage: 1 divides optimizer states and what the optimizer's step needs, 2 gradients too, 3 also weights
        devices: how many share the step
        module_bytes: of the parameters of the largest module: as much of gradients and of weights is whole at a time
        buffer_bytes: of the model's buffers, which are counted with the weights and never divided
    """

    def divided(curve: Sequence[int], whole: int = 0, buffers: int = 0) -> list[int]:
        parts = (buffers + -(-(nbytes - buffers) // devices) for nbytes in curve)  # rounded up
        return [min(nbytes, part + whole) for nbytes, part in zip(curve, parts)]

    curves = dict(timeline.curves)
    for category in ("optimizer states", "optimizer temporaries"):
        curves[category] = divided(curves[category])
    if stage > 1:
        curves["gradients"] = divided(curves["gradients"], module_bytes)
    if stage > 2:
        curves["weights"] = divided(curves["weights"], module_bytes, buffer_bytes)
    return max(map(sum, zip(*curves.values())))


def fake_model(workload: Workload, device: str) -> nn.Module:
    """The workload's model without any memory, which may name the device that is predicted."""
    mode, is_cuda = FakeTensorMode(allow_non_fake_inputs=True), device == "cuda"
    recorder = StepRecorder(mode, is_cuda)
    recorder.enter("setup")
    forms = NamedCudaForms(recorder.unknown) if is_cuda else nullcontext()
    with isolated_from_caller(), mode, forms, recorder, KnownValues():
        return build_model(workload.model)


def _total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _combination(
    start: _Setting, tried: Iterable[tuple[_Option, Method]], predict: _Predictor, budget_bytes: int
) -> tuple[dict[str, int], dict[str, str]]:
    """Options that together fit the budget, each with the peak of it and all before; and why others are not among them.

    They are tried in the order of what they cost: in results, then in operations. Those that cost the same keep the
    order of `tried`. One that the others can do without is left out.
    """
    usable = [(option, method) for option, method in tried if method.peak_bytes is not None]
    usable.sort(key=lambda one: (one[0].results, round(one[1].operations or 1.0, 2)))

    def peak_of(options: Collection[_Option]) -> int:
        setting = start
        for option in sorted(options, key=lambda option: FAMILIES.index(option.family)):
            assert option.change is not None
            setting = option.change(setting)
        return predict(setting, " and ".join(option.name for option in options) or "the step as it is").peak_bytes

    left_out: dict[str, str] = {}
    chosen: dict[str, _Option] = {}
    first_bytes = peak_bytes = peak_of([])
    for option, method in usable:
        if peak_bytes <= budget_bytes:
            saves = method.peak_bytes is not None and method.peak_bytes < first_bytes
            left_out[option.name] = "not needed" if saves else "saves nothing"
            continue
        candidate = {**chosen, option.family: option}
        if (found := peak_of(candidate.values())) < peak_bytes:
            if option.family in chosen:
                left_out[chosen[option.family].name] = f"{option.name} saves more"
            chosen, peak_bytes = candidate, found
        else:
            left_out[option.name] = "saves nothing beside the others"
    limit = max(peak_bytes, budget_bytes)  # the budget, or the lowest peak found if none fits
    together = list(chosen.values())
    for option in reversed(together):
        others = [other for other in together if other is not option]
        if peak_of(others) <= limit:
            together = others
            left_out[option.name] = "not needed"
    combination = {option.name: peak_of(together[: index + 1]) for index, option in enumerate(together)}
    return combination, left_out
