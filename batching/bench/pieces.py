"""What the page is put together from: charts of microseconds as SVG, figures, tables, and their style.

In a chart horizontal places are percentages, vertical ones pixels, and there is no `viewBox`: it follows the width of
the page while its text keeps its size, on a phone as on a desk, without a script. Colours are classes, see `STYLE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

import attrs


@attrs.frozen
class Bar:
    """One measured time. Of what is None nothing is drawn."""

    name: str
    kind: str
    """The class of its colour: wait, before, slab, ours, other or floor."""
    value: float | None
    lowest: float | None = None
    highest: float | None = None
    p99: float | None = None
    note: str = ""
    """Stands behind the value where there is room, or in its place."""

    @property
    def reach(self) -> float:
        return max(one or 0.0 for one in (self.value, self.highest, self.p99))


@attrs.frozen
class Line:
    """One strategy over the categories of a chart; a None leaves a gap."""

    name: str
    kind: str
    mark: str
    """The form of its points: a key of `_MARKS`."""
    values: Sequence[float | None]
    dashed: bool = False


@attrs.frozen
class Way:
    """One way to build a batch behind queued GPU work, as a timeline that starts when the host begins."""

    name: str
    kind: str
    tag: str
    host: float
    """When the host is free again."""
    work: float
    """When the GPU is through with the work queued before."""
    gpu: float | None
    """GPU time of the copies behind that work."""
    host_note: str
    gpu_note: str


def us(value: float | None) -> str:
    """Microseconds for reading: three digits or a little more."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# ---------------------------------------------------------------------- bars

_PITCH, _BAR = 42, 10


def bars(title: str, items: Sequence[Bar], *, cut: bool = False) -> str:
    """Bars from zero, one below the other. With `cut` one four times as long as the next is visibly broken."""
    longest, second = ([*sorted((item.reach for item in items), reverse=True), 0.0, 0.0])[:2]
    top = (second if cut and longest > 4 * second > 0 else longest) * 1.04 or 1.0
    bottom = _PITCH * len(items) + 2
    parts = [_grid(top, 0, bottom)]
    for number, item in enumerate(items):
        y = number * _PITCH
        note = escape(item.note)
        if item.value is not None:
            note = us(item.value) + (f'<tspan class="more"> · {note}</tspan>' if note else "")
        parts.append(f'<text class="name" x="0" y="{y + 15}">{escape(item.name)}</text>')
        parts.append(f'<text class="value" x="100%" y="{y + 15}">{note}</text>')
        if item.value is not None:
            parts += _bar(item, top, y + 22)
    return _svg(title, bottom + 20, parts)


def _bar(item: Bar, top: float, y: int) -> list[str]:
    assert item.value is not None
    if item.reach > top:
        return [
            f'<rect class="{item.kind}" x="0" y="{y}" width="100%" height="{_BAR}"/>',
            f'<svg class="over" x="90%" y="{y}"><path class="break" d="M-2 13 5-3M5 13 12-3"/></svg>',
        ]
    parts = [f'<rect class="{item.kind}" x="0" y="{y}" width="{_at(item.value, top)}" height="{_BAR}"/>']
    middle = y + _BAR // 2
    if item.lowest is not None and item.highest is not None:
        ends = f'x1="{_at(item.lowest, top)}" x2="{_at(item.highest, top)}"'
        parts.append(f'<line class="range" {ends} y1="{middle}" y2="{middle}"/>')
    if item.p99 is not None:
        x, begin = _at(item.p99, top), _at(min(item.value, item.p99), top)
        parts.append(f'<line class="tail" x1="{begin}" x2="{x}" y1="{middle}" y2="{middle}"/>')
        parts.append(f'<line class="tail" x1="{x}" x2="{x}" y1="{y}" y2="{y + _BAR}"/>')
    return parts


# ---------------------------------------------------------------------- lines

_HEIGHT, _LEFT, _RIGHT = 290, 13.0, 93.0
_MARKS = {
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "square": "M-3.5-3.5h7v7h-7z",
    "diamond": "M0-5 5 0 0 5-5 0z",
    "triangle": "M0-4.8 4.8 3.6h-9.6z",
    "cross": "M-4-4 4 4M4-4-4 4",
}


def lines(title: str, categories: Sequence[str], series: Sequence[Line], beside: Sequence[Line] = ()) -> str:
    """Lines over evenly spaced categories, on a logarithmic axis that the chart beside can share."""
    values = [value for line in (*series, *beside) for value in line.values if value]
    low, high = min(values, default=1.0), max(values, default=10.0)
    ticks = _log_ticks(low, high)
    bottom, span = _HEIGHT - 24, math.log(ticks[-1] / ticks[0])

    def y(value: float) -> float:
        return round(bottom - (bottom - 20) * math.log(value / ticks[0]) / span, 1)

    step = (_RIGHT - _LEFT) / max(1, len(categories) - 1)
    places = [f"{_LEFT + step * at:.2f}%" for at in range(len(categories))]
    parts = []
    for tick in ticks:
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(f'<text class="tick" x="0" y="{y(tick) - 4}">{tick:,.10g}</text>')
    for place, category in zip(places, categories, strict=True):
        parts.append(f'<text class="tick middle" x="{place}" y="{_HEIGHT - 6}">{escape(category)}</text>')
    for line in series:
        style = f"{line.kind} dashed" if line.dashed else line.kind
        points = [(place, y(value)) if value else None for place, value in zip(places, line.values, strict=True)]
        for one, other in pairwise(points):
            if one and other:
                ends = f'x1="{one[0]}" y1="{one[1]}" x2="{other[0]}" y2="{other[1]}"'
                parts.append(f'<line class="series {style}" {ends}/>')
        parts += [f'<svg class="over" x="{point[0]}" y="{point[1]}">{_mark(line)}</svg>' for point in points if point]
    return _svg(title, _HEIGHT, parts)


def legend(series: Sequence[Line]) -> str:
    """The names of the lines, each behind a piece of it."""
    entries = []
    for line in series:
        style = f"{line.kind} dashed" if line.dashed else line.kind
        drawn = f'<line class="series {style}" x1="0" y1="6" x2="30" y2="6"/>'
        drawn += f'<svg class="over" x="15" y="6">{_mark(line)}</svg>'
        entries.append(f'<li><svg width="30" height="12" aria-hidden="true">{drawn}</svg> {escape(line.name)}</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _mark(line: Line) -> str:
    hollow = " hollow" if line.dashed else ""
    return f'<path class="mark {line.kind}{hollow}" d="{_MARKS[line.mark]}"/>'


def _log_ticks(low: float, high: float) -> list[float]:
    """From at or below `low` to at or above `high`: 1, 2 and 5 of each decade, of many decades 1 alone."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if math.log10(high / low) < 3.2 else (1,)
    ticks = [factor * 10.0**decade for decade in range(first, last + 1) for factor in steps]
    begin = max(at for at, tick in enumerate(ticks) if tick <= low * 1.0001)
    end = min((at for at, tick in enumerate(ticks) if tick >= high * 0.9999 and at > begin), default=len(ticks) - 1)
    return [float(f"{tick:.6g}") for tick in ticks[begin : end + 1]]


# ---------------------------------------------------------------------- timeline

_BLOCK, _LANE, _GUTTER = 104, 24, 12.0
"""Pixels for one way and for one lane; percent of the width for the names of the lanes."""


def timeline(title: str, ways: Sequence[Way]) -> str:
    """Two lanes for each way, host above GPU, all on one axis."""
    top = max(max(way.host, way.work + (way.gpu or 0)) for way in ways) * 1.015
    bottom = _BLOCK * len(ways) + 4
    parts = [_grid(top, _GUTTER, bottom)]
    for number, way in enumerate(ways):
        y = number * _BLOCK
        host, gpu = y + 30, y + 30 + _LANE + 8
        x = _at(0, top, _GUTTER)
        parts += [
            f'<text class="name strong" x="0" y="{y + 20}">{escape(way.name)}</text>',
            f'<text class="value {way.kind}" x="100%" y="{y + 20}">{escape(way.tag)}</text>',
            f'<text class="lane" x="0" y="{host + 16}">host</text>',
            f'<text class="lane" x="0" y="{gpu + 16}">GPU</text>',
            f'<rect class="free" x="{x}" y="{host}" width="{_length(top, top, _GUTTER)}" height="{_LANE}"/>',
            f'<rect class="{way.kind}" x="{x}" y="{host}" width="{_length(way.host, top, _GUTTER)}" height="{_LANE}"/>',
            f'<rect class="work" x="{x}" y="{gpu}" width="{_length(way.work, top, _GUTTER)}" height="{_LANE}"/>',
        ]
        # Inside a bar that is long, behind one that is short: so a label has half the width at least.
        inside = way.host > top / 2
        at = x if inside else _at(way.host, top, _GUTTER)
        parts.append(
            f'<text class="{"on" if inside else ""}" x="{at}" dx="8" y="{host + 16}">{escape(way.host_note)}</text>'
        )
        if way.work > 0.8 * top:
            parts.append(f'<text x="{x}" dx="8" y="{gpu + 16}">queued work</text>')
        end = _at(way.work, top, _GUTTER)
        if way.gpu is not None:
            width = _length(way.gpu, top, _GUTTER)
            parts.append(f'<rect class="{way.kind}" x="{end}" y="{gpu}" width="{width}" height="{_LANE}"/>')
            # Copies are thinner than a pixel here. The line keeps them visible.
            parts.append(f'<line class="series {way.kind}" x1="{end}" x2="{end}" y1="{gpu}" y2="{gpu + _LANE}"/>')
        turn, aside = ("end", -8) if way.work > top / 2 else ("", 8)
        parts.append(f'<text class="{turn}" x="{end}" dx="{aside}" y="{gpu + 16}">{escape(way.gpu_note)}</text>')
    return _svg(title, bottom + 20, parts)


# ---------------------------------------------------------------------- shared


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    name = escape(title, quote=True)
    return f'<svg class="chart" role="img" aria-label="{name}" width="100%" height="{height}">{"".join(parts)}</svg>'


def _at(value: float, top: float, gutter: float = 0.0) -> str:
    return f"{gutter + (100 - gutter) * value / top:.2f}%"


def _length(value: float, top: float, gutter: float) -> str:
    return f"{(100 - gutter) * value / top:.3f}%"


def _grid(top: float, gutter: float, bottom: int) -> str:
    """Lines at round numbers, with the numbers below."""
    rough = top / 6
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    parts = []
    count = int(top / step) + 1
    crowded = count * len(f"{top:,.0f}") > 24  # on a phone six of "10,000" have no room
    for number in range(count):
        x = _at(number * step, top, gutter)
        turn = "start" if number == 0 and not gutter else "end" if number * step > 0.9 * top else "middle"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{bottom}"/>')
        turn += " roomy" if crowded and number % 2 else ""
        parts.append(f'<text class="tick {turn}" x="{x}" y="{bottom + 15}">{number * step:,.10g}</text>')
    return "".join(parts)


# ---------------------------------------------------------------------- HTML


def figure(title: str, caption: str, chart: str) -> str:
    """A chart, in HTML already, below its title and what has to be known to read it. Either may be empty."""
    head = f"<h4>{escape(title)}</h4>" if title else ""
    about = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{head}{about}{chart}</figure>"


def table(caption: str, head: Sequence[str], cells: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table that scrolls inside itself, also by keyboard. Cells are HTML already.

    Kinds: `tall` is no higher than a part of a screen, `wrap` has text in its cells that may run over several lines.
    """
    name = escape(caption)
    heads = "".join(f'<th scope="col">{escape(one)}</th>' for one in head)
    top = f"<thead><tr>{heads}</tr></thead>" if head else ""
    body = "".join(
        f'<tr><th scope="row">{line[0]}</th>{"".join(f"<td>{one}</td>" for one in line[1:])}</tr>' for line in cells
    )
    return (
        f'<div class="scroll {kind}" role="region" tabindex="0" aria-label="{name}"><table><caption>{name}</caption>'
        f"{top}<tbody>{body}</tbody></table></div>"
    )


def details(summary: str, body: str) -> str:
    """What is shown when it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


STYLE = """
:root {
  color-scheme: light dark;
  --bg: #fafaf8; --card: #ffffff; --ink: #1b1f24; --muted: #57606a; --rule: #d8dce0; --grid: #e4e7ea;
  --work: #d3d9e0; --free: #f1f3f5; --on: #ffffff; --link: #0b5fa5; --notice: #fff6e0;
  --c-wait: #b3372b; --c-before: #a85b08; --c-slab: #5b4bb7; --c-ours: #0a6e6a; --c-other: #7b8590; --c-floor: #57606a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #14171b; --card: #1b1f25; --ink: #e8eaed; --muted: #a7b0ba; --rule: #363d46; --grid: #2c323a;
    --work: #454e59; --free: #242a31; --on: #14171b; --link: #7cb8f2; --notice: #332b17;
    --c-wait: #f08a78; --c-before: #e0a458; --c-slab: #b0a4f5; --c-ours: #4fc3b5; --c-other: #8b95a0;
    --c-floor: #c3cad1;
  }
}

* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 70rem; background: var(--bg); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: clamp(1.6rem, 1.1rem + 2.2vw, 2.3rem); line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 0 0 .6rem; }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .5rem; }
h4 { font-size: .95rem; margin: 0 0 .1rem; }
p { margin: .4rem 0 1rem; max-width: 46rem; }
a, summary { color: var(--link); }
code { font: .875em ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
section { border-top: 1px solid var(--rule); padding-top: 1.6rem; margin-top: 2.4rem; }
summary { cursor: pointer; padding: .3rem 0; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.lede { max-width: none; display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 .8rem; }
.lede span, figcaption, footer, .legend, .cards dt, table { font-size: .875rem; }
.lede span, figcaption, footer, .cards dt, thead th { color: var(--muted); }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0; margin: 1rem 0 0; }
nav { font-size: .9rem; }
footer { margin-top: 3rem; }

figure, .scroll, .notice, .cards div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
figure { margin: 0 0 1rem; padding: 1rem; }
figcaption { margin: 0 0 .7rem; max-width: 46rem; line-height: 1.45; }
.notice { background: var(--notice); padding: .7rem 1rem; max-width: none; }
.pair, .many { display: grid; gap: 0 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.many { grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 1fr)); }
.pair > *, .many > * { min-width: 0; }
.pair figure, .many figure { display: flex; flex-direction: column; }
.pair figcaption, .many h4 { flex: 1; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; padding: 0; margin: .2rem 0 1.2rem; }
figure .legend { margin-bottom: 0; }
.legend svg { vertical-align: middle; margin-right: .3rem; overflow: visible; }
.cards { display: grid; gap: .8rem; margin: 0 0 1rem; }
.cards { grid-template-columns: repeat(auto-fill, minmax(min(45%, 15rem), 1fr)); }
.cards div { padding: .7rem 1rem; }
.cards code { display: block; }
.cards dd { margin: .2rem 0 0; font-size: 1.35rem; }

.scroll { overflow: auto; margin: 0 0 1rem; }
.tall { max-height: 26rem; }
table { border-collapse: collapse; width: 100%; }
table, .cards dd { font-variant-numeric: tabular-nums; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th, td { padding: .4rem .8rem; border-bottom: 1px solid var(--grid); text-align: right; vertical-align: top; }
th, td { white-space: nowrap; font-weight: 400; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { position: sticky; top: 0; background: var(--card); box-shadow: 0 1px var(--rule); }
th:first-child { text-align: left; }
tbody th { white-space: normal; overflow-wrap: break-word; min-width: 8rem; }
@media (min-width: 36rem) { .wrap tbody th { min-width: 17rem; } }
.wrap td, .wrap thead th { white-space: normal; text-align: left; }
.item { display: inline-block; margin-right: 1.2rem; }
.yes { color: var(--c-ours); }
.no { color: var(--c-wait); font-weight: 600; }
@media (max-width: 36rem) {
  figure { padding: .8rem .7rem; }
  th, td { padding: .4rem .55rem; }
  .roomy { display: none; }
}

.chart { display: block; overflow: hidden; }
.over { overflow: visible; }
.chart text { font-size: 13px; fill: var(--ink); }
.chart .tick, .chart .lane { font-size: 12px; fill: var(--muted); }
.chart .middle { text-anchor: middle; }
.chart .end, .chart .value { text-anchor: end; }
.chart .value, .chart .tick { font-variant-numeric: tabular-nums; }
.chart .strong { font-weight: 600; }
.chart .on { fill: var(--on); }
.grid { stroke: var(--grid); }
.wait { --colour: var(--c-wait); } .before { --colour: var(--c-before); } .slab { --colour: var(--c-slab); }
.ours { --colour: var(--c-ours); } .other { --colour: var(--c-other); } .floor { --colour: var(--c-floor); }
rect, path.mark { fill: var(--colour); }
rect.work { fill: var(--work); }
rect.free { fill: var(--free); }
.series, path.mark { stroke: var(--colour); stroke-width: 2; }
.dashed { stroke-dasharray: 5 4; }
path.hollow { fill: var(--card); }
.chart text.wait, .chart text.before, .chart text.slab, .chart text.ours { fill: var(--colour); font-weight: 600; }
.range { stroke: var(--ink); stroke-width: 3; }
.tail { stroke: var(--muted); }
.break { stroke: var(--card); stroke-width: 3; fill: none; }
@media (max-width: 24rem) { .more { display: none; } .chart text { font-size: 12px; } }
"""
