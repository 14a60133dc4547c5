"""Debug mode: each net is given the bug that it is there for, planted by way of private names."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from staging import Field, Layout, SlotOverwritten, StagingPool
from staging.testing import SimulatedDevice

LAYOUT = Layout([Field("first", torch.int32), Field("second", torch.int64)], "pair")
MakePool = Callable[..., StagingPool]


def fill(pool: StagingPool) -> Any:
    lease = pool.lease(LAYOUT, rows=3)
    lease["first"], lease["second"] = [1, 2, 3], [4, 5, 6]
    return lease


def memory(pool: StagingPool, slot: int = 0) -> Any:
    """The slot's bytes, which nobody outside the library has a way to."""
    return next(one for one in pool._ring.slots if one.index == slot).buffer.array


@pytest.fixture
def pool(device: SimulatedDevice, make_pool: MakePool) -> StagingPool:
    return make_pool(device, slots=1, max_slots=1, timeout=0, slot_bytes=64, debug=True)


def test_a_write_under_a_copy_is_found_and_named(device: SimulatedDevice, pool: StagingPool) -> None:
    """When the event has passed the checksum differs: the error has the upload, the slot and the field."""
    fill(pool).upload()
    memory(pool)[16] ^= 1  # the first byte of `second`
    device.copies[0].snapshot[16] ^= 1  # this test is not about the simulated device's own notice
    device.finish_all()
    with pytest.raises(
        SlotOverwritten, match=r"slot 0: upload 1: field 'second' was written under the copy.*test_debug"
    ):
        pool.lease(LAYOUT, rows=3)
    stats = pool.stats()
    assert (stats.violations, stats.free, stats.leases_refused) == (1, 1, 1)
    fill(pool).discard()  # the next one works


def test_a_write_to_a_slot_that_nobody_leased_is_found(pool: StagingPool) -> None:
    """The pattern over a released slot is not whole any more at the next hand-out."""
    fill(pool).discard()
    memory(pool)[5] = 0
    with pytest.raises(SlotOverwritten, match="byte 5 was written while the slot was leased to nobody"):
        pool.lease(LAYOUT, rows=3)
    fill(pool).discard()
    assert pool.stats().violations == 1


@pytest.mark.parametrize("rows", [3, 4], ids=["part of a slot", "a whole slot"])
def test_a_write_behind_the_end_is_found_before_the_copy(device: SimulatedDevice, pool: StagingPool, rows: int) -> None:
    """The canary behind the bytes in use is dead: the upload is refused, also where they fill the slot."""
    with pool.lease(Layout([Field("only", torch.int64), Field("other", torch.int64)]), rows=rows) as lease:
        lease["only"] = lease["other"] = 7
        memory(pool)[lease.nbytes] = 0
        with pytest.raises(SlotOverwritten, match=f"byte {lease.nbytes} behind its {lease.nbytes} was written"):
            lease.upload()
    assert device.calls["copy"] == 0
    assert pool.stats().violations == 1


def test_a_write_behind_the_end_under_the_copy_is_found(device: SimulatedDevice, pool: StagingPool) -> None:
    """The canary is looked at again when the event has passed."""
    lease = fill(pool)
    lease.upload()
    memory(pool)[lease.nbytes + 2] = 0
    device.finish_all()
    with pytest.raises(SlotOverwritten, match="upload 1: byte"):
        pool.lease(LAYOUT, rows=3)


def test_what_is_found_at_the_end_is_logged(
    device: SimulatedDevice, pool: StagingPool, caplog: pytest.LogCaptureFixture
) -> None:
    """close() does not raise; a write under the last copy is in the log all the same."""
    fill(pool).upload()
    memory(pool)[0] ^= 1
    device.copies[0].snapshot[0] ^= 1
    device.finish_all()
    with caplog.at_level(logging.WARNING, "staging"):
        pool.close()
    assert "field 'first' was written under the copy" in caplog.text


def test_leases_that_are_left_open_are_reported_with_their_place(
    pool: StagingPool, caplog: pytest.LogCaptureFixture
) -> None:
    """A dropped one is logged at the next lease, one that is still open when the pool is closed: file and line."""
    with caplog.at_level(logging.WARNING, "staging"):
        fill(pool)
        gc.collect()
        lease = fill(pool)
        assert "was dropped without upload or discard; taken at" in caplog.text
        assert "test_debug.py" in caplog.text
        caplog.clear()
        pool.close()
    assert "closed with slot 0 still leased" in caplog.text
    assert "test_debug.py" in caplog.text
    assert not lease.is_open


def test_sound_traffic_raises_nothing(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Uploads, discards, enlarging and growth for a while: no violation, and the bytes are right."""
    pool = make_pool(device, slots=2, slot_bytes=16, debug=True, timeout=0)
    for step in range(300):
        with pool.lease(LAYOUT, rows=1 + step % 17) as lease:
            lease["first"], lease["second"] = step, -step
            if step % 5:
                upload = lease.upload()
                assert int(upload["second"][-1]) == -step
        if step % 3 == 2:
            device.finish_all()
    assert pool.stats().violations == 0


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither guard bytes nor checks; the environment turns it on, the argument has the last word."""
    monkeypatch.delenv("STAGING_DEBUG", raising=False)
    with StagingPool("cpu", slot_bytes=64) as pool:
        assert not pool.debug
        assert pool._ring.watch is None
        assert len(memory(pool, pool._ring.slots[0].index)) == 64
    monkeypatch.setenv("STAGING_DEBUG", "1")
    with StagingPool("cpu") as on, StagingPool("cpu", debug=False) as off:
        assert (on.debug, off.debug) == (True, False)
