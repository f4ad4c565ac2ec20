"""Draws line plots and stacked bar charts as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#718096")
WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 64, 50


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`, linear or logarithmic."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Returns the position of a value on the axis, from 0 to 1."""
        of = math.log if self.log else float
        return (of(value) - of(self.low)) / ((of(self.high) - of(self.low)) or 1.0)

    def ticks(self) -> list[float]:
        """Returns round values on the axis. A logarithmic axis has powers of 2, or powers of 10 if `high` is more than
        1024 times `low`.
        """
        if self.log:
            base = 2.0 if self.high / self.low <= 1024 else 10.0
            first, last = math.ceil(math.log(self.low, base) - 1e-9), math.floor(math.log(self.high, base) + 1e-9)
            return [base**power for power in range(first, last + 1)]
        step = 10 ** math.floor(math.log10((self.high - self.low) or 1.0))
        step = next(step * part for part in (0.1, 0.2, 0.5, 1, 2) if (self.high - self.low) / (step * part) <= 10)
        return [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def document(title: str, parts: Sequence[str], width: int = WIDTH, height: int = HEIGHT) -> str:
    """Returns an SVG image that consists of a title and the elements `parts`."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="12">\n<title>{escape(title)}</title>\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join([text(width / 2, 20, title, size=14), *parts])
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, *, anchor: str = "middle", size: int = 12, turn: int = 0) -> str:
    """Returns a text element. `turn` is a rotation in degrees."""
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#1a202c"{turned}>'
        f"{escape(words)}</text>"
    )


def rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" stroke="{stroke}"/>'


def legend(names: Sequence[str]) -> Iterator[str]:
    """Yields the elements of a row of names, each with a coloured square, below the title."""
    x = float(LEFT)
    for colour, name in zip(COLOURS, names, strict=False):
        yield rect(x, 36, 10, 10, colour)
        yield text(x + 15, 45, name, anchor="start", size=11)
        x += 26 + 6.4 * len(name)


def _frame(x: Axis | None, y: Axis) -> Iterator[str]:
    """Yields the elements of the axes, the grid and the labels."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for value in y.ticks():
        at = bottom - y.place(value) * (bottom - TOP)
        yield f'<line x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#e2e8f0"/>'
        yield text(LEFT - 6, at + 4, f"{value:g}", anchor="end", size=11)
    for value in x.ticks() if x is not None else ():
        at = LEFT + x.place(value) * (right - LEFT) if x is not None else 0.0
        yield f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}" stroke="#e2e8f0"/>'
        yield text(at, bottom + 16, f"{value:g}", size=11)
    if x is not None:
        yield text((LEFT + right) / 2, HEIGHT - 12, x.label)
    yield text(18, (TOP + bottom) / 2, y.label, turn=-90)
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#4a5568"/>'


def lines(title: str, x: Axis, y: Axis, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Returns a plot of lines with a dot at each point."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [*_frame(x, y), *legend(list(series))]
    for colour, points in zip(COLOURS, series.values(), strict=False):
        places = [
            (LEFT + x.place(a) * (right - LEFT), bottom - min(1.0, max(0.0, y.place(b))) * (bottom - TOP))
            for a, b in points
        ]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
    return document(title, parts)


def bars(title: str, y: Axis, names: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """Returns a plot of stacked bars. Each series has one value per name."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    slot = (right - LEFT) / len(names)
    parts = [*_frame(None, y), *legend(list(series))]
    for index, name in enumerate(names):
        x, at = LEFT + slot * (index + 0.2), float(bottom)
        for colour, values in zip(COLOURS, series.values(), strict=False):
            height = (y.place(values[index]) - y.place(y.low)) * (bottom - TOP)
            at -= height
            parts.append(rect(x, at, 0.6 * slot, height, colour))
        parts.append(text(x + 0.3 * slot, bottom + 16, name, size=11))
    return document(title, parts)


def axis_of(label: str, values: Sequence[float], *, log: bool = False, zero: bool = False) -> Axis:
    """Returns an axis that covers `values`, and that begins at 0 if `zero` is set."""
    margin: Callable[[float], float] = (lambda value: value * 1.1) if not log else (lambda value: value * 1.15)
    low = 0.0 if zero else min(values) / (1.15 if log else 1.0)
    return Axis(label, low, margin(max(values)), log)
