"""What observing costs: every way builds the same bytes, really observes, and leaves nothing behind."""

from __future__ import annotations

import threading
import time

import torch

from batching.bench import observing
from batching.bench.sections import compare
from batching.bench.timing import Machine

CPU = torch.device("cpu")


def test_each_way_builds_the_same_batches_and_is_observed():
    """Bit for bit; the timeline has its spans, the scraper has scraped; the thread is gone afterwards."""
    before = threading.active_count()
    with observing.contenders(CPU, 5, seed=1) as runners:
        assert [runner.name for runner in runners] == [
            observing.COUNTED,
            observing.READ,
            observing.SCRAPED,
            observing.TIMELINE,
        ]
        for runner in runners:
            assert compare(runner, Machine(CPU)) == []
            assert runner.pool is not None
            assert runner.pool.stats().uploads > 4
        timeline = runners[-1].build.__self__.pool._timeline  # type: ignore[attr-defined]
        assert timeline.uploads > 4
        scraped = runners[2].build.__self__  # type: ignore[attr-defined]
        deadline = time.monotonic() + 20
        while scraped.building and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not scraped.building, "nobody scraped"
    assert threading.active_count() == before


def test_the_parts_are_those_of_one_upload():
    """Each is there once for each repeat, and none is nothing."""
    with observing.StagingPool("cpu") as pool:
        found = observing.parts(Machine(CPU), pool, 3, seed=0, repeats=2, count=8)
        assert pool.stats().uploads == 3 * 16
    assert list(found) == [*observing._PARTS[:8], observing.CONDUCTING, observing.COLD, observing.FREE_SLOT]
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())
