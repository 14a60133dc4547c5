"""What the numbers mean: each is made to differ by what it counts; peaks and differences; the advice is followed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import attrs
import pytest
import torch

from staging import Field, Layout, PoolExhausted, PoolStats, SlotOverwritten, StagingPool
from staging.stats import COUNTERS, DERIVED, PEAKS, WAIT_BUCKETS, Counters
from staging.testing import SimulatedCopy, SimulatedDevice

COLUMN = Layout([Field("column", torch.int32)], "column")
PAIR = Layout([Field("one", torch.int64), Field("two", torch.int32)], "pair")

MakePool = Callable[..., StagingPool]


def batch(pool: StagingPool, rows: int = 4) -> None:
    with pool.lease(COLUMN, rows=rows) as lease:
        lease["column"] = 1
        lease.upload()


def finish_one(device: SimulatedDevice) -> None:
    if device.copies:
        device.finish()


def numbered(start: int, step: int = 1) -> PoolStats:
    """A snapshot in which every number is another."""
    return PoolStats(**{field.name: start + step * place for place, field in enumerate(attrs.fields(PoolStats))})


# Every key, always, in whole numbers.


def test_every_key_is_there_from_the_start_and_is_an_integer(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A pool that has done nothing has all keys; what it has made is its slots."""
    stats = make_pool(device, slots=3, slot_bytes=64).stats().as_dict()
    assert {type(value) for value in stats.values()} == {int}
    assert {name: value for name, value in stats.items() if value} == {
        "allocations": 3,
        "slots": 3,
        "free": 3,
        "pinned_bytes": 192,
        "host_bytes": 192,
        "suggested_slots": 3,
    }
    assert set(COUNTERS) | set(PEAKS) | set(DERIVED) < set(stats)


def test_copies_avoided_are_the_fields_less_the_uploads(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Two fields in one copy save one; a single field saves none; what is used and what is padded is told apart."""
    pool = make_pool(device)
    with pool.lease(PAIR, rows=3) as lease:
        lease["one"], lease["two"] = 1, 2
        lease.upload()
    stats = pool.stats()
    assert (stats.fields, stats.uploads, stats.copies_avoided) == (2, 1, 1)
    assert (stats.bytes_used, stats.bytes_padded, stats.bytes_peak) == (36, 12, 48)
    batch(pool)
    assert pool.stats().copies_avoided == 1


def test_outcomes_add_up_to_the_leases_and_buckets_to_the_waits() -> None:
    """Sums of all their parts, and of nothing else."""
    stats = numbered(1000)
    outcomes = ("ready", "grown", "waited", "empty", "timed_out", "refused")
    assert stats.leases == sum(getattr(stats, f"leases_{name}") for name in outcomes)
    assert stats.waits == sum(getattr(stats, name) for name in (*WAIT_BUCKETS, "waits_longer"))
    assert stats.violations == sum(
        getattr(stats, f"violations_{kind}") for kind in ("under_copy", "unleased", "behind_end")
    )


# Waits.


def test_a_wait_is_in_the_bucket_that_just_holds_it() -> None:
    """A bound belongs to its bucket, a nanosecond more to the next."""
    for took, bucket in [(0, "waits_to_50us"), *((bound, name) for name, bound in WAIT_BUCKETS.items())]:
        counters = Counters()
        counters.count_wait(took)
        assert {name for name in (*WAIT_BUCKETS, "waits_longer") if getattr(counters, name)} == {bucket}
    for bound, bucket in zip(WAIT_BUCKETS.values(), [*WAIT_BUCKETS, "waits_longer"][1:], strict=True):
        counters = Counters()
        counters.count_wait(bound + 1)
        assert getattr(counters, bucket) == counters.waits == 1
        assert counters.wait_ns == counters.wait_ns_max == bound + 1


def test_bucket_names_say_their_bounds() -> None:
    """`waits_to_2ms` ends at two milliseconds, and bounds rise."""
    units = {"us": 10**3, "ms": 10**6, "s": 10**9}
    for name, bound in WAIT_BUCKETS.items():
        number = name.removeprefix("waits_to_").rstrip("mus")
        assert int(number) * units[name.removeprefix(f"waits_to_{number}")] == bound
    assert list(WAIT_BUCKETS.values()) == sorted(WAIT_BUCKETS.values())


@pytest.mark.parametrize("served", [True, False])
def test_a_wait_is_counted_when_it_ends(device: SimulatedDevice, make_pool: MakePool, served: bool) -> None:
    """Served or given up, once, with its whole time; while it lasts it is in `waiting` alone."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0.05)
    batch(pool)
    during: list[PoolStats] = []

    def watch(device: SimulatedDevice) -> None:
        during.append(pool.stats())
        if served and device.time_ns > 3e6:
            finish_one(device)

    device.on_sleep = watch
    with contextlib.nullcontext() if served else pytest.raises(PoolExhausted):
        batch(pool)
    assert {(stats.waiting, stats.waits, stats.wait_ns) for stats in during} == {(1, 0, 0)}
    stats = pool.stats()
    assert (stats.waiting, stats.waiting_peak, stats.waits) == (0, 1, 1)
    assert stats.wait_ns == stats.wait_ns_max == device.time_ns
    assert (stats.waits_to_5ms, stats.waits_to_100ms) == ((1, 0) if served else (0, 1))
    assert (stats.leases_waited, stats.leases_timed_out) == ((1, 0) if served else (0, 1))


def test_who_may_not_wait_makes_no_wait(device: SimulatedDevice, make_pool: MakePool) -> None:
    """With `timeout=0` a busy ring is an outcome, not a wait."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    batch(pool)
    with pytest.raises(PoolExhausted):
        batch(pool)
    stats = pool.stats()
    assert (stats.waits, stats.waiting_peak, stats.leases_timed_out) == (0, 0, 1)


# The oldest unfinished upload.


def test_the_oldest_unfinished_upload_lags_by_those_made_since(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Uploads made since, whether these have finished or not; what has not been looked at counts as unfinished."""
    pool = make_pool(device, slots=3, max_slots=3, timeout=0)
    assert pool.stats().oldest_lag == 0
    for stream, lag in enumerate((0, 1, 2)):
        device.stream = stream
        batch(pool)
        assert pool.stats().oldest_lag == lag
    for lag in (3, 4, 5):  # the first stays stuck, the others go round
        device.finish(1)
        batch(pool)
        assert pool.stats().oldest_lag == lag
    device.finish()
    assert pool.stats().oldest_lag == 5
    pool.lease(COLUMN, rows=4).discard()  # looks
    assert (pool.stats().in_flight, pool.stats().oldest_lag) == (2, 1)


def test_a_healed_slot_lags_from_its_healing(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Its event was recorded then: the upload that the slot made long before does not count."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=0)
    for _ in range(2):
        batch(pool)
        device.finish()
    device.stream = 1
    device.fail("record")
    with pytest.raises(RuntimeError, match="injected"):
        batch(pool)  # from the slot of upload 1
    device.stream = 0
    for _ in range(4):
        batch(pool)
        device.finish(-1)
    batch(pool)
    assert (pool.stats().quarantined, pool.stats().uploads, pool.stats().oldest_lag) == (1, 7, 0)
    with pytest.raises(PoolExhausted):
        pool.lease(COLUMN, rows=4)  # heals it, but its copy has not run
    assert (pool.stats().in_flight, pool.stats().heals, pool.stats().oldest_lag) == (2, 1, 0)
    device.finish(-1)
    batch(pool)
    assert pool.stats().oldest_lag == 1


# Violations.


@pytest.mark.parametrize("kind", ["under_copy", "unleased", "behind_end", "behind_end, late"])
def test_violations_are_counted_by_kind(device: SimulatedDevice, make_pool: MakePool, kind: str) -> None:
    """Each of the nets counts what it has caught under its own name."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0, slot_bytes=64, debug=True)
    memory = pool._ring.slots[0].buffer.array  # type: ignore[union-attr]
    lease = pool.lease(COLUMN, rows=4)
    lease["column"] = 5
    if kind == "unleased":
        lease.discard()
        memory[3] ^= 1
    elif kind == "behind_end":
        memory[16] ^= 1
        with pytest.raises(SlotOverwritten):
            lease.upload()
    else:
        lease.upload()
        memory[0 if kind == "under_copy" else 16] ^= 1
        device.copies[0].snapshot[0 if kind == "under_copy" else 15] ^= kind == "under_copy"
        device.finish_all()
    if kind != "behind_end":
        with pytest.raises(SlotOverwritten):
            pool.lease(COLUMN, rows=4)
    stats = pool.stats().as_dict()
    caught = f"violations_{kind.removesuffix(', late')}"
    assert {name: value for name, value in stats.items() if name.startswith("violations") and value} == {
        "violations": 1,
        caught: 1,
    }


# Snapshots subtract, peaks start anew.


def test_a_difference_has_the_counters_in_between_and_the_laters_gauges_and_peaks() -> None:
    """Counters are subtracted, the rest is taken over, and what is derived follows."""
    earlier, later = numbered(1000), numbered(5000, 3)
    since = later - earlier
    for field in attrs.fields(PoolStats):
        expected = getattr(later, field.name)
        if field.name in COUNTERS:
            expected -= getattr(earlier, field.name)
        assert getattr(since, field.name) == expected, field.name
    assert since.leases == later.leases - earlier.leases
    assert since.suggested_slots == later.suggested_slots


def test_an_earlier_snapshot_minus_a_later_one_is_refused(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Counters only rise: the error names one that did not. Other things cannot be subtracted at all."""
    pool = make_pool(device)
    earlier = pool.stats()
    batch(pool)
    with pytest.raises(ValueError, match=r"leases_ready was 1 and is 0.*an earlier snapshot of the same pool"):
        earlier - pool.stats()
    with pytest.raises(TypeError):
        earlier - 1


def test_reading_resets_nothing_and_resetting_peaks_nothing_else(device: SimulatedDevice, make_pool: MakePool) -> None:
    """`stats()` twice is the same twice. Peaks fall to what is the case now and rise again; the rest stays."""
    pool = make_pool(device, slots=2, max_slots=2, slot_bytes=1024)
    device.on_sleep = finish_one
    batch(pool, rows=100)
    for _ in range(3):
        batch(pool)
    before = pool.stats()
    assert pool.stats() == before
    peaks = {name: getattr(before, name) for name in PEAKS}
    assert peaks == {
        "bytes_peak": 400,
        "in_flight_peak": 2,
        "wait_ns_max": before.wait_ns // 2,
        "waiting_peak": 1,
        "depth_needed": 4,
    }
    device.finish_all()
    pool.lease(COLUMN, rows=4).discard()  # one is seen done
    before = pool.stats()
    pool.reset_peaks()
    now = dict.fromkeys(PEAKS, 0) | {"in_flight_peak": 1}
    assert pool.stats() == attrs.evolve(before, **now)
    batch(pool)
    assert (pool.stats().bytes_peak, pool.stats().in_flight_peak) == (16, 2)


def test_peaks_reset_while_a_lease_waits_count_it(device: SimulatedDevice, make_pool: MakePool) -> None:
    """The new peaks begin with who waits now, and with the slots in use."""
    pool = make_pool(device, slots=2, max_slots=2)
    seen: list[tuple[int, int, int]] = []

    def reset(device: SimulatedDevice) -> None:
        pool.reset_peaks()
        stats = pool.stats()
        seen.append((stats.waiting_peak, stats.in_flight_peak, stats.depth_needed))
        finish_one(device)

    device.on_sleep = reset
    for _ in range(3):
        batch(pool)
    assert seen == [(1, 2, 3)]


# Advice.


def step_by_step(slots: int, leases: int, steps_in_flight: int, steps: int = 20) -> PoolStats:
    """A scheduler that makes so many leases each step, and then waits for the results of an earlier step.

    A lease that finds no slot waits until the oldest copy is done.
    """
    device = SimulatedDevice(on_sleep=finish_one)
    made: list[list[SimulatedCopy]] = []
    with StagingPool(device, slots=slots, max_slots=slots, name="stepping") as pool:
        for step in range(steps):
            made.append([])
            for _ in range(leases):
                batch(pool)
                made[step].append(device.copies[-1])
            if step >= steps_in_flight:
                for copy in made[step - steps_in_flight]:
                    if not copy.finished:
                        device.finish(copy)
        stats = pool.stats()
        device.finish_all()
    return stats


@pytest.mark.parametrize(
    ("slots", "leases", "steps_in_flight"),
    [(2, 3, 0), (5, 8, 0), (3, 3, 1), (4, 3, 1), (5, 3, 1), (6, 4, 1), (7, 4, 1), (8, 3, 2), (15, 4, 3)],
)
def test_the_suggested_depth_is_the_one_that_makes_the_waits_go_away(
    slots: int, leases: int, steps_in_flight: int
) -> None:
    """It is what the depth rule says; with it no lease waits, and with one slot less some do."""
    shallow = step_by_step(slots, leases, steps_in_flight)
    assert shallow.waits > 0
    advice = shallow.advice()
    assert advice.suggested_slots == shallow.suggested_slots == leases * (steps_in_flight + 1)
    deep = step_by_step(advice.suggested_slots, leases, steps_in_flight)
    assert deep.waits == deep.depth_needed == 0
    assert deep.advice().suggested_slots == advice.suggested_slots
    assert step_by_step(advice.suggested_slots - 1, leases, steps_in_flight).waits > 0


@pytest.mark.parametrize("slots", range(1, 16))
def test_advice_that_is_followed_comes_to_an_end(slots: int) -> None:
    """A ring that is always behind is doubled, and the advice says that it guesses; it ends below twice the need."""
    need = 4 * (3 + 1)
    tried = [slots]
    while (stats := step_by_step(tried[-1], 4, 3)).waits:
        assert stats.suggested_slots > tried[-1]
        assert ("look again" in stats.advice().text) == (stats.suggested_slots == 2 * tried[-1])
        tried.append(stats.suggested_slots)
    assert need <= tried[-1] < 2 * need
    assert len(tried) <= 6


def waiting_together(slots: int, threads: int) -> PoolStats:
    """All slots in flight, then so many threads ask at once; none is served before all have asked."""
    device = SimulatedDevice()
    lock = threading.Lock()
    pool = StagingPool(device, slots=slots, max_slots=slots, timeout=None, name="together")
    for _ in range(min(slots, 2)):
        batch(pool)
    asked = threading.Barrier(threads)
    met = threading.local()

    def meet() -> None:
        if not getattr(met, "already", False):
            met.already = True
            asked.wait(20)

    def on_sleep(device: SimulatedDevice) -> None:
        meet()
        with lock:
            device.finish_all()

    device.on_sleep = on_sleep

    def ask() -> None:
        lease = pool.lease(COLUMN, rows=4)
        meet()
        lease.discard()

    workers = [threading.Thread(target=ask) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
        assert not worker.is_alive()
    stats = pool.stats()
    device.finish_all()
    pool.close()
    return stats


def test_threads_that_wait_together_each_need_a_slot() -> None:
    """The slots in use and one for each that waits; a ring of that depth serves them all at once."""
    shallow = waiting_together(2, 3)
    assert (shallow.waits, shallow.waiting_peak) == (3, 3)
    assert shallow.depth_needed == shallow.suggested_slots == 5
    deep = waiting_together(5, 3)
    assert (deep.waits, deep.waiting_peak, deep.depth_needed) == (0, 0, 0)


def test_asking_again_and_again_is_one_lease_too_many(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A scheduler that polls with `timeout=0` needs one slot more, however often it asks."""
    pool = make_pool(device, slots=3, max_slots=3, timeout=0)
    for _ in range(3):
        batch(pool)
    for _ in range(10):
        with pytest.raises(PoolExhausted):
            batch(pool)
    assert pool.stats().depth_needed == 4
    assert (
        pool.stats().advice().text == "0 leases waited, 0.000 ms in all, and 10 timed out; build the pool with slots=4"
    )


def test_a_lease_that_is_served_at_once_ends_the_row(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Waits far apart need one slot more each, not one on top of the other."""
    pool = make_pool(device, slots=3, max_slots=3)
    device.on_sleep = finish_one
    for _ in range(4):  # three are served at once, the fourth waits
        for _ in range(4):
            batch(pool)
        device.finish_all()
    assert (pool.stats().waits, pool.stats().depth_needed) == (4, 4)


@pytest.mark.parametrize("timeout", [0, 10])
def test_a_ring_that_cannot_grow_for_lack_of_memory_gets_advice_too(
    device: SimulatedDevice, make_pool: MakePool, timeout: float
) -> None:
    """The lease that would have grown the ring waits or fails instead: it needs one slot more than there are."""
    pool = make_pool(device, slots=2, max_slots=4, timeout=timeout)
    device.on_sleep = finish_one
    device.fail("host_buffer")
    for _ in range(2):
        batch(pool)
    with contextlib.nullcontext() if timeout else pytest.raises(PoolExhausted):
        batch(pool)
    assert (pool.stats().waits, pool.stats().depth_needed) == (1 if timeout else 0, 3)


def test_one_that_may_not_wait_needs_a_slot_beside_those_that_do(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Refused while another thread waits: the slots in use, one for that thread, one for itself."""
    pool = make_pool(device, slots=2, max_slots=2)
    for _ in range(2):
        batch(pool)
    refused: list[int] = []

    def ask() -> None:
        with pytest.raises(PoolExhausted):
            pool.lease(COLUMN, rows=4, timeout=0)
        refused.append(pool.stats().depth_needed)

    def another(device: SimulatedDevice) -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(20)
        device.finish_all()

    device.on_sleep = another
    batch(pool)
    assert refused == [4]


def test_two_that_ask_at_once_count_each_other(make_pool: MakePool) -> None:
    """The second asks, and waits, before the first has taken its place in the queue: three slots, not two."""
    second_waits, first_waits = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    class Between(SimulatedDevice):
        armed = False

        def now(self) -> int:  # asked by a lease that found no slot, before it waits
            if self.armed:
                self.armed = False
                threads.append(threading.Thread(target=lambda: pool.lease(COLUMN, rows=4).discard()))
                threads[0].start()
                assert second_waits.wait(20)
            return super().now()

    def on_sleep(device: SimulatedDevice) -> None:
        if threading.current_thread() in threads:
            second_waits.set()
            first_waits.wait(20)
        elif not first_waits.is_set():
            device.finish_all()
            first_waits.set()

    device = Between(on_sleep=on_sleep)
    pool = make_pool(device, slots=1, max_slots=1)
    batch(pool)
    device.armed = True
    pool.lease(COLUMN, rows=4).discard()
    threads[0].join(20)
    assert not threads[0].is_alive()
    assert (pool.stats().waits, pool.stats().waiting_peak, pool.stats().depth_needed) == (2, 2, 3)


def test_without_waits_the_advice_is_the_depth_there_is(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A ring that grew should be built as deep as it is; one that did not is deep enough."""
    pool = make_pool(device, slots=1, max_slots=2)
    batch(pool)
    assert str(pool.stats().advice()) == "every lease found a slot in a ring of 1"
    batch(pool)
    advice = pool.stats().advice()
    assert advice.text == "every lease found a slot in a ring of 2, 1 of them by growing; build the pool with slots=2"
    assert advice.suggested_slots == 2
