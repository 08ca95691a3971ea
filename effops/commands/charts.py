"""Bars and curves of bytes or times, as SVG that stands inside of a page of HTML and takes its colours from there."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from effops.text import format_bytes, format_us

WIDTH = 340  # units, of which a page shows each as a pixel or more
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 26, 40  # of the area of curves
CURVES_HEIGHT = 240
BAR_PITCH = 28
MOST_STEPS = 4  # from one tick to the next
MOST_SIZES = 6  # at the axis of curves
DECADE = 10
COLORS = 8  # .c0 to .c7 of the page; a ninth curve has those of the first


@dataclass(frozen=True)
class Unit:
    """How a number is written, and the base of the numbers that are round in it."""

    base: int
    text: Callable[[float], str]

    def tick(self, value: float) -> str:
        """A round number without the digits that are zeros."""
        number, unit = self.text(value).split(" ")
        return f"{float(number):g} {unit}"


BYTES, MICROSECONDS = Unit(2, format_bytes), Unit(10, format_us)


class Point(NamedTuple):
    """A value of a named thing; `size` places it in curves. One that was not measured is hollow."""

    name: str
    value: float
    is_predicted: bool = False
    size: float = 0


@dataclass(frozen=True)
class Scale:
    """From the first tick to the last one: logarithms if values span a decade, else from zero."""

    ticks: Sequence[float]
    is_log: bool

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        if not self.is_log:
            return (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])
        if value <= 0:
            return 0.0
        return math.log(value / self.ticks[0]) / math.log(self.ticks[-1] / self.ticks[0])

    @property
    def remark(self) -> str:
        return ", log scale" if self.is_log else ""


def scale_of(values: Sequence[float], unit: Unit) -> Scale:
    """A scale with few round ticks, around all values."""
    positive = [value for value in values if value > 0] or [1.0]
    least, most = min(positive), max(positive)
    if most < DECADE * least:
        step = _step(most / MOST_STEPS, unit)
        return Scale([step * number for number in range(math.ceil(most / step) + 1)], False)
    low, high = math.floor(math.log(least, unit.base)), math.ceil(math.log(most, unit.base))
    exponent = next(one for one in (1, 2, 5, 10, 20, 50, 100, 1000) if high - low <= MOST_STEPS * one)
    exponents = range(low // exponent, -(-high // exponent) + 1)
    return Scale([float(unit.base) ** (exponent * number) for number in exponents], True)


def _step(least: float, unit: Unit) -> float:
    """The smallest round number that is at least so large; a byte has no parts."""
    if unit.base == 2:
        return max(1.0, 2.0 ** math.ceil(math.log2(least)))
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def bars(title: str, unit: Unit, points: Sequence[Point]) -> str:
    """A bar for each point, under its name and its value; empty if there is no point."""
    if not points:
        return ""
    scale = scale_of([point.value for point in points], unit)
    bottom = TOP + BAR_PITCH * len(points) + 4
    label, drawn = title, [_text(0, 12, f"{title}{scale.remark}", "title")]
    for tick in scale.ticks:
        x = WIDTH * scale.share(tick)
        drawn += [_line(x, TOP, x, bottom), _text(x, bottom + 14, unit.tick(tick), _anchor(x))]
    for number, point in enumerate(points):
        y = TOP + BAR_PITCH * number
        length = max(2.0, WIDTH * scale.share(point.value)) if point.value > 0 else 0.0
        kind = "hollow" if point.is_predicted else "bar"
        value = unit.text(point.value) + (" predicted" if point.is_predicted else "")
        label += f"; {point.name} {value}"
        drawn += [
            _text(0, y + 12, point.name, "name"),
            _text(WIDTH, y + 12, value, "name end"),
            f'<rect class="{kind}" x="0.5" y="{y + 16}" width="{max(0.0, length - 1):.1f}" height="8"/>',
        ]
    return _svg(label, bottom + 20, drawn)


def curves(title: str, unit: Unit, axis: str, points: Sequence[Point]) -> str:
    """A curve for each name against sizes, and below them what each is; empty without points above zero.

    A logarithm of zero cannot be drawn: a line names what has it.
    """
    shown = [point for point in points if point.value > 0]
    if not shown:
        return ""
    scale, sizes = scale_of([point.value for point in shown], unit), sorted({point.size for point in shown})
    across = Scale(sizes if len(sizes) > 1 else [sizes[0] / 2, sizes[0] * 2], True)
    bottom = CURVES_HEIGHT - BOTTOM
    drawn = [_text(0, 12, f"{title}{scale.remark}", "title")]
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, CURVES_HEIGHT - 5, f"{axis}, log scale", "middle"))

    def place(point: Point) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * across.share(point.size)
        return x, bottom - (bottom - TOP) * scale.share(point.value)

    for tick in scale.ticks:
        _, y = place(Point("", tick, size=sizes[0]))
        drawn += [_line(LEFT, y, WIDTH - RIGHT, y), _text(LEFT - 6, y + 4, unit.tick(tick), "end")]
    for size in sizes[:: -(-len(sizes) // MOST_SIZES)]:
        x, _ = place(Point("", scale.ticks[0], size=size))
        drawn += [_line(x, bottom, x, bottom + 4), _text(x, bottom + 18, f"{size:g}", "middle")]
    series: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for point in shown:
        series.setdefault((point.name, point.is_predicted), []).append(place(point))
    names = list(dict.fromkeys(name for name, _ in series))
    kinds = {
        (name, is_predicted): f"curve c{names.index(name) % COLORS}" + " predicted" * is_predicted
        for name, is_predicted in series
    }
    for key, places in series.items():
        drawn.append(_curve(places, kinds[key], max(2.5, 5.0 - names.index(key[0]))))
    entries = "".join(_entry(name + ", predicted" * is_predicted, kind) for (name, is_predicted), kind in kinds.items())
    zeros: dict[str, list[str]] = {}
    for point in points:
        if point.value <= 0:
            zeros.setdefault(point.name, []).append(f"{point.size:g}")
    told = "; ".join(f"{name} at {axis} = {', '.join(at)}" for name, at in zeros.items())
    note = f'<p class="note">Zero, which is not drawn: {escape(told)}</p>' if zeros else ""
    return f'{_svg(title, CURVES_HEIGHT, drawn)}<ul class="legend">{entries}</ul>{note}'


def _curve(places: Sequence[tuple[float, float]], kind: str, radius: float) -> str:
    """A line with a mark at each place. Marks of later curves are smaller, so that they hide none."""
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marks = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in places)
    return f'<g class="{kind}"><polyline points="{line}"/>{marks}</g>'


def _entry(name: str, kind: str) -> str:
    mark = f'<g class="{kind}"><polyline points="0,6 24,6"/><circle cx="12" cy="6" r="3.5"/></g>'
    return f'<li><svg viewBox="0 0 24 12" width="24" height="12" aria-hidden="true">{mark}</svg> {escape(name)}</li>'


def _anchor(x: float) -> str:
    return "" if x < 1 else "end" if x > WIDTH - 1 else "middle"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _svg(label: str, height: float, drawn: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(drawn)}</svg>'
