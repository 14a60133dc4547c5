"""When things fail: allocation, copy, event, the device, the process. No slot is reused on a guess."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from staging import (
    Field,
    Layout,
    Lease,
    LeaseError,
    PinningError,
    PoolBroken,
    PoolClosed,
    PoolExhausted,
    PoolForked,
    StagingPool,
    Upload,
)
from staging.layout import KEPT_ALONG
from staging.testing import SimulatedDevice

COLUMN = Layout([Field("column", torch.int32)], "column")

MakePool = Callable[..., StagingPool]


def batch(pool: StagingPool, value: int = 0, rows: int = 4) -> Upload:
    with pool.lease(COLUMN, rows=rows) as lease:
        lease["column"] = value
        return lease.upload()


def gauges(pool: StagingPool) -> tuple[int, int, int, int]:
    """Free, filling, in flight, quarantined; they add up to the slots, and nobody waits."""
    stats = pool.stats()
    assert stats.slots == stats.free + stats.filling + stats.in_flight + stats.quarantined
    assert stats.waiting == 0
    return stats.free, stats.filling, stats.in_flight, stats.quarantined


class RecyclingDevice(SimulatedDevice):
    """Host memory that is freed belongs to somebody else at once, who writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.freed = 0

    def host_buffer(self, nbytes: int, *, pinned: bool) -> Any:
        buffer = super().host_buffer(nbytes, pinned=pinned)
        # The array goes exactly when the buffer does: arrays take no part in cyclic garbage, whose weak references
        # are told before a finaliser can save what it wants to keep.
        weakref.finalize(buffer.array, self._recycle, buffer.tensor.numpy()).atexit = False
        return buffer

    def _recycle(self, array: Any) -> None:
        self.freed += 1
        array.fill(0xDD)


# Host memory.


def test_a_pin_that_fails_because_the_device_is_lost_marks_the_pool_broken(
    device: SimulatedDevice, make_pool: MakePool
) -> None:
    """The error of a larger buffer is a `PinningError`, but the device is asked all the same."""
    pool = make_pool(device, slots=1, slot_bytes=16, timeout=0)
    lost = RuntimeError("an illegal memory access was encountered")

    def host_buffer(nbytes: int, *, pinned: bool) -> Any:
        device.break_down(lost)
        raise PinningError("no host memory") from lost

    device.host_buffer = host_buffer  # type: ignore[method-assign]
    with pytest.raises(PinningError):
        batch(pool, rows=1000)
    with pytest.raises(PoolBroken, match="illegal memory access"):
        batch(pool)


def test_auto_falls_back_to_pageable_memory_with_one_warning(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Where pinning fails at construction the pool still works, says so once, and reports the kind."""
    device.fail("host_buffer")
    with pytest.warns(RuntimeWarning, match="pinned memory could not be had") as warned:
        pool = make_pool(device, slots=2, timeout=0)
    assert len(warned) == 1
    assert warned[0].filename == make_pool.__code__.co_filename
    assert repr(pool) == "<StagingPool 'ring' cpu pageable: 2 slots (2 free, 0 filling, 0 in flight, 0 quarantined)>"
    stats = pool.stats()
    assert (stats.pinned_bytes, stats.allocations, stats.allocations_failed) == (0, 2, 1)
    assert batch(pool, 3)["column"].tolist() == [3] * 4


def test_a_ring_that_cannot_be_pinned_whole_goes_on_with_fewer_slots(
    device: SimulatedDevice, make_pool: MakePool
) -> None:
    """If the third buffer cannot be pinned, two pinned slots are what there is; the ring does not try to grow."""
    device.host_buffer, plain = _failing_third(device), device.host_buffer  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="pinned memory could not be had"):
        pool = make_pool(device, slots=4, timeout=0)
    device.host_buffer = plain  # type: ignore[method-assign]
    assert pool.memory == "pinned"
    assert gauges(pool) == (2, 0, 0, 0)
    for value in range(2):
        batch(pool, value)
    with pytest.raises(PoolExhausted):
        batch(pool, 2)
    assert pool.stats().allocations == 2


def _failing_third(device: SimulatedDevice) -> Callable[..., Any]:
    plain, calls = device.host_buffer, []

    def host_buffer(nbytes: int, *, pinned: bool) -> Any:
        calls.append(nbytes)
        if len(calls) == 3:
            raise PinningError("no more to lock")
        return plain(nbytes, pinned=pinned)

    return host_buffer


@pytest.mark.parametrize("memory", ["pinned", "pageable"])
def test_memory_that_was_demanded_and_is_not_there_is_an_error(device: SimulatedDevice, memory: Any) -> None:
    """`memory="pinned"` never falls back; the error names pool, size and the way out."""
    device.fail("host_buffer")
    with pytest.raises(PinningError, match=rf"pool 'mine': {memory} .* 2 slots of 64 bytes, 128 bytes .*injected"):
        StagingPool(device, slots=2, slot_bytes=64, memory=memory, name="mine")


def test_auto_gives_up_when_there_is_no_memory_of_either_kind(device: SimulatedDevice) -> None:
    """Pageable memory can run out as well."""
    device.fail("host_buffer", times=2)
    with pytest.raises(PinningError, match="injected"):
        StagingPool(device, slots=2)


def test_a_pool_that_cannot_grow_stays_as_deep_as_it_is(
    device: SimulatedDevice, make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    """No memory for one more slot: the log says so once, and the lease waits for the slots there are."""
    pool = make_pool(device, slots=1, max_slots=2, timeout=1)
    batch(pool, 1)
    device.fail("host_buffer")
    device.on_sleep = lambda device: device.finish_all()
    with caplog.at_level(logging.WARNING, "staging"):
        upload = batch(pool, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "pool 'ring' stays at 1 slots: injected: no host memory"
    ]
    assert upload["column"].tolist() == [2] * 4
    assert gauges(pool) == (0, 0, 1, 0)
    stats = pool.stats()
    assert (stats.leases_ready, stats.leases_waited, stats.leases_grown) == (1, 1, 0)
    assert (stats.allocations, stats.allocations_failed) == (1, 1)
    with pytest.raises(PoolExhausted):
        pool.lease(COLUMN, rows=4, timeout=0)
    assert device.calls["host_buffer"] == 2  # it does not try again


@pytest.mark.parametrize("error", [PinningError("no memory"), RuntimeError("odd"), KeyboardInterrupt()], ids=repr)
def test_a_slot_that_cannot_be_enlarged_keeps_its_buffer(
    device: SimulatedDevice, make_pool: MakePool, error: Exception
) -> None:
    """The error is the caller's; the slot is free, as large as before, and the next attempt may succeed."""
    pool = make_pool(device, slots=1, max_slots=1, slot_bytes=16, timeout=0)
    device.fail("host_buffer", error)
    with pytest.raises(type(error)):
        pool.lease(COLUMN, rows=100)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (1 free, 0 filling, 0 in flight, 0 quarantined)>"
    stats = pool.stats()
    assert (stats.host_bytes, stats.enlarged, stats.leases_refused, stats.allocations_failed) == (16, 0, 1, 1)
    batch(pool, 1)
    device.finish()
    assert batch(pool, 2, rows=100)["column"].tolist() == [2] * 100


def test_an_odd_error_while_growing_leaves_no_half_made_slot(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Whatever goes wrong in making a new slot, the ring is as it was, and may grow the next time."""
    pool = make_pool(device, slots=1, max_slots=2, timeout=0)
    batch(pool)
    device.fail("host_buffer", RuntimeError("odd"))
    with pytest.raises(RuntimeError, match="odd"):
        pool.lease(COLUMN, rows=4)
    assert gauges(pool) == (0, 0, 1, 0)
    batch(pool)
    assert gauges(pool) == (0, 0, 2, 0)


# Device memory.


@pytest.mark.parametrize("times", [1, 2, 5])
def test_without_device_memory_the_lease_stays_open(device: SimulatedDevice, make_pool: MakePool, times: int) -> None:
    """An upload that finds no device memory queued nothing: it can be tried again, or the lease discarded."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    device.fail("empty", MemoryError("device full"), times=times)
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = [1, 2, 3, 4]
        for _ in range(times):
            with pytest.raises(MemoryError, match="device full"):
                lease.upload()
            assert lease.is_open
            assert gauges(pool) == (0, 1, 0, 0)
        assert lease.upload()["column"].tolist() == [1, 2, 3, 4]
    assert device.calls["copy"] == 1
    assert pool.stats().uploads_failed == 0


def test_without_memory_for_the_second_allocation_nothing_is_queued(
    device: SimulatedDevice, make_pool: MakePool
) -> None:
    """A mixed layout needs two device allocations; both are had before the copy."""
    layout = Layout([Field("column", torch.int32), Field("ids", torch.int64, "tokens")])
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    many = KEPT_ALONG // 8 + 1
    with pool.lease(layout, rows=1, tokens=many) as lease:
        lease["column"] = lease["ids"] = 1
        plain, sizes = device.empty, []

        def second_fails(elements: int, dtype: torch.dtype) -> torch.Tensor:
            sizes.append(elements)
            if len(sizes) == 2:
                raise MemoryError("device full")
            return plain(elements, dtype)

        device.empty = second_fails  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            lease.upload()
        assert device.calls["copy"] == 0
        assert lease.is_open
        assert lease.upload()["ids"].tolist() == [1] * many


# Copies and events: quarantine and heal.


@pytest.mark.parametrize("call", ["copy", "record"])
@pytest.mark.parametrize("after", [False, True], ids=["before its effect", "after its effect"])
def test_a_failed_upload_puts_its_slot_in_quarantine(
    device: SimulatedDevice, make_pool: MakePool, call: str, after: bool
) -> None:
    """The device's error is the caller's, the lease is over, and the slot waits for a new event behind its copy."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    device.fail(call, after=after)
    lease = pool.lease(COLUMN, rows=4)
    lease["column"] = 1
    with pytest.raises(RuntimeError, match=f"injected: {call} failed"):
        lease.upload()
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (0 free, 0 filling, 0 in flight, 1 quarantined)>"
    assert not lease.is_open
    lease.discard()  # does nothing: the slot is not free
    assert gauges(pool) == (0, 0, 0, 1)
    queued = len(device.copies)
    assert queued == (0 if call == "copy" and not after else 1)
    if queued:
        with pytest.raises(PoolExhausted):
            pool.lease(COLUMN, rows=4)
        assert gauges(pool) == (0, 0, 1, 0)  # healed: it has an event again, which has not passed
        device.finish()
    assert batch(pool, 2)["column"].tolist() == [2] * 4
    stats = pool.stats()
    assert (stats.quarantines, stats.heals, stats.uploads_failed, stats.uploads) == (1, 1, 1, 1)
    device.finish_all()
    assert device.violations == []


@pytest.mark.parametrize("call", ["copy", "record"])
@pytest.mark.parametrize("slots", [1, 2])
def test_late_bytes_of_a_failed_upload_are_still_its_own(
    device: SimulatedDevice, make_pool: MakePool, call: str, slots: int
) -> None:
    """A copy may be queued although the call failed: its slot is not rewritten until that copy has run."""
    pool = make_pool(device, slots=slots, max_slots=slots, timeout=0)
    out = torch.zeros(16, dtype=torch.uint8)
    device.stream = 7
    device.fail(call, after=True)
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = [11, 12, 13, 14]
        with pytest.raises(RuntimeError, match="injected"):
            lease.upload(out=out)
    late = device.copies[0]
    device.stream = 8  # the application goes on elsewhere; the slot's event must still come from stream 7
    for value in range(5 * slots):
        try:
            batch(pool, value)
        except PoolExhausted:
            assert slots == 1
        for copy in [copy for copy in device.copies if copy is not late]:
            device.finish(copy)
    device.finish(late)
    assert device.violations == []
    assert out.view(torch.int32).tolist() == [11, 12, 13, 14]
    all_slots = [pool.lease(COLUMN, rows=4) for _ in range(slots)]  # nobody heals a slot before it is needed
    assert gauges(pool) == (0, slots, 0, 0)
    for lease in all_slots:
        lease["column"] = 3
        assert lease.upload()["column"].tolist() == [3] * 4
    device.finish_all()
    assert device.violations == []


@pytest.mark.parametrize("after", [False, True])
def test_an_event_that_was_never_recorded_is_never_trusted(
    device: SimulatedDevice, make_pool: MakePool, after: bool
) -> None:
    """However often healing fails, a slot with a copy behind it stays away from the next batch."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    device.fail("record", times=4, after=after)
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = 1
        with pytest.raises(RuntimeError, match="injected: record failed"):
            lease.upload()
    for _ in range(3):
        with pytest.raises(PoolExhausted):
            pool.lease(COLUMN, rows=4)
        assert gauges(pool) == (0, 0, 0, 1)
    assert pool.stats().heals == 0
    with pytest.raises(PoolExhausted):
        pool.lease(COLUMN, rows=4)
    assert gauges(pool) == (0, 0, 1, 0)
    device.finish()
    batch(pool, 2)
    device.finish()
    assert device.violations == []
    stats = pool.stats()
    assert (stats.quarantines, stats.heals) == (1, 1)


def test_waiting_for_an_upload_never_rests_on_an_event_that_was_never_recorded(make_pool: MakePool) -> None:
    """An upload whose slot went into quarantine later is still waited for by an event behind its copy."""
    waited: list[Any] = []

    class Watching(SimulatedDevice):
        def wait(self, stream: int | None, event: Any) -> None:
            waited.append(event)
            super().wait(stream, event)

    device = Watching()
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    upload = batch(pool, 1)
    device.fail("done")
    device.fail("record", times=2)
    for _ in range(2):
        with pytest.raises(PoolExhausted):
            pool.lease(COLUMN, rows=4)
    assert gauges(pool) == (0, 0, 0, 1)
    upload.wait(9)
    assert [event.behind for event in waited] == [tuple(device.copies)]


@pytest.mark.parametrize("times", [1, 2, 5])
def test_an_event_that_cannot_be_asked_puts_its_slot_in_quarantine(
    device: SimulatedDevice, make_pool: MakePool, times: int
) -> None:
    """A failed query answers neither yes nor no: the slot gets a new event, and is free only when that has passed."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    batch(pool, 1)
    device.fail("done", times=times)
    for _ in range(times):
        with pytest.raises(PoolExhausted):
            pool.lease(COLUMN, rows=4)
        assert sum(gauges(pool)[2:]) == 1
    assert gauges(pool) == (0, 0, 1, 0)
    device.finish()
    batch(pool, 2)
    device.finish()
    assert device.violations == []
    assert pool.stats().heals == pool.stats().quarantines == times


def test_healing_does_not_keep_a_lease_from_other_slots(device: SimulatedDevice, make_pool: MakePool) -> None:
    """While one slot is in quarantine the others serve, and no event is recorded for it."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=0)
    device.fail("copy", after=True)
    with pytest.raises(RuntimeError, match="injected"):
        batch(pool)
    device.stream = 1
    for value in range(10):
        batch(pool, value)
        device.finish(1)
        assert gauges(pool) == (0, 0, 1, 1)
    assert device.calls["record"] == 10
    assert pool.stats().heals == 0


def test_a_quarantined_slot_heals_while_a_lease_waits(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Waiting turns a quarantined slot into one with an event, and ends when that has passed."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=10)
    device.fail("record")
    with pytest.raises(RuntimeError, match="injected"):
        batch(pool, 1)
    device.on_sleep = lambda device: device.finish() if device.time_ns > 5e6 and device.copies else None
    assert batch(pool, 2)["column"].tolist() == [2] * 4
    stats = pool.stats()
    assert (stats.heals, stats.leases_waited) == (1, 1)
    device.finish()
    assert device.violations == []


@pytest.mark.parametrize("call", ["copy", "record", "empty", "done"])
@pytest.mark.parametrize("after", [False, True])
def test_a_pool_works_after_many_failures_in_a_row(
    device: SimulatedDevice, make_pool: MakePool, call: str, after: bool
) -> None:
    """Failure after failure loses no slot: afterwards the ring is as deep as before and every batch is right."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=0)
    device.fail(call, times=25, after=after)
    for value in range(100):
        try:
            batch(pool, value)
        except (RuntimeError, PoolExhausted):
            pass
        assert sum(gauges(pool)) == 2
        device.finish_all()
    for value in range(10):
        both = [pool.lease(COLUMN, rows=4), pool.lease(COLUMN, rows=4)]
        assert gauges(pool) == (0, 2, 0, 0)
        for lease in both:
            lease["column"] = value
            assert lease.upload()["column"].tolist() == [value] * 4
        device.finish_all()
    assert device.violations == []


def test_waiting_for_another_streams_event_may_fail_too(device: SimulatedDevice, make_pool: MakePool) -> None:
    """If the device cannot wait for `after`, nothing is copied, and the slot comes back."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    device.fail("wait")
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = 1
        with pytest.raises(RuntimeError, match="injected: wait failed"):
            lease.upload(out=torch.empty(16, dtype=torch.uint8), after="the reader")
    assert device.calls["copy"] == 0
    assert batch(pool, 2)["column"].tolist() == [2] * 4


# A device that is gone.


def test_a_broken_device_breaks_the_pool_for_good(device: SimulatedDevice, make_pool: MakePool) -> None:
    """The call that meets the error reports it; every lease after it fails at once with that first error as cause."""
    pool = make_pool(device, slots=1, max_slots=2, timeout=10)
    lease = pool.lease(COLUMN, rows=4)
    lease["column"] = 1
    first = RuntimeError("an illegal memory access was encountered")
    device.break_down(first)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        lease.upload()
    calls = dict(device.calls)
    for _ in range(3):
        with pytest.raises(PoolBroken, match=r"'ring' is broken: an illegal memory access.*restarted") as broken:
            pool.lease(COLUMN, rows=4)
        assert broken.value.__cause__ is first
    with pytest.raises(PoolBroken):
        pool.lease(COLUMN, rows=0)
    with pytest.raises((PoolBroken, LeaseError)):
        lease.upload()
    lease.discard()
    assert device.calls == calls  # a broken device is left alone
    assert repr(pool).endswith(", broken>")
    assert sum(gauges(pool)) == 1
    pool.close()
    assert device.calls == calls


@pytest.mark.parametrize("moment", ["upload", "query", "growth", "enlarging", "waiting", "heal"])
def test_the_first_error_is_the_cause_whenever_it_is_met(
    device: SimulatedDevice, make_pool: MakePool, moment: str
) -> None:
    """Whichever call meets the sticky error, the pool is broken from then on and the gauges add up."""
    pool = make_pool(device, slots=1, max_slots=2 if moment == "growth" else 1, slot_bytes=16, timeout=10)
    first = RuntimeError("sticky")
    if moment in ("query", "waiting", "growth"):
        batch(pool)
    if moment == "heal":
        device.fail("record")
        with pytest.raises(RuntimeError, match="injected"):
            batch(pool)
    if moment == "waiting":
        device.on_sleep = lambda device: device.break_down(first)
    elif moment == "growth":
        plain = device.host_buffer

        def breaks(nbytes: int, *, pinned: bool) -> Any:
            device.break_down(first)
            return plain(nbytes, pinned=pinned)

        device.host_buffer = breaks  # type: ignore[method-assign]
    else:
        device.break_down(first)
    with pytest.raises((RuntimeError, PoolBroken), match="sticky"):
        batch(pool, rows=100 if moment == "enlarging" else 4)
    with pytest.raises(PoolBroken, match="sticky") as broken:
        pool.lease(COLUMN, rows=4)
    assert broken.value.__cause__ is first
    gauges(pool)


def test_an_error_that_goes_away_does_not_break_the_pool(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Only what every further call would report makes a pool useless."""
    pool = make_pool(device, slots=1, timeout=0)
    device.fail("copy")
    with pytest.raises(RuntimeError, match="injected"):
        batch(pool)
    batch(pool)
    assert not repr(pool).endswith("broken>")


def test_memory_of_a_broken_pool_is_never_freed(make_pool: MakePool) -> None:
    """A copy may still read it: even after the pool is gone its buffers stay."""
    device = RecyclingDevice()
    pool = StagingPool(device, slots=2, timeout=0)
    batch(pool)
    error = RuntimeError("sticky")
    device.break_down(error)
    with pytest.raises(RuntimeError, match="sticky"):
        batch(pool)
    error.__traceback__ = None  # its frames know the pool
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert device.freed == 0
    device.finish_all()
    assert device.violations == []


# Closing.


def test_closing_an_idle_pool_frees_its_memory(make_pool: MakePool) -> None:
    """Nothing in flight: nothing to wait for, nothing leaked."""
    device = RecyclingDevice()
    pool = StagingPool(device, slots=3, timeout=10)
    batch(pool)
    device.finish()
    pool.close()
    gc.collect()
    assert device.freed == 3
    assert device.calls["sleep"] == 0
    assert pool.stats().slots == pool.stats().host_bytes == 0


def test_closing_waits_for_copies_in_flight(device: SimulatedDevice) -> None:
    """Copies that finish before the deadline are waited for, and no warning is logged."""
    pool = StagingPool(device, slots=3, timeout=10)
    uploads = [batch(pool, value) for value in range(3)]
    device.on_sleep = lambda device: device.finish() if device.copies and device.time_ns > 1e6 else None
    pool.close()
    assert device.copies == []
    assert device.time_ns < 10e9
    assert [upload["column"][0].item() for upload in uploads] == [0, 1, 2]


@pytest.mark.parametrize("quarantined", [False, True])
def test_closing_leaks_what_is_in_flight_at_the_deadline(caplog: pytest.LogCaptureFixture, quarantined: bool) -> None:
    """After the deadline the memory under a running copy is leaked with a warning: its bytes still arrive."""
    device = RecyclingDevice()
    pool = StagingPool(device, slots=2, slot_bytes=64, timeout=10, name="ring")
    out = torch.zeros(16, dtype=torch.uint8)
    error = RuntimeError("no event can be recorded")
    if quarantined:
        device.fail("record", error, times=10_000)
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = [1, 2, 3, 4]
        try:
            lease.upload(out=out)
        except RuntimeError:
            assert quarantined
    caplog.clear()  # the failed upload has been logged
    with caplog.at_level(logging.WARNING, "staging"):
        pool.close(timeout=0.5)
    assert 0.5e9 <= device.time_ns <= 0.502e9
    assert len(caplog.records) == 1
    assert "'ring' closed with 1 slots still in use: leaked 64 bytes" in caplog.text
    error.__traceback__ = None  # its frames know the pool
    del pool, lease
    gc.collect()
    assert device.freed == 1  # the idle slot's
    device.finish_all()
    assert device.violations == []
    assert out.view(torch.int32).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("times", [1, 3, 10_000])
def test_closing_copes_with_events_that_cannot_be_asked(times: int) -> None:
    """close() does not raise for what it cannot free, and frees nothing under a running copy."""
    device = RecyclingDevice()
    pool = StagingPool(device, slots=1, timeout=0.1)
    upload = batch(pool, 5)["column"]
    device.fail("done", times=times)
    pool.close()
    assert pool.stats().slots == 0
    del pool
    gc.collect()
    assert device.freed == 0
    device.finish_all()
    assert device.violations == []
    assert upload.tolist() == [5] * 4


def test_closing_a_pool_whose_device_breaks_meanwhile_does_not_raise() -> None:
    """A sticky error met in close() leaks the memory and is not the caller's."""
    device = RecyclingDevice()
    pool = StagingPool(device, slots=1, timeout=0.1)
    batch(pool)
    error = RuntimeError("sticky")
    device.break_down(error)
    pool.close()
    error.__traceback__ = None  # its frames know the pool
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert device.freed == 0


def test_closing_twice_does_nothing(device: SimulatedDevice, caplog: pytest.LogCaptureFixture) -> None:
    """The second close() neither waits nor warns."""
    pool = StagingPool(device, slots=1, timeout=0)
    batch(pool)
    pool.close()
    calls, time_ns = dict(device.calls), device.time_ns
    pool.close()
    pool.close(timeout=5)
    assert device.calls == calls
    assert device.time_ns == time_ns
    assert len(caplog.records) == 1


def test_closing_ends_leases_of_this_thread_without_waiting(device: SimulatedDevice) -> None:
    """A lease the closing thread itself holds would never end by waiting: it is ended, and its slot freed."""
    pool = StagingPool(device, slots=2, timeout=10)
    lease = pool.lease(COLUMN, rows=4)
    lease["column"] = 1
    pool.close()
    assert device.calls["sleep"] == 0
    assert not lease.is_open
    for act in (lease.upload, lambda: lease.__setitem__("column", 2)):
        with pytest.raises(LeaseError):
            act()
    lease.discard()
    assert device.calls["copy"] == 0


def test_closing_waits_for_a_lease_of_another_thread(device: SimulatedDevice) -> None:
    """Somebody else's lease may still be uploaded before the deadline."""
    pool = StagingPool(device, slots=1, timeout=10)
    held: list[Lease] = []
    thread = threading.Thread(target=lambda: held.append(pool.lease(COLUMN, rows=4)))
    thread.start()
    thread.join()
    uploads = []

    def finish_up(device: SimulatedDevice) -> None:
        if not uploads:
            held[0]["column"] = 6
            uploads.append(held[0].upload())
            with pytest.raises(PoolClosed):
                pool.lease(COLUMN, rows=4)
        elif device.copies:
            device.finish()

    device.on_sleep = finish_up
    pool.close()
    assert uploads[0]["column"].tolist() == [6] * 4
    assert device.violations == []


def test_closing_at_the_deadline_ends_a_lease_of_another_thread(
    device: SimulatedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """At the deadline the lease is ended; its memory is leaked, since that thread may be writing it."""
    pool = StagingPool(device, slots=1, slot_bytes=64, timeout=1)
    held: list[Lease] = []
    thread = threading.Thread(target=lambda: held.append(pool.lease(COLUMN, rows=4)))
    thread.start()
    thread.join()
    pool.close()
    assert "leaked 64 bytes" in caplog.text
    with pytest.raises(LeaseError):
        held[0]["column"] = 1
    with pytest.raises(LeaseError):
        held[0].upload()


def test_a_pool_is_closed_at_the_end_of_its_block(device: SimulatedDevice) -> None:
    """As a context manager a pool closes, also when an exception leaves the block."""
    with pytest.raises(KeyError), StagingPool(device, slots=1, timeout=0) as pool:
        raise KeyError("theirs")
    with pytest.raises(PoolClosed):
        pool.lease(COLUMN, rows=4)


def test_statistics_outlive_the_pools_end(device: SimulatedDevice) -> None:
    """Counters of a closed pool can still be read; its gauges are zero."""
    with StagingPool(device, slots=1, timeout=0, name="ring") as pool:
        batch(pool)
        device.finish()
    stats = pool.stats()
    assert (stats.uploads, stats.leases, stats.slots) == (1, 1, 0)
    assert (
        repr(pool) == "<StagingPool 'ring' cpu pinned: 0 slots (0 free, 0 filling, 0 in flight, 0 quarantined), closed>"
    )


# Forgotten pools.


def forget(kept: list[object]) -> None:
    """Let go of a pool that nobody closed: it is collected with a warning."""

    def collect() -> None:
        kept.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="never closed"):
        collect()


def test_copies_of_a_forgotten_pool_still_arrive() -> None:
    """A pool collected with copies in flight keeps their source alive until they have run."""
    device = RecyclingDevice()
    pool = StagingPool(device, slots=2, timeout=0)
    tensor = batch(pool, 5)["column"]
    kept = [pool]
    del pool
    forget(kept)
    assert device.freed == 0
    with StagingPool(SimulatedDevice(), slots=1, timeout=0) as other:
        other.lease(COLUMN, rows=4).discard()  # looks, and leaves what is in flight alone
        assert device.freed == 0
        device.finish()
        assert device.violations == []
        assert tensor.tolist() == [5] * 4
        other.lease(COLUMN, rows=4).discard()
        gc.collect()
        assert device.freed == 2


def test_a_forgotten_pools_quarantined_slots_are_never_freed() -> None:
    """Without an event to ask, their memory stays."""
    device = RecyclingDevice()
    pool = StagingPool(device, slots=1, timeout=0)
    out = torch.zeros(16, dtype=torch.uint8)
    device.fail("record")
    lease = pool.lease(COLUMN, rows=4)
    lease["column"] = 5
    with pytest.raises(RuntimeError, match="injected"):
        lease.upload(out=out)
    kept = [pool, lease]
    del pool, lease
    forget(kept)
    with StagingPool(SimulatedDevice(), slots=1, timeout=0) as other:
        for _ in range(3):
            other.lease(COLUMN, rows=4).discard()
            gc.collect()
    assert device.freed == 0
    device.finish_all()
    assert device.violations == []
    assert out.view(torch.int32).tolist() == [5] * 4


def test_an_upload_keeps_what_it_needs_of_a_forgotten_pool() -> None:
    """Tensors, and waiting for them, do not depend on the caller keeping the pool."""
    device = SimulatedDevice()
    upload = batch(StagingPool(device, slots=1, timeout=0), 5)
    gc.collect()
    upload.wait(9)
    device.finish()
    assert upload["column"].tolist() == [5] * 4
    assert device.violations == []


# Forks.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_in_a_forked_child_the_pool_refuses_and_the_parent_goes_on(
    device: SimulatedDevice, make_pool: MakePool, kind: str
) -> None:
    """Memory and events do not survive a fork: the child is told so, can read statistics, and may make its own pool."""
    pool = make_pool(device if kind == "simulated" else "cpu", slots=2, timeout=0)
    batch(pool, 1)
    held = pool.lease(COLUMN, rows=4)
    held["column"] = 2
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(30)  # a child that hangs ends by itself
        result = "the child failed"
        try:
            result = _what_a_child_finds(pool, held, dict(device.calls), device)
        except BaseException as error:
            result = repr(error)
        finally:
            os.write(write, result.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == "as expected"
    assert os.waitpid(child, 0)[1] == 0
    assert held.upload()["column"].tolist() == [2] * 4
    device.finish_all()
    assert batch(pool, 3)["column"].tolist() == [3] * 4
    device.finish_all()
    assert device.violations == []
    assert not repr(pool).endswith("forked>")


def _what_a_child_finds(pool: StagingPool, held: Lease, calls: dict[str, int], device: SimulatedDevice) -> str:
    for rows in (4, 0):
        with pytest.raises(PoolForked, match="belongs to the parent process"):
            pool.lease(COLUMN, rows=rows)
    with pytest.raises(PoolForked):
        held.upload()
    held.discard()
    assert repr(pool).endswith(", forked>")
    assert pool.stats().uploads == 1
    assert pool.stats().slots == 2
    pool.close()
    assert device.calls == calls  # the parent's device was not touched
    with StagingPool("cpu", slots=1, slot_bytes=64) as own:
        assert batch(own, 7)["column"].tolist() == [7] * 4
    del pool, held
    gc.collect()
    assert device.calls == calls
    return "as expected"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_holds_the_pool_does_not_hang_the_child(make_pool: MakePool) -> None:
    """The child's copy of a lock held by another thread of the parent is of no consequence."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(SimulatedDevice):
        def done(self, event: Any) -> bool:
            inside.set()
            go_on.wait()
            return super().done(event)

    device = Slow()
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    batch(pool)
    device.finish()
    thread = threading.Thread(target=lambda: pool.lease(COLUMN, rows=4).discard())  # asks the event under the lock
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:
        signal.alarm(30)
        code = 1
        try:
            with pytest.raises(PoolForked):
                pool.lease(COLUMN, rows=4)
            pool.stats()
            code = 0
        finally:
            os._exit(code)
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
