"""The texts with figures in README.md and docs/*.md, from committed results and bench/studies/sharded.py's model."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from effops.text import format_bytes, parse_bytes

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BENCH = ROOT / "bench"
AMD = BENCH / "results" / "amd-epyc-2-threads"
RATIOS = [
    AMD / f"ratios-{name}.json" for name in ("2026-11-24", "densities-2026-11-25", "attention-2026-11-25")
]  # a later one counts
LOG_SPARSE = AMD / "log-sparse-2026-11-22.json"
SHARDED = AMD / "sharded-2026-11-21.json"
TRAINING = AMD / "memory-2026-11-22.json"
LARGEST = AMD / "memory-largest-2026-11-22.json"
LINTED = AMD.with_name("amd-epyc-1-thread") / "lint-of-models-2026-11-26.json"
FRONT_DOOR = AMD / "front-door-2026-11-26.json"
CORPUS = AMD.with_name("amd-epyc-1-thread") / "corpus-2026-11-26.json"
TILES = AMD / "tiles-2026-11-27.json"
LARGE_TILES = AMD / "tiles-of-gigabytes-2026-11-27.json"
HEAD_IN_TILES = AMD / "head-in-tiles-2026-11-27.json"
INTEL = AMD.with_name("intel-xeon-2-threads")
ALL_OPS, ONE_OP = INTEL / "all-ops-2026-11-28.json", INTEL / "power-spherical-2026-11-28.json"
NATIVE = [INTEL / f"native-alone-{number}-2026-11-28.json" for number in (1, 2, 3)]
BESIDE = {
    load: INTEL / f"native-beside-{load.replace(':', '-')}-2026-11-28.json"
    for load in ("processes:1", "processes:2", "moving:1", "moving:2", "thread")
}
SMALL_CALLS = AMD.with_name("amd-epyc-1-thread") / "small-calls-2026-11-24.json"
VERSIONS = sorted((BENCH / "results").glob("versions-*.json"))  # a later one counts
MOST_NAMED = 5  # failures of a row that are named
PUBLISHED = BENCH / "results" / "predictions" / "memory-tables-2026-11-23.json"
FOUNDING = "power_spherical_log_prob"
BUSY_OPS = ("power_spherical_mixture_log_prob", "attention_weights")
MEASURES = ("temporary memory", "time", "times faster than naive", "error / budget")

Row = Mapping[str, Any]


def content(result: Path) -> Any:
    return json.loads(result.read_text())


def measured(result: Path) -> list[Row]:
    """The rows that ran, in the order of the result: of each op the automatic choice first."""
    return [row for row in content(result)["rows"] if row["status"] == "ok"]


def link(result: Path, folder: Path) -> str:
    return f"([result]({Path(os.path.relpath(result, folder)).as_posix()}))"


def measured_on(result: Path, folder: Path = DOCS) -> str:
    header = content(result)["header"]
    return f"Measured on {header['device']}, torch {header['torch']}\n{link(result, folder)}."


def measured_in(results: Sequence[Path]) -> str:
    """The device of the first result, and links to all."""
    first, *others = results
    return "\n".join((measured_on(first).removesuffix("."), *(link(result, DOCS) for result in others))) + "."


def milliseconds(time: float) -> str:
    return f"{time:.0f} ms" if time >= 10 else f"{time:.1f} ms"


def times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 1 else f"{ratio:.2f}"


def share(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.005 else "< 0.01"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ruler, *rows))


def figures(row: Row, naive: Row | None) -> tuple[str, ...]:
    """What MEASURES names, of one row."""
    return (
        format_bytes(row["temporary_bytes"]),
        milliseconds(row["time_ms"]),
        times(naive["time_ms"] / row["time_ms"]) if naive else "-",
        share(row["error_ratio"]),
    )


def fastest_first(rows: Sequence[Row], name: Callable[[Row], str]) -> list[tuple[str, ...]]:
    """The lines of rows that measured the same."""
    naive = next((row for row in rows if row["variant"] == "naive"), None)
    return [(name(row), *figures(row, naive)) for row in sorted(rows, key=lambda row: row["time_ms"])]


def variant(row: Row) -> str:
    return f"`{row['variant']}`" + (", a peer" if row["is_peer"] else "")


def case(row: Row) -> str:
    """What a row measures: the op, its sizes and options, the dtype and the pass."""
    values = {**row["size"], **row.get("options", {})}
    arguments = ", ".join(f"{key} = {value}" for key, value in values.items())
    return f"**`{row['op']}`**, {arguments}, {row['dtype']}, {row['pass']}"


def founding_rows() -> list[Row]:
    return measured(ONE_OP)


def founding() -> str:
    lines = fastest_first(founding_rows(), variant)
    return f"{table(('variant', *MEASURES), lines)}\n\n{measured_on(ONE_OP, ROOT)}"


def comparison(result: Path) -> str:
    """A table for each op and pass of a benchmark."""
    parts = [measured_on(result)]
    for title, group in groupby(measured(result), case):
        parts += [title, table(("variant", *MEASURES), fastest_first(list(group), variant))]
    return "\n\n".join(parts)


def sweep() -> str:
    """One table for all lengths."""
    lines = []
    for length, group in groupby(measured(LOG_SPARSE), lambda row: row["size"]["L"]):
        lines += [(str(length), *line) for line in fastest_first(list(group), variant)]
    return f"{table(('L', 'variant', *MEASURES), lines)}\n\n{measured_on(LOG_SPARSE)}"


def ratios() -> str:
    """A line for each op: the least and the largest ratio at its default size, by the last result that has it."""
    ops: dict[str, list[Row]] = {}
    for result in RATIOS:
        rows = [row for row in content(result)["rows"] if (row["case"], row["subject"]) == ("default", "auto")]
        ops |= {op: list(group) for op, group in groupby(sorted(rows, key=itemgetter("op")), itemgetter("op"))}

    def spread(rows: Iterable[Row], name: str) -> str:
        found = sorted(row["ratio"] for row in rows if row["pass"] == name and row["ratio"] is not None)
        return f"{found[0]:.2f} to {found[-1]:.2f}" if found else "-"

    lines = [(f"`{op}`", spread(rows, "forward"), spread(rows, "both")) for op, rows in ops.items()]
    return f"{table(('op', 'forward', 'forward and backward'), lines)}\n\n{measured_in(RATIOS)}"


def times_of_variants(found: Any) -> dict[tuple[str, str, int], dict[str, float]]:
    """By op, pass and threads, the milliseconds of the variants and peers of a result of ratios.py."""
    times: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in found["rows"]:
        own = times.setdefault((row["op"], row["pass"], row["threads"]), {})
        own |= {**row["peers_ms"], row["chosen"]: row["time_ms"]}
    return times


def native() -> str:
    """A line for each op and pass: the time of `cpp`, and its ratio to `chunked`, the medians of some processes."""
    processes = [times_of_variants(content(one)) for one in NATIVE]
    lines: dict[tuple[str, str], dict[int, tuple[str, ...]]] = {}
    for op, one_pass, threads in processes[0]:
        found = [times[op, one_pass, threads] for times in processes if (op, one_pass, threads) in times]
        if "cpp" not in found[0]:
            continue
        own = median(times["cpp"] for times in found)
        ratio = median(times["cpp"] / times["chunked"] for times in found)
        others = [min(ms for name, ms in times.items() if name not in ("cpp", "chunked")) for times in found]
        of_others = median(times["cpp"] / other for times, other in zip(found, others))
        cells = f"{own:.1f} ms", f"{ratio:.2f}", f"{of_others:.2f}"
        lines.setdefault((f"`{op}`", one_pass), {})[threads] = cells
    measures = "of `chunked`", "of the best other"
    titles = "op", "pass", "1 thread", *measures, "2 threads", *measures
    rows = [(*way, *by.get(1, ("-",) * 3), *by.get(2, ("-",) * 3)) for way, by in lines.items()]
    return f"{table(titles, rows)}\n\n{measured_in(NATIVE)}"


def beside() -> str:
    """A line for each op, pass, number of threads and load: milliseconds of variants."""
    lines = []
    for load, result in {"nothing": NATIVE[0], **BESIDE}.items():
        for (op, one_pass, threads), times in times_of_variants(content(result)).items():
            if op in BUSY_OPS:
                cells = (f"{times[name]:.0f} ms" if name in times else "-" for name in ("cpp", "chunked", "compile"))
                lines.append((f"`{op}`", one_pass, str(threads), load, *cells))
    titles = "op", "pass", "threads", "beside", "`cpp`", "`chunked`", "`compile`"
    return f"{table(titles, sorted(lines))}\n\n{measured_in([NATIVE[0], *BESIDE.values()])}"


def small_calls() -> str:
    """A line for each kind of call and number of components: a time and a ratio for each size of its points."""
    rows = content(SMALL_CALLS)["rows"]
    sizes = list(dict.fromkeys((row["points"], row["dimension"]) for row in rows))
    lines: dict[tuple[str, str], dict[tuple[int, int], str]] = {}
    for row in rows:
        cells = lines.setdefault((row["call"], str(row["components"])), {})
        cells[row["points"], row["dimension"]] = f"{row['effops']:.0f} µs, {row['ratio']:.2f}"
    titles = "call", "components", *(f"{points} points, {dimension} dimensions" for points, dimension in sizes)
    own = ((*way, *(cells.get(size, "") for size in sizes)) for way, cells in lines.items())
    return f"{table(titles, own)}\n\n{measured_small_calls()}"


def measured_small_calls() -> str:
    found = content(SMALL_CALLS)
    device = found["device"].replace(" 1 threads", " 1 thread")
    return f"Measured on {device}, torch {found['torch']}\n{link(SMALL_CALLS, DOCS)}."


def mixture_memory() -> str:
    densities, mixture = (
        next(format_bytes(row["output_bytes"]) for row in measured(ALL_OPS) if row["op"] == op)
        for op in (FOUNDING, "power_spherical_mixture_log_prob")
    )
    return f"At the sizes below, the log densities take {densities}, and the result of either line {mixture}."


def training() -> str:
    peaks = content(TRAINING)["peaks"]
    off = max(abs(peak["predicted_bytes"] - peak["measured_bytes"]) for peak in peaks)
    least, most = (pick(peak["measured_bytes"] for peak in peaks) for pick in (min, max))
    return (
        f"Predicted and measured peaks of {len(peaks)} training steps, {format_bytes(least)} to {format_bytes(most)},\n"
        f"differ by at most {format_bytes(off)} {link(TRAINING, ROOT)}."
    )


def largest() -> str:
    found = content(LARGEST)["largest"]
    right = sum(row["predicted"] == row["measured"] for row in found)
    return (
        f"For {right} of {len(found)} budgets, the largest batch that is predicted is the one found by running all\n"
        f"sizes {link(LARGEST, DOCS)}."
    )


def bench_sharded() -> ModuleType:
    """bench/studies/sharded.py, which has the model and its tables."""
    if str(BENCH / "studies") not in sys.path:
        sys.path.append(str(BENCH / "studies"))
    import sharded

    return sharded


def scaling_measured() -> str:
    bench = bench_sharded()
    rows = [bench.Row(**{**row, "split": bench.Split(**row["split"])}) for row in content(SHARDED)["rows"]]
    above = max(row.peak_bytes - row.predicted_peak_bytes for row in rows)
    off = max(abs(row.sent_bytes / row.predicted_sent_bytes - 1) for row in rows if row.predicted_sent_bytes)
    return (
        f"{bench.measurement(rows)}\n\n{measured_on(SHARDED)}\n"
        f"Memory is above the prediction by the op's temporaries, at most {format_bytes(above)};\n"
        f"bytes sent agree to within {off:.2%}."
    )


def scaling_predicted(**sizes: int) -> str:
    prediction: str = bench_sharded().prediction(**sizes)
    return prediction


def published(name: str) -> str:
    """A table that examples/memory_tables.py predicted."""
    header, *rows = content(PUBLISHED)["tables"][name]
    return table(header, rows)


def largest_batches() -> str:
    _, *rows = content(PUBLISHED)["tables"]["batches"]
    least = max((row[-2] for row in rows), key=parse_bytes)
    below = min((row[-1] for row in rows), key=parse_bytes)
    return f"{published('batches')}\n\nAny budget from {least} to below {below} gives the published column."


def predicted_with() -> str:
    versions = content(PUBLISHED)["versions"]
    return f"Predicted with {' and '.join(f'{name} {one}' for name, one in versions.items())}\n{link(PUBLISHED, DOCS)}."


def lint_of_models() -> str:
    """A line for each finding in models of libraries, and those without findings in one sentence."""
    rows = content(LINTED)["rows"]
    columns = "now_bytes", "after_bytes", "measured_bytes", "mended_bytes", "saved_bytes"
    lines = [
        (row["model"], f"`{row['source']}`", *(format_bytes(row[name]) for name in columns), row["remedy"])
        for row in rows
        if row["is_true"]
    ]
    titles = ("model", "line", "now", "after", "forward, as it is", "mended", "saved", "mended by")
    return f"{table(titles, lines)}\n\n{measured_on(LINTED)}"


def corpus_recall() -> str:
    """What lint finds in the corpus: a line for each half."""
    rows = [row for row in content(CORPUS)["rows"] if "findings" in row]
    lines = []
    for half, group in groupby(rows, itemgetter("half")):
        own = list(group)
        found, expected, findings, false = (
            sum(row[name] for row in own) for name in ("found", "expected", "findings", "false_findings")
        )
        clean = sum(row["expected"] == 0 for row in own)
        lines.append(
            (half.replace("_", " "), str(len(own)), str(clean), f"{found} of {expected}", f"{false} of {findings}")
        )
    titles = ("half", "programs", "clean", "lines found", "false findings")
    return f"{table(titles, lines)}\n\n{measured_on(CORPUS)}"


def corpus_costs() -> str:
    """Bytes of each way to write a wasteful program of the corpus, and its time by that of the program as it is."""
    rows = [row for row in content(CORPUS)["rows"] if "forms" in row and row["mended"]]
    names = list(rows[0]["forms"])

    def cell(row: Row, name: str) -> str:
        form, own = row["forms"][name], row["forms"]["as it is"]
        if form["budget_bytes"] is None:
            return "" if form["reason"] == "-" else form["reason"]
        bytes_text = format_bytes(form["budget_bytes"])
        if name == "as it is" or form["time_ms"] is None or own["time_ms"] is None:
            return bytes_text
        return f"{bytes_text}, {form['time_ms'] / own['time_ms']:.2f}"

    lines = [(row["program"], *(cell(row, name) for name in names)) for row in rows]
    return f"{table(('program', *names), lines)}\n\n{measured_on(CORPUS)}"


def tiles() -> str:
    """What `tiled` accepts of the corpus, and its times: a line for each half, budget and number of threads."""
    of_corpus = [row for row in content(TILES)["rows"] if "half" in row]
    rows = sorted(of_corpus, key=itemgetter("half", "budget", "threads"))
    lines = []
    for (half, budget, threads), group in groupby(rows, itemgetter("half", "budget", "threads")):
        own = list(group)
        cut = [row for row in own if row["status"] == "tiles"]
        cells = []
        for name, most in (("forward", 1.2), ("both", 1.5)):
            found = [row[name] for row in cut if row[name] is not None]
            fast = sum(one <= most for one in found)
            cells += [f"{median(found):.2f}", f"{fast} of {len(found)}", f"{max(found):.2f}"]
        accepted = sum(row["taken_bytes"] is not None for row in own)
        above = sum(row["taken_bytes"] > parse_bytes(budget) for row in cut)
        lines.append(
            (
                half.replace("_", " "),
                budget,
                str(threads),
                f"{accepted} of {len(own)}",
                str(above),
                str(len(cut)),
                *cells,
            )
        )
    passes = (f"{what} {name}" for name in ("forward", "both") for what in ("median", "within", "most"))
    titles = ("half", "budget", "threads", "accepted", "above it", "cut", *passes)
    return f"{table(titles, lines)}\n\n{measured_on(TILES)}"


def forms_of_programs(result: Path) -> str:
    """Programs whose intermediates take gigabytes: a line for each pass and form, with what it takes and its time."""
    lines = [
        (row["program"], row["pass"], row["form"], format_bytes(row["taken_bytes"]), f"{row['time_s']:.2f} s")
        for row in content(result)["rows"]
    ]
    titles = ("program", "pass", "form", "takes", "time")
    return f"{table(titles, lines)}\n\n{measured_on(result)}"


def front_door() -> str:
    """A line for each of README's commands and each cache of wheels."""

    def seconds(time: float | None) -> str:
        return "" if time is None else f"{time:.0f} s"

    lines = [
        (f"`{row['command'].split()[-1]}`", row["wheels"], seconds(row["first_table_s"]), seconds(row["end_s"]))
        for row in content(FRONT_DOOR)["rows"]
    ]
    titles = "the command that ends in", "wheels", "first table", "end"
    return f"{table(titles, lines)}\n\n{measured_on(FRONT_DOOR)}"


def versions() -> str:
    """A line for each row of versions, what does not hold of each, and where they ran."""
    rows: dict[str, Row] = {row["row"]: row for result in VERSIONS for row in content(result)["rows"]}
    if not rows:
        return "0 rows ran."
    packages = "torch", "build", "python", "triton", "numpy", "transformers"
    lines = []
    for name, row in rows.items():
        tests = row.get("steps", {}).get("tests", {})
        found = row.get("versions", {})
        told = [str(tests.get(key, "-")) for key in ("passed", "failed", "skipped")]
        commit = f"{row['date'][:10]}, {row['commit'][:7]}"
        lines.append((f"`{name}`", *(str(found.get(package) or "-") for package in packages), *told, commit))
    titles = "row", "PyTorch", "build", "CPython", *packages[3:], "passed", "failed", "skipped", "ran on, at commit"
    wrong = [f"- `{name}`: {one}" for name, row in rows.items() for one in does_not_hold(row)]
    holds = "Tests, `effops doctor`, README's examples and the interpreted kernels hold"
    nothing_else = f"{holds} in each row." if not wrong else f"{holds}, but for these:\n\n" + "\n".join(wrong)
    devices = " and ".join(sorted({row["device"] for row in rows.values()}))
    links = "\n".join(link(result, DOCS) for result in VERSIONS)
    return f"{table(titles, sorted(lines, key=of_versions))}\n\n{nothing_else}\n\nRan on {devices}\n{links}."


def of_versions(line: Sequence[str]) -> tuple[list[int], list[int]]:
    """What sorts lines of versions: by PyTorch's, then by CPython's."""
    torch, python = ([int(digits) for digits in re.findall(r"\d+", line[place])] for place in (1, 3))
    return torch, python


def does_not_hold(row: Row) -> Iterator[str]:
    """A text for each step of a row of versions that failed, with the first failures of its tests."""
    if not row["installed"]:
        yield f"it cannot be installed: {verbatim(row['error'])}"
        return
    for name, step in row["steps"].items():
        failures = step.get("failures", ())
        if not step["ok"] and not failures:
            yield f"{name.replace('_', ' ')}: {verbatim(step['error'])}"
        for failure in failures[:MOST_NAMED]:
            yield f"`{failure['test']}`: {verbatim(failure['error'])}"
        if len(failures) > MOST_NAMED:
            yield f"{len(failures) - MOST_NAMED} more tests"


def verbatim(text: str) -> str:
    """The text as Markdown shows code, which must not have two backticks in a row."""
    return f"`` {text} ``"


TEXTS: Mapping[str, Callable[[], str]] = {
    "versions": versions,
    "founding": founding,
    "training": training,
    "mixture_memory": mixture_memory,
    "ratios": ratios,
    "beside": beside,
    "native": native,
    "small_calls": small_calls,
    "all_ops": partial(comparison, ALL_OPS),
    "causal_8192": partial(comparison, AMD / "attention-2026-11-22.json"),
    "causal_4096": partial(comparison, AMD / "attention-head-2026-11-22.json"),
    "keops": partial(comparison, AMD / "mixture-2026-11-21.json"),
    "log_sparse": sweep,
    "scaling_measured": scaling_measured,
    "scaling_predicted": partial(scaling_predicted, M=128, T=512, D=128),
    "scaling_components": partial(scaling_predicted, M=1024, T=512, D=128),
    "scaling_positions": partial(scaling_predicted, M=128, T=65536, D=128),
    "largest": largest,
    "predicted_with": predicted_with,
    "largest_batches": largest_batches,
    "other_attention": partial(published, "attention"),
    "bert": partial(published, "bert"),
    "rough": partial(published, "rough"),
    "lint_of_models": lint_of_models,
    "front_door": front_door,
    "corpus_recall": corpus_recall,
    "tiles": tiles,
    "tiles_of_gigabytes": partial(forms_of_programs, LARGE_TILES),
    "head_in_tiles": partial(forms_of_programs, HEAD_IN_TILES),
    "corpus_costs": corpus_costs,
}
