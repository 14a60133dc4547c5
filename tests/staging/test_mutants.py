"""Behaviour that nothing else would have missed; `tests/run_mutations.py` takes out the guard behind each of these."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable

import pytest
import torch

from staging import Field, Layout, LeaseError, PoolExhausted, StagingPool
from staging.testing import SimulatedDevice

COLUMN = Layout([Field("column", torch.int32)], "column")

MakePool = Callable[..., StagingPool]


def test_a_wait_is_given_up_within_its_time(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A lease that nobody helps sleeps about as often as its timeout has longest pauses, and no more."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0.05)
    with pool.lease(COLUMN, rows=1) as lease:
        lease["column"] = 1
        lease.upload()

    def count(device: SimulatedDevice) -> None:
        assert device.calls["sleep"] < 100, "the lease goes on waiting"

    device.on_sleep = count
    with pytest.raises(PoolExhausted, match=r"within 0\.05 s"):
        pool.lease(COLUMN, rows=1)


def test_an_upload_whose_slot_was_handed_out_again_has_nothing_to_wait_for(
    device: SimulatedDevice, make_pool: MakePool
) -> None:
    """The slot's event belongs to the next upload from the moment that the slot is leased."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    with pool.lease(COLUMN, rows=1) as lease:
        lease["column"] = 1
        upload = lease.upload()
    upload.wait(5)
    assert device.calls["wait"] == 1
    device.finish()
    with pool.lease(COLUMN, rows=1):
        upload.wait(5)
    assert device.calls["wait"] == 1


def test_a_lease_discarded_twice_while_the_ring_is_busy_is_given_back_once(
    device: SimulatedDevice, make_pool: MakePool
) -> None:
    """The discards wait for whoever is inside; the second finds its lease ended, perhaps the slot another lease's."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    lease = pool.lease(COLUMN, rows=1)
    before = repr(lease).replace("open", "ended")
    with pool._ring.lock:
        entry = (lease._slot, lease._generation)
        lease.discard()
        assert not lease.is_open
        assert repr(lease) == before
        with pytest.raises(LeaseError, match="ended"):
            lease["column"] = 1
        lease.discard()
        pool._ring.discarded.append(entry)  # as where an interrupt came before the lease had ended
    with pool.lease(COLUMN, rows=1) as second:
        second["column"] = 1
        assert second.upload()["column"].tolist() == [1]
    assert pool.stats().discards == 1


def test_an_upload_cut_off_twice_while_it_is_booked_is_healed(device: SimulatedDevice, make_pool: MakePool) -> None:
    """One interrupt before the slot is in flight, the next before it is quarantined: the lease's end is still seen."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    ring = pool._ring
    lease = pool.lease(COLUMN, rows=1)
    lease["column"] = 1

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    ring.uploaded = ring.upload_failed = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        lease.upload()
    del ring.uploaded, ring.upload_failed
    del lease
    gc.collect()
    device.finish_all()
    with pool.lease(COLUMN, rows=1) as second:
        assert second.is_open
    assert pool.stats().quarantines == 1
    assert device.violations == []


def test_an_upload_cut_off_while_it_is_booked_is_watched_until_it_is_in_flight(
    device: SimulatedDevice, make_pool: MakePool
) -> None:
    """The interrupt comes in the booking itself, the next one before the quarantine."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    ring, now = pool._ring, device.now
    lease = pool.lease(COLUMN, rows=1)
    lease["column"] = 1

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    device.now = interrupted  # type: ignore[method-assign]
    ring.upload_failed = interrupted  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            lease.upload()
    finally:
        device.now = now  # type: ignore[method-assign]
        del ring.upload_failed
    assert ring.slots[0].ticket is not None


def test_of_two_uploads_at_once_the_one_that_comes_too_late_harms_nothing(make_pool: MakePool) -> None:
    """It fails while the other's copy is being queued; the other's slot is not taken for a failed one."""
    in_empty, claimed, failed = threading.Event(), threading.Event(), threading.Event()

    class Slow(SimulatedDevice):
        def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
            if threading.current_thread().name == "late":
                in_empty.set()
                claimed.wait(20)
            return super().empty(elements, dtype)

        def copy(self, landing: torch.Tensor, source: torch.Tensor, stream: int) -> None:
            claimed.set()
            failed.wait(20)
            super().copy(landing, source, stream)

    device = Slow()
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    lease = pool.lease(COLUMN, rows=1)
    lease["column"] = 1
    errors: list[BaseException] = []

    def late() -> None:
        try:
            lease.upload()
        except LeaseError as error:
            errors.append(error)
        failed.set()

    thread = threading.Thread(target=late, name="late")
    thread.start()
    assert in_empty.wait(20)
    assert lease.upload()["column"].tolist() == [1]
    thread.join(20)
    assert len(errors) == 1
    stats = pool.stats()
    assert (stats.uploads, stats.uploads_failed, stats.quarantines, stats.in_flight) == (1, 0, 0, 1)


def test_notes_that_another_thread_logs_first_are_no_error(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Seen, and gone before they are taken."""
    pool = make_pool(device)

    class Raced(deque[str]):
        def __bool__(self) -> bool:
            return True

    pool._ring.notes = Raced()
    with pool.lease(COLUMN, rows=1) as lease:
        assert lease.is_open
