"""The tables that are printed, in Markdown, and the same numbers as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import attrs

from batching.bench import observing
from batching.bench import prefill as pre
from batching.bench import strategies as by
from batching.bench.sections import NEEDS_GPU, ByRows, Results, Settings, medians
from batching.bench.timing import BUSY_SECONDS, SETTLE_EVERY, Samples

_REFERENCES = (by.FLAGS, by.FLOOR)


def markdown(about: dict[str, Any], settings: Settings, results: Results) -> str:
    """Everything, in the order of the sections."""
    parts = [_table(("", ""), [(key, _plain(value)) for key, value in about.items()])]
    parts += _host(results) if results.host else []
    parts += _bought(results.host) if results.host else []
    parts += _queued(results) if results.queued else []
    parts += _copies(results) if results.copies else []
    parts += _prefill(results) if results.prefill else []
    parts += _kernel(results) if results.kernel else []
    parts += _packing(results) if results.packing else []
    parts += _parts(results) if results.parts else []
    parts += _observing(results) if results.observing else []
    parts += _threads(settings, results) if results.threads else []
    if about["cuda"]:
        parts += _claims(results)
    else:
        parts += [f"Not run on the CPU: {name}, {why}." for name, why in NEEDS_GPU.items() if name in settings.sections]
    return "\n\n".join(parts)


def as_json(about: dict[str, Any], settings: Settings, results: Results) -> dict[str, Any]:
    """The result for machines, every repeat's median included; times in microseconds."""

    def by_rows(found: ByRows | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {
            str(rows): {
                name: samples.as_dict() | {"copies": results.copies_per_batch.get(name)}
                for name, samples in of_rows.items()
            }
            for rows, of_rows in found.items()
        }

    queued = by_rows(results.queued)
    for rows, of_rows in (results.queued or {}).items():
        for name, samples in of_rows.items():
            assert queued is not None
            queued[str(rows)][name]["still_busy"] = samples.still_busy
    return {
        **about,
        "settings": attrs.asdict(settings, filter=lambda attribute, _: attribute.name != "shapes"),
        "queued_work_us": BUSY_SECONDS * 1e6,
        "host": by_rows(results.host),
        "queued": queued,
        "copies": results.copies and {str(rows): numbers for rows, numbers in results.copies.items()},
        "prefill": by_rows(results.prefill),
        "kernel": results.kernel,
        "kernel_variants": results.kernel_variants,
        "packing": results.packing,
        "parts": results.parts and {str(rows): numbers for rows, numbers in results.parts.items()},
        "observing": by_rows(results.observing),
        "threads": results.threads and {name: attrs.asdict(found) for name, found in results.threads.items()},
        "claims": [{"claim": claim, "value": value, "holds": holds} for claim, value, holds in claims(results)],
        "pool": results.pool and results.pool.as_dict(),
    }


# ---------------------------------------------------------------------- sections


def _host(results: Results) -> list[str]:
    assert results.host
    parts = [
        "## Host time of building a batch\n\nMicroseconds by number of rows, flags included (not in the floor): of one "
        f"batch, medians over rounds of {SETTLE_EVERY}. Nothing is queued but the last few uploads.",
        _overview(results.host),
    ]
    for rows, samples in results.host.items():
        parts += [f"### {rows} rows", _detail(samples, results)]
    return parts


def _overview(found: ByRows) -> str:
    names = next(iter(found.values()))
    return _table(
        ("us", *map(str, found)),
        [(name, *(_us(samples[name].median) for samples in found.values())) for name in names],
    )


def _detail(samples: dict[str, Samples], results: Results) -> str:
    lines = []
    for name, one in samples.items():
        slab = by.with_equal_fill(name)
        lines.append(
            (
                name,
                str(results.copies_per_batch[name]),
                _us(one.median),
                f"{_us(min(one.medians))} to {_us(max(one.medians))}",
                _us(one.p99),
                f"{one.over(samples[by.FRESH_PINNED]):.2f}",
                "" if slab is None else f"{one.over(samples[slab]):.2f}",
                f"{one.over(samples[by.FLOOR]):.2f}",
            )
        )
    head = ("", "copies", "median us", "medians of repeats", "p99 us")
    return _table((*head, "of fresh pinned", "of the slab, equal fill", "of the floor"), lines)


def _bought(host: ByRows) -> list[str]:
    pairs = (
        ("the pool, with columns: slab checked / ours fresh", by.SLAB_CHECKED, by.OURS_COLUMNS),
        ("the pool, with records: slab / ours fresh", by.SLAB_RECORDS, by.OURS_RECORDS),
        ("the pool and the checks, with columns: slab / ours fresh", by.SLAB_COLUMNS, by.OURS_COLUMNS),
        ("records, in the slab: columns / records", by.SLAB_COLUMNS, by.SLAB_RECORDS),
        ("records, in the pool: columns / records", by.OURS_COLUMNS, by.OURS_RECORDS),
        ("one copy, no records: fresh pinned / slab", by.FRESH_PINNED, by.SLAB_COLUMNS),
        ("a fixed destination: ours fresh / fixed, records", by.OURS_RECORDS, by.FIXED_RECORDS),
        ("all: fresh pinned / ours fresh, records", by.FRESH_PINNED, by.OURS_RECORDS),
        ("all: fresh pinned / ours fixed, records", by.FRESH_PINNED, by.FIXED_RECORDS),
    )
    lines = [
        (what, *(f"{samples[one].over(samples[other]):.2f}" for samples in host.values())) for what, one, other in pairs
    ]
    return [
        "## What buys what\n\nRatios of medians by number of rows; above 1 the second is faster.",
        _table(("", *map(str, host)), lines),
    ]


def _queued(results: Results) -> list[str]:
    assert results.queued
    parts = [
        f'## Host time behind queued work\n\nEach batch right behind {BUSY_SECONDS * 1e3:.0f} ms of GPU work. "Still '
        f'busy" is the share of batches at whose end that work was still running: 0 means that the host waited for it. '
        f'"Of quiet" compares with as many builds in turn, each right after the host had waited for as much work: a '
        f"host that has waited runs slower for a while, whatever it does.",
    ]
    for rows, samples in results.queued.items():
        lines = [
            (
                name,
                _us(one.median),
                f"{_us(min(one.medians))} to {_us(max(one.medians))}",
                _us(one.p99),
                f"{one.of_quiet:.2f}",
                f"{100 * one.still_busy / one.count:.0f} %",
            )
            for name, one in samples.items()
        ]
        head = ("", "median us", "medians of repeats", "p99 us", "of quiet", "still busy")
        parts += [f"### {rows} rows, queued", _table(head, lines)]
    return parts


def _copies(results: Results) -> list[str]:
    assert results.copies
    names = next(iter(results.copies.values()))
    lines = []
    for name in names:
        if name == by.FLAGS:
            continue
        cells = []
        for of_rows in results.copies.values():
            numbers = of_rows[name]
            cells.append("host waits" if numbers is None else f"{statistics.median(numbers):.2f}")
        lines.append((name, *cells))
    return [
        "## GPU time of the copies\n\nMicroseconds of what one batch queues, copies and events, run back to back.",
        _table(("us", *map(str, results.copies)), lines),
    ]


def _prefill(results: Results) -> list[str]:
    assert results.prefill
    parts = [
        "## The whole upload of a prefill batch\n\nHost microseconds. 14 arrays, 13 without seeds; "
        f"{pre.TOKENS_EACH} new tokens a request, at most {pre.MOST_TOKENS} in all.",
    ]
    for rows, samples in results.prefill.items():
        lines = [
            (
                name,
                str(results.copies_per_batch[name]),
                _us(one.median),
                f"{_us(min(one.medians))} to {_us(max(one.medians))}",
                _us(one.p99),
                f"{samples[pre.ONE_BY_ONE_13].over(one):.2f}",
                "" if (slab := pre.with_equal_fill(name)) is None else f"{samples[slab].over(one):.2f}",
            )
            for name, one in samples.items()
        ]
        head = (
            "",
            "copies",
            "median us",
            "medians of repeats",
            "p99 us",
            "13 one by one / this",
            "slab / this, equal fill",
        )
        parts += [f"### {rows} requests", _table(head, lines)]
    return parts


def _kernel(results: Results) -> list[str]:
    assert results.kernel
    lines = []
    for label, numbers in results.kernel.items():
        cells = ["host waits" if found is None else f"{statistics.median(found):.2f}" for found in numbers.values()]
        ratio = _serial_over_ours(numbers)
        lines.append((label, *cells, "" if ratio is None else f"{ratio:.2f}"))
    parts = [
        "## `write_cache_indices`\n\nGPU microseconds of one launch, run back to back; requests x prefix + new tokens.",
        _table(("", *next(iter(results.kernel.values())), "serial / ours"), lines),
    ]
    variants = results.kernel_variants
    known = "This Triton does not say how many variants" if variants is None else f"{variants} variant(s)"
    parts.append(f"{known} of our kernel were compiled, for 1 to 2048 requests and all context lengths tried.")
    return parts


def _packing(results: Results) -> list[str]:
    assert results.packing
    notes = {
        "SamplingParams(...)": "checks, normalises and packs; when the request is made",
        "SAMPLING.pack": "of that, packing the record alone",
        "pointer": "joining the pointer to the record; when the prefix is found",
    }
    lines = []
    for name, numbers in results.packing.items():
        middle, lowest, highest = medians(numbers)
        lines.append((name, f"{middle:.2f}", f"{lowest:.2f} to {highest:.2f}", notes[name]))
    parts = ["## Packing, per request", _table(("", "median us", "medians of repeats", ""), lines)]
    if results.host:
        each = sum(statistics.median(results.packing[name]) for name in ("SAMPLING.pack", "pointer"))
        sums = [("ours fresh, columns", by.OURS_COLUMNS, 0.0), ("ours fresh, records", by.OURS_RECORDS, 0.0)]
        sums.append(("records, and packing every request", by.OURS_RECORDS, each))
        parts += [
            "The sum: what a batch costs when each of its requests was packed for this batch alone.",
            _table(
                ("us", *map(str, results.host)),
                [
                    (what, *(_us(samples[name].median + rows * cost) for rows, samples in results.host.items()))
                    for what, name, cost in sums
                ],
            ),
        ]
    return parts


def _parts(results: Results) -> list[str]:
    assert results.parts
    names = next(iter(results.parts.values()))
    lines = [
        (name, *(f"{statistics.median(of_rows[name]):.2f}" for of_rows in results.parts.values())) for name in names
    ]
    return [
        "## Where the time of one upload goes\n\nHost microseconds of ours fixed, records, by number of rows; reading "
        "the clock is in each.",
        _table(("us", *map(str, results.parts)), lines),
    ]


def _observing(results: Results) -> list[str]:
    assert results.observing
    names = next(iter(results.observing.values()))
    lines = []
    for name in names:
        cells = []
        for samples in results.observing.values():
            one, counted = samples[name], samples[observing.COUNTED]
            cells += [_us(one.median), _us(one.p99), f"{one.over(counted):.2f}"]
        lines.append((name, *cells))
    head = [text for rows in results.observing for text in (f"{rows} rows, median us", "p99 us", "of counted")]
    return [
        "## What observing costs\n\nOurs fixed, records, flags included. Counting is always on, and in every number of "
        "this report.",
        _table(("", *head), lines),
    ]


def _threads(settings: Settings, results: Results) -> list[str]:
    assert results.threads
    lines = [
        (
            name,
            *(_us(value) for value in found.percentiles_us.values()),
            "not counted" if found.pinned_allocations is None else str(found.pinned_allocations),
            "; ".join(found.wrong[:2]) or "nothing",
        )
        for name, found in results.threads.items()
    ]
    head = ("host us of a batch", *next(iter(results.threads.values())).percentiles_us)
    return [
        f"## {settings.threads} threads, {settings.thread_batches:,} batches each\n\n16 rows, each thread on a stream "
        "of its own; no flags; after a warm-up of a tenth. The threads share one interpreter lock, and wait for it.",
        _table((*head, "pinned allocations", "wrong"), lines),
    ]


# ---------------------------------------------------------------------- what was to be shown


def _claims(results: Results) -> list[str]:
    lines = [(claim, value, "yes" if holds else "NO") for claim, value, holds in claims(results)]
    return ["## What was to be shown", _table(("", "measured", "holds"), lines)] if lines else []


def claims(results: Results) -> list[tuple[str, str, bool]]:
    """What this project says of itself, each with what this run measured and whether it holds."""
    found: list[tuple[str, str, bool]] = []
    for rows, samples in (results.host or {}).items():
        for ours, least in ((by.OURS_RECORDS, _FRESH_GOALS.get(rows)), (by.FIXED_RECORDS, _FIXED_GOALS.get(rows))):
            if least is not None:
                gain = samples[by.FRESH_PINNED].over(samples[ours])
                claim = f"{ours}: {least:g}x faster than {by.FRESH_PINNED}, {rows} rows"
                found.append((claim, f"{gain:.2f}x", gain >= least))
    for rows, samples in (results.host or {}).items():
        for fill, slab, ours in (
            ("columns", by.SLAB_CHECKED, by.OURS_COLUMNS),
            ("records", by.SLAB_RECORDS, by.OURS_RECORDS),
        ):
            ratio = samples[ours].over(samples[slab])
            found.append(
                (f"never slower than the slab with equal fill, {fill}, {rows} rows", f"{ratio:.2f} of it", ratio <= 1)
            )
    for rows, samples in (results.host or {}).items():
        if rows <= 16:
            ratio = samples[by.FIXED_RECORDS].over(samples[by.FLOOR])
            found.append((f"ours fixed at most 2.5x the floor, {rows} rows", f"{ratio:.2f}x", ratio <= 2.5))
    for rows, parts in (results.parts or {}).items():
        clock = statistics.median(parts[observing.CLOCK])
        for name, where in ((observing.CONDUCTING, "before each batch"), (observing.COLD, "after a wait")):
            took = statistics.median(parts[name]) - clock
            claim = f"conducting, without fill and copy, {where}, the clock taken off, at most 4 us, {rows} rows"
            found.append((claim, f"{took:.2f} us", took <= 4))
    for rows, samples in (results.queued or {}).items():
        names = (by.OURS_COLUMNS, by.OURS_RECORDS, by.FIXED_COLUMNS, by.FIXED_RECORDS)
        ratio = max(samples[name].of_quiet for name in names)
        busy = all(samples[name].still_busy == samples[name].count for name in names)
        value = f"{ratio:.2f}x at most" + ("" if busy else ", but the queue ran dry")
        found.append((f"behind queued work within 2x of quiet, {rows} rows", value, ratio <= 2 and busy))
    for rows, samples in (results.prefill or {}).items():
        if rows in (1, 64):
            for ours in (pre.PREFILL_OURS_RECORDS, pre.PREFILL_FIXED_RECORDS):
                gain = samples[pre.ONE_BY_ONE_13].over(samples[ours])
                claim = f"whole prefill upload, {ours}: 2.5x less host time than one by one, {rows} requests"
                found.append((claim, f"{gain:.2f}x less", gain >= 2.5))
    for label, numbers in (results.kernel or {}).items():
        kernel_gain = _serial_over_ours(numbers)
        if kernel_gain is not None:
            least = 3.0 if label in _THREE_TIMES else 1 / 1.1
            claim = "3x less GPU time than the serial form" if least > 1 else "at most 10 % slower than the serial form"
            found.append((f"kernel {claim}, {label}", f"{kernel_gain:.2f}x less", kernel_gain >= least))
    for name, threaded in (results.threads or {}).items():
        if name != by.FRESH_PINNED and threaded.pinned_allocations is not None:
            pinned, wrong = threaded.pinned_allocations, len(threaded.wrong)
            claim = f"many threads, {name}: nothing pinned after the warm-up, nothing wrong"
            found.append((claim, f"{pinned} pinned, {wrong} wrong", pinned == wrong == 0))
    if results.kernel_variants is not None:
        found.append(("one compiled variant of the kernel", str(results.kernel_variants), results.kernel_variants == 1))
    return found


_FRESH_GOALS = {1: 2.0, 16: 2.2, 64: 2.8, 256: 4.8, 1024: 9.0}
_FIXED_GOALS = {1: 4.5, 16: 4.5, 64: 6.0, 256: 9.0, 1024: 13.0}
"""What was aimed at, by number of rows."""
_THREE_TIMES = ("1 x 131072 + 64", "8 x 32768 + 256", "1024 x 256 + 16", "2048 x 64 + 8")


def _serial_over_ours(numbers: dict[str, list[float] | None]) -> float | None:
    serial, ours = numbers["serial"], numbers["ours"]
    if serial is None or ours is None:
        return None
    return statistics.median(a / b for a, b in zip(serial, ours, strict=True))


# ---------------------------------------------------------------------- Markdown


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, marks, *lines))


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
