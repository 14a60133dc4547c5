"""Many threads at once: every thread is counted, wrong tensors and errors are told, and nobody hangs."""

from __future__ import annotations

import threading
from itertools import count

import pytest
import torch

from batching.bench import threads
from batching.bench.sections import Settings
from batching.bench.strategies import OURS_RECORDS

CPU = torch.device("cpu")


def test_every_way_builds_right_batches_from_many_threads():
    """After the warm-up all batches are counted; the pool's depth is enough for all threads, so it made nothing."""
    with threads.threads_pool("cpu", 4) as pool:
        before = pool.stats()
        for name, build in threads.ways(CPU, pool).items():
            found = threads.run(CPU, build, threads=4, batches=30, seed=1)
            assert found.wrong == [], name
            assert found.batches == 4 * 27
            median, p99, p999, longest = found.percentiles_us.values()
            assert 0 < median <= p99 <= p999 <= longest
            assert found.pinned_allocations is None  # nothing is pinned here
        used = pool.stats() - before
    assert (used.uploads, used.allocations, used.leases_waited) == (2 * 4 * 30, 0, 0)


def test_what_goes_wrong_in_one_thread_is_told_and_ends_the_others():
    """Wrong tensors by name; an error with its thread; the barrier lets the rest go."""
    before = threading.active_count()
    with threads.threads_pool("cpu", 3) as pool:
        build = threads.ways(CPU, pool)[OURS_RECORDS]
        calls = count()

        def sometimes(batch):
            if next(calls) == 4:
                raise MemoryError("planted")
            return build(batch)

        found = threads.run(CPU, sometimes, threads=3, batches=40, seed=1)
        assert any("MemoryError: planted" in line for line in found.wrong)
        found = threads.run(CPU, lambda batch: {**build(batch), "top_ks": torch.zeros(16)}, 2, 20, seed=1)
        assert all("top_ks" in line for line in found.wrong)
        assert len(found.wrong) == 2
    assert threading.active_count() == before


@pytest.mark.parametrize("section", ["threads"])
def test_the_section_is_left_out_on_the_cpu(section):
    """Where nothing is pinned it would show nothing."""
    assert not Settings().has(section, CPU)
    assert Settings().has(section, torch.device("cuda", 0))
