"""What a pool has seen: a frozen snapshot of its gauges and counters."""

from __future__ import annotations

import attrs


@attrs.define(kw_only=True)
class Counters:
    """What only ever rises: sums, and peaks caught when they happen. The pool keeps one, changed under its lock."""

    # Outcomes: every lease request is counted under exactly one.
    leases_ready: int = 0
    """Leases served at once from a slot that was free, or whose copy was seen done."""
    leases_grown: int = 0
    """Leases served by adding a slot to the ring."""
    leases_waited: int = 0
    """Leases served after waiting."""
    leases_empty: int = 0
    """Leases of zero bytes, which need no slot and make no copy."""
    leases_timed_out: int = 0
    """Requests that ended in `PoolExhausted`."""
    leases_refused: int = 0
    """Requests that ended in any other error: too large, closed, broken, capture, no memory, …"""

    # How leases ended.
    uploads: int = 0
    """Copies queued, one for each upload that was not empty."""
    uploads_failed: int = 0
    """Uploads whose copy or event failed; each put its slot in quarantine."""
    discards: int = 0
    """Leases given back without an upload."""
    dropped: int = 0
    """Leases that were garbage-collected while open; a mistake of the caller's, repaired at the next lease."""

    # What it cost and what it saved.
    fields: int = 0
    """Fields carried by the uploads; copies avoided = fields - uploads."""
    bytes_used: int = 0
    """Bytes of fields uploaded."""
    bytes_padded: int = 0
    """Bytes of padding uploaded with them."""
    bytes_peak: int = 0
    """Most bytes that one upload carried, padding included."""
    met_in_flight: int = 0
    """How often a lease looked at a slot and found its copy still queued or running."""
    in_flight_peak: int = 0
    """Most slots in flight at once."""
    wait_ns: int = 0
    """Time leases spent waiting for a slot."""
    wait_ns_max: int = 0
    """The longest of these waits."""
    allocations: int = 0
    """Host buffers made: the first of each slot, and one each time a slot is enlarged."""
    allocation_ns: int = 0
    """Time spent making them."""
    allocations_failed: int = 0
    """Host buffers that could not be had."""
    enlarged: int = 0
    """Slots that got a larger buffer."""
    quarantines: int = 0
    """Times a slot went into quarantine."""
    heals: int = 0
    """Times a quarantined slot got a new event behind its copy."""
    violations: int = 0
    """Writes around the lease that debug mode found; always 0 without it."""

    @property
    def leases(self) -> int:
        """Lease requests, whatever their outcome."""
        return (
            self.leases_ready
            + self.leases_grown
            + self.leases_waited
            + self.leases_empty
            + self.leases_timed_out
            + self.leases_refused
        )


@attrs.frozen(kw_only=True)
class PoolStats(Counters):
    """A snapshot of one pool, consistent in itself. Reading it never touches the device and resets nothing.

    Integers throughout: counts, bytes, nanoseconds. "In flight" means not yet seen done.
    `slots == free + filling + in_flight + quarantined`, and `leases` is the sum of its outcomes.
    """

    slots: int
    """Slots the ring has now."""
    free: int
    """Slots ready to be leased."""
    filling: int
    """Slots that an open lease may write."""
    in_flight: int
    """Slots whose copy has not been seen done."""
    quarantined: int
    """Slots whose event is unknown after an error; they are healed before they are used again."""
    waiting: int
    """Threads waiting for a slot now."""
    pinned_bytes: int
    """Host bytes locked for the slots now, as the allocator rounds them; 0 when pageable."""
    host_bytes: int
    """Host bytes the slots can hold now."""

    def as_dict(self) -> dict[str, int]:
        """All of it, `leases` included, in a stable order: for logs and JSON."""
        return {**attrs.asdict(self), "leases": self.leases}
