"""`pool.dump()` and the log: what they say, and that a dump may be asked for whatever hangs."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from staging import Field, Layout, PoolBroken, PoolExhausted, StagingPool
from staging._dump import _age
from staging.testing import SimulatedDevice

COLUMN = Layout([Field("column", torch.int32)], "column")

MakePool = Callable[..., StagingPool]


def batch(pool: StagingPool, rows: int = 4) -> None:
    with pool.lease(COLUMN, rows=rows) as lease:
        lease["column"] = 1
        lease.upload()


def plain(dump: str) -> list[str]:
    """Its lines, without the numbers that the system gives to threads."""
    return re.sub(r"thread \d+", "thread N", dump).splitlines()


def test_every_slot_has_a_line(device: SimulatedDevice, make_pool: MakePool) -> None:
    """By number, with state, age, last upload, size and holder; the ring's own order is another one."""
    pool = make_pool(device, slots=4, max_slots=4, slot_bytes=64, timeout=0)
    batch(pool)
    device.time_ns += 5_000_000_000
    device.finish()
    batch(pool)
    device.fail("copy")
    with pytest.raises(RuntimeError, match="injected"):
        batch(pool)
    held = pool.lease(COLUMN, rows=4)
    device.time_ns += 1_500_000
    assert held.is_open
    calls = dict(device.calls)
    assert plain(pool.dump()) == [
        "<StagingPool 'ring' cpu pinned: 4 slots (0 free, 1 filling, 2 in flight, 1 quarantined)>",
        "0 leases waiting; 2 uploads, 1 of them since the oldest unfinished one",
        "slot 0: in flight for 5.0 s, last upload 1, 64 bytes, last leased by thread N 'MainThread'",
        "slot 1: in flight for 1.5 ms, last upload 2, 64 bytes, last leased by thread N 'MainThread'",
        "slot 2: quarantined for 1.5 ms, no upload yet, 64 bytes, last leased by thread N 'MainThread'",
        "slot 3: filling for 1.5 ms, no upload yet, 64 bytes, held by thread N 'MainThread'",
    ]
    assert str(threading.get_ident()) in pool.dump()
    assert device.calls == calls


def test_a_fresh_ring_and_a_closed_one(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A slot that was never leased has no holder; of a closed pool the reason is there, and no slots."""
    pool = make_pool(device, slots=1, slot_bytes=64)
    assert pool.dump().splitlines()[1:] == [
        "0 leases waiting; 0 uploads, 0 of them since the oldest unfinished one",
        "slot 0: free for 0 ns, no upload yet, 64 bytes",
    ]
    pool.close()
    assert pool.dump().splitlines() == [
        "<StagingPool 'ring' cpu pinned: 0 slots (0 free, 0 filling, 0 in flight, 0 quarantined), closed>",
        "leases are refused: pool 'ring' is closed; make a new one",
        "0 leases waiting; 0 uploads, 0 of them since the oldest unfinished one",
    ]


def test_a_holder_that_has_ended_is_said_to(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A lease taken by a thread that is gone: that is where to look for one that nobody will give back."""
    pool = make_pool(device, slots=1)
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(pool.lease(COLUMN, rows=4)), name="builder")
    thread.start()
    thread.join()
    assert re.search(r"filling .* held by thread \d+ which has ended$", pool.dump())


def test_debug_mode_adds_where_the_lease_was_taken(device: SimulatedDevice, make_pool: MakePool) -> None:
    """File and line of the caller."""
    pool = make_pool(device, slots=1, debug=True)
    lease = pool.lease(COLUMN, rows=4)
    assert re.search(r"held by thread \d+ 'MainThread' at .*test_dump\.py:\d+$", pool.dump())
    lease.discard()


def test_a_lease_that_waits_is_seen_from_another_thread(device: SimulatedDevice, make_pool: MakePool) -> None:
    """While the scheduler waits for a slot, the dump says so, and what it waits for."""
    pool = make_pool(device, slots=1, max_slots=1, slot_bytes=64)
    batch(pool)
    dumps: list[str] = []

    def look(device: SimulatedDevice) -> None:
        other = threading.Thread(target=lambda: dumps.append(pool.dump()))
        other.start()
        other.join()
        device.finish_all()

    device.on_sleep = look
    batch(pool)
    assert plain(dumps[0])[1] == "1 leases waiting; 1 uploads, 0 of them since the oldest unfinished one"
    assert plain(dumps[0])[2].startswith("slot 0: in flight for ")


def test_a_healed_slot_is_said_to_be(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Its event is not its last upload's; with its next upload that is over."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    batch(pool)
    device.finish()
    device.fail("record")
    with pytest.raises(RuntimeError, match="injected"):
        batch(pool)
    with pytest.raises(PoolExhausted):
        batch(pool)
    assert "slot 0: in flight, healed for 0 ns, last upload 1," in pool.dump()
    device.finish_all()
    batch(pool)
    assert "slot 0: in flight for 0 ns, last upload 2," in pool.dump()


class Hanging(SimulatedDevice):
    """A device of which one call, once armed, does not come back until it is let go."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()
        setattr(self, call, self._hang(getattr(self, call)))
        self.armed = False

    def _hang(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def hangs(*arguments: Any, **options: Any) -> Any:
            if self.armed:
                self.armed = False
                self.inside.set()
                self.go_on.wait(20)
            return real(*arguments, **options)

        return hangs


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("copy", "slot 0: filling, upload begun for "),  # the driver's copy, outside the lock
        ("host_buffer", "slot 0: filling for "),  # a larger buffer, outside the lock
        ("done", "slot 0: in flight for "),  # an event, under the lock
    ],
)
def test_a_dump_comes_while_the_scheduler_hangs(call: str, line: str) -> None:
    """Wherever the scheduler's thread is stuck in the driver, the dump comes, and says what it was about to do."""
    device = Hanging(call)
    pool = StagingPool(device, slots=1, max_slots=1, slot_bytes=16, timeout=0, name="hung")
    if call == "done":
        batch(pool)
        device.finish()
    device.armed = True
    rows = 100 if call == "host_buffer" else 4
    scheduler = threading.Thread(target=lambda: batch(pool, rows), name="scheduler", daemon=True)
    scheduler.start()
    assert device.inside.wait(20)
    start = time.monotonic()
    lines = pool.dump().splitlines()
    assert time.monotonic() - start < 10  # it came back long before the call did
    assert not device.go_on.is_set()
    assert lines[-1].startswith(line)
    assert ("'scheduler'" in lines[-1]) == (call != "done")
    without_lock = "read without the lock: a thread has been inside the pool for a quarter of a second or longer"
    assert (lines[1] == without_lock) == (call == "done")
    device.go_on.set()
    scheduler.join(20)
    assert not scheduler.is_alive()
    device.finish_all()
    pool.close()


def test_a_slot_whose_first_buffer_is_being_made_is_said_to_be() -> None:
    """Growing pins memory outside the lock: until that is there, the slot has none."""
    device = Hanging("host_buffer")
    pool = StagingPool(device, slots=1, max_slots=2, slot_bytes=16, name="hung")
    batch(pool)
    device.armed = True
    scheduler = threading.Thread(target=lambda: batch(pool), daemon=True)
    scheduler.start()
    assert device.inside.wait(20)
    assert "slot 1: filling, its first buffer is being made for " in pool.dump()
    device.go_on.set()
    scheduler.join(20)
    device.finish_all()
    pool.close()


def test_a_signal_handler_may_ask() -> None:
    """It runs on top of the thread that is inside the pool, and must not wait for it."""
    dumps: list[str] = []

    class Asking(SimulatedDevice):
        armed = False

        def done(self, event: Any) -> bool:  # asked under the lock
            if self.armed:
                self.armed = False
                dumps.append(pool.dump())
                pool.reset_peaks()
            return super().done(event)

    device = Asking()
    pool = StagingPool(device, slots=1, max_slots=1, timeout=0)
    batch(pool)
    device.finish()
    device.armed = True
    worker = threading.Thread(target=lambda: batch(pool), daemon=True)  # so that a hang ends the test, not the suite
    worker.start()
    worker.join(20)
    assert not worker.is_alive(), "it waits for a lock that it holds itself"
    assert dumps[0].splitlines()[1].startswith("read without the lock")
    assert pool.stats().uploads == 2
    device.finish_all()
    pool.close()


def test_ages_are_in_units_one_can_read() -> None:
    """The largest unit that is not more than the age."""
    second = 1_000_000_000
    ages = [0, 999, 1000, 1_500_000, second, 90 * second, 3600 * second, 50 * 3600 * second]
    assert [_age(ns) for ns in ages] == ["0 ns", "999 ns", "1.0 µs", "1.5 ms", "1.0 s", "1.5 min", "1.0 h", "50.0 h"]


# The log.


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "staging"]


def test_what_happens_outside_the_steady_state_is_logged(
    device: SimulatedDevice, make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    """The beginning, each larger buffer and new slot, and the end; a steady batch writes nothing."""
    caplog.set_level(logging.DEBUG, "staging")
    pool = make_pool(device, slots=1, max_slots=2, slot_bytes=16)
    assert logged(caplog) == [("INFO", "pool 'ring' on cpu: 1 pinned slots of 16 bytes, up to 2")]
    caplog.clear()
    batch(pool)
    assert logged(caplog) == []
    batch(pool)
    device.finish_all()
    batch(pool, rows=8)
    assert logged(caplog) == [
        ("INFO", "pool 'ring': slot 1 has 16 bytes now; 2 slots"),
        ("INFO", "pool 'ring': slot 0 has 32 bytes now; 2 slots"),
    ]
    caplog.clear()
    device.finish_all()
    pool.close()
    assert logged(caplog) == [("INFO", "pool 'ring' is closed")]


def test_a_failed_upload_is_logged_with_its_slot(
    device: SimulatedDevice, make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    """As text alone: a record that is kept must not keep the frames of the error."""
    pool = make_pool(device, slots=1)
    device.fail("copy")
    with pytest.raises(RuntimeError, match="injected"):
        batch(pool)
    message = "pool 'ring': slot 0 is quarantined, its upload failed: RuntimeError: injected: copy failed"
    assert logged(caplog) == [("WARNING", message)]
    assert [record.args for record in caplog.records] == [(message,)]


@pytest.mark.parametrize("where", ["lease", "upload"])
def test_a_broken_pool_is_logged_once_as_an_error(
    device: SimulatedDevice, make_pool: MakePool, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """When it is found out, not with each lease that fails afterwards."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    if where == "lease":
        batch(pool)
    lease = None if where == "lease" else pool.lease(COLUMN, rows=4)
    device.break_down(RuntimeError("sticky"))
    if lease is not None:
        lease["column"] = 1
        with pytest.raises(RuntimeError):
            lease.upload()
    for _ in range(3):
        with pytest.raises(PoolBroken):
            pool.lease(COLUMN, rows=4)
    broken = [message for level, message in logged(caplog) if level == "ERROR" and "is broken" in message]
    assert len(broken) == 1
    assert broken[0].startswith("pool 'ring' is broken: sticky; the process has to be restarted")
