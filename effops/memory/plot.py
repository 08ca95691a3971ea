"""Pictures of memory: over a step, and against the sizes of a model."""

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from effops.memory.anatomy import Anatomy
from effops.prediction.timeline import Timeline
from effops.text import did_you_mean, how_to_install

MIB = 2**20
LEAST_LABELLED = 0.04  # of the picture's width: shorter phases have no label


def plot_anatomy(anatomy: Anatomy, path: str | Path) -> None:
    """Draw what each category takes over the ticks of a step, one upon the other, with its phases and its peak.

    A tick is an allocation or a release, so that the picture tells order and not time. The ending of `path` chooses
    the format, such as .png or .svg.

    Raises:
        ImportError: matplotlib is not installed
        TypeError: `anatomy` is none, or `path` is no path
        ValueError: there is no format for the ending of `path`
        FileNotFoundError: there is no such folder

    Example:
        >>> workload = effops.memory.Workload(lambda: torch.nn.Linear(256, 1), lambda size: torch.randn(size, 256))
        >>> effops.memory.plot_anatomy(effops.memory.anatomy(workload, 32), "step.png")
    """
    if not isinstance(anatomy, Anatomy):
        got = type(anatomy).__name__
        raise TypeError(f"plot_anatomy: `anatomy` must be an Anatomy; got {got}; give what `anatomy(...)` returns")
    figure = _figure("plot_anatomy", (10, 5), path)
    axes = figure.add_subplot()
    timeline = anatomy.timeline
    ticks = range(timeline.start, timeline.end + 1)
    curves = {category: [nbytes / MIB for nbytes in curve] for category, curve in timeline.curves.items() if any(curve)}
    axes.stackplot(ticks, curves.values(), labels=curves, step="post")
    axes.plot(timeline.peak_tick, timeline.peak_bytes / MIB, "kv", label="peak")
    top = axes.get_xaxis_transform()
    for phase, begin, end in _phases(timeline):
        axes.axvline(begin, color="black", linewidth=0.5, alpha=0.5)
        if end - begin > LEAST_LABELLED * len(ticks):
            axes.text((begin + end) / 2, 1.01, phase, transform=top, ha="center", va="bottom", fontsize="small")
    axes.set(
        xlabel="allocations and releases",
        ylabel="tensors, MiB",
        xlim=(ticks[0], ticks[-1]),
        title=f"a step of batch size {anatomy.batch_size}: {anatomy.peak_bytes / MIB:,.1f} MiB at its peak\n",
    )
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)


def plot_sweep(swept: Mapping[str, Mapping[Any, int]], quantity: str, in_mib: bool, path: str | Path) -> None:
    """Draw a quantity, such as the largest batch, against each axis that was swept; see `Sweep.plot`."""
    figure = _figure("Sweep.plot", (3 * len(swept) + 1, 3.5), path)
    unit = MIB if in_mib else 1
    panels = figure.subplots(1, len(swept), sharey=True, squeeze=False)[0]
    for panel, (name, results) in zip(panels, swept.items()):
        panel.plot([str(value) for value in results], [result / unit for result in results.values()], "o-")
        panel.set_xlabel(name)
        panel.margins(x=0.15)
        panel.tick_params("x", rotation=20 if any(isinstance(value, str) for value in results) else 0)
        panel.grid(alpha=0.3)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel(f"{quantity}, MiB" if in_mib else quantity)
    figure.savefig(path)


def _phases(timeline: Timeline) -> Iterator[tuple[str, int, int]]:
    """The phases of the last step, with the ticks at which each begins and ends; equal phases in a row are one."""
    begun = [(phase, max(begin, timeline.start)) for phase, begin in timeline.phases if begin >= timeline.start]
    begins = [(phase, next(group)[1]) for phase, group in itertools.groupby(begun, key=lambda one: one[0])]
    for (phase, begin), end in zip(begins, [*(begin for _, begin in begins[1:]), timeline.end]):
        yield phase, begin, end


def check_picture(caller: str, path: str | Path) -> None:
    """Raise if no picture of that format can be drawn.

    Raises:
        ImportError: matplotlib is not installed
        TypeError: `path` is no path
        ValueError: there is no format for the ending of `path`
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f'{caller}: `path` must be a path; got {type(path).__name__} {path!r}; give one, as "step.png"')
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{caller}: needs the package matplotlib, which cannot be imported; {how_to_install('bench')}"
        ) from error
    known = Figure().canvas.get_supported_filetypes()
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending and ending not in known:  # without an ending it is a .png
        raise ValueError(
            f"{caller}: expected a file with one of the endings {', '.join(sorted(known))}; got {str(path)!r}"
            + did_you_mean(ending, known)
        )


def _figure(caller: str, size: tuple[float, float], path: str | Path) -> Any:
    check_picture(caller, path)
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{caller}: `path` must be in a folder that exists; got {str(path)!r}; make {str(folder)!r} first"
        )
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")
