"""One self-contained HTML page of a run: before and after as a timeline, what is against us, charts, all numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TypeVar

from batching.bench import prefill as pre
from batching.bench import strategies as by
from batching.bench.document import Document, Gpu, Timing, Timings, ratio
from batching.bench.pieces import STYLE, Bar, Line, Way, bars, details, figure, legend, lines, table, timeline, us
from batching.bench.sections import COPIES, HOST, KERNEL, NEEDS_GPU, PACKING, PREFILL, QUEUED

T = TypeVar("T")


def page(document: Document) -> str:
    """The page. Every number on it is the document's, or a ratio or sum of such numbers, as the text beside it says."""

    def shown(section: str, found: T | None, draw: Callable[[Document, T], str]) -> str:
        return _absent(document, section) if found is None else draw(document, found)

    sections = (
        ("timeline", "Before and after", "Before and after", _before_and_after(document)),
        ("against", "Against us", "What does not favour us", _against(document)),
        (HOST, "Host time", "Host time of building a batch", shown(HOST, document.host, _host)),
        (QUEUED, "Queued", "Host time behind queued work", shown(QUEUED, document.queued, _queued)),
        (COPIES, "Copies", "GPU time of the copies", shown(COPIES, document.copies, _copies)),
        (PREFILL, "Prefill", "The whole upload of a prefill batch", shown(PREFILL, document.prefill, _prefill)),
        (KERNEL, "Kernel", "The kernel: write_cache_indices", shown(KERNEL, document.kernel, _kernel)),
        (PACKING, "Packing", "What packing the records costs", shown(PACKING, document.packing, _packing)),
        ("pool", "Pool", "What the pool counted", shown("pool", document.pool, _pool)),
        ("run", "The run", "The run", _run(document)),
    )
    nav = "".join(f'<li><a href="#{anchor}">{short}</a></li>' for anchor, short, _, _ in sections)
    main = "".join(f'<section id="{anchor}"><h2>{title}</h2>{body}</section>' for anchor, _, title, body in sections)
    device = escape(str(document.about["device"]))
    facts = "".join(
        f"<span>{key} {escape(str(document.about[key]))}</span>"
        for key in ("commit", "torch", "cuda", "triton", "repeats")
        if document.about.get(key) is not None
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Uploading a batch, before and after: {device}</title><style>{STYLE}</style></head><body>"
        "<header><h1>Uploading a batch: before and after</h1>"
        f'<p class="lede"><strong>{device}</strong> {facts}</p>'
        f'{"" if document.on_gpu else _ON_CPU}<nav aria-label="Sections"><ul>{nav}</ul></nav></header>'
        f"<main>{main}</main>"
        "<footer><p>Written by <code>python -m batching bench --report</code> from the results of one run. The page "
        "runs no script and loads nothing.</p></footer></body></html>\n"
    )


_ON_CPU = (
    '<p class="notice">This run was made on a CPU. Nothing is pinned there and no copy is asynchronous: the page shows '
    "that the benchmark works, and says nothing about a GPU.</p>"
)


def _absent(document: Document, section: str, matters: str = "") -> str:
    """What is missing, why, and what cannot be shown without it."""
    if not document.on_gpu and section in NEEDS_GPU:
        return f'<p class="notice">Not measured on a CPU: {section}, {NEEDS_GPU[section]}. {matters}</p>'
    return f'<p class="notice">This run did not measure: {section}. {matters}</p>'


# ---------------------------------------------------------------------- before and after

_WAYS = ((by.ON_DEVICE, "before"), (by.FRESH_PINNED, "before"), (by.OURS_RECORDS, "after"))
"""What the timeline shows: the host stalled behind the GPU, many copies one by one, one copy from the ring."""
_MAGNIFIED = (
    by.ON_DEVICE,
    by.FRESH_PINNED,
    by.SLAB_COLUMNS,
    by.SLAB_RECORDS,
    by.OURS_COLUMNS,
    by.OURS_RECORDS,
    by.FIXED_RECORDS,
)
"""What is shown beside it, the strongest rival among them."""


def _before_and_after(document: Document) -> str:
    if document.queued is None:
        missing = _absent(document, QUEUED, "There is no timeline without it.")
        return missing if document.copies else missing + _absent(document, COPIES)
    return (
        "<p>A scheduler builds the next batch while the GPU still works on the last one. What counts is when the "
        "host is free again. Each way below builds the same batches, right behind the same queued GPU work.</p>"
        + _by_rows(document.queued, lambda rows: _scene(document, rows), "")
    )


def _scene(document: Document, rows: int) -> str:
    queued, copies = (document.queued or {})[rows], (document.copies or {}).get(rows)
    names = [name for name in _MAGNIFIED if name in queued]
    host = bars(
        f"Host time behind queued work, {_requests(rows)}, µs",
        [_bar(name, queued[name], _count(queued[name])) for name in names],
        cut=True,
    )
    figures = figure("The host's part, magnified", f"µs until the host is free again. {_BARS_SAY} {_CUT_SAYS}", host)
    if copies is None:
        figures += _absent(document, COPIES, "The GPU time of the copies is not shown.")
    else:
        gpu = bars(
            f"GPU time of the copies, {_requests(rows)}, µs",
            [_gpu_bar(name, copies[name]) for name in names if name in copies],
        )
        about = f"µs of GPU time for the copies of one batch and the events behind them. {_GPU_BARS_SAY}"
        figures += figure("The GPU's part, magnified", about, gpu)
    return _timeline(document, queued, copies or {}, rows) + f'<div class="pair">{figures}</div>'


def _timeline(document: Document, queued: Mapping[str, Timing], copies: Mapping[str, Gpu], rows: int) -> str:
    work, length = document.queued_work_us, us(document.queued_work_us)
    stalled = queued.get(by.ON_DEVICE)
    if work is None and stalled is not None and stalled.still_busy == 0:
        work, length = stalled.median, f"at most {us(stalled.median)}"  # the host waited for its end, every time
    shown = [(name, tag) for name, tag in _WAYS if name in queued]
    if work is None or not shown:
        return '<p class="notice">No timeline: the results do not say how much GPU work was queued, or for no way.</p>'
    ways = []
    for name, tag in shown:
        gpu = _median(copies.get(name))
        count = _count(queued[name]) or "copies"
        ways.append(
            Way(
                name=name,
                kind=_kind(name),
                tag=tag,
                host=queued[name].median,
                work=work,
                gpu=gpu,
                host_note=f"{'waits, ' if queued[name].still_busy == 0 else ''}free after {us(queued[name].median)} µs",
                gpu_note=count if gpu is None else f"{count}, {us(gpu)} µs",
            )
        )
    caption = (
        f"µs from the start of a build. Host bars: median time of a build behind {length} µs of queued work. Copies "
        "run right behind that work; where their GPU time could be measured it is given, and their mark is wider "
        "than to scale."
    )
    if any(queued[name].still_busy == 0 for name, _ in shown):
        caption += " “Waits”: at the end of every build the queued work was over."
    return figure("When the host is free again", caption, timeline(f"Host and GPU, {_requests(rows)}, µs", ways))


def _count(timing: Timing) -> str:
    return "" if timing.copies is None else f"{timing.copies} {'copy' if timing.copies == 1 else 'copies'}"


# ---------------------------------------------------------------------- what speaks against us


def _against(document: Document) -> str:
    if not (document.host or document.queued or document.prefill or document.kernel):
        return '<p class="notice">This run compared nothing with ours.</p>'
    parts = []
    if document.on_gpu and document.claims:
        claims = sorted(document.claims, key=lambda claim: claim[2])
        failed = sum(not holds for _, _, holds in claims)
        parts.append(
            f"<p>This project says {len(claims)} things of itself that a run can check. In this run "
            f"<strong>{failed}</strong> of them did not hold; they stand first.</p>"
        )
        verdicts = ('<span class="no">no</span>', '<span class="yes">yes</span>')
        cells = [(escape(claim), escape(value), verdicts[holds]) for claim, value, holds in claims]
        parts.append(table("What the project says of itself", ("claim", "measured", "holds"), cells, "tall"))
    faster = [
        *_faster(document.host, by.OURS_RECORDS, "building a batch"),
        *_faster(document.queued, by.OURS_RECORDS, "behind queued work"),
        *_faster(document.prefill, pre.PREFILL_OURS_RECORDS, "whole prefill upload"),
    ]
    for label, numbers in (document.kernel or {}).items():
        faster.append(
            (f"kernel, {escape(label)}", _rivals({"serial": _share(numbers.get("serial"), numbers.get("ours"))}))
        )
    parts.append(
        f"<h3>Who was faster</h3><p>Rivals that needed less time than “{by.OURS_RECORDS}”, or for a prefill batch "
        f"than “{pre.PREFILL_OURS_RECORDS}”, and their time as a share of ours: the median of the ratios of each "
        f"repeat's medians. Records are taken as packed beforehand: see what packing costs, below. {_UNSAFE_SAYS}</p>"
    )
    parts.append(table("Who was faster", ("measured", "faster, and its share of our time"), faster, "wrap tall"))
    return "".join(parts)


def _faster(section: Timings | None, ours: str, what: str) -> list[tuple[str, str]]:
    found = []
    for rows, timings in (section or {}).items():
        if ours in timings:
            rivals = [name for name in timings if _kind(name) not in ("ours", "floor")]
            shares = {_name(name): timings[name].over(timings[ours]) for name in rivals}
            found.append((f"{what}, {_requests(rows)}", _rivals(shares)))
    return found


def _rivals(shares: Mapping[str, float | None]) -> str:
    """Those below 1, the fastest first; whoever cannot be compared is named as well."""
    items = [
        f'<span class="item">{escape(name)} <b>{"not comparable" if share is None else f"{share:.2f}"}</b></span>'
        for name, share in sorted(shares.items(), key=lambda item: item[1] or 0.0)
        if share is None or share < 1
    ]
    return "".join(items) or "nobody"


# ---------------------------------------------------------------------- sections


def _host(_: Document, host: Timings) -> str:
    return (
        "<p>Six columns and the five flags; nothing is queued but the last few uploads. The reference is "
        f"“{by.FRESH_PINNED}”. Records are packed when a request is made, which is not in these times.</p>"
        + _over_rows(host, _HOST_LINES)
        + _by_rows(host, lambda rows: _all_bars(host[rows], by.FRESH_PINNED, f"Host time, {_requests(rows)}, µs"))
        + _numbers(
            host,
            {
                "of fresh pinned": lambda _: by.FRESH_PINNED,
                "of slab, equal fill": by.with_equal_fill,
                "of floor": _floor,
            },
        )
    )


def _queued(document: Document, queued: Timings) -> str:
    def of_quiet(timing: Timing) -> str:
        return "–" if timing.of_quiet is None else f"{timing.of_quiet:.2f}"

    cells = [
        (str(rows), escape(_name(name)), *_times(timing), of_quiet(timing), _busy(timing))
        for rows, timings in queued.items()
        for name, timing in timings.items()
    ]
    head = ("requests", "", *_TIMES, "of quiet", "still busy")
    return (
        "<p>The same builds, each right behind queued GPU work. “Still busy” is the share of builds at whose end "
        "that work was still running: 0 % means that the host waited for it. “Of quiet” compares with as many builds "
        "in turn, each right after the host had waited for as much. Samples are few, so p99 is close to the worst.</p>"
        + _by_rows(
            queued,
            lambda rows: _all_bars(
                queued[rows], by.FRESH_PINNED, f"Host time behind queued work, {_requests(rows)}, µs", cut=True
            ),
        )
        + details("All numbers", table("Host time behind queued work, µs", head, cells, "tall"))
    )


def _copies(_: Document, copies: Mapping[int, Mapping[str, Gpu]]) -> str:
    series = [
        _line(name, mark, [_median(found.get(name)) for found in copies.values()])
        for name, mark in _COPY_LINES.items()
        if any(found.get(name) for found in copies.values())
    ]
    names = [name for name in next(iter(copies.values())) if name != by.FLAGS]
    cells = [
        (escape(_name(name)), *(_gpu(found[name]) if name in found else "–" for found in copies.values()))
        for name in names
    ]
    chart = lines("GPU time of the copies, µs, by requests", [*map(str, copies)], series)
    return (
        "<p>What one batch queues, copies and the events behind them, run back to back; no host time is in it. Where "
        "the host has to wait there is no number.</p>"
        + figure("Medians", "µs, by the number of requests. The axis is logarithmic.", chart + legend(series))
        + details("All numbers", table("GPU time of the copies, µs, by requests", ("", *map(str, copies)), cells))
    )


def _prefill(_: Document, prefill: Timings) -> str:
    reference = pre.ONE_BY_ONE_13
    return (
        "<p>Host time for all arrays of a prefill batch, token ids among them: one by one from fresh pinned memory, "
        "in one fresh slab, in one lease.</p>"
        + _over_rows(prefill, _PREFILL_LINES)
        + _by_rows(
            prefill, lambda rows: _all_bars(prefill[rows], reference, f"Whole prefill upload, {_requests(rows)}, µs")
        )
        + _numbers(prefill, {"of 13 one by one": lambda _: reference, "of slab, equal fill": pre.with_equal_fill})
    )


def _kernel(document: Document, kernel: Mapping[str, Mapping[str, Gpu]]) -> str:
    names = next(iter(kernel.values()))
    figures, cells = [], []
    for label, numbers in kernel.items():
        share = _share(numbers.get("ours"), numbers.get("serial"))
        of_serial = "–" if share is None else f"{share:.2f}"
        items = [_gpu_bar(name, found, of_serial if name == "ours" else "") for name, found in numbers.items()]
        figures.append(figure(label, "", bars(f"Kernel, {label}, µs", items)))
        cells.append((escape(label), *(_gpu(numbers[name]) if name in numbers else "–" for name in names), of_serial))
    variants = document.kernel_variants
    return (
        "<p>µs of GPU time for one launch, by requests × prefix + new tokens; each chart has an axis of its own. "
        "“Serial” is one program for each request, as engines have it, and the second number of ours is the share of "
        f"it; “nothing” is a kernel that does nothing. {_GPU_BARS_SAY}</p>"
        + f'<div class="many">{"".join(figures)}</div>'
        + ("" if variants is None else f"<p>Variants of our kernel compiled for all shapes tried: {variants}.</p>")
        + details(
            "All numbers",
            table("GPU time of one launch, µs", ("", *names, "ours, of serial"), cells),
        )
    )


def _packing(document: Document, packing: Mapping[str, Sequence[float]]) -> str:
    cells = [
        (escape(name), us(statistics.median(found)), us(min(found)), us(max(found))) for name, found in packing.items()
    ]
    text = (
        "<p>µs of host time for each request, when it is made: <code>SamplingParams(…)</code> checks, normalises and "
        "packs; <code>SAMPLING.pack</code> is the packing in it; the pointer is joined when the prefix is found.</p>"
        + table("Packing, µs for each request", ("", "median", "lowest", "highest"), cells)
    )
    each = [statistics.median(packing[name]) for name in ("SAMPLING.pack", "pointer") if name in packing]
    if not document.host or len(each) < 2:
        return text
    sums = [
        (
            label,
            *(us(found[name].median + rows * cost) if name in found else "–" for rows, found in document.host.items()),
        )
        for label, name, cost in (
            (by.OURS_COLUMNS, by.OURS_COLUMNS, 0.0),
            (by.OURS_RECORDS, by.OURS_RECORDS, 0.0),
            ("records, and packing every request", by.OURS_RECORDS, sum(each)),
        )
    ]
    return (
        f"{text}<p>The sum, in µs by the number of requests: what a batch costs if each of its requests was packed for "
        "this batch alone.</p>" + table("Host time with packing, µs, by requests", ("", *map(str, document.host)), sums)
    )


_POOL = {
    "uploads": "copies queued",
    "fields": "fields they carried",
    "leases_waited": "leases that waited for a slot",
    "met_in_flight": "slots met in flight, passed over",
    "slots": "slots in the ring",
    "in_flight_peak": "most slots in flight at once",
    "allocations": "host buffers ever made",
    "pinned_bytes": "bytes pinned",
}


def _pool(_: Document, stats: Mapping[str, int]) -> str:
    cards = "".join(
        f"<div><dt>{meaning}<code>{key}</code></dt><dd>{stats[key]:,}</dd></div>"
        for key, meaning in _POOL.items()
        if key in stats
    )
    cells = [(f"<code>{escape(key)}</code>", f"{value:,}") for key, value in stats.items()]
    return (
        "<p><code>pool.stats()</code> of the one pool behind our times of host, queued and prefill; comparing and "
        f'warming up count as well.</p><dl class="cards">{cards}</dl>'
        + details("Every key", table("pool.stats()", ("key", "value"), cells, "tall"))
    )


def _run(document: Document) -> str:
    cells = [(escape(key), "–" if value is None else escape(str(value))) for key, value in document.about.items()]
    return "<p>What was measured, how, and what each strategy stands for: <code>docs/bench.md</code>.</p>" + table(
        "The run", (), cells, "wrap"
    )


# ---------------------------------------------------------------------- strategies by name

_BARS_SAY = "Bar: median. Thick line: lowest to highest median of the repeats. Thin line: up to p99."
_GPU_BARS_SAY = "Bar: median. Thick line: lowest to highest of the repeats."
_CUT_SAYS = "A broken bar is more than four times as long as any other."
_UNSAFE_SAYS = "†\u00a0unsafe: the last copy may still read the buffer that is rewritten."

# What is drawn as lines, and the form of its points. Bars show every strategy.
_HOST_LINES = {
    by.ON_DEVICE: "cross",
    by.FRESH_PINNED: "square",
    by.ADMITTED_ONE: "triangle",
    by.SLAB_COLUMNS: "diamond",
    by.SLAB_RECORDS: "diamond",
    by.OURS_COLUMNS: "circle",
    by.OURS_RECORDS: "circle",
    by.FIXED_RECORDS: "square",
    by.FLOOR: "cross",
}
_COPY_LINES = {
    by.PAGEABLE: "triangle",
    by.FRESH_PINNED: "square",
    by.SLAB_RECORDS: "diamond",
    by.OURS_RECORDS: "circle",
    by.FIXED_RECORDS: "square",
    by.FLOOR: "cross",
}
_PREFILL_LINES = {
    pre.ONE_BY_ONE_13: "square",
    pre.PREFILL_SLAB_COLUMNS: "diamond",
    pre.PREFILL_SLAB_RECORDS: "diamond",
    pre.PREFILL_OURS_COLUMNS: "circle",
    pre.PREFILL_OURS_RECORDS: "circle",
    pre.PREFILL_FIXED_RECORDS: "square",
}


def _kind(name: str) -> str:
    """The class of its colour."""
    if name == by.ON_DEVICE:
        return "wait"
    if name in (by.FRESH_PINNED, pre.ONE_BY_ONE_13, pre.ONE_BY_ONE_14, "serial"):
        return "before"
    if name.startswith(("ours", "one lease")):
        return "ours"
    if "slab" in name:
        return "slab"
    return "floor" if name in (by.FLAGS, by.FLOOR, "nothing") else "other"


def _name(name: str) -> str:
    """With a dagger where nothing keeps a buffer from being rewritten under the last copy."""
    return f"{name} †" if name == by.REWRITTEN or name.startswith("written at admission") else name


def _floor(name: str) -> str:
    return by.FLOOR


# ---------------------------------------------------------------------- charts


def _over_rows(section: Timings, shown: Mapping[str, str]) -> str:
    """Medians and p99 by the number of requests."""
    names = [name for name in shown if any(name in timings for timings in section.values())]

    def series(value: Callable[[Timing], float]) -> list[Line]:
        return [
            _line(name, shown[name], [value(found[name]) if name in found else None for found in section.values()])
            for name in names
        ]

    medians, p99 = series(lambda timing: timing.median), series(lambda timing: timing.p99)
    categories = [*map(str, section)]
    about = "µs, by requests. The axes are logarithmic, and the same."
    return (
        '<div class="pair">'
        + figure("Median", about, lines("Median, µs, by requests", categories, medians, p99))
        + figure("p99", "µs, over all samples of all repeats.", lines("p99, µs, by requests", categories, p99, medians))
        + f"</div>{legend(medians)}"
    )


def _all_bars(timings: Mapping[str, Timing], reference: str, title: str, *, cut: bool = False) -> str:
    shares = {name: _over(timings, name, reference) for name in timings}
    items = [_bar(name, timing, shares[name]) for name, timing in timings.items()]
    about = f"µs, and the share of “{reference}”. {_BARS_SAY}"
    if any(_name(name) != name for name in timings):
        about += f" {_UNSAFE_SAYS}"
    if cut:
        about += f" {_CUT_SAYS}"
    return figure("Every strategy", about, bars(title, items, cut=cut))


def _by_rows(section: Mapping[int, object], draw: Callable[[int], str], kind: str = "pair") -> str:
    """The number of requests nearest to 64, a usual batch, and the others on request."""
    first = min(section, key=lambda rows: (abs(math.log2(rows / 64)), rows))
    others = [rows for rows in section if rows != first]
    shown = f"<h3>A batch of {_requests(first)}</h3>{draw(first)}"
    if not others:
        return shown
    more = "".join(f"<div><h3>A batch of {_requests(rows)}</h3>{draw(rows)}</div>" for rows in others)
    return shown + details(f"The same for {', '.join(map(str, others))} requests", f'<div class="{kind}">{more}</div>')


def _bar(name: str, timing: Timing, note: str) -> Bar:
    return Bar(_name(name), _kind(name), timing.median, timing.lowest, timing.highest, timing.p99, note)


def _gpu_bar(name: str, found: Gpu, note: str = "") -> Bar:
    if found is None:
        return Bar(_name(name), _kind(name), None, note="host waits")
    return Bar(_name(name), _kind(name), statistics.median(found), min(found), max(found), note=note)


def _line(name: str, mark: str, values: Sequence[float | None]) -> Line:
    return Line(_name(name), _kind(name), mark, values, dashed=name.endswith("columns"))


# ---------------------------------------------------------------------- numbers as text

_TIMES = ("median", "lowest", "highest", "p99")


def _times(timing: Timing) -> tuple[str, ...]:
    return us(timing.median), us(timing.lowest), us(timing.highest), us(timing.p99)


def _numbers(section: Timings, references: Mapping[str, Callable[[str], str | None]]) -> str:
    """A table of every time, with its share of the reference for each name."""
    cells = [
        (
            str(rows),
            escape(_name(name)),
            "–" if timing.copies is None else str(timing.copies),
            *_times(timing),
            *(_over(timings, name, reference(name)) for reference in references.values()),
        )
        for rows, timings in section.items()
        for name, timing in timings.items()
    ]
    return details(
        "All numbers", table("Host time, µs", ("requests", "", "copies", *_TIMES, *references), cells, "tall")
    )


def _over(timings: Mapping[str, Timing], name: str, reference: str | None) -> str:
    other = None if reference is None else timings.get(reference)
    share = None if other is None else timings[name].over(other)
    return "–" if share is None else f"{share:.2f}"


def _busy(timing: Timing) -> str:
    if timing.still_busy is None or not timing.samples:
        return "–"
    return f"{100 * timing.still_busy / timing.samples:.0f} %"


def _median(found: Gpu) -> float | None:
    return None if found is None else statistics.median(found)


def _gpu(found: Gpu) -> str:
    return "host waits" if found is None else us(statistics.median(found))


def _share(these: Gpu, those: Gpu) -> float | None:
    return None if these is None or those is None else ratio(these, those)


def _requests(rows: int) -> str:
    return f"{rows} request{'' if rows == 1 else 's'}"
