"""What `StagingPool.dump` says: the ring in words, for a person who wants to know why a scheduler hangs."""

from __future__ import annotations

import threading

from staging._ring import Ring
from staging._slots import Slot, State

_UNITS = (("h", 3_600_000_000_000), ("min", 60_000_000_000), ("s", 1_000_000_000), ("ms", 1_000_000), ("µs", 1_000))


def describe(pool: str, ring: Ring, now: int, locked: bool) -> str:
    """The pool, who waits, and each slot by its number. `locked` says whether nothing changes meanwhile."""
    lines = [pool]
    if not locked:
        lines.append("read without the lock: a thread has been inside the pool for a quarter of a second or longer")
    if ring.refusal is not None:
        lines.append(f"leases are refused: {ring.refusal}")
    lines.append(
        f"{ring.count_waiting()} leases waiting; {ring.counters.uploads} uploads, {max(0, ring.oldest_lag())} of them "
        f"since the oldest unfinished one"
    )
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines += [_line(slot, now, names) for slot in sorted(ring.slots, key=lambda slot: slot.index)]
    return "\n".join(lines)


def _line(slot: Slot, now: int, names: dict[int | None, str]) -> str:
    parts = [f"slot {slot.index}: {slot.state.value}"]
    ticket = slot.ticket
    if slot.buffer is None:
        parts[0] += ", its first buffer is being made"
    elif slot.state is State.FILLING and ticket is not None and ticket.generation != slot.generation:
        parts[0] += ", upload begun"  # the lease has ended, and the copy or its event is being queued
    elif slot.state is State.IN_FLIGHT and slot.healed_at >= slot.upload:
        parts[0] += ", healed"  # its event is not the upload's own
    parts[0] += f" for {_age(now - slot.since)}"
    parts.append(f"last upload {slot.upload}" if slot.upload else "no upload yet")
    parts.append(f"{slot.capacity} bytes")
    if slot.holder:
        name = repr(names[slot.holder]) if slot.holder in names else "which has ended"
        held = "held" if slot.state is State.FILLING else "last leased"
        parts.append(f"{held} by thread {slot.holder} {name}" + (f" at {slot.site}" if slot.site else ""))
    return ", ".join(parts)


def _age(ns: int) -> str:
    for unit, size in _UNITS:
        if ns >= size:
            return f"{ns / size:.1f} {unit}"
    return f"{ns} ns"
