"""The benchmark's tables and its JSON file."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from comparison import Row
from rich import box
from rich.console import Console
from rich.table import Table

from effops.measure import Profile, ProfileRow, device_model, format_us
from effops.text import format_bytes

TABLE_WIDTH = 132

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
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "copy_gbps": None if copy_gbps is None else round(copy_gbps, 2),
        "load_average": round(os.getloadavg()[0], 2),
    }


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor with the number of threads in use."""
    model = device_model(device)
    return model if device.type == "cuda" else f"{model}, {torch.get_num_threads()} threads"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with "-dirty" after it if tracked files differ; None outside of a checkout."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def json_row(row: Row) -> dict[str, Any]:
    """The row as written to the file; an infinite error, which JSON has no number for, becomes null."""
    values = {"pass" if key == "pass_name" else key: value for key, value in asdict(row).items()}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


def write_json(path: Path, head: Mapping[str, Any], rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"header": dict(head), "rows": [json_row(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def print_tables(console: Console, rows: Sequence[Row], profile: Profile, sort_by: str) -> None:
    """The profiler's table, the operators by stack if there are any, and the table of time, memory and error."""
    first = rows[0]
    sizes = ", ".join(f"{key}={value}" for key, value in {**first.size, **first.options}.items())
    console.print(f"\n{first.op}, {first.pass_name}, {first.dtype}, {sizes}", style="bold")
    place = _order(rows, profile, sort_by)
    if profile.rows:
        profiled = sorted(profile.rows, key=lambda row: place[row.name])
        console.print(_table(profile.columns, [profile.cells(row) for row in profiled]))
        for name, operators in profile.operators.items():
            ranked = sorted(operators, key=PROFILE_KEYS.get(sort_by, PROFILE_KEYS["cpu-total"]), reverse=True)
            cells = [(*profile.cells(row), "\n".join(row.stack)) for row in ranked]
            console.print(f"inside {name}:")
            console.print(_table((*profile.columns, "Stack"), cells))
        console.print(
            f"{profile.columns[1]} is net: what a range itself allocated less what it freed, without the operators "
            "called inside. It is not peak memory, and is negative where a range frees what they allocated."
        )
    console.print(_table(_COLUMNS, [_cells(row) for row in sorted(rows, key=lambda row: place[row.variant])]))


def _order(rows: Sequence[Row], profile: Profile, sort_by: str) -> dict[str, int]:
    """The place of each name: by ascending value of the key, without a value last; as given if there is no key."""
    values: dict[str, float | None] = dict.fromkeys(row.variant for row in rows)
    if sort_by in ROW_KEYS:
        values |= {row.variant: ROW_KEYS[sort_by](row) for row in rows}
    elif sort_by in PROFILE_KEYS:
        values |= {row.name: PROFILE_KEYS[sort_by](row) for row in profile.rows}

    def key(name: str) -> tuple[bool, float]:
        value = values[name]
        return value is None, value or 0.0

    return {name: place for place, name in enumerate(sorted(values, key=key))}


_TEXT_COLUMNS = ("Name", "Status", "Stack")


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A table whose last column alone is folded where a terminal is too narrow."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT_COLUMNS else "right", no_wrap=column != columns[-1])
    for cells in lines:
        table.add_row(*cells)
    return table


_COLUMNS = (
    "Name",
    "Time\nmedian",
    "Spread",
    "Speed-\nup",
    "Temporary\npredicted",
    "Temporary\nmeasured",
    "Output",
    "GB/s",
    "Of copy",
    "Error/\nbudget",
    "allclose\nnaive/f64",
    "Status",
)


def _cells(row: Row) -> tuple[str, ...]:
    close = row.allclose or {}
    float64 = next((value for key, value in close.items() if key.endswith("_float64")), None)
    return (
        row.variant,
        _ms(row.time_ms),
        _ms(row.time_ms_iqr),
        _text("{:.2f}x", row.speedup),
        _bytes(row.predicted_temporary_bytes),
        _bytes(row.temporary_bytes),
        _bytes(row.output_bytes),
        _text("{:.1f}", row.gbps),
        _text("{:.1%}", row.copy_share),
        _text("{:.3g}", row.error_ratio),
        f"{_yes_no(close.get('naive'))}/{_yes_no(float64)}",
        f"{row.status}: {row.reason}" if row.reason else row.status,
    )


def _text(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else format_us(1000 * milliseconds)


def _bytes(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _yes_no(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "-"}[value]
