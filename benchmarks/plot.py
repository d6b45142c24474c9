"""Lines and dots over two logarithmic axes as an SVG, for figures of the documentation.

Knows nothing of what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 130, 40, 40
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")

Dots = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    name: str
    dots: Dots
    line: Dots


@dataclass(frozen=True)
class Panel:
    title: str
    series: Sequence[Series]


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` laid logarithmically from pixel `start` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Axis:
        return cls(min(values) / 1.15, max(values) * 1.15, start, end)

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, base: float) -> list[float]:
        """Powers of `base` within."""
        first, last = math.ceil(math.log(self.low, base)), math.floor(math.log(self.high, base))
        return [base**power for power in range(first, last + 1)]


def svg(panels: Sequence[Panel]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT * len(panels)}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate(0,{number * HEIGHT})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> Iterator[str]:
    all_dots = [dot for series in panel.series for dot in (*series.dots, *series.line)]
    x = Axis.over([dot[0] for dot in all_dots], LEFT, WIDTH - RIGHT)
    y = Axis.over([dot[1] for dot in all_dots], HEIGHT - BOTTOM, TOP)
    yield f'<text x="{LEFT}" y="{TOP - 16}" font-size="13">{escape(panel.title)}</text>'
    yield from _grid(x, y)
    for number, series in enumerate(panel.series):
        yield from _series(series, COLOURS[number % len(COLOURS)], x, y)


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for value in x.ticks(2):
        at = x.at(value)
        yield f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#dddddd"/>'
        yield f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
    for value in y.ticks(2):
        at = y.at(value)
        yield f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#dddddd"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>'


def _series(series: Series, colour: str, x: Axis, y: Axis) -> Iterator[str]:
    line = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in sorted(series.line))
    yield f'<polyline points="{line}" fill="none" stroke="{colour}"/>'
    for a, b in series.dots:
        yield f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="3" fill="{colour}"/>'
    last = max(series.line)
    yield f'<text x="{x.at(last[0]) + 8:.1f}" y="{y.at(last[1]) + 4:.1f}" fill="{colour}">{escape(series.name)}</text>'
