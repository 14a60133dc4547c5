"""The page of a run, from a CPU run and from a GPU-like document: its numbers, its texts, its layout in a browser."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import statistics
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from batching.__main__ import main
from batching.bench import command, prefill, strategies, timing
from batching.bench.document import DocumentError, load, parse
from batching.bench.page import page
from batching.bench.pieces import STYLE, Bar, Line, bars, lines, us
from batching.bench.report import as_json
from batching.bench.sections import Results, Settings
from batching.bench.strategies import (
    FIXED_COLUMNS,
    FIXED_RECORDS,
    FLOOR,
    FRESH_PINNED,
    ON_DEVICE,
    OURS_COLUMNS,
    OURS_RECORDS,
    SLAB_CHECKED,
    SLAB_COLUMNS,
    SLAB_RECORDS,
)
from batching.bench.timing import Samples
from staging import StagingPool

TINY = ["bench", "--device", "cpu", "--rows", "1,3", "--repeats", "2", "--batches", "3"]
SLABS = (SLAB_COLUMNS, SLAB_CHECKED, SLAB_RECORDS)
OURS = (OURS_COLUMNS, OURS_RECORDS, FIXED_COLUMNS, FIXED_RECORDS)
FEW = (ON_DEVICE, FRESH_PINNED, *SLABS, *OURS, FLOOR)
"""What the claims are about, and what they compare with."""
SECTIONS = ("host", "queued", "copies", "prefill", "kernel", "packing", "pool")


def names_of(module: Any) -> list[str]:
    names = [name for name in vars(module) if name.isupper() and not name.startswith("_") and name != "SEEDS"]
    return [getattr(module, name) for name in names if isinstance(getattr(module, name), str)]


def gpu_document(names: list[str] | tuple[str, ...] = (), rows: tuple[int, ...] = (1, 64, 1024)) -> Any:
    """What `--json` writes on a GPU, by the code that writes it, with times made up from a seed."""
    dice = random.Random(7)

    def samples(base: float, busy: bool = True) -> Samples:
        repeats = [[int(base * dice.uniform(800, 1600)) for _ in range(10)] for _ in range(3)]
        return Samples(repeats, still_busy=30 * busy)

    def gpu(base: float) -> list[float]:
        return [base * dice.uniform(0.9, 1.1) for _ in range(3)]

    names = names or names_of(strategies)
    host = {count: {name: samples(40 + 10 * at + count / 2) for at, name in enumerate(names)} for count in rows}
    queued = {count: {name: samples(60 + 13 * at + count / 2) for at, name in enumerate(names)} for count in rows}
    for of_rows in queued.values():
        for one in of_rows.values():
            one.quiet = [[number // 2 for number in repeat] for repeat in one.repeats]
    for count in rows:  # a host that waits for the work, and once for far longer
        busy = samples(45_000 if count == rows[0] else 9000, busy=False)
        busy.quiet = [[1000] * 10] * 3
        queued[count][ON_DEVICE] = busy
    with StagingPool("cpu") as pool:
        results = Results(
            host=host,
            queued=queued,
            copies={count: {name: None if name == ON_DEVICE else gpu(9) for name in names} for count in rows},
            prefill={count: {name: samples(300 + count) for name in names_of(prefill)} for count in rows},
            kernel={
                label: {"serial": gpu(base), "ours": gpu(3.4), "nothing": gpu(1.3)}
                for label, base in (("1 x 131072 + 64", 53.0), ("1 x 0 + 128", 1.9))
            },
            kernel_variants=1,
            packing={"SamplingParams(...)": gpu(60), "SAMPLING.pack": gpu(30), "pointer": gpu(0.2)},
            copies_per_batch={name: 6 if "fresh pinned" in name else 1 for name in (*names, *names_of(prefill))},
            pool=pool.stats(),
        )
    about = {"device": "NVIDIA H200", "cuda": "13.0", "torch": "2.11.0", "commit": "abc1234", "repeats": 3}
    return json.loads(json.dumps(as_json(about, Settings(rows=rows, repeats=3), results)))


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The document and the page of one real run."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing.gc, "collect", lambda: 0)  # takes longer than all else here
        assert main([*TINY, "--json", str(folder / "bench.json"), "--report", str(folder / "page.html")]) == 0
    return folder / "bench.json", folder / "page.html"


class Text(HTMLParser):
    """The elements and what is read on the page; fails where a tag is not closed."""

    def __init__(self, html: str, without: str = "style") -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.parts: list[str] = []
        self.without = without
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append((tag, dict(attributes).get("class") or ""))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if not any(tag == "style" or self.without in (tag, *kind.split()) for tag, kind in self.open):
            self.parts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.parts)


def numbers_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text))


def section(html: str, anchor: str) -> str:
    return re.search(f'<section id="{anchor}">.*?</section>', html, re.S).group()


# ---------------------------------------------------------------------- a CPU run


def test_a_cpu_run_says_what_is_missing_and_invents_nothing(cpu_run):
    """No timeline, no copies, no kernel, no verdicts; what was measured is there."""
    html = cpu_run[1].read_text(encoding="utf-8")
    read = Text(html).text
    for absent in ("queued", "copies", "kernel"):
        assert f"Not measured on a CPU: {absent}, " in read
    assert "There is no timeline without it." in read
    assert "<svg" not in section(html, "timeline")
    assert "says nothing about a GPU" in read
    assert "things of itself" not in read
    for anchor in ("host", "prefill"):
        assert section(html, anchor).count('class="chart"') == 4  # median, p99, and bars for each number of rows


def test_a_kept_result_makes_the_same_page_and_measures_nothing(cpu_run, tmp_path, monkeypatch, capsys):
    """`--from` what `--json` wrote."""
    monkeypatch.setattr(command, "bench_pool", lambda *_: pytest.fail("measured"))
    again = tmp_path / "again.html"
    assert main(["bench", "--from", str(cpu_run[0]), "--report", str(again)]) == 0
    assert again.read_bytes() == cpu_run[1].read_bytes()
    assert capsys.readouterr() == ("", "")


# ---------------------------------------------------------------------- a GPU-like document


def test_the_timeline_is_to_scale():
    """Each host bar is as long, beside the queued work, as the median of that way in this document says."""
    document = gpu_document()
    html = section(page(parse(document)), "timeline")
    charts = re.findall(r'aria-label="Host and GPU, (\d+) requests?, µs"(.*?)</svg>', html, re.S)
    assert [rows for rows, _ in charts] == ["64", "1", "1024"]  # the usual batch first
    for rows, chart in charts:
        queued = document["queued"][rows]
        host = re.findall(r'<rect class="(wait|before|ours)" x="12.00%" y="\d+" width="([\d.]+)%"', chart)
        (work,) = {float(width) for width in re.findall(r'<rect class="work" .*?width="([\d.]+)%"', chart)}
        assert [kind for kind, _ in host] == ["wait", "before", "ours"]
        for (_, width), name in zip(host, (ON_DEVICE, FRESH_PINNED, OURS_RECORDS), strict=True):
            median = queued[name]["median_us"]
            assert float(width) / work == pytest.approx(median / document["queued_work_us"], abs=1e-3)
            assert f"free after {us(median)} µs" in chart
        copies = document["copies"][rows]
        assert f">1 copy, {us(statistics.median(copies[OURS_RECORDS]))} µs" in chart
        assert ">6 copies, " in chart
        assert chart.count("waits, ") == 1  # only where the queued work was over every time


def test_an_older_document_bounds_the_queued_work_or_shows_no_timeline():
    """Without its length: the host that waited for it is the bound; if nobody waited there is none."""
    document = gpu_document()
    del document["queued_work_us"]
    bound = us(document["queued"]["64"][ON_DEVICE]["median_us"])
    assert f"at most {bound} µs of queued work" in page(parse(document))
    for rows in document["queued"].values():
        rows[ON_DEVICE]["still_busy"] = 1
    html = page(parse(document))
    assert "Host and GPU, " not in html
    assert "No timeline: the results do not say" in html


@pytest.mark.parametrize("absent", SECTIONS)
def test_a_section_that_was_not_asked_for_is_named(absent):
    """And all others are still there."""
    document = gpu_document()
    document[absent] = None
    html = page(parse(document))
    assert f"This run did not measure: {absent}." in section(html, "pool" if absent == "pool" else absent)
    for other in {*SECTIONS} - {absent}:
        assert "did not measure" not in section(html, other)
    assert ("did not measure" in section(html, "timeline")) == (absent in ("queued", "copies"))


def test_every_number_on_the_page_is_of_the_document():
    """All that is read, ticks of the axes apart, is a number of the document, or a ratio or sum that the page names."""
    document = gpu_document(FEW, rows=(5, 70))
    allowed = {"0"}  # "0 % means that the host waited"
    for text in re.findall(r'"((?:[^"\\]|\\.)*)"', json.dumps(document)):
        allowed |= numbers_in(text)  # device, versions, names, what claims say
    allowed |= {"13"}  # "of 13 one by one"

    def collect(value: Any) -> None:
        for one in value.values() if isinstance(value, dict) else value:
            if isinstance(one, (dict, list)):
                collect(one)
            elif isinstance(one, (int, float)):
                allowed.update((us(one), f"{one:,}"))
        if isinstance(value, list) and value and isinstance(value[0], float):
            allowed.update(map(us, (statistics.median(value), min(value), max(value))))

    collect(document)

    def share(a: list[float], b: list[float]) -> str:
        return f"{statistics.median(x / y for x, y in zip(a, b, strict=True)):.2f}"

    references = (FRESH_PINNED, *SLABS, OURS_RECORDS, FLOOR)
    references += (prefill.ONE_BY_ONE_13, prefill.PREFILL_SLAB_CHECKED, prefill.PREFILL_SLAB_RECORDS_CHECKED)
    for found in (document["host"], document["queued"], document["prefill"]):
        for timings in found.values():
            for reference in (*references, prefill.PREFILL_OURS_RECORDS):
                if reference in timings:
                    allowed |= {share(t["medians_us"], timings[reference]["medians_us"]) for t in timings.values()}
    for timings in document["queued"].values():
        allowed |= {f"{t['of_quiet']:.2f}" for t in timings.values()}
        allowed |= {f"{100 * t['still_busy'] / t['samples']:.0f}" for t in timings.values()}
    for numbers in document["kernel"].values():
        allowed |= {share(numbers["ours"], numbers["serial"]), share(numbers["serial"], numbers["ours"])}
    each = sum(statistics.median(document["packing"][name]) for name in ("SAMPLING.pack", "pointer"))
    for rows, timings in document["host"].items():
        allowed.add(us(timings[OURS_RECORDS]["median_us"] + int(rows) * each))
    allowed |= {str(len(document["claims"])), str(sum(not claim["holds"] for claim in document["claims"]))}

    read = Text(page(parse(document)), without="tick").text
    assert numbers_in(read) - allowed == set()


def test_what_does_not_favour_us_is_told():
    """Failed claims first and counted; each faster rival with its share; nobody, where nobody was."""
    document = gpu_document()
    document["claims"] = [
        {"claim": "good", "value": "2.00x", "holds": True},
        {"claim": "bad", "value": "0.50x", "holds": False},
    ]
    fast = document["host"]["64"][SLAB_RECORDS]
    ours = document["host"]["64"][OURS_RECORDS]
    for timings in document["host"].values():
        for name, one in timings.items():
            one["medians_us"] = [20.0, 20.0, 20.0] if name == OURS_RECORDS else [30.0, 30.0, 30.0]
    fast["medians_us"] = [10.0, 5.0, 12.0]
    assert ours["medians_us"] == [20.0, 20.0, 20.0]
    html = section(page(parse(document)), "against")
    read = Text(html).text
    assert re.search(r"says 2 things .* In this run\s+1\s+of them did not hold", read)
    assert html.index("bad") < html.index("good")
    lines_of = dict(re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td></tr>', html))
    assert lines_of["building a batch, 64 requests"] == f'<span class="item">{SLAB_RECORDS} <b>0.50</b></span>'
    assert lines_of["building a batch, 1 request"] == "nobody"
    assert "<b>0." in lines_of["behind queued work, 64 requests"]
    assert "serial <b>" in lines_of["kernel, 1 x 0 + 128"]
    assert lines_of["kernel, 1 x 131072 + 64"] == "nobody"


def test_what_cannot_be_compared_is_said():
    """Repeats that do not pair, or take no time: no share, and nobody is called slower."""
    document = gpu_document()
    document["host"]["64"][SLAB_RECORDS]["medians_us"].append(5.0)
    document["prefill"]["64"][prefill.PREFILL_OURS_RECORDS]["medians_us"][1] = 0
    html = page(parse(document))
    lines_of = dict(re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td></tr>', section(html, "against")))
    assert f"{SLAB_RECORDS} <b>not comparable</b>" in lines_of["building a batch, 64 requests"]
    assert f"{prefill.ONE_BY_ONE_13} <b>not comparable</b>" in lines_of["whole prefill upload, 64 requests"]
    assert "<td>–</td>" in section(html, "host")


def test_texts_are_escaped():
    """Whatever a document says is shown as text."""
    evil = "<script>alert(\"1\")</script> & 'x'"
    document = gpu_document()
    document["device"] = document["commit"] = document[evil] = evil
    document["pool"][evil] = 3
    document["packing"][evil] = [1.0, 2.0, 3.0]
    document["claims"].append({"claim": evil, "value": evil, "holds": False})
    for key in ("host", "queued", "copies", "prefill"):
        for timings in document[key].values():
            timings[evil] = next(iter(timings.values()))
    document["kernel"][evil] = {evil: [1.0, 2.0, 3.0], **document["kernel"]["1 x 0 + 128"]}
    html = page(parse(document))
    read = Text(html)
    assert "script" not in read.tags
    assert read.text.count(evil) > 30
    assert not re.search(r'="[^"]*<', html)  # nor does it leave an attribute


def test_nothing_is_loaded(cpu_run):
    """No script, no font, no image, no style from elsewhere."""
    for html in (page(parse(gpu_document())), cpu_run[1].read_text(encoding="utf-8")):
        assert not re.search(r"https?:|//|src=|@import|url\(|@font-face|<link|<script|javascript:|\son\w+=", html)
        assert set(re.findall(r'href="(.)', html)) == {"#"}
        assert {*re.findall(r'href="#(\w+)"', html)} == {*re.findall(r'<section id="(\w+)"', html)}


# ---------------------------------------------------------------------- charts


def test_bars_are_to_scale_with_their_axis():
    """A bar twice as long is twice the time, and stands at the tick that says so."""
    chart = bars("t", [Bar("a", "ours", 50.0, 40.0, 60.0, 90.0), Bar("b", "slab", 100.0), Bar("c", "other", None)])
    widths = [float(width) for width in re.findall(r'<rect class="\w+" .*?width="([\d.]+)%"', chart)]
    assert len(widths) == 2
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.02)
    ticks = dict(re.findall(r'<text class="tick[\w ]*" x="([\d.]+)%" y="\d+">([\d,]+)</text>', chart))
    assert {tick: float(x) for x, tick in ticks.items()}["100"] == pytest.approx(widths[1], abs=0.02)
    ends = re.search(r'class="range" x1="([\d.]+)%" x2="([\d.]+)%"', chart)
    assert [float(ends.group(at)) / widths[1] for at in (1, 2)] == pytest.approx([0.4, 0.6], abs=1e-3)
    assert re.search(rf'class="tail" x1="{widths[0]:.2f}%" x2="{widths[1] * 0.9:.2f}%"', chart)


@pytest.mark.parametrize(("longest", "broken"), [(399.0, False), (401.0, True)])
def test_only_a_bar_four_times_as_long_is_broken_and_only_if_asked(longest, broken):
    """It ends at the edge with a mark; the others keep their scale."""
    items = [Bar("a", "wait", longest), Bar("b", "ours", 100.0)]
    assert ('class="break"' in bars("t", items, cut=True)) == broken
    assert 'class="break"' not in bars("t", items)
    width = re.search(r'<rect class="ours" .*?width="([\d.]+)%"', bars("t", items, cut=True)).group(1)
    assert (float(width) > 90) == broken


def test_lines_are_logarithmic_and_a_missing_value_leaves_a_gap():
    """Equal ratios are equal distances; no line leads over what was not measured."""
    chart = lines("t", ["1", "2", "3", "4"], [Line("a", "ours", "circle", [10.0, 100.0, 1000.0, None])])
    heights = [float(y) for y in re.findall(r'<svg class="over" x="[\d.]+%" y="([\d.]+)"', chart)]
    assert len(heights) == 3
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert chart.count('<line class="series') == 2
    ticks = {tick: float(y) + 4 for y, tick in re.findall(r'class="tick" x="0" y="([\d.]+)">([\d,]+)<', chart)}
    assert [ticks["10"], ticks["100"], ticks["1,000"]] == pytest.approx(heights, abs=0.11)


@pytest.mark.parametrize(
    "values", [[None, None], [0.0, 0.0], [5.0, 5.0], [1e-6, 1e12], [0.000001, 0.000001], [1e12, 1e12]]
)
def test_charts_of_extreme_values_can_be_drawn(values):
    """Nothing, one value, or a range that no run has."""
    assert lines("t", ["1", "2"], [Line("a", "ours", "circle", values)]).endswith("</svg>")
    assert bars("t", [Bar(str(value), "ours", value, value, value, value) for value in values]).endswith("</svg>")


def test_a_time_too_short_to_draw_is_none():
    """No axis is made for what no clock can tell."""
    document = gpu_document()
    for timings in document["host"].values():
        for one in timings.values():
            one |= {key: 5e-324 for key in one if key.endswith("_us") and key != "medians_us"}
    assert ">0.00<" in section(page(parse(document)), "host")


def theme(dark: bool) -> dict[str, tuple[float, ...]]:
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.S)
    found = {}
    for name, value in re.findall(r"--([\w-]+): #(\w{6});", "".join(blocks if dark else blocks[:1])):
        found[name] = tuple(int(value[at : at + 2], 16) / 255 for at in (0, 2, 4))
    return found


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """As WCAG 2 defines it."""

    def luminance(color: tuple[float, ...]) -> float:
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_have_contrast(dark):
    """4.5 for text, 3 for bars and lines, in both themes."""
    of = theme(dark)
    text = [("ink", "bg"), ("ink", "card"), ("ink", "work"), ("ink", "free"), ("ink", "notice"), ("on", "c-wait")]
    text += [("muted", "bg"), ("muted", "card"), ("link", "bg"), ("link", "card")]
    text += [(colour, "card") for colour in ("c-wait", "c-before", "c-slab", "c-ours")]
    for one, other in text:
        assert contrast(of[one], of[other]) >= 4.5, (one, other)
    for colour in ("c-wait", "c-before", "c-slab", "c-ours", "c-other", "c-floor"):
        assert contrast(of[colour], of["card"]) >= 3, colour


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("host",), [], "host is [], not an object with entries"),
        (("host",), {}, "host is {}, not an object with entries"),
        (("host", "64"), {}, "host, 64 is {}, not an object with entries"),
        (("host", "many"), {"floor": {}}, "host, many, floor has no 'median_us'"),
        (("copies", "-3"), {"floor": [1.0]}, "a key of copies is '-3', not a number of rows"),
        (("copies", "0"), {"floor": [1.0]}, "a key of copies is '0', not a number of rows"),
        (("copies", "9" * 5000), {"floor": [1.0]}, "a key of copies is '999"),
        (("copies", "³"), {"floor": [1.0]}, "a key of copies is '³', not a number of rows"),
        (("host", "64", FLOOR, "median_us"), "9", f"host, 64, {FLOOR}, median_us is '9', not a number of microseconds"),
        (("host", "64", FLOOR, "median_us"), float("nan"), "median_us is nan, not a number"),
        (("host", "64", FLOOR, "p99_us"), float("inf"), "p99_us is inf, not a number"),
        (("host", "64", FLOOR, "p99_us"), -1, "p99_us is -1, not a number"),
        (("host", "64", FLOOR, "p99_us"), True, "p99_us is True, not a number"),
        (("host", "64", FLOOR, "medians_us"), [], "medians_us is [], not a number for each repeat"),
        (("host", "64", FLOOR, "medians_us"), [1, None], "medians_us[1] is None, not a number"),
        (("host", "64", FLOOR, "copies"), 1.5, "copies is 1.5, not a whole number"),
        (("host", "64", FLOOR, "samples"), -1, "samples is -1, not a whole number"),
        (("queued_work_us",), "long", "queued_work_us is 'long', not a number"),
        (("kernel", "1 x 0 + 128"), [1], "kernel, 1 x 0 + 128 is [1], not an object"),
        (("kernel_variants",), True, "kernel_variants is True, not a whole number"),
        (("claims",), {}, "claims is {}, not a list"),
        (("claims",), [{"claim": "x", "value": "y", "holds": 1}], "claims[0] is {'claim': 'x'"),
        (("pool", "slots"), None, "pool, slots is None, not a whole number"),
    ],
)
def test_a_document_that_is_wrong_names_the_field(where, value, said):
    """With what is there and what should be."""
    document = gpu_document()
    at = document
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    with pytest.raises(DocumentError, match="give the file that bench --json wrote") as error:
        parse(document)
    assert said in str(error.value)


def test_every_section_must_be_there():
    """Another command's result is none of the benchmark."""
    for key in ("device", "cuda", "host", "queued", "copies", "prefill", "kernel", "packing", "claims", "pool"):
        document = gpu_document()
        del document[key]
        with pytest.raises(DocumentError, match=f"there is no field '{key}'"):
            parse(document)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b"<html>", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "the document is [], not an object"),
        (b"{}", "there is no field 'device'"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_no_result_is_2(content, said, tmp_path, capsys):
    """One line, the file named, no page."""
    kept, report = tmp_path / "x.json", tmp_path / "page.html"
    if content is not None:
        kept.write_bytes(content)
    assert main(["bench", "--from", str(kept), "--report", str(report)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("bench: ")
    assert printed.count("\n") == 1
    assert str(kept) in printed
    assert said in printed
    assert not report.exists()


def test_half_a_surrogate_pair_is_no_traceback(tmp_path):
    """JSON can name it, UTF-8 cannot write it."""
    document = gpu_document()
    document["device"] = "half \ud800"
    (tmp_path / "x.json").write_text(json.dumps(document))
    assert main(["bench", "--from", str(tmp_path / "x.json"), "--report", str(tmp_path / "page.html")]) == 0
    assert "half ?" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "kept.json"], "say where with --report PATH"),
        (["--from", "kept.json", "--report", "x.html", "--rows", "7"], "leave out every option but --report"),
        (["--from", "kept.json", "--report", "x.html", "--device", "cpu"], "leave out every option but --report"),
        (["--from", "kept.json", "--report", "x.html", "--json", "y.json"], "leave out every option but --report"),
        (["--from", "kept.json", "--report", "./kept.json"], "would be written over the result"),
        (["--from", "kept.json", "--report", "x/../kept.json"], "would be written over the result"),
        (["--json", "x", "--report", "x"], "would be written over the result"),
        (["--report", "."], "cannot write"),
        (["--report", "missing/x.html"], "cannot write missing/x.html"),
        (["--from", "kept.json", "--report", "missing/x.html"], "cannot write missing/x.html"),
    ],
)
def test_a_mistake_is_found_before_measuring(arguments, said, tmp_path, capsys, monkeypatch):
    """Status 2, one line, nothing measured, nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "bench_pool", lambda *_: pytest.fail("measured in vain"))
    kept = json.dumps(gpu_document())
    Path("kept.json").write_text(kept)
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("bench: ")
    assert said in printed
    assert printed.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert Path("kept.json").read_text() == kept


def test_a_page_that_cannot_be_written_is_2(cpu_run, tmp_path, capsys, monkeypatch):
    """Found out late: the disk is full, say."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["bench", "--from", str(cpu_run[0]), "--report", str(tmp_path / "page.html")]) == 2
    assert capsys.readouterr().err == f"bench: cannot write {tmp_path / 'page.html'}: No space left on device\n"


def test_load_reads_what_parse_accepts(cpu_run):
    """The file of a real run."""
    assert load(cpu_run[0]) == parse(json.loads(cpu_run[0].read_text()))


# ---------------------------------------------------------------------- in a browser

PROBE = """<script>
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(one => one.open = true);
  const faults = [];
  let seen = 0;
  document.querySelectorAll("svg.chart").forEach(chart => {
    const name = chart.getAttribute("aria-label"), frame = chart.getBoundingClientRect();
    const texts = [...chart.querySelectorAll("text")].map(one => [one.textContent, one.getBoundingClientRect()])
      .filter(([_, box]) => box.width > 0);
    seen += texts.length;
    texts.forEach(([text, box], at) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1) faults.push(`${name}: "${text}" is cut off`);
      texts.slice(at + 1).forEach(([other, second]) => {
        const wide = Math.min(box.right, second.right) - Math.max(box.left, second.left);
        const high = Math.min(box.bottom, second.bottom) - Math.max(box.top, second.top);
        if (wide > 0 && high > 3) faults.push(`${name}: "${text}" and "${other}" overlap`);
      });
    });
  });
  const found = {
    faults, seen, inner: innerWidth, scroll: document.documentElement.scrollWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    background: getComputedStyle(document.body).backgroundColor,
    charts: [...document.querySelectorAll("svg.chart")].filter(one => one.getBoundingClientRect().width > 200).length,
  };
  const note = document.createElement("pre");
  note.id = "probe";
  note.textContent = JSON.stringify(found);
  parent.document.body.append(note);
});
</script>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    """The browser that CHROMIUM names, or one on PATH, if it starts."""
    named = [os.environ["CHROMIUM"]] if "CHROMIUM" in os.environ else ["chromium", "chromium-browser", "google-chrome"]
    for path in filter(None, map(shutil.which, named)):
        if subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    pytest.skip(f"no Chromium that starts: none of {', '.join(named)}")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_lays_it_out_without_faults(width, dark, chromium, cpu_run, tmp_path):
    """No console message, no sideways scrolling, no label on another or cut off, with everything unfolded."""
    for kind, html in (("gpu", page(parse(gpu_document()))), ("cpu", cpu_run[1].read_text(encoding="utf-8"))):
        path = tmp_path / f"{kind}.html"
        # In a frame: Chromium's own windows are 500 px wide at least.
        frame = escape(html.replace("</body>", f"{PROBE}</body>"))
        path.write_text(
            "<!doctype html><meta charset=utf-8><style>:root { color-scheme: light dark } iframe { border: 0 }</style>"
            f'<iframe width="{width}" height="900" srcdoc="{frame}"></iframe>',
            encoding="utf-8",
        )
        done = subprocess.run(
            [
                chromium, "--headless", *(["--no-sandbox"] if os.geteuid() == 0 else []), "--disable-gpu",
                "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}",
                "--enable-logging=stderr", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                "--window-size=1400,1000", "--dump-dom", path.as_uri(),
            ],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
        found = json.loads(Text(done.stdout.partition('<pre id="probe">')[2].partition("</pre>")[0]).text)
        assert found["faults"] == []
        assert (found["inner"], found["scroll"]) == (width, width)
        assert found["dark"] == dark
        rgb = ", ".join(f"{255 * part:.0f}" for part in theme(dark)["bg"])
        assert found["background"] == f"rgb({rgb})"
        assert found["charts"] == html.count('class="chart"')
        assert found["seen"] > 5 * found["charts"]  # there are fonts
