"""Small rings, completely: every sequence of actions up to a length, and every state that any sequence can reach.

Both walks go depth first and put pool and device back after each action instead of building them anew, so an action
costs what the pool costs. An action is counted as the steps it asks of the pool: a lease, a write, an upload, a
discard, a copy that runs, an injected failure, a close.

    sequences   all of 7 actions, none merged: rings of one slot, of two, and of one that grows to two, up to length
                7; of three up to 6. 790,000 sequences, 1,210,000 steps.
    states      of 13 actions, leases of two sizes, open leases and drops among them, to any length, for rings of at
                most two slots; of the 7 for three. 18,000 states, each also closed, 260,000 steps.

`STAGING_TEST_DEPTH=1` makes the sequences longer by one, about six times the steps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import pytest
import torch

from staging import Field, Layout, Lease, LeaseError, PinningError, PoolClosed, PoolExhausted, StagingPool, _ring
from staging._ring import _proves
from staging._slots import Slot, State  # the walks look inside on purpose: nothing public says which slot is which
from staging.testing import SimulatedCopy, SimulatedDevice

pytestmark = pytest.mark.no_cover  # coverage counts lines, which would make this several times slower

STAMP = Layout([Field("stamp", torch.int64)], "stamp")
SMALL, LARGE = 1, 3
"""Rows of the two leases: one fits a fresh slot, the other needs a larger buffer."""
FORGOTTEN = -1
"""Generation of leases that another branch of a walk made: collecting them is nothing the pool should hear of."""
MORE = int(os.environ.get("STAGING_TEST_DEPTH", "0"))

Undo = Callable[[], None]
Action = Callable[["Walk"], None]


@attrs.define
class Walk:
    """A pool on a simulated device, with what the test knows of it; an action either applies or does nothing."""

    device: SimulatedDevice
    pool: StagingPool
    open: list[Lease] = attrs.Factory(list)
    """Leases being filled, the oldest first."""
    expected: dict[SimulatedCopy, Slot] = attrs.Factory(dict)
    """Of each copy that has not run, the slot it reads."""
    stamps: WeakKeyDictionary[SimulatedCopy, int] = attrs.Factory(WeakKeyDictionary)
    """Of each copy, the value it has to deliver."""
    stamp: int = 0
    steps: int = 0
    requests: int = 0
    thorough: bool = False
    """Whether ended leases are tried out."""
    path: list[str] = attrs.Factory(list)

    def take(self, rows: int) -> Lease | None:
        self.steps += 1
        self.requests += 1
        try:
            return self.pool.lease(STAMP, rows=rows)
        except (PoolExhausted, PinningError):
            return None

    def send(self, lease: Lease) -> None:
        """Fill and upload; the lease is dead afterwards, however the upload ended."""
        self.steps += 2
        self.stamp += 1
        device, queued = self.device, len(self.device.copies)
        lease["stamp"] = [self.stamp] * lease.lengths["rows"]
        device.stream = self.stamp % 2
        try:
            upload = lease.upload()
        except RuntimeError as error:
            if "injected" not in str(error):
                raise
        else:
            assert upload["stamp"].data_ptr() == device.copies[-1].landing.data_ptr(), self
        if len(device.copies) > queued:
            self.expected[device.copies[-1]] = lease._slot
            self.stamps[device.copies[-1]] = self.stamp
        self.dead(lease)

    def finish(self, position: int) -> None:
        """Let a copy run, and see what it delivered."""
        self.steps += 1
        copy = self.device.copies[position]
        del self.expected[copy]
        self.device.finish(copy)
        got = copy.landing.view(torch.int64).tolist()
        assert got[0] == self.stamps[copy], f"{self}: stamp {self.stamps[copy]} arrived as {got[0]}"
        assert not self.device.violations, self

    def dead(self, lease: Lease) -> None:
        """An ended lease refuses everything, and giving it back again does nothing."""
        assert not lease.is_open, self
        if self.thorough:
            with pytest.raises(LeaseError, match="ended"):
                lease["stamp"] = -1
            with pytest.raises(LeaseError, match="ended"):
                lease.upload()
            lease.discard()
        lease._generation = FORGOTTEN

    def check(self) -> None:
        """What holds after every action, from the counters that `stats()` copies."""
        ring, counted = self.pool._ring, self.pool._ring.counters
        filling = ring.count(State.FILLING)
        assert len(ring.slots) <= self.pool.max_slots, self
        assert filling == len(self.open), self
        served = counted.leases_ready + counted.leases_grown
        assert served + counted.leases_timed_out + counted.leases_refused == self.requests, self
        ended = counted.uploads + counted.uploads_failed + counted.discards + counted.dropped
        assert served == ended + filling, self
        for slot in self.expected.values():  # of the copies that have not run
            assert slot.state is State.IN_FLIGHT or slot.state is State.QUARANTINED, self

    def check_more(self) -> None:
        """What costs more to see, and depends on the state alone."""
        stats = self.pool.stats()
        assert stats.slots == stats.free + stats.filling + stats.in_flight + stats.quarantined, self
        assert stats.filling == len(self.open), self
        assert stats.leases == self.requests, self
        assert stats.leases_waited == stats.leases_empty == stats.waiting == 0, self
        memory = {slot.buffer.tensor.data_ptr() for slot in self.pool._ring.slots}
        for copy in self.expected:
            assert copy.source.data_ptr() in memory, self
            assert copy.landing.untyped_storage().data_ptr() not in memory, self

    def close(self) -> None:
        """The end: late copies still deliver their own bytes, nothing can be leased, open leases are over."""
        self.steps += 1
        self.pool.close(timeout=0)
        with pytest.raises(PoolClosed):
            self.pool.lease(STAMP, rows=1)
        while self.device.copies:
            self.finish(0)
        for lease in self.open:
            self.dead(lease)
        assert self.pool.stats().slots == 0, self

    def __str__(self) -> str:
        return f"after {', '.join(self.path)}"

    # Putting everything back.

    def mark(self) -> Undo:
        """A function that puts pool, device and walk back to what they are now, as often as it is called."""
        ring, device = self.pool._ring, self.device
        slots = list(ring.slots)
        fields = [[(name, getattr(slot, name)) for name in Slot.__slots__ if name != "__weakref__"] for slot in slots]
        contents = [slot.buffer.tensor.clone() for slot in slots if slot.buffer is not None]
        buffers = [slot.buffer.tensor for slot in slots if slot.buffer is not None]
        events = [(slot.event, slot.event.behind) for slot in slots]
        finished = {copy: copy.finished for _, behind in events for copy in behind}
        counters = ring.counters
        counted = [(name, getattr(counters, name)) for name in counters.__slots__ if name != "__weakref__"]
        own = [(name, getattr(ring, name)) for name in ("refusal", "may_grow", "in_a_row", "short", "_reach", "_yes")]
        copies, faults = list(device.copies), {name: list(queue) for name, queue in device._faults.items()}
        leases = [(lease, lease._generation, lease._written) for lease in self.open]
        expected, stamp, requests = dict(self.expected), self.stamp, self.requests

        def undo() -> None:
            for lease in self.open:
                lease._generation = FORGOTTEN
            ring.slots = list(slots)
            ring.dropped.clear()
            ring.notes.clear()
            for slot, values in zip(slots, fields, strict=True):
                for name, value in values:
                    setattr(slot, name, value)
            for buffer, content in zip(buffers, contents, strict=True):
                buffer.copy_(content)
            for event, behind in events:
                event.behind = behind
            for name, value in counted:
                setattr(counters, name, value)
            for name, value in own:
                setattr(ring, name, value)
            device.copies = list(copies)
            for copy in copies:
                copy.finished = False
            for copy, value in finished.items():
                copy.finished = value
            for name, queue in faults.items():
                device._faults[name] = list(queue)
            self.open = []
            for lease, generation, written in leases:
                lease._generation, lease._written = generation, written
                self.open.append(lease)
            self.expected, self.stamp, self.requests = dict(expected), stamp, requests

        return undo

    def state(self) -> Any:
        """What decides how the pool and the device go on, without names, counts and times.

        Slots in the ring's order; of each its state, size, the copies it is read by that have not run, those its event
        stands behind, its stream, and the slots that its event answers for; for how many it is asked next; open leases;
        copies in the order they were queued; failures to come. Stamps are all alike, and of finished copies nothing is
        left.
        """
        numbers = {slot: number for number, slot in enumerate(self.pool._ring.slots)}
        queued = {copy: number for number, copy in enumerate(self.device.copies)}
        slots = []
        for slot in self.pool._ring.slots:
            behind = tuple(sorted(queued[copy] for copy in slot.event.behind if not copy.finished))
            stream = slot.stream if slot.state in (State.QUARANTINED, State.IN_FLIGHT) else None
            answers = [other for other in numbers if slot.state is other.state is State.IN_FLIGHT]
            proven = tuple(numbers[other] for other in answers if _proves(slot, other))
            # An event that is not asked again counts by what it would say.
            slots.append((slot.state, slot.capacity, behind, stream, proven))
        copies = tuple((copy.stream, numbers[self.expected[copy]]) for copy in self.device.copies)
        leases = tuple(numbers[lease._slot] for lease in self.open)
        faults = tuple((name, len(queue)) for name, queue in sorted(self.device._faults.items()) if queue)
        ring = self.pool._ring
        return tuple(slots), copies, leases, faults, ring.may_grow, min(ring._reach, len(slots)), self.stamp % 2


# The actions. Each returns without a step where it does not apply.


def send(walk: Walk) -> None:
    lease = walk.take(SMALL)
    if lease is not None:
        walk.send(lease)


def send_large(walk: Walk) -> None:
    lease = walk.take(LARGE)
    if lease is not None:
        walk.send(lease)


def abandon(walk: Walk) -> None:
    """A lease whose block ends early."""
    lease = walk.take(SMALL)
    if lease is not None:
        walk.steps += 2
        with lease:
            lease["stamp"] = -1
        walk.dead(lease)


def begin(walk: Walk) -> None:
    lease = walk.take(SMALL)
    if lease is not None:
        walk.open.append(lease)


def ship(walk: Walk) -> None:
    if walk.open:
        walk.send(walk.open.pop(0))


def discard_last(walk: Walk) -> None:
    if walk.open:
        walk.steps += 1
        lease = walk.open.pop()
        lease.discard()
        walk.dead(lease)


def drop(walk: Walk) -> None:
    """A lease is forgotten and collected; the next lease takes its slot back."""
    if walk.open:
        walk.steps += 1
        lease = walk.open.pop(0)
        # By hand: the walk's way back still knows the lease, so nobody collects it.
        walk.pool._ring.dropped.append(lease._slot.ticket)
        lease._generation = FORGOTTEN
        lease = walk.take(SMALL)
        if lease is not None:
            lease.discard()


def finish_oldest(walk: Walk) -> None:
    if walk.device.copies:
        walk.finish(0)


def finish_newest(walk: Walk) -> None:
    if len(walk.device.copies) > 1:
        walk.finish(-1)


def sending_fails(call: str, *, after: bool) -> Action:
    """An upload whose copy or record fails, with or without its effect."""

    def send_and_fail(walk: Walk) -> None:
        lease = walk.take(SMALL)
        if lease is not None:
            walk.steps += 1
            walk.device.fail(call, after=after)
            walk.send(lease)

    send_and_fail.__name__ = f"{call} fails{' late' if after else ''}"
    return send_and_fail


def next_call_fails(call: str) -> Action:
    """A failure that lies in wait for whoever makes the call next."""

    def fail(walk: Walk) -> None:
        if not walk.device._faults[call]:
            walk.steps += 1
            walk.device.fail(call)

    fail.__name__ = f"next {call} fails"
    return fail


SEQUENCE_ACTIONS = [
    send,
    finish_oldest,
    finish_newest,
    abandon,
    sending_fails("copy", after=True),
    sending_fails("record", after=False),
    next_call_fails("done"),
]

STATE_ACTIONS = [
    *SEQUENCE_ACTIONS,
    send_large,
    begin,
    ship,
    discard_last,
    drop,
    next_call_fails("record"),
]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each yes makes the next question about one slot more: the walks are too short for the usual reserve."""
    monkeypatch.setattr(_ring, "_CONFIDENCE", 1)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every end with a copy in flight is logged; a hundred thousand of them need not be kept."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def start(slots: int, max_slots: int) -> Walk:
    device = SimulatedDevice()
    pool = StagingPool(device, slots=slots, max_slots=max_slots, slot_bytes=16, timeout=0, debug=False)
    return Walk(device, pool)


def apply(walk: Walk, action: Action) -> bool:
    """Do it and check; says whether it did anything."""
    steps = walk.steps
    walk.path.append(action.__name__)
    action(walk)
    if walk.steps == steps:
        return False
    walk.check()
    return True


def every_sequence(walk: Walk, length: int, actions: list[Action]) -> int:
    """All sequences of at most `length` actions from here on; returns how many there were."""
    if not length:
        return 1
    undo = walk.mark()
    sequences = 1
    for action in actions:
        if apply(walk, action):
            sequences += every_sequence(walk, length - 1, actions)
            undo()
        walk.path.pop()
    return sequences


def every_state(walk: Walk, actions: list[Action]) -> int:
    """All states that can be reached by any sequence; returns how many there are."""
    walk.thorough = True
    seen = {walk.state()}
    ahead = [(walk.mark(), ())]
    while ahead:
        undo, path = ahead.pop()
        for action in actions:
            undo()
            walk.path = list(path)
            if not apply(walk, action):
                continue
            state = walk.state()
            if state not in seen:
                walk.check_more()
                seen.add(state)
                ahead.append((walk.mark(), tuple(walk.path)))
        undo()
        walk.close()
        undo()
    return len(seen)


SEQUENCES = [(1, 1, 7, 240_000), (2, 2, 7, 430_000), (1, 2, 7, 460_000), (3, 3, 6, 70_000)]
"""Slots, at most, length of the sequences, steps that they are at least."""


@pytest.mark.parametrize(("slots", "max_slots", "length", "steps"), SEQUENCES)
def test_no_sequence_of_actions_delivers_a_wrong_value(slots: int, max_slots: int, length: int, steps: int) -> None:
    """All sequences of uploads, early ends, failures and progress in two orders: each value its own, each slot kept."""
    walk = start(slots, max_slots)
    sequences = every_sequence(walk, length + MORE, SEQUENCE_ACTIONS)
    assert walk.steps >= sequences > 10_000
    assert walk.steps >= steps


@pytest.mark.parametrize(
    ("slots", "max_slots", "actions", "states"),
    [
        (1, 1, STATE_ACTIONS, 112),
        (2, 2, STATE_ACTIONS, 8192),
        (1, 2, STATE_ACTIONS, 8272),
        (3, 3, SEQUENCE_ACTIONS, 22484),
        (1, 3, SEQUENCE_ACTIONS, 23290),
    ],
)
def test_no_state_of_a_small_ring_breaks_a_promise(
    slots: int, max_slots: int, actions: list[Action], states: int
) -> None:
    """Everything that any number of actions can lead to, closed once from each state; the number of states is known."""
    assert every_state(start(slots, max_slots), actions) == states


def test_a_million_steps_are_run() -> None:
    """What the sequences above are asked for adds up to it."""
    assert sum(steps for *_, steps in SEQUENCES) >= 1_000_000


class Forgetful(SimulatedDevice):
    """A device whose events say "done" once too early: at the seventh question."""

    def done(self, event: Any) -> bool:
        return super().done(event) or self.calls["done"] % 7 == 0


def test_a_lying_event_does_not_get_past_the_walk() -> None:
    """The walk itself is worth something: one early "done" in seven is found within a few steps."""
    device = Forgetful()
    pool = StagingPool(device, slots=2, max_slots=2, slot_bytes=16, timeout=0, debug=False)
    with pytest.raises(AssertionError, match="after send"):
        every_sequence(Walk(device, pool), 6, SEQUENCE_ACTIONS)
