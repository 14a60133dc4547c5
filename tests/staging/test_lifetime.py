"""Host memory lives for as long as a copy may read it, whatever becomes of the pool, and wherever an interrupt comes.

torch's allocator of pinned memory is not told of the copies, so a buffer that is freed is anybody's at once.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_interrupts import Interrupted, Interrupter

from staging import Field, Layout, StagingPool, _lifetime
from staging._device import HostBuffer
from staging.testing import SimulatedDevice

COLUMN = Layout([Field("column", torch.int64)])


class Watched(SimulatedDevice):
    """Knows which of its host buffers are alive, and can have something done between a copy and its record."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[int, weakref.ref[HostBuffer]] = {}
        self.behind_the_copy: Callable[[], object] = lambda: None
        self.on_done: Callable[[], object] = lambda: None

    def host_buffer(self, nbytes: int, *, pinned: bool) -> HostBuffer:
        buffer = super().host_buffer(nbytes, pinned=pinned)
        self.buffers[buffer.tensor.data_ptr()] = weakref.ref(buffer)
        return buffer

    def record(self, event: Any, stream: int) -> None:
        act, self.behind_the_copy = self.behind_the_copy, lambda: None
        act()
        super().record(event, stream)

    def done(self, event: Any) -> bool:
        act, self.on_done = self.on_done, lambda: None
        act()
        return super().done(event)

    def read_by_copies(self) -> list[HostBuffer | None]:
        """The buffers that copies still read; None for one that is gone."""
        gc.collect(1)  # what a test has made is young
        return [self.buffers[copy.source.data_ptr()]() for copy in self.copies]


def interrupt(*arguments: object) -> None:
    raise Interrupted


def send(pool: StagingPool, value: int = 1) -> None:
    with pool.lease(COLUMN, rows=3) as lease:
        lease["column"] = value
        lease.upload()


@pytest.fixture
def device() -> Iterator[Watched]:
    """At the end nothing is left behind for other tests."""
    device = Watched()
    yield device
    device.finish_all()
    _lifetime.reap()


@pytest.mark.parametrize("where", ["another thread", "a signal handler"])
def test_closing_beside_an_upload_that_is_going_on(
    device: Watched, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """By the thread that took the lease, between the copy and the moment when the ring knows of it."""
    pool = StagingPool(device, slots=1, max_slots=1)
    lease = pool.lease(COLUMN, rows=3)
    lease["column"] = 1
    if where == "a signal handler":
        device.behind_the_copy = pool.close
        lease.upload()
    else:
        copied, closed = threading.Event(), threading.Event()
        device.behind_the_copy = lambda: (copied.set(), closed.wait(10))
        thread = threading.Thread(target=lease.upload)
        thread.start()
        assert copied.wait(10)
        pool.close()
        closed.set()
        thread.join()
        del thread
    device.behind_the_copy = lambda: None
    del pool, lease
    assert f"leaked {256 * 1024} bytes rather than free them under a copy" in caplog.text
    assert len(device.read_by_copies()) == 1
    assert None not in device.read_by_copies()


def test_an_upload_that_goes_on_when_its_pool_is_closed_is_waited_for(device: Watched) -> None:
    """A reader on another stream: the pool's end is not the end of the copy."""
    pool = StagingPool(device, slots=1, max_slots=1)
    device.behind_the_copy = pool.close
    with pool.lease(COLUMN, rows=3) as lease:
        lease["column"] = 1
        upload = lease.upload()
    upload.wait(9)
    assert device.calls["wait"] == 1


def test_an_interrupt_while_a_forgotten_pool_is_looked_at(device: Watched) -> None:
    """Any other pool's lease looks, and asks the events."""
    pool = StagingPool(device, slots=1)
    send(pool)
    del pool
    gc.collect()
    with StagingPool(SimulatedDevice(), slots=1) as other:
        device.on_done = interrupt
        with pytest.raises(Interrupted):
            send(other)
        assert None not in device.read_by_copies()
        device.finish_all()
        send(other)
    assert [ref() for ref in device.buffers.values()] == [None]


def test_a_forgotten_pool_whose_event_cannot_be_asked(device: Watched) -> None:
    """Nobody will ever know that its copy is done, so its memory stays; and nobody asks again."""
    pool = StagingPool(device, slots=1)
    send(pool)
    del pool
    gc.collect()
    device.fail("done")
    with StagingPool("cpu", slots=1) as other:
        send(other)
        device.finish_all()
        send(other)
    gc.collect()
    assert [ref() is None for ref in device.buffers.values()] == [False]
    assert all(one is not device for one, _ in _lifetime.orphans)


def test_an_upload_that_was_cut_off_twice_and_its_pool_forgotten(
    device: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = StagingPool(device, slots=1)
    lease = pool.lease(COLUMN, rows=3)
    lease["column"] = 1
    device.fail("record")
    monkeypatch.setattr(pool._ring, "upload_failed", interrupt)
    with pytest.raises(Interrupted):
        lease.upload()
    monkeypatch.undo()
    del pool, lease
    gc.collect()
    with StagingPool(SimulatedDevice(), slots=1) as other:
        send(other)
    assert len(device.read_by_copies()) == 1
    assert None not in device.read_by_copies()


def test_an_interrupt_when_close_has_given_up(device: Watched) -> None:
    """Even closed again: the ring has no slots by then."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise Interrupted

    pool = StagingPool(device, slots=1)
    send(pool)
    log, handler = logging.getLogger("staging"), Handler()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with pytest.raises(Interrupted):
            pool.close(timeout=0)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    pool.close(timeout=0)
    del pool
    assert len(device.read_by_copies()) == 1
    assert None not in device.read_by_copies()


def test_an_interrupt_that_the_pools_finaliser_swallows(device: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints it and goes on; nobody then knows of the pool."""
    swallowed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: swallowed.append(about.exc_type))
    pool = StagingPool(device, slots=1)
    send(pool)
    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: interrupt() if frame.f_code.co_name == "__del__" else None)
    try:
        del pool
    finally:
        sys.settrace(before)
    assert swallowed == [Interrupted]
    assert len(device.read_by_copies()) == 1
    assert None not in device.read_by_copies()


def forgetting(device: Watched) -> None:
    """A pool with a copy on its way is forgotten; another one's lease looks after it."""
    pool = StagingPool(device, slots=1)
    send(pool)
    del pool
    with StagingPool("cpu", slots=1) as other:
        send(other)


def closing(device: Watched) -> None:
    """A pool is closed with a copy on its way that does not come to its end."""
    pool = StagingPool(device, slots=2)
    send(pool)
    pool.close(timeout=0)


def failing(device: Watched) -> None:
    """A copy fails that has been queued; the slot is healed by the next lease."""
    pool = StagingPool(device, slots=1, max_slots=1, timeout=0)
    device.fail("copy", after=True)
    with pytest.raises(RuntimeError, match="injected"):
        send(pool)
    with pytest.raises(Exception, match="no slot came free"):
        send(pool)
    del pool


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python's own table of exception handlers")
@pytest.mark.no_cover
@pytest.mark.parametrize("run", [forgetting, closing, failing])
def test_an_interrupt_anywhere_frees_nothing_that_a_copy_reads(
    run: Callable[[Watched], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run for each place where an interrupt can come; after each, everything is dropped."""
    monkeypatch.setattr(sys, "unraisablehook", lambda about: None)
    for place in itertools.count(-1):  # the first run is undisturbed, so that plans are known from then on
        device, interrupter = Watched(), Interrupter(place)
        before = sys.gettrace()
        gc.disable()
        sys.settrace(interrupter)
        try:
            run(device)
        except Interrupted:
            pass
        finally:
            sys.settrace(before)
            gc.enable()
        assert None not in device.read_by_copies(), interrupter.where
        device._faults.clear()
        device.finish_all()
        _lifetime.reap()
        assert all(other is not device for other, _ in _lifetime.orphans), interrupter.where
        if place > 0 and not interrupter.where:
            break
    assert place > 50


def test_an_interrupt_when_the_event_was_seen_done_keeps_nothing(
    device: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(_lifetime.held)
    pool = StagingPool(device, slots=1)
    send(pool)
    device.finish_all()
    device.on_done = lambda: monkeypatch.setattr(device, "now", interrupt)
    with pytest.raises(Interrupted):
        send(pool)
    monkeypatch.undo()
    pool.close()
    assert _lifetime.held == before


def test_what_is_read_no_more_is_let_go(device: Watched) -> None:
    """Held from the copy until its event is seen done, and no longer."""
    before = set(_lifetime.held)
    with StagingPool(device, slots=1, max_slots=1) as pool:
        send(pool)
        (slot,) = _lifetime.held - before
        assert slot.buffer is device.read_by_copies()[0]
        device.finish_all()
        pool.lease(COLUMN, rows=3).discard()
        assert slot not in _lifetime.held
        send(pool)
        assert slot in _lifetime.held
        device.finish_all()
    assert _lifetime.held == before
