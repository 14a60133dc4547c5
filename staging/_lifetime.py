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

orphans: deque[tuple[Device, list[Slot]]] = deque()
"""Slots of pools that were collected without close(), until their copies are done: the next lease looks."""


def reap() -> None:
    """Let go of collected pools' slots whose copies are done; those in quarantine are leaked."""
    for _ in range(len(orphans)):
        try:
            device, slots = orphans.popleft()  # two pools may reap at once: each entry is held by one
        except IndexError:
            return
        try:
            if any(slot.state is State.IN_FLIGHT and not device.done(slot.event) for slot in slots):
                orphans.append((device, slots))
            elif any(slot.state is State.QUARANTINED for slot in slots):
                leak(slots)
        except Exception:
            leak(slots)


def leak(objects: object) -> None:
    """Keep `objects` for the rest of the process, past the interpreter's own end: nothing ever frees them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(objects))


def _after_fork_in_child() -> None:
    for pool in list(alive):
        pool._after_fork()
    leak(list(orphans))
    orphans.clear()  # or the child's next lease would ask the parent's events


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
