"""What a pool has seen: a frozen snapshot of its gauges, counters and peaks, and the advice they give.

`docs/stats.md` defines every key in one table.
"""

from __future__ import annotations

from bisect import bisect_left

import attrs

WAIT_BUCKETS = {
    "waits_to_50us": 50_000,
    "waits_to_100us": 100_000,
    "waits_to_200us": 200_000,
    "waits_to_500us": 500_000,
    "waits_to_1ms": 1_000_000,
    "waits_to_2ms": 2_000_000,
    "waits_to_5ms": 5_000_000,
    "waits_to_10ms": 10_000_000,
    "waits_to_100ms": 100_000_000,
    "waits_to_1s": 1_000_000_000,
    "waits_to_10s": 10_000_000_000,
}
"""The wait histogram: of each bucket its longest wait, in nanoseconds. What is longer is in `waits_longer`."""

_BUCKETS = (*WAIT_BUCKETS, "waits_longer")
_BOUNDS = tuple(WAIT_BUCKETS.values())


@attrs.define(kw_only=True)
class Counters:
    """Sums that only rise, and peaks caught when they happen. The pool keeps one, changed under its lock."""

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
    """Fields carried by the uploads."""
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
    """Time of the waits, from the request to the slot or to giving up."""
    wait_ns_max: int = 0
    """The longest of these waits."""
    waits_to_50us: int = 0
    """Waits of at most 50 microseconds. Each wait is in one bucket."""
    waits_to_100us: int = 0
    """Waits of at most 100 microseconds, and longer than the bucket before; so with all that follow."""
    waits_to_200us: int = 0
    waits_to_500us: int = 0
    waits_to_1ms: int = 0
    waits_to_2ms: int = 0
    waits_to_5ms: int = 0
    waits_to_10ms: int = 0
    waits_to_100ms: int = 0
    waits_to_1s: int = 0
    waits_to_10s: int = 0
    waits_longer: int = 0
    """Waits of more than 10 seconds."""
    waiting_peak: int = 0
    """Most leases that waited at once."""
    depth_needed: int = 0
    """Slots that would have served the leases that found none, at the most; 0 when every lease found one."""
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
    violations_under_copy: int = 0
    """Writes to a slot in flight that debug mode found; always 0 without it, like the next two."""
    violations_unleased: int = 0
    """Writes to a slot that nobody had leased."""
    violations_behind_end: int = 0
    """Writes behind the end of what was leased."""

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

    @property
    def waits(self) -> int:
        """Waits that have ended, with a slot or without; the sum of the buckets."""
        return sum(getattr(self, bucket) for bucket in _BUCKETS)

    @property
    def violations(self) -> int:
        """Writes around the lease that debug mode found, of every kind."""
        return self.violations_under_copy + self.violations_unleased + self.violations_behind_end

    @property
    def copies_avoided(self) -> int:
        """Copies that one for each field would have made more: `fields - uploads`."""
        return self.fields - self.uploads

    def count_wait(self, took: int) -> None:
        """One wait has ended."""
        bucket = _BUCKETS[bisect_left(_BOUNDS, took)]
        setattr(self, bucket, getattr(self, bucket) + 1)
        self.wait_ns += took
        self.wait_ns_max = max(self.wait_ns_max, took)


PEAKS = ("bytes_peak", "in_flight_peak", "wait_ns_max", "waiting_peak", "depth_needed")
COUNTERS = tuple(field.name for field in attrs.fields(Counters) if field.name not in PEAKS)
DERIVED = ("leases", "waits", "violations", "copies_avoided", "suggested_slots")


@attrs.frozen
class Advice:
    """What the numbers say about the ring's depth."""

    suggested_slots: int
    """`StagingPool(slots=…)` for traffic like this."""
    text: str
    """The same as a sentence, with the reason."""

    def __str__(self) -> str:
        return self.text


@attrs.frozen(kw_only=True)
class PoolStats(Counters):
    """A snapshot of one pool, consistent in itself. Reading it never touches the device and resets nothing.

    Integers throughout: counts, bytes, nanoseconds. "In flight" means not yet seen done.
    `slots == free + filling + in_flight + quarantined`, and `leases` is the sum of its outcomes.

    `later - earlier` is what happened in between: counters are subtracted; gauges are the later's, and so are peaks,
    which cannot be subtracted (`StagingPool.reset_peaks` starts them anew).
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
    oldest_lag: int
    """Uploads made since the oldest copy that has not been seen done; 0 when none is in flight."""
    pinned_bytes: int
    """Host bytes locked for the slots now, as the allocator rounds them; 0 when pageable."""
    host_bytes: int
    """Host bytes the slots can hold now."""

    @property
    def suggested_slots(self) -> int:
        """The depth that would have avoided the waits, and the ring's own where it is deeper."""
        return max(self.slots, self.depth_needed)

    def as_dict(self) -> dict[str, int]:
        """All of it, what is derived included, in a stable order: for logs and JSON."""
        return {**attrs.asdict(self), **{name: getattr(self, name) for name in DERIVED}}

    def advice(self) -> Advice:
        """Whether the ring was deep enough, and how deep it should have been. `docs/stats.md` has the limits of it."""
        slots = self.suggested_slots
        if not self.depth_needed:
            text = f"every lease found a slot in a ring of {self.slots}"
            if self.leases_grown:
                text += f", {self.leases_grown} of them by growing; build the pool with slots={slots}"
            return Advice(slots, text)
        text = (
            f"{self.waits} leases waited, {self.wait_ns / 1e6:.3f} ms in all, and {self.leases_timed_out} timed out; "
            f"build the pool with slots={slots}"
        )
        if self.depth_needed >= 2 * self.slots:
            text += ", then look again: the ring was behind for so long that this is a guess"
        return Advice(slots, text)

    def __sub__(self, earlier: PoolStats) -> PoolStats:
        if not isinstance(earlier, PoolStats):
            return NotImplemented
        since = {name: getattr(self, name) - getattr(earlier, name) for name in COUNTERS}
        for name, value in since.items():
            if value < 0:
                raise ValueError(
                    f"{name} was {getattr(earlier, name)} and is {getattr(self, name)}, but counters only rise; "
                    f"subtract an earlier snapshot of the same pool"
                )
        return attrs.evolve(self, **since)
