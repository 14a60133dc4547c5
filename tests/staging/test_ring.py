"""The ring as a diary: which slot is handed out, when it grows, when it waits, and what is counted."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from staging import (
    CaptureError,
    Field,
    FieldError,
    Layout,
    Lease,
    LeaseTooLarge,
    PinningError,
    PoolClosed,
    PoolExhausted,
    StagingError,
    StagingPool,
    Upload,
)
from staging.layout import KEPT_ALONG
from staging.testing import SimulatedDevice

COLUMN = Layout([Field("column", torch.int32)], "column")
"""16 bytes for each four rows."""

OUTCOMES = ("leases_ready", "leases_grown", "leases_waited", "leases_empty", "leases_timed_out", "leases_refused")

MakePool = Callable[..., StagingPool]


def send(lease: Lease, value: int = 0) -> Upload:
    lease["column"] = value
    return lease.upload()


def batch(pool: StagingPool, value: int = 0, rows: int = 4, **options: Any) -> Upload:
    """One batch, as a scheduler builds it."""
    with pool.lease(COLUMN, rows=rows, **options) as lease:
        return send(lease, value)


def batches_on_streams_of_their_own(device: SimulatedDevice, pool: StagingPool, count: int) -> list[Upload]:
    """Copies on one stream finish in order; these are free to finish in any."""
    uploads = []
    for value in range(count):
        device.stream = value
        uploads.append(batch(pool, value))
    return uploads


def slot_of(lease: Lease) -> str:
    """Which slot a lease fills, as its repr says."""
    return repr(lease).split("slot ")[1].split(",")[0]


def outcomes(pool: StagingPool) -> dict[str, int]:
    stats = pool.stats().as_dict()
    return {name.removeprefix("leases_"): stats[name] for name in OUTCOMES if stats[name]}


# The order of handing out.


def test_a_ring_fills_grows_waits_and_gives_up(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Hand-out order: a free slot, a slot whose copy is done, one more slot, a wait, an error."""
    pool = make_pool(device, slots=1, max_slots=2, timeout=1)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (1 free, 0 filling, 0 in flight, 0 quarantined)>"

    first = pool.lease(COLUMN, rows=4)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (0 free, 1 filling, 0 in flight, 0 quarantined)>"
    send(first)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (0 free, 0 filling, 1 in flight, 0 quarantined)>"
    device.finish()  # the pool has not looked yet
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (0 free, 0 filling, 1 in flight, 0 quarantined)>"

    second = pool.lease(COLUMN, rows=4)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (0 free, 1 filling, 0 in flight, 0 quarantined)>"
    assert slot_of(second) == "0"
    send(second)

    third = pool.lease(COLUMN, rows=4)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 2 slots (0 free, 1 filling, 1 in flight, 0 quarantined)>"
    assert slot_of(third) == "1"
    send(third)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 2 slots (0 free, 0 filling, 2 in flight, 0 quarantined)>"

    device.on_sleep = lambda device: device.finish() if device.copies else None
    fourth = pool.lease(COLUMN, rows=4)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 2 slots (0 free, 1 filling, 1 in flight, 0 quarantined)>"
    assert slot_of(fourth) == "0"
    send(fourth)

    device.on_sleep = None
    with pytest.raises(PoolExhausted, match="no slot came free within 1 s"):
        pool.lease(COLUMN, rows=4)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 2 slots (0 free, 0 filling, 2 in flight, 0 quarantined)>"

    assert outcomes(pool) == {"ready": 2, "grown": 1, "waited": 1, "timed_out": 1}
    pool.close(timeout=0)
    assert (
        repr(pool) == "<StagingPool 'ring' cpu pinned: 0 slots (0 free, 0 filling, 0 in flight, 0 quarantined), closed>"
    )


def test_a_discarded_lease_frees_its_slot_at_once(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Discard, the end of a block without upload, and an exception in it all give the slot back."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    lease = pool.lease(COLUMN, rows=4)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (0 free, 1 filling, 0 in flight, 0 quarantined)>"
    lease.discard()
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (1 free, 0 filling, 0 in flight, 0 quarantined)>"
    with pool.lease(COLUMN, rows=4):
        assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (0 free, 1 filling, 0 in flight, 0 quarantined)>"
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (1 free, 0 filling, 0 in flight, 0 quarantined)>"
    with pytest.raises(ZeroDivisionError), pool.lease(COLUMN, rows=4):
        _ = 1 / 0
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (1 free, 0 filling, 0 in flight, 0 quarantined)>"
    assert pool.stats().discards == 3
    assert device.copies == []


def test_a_free_slot_comes_before_one_whose_copy_is_done(device: SimulatedDevice, make_pool: MakePool) -> None:
    """While a slot is free no event is asked."""
    pool = make_pool(device, slots=2, timeout=0)
    batch(pool)
    device.finish()
    with pool.lease(COLUMN, rows=4) as lease:
        assert slot_of(lease) == "1"
    assert device.calls["done"] == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_copies_may_finish_in_any_order(device: SimulatedDevice, make_pool: MakePool, order: tuple[int, ...]) -> None:
    """Each slot comes back by its own event, whichever finishes first."""
    pool = make_pool(device, slots=3, max_slots=3, timeout=0)
    uploads = batches_on_streams_of_their_own(device, pool, 3)
    copies = list(device.copies)
    for turn, k in enumerate(order):
        device.finish(copies[k])
        with pool.lease(COLUMN, rows=4) as lease:
            assert slot_of(lease) == str(k)
            device.stream = k
            send(lease, 10 + turn)
    device.finish_all()
    assert device.violations == []
    assert [upload["column"].tolist() for upload in uploads] == [[value] * 4 for value in range(3)]


def test_one_stuck_copy_does_not_hold_up_the_others(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A copy that never finishes costs its own slot and nothing else."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=0)
    stuck = batch(pool, 7)
    device.stream = 1
    for value in range(20):
        batch(pool, value)
        assert repr(pool) == "<StagingPool 'ring' cpu pinned: 2 slots (0 free, 0 filling, 2 in flight, 0 quarantined)>"
        device.finish(1)
    assert outcomes(pool) == {"ready": 21}
    assert pool.stats().met_in_flight == 19
    assert len(device.copies) == 1
    device.finish()
    assert device.violations == []
    assert stuck["column"].tolist() == [7] * 4


def test_the_slot_used_longest_ago_is_handed_out_first(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Of several free or done slots the one uploaded from longest ago is next."""
    pool = make_pool(device, slots=3, timeout=0)
    for _ in range(3):
        batch(pool)
    device.finish_all()
    order = []
    for _ in range(6):
        with pool.lease(COLUMN, rows=4) as lease:
            order.append(slot_of(lease))
            send(lease)
        device.finish_all()
    assert order == ["0", "1", "2", "0", "1", "2"]


# Sizes.


def test_a_free_slot_that_is_too_small_gets_a_larger_buffer(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Enlarging is counted, keeps the number of slots, and stays: the next batch of that size allocates nothing."""
    pool = make_pool(device, slots=1, max_slots=2, slot_bytes=16, timeout=0)
    assert pool.stats().host_bytes == 16
    upload = batch(pool, 5, rows=100)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (0 free, 0 filling, 1 in flight, 0 quarantined)>"
    stats = pool.stats()
    assert (stats.enlarged, stats.allocations, stats.host_bytes, stats.pinned_bytes) == (1, 2, 512, 512)
    assert upload["column"].tolist() == [5] * 100
    device.finish()
    batch(pool, 6, rows=128)
    assert pool.stats().allocations == device.calls["host_buffer"] == 2
    device.finish()
    assert device.violations == []
    assert outcomes(pool) == {"ready": 2}


def test_a_slot_that_is_large_enough_comes_before_one_to_enlarge(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Once one slot is large, large batches go there as long as it is not busy."""
    pool = make_pool(device, slots=2, max_slots=2, slot_bytes=16, timeout=0)
    for _ in range(3):
        batch(pool, rows=100)
        device.finish_all()
    assert pool.stats().enlarged == 1
    batch(pool, rows=100)
    batch(pool, rows=100)  # now both are needed
    assert pool.stats().enlarged == 2


def test_a_slot_in_flight_is_never_enlarged(device: SimulatedDevice, make_pool: MakePool) -> None:
    """The buffer under a running copy is not replaced, however small it is."""
    pool = make_pool(device, slots=1, max_slots=1, slot_bytes=16, timeout=0)
    batch(pool)
    with pytest.raises(PoolExhausted):
        pool.lease(COLUMN, rows=100)
    assert pool.stats().enlarged == 0


def test_a_new_slot_is_made_as_large_as_its_first_batch(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Growing for a large batch makes one buffer, not a small one to be enlarged."""
    pool = make_pool(device, slots=1, max_slots=2, slot_bytes=16, timeout=0)
    batch(pool)
    batch(pool, rows=100)
    stats = pool.stats()
    assert (stats.leases_grown, stats.allocations, stats.enlarged, stats.host_bytes) == (1, 2, 0, 16 + 512)


def test_a_batch_beyond_max_bytes_is_refused_before_anything_is_touched(
    device: SimulatedDevice, make_pool: MakePool
) -> None:
    """`LeaseTooLarge` says what was needed and what is allowed; no slot, buffer or event is looked at."""
    pool = make_pool(device, slots=1, slot_bytes=16, max_bytes=64, timeout=0)
    calls = dict(device.calls)
    with pytest.raises(LeaseTooLarge, match=r"'column'.* with 17 rows needs 80 bytes.* allows 64"):
        pool.lease(COLUMN, rows=17)
    with pytest.raises(LeaseTooLarge):
        pool.lease(COLUMN, rows=10**30)
    assert device.calls == calls
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (1 free, 0 filling, 0 in flight, 0 quarantined)>"
    batch(pool, rows=16)
    assert outcomes(pool) == {"ready": 1, "refused": 2}
    assert pool.stats().host_bytes == 64


def test_max_bytes_need_not_be_a_power_of_two(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A slot holds up to `max_bytes` exactly, and not one byte more."""
    pool = make_pool(device, slots=1, slot_bytes=20, max_bytes=48, timeout=0)
    assert pool.stats().host_bytes == 32
    assert batch(pool, 3, rows=12)["column"].tolist() == [3] * 12
    assert pool.stats().host_bytes == 48


# Waiting.


def test_timeout_zero_never_waits(device: SimulatedDevice, make_pool: MakePool) -> None:
    """With `timeout=0`, for the pool or one lease, a busy ring is an error at once: the clock does not move."""
    for pool, options in (
        (make_pool(device, slots=1, max_slots=1, timeout=0), {}),
        (make_pool(device, slots=1, max_slots=1, timeout=None), {"timeout": 0}),
    ):
        batch(pool)
        with pytest.raises(PoolExhausted, match="within 0 s"):
            pool.lease(COLUMN, rows=4, **options)
    assert device.calls["sleep"] == 0
    assert device.time_ns == 0


@pytest.mark.parametrize("timeout", [1e-6, 0.001, 0.5, 30])
def test_a_wait_ends_at_its_deadline(device: SimulatedDevice, make_pool: MakePool, timeout: float) -> None:
    """The deadline is kept to within one pause, a millisecond at most; the wait is in the statistics."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=timeout)
    batch(pool)
    with pytest.raises(PoolExhausted, match=f"within {timeout:g} s"):
        pool.lease(COLUMN, rows=4)
    assert timeout * 1e9 <= device.time_ns <= timeout * 1e9 + 1e6
    stats = pool.stats()
    assert stats.wait_ns == stats.wait_ns_max == device.time_ns
    assert stats.waiting == 0
    assert outcomes(pool) == {"ready": 1, "timed_out": 1}


def test_a_leases_own_timeout_takes_the_place_of_the_pools(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A lease may wait shorter than the pool says, or without end."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=5)
    batch(pool)
    with pytest.raises(PoolExhausted, match=r"within 0.25 s"):
        pool.lease(COLUMN, rows=4, timeout=0.25)

    def after_a_minute(device: SimulatedDevice) -> None:
        if device.time_ns > 60e9 and device.copies:
            device.finish()

    device.on_sleep = after_a_minute
    with pool.lease(COLUMN, rows=4, timeout=None) as lease:
        assert lease.is_open
    assert 60e9 < device.time_ns < 60.01e9


@pytest.mark.parametrize(
    ("situation", "timeout"),
    [
        *[(situation, timeout) for situation in ("grow", "enlarge", "wait") for timeout in (-1, True)],
        *[(how, value) for how in ("grow", "enlarge") for value in (float("nan"), "soon")],
        *[(how, float("inf")) for how in ("grow", "enlarge", "wait")],
        ("wait", float("nan")),
        ("wait", "soon"),
    ],
)
def test_a_useless_timeout_does_not_cost_a_slot(
    device: SimulatedDevice, make_pool: MakePool, timeout: Any, situation: str
) -> None:
    """Whatever is given as a timeout, afterwards the gauges are as before, or the lease was served."""
    pool = make_pool(device, slots=1, max_slots=2 if situation == "grow" else 1, slot_bytes=16, timeout=1)
    if situation != "enlarge":
        batch(pool)
    device.on_sleep = lambda device: device.finish() if device.copies else None
    with contextlib.suppress(StagingError, TypeError, ValueError):
        pool.lease(COLUMN, rows=100 if situation == "enlarge" else 4, timeout=timeout).discard()
    device.finish_all()
    assert pool.stats().filling == 0


@pytest.mark.parametrize("timeout", [None, float("inf")])
def test_a_pool_may_wait_for_ever(device: SimulatedDevice, make_pool: MakePool, timeout: float | None) -> None:
    """Both `None` and infinity mean: no deadline."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=timeout)
    batch(pool)
    device.on_sleep = lambda device: device.finish() if device.time_ns > 100e9 and device.copies else None
    batch(pool)
    assert outcomes(pool) == {"ready": 1, "waited": 1}


def test_a_wait_ends_when_a_copy_finishes(device: SimulatedDevice, make_pool: MakePool) -> None:
    """The waiting lease gets the slot whose copy finished, and its wait is counted."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=10)
    uploads = batches_on_streams_of_their_own(device, pool, 2)
    device.on_sleep = lambda device: device.finish(1) if device.time_ns > 2e6 and len(device.copies) > 1 else None
    with pool.lease(COLUMN, rows=4) as lease:
        assert slot_of(lease) == "1"
        assert repr(pool) == "<StagingPool 'ring' cpu pinned: 2 slots (0 free, 1 filling, 1 in flight, 0 quarantined)>"
        uploads.append(send(lease, 2))
    stats = pool.stats()
    assert stats.wait_ns == device.time_ns > 2e6
    assert outcomes(pool) == {"ready": 2, "waited": 1}
    device.finish_all()
    assert device.violations == []
    assert [upload["column"][0].item() for upload in uploads] == [0, 1, 2]


def test_a_wait_ends_when_a_lease_is_discarded(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Waiting is not only for events: a discard ends it too."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=10)
    batch(pool)
    held = pool.lease(COLUMN, rows=4)
    device.on_sleep = lambda device: held.discard()
    with pool.lease(COLUMN, rows=4) as lease:
        assert slot_of(lease) == slot_of(held)
        assert repr(pool) == "<StagingPool 'ring' cpu pinned: 2 slots (0 free, 1 filling, 1 in flight, 0 quarantined)>"
    assert device.calls["sleep"] == 1
    assert outcomes(pool) == {"ready": 2, "waited": 1}


def test_a_wait_ends_when_a_lease_is_dropped(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A lease that is garbage-collected while others wait comes back to them."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=10)
    batch(pool)
    held = [pool.lease(COLUMN, rows=4)]

    def drop(device: SimulatedDevice) -> None:
        if held:
            held.clear()
            gc.collect()

    device.on_sleep = drop
    with pool.lease(COLUMN, rows=4) as lease:
        assert slot_of(lease) == "1"
    assert outcomes(pool) == {"ready": 2, "waited": 1}
    assert pool.stats().dropped == 1


def test_a_wait_ends_when_the_pool_is_closed(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Closing tells those who wait, at once."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=10)
    batch(pool)

    def close(device: SimulatedDevice) -> None:
        device.on_sleep = None
        device.finish()
        pool.close()

    device.on_sleep = close
    with pytest.raises(PoolClosed):
        pool.lease(COLUMN, rows=4)
    assert pool.stats().waiting == 0
    assert outcomes(pool) == {"ready": 1, "refused": 1}


def test_whoever_waits_is_served_before_whoever_comes_later(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A lease asked for while another one waits does not overtake it, even if a slot has just come free."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=10)
    batch(pool)
    seen = []

    def newcomer(device: SimulatedDevice) -> None:
        device.on_sleep = None
        seen.append(pool.stats().waiting)
        device.finish()
        with pytest.raises(PoolExhausted):
            pool.lease(COLUMN, rows=4, timeout=0)

    device.on_sleep = newcomer
    with pool.lease(COLUMN, rows=4) as lease:
        assert lease.is_open
    assert seen == [1]
    assert outcomes(pool) == {"ready": 1, "waited": 1, "timed_out": 1}


def test_a_newcomer_gets_what_is_left_for_those_who_wait(device: SimulatedDevice, make_pool: MakePool) -> None:
    """One waits and two slots come free: a lease that cannot wait gets the second, the next one is refused."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=10)
    batches_on_streams_of_their_own(device, pool, 2)
    newcomers = []

    def come(device: SimulatedDevice) -> None:
        device.on_sleep = None
        device.finish_all()
        newcomers.append(pool.lease(COLUMN, rows=4, timeout=0))
        with pytest.raises(PoolExhausted):
            pool.lease(COLUMN, rows=4, timeout=0)

    device.on_sleep = come
    with pool.lease(COLUMN, rows=4) as lease:
        assert {slot_of(lease), slot_of(newcomers[0])} == {"0", "1"}
    assert outcomes(pool) == {"ready": 3, "waited": 1, "timed_out": 1}


def test_those_who_wait_longest_have_the_first_claim(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Of two that wait, the second is not served by the only slot that came free, also when it looks first."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=10)
    batch(pool)
    order: list[str] = []

    def second(device: SimulatedDevice) -> None:
        def free_one(device: SimulatedDevice) -> None:
            device.on_sleep = None
            device.finish_all()

        device.on_sleep = free_one
        with pytest.raises(PoolExhausted):
            pool.lease(COLUMN, rows=4, timeout=0.0005)
        order.append("second")

    device.on_sleep = second
    with pool.lease(COLUMN, rows=4):
        order.append("first")
    assert order == ["second", "first"]
    assert outcomes(pool) == {"ready": 1, "waited": 1, "timed_out": 1}


def test_a_thread_that_holds_every_slot_is_told_at_once(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Waiting for oneself never ends: the error comes without a sleep and names every holder."""
    pool = make_pool(device, slots=1, max_slots=2, timeout=10, debug=True)
    held = [pool.lease(COLUMN, rows=4), pool.lease(COLUMN, rows=4)]
    with pytest.raises(PoolExhausted, match="this thread holds every slot") as refused:
        pool.lease(COLUMN, rows=4)
    message = str(refused.value)
    assert repr(pool) in message
    assert message.count(f"by thread {threading.get_ident()} at {__file__}:") == 2
    assert "slot 0 filling" in message
    assert "slot 1 filling" in message
    assert device.calls["sleep"] == 0
    assert outcomes(pool) == {"ready": 1, "grown": 1, "timed_out": 1}
    held[0].discard()
    with pool.lease(COLUMN, rows=4) as lease:
        assert lease.is_open


def test_slots_held_by_another_thread_are_worth_waiting_for(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Only a thread's own leases make waiting pointless."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=10)
    held: list[Lease] = []
    thread = threading.Thread(target=lambda: held.append(pool.lease(COLUMN, rows=4)))
    thread.start()
    thread.join()
    with pytest.raises(PoolExhausted, match=r"no slot came free within 1 s.*by thread"):
        pool.lease(COLUMN, rows=4, timeout=1)
    device.on_sleep = lambda device: held[0].discard()
    with pool.lease(COLUMN, rows=4) as lease:
        assert lease.is_open


# What is counted.


def test_every_request_is_counted_under_exactly_one_outcome(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Whatever becomes of a request, exactly one outcome goes up by one."""
    pool = make_pool(device, slots=1, max_slots=2, slot_bytes=16, max_bytes=1024, timeout=0)
    expected: list[str] = []

    def after(outcome: str) -> None:
        expected.append(outcome)
        assert outcomes(pool) == {name: expected.count(name) for name in set(expected)}
        assert pool.stats().leases == len(expected)

    batch(pool)
    after("ready")
    batch(pool)
    after("grown")
    with pytest.raises(PoolExhausted):
        pool.lease(COLUMN, rows=4)
    after("timed_out")
    device.on_sleep = lambda device: device.finish_all()
    batch(pool, timeout=1)
    after("waited")
    with pytest.raises(FieldError):
        pool.lease(COLUMN)
    after("refused")
    with pytest.raises(LeaseTooLarge):
        pool.lease(COLUMN, rows=1000)
    after("refused")
    device.capturing_now = True
    with pytest.raises(CaptureError):
        pool.lease(COLUMN, rows=4)
    after("refused")
    device.capturing_now = False
    pool.lease(COLUMN, rows=0).upload()
    after("empty")
    device.finish_all()
    device.fail("host_buffer")
    with pytest.raises(PinningError):
        pool.lease(COLUMN, rows=100)
    after("refused")
    batch(pool, rows=100)
    after("ready")
    held = [pool.lease(COLUMN, rows=4)]
    after("ready")
    device.finish_all()
    held.append(pool.lease(COLUMN, rows=4))
    after("ready")
    with pytest.raises(PoolExhausted, match="this thread holds every slot"):
        pool.lease(COLUMN, rows=4, timeout=10)
    after("timed_out")
    pool.close()
    with pytest.raises(PoolClosed):
        pool.lease(COLUMN, rows=4)
    after("refused")


def test_reading_statistics_never_touches_the_device(device: SimulatedDevice, make_pool: MakePool) -> None:
    """stats(), repr() and the dictionary ask the device nothing, reset nothing and do not notice a finished copy."""
    pool = make_pool(device, slots=2, timeout=0)
    batch(pool)
    pool.lease(COLUMN, rows=4).discard()
    device.finish_all()
    calls = dict(device.calls)
    before = pool.stats()
    for _ in range(3):
        assert pool.stats() == before
        assert repr(pool) == "<StagingPool 'ring' cpu pinned: 2 slots (1 free, 0 filling, 1 in flight, 0 quarantined)>"
        assert pool.stats().as_dict()["leases"] == 2
    assert device.calls == calls


def test_statistics_are_a_frozen_snapshot_of_integers(device: SimulatedDevice, make_pool: MakePool) -> None:
    """All numbers exist from the start, are integers, and do not change behind the reader's back."""
    pool = make_pool(device, slots=2, timeout=0)
    first = pool.stats()
    names = list(first.as_dict())
    assert all(type(value) is int for value in first.as_dict().values())
    batch(pool)
    assert list(pool.stats().as_dict()) == names
    assert first.uploads == 0
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        first.slots = 7  # type: ignore[misc]


def test_bytes_and_fields_of_uploads_are_counted(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Used and padding bytes, the largest upload, fields, and the most slots ever in flight."""
    pool = make_pool(device, slots=3, timeout=0)
    layout = Layout([Field("a", torch.int32), Field("b", torch.uint8)])
    for rows in (5, 1):
        with pool.lease(layout, rows=rows) as lease:
            lease["a"] = lease["b"] = 0
            lease.upload()
    stats = pool.stats()
    assert (stats.uploads, stats.fields) == (2, 4)
    assert (stats.bytes_used, stats.bytes_padded, stats.bytes_peak) == (25 + 5, 23 + 27, 48)
    assert stats.in_flight_peak == 2
    device.finish_all()
    batch(pool)
    assert pool.stats().in_flight_peak == 3  # "in flight" means not yet seen done


def test_a_steady_batch_is_one_copy_one_record_and_no_allocation(device: SimulatedDevice, make_pool: MakePool) -> None:
    """In the steady state: 1 copy, 1 record, 1 device allocation, no host buffer, no wait, one query."""
    pool = make_pool(device, slots=2, max_slots=4, timeout=0)
    for value in range(6):
        batch(pool, value)
        device.finish(0) if len(device.copies) > 1 else None
    for value in range(50):
        before = dict(device.calls)
        pool._ring._yes = 0  # one in 16 tries another one first
        batch(pool, value, rows=1 + value)
        device.finish()
        after = device.calls
        assert {name: after[name] - before.get(name, 0) for name in after} == {
            "host_buffer": 0,
            "empty": 1,
            "copy": 1,
            "record": 1,
            "done": 1,
        }
    assert pool.stats().slots == 2
    assert device.violations == []


def test_one_lease_asks_each_slot_in_flight_at_most_once(device: SimulatedDevice, make_pool: MakePool) -> None:
    """However many slots are busy, a lease that does not wait asks each of them once."""
    pool = make_pool(device, slots=5, max_slots=5, timeout=0)
    batches_on_streams_of_their_own(device, pool, 5)
    before = device.calls["done"]
    with pytest.raises(PoolExhausted):
        pool.lease(COLUMN, rows=4)
    assert device.calls["done"] - before == 5
    assert pool.stats().met_in_flight == 5
    device.finish(3)
    before = device.calls["done"]
    pool.lease(COLUMN, rows=4).discard()
    assert device.calls["done"] - before == 4


def test_mixed_layouts_still_make_one_copy_from_the_host(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Per-row and per-token fields travel together; only the device allocation is split."""
    pool = make_pool(device, slots=1, timeout=0)
    layout = Layout([Field("ids", torch.int64, "tokens"), Field("column", torch.int32)])
    before = dict(device.calls)
    many = KEPT_ALONG // 8 + 1
    with pool.lease(layout, rows=2, tokens=many) as lease:
        lease["ids"] = 1
        lease["column"] = [4, 5]
        lease.upload()
    after = device.calls
    assert {name: after[name] - before.get(name, 0) for name in ("copy", "record", "empty", "host_buffer")} == {
        "copy": 1,
        "record": 1,
        "empty": 2,
        "host_buffer": 0,
    }


# Making and warming a pool.


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 0},
        {"slots": -1},
        {"slots": True},
        {"slots": 2.0},
        {"slots": 4, "max_slots": 3},
        {"slot_bytes": 0},
        {"max_bytes": 0},
        {"slot_bytes": 1024, "max_bytes": 512},
        {"timeout": -1},
        {"timeout": "soon"},
        {"timeout": float("nan")},
        {"memory": "locked"},
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(device: SimulatedDevice, options: dict[str, Any]) -> None:
    """A pool that could not work is refused when it is made, naming the argument, before any memory is had."""
    with pytest.raises(ValueError, match=next(iter(options))):
        StagingPool(device, **options)
    assert device.calls["host_buffer"] == 0


def test_devices_never_tried_are_refused_clearly() -> None:
    """A kind of device nobody has tried says so instead of failing later."""
    for device in ("meta", torch.device("meta")):
        with pytest.raises(StagingError, match="never been tried on devices of kind 'meta'"):
            StagingPool(device)
    with pytest.raises(StagingError, match="neither a torch device nor a staging device"):
        StagingPool(object())  # type: ignore[arg-type]


def test_a_cpu_pool_has_nothing_to_pin() -> None:
    """On the CPU "auto" is pageable without a warning, and "pinned" is an error."""
    with StagingPool("cpu") as pool:
        assert pool.memory == "pageable"
        assert pool.device == torch.device("cpu")
        assert pool.stats().pinned_bytes == 0
    with pytest.raises(PinningError, match="nothing to pin"):
        StagingPool("cpu", memory="pinned")
    assert not torch.cuda.is_initialized()


def test_memory_says_what_the_slots_are(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Pinned where it can be had, pageable on request; locked bytes are reported as the allocator has them."""
    assert make_pool(device, slots=2, slot_bytes=64).stats().pinned_bytes == 128
    pageable = make_pool(device, slots=2, slot_bytes=64, memory="pageable")
    assert pageable.memory == "pageable"
    assert pageable.stats().pinned_bytes == 0
    assert pageable.stats().host_bytes == 128


def test_warming_grows_the_ring_and_sends_from_each_slot(device: SimulatedDevice, make_pool: MakePool) -> None:
    """`warm(n)` makes the ring n deep before serving; its uploads are counted like any others."""
    pool = make_pool(device, slots=2, max_slots=4, timeout=0)
    pool.warm(4)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 4 slots (0 free, 0 filling, 4 in flight, 0 quarantined)>"
    assert device.calls["copy"] == pool.stats().uploads == 4
    device.finish_all()
    pool.warm()
    assert pool.stats().slots == 4
    assert pool.stats().uploads == 8
    for slots in (0, 5):
        with pytest.raises(ValueError, match="max_slots=4"):
            pool.warm(slots)


def test_the_environment_can_switch_debugging_on(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """STAGING_DEBUG is read when no argument says otherwise."""
    for value, argument, expected in (("1", None, True), ("0", None, False), ("", None, False), ("1", False, False)):
        monkeypatch.setenv("STAGING_DEBUG", value)
        with StagingPool(device, slots=1, debug=argument) as pool:
            assert pool.debug is expected
