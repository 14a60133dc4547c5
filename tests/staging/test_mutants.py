"""Behaviour that nothing else would have missed; `tests/run_mutations.py` takes out the guard behind each of these."""

from __future__ import annotations

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
