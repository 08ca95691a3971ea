"""The page of `bench/run.py --html`: well formed, whole, by itself, and safe whatever its texts are."""

from __future__ import annotations

import importlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from effops.commands.charts import BYTES, MICROSECONDS, Point, bars, curves, scale_of
from effops.commands.html_report import html_report, summary

BENCH = Path(__file__).resolve().parents[2] / "bench"
RESULT = json.loads((BENCH / "results" / "amd-epyc-2-threads" / "all-ops-2026-11-25.json").read_text())
SWEEP = json.loads((BENCH / "results" / "amd-epyc-2-threads" / "log-sparse-2026-11-22.json").read_text())
VOID = {"meta", "link", "br", "img", "hr", "input"}
COLUMNS = ["Op", "Case", "Dtype", "Pass", "Variant", "Self CPU Mem"]
COLUMNS += ["Temporary", "Saved", "Peak", "Time", "Error / budget", "Status"]


class Page(HTMLParser):
    """The elements of a page, each with its attributes, and the texts of the cells of each table, row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    def count(self, tag: str) -> int:
        return [name for name, _ in self.elements].count(tag)


def page_of(result: dict[str, Any]) -> Page:
    return Page(html_report(result["header"], result["rows"]))


def test_a_run_writes_its_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As it writes its JSON: after each table, so that a run that is stopped leaves what it has found."""
    monkeypatch.syspath_prepend(str(BENCH))
    run = importlib.import_module("run")
    monkeypatch.setattr(run, "copy_bandwidth_gbps", lambda device: 10.0)
    small = ["--op", "attention_weights", "--size", "B=1,H=2,D=4", "--sweep", "L=8,16", "--device", "cpu"]
    file, rows = tmp_path / "made" / "page.html", tmp_path / "rows.json"
    written = ["--html", str(file), "--json", str(rows)]
    assert run.main([*small, *written, "--variants", "naive,chunked", "--repeats", "2"]) == 0
    assert file.read_text() == html_report(*json.loads(rows.read_text()).values())
    page = Page(file.read_text())
    assert [(row[1], row[3]) for row in page.tables[0][1:]] == [
        (f"B=1, H=2, L={size}, D=4", "forward") for size in (8, 16) for _ in range(2)
    ]
    assert page.count("polyline") >= 4


def test_every_row_is_there() -> None:
    page, rows = page_of(RESULT), RESULT["rows"]
    heads, *lines = page.tables[0]
    assert heads == COLUMNS
    assert [(line[0], line[4].removesuffix(" (peer)")) for line in lines] == [
        (row["op"], row["variant"]) for row in rows
    ]
    naive = next(line for line in lines if line[4] == "naive")
    assert naive[1:4] == ["M=128, T=512, D=128", "float32", "forward"]
    assert naive[5:] == ["-4.2 GiB", "4.0 GiB", "0 B", "4.1 GiB", "2.428 s", "0.33", "ok"]
    assert [line[-1] for line in lines].count("skipped") == 16
    assert [line[-1] for line in lines].count("inexact") == 2  # peers whose error is above the budget
    assert page.count("figure") == 13
    assert len(page.tables[1]) == 1 + 16
    assert ["commit", RESULT["header"]["commit"]] in page.tables[2]


def test_it_asks_no_other_host_and_says_what_heads_what() -> None:
    page = page_of(RESULT)
    assert all(
        not (value or "").startswith(("http:", "https:", "//", "/"))
        for _, attributes in page.elements
        for key, value in attributes.items()
        if key in ("src", "href", "srcset", "action", "data", "xlink:href")
    )
    text = html_report(RESULT["header"], RESULT["rows"])
    assert not any(part in text for part in ("@import", "url(", "http://", "https://"))
    assert "default-src 'none'" in text
    assert all(attributes.get("scope") in ("row", "col") for tag, attributes in page.elements if tag == "th")
    assert page.count("caption") == page.count("table") == 3
    assert all(attributes["aria-label"] for _, attributes in page.elements if attributes.get("role"))
    assert "aria-sort" in text


def test_texts_are_escaped() -> None:
    """A reason is the text of an error, and may hold anything."""
    bad = "<script>alert('&')</script>\" onclick=\"x$table"
    row = {**RESULT["rows"][1], "op": bad, "variant": bad, "reason": bad, "status": bad, "case": bad, "dtype": bad}
    swept = [{**row, "size": {bad: size}, "options": {bad: bad}} for size in (1, 2)]
    text = html_report({"device": bad, bad: bad}, swept, title=bad)
    page = Page(text)
    assert page.count("script") == 1
    assert "onclick" not in {key for _, attributes in page.elements for key in attributes}
    assert page.tables[0][1][0] == bad
    assert bad not in text


def test_the_headline() -> None:
    assert summary(RESULT["rows"]) == (
        "The variant that effops prefers takes less temporary memory than naive in 13 of the 13 workloads where both "
        "ran, and less time in 13; in the median, naive takes 3,135 times its memory and 102 times its time."
    )
    assert summary([]) == "No workload has both naive and another variant that ran."
    text = html_report(RESULT["header"], RESULT["rows"])
    assert (
        "<p>AMD EPYC, 2 threads · 2026-11-25T07:02:44+00:00 · torch 2.13.0+cpu · triton 3.7.1 · python 3.11.7</p>"
        in text
    )


@pytest.mark.parametrize("rows", [[], [{}], [{"op": "a", "status": "failed", "reason": "raised"}]], ids=len)
def test_what_is_not_known_is_left_out(rows: list[dict[str, Any]]) -> None:
    page = Page(html_report({}, rows))
    assert len(page.tables[0]) == 1 + len(rows)
    assert page.count("figure") == 0


def test_a_sweep_has_curves() -> None:
    """The largest size of naive did not fit: its predicted bytes are a hollow mark of their own."""
    text = html_report(SWEEP["header"], SWEEP["rows"])
    assert text.count("<li>") == 3 + 2
    assert "naive, predicted</li>" in text
    assert "Against sizes" in text
    assert "Against sizes" not in html_report(RESULT["header"], RESULT["rows"])


@pytest.mark.parametrize(
    ("values", "unit", "ticks"),
    [
        ([2**20, 2**30], BYTES, ["1 MiB", "32 MiB", "1 GiB"]),
        ([3 * 2**20, 4 * 2**20], BYTES, ["0 B", "1 MiB", "2 MiB", "3 MiB", "4 MiB"]),
        ([1.0, 2.0], BYTES, ["0 B", "1 B", "2 B"]),
        ([0.0], BYTES, ["0 B", "1 B"]),
        ([150.0, 30.0], MICROSECONDS, ["0 us", "50 us", "100 us", "150 us"]),
        ([20.0, 3e6], MICROSECONDS, ["1 us", "100 us", "10 ms", "1 s", "100 s"]),
    ],
    ids=["decades", "units", "small", "nothing", "times", "decades of times"],
)
def test_scales(values: list[float], unit: Any, ticks: list[str]) -> None:
    scale = scale_of(values, unit)
    assert [unit.tick(tick) for tick in scale.ticks] == ticks
    assert all(0 <= scale.share(value) <= 1 for value in values)
    assert [scale.share(scale.ticks[place]) for place in (0, -1)] == pytest.approx([0, 1])


def test_zero_is_told_where_it_cannot_be_drawn() -> None:
    points = [Point("naive", 8.0, size=4), Point("naive", 800.0, size=8), Point("chunked", 0.0, size=4)]
    points.append(Point("chunked", 0.0, size=8))
    drawn = curves("Memory", BYTES, "L", points)
    assert "Zero, which is not drawn: chunked at L = 4, 8" in drawn
    assert drawn.count("<li>") == 1  # a legend has no entry for what is not drawn
    assert curves("Memory", BYTES, "L", points[2:]) == bars("Memory", BYTES, []) == ""
    assert bars("Memory", BYTES, points).count("<rect") == 4
