"""Readable tables and sizes."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Lines of cells, the first `left` columns to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justified = (
        [cell.ljust(width) for cell, width in zip(row[:left], widths)]
        + [cell.rjust(width) for cell, width in zip(row[left:], widths[left:])]
        for row in rows
    )
    return "\n".join("  ".join(cells).rstrip() for cells in justified)


def format_bytes(count: float) -> str:
    """A number of bytes for people: 33554432 -> '32.0 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        text = f"{count:.{0 if unit == 'B' else 1}f}"
        if abs(float(text)) < 1024:
            return f"{text} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
