"""One slot of the ring: a pinned host buffer, its event, and the state it is in."""

from __future__ import annotations

import enum
import weakref
from typing import Any

from staging._device import HostBuffer
from staging._prepared import MOST, Prepared, Scratch
from staging.layout import Plan


class State(enum.Enum):
    """free -> filling -> in flight -> free; quarantined = the event behind the copy is unknown after an error."""

    FREE = "free"
    FILLING = "filling"
    IN_FLIGHT = "in flight"
    QUARANTINED = "quarantined"


class Ticket(weakref.ref[Any]):
    """Watches a lease for as long as it has its slot: when it is collected, the ticket itself is put into a deque.

    Not a `__del__`: an interrupt that comes while Python code of ours runs there would be swallowed, and the slot lost.
    """

    __slots__ = ("generation", "slot")
    slot: Slot
    generation: int
    """Of the slot, while the lease is open."""


class Slot:
    """The ring's unit. Its fields change under the pool's lock, in the methods of `Ring` (`stream` alone is set by the
    upload that has claimed the slot). Its bytes are written by the one open lease."""

    __slots__ = (
        "__weakref__",
        "_scratch",
        "behind",
        "buffer",
        "capacity",
        "event",
        "generation",
        "healed_at",
        "holder",
        "index",
        "lasting",
        "prepared",
        "since",
        "site",
        "state",
        "stream",
        "ticket",
        "upload",
    )

    def __init__(self, index: int, event: Any) -> None:
        self.index = index
        self.state = State.FREE
        self.buffer: HostBuffer | None = None
        """None only while a new slot's first buffer is being made."""
        self.capacity = 0
        self.prepared: dict[Plan, Prepared] = {}
        """Views of the buffer, by plan; emptied when the slot gets another buffer."""
        self._scratch = Scratch()
        self.event = event
        self.stream: Any = None
        """The stream of the last copy: where a quarantined slot's event is recorded again."""
        self.lasting = False
        """Whether that stream, then, was one that is never destroyed, so that its handle means the same for ever."""
        self.generation = 0
        """Goes up when a lease begins and when it ends, so a lease is alive exactly while the number is its own."""
        self.holder = 0
        """Thread that took the open lease; of a quarantined slot, that of the upload that failed."""
        self.upload = 0
        """Number of the last upload from here, counted from 1 over the pool; 0 before the first."""
        self.behind = -1
        """Uploads the pool had made when the last one from here began: its event stands behind theirs of its stream."""
        self.healed_at = -1
        """Uploads the pool had made when this slot was healed last: its event stands behind these."""
        self.ticket: Ticket | None = None
        """Of the lease that has the slot, until its upload or discard."""
        self.since = 0
        """When the state began, in the device's nanoseconds."""
        self.site = ""
        """Where the lease was asked for; kept in debug mode only."""

    def views(self, plan: Plan) -> Prepared:
        """The buffer's views for a plan, made when they are first asked for."""
        prepared = self.prepared.get(plan)
        if prepared is None:
            assert self.buffer is not None, "a slot that was leased has memory"
            if len(self.prepared) >= MOST:
                self.prepared.clear()
            prepared = self.prepared[plan] = Prepared(plan, self.buffer, self._scratch)
        return prepared

    def __repr__(self) -> str:
        return f"<slot {self.index}: {self.state.value}, {self.capacity} bytes, generation {self.generation}>"
