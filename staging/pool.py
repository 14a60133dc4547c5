"""`StagingPool`: a ring of host buffers pinned once, handed out per batch, sent with one copy, reused when it is safe.

Note: why a slot cannot be rewritten early
------------------------------------------
An asynchronous copy reads its pinned source when it RUNS, not when it is queued. So the event is recorded on the
stream that carried the copy, right behind it, and a slot leaves "in flight" only when that event has passed. The
stream is read once per upload, at the upload: copy and record cannot end up on different streams.

A CUDA event that was never recorded reports "done". So no decision rests on the event of a slot whose copy or record
failed: such a slot is quarantined, and gets a new event, recorded on the same stream behind whatever was queued,
before anybody asks again.

A slot changes its state under one lock, in `_ring.py`. What takes long (making host memory, waiting, the copy)
happens here, outside it, on a slot that the ring has already reserved. The only wait is polling with growing sleeps:
waiting for an event has no deadline, and spins.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import attrs
import torch

from staging import _lifetime
from staging._debug import GUARD
from staging._device import Device, HostBuffer, Memory, open_device
from staging._dump import describe
from staging._fixed import Destination, Destinations
from staging._memory import limits, wished
from staging._ring import Ring, Turn
from staging._slots import Slot, State
from staging.errors import (
    CaptureError,
    FieldError,
    LeaseError,
    LeaseTooLarge,
    PinningError,
    PoolBroken,
    PoolClosed,
    PoolExhausted,
    PoolForked,
    StagingError,
)
from staging.layout import ALIGNMENT, Field, Layout, Plan
from staging.lease import Lease
from staging.stats import PoolStats
from staging.upload import Upload

log = logging.getLogger("staging")

_FIRST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3
_WARM = Layout([Field("warm", torch.uint8)], "warm-up")

_names = itertools.count()
_T = TypeVar("_T")


class _Unset:
    def __repr__(self) -> str:
        return "the pool's"


_POOLS_TIMEOUT = _Unset()


class StagingPool:
    """A ring of pinned host buffers ("slots"), one leased for each batch that is built.

    In order: take a lease, write its fields, upload once. The slot is then in flight, and free again when the event
    behind its copy has passed. In the steady state a batch costs one copy, one event record and no host allocation.

        pool = StagingPool("cuda")
        with pool.lease(layout, rows=3) as lease:
            lease["temperatures"] = [0.7, 1.0, 0.6]
            upload = lease.upload()
        upload["temperatures"]        # a float32 tensor on the device

    Arguments:
        device: a torch device, its index, or a device of `staging.testing`. `"cuda"` is the current CUDA device.
            "cpu" works the same way without pinning and never touches CUDA.
        slots: host buffers made now. Depth rule: leases per iteration x (steps in flight + 1).
        max_slots: how far the ring may grow when all are busy; twice `slots` when not given.
        slot_bytes: bytes of each buffer to start with, rounded up to a power of two.
        max_bytes: the largest buffer that one slot may be enlarged to, and so the largest upload; what can be locked
            is at most `max_slots * max_bytes`.
        timeout: seconds a lease waits when all slots are busy and the ring cannot grow; 0 never waits, None for ever.
        memory: "pinned" or an error; "pageable"; or "auto": what STAGING_MEMORY says, or pinned where it can be had,
            else fewer slots, else pageable, with one warning.
        debug: find writes around the lease (`SlotOverwritten`), and remember where each lease was taken. None reads
            STAGING_DEBUG. Costs a few passes over the bytes of every batch, and twice the pinned bytes, since torch
            rounds a buffer with room for a canary up to the next power of two; nothing when off.
        name: for messages and metrics.

    Thread-safe: any number of threads may lease from one pool. Raises `StagingError` for a device of an untried kind,
    `PinningError` where host memory cannot be had, `ValueError` for arguments that contradict each other.
    """

    def __init__(
        self,
        device: str | int | torch.device | Device = "cuda",
        *,
        slots: int = 4,
        max_slots: int | None = None,
        slot_bytes: int = 256 * 1024,
        max_bytes: int = 64 * 1024 * 1024,
        timeout: float | None = 10.0,
        memory: Memory = "auto",
        debug: bool | None = None,
        name: str | None = None,
    ) -> None:
        max_slots = 2 * slots if max_slots is None else max_slots
        _check_arguments(slots, max_slots, slot_bytes, max_bytes)
        wish = wished(memory)
        self.name = f"staging-{next(_names)}" if name is None else name
        """The pool's name in messages and metrics."""
        self.max_bytes = max_bytes
        self.timeout = _checked_timeout(timeout)
        self.debug = os.environ.get("STAGING_DEBUG", "") not in ("", "0") if debug is None else debug
        self._slot_bytes = _power_of_two(max(slot_bytes, ALIGNMENT))
        self._device = open_device(device)
        self._ring = Ring(self.name, self._device, max_slots, debug=self.debug)
        self._destinations = Destinations()
        self._pinned = wish != "pageable" and self._device.can_pin
        if memory == "pinned" and not self._pinned:
            raise PinningError(f"pool {self.name!r}: a pool for {self.device} has nothing to pin; use memory='auto'")
        if memory != wish and not self._device.can_pin:
            log.warning("pool %r: STAGING_MEMORY=%s is not applicable on %s", self.name, wish, self.device)
        self._make_first_slots(slots, wish)
        _lifetime.alive.add(self)
        log.info(
            "pool %r on %s: %d %s slots of %d bytes, up to %d",
            self.name,
            self.device,
            len(self._ring.slots),
            self.memory,
            self._slot_bytes,
            max_slots,
        )

    # ------------------------------------------------------------------ what users call

    @property
    def device(self) -> torch.device:
        """Where uploads land, index resolved."""
        return self._device.torch_device

    @property
    def max_slots(self) -> int:
        """How many slots the ring may have."""
        return self._ring.max_slots

    @property
    def memory(self) -> str:
        """The kind of host memory in use: "pinned" or "pageable"."""
        return "pinned" if self._pinned else "pageable"

    def lease(self, layout: Layout, /, *, timeout: float | _Unset | None = _POOLS_TIMEOUT, **lengths: int) -> Lease:
        """Lease a slot for `layout` with these lengths, e.g. `pool.lease(layout, rows=3)`.

        In this order: a slot that is free or whose copy is done; a new slot, up to `max_slots`; waiting up to
        `timeout` seconds (default: the pool's); `PoolExhausted`. A free slot that is too small gets a larger buffer
        first. Lengths that are all zero need no slot: the lease's upload makes typed tensors of length 0, no copy.

        Raises `FieldError` for unsuitable lengths, `LeaseTooLarge` beyond `max_bytes`, `CaptureError` while a graph
        is being captured on the current stream, `PinningError` when a larger buffer cannot be had, and `PoolClosed`,
        `PoolBroken` or `PoolForked` when the pool is of no use any more. In each case no slot is taken.
        """
        ring, device = self._ring, self._device
        try:
            plan = layout.plan(lengths)
            if timeout is not _POOLS_TIMEOUT:
                timeout = _checked_timeout(timeout)  # type: ignore[arg-type]
            lease = Lease(self, plan)
            if ring.refusal is not None:
                raise ring.refused()
            need = plan.total
            if need > self.max_bytes:
                raise LeaseTooLarge(
                    f"{layout!r} with {_lengths(plan)} needs {need} bytes, {self!r} allows {self.max_bytes} in "
                    f"one upload; build smaller batches, or the pool with a larger max_bytes"
                )
            if not need:
                return self._empty(lease)
            if device.capturing(device.current_stream()):
                raise CaptureError(_capture_message(f"lease from {self!r}"))
            with ring.lock:
                slot = ring.choose(lease, need)
                ready = slot is not None and slot.capacity >= need
                if ready:
                    ring.counters.leases_ready += 1
                    ring.in_a_row = 0
                    if ring.watch is not None:
                        ring.watch.leased(lease._slot, plan)
            if not ready:
                self._obtain(lease, slot, self.timeout if timeout is _POOLS_TIMEOUT else timeout)  # type: ignore[arg-type]
        except BaseException as error:
            with ring.lock:
                if isinstance(error, PoolExhausted):
                    ring.counters.leases_timed_out += 1
                    ring.gave_up()
                else:
                    ring.counters.leases_refused += 1
                ring.note_if_broken(error)
            self._log_notes()
            raise
        if ring.notes:
            self._log_notes()
        return lease

    def destination(self, layout: Layout, /, **lengths: int) -> Destination:
        """Device memory of fixed address for this pool's uploads of `layout`, with these lengths or smaller ones.

        It belongs to the caller. Zeros, written on the current stream. Raises `FieldError` for unsuitable lengths, the
        device's own error where there is no memory, `CaptureError` while a graph is being captured on the current
        stream, and as `lease` when the pool is of no use any more.
        """
        if self._ring.refusal is not None:
            raise self._ring.refused()
        if self._device.capturing(self._device.current_stream()):
            raise CaptureError(_capture_message(f"make a destination of {self!r}", "and it would write the zeros"))
        return Destination(self._device, layout.plan(lengths).total)

    def stats(self) -> PoolStats:
        """A consistent snapshot of all gauges and counters. Never touches the device; resets nothing.

        It does not wait for a thread that stays inside the pool (a driver call that hangs, or this very thread below a
        signal handler): the numbers are then read as they stand, perhaps between two steps of one change. Only a thread
        that enters between this one's look and its lock, and hangs then, is waited for.
        """
        return self._reading(lambda locked: self._snapshot())

    def reset_peaks(self) -> None:
        """Start the peaks anew, from what is the case now; counters and gauges stay. Waits as little as `stats()`."""
        self._reading(lambda locked: self._ring.reset_peaks())

    def dump(self) -> str:
        """What the pool is doing now, for a person: a line for the pool, one for who waits, one for each slot.

        For when a scheduler hangs: from another thread, or a signal handler. Like `stats()` it never touches the
        device; where somebody stays inside the pool it says so, and reads the slots as they stand.
        """
        return self._reading(lambda locked: describe(repr(self), self._ring, self._device.now(), locked))

    def warm(self, slots: int | None = None) -> None:
        """Pay first-use costs before serving: make the ring `slots` deep (default: as it is), send a copy from each.

        Its leases and uploads are counted like any others. Raises `ValueError` beyond `max_slots`.
        """
        wanted = len(self._ring.slots) if slots is None else slots
        if not 1 <= wanted <= self.max_slots:
            raise ValueError(f"{self!r}: warm({slots}) is not within 1 and max_slots={self.max_slots}")
        leases = [self.lease(_WARM, rows=1) for _ in range(wanted)]
        for lease in leases:
            with lease:
                lease["warm"] = 0
                lease.upload()

    def close(self, timeout: float | None = None) -> None:
        """Refuse new leases, wait for open leases and copies up to `timeout` seconds (None: the pool's), free the ring.

        Slots that are still in flight or quarantined at the deadline are leaked rather than freed under a running
        copy, with a warning in the log; leases still open are ended. Leases held by the calling thread are not
        waited for. Closing twice does nothing. Does not raise for what it cannot free; `StagingError` when a thread
        stays inside the pool, as this one does below a signal handler that calls it in the middle of a change.
        """
        timeout = self.timeout if timeout is None else _checked_timeout(timeout)
        if not self._ring.wait_until_unlocked():
            raise StagingError(
                f"{self!r} cannot be closed now: a thread stays inside it, maybe this one below a signal handler; let "
                f"that handler set a flag, and close the pool where the scheduler sees it"
            )
        with self._ring.lock:
            if self._ring.refusal is None:
                self._ring.refusal = PoolClosed(f"pool {self.name!r} is closed; make a new one")
            elif not isinstance(self._ring.refusal, PoolClosed) or not self._ring.slots:
                return  # nothing left to do; an interrupted close() is taken up again
        deadline = None if timeout is None else self._device.now() + int(timeout * 1e9)
        pause = _FIRST_PAUSE
        me = threading.get_ident()
        while True:
            with self._ring.lock:
                busy = self._ring.settle_all()
                over = all(slot.state is State.FILLING and slot.holder == me for slot in busy)
                over = over or (deadline is not None and self._device.now() >= deadline)
                # A broken device finishes nothing any more: what is quarantined stays so.
                if over or (self._ring.count(State.QUARANTINED) and self._device.broken() is not None):
                    self._ring.end(busy)
                    break
            self._device.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        self._destinations.clear()
        self._log_notes()
        log.info("pool %r is closed", self.name)
        for slot in busy:
            if slot.state is State.FILLING:
                log.warning(
                    "pool %r closed with slot %d still leased by thread %d%s",
                    self.name,
                    slot.index,
                    slot.holder,
                    f" at {slot.site}" if slot.site else "; STAGING_DEBUG=1 says where it was taken",
                )
        # Held as well: an upload that is going on right now, in another thread or below this signal handler. What is
        # held stays so: nobody asks its event any more. What another thread writes lives with that thread's lease.
        unsafe = [s for s in busy if s.state is not State.FILLING or s.holder != me or s in _lifetime.held]
        if unsafe:
            log.warning(
                "pool %r closed with %d slots still in use: leaked %d bytes rather than free them under a copy",
                self.name,
                len(unsafe),
                sum(slot.capacity for slot in unsafe),
            )

    def __enter__(self) -> StagingPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        states = ", ".join(f"{self._ring.count(state)} {state.value}" for state in State)
        end = f", {_END[type(self._ring.refusal)]}" if self._ring.refusal is not None else ""
        return f"<StagingPool {self.name!r} {self.device} {self.memory}: {len(self._ring.slots)} slots ({states}){end}>"

    def __reduce__(self) -> str:
        raise TypeError(f"{self!r} cannot be pickled or copied: its memory and events belong to this process")

    def __del__(self) -> None:
        # No lock, no CUDA, no logging: a finaliser may run anywhere. The slots wait in a deque for another pool's
        # lease to see their copies done; without one they are held for the life of the process. So they are when an
        # interrupt comes in here, and is swallowed.
        try:
            slots, refusal = self._ring.slots, self._ring.refusal
            if slots and (refusal is None or isinstance(refusal, PoolClosed)):
                _lifetime.orphans.append((self._device, slots))
                if not sys.is_finalizing():
                    warnings.warn(
                        f"staging pool {self.name!r} was never closed", ResourceWarning, stacklevel=2, source=self
                    )
        except AttributeError:
            pass  # __init__ never ran to its end, or the interpreter is going away and this module's names are gone

    def _reading(self, read: Callable[[bool], _T]) -> _T:
        """Read under the lock, `read(True)`; or without it, where it is not to be had for as long as somebody asks."""
        if not self._ring.wait_until_unlocked():
            return read(False)
        with self._ring.lock:
            self._ring.drain_discarded()
            return read(True)

    def _snapshot(self) -> PoolStats:
        ring = self._ring
        slots = list(ring.slots)
        states = [slot.state for slot in slots]
        return PoolStats(
            **attrs.asdict(ring.counters),
            slots=len(slots),
            free=states.count(State.FREE),
            filling=states.count(State.FILLING),
            in_flight=states.count(State.IN_FLIGHT),
            quarantined=states.count(State.QUARANTINED),
            waiting=ring.count_waiting(),
            oldest_lag=max(0, ring.oldest_lag()),  # an upload may be between two steps, where the lock is not to be had
            pinned_bytes=sum(slot.buffer.locked_bytes for slot in slots if slot.buffer is not None),
            host_bytes=sum(slot.capacity for slot in slots),
        )

    # ------------------------------------------------------------------ growing and waiting, outside the lock

    def _obtain(self, lease: Lease, slot: Slot | None, timeout: float | None) -> None:
        """Bind `lease` to a slot that holds it: by enlarging `slot`, the one just reserved, or by waiting for one."""
        ring, plan = self._ring, lease._plan
        turn = Turn()
        waited = grown = False
        start = self._device.now()
        try:
            deadline = None if timeout is None else start + int(timeout * 1e9)
            pause = _FIRST_PAUSE
            while True:
                if slot is not None:
                    grown = slot.buffer is None
                    if slot.capacity >= plan.total or self._enlarge(lease, plan.total):
                        break
                if deadline is not None and self._device.now() >= deadline:
                    raise PoolExhausted(self._exhausted(f"no slot came free within {timeout:g} s", plan))
                with ring.lock:
                    self._check_not_stuck(plan)
                    waited = True
                    ring.wait_begins(turn)
                self._device.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE)
                with ring.lock:
                    slot = ring.choose(lease, plan.total, turn)
                    if slot is not None:
                        ring.wait_over(turn)  # the next one need not wait for this one's larger buffer
        except BaseException:
            with ring.lock:
                ring.release(lease._slot, lease._generation)  # unless it has none, or has given it back
            raise
        finally:
            if waited:
                with ring.lock:
                    ring.wait_over(turn)
                    ring.counters.count_wait(self._device.now() - start)
        with ring.lock:
            if waited:
                ring.counters.leases_waited += 1
            else:
                ring.in_a_row = 0
                if grown:
                    ring.counters.leases_grown += 1
                else:
                    ring.counters.leases_ready += 1
            if ring.watch is not None:
                ring.watch.leased(lease._slot, plan)

    def _enlarge(self, lease: Lease, need: int) -> bool:
        """Give a reserved slot a buffer of at least `need` bytes. The slot is new, or its last copy is done.

        False when a new slot's memory cannot be had: the ring then stays as deep as it is. For a slot that exists the
        error is the caller's, and the slot keeps its old buffer.
        """
        slot, reserved = lease._slot, lease._generation
        size = min(_power_of_two(max(need, self._slot_bytes)), self.max_bytes)
        try:
            buffer = self._make_buffer(size)
        except BaseException as error:
            with self._ring.lock:
                if not self._ring.not_enlarged(slot, reserved, error):
                    raise
            log.warning("pool %r stays at %d slots: %s", self.name, len(self._ring.slots), error)
            return False
        with self._ring.lock:
            self._ring.enlarged(slot, reserved, buffer, size)
        # Outside the steady state, so each is worth a line.
        log.info("pool %r: slot %d has %d bytes now; %d slots", self.name, slot.index, size, len(self._ring.slots))
        return True

    def _make_buffer(self, nbytes: int) -> HostBuffer:
        start = self._device.now()
        try:
            # In debug mode with room for the canary of a full slot.
            extra = GUARD if self._ring.watch is not None else 0
            buffer = self._device.host_buffer(nbytes + extra, pinned=self._pinned)
        except BaseException:
            with self._ring.lock:
                self._ring.counters.allocations_failed += 1
            raise
        with self._ring.lock:
            self._ring.counters.allocations += 1
            self._ring.counters.allocation_ns += self._device.now() - start
        return buffer

    def _make_first_slots(self, slots: int, wish: Memory) -> None:
        """Pin what can be pinned: all slots, or with "auto" fewer, or none and the ring is pageable."""
        size = min(self._slot_bytes, self.max_bytes)
        buffers, error = self._make_buffers(slots, size)
        if error is not None:
            message = (
                f"staging pool {self.name!r}: {self.memory} memory could not be had for {slots} slots of {size} bytes, "
                f"{slots * size} bytes of host (system) memory, not GPU memory; there was enough for {len(buffers)} "
                f"({error}); {limits()}; use fewer slots or a smaller slot_bytes"
            )
            if wish != "auto" or not self._pinned:
                raise PinningError(message) from error
            if buffers:
                kept = f"it goes on with {len(buffers)} slots, which may make leases wait"
                self._ring.may_grow = False
            else:
                kept = "it goes on with pageable memory, which may make the host wait in every copy"
                self._pinned = False
                buffers, error = self._make_buffers(slots, size)
                if error is not None:
                    raise PinningError(f"{message}; pageable memory neither ({error})") from error
            warnings.warn(f"{message}; {kept}", RuntimeWarning, stacklevel=3)
        for buffer in buffers:
            self._ring.add(buffer, size)

    def _make_buffers(self, slots: int, size: int) -> tuple[list[HostBuffer], PinningError | None]:
        buffers: list[HostBuffer] = []
        try:
            for _ in range(slots):
                buffers.append(self._make_buffer(size))
        except PinningError as error:
            return buffers, error
        return buffers, None

    def _log_notes(self) -> None:
        level = logging.ERROR if isinstance(self._ring.refusal, PoolBroken) else logging.WARNING
        while self._ring.notes:
            try:
                log.log(level, "%s", self._ring.notes.popleft())
            except IndexError:
                return  # another thread was faster

    def _check_not_stuck(self, plan: Plan) -> None:
        """Waiting is pointless when every slot is being filled by the very thread that would wait. Under the lock."""
        if self._ring.refusal is not None:
            raise self._ring.refused()
        me = threading.get_ident()
        if all(slot.state is State.FILLING and slot.holder == me for slot in self._ring.slots):
            raise PoolExhausted(self._exhausted("this thread holds every slot, so waiting would never end", plan))

    def _exhausted(self, what: str, plan: Plan) -> str:
        now = self._device.now()
        holders = "; ".join(
            f"slot {slot.index} {slot.state.value} for {(now - slot.since) / 1e6:.1f} ms"
            + (f" with upload {slot.upload} on stream {slot.stream}" if slot.state is State.IN_FLIGHT else "")
            + (f" by thread {slot.holder}" if slot.state is State.FILLING else "")
            + (f" at {slot.site}" if slot.site and slot.state is State.FILLING else "")
            for slot in self._ring.slots
        )
        return (
            f"{self!r}: {what} ({plan.layout.name!r}, {_lengths(plan)}): {holders}; upload or discard leases sooner, "
            f"or build the pool with more slots"
        )

    # ------------------------------------------------------------------ ending a lease

    def _empty(self, lease: Lease) -> Lease:
        """A lease of zero bytes gets a slot outside the ring, which no copy ever reads."""
        lease._slot, lease._generation = Slot(-1, None), 0
        lease._slot.state = State.FILLING
        with self._ring.lock:
            self._ring.counters.leases_empty += 1
        return lease

    def _upload(self, lease: Lease, out: torch.Tensor | Destination | None, after: Any) -> Upload:
        slot, plan, device, ring = lease._slot, lease._plan, self._device, self._ring
        if slot.generation != lease._generation:
            lease._check_open("upload")
        if ring.refusal is not None and not isinstance(ring.refusal, PoolClosed):
            raise ring.refused()  # broken or forked; a pool that is closing still waits for this upload
        missing = plan.all_bits & ~lease._written
        if missing:
            names = ", ".join(repr(place.field.name) for place in plan.places if missing & place.bit)
            raise LeaseError(
                f"cannot upload {lease!r}: {names} never written, the slot still holds an older batch's bytes"
            )
        try:
            stream = device.current_stream()
            if slot.buffer is not None:
                if device.capturing(stream):
                    raise CaptureError(_capture_message(f"upload {lease!r}"))
                if ring.watch is not None:
                    with ring.lock:
                        ring.watch.uploading(slot, plan)
            # What can fail for lack of memory comes first: the lease is still open then, and can be tried again.
            fresh: tuple[torch.Tensor, ...] = ()
            if isinstance(out, Destination):
                landing, tensors = out._landing(plan, device, stream)
                upload = Upload(tensors)
            elif out is not None:
                landing, tensors = self._destinations.find(out, plan) or self._new_destination(out, plan)
                upload = Upload(tensors)
            else:
                landing, upload = device.empty(plan.cut.elements, plan.cut.dtype), Upload()
                fresh = (landing,)
                if plan.row_runs:
                    rows = device.empty(plan.row_cut.elements, plan.row_cut.dtype)
                    fresh = (landing, rows)
                    upload.update(dict.fromkeys(plan.by_name, landing))  # the order of the layout
                    plan.other_cut.tensors(landing, upload)
                    plan.row_cut.tensors(rows, upload)
                else:
                    plan.cut.tensors(landing, upload)
            if after is not None:
                device.wait(stream, after)  # nothing of ours is queued yet: an unsuitable event costs nothing
        except Exception as error:
            with ring.lock:
                ring.note_if_broken(error)
            raise
        token = object()
        try:
            with ring.lock:
                ring.claim(lease, token)
            if slot.buffer is not None:
                slot.stream, slot.lasting = stream, device.lasting(stream)
                _lifetime.held.add(slot)
                device.copy(landing, (lease._prepared or slot.views(plan)).source, stream)
                if len(fresh) > 1:
                    device.copy_on_device(fresh[1], landing, plan.row_runs, stream)
                device.record(slot.event, stream)  # behind both: `Upload.wait` waits for all of it
                with ring.lock:
                    ring.uploaded(slot, plan)
                lease._prepared = None  # or an upload that is kept would keep a buffer that was replaced
        except BaseException as error:
            # Whether the copy was queued is not known, and the event says nothing about it.
            with ring.lock:
                ring.upload_failed(lease, token, error)
            self._log_notes()
            raise
        upload._lease = lease
        upload._fresh = fresh
        upload._stream = stream
        return upload

    def _discard(self, lease: Lease) -> None:
        if lease._generation != lease._slot.generation:
            return
        lease._prepared = None
        # Not waiting where the lock is taken: a generator that holds a lease may be closed by garbage collection, in
        # the middle of one of the ring's own methods. Whoever leases next, or asks for stats, finds it.
        self._ring.discarded.append((lease._slot, lease._generation))
        if self._ring.lock.locked():
            lease._generation = ~lease._generation  # ended all the same; no slot has such a generation
            return
        with self._ring.lock:
            self._ring.drain_discarded()

    def _wait_for_upload(self, lease: Lease, stream: Any) -> None:
        if isinstance(self._ring.refusal, PoolForked):
            raise self._ring.refused()
        slot = lease._slot
        with self._ring.lock:
            # A slot that was handed out again had its copy seen done, and its event belongs to another upload now.
            if slot.generation == lease._generation + 1 and slot.buffer is not None:
                self._device.wait(stream, slot.event)

    def _new_destination(self, out: Any, plan: Plan) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        problem = ""
        if not isinstance(out, torch.Tensor) or out.dtype != torch.uint8 or out.ndim != 1 or not out.is_contiguous():
            problem = "must be a contiguous one-dimensional uint8 tensor"
        elif out.device != self.device:
            problem = f"is on {out.device}, the pool uploads to {self.device}"
        elif out.numel() < plan.total:
            problem = f"has {out.numel()} bytes, the upload has {plan.total}"
        elif out.data_ptr() % ALIGNMENT or out.storage_offset() % ALIGNMENT:
            problem = f"must start at a multiple of {ALIGNMENT} bytes"
        elif out.is_inference() and not torch.is_inference_mode_enabled():
            problem = "was made in inference mode and cannot be written outside it"
        if problem:
            raise FieldError(f"{self!r}: upload(out=…) {problem}; make it with pool.destination(layout, …)")
        return self._destinations.remember(out, plan)

    # ------------------------------------------------------------------ when things are over

    def _after_fork(self) -> None:
        """In the child: nothing of the parent's CUDA may be touched, not even by a destructor."""
        self._ring.lock = threading.Lock()  # another thread of the parent may have held it
        self._ring.refusal = PoolForked(
            f"pool {self.name!r} belongs to the parent process; make one in the child (pid {os.getpid()}), or start "
            f"workers with the 'spawn' method"
        )
        _lifetime.leak([self._ring.slots, self._device])


_END: dict[type, str] = {PoolClosed: "closed", PoolBroken: "broken", PoolForked: "forked"}


def _capture_message(what: str, would: str = "and a captured copy would read the slot") -> str:
    return (
        f"cannot {what}: a CUDA graph is being captured on the current stream, {would} "
        f"again at each replay; upload before the capture into a fixed destination, upload(out=…), and let the graph "
        f"read that"
    )


def _lengths(plan: Plan) -> str:
    return ", ".join(f"{length} {count}" for count, length in plan.lengths.items())


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


def _check_arguments(slots: int, max_slots: int, slot_bytes: int, max_bytes: int) -> None:
    for name, value in (
        ("slots", slots),
        ("max_slots", max_slots),
        ("slot_bytes", slot_bytes),
        ("max_bytes", max_bytes),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"StagingPool({name}={value!r}): a positive integer is needed")
    if max_slots < slots:
        raise ValueError(f"StagingPool: max_slots={max_slots} is less than slots={slots}")
    if max_bytes < slot_bytes:
        raise ValueError(f"StagingPool: max_bytes={max_bytes} is less than slot_bytes={slot_bytes}")


def _checked_timeout(timeout: float | None) -> float | None:
    """Seconds, or None for ever (infinity is for ever too)."""
    if timeout is None or timeout == math.inf:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout={timeout!r} is not a number of seconds; use 0 to never wait, None to wait for ever")
    return float(timeout)
