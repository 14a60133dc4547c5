"""One slot of the ring: a pinned host buffer, its event, and the state it is in."""

from __future__ import annotations

import enum
from typing import Any

from staging._device import HostBuffer


class State(enum.Enum):
    """free -> filling -> in flight -> free; quarantined = the event behind the copy is unknown after an error."""

    FREE = "free"
    FILLING = "filling"
    IN_FLIGHT = "in flight"
    QUARANTINED = "quarantined"


class Slot:
    """The ring's unit. All fields change under the pool's lock; the bytes are written by the one open lease."""

    __slots__ = (
        "__weakref__",
        "buffer",
        "capacity",
        "event",
        "generation",
        "holder",
        "index",
        "since",
        "site",
        "state",
        "stream",
    )

    def __init__(self, index: int, event: Any) -> None:
        self.index = index
        self.state = State.FREE
        self.buffer: HostBuffer | None = None
        """None only while a new slot's first buffer is being made."""
        self.capacity = 0
        self.event = event
        self.stream: Any = None
        """The stream of the last copy: where a quarantined slot's event is recorded again."""
        self.generation = 0
        """Goes up when a lease begins and when it ends, so a lease is alive exactly while the number is its own."""
        self.holder = 0
        """Thread that took the open lease."""
        self.since = 0
        """When the state began, in the device's nanoseconds."""
        self.site = ""
        """Where the lease was asked for; kept in debug mode only."""

    def __repr__(self) -> str:
        return f"<slot {self.index}: {self.state.value}, {self.capacity} bytes, generation {self.generation}>"
