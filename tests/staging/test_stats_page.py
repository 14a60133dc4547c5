"""docs/stats.md and the code say the same: each key once, with kind, unit and metric; the example prints the same."""

from __future__ import annotations

import contextlib
import io
import re
import types
from pathlib import Path

import attrs
import pytest

from staging import PoolStats
from staging.metrics import FAMILIES, WAIT, PoolCollector
from staging.stats import COUNTERS, DERIVED, PEAKS, WAIT_BUCKETS

PAGE = (Path(__file__).parents[2] / "docs" / "stats.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \| (\S.*?) \| (\S.*) \|$", PAGE, re.MULTILINE)
NUMBERS = {field.name: 1000 + 7 * place for place, field in enumerate(attrs.fields(PoolStats))}
STATES = ("free", "filling", "in_flight", "quarantined")
STATS = PoolStats(**{**NUMBERS, "slots": sum(NUMBERS[state] for state in STATES)})
"""Every number is another."""


class Known:
    """What a collector needs of a pool."""

    name, device = "known", "cpu"

    def stats(self) -> PoolStats:
        return STATS


@pytest.fixture(scope="module")
def samples() -> dict[str, float]:
    """Every sample that a pool has, written as the page writes it: without the labels that all have."""
    known, collector = Known(), PoolCollector()
    collector.add(known)  # type: ignore[arg-type]
    found = {}
    for metric in collector.collect():
        for sample in metric.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("pool", "device")}
            own = ",".join(f'{name}="{value}"' for name, value in labels.items())
            found[f"{sample.name}{{{own}}}" if own else sample.name] = sample.value
    return found


def test_every_key_has_one_row_and_every_row_a_key() -> None:
    """Both directions; and nothing that looks like a row of the table was left out."""
    keys = [key for key, *_ in ROWS]
    assert sorted(keys) == sorted(STATS.as_dict())
    table = PAGE[PAGE.index("| key |") :].split("\n\n")[0].splitlines()
    assert len(table) == len(ROWS) + 2


@pytest.mark.parametrize(("key", "kind", "unit", "metric"), [(a, b, c, e) for a, b, c, _, e in ROWS])
def test_a_row_says_what_the_code_does(samples: dict[str, float], key: str, kind: str, unit: str, metric: str) -> None:
    """The kind decides what a difference and a reset do; the metric shows this very number, in seconds for time."""
    kinds = {"counter": COUNTERS, "peak": PEAKS, "derived": DERIVED}
    kinds["gauge"] = tuple(name for name in STATS.as_dict() if all(name not in names for names in kinds.values()))
    assert key in kinds[kind]
    assert unit == ("ns" if re.search(r"_ns(_|$)", key) else "bytes" if "bytes" in key else "count")
    number = STATS.as_dict()[key]
    if key in WAIT_BUCKETS or key == "waits_longer":
        buckets = [*WAIT_BUCKETS, "waits_longer"]
        number = sum(getattr(STATS, name) for name in buckets[: buckets.index(key) + 1])
    whole = re.fullmatch(r"sum of `(\w+)`", metric)
    if whole:
        shown = sum(value for name, value in samples.items() if name.split("{")[0] == whole[1])
    else:
        shown = samples[metric.strip("`")]
    assert shown == (number / 1e9 if unit == "ns" else number)


def test_every_sample_is_in_the_table(samples: dict[str, float]) -> None:
    """No metric that the page does not define, and none in two rows."""
    named = [metric.strip("`") for *_, metric in ROWS if not metric.startswith("sum of ")]
    assert sorted(named) == sorted(samples)
    assert {name.split("{")[0] for name in named} > {family.name for family in FAMILIES}
    assert f"{WAIT}_count" in named


def test_metrics_named_elsewhere_on_the_page_exist(samples: dict[str, float]) -> None:
    """The queries ask for something that is there."""
    queries = re.findall(r"rate\((staging_\w+)", PAGE)
    assert queries
    assert set(queries) <= {name.split("{")[0] for name in samples}


def test_the_example_prints_what_the_page_says() -> None:
    """Its first Python block is run, as a program's main module; thread numbers are left out."""
    example, output = re.search(r"<!-- example -->\n```python\n(.*?)```.*?```text\n(.*?)```", PAGE, re.DOTALL).groups()  # type: ignore[union-attr]
    module = types.ModuleType("example")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "docs/stats.md", "exec"), module.__dict__)
    module.device.finish_all()
    module.held.discard()
    module.pool.close()
    assert re.sub(r"thread \d+", "thread N", printed.getvalue()) == re.sub(r"thread \d+", "thread N", output)
