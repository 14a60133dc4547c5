"""The numbers of the plugin's pool, where SGLang's `/metrics` takes its own from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, multiprocess
from real_sglang import plugged, pool_of, request

import batching.sglang
from batching.sglang import _series
from staging.metrics import FAMILIES


@pytest.fixture
def with_metrics(srt: Any) -> Any:
    """A server with --enable-metrics; afterwards the process's registry is as it was."""
    with srt.runtime_context.get_observability().override(enable_metrics=True):
        yield
    for metric in _series().values():
        REGISTRY.unregister(metric)
    _series.cache_clear()


def shown(feeder: Any, name: str, **labels: str) -> float | None:
    """What the registry of this process says of the pool."""
    labels |= {"pool": "sglang", "device": str(pool_of(feeder).device)}
    return REGISTRY.get_sample_value(name, labels)


def test_they_are_set_once_a_second_at_most(with_metrics, engine, monkeypatch):
    """Counters go up by what was added since; gauges are what they are."""
    now = [100.0]
    monkeypatch.setattr(batching.sglang.time, "monotonic", lambda: now[0])
    with plugged() as feeder:
        engine.prefill([request("a", 0, 1)])
        assert shown(feeder, "staging_uploads_total") == 1
        engine.prefill([request("b", 0, 1)])
        assert shown(feeder, "staging_uploads_total") == 1
        now[0] += 1.0
        engine.prefill([request("c", 0, 1)])
        assert shown(feeder, "staging_uploads_total") == 3
        assert shown(feeder, "staging_leases_total", outcome="ready") == 3
        stats = pool_of(feeder).stats()
        assert shown(feeder, "staging_host_bytes") == stats.host_bytes
        assert shown(feeder, "staging_allocation_seconds_total") == pytest.approx(stats.allocation_ns / 1e9)


def test_every_family_is_there(with_metrics, engine):
    """All that `staging.metrics` collects; waits have no histogram, since these pools never wait."""
    with plugged():
        engine.prefill([request("a", 0, 1)])
    assert set(_series()) == {family.name for family in FAMILIES}


def test_without_the_option_there_are_none(srt, engine):
    """Nothing is registered in a server without --enable-metrics."""
    with plugged() as feeder:
        engine.prefill([request("a", 0, 1)])
        assert feeder._metrics == {}
    assert _series.cache_info().currsize == 0


def test_metrics_that_fail_cost_no_upload(with_metrics, engine, monkeypatch, caplog):
    """Said once, and not tried again."""
    tried = []

    def fail(self: Any) -> None:
        tried.append(self)
        raise OSError("disk full")

    monkeypatch.setattr(batching.sglang.Metrics, "update", fail)
    with plugged() as feeder:
        engine.prefill([request("a", 0, 1)])
        engine.prefill([request("b", 0, 1)])
        assert pool_of(feeder).stats().uploads == 2
    assert [line for line in caplog.messages if "no metrics" in line] == ["staging: no metrics: OSError: disk full"]
    assert len(tried) == 1


def test_metrics_that_are_registered_already_cost_no_pool(with_metrics, engine, monkeypatch, caplog):
    """Somebody else's collector has the names: there is a pool all the same."""
    monkeypatch.setattr(batching.sglang, "Metrics", prometheus_client.Gauge)
    with plugged() as feeder:
        engine.prefill([request("a", 0, 1)])
        assert pool_of(feeder).stats().uploads == 1
    assert sum("no metrics" in line for line in caplog.messages) == 1


SCHEDULER = """
import batching.sglang
from real_sglang import DEVICE, Engine, load, plugged, request

srt = load()
engine = Engine(DEVICE, rows=4, context=16)
with srt.runtime_context.get_observability().override(enable_metrics=True), plugged():
    engine.prefill([request("a", 0, 1)])
"""


def test_the_process_that_answers_sees_what_the_scheduler_has_set(srt, tmp_path):
    """Two processes and prometheus_client's multiprocess mode, as SGLang runs it."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), *sys.path])
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, "-c", SCHEDULER], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    samples = {
        sample.name: (sample.value, sorted(sample.labels))
        for metric in registry.collect()
        for sample in metric.samples
        if sample.labels.get("pool") == "sglang"
    }
    assert samples["staging_uploads_total"] == (1, ["device", "pool"])
    assert samples["staging_host_bytes"] == (4 * 256 * 1024, ["device", "pool"])  # not one for each process number
