"""The ring: the state of every slot, who waits for one, what was counted, and the few places that change a slot.

Every method here is called with `lock` held, makes no copy, allocates no host memory and waits for nothing.

An exception may come from outside between any two steps (Ctrl-C, a signal handler that raises). So a lease exists
before its slot is reserved, and is bound to it as it is: whatever happens next, the lease's end gives the slot back.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from threading import get_ident
from typing import TYPE_CHECKING, cast

from staging import _lifetime
from staging._debug import Watch
from staging._device import Device, HostBuffer
from staging._slots import Slot, State, Ticket
from staging.errors import LeaseError, PinningError, PoolBroken, SlotOverwritten, StagingError
from staging.layout import Plan
from staging.stats import Counters

if TYPE_CHECKING:
    from staging.lease import Lease

_FREE, _FILLING, _IN_FLIGHT, _QUARANTINED = State  # looked up often: a name is several times as fast as a member
_PATIENCE_S = 0.25
_CONFIDENCE = 16
"""Answers yes before a question is about one slot more: a no costs a second question, so one in 16 may."""


class Turn:
    """A lease's place in the queue, for as long as its thread waits: the queue knows it by a weak reference."""

    __slots__ = ("__weakref__", "known")

    def __init__(self) -> None:
        self.known = weakref.ref(self)


class Ring:
    """Slots, who waits for them, and what was counted. The pool conducts; this keeps the books."""

    def __init__(self, name: str, device: Device, max_slots: int, *, debug: bool) -> None:
        self.lock = threading.Lock()
        self.slots: list[Slot] = []
        """In order of last use, the oldest upload first."""
        self.waiting: deque[weakref.ref[Turn]] = deque()
        """Turns of the threads that wait, the first to be served first. One that was interrupted leaves a dead one."""
        self.counters = Counters()
        self.refusal: StagingError | None = None
        """Why every lease fails, once it does: the pool is closed, broken or forked."""
        self.dropped: deque[Ticket] = deque()
        """Of leases that were collected before their end: appended without the lock; drained by the next lease."""
        self._drop = self.dropped.append
        self.discarded: deque[tuple[Slot, int]] = deque()
        """Leases discarded while the lock was taken, perhaps by this thread: garbage collection may run anywhere."""
        self.may_grow = True
        """False once a further slot's memory could not be had."""
        self.in_a_row = 0
        """Leases that found no slot, one behind the other, all of the thread `short`; 0 once one was served at once."""
        self.short = 0
        self._name = name
        self._device = device
        self.max_slots = max_slots
        self.watch = Watch(name, self.counters) if debug else None
        """Debug mode; None when off."""
        self.notes: deque[str] = deque()
        """What is to be logged once the lock is released."""
        self._numbers = itertools.count()
        self._reach = 1
        """How many slots one question is about, see `_ask`."""
        self._yes = 0
        """Answers yes since it changed."""

    def add(self, buffer: HostBuffer | None = None, capacity: int = 0) -> Slot:
        """One more slot, free. Without a buffer it has to be reserved, and given one before anybody fills it."""
        slot = Slot(next(self._numbers), self._device.new_event())
        slot.buffer, slot.capacity = buffer, capacity
        self.slots.append(slot)
        return slot

    def choose(self, lease: Lease, need: int, turn: Turn | None = None) -> Slot | None:
        """Reserve a slot for `lease`, or None. The one place where a slot begins to be filled.

        A slot that holds `need` bytes comes first; one that is too small, or new, is returned to be enlarged.
        `turn` is the caller's place in the queue, when it has waited before.
        """
        if self.dropped or self.discarded or _lifetime.orphans:
            self._drain()
        if self.refusal is not None:
            raise self.refused()
        left = self._ahead_of(turn) if self.waiting else 0  # slots to leave for those who wait longer
        small: Slot | None = None
        asked: Slot | None = None
        for slot in self.slots:  # oldest upload first; one stuck event does not hold up the others
            if slot.state is _IN_FLIGHT:
                if asked is None:
                    asked = self._ask(slot)
                if slot is not asked and slot.state is _IN_FLIGHT:
                    self._settle(slot)
            if slot.state is _FREE:
                if left:
                    left -= 1
                elif slot.capacity >= need:
                    return self._reserve(slot, lease)
                else:
                    small = small or slot
            elif slot.state is _IN_FLIGHT and turn is None:  # polls while waiting are not counted again
                self.counters.met_in_flight += 1
        if small is not None:
            return self._reserve(small, lease)
        if left:
            self._fell_short(turn)
            return None
        for slot in list(self.slots):
            if slot.state is _QUARANTINED and self._settle(slot):
                return self._reserve(slot, lease)
        if self.may_grow and len(self.slots) < self.max_slots:
            return self._reserve(self.add(), lease)
        self._fell_short(turn)
        return None

    def enlarged(self, slot: Slot, generation: int, buffer: HostBuffer, capacity: int) -> None:
        """A slot that is still reserved in this generation gets a buffer, its first one or a larger one."""
        if slot.generation != generation:
            raise self.refused()  # closed meanwhile: the slot is nobody's any more
        self.counters.enlarged += slot.buffer is not None
        slot.buffer = buffer
        slot.capacity = capacity
        slot.prepared = {}
        if self.watch is not None:
            self.watch.enlarged(slot)

    def not_enlarged(self, slot: Slot, generation: int, error: BaseException) -> bool:
        """The buffer could not be had: the slot is given back, a new one leaves the ring.

        Says whether the ring goes on as deep as it is, so that the lease may wait; if not, the error is the lease's.
        """
        if not self.release(slot, generation) or slot.buffer is not None:
            return False  # closed meanwhile, or a slot that goes on with its old buffer
        self.slots.remove(slot)
        if not isinstance(error, PinningError) or not self.slots:
            return False
        self.may_grow = False
        self._fell_short(None)
        return True

    def wait_begins(self, turn: Turn) -> None:
        """The lease with this turn stands in the queue now, unless it did already."""
        if turn.known not in self.waiting:
            self.waiting.append(turn.known)
            counters, waiting = self.counters, self.count_waiting()
            counters.waiting_peak = max(counters.waiting_peak, waiting)
            counters.depth_needed = max(counters.depth_needed, self._busy() + waiting)  # with those asking at once

    def wait_over(self, turn: Turn) -> None:
        """It was served, or gives up."""
        if turn.known in self.waiting:
            self.waiting.remove(turn.known)

    def gave_up(self) -> None:
        """A lease that found no slot took none either: asking again is not one lease more."""
        if self.short == get_ident() and self.in_a_row:
            self.in_a_row -= 1

    def reset_peaks(self) -> None:
        """Peaks begin again with what is the case now."""
        counters, waiting = self.counters, self.count_waiting()
        counters.bytes_peak = counters.wait_ns_max = 0
        counters.in_flight_peak = self.count(_IN_FLIGHT)
        counters.waiting_peak = waiting
        counters.depth_needed = self._busy() + waiting if waiting else 0

    def oldest_lag(self) -> int:
        """Uploads made since the oldest event that has not been seen done."""
        made = self.counters.uploads
        lags = [made - max(slot.upload, slot.healed_at) for slot in self.slots if slot.state is _IN_FLIGHT]
        return max(lags, default=0)

    def claim(self, lease: Lease, token: object) -> None:
        """The lease ends here, and its upload begins: of two threads that try, one gets past. `LeaseError`."""
        slot = lease._slot
        if slot.generation != lease._generation:
            lease._check_open("upload")
        lease._claim = token
        slot.behind = self.counters.uploads
        slot.generation += 1

    def uploaded(self, slot: Slot, plan: Plan) -> None:
        """filling -> in flight: the event stands behind the copy."""
        counters = self.counters
        slot.upload = counters.uploads + 1
        slot.state = _IN_FLIGHT
        slot.since = self._device.now()
        slot.ticket = None  # not before: until then an interrupt, and one more, leave the slot to its ticket
        counters.uploads += 1
        slots = self.slots
        if slots:  # in one step: taking out and putting back would be two
            at = 0 if slots[0] is slot else slots.index(slot)
            self.slots = [*slots[:at], *slots[at + 1 :], slot] if at else [*slots[1:], slot]
        counters.fields += plan.fields
        counters.bytes_used += plan.used
        counters.bytes_padded += plan.padding
        if counters.bytes_peak < plan.total:
            counters.bytes_peak = plan.total
        if counters.in_flight_peak < len(slots):  # in the long run it is the whole ring, and nobody need count
            counters.in_flight_peak = max(counters.in_flight_peak, self.count(_IN_FLIGHT))

    def upload_failed(self, lease: Lease, token: object, error: BaseException) -> None:
        """To quarantined, if the upload with this token had begun and was not seen to its end."""
        slot = lease._slot
        if lease._claim is token and slot.generation == lease._generation + 1 and slot.state is _FILLING:
            slot.holder = get_ident()
            self._upload_lost(slot, error)

    def quarantine(self, slot: Slot, error: BaseException) -> None:
        """To quarantined: an error left open whether the copy was queued or its event recorded."""
        self._enter(slot, _QUARANTINED)
        slot.ticket = None
        self.counters.quarantines += 1
        self.note_if_broken(error)

    def release(self, slot: Slot, generation: int) -> bool:
        """filling -> free, if that lease is still the open one; says whether it was."""
        if slot.generation != generation:
            return False
        self._enter(slot, _FREE)
        slot.generation += 1
        slot.ticket = None
        if self.watch is not None and slot.buffer is not None:
            self.watch.released(slot)
        return True

    def end(self, busy: list[Slot]) -> None:
        """The ring is over: it has no slots, and the leases of those that are still being filled have ended."""
        self.slots = []
        for slot in busy:
            if slot.ticket is not None and slot.ticket.generation == slot.generation:  # not one whose upload goes on
                slot.generation += 1

    def settle_all(self) -> list[Slot]:
        """Look once at every slot that is not leased; returns those that are not free."""
        self._drain()
        for slot in list(self.slots):
            if slot.state is not _FILLING:
                try:
                    self._settle(slot)
                except SlotOverwritten as found:
                    self.notes.append(str(found))
        return [slot for slot in self.slots if slot.state is not _FREE]

    def count_waiting(self) -> int:
        """Threads that wait for a slot."""
        return sum(known() is not None for known in list(self.waiting))

    def count(self, state: State) -> int:
        """Slots in this state."""
        return [slot.state for slot in self.slots].count(state)

    def note_if_broken(self, error: BaseException) -> None:
        """Ask the device whether anything will ever work again."""
        if self.refusal is not None or (isinstance(error, StagingError) and not isinstance(error, PinningError)):
            return
        sticky = self._device.broken()
        if sticky is None:
            return
        self.refusal = PoolBroken(
            f"pool {self._name!r} is broken: {sticky}; the process has to be restarted, the pool's memory is "
            f"leaked since copies may still read it"
        )
        self.refusal.__cause__ = error if isinstance(error, Exception) else sticky
        self.notes.append(str(self.refusal))
        _lifetime.leak(self.slots)

    def refused(self) -> StagingError:
        """A fresh exception of the kind that ended the pool, so that tracebacks do not pile up on one object."""
        first = cast(StagingError, self.refusal)
        error = type(first)(*first.args)
        error.__cause__ = first.__cause__
        return error

    def wait_until_unlocked(self) -> bool:
        """Before `with lock`, where waiting for ever will not do: False when somebody stays inside.

        That is a driver call that hangs in another thread, or this thread itself: a signal handler runs on top of it.
        """
        give_up = time.monotonic() + _PATIENCE_S
        while self.lock.locked():
            if time.monotonic() > give_up:
                return False
            time.sleep(20e-6)
        return True

    def _fell_short(self, turn: Turn | None) -> None:
        """No slot for this lease. For a newcomer: note how deep a ring would have served it.

        One that has the slots in use, one for each that waits, one for this lease; and one more for each lease of
        this thread just before that found none: had they not waited, this one would have come before their slots were
        free. Of a ring that stays behind for longer than it is deep this says little, so it is twice the ring at most.
        """
        if turn is not None:
            return
        me = get_ident()
        self.in_a_row = self.in_a_row + 1 if self.short == me else 1
        self.short = me
        least = self._busy() + self.count_waiting() + 1
        needed = max(least, min(least - 1 + self.in_a_row, 2 * len(self.slots)))
        self.counters.depth_needed = max(self.counters.depth_needed, needed)

    def _busy(self) -> int:
        return len(self.slots) - self.count(_FREE)

    def _ahead_of(self, turn: Turn | None) -> int:
        """How many wait longer than `turn`, or than a newcomer."""
        ahead = 0
        for known in list(self.waiting):
            other = known()
            if other is None:  # an interrupt has taken it out of the pool before it could leave
                self.waiting.remove(known)
            elif other is turn:
                break
            else:
                ahead += 1
        return ahead

    def _reserve(self, slot: Slot, lease: Lease) -> Slot:
        if self.watch is not None:
            self.watch.taken(slot)
        # Before the generation moves on and the lease is open, all is ready for its end.
        generation = slot.generation + 1
        ticket = Ticket(lease, self._drop)
        ticket.slot, ticket.generation = slot, generation
        slot.ticket = ticket
        lease._slot, lease._generation = slot, generation
        slot.generation = generation
        slot.state = _FILLING
        slot.since = self._device.now()
        slot.holder = get_ident()
        if self.watch is not None:
            slot.site = _call_site()
        return slot

    def _ask(self, oldest: Slot) -> Slot:
        """Ask one event: that of `oldest`, or of a later upload, which answers for those before it on its stream.

        Returns the slot that was asked. Asking takes the host up to 2 us, a third of a lease, so one question should
        free as many slots as the steps in flight leave: one more is tried after `_CONFIDENCE` times a yes, one less
        after a no.
        """
        slots, reach = self.slots, self._reach
        if reach > 1:
            at = slots.index(oldest)
            before = slots[at : at + reach]
            last = before.pop()
            if last.state is _IN_FLIGHT and last.stream == oldest.stream and last.lasting:
                if not self._settle(last):
                    self._reach, self._yes = reach - 1, 0
                    return last
                now = last.since
                for slot in before:
                    if slot.state is _IN_FLIGHT and _proves(last, slot):
                        self._done(slot, now)
                        if self.watch is not None:
                            self.watch.done(slot)
                self._count_yes()
                return last
        if self._settle(oldest):
            self._count_yes()
        return oldest

    def _count_yes(self) -> None:
        self._yes += 1
        if self._yes >= _CONFIDENCE and self._reach < len(self.slots):
            self._reach, self._yes = self._reach + 1, 0

    def _done(self, slot: Slot, now: int) -> None:
        """in flight -> free: its event has passed."""
        _lifetime.held.discard(slot)  # first: an interrupt behind it is one of a slot to be asked again
        slot.state = _FREE
        slot.since = now

    def _settle(self, slot: Slot) -> bool:
        """Look once at a slot that is not leased: whether it is free now.

        In flight: ask its event. Quarantined: record a new event behind whatever was queued on its stream, which
        turns the unknown into something that can be asked.
        """
        device = self._device
        if slot.state is _QUARANTINED and not slot.lasting and slot.holder != get_ident():
            return False  # the handle may name another stream in this thread, as that of the per-thread one does
        try:
            if slot.state is _QUARANTINED:
                event = device.new_event()
                device.record(event, slot.stream)
                slot.event = event  # only now: an upload may still be told to wait for the old one
                slot.healed_at = self.counters.uploads
                self._enter(slot, _IN_FLIGHT)
                self.counters.heals += 1
            if slot.state is _IN_FLIGHT:
                if not device.done(slot.event):
                    return False
                self._done(slot, device.now())
        except Exception as error:
            if slot.state is _IN_FLIGHT:  # the answer is unknown, so the slot's event is
                self.quarantine(slot, error)
            else:
                self.note_if_broken(error)
            if isinstance(self.refusal, PoolBroken):
                raise self.refused() from error
        if slot.state is not _FREE:
            return False
        if self.watch is not None:
            self.watch.done(slot)
        return True

    def drain_discarded(self) -> None:
        """Give back the slots of leases that were discarded while the lock was taken."""
        while self.discarded:
            slot, generation = self.discarded[0]
            if self.release(slot, generation):
                self.counters.discards += slot.buffer is not None
            self.discarded.popleft()

    def _drain(self) -> None:
        self.drain_discarded()
        while self.dropped:
            ticket = self.dropped[0]
            slot = ticket.slot
            released = False
            if slot.ticket is ticket and slot.state is _FILLING:
                released = self.release(slot, ticket.generation)
                if not released:  # the lease had ended, by an upload that two exceptions in a row cut off
                    self._upload_lost(slot, LeaseError("interrupted"))
            self.dropped.popleft()
            if released:
                self.counters.dropped += 1
                where = f"taken at {slot.site}" if slot.site else "STAGING_DEBUG=1 says where it was taken"
                self.notes.append(
                    f"pool {self._name!r}: a lease of slot {slot.index} was dropped without upload or discard; {where}"
                )
        _lifetime.reap()

    def _upload_lost(self, slot: Slot, error: BaseException) -> None:
        self.counters.uploads_failed += 1
        self.quarantine(slot, error)
        # As text: a log handler may keep the record, and an error's traceback keeps the caller's frames.
        self.notes.append(
            f"pool {self._name!r}: slot {slot.index} is quarantined, its upload failed: {type(error).__name__}: {error}"
        )

    def _enter(self, slot: Slot, state: State) -> None:
        slot.state = state
        slot.since = self._device.now()


def _proves(later: Slot, slot: Slot) -> bool:
    """Whether the event of `later`, once it has passed, says that the event of `slot` has: a stream is in order.

    Its upload must have begun after the other event was recorded, which the order of the ring does not say of two
    threads. And their stream must be the same one, not only its handle: one that lasted since the first of them.
    """
    return (
        slot.stream == later.stream and slot.lasting and slot.upload <= later.behind and slot.healed_at < later.behind
    )


def _call_site() -> str:
    """File and line of the nearest caller outside this package."""
    here = os.path.dirname(__file__)
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == here:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
