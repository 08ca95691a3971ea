"""The largest batch whose step fits a budget: predicted, or found by running."""

import functools
import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from effops.measure import available_bytes
from effops.memory.anatomy import Anatomy, anatomy
from effops.memory.checked import check_count, check_device, check_flags, check_progress
from effops.memory.measured import measured_timeline
from effops.memory.workload import Step, Workload, check_step
from effops.prediction.cuda_forms import CONTEXT_BYTES
from effops.prediction.inside import caution
from effops.text import aligned, did_you_mean, format_bytes, format_distinct_bytes, parse_bytes, tells_wrong_arguments

# While fewer sizes were tried, the smallest among them, the line through two peaks gives the next one. These are more
# than a nearly affine peak needs. The sizes after them halve a gap.
LINE_TRIALS = 12
PROBED_STEPS = 3  # steps that run to find the peak of a batch size
LARGEST_BATCH = 2**40  # where a search ends: the peak does not grow with the batch
FEW_BYTES = 1024  # a budget that is a smaller number probably lacks its unit
MEANINGS = ("tensors", "device")
MODES = ("predict", "probe")


class BudgetTooSmallError(ValueError):
    """Not even the smallest batch fits the budget."""


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch size that fits.

    Attributes:
        batch_size: of each forward pass
        predicted_peak_bytes: of a step with that batch, counted as `budget_means` says; None if it was found by running
        next_peak_bytes: the peak of the next larger batch that was allowed, which does not fit, as predicted or
            measured; None if memory ran out
        budget_bytes, budget_means: as given
        tried: what was predicted or measured of each batch size that was looked at; None where memory ran out
        unknown: operators that may allocate more inside than is predicted, so that the batch may be too large
    """

    batch_size: int
    predicted_peak_bytes: int | None
    next_peak_bytes: int | None
    budget_bytes: int | None
    budget_means: str
    tried: dict[int, int | None] = field(repr=False)
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        limit = "" if self.budget_bytes is None else f" of {format_bytes(self.budget_bytes)} ({self.budget_means})"
        too_large = (size for size in self.tried if size > self.batch_size)
        sizes = {"largest that fits": self.batch_size, "next that is allowed, too large": min(too_large, default=None)}
        shown = {name: size for name, size in sizes.items() if size is not None}
        texts = iter(_distinct((self.tried[size] for size in shown.values()), self.budget_bytes))
        rows = [
            (name, f"{size:,}", "out of memory" if self.tried[size] is None else next(texts))
            for name, size in shown.items()
        ]
        table = aligned([("", "batch size", "peak"), *rows])
        head = f"largest batch within the budget{limit}: {self.batch_size:,}"
        return "\n\n".join(part for part in (head, table, caution(self.unknown)) if part)


def _distinct(peaks: Iterable[int | None], budget_bytes: int | None) -> list[str]:
    """Texts of peaks, and then of the budget, that differ where the bytes do; None has no text."""
    counts = [nbytes for nbytes in (*peaks, budget_bytes) if nbytes is not None]
    return format_distinct_bytes(*counts)


@tells_wrong_arguments
def max_batch_size(
    workload: Workload,
    budget: str | float | None = None,
    *,
    budget_means: str | None = None,
    device: str = "cpu",
    mode: str = "predict",
    multiple_of: int = 1,
    power_of_two: bool = False,
    probe: bool = True,
    context_bytes: str | float = CONTEXT_BYTES,
    progress: Callable[[str], None] = lambda text: None,
) -> MaxBatch:
    """The largest batch size of a forward pass whose step fits a budget.

    Args:
        workload: what a step runs
        budget: bytes, as a number such as 6e9, or as a text such as "6G" or "6 GiB". It may be None only to "probe" a
            CUDA device: its memory is the limit then
        budget_means: "tensors", what tensors take; or "device", what a CUDA device holds, its overheads included: the
            default for CUDA. What its allocator keeps may jump from one size to the next, by gigabytes. Then sizes
            above the one that is found may fit too, and some below not: `anatomy(..).device_bytes` tells
        device: "cpu" or "cuda", the device to predict for; probing runs on PyTorch's default device
        mode: "predict" runs no step. The peak is nearly affine in the batch size, so that a few predictions suffice.
            "probe" runs steps on PyTorch's default device. It doubles the size until memory runs out or the budget is
            exceeded, and then halves the gap
        multiple_of, power_of_two: only such sizes are tried
        probe: as in `anatomy`
        context_bytes: what a CUDA device holds before there are tensors, as a number or as a text such as "600 MiB"
        progress: is told of each batch size before it is tried

    Raises:
        BudgetTooSmallError: the smallest batch exceeds the budget; a ValueError that tells what takes most
        ValueError: an argument is out of range

    Example:
        >>> workload = effops.memory.Workload(lambda: torch.nn.Linear(256, 1), lambda size: torch.randn(size, 256))
        >>> effops.memory.max_batch_size(workload, "1 MiB").batch_size
        1019
    """
    check_step("max_batch_size", workload)
    budget_means = budget_means or _meaning_on(device if mode == "predict" else torch.get_default_device().type)
    _check_choices(budget_means=(budget_means, MEANINGS), mode=(mode, MODES))
    check_device("max_batch_size", device)
    check_flags("max_batch_size", power_of_two=power_of_two, probe=probe)
    check_count("max_batch_size", "multiple_of", multiple_of, "leave it out for any batch size")
    check_progress("max_batch_size", progress)
    if power_of_two and multiple_of & (multiple_of - 1):
        raise ValueError(
            f"max_batch_size: `multiple_of` must be a power of two beside `power_of_two`; got {multiple_of}; give "
            f"{2 ** (multiple_of.bit_length() - 1)}, or leave one out"
        )
    budget_bytes = None if budget is None else parse_bytes(budget, "max_batch_size: `budget`")
    cuda_context_bytes, unknown = parse_bytes(context_bytes, "max_batch_size: `context_bytes`"), set[str]()
    anatomy_of = functools.partial(anatomy, workload, device=device, probe=probe, context_bytes=cuda_context_bytes)
    if mode == "predict":
        peak_of = _predictor(anatomy_of, budget_bytes, budget_means, device, unknown)
    else:
        peak_of = _prober(workload, budget_bytes, budget_means, cuda_context_bytes)

    def told_peak_of(size: int) -> int | None:
        progress(f"{'predicting' if mode == 'predict' else 'running'} a step of batch size {size:,}")
        return peak_of(size)

    search = _Search(told_peak_of, _Sizes(multiple_of, power_of_two), budget_bytes)
    if not search.try_index(0):
        least = search.sizes.at(0)
        parts = _parts_of(anatomy_of(least), budget_means) if mode == "predict" else {}
        text = _too_small_text(least, search.tried[least], budget_bytes, parts, not isinstance(budget, str))
        raise BudgetTooSmallError(text)
    largest, following = search.run(LINE_TRIALS if mode == "predict" else 0)
    return MaxBatch(
        largest,
        search.tried[largest] if mode == "predict" else None,
        search.tried[following],
        budget_bytes,
        budget_means,
        search.tried,
        unknown=tuple(sorted(unknown)),
    )


def _meaning_on(device: str) -> str:
    """What a budget means on a device, if that is not said."""
    return "device" if device == "cuda" else "tensors"


def _parts_of(found: Anatomy, budget_means: str) -> Mapping[str, int]:
    """What takes a budget at the peak of a step."""
    overheads = found.overheads if budget_means == "device" else {}
    return {**found.instants["peak"], **overheads}


def _check_choices(**choices: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, expected) in choices.items():
        if value not in expected:
            near = did_you_mean(value, expected)
            raise ValueError(
                f'max_batch_size: `{name}` must be "{expected[0]}" or "{expected[1]}"; got {value!r}{near}'
            )


@dataclass(frozen=True)
class _Sizes:
    """The batch sizes that are allowed, by index: the multiples of `unit`, or with `doubled` 1, 2, 4, .. times it."""

    unit: int
    doubled: bool

    def at(self, index: int) -> int:
        return int(self.unit * (2**index if self.doubled else index + 1))

    def index_up_to(self, size: float) -> int:
        """The index of the largest batch size up to a given one."""
        units = int(size // self.unit)
        return (units.bit_length() if self.doubled else units) - 1


@dataclass
class _Search:
    """Looks for the largest batch size that fits a budget.

    Attributes:
        peak_of: predicts or measures the peak of a batch size; None where memory runs out
        sizes: the batch sizes that are allowed, by index
        budget_bytes: None if memory itself is the limit
        tried: the peaks found so far, by batch size
    """

    peak_of: Callable[[int], int | None]
    sizes: _Sizes
    budget_bytes: int | None
    tried: dict[int, int | None] = field(default_factory=dict)

    def try_index(self, index: int) -> bool:
        """Find the peak of a batch size, and tell whether it fits."""
        size = self.sizes.at(index)
        nbytes = self.peak_of(size)
        self.tried[size] = nbytes
        return nbytes is not None and (self.budget_bytes is None or nbytes <= self.budget_bytes)

    def run(self, line_trials: int) -> tuple[int, int]:
        """The largest size that fits, and the next one, which does not; the smallest one was tried and fits.

        Up to `line_trials` sizes, the smallest one among them, are where the line through the last two peaks reaches
        the budget. Then sizes are doubled until one does not fit, and the gap is halved. All this takes the peak to
        rise with the size; that of a device need not, since its allocator keeps now more and now less.
        """
        low, high = 0, None  # indices of the largest size that fits, and of the smallest that does not
        while high is None or high - low > 1:
            size = self.sizes.at(low)
            if size >= LARGEST_BATCH:
                raise ValueError(
                    "max_batch_size: the peak must grow with the batch size; got "
                    f"{format_bytes(self.tried[size] or 0)} for a batch of {size:,}; make the first dimension "
                    "of what `batch` returns the argument"
                )
            if len(self.tried) < line_trials:
                assert self.budget_bytes is not None
                crossing = _crossing(self.tried, self.budget_bytes)
                # If a size from LARGEST_BATCH on fits, the search ends in the error above. An allowed size of at most
                # twice as much is one, if powers of two alone are allowed too.
                index = max(low + 1, self.sizes.index_up_to(min(crossing, 2 * LARGEST_BATCH)))
            else:
                index = self.sizes.index_up_to(2 * size) if high is None else (low + high) // 2
            index = index if high is None else min(index, high - 1)
            if self.try_index(index):
                low = index
            else:
                high = index
        return self.sizes.at(low), self.sizes.at(high)


def _crossing(tried: Mapping[int, int | None], budget_bytes: int) -> float:
    """Where the line through the last two peaks reaches the budget; twice the largest size tried if it is level."""
    known = [(size, nbytes) for size, nbytes in tried.items() if nbytes is not None]
    size, nbytes = known[-1]
    other_size, other_bytes = known[-2] if len(known) > 1 else (size, nbytes)
    if nbytes == other_bytes:
        return 2 * max(tried)
    return size + (budget_bytes - nbytes) * (other_size - size) / (other_bytes - nbytes)


def _too_small_text(
    size: int, nbytes: int | None, budget_bytes: int | None, parts: Mapping[str, int], is_number: bool
) -> str:
    """What the error says of a budget that does not hold `nbytes`, the peak of the smallest batch."""
    shown = iter(_distinct([nbytes], budget_bytes))
    took = "more than the device has" if nbytes is None else next(shown)
    given = "none" if budget_bytes is None else next(shown)
    most = ", ".join(f"{name} {format_bytes(parts[name])}" for name in sorted(parts, key=lambda name: -parts[name])[:3])
    remedy = "raise it, or see what `advise` says of the workload"
    if is_number and budget_bytes is not None and budget_bytes < FEW_BYTES:
        remedy = f'a number alone is bytes: give a unit too, as "{budget_bytes}G"'
    return (
        f"max_batch_size: `budget` must hold a step of batch size {size}, which takes {took}"
        f"{f' (at its peak {most})' if most else ''}; got {given}; {remedy}"
    )


def _predictor(
    anatomy_of: Callable[[int], Anatomy],
    budget_bytes: int | None,
    budget_means: str,
    device: str,
    unknown: set[str],
) -> Callable[[int], int | None]:
    """A function that predicts the peak of a batch size, and adds operators of unknown workspace to `unknown`."""
    if budget_bytes is None:
        raise ValueError('max_batch_size: a prediction needs a `budget`, such as "6 GiB"; got None')
    if budget_means == "device" and device != "cuda":
        raise ValueError(
            'max_batch_size: `budget_means="device"` counts what a CUDA device holds; got '
            f'device={device!r}; give device="cuda"'
        )

    def peak_bytes(size: int) -> int:
        try:
            found = anatomy_of(size)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                "max_batch_size: batch normalisation must have more than one value a channel; got a batch of size "
                f"{size}; give multiple_of=2"
            ) from error
        unknown.update(found.unknown)
        return found.device_bytes if budget_means == "device" else found.peak_bytes

    return peak_bytes


def _prober(
    workload: Workload, budget_bytes: int | None, budget_means: str, context_bytes: int
) -> Callable[[int], int | None]:
    """A function that runs steps of a batch size and tells their peak, or None where memory ran out."""
    device = torch.get_default_device()
    if device.type == "cuda":
        return lambda size: _cuda_peak(workload, size, context_bytes if budget_means == "device" else None)
    available = available_bytes(device)
    # A probe doubles the batch, so that it may run a step of about twice the budget. The rest is a margin.
    if budget_bytes is None or budget_means != "tensors" or budget_bytes > available // 3:
        given = "none" if budget_bytes is None else format_bytes(budget_bytes)
        raise ValueError(
            'max_batch_size: mode="probe" on a CPU needs a `budget` of tensors of at most a third of the '
            f"{format_bytes(available)} that are free, for it runs what exceeds it; got {given} "
            f'({budget_means}); give a smaller one, or set a CUDA device by torch.set_default_device("cuda")'
        )
    return lambda size: measured_timeline(workload, size).peak_bytes


def _cuda_peak(workload: Workload, size: int, context_bytes: int | None) -> int | None:
    """The peak of `PROBED_STEPS` steps, or None where memory runs out.

    It is in bytes of tensors, or with `context_bytes` of all that the device holds.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        step = Step(workload, size)
        for _ in range(PROBED_STEPS):
            step.run()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return None
    finally:
        step = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()
    if context_bytes is None:
        return torch.cuda.max_memory_allocated()
    return torch.cuda.max_memory_reserved() + context_bytes
