"""The ring: all of a pool's mutable state, and the few places that change it.

Every method here is called with `lock` held, makes no copy, allocates no host memory and waits for nothing.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import deque
from typing import cast

from staging import _lifetime
from staging._debug import Watch
from staging._device import Device, HostBuffer
from staging._slots import Slot, State
from staging.errors import PoolBroken, SlotOverwritten, StagingError
from staging.layout import Plan
from staging.stats import Counters


class Ring:
    """Slots, who waits for them, and what was counted. The pool conducts; this keeps the books."""

    def __init__(self, name: str, device: Device, max_slots: int, *, debug: bool) -> None:
        self.lock = threading.Lock()
        self.slots: list[Slot] = []
        """In order of last use, the oldest upload first."""
        self.waiting: deque[object] = deque()
        """Tickets of the threads that wait, the first to be served first."""
        self.counters = Counters()
        self.refusal: StagingError | None = None
        """Why every lease fails, once it does: the pool is closed, broken or forked."""
        self.dropped: deque[tuple[Slot, int]] = deque()
        """Leases collected while open: appended by finalisers, without the lock; drained by the next lease."""
        self.discarded: deque[tuple[Slot, int]] = deque()
        """Leases discarded while the lock was taken, perhaps by this thread: garbage collection may run anywhere."""
        self.may_grow = True
        """False once a further slot's memory could not be had."""
        self._name = name
        self._device = device
        self._max_slots = max_slots
        self.watch = Watch(name, self.counters) if debug else None
        """Debug mode; None when off."""
        self.notes: deque[str] = deque()
        """What is to be logged once the lock is released."""
        self._numbers = itertools.count()

    def add(self, buffer: HostBuffer | None = None, capacity: int = 0) -> Slot:
        """One more slot, free. Without a buffer it has to be reserved, and given one before anybody fills it."""
        slot = Slot(next(self._numbers), self._device.new_event())
        slot.buffer, slot.capacity = buffer, capacity
        self.slots.append(slot)
        return slot

    def choose(self, need: int, ticket: object = None) -> Slot | None:
        """Reserve a slot, or None. The one place where a slot begins to be filled.

        A slot that holds `need` bytes comes first; one that is too small, or new, is returned to be enlarged.
        `ticket` is the caller's place in the queue, when it has waited before.
        """
        if self.dropped or self.discarded or _lifetime.orphans:
            self._drain()
        if self.refusal is not None:
            raise self.refused()
        if self.waiting and self.waiting[0] is not ticket:
            return None  # others wait already; whoever comes first is served first
        small: Slot | None = None
        for slot in self.slots:
            if slot.state is State.FREE:
                if slot.capacity >= need:
                    return self._reserve(slot)
                small = small or slot
        for slot in list(self.slots):  # oldest upload first; one stuck event does not hold up the others
            if slot.state is not State.IN_FLIGHT:
                continue
            if self._settle(slot):
                if slot.capacity >= need:
                    return self._reserve(slot)
                small = small or slot
            elif ticket is None:  # polls while waiting are not counted again
                self.counters.met_in_flight += 1
        if small is not None:
            return self._reserve(small)
        for slot in list(self.slots):
            if slot.state is State.QUARANTINED and self._settle(slot):
                return self._reserve(slot)
        if self.may_grow and len(self.slots) < self._max_slots:
            return self._reserve(self.add())
        return None

    def uploaded(self, slot: Slot, plan: Plan) -> None:
        """filling -> in flight: the event stands behind the copy."""
        self._enter(slot, State.IN_FLIGHT)
        if slot in self.slots:  # not when the pool was closed meanwhile
            self.slots.remove(slot)
            self.slots.append(slot)
        counters = self.counters
        counters.uploads += 1
        counters.fields += len(plan.places)
        counters.bytes_used += plan.used
        counters.bytes_padded += plan.total - plan.used
        counters.bytes_peak = max(counters.bytes_peak, plan.total)
        counters.in_flight_peak = max(counters.in_flight_peak, self.count(State.IN_FLIGHT))

    def quarantine(self, slot: Slot, error: BaseException) -> None:
        """To quarantined: an error left open whether the copy was queued or its event recorded."""
        self._enter(slot, State.QUARANTINED)
        self.counters.quarantines += 1
        self.note_if_broken(error)

    def release(self, slot: Slot, generation: int) -> bool:
        """filling -> free, if that lease is still the open one; says whether it was."""
        if slot.generation != generation:
            return False
        slot.generation += 1
        self._enter(slot, State.FREE)
        if self.watch is not None and slot.buffer is not None:
            self.watch.released(slot)
        return True

    def settle_all(self) -> list[Slot]:
        """Look once at every slot that is not leased; returns those that are not free."""
        self._drain()
        for slot in list(self.slots):
            if slot.state is not State.FILLING:
                try:
                    self._settle(slot)
                except SlotOverwritten as found:
                    self.notes.append(str(found))
        return [slot for slot in self.slots if slot.state is not State.FREE]

    def count(self, state: State) -> int:
        """Slots in this state."""
        return sum(slot.state is state for slot in self.slots)

    def note_if_broken(self, error: BaseException) -> None:
        """Ask the device whether anything will ever work again."""
        if self.refusal is not None or isinstance(error, StagingError):
            return
        sticky = self._device.broken()
        if sticky is None:
            return
        self.refusal = PoolBroken(
            f"pool {self._name!r} is broken: {sticky}; the process has to be restarted, the pool's memory is "
            f"leaked since copies may still read it"
        )
        self.refusal.__cause__ = error if isinstance(error, Exception) else sticky
        _lifetime.leak(self.slots)

    def refused(self) -> StagingError:
        """A fresh exception of the kind that ended the pool, so that tracebacks do not pile up on one object."""
        first = cast(StagingError, self.refusal)
        error = type(first)(*first.args)
        error.__cause__ = first.__cause__
        return error

    def _reserve(self, slot: Slot) -> Slot:
        if self.watch is not None:
            self.watch.taken(slot)
        self._enter(slot, State.FILLING)
        slot.generation += 1
        slot.holder = threading.get_ident()
        if self.watch is not None:
            slot.site = _call_site()
        return slot

    def _settle(self, slot: Slot) -> bool:
        """Look once at a slot that is not leased: whether it is free now.

        In flight: ask its event. Quarantined: record a new event behind whatever was queued on its stream, which
        turns the unknown into something that can be asked.
        """
        try:
            if slot.state is State.QUARANTINED:
                event = self._device.new_event()
                self._device.record(event, slot.stream)
                slot.event = event  # only now: an upload may still be told to wait for the old one
                self._enter(slot, State.IN_FLIGHT)
                self.counters.heals += 1
            if slot.state is State.IN_FLIGHT:
                if not self._device.done(slot.event):
                    return False
                self._enter(slot, State.FREE)
        except Exception as error:
            if slot.state is State.IN_FLIGHT:  # the answer is unknown, so the slot's event is
                self.quarantine(slot, error)
            else:
                self.note_if_broken(error)
            if isinstance(self.refusal, PoolBroken):
                raise self.refused() from error
        if slot.state is not State.FREE:
            return False
        if self.watch is not None:
            self.watch.done(slot)
        return True

    def drain_discarded(self) -> None:
        """Give back the slots of leases that were discarded while the lock was taken."""
        while self.discarded:
            slot, generation = self.discarded.popleft()
            if self.release(slot, generation):
                self.counters.discards += slot.buffer is not None

    def _drain(self) -> None:
        self.drain_discarded()
        while self.dropped:
            slot, generation = self.dropped.popleft()
            if self.release(slot, generation) and slot.buffer is not None:
                self.counters.dropped += 1
                where = f"taken at {slot.site}" if slot.site else "STAGING_DEBUG=1 says where it was taken"
                self.notes.append(
                    f"pool {self._name!r}: a lease of slot {slot.index} was dropped without upload or discard; {where}"
                )
        _lifetime.reap()

    def _enter(self, slot: Slot, state: State) -> None:
        slot.state = state
        slot.since = self._device.now()


def _call_site() -> str:
    """File and line of the nearest caller outside this package."""
    here = os.path.dirname(__file__)
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == here:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
