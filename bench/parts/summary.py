"""The last lines of a benchmark: what naive and the preferred variant of each op take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from .comparison import Row
from .report import format_count, format_ms, format_ratio, prose, table

_COLUMNS = ("Op", "Variant", "Temporary", "Time", "Less memory", "Speed")


def print_summary(console: Console, groups: Sequence[Sequence[Row]]) -> None:
    """Two lines for each group of rows, which are those of one op, pass and size."""
    meaning = (
        "Summary: naive, and of the others that ran the one that effops prefers: for its memory first, so it may be "
        "slower than naive. Ratios are naive's figure by its own; below 1x, naive takes less."
    )
    console.print(f"\n{prose(meaning, console.width)}")
    console.print(table(console, _COLUMNS, [line for rows in groups for line in _lines(rows, groups)]))


def _lines(rows: Sequence[Row], groups: Sequence[Sequence[Row]]) -> Iterator[tuple[str, ...]]:
    """The line of naive and that of the preferred variant. Rows are in order of preference."""
    naive = next((row for row in rows if row.variant == "naive"), None)
    preferred = next((row for row in rows if row.status == "ok" and not row.is_peer and row is not naive), None)
    first, second = rows[0].op, _detail(rows[0], groups)  # of the lines
    if naive is not None:
        yield first, *_figures(naive), "", ""
        first, second = second, ""
    if preferred is not None:
        yield first, *_figures(preferred), format_ratio(_times_less(naive, preferred)), format_ratio(preferred.speedup)
        first = second
    if first:
        yield first, "", "", "", "", ""


def _detail(row: Row, groups: Sequence[Sequence[Row]]) -> str:
    """The pass and the sizes, as far as groups of the same op differ in them."""
    same = [group[0] for group in groups if group[0].op == row.op]
    passes = [row.pass_name] if len({one.pass_name for one in same}) > 1 else []
    sizes = [f"{key}={size}" for key, size in row.size.items() if len({one.size[key] for one in same}) > 1]
    return "  " + ", ".join(passes + sizes) if passes or sizes else ""


def _figures(row: Row) -> tuple[str, str, str]:
    if row.status != "ok":
        return row.variant, row.status, row.status
    return row.variant, format_count(row.temporary_bytes), format_ms(row.time_ms)


def _times_less(naive: Row | None, preferred: Row) -> float | None:
    if naive is None or naive.temporary_bytes is None or preferred.temporary_bytes is None:
        return None
    return naive.temporary_bytes / max(1, preferred.temporary_bytes)
