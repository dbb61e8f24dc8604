"""Line and bar charts as compact SVG for a page: text stays text, and colours and fonts come from the style sheet.

Every chart is drawn in a coordinate system WIDTH units wide and scales with its container. A line's group carries its
name (`data-label`) and the svg carries both scales, so that a script can read values back from the drawn path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 400
HEIGHT = 250
LETTER = 6.6  # mean advance of a digit at the charts' font size, to leave room for tick labels
MOST_POINTS = 400  # per line; more than the pixels that a line has
SLOTS = 12  # colours in the style sheet


@dataclass(frozen=True)
class Series:
    """One line. `group` names what a legend shows and hides together; `slot` is its colour."""

    label: str
    x: Sequence[float | None]
    y: Sequence[float | None]
    slot: int = 0
    group: str = ""
    dashed: bool = False
    marked: bool = False

    def points(self, x_log: bool = False, y_log: bool = False) -> list[tuple[float, float] | None]:
        """Points that can be drawn; None where the line breaks."""
        found: list[tuple[float, float] | None] = []
        for x, y in zip(self.x, self.y, strict=True):
            fine = drawable(x, x_log) and drawable(y, y_log)
            found.append((float(x), float(y)) if fine and x is not None and y is not None else None)
        step = math.ceil(len(found) / MOST_POINTS)
        return found if step < 2 else [*found[:-1:step], found[-1]]


@dataclass(frozen=True)
class Bar:
    """A mean with its spread and the single values behind it; `style` is a class of the style sheet."""

    value: float
    error: float | None
    values: Sequence[float]
    style: str
    label: str


@dataclass(frozen=True)
class BarGroup:
    """The bars of one thing, and optionally a mark to compare them with."""

    label: str
    bars: Sequence[Bar]
    slot: int = 0
    group: str = ""
    mark: float | None = None
    form: str = "{:.1f}"


@dataclass(frozen=True)
class Scale:
    """From data to drawing, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        return log_ticks(self.low, self.high, about) if self.log else linear_ticks(self.low, self.high, about)

    def attribute(self) -> str:
        return f"{self.low:.6g} {self.high:.6g} {self.start:g} {self.end:g} {'log' if self.log else 'linear'}"


def drawable(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within the range."""
    raw = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Powers of ten, with 2 and 5 between them where there are few, or only some of them where there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**k for k in range(first, last + 1) for m in factors]
        found = [v for v in found if low * 0.999 <= v <= high * 1.001]
        if len(found) <= about + 1:
            return found
    return found[:: math.ceil(len(found) / (about + 1))]


def span(values: Sequence[float], log: bool) -> tuple[float, float]:
    """A range that holds the values, a little wider; never empty."""
    low, high = min(values), max(values)
    if log:
        room = (high / low) ** 0.04 if high > low else 2.0
        return low / room, high * room
    room = 0.05 * (high - low) or 0.1 * abs(high) or 0.1
    return low - (0.0 if 0 <= low < room else room), high + room


def number(value: float) -> str:
    """A tick's label: a few digits, powers of ten as such, a real minus sign."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    if exponent < -4 or exponent > 5:
        factor = value / 10.0**exponent
        power = f"10{str(exponent).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
        text = power if abs(factor - 1) < 1e-6 else f"{factor:.3g}·{power}"
    else:
        text = f"{value:,.0f}" if exponent >= 3 else f"{value:.6g}"
    return text.replace("-", "−")


def lines(
    series: Sequence[Series],
    *,
    title: str,
    x_name: str,
    y_name: str,
    x_log: bool = False,
    y_log: bool = False,
    x_ticks: Sequence[tuple[float, str]] | None = None,
) -> str:
    """Lines over common axes; an empty text where there is nothing to draw."""
    drawn = [(one, one.points(x_log, y_log)) for one in series]
    points = [p for _, found in drawn for p in found if p is not None]
    if not points:
        return ""
    y_range = span([y for _, y in points], y_log)
    y_labels = [number(v) for v in Scale(*y_range, 0, 1, y_log).ticks()]
    left = 10 + LETTER * max((len(text) for text in y_labels), default=1)
    xs = [x for x, _ in points]
    x_range = span(xs, x_log) if x_log or min(xs) == max(xs) else (min(xs), max(xs))
    x = Scale(*x_range, round(left, 1), WIDTH - 12, x_log)
    y = Scale(*y_range, HEIGHT - 40, 26, y_log)
    parts = [_frame(x, y, x_name, y_name, x_ticks)]
    for one, found in drawn:
        if any(found):
            parts.append(_line(one, found, x, y))
    names = ", ".join(dict.fromkeys(one.group or one.label for one in series))
    label = f"{title}: {y_name} against {x_name} for {names}"
    scales = f'data-x="{x.attribute()}" data-y="{y.attribute()}" data-x-name="{escape(x_name)}"'
    return _svg(HEIGHT, label, "".join(parts), f'class="lines" {scales}')


def _svg(height: float, label: str, content: str, attributes: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}" {attributes}>{content}</svg>'


def _frame(x: Scale, y: Scale, x_name: str, y_name: str, x_ticks: Sequence[tuple[float, str]] | None) -> str:
    """Grid, tick labels and the names of the axes."""
    parts = [f'<text class="name" x="2" y="13">{escape(y_name)}</text>']
    for value in y.ticks():
        at = y(value)
        parts.append(f'<path class="grid" d="M{x.start:g},{at:.1f}H{x.end:g}"/>')
        parts.append(f'<text class="tick end" x="{x.start - 6:g}" y="{at + 4:.1f}">{number(value)}</text>')
    before = -math.inf
    for value, text in x_ticks or [(v, number(v)) for v in x.ticks()]:
        at, half = x(value), LETTER * len(text) / 2
        parts.append(f'<path class="mark" d="M{at:.1f},{y.start:g}v4"/>')
        if at - half > before + 5:  # a label that would touch the one before it is left out
            middle = min(at, WIDTH - half)
            parts.append(f'<text class="tick mid" x="{middle:.1f}" y="{y.start + 17:g}">{escape(text)}</text>')
            before = at + half
    parts.append(f'<path class="axis" d="M{x.start:g},{y.start:g}H{x.end:g}"/>')
    parts.append(f'<text class="name end" x="{x.end:g}" y="{HEIGHT - 5}">{escape(x_name)}</text>')
    return "".join(parts)


def _line(one: Series, points: Sequence[tuple[float, float] | None], x: Scale, y: Scale) -> str:
    path, pen = [], "M"
    for i, point in enumerate(points):
        if point is None:
            pen = "M"
            continue
        path.append(f"{pen}{x(point[0]):.1f},{y(point[1]):.1f}")
        alone = pen == "M" and (i + 1 == len(points) or points[i + 1] is None)
        if alone:  # a line of no length has round ends: a dot
            path.append("h0")
        pen = "L"
    style = "line dashed" if one.dashed else "line"
    marks = f'<path class="marks" d="{"".join(_marks(one.slot, points, x, y))}"/>' if one.marked else ""
    return (
        f'<g class="c{one.slot % SLOTS}" data-s="{escape(one.group or one.label)}" data-label="{escape(one.label)}">'
        f'<path class="{style}" d="{"".join(path)}"/>{marks}</g>'
    )


# One shape per colour, so that lines can be told apart without seeing colours.
SHAPES = (
    "m-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0z",
    "m-3.2,-3.2h6.4v6.4h-6.4z",
    "m0,-4.2l4,7h-8z",
    "m0,-4.6l4.2,4.6l-4.2,4.6l-4.2,-4.6z",
    "m0,4.2l4,-7h-8z",
)


def _marks(slot: int, points: Sequence[tuple[float, float] | None], x: Scale, y: Scale) -> Iterator[str]:
    for point in points:
        if point is not None:
            yield f"M{x(point[0]):.1f},{y(point[1]):.1f}{SHAPES[slot % len(SHAPES)]}"


ROW, HEAD, GAP = 14, 17, 9  # heights of a bar, of a group's name, and of the space between groups


def bars(groups: Sequence[BarGroup], *, title: str, low: float, high: float, unit: str = "%") -> str:
    """Horizontal bars from zero; from anywhere else dots with whiskers, for a bar's length would then mislead."""
    groups = [group for group in groups if group.bars]
    if not groups:
        return ""
    room = max(LETTER * len(spoken(bar, group.form)) for group in groups for bar in group.bars) + 10
    x = Scale(low, high, 4, WIDTH - room)
    height = sum(HEAD + ROW * len(group.bars) + GAP for group in groups) + 24
    foot = height - 20
    parts = []
    for value in x.ticks(6):
        at = x(value)
        parts.append(f'<path class="grid" d="M{at:.1f},2V{foot:g}"/>')
        anchor = "mid" if at > 12 else ""
        parts.append(f'<text class="tick {anchor}" x="{at:.1f}" y="{foot + 15:g}">{number(value)}</text>')
    parts.append(f'<text class="name end" x="{WIDTH - 2}" y="{foot + 15:g}">{escape(unit)}</text>')
    top = 0.0
    for group in groups:
        parts.append(_bar_group(group, x, top, from_zero=low == 0))
        top += HEAD + ROW * len(group.bars) + GAP
    said = "; ".join(f"{g.label}: " + ", ".join(f"{b.label} {spoken(b, g.form)}" for b in g.bars) for g in groups)
    return _svg(height, f"{title}. {said}", "".join(parts), 'class="bars"')


def spoken(bar: Bar, form: str) -> str:
    return form.format(bar.value) if bar.error is None else f"{form} ± {form}".format(bar.value, bar.error)


def _bar_group(group: BarGroup, x: Scale, top: float, from_zero: bool) -> str:
    parts = [f'<text class="head" x="4" y="{top + 13:g}">{escape(group.label)}</text>']
    first = top + HEAD
    for i, bar in enumerate(group.bars):
        parts.append(_bar(bar, spoken(bar, group.form), x, first + ROW * i, from_zero))
    if group.mark is not None and x.low <= group.mark <= x.high:
        at, last = x(group.mark), first + ROW * len(group.bars) - 2
        parts.append(
            f'<g class="paper"><title>the paper: {group.mark:g}</title><path d="M{at:.1f},{first - 1:g}V{last:g}"/>'
            f'<path class="diamond" d="M{at:.1f},{first - 8:g}l4,4.5l-4,4.5l-4,-4.5z"/></g>'
        )
    return f'<g class="c{group.slot % SLOTS}" data-s="{escape(group.group or group.label)}">{"".join(parts)}</g>'


def _bar(bar: Bar, text: str, x: Scale, top: float, from_zero: bool) -> str:
    middle, at = top + (ROW - 3) / 2, x(bar.value)
    parts = [f"<title>{escape(bar.label)}: {text}</title>"]
    if from_zero:
        parts.append(f'<rect class="{bar.style}" x="4" y="{top:g}" width="{at - 4:.1f}" height="{ROW - 3}" rx="2"/>')
    else:
        spots = "".join(f"M{x(v):.1f},{middle:g}h0" for v in bar.values)
        parts.append(f'<path class="spots" d="{spots}"/>')
    if bar.error:
        ends = [x(min(max(v, x.low), x.high)) for v in (bar.value - bar.error, bar.value + bar.error)]
        caps = "".join(f"M{end:.1f},{middle - 3:g}v6" for end in ends)
        parts.append(f'<path class="whisker" d="M{ends[0]:.1f},{middle:g}H{ends[1]:.1f}{caps}"/>')
    if not from_zero:
        parts.append(f'<circle class="{bar.style}" cx="{at:.1f}" cy="{middle:g}" r="4.5"/>')
    parts.append(f'<text class="value" x="{x.end + 8:.1f}" y="{middle + 4:g}">{text}</text>')
    return f"<g>{''.join(parts)}</g>"
