"""The replay on a real device, kept busy: right with the event guard, and seen to be wrong without it."""

from __future__ import annotations

import attrs
import pytest

from batching.replay.scheduler import Scheduler, Settings
from batching.replay.trace import TraceRequest, builtin_trace
from batching.stage import PREFILL
from staging import StagingPool


def replay(trace: list[TraceRequest], slots: int, **settings: object):
    with StagingPool("cuda", slots=slots, max_slots=max(slots, 8)) as pool:
        result = Scheduler(trace, pool, Settings(**settings)).run()
        return result, pool.stats()


def test_the_builtin_trace_replays_without_a_mismatch_and_meets_slots_in_flight():
    """Tensors and tokens equal the plain way's bit for bit, while copies really are in flight."""
    # A forward far slower than the host, so that several iterations are really queued.
    result, stats = replay(builtin_trace(60), slots=2, ahead=4, forward_us=15_000.0)
    assert result.requests == 60
    assert result.mismatches is not None
    assert sum(result.mismatches.values()) == 0
    assert stats.met_in_flight > 0


class UnguardedPrefill:
    """Sends prefill batches through a pool whose event guard is taken out, all else through a sound one.

    Wrong bytes must stay harmless for the process: with one request in each prefill, and no cached prefixes, what
    arrives too late are another request's values, good row numbers and lengths among them.
    """

    def __init__(self, *, guard: bool) -> None:
        self.prefill = StagingPool("cuda", slots=1, max_slots=1)
        self.others = StagingPool("cuda")
        self.device = self.others.device
        if not guard:
            self.prefill._device.done = lambda event: True

    def warm(self) -> None:
        self.prefill.warm()

    def lease(self, layout, **lengths):
        return (self.prefill if layout == PREFILL else self.others).lease(layout, **lengths)


@pytest.mark.parametrize("guard", [True, False])
def test_the_event_guard_is_what_keeps_the_replay_right(guard):
    """One slot for the prefills of a busy device: no mismatch with the guard, mismatches with the guard taken out."""
    trace = [attrs.evolve(row, blocks=()) for row in builtin_trace(60)]
    # A forward far slower than the host, so that several iterations are really queued.
    settings = Settings(prefill_tokens=1, ahead=4, forward_us=15_000.0, kv_tokens=4_000_000)
    result = Scheduler(trace, UnguardedPrefill(guard=guard), settings).run()
    assert result.requests == 60
    assert result.mismatches is not None
    assert (sum(result.mismatches.values()) == 0) == guard, result.mismatches
