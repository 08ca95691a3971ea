"""The benchmark's tables, its JSON file and its page of HTML."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from effops.commands.html_report import html_report
from effops.dispatch.requirements import library_description
from effops.measure import Profile, ProfileRow, device_model
from effops.text import counted, format_bytes

from .comparison import Found, Row
from .expected import Workload

ROOT = Path(__file__).resolve().parents[2]
LEAST_WIDTH = 80  # what every table fits into
PROSE_WIDTH = 100  # the longest line that is read with ease
ANY_WIDTH = 1000

ROW_KEYS: Mapping[str, Callable[[Row], float | None]] = {
    "time": lambda row: row.time_ms,
    "min": lambda row: row.time_ms_min,
    "spread": lambda row: row.time_ms_iqr,
    "speedup": lambda row: row.speedup,
    "temporary": lambda row: row.temporary_bytes,
    "predicted": lambda row: row.predicted_temporary_bytes,
    "output": lambda row: row.output_bytes,
    "saved": lambda row: row.saved_bytes,
    "peak": lambda row: row.peak_bytes,
    "gbps": lambda row: row.gbps,
    "share": lambda row: row.copy_share,
    "floor": lambda row: row.floor_ratio,
    "error": lambda row: row.error_ratio,
}
PROFILE_KEYS: Mapping[str, Callable[[ProfileRow], float]] = {
    "self-mem": lambda row: row.self_mem_bytes,
    "cuda-avg": lambda row: row.device_time_avg_us,
    "cpu-percent": lambda row: row.cpu_total_percent,
    "cpu-total": lambda row: row.cpu_total_us,
    "cpu-avg": lambda row: row.cpu_time_avg_us,
    "self-cuda": lambda row: row.self_device_us,
    "self-cuda-percent": lambda row: row.self_device_percent,
}
SORT_KEYS = (*ROW_KEYS, *PROFILE_KEYS)


def plot_memory(rows: Sequence[Row], swept: str, file: Path) -> None:
    """Draw the temporary bytes of every variant against the size that was swept, and what is predicted of the rest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, variant in enumerate(dict.fromkeys(row.variant for row in rows)):
        own = [row for row in rows if row.variant == variant]
        for style, label, points in (
            ("o-", variant, [(row.size[swept], row.temporary_bytes) for row in own]),
            (
                "x:",
                f"{variant}, predicted",
                [(row.size[swept], row.predicted_temporary_bytes) for row in own if row.temporary_bytes is None],
            ),
        ):
            known = [(size, count / 2**20) for size, count in points if count]
            if known:
                axes.plot(*zip(*known), style, color=f"C{number}", label=label)
    first = rows[0]
    others = ", ".join(f"{key}={value}" for key, value in {**first.size, **first.options}.items() if key != swept)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel=swept,
        ylabel="temporary memory, MiB",
        title=f"{first.op}, {first.pass_name}, {first.dtype}, {others}",
    )
    axes.grid(which="major", alpha=0.3)
    axes.legend()
    figure.savefig(file)


def header(device: torch.device, copy_gbps: float | None) -> dict[str, Any]:
    """What the figures depend on besides the code: the machine, the versions, the commit, the date."""
    return {
        "device": device_name(device),
        "device_type": device.type,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cpp": library_description() if device.type == "cpu" else None,
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "copy_gbps": None if copy_gbps is None else round(copy_gbps, 2),
        "load_average": round(os.getloadavg()[0], 2),
    }


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor with the number of threads in use."""
    model = device_model(device)
    return model if device.type == "cuda" else f"{model}, {counted(torch.get_num_threads(), 'threads')}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with "-dirty" after it if tracked files differ; None outside of a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def json_row(row: Any) -> dict[str, Any]:
    """The row as written to the file; an infinite error, which JSON has no number for, becomes null."""
    values = {"pass" if key == "pass_name" else key: value for key, value in asdict(row).items()}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


def write_json(path: Path, head: Mapping[str, Any], rows: Sequence[Any]) -> None:
    """Write the header and a dataclass for each row."""
    path.write_text(_as_json(head, rows))


def write_html(path: Path, head: Mapping[str, Any], rows: Sequence[Any]) -> None:
    """Write the same as a page for a browser."""
    content = json.loads(_as_json(head, rows))
    path.write_text(html_report(content["header"], content["rows"]), encoding="utf-8")


def _as_json(head: Mapping[str, Any], rows: Sequence[Any]) -> str:
    """The text of both. Files of the repository are named by their place in it."""
    content = {"header": dict(head), "rows": [json_row(row) for row in rows]}
    return json.dumps(content, indent=1, allow_nan=False).replace(f"{ROOT}/", "") + "\n"


def heading(head: Mapping[str, Any], width: int) -> str:
    """The header as it is printed."""
    known = {**head, "commit": (head["commit"] or "unknown")[:12]}
    return prose(", ".join(f"{key}: {value}" for key, value in known.items()), width)


def prose(text: str, width: int) -> str:
    """A text in lines that fit a console of that width."""
    return textwrap.fill(text, min(width, PROSE_WIDTH), break_long_words=False, break_on_hyphens=False)


def title(workload: Workload) -> str:
    """What is run: 'normal_log_prob, forward, float32, N=4096, M=4096, D=64'."""
    sizes = (f"{key}={value}" for key, value in {**workload.sizes, **workload.options}.items())
    return ", ".join((workload.op.name, workload.pass_name, str(workload.dtype).removeprefix("torch."), *sizes))


def print_tables(console: Console, found: Found, sort_by: str = "", *, wide: bool = False) -> None:
    """The profiler's table if there is one, the table of every row, and below it what needs more words."""
    place = _order(found.rows, found.profile, sort_by)
    rows = sorted(found.rows, key=lambda row: place[row.variant])
    if found.profile is not None:
        _print_profile(console, found, found.profile, sort_by, place)
    console.print(table(console, _COLUMNS, [_cells(row) for row in rows]))
    if wide:
        console.print(table(console, _TIME_COLUMNS, [_time_cells(row) for row in rows]))
        console.print(table(console, _MEMORY_COLUMNS, [_memory_cells(row) for row in rows]))
    if found.checked_share is not None and found.checked_share < 1:
        share = f"Error: of {found.checked_share:.1%} of the results, evenly spread; --all checks all of them."
        console.print(prose(share, console.width))
    for note in (note for row in rows for note in _notes(row)):
        console.print(prose(note, console.width))


def _print_profile(console: Console, found: Found, profile: Profile, sort_by: str, place: Mapping[str, int]) -> None:
    """The profiler's table, whether results are close to each other, and the operators by stack if there are any."""
    rows = {row.variant: row for row in found.rows}
    others = list(dict.fromkeys(name for row in found.rows for name in row.allclose or {}))
    profiled = sorted(profile.rows, key=lambda row: place[row.name])
    console.print(
        table(
            console,
            (*profile.columns, "allclose"),
            [(*profile.cells(row), _closeness(rows[row.name], others)) for row in profiled],
        )
    )
    closeness = (
        f"allclose: to {' / '.join(others)}, every element within twice its error budget, which is "
        f"{found.tolerance:.2g} at most, and rounding to the result's dtype."
    )
    console.print(f"{prose(profile.note, console.width)}\n{prose(closeness, console.width)}")
    for name, operators in profile.operators.items():
        ranked = sorted(operators, key=PROFILE_KEYS.get(sort_by, PROFILE_KEYS["cpu-total"]), reverse=True)
        cells = [(*profile.cells(row), "\n".join(row.stack)) for row in ranked]
        console.print(f"\ninside {name}:")
        console.print(table(console, (*profile.columns, "Stack"), cells))


def _order(rows: Sequence[Row], profile: Profile | None, sort_by: str) -> dict[str, int]:
    """The place of each name: by ascending value of the key, without a value last; as given if there is no key."""
    values: dict[str, float | None] = dict.fromkeys(row.variant for row in rows)
    if sort_by in ROW_KEYS:
        values |= {row.variant: ROW_KEYS[sort_by](row) for row in rows}
    elif sort_by in PROFILE_KEYS and profile is not None:
        values |= {row.name: PROFILE_KEYS[sort_by](row) for row in profile.rows}

    def key(name: str) -> tuple[bool, float]:
        value = values[name]
        return value is None, value or 0.0

    return {name: place for place, name in enumerate(sorted(values, key=key))}


_TEXT_COLUMNS = ("Name", "Op", "Variant", "Status", "Stack")


def table(console: Console, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A table that folds no words. If the console is too narrow, headers take two lines, and empty columns go."""
    made = _table(columns, lines)
    if Measurement.get(console, console.options.update(max_width=ANY_WIDTH), made).maximum <= console.width:
        return made
    kept = [number for number in range(len(columns)) if any(line[number] not in ("", "-") for line in lines)]
    headers = ["\n".join(columns[number].rsplit(" ", 1)) for number in kept]
    return _table(headers, [[line[number] for number in kept] for line in lines])


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        folds = column == "Stack"
        justify: Literal["left", "right"] = "left" if column in _TEXT_COLUMNS else "right"
        made.add_column(column, justify=justify, no_wrap=not folds, overflow="fold" if folds else "ignore")
    for cells in lines:
        made.add_row(*cells)
    return made


_COLUMNS = ("Name", "Time", "Speed-up", "Temporary", "Error", "Status")
_TIME_COLUMNS = ("Name", "Least time", "Spread", "Runs", "GB/s", "Of copy", "Of floor", "allclose")
_MEMORY_COLUMNS = ("Name", "Temporary predicted", "Output", "Saved", "Peak")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.variant,
        format_ms(row.time_ms),
        format_ratio(row.speedup),
        format_count(row.temporary_bytes) + ("*" if _differs(row) else ""),
        _text("{:.2g}", row.error_ratio),
        "inexact" if _inexact(row) else row.status,
    )


def _time_cells(row: Row) -> tuple[str, ...]:
    return (
        row.variant,
        format_ms(row.time_ms_min),
        format_ms(row.time_ms_iqr),
        _text("{}", row.repeats),
        _text("{:.1f}", row.gbps),
        _text("{:.1%}", row.copy_share),
        _text("{:.2f}", row.floor_ratio),
        _closeness(row, list(row.allclose or {})),
    )


def _memory_cells(row: Row) -> tuple[str, ...]:
    counts = row.predicted_temporary_bytes, row.output_bytes, row.saved_bytes, row.peak_bytes
    return (row.variant, *map(format_count, counts))


def _notes(row: Row) -> Iterator[str]:
    """What a table has no room for."""
    if row.is_peer:
        yield f"{row.variant}: a peer, which is another implementation and no variant of effops"
    if row.reason:
        yield f"{row.variant} {row.status}: {row.reason}"
    if _inexact(row):
        yield f"{row.variant} inexact: the error is {row.error_ratio:.3g} times the budget of effops's variants"
    if _differs(row):
        yield f"* {row.variant}: {format_count(row.predicted_temporary_bytes)} of temporary memory were predicted"


def _inexact(row: Row) -> bool:
    """Whether a peer ran and is not as exact as effops must be."""
    return row.status == "ok" and row.is_peer and row.error_ratio is not None and not row.error_ratio <= 1


def _differs(row: Row) -> bool:
    """Whether the measured temporary memory is not the predicted one, as far as it is printed."""
    counts = row.temporary_bytes, row.predicted_temporary_bytes
    return None not in counts and format_count(counts[0]) != format_count(counts[1])


def _closeness(row: Row, others: Sequence[str]) -> str:
    close = row.allclose or {}
    return "/".join({True: "yes", False: "no", None: "-"}[close.get(name)] for name in others) or "-"


def _text(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)


def format_ratio(ratio: float | None) -> str:
    """A ratio in two digits or more: '0.87x', '3.4x', '41x', '>9999x'."""
    if ratio is None:
        return "-"
    if ratio >= 10_000:
        return ">9999x"
    return f"{ratio:.{0 if ratio >= 10 else 1 if ratio >= 1 else 2}f}x"


def format_ms(milliseconds: float | None) -> str:
    """A time in three digits: '2.27 s', '56.1 ms'."""
    if milliseconds is None:
        return "-"
    value, unit = next(
        ((milliseconds / size, unit) for unit, size in (("s", 1e3), ("ms", 1.0)) if milliseconds >= size),
        (milliseconds * 1e3, "us"),
    )
    return f"{value:.{max(0, 2 - math.floor(math.log10(value))) if value else 0}f} {unit}"


def format_count(count: int | None) -> str:
    """Bytes, if they are known."""
    return "-" if count is None else format_bytes(count)
