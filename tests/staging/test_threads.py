"""Many threads, one pool: every upload is its own thread's, and the statistics add up at any moment."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from staging import Field, Layout, PoolStats, StagingPool

THREADS = 8
STEPS = 1000

COLUMN = Layout([Field("column", torch.int64)], "column")
MIXED = Layout([Field("column", torch.int64), Field("ids", torch.int32, "tokens")], "mixed")


class OwnError(Exception):
    """What a thread raises in its own block."""


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns after a microsecond, so that they meet everywhere."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def served(stats: PoolStats) -> int:
    return stats.leases_ready + stats.leases_grown + stats.leases_waited


def ended(stats: PoolStats) -> int:
    return stats.uploads + stats.uploads_failed + stats.discards + stats.dropped


def build_batches(pool: StagingPool, thread: int, wrong: list[object]) -> None:
    """Batches of random size and fate; each value names its thread and step."""
    choice = random.Random(thread)
    kept: list[tuple[int, torch.Tensor]] = []
    try:
        for step in range(STEPS):
            stamp = thread * STEPS + step
            rows = choice.choice((0, 1, 3, 40))
            fate = choice.random()
            with contextlib.suppress(OwnError):
                if fate < 0.4:
                    with pool.lease(MIXED, rows=rows, tokens=2 * rows + 1) as lease:
                        lease["ids"] = [thread] * (2 * rows + 1)
                        lease["column"] = stamp
                        upload = lease.upload()
                    if upload["ids"].tolist() != [thread] * (2 * rows + 1):
                        wrong.append((stamp, upload["ids"]))
                    kept.append((stamp, upload["column"]))
                elif fate < 0.8:
                    with pool.lease(COLUMN, rows=rows) as lease:
                        lease.write_records([COLUMN.pack(column=stamp)] * rows)
                        kept.append((stamp, lease.upload()["column"]))
                elif fate < 0.9:
                    with pool.lease(COLUMN, rows=rows) as lease:
                        lease["column"] = -1
                        raise OwnError
                elif fate < 0.95:
                    pool.lease(COLUMN, rows=rows).discard()
                else:
                    pool.lease(COLUMN, rows=rows)["column"] = -1  # dropped
            if len(kept) == 50:
                wrong += [(stamp, column) for stamp, column in kept if set(column.tolist()) - {stamp}]
                kept.clear()
    except BaseException as error:
        wrong.append(error)


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize(("slots", "max_slots"), [(1, 1), (2, 4), (8, 8)])
def test_threads_that_share_a_pool_never_see_each_others_values(slots: int, max_slots: int) -> None:
    """Fewer slots than threads, a growing ring, and one slot for each: all uploads right, all requests counted."""
    pool = StagingPool("cpu", slots=slots, max_slots=max_slots, slot_bytes=16, timeout=20)
    wrong: list[object] = []
    threads = [threading.Thread(target=build_batches, args=(pool, k, wrong)) for k in range(THREADS)]
    for thread in threads:
        thread.start()
    snapshots = []
    while any(thread.is_alive() for thread in threads):
        snapshots.append(pool.stats())
        threads[0].join(0.001)
    for thread in threads:
        thread.join()
    assert wrong == []

    earlier = snapshots[0]
    for stats in snapshots:
        assert stats.slots == stats.free + stats.filling + stats.in_flight + stats.quarantined
        assert stats.slots <= max_slots
        assert 0 <= stats.waiting <= THREADS
        assert 0 <= ended(stats) + stats.filling - served(stats) <= THREADS  # served, and counted a moment later
        assert stats.uploads >= earlier.uploads
        assert stats.leases >= earlier.leases
        assert stats.bytes_used >= earlier.bytes_used
        earlier = stats

    pool.lease(COLUMN, rows=1).discard()  # takes back what was dropped last
    stats = pool.stats()
    assert stats.leases == THREADS * STEPS + 1
    assert stats.leases_timed_out == stats.leases_refused == 0
    assert served(stats) == ended(stats)
    assert stats.filling == stats.quarantined == stats.waiting == 0
    assert stats.dropped > 0
    pool.close()


@pytest.mark.usefixtures("eager_switching")
def test_of_two_threads_that_upload_one_lease_one_gets_past() -> None:
    """A lease handed to several threads is still uploaded once."""
    pool = StagingPool("cpu", slots=1, max_slots=1)
    for step in range(300):
        lease = pool.lease(COLUMN, rows=2)
        lease["column"] = step
        uploads: list[torch.Tensor] = []
        start = threading.Barrier(3)

        def upload() -> None:
            start.wait()  # noqa: B023 - joined before the next turn
            with contextlib.suppress(Exception):
                uploads.append(lease.upload()["column"])  # noqa: B023

        threads = [threading.Thread(target=upload) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [column.tolist() for column in uploads] == [[step, step]]
    assert pool.stats().uploads == 300
    pool.close()
