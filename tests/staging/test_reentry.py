"""Code that runs in the middle of the pool's own: garbage collection, values with methods, a second close."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from staging import Field, Layout, LeaseError, PoolClosed, PoolForked, StagingError, StagingPool
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
    sent: list[list[int]] = []
    thread = threading.Thread(target=lambda: sent.append(send(pool, 7).tolist()), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive(), "it waits for a lock that it holds itself"
    assert sent == [[7] * 4]
    stats = pool.stats()
    assert (stats.filling, stats.discards, stats.dropped) == (0, 1, 0)
    pool.close()


@pytest.mark.parametrize("stuck_elsewhere", [False, True])
def test_statistics_never_hang(stuck_elsewhere: bool) -> None:
    """Asked by a signal handler in the middle of a change, or while another thread hangs in the driver."""
    seen: list[int] = []
    release = threading.Event()

    class Asking(SimulatedDevice):
        armed = False

        def now(self) -> int:  # asked under the lock, whenever a slot changes its state
            if self.armed:
                self.armed = False
                if stuck_elsewhere:
                    release.wait(20)
                else:
                    seen.append(pool.stats().slots)
            return super().now()

    device = Asking()
    pool = StagingPool(device, slots=2, timeout=0)
    device.armed = True
    thread = threading.Thread(target=lambda: send(pool, 7), daemon=True)
    thread.start()
    if stuck_elsewhere:
        while device.armed:
            time.sleep(0.001)
        seen.append(pool.stats().slots)
        release.set()
    thread.join(timeout=20)
    assert not thread.is_alive(), "it waits for a lock that it holds itself"
    assert seen == [2]
    assert pool.stats().uploads == 1
    device.finish_all()
    pool.close()


def test_a_pool_is_not_closed_below_its_own_thread() -> None:
    """A signal handler that closes it in the middle of a change is told so; closed later, all is well."""
    refused: list[StagingError] = []

    class Closing(SimulatedDevice):
        armed = False

        def now(self) -> int:  # asked under the lock, whenever a slot changes its state
            if self.armed:
                self.armed = False
                with pytest.raises(StagingError, match="cannot be closed now") as caught:
                    pool.close(timeout=0)
                refused.append(caught.value)
            return super().now()

    device = Closing()
    pool = StagingPool(device, slots=2, timeout=0)
    device.armed = True
    thread = threading.Thread(target=lambda: send(pool, 7), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive(), "it waits for a lock that it holds itself"
    assert len(refused) == 1
    assert pool.stats().uploads == 1
    device.finish_all()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
@pytest.mark.parametrize("many", [True, False], ids=["in a list", "one for all"])
def test_a_number_whose_value_ends_the_lease_never_reaches_a_slot_in_flight(dtype: torch.dtype, many: bool) -> None:
    """Its class is one of the caller's, so asking for its value runs code of theirs: before anything is written."""
    device = SimulatedDevice()
    pool = StagingPool(device, slots=1, max_slots=1, timeout=0)
    layout = Layout([Field("column", dtype)])
    lease = pool.lease(layout, rows=4)

    def value() -> int:
        if lease.is_open:
            lease.discard()
            with pool.lease(layout, rows=4) as other:
                other["column"] = 8
                other.upload()
        return 9

    class Float(float):
        def __float__(self) -> float:
            return float(value())

    class Int(int):
        def __int__(self) -> int:
            return value()

        __index__ = __int__

    number = Float(9) if dtype.is_floating_point else Int(9)
    with pytest.raises(LeaseError, match="has ended"):
        lease["column"] = [number, 9, 9, 9] if many else number
    device.finish_all()
    assert device.violations == []


def test_a_name_whose_hash_ends_the_lease_never_reaches_a_slot_in_flight() -> None:
    """Looking up a name of a class of the caller's runs code of theirs: before the lease is asked."""
    device = SimulatedDevice()
    pool = StagingPool(device, slots=1, max_slots=1, timeout=0)
    lease = pool.lease(COLUMN, rows=4)

    class Name(str):
        def __hash__(self) -> int:
            if lease.is_open:
                lease.discard()
                send(pool, 8)
            return str.__hash__(self)

    with contextlib.suppress(LeaseError):
        lease[Name("column")] = [9] * 4
    device.finish_all()
    assert device.violations == []
    with pytest.raises(LeaseError, match="has ended"):
        lease[Name("column")] = [9] * 4
    assert type(Field(Name("column"), torch.int32).name) is str


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


def test_an_upload_that_fails_after_its_slot_moved_on_leaves_the_new_owner_alone() -> None:
    """An interrupt right after the upload was booked: the slot is another lease's by then, and stays so."""
    device = SimulatedDevice()
    pool = StagingPool(device, slots=1, max_slots=1, timeout=0)
    first = pool.lease(COLUMN, rows=4)
    first["column"] = 1
    taken = []

    class Interrupting:
        """The ring's lock, which lets somebody else in and then raises, once the slot is in flight."""

        def __init__(self, lock: Any) -> None:
            self._lock = lock
            self.locked = lock.locked

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *error: object) -> None:
            self._lock.release()
            if device.copies and not taken:
                device.finish_all()
                taken.append(None)
                taken[0] = pool.lease(COLUMN, rows=4)
                raise KeyboardInterrupt

    pool._ring.lock = Interrupting(pool._ring.lock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        first.upload()
    stats = pool.stats()
    assert (stats.filling, stats.quarantined, stats.uploads, stats.uploads_failed) == (1, 0, 1, 0)
    taken[0]["column"] = 2
    assert taken[0].upload()["column"].tolist() == [2] * 4
    device.finish_all()
    assert device.violations == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_asks_nothing_of_what_the_parent_left() -> None:
    """Neither an upload's event nor those of collected pools; the child's own pool works."""
    device = SimulatedDevice()
    pool = StagingPool(device, slots=2)
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = 1
        upload = lease.upload()
    lost = StagingPool(device, slots=1)
    send(lost, 1)
    del lost
    gc.collect()
    child = os.fork()
    if child == 0:
        asked = device.calls.copy()
        verdict = 1
        try:
            upload.wait(1)
        except PoolForked:
            own = StagingPool("cpu")
            verdict = 0 if send(own, 3).tolist() == [3] * 4 and device.calls == asked else 2
        finally:
            os._exit(verdict)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    device.finish_all()
    send(pool, 1)
    device.finish_all()
    pool.close()
