"""Line charts as SVG text: axes, curves, points with ranges, marks. No library, no script."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

WIDTH, HEIGHT = 860, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 26, 34
_MOST_POINTS = 1500  # a longer curve is thinned: the page stays small


@final
@dataclass(frozen=True)
class Series:
    """One curve.

    Args:
        name: For the legend.
        xs: Places.
        ys: Values; those that are not finite leave a gap.
        colour: Of line and points.
        points: Draw a dot at each value.
        faint: Draw a thin, pale line.
        ranges: Lower and upper end at each place, drawn as a bar.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    points: bool = False
    faint: bool = False
    ranges: Sequence[tuple[float, float]] = field(default_factory=tuple)


@final
@dataclass(frozen=True)
class Mark:
    """A vertical line at ``x`` with a word."""

    x: float
    text: str
    colour: str


@final
@dataclass(frozen=True)
class _Frame:
    """The data's ranges, and where they are in the picture."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        share = (value - self.left) / (self.right - self.left)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def line_chart(title: str, series: Sequence[Series], marks: Sequence[Mark] = ()) -> str:
    """A figure with the curves over one pair of axes; empty text where no value is finite."""
    frame = _frame(series)
    if frame is None:
        return ""
    parts = [*_axes(frame), *(_mark(frame, one) for one in marks)]
    for one in series:
        parts += _curve(frame, one)
    if len(series) > 1:
        parts += _legend(series)
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
        f"<title>{html.escape(title)}</title>{''.join(parts)}</svg></figure>\n"
    )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _frame(series: Sequence[Series]) -> _Frame | None:
    points = [
        (x, y) for one in series for x, y in zip(one.xs, one.ys, strict=True) if math.isfinite(y)
    ]
    if not points:
        return None
    xs, ys = zip(*points, strict=True)
    ends = [end for one in series for pair in one.ranges for end in pair if math.isfinite(end)]
    low, high = min(*ys, *ends, ys[0]), max(*ys, *ends, ys[0])
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    left, right = min(xs), max(xs)
    if left == right:
        left, right = left - 0.5, right + 0.5
    bottom = 0.0 if 0.0 <= low < 0.5 * high else low - margin
    return _Frame(left, right, bottom, high + margin)


def _axes(frame: _Frame) -> list[str]:
    parts: list[str] = []
    for value in ticks(frame.low, frame.high):
        y = frame.y(value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
    for value in ticks(frame.left, frame.right, 8):
        if value == int(value):
            parts.append(
                f'<text x="{frame.x(value):.1f}" y="{HEIGHT - _BOTTOM + 16}" '
                f'text-anchor="middle">{value:.0f}</text>'
            )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    return parts


def _mark(frame: _Frame, mark: Mark) -> str:
    if not frame.left <= mark.x <= frame.right:
        return ""
    x = frame.x(mark.x)
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" '
        f'stroke="{mark.colour}" stroke-dasharray="3 3"><title>{html.escape(mark.text)}</title>'
        f"</line>"
    )


def _curve(frame: _Frame, one: Series) -> list[str]:
    skip = -(-len(one.xs) // _MOST_POINTS)
    places = [
        (frame.x(x), frame.y(y) if math.isfinite(y) else math.nan)
        for x, y in zip(one.xs[::skip], one.ys[::skip], strict=True)
    ]
    width, opacity = (1.0, 0.4) if one.faint else (1.8, 1.0)
    parts = [
        f'<path d="{_path(places)}" fill="none" stroke="{one.colour}" stroke-width="{width}" '
        f'stroke-opacity="{opacity}"/>'
    ]
    for x, (low, high) in zip(one.xs, one.ranges, strict=False):
        if math.isfinite(low) and math.isfinite(high):
            parts.append(
                f'<line x1="{frame.x(x):.1f}" x2="{frame.x(x):.1f}" y1="{frame.y(low):.1f}" '
                f'y2="{frame.y(high):.1f}" stroke="{one.colour}" stroke-width="1"/>'
            )
    if one.points:
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{one.colour}"/>'
            for x, y in places
            if math.isfinite(y)
        ]
    return parts


def _path(places: Sequence[tuple[float, float]]) -> str:
    """Lines between neighbours; a new start after every gap."""
    words: list[str] = []
    drawing = False
    for x, y in places:
        if math.isfinite(y):
            words.append(f"{'L' if drawing else 'M'}{x:.1f} {y:.1f}")
        drawing = math.isfinite(y)
    return "".join(words)


def _legend(series: Sequence[Series]) -> list[str]:
    parts: list[str] = []
    x = _LEFT + 4.0
    for one in series:
        parts.append(
            f'<rect x="{x:.0f}" y="8" width="14" height="4" fill="{one.colour}" '
            f'fill-opacity="{0.4 if one.faint else 1.0}"/>'
            f'<text x="{x + 18:.0f}" y="14">{html.escape(one.name)}</text>'
        )
        x += 34.0 + 6.2 * len(one.name)
    return parts
