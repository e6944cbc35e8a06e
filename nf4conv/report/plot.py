"""Draws how far models in 4 bits are from their original against their size, as SVG."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from nf4conv.report.page import folder_name
from nf4conv.report.results.contents import Evaluations
from nf4conv.report.text.terminal import printable

# pixels
_WIDTH: Final = 760
_HEIGHT: Final = 420
_LEFT: Final = 70
_RIGHT: Final = 230  # room for names
_TOP: Final = 44
_BOTTOM: Final = 56
_LINE: Final = 14  # between two names

_COLOURS: Final = ("#1b6ca8", "#c9602c", "#6a8f3c", "#7a5195", "#8a8a8a", "#b08900")
_STEPS: Final = (1, 2, 2.5, 5, 10)  # between two ticks, times a power of ten
_TICKS: Final = 6  # at most, more or less


@dataclass(frozen=True)
class Point:
    """A model in the plot.

    Attributes:
        name: what stands beside it.
        x: bits per weight.
        y: divergence.
        low: the lower end of its interval.
        high: the upper end of its interval.
        group: models of one group share a colour.
    """

    name: str
    x: float
    y: float
    low: float
    high: float
    group: str = ""


@dataclass(frozen=True)
class _Axis:
    """Takes values to pixels."""

    lowest: float
    highest: float
    # pixel of the lowest value, and of the highest
    start: float
    stop: float

    def place(self, value: float) -> float:
        share = (value - self.lowest) / (self.highest - self.lowest)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Returns round values between both ends."""
        wanted = (self.highest - self.lowest) / _TICKS
        exponent = math.floor(math.log10(wanted))
        power = 10.0**exponent
        step = power
        for factor in _STEPS:
            step = factor * power
            if step >= wanted:
                break
        first = math.ceil(self.lowest / step)
        last = math.floor(self.highest / step)
        numbers = range(first, last + 1)
        return [step * number for number in numbers]


def evaluation_plot(compared: Evaluations) -> str:
    """Returns the plot of an evaluation; empty if there is no divergence or no size to show."""
    points = []
    for one in compared.evaluations:
        divergence = one.figures.get("kl")
        if divergence is None or one.bits_per_weight is None:
            return ""
        low = one.figures.get("kl_low", divergence)
        high = one.figures.get("kl_high", divergence)
        name = printable(folder_name(one.out))
        points.append(Point(name, one.bits_per_weight, divergence, low, high))
    source = printable(folder_name(compared.evaluations[0].source))
    return scatter(points, f"Divergence from {source}, mean and 95 % interval")


def scatter(
    points: Sequence[Point], title: str, measured: str = "KL divergence, nats a token"
) -> str:
    """Returns a drawing of points with their names, against bits per weight.

    Args:
        points: one at least.
        title: stands above.
        measured: what the other axis shows.
    """
    least = min(point.x for point in points)
    most = max(point.x for point in points)
    margin = 0.08 * (most - least)
    margin = max(margin, 0.05)
    x = _Axis(least - margin, most + margin, _LEFT, _WIDTH - _RIGHT)
    highest = max(point.high for point in points)
    highest = max(highest, 1e-9)
    y = _Axis(0, 1.05 * highest, _HEIGHT - _BOTTOM, _TOP)
    groups = list(dict.fromkeys(point.group for point in points))
    parts = [_text(_LEFT, 22, title, 14), *_grid(x, y, measured)]
    for point in points:
        number = groups.index(point.group)
        parts += _mark(point, x, y, _colour(number))
    parts += _names(points, x, y)
    if len(groups) > 1:
        parts += _legend(groups)
    size = f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="11"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([opening, paper, *parts, "</svg>"]) + "\n"


def _grid(x: _Axis, y: _Axis, measured: str) -> Iterator[str]:
    """Yields lines and numbers along both axes, and what the axes show."""
    for value in y.ticks():
        place = y.place(value)
        yield _stroke(x.start, place, x.stop, place, "#e5e5e5")
        yield _text(_LEFT - 8, place + 4, f"{value:g}", anchor="end")
    for value in x.ticks():
        place = x.place(value)
        yield _stroke(place, y.start, place, y.start + 4, "#888")
        yield _text(place, y.start + 18, f"{value:g}", anchor="middle")
    yield _stroke(x.start, y.start, x.stop, y.start, "#888")
    middle = (x.start + x.stop) / 2
    yield _text(middle, y.start + 40, "bits per weight", anchor="middle")
    yield _text(_LEFT, _TOP - 8, measured)


def _mark(point: Point, x: _Axis, y: _Axis, colour: str) -> Iterator[str]:
    """Yields a dot, and a line over its interval."""
    across = x.place(point.x)
    low = y.place(max(point.low, 0))
    high = y.place(point.high)
    yield _stroke(across, low, across, high, colour)
    yield _dot(across, y.place(point.y), colour)


def _names(points: Sequence[Point], x: _Axis, y: _Axis) -> Iterator[str]:
    """Yields the names in one column beside the plot, each joined to its point by a thin line."""
    column = _WIDTH - _RIGHT + 24
    free = float(_TOP)
    for point in sorted(points, key=lambda point: -point.y):
        place = y.place(point.y)
        line = max(place, free)
        free = line + _LINE
        yield _stroke(x.place(point.x) + 6, place, column - 6, line, "#cccccc")
        yield _text(column, line + 4, f"{point.name}  {point.y:.4g}")


def _legend(groups: Sequence[str]) -> Iterator[str]:
    for number, group in enumerate(groups):
        place = _LEFT + 190 + 130 * number
        yield _dot(place, _TOP - 12, _colour(number))
        yield _text(place + 8, _TOP - 8, group)


def _colour(group: int) -> str:
    number = group % len(_COLOURS)
    return _COLOURS[number]


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}"/>'


def _text(x: float, y: float, words: str, size: int = 11, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(words)}</text>"
