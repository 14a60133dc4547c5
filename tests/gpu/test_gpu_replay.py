"""The replay on a real device, kept busy: right with the event guard, and seen to be wrong without it."""

from __future__ import annotations

import attrs
import pytest

from batching.replay.scheduler import Scheduler, Settings
from batching.replay.trace import TraceRequest, builtin_trace
from staging import StagingPool


def replay(trace: list[TraceRequest], slots: int, **settings: object):
    with StagingPool("cuda", slots=slots, max_slots=max(slots, 8)) as pool:
        result = Scheduler(trace, pool, Settings(**settings)).run()
        return result, pool.stats()


def test_the_builtin_trace_replays_without_a_mismatch_and_meets_slots_in_flight():
    """Tensors and tokens equal the plain way's bit for bit, while copies really are in flight."""
    result, stats = replay(builtin_trace(), slots=2, forward_us=3000.0)
    assert result.requests == 400
    assert result.mismatches is not None
    assert sum(result.mismatches.values()) == 0
    assert stats.met_in_flight > 0


@pytest.mark.usefixtures("unguarded")
def test_without_the_event_guard_the_replay_reports_mismatches():
    """The guard taken out, two slots, the device busy: wrong bytes arrive, and the check sees them."""
    # Without cached prefixes: a wrong pointer would end the process, not the test.
    trace = [attrs.evolve(row, blocks=()) for row in builtin_trace()]
    result, _ = replay(trace, slots=2, forward_us=3000.0, ahead=4)
    assert result.mismatches is not None
    assert sum(result.mismatches.values()) > 0
