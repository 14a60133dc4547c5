"""Prometheus metrics of any number of pools. Needs the extra `metrics`; nothing else in the library imports this.

from prometheus_client import REGISTRY
from staging.metrics import PoolCollector

REGISTRY.register(PoolCollector(pool))

The numbers are those of `pool.stats()`, read at each scrape; `docs/stats.md` names the metric of each key.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterable, Mapping

import attrs
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from staging.pool import StagingPool
from staging.stats import WAIT_BUCKETS, PoolStats

_LABELS = ("pool", "device")


@attrs.frozen
class Family:
    """One metric, and the keys of `PoolStats` that its samples show."""

    name: str
    help: str
    keys: dict[str, str]
    """Key by the value of `label`; by "" where there is none."""
    label: str = ""
    seconds: bool = False
    """The keys are nanoseconds."""

    @property
    def is_counter(self) -> bool:
        """Counters end in _total, as is the custom."""
        return self.name.endswith("_total")

    def sample(self, value: str) -> str:
        """How the docs write one of its samples, without pool and device."""
        return f'{self.name}{{{self.label}="{value}"}}' if self.label else self.name


def _one(name: str, key: str, text: str, *, seconds: bool = False) -> Family:
    return Family(name, text, {"": key}, seconds=seconds)


FAMILIES = (
    Family(
        "staging_slots",
        "Slots of the ring, by state",
        {name: name for name in ("free", "filling", "in_flight", "quarantined")},
        "state",
    ),
    _one("staging_waiting_leases", "waiting", "Leases waiting for a slot"),
    _one("staging_oldest_lag_uploads", "oldest_lag", "Uploads made since the oldest unfinished one"),
    _one("staging_pinned_bytes", "pinned_bytes", "Host memory locked for the slots"),
    _one("staging_host_bytes", "host_bytes", "Bytes the slots can hold"),
    Family(
        "staging_leases_total",
        "Lease requests, by outcome",
        {name: f"leases_{name}" for name in ("ready", "grown", "waited", "empty", "timed_out", "refused")},
        "outcome",
    ),
    _one("staging_uploads_total", "uploads", "Copies queued"),
    _one("staging_uploads_failed_total", "uploads_failed", "Uploads whose copy or event failed"),
    _one("staging_discards_total", "discards", "Leases given back without an upload"),
    _one("staging_dropped_total", "dropped", "Leases that were garbage-collected while open"),
    _one("staging_fields_total", "fields", "Fields carried by the uploads"),
    _one("staging_copies_avoided_total", "copies_avoided", "Copies that one for each field would have made more"),
    Family(
        "staging_upload_bytes_total",
        "Bytes uploaded, of fields and of padding",
        {"used": "bytes_used", "padded": "bytes_padded"},
        "part",
    ),
    _one("staging_upload_peak_bytes", "bytes_peak", "Most bytes that one upload carried"),
    _one("staging_met_in_flight_total", "met_in_flight", "Slots looked at while their copy was unfinished"),
    _one("staging_in_flight_peak_slots", "in_flight_peak", "Most slots in flight at once"),
    _one("staging_wait_peak_seconds", "wait_ns_max", "The longest wait for a slot", seconds=True),
    _one("staging_waiting_peak_leases", "waiting_peak", "Most leases that waited at once"),
    _one("staging_depth_needed_slots", "depth_needed", "Slots that would have served the leases that found none"),
    _one("staging_suggested_slots", "suggested_slots", "Slots to build the pool with"),
    _one("staging_allocations_total", "allocations", "Host buffers made"),
    _one("staging_allocation_seconds_total", "allocation_ns", "Time spent making host buffers", seconds=True),
    _one("staging_allocations_failed_total", "allocations_failed", "Host buffers that could not be had"),
    _one("staging_enlarged_total", "enlarged", "Slots that got a larger buffer"),
    _one("staging_quarantines_total", "quarantines", "Times a slot went into quarantine"),
    _one("staging_heals_total", "heals", "Times a quarantined slot got a new event"),
    Family(
        "staging_violations_total",
        "Writes around the lease that debug mode found, by kind",
        {name: f"violations_{name}" for name in ("under_copy", "unleased", "behind_end")},
        "kind",
    ),
)
WAIT = "staging_wait_seconds"
"""The histogram: buckets, sum, count."""
_TAKEN = {*_LABELS, "le", *(family.label for family in FAMILIES if family.label)}
_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class PoolCollector(Collector):
    """A collector for any number of pools; keeps none of them alive. Labels: pool (its name) and device.

    `labels` are put on every series as well, such as the rank of this process; `ValueError` for one that cannot be.

    A pool that is gone takes its series with it. Two living pools of one name on one device would give one series
    two values, so the second is refused with `ValueError`; where the first serves no more (closed, broken), the second
    takes its place.
    """

    def __init__(self, *pools: StagingPool, labels: Mapping[str, str] | None = None) -> None:
        self._constant = {name: str(value) for name, value in (labels or {}).items()}
        for name in self._constant:
            if name in _TAKEN or not _NAME.fullmatch(name):
                raise ValueError(
                    f"labels: {name!r} is no name for one more label: it has letters, digits and underscores, does not "
                    f"begin with a digit or two underscores, and is none of {', '.join(sorted(_TAKEN))}"
                )
        self._lock = threading.Lock()
        self._pools: list[weakref.ref[StagingPool]] = []
        for pool in pools:
            self.add(pool)

    def add(self, pool: StagingPool) -> None:
        """One pool more; one that is there already stays once."""
        with self._lock:
            kept = []
            for known in self._living():
                if known is pool or (_labels(known) == _labels(pool) and known._ring.refusal is not None):
                    continue
                if _labels(known) == _labels(pool):
                    raise ValueError(f"{known!r} is collected already; give {pool!r} a name of its own")
                kept.append(known)
            self._pools = [weakref.ref(known) for known in [*kept, pool]]

    def collect(self) -> Iterable[Metric]:
        """Read every pool once; every metric is there, whether or not a pool is."""
        names = [*_LABELS, *self._constant]
        snapshots = [([*_labels(pool), *self._constant.values()], pool.stats()) for pool in self._living()]
        for family in FAMILIES:
            yield _collected(family, names, snapshots)
        yield _waits(names, snapshots)

    def _living(self) -> list[StagingPool]:
        return [pool for pool in (known() for known in self._pools) if pool is not None]


def _labels(pool: StagingPool) -> list[str]:
    return [pool.name, str(pool.device)]


def _collected(family: Family, names: list[str], snapshots: list[tuple[list[str], PoolStats]]) -> Metric:
    kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=[*names, family.label] if family.label else names)
    for labels, stats in snapshots:
        for value, key in family.keys.items():
            number = getattr(stats, key)
            metric.add_metric([*labels, value] if family.label else labels, number / 1e9 if family.seconds else number)
    return metric


def _waits(names: list[str], snapshots: list[tuple[list[str], PoolStats]]) -> Metric:
    metric = HistogramMetricFamily(WAIT, "How long leases waited for a slot", labels=names)
    for labels, stats in snapshots:
        buckets, so_far = [], 0
        for key, bound in WAIT_BUCKETS.items():
            so_far += getattr(stats, key)
            buckets.append((repr(bound / 1e9), float(so_far)))
        buckets.append(("+Inf", float(stats.waits)))
        metric.add_metric(labels, buckets, stats.wait_ns / 1e9)
    return metric
