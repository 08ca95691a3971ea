"""A benchmark's rows as one page of HTML, which asks no other host for anything. Start with `html_report`."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from effops.commands.charts import BYTES, MICROSECONDS, Point, bars, curves
from effops.text import counted, format_bytes, format_us

Row = Mapping[str, Any]
Cell = tuple[str, float | None]  # what is read, and the number by which it is sorted, if it is one
MOST_TIMES = 10_000  # a larger ratio tells no more
VERSIONS = ("torch", "triton", "python")
HEADLINE = ("device", "date", *VERSIONS)
LABELS = {"copy_gbps": "bandwidth of a copy, GB/s", "cpp": "C++ library"}


def html_report(environment: Mapping[str, Any], rows: Sequence[Row], title: str = "effops benchmark") -> str:
    """The page. Environment and rows are plain data, as "header" and "rows" of the file of `bench/run.py --json`.

    Rows of one workload are in order of preference. A key that a row lacks is one whose value is not known.
    """
    known = [key for key in HEADLINE if environment.get(key)]
    shown = [f"{key} {environment[key]}" if key in VERSIONS else str(environment[key]) for key in known]
    return Template(PAGE).substitute(
        style=STYLE,
        script=SCRIPT,
        title=escape(title),
        shown=escape(" · ".join(shown)),
        summary=escape(summary(rows)),
        table=_table_of_rows(rows),
        sweeps=_section("Against sizes", _sweeps(rows)),
        bars=_section("Memory and time of each op", [_bars(group) for group in _groups(rows, _workload)]),
        reasons=_reasons(rows),
        environment=_environment(environment),
    )


def summary(rows: Sequence[Row]) -> str:
    """One sentence on what the preferred variants take, beside naive: those that the benchmark's summary shows."""
    pairs = [pair for group in _groups(rows, _workload) if (pair := _naive_and_preferred(group))]
    if not pairs:
        return "No workload has both naive and another variant that ran."
    less = [naive["temporary_bytes"] / max(1, own["temporary_bytes"]) for naive, own in pairs]
    faster = [naive["time_ms"] / own["time_ms"] for naive, own in pairs]
    return (
        f"The variant that effops prefers takes less temporary memory than naive in {sum(ratio > 1 for ratio in less)} "
        f"of the {counted(len(pairs), 'workloads')} where both ran, and less time in {sum(one > 1 for one in faster)}; "
        f"in the median, naive takes {_times(less)} its memory and {_times(faster)} its time."
    )


def _naive_and_preferred(rows: Iterable[Row]) -> tuple[Row, Row] | None:
    ran = [row for row in rows if _status(row) == "ok" and not row.get("is_peer") and row.get("time_ms")]
    ran = [row for row in ran if row.get("temporary_bytes") is not None]
    naive = [row for row in ran if row.get("variant") == "naive"]
    others = [row for row in ran if row.get("variant") != "naive"]
    return (naive[0], others[0]) if naive and others else None


def _times(ratios: Sequence[float]) -> str:
    median = statistics.median(ratios)
    number = f"over {MOST_TIMES:,}" if median > MOST_TIMES else f"{median:,.{0 if median >= 10 else 2}f}"
    return f"{number} times"


def _groups(rows: Iterable[Row], key: Callable[[Row], object]) -> list[list[Row]]:
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _case(row: Row, without: str = "") -> str:
    """Sizes and options, behind the name of the case if it has one: 'M=128, T=512, D=128'."""
    sizes = {**(row.get("size") or {}), **(row.get("options") or {})}
    parts = [row["case"]] if row.get("case") else []
    return ", ".join(parts + [f"{key}={value}" for key, value in sizes.items() if key != without])


def _workload(row: Row, without: str = "") -> str:
    """What rows that can be compared have in common: 'normal_log_prob, forward, float32, N=4096, M=4096, D=64'."""
    known = (row.get(key) for key in ("op", "pass", "dtype"))
    return ", ".join([str(one) for one in known if one] + [text for text in [_case(row, without)] if text])


def _series(row: Row) -> str:
    """What rows of a sweep have in common."""
    return _workload({**row, "size": None})


def _status(row: Row) -> str:
    """A peer that ran may be less exact than effops must be."""
    status, error = str(row.get("status") or "ok"), row.get("error_ratio")
    return "inexact" if status == "ok" and row.get("is_peer") and error is not None and not error <= 1 else status


def _table_of_rows(rows: Sequence[Row]) -> str:
    on_cuda = any(str(row.get("device")).startswith("cuda") for row in rows)
    own_memory = "Self CUDA Mem" if on_cuda else "Self CPU Mem"
    columns: dict[str, Callable[[Row], Cell]] = {
        "Op": lambda row: (str(row.get("op", "")), None),
        "Case": lambda row: (_case(row), None),
        "Dtype": lambda row: (str(row.get("dtype", "")), None),
        "Pass": lambda row: (str(row.get("pass", "")), None),
        "Variant": lambda row: (_name(row), None),
        own_memory: lambda row: _number(row, "self_mem_bytes", format_bytes),
        "Temporary": lambda row: _number(row, "temporary_bytes", format_bytes),
        "Saved": lambda row: _number(row, "saved_bytes", format_bytes),
        "Peak": lambda row: _number(row, "peak_bytes", format_bytes),
        "Time": lambda row: _number(row, "time_ms", lambda time_ms: format_us(1000 * time_ms)),
        "Error / budget": lambda row: _number(row, "error_ratio", "{:.2g}".format),
        "Status": lambda row: (_status(row), None),
    }
    note = "Temporary memory does not count inputs and output. An error of 1 is the largest that rounding can explain."
    if any(row.get("self_mem_bytes") is not None for row in rows):
        note += f" {own_memory} is the profiler's: what a call itself allocated less what it freed, not its peak."
    else:
        del columns[own_memory]
    lines = [[column(row) for column in columns.values()] for row in rows]
    return _table(f"{counted(len(rows), 'rows')}. {note}", list(columns), lines, "sortable")


def _name(row: Row) -> str:
    return str(row.get("variant", "")) + (" (peer)" if row.get("is_peer") else "")


def _number(row: Row, key: str, text: Callable[[float], str]) -> Cell:
    value = row.get(key)
    return ("-", float("nan")) if value is None else (text(value), value)


def _cells(line: Sequence[Cell]) -> str:
    """The cells of a row, of which the first is its head."""
    (first, _), *others = line
    cells = [f'<th scope="row">{escape(first)}</th>']
    for text, value in others:
        kind = f' class="{text}"' if text in ("failed", "skipped", "inexact") else ""
        number = "" if value is None else f' class="number" data-value="{value}"'
        cells.append(f"<td{number or kind}>{escape(text)}</td>")
    return "".join(cells)


def _table(caption: str, columns: Sequence[str], lines: Sequence[Sequence[Cell]], kind: str = "prose") -> str:
    """A table in a box of its own, which scrolls, by the keyboard too."""
    numbers = [value is not None for _, value in lines[0]] if lines else [False] * len(columns)
    heads = "".join(
        f'<th scope="col"{" class=number" * is_number}>{escape(name)}</th>' for name, is_number in zip(columns, numbers)
    )
    body = "\n".join(f"<tr>{_cells(line)}</tr>" for line in lines)
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table class="{kind}">'
        f"<caption><span>{escape(caption)}</span></caption>\n"
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _points(rows: Iterable[Row], key: str, factor: float = 1, swept: str = "") -> list[Point]:
    """What is known of each row; of bytes that were not measured, the predicted ones."""
    points = []
    for row in rows:
        measured, predicted = row.get(key), row.get(f"predicted_{key}")
        value = predicted if measured is None else measured
        if value is not None:
            points.append(Point(_name(row), factor * value, measured is None, row["size"][swept] if swept else 0))
    return points


def _bars(rows: Sequence[Row]) -> str:
    memory = bars("Temporary memory, bytes", BYTES, _points(rows, "temporary_bytes"))
    time = bars("Time, median", MICROSECONDS, _points(rows, "time_ms", 1000))
    return _figure(_workload(rows[0]), memory + time)


def _sweeps(rows: Sequence[Row]) -> list[str]:
    """Curves of the rows that differ in one size alone."""
    figures = []
    for group in _groups(rows, _series):
        sizes = [row.get("size") or {} for row in group]
        swept = [key for key in sizes[0] if len({one.get(key) for one in sizes}) > 1]
        if len(swept) == 1 and all(one.get(swept[0]) for one in sizes):
            memory, time = _points(group, "temporary_bytes", 1, *swept), _points(group, "time_ms", 1000, *swept)
            memory_curves = curves("Temporary memory, bytes", BYTES, swept[0], memory)
            time_curves = curves("Time, median", MICROSECONDS, swept[0], time)
            figures.append(_figure(_workload(group[0], swept[0]), memory_curves + time_curves))
    return figures


def _figure(caption: str, content: str) -> str:
    return content and f"<figure><figcaption>{escape(caption)}</figcaption>{content}</figure>"


def _section(heading: str, figures: Sequence[str]) -> str:
    shown = "\n".join(filter(None, figures))
    return shown and f'<section><h2>{heading}</h2><div class="figures">\n{shown}\n</div></section>'


def _reasons(rows: Sequence[Row]) -> str:
    """Each variant that did not run, or was wrong, and why."""
    lines = [
        [(_name(row), None), (_status(row), None), (row["reason"], None), (_workload(row), None)]
        for row in rows
        if row.get("reason")
    ]
    if not lines:
        return ""
    caption = "Variants that did not run, or whose results are wrong"
    table = _table(caption, ("Variant", "Status", "Reason", "Workload"), lines)
    return f"<section><h2>What did not run</h2>{table}</section>"


def _environment(environment: Mapping[str, Any]) -> str:
    named = ((LABELS.get(key, key.replace("_", " ")), value) for key, value in environment.items())
    lines = [[(name, None), ("none" if value is None else str(value), None)] for name, value in named]
    return _table("What the figures depend on besides the code", ("What", "Value"), lines)


# The policy keeps the page from asking any host, whatever a text in it might be taken for.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<header><h1>$title</h1><p>$shown</p><p class="summary">$summary</p></header>
<section><h2>Rows</h2>$table</section>
$sweeps
$bars
$reasons
<section><h2>Environment</h2>$environment</section>
</main>
<script>$script</script>
</body>
</html>
"""
STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --back: #fff; --box: #f6f8fa; --line: #d0d7de;
 --bad: #b42318; --warn: #92600a; --c0: #0b62a4; --c1: #c2410c; --c2: #047857; --c3: #a21caf; --c4: #8a6100;
 --c5: #0e7490; --c6: #6d28d9; --c7: #57606a; }
@media print { .scroll { max-height: none; } }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --soft: #a3adb8; --back: #12161b; --box: #1b2128;
 --line: #38414b; --bad: #ff8a80; --warn: #e3b341; --c0: #6cb6ff; --c1: #f69d50; --c2: #57c785; --c3: #e58fd8;
 --c4: #e0c050; --c5: #5fd3e0; --c6: #b794f6; --c7: #adbac7; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1320px; margin: auto; padding: 16px; overflow-wrap: anywhere; }
h1 { margin: 8px 0; font-size: 24px; } h2 { margin: 32px 0 8px; font-size: 18px; }
header p { margin: 4px 0; color: var(--soft); } header .summary { color: var(--text); max-width: 80ch; }
.scroll { overflow: auto; max-height: 80vh; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 12px; overflow-wrap: normal; }
caption { text-align: left; padding: 8px; color: var(--soft); }
caption span { display: block; position: sticky; left: 8px; max-width: min(80ch, calc(100vw - 50px)); }
th, td { padding: 4px 5px; text-align: left; white-space: nowrap; border-top: 1px solid var(--line); }
th { font-weight: 600; } tbody th { font-weight: 400; } .prose td { white-space: normal; min-width: 12ch; }
.prose tbody th { width: 1%; } .sortable td:nth-child(5) { white-space: normal; }
.sortable td:nth-child(2) { white-space: normal; min-width: 20ch; }
thead th { background: var(--box); position: sticky; top: 0; white-space: normal; vertical-align: bottom; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.failed { color: var(--bad); font-weight: 600; } .inexact { color: var(--warn); } .skipped { color: var(--soft); }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--c0); }
th button::after { content: "\\2195"; color: var(--soft); }
[aria-sort=ascending] button::after { content: "\\2191"; } [aria-sort=descending] button::after { content: "\\2193"; }
.figures { display: grid; gap: 16px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); }
figure { margin: 0; padding: 12px; background: var(--box); border: 1px solid var(--line); border-radius: 6px; }
figcaption { font-weight: 600; margin-bottom: 8px; } figure > svg { display: block; width: 100%; margin-top: 8px; }
svg text { font-size: 10.5px; fill: var(--soft); paint-order: stroke; stroke: var(--box); stroke-width: 3px; }
svg .title, svg .name { fill: var(--text); }
svg .title { font-size: 12px; } .end { text-anchor: end; } .middle { text-anchor: middle; }
svg line { stroke: var(--line); } .bar { fill: var(--c0); }
.hollow { fill: none; stroke: var(--c0); stroke-dasharray: 3 2; }
.curve { stroke: currentColor; fill: currentColor; stroke-width: 1.5; } .curve polyline { fill: none; }
.curve.predicted { stroke-dasharray: 3 3; } .curve.predicted circle { fill: var(--box); stroke-dasharray: none; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; list-style: none; margin: 4px 0 0; padding: 0; }
.legend, .note { font-size: 12px; } .note { color: var(--soft); margin: 4px 0 0; }
"""
SCRIPT = """
for (const head of document.querySelectorAll(".sortable thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  head.setAttribute("aria-sort", "none");
  button.addEventListener("click", () => sort(head));
}
function sort(head) {
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  const body = head.closest("table").tBodies[0];
  const cell = row => row.cells[head.cellIndex];
  const compare = (a, b) => {
    if (!("value" in cell(a).dataset))
      return sign * cell(a).textContent.localeCompare(cell(b).textContent, "en", { numeric: true });
    const [x, y] = [a, b].map(row => Number(cell(row).dataset.value));
    return isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) : sign * (x - y);
  };
  body.append(...[...body.rows].sort(compare));
}
"""
