"""What outlives a pool: memory that a copy may still read, and what a forked child must not touch."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from typing import Protocol

from staging._device import Device
from staging._slots import Slot, State


class Forkable(Protocol):
    """What is told in the child after a fork."""

    def _after_fork(self) -> None: ...


alive: weakref.WeakSet[Forkable] = weakref.WeakSet()
"""Every pool of this process."""

held: set[Slot] = set()
"""Slots that a copy may still read: from before it is queued until its event was seen done.

torch's allocator does not know of these copies, and gives a freed block to whoever asks next. So a slot's memory lives
for as long as it is here, whatever becomes of its pool, and whatever is interrupted on the way."""

orphans: deque[tuple[Device, list[Slot]]] = deque()
"""Slots of pools that were collected without close(), until their copies are done: the next lease looks."""


def reap() -> None:
    """Let go of collected pools' slots whose copies are done; of the others nobody will know, and they stay held."""
    for entry in list(orphans):
        device, slots = entry
        flying = [slot for slot in slots if slot.state is State.IN_FLIGHT]
        try:
            if not all(device.done(slot.event) for slot in flying):
                continue
        except Exception:
            flying = []
        held.difference_update(flying)
        try:
            orphans.remove(entry)
        except ValueError:
            pass  # another pool looked at the same time


def leak(objects: object) -> None:
    """Keep `objects` for the rest of the process, past the interpreter's own end: nothing ever frees them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(objects))


leak(held)


def _after_fork_in_child() -> None:
    for pool in list(alive):
        pool._after_fork()
    leak(list(orphans))
    orphans.clear()  # or the child's next lease would ask the parent's events


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
