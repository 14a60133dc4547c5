"""The soak on a real device, short: right with the event guard, and seen to be wrong without it."""

from __future__ import annotations

import pytest
import torch

from batching.soak.plain import PlainWay
from batching.soak.traffic import Result, Settings, Soak, open_seam
from staging import StagingPool

SETTINGS = Settings(threads=8, batches=200, seed=1)


def soak(*, guard: bool) -> Result:
    with StagingPool(open_seam("cuda", guard=guard), slots=2, max_slots=3, slot_bytes=1 << 14, timeout=60) as pool:
        return Soak(pool, SETTINGS).run()


def test_a_short_soak_finds_nothing_while_slots_are_met_in_flight():
    """Eight threads, six streams, random delays: every check of every upload is right."""
    result = soak(guard=True)
    assert result.failure is None
    assert (result.bad_checks, result.bad_elements, result.lowest, result.highest) == (0, 0, 0, 0)
    assert result.stats is not None
    assert result.stats.met_in_flight > 0
    assert result.checks > 1000


def test_the_same_soak_without_the_guard_finds_mismatches():
    """The guard taken out: slots are rewritten under their copies, later batches' bytes among what arrives."""
    result = soak(guard=False)
    assert result.failure is None
    assert result.bad_elements
    assert result.highest is not None
    assert result.highest > 0


def test_slots_made_beforehand_are_the_last_pinned_allocations():
    """After the warm-up, in size and number, the traffic pins nothing more."""
    with StagingPool("cuda", slots=4, timeout=60) as pool:
        result = Soak(pool, Settings(threads=8, batches=100, seed=2, delays=False, warm=True)).run()
    assert result.failure is None
    assert result.bad_elements == 0
    assert result.allocations is not None
    assert result.allocations[1:] == (0, 0)


@pytest.mark.parametrize("delays", [True, False])
def test_the_per_call_way_is_right_as_well(delays):
    """The comparison's other side: torch's own allocator keeps it right."""
    way = PlainWay(torch.device("cuda", torch.cuda.current_device()))
    result = Soak(way, Settings(threads=4, batches=100, seed=3, delays=delays)).run()
    assert result.failure is None
    assert result.bad_elements == 0
