"""Prometheus: a real scrape over HTTP, read by the client's own parsers, and what becomes of pools that go."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator

import attrs
import pytest
import torch
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from staging import Field, Layout, PoolStats, StagingPool
from staging.metrics import FAMILIES, WAIT, PoolCollector
from staging.stats import WAIT_BUCKETS
from staging.testing import SimulatedDevice

COLUMN = Layout([Field("column", torch.int32), Field("other", torch.int32)], "column")
PLAIN = ("text/plain", parse_text)
OPEN = ("application/openmetrics-text; version=1.0.0", parse_openmetrics)

MakePool = Callable[..., StagingPool]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def batch(pool: StagingPool) -> None:
    with pool.lease(COLUMN, rows=3) as lease:
        lease["column"] = lease["other"] = 1
        lease.upload()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry(auto_describe=True)


@pytest.fixture
def scrape(registry: CollectorRegistry) -> Iterator[Callable[..., list[Metric]]]:
    """A server of its own on a free port; asks it once, in one of its two formats."""
    server, thread = start_http_server(0, "127.0.0.1", registry)

    def ask(accept: str = PLAIN[0], parse: Callable[[str], Iterable[Metric]] = parse_text) -> list[Metric]:
        request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/metrics", headers={"Accept": accept})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=20) as answer:
            assert answer.headers["Content-Type"].startswith(accept.split(";")[0])
            return list(parse(answer.read().decode()))

    yield ask
    server.shutdown()
    server.server_close()
    thread.join(20)


def samples(metrics: Iterable[Metric]) -> Samples:
    found = [(sample.name, frozenset(sample.labels.items()), sample.value) for one in metrics for sample in one.samples]
    table = {(name, labels): value for name, labels, value in found}
    assert len(table) == len(found), "a series has two values"
    return table


def value(table: Samples, name: str, pool: str, **labels: str) -> float:
    return table[name, frozenset({"pool": pool, "device": "cpu", **labels}.items())]


@pytest.mark.parametrize("form", [PLAIN, OPEN], ids=["text", "openmetrics"])
def test_a_scrape_shows_two_pools(
    registry: CollectorRegistry, scrape: Callable[..., list[Metric]], make_pool: MakePool, form: tuple[str, object]
) -> None:
    """Each under its own labels, in seconds and bytes, read anew at each scrape."""
    device = SimulatedDevice()
    prefill = make_pool(device, slots=2, max_slots=2, slot_bytes=64, name="prefill")
    decode = make_pool(SimulatedDevice(), slots=1, slot_bytes=64, name="decode")
    registry.register(PoolCollector(prefill, decode))
    table = samples(scrape(*form))
    assert value(table, "staging_slots", "prefill", state="free") == 2
    assert value(table, "staging_uploads_total", "prefill") == 0

    def later(device: SimulatedDevice) -> None:
        if device.time_ns > 1_500_000:
            device.finish_all()

    device.on_sleep = later
    for _ in range(3):
        batch(prefill)
    table = samples(scrape(*form))
    waited = prefill.stats().wait_ns
    assert 1_500_000 < waited < 5_000_000
    expected = {
        ("staging_slots", "in_flight"): 2,
        ("staging_slots", "free"): 0,
        ("staging_leases_total", "ready"): 2,
        ("staging_leases_total", "waited"): 1,
        ("staging_leases_total", "timed_out"): 0,
        ("staging_upload_bytes_total", "used"): 72,
        ("staging_upload_bytes_total", "padded"): 24,
        ("staging_violations_total", "unleased"): 0,
        "staging_uploads_total": 3,
        "staging_fields_total": 6,
        "staging_copies_avoided_total": 3,
        "staging_host_bytes": 128,
        "staging_depth_needed_slots": 3,
        "staging_wait_peak_seconds": waited / 1e9,
        "staging_wait_seconds_sum": waited / 1e9,
        "staging_wait_seconds_count": 1,
    }
    label = {"staging_slots": "state", "staging_leases_total": "outcome", "staging_upload_bytes_total": "part"}
    for key, number in expected.items():
        name, labels = (key, {}) if isinstance(key, str) else (key[0], {label.get(key[0], "kind"): key[1]})
        assert value(table, name, "prefill", **labels) == number, key
    assert value(table, "staging_uploads_total", "decode") == 0
    buckets = {
        dict(labels)["le"]: number
        for (name, labels), number in table.items()
        if name == f"{WAIT}_bucket" and ("pool", "prefill") in labels
    }
    assert {float(bound): number for bound, number in buckets.items()} == {
        bound / 1e9: float(waited <= bound) for bound in WAIT_BUCKETS.values()
    } | {float("inf"): 1.0}


def test_names_and_units_follow_the_custom(registry: CollectorRegistry, make_pool: MakePool) -> None:
    """Counters and they alone end in _total; base units stand at the end; no abbreviation, no nanosecond."""
    registry.register(PoolCollector(make_pool(SimulatedDevice())))
    metrics = {metric.name: metric for metric in registry.collect()}
    assert len(metrics) == len(FAMILIES) + 1
    for name, metric in metrics.items():
        assert re.fullmatch(r"staging_[a-z_]+", name)
        assert metric.documentation
        assert not re.search(r"(^|_)(ns|nanoseconds|ms|us|kb|mb)(_|$)", name)
        assert metric.type == "counter" or not any(sample.name.endswith("_total") for sample in metric.samples)
        for word in ("seconds", "bytes"):
            assert word not in name or name.endswith(word)
    keys = [key for family in FAMILIES for key in family.keys.values()]
    assert len(keys) == len(set(keys))
    assert all(family.seconds == ("_ns" in key) for family in FAMILIES for key in family.keys.values())
    assert all(("_bytes" in family.name) == ("bytes" in key) for family in FAMILIES for key in family.keys.values())


def test_a_collector_without_pools_still_names_every_metric(registry: CollectorRegistry) -> None:
    """So that the registry knows the names before the first pool comes, and refuses a second collector."""
    registry.register(PoolCollector())
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(PoolCollector())
    assert {metric.name for metric in registry.collect()} == {
        *(family.name.removesuffix("_total") for family in FAMILIES),
        WAIT,
    }


def test_buckets_add_up_from_the_smallest_on() -> None:
    """What `stats()` keeps apart a histogram adds up; sum and count are the waits'."""

    class Known:
        name, device = "known", "cpu"

        def stats(self) -> PoolStats:
            numbers = {field.name: 1000 + place for place, field in enumerate(attrs.fields(PoolStats))}
            return PoolStats(**numbers)

    known = Known()
    collector = PoolCollector()
    collector.add(known)  # type: ignore[arg-type]
    (histogram,) = (metric for metric in collector.collect() if metric.name == WAIT)
    stats, so_far = known.stats(), 0
    table = samples([histogram])
    for key, bound in WAIT_BUCKETS.items():
        so_far += getattr(stats, key)
        assert value(table, f"{WAIT}_bucket", "known", le=repr(bound / 1e9)) == so_far
    assert value(table, f"{WAIT}_bucket", "known", le="+Inf") == so_far + stats.waits_longer == stats.waits
    assert value(table, f"{WAIT}_sum", "known") == stats.wait_ns / 1e9


def test_a_collector_keeps_no_pool_alive() -> None:
    """When the pool has gone, so have its series."""
    pool = StagingPool(SimulatedDevice(), slots=1, name="gone")
    collector = PoolCollector(pool)
    assert any(metric.samples for metric in collector.collect())
    pool.close()
    assert any(metric.samples for metric in collector.collect())  # closed, but there: its counters can still be read
    del pool
    gc.collect()
    assert not any(metric.samples for metric in collector.collect())


def test_two_living_pools_of_one_name_are_refused(make_pool: MakePool) -> None:
    """They would give a series two values. One pool twice is one, and a closed pool makes room."""
    first, second = (make_pool(SimulatedDevice(), slots=slots, name="twin") for slots in (1, 2))
    collector = PoolCollector(first)
    collector.add(first)
    assert value(samples(collector.collect()), "staging_slots", "twin", state="free") == 1
    with pytest.raises(ValueError, match=r"'twin' .* is collected already; give .* a name of its own"):
        collector.add(second)
    first.close()
    collector.add(second)
    assert value(samples(collector.collect()), "staging_slots", "twin", state="free") == 2


def test_the_library_itself_does_not_import_the_client() -> None:
    """Only `staging.metrics` does."""
    code = "import sys, staging, staging.testing, batching; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_more_labels_are_on_every_series(make_pool: MakePool) -> None:
    """The same for all pools, also numbers; without them nothing changes."""
    pool = make_pool("cpu", slots=1, name="replay")
    batch(pool)
    plain, labelled = samples(PoolCollector(pool).collect()), samples(PoolCollector(pool, labels={"rank": 1}).collect())
    assert {(name, labels | {("rank", "1")}): number for (name, labels), number in plain.items()} == labelled
    assert value(labelled, "staging_leases_total", "replay", outcome="ready", rank="1") == 1
    assert value(labelled, f"{WAIT}_count", "replay", rank="1") == 0


@pytest.mark.parametrize(
    "name", ["pool", "device", "le", "state", "outcome", "", "1st", "a-b", "__name__", "ränk", "a\n"]
)
def test_a_label_that_cannot_be_is_refused(name: str) -> None:
    """One that a series has already, and what Prometheus would not read; it is named."""
    with pytest.raises(ValueError, match=re.escape(f"labels: {name!r} is no name for one more label")):
        PoolCollector(labels={name: "1"})
