"""One event answers for several slots: fewer questions in a quiet ring, and never an answer for another's copy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from staging import Field, Layout, Lease, PoolExhausted, SlotOverwritten, StagingPool, Upload, _lifetime, _ring
from staging.testing import SimulatedDevice, SimulatedEvent

COLUMN = Layout([Field("column", torch.int32)], "column")

MakePool = Callable[..., StagingPool]


class Hooked(SimulatedDevice):
    """A device on which something may happen right behind a record: before the pool has entered the upload."""

    hook: Callable[[], None] | None = None

    def record(self, event: SimulatedEvent, stream: int) -> None:
        super().record(event, stream)
        hook, self.hook = self.hook, None
        if hook is not None:
            hook()


@pytest.fixture
def device() -> Hooked:
    return Hooked()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each yes makes the next question about one slot more."""
    monkeypatch.setattr(_ring, "_CONFIDENCE", 1)


def send(lease: Lease, value: int = 0) -> Upload:
    lease["column"] = value
    return lease.upload()


def batch(pool: StagingPool, value: int = 0) -> Upload:
    with pool.lease(COLUMN, rows=4) as lease:
        return send(lease, value)


def questions(device: SimulatedDevice, pool: StagingPool, batches: int, in_flight: int = 0) -> int:
    """How often an event was asked in so many batches, of which the last few are always in flight."""
    before = device.calls["done"]
    for value in range(batches):
        batch(pool, value)
        while len(device.copies) > in_flight:
            device.finish()
    return device.calls["done"] - before


def asked_about(pool: StagingPool, slots: int) -> None:
    """Make the next question one about so many slots."""
    pool._ring._reach = slots


def slots_of(pool: StagingPool, *more: Lease) -> list[int]:
    """Of all leases that can be had at once."""
    leases = list(more)
    while True:
        try:
            leases.append(pool.lease(COLUMN, rows=4))
        except PoolExhausted:
            return [lease._slot.index for lease in leases]


@pytest.mark.parametrize("slots", [1, 2, 4, 7])
def test_a_quiet_ring_is_asked_once_a_round(device: Hooked, make_pool: MakePool, slots: int) -> None:
    """All copies are over when a slot is looked for: one question frees all slots."""
    pool = make_pool(device, slots=slots, max_slots=slots, timeout=0)
    questions(device, pool, 16 * slots * slots)
    assert questions(device, pool, 10 * slots) == 10
    assert device.violations == []


@pytest.mark.parametrize(("slots", "in_flight"), [(2, 1), (4, 1), (4, 2), (6, 3), (8, 7)])
def test_a_busy_ring_is_asked_for_what_is_over(device: Hooked, make_pool: MakePool, slots: int, in_flight: int) -> None:
    """One question frees what the batches in flight leave; what is tried beyond costs one question in 16."""
    pool = make_pool(device, slots=slots, max_slots=slots, timeout=0)
    questions(device, pool, 400, in_flight)
    free = slots - in_flight
    least = 960 // free
    assert least <= questions(device, pool, 960, in_flight) <= least * 1.2 + 2
    assert device.violations == []
    assert pool.stats().met_in_flight == 0


def test_a_no_costs_one_question_and_the_oldest_is_asked_all_the_same(device: Hooked, make_pool: MakePool) -> None:
    """The later event has not passed: the slot that is free is found in the same lease."""
    pool = make_pool(device, slots=3, max_slots=3, timeout=0)
    for value in range(3):
        batch(pool, value)
    device.finish()
    asked_about(pool, 3)
    lease = pool.lease(COLUMN, rows=4)
    assert lease._slot.index == 0
    assert device.calls["done"] == 2
    assert pool._ring._reach == 2
    assert pool.stats().met_in_flight == 0
    with pytest.raises(PoolExhausted):
        pool.lease(COLUMN, rows=4)
    assert device.calls["done"] == 4  # each of the two in flight once, the later one first
    lease.discard()
    assert pool.stats().met_in_flight == 2


def test_what_one_event_answers_for_is_let_go(device: Hooked, make_pool: MakePool) -> None:
    """Slots that were not asked themselves are free, are counted so, and are no longer held for a copy."""
    pool = make_pool(device, slots=3, max_slots=3, timeout=0)
    for value in range(3):
        batch(pool, value)
    slots = set(pool._ring.slots)
    assert slots <= _lifetime.held
    device.finish_all()
    device.time_ns = 77
    asked_about(pool, 3)
    pool.lease(COLUMN, rows=4).discard()
    assert device.calls["done"] == 1
    assert pool.stats().free == 3
    assert not slots & _lifetime.held
    assert [slot.since for slot in pool._ring.slots] == [77] * 3


def test_a_stream_does_not_answer_for_another(device: Hooked, make_pool: MakePool) -> None:
    """The copy of the oldest slot has not run, the later ones of other streams have."""
    pool = make_pool(device, slots=3, max_slots=3, timeout=0)
    for stream in (0, 1, 1):
        device.stream = stream
        batch(pool, stream)
    device.finish(2)
    device.finish(1)
    asked_about(pool, 3)
    assert slots_of(pool) == [1, 2]


def test_between_streams_those_of_the_own_are_freed(device: Hooked, make_pool: MakePool) -> None:
    """Of the slots between, the event answers for those of its stream only."""
    pool = make_pool(device, slots=3, max_slots=3, timeout=0)
    for stream in (0, 1, 0):
        device.stream = stream
        batch(pool, stream)
    device.finish(2)
    device.finish(0)
    asked_about(pool, 3)
    assert pool.lease(COLUMN, rows=4)._slot.index == 0
    assert (pool.stats().free, pool.stats().in_flight) == (1, 1)
    assert device.calls["done"] == 1


def test_the_order_of_the_ring_is_not_that_of_the_stream(device: Hooked, make_pool: MakePool) -> None:
    """Two threads on one stream: one records first and enters its upload last. Its event says nothing of the other."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=0)
    first, second = pool.lease(COLUMN, rows=4), pool.lease(COLUMN, rows=4)
    late: list[Upload] = []
    device.hook = lambda: late.append(send(second, 2))
    send(first, 1)
    assert [slot.index for slot in pool._ring.slots] == [1, 0]
    device.finish()  # the copy of the first
    asked_about(pool, 2)
    assert slots_of(pool) == [0]
    device.finish()
    assert late[0]["column"].tolist() == [2] * 4
    assert device.violations == []


def test_a_healed_slot_is_asked_itself(device: Hooked, make_pool: MakePool) -> None:
    """Its upload failed while another was being entered, and its copy may run after that one's event."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=0)
    for value in range(2):
        batch(pool, value)
    device.finish_all()
    bad, good = pool.lease(COLUMN, rows=4), pool.lease(COLUMN, rows=4)

    def fail() -> None:
        device.fail("copy", after=True)
        with pytest.raises(RuntimeError, match="injected"):
            send(bad, 3)

    device.hook = fail
    send(good, 4)
    with pytest.raises(PoolExhausted):
        pool.lease(COLUMN, rows=4)  # heals
    assert [slot.index for slot in pool._ring.slots] == [0, 1]
    assert pool.stats().heals == 1
    device.finish()  # the copy of the good one; that of the bad one was queued behind it
    asked_about(pool, 2)
    assert slots_of(pool) == [1]


def test_the_event_of_a_healed_slot_answers_for_those_before(device: Hooked, make_pool: MakePool) -> None:
    """It is recorded behind all that its upload was queued behind."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=0)
    for stream in (0, 1):
        device.stream = stream
        batch(pool)
    device.finish(1)
    device.stream = 0
    device.fail("copy", after=True)
    with pytest.raises(RuntimeError, match="injected"):
        batch(pool)
    with pytest.raises(PoolExhausted):
        pool.lease(COLUMN, rows=4)  # heals
    device.finish_all()
    before = device.calls["done"]
    asked_about(pool, 2)
    assert slots_of(pool) == [0, 1]
    assert device.calls["done"] - before == 1


@pytest.mark.parametrize("then", ["somebody's", "torch's"])
def test_a_stream_that_somebody_may_destroy_is_asked_slot_by_slot(
    device: Hooked, make_pool: MakePool, then: str
) -> None:
    """The next stream may have its number: the copies on it are then not behind those of the old one.

    Also where that one is torch's, which lasts: the number was somebody else's first.
    """
    pool = make_pool(device, slots=2, max_slots=2, timeout=0)
    device.stream = 5
    device.foreign.add(5)
    old = batch(pool, 1)
    device.copies[0].stream = -1  # destroyed; what was queued there still runs
    if then == "torch's":
        device.foreign.discard(5)
    batch(pool, 2)
    device.finish(1)
    asked_about(pool, 2)
    assert slots_of(pool) == [1]
    device.finish()
    assert old["column"].tolist() == [1] * 4
    assert device.violations == []


def test_a_stream_that_may_be_another_in_another_thread_is_healed_where_it_was_used(
    device: Hooked, make_pool: MakePool
) -> None:
    """The handle of the per-thread default stream means as many streams as there are threads."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    device.foreign.add(0)

    def fail() -> None:
        device.fail("copy", after=True)
        with pytest.raises(RuntimeError, match="injected"):
            batch(pool)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    device.finish_all()
    assert slots_of(pool) == []
    assert (pool.stats().quarantined, pool.stats().heals) == (1, 0)
    pool._ring.slots[0].holder = threading.get_ident()  # as if it had failed in this thread
    pool.lease(COLUMN, rows=4).discard()
    assert (pool.stats().quarantined, pool.stats().heals) == (0, 1)


def test_a_slot_that_is_healed_while_a_later_upload_is_entered_is_asked_itself(
    device: Hooked, make_pool: MakePool
) -> None:
    """As many uploads were made when it was healed as when the later one began, whose event is before its copy."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=0)
    for value in range(2):
        batch(pool, value)
    device.finish_all()
    bad, good = pool.lease(COLUMN, rows=4), pool.lease(COLUMN, rows=4)

    def fail_and_heal() -> None:
        device.fail("copy", after=True)
        with pytest.raises(RuntimeError, match="injected"):
            send(bad, 3)
        with pytest.raises(PoolExhausted):
            pool.lease(COLUMN, rows=4)

    device.hook = fail_and_heal
    send(good, 4)
    assert pool.stats().heals == 1
    device.finish()
    asked_about(pool, 2)
    assert slots_of(pool) == [1]


@pytest.mark.usefixtures("eager")
def test_a_question_reaches_no_further_than_the_ring(device: Hooked, make_pool: MakePool) -> None:
    """Or each later no would cost a question more until it has come down."""
    pool = make_pool(device, slots=3, max_slots=3, timeout=0)
    questions(device, pool, 50)
    assert pool._ring._reach == 3


def test_a_write_into_a_slot_that_is_freed_by_anothers_event_is_found(device: Hooked, make_pool: MakePool) -> None:
    """Debug mode looks at each slot that is freed, asked or not."""
    pool = make_pool(device, slots=3, max_slots=3, timeout=0, debug=True)
    for value in range(3):
        batch(pool, value)
    pool._ring.slots[1].buffer.array[0] = 99  # type: ignore[union-attr]
    device.finish_all()
    asked_about(pool, 3)
    with pytest.raises(SlotOverwritten, match="slot 1"):
        pool.lease(COLUMN, rows=4)
    assert pool.stats().quarantined == 0


def test_an_event_that_cannot_be_asked_answers_for_nobody(device: Hooked, make_pool: MakePool) -> None:
    """The slot that was asked is quarantined; the others are asked themselves."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=0)
    for value in range(2):
        batch(pool, value)
    device.fail("done")
    asked_about(pool, 2)
    with pytest.raises(PoolExhausted):
        pool.lease(COLUMN, rows=4)
    device.finish()
    assert slots_of(pool) == [0]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_no_slot_is_written_too_early_however_far_a_question_reaches(
    device: Hooked, make_pool: MakePool, order: tuple[int, ...]
) -> None:
    """Three streams that are let go on in turn, in another order than they were filled."""
    pool = make_pool(device, slots=5, max_slots=5, timeout=1)
    turn = iter(order * 1000)

    def progress(device: Any) -> None:
        stream = next(turn)
        copy = next((copy for copy in device.copies if copy.stream == stream), None)
        if copy is not None:
            device.finish(copy)

    device.on_sleep = progress
    uploads = []
    for value in range(200):
        device.stream = value * value % 3
        uploads.append(batch(pool, value))
        if value % 3:
            progress(device)
    device.finish_all()
    assert device.violations == []
    assert [upload["column"].tolist() for upload in uploads] == [[value] * 4 for value in range(200)]
