"""Code that runs in the middle of the pool's own: garbage collection, values with methods, a second close."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from staging import Field, Layout, LeaseError, PoolClosed, StagingPool
from staging.testing import SimulatedDevice

COLUMN = Layout([Field("column", torch.int64)], "column")


def send(pool: StagingPool, value: int) -> torch.Tensor:
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = value
        return lease.upload()["column"]


def test_a_lease_ended_by_garbage_collection_inside_the_ring_does_not_hang() -> None:
    """A suspended generator in a cycle is closed while the ring's lock is held; its slot comes back all the same."""

    class Collecting(SimulatedDevice):
        armed = False

        def now(self) -> int:
            if self.armed:  # asked under the lock, whenever a slot changes its state
                self.armed = False
                gc.collect()
            return super().now()

    device = Collecting()
    pool = StagingPool(device, slots=2, max_slots=2, timeout=0)

    def holding(cycle: list[Any]) -> Iterator[None]:
        with pool.lease(COLUMN, rows=4):
            yield
            cycle.clear()

    cycle: list[Any] = []
    generator = holding(cycle)
    next(generator)
    cycle.append(generator)
    cycle.append(cycle)
    assert pool.stats().filling == 1
    del generator, cycle
    device.armed = True
    assert send(pool, 7).tolist() == [7] * 4
    stats = pool.stats()
    assert (stats.filling, stats.discards, stats.dropped) == (0, 1, 0)
    pool.close()


def test_values_whose_reading_ends_the_lease_never_reach_a_slot_in_flight() -> None:
    """The caller's own code runs before the lease is asked whether it is open, not between that and the write."""
    device = SimulatedDevice()
    pool = StagingPool(device, slots=1, max_slots=1, timeout=0)
    lease = pool.lease(COLUMN, rows=4)

    class Ending(Sequence[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: Any) -> int:
            if lease.is_open:
                lease.discard()
                send(pool, 1)
            if index >= 4:
                raise IndexError
            return 99

    with pytest.raises(LeaseError, match="has ended"):
        lease["column"] = Ending()
    device.finish_all()
    assert device.violations == []


def test_an_event_that_cannot_be_waited_for_leaves_the_lease_open() -> None:
    """Nothing was queued: no quarantine, and the upload can be tried again."""
    device = SimulatedDevice()
    with StagingPool(device, slots=1, timeout=0) as pool:
        out = torch.zeros(COLUMN.nbytes(rows=4), dtype=torch.uint8)
        lease = pool.lease(COLUMN, rows=4)
        lease["column"] = 5
        device.fail("wait")
        with pytest.raises(RuntimeError, match="injected"):
            lease.upload(out=out, after=device.new_event())
        assert lease.upload(out=out)["column"].tolist() == [5] * 4
        assert pool.stats().quarantines == 0
        device.finish_all()


def test_an_empty_batch_is_fine_during_a_capture() -> None:
    """It makes no copy, so there is nothing that a graph could repeat."""
    device = SimulatedDevice()
    with StagingPool(device) as pool:
        device.capturing_now = True
        assert pool.lease(COLUMN, rows=0).upload()["column"].shape == (0,)
        device.capturing_now = False


def test_an_interrupted_close_can_be_taken_up_again() -> None:
    """The first one is interrupted while it waits, the second one ends the pool."""
    device = SimulatedDevice()
    pool = StagingPool(device, slots=1, timeout=1)
    send(pool, 3)

    def interrupt(_: SimulatedDevice) -> None:
        raise KeyboardInterrupt

    device.on_sleep = interrupt
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    device.on_sleep = lambda device: device.finish() if device.copies else None
    pool.close()
    assert pool.stats().slots == 0
    with pytest.raises(PoolClosed):
        pool.lease(COLUMN, rows=1)


def test_an_unusable_timeout_of_close_changes_nothing() -> None:
    """The pool is still open after the error."""
    with StagingPool("cpu") as pool:
        with pytest.raises(ValueError, match="timeout"):
            pool.close(timeout=-1)
        assert send(pool, 2).tolist() == [2] * 4


@pytest.mark.parametrize("fails", [False, True])
def test_a_pool_closed_while_a_slot_is_enlarged_hands_nothing_out(fails: bool) -> None:
    """Whether the larger buffer can be had or not, the lease ends in PoolClosed or the buffer's own error."""

    class Closing(SimulatedDevice):
        def host_buffer(self, nbytes: int, *, pinned: bool) -> Any:
            if nbytes > 16:
                pool.close(timeout=0)
                if fails:
                    self.fail("host_buffer")
            return super().host_buffer(nbytes, pinned=pinned)

    pool = StagingPool(Closing(), slots=1, slot_bytes=16, timeout=0)
    with pytest.raises(MemoryError if fails else PoolClosed):
        pool.lease(COLUMN, rows=1000)
    assert pool.stats().filling == 0
    assert pool.stats().leases == pool.stats().leases_refused == 1


def test_uploads_are_compared_by_identity() -> None:
    """Comparing tensors would wait for the device; an upload can be a key."""
    with StagingPool("cpu") as pool:
        first, second = ({pool.lease(COLUMN, rows=0).upload(): 1} for _ in range(2))
        assert first != second
